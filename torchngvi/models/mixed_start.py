"""Where a fit of a mixed model starts, and the prior of Kass and Natarajan: from the data, by weighted least squares.

The start is the mode of the penalised quasi-likelihood in (b, β) given Ω (Breslow and Clayton 1993), with Newton steps
between updates of Ω = (n + ν)(S⁻¹ + Σ_i (b_i b_iᵀ + V_i))⁻¹, an EM iteration with Laplace's covariances V_i.
"""

from typing import Protocol

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Coordinates
from torchngvi.models.effects_prior import CovariancePrior
from torchngvi.models.likelihoods import (
    BernoulliLogit,
    BernoulliProbit,
    GaussianNoise,
    Likelihood,
    NegativeBinomial,
    PoissonLog,
    StudentT,
)
from torchngvi.models.mixed_prior import Effects, Precision, Wishart, derivative, omega_of
from torchngvi.models.mixed_rows import GroupedRows
from torchngvi.numerics import small_blocks
from torchngvi.numerics.gaussian_integrals import Moments
from torchngvi.numerics.linalg import cholesky
from torchngvi.structures import Forest, arrow
from torchngvi.structures.pattern import Structured
from torchngvi.structures.storage import Part

_POINT = 1e-6  # a variance of the predictor that is as good as none
_CLIP = 2.0  # length of the longest change of b_i, and of β
_ROUNDS = 12
_SETTLED = 0.05  # change of Ω at which the iteration ends
_FIRST = 0.7  # standard deviation of the random effects in the first round
_NEWTON = 50  # steps for the fixed effects alone
_LAST = 2  # more, where that number must not depend on rounding
_SMALLEST = 1e-6  # share of a Newton step
_SURE = 1.0986122886681098  # log 3, the log odds of (1 + ½)/2


class Observed(Protocol):
    """Targets with their likelihood, one a row."""

    likelihood: Likelihood
    y: Tensor
    weights: Tensor
    offset: Tensor

    def present(self, x: Tensor, otherwise: float) -> Tensor:
        """Put a number for rows of weight 0."""


def row_moments(rows: Observed, eta: Tensor) -> Moments:
    """Weighted -log p(y | η) of each row with two derivatives, the second not negative."""
    likelihood, eta = rows.likelihood, rows.present(eta, 0.0)
    point = torch.full_like(eta, _POINT)
    if isinstance(likelihood, BernoulliLogit | NegativeBinomial):
        moments = likelihood.expected(eta, point, rows.y, _softplus_at)
    else:
        moments = likelihood.expected(eta, point, rows.y)
    value, slope, curvature = (rows.weights * x for x in moments)
    return Moments(value, slope, curvature.clamp_min(0.0))


def _softplus_at(mean: Tensor, variance: Tensor) -> Moments:
    """Of log(1 + eˣ) at a point, which needs no quadrature."""
    slope = mean.sigmoid()
    return Moments(torch.nn.functional.softplus(mean, threshold=40), slope, slope * (-mean).sigmoid())


def prior_counts(prior: CovariancePrior) -> tuple[Tensor | float, float]:
    """What the prior of Ω adds to the sum of squares of the effects, and to the number of groups, in an EM
    iteration.
    """
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


def guessed(rows: Observed) -> Tensor:
    """Predictors that each row alone would have, drawn towards 0 as by half an observation."""
    match rows.likelihood:
        case BernoulliLogit() | BernoulliProbit():
            return _SURE * rows.y
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

    def clipped(self, step: Tensor) -> Tensor:
        """With no change of b_i or β longer than the clip."""
        b, beta, _ = self.rows.parts(step)
        b, beta = (x * (_CLIP / torch.linalg.vector_norm(x, dim=-1, keepdim=True)).clamp_max(1.0) for x in (b, beta))
        return torch.cat([b.flatten(-2), beta], -1)

    def locals(self, root: Structured) -> Tensor:
        """The covariances V_i of b_i, (*batch, n, r, r)."""
        V = self.structure.marginals(self.structure.inverse(root), True)
        return self.structure.parts(V)[0].square


def started(rows: GroupedRows, prior: CovariancePrior, structure: Forest) -> Coordinates:
    """Mean and root of the precision of a start, over all coordinates."""
    known, count = prior_counts(prior)
    penalised, like, batch = _Penalised(rows), rows.X, rows.batch
    identity = torch.eye(rows.r, dtype=like.dtype, device=like.device)
    omega, aim = (identity / _FIRST**2).expand(*batch, -1, -1), guessed(rows)
    curvature = row_moments(rows, aim).curvature
    root = penalised.root(curvature, omega)
    nothing = like.new_zeros(*batch, penalised.structure.dim)  # where the penalty is the pull of the prior mean
    aimed = penalised.gathered(curvature * (aim - rows.offset)) - penalised.penalty(nothing, omega)
    theta = penalised.solved(root, aimed)
    for _ in range(_ROUNDS):
        _, alpha, curvature = row_moments(rows, rows.predictor(theta))
        root = penalised.root(curvature, omega)
        gradient = penalised.gathered(alpha) + penalised.penalty(theta, omega)
        theta = theta - penalised.clipped(penalised.solved(root, gradient))
        b, V = rows.parts(theta)[0], penalised.locals(root)
        (square,) = rows.total((known if rows.leads else 0.0) + b.mT @ b + V.sum(-3))
        new = (rows.all_groups + count) * torch.linalg.inv(square)
        new = 0.5 * (new + new.mT)
        change, omega = torch.linalg.solve(omega, new) - identity, new
        if bool((change.square().sum((-2, -1)) < _SETTLED**2).all()):
            break
    entries = omega_of(cholesky(omega)[0])
    nothing, q = theta.new_zeros(()), entries.shape[-1]
    unsure = Effects(b, entries, V, nothing.expand(*batch, rows.n, q, rows.r), nothing.expand(*batch, q, q))
    wishart = prior if isinstance(prior, Precision) else None
    (H,) = rows.total(derivative(unsure, wishart if rows.leads else None).omega_omega)
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
