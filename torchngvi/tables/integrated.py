"""The log joint of the globals of a model with at most one grouping factor, its random effects integrated out.

The effects of a group are b_i = C u_i with u_i ~ N(0, I): where standard deviations tend to 0 the integrand over u has
a Hessian of at least I, and nothing collapses.  With û_i its mode and L_i L_iᵀ the inverse of its Hessian there,

    log p(y_i | θ) ≈ log Σ_k w_k exp(½|z_k|² + log|L_i| - ½|u_ik|² + Σ_j log p(y_j | x_jᵀa + z_jᵀC u_ik, φ)),
    u_ik = û_i + L_i z_k,

is adaptive Gauss-Hermite quadrature (Liu and Pierce 1994; Pinheiro and Bates 1995).  The integral does not depend on
where the nodes are, so that its gradient is that of the integrand at nodes that are held, up to the error of the rule.
Without a factor each row is a group of its own that has no effects, r = 0, and there is nothing to integrate.

With Gaussian noise and normal priors of coefficients these are integrated out as well, in closed form.  What is left
are the coordinates ρ = (ξ, φ) of the scales, three of a random intercept however many columns there are.  With Σ =
σ² W⁻¹ + Z C Cᵀ Zᵀ, prior mean m and precision P of the coefficients, and e = y - offset - X m,

    Q = XᵀΣ⁻¹X + P,  h = XᵀΣ⁻¹e,  a | y, ρ ~ N(m + Q⁻¹h, Q⁻¹),
    log p(y, ρ) = log p(ρ) + log N(e; 0, Σ) + ½ log|P| - ½ log|Q| + ½ hᵀQ⁻¹h,

all of it from sums over the rows of each group that are taken once (Woodbury in each group, Lindley and Smith 1972).

Tensors have the groups or the rows first, (n, S, ..), for S values of the globals.  The rows of a group are one axis,
of m rows, where groups of fewer rows are filled up by rows of weight 0: sums over rows, and effects of rows, are then
plain sums and broadcasts, 2 to 4 times faster than with indices.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.numerics import linalg
from torchngvi.numerics.linalg import cholesky, eigh
from torchngvi.numerics.special import normal_rule
from torchngvi.tables.families import Family, Multinomial
from torchngvi.tables.parts import Coordinates, Design, covariance_root, draw_normal, draw_uniform, replace_where
from torchngvi.tables.priors import Normal, Priors


@dataclass(frozen=True)
class Integration:
    """How effects are integrated out: the numbers behind `Integrated`.

    Attributes:
        decrement: nats that a step of Newton's method for the modes may still promise at its end. Modes that are right
            to 10⁻⁵ sds move no sum of 5 nodes by 10⁻⁸ nats; a search with three steps in place of an end stood still
            30 to 70 nats below the mode.
        steps: of Newton's method at most. It takes 3 from modes of a neighbouring value, 30 from 0 with counts of e¹⁰.
        trust: nats that the one step of a draw may promise in every group; draws beyond take all steps to their modes.
        at_once: numbers of one table of rows, values and nodes, so that it stays in the cache of a core: with 4·10⁵
            in place of 2·10⁶ the draws of 9,172 rows take half of the time.
        filled: the rows by which filling up may lengthen a table, as a share; beyond, groups go by powers of two of
            their sizes.
        search_nodes: of the rule while the mode is searched for, in each dimension of one, two and three effects. With
            9 a search stood still 70 nats below the mode of the toenail data, with 15 none did.
        wide_nodes: the same where a standard deviation has passed ``wide``.
        wide: standard deviation of effects, on the scale of the linear predictor, beyond which outcomes of 0 and 1 make
            integrands that are far from Gaussian.
        nearest_nodes: of expectations over the linear predictor of a row, whose relative error is below 10⁻⁶ with 15.
        nearest_draws: of the same expectations where each category has a linear predictor, in pairs ±z.
        nearest_steps: to the nearest Gaussian at most; 5 to 10 where there are more rows than columns.
        nearest_end: twice the nats that a step to the nearest Gaussian still promises.
        difference: by which coordinates of scales and of the likelihood are moved for second differences, all of them
            logarithms or their like.
    """

    decrement: float = 1e-10
    steps: int = 50
    trust: float = 5.0
    at_once: int = 400_000
    filled: float = 0.5
    search_nodes: tuple[int, ...] = (15, 7, 5)
    wide_nodes: tuple[int, ...] = (25, 11, 7)
    wide: float = 2.0
    difference: float = 0.01
    nearest_nodes: int = 15
    nearest_draws: int = 128
    nearest_steps: int = 50
    nearest_end: float = 1e-3


class Valued(NamedTuple):
    """The log joint at S values of the globals."""

    value: Tensor  # log p(y, θ), (S,); -inf where it is not finite
    gradient: Tensor  # (S, dim); zeros where none was asked for
    modes: Tensor  # what the next evaluation begins from, (n, S, r)
    of_groups: Tensor  # log p(y_i | θ), (n, S)


class LogJoint(ABC):
    """A log joint of the globals that carries modes of the effects from one value to the next: abstract."""

    scales: int  # the place from which on coordinates are logarithms of scales, or others of their like
    together: int  # draws that are evaluated in one call, so that tables of modes are not large
    gradients: int  # that were computed, one for each value of the globals
    difference: Tensor  # by which each coordinate is moved for second differences, (dim,)
    newton = False  # whether the curvature is exact, so that steps are those of Newton's method

    def refine(self, theta: Tensor, stuck: bool) -> bool:
        """Whether the log joint is finer from here on: a search asks at its end, and where it is stuck."""
        return False

    @abstractmethod
    def start(self) -> tuple[Tensor, Tensor]:
        """Where a search begins: θ (dim,), and modes (n, 1, r)."""

    @abstractmethod
    def with_gradient(
        self,
        theta: Tensor,  # (S, dim)
        modes: Tensor,  # to begin from, (n, S, r)
    ) -> Valued:
        """Evaluate the log joint and its gradient, with modes found to their end."""

    @abstractmethod
    def log_joint(
        self,
        theta: Tensor,  # (S, dim)
        modes: Tensor,  # near the modes, (n, S, r)
    ) -> Tensor:
        """Evaluate the log joint of draws, (S,), as cheaply as weights allow."""

    def completed(self, theta: Tensor, generator: torch.Generator) -> Tensor:  # theta (S, dim)
        """Draw what else has been integrated out of the globals, and return all of them."""
        return theta

    def curvature(
        self,
        theta: Tensor,  # (dim,)
        modes: Tensor,  # of θ, (n, 1, r)
    ) -> Tensor:
        """About the Hessian of -log p(y, θ), (dim, dim), symmetric, by central differences of gradients."""
        columns = self.difference_gradients(theta, modes, self.difference.diag(), self.difference)
        return 0.5 * (columns + columns.mT)

    def difference_gradients(self, theta: Tensor, modes: Tensor, moves: Tensor, lengths: Tensor) -> Tensor:
        """Central differences of gradients over moves (m, dim) of some lengths (m,), of -log p(y, θ), (m, dim)."""
        around, count = torch.cat([theta + moves, theta - moves]), len(moves)
        gradient = self.with_gradient(around, modes.expand(-1, 2 * count, -1)).gradient
        return (gradient[count:] - gradient[:count]) / (2 * lengths[:, None])


def find_start(design: Design, family: Family, coordinates: Coordinates) -> tuple[Tensor, Tensor]:
    """No effect of any column, the intercept at the link of the mean, log τ = -.7 in units of y, and that unit."""
    c = coordinates
    location, phi = family.start(design.y, design.offset, design.weights)
    unit = c.X.new_ones(())
    if family.link == "identity":  # of the standard deviation of y less the offset
        share = design.weights / design.weights.sum()
        y = design.y[0].to(share) - design.offset
        sd = (share @ (y - share @ y).square()).sqrt()
        unit = torch.where(sd > 0, sd, 1.0)
    locations = [float(location)]
    if isinstance(family, Multinomial):
        locations = family.levels(design.y, design.weights)
    level = c.X.new_zeros(c.p) if c.thresholds else c.level(*locations).to(c.X)
    xis = [torch.cat([unit.log() - 0.7 + c.X.new_zeros(r), c.X.new_zeros(r * (r - 1) // 2)]) for r in c.sizes]
    return torch.cat([level, *xis, torch.as_tensor(phi, device=c.X.device).to(c.X).reshape(-1)]), unit


class Block(NamedTuple):
    """Rows of neighbouring groups, m of each."""

    part: slice  # of the groups
    X: Tensor  # (n, m, p)
    Z: Tensor  # (n, m, r)
    offset: Tensor  # (n, m)
    y: tuple[Tensor, ...]  # (n m, 1), or of outcomes that differ between values of the globals (n m, S)
    weights: Tensor | None  # (n, m); None where all are 1
    members: Tensor | None = None  # of many models the one of each value of the globals, (S,)

    def weighted(self, table: Tensor) -> Tensor:  # (n, m, ..)
        """Multiply by the weights of rows."""
        return table if self.weights is None else self.weights[(...,) + (None,) * (table.ndim - 2)] * table


class Integrated(LogJoint):
    """log p(y, θ) of a design with no factor or one, all constants included, by adaptive Gauss-Hermite quadrature."""

    def __init__(
        self,
        design: Design,
        family: Family,
        coordinates: Coordinates,
        priors: Priors,
        settings: Integration | None = None,
    ) -> None:
        self.design, self.family, self.coordinates, self.priors = design, family, coordinates, priors
        self.settings = Integration() if settings is None else settings
        self.r = coordinates.sizes[0] if coordinates.sizes else 0  # effects of a group
        self.scales = coordinates.p
        self.difference = coordinates.X.new_full((coordinates.dim,), self.settings.difference)
        self.exact = self.r > 0 and family.name == "gaussian"  # the integrand over u is Gaussian
        self.newton, self.nodes, self.draw_nodes = self.r == 0, 1, 1  # nodes of gradients and of draws, each dimension
        if self.r:
            self.nodes = 2 if self.exact else self._nodes_of(self.settings.search_nodes)
            self.draw_nodes = 1 if self.exact else self.nodes
        # for each value of the globals: gradients; derivatives of the likelihood, by step; evaluations of it, by node
        self.gradients = self.jets = self.energies = 0
        self.blocks, self.order = self._arranged()
        self.n = len(self.order)
        size = self.n * max(1, self.r, len(coordinates.categories))
        self.together = max(1, 10 * self.settings.at_once // max(1, size))
        self.place = torch.empty_like(self.order).scatter(0, self.order, torch.arange(self.n, device=self.order.device))

    # ---------------------------------------------------------------------------- rows in groups of one length

    def _arranged(self) -> tuple[list[Block], Tensor]:
        """Blocks of rows, and which group stands in which place."""
        design, c = self.design, self.coordinates
        there = torch.nonzero(design.weights > 0)[:, 0]
        if self.r:
            groups, n = design.factors[0].groups[there], len(design.factors[0].levels)
        else:
            groups, n = torch.arange(len(there), device=there.device), len(there)
        by_group = torch.argsort(groups, stable=True)
        rows, sizes = there[by_group], torch.bincount(groups, minlength=n)
        first = sizes.cumsum(0) - sizes
        order, ends = torch.arange(n, device=there.device), [n]
        if n * int(sizes.max()) > (1 + self.settings.filled) * len(rows):
            kinds = sizes.clamp_min(1).double().log2().ceil()
            order = torch.argsort(kinds, stable=True)
            ends = torch.unique_consecutive(kinds[order], return_counts=True)[1].cumsum(0).tolist()
        blocks, begin = [], 0
        Z = c.Z[0] if self.r else c.X[:, :0]
        for end in ends:
            m = int(sizes[order[begin:end]].max())
            step = max(1, self.settings.at_once // max(1, m))
            for low in range(begin, end, step):
                part = slice(low, min(end, low + step))
                inner = torch.arange(m, device=there.device)
                own = sizes[order[part], None]
                place = first[order[part], None] + torch.where(inner < own, inner, 0)
                index = rows[place.clamp_max(len(rows) - 1)]  # (n, m)
                weights = torch.where(inner < own, design.weights[index], 0.0)
                plain = bool((weights == 1).all())
                y = tuple(one.reshape(len(one), -1)[index.flatten()] for one in design.y)
                offset = design.offset[index]
                blocks.append(Block(part, c.X[index], Z[index], offset, y, None if plain else weights))
            begin = end
        return blocks, order

    def _pieces(self, count: int, nodes: int) -> Iterator[tuple[Block, slice]]:
        """Blocks and ranges of values of the globals, so that no table is large."""
        for block in self.blocks:
            most = self._most(block, nodes)
            for low in range(0, count, most):
                yield block, slice(low, min(count, low + most))

    def _most(self, block: Block, nodes: int) -> int:
        """The values of the globals at once."""
        size = block.offset.numel() * max(1, len(self.coordinates.categories)) * nodes**self.r
        return max(1, self.settings.at_once // max(1, size))

    # ---------------------------------------------------------------------------- what the search asks for

    def start(self) -> tuple[Tensor, Tensor]:
        """Where a search begins: see `find_start`."""
        theta = find_start(self.design, self.family, self.coordinates)[0]
        return theta, theta.new_zeros(self.n, 1, self.r)

    def refine(self, theta: Tensor, stuck: bool) -> bool:
        """Take more nodes where a standard deviation is large, or values and gradients contradict one another."""
        if not self.r or self.exact:
            return False
        more, wide = self._nodes_of(self.settings.wide_nodes), self.coordinates.split(theta)[1][0][: self.r].exp().max()
        if self.nodes >= more or not (stuck or float(wide) > self.settings.wide):
            return False
        self.nodes = more
        return True

    def _nodes_of(self, by_effects: tuple[int, ...]) -> int:
        """The number for so many effects a group."""
        return by_effects[min(max(self.r, 1), len(by_effects)) - 1]

    def with_gradient(self, theta: Tensor, modes: Tensor) -> Valued:
        """Evaluate the log joint and its gradient, with modes found to their end."""
        return self.values(theta, modes, self.nodes, gradient=True)

    def log_joint(self, theta: Tensor, modes: Tensor) -> Tensor:
        """Evaluate the log joint of draws, with one step from where the modes are to be expected, (S,)."""
        return self.values(theta, modes, self.draw_nodes, one_step=True).value

    def values(
        self,
        theta: Tensor,  # (S, dim)
        modes: Tensor,  # near the modes, (n, S, r)
        nodes: int,
        one_step: bool = False,
        gradient: bool = False,
    ) -> Valued:
        """Evaluate the log joint with a number of nodes, about modes, or about where one step towards them leads."""
        theta = theta.detach()
        z, log_w = normal_rule(nodes, max(1, self.r), theta)
        z, base = z[:, : self.r], log_w + 0.5 * z[:, : self.r].square().sum(-1)
        self.gradients += len(theta) * gradient
        self.energies += len(theta) * len(z)
        found, of_groups = torch.empty_like(modes), theta.new_empty(self.n, len(theta))
        slope = torch.zeros_like(theta)
        for block, part in self._pieces(len(theta), nodes):
            here = theta[part]
            u, spread, volume = self._nodes(block, here, modes[block.part, part], z, one_step)
            with torch.set_grad_enabled(gradient):
                here.requires_grad_(gradient)
                data = torch.logsumexp(self._integrand(block, here, u[..., None, :] + spread) + base, -1) + volume
                if gradient:
                    slope[part] += torch.autograd.grad(data.sum(), here)[0].nan_to_num(0.0, 0.0, 0.0)
            found[block.part, part], of_groups[block.part, part] = u, data.detach()
        with torch.set_grad_enabled(gradient):
            prior = self.log_prior(theta.requires_grad_(gradient))
            if gradient:
                slope = slope + torch.autograd.grad(prior.sum(), theta)[0]
        value = finite(of_groups.sum(0) + prior.detach())
        return Valued(value, slope, found, of_groups)

    def log_prior(self, theta: Tensor) -> Tensor:
        """Evaluate log p(θ), (S,)."""
        return self.priors.log_prob(theta)

    def _integrand(self, block: Block, theta: Tensor, u: Tensor) -> Tensor:  # theta (S, dim), u (n, S, K, r)
        """log p(y_i | u, θ) - ½|u|² at points of u, (n, S, K)."""
        fixed, C, phi = self._predictor(block, theta)
        eta = fixed.unsqueeze(3).expand(*fixed.shape[:3], u.shape[-2], *fixed.shape[3:])
        if self.r:
            b = linalg.small_product(u, C.mT)
            eta = eta + sum(block.Z[:, :, None, None, k] * b[:, None, ..., k] for k in range(self.r))
        y = tuple(one[..., None] for one in block.y)
        log_p = self.family.log_prob(eta.flatten(0, 1), y, phi[:, None, :])
        data = block.weighted(log_p.unflatten(0, fixed.shape[:2])).sum(1)
        return data - 0.5 * sum(u[..., k].square() for k in range(self.r)) if self.r else data

    def _predictor(self, block: Block, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """X a + offset (n, m, S), of categories (n, m, S, C - 1), C (S, r, r), and φ (S, nphi)."""
        a, xis, phi = self.coordinates.split(theta)
        fixed = self.coordinates.linear(block.X, a, block.offset)
        return fixed, covariance_root(xis[0], self.r) if self.r else theta.new_ones(len(theta), 0, 0), phi

    # ---------------------------------------------------------------------------- where the nodes are

    @torch.no_grad()
    def _nodes(
        self,
        block: Block,
        theta: Tensor,  # (S, dim)
        start: Tensor,  # (n, S, r)
        z: Tensor,  # (K, r)
        one_step: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """û (n, S, r), L z_k (n, S, K, r) and log|L| (n, S)."""
        if not self.r:
            return start, start[..., None, :], start.sum(-1)
        u, root = self._modes(block, theta, start, one_step)
        spread = linalg.small_tsolve(root, z.mT.expand(*root.shape[:-2], -1, -1)).mT  # L = R⁻ᵀ, H = R Rᵀ
        return u, spread, -root.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def _modes(self, block: Block, theta: Tensor, u: Tensor, one_step: bool) -> tuple[Tensor, Tensor]:
        """Damped Newton steps for all groups and values at once: û (n, S, r) and the root R of the Hessian."""
        fixed, C, phi = self._predictor(block, theta)
        value, gradient, root = self._quadratic(block, u, fixed, C, phi)
        size = torch.ones_like(value)
        for _ in range(self.settings.steps):
            half = linalg.small_solve(root, gradient[..., None])
            decrement = 0.5 * half.square().sum((-2, -1))
            if one_step:
                found, astray = u - linalg.small_tsolve(root, half)[..., 0], (decrement > self.settings.trust).any(0)
                if bool(astray.any()):
                    found[:, astray], root[:, astray] = self._modes(block, theta[astray], u[:, astray], False)
                return found, root
            if bool((decrement < self.settings.decrement).all()):
                break
            new = u - size[..., None] * linalg.small_tsolve(root, half)[..., 0]
            there = self._quadratic(block, new, fixed, C, phi)
            better = there[0] <= value + 1e-12 * value.abs()  # what rounding leaves
            u, value, gradient, root = replace_where(better, (new, *there), (u, value, gradient, root))
            size = torch.where(better, (2 * size).clamp_max(1.0), 0.5 * size)
        return u, root

    def _quadratic(
        self,
        block: Block,
        u: Tensor,  # (n, S, r)
        fixed: Tensor,  # (n, m, S)
        C: Tensor,  # (S, r, r)
        phi: Tensor,  # (S, nphi)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-log of the integrand up to a constant (n, S), its gradient, and the root R of its Hessian, at least I."""
        self.jets += len(phi) if block.part.start == 0 else 0
        f, slope, curvature = self._jet(block, u, fixed, C, phi)
        value = f.sum(1) + 0.5 * u.square().sum(-1)
        gradient = linalg.small_product(_sums(slope, block.Z)[..., None, :], C)[..., 0, :] + u
        inner = _sums(curvature.clamp_min(0.0), _squares(block.Z)).unflatten(-1, (self.r, self.r))
        eye = torch.eye(self.r, dtype=u.dtype, device=u.device)
        H = linalg.small_product(C.mT, linalg.small_product(inner, C)) + eye
        root, ok = linalg.small_cholesky(H)
        return -finite(-value), gradient, torch.where(ok[..., None, None], root, eye)

    def _jet(self, block: Block, u: Tensor, fixed: Tensor, C: Tensor, phi: Tensor) -> tuple[Tensor, ...]:
        """-log p(y | η, φ) of rows, times their weights, with two derivatives in η, (n, m, S)."""
        eta = fixed
        if self.r:
            b = linalg.small_product(u[..., None, :], C.mT)[..., 0, :]
            eta = fixed + sum(block.Z[:, :, None, k] * b[:, None, :, k] for k in range(self.r))
        jet = self.family.jet(eta.flatten(0, 1), block.y, phi)
        return tuple(block.weighted(part.unflatten(0, fixed.shape[:2])) for part in jet)

    # ---------------------------------------------------------------------------- curvature

    def curvature(self, theta: Tensor, modes: Tensor) -> Tensor:
        """About the Hessian of -log p(y, θ), (dim, dim), that of other coordinates than coefficients by differences."""
        p, rest = self.coordinates.p, self.coordinates.dim - self.coordinates.p
        H = -self.of_prior(theta)
        H[:p, :p] += self._of_coefficients(theta[None], modes)
        if rest:
            columns = self.difference_gradients(theta, modes, self.difference.diag()[p:], self.difference[p:])
            H[p:], H[:, p:] = columns, columns.mT
            H[p:, p:] = 0.5 * (columns[:, p:] + columns[:, p:].mT)
        return H

    def of_prior(self, theta: Tensor) -> Tensor:
        """The Hessian of the log prior."""
        return torch.func.jacrev(torch.func.grad(self.priors.log_prob))(theta)

    @torch.no_grad()
    def _of_coefficients(self, theta: Tensor, modes: Tensor) -> Tensor:
        """The Hessian of -log p(y | θ) in the coefficients, (p, p), without effects: XᵀWX - Σ_i B_iᵀ H_i⁻¹ B_i."""
        total = theta.new_zeros(self.coordinates.p, self.coordinates.p)
        for block in self.blocks:
            fixed, C, phi = self._predictor(block, theta)
            u = modes[block.part]
            curvature = self._jet(block, u, fixed, C, phi)[2]
            if self.coordinates.categories:
                total += _of_categories(block.X.flatten(0, 1), curvature.flatten(0, 2))
                continue
            curvature = curvature.clamp_min(0.0)
            WX = curvature * block.X
            total += block.X.flatten(0, 1).mT @ WX.flatten(0, 1)
            if self.r:
                root = self._quadratic(block, u, fixed, C, phi)[2][:, 0]
                half = linalg.small_solve(root, C.mT @ (block.Z.mT @ WX)).flatten(0, 1)
                total -= half.mT @ half
        return total

    # ---------------------------------------------------------------------------- many coefficients

    @torch.no_grad()
    def nearest(self, theta: Tensor, root: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """The nearest Gaussian, its mean and a root of its covariance, without effects (Opper and Archambeau 2009)."""
        p, settings = self.coordinates.p, self.settings
        z, log_w = normal_rule(settings.nearest_nodes, 1, theta)
        H = self.curvature(theta, self.start()[1])
        fixed = H[:p, :p] - self._of_coefficients(theta[None], self.start()[1])  # the prior, at the mode
        begin, rate, promised = theta, 1.0, math.inf
        prior_slope = torch.func.grad(self.priors.log_prob)(theta)[:p]
        pairs = settings.nearest_draws // 2 if self.coordinates.categories else 0
        half = draw_normal(pairs, p, generator=generator, like=theta)
        for _ in range(settings.nearest_steps):
            slope, curvature = fixed @ (theta - begin)[:p], fixed.clone()
            slope = slope - prior_slope
            for block in self.blocks:
                X = block.X.flatten(0, 1)
                if self.coordinates.categories:
                    first, second = self._averaged(block, theta, root, half)
                    slope, curvature = slope + (first.mT @ X).flatten(), curvature + _of_categories(X, second)
                    continue
                mean, _, phi = self._predictor(block, theta[None])
                sd = (X @ root[:p]).square().sum(-1).sqrt()
                eta = mean.flatten()[:, None] + sd[:, None] * z[:, 0]
                jet = self.family.jet(eta, block.y, phi.expand(len(z), -1))
                first, second = (
                    block.weighted((part @ log_w.exp()).reshape(mean.shape[:2])).flatten() for part in jet[1:]
                )
                slope = slope + first @ X
                curvature += X.mT @ (second.clamp_min(0.0)[:, None] * X)
            H = H.clone()
            H[:p, :p] += rate * (curvature - H[:p, :p])
            root = inverse_root(H)
            step = root[:p] @ (root[:p].mT @ slope)
            theta = torch.cat([theta[:p] - rate * step, theta[p:]])
            before, promised = promised, float(slope @ step)
            if promised < settings.nearest_end:
                break
            rate = 0.5 * rate if promised > before else rate
        return theta, root

    def _averaged(self, block: Block, theta: Tensor, root: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients (n, C - 1) and Hessians in the predictors of categories, averaged over draws and their mirror."""
        assert isinstance(self.family, Multinomial)
        slope, curvature = theta.new_zeros(()), theta.new_zeros(())
        root = torch.linalg.cholesky(root @ root.mT)  # which changes little between steps, as eigenvectors do not
        for part in torch.cat([half, -half]).split(self._most(block, 1)):
            eta, _, phi = self._predictor(block, theta + part @ root.mT)
            own = self.family.averaged(eta.flatten(0, 1), block.y, phi)
            first, second = (len(part) / (2 * len(half)) * block.weighted(one[:, None])[:, 0] for one in own)
            slope, curvature = slope + first, curvature + second
        return slope, curvature

    # ---------------------------------------------------------------------------- effects given the globals

    @torch.no_grad()
    def draw(
        self,
        theta: Tensor,  # (S, dim)
        modes: Tensor,  # near the modes, (n, S, r)
        candidates: int,
        wider: float,
        generator: torch.Generator,
    ) -> Tensor:
        """Draw u of all groups given the globals, (n, S, r), one point of a lattice by its importance weight."""
        drawn = torch.empty_like(modes)
        lattice = _lattice(candidates, self.r).to(modes)
        for block, part in self._pieces(len(theta), candidates):
            u, root = self._modes(block, theta[part], modes[block.part, part], False)
            shift = draw_uniform(*u.shape[:2], 1, self.r + 1, generator=generator, like=u)
            z = torch.special.ndtri((lattice + shift[..., :-1]).frac().clamp(1e-12, 1 - 1e-12))
            points = u[..., None, :] + wider * linalg.small_tsolve(root, z.mT).mT
            if candidates > 1:
                log_weights = self._integrand(block, theta[part], points) + 0.5 * z.square().sum(-1)
                best = choose(log_weights, shift[..., 0, -1])
                points = points.gather(-2, best[..., None, None].expand(*best.shape, 1, self.r))
            drawn[block.part, part] = points[..., 0, :]
        return drawn

    def effects(self, u: Tensor, theta: Tensor) -> Tensor:  # u (n, S, r), theta (S, dim)
        """b = C u of the groups in the order of their numbers, (S, n, r)."""
        C = covariance_root(self.coordinates.split(theta)[1][0], self.r)
        return linalg.small_product(u[self.place][..., None, :], C.mT)[..., 0, :].transpose(0, 1)


def finite(values: Tensor) -> Tensor:
    """Values, -inf in the place of whatever is not finite."""
    return torch.where(values.isfinite(), values, -torch.inf)


def choose(log_weights: Tensor, uniform: Tensor) -> Tensor:  # log_weights (..., K), uniform (...)
    """Choose one of K candidates with a probability in proportion to its weight, (...)."""
    share = finite(log_weights).softmax(-1).nan_to_num(1.0).cumsum(-1)
    return (share < uniform[..., None] * share[..., -1:]).sum(-1).clamp_max(share.shape[-1] - 1)


def _of_categories(
    X: Tensor,  # (N, D)
    W: Tensor,  # of rows, (N, C, C)
) -> Tensor:
    """Σ_n W_n ⊗ x_n x_nᵀ, (C D, C D), a block of rows for each category."""
    blocks = [X.mT @ (row[..., None] * X[:, None]).flatten(1) for row in W.unbind(1)]
    return torch.cat(blocks)


def _sums(table: Tensor, columns: Tensor) -> Tensor:  # table (n, m, S), columns (n, m, k)
    """Sums over the rows of groups of products with columns, (n, S, k)."""
    if columns.shape[-1] == 1:
        return (table * columns).sum(1)[..., None]
    return table.transpose(1, 2) @ columns


def _squares(Z: Tensor) -> Tensor:  # (n, m, r)
    """z zᵀ of rows, (n, m, r²)."""
    return (Z[..., :, None] * Z[..., None, :]).flatten(-2)


def _lattice(count: int, dim: int) -> Tensor:
    """A rank-one lattice in the unit cube, (count, dim): steps of 1/count, and powers of a golden ratio."""
    ratio = 2.0
    for _ in range(50):
        ratio = (1 + ratio) ** (1 / dim)  # x^dim = x + 1 is the golden ratio of dim - 1 more coordinates
    steps = torch.tensor([1 / count, *(ratio**-k for k in range(1, dim))], dtype=torch.float64, device="cpu")
    return (torch.arange(count, dtype=torch.float64, device="cpu")[:, None] * steps).frac()


def inverse_root(hessian: Tensor) -> Tensor:  # (dim, dim), symmetric
    """A root C of the inverse of a Hessian, C Cᵀ = H⁻¹, with the sizes of eigenvalues that are negative."""
    diagonal = hessian.diagonal().abs()
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    values, vectors, _ = eigh(scale[:, None] * hessian * scale)
    least = len(values) * torch.finfo(values.dtype).eps * values.abs().max()
    return scale[:, None] * vectors * values.abs().clamp_min(least.clamp_min(torch.finfo(least.dtype).tiny)).rsqrt()


# ------------------------------------------------------------------------------------ coefficients integrated out


class Closed(LogJoint):
    """log p(y, ρ) of a model with Gaussian noise and at most one factor, effects and coefficients integrated out."""

    scales = 0

    def __init__(self, joint: Integrated) -> None:
        self.joint, self.p, self.gradients = joint, joint.coordinates.p, 0
        p, r = self.p, joint.r
        self.begin = joint.start()[0]
        self.difference = joint.difference[p:]
        self.location = joint.priors.location.to(self.begin)
        self.precision = -joint.of_prior(torch.cat([self.location, self.begin[p:]]))[:p, :p]
        self.of_rows = self.begin.new_zeros(p + 1, p + 1)
        inner, cross = [], []
        self.log_weight = self.begin.new_zeros(())
        for block in joint.blocks:
            apart = block.y[0].reshape(block.offset.shape) - block.offset - block.X @ self.location
            V = torch.cat([block.X, apart[..., None]], -1)
            WV, WZ = block.weighted(V), block.weighted(block.Z)
            self.of_rows += V.flatten(0, 1).mT @ WV.flatten(0, 1)
            self.log_weight += block.weighted(torch.ones_like(apart)).sum()
            inner.append(block.Z.mT @ WZ)
            cross.append(block.Z.mT @ WV)
        self.inner, self.cross = torch.cat(inner), torch.cat(cross)  # (n, r, r), (n, r, p + 1)
        self.together = self.most = max(
            1, joint.settings.at_once // ((p + 1) ** 2 + (len(self.inner) * r * (p + 1) if r else 0))
        )

    @classmethod
    def fits(cls, joint: Integrated) -> bool:
        """Whether noise is Gaussian, with a standard deviation that is learned, and priors of coefficients normal."""
        normal = all(isinstance(prior, Normal) for prior in joint.priors.coefficients)
        return joint.family.name == "gaussian" and len(joint.family.parameters) == 1 and normal

    def start(self) -> tuple[Tensor, Tensor]:
        """Where the scales of the log joint of all globals begin."""
        return self.begin[self.p :], self.begin.new_zeros(0, 1, 0)

    def with_gradient(self, theta: Tensor, modes: Tensor) -> Valued:
        """Evaluate the log joint and its gradient by automatic differentiation."""
        self.gradients += len(theta)
        parts = []
        for part in theta.detach().split(self.most):
            with torch.enable_grad():
                value = self._value(part.requires_grad_())
                parts.append((value.detach(), torch.autograd.grad(value.sum(), part)[0].nan_to_num(0.0, 0.0, 0.0)))
        value, gradient = (torch.cat(some) for some in zip(*parts, strict=True))
        return Valued(finite(value), gradient, modes, value[None])

    @torch.no_grad()
    def log_joint(self, theta: Tensor, modes: Tensor) -> Tensor:
        """Evaluate the log joint, (S,)."""
        return finite(torch.cat([self._value(part) for part in theta.split(self.most)]))

    @torch.no_grad()
    def completed(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """Draw the coefficients given the scales, θ = (a, ρ), (S, dim)."""
        parts = []
        for part in theta.split(self.most):
            _, root, half, _ = self._solved(part)
            z = draw_normal(len(part), self.p, generator=generator, like=part)
            apart = torch.linalg.solve_triangular(root.mT, half + z[..., None], upper=True)[..., 0]
            parts.append(torch.cat([self.location + apart, part], -1))
        return torch.cat(parts)

    def _value(self, theta: Tensor) -> Tensor:
        """log p(y, ρ), (S,)."""
        log_noise, root, half, rest = self._solved(theta)
        prior = self.joint.priors.log_prob(torch.cat([self.location.expand(len(theta), -1), theta], -1))
        volume = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        data = -self.log_weight * (0.5 * math.log(2 * math.pi) + log_noise) + rest + 0.5 * half.square().sum((-2, -1))
        return prior + data - volume + 0.5 * self.p * math.log(2 * math.pi)

    def _solved(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """log σ (S,), the root L of Q (S, p, p), L⁻¹h (S, p, 1), and what groups and e alone add to log N(e; 0, Σ)."""
        p, r = self.p, self.joint.r
        log_noise = theta[:, -1]
        scale = (-2 * log_noise).exp()[:, None, None]
        G, log_det = scale * self.of_rows, torch.zeros_like(log_noise)
        if r:
            C = covariance_root(theta[:, :-1], r)
            eye = torch.eye(r, dtype=theta.dtype, device=theta.device)
            inner = linalg.small_product(C.mT, linalg.small_product(self.inner[:, None], C))
            factor, _ = linalg.small_cholesky(eye + scale * inner)  # (n, S, r, r)
            half = linalg.small_solve(factor, scale * linalg.small_product(C.mT, self.cross[:, None]))
            half = half.transpose(0, 1).flatten(1, 2)  # (S, n r, p + 1)
            G = G - half.mT @ half
            log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum((0, -1))
        root, ok = cholesky(G[:, :p, :p] + self.precision)
        root = torch.where(ok[:, None, None], root, math.nan)
        half = torch.linalg.solve_triangular(root, G[:, :p, p:], upper=False)
        return log_noise, root, half, -0.5 * G[:, p, p] - log_det
