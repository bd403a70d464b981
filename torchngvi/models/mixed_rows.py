"""The rows of a mixed model: their designs, the group of each, and sums by group.

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
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from torchngvi.distributed import Processes
from torchngvi.errors import InputError
from torchngvi.interfaces import Coordinates, Prior
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
    derivative,
    half_squares,
    omega_of,
    root_of,
)
from torchngvi.models.standardize import WIDTH, Standardization, full_set, location_and_unit, mean_and_sd
from torchngvi.numerics import small_blocks, sparse
from torchngvi.numerics.gaussian_integrals import Moments
from torchngvi.numerics.linalg import cholesky, column_rank, positive_columns
from torchngvi.structures import Forest, arrow
from torchngvi.structures.pattern import Structured
from torchngvi.structures.storage import Part

_AT_ONCE = 65_536  # rows of which everything is computed together on the CPU
Sums = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class GroupedRows:
    """Rows with fixed effects β and random effects b of groups, η = Xβ + Z b_group + offset.

    Attributes:
        batch: the shape of the targets without their rows, () for one set of targets.
        n: the number of groups, r that of the effects of each, p that of the fixed effects.
        processes: those over which the groups are spread, each of which has the rows of its own; None for one process.
        all_groups: the number of groups of all processes.
        columns: how X has been centred and scaled; None where it is as it was given.
        within: the same of Z.
        unit: s_y of default priors, the standard deviation of y for the identity link and 1 for any other, (*batch,).

    >>> fixed = GeneralizedLinear(torch.ones(3, 1), [1.0, 0.0, 2.0], "poisson_log")
    >>> rows = GroupedRows(fixed, torch.ones(3, 1), [0, 1, 1])
    >>> rows.n, rows.r, rows.p
    (2, 1, 1)
    >>> rows.predictor(torch.tensor([1.0, 2.0, 0.5, 0.0])).tolist()
    [1.5, 2.5, 2.5]
    """

    processes: Processes | None = None
    columns: Standardization | None = None
    within: Standardization | None = None
    unit = torch.ones((), dtype=torch.float64)

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


_NEWTON = 50  # steps for the fixed effects alone
_LAST = 2  # more, where that number must not depend on rounding
_SMALLEST = 1e-6  # share of a Newton step


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


def prior_counts(prior: CovariancePrior) -> tuple[Tensor | float, float]:
    """What the prior of Ω adds to the sum of squares of the effects and to the number of groups in an EM iteration."""
    return (prior.inverse, prior.dof) if isinstance(prior, Precision) else (0.0, 0.0)


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


def _alone(rows: GroupedRows) -> Tensor:
    """The modes of β without random effects, by Newton's steps that are halved where they do not descend."""
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
    for _ in range(_NEWTON):
        gradient, step = newton(here)
        # where the step promises no more than rounding, no part of it does
        going = going & ((gradient * step).sum(-1) > torch.finfo(beta.dtype).eps * here.value.abs())
        size = torch.where(going, 1.0, 0.0).to(beta)
        while True:
            there = at(beta - size[..., None] * step)
            worse = (size > _SMALLEST) & ~(there.value <= here.value)
            if not bool(worse.any()):
                break
            size = torch.where(worse, 0.5 * size, size)
        going = size > _SMALLEST
        beta = torch.where(going[..., None], beta - size[..., None] * step, beta)
        gained = here.value - there.value
        here = Moments(
            torch.where(going, there.value, here.value),
            *(torch.where(going[..., None], new, old) for new, old in zip(there[1:], here[1:], strict=True)),
        )
        going = going & (gained > torch.finfo(beta.dtype).eps * here.value.abs())
        if not bool(going.any()):
            break
    for _ in range(0 if rows.processes is None else _LAST):  # to the same digits at any number of processes
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
        lower = small_blocks.cholesky(parts[0].square)[0]
        down = small_blocks.solve(lower, border.mT).mT
        (schur,) = self.rows.total(top - (down @ down.mT).sum(-3, keepdim=True))
        return self.structure.matrix([Part(lower, down), Part(cholesky(schur)[0], top[..., :0, :])])

    def solved(self, root: Structured, g: Tensor) -> Tensor:
        """S⁻¹ g, (*batch, n r + p)."""
        if self.rows.processes is None:
            return self.structure.tsolve(root, self.structure.solve(root, g))
        (leaves, tops), size = self.structure.parts(root), self.rows.n * self.rows.r
        y = small_blocks.solve(leaves.square, g[..., :size].unflatten(-1, (self.rows.n, -1))[..., None])
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
    known, count = prior_counts(prior)
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
    """Where the targets of a model lie, one number for each member of a batch of targets.

    Attributes:
        location: g(ȳ), (*batch,), float64.
        unit: s_y, the standard deviation of y for the identity link, about 0 where the fixed effects make no constant;
            1 for any other link, (*batch,), float64.
    """

    location: Tensor
    unit: Tensor

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
    """Centre and scale columns by the rows of all processes; ``before`` says how those of this one have been
    already.
    """
    if weights.ndim > 1:
        weights = weights.flatten(0, -2).sum(0)
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


def set_effects(rows: GroupedRows) -> None:
    """Centre and scale the columns of the random effects of one factor in place, as their default prior needs it."""
    rows.Z, rows.within = standardized(rows.Z, rows.within, rows.weights, rows.processes)


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
    """Map the coordinates ω of Ω to those of the same effects in the units of the user, (*any, q).

    With b = A b_s the precision is A⁻ᵀ W (A⁻ᵀ W)ᵀ.
    """
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
