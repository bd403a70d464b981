"""The model of a table, and the posterior of its globals with several grouping factors, nested or crossed.

With several factors it is Laplace's approximation, corrected.

With the effects b_k = C_k u_k of all factors, u ~ N(0, I) in D dimensions, û the mode of log p(y, u | θ), A the rows of
the designs Z_k C_k, W the curvatures of -log p(y | η, φ) there, and H = I + AᵀWA,

    log p(y | θ) ≈ log p(y | û, θ) - ½|û|² - ½ log|H|

is Laplace's approximation (Tierney and Kadane 1986; Bates and others 2015 for the sparse factor H = T Tᵀ, which has the
pattern of a forest).  Its gradient follows û: with λ = ½ H⁻¹ ∂log|H|/∂u,

    d/dθ = ∂/∂θ [log p(y | û, θ) - ½ log|H| + λᵀ ∂log p(y, u | θ)/∂u],

since dû/dθ = H⁻¹ ∂²log p/∂u∂θ.  The search for the mode of the globals takes this.  The weights of draws are corrected:
the effects v of all factors but the largest are drawn from the Gaussian N(û, H⁻¹), and given these the effects w_j of
the groups of the largest, which are then independent, are integrated by nodes (see `torchngvi.tables.integrated`),

    p(y | θ) ≈ 1/M Σ_m p(v_m)/N(v_m; û, H⁻¹) Π_j ∫ p(y_j | w_j, v_m, θ) N(w_j; 0, I) dw_j,

without a bias up to that of the nodes (Durbin and Koopman 1997).  The M normal draws, in pairs z and -z, are the same
for all θ, so that differences between values of θ have little noise.  With Gaussian noise M = 1 with one node is exact.

A row couples one group of each factor, so that its groups must lie on one path from a leaf to the root of the forest.
Factors within which others are nested, as schools hold classes, make a chain: the groups of the innermost are leaves,
and each group is below the one that holds it.  The effects of all other factors, which are crossed with these, stand in
the root: u = (those of the leaves, of the next level, ..., of the crossed factors).  Matrices Σ_i w_i a_i a_iᵀ over
rows whose entries are the designs of their groups have the pattern of the forest, and so have their Cholesky factors.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchngvi.arguments import read_seed
from torchngvi.diagnostics.importance import USELESS
from torchngvi.errors import InputError
from torchngvi.messages import listed, needing
from torchngvi.models.likelihoods import GaussianNoise, Likelihood, NegativeBinomial, StudentT
from torchngvi.models.mixed_prior import MixedPrior, ScalePrior
from torchngvi.numerics import linalg
from torchngvi.numerics.special import normal_rule
from torchngvi.structures.forest import Forest
from torchngvi.structures.pattern import Structured
from torchngvi.tables.design import Formula, design_of_arrays, usual_family
from torchngvi.tables.families import Family, Held, Multinomial, Ordinal, family_of
from torchngvi.tables.globals import (
    FitSettings,
    Found,
    Frame,
    Mixture,
    Weigher,
    Weighing,
    enough_nodes,
    integrate,
    moments,
    search,
)
from torchngvi.tables.integrated import Integration, LogJoint, Valued, choose, find_start, finite
from torchngvi.tables.parts import (
    Coordinates,
    Design,
    Factor,
    Posterior,
    covariance_root,
    draw_normal,
    draw_uniform,
    replace_where,
    take_rows,
)
from torchngvi.tables.priors import LKJ, Exponential, HalfNormal, HalfT, Normal, Priors, settle
from torchngvi.tables.result import TableResult
from torchngvi.tables.table import warn_of


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


LARGEST_ROOT = 4_000  # crossed effects, whose matrix is dense: a factor of it takes about a second
MOST_ENTRIES = 2**27  # of a matrix in the pattern: one gigabyte


class _Pair(NamedTuple):
    """The block of two factors in the stored matrix: where the entries of each row stand."""

    left: int  # the factor of the rows of the block
    right: int  # of its columns
    places: Tensor  # (N · r_left · r_right,)


def holds(
    inner: Tensor,  # (N,)
    outer: Tensor,  # (N,)
) -> bool:
    """Whether all rows of each inner group are of one outer group."""
    of = outer.new_zeros(int(inner.max()) + 1)
    of[inner] = outer
    return bool((of[inner] == outer).all())


def chain_of(factors: Sequence[Factor]) -> tuple[int, ...]:
    """Find the chain of nested factors, leaves first, that leaves the fewest effects in the root.

    >>> one = torch.ones(4, 1)
    >>> groups = {"school": [0, 0, 1, 1], "class": [0, 1, 2, 3], "teacher": [0, 1, 0, 1]}
    >>> factors = [Factor(k, ("1",), tuple(map(str, set(g))), one, torch.tensor(g)) for k, g in groups.items()]
    >>> chain_of(factors)
    (1, 0)
    """
    sizes = [len(of.levels) * of.Z.shape[1] for of in factors]
    order = sorted(range(len(factors)), key=lambda k: -len(factors[k].levels))
    chains = []
    for leaf in order:
        chain = [leaf]
        for k in order:
            if k not in chain and holds(factors[chain[-1]].groups, factors[k].groups):
                chain.append(k)
        chains.append(tuple(chain))
    return max(chains, key=lambda chain: sum(sizes[k] for k in chain))


class Arranged:
    """The effects u of all groups of K ≥ 1 factors, as the coordinates of a forest.

    >>> one = torch.ones(4, 1)
    >>> subject, item = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 0, 1])
    >>> of = Arranged([Factor("s", ("1",), ("a", "b", "c"), one, subject), Factor("i", ("1",), ("d", "e"), one, item)])
    >>> of.structure, of.chain, of.crossed
    (Forest(3 of 1 below 2, 1 of 2), (0,), (1,))
    """

    def __init__(self, factors: Sequence[Factor]) -> None:
        self.groups = [of.groups for of in factors]
        self.n, self.r = [len(of.levels) for of in factors], [of.Z.shape[1] for of in factors]
        self.chain = chain_of(factors)  # the factors that make the levels of the forest, leaves first
        self.crossed = tuple(k for k in range(len(factors)) if k not in self.chain)  # those in its root
        self.places = [slice(0)] * len(factors)  # of the effects of each factor in u
        start = 0
        for k in (*self.chain, *self.crossed):
            self.places[k] = slice(start, start + self.n[k] * self.r[k])
            start = self.places[k].stop
        self.dim, self.root = start, sum(self.n[k] * self.r[k] for k in self.crossed)
        self._check_size()
        sizes = [self.r[k] for k in self.chain for _ in range(self.n[k])]
        self.structure = Forest(self._parents(), (*sizes, self.root) if self.root else tuple(sizes))
        self.pairs = self._pairs()

    def predictor(
        self,
        designs: Sequence[Tensor],  # of each factor, (*batch, N, r)
        u: Tensor,  # (*batch, dim)
    ) -> Tensor:
        """Compute Σ_k a_kᵀu_k[group], (*batch, N)."""
        total = designs[0].new_zeros(())
        for a, at, groups, r in zip(designs, self.places, self.groups, self.r, strict=True):
            total = total + (u[..., at].unflatten(-1, (-1, r)).index_select(-2, groups) * a).sum(-1)
        return total

    def gathered(
        self,
        designs: Sequence[Tensor],  # (S, N, r)
        slope: Tensor,  # (S, N)
    ) -> Tensor:
        """Sum slope · a over the rows, (S, dim)."""
        S = len(slope)
        out = slope.new_zeros(S, self.dim)
        for a, at, groups, r in zip(designs, self.places, self.groups, self.r, strict=True):
            index = (groups[:, None] * r + torch.arange(r, device=groups.device) + at.start).flatten()
            out = out.scatter_add(-1, index.expand(S, -1), (slope[..., None] * a).flatten(-2))
        return out

    def gram(
        self,
        designs: Sequence[Tensor],  # (S, N, r)
        weights: Tensor,  # (S, N)
    ) -> Structured:
        """Sum weight · a aᵀ over the rows, (S, E), of squares at least the lower triangles."""
        S = len(weights)
        out = weights.new_zeros(S, *self.structure.shape)
        for pair in self.pairs:
            left, right = weights[..., None] * designs[pair.left], designs[pair.right]
            entries = (left[..., :, None] * right[..., None, :]).flatten(-3)
            out.scatter_add_(-1, pair.places.expand(S, -1), entries)
        return out

    def variances(
        self,
        designs: Sequence[Tensor],  # (S, N, r)
        V: Structured,  # (S, E), symmetric squares
    ) -> Tensor:
        """Compute aᵀVa of each row, (S, N), differentiable in the designs."""
        total = V.new_zeros(())
        for pair in self.pairs:
            left, right = designs[pair.left], designs[pair.right]
            block = V[:, pair.places].unflatten(-1, (-1, left.shape[-1], right.shape[-1]))
            term = ((block * right[..., None, :]).sum(-1) * left).sum(-1)
            total = total + (term if pair.left == pair.right else 2 * term)
        return total

    def _pairs(self) -> list[_Pair]:
        """The blocks on and below the diagonal that a row touches."""
        kinds, starts, end = self.structure.kinds, [], 0
        for kind in kinds:
            starts.append((end, end + kind.nodes * kind.size**2))
            end += kind.nodes * kind.size * (kind.size + kind.above)
        origin = self.dim - self.root
        pairs = []
        for level, k in enumerate(self.chain):
            r, groups, (square, border) = self.r[k], self.groups[k], starts[level]
            pairs.append(self._pair(k, k, square + groups * r * r, r))
            row = border + groups * kinds[level].above * r  # of the first ancestor
            for above in self.chain[level + 1 :]:
                pairs.append(self._pair(above, k, row, r))
                row = row + self.r[above] * r
            for c in self.crossed:
                inside = self.places[c].start - origin + self.groups[c] * self.r[c]
                pairs.append(self._pair(c, k, row + inside * r, r))
        for i, left in enumerate(self.crossed):
            for right in self.crossed[: i + 1]:
                row, column = (self.places[k].start - origin + self.groups[k] * self.r[k] for k in (left, right))
                pairs.append(self._pair(left, right, starts[-1][0] + row * self.root + column, self.root))
        return pairs

    def _pair(self, left: int, right: int, base: Tensor, stride: int) -> _Pair:
        """The block whose first entries stand at ``base`` (N,), its rows ``stride`` apart."""
        i, j = (torch.arange(self.r[k], device=base.device) for k in (left, right))
        return _Pair(left, right, (base[:, None, None] + i[:, None] * stride + j).flatten())

    def _parents(self) -> tuple[int, ...]:
        """The parent of each node: of a group the one that holds it, of the last level the root, if there is one."""
        parents: list[int] = []
        end = 0
        for level, k in enumerate(self.chain):
            end += self.n[k]
            if level + 1 == len(self.chain):
                parents += [end if self.root else -1] * self.n[k]
                continue
            held = self.groups[k].new_zeros(self.n[k])
            held[self.groups[k]] = self.groups[self.chain[level + 1]]
            parents += (end + held).tolist()
        return (*parents, -1) if self.root else tuple(parents)

    def _check_size(self) -> None:
        """Refuse what would not fit into the memory."""
        above, entries = self.root, self.root**2
        for k in reversed(self.chain):
            entries += self.n[k] * self.r[k] * (self.r[k] + above)
            above += self.r[k]
        if self.root > LARGEST_ROOT or entries > MOST_ENTRIES:
            raise InputError(
                f"crossed factors need a dense matrix of their effects, of at most {LARGEST_ROOT} rows, and at most "
                f"{MOST_ENTRIES} numbers with its borders to the groups of the largest factor; got {self.root} rows "
                f"and {entries} numbers. Leave out a factor, or group its levels more coarsely."
            )


# ------------------------------------------------------------------------------------------------- the log joint


class _Linear(NamedTuple):
    """The linear predictor as a function of u at S values of the globals."""

    designs: list[Tensor]  # Z_k C_k, (S, N, r)
    fixed: Tensor  # X a + offset, (S, N)
    phi: Tensor  # (S, nphi)


class ByLaplace(LogJoint):
    """log p(y, θ) of a design with K ≥ 1 factors, all constants included, by Laplace's approximation or corrected.

    A value costs one factorisation of a matrix in the pattern of the forest.
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
        pairs = zip(design.factors, coordinates.Z, strict=True)
        scaled = design._replace(X=coordinates.X, factors=tuple(of._replace(Z=Z) for of, Z in pairs))
        self.rows = take_rows(scaled, design.weights > 0)
        self.X, self.offset, self.weights, self.y = self.rows.X, self.rows.offset, self.rows.weights, self.rows.y
        self.arranged = Arranged(self.rows.factors)
        self.forest = self.arranged.structure
        self.leaf = self.arranged.chain[0]  # the largest factor, or the innermost of nested ones, integrated by nodes
        self.r, self.others = self.arranged.r[self.leaf], self.arranged.dim > self.arranged.places[self.leaf].stop
        self.exact = family.name == "gaussian"  # log p(y, u) is a parabola in u
        self.gradients = 0
        self.scales = coordinates.p
        self.begin, unit = find_start(self.rows, family, coordinates)
        self.difference = torch.full_like(self.begin, self.settings.difference)
        self.difference[: self.scales] *= unit
        self.together = max(1, 10 * self.settings.at_once // self.arranged.dim)
        self.nodes = 1
        self.z: Tensor | None = None

    # ---------------------------------------------------------------------------- what the search asks for

    def start(self) -> tuple[Tensor, Tensor]:
        """Where a search begins: see `find_start`."""
        return self.begin, self.begin.new_zeros(self.arranged.dim, 1, 1)

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
        value = finite(value)
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
        pairs = zip(self.rows.factors, xis, strict=True)
        designs = [linalg.small_product(of.Z, covariance_root(xi, of.Z.shape[1])) for of, xi in pairs]
        return _Linear(designs, a @ self.X.mT + self.offset, phi)

    def _jet(self, of: _Linear, u: Tensor) -> tuple[Tensor, ...]:
        """-log p(y | η, φ) of rows, times their weights, with two derivatives in η, (S, N)."""
        eta = of.fixed + self.arranged.predictor(of.designs, u)
        jet = self.family.jet(eta.mT, tuple(part[:, None] for part in self.y), of.phi)
        return tuple(self.weights * part.mT for part in jet)

    def _factored(self, of: _Linear, curvature: Tensor) -> tuple[Structured, Structured]:
        """The roots of H with curvatures clamped to ≥ 0, and of H as it is where that is positive definite."""

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
            u, value, gradient, root = replace_where(better, (new, *there), (u, value, gradient, root))
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
        value = finite(value + self.priors.log_prob(theta))
        return Valued(value, torch.zeros_like(theta), found, value[None])

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
        apart = linalg.small_tsolve(square[:, None], z.mT.expand(-1, -1, n, -1, -1)).mT  # (S, M, n, K, r)
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

        def best_of(log_weights: Tensor) -> Tensor:
            return choose(log_weights, draw_uniform(*log_weights.shape[:-1], generator=generator, like=theta))

        for part in self._parts(len(theta), len(self.X) * count * self.nodes**r):
            of = self._linear(theta[part])
            u, root = self._modes(of, modes[:, part, 0].mT, self.correction.end)
            z = draw_normal(count, len(u), D, generator=generator, like=theta)
            if self.others and count > 1:
                best = best_of(self._of_draws(of, u, root, z, min(self.correction.few, self.nodes)).mT)
                z = z.gather(0, best[None, :, None].expand(1, -1, D))
            else:
                z = z[:1]
            z[..., self.arranged.places[leaf]] = 0.0
            points = u + self.forest.tsolve(root, z)
            own = draw_normal(len(u), 1, n, count, r, generator=generator, like=theta)
            integrand, w = self._of_leaves(of, points, root, own)
            best = best_of(integrand[:, :, 0] + 0.5 * own[:, 0].square().sum(-1).transpose(0, 1))  # (n, S)
            w = w[:, :, 0].gather(2, best[..., None, None].expand(-1, -1, 1, r))[:, :, 0]
            drawn[part] = points[0]
            drawn[part, self.arranged.places[leaf]] = w.transpose(0, 1).flatten(1)
        xis = self.coordinates.split(theta)[1]
        pairs = zip(self.arranged.places, xis, self.arranged.r, strict=True)
        return tuple(
            linalg.small_product(drawn[:, at].unflatten(-1, (-1, r)), covariance_root(xi, r).mT) for at, xi, r in pairs
        )


# ------------------------------------------------------------------------------------------------- the posterior


class Mirrored(NamedTuple):
    """A proposal for standard deviations that may be 0, whose density is flat there: in τ itself, mirrored at 0."""

    inner: Mixture  # of x
    scales: Tensor  # which coordinates of θ are log τ of these, (k,)

    @classmethod
    def of(cls, before: Weighing, scales: Tensor, frame: Frame, settings: FitSettings) -> Self | None:
        """The proposal with the moments of weighted draws; None where they have no covariance."""
        x = before.theta.clone()
        x[:, scales] = x[:, scales].exp()
        mean, root = moments(x, before.weighted.weights)
        even = torch.ones_like(x[:1]).expand(2, -1)
        return None if root is None else cls(Mixture(mean, root, even, frame, settings.wider, settings.dof), scales)

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
    """The posterior of the globals of a model with K ≥ 1 factors."""

    def __init__(
        self, joint: ByLaplace, found: Found, frame: Frame, settings: FitSettings, seed: int, progress: bool
    ) -> None:
        self.joint, self.coordinates, self.settings = joint, joint.coordinates, settings
        self.mode, self.frame = found.theta, frame
        self.converged, self.reason, self.gradients = found.converged, found.reason, joint.gradients
        generator = torch.Generator().manual_seed(seed)
        weigher = Weigher(joint, frame, float(found.at.value[0]), settings, generator)
        mirrored = self._mirrored(weigher)
        self.agreed = self._refined(generator)  # whether other normal draws would give nearly the same weights
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
        theta = frame.draw_near(settings, generator)
        modes = joint.values(theta, frame.modes(theta), 1).modes
        for pairs in joint.correction.pairs:
            z = draw_normal(2, pairs, 1, joint.arranged.dim, generator=generator, like=theta)
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
            leaf = joint.rows.factors[joint.leaf].name
            by = f"by Laplace's approximation, corrected by {joint.nodes} nodes for each group of {leaf}"
            if len(joint.rows.factors) > 1:
                by += f" and {0 if joint.z is None else len(joint.z)} draws of the other effects"
                by += "" if self.agreed else ", with which other draws do not quite agree"
        return f"Random effects are integrated out {by}; draws of {how} are weighted to the posterior."

    def effects(self, theta: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw the effects of all groups given the globals, (S, n, r), of centred and scaled columns."""
        parts = theta.split(self.joint.together)
        drawn = [self.joint.draw(part, self.frame.modes(part), generator) for part in parts]
        return tuple(torch.cat(of) for of in zip(*drawn, strict=True))

    def of_groups(self, theta: Tensor) -> Tensor:
        """Refuse: with several factors the rows of a group depend on those of others."""
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
    """Find the posterior of the globals of a design with several grouping factors, nested or crossed."""
    joint = ByLaplace(design, family, coordinates, priors, settings.integration, correction)
    found = search(joint, settings)
    frame = Frame.around(joint, found, settings.apart)
    return SeveralPosterior(joint, found, frame, settings, seed, progress)


# ------------------------------------------------------------------------------------ the model of a table


_GONE = {
    "marginalise": "random effects are always integrated out",
    "max_evaluations": "the search for the mode ends by itself",
    "max_seconds": "the search for the mode ends by itself",
}


class TableModel:
    """A regression or a mixed model of some rows, as `regression` makes it of a formula and a table.

    The linear predictor is η = Xβ + Σ_k Z_k b_k + offset with K ≥ 0 grouping factors, the effects of the groups of
    factor k are b_k ~ N(0, Σ_k), and rows have the density p(y | η, φ) of the family.

    Args:
        design: the rows, from a formula or from arrays (`torchngvi.tables.design_of_arrays`).
        family: a word, such as "poisson", or a `torchngvi.tables.Family`.
        priors: by name, see `regression`.
        formula: what has made the design, with which the result predicts tables.

    Attributes:
        design: the rows.
        family: the family, with what it needs of the data.
        coordinates: of the globals.
        priors: of the globals, in the units of the data where none was given.

    Raises:
        InputError: outcomes that the family cannot produce, or a prior of a name that the model does not have.
    """

    def __init__(
        self,
        design: Design,
        family: str | Family = "gaussian",
        *,
        priors: Mapping[str, Any] | str | None = None,
        formula: Formula | None = None,
    ) -> None:
        self.family = family_of(family).settled(design.y, design.weights, design.offset)
        self.design, self.formula = design._replace(y=self.family.checked(design.y)), formula
        if self.family.nominal and design.factors:
            raise InputError(
                f"the {self.family.name} family takes no grouping factors; the model has "
                f"{listed([of.name for of in design.factors])}. For each category but the reference, fit the rows of "
                "the two with the family 'bernoulli'; where categories have an order, take 'ordinal'; or make a factor "
                "of few levels a column."
            )
        own = (self.family.outcomes or ())[1:] if self.family.nominal else ()
        self.coordinates = Coordinates(
            self.design, len(self.family.parameters), thresholds=not self.family.intercept, categories=own
        )
        self.priors: Priors = settle(self.design, self.family, self.coordinates, priors)

    def __repr__(self) -> str:
        what = "arrays" if self.formula is None else repr(self.formula.formula)
        return f"TableModel({what}, {self.family.name}, {len(self.design.X)} rows)"

    def fit(
        self,
        *,
        draws: int | None = None,
        nodes: int | None = None,
        seed: int = 0,
        progress: bool = True,
        settings: FitSettings | None = None,
        **gone: Any,
    ) -> TableResult:
        """Fit the model: the globals with the random effects integrated out, and the effects given the globals.

        The mode of log p(y, θ) over the globals θ is found first, with the effects integrated out by adaptive
        Gauss-Hermite quadrature, in closed form where noise is Gaussian, and by a corrected Laplace approximation for
        several factors. Draws of a Gaussian and of a wider t distribution about the mode are then weighted to the
        posterior. Their k-hat says how far to believe them.

        Args:
            draws: the number of weighted draws of the globals; by default 400, up to 4,096 where the table is small,
                and more where fewer than 200 are effective.
            nodes: the quadrature nodes in each dimension; by default as many as make no difference of 0.02 nats.
            seed: of all draws.
            progress: show a bar.
            settings: all numbers of the fit, see `torchngvi.tables.FitSettings`.

        Returns:
            The result, which prints as a table.

        Raises:
            InputError: settings out of range.
        """
        for name in gone:
            if name not in _GONE:
                raise TypeError(f"fit() got an unexpected keyword argument {name!r}")
            warnings.warn(f"{name}= does nothing any more: {_GONE[name]}.", FutureWarning, stacklevel=2)
        settings = (FitSettings() if settings is None else settings).asked(draws=draws, nodes=nodes)
        seed, design, columns = read_seed("seed", seed), self.design, self.coordinates
        groups = {f"the grouping factor {of.name}": len(of.levels) for of in design.factors}
        own_noise = "residual sd" in self.family.parameters
        parts = self.priors.parts[: len(design.names)]
        warn_of(columns.X, columns.columns, parts, groups, design.names, own_noise)

        refit = partial(self._with_weights, settings=settings, seed=seed)
        fitted = self._integrated(self.design, settings, seed, progress)
        return TableResult(self.design, self.family, fitted, self.priors, formula=self.formula, refit=refit)

    def _with_weights(self, weights: Tensor, settings: FitSettings, seed: int) -> Posterior:
        """The posterior under other weights of the rows, and the same priors."""
        return self._integrated(self.design._replace(weights=weights), settings, seed, False)

    def _integrated(self, design: Design, settings: FitSettings, seed: int, progress: bool) -> Posterior:
        engine = integrate if len(design.factors) <= 1 else integrate_several
        return engine(design, self.family, self.coordinates, self.priors, settings, seed, progress)


class MixedModel(TableModel):
    """A regression or a mixed model of arrays: y ~ family(Xβ + Σ_k Z_k b_k + offset), b_k ~ N(0, Σ_k).

    Use it where the designs are there as arrays; of a table `mixed` makes the same model by a formula.

    Args:
        X: the design of the fixed effects β, (N, p), dense, with a column of ones for an intercept.
        y: the outcome, (N,), or a tuple of it and what is known of it, such as the trials.
        random: a pair (Z, groups), the design of the effects that vary, (N, r), and the group of each row, (N,), whole
            numbers 0, ..., n - 1; a dict from the names of several grouping factors to such pairs; None for a
            regression.
        family: a word, such as "poisson", or a `torchngvi.tables.Family`.
        priors: by name, see `regression`; coefficients are "Intercept" and "x1", "x2", ... unless they have names.
        weights: factors of the log likelihood of each row, (N,), not negative.
        offset: what is added to the linear predictor, (N,), as the logarithm of an exposure.
        names: of the columns of X.
        prior: `torchngvi.models.MixedPrior` of earlier releases, with a warning.

    Raises:
        InputError: arrays of other shapes, groups that are no numbers 0, ..., n - 1 or have no rows, columns of Z that
            depend on one another, outcomes that the family cannot produce, or a prior that the model does not have.

    >>> import torch
    >>> X = torch.ones(6, 1, dtype=torch.float64)
    >>> result = MixedModel(X, [3, 4, 0, 1, 2, 6], (X, [0, 0, 1, 1, 2, 2]), "poisson").fit(progress=False)
    >>> result.summary().random["group"].sd.names
    ('Intercept',)
    """

    def __init__(
        self,
        X: Any,
        y: Any,
        random: Any = None,
        family: str | Family | Likelihood = "bernoulli",
        *,
        priors: Mapping[str, Any] | str | None = None,
        weights: Any = None,
        offset: Any = None,
        names: Sequence[str] | None = None,
        prior: MixedPrior | None = None,
    ) -> None:
        design = design_of_arrays(X, y, random, offset=offset, weights=weights, names=names)
        found = _family(family)
        super().__init__(design, found, priors=_priors(priors, prior, found))


def regression(
    formula: str,
    frame: Any,
    family: str | Family | Likelihood | None = None,
    *,
    priors: Mapping[str, Any] | str | None = None,
    weights: str | Any = None,
    positive: Any = None,
    prior: MixedPrior | None = None,
) -> TableModel:
    """Make a regression or a mixed model of a formula and a table, as R, lme4, brms and bambi do.

    Use it for data in a pandas DataFrame: the result speaks of its columns and groups, predicts new tables, and says
    what a column does on the scale of the outcome. `mixed` is the same function under the name that people look for
    where rows come in groups.

    Args:
        formula: the outcome, fixed effects, and effects that vary over groups, K ≥ 0 factors of them: "y ~ x * z",
            "y ~ log(x) + bs(w, df=4)", "y ~ x + (1 + x | g)", "y ~ x + (1 | a/b)", "prop(s, n) ~ x" for s successes of
            n trials, "censored(time, event) ~ x", "n ~ x + offset(log(days))".
        frame: a `pandas.DataFrame`.
        family: what the outcome is distributed as: "gaussian", "student_t", "bernoulli", "probit", "binomial",
            "beta_binomial", "poisson", "negative_binomial", "zero_inflated_poisson", "hurdle_poisson" and the same of
            negative binomial counts, "ordinal", "ordinal_probit", "multinomial", "beta", "gamma", "weibull",
            "lognormal"; or a `torchngvi.tables.Family` of your own. By default "bernoulli" where the formula or
            ``positive`` says what counts as success, as "died[yes] ~ x", and else "gaussian".
        priors: a mapping from names to priors or their texts, in the units of the table: {"x": Normal(0, 1),
            "1|g": "half_t(3, 1)", "Intercept": ...}. "Intercept" is that at the means of the columns, "b" all other
            coefficients, "sd" and "cor" all standard deviations and correlations over groups, and parameters of the
            family have their own names. The word "flat" makes all of them say nothing. By default those of rstanarm and
            brms: N(0, (2.5 s_y/s_j)²) of the coefficient of column j, half-t(3, 2.5 s_y/s_j) of standard deviations
            over groups, LKJ(1) of correlations, s_y the standard deviation of y under the identity link and else 1.
        weights: factors of the log likelihood of each row: the name of a column, or numbers (N,).
        positive: of two classes the one that counts as success; by default the one that sorts last.
        prior: `torchngvi.models.MixedPrior` of earlier releases, with a warning.

    Returns:
        The model; its ``fit()`` is the answer.

    Raises:
        ImportError: without formulae and pandas.
        InputError: a formula that cannot be read, a table without its columns or with cells that are no numbers, all
            faults in one error; outcomes that the family cannot produce; a prior that the model does not have.

    >>> import pandas
    >>> visits = pandas.DataFrame(
    ...     {"seizures": [3, 4, 0, 1, 2, 6, 1, 0], "week": [0.0, 1.0] * 4, "patient": list("aabbccdd")}
    ... )
    >>> result = regression("seizures ~ week + (1 | patient)", visits, "poisson").fit(progress=False)
    >>> result.summary().fixed.names, result.group_names["patient"]
    (('Intercept', 'week'), ('a', 'b', 'c', 'd'))
    >>> new = result.predict(pandas.DataFrame({"week": [2.0, 2.0], "patient": ["a", "eve"]}))
    >>> bool(new.sd[0] < new.sd[1])  # less is known of a new patient
    True
    """
    with needing("torchngvi.regression", "formula"):
        import formulae  # noqa: F401
        import pandas  # noqa: F401
    found = _family(usual_family(formula, positive) if family is None else family)
    made = Formula(formula, frame, found, weights=weights, positive=positive)
    for note in (*made.notes, *([made.asked] if made.asked else [])):
        warnings.warn(f"{note[0].upper()}{note[1:].rstrip('.')}.", stacklevel=2)
    if made.outcomes is not None and isinstance(found, Ordinal | Multinomial):
        found = type(found)(made.outcomes)
    return TableModel(made.design, found, priors=_priors(priors, prior, found), formula=made)


mixed = regression


def _family(family: Any) -> Family:
    """The family of a word or an object; the likelihoods of `torchngvi.models` hold their parameters."""
    match family:
        case GaussianNoise():
            return Held(family_of("gaussian"), {"residual sd": family.noise})
        case NegativeBinomial():
            return Held(family_of("negative_binomial"), {"size": family.dispersion})
        case StudentT() if family.dof == 4:
            return Held(family_of("student_t"), {"scale": family.scale})
        case Likelihood():
            raise InputError(
                f"a table takes a family by its name, or a torchngvi.tables.Family; got {type(family).__name__}."
            )
    return family_of(family)


def _priors(priors: Any, prior: MixedPrior | None, family: Family) -> Any:
    """The priors by name, those of an earlier release put into these names."""
    if prior is None:
        return priors
    there = isinstance(prior, MixedPrior) and prior.precision is None and isinstance(prior.sd, ScalePrior | None)
    if not there or priors is not None:
        raise InputError(
            "priors are given by name, priors={'x': Normal(0, 1), '1|g': HalfT(3, 1)}. A MixedPrior cannot stand "
            "beside them, and one of a precision matrix has no place here: fit torchngvi.models.MixedLogJoint with it."
        )
    warnings.warn(
        "prior=MixedPrior(...) goes with the next release: name the priors, priors={'b': Normal(0, 1), 'sd': HalfT(3, "
        "1)}. That of the intercept is the one at the means of the columns.",
        FutureWarning,
        stacklevel=3,
    )
    given: dict[str, Any] = {}
    if prior.fixed_scale is not None:
        given["b"] = given["Intercept"] = Normal(0.0, prior.fixed_scale)
    spreads = {"HalfT": HalfT, "HalfNormal": HalfNormal, "Exponential": Exponential}
    some: dict[str, Any] = {"sd": prior.sd, **dict.fromkeys(family.parameters, prior.likelihood)}
    given |= {name: spreads[type(one).__name__](*one) for name, one in some.items() if one is not None}
    return given if prior.concentration == 1.0 else {**given, "cor": LKJ(prior.concentration)}
