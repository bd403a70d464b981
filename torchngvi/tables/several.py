"""The posterior of the globals with several grouping factors, nested or crossed: Laplace's approximation, corrected.

With the effects b_k = C_k u_k of all factors, u ~ N(0, I) in D dimensions, û the mode of log p(y, u | θ), A the rows of
the designs Z_k C_k, W the curvatures of -log p(y | η, φ) there, and H = I + AᵀWA,

    log p(y | θ) ≈ log p(y | û, θ) - ½|û|² - ½ log|H|

is Laplace's approximation (Tierney and Kadane 1986; Bates and others 2015 for the sparse factor H = T Tᵀ, which has the
pattern of the forest of `torchngvi.tables.arranged`).  Its gradient follows û: with λ = ½ H⁻¹ ∂log|H|/∂u,

    d/dθ = ∂/∂θ [log p(y | û, θ) - ½ log|H| + λᵀ ∂log p(y, u | θ)/∂u],

since dû/dθ = H⁻¹ ∂²log p/∂u∂θ.  The search for the mode of the globals takes this.  The weights of draws are corrected:
the effects v of all factors but the largest are drawn from the Gaussian N(û, H⁻¹), and given these the effects w_j of
the groups of the largest, which are then independent, are integrated by nodes (see `torchngvi.tables.integrated`),

    p(y | θ) ≈ 1/M Σ_m p(v_m)/N(v_m; û, H⁻¹) Π_j ∫ p(y_j | w_j, v_m, θ) N(w_j; 0, I) dw_j,

without a bias up to that of the nodes (Durbin and Koopman 1997).  The M normal draws, in pairs z and -z, are the same
for all θ, so that differences between values of θ have little noise.  With Gaussian noise M = 1 with one node is exact.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchngvi.diagnostics.importance import USELESS
from torchngvi.errors import InputError
from torchngvi.numerics import small_blocks
from torchngvi.numerics.linalg import cholesky
from torchngvi.numerics.special import normal_rule
from torchngvi.structures.pattern import Structured
from torchngvi.tables.arranged import Arranged
from torchngvi.tables.families import Family
from torchngvi.tables.globals import FitSettings, Found, Frame, Mixture, Weigher, Weighing, enough_nodes, search
from torchngvi.tables.integrated import Integration, LogJoint, Valued
from torchngvi.tables.parts import Coordinates, Design, Posterior, covariance_root
from torchngvi.tables.priors import Priors


@dataclass(frozen=True)
class Correction:
    """How Laplace's approximation is corrected: the numbers that several factors need beside `FitSettings`.

    Attributes:
        pairs: numbers of pairs of normal draws that are tried. With 4 the means of crossed binary data, 20 by 20 in 120
            rows, varied by .02 to .06 sds between seeds, with 8 by .02 to .04, 3,000 draws of the globals alone by .02.
        agreed: nats of the standard deviation, between draws near the posterior, by which two sets of pairs may differ:
            it moves a mean by half as many sds. One set in ten is worse than the others, so that few pairs agree by
            chance: the smallest number is 4.
        few: nodes, in each dimension, with which groups are integrated given each draw of the others. The difference
            to the nodes of the fit is taken at the mode of the others alone: what it misses had a standard deviation
            of .007 to .022 nats between draws near the posterior, in four sets of crossed binary data where that of
            the correction itself was .1 to .6.
        end: nats that the last step of Newton's method towards the modes of the effects may promise.
        trust: the same where draws are weighted: what is left after this step is about its square.
        mirrored: standard deviations at most that are drawn as they are and mirrored at 0; densities add over signs.
        candidates: of the effects of each draw, of which one is taken.
    """

    pairs: tuple[int, ...] = (4, 8, 16, 32)
    agreed: float = 0.1
    few: int = 2
    end: float = 1e-8
    trust: float = 0.02
    mirrored: int = 6
    candidates: int = 16


class _Linear(NamedTuple):
    """The linear predictor as a function of u at S values of the globals."""

    designs: list[Tensor]  # Z_k C_k, (S, N, r)
    fixed: Tensor  # X a + offset, (S, N)
    phi: Tensor  # (S, nphi)


class ByLaplace(LogJoint):
    """log p(y, θ) of a design with K ≥ 1 factors, all constants included, by Laplace's approximation or corrected.

    Use it through `integrate_several`. A value costs one factorisation of a matrix in the pattern of the forest.

    Args:
        design: the rows; those of weight 0 are left out.
        family: the density of y given η.
        coordinates: of the globals.
        priors: of the globals.
        settings: of Newton's method, and how much is done at once.
        correction: of Laplace's approximation.

    Attributes:
        arranged: the effects in the forest.
        leaf: the largest factor, or the innermost of nested ones, whose groups are integrated by nodes.
        r: the number of effects of its groups.
        others: whether there are effects of other factors.
        exact: whether log p(y, u) is a parabola in u.
        gradients: how many were computed, one for each value of the globals.
        factorisations: how many, in the same way.

    >>> from torchngvi.tables.families import family_of
    >>> from torchngvi.tables.parts import Factor
    >>> from torchngvi.tables.priors import settle
    >>> one, y = torch.ones(4, 1, dtype=torch.float64), torch.tensor([1.0, 2.0, 0.0, 1.0], dtype=torch.float64)
    >>> groups = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    >>> factors = tuple(Factor(name, ("Intercept",), ("a", "b"), one, of) for name, of in zip("gh", groups))
    >>> design = Design(one, ("Intercept",), factors, 0 * y, (y,), one[:, 0])
    >>> coordinates, family = Coordinates(design, 0), family_of("poisson")
    >>> joint = ByLaplace(design, family, coordinates, settle(design, family, coordinates, None))
    >>> theta, modes = joint.start()
    >>> joint.with_gradient(theta[None], modes).gradient.shape
    torch.Size([1, 3])
    """

    def __init__(
        self,
        design: Design,
        family: Family,
        coordinates: Coordinates,
        priors: Priors,
        settings: Integration | None = None,
        correction: Correction | None = None,
    ) -> None:
        self.family, self.coordinates, self.priors = family, coordinates, priors
        self.settings = Integration() if settings is None else settings
        self.correction = Correction() if correction is None else correction
        here = design.weights > 0
        self.factors = [
            of._replace(Z=Z[here], groups=of.groups[here]) for of, Z in zip(design.factors, coordinates.Z, strict=True)
        ]
        self.X, self.offset, self.weights = coordinates.X[here], design.offset[here], design.weights[here]
        self.y = tuple(part[here] for part in design.y)
        self.arranged = Arranged(self.factors)
        self.forest = self.arranged.structure
        self.leaf = self.arranged.chain[0]
        self.r, self.others = self.arranged.r[self.leaf], self.arranged.dim > self.arranged.places[self.leaf].stop
        self.exact = family.name == "gaussian"
        self.gradients = self.factorisations = 0
        self.scales = coordinates.p
        self.together = max(1, 10 * self.settings.at_once // self.arranged.dim)
        self.nodes = 1
        self.z: Tensor | None = None

    # ---------------------------------------------------------------------------- what the search asks for

    def start(self) -> tuple[Tensor, Tensor]:
        """No effect of any column, the intercept at the link of the mean, log τ = -.7 in units of y."""
        c = self.coordinates
        location, phi = self.family.start(self.y, self.offset, self.weights)
        level = c.columns.level(float(location)).to(c.X) if not c.thresholds else c.X.new_zeros(c.p)
        xis = [
            torch.cat([self._unit().log() - 0.7 + c.X.new_zeros(r), c.X.new_zeros(r * (r - 1) // 2)]) for r in c.sizes
        ]
        theta = torch.cat([level, *xis, torch.as_tensor(phi, device=c.X.device).to(c.X).reshape(-1)])
        return theta, theta.new_zeros(self.arranged.dim, 1, 1)

    def _unit(self) -> Tensor:
        """The unit of the linear predictor: for the identity link the standard deviation of y less the offset."""
        if self.family.link != "identity":
            return self.X.new_ones(())
        share, y = self.weights / self.weights.sum(), self.y[0].to(self.X) - self.offset
        sd = (share @ (y - share @ y).square()).sqrt()
        return torch.where(sd > 0, sd, 1.0)

    def curvature(self, theta: Tensor, modes: Tensor) -> Tensor:
        """The Hessian of -log p(y, θ) by central differences of gradients, (dim, dim)."""
        dim, move = len(theta), torch.full_like(theta, self.settings.difference)
        move[: self.coordinates.p] *= self._unit()
        around = torch.cat([theta + move.diag(), theta - move.diag()])
        gradient = self.with_gradient(around, modes.expand(-1, 2 * dim, -1)).gradient
        assert gradient is not None
        H = (gradient[dim:] - gradient[:dim]) / (2 * move[:, None])
        return 0.5 * (H + H.mT)

    @torch.no_grad()
    def with_gradient(self, theta: Tensor, modes: Tensor) -> Valued:
        """Evaluate Laplace's approximation and its gradient, with modes found to their end."""
        theta, found = theta.detach(), torch.empty_like(modes)
        value, slope = theta.new_empty(len(theta)), torch.empty_like(theta)
        self.gradients += len(theta)
        for part in self._parts(len(theta), len(self.X)):
            u = self._modes(self._linear(theta[part]), modes[:, part, 0].mT, self.correction.end)[0]
            value[part], slope[part] = self._laplace(theta[part], u)
            found[:, part, 0] = u.mT
        value = value.nan_to_num(nan=-torch.inf, posinf=-torch.inf)
        return Valued(value, slope.nan_to_num(0.0, 0.0, 0.0), found, value[None])

    def _laplace(
        self,
        theta: Tensor,  # (S, dim)
        u: Tensor,  # modes, (S, D)
    ) -> tuple[Tensor, Tensor]:
        """The log joint (S,) and its gradient (S, dim)."""
        with torch.enable_grad():
            theta = theta.clone().requires_grad_()
            of, at = self._linear(theta), u.clone().requires_grad_()
            f, slope, curvature = self._jet(of, at)
            with torch.no_grad():
                root, turned = self._factored(of, curvature)
                covariance = self.forest.gram(self.forest.inverse(root), torch.ones_like(u))
            trace = (curvature.clamp_min(0.0) * self.arranged.variances(of.designs, covariance)).sum()
            total = self.priors.log_prob(theta) - f.sum(-1)
            aim = total.sum() - 0.5 * trace
            if not self.exact:
                (change,) = torch.autograd.grad(trace, at, retain_graph=True)
                follow = 0.5 * self.forest.tsolve(turned, self.forest.solve(turned, change))
                aim = aim + (follow * self.arranged.gathered(of.designs, slope)).sum()
            (gradient,) = torch.autograd.grad(aim, theta)
        return total.detach() - 0.5 * u.square().sum(-1) - self.forest.log_det(root), gradient

    # ---------------------------------------------------------------------------- the modes of the effects

    def _parts(self, count: int, table: int) -> Iterator[slice]:
        """Ranges of values of the globals, so that neither matrices nor tables of rows are large."""
        most = max(1, self.settings.at_once // max(table, self.forest.shape[0]))
        for low in range(0, count, most):
            yield slice(low, min(count, low + most))

    def _linear(self, theta: Tensor) -> _Linear:
        """The linear predictor at values of the globals."""
        a, xis, phi = self.coordinates.split(theta)
        pairs = zip(self.factors, xis, strict=True)
        designs = [small_blocks.product(of.Z, covariance_root(xi, of.Z.shape[1])) for of, xi in pairs]
        return _Linear(designs, a @ self.X.mT + self.offset, phi)

    def _jet(self, of: _Linear, u: Tensor) -> tuple[Tensor, ...]:
        """-log p(y | η, φ) of rows, times their weights, with two derivatives in η, (S, N)."""
        eta = of.fixed + self.arranged.predictor(of.designs, u)
        jet = self.family.jet(eta.mT, tuple(part[:, None] for part in self.y), of.phi)
        return tuple(self.weights * part.mT for part in jet)

    def _factored(self, of: _Linear, curvature: Tensor) -> tuple[Structured, Structured]:
        """The roots of H with curvatures clamped to ≥ 0, and of H as it is where that is positive definite."""
        self.factorisations += len(curvature)

        def factor(weights: Tensor) -> tuple[Structured, Tensor]:
            H = self.arranged.gram(of.designs, weights)
            return self.forest.cholesky(self.forest.with_diagonal(H, self.forest.diagonal(H) + 1))

        root, _ = factor(curvature.clamp_min(0.0))
        if bool((curvature >= 0).all()):
            return root, root
        true, ok = factor(curvature)
        return root, torch.where(ok[:, None], true, root)

    def _quadratic(self, of: _Linear, u: Tensor) -> tuple[Tensor, Tensor, Structured]:
        """-log p(y, u | θ) up to a constant (S,), its gradient (S, D), and the root of its Hessian."""
        f, slope, curvature = self._jet(of, u)
        gradient = self.arranged.gathered(of.designs, slope) + u
        return f.sum(-1) + 0.5 * u.square().sum(-1), gradient, self._factored(of, curvature.clamp_min(0.0))[0]

    def _modes(self, of: _Linear, u: Tensor, end: float) -> tuple[Tensor, Structured]:
        """Damped Newton steps: û (S, D), and the root of the Hessian where the last step began."""
        value, gradient, root = self._quadratic(of, u)
        size = torch.ones_like(value)
        for _ in range(self.settings.steps):
            half = self.forest.solve(root, gradient)
            step = self.forest.tsolve(root, half)
            if self.exact or bool((0.5 * half.square().sum(-1) < end).all()):
                return u - step, root
            new = u - size[:, None] * step
            there = self._quadratic(of, new)
            better = there[0] <= value + 1e-12 * value.abs()  # what rounding leaves
            u, gradient, root = (
                torch.where(better[:, None], a, b) for a, b in zip((new, *there[1:]), (u, gradient, root), strict=True)
            )
            value = torch.where(better, there[0], value)
            size = torch.where(better, (2 * size).clamp_max(1.0), 0.5 * size)
        return u, root

    # ---------------------------------------------------------------------------- corrected

    def log_joint(self, theta: Tensor, modes: Tensor) -> Tensor:
        """Evaluate the corrected log joint of draws, (S,)."""
        return self.values(theta, modes, self.nodes, True, self.z).value

    @torch.no_grad()
    def values(
        self,
        theta: Tensor,  # (S, dim)
        modes: Tensor,  # near the modes, (D, S, 1)
        nodes: int,
        one_step: bool = False,
        z: Tensor | None = None,  # (M, 1, D), normal draws, those of the largest factor unused; None: v = its mode
    ) -> Valued:
        """Compute log p(y, θ) by nodes for the largest factor and M draws of the others."""
        found, value = torch.empty_like(modes), theta.new_empty(len(theta))
        points = max(nodes**self.r, 0 if z is None else len(z) * min(self.correction.few, nodes) ** self.r)
        for part in self._parts(len(theta), len(self.X) * points):
            of = self._linear(theta[part])
            u, root = self._modes(of, modes[:, part, 0].mT, self.correction.trust if one_step else self.correction.end)
            if nodes == 1:  # Laplace's approximation
                f = self._jet(of, u)[0].sum(-1)
                value[part] = -f - 0.5 * u.square().sum(-1) - self.forest.log_det(root)
            else:
                value[part] = self._of_draws(of, u, root, torch.zeros_like(u)[None], nodes)[0]
            if z is not None:
                few = min(self.correction.few, nodes)
                drawn = self._of_draws(of, u, root, torch.cat([torch.zeros_like(z[:1]), z]).expand(-1, len(u), -1), few)
                value[part] += drawn[1:].logsumexp(0) - math.log(len(z)) - drawn[0]
            found[:, part, 0] = u.mT
        value = (value + self.priors.log_prob(theta)).nan_to_num(nan=-torch.inf, posinf=-torch.inf)
        return Valued(value, None, found, value[None])

    def _of_draws(
        self,
        of: _Linear,
        u: Tensor,  # (S, D)
        root: Structured,  # T, (S, E)
        z: Tensor,  # (M, S, D)
        nodes: int,
    ) -> Tensor:
        """The logarithms of M estimates of p(y | θ), (M, S)."""
        leaves = self.arranged.places[self.leaf]
        z = z.clone()
        z[..., leaves] = 0.0
        points = u + self.forest.tsolve(root, z)
        own = points[..., leaves].square().sum(-1)
        node, log_w = normal_rule(nodes, self.r, u)
        integrand, _ = self._of_leaves(of, points, root, node.expand(*u.shape[:1], len(own), -1, -1)[:, :, None])
        inner = torch.logsumexp(integrand + log_w + 0.5 * node.square().sum(-1), -1).sum(0).mT
        others = 0.5 * (z.square().sum(-1) - points.square().sum(-1) + own)
        return inner + others - self.forest.log_det(root)

    def _of_leaves(
        self,
        of: _Linear,
        points: Tensor,  # u, (M, S, D), the groups of the largest factor at their means given the others
        root: Structured,  # (S, E)
        z: Tensor,  # (S, M, n or 1, K, r)
    ) -> tuple[Tensor, Tensor]:
        """log p(y_j | w, v, θ) - ½|w|² of groups j of the largest factor at w = mean + L⁻ᵀz, (n, S, M, K), and w."""
        leaf = self.leaf
        n, r, groups = self.arranged.n[leaf], self.arranged.r[leaf], self.arranged.groups[leaf]
        square = self.forest.parts(root)[0].square  # (S, n, r, r)
        apart = small_blocks.tsolve(square[:, None], z.mT.expand(-1, -1, n, -1, -1)).mT  # (S, M, n, K, r)
        w = points[..., self.arranged.places[leaf]].unflatten(-1, (n, r)).transpose(0, 1)[..., None, :] + apart
        eta = (of.fixed + self.arranged.predictor(of.designs, points)).permute(2, 1, 0)[..., None]  # (N, S, M, 1)
        design = of.designs[leaf].transpose(0, 1)[:, :, None, None, :]  # (N, S, 1, 1, r)
        eta = eta + (apart.permute(2, 0, 1, 3, 4)[groups] * design).sum(-1)
        log_p = self.family.log_prob(eta, tuple(part[:, None, None, None] for part in self.y), of.phi[:, None, None])
        log_p = self.weights[:, None, None, None] * log_p
        data = log_p.new_zeros(n, *log_p.shape[1:]).index_add(0, groups, log_p)
        w = w.permute(2, 0, 1, 3, 4)  # (n, S, M, K, r)
        return data - 0.5 * w.square().sum(-1), w

    # ---------------------------------------------------------------------------- effects given the globals

    @torch.no_grad()
    def draw(
        self,
        theta: Tensor,  # (S, dim)
        modes: Tensor,  # near the modes, (D, S, 1)
        generator: torch.Generator,
    ) -> tuple[Tensor, ...]:
        """Draw b = C u of the groups of each factor given the globals, (S, n, r).

        Of some candidates for the effects of all factors but the largest one is taken by its importance weight, and
        given these of some candidates for each group of the largest factor.
        """
        leaf, n, r, D = self.leaf, self.arranged.n[self.leaf], self.r, self.arranged.dim
        count = 1 if self.exact else self.correction.candidates
        drawn = theta.new_empty(len(theta), D)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(theta)

        def chosen(log_weights: Tensor) -> Tensor:  # along the last axis
            share = log_weights.nan_to_num(nan=-torch.inf).softmax(-1).nan_to_num(1.0).cumsum(-1)
            at = torch.rand(share.shape[:-1], generator=generator, dtype=torch.float64, device="cpu").to(share)[
                ..., None
            ]
            return (share < at * share[..., -1:]).sum(-1).clamp_max(share.shape[-1] - 1)

        for part in self._parts(len(theta), len(self.X) * count * self.nodes**r):
            of = self._linear(theta[part])
            u, root = self._modes(of, modes[:, part, 0].mT, self.correction.end)
            z = noise(count, len(u), D)
            if self.others and count > 1:
                best = chosen(self._of_draws(of, u, root, z, min(self.correction.few, self.nodes)).mT)
                z = z.gather(0, best[None, :, None].expand(1, -1, D))
            else:
                z = z[:1]
            z[..., self.arranged.places[leaf]] = 0.0
            points = u + self.forest.tsolve(root, z)
            own = noise(len(u), 1, n, count, r)
            integrand, w = self._of_leaves(of, points, root, own)
            best = chosen(integrand[:, :, 0] + 0.5 * own[:, 0].square().sum(-1).transpose(0, 1))  # (n, S)
            w = w[:, :, 0].gather(2, best[..., None, None].expand(-1, -1, 1, r))[:, :, 0]
            drawn[part] = points[0]
            drawn[part, self.arranged.places[leaf]] = w.transpose(0, 1).flatten(1)
        xis = self.coordinates.split(theta)[1]
        pairs = zip(self.arranged.places, xis, self.arranged.r, strict=True)
        return tuple(
            small_blocks.product(drawn[:, at].unflatten(-1, (-1, r)), covariance_root(xi, r).mT) for at, xi, r in pairs
        )


# ------------------------------------------------------------------------------------------------- the posterior


class Mirrored(NamedTuple):
    """A proposal for standard deviations that may be 0: a mixture in τ in the place of log τ, mirrored at 0.

    The density of τ is flat towards 0, where that of log τ has an exponential tail. With x the globals, τ itself for
    some of its coordinates, draws are |x| there, and their density is the sum of those of all signs.
    """

    inner: Mixture  # of x
    scales: Tensor  # which coordinates of θ are log τ of these, (k,)

    @classmethod
    def of(cls, before: Weighing, scales: Tensor, frame: Frame, settings: FitSettings) -> Self | None:
        """The proposal with the moments of weighted draws; None where they have no covariance."""
        weights, x = before.weighted.weights, before.theta.clone()
        x[:, scales] = x[:, scales].exp()
        mean = weights @ x
        apart = x - mean
        root, ok = cholesky(apart.mT @ (weights[:, None] * apart))
        even = torch.ones_like(root[:2])
        return cls(Mixture(mean, root, even, frame, settings.wider, settings.dof), scales) if bool(ok) else None

    def again(self, draws: Weighing, settings: FitSettings) -> Self | None:
        """The same with the moments of other draws."""
        return self.of(draws, self.scales, self.inner.frame, settings)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw θ, (count, dim)."""
        x = self.inner.sample(count, generator)
        x[:, self.scales] = x[:, self.scales].abs().clamp_min(torch.finfo(x.dtype).tiny).log()
        return x

    def log_density(self, theta: Tensor) -> Tensor:
        """The log density of each, (S,)."""
        x = theta.clone()
        x[:, self.scales] = x[:, self.scales].exp()
        signs = torch.cartesian_prod(*[theta.new_tensor([1.0, -1.0])] * len(self.scales)).reshape(-1, len(self.scales))
        found = []
        for sign in signs:
            turned = x.clone()
            turned[:, self.scales] *= sign
            found.append(self.inner.log_density(turned))
        return torch.stack(found).logsumexp(0) + theta[:, self.scales].sum(-1)

    def modes(self, theta: Tensor) -> Tensor:
        """About the modes of the effects, (n, S, r)."""
        return self.inner.modes(theta)


class SeveralPosterior(Posterior):
    """The posterior of the globals of a model with K ≥ 1 factors.

    Attributes:
        joint: the log joint of the globals.
        mode: of the globals by Laplace's approximation, (dim,).
        frame: the globals about their mode.
        agreed: whether other normal draws would give nearly the same weights.
    """

    def __init__(
        self, joint: ByLaplace, found: Found, frame: Frame, settings: FitSettings, seed: int, progress: bool
    ) -> None:
        self.joint, self.coordinates, self.settings = joint, joint.coordinates, settings
        self.mode, self.frame = found.theta, frame
        self.converged, self.reason, self.gradients = found.converged, found.reason, joint.gradients
        generator = torch.Generator().manual_seed(seed)
        weigher = Weigher(joint, frame, float(found.at.value[0]), settings, generator)
        mirrored = self._mirrored(weigher)
        self.agreed = self._refined(generator)
        weigher.value = float(joint.log_joint(frame.theta[None], frame.effects))
        best, how = self._weighted(weigher, mirrored)
        if found.converged and best.weighted.k_hat <= USELESS:
            best = weigher.enough(best, progress)
        self.weighted, self.log_evidence = best.weighted, best.log_evidence
        self.method = self._said(how)

    def _mirrored(self, weigher: Weigher) -> Mirrored | None:
        """A proposal where standard deviations may be 0, of draws weighted by Laplace's approximation."""
        sds, place, wide = self.frame.root.norm(dim=1).tolist(), self.coordinates.p, list[int]()
        for r, length in zip(self.coordinates.sizes, self.coordinates.lengths[1:], strict=False):
            wide += [k for k in range(place, place + r) if sds[k] > self.settings.grid_above]
            place += length
        if not wide:
            return None
        wide = sorted(wide, key=lambda k: -sds[k])[: self.joint.correction.mirrored]
        draws = weigher.of_mixture(self.frame.theta, self.frame.root, self.settings.draws)
        first = Mirrored.of(draws, torch.tensor(wide, device=draws.theta.device), self.frame, self.settings)
        return None if first is None else first.again(weigher.weigh(first, self.settings.draws), self.settings)

    def _refined(self, generator: torch.Generator) -> bool:
        """Choose nodes and normal draws by what they change between draws near the posterior."""
        joint, settings, frame = self.joint, self.settings, self.frame
        joint.nodes = enough_nodes(joint, frame, settings, generator)  # type: ignore[arg-type]  # it asks for r and values
        if joint.exact or not joint.others:
            return True
        far = torch.randn(settings.looked, len(frame.theta), generator=generator, dtype=torch.float64, device="cpu").to(
            frame.theta
        )
        theta = frame.theta + settings.far * far @ frame.root.mT
        modes = joint.values(theta, frame.modes(theta), 1).modes
        for pairs in joint.correction.pairs:
            z = torch.randn(2, pairs, 1, joint.arranged.dim, generator=generator, dtype=torch.float64, device="cpu").to(
                theta
            )
            joint.z, other = (torch.cat([half, -half]) for half in z)
            one, two = (joint.values(theta, modes, joint.nodes, True, half).value for half in (joint.z, other))
            if float((one - two).std()) < joint.correction.agreed:
                return True
        return False

    def _weighted(self, weigher: Weigher, mirrored: Mirrored | None) -> tuple[Weighing, str]:
        """Draws with weights, and how they were drawn."""
        best, settings = None, self.settings
        for _ in range(settings.again):
            if mirrored is None or (best is not None and best.fine(settings)):
                break
            found = weigher.weigh(mirrored, settings.draws)
            best = found if best is None else max(best, found, key=lambda one: one.merit)
            mirrored = mirrored.again(found, settings)
        if best is None or not best.fine(settings):
            other = weigher.from_mixture(settings.draws)
            if best is None or other.merit > best.merit:
                return other, "a Gaussian and a wider t distribution about their mode"
        return best, "a Gaussian and a wider t distribution of standard deviations, mirrored at 0"

    def _said(self, how: str) -> str:
        """What was computed, one sentence."""
        joint = self.joint
        if joint.exact:
            by = "in closed form"
        else:
            leaf = joint.factors[joint.leaf].name
            by = f"by Laplace's approximation, corrected by {joint.nodes} nodes for each group of {leaf}"
            if len(joint.factors) > 1:
                by += f" and {0 if joint.z is None else len(joint.z)} draws of the other effects"
                by += "" if self.agreed else ", with which other draws do not quite agree"
        return f"Random effects are integrated out {by}; draws of {how} are weighted to the posterior."

    def effects(self, theta: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw the effects of all groups given the globals, (S, n, r), of centred and scaled columns."""
        parts = theta.split(self.joint.together)
        drawn = [self.joint.draw(part, self.frame.modes(part), generator) for part in parts]
        return tuple(torch.cat(of) for of in zip(*drawn, strict=True))

    def of_groups(self, theta: Tensor) -> Tensor:
        """Refuse: with several factors the rows of a group depend on those of others.

        Raises:
            InputError: always.
        """
        raise InputError("the log density of a group is for models of one grouping factor; this one has several.")


def integrate_several(
    design: Design,
    family: Family,
    coordinates: Coordinates,
    priors: Priors,
    settings: FitSettings,
    seed: int,
    progress: bool,
    correction: Correction | None = None,
) -> SeveralPosterior:
    """Find the posterior of the globals of a design with several grouping factors, nested or crossed.

    Use it for pupils in classes in schools, for answers of subjects to items, and other rows that belong to groups of
    several kinds. With one factor it gives what `torchngvi.tables.globals.integrate` gives, by the same quadrature.
    The formulas are those of `torchngvi.tables.several`.

    Args:
        design: the rows, with K ≥ 1 factors.
        family: the density of y given the linear predictor.
        coordinates: of the globals.
        priors: of the globals.
        settings: all numbers of the fit.
        seed: of all draws.
        progress: show a bar where draws are doubled.
        correction: the numbers that several factors need; None for those of `Correction`.

    Returns:
        The posterior. Where the search has found no mode, ``converged`` is False, and ``reason`` says why; where other
        normal draws would give other weights, ``agreed`` is False, and ``method`` says so.

    Raises:
        InputError: crossed factors of more effects than a dense matrix of them has room for.

    >>> from torchngvi.tables.design import design_of_arrays
    >>> from torchngvi.tables.families import family_of
    >>> from torchngvi.tables.priors import settle
    >>> subject, item = torch.arange(60) // 6, torch.arange(60) % 6
    >>> one = torch.ones(60, 1, dtype=torch.float64)
    >>> y = ((subject * item + subject) % 3).double()
    >>> design = design_of_arrays(one, y, {"subject": (one, subject), "item": (one, item)})
    >>> coordinates, family = Coordinates(design, 0), family_of("poisson")
    >>> priors = settle(design, family, coordinates, None)
    >>> found = integrate_several(design, family, coordinates, priors, FitSettings(), 0, False)
    >>> found.converged, found.weighted.k_hat < 0.7
    (True, True)
    >>> [effects.shape for effects in found.effects(found.weighted.theta[:3], torch.Generator())]
    [torch.Size([3, 10, 1]), torch.Size([3, 6, 1])]
    """
    joint = ByLaplace(design, family, coordinates, priors, settings.integration, correction)
    found = search(joint, settings)
    frame = Frame.around(joint, found, settings.apart)
    return SeveralPosterior(joint, found, frame, settings, seed, progress)
