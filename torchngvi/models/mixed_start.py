"""Where a fit of a mixed model starts, and its default prior: from the data, by weighted least squares.

The start is the mode of the penalised quasi-likelihood in (b, β) given Ω (Breslow and Clayton 1993), with Newton's steps
between updates of Ω = (n + ν)(S⁻¹ + Σ_i (b_i b_iᵀ + V_i))⁻¹, an EM iteration with Laplace's covariances V_i.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Coordinates
from torchngvi.models.likelihoods import (
    BernoulliLogit,
    BernoulliProbit,
    GaussianNoise,
    Likelihood,
    NegativeBinomial,
    PoissonLog,
    StudentT,
)
from torchngvi.models.mixed_prior import Effects, Wishart, derivative, omega_of
from torchngvi.numerics.linalg import cholesky
from torchngvi.structures import Forest, arrow
from torchngvi.structures.pattern import Structured
from torchngvi.structures.storage import Part

if TYPE_CHECKING:
    from torchngvi.models.mixed import MixedModel

_POINT = 1e-6  # a variance of the predictor that is as good as none
_CLIP = 2.0  # length of the longest change of b_i, and of β
_ROUNDS = 12
_SETTLED = 0.05  # change of Ω at which the iteration ends
_FIRST = 0.7  # standard deviation of the random effects in the first round
_NEWTON = 50  # steps for the fixed effects alone
_SURE = 1.0986122886681098  # log 3, the log odds of (1 + ½)/2


def _slopes(likelihood: Likelihood, eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """First and second derivative of -log p(y | η), the second not negative."""
    moments = likelihood.expected(eta, torch.full_like(eta, _POINT), y)
    return moments.slope, moments.curvature.clamp_min(torch.finfo(eta.dtype).tiny)


def information(model: "MixedModel") -> Wishart:
    """The default prior of Kass and Natarajan (2006): J, what the rows of one group tell of its effects on average.

    Raises:
        InputError: rows that tell nothing of some effect.
    """
    fixed, Z, r = model.fixed, model.Z, model.r
    _, curvature = _slopes(fixed.likelihood, fixed.predictor(_alone(model)), fixed.y)
    J = (Z * (fixed.weights * curvature)[:, None]).mT @ Z / model.n
    J = 0.5 * (J + J.mT)
    if not bool(cholesky(J)[1]):
        raise InputError(
            "the rows tell nothing of some random effect, so that the default prior of Kass and Natarajan is not there. "
            "Give prior=MixedPrior(precision=Wishart(dof, scale))."
        )
    return Wishart(1.0, J) if r == 1 else Wishart(r + 1.0, J / (r + 1))


def _alone(model: "MixedModel") -> Tensor:
    """The mode of β without random effects, by Newton's steps that are halved where they do not descend."""
    fixed = model.fixed
    beta = fixed.X.new_zeros(fixed.dim)
    before = -fixed.log_joint(beta)
    for _ in range(_NEWTON):
        alpha, curvature = (fixed.weights * x for x in _slopes(fixed.likelihood, fixed.predictor(beta), fixed.y))
        gradient = alpha @ fixed.X + fixed.prior.force(beta)
        H = fixed.prior.add_to((fixed.X * curvature[:, None]).mT @ fixed.X)
        step = torch.linalg.solve(H, gradient)
        size = 1.0
        while not bool((after := -fixed.log_joint(beta - size * step)) <= before) and size > 1e-6:
            size *= 0.5
        if size <= 1e-6:  # nothing more is to be had
            break
        beta, gained, before = beta - size * step, float(before - after), after
        if gained <= 1e-12 * abs(float(after)):
            break
    return beta


def _guessed(model: "MixedModel") -> Tensor:
    """Predictors that each row alone would have, drawn towards 0 as by half an observation."""
    match model.likelihood:
        case BernoulliLogit() | BernoulliProbit():
            return _SURE * model.y
        case PoissonLog() | NegativeBinomial():
            return (model.y + 0.5).log()
        case GaussianNoise() | StudentT():
            return model.y
    return model.offset


