"""Generalised linear mixed models with one grouping factor: their rows, their start and their prior.

Where a fit of a mixed model starts, and the prior of Kass and Natarajan: from the data, by weighted least squares.

The start is the mode of the penalised quasi-likelihood in (b, β) given Ω (Breslow and Clayton 1993), with Newton steps
between updates of Ω = (n + ν)(S⁻¹ + Σ_i (b_i b_iᵀ + V_i))⁻¹, an EM iteration with Laplace's covariances V_i.

Mixed models in the units of their data: columns of X and Z centred and scaled inside, and the default priors.

With the columns of X and Z of one grouping factor centred and scaled (`torchngvi.models.standardize`),

    η = a_0 + Σ_j z_j a_j + Z_s b,   b ~ N(0, Ω⁻¹),   a_0 ~ N(g(ȳ), (2.5 s_y)²),   a_j ~ N(0, (2.5 s_y)²),

and each standard deviation of b is half-t with three degrees of freedom and the scale 2.5 s_y, its correlations LKJ(1).
In the units of the columns a slope over the column j has the scale 2.5 s_y/s_j.  Since the columns of Z are centred
too, where they come with an intercept, neither the unit nor the origin of a column changes any prediction, whether its
slope varies over groups or not.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from torchngvi.arguments import shown
from torchngvi.distributed import Processes
from torchngvi.errors import InputError
from torchngvi.interfaces import Coordinates, Frame, Framed, Posterior, Prior, Raw, TractableTarget
from torchngvi.models import checks
from torchngvi.models.generalized_linear import GeneralizedLinear
from torchngvi.models.likelihoods import (
    BernoulliLogit,
    BernoulliProbit,
    GaussianNoise,
    Likelihood,
    NegativeBinomial,
    PoissonLog,
    StudentT,
    link_of,
)
from torchngvi.models.mixed_prior import (
    CovariancePrior,
    Effects,
    HalfT,
    MixedPrior,
    Precision,
    ScalesPrior,
    Wishart,
    check_one_prior,
    checked_prior,
    derivative,
    expected_energy,
    half_squares,
    omega_of,
    root_of,
    scales_of,
)
from torchngvi.models.standardize import WIDTH, Standardization, full_set, location_and_unit, mean_and_sd
from torchngvi.numerics import linalg, sparse
from torchngvi.numerics.arrays import settings_of, tensors_of, tracked
from torchngvi.numerics.gaussian_integrals import Moments
from torchngvi.numerics.linalg import cholesky, column_rank, positive_columns
from torchngvi.posteriors import PrecisionCholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.renamed import warn_renamed
from torchngvi.structures import Forest, arrow
from torchngvi.structures.forest import Part
from torchngvi.structures.pattern import Structured

_AT_ONCE = 65_536  # rows of which everything is computed together on the CPU
Sums = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class GroupedRows:
    """Rows with fixed effects β and random effects b of n groups, η = Xβ + Z b_group + offset."""

    processes: Processes | None = None  # over which the groups are spread, each of which has the rows of its own
    columns: Standardization | None = None  # how X has been centred and scaled
    within: Standardization | None = None  # the same of Z
    unit = torch.ones((), dtype=torch.float64)  # s_y of default priors, (*batch,)

    def __init__(self, fixed: GeneralizedLinear, Z: Any, groups: Any, members: bool = False) -> None:
        self.fixed, self.X, self.likelihood = fixed, fixed.X, fixed.likelihood
        if sparse.is_sparse(self.X) or self.X.ndim > 2 or (fixed.y.ndim > 1 and not members):
            raise InputError(
                "a MixedModel has one dense design X (N, p) and targets y (N,); got X of shape "
                f"{tuple(self.X.shape)}, {self.X.layout}, and y of {tuple(fixed.y.shape)}."
            )
        self.batch, rows = fixed.y.shape[:-1], len(self.X)
        for name, given in (("weights", fixed.weights), ("offset", fixed.offset)):
            if given.shape not in ((rows,), fixed.y.shape):
                either = f"({rows},)" + f", or the shape of y, {tuple(fixed.y.shape)}" * bool(self.batch)
                raise InputError(f"{name} must have one entry a row, {either}; got shape {tuple(given.shape)}.")
        self.Z, self.groups = checks.grouped(Z, groups, self.X)
        if (rank := column_rank(self.Z)) < self.Z.shape[1]:
            raise InputError(
                f"the {self.Z.shape[1]} columns of Z, the design of the random effects, must be linearly independent; "
                f"their rank is {rank}. Leave a column out."
            )
        self.y, self.weights, self.offset = fixed.y, fixed.weights, fixed.offset
        self.n, self.r, self.p = int(self.groups.max()) + 1, self.Z.shape[1], self.X.shape[1]
        self.all_groups = self.n

    # ---------------------------------------------------------------------------- over processes

    def spread(self, processes: Processes) -> Self:
        """Make the same rows as those of one of several processes, each of which has groups of its own."""
        new = copy.copy(self)
        new.processes, (count,) = processes, processes.total([torch.tensor([self.n], dtype=torch.float64)])
        new.all_groups = int(count)
        return new

    @property
    def leads(self) -> bool:
        """Whether what is to be counted once, such as a prior, is counted here."""
        return self.processes is None or self.processes.leads

    def total(self, *parts: Tensor) -> list[Tensor]:
        """Complete sums over the groups, or their rows, by those of the other processes."""
        return list(parts) if self.processes is None else self.processes.total(parts)

    def check_one_process(self, what: str) -> None:
        """Check that all groups are here."""
        if self.processes is not None:
            raise InputError(
                f"{what} needs all groups in one process, and here they are spread over {self.processes.world}. Use "
                "fit(model.posterior(), model) on every rank."
            )

    # ---------------------------------------------------------------------------- one set of targets

    def check_one(self, what: str) -> None:
        """Check that there is one set of targets."""
        if self.batch:
            raise InputError(
                f"{what} takes one set of targets y (N,); got y of shape {tuple(self.y.shape)}. Fit many of them by "
                "fit(model.posterior(), model), or make a model of each."
            )

    def blocks(self) -> "list[GroupedRows]":
        """Take the rows a few at a time, as views: what is computed of each row need not be there for all of them."""
        if not self.X.is_cpu or self.batch or len(self.X) <= _AT_ONCE:
            return [self]
        made = []
        for start in range(0, len(self.X), _AT_ONCE):
            at = slice(start, start + _AT_ONCE)
            block = copy.copy(self)
            block.X, block.Z, block.groups = self.X[at], self.Z[at], self.groups[at]
            block.y, block.weights, block.offset = self.y[at], self.weights[at], self.offset[at]
            made.append(block)
        return made

    def parts(
        self,
        theta: Tensor,  # (*any, D)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take θ apart: b (*any, n, r), β (*any, p) and ω (*any, r(r + 1)/2)."""
        b, beta, omega = theta.split([self.n * self.r, self.p, theta.shape[-1] - self.n * self.r - self.p], -1)
        return b.unflatten(-1, (self.n, self.r)), beta, omega

    def predictor(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Compute η = Xβ + Z b + offset, (*sample, *batch, N)."""
        b, beta, _ = self.parts(theta)
        return beta @ self.X.mT + self.offset + (b.index_select(-2, self.groups) * self.Z).sum(-1)

    def present(
        self,
        x: Tensor,  # (*batch, N)
        otherwise: float,
    ) -> Tensor:
        """Put a number for rows of weight 0, which are not there, also where their loss would be infinite."""
        return torch.where(self.weights > 0, x, otherwise)

    def variances(
        self,
        parts: Part,  # V_bb and V_βb, of each group
        between: Tensor,  # V_ββ
    ) -> Tensor:
        """The variances of the predictors of rows, zᵀV_bb z + 2 xᵀV_βb z + xᵀV_ββ x, (*batch, N)."""
        X, Z, groups = self.X, self.Z, self.groups
        square = parts.square.index_select(-3, groups)
        border = parts.border[..., : X.shape[-1], :].index_select(-3, groups)
        local = (Z[:, None, :] * square).sum(-1) + 2 * (X[:, :, None] * border).sum(-2)
        return (local * Z).sum(-1) + ((X @ between) * X).sum(-1)

    def summed(
        self,
        alpha: Tensor,  # of each row, (*batch, N)
        beta: Tensor,
        to: Sums | None = None,
    ) -> Sums:
        """Σ α (z, x) and Σ β (z, x)(z, x)ᵀ: by group in the parts of b, over all rows in that of the fixed effects."""
        X, Z, batch = self.X, self.Z, alpha.shape[:-1]
        if to is None:
            sizes = (self.n, self.r), (self.p,), (self.n, self.r, self.r), (self.n, self.p, self.r), (self.p, self.p)
            g_b, g_beta, bb, border, bebe = (alpha.new_zeros(*batch, *size) for size in sizes)
            to = (g_b, g_beta), (bb, border, bebe)
        (g_b, g_beta), (bb, border, bebe) = to
        g_b.index_add_(-2, self.groups, alpha[..., None] * Z)
        g_beta += alpha @ X
        scaled = beta[..., None] * Z
        bb.index_add_(-3, self.groups, scaled[..., None, :] * Z[:, :, None])
        border.index_add_(-3, self.groups, scaled[..., None, :] * X[:, :, None])
        bebe += (X * beta[..., None]).mT @ X
        return to

    def expected(
        self,
        mean: Tensor,
        groups: Part,  # of V
        between: Tensor,  # V_ββ
    ) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """The likelihood: value, gradients (b, β), and Hessians (b, b), (β, b), (β, β)."""
        total, sums = mean.new_zeros(()), None
        for rows in self.blocks():
            eta, variance = rows.present(rows.predictor(mean), 0.0), rows.present(rows.variances(groups, between), 1.0)
            value, alpha, beta = (rows.weights * part for part in rows.likelihood.expected(eta, variance, rows.y))
            total, sums = total + value.sum(-1), rows.summed(alpha.detach(), beta.detach(), sums)
        assert sums is not None
        return total, *sums


class Observed(Protocol):
    """Targets with their likelihood, one a row."""

    likelihood: Likelihood
    y: Tensor
    weights: Tensor
    offset: Tensor

    def present(self, x: Tensor, otherwise: float) -> Tensor:
        """Put a number for rows of weight 0."""


def row_moments(rows: Observed, eta: Tensor, point: float = 1e-6) -> Moments:
    """Weighted -log p(y | η) of each row with two derivatives, the second not negative."""
    # point: a variance of the predictor that is as good as none
    likelihood, eta = rows.likelihood, rows.present(eta, 0.0)
    if likelihood.of_softplus:
        moments = likelihood.derivatives(eta, rows.y)
    else:
        moments = likelihood.expected(eta, torch.full_like(eta, point), rows.y)
    value, slope, curvature = (rows.weights * x for x in moments)
    return Moments(value, slope, curvature.clamp_min(0.0))


def information(rows: GroupedRows) -> Wishart:
    """Make the prior of Kass and Natarajan (2006) from J, what the rows of a group tell of its effects on average."""
    fixed, Z, r = rows.fixed, rows.Z, rows.r
    curvature = row_moments(rows, fixed.predictor(_alone(rows))).curvature
    J = rows.total((Z * curvature[..., None]).mT @ Z)[0] / rows.all_groups
    J = 0.5 * (J + J.mT)
    if not bool(cholesky(J)[1].all()):
        raise InputError(
            "the rows tell nothing of some random effect, which the prior of Kass and Natarajan needs. Leave "
            "precision= out for the default, or give Wishart(dof, scale)."
        )
    return Wishart(1.0, J) if r == 1 else Wishart(r + 1.0, J / (r + 1))


def _alone(rows: GroupedRows, steps: int = 50, last: int = 2, smallest: float = 1e-6) -> Tensor:
    """The modes of β without random effects, by Newton's steps that are halved where they do not descend."""
    # last: more steps, where their number must not depend on rounding
    # smallest: share of a step
    fixed = rows.fixed

    def at(beta: Tensor) -> Moments:
        moments = row_moments(rows, fixed.predictor(beta))
        return moments._replace(value=rows.total(moments.value.sum(-1))[0] + fixed.prior.energy(beta))

    def newton(here: Moments) -> tuple[Tensor, Tensor]:
        slope, square = here.slope @ fixed.X, (fixed.X * here.curvature[..., None]).mT @ fixed.X
        slope, square = rows.total(slope, square)
        gradient = slope + fixed.prior.force(beta)
        return gradient, torch.linalg.solve(fixed.prior.add_to(square), gradient[..., None])[..., 0]

    beta = fixed.X.new_zeros(*rows.batch, fixed.dim)
    here = at(beta)
    going = torch.ones_like(here.value, dtype=torch.bool)
    for _ in range(steps):
        gradient, step = newton(here)
        # where the step promises no more than rounding, no part of it does
        going = going & ((gradient * step).sum(-1) > torch.finfo(beta.dtype).eps * here.value.abs())
        size = torch.where(going, 1.0, 0.0).to(beta)
        while True:
            there = at(beta - size[..., None] * step)
            worse = (size > smallest) & ~(there.value <= here.value)
            if not bool(worse.any()):
                break
            size = torch.where(worse, 0.5 * size, size)
        going = size > smallest
        beta = torch.where(going[..., None], beta - size[..., None] * step, beta)
        gained = here.value - there.value
        here = Moments(
            torch.where(going, there.value, here.value),
            *(torch.where(going[..., None], new, old) for new, old in zip(there[1:], here[1:], strict=True)),
        )
        going = going & (gained > torch.finfo(beta.dtype).eps * here.value.abs())
        if not bool(going.any()):
            break
    for _ in range(0 if rows.processes is None else last):  # to the same digits at any number of processes
        beta = beta - newton(at(beta))[1]
    return beta


def guessed(rows: Observed, sure: float = 1.0986122886681098) -> Tensor:
    """Predictors that each row alone would have, drawn towards 0 as by half an observation."""
    # sure: log 3, the log odds of (1 + ½)/2
    match rows.likelihood:
        case BernoulliLogit() | BernoulliProbit():
            return sure * rows.y
        case PoissonLog() | NegativeBinomial():
            return (rows.y + 0.5).log()
        case GaussianNoise() | StudentT():
            return rows.y
    return rows.offset.expand_as(rows.y)


class _Penalised:
    """The penalised quasi-likelihood of (b, β) given Ω, over the arrow of these coordinates alone."""

    def __init__(self, rows: GroupedRows) -> None:
        self.rows, self.prior = rows, rows.fixed.prior
        self.structure = arrow(groups=rows.n, local=rows.r, globals=rows.p)

    def root(self, curvature: Tensor, omega: Tensor) -> Structured:
        """T of the precision, from the weighted curvatures of the rows and Ω (*batch, r, r)."""
        bb, border, between = self.rows.summed(torch.zeros_like(curvature), curvature)[1]
        top = (self.prior.add_to(between) if self.rows.leads else between)[..., None, :, :]
        parts = [Part(bb + omega[..., None, :, :], border), Part(top, top[..., :0, :])]
        if self.rows.processes is None:
            return self.structure.cholesky(self.structure.matrix(parts))[0]
        lower = linalg.small_cholesky(parts[0].square)[0]
        down = linalg.small_solve(lower, border.mT).mT
        (schur,) = self.rows.total(top - (down @ down.mT).sum(-3, keepdim=True))
        return self.structure.matrix([Part(lower, down), Part(cholesky(schur)[0], top[..., :0, :])])

    def solved(self, root: Structured, g: Tensor) -> Tensor:
        """S⁻¹ g, (*batch, n r + p)."""
        if self.rows.processes is None:
            return self.structure.tsolve(root, self.structure.solve(root, g))
        (leaves, tops), size = self.structure.parts(root), self.rows.n * self.rows.r
        y = linalg.small_solve(leaves.square, g[..., :size].unflatten(-1, (self.rows.n, -1))[..., None])
        (rest,) = self.rows.total(g[..., size:] - (leaves.border @ y)[..., 0].sum(-2))
        top = torch.linalg.solve_triangular(tops.square[..., 0, :, :], rest[..., None], upper=False)[..., 0]
        return self.structure.tsolve(root, torch.cat([y.flatten(-3), top], -1))

    def gathered(self, alpha: Tensor) -> Tensor:
        """The gradient of rows with these weighted slopes, (*batch, n r + p)."""
        g_b, g_beta = self.rows.summed(alpha, torch.zeros_like(alpha))[0]
        return torch.cat([g_b.flatten(-2), g_beta], -1)

    def penalty(self, theta: Tensor, omega: Tensor) -> Tensor:
        """The gradient of the two quadratic penalties."""
        b, beta, _ = self.rows.parts(theta)
        force = self.prior.force(beta) if self.rows.leads else torch.zeros_like(beta)
        return torch.cat([(b @ omega).flatten(-2), force], -1)

    def clipped(self, step: Tensor, longest: float = 2.0) -> Tensor:
        """With no change of b_i or β longer than the clip."""
        # longest: length of the longest change of b_i, and of β
        b, beta, _ = self.rows.parts(step)
        b, beta = (x * (longest / torch.linalg.vector_norm(x, dim=-1, keepdim=True)).clamp_max(1.0) for x in (b, beta))
        return torch.cat([b.flatten(-2), beta], -1)

    def locals(self, root: Structured) -> Tensor:
        """The covariances V_i of b_i, (*batch, n, r, r)."""
        V = self.structure.marginals(self.structure.inverse(root), True)
        return self.structure.parts(V)[0].square


def started(
    rows: GroupedRows,
    prior: CovariancePrior,
    structure: Forest,
    rounds: int = 12,
    settled: float = 0.05,
    first: float = 0.7,
) -> Coordinates:
    """Mean and root of the precision of a start, over all coordinates."""
    # settled: change of Ω at which the iteration ends
    # first: standard deviation of the random effects in the first round
    # what the prior of Ω adds to the sum of squares of the effects and to the number of groups
    known, count = (prior.inverse, prior.dof) if isinstance(prior, Precision) else (0.0, 0.0)
    penalised, like, batch = _Penalised(rows), rows.X, rows.batch
    identity = torch.eye(rows.r, dtype=like.dtype, device=like.device)
    omega, aim = (identity / first**2).expand(*batch, -1, -1), guessed(rows)
    curvature = row_moments(rows, aim).curvature
    root = penalised.root(curvature, omega)
    nothing = like.new_zeros(*batch, penalised.structure.dim)  # where the penalty is the pull of the prior mean
    aimed = penalised.gathered(curvature * (aim - rows.offset)) - penalised.penalty(nothing, omega)
    theta = penalised.solved(root, aimed)
    for _ in range(rounds):
        _, alpha, curvature = row_moments(rows, rows.predictor(theta))
        root = penalised.root(curvature, omega)
        gradient = penalised.gathered(alpha) + penalised.penalty(theta, omega)
        theta = theta - penalised.clipped(penalised.solved(root, gradient))
        b, V = rows.parts(theta)[0], penalised.locals(root)
        (square,) = rows.total((known if rows.leads else 0.0) + b.mT @ b + V.sum(-3))
        new = (rows.all_groups + count) * torch.linalg.inv(square)
        new = 0.5 * (new + new.mT)
        change, omega = torch.linalg.solve(omega, new) - identity, new
        if bool((change.square().sum((-2, -1)) < settled**2).all()):
            break
    entries = omega_of(cholesky(omega)[0])
    nothing, q = theta.new_zeros(()), entries.shape[-1]
    unsure = Effects(b, entries, V, nothing.expand(*batch, rows.n, q, rows.r), nothing.expand(*batch, q, q))

    def quadratic(of: Effects) -> Tensor:
        """What is quadratic in W: E[½ Σ_i b_iᵀΩb_i + ½ tr(S⁻¹Ω)]."""
        wishart = prior.expected(of) if rows.leads and isinstance(prior, Precision) else 0.0
        return half_squares(of).sum(-1) + wishart

    (H,) = rows.total(derivative(quadratic, unsure).omega_omega)
    factor, ok = cholesky(H)
    plain = H.diagonal(dim1=-2, dim2=-1).clamp_min(1.0).sqrt().diag_embed()
    factor = torch.where(ok[..., None, None], factor, plain)
    groups, roots = penalised.structure.parts(root)
    between = factor.new_zeros(*batch, rows.p, q)
    upper, lower = torch.cat([roots.square[..., 0, :, :], between], -1), torch.cat([between.mT, factor], -1)
    top = torch.cat([upper, lower], -2)[..., None, :, :]
    border = torch.cat([groups.border, groups.border.new_zeros(*batch, rows.n, q, rows.r)], -2)
    T = structure.matrix([Part(groups.square, border), Part(top, top[..., :0, :])])
    return Coordinates(torch.cat([theta, entries], -1), T)


SD_PRIOR = HalfT(3.0, WIDTH)  # of a standard deviation between groups, in units of s_y: as brms


class Levels(NamedTuple):
    """Where the targets of a model lie, one number for each member of a batch of targets."""

    location: Tensor  # g(ȳ), (*batch,), float64
    unit: Tensor  # s_y, about 0 where the fixed effects make no constant; 1 for other links than the identity

    @classmethod
    def of(cls, rows: GroupedRows) -> "Levels":
        """Find them from the targets of all processes."""
        there = (rows.weights > 0).any(-1)
        if rows.processes is None and not bool(there.all()):
            raise InputError("no row has a positive weight, of which nothing can be learned. Give at least one.")
        y, link = rows.y.double(), link_of(rows.likelihood)
        through_0 = standardized(rows.X, rows.columns, rows.weights, rows.processes)[1].constant is None
        offset, weights = (x.double().expand(y.shape) for x in (rows.offset, rows.weights))
        if rows.processes is not None:
            gathered = _gathered(y, link, offset, weights, rows.processes)
            return cls(*map(torch.tensor, location_and_unit(*gathered, through_0=through_0)))
        if not rows.batch:
            found = [location_and_unit(y, link, offset, weights, through_0=through_0)]
        else:
            members = zip(*(x.flatten(0, -2) for x in (y, offset, weights)), strict=True)
            found = [location_and_unit(one, link, shift, w, through_0=through_0) for one, shift, w in members]
        location, unit = torch.tensor(found, dtype=torch.float64).unbind(-1)
        return cls(location.reshape(rows.batch), unit.reshape(rows.batch))


def _gathered(
    y: Tensor, link: str, offset: Tensor, weights: Tensor, processes: Processes
) -> tuple[Tensor, str, Tensor, Tensor]:
    """Two rows of each process that have the sums of all of its rows, as far as location and unit depend on them."""
    here = weights > 0
    y, offset, weights = y[here], offset[here], weights[here]
    total, share = weights.sum(), weights / weights.sum()
    if link == "identity":
        mean, sd = mean_and_sd((y - offset)[:, None], weights)
        pair = [(float(mean + sign * sd), 0.0, float(total / 2)) for sign in (-1, 1)]
    elif link == "log":
        exposure = float(torch.logsumexp(share.log() + offset, 0))
        pair = [(float((share * y).sum()), exposure, float(total / 2))] * 2
    else:
        success, shift = float((share * (y > 0)).sum()), float((share * offset).sum())
        pair = [(1.0, shift, success * float(total)), (0.0, shift, (1 - success) * float(total))]
    rows = torch.tensor([row for some in processes.gather(pair) for row in some], dtype=torch.float64)
    return rows[:, 0], link, rows[:, 1], rows[:, 2]


def standardized(
    columns: Tensor,  # (N, D)
    before: Standardization | None,
    weights: Tensor,
    processes: Processes | None,
) -> tuple[Tensor, Standardization]:
    """Centre and scale columns by the rows of all processes; ``before`` says how those here have been already."""
    weights = weights.flatten(0, -2).sum(0) if weights.ndim > 1 else weights
    if processes is None:
        units = Standardization.of(columns, weights)
        return units.standardize(columns), units
    like = columns.new_zeros(columns.shape[-1], dtype=torch.float64)
    center, scale = (like, like + 1) if before is None else (before.centers.to(like), before.scales.to(like))
    # two rows with the moments of all: one standard deviation below and above their mean
    mean, sd = (x.to(like) for x in mean_and_sd(columns, weights))
    half = 0.5 * float(weights.sum())
    here = [(half, (center + scale * (mean + sign * sd)).cpu()) for sign in (-1, 1)]
    rows = [row for some in processes.gather(here) for row in some]
    halves = torch.tensor([half for half, _ in rows], dtype=torch.float64)
    moments = torch.stack([row for _, row in rows])
    units = Standardization.of(moments, halves)
    if units.intercept is None:
        found = processes.gather(list(_patterns(restored(columns, before)[weights > 0])))
        patterns = torch.stack([row for some in found for row in some])
        units = Standardization.without_intercept(mean_and_sd(moments, halves)[0], units.scales, full_set(patterns))
    slope, shift = scale / units.scales.to(like), (center - units.centers.to(like)) / units.scales.to(like)
    return (slope * columns.double() + shift).to(columns), units


def _patterns(columns: Tensor, rounding: float = 1e-6) -> Tensor:
    """The rows that differ, as far as `full_set` looks at them: columns of other numbers than 0 and 1 are all ½."""
    # rounding: of an indicator that was scaled and is restored, in float32
    near = columns.double().round()
    binary = ((near == 0) | (near == 1)) & ((columns - near).abs() < rounding)
    return torch.unique(torch.where(binary.all(0), near, 0.5), dim=0).cpu()


def set_columns(rows: GroupedRows, fixed: GeneralizedLinear, levels: Levels) -> None:
    """Centre and scale the columns of the fixed effects in place, and give these their default prior."""
    X, columns = standardized(rows.X, rows.columns, rows.weights, rows.processes)
    mean = levels.location.to(X)[..., None] * columns.level(1.0).to(X)
    precision = (WIDTH * levels.unit).pow(-2).to(X)[..., None].expand(mean.shape).contiguous()
    fixed.X, fixed.prior = X, Prior(mean, precision)
    rows.X, rows.columns = X, columns


def covariance_prior_of(prior: MixedPrior, rows: GroupedRows) -> CovariancePrior:
    """Make the prior of ω of one factor."""
    if prior.usual:
        return ScalesPrior(SD_PRIOR, prior.concentration, rows.r, rows.unit)
    if prior.precision is None:
        return ScalesPrior(prior.sd, prior.concentration, rows.r)
    wishart = information(rows) if isinstance(prior.precision, str) else prior.precision
    return Precision(wishart, rows.X, rows.r, rows.batch)


def restored(columns: Tensor, units: Standardization | None) -> Tensor:
    """The columns as they were given."""
    return columns if units is None else columns * units.scales.to(columns) + units.centers.to(columns)


def omega_to_user(
    omega: Tensor,  # (*any, q)
    units: Standardization | None,
    size: int,  # r
) -> Tensor:
    """Map ω to that of the effects b = A b_s in the units of the user, (*any, q), whose precision is A⁻ᵀ W (A⁻ᵀ W)ᵀ."""
    if units is None:
        return omega
    inverse = units.from_user(torch.eye(size, dtype=torch.float64, device=omega.device), 0)
    root = inverse.mT @ root_of(omega.double(), size)
    if bool(root.triu(1).any()):
        root = positive_columns(torch.linalg.qr(root.mT, mode="r").R.mT)[0]
    return omega_of(root).to(omega)


def to_user(
    coefficients: Tensor,  # (*any, D)
    units: Standardization | None,
) -> Tensor:
    """Map fixed effects, or random effects of a factor, to the units of the user."""
    return coefficients if units is None else units.to_user(coefficients)


def rows_of_user(X: Tensor, units: Standardization | None) -> Tensor:
    """Centre and scale new rows as the columns of a model are."""
    return X if units is None else units.standardize(X)


# ------------------------------------------------------------------------------------ the models


_GROUPS_AT_ONCE = 10_000  # groups of one process that are worked on together


@dataclass(frozen=True)
class MixedSummary:
    """Posterior means and standard deviations of a `torchngvi.MixedModel`, as `MixedModel.summary` returns them.

    Those of random effects are of the standard deviations and correlations in Ω⁻¹, the covariance of b.  A Gaussian q
    understates their uncertainty.  Of many sets of targets every shape has that of the batch in front.

    Attributes:
        fixed: means of β, (p,).
        fixed_sd: their standard deviations, (p,).
        sd: means of the standard deviations of the random effects, (r,).
        sd_sd: their standard deviations, (r,).
        sd_interval: their 2.5 % and 97.5 % quantiles, (2, r).
        correlation: means of the correlations of the random effects, (r, r).
        correlation_sd: their standard deviations, (r, r).
        group: means of the effects of each group, (n, r).
        group_sd: their standard deviations, (n, r).

    >>> one = torch.ones(1)
    >>> print(MixedSummary(one, one, one, one, torch.ones(2, 1), one[None], one[None], one[None], one[None]))
    fixed effects        mean         sd
      0                     1          1
    sd of random         mean         sd      2.5 %     97.5 %
      0                     1          1          1          1
    1 group
    """

    fixed: Tensor  # (p,)
    fixed_sd: Tensor  # (p,)
    sd: Tensor  # (r,)
    sd_sd: Tensor  # (r,)
    sd_interval: Tensor  # (2, r)
    correlation: Tensor  # (r, r)
    correlation_sd: Tensor  # (r, r)
    group: Tensor  # (n, r)
    group_sd: Tensor  # (n, r)

    def member(self, index: int | tuple[int, ...]) -> "MixedSummary":
        """Take the summary of one of many sets of targets.

        Args:
            index: its place in the batch.

        Returns:
            Its numbers, without the shape of the batch in front.

        >>> many = torch.ones(3, 1)
        >>> square = many[..., None]
        >>> MixedSummary(many, many, many, many, torch.ones(3, 2, 1), square, square, square, square).member(2).fixed
        tensor([1.])
        """
        return MixedSummary(*(getattr(self, part.name)[index] for part in fields(self)))

    def __str__(self) -> str:
        if self.fixed.ndim > 1:
            return f"{self.fixed[..., 0].numel()} mixed models of one design: member(k) is the table of one"
        lines = [f"{'fixed effects':<14}{'mean':>11}{'sd':>11}"]
        lines += _lines(self.fixed, self.fixed_sd)
        lines.append(f"{'sd of random':<14}{'mean':>11}{'sd':>11}{'2.5 %':>11}{'97.5 %':>11}")
        lines += _lines(self.sd, self.sd_sd, *self.sd_interval)
        size = len(self.sd)
        if size > 1:
            lines.append(f"{'correlations':<14}{'mean':>11}{'sd':>11}")
            pairs = [(i, k) for i in range(size) for k in range(i)]
            columns = [torch.stack([x[i, k] for i, k in pairs]) for x in (self.correlation, self.correlation_sd)]
            lines += _lines(*columns, names=[f"{i} with {k}" for i, k in pairs])
        n = len(self.group)
        return "\n".join([*lines, f"{n} group{'s' if n > 1 else ''}"])


def _lines(*columns: Tensor, names: Sequence[object] | None = None) -> list[str]:
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        f"  {index:<12}" + "".join(f"{x:>11.4g}" for x in row)
        for index, row in zip(names or range(len(columns[0])), rows, strict=True)
    ]


def summarised(
    rows: GroupedRows, structure: Forest, q: Gaussian, draws: int, seed: int, at_once: int = 2**23
) -> MixedSummary:
    """Summarise q over the coordinates of a mixed model."""
    # at_once: numbers of which quantiles are found together
    frame = q.frame()
    b, beta, omega = rows.parts(frame.mean)
    generator = torch.Generator(omega.device).manual_seed(seed)
    z = torch.randn(draws, omega.shape[-1], generator=generator, dtype=omega.dtype, device=omega.device)
    V_b, V = _covariances(rows, structure, q)
    root = torch.linalg.cholesky(V[..., rows.p :, rows.p :])
    around = root @ z.mT  # (*batch, q, draws), the same draws for all members
    sd, correlation = scales_of(omega_to_user(omega + around.movedim(-1, 0), rows.within, rows.r), rows.r)
    ends = torch.tensor([0.025, 0.975], dtype=sd.dtype, device=sd.device)
    some = sd.flatten(1).split(max(1, at_once // draws), -1)
    interval = torch.cat([torch.quantile(part, ends, dim=0) for part in some], -1).unflatten(-1, sd.shape[1:])
    return MixedSummary(
        to_user(beta, rows.columns),
        _sd_to_user(V[..., : rows.p, : rows.p], rows.columns),
        sd.mean(0),
        sd.std(0),
        interval.movedim(0, -2),
        correlation.mean(0),
        correlation.std(0),
        to_user(b, rows.within),
        _sd_to_user(V_b, rows.within),
    )


def _sd_to_user(
    V: Tensor,  # (*any, D, D)
    units: Standardization | None,
) -> Tensor:
    """The standard deviations of coefficients in the units of the user, (*any, D)."""
    if units is None:
        return V.diagonal(dim1=-2, dim2=-1).sqrt()
    root = units.to_user(torch.linalg.cholesky(V), -2)
    return torch.linalg.vector_norm(root, dim=-1)


def _covariances(rows: GroupedRows, structure: Forest, q: Gaussian) -> tuple[Tensor, Tensor]:
    """The covariances under q of the effects of each group (*batch, n, r, r), and of the globals (*batch, P, P)."""
    frame, local = q.frame(), rows.n * rows.r
    if frame.structure == structure:
        groups, roots = structure.parts(frame.marginals())
        return groups.square, roots.square[..., 0, :, :]
    root = frame.dense()
    b, g = root[..., :local, :].unflatten(-2, (rows.n, rows.r)), root[..., local:, :]
    return b @ b.mT, g @ g.mT


def predicted(
    rows: GroupedRows,
    q: Gaussian,
    X: Any,  # (M, p)
    Z: Any,  # (M, r)
    groups: Any,  # (M,), or None
    draws: int,
    seed: int,
) -> Tensor:
    """Draw linear predictors of new rows, of groups of the data or of one group that the data do not have."""
    X, Z = checks.numbers("X", X, rows.X), checks.numbers("Z", Z, rows.X)
    if X.shape[1:] != (rows.p,) or Z.shape != (len(X), rows.r):
        raise InputError(
            f"new rows need X of shape (M, {rows.p}) and Z of shape (M, {rows.r}); got {tuple(X.shape)} and "
            f"{tuple(Z.shape)}."
        )
    X, Z = rows_of_user(X, rows.columns), rows_of_user(Z, rows.within)
    generator = torch.Generator(X.device).manual_seed(seed)
    b, beta, omega = rows.parts(q.sample((draws,), generator))
    if groups is not None:
        index = checks.group_index(groups, len(X), X)
        if bool(((index < 0) | (index >= rows.n)).any()):
            raise InputError(
                f"groups of new rows must be those of the data, 0 to {rows.n - 1}; got {int(index.min())} to "
                f"{int(index.max())}. Leave groups= out for a group that the data do not have."
            )
        return beta @ X.mT + (b.index_select(-2, index) * Z).sum(-1)
    noise = torch.randn(draws, *rows.batch, rows.r, 1, generator=generator, dtype=X.dtype, device=X.device)
    new = torch.linalg.solve_triangular(root_of(omega, rows.r).mT, noise, upper=True)
    return beta @ X.mT + new[..., 0] @ Z.mT


_NARROWER = (1.0, 3.0, 10.0, 30.0, 100.0)  # factors of the root of the precision of a start, as long as they help


class RandomEffects(NamedTuple):
    """The random effects of a mixed model: r effects a group, of which each row has one group.

    Attributes:
        Z: their design, (N, r): a column of ones for an intercept that varies, a covariate for a slope that varies.
        groups: the group of each row, (N,), integers 0, ..., n - 1, in any order of the rows.

    >>> RandomEffects([[1.0], [1.0]], [0, 1]).groups
    [0, 1]
    """

    Z: Any
    groups: Any


class MixedLogJoint(TractableTarget):
    """Log joint of a generalised linear mixed model with one grouping factor, with its expectation in closed form.

    Use it for repeated measurements of patients, pupils of schools, and other data in groups whose levels, and
    perhaps slopes, vary.  ``fit(q, model)`` with ``q = model.posterior()`` needs no learning rate and no draws, and its
    cost is linear in the number of groups.

    Args:
        X: the design of the fixed effects β, (N, p), dense.
        y: the targets, (N,), as in `torchngvi.GeneralizedLinear`; or many sets of them, (*batch, N), each a model of
            its own with the same rows, designs and groups, and with its own default prior of Ω.
        random: `RandomEffects`, or a pair (Z, groups): the design (N, r) and the group of each row.
        family: the likelihood, "bernoulli_logit", "bernoulli_probit", "poisson_log", "gaussian" (noise 1), or a
            `Likelihood` such as ``GaussianNoise(0.1)`` or ``NegativeBinomial(2.0)``.
        prior: `MixedPrior`; by default in the units of the data: the columns of X and Z are centred and scaled inside,
            θ is of these columns, and `summary` and `predict` are in the units of the user. Its precision
            "kass-natarajan" is the Wishart prior of Kass and Natarajan (2006): ν = 1, S = J for r = 1, else ν = r + 1,
            S = J/(r + 1), where J is the mean over groups of Z_iᵀ diag(A'') Z_i at the estimate of β without random
            effects (under its prior).
        weights: factors of the log likelihood of each row, (N,), not negative.
        offset: what is added to the linear predictor, (N,), as the logarithm of an exposure.

    Attributes:
        structure: the arrow of θ = (b_1, ..., b_n, β, ω), n blocks of r coordinates before p + r(r + 1)/2 global ones.
        rows: the data, whose ``columns`` and ``within`` say how X and Z have been centred and scaled, None where a
            prior that was given is for the columns as they are.
        covariance_prior: of ω.

    Raises:
        InputError: as `torchngvi.GeneralizedLinear`; designs of other numbers of rows, groups that are no numbers
            0, ..., n - 1 or have no rows, columns of Z that depend on one another, or a prior out of range.

    >>> from torchngvi import fit
    >>> groups = torch.arange(20) // 5
    >>> X = torch.ones(20, 1, dtype=torch.float64)
    >>> y = torch.tensor([1.0, 0, 2, 1, 0, 5, 7, 4, 6, 5, 2, 3, 1, 2, 2, 0, 0, 1, 0, 0])
    >>> model = MixedLogJoint(X, y, RandomEffects(X, groups), "poisson_log")
    >>> q = model.posterior()
    >>> fit(q, model, progress=False).converged
    True
    >>> model.summary(q).fixed_sd.shape
    torch.Size([1])
    """

    temperature = 1.0
    members = True  # whether y may be several sets of targets

    @tracked
    def __init__(
        self,
        X: Any,
        y: Any,
        random: RandomEffects | tuple[Any, Any],
        family: str | Likelihood = "bernoulli_logit",
        *,
        prior: MixedPrior | None = None,
        weights: Any = None,
        offset: Any = None,
    ) -> None:
        self.asked = prior = checked_prior(prior)
        check_one_prior(prior)
        if not isinstance(random, tuple | list) or len(random) != 2:
            parted = isinstance(random, tuple | list)
            got = f"a {type(random).__name__} of {len(random)} parts" if parted else shown(random)
            raise InputError(f"random is a pair of a design and groups, RandomEffects(Z, groups); got {got}.")
        scale = 1.0 if prior.fixed_scale is None else prior.fixed_scale
        self.fixed = GeneralizedLinear(X, y, family, prior_precision=scale**-2, weights=weights, offset=offset)
        self.coding = self.fixed.coding
        self.rows = rows = GroupedRows(self.fixed, random[0], random[1], self.members)
        self.structure = arrow(groups=rows.n, local=rows.r, globals=rows.p + rows.r * (rows.r + 1) // 2)
        self.dim = self.structure.dim
        self.settle()

    @property
    def precision(self) -> CovariancePrior:
        """The prior of ω under its old name ``precision``, with a warning."""
        warn_renamed(type(self).__name__, "precision", "covariance_prior")
        return self.covariance_prior

    @property
    def all_dim(self) -> int:
        """The number of coordinates of all processes."""
        return self.dim + (self.rows.all_groups - self.rows.n) * self.rows.r

    def spread(self, processes: Processes) -> Self:
        """Make the part of this process of a model whose groups several processes have; see `torchngvi.Sharded`."""
        new = copy.copy(self)
        new.rows, new.processes, new.groups_at_once = self.rows.spread(processes), processes, _GROUPS_AT_ONCE
        new.settle()
        return new

    def settle(self) -> None:
        """Set what depends on the data of all processes: centres and scales of columns, and the priors."""
        rows, levels = self.rows, Levels.of(self.rows)
        rows.unit = levels.unit
        if self.asked.fixed_scale is None:
            self.fixed = rows.fixed = copy.copy(self.fixed)
            set_columns(rows, self.fixed, levels)
        if self.asked.usual:
            rows.Z, rows.within = standardized(rows.Z, rows.within, rows.weights, rows.processes)
        self.covariance_prior = covariance_prior_of(self.asked, rows)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that a value depends on."""
        rows, prior = self.rows, self.covariance_prior
        covariance = (prior.scale,) if isinstance(prior, Precision) else ()
        data = (rows.X, rows.Z, rows.groups, rows.y, rows.weights, rows.offset)
        return (*data, *covariance, *self.fixed.prior, *tensors_of(rows.likelihood))

    def settings(self) -> tuple[object, ...]:
        """Return the settings of the likelihood, and of the prior of ω."""
        return (*settings_of(self.rows.likelihood), *self.covariance_prior.settings())

    def known_data(self) -> tuple[Tensor, ...]:
        """Return the tensors that a value depends on; of groups of other processes the value of the loss tells."""
        return self.tensors() if self.processes is None else ()

    def expected_energy(self, frame: Frame) -> tuple[Tensor, Framed | Raw]:  # type: ignore[override]
        """Compute E_q[ℓ] (*batch,), differentiable in the frame, and its derivative.

        A q over the structure of the model gives a packet in its frame, and nothing is D x D; any other Gaussian, such
        as a dense one of few groups, one in θ.

        Raises:
            InputError: groups that are spread over processes, and q with them.
        """
        self.rows.check_one_process("a step or a bound over all coordinates")
        structure = self.structure
        if frame.structure == structure and frame.upper:
            value, g, H = self.moments(frame.mean, frame.marginals())
            return value, Framed(frame.pull(g), structure.congruence(frame.root, H))
        root = frame.dense()
        value, g, H = self.moments(frame.mean, structure.from_dense(root @ root.mT))
        return value, Raw(g, structure.full(H))

    def shared_energy(
        self,
        mean: Tensor,  # of the globals, (*any, P)
        covariance: Tensor,  # (*any, P, P)
    ) -> Tensor:
        """Compute E[-log p(β) - log p(ω)], the terms that no group has, (*any,)."""
        p, prior = self.rows.p, self.fixed.prior
        assert isinstance(prior, Prior)
        spread = 0.5 * (prior.precision * covariance[..., :p, :p].diagonal(dim1=-2, dim2=-1)).sum(-1)
        of_omega = self.covariance_prior.expected_energy(mean[..., p:], covariance[..., p:, p:])
        return prior.energy(mean[..., :p]) + spread + of_omega

    # ---------------------------------------------------------------------------- the target

    def check(self, q: Posterior) -> None:
        """Check that q is over these coordinates.

        Raises:
            InputError: if their number, the dtype, the device or the batch is another.
        """
        checks.posterior(q, self.dim, self.rows.batch, self.rows.X)

    def log_joint(self, theta: Tensor) -> Tensor:
        """Compute log p(y, θ) with all its constants, (*sample, *batch).

        Of groups that are spread over processes θ has the effects of this one, and the values are sums over all.
        """
        rows = self.rows
        b, beta, omega = rows.parts(theta)
        data = (rows.weights * rows.likelihood.energy(rows.present(rows.predictor(theta), 0.0), rows.y)).sum(-1)
        constant = 0.5 * rows.n * rows.r * math.log(2 * math.pi)
        normaliser = constant - rows.n * omega[..., self.covariance_prior.diagonal].sum(-1)
        effects = 0.5 * (b @ root_of(omega, rows.r)).square().sum((-2, -1)) + normaliser
        (data_and_effects,) = rows.total(data + effects)
        return -(data_and_effects + self.fixed.prior.energy(beta) + self.covariance_prior.energy(omega))

    def moments(
        self,
        mean: Tensor,  # m, (*batch, D)
        covariance: Structured,  # V in the pattern of the arrow
    ) -> tuple[Tensor, Tensor, Structured]:
        """Compute E_q[ℓ], g = E_q[∇ℓ] and H = E_q[∇²ℓ], which has the pattern of the arrow."""
        groups, roots = self.structure.parts(covariance)
        V, p = roots.square[..., 0, :, :], self.rows.p
        b, beta, omega = self.rows.parts(mean)
        of = Effects(b, omega, groups.square, groups.border[..., p:, :], V[..., p:, p:])
        value, row_g, row_H = self.rows.expected(mean, groups, V[..., :p, :p])
        prior = self.fixed.prior
        assert isinstance(prior, Prior)
        spread = 0.5 * (prior.precision * V[..., :p, :p].diagonal(dim1=-2, dim2=-1)).sum(-1)
        value = value + prior.energy(beta) + spread + expected_energy(of, self.covariance_prior)
        d = derivative(lambda of: expected_energy(of, self.covariance_prior), of)
        g = torch.cat([(row_g[0] + d.b).flatten(-2), row_g[1] + prior.force(beta), d.omega], -1)
        bb, border, bebe = row_H
        bebe = bebe + torch.diag_embed(prior.precision)
        between = bebe.new_zeros(*bebe.shape[:-1], d.omega.shape[-1])
        top = torch.cat([torch.cat([bebe, between], -1), torch.cat([between.mT, d.omega_omega], -1)], -2)
        leaves = Part(bb + d.bb, torch.cat([border, d.omega_b], -2))
        return value, g, self.structure.matrix([leaves, Part(top[..., None, :, :], top[..., None, :0, :])])

    # ---------------------------------------------------------------------------- the posterior

    def _loss(self, q: PrecisionCholeskyGaussian) -> Tensor:
        """The negative ELBO, (*batch,); what is of the globals alone is counted once."""
        if self.processes is None:
            return self.expected_energy(q.frame())[0] - q.entropy()
        frame, size = q.frame(), self.dim - self.rows.n * self.rows.r
        V = frame.marginals()
        loss = self.moments(frame.mean, V)[0] - q.entropy()
        if not self.rows.leads:
            shared = self.structure.parts(V)[-1].square
            entropy = 0.5 * torch.linalg.slogdet(shared[..., 0, :, :])[1] + 0.5 * size * (1 + math.log(2 * math.pi))
            loss = loss - self.shared_energy(frame.mean[..., None, -size:], shared)[..., 0] + entropy
        return self.rows.total(loss)[0]

    @tracked
    @torch.no_grad()
    def posterior(self) -> PrecisionCholeskyGaussian:
        """Make a q over the arrow of the model, at a start from which few steps are needed.

        It stands at the mode of the penalised quasi-likelihood (Breslow and Clayton 1993), with Ω by an EM iteration,
        and has the curvature there for its precision, or a multiple of it where that raises the bound: counts that are
        all 0 say little at their mode of how steeply the likelihood falls beside it.

        Returns:
            A new posterior of the dtype and on the device of X, or a batch of them, one for each set of targets.
        """
        like, batch = self.rows.X, self.rows.batch
        q = PrecisionCholeskyGaussian(self.dim, batch, structure=self.structure, dtype=like.dtype, device=like.device)
        mode, root = started(self.rows, self.covariance_prior, self.structure)
        at, narrowest = q.snapshot()
        best = like.new_full(batch, math.inf)
        going = torch.ones_like(best, dtype=torch.bool)
        for factor in _NARROWER:
            q.restore(Coordinates(mode, factor * root))
            loss = self._loss(q)
            better = going & (loss < best)
            at = torch.where(better[..., None], mode, at)
            narrowest = torch.where(better[..., None], factor * root, narrowest)
            going = going & (better | best.isinf())
            best = torch.where(better, loss, best)
            if not bool(going.any()):
                break
        q.restore(Coordinates(at, narrowest))
        return q

    @torch.no_grad()
    def summary(self, q: Gaussian, draws: int = 4000, seed: int = 0) -> MixedSummary:
        """Summarise q: fixed effects, standard deviations and correlations of the random effects, effects of groups.

        Standard deviations and correlations are functions of ω, and are summarised by draws of ω from q.

        Args:
            q: the fitted posterior, over the arrow of the model.
            draws: the number of draws of ω.
            seed: of the draws.

        Returns:
            Means and standard deviations, in the units of the predictor and of the columns of X and Z; of many sets of
            targets one summary of all, of which ``member`` takes one.

        Raises:
            InputError: a q over other coordinates.
        """
        self.check(q)
        return summarised(self.rows, self.structure, q, draws, seed)

    @torch.no_grad()
    def predict(self, q: Gaussian, X: Any, Z: Any, groups: Any = None, *, draws: int = 1000, seed: int = 0) -> Tensor:
        """Draw the linear predictors of new rows from the posterior predictive distribution.

        Apply the inverse link to the draws, ``.sigmoid()`` or ``.exp()``, for means of responses; add offsets first.

        Args:
            q: the fitted posterior, over the arrow of the model.
            X: the design of the fixed effects, (M, p).
            Z: the design of the random effects, (M, r).
            groups: the groups of the rows, (M,), numbers of groups of the data; None where all rows are of one group
                that the data do not have, b ~ N(0, Ω⁻¹) with Ω drawn from q.
            draws: the number of draws.
            seed: of the draws.

        Returns:
            Draws of η, (draws, M), or (draws, *batch, M) of many sets of targets.

        Raises:
            InputError: rows of another width, groups that are none of the data, a q over other coordinates.
        """
        self.check(q)
        return predicted(self.rows, q, X, Z, groups, draws, seed)