class _Penalised:
    """The penalised quasi-likelihood of (b, β) given Ω, over the arrow of these coordinates alone."""

    def __init__(self, model: "MixedModel") -> None:
        self.model = model
        small = arrow(groups=model.n, local=model.r, globals=model.p)
        assert isinstance(small, Forest)
        self.structure = small
        self.prior = model.fixed.prior

    def root(self, curvature: Tensor, omega: Tensor) -> Structured:
        """T of the precision, from the curvatures of the rows and Ω (r, r)."""
        bb, border, between = self.model.summed(torch.zeros_like(curvature), self.model.weights * curvature)[1]
        top = self.prior.add_to(between)[None]
        return self.structure.cholesky(self.structure.matrix([Part(bb + omega, border), Part(top, top[:, :0])]))[0]

    def solved(self, root: Structured, alpha: Tensor, pull: Tensor | None = None) -> Tensor:
        """S⁻¹ times the gradient, (n r + p,)."""
        g_b, g_beta = self.model.summed(self.model.weights * alpha, torch.zeros_like(alpha))[0]
        g = torch.cat([g_b.flatten(), g_beta])
        g = g if pull is None else g + pull
        return self.structure.tsolve(root, self.structure.solve(root, g))

    def pull(self, theta: Tensor, omega: Tensor) -> Tensor:
        """The gradient of the two quadratic penalties."""
        n, r = self.model.n, self.model.r
        b, beta = theta[: n * r].unflatten(0, (n, r)), theta[n * r :]
        return torch.cat([(b @ omega).flatten(), self.prior.force(beta)])

    def clipped(self, step: Tensor) -> Tensor:
        """With no change of b_i or β longer than the clip."""
        n, r = self.model.n, self.model.r
        b, beta = step[: n * r].unflatten(0, (n, r)), step[n * r :]
        shorter = [x * (_CLIP / torch.linalg.vector_norm(x, dim=-1, keepdim=True)).clamp_max(1.0) for x in (b, beta)]
        return torch.cat([shorter[0].flatten(), shorter[1]])


def started(model: "MixedModel") -> Coordinates:
    """Mean and root of the precision of a start, over all coordinates."""
    n, r, p = model.n, model.r, model.p
    penalised, like = _Penalised(model), model.X
    omega = torch.eye(r, dtype=like.dtype, device=like.device) / _FIRST**2
    aim = _guessed(model)
    _, curvature = _slopes(model.likelihood, aim, model.y)
    root = penalised.root(curvature, omega)
    theta = penalised.solved(root, curvature * (aim - model.offset))
    for _ in range(_ROUNDS):
        b = theta[: n * r].unflatten(0, (n, r))
        eta = theta[n * r :] @ model.X.mT + model.offset + (b.index_select(0, model.groups) * model.Z).sum(-1)
        alpha, curvature = _slopes(model.likelihood, eta, model.y)
        root = penalised.root(curvature, omega)
        theta = theta - penalised.clipped(penalised.solved(root, alpha, penalised.pull(theta, omega)))
        b = theta[: n * r].unflatten(0, (n, r))
        inverse = penalised.structure.inverse(root)
        V = penalised.structure.parts(penalised.structure.marginals(inverse, True))[0].square
        scatter = model.precision.inverse + b.mT @ b + V.sum(0)
        new = (n + model.precision.dof) * torch.linalg.inv(scatter)
        new = 0.5 * (new + new.mT)
        change = torch.linalg.solve(omega, new) - torch.eye(r, dtype=like.dtype, device=like.device)
        omega = new
        if float(change.square().sum()) < _SETTLED**2:
            break
    return _extended(model, theta, root, omega, V)


def _extended(model: "MixedModel", theta: Tensor, root: Structured, omega: Tensor, V: Tensor) -> Coordinates:
    """With ω at the root of Ω, independent of the rest, with the expected curvature there for its precision."""
    n, r, p = model.n, model.r, model.p
    entries = omega_of(cholesky(omega)[0])
    q = len(entries)
    nothing = theta.new_zeros(())
    of = Effects(theta[: n * r].unflatten(0, (n, r)), entries, V, nothing.expand(n, q, r), nothing.expand(q, q))
    H = derivative(of, model.precision).omega_omega
    factor, ok = cholesky(H)
    factor = factor if bool(ok) else H.diagonal().clamp_min(1.0).sqrt().diag()
    groups, roots = arrow(groups=n, local=r, globals=p).parts(root)
    top = torch.block_diag(roots.square[0], factor)[None]
    border = torch.cat([groups.border, groups.border.new_zeros(n, q, r)], -2)
    T = model.structure.matrix([Part(groups.square, border), Part(top, top[:, :0])])
    return Coordinates(torch.cat([theta, entries]), T)
