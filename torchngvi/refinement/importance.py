"""Weighted draws: importance sampling from q and a wide t beside it, from values of the log joint alone."""

import math

import torch
from torch import Tensor

from torchngvi.diagnostics.linear_response import response_covariance, third_order
from torchngvi.diagnostics.psis import smoothed
from torchngvi.errors import InputError
from torchngvi.expectations.draws import Fixed
from torchngvi.interfaces import Frame
from torchngvi.linalg import cholesky
from torchngvi.refinement.density import Density
from torchngvi.refinement.joint import Joint, Quality, quality_of, value_and_gradient

_DRAWS = 2048
_DEGREES = 5.0  # of freedom
_FEWEST, _EACH = 512, 16  # draws of the residuals, and a coordinate
_LOG_TAU = 0.5 * math.log(2 * math.pi)


class WeightedDraws(Density):
    """Draws of θ with weights that sum to one: moments, quantiles and resampling, and no density.

    Args:
        theta: (S, D).
        log_weights: (S,), of which the exponentials sum to one.

    >>> q = WeightedDraws(torch.tensor([[0.0], [2.0]]), torch.tensor([0.75, 0.25]).log())
    >>> q.mean.item(), q.variance.item()
    (0.5, 0.75)
    """

    theta: Tensor
    log_weights: Tensor

    def __init__(self, theta: Tensor, log_weights: Tensor) -> None:
        super().__init__()
        self.register_buffer("theta", theta)
        self.register_buffer("log_weights", log_weights.to(theta))
        self.dim = theta.shape[-1]

    def log_prob(self, theta: Tensor) -> Tensor:
        """Refused: weighted draws have none.

        Raises:
            InputError: always.
        """
        raise InputError(
            'weighted draws have no density to be evaluated. Use kind="fan" or kind="mixture" of refine for one.'
        )

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n times θ, (n, D): systematic resampling, in any order."""
        like = self.theta
        place = torch.rand((), dtype=torch.float64, device=like.device, generator=generator)
        ranks = (torch.randperm(n, device=like.device, generator=generator) + place) / n
        cumulated = self.log_weights.double().softmax(0).cumsum(0)
        return like[torch.searchsorted(cumulated, ranks).clamp_max(len(like) - 1)]

    def moments(self) -> tuple[Tensor, Tensor]:
        """The weighted mean (D,) and covariance (D, D)."""
        weights = self.log_weights.exp()
        mean = weights @ self.theta
        apart = self.theta - mean
        return mean, (apart.mT * weights) @ apart

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> "WeightedDraws":
        """The draws that a state_dict is of."""
        return cls(state["theta"], state["log_weights"])


@torch.no_grad()
def weigh(frame: Frame, joint: Joint, seed: int) -> tuple[WeightedDraws, Quality] | None:
    """Draw 2,048 times from ½ q + ½ t₅(m, Cov_LR) and weigh by p; None where no draw has a finite weight.

    q keeps the weights bounded where it has mass, and the t has the tails and the width that q lacks, as far as its
    linear response tells (defensive importance sampling: Hesterberg 1995, Technometrics 37).
    """
    dim, mean = len(frame.mean), frame.mean
    z = Fixed(max(_FEWEST, _EACH * dim), seed=seed)(mean)
    value, gradient = value_and_gradient(joint, mean + frame.push(z))
    residual = -frame.pull(gradient) - z
    pair = (value.isfinite() & residual.isfinite().all(-1)).reshape(2, -1).all(0).repeat(2)
    M = third_order(z[pair], residual[pair]).matrix if int(pair.sum()) >= _FEWEST // 2 else torch.zeros_like(z[:dim])
    wide, ok = cholesky(response_covariance(frame, M))
    own = frame.dense()
    if not bool(ok):
        wide = torch.linalg.cholesky(own @ own.mT)
    generator = torch.Generator(mean.device).manual_seed(seed)
    noise = torch.randn(_DRAWS, dim, dtype=mean.dtype, device=mean.device, generator=generator)
    half = _DRAWS // 2
    shape = torch.full((half,), 0.5 * _DEGREES, dtype=mean.dtype, device=mean.device)
    stretch = (_DEGREES / (2 * torch._standard_gamma(shape, generator=generator))).sqrt()
    theta = mean + torch.cat([noise[:half] @ own.mT, stretch[:, None] * noise[half:] @ wide.mT])
    log_weights = joint(theta) - _log_proposal(theta - mean, own, wide)
    if not bool(log_weights.isfinite().any()) or bool(log_weights.isnan().any()):
        return None
    return WeightedDraws(theta, smoothed(log_weights).log_weights), quality_of(log_weights)


def _log_proposal(
    apart: Tensor,  # θ - m, (S, D)
    own: Tensor,  # any root of V, (D, D)
    wide: Tensor,  # lower triangular, (D, D)
) -> Tensor:
    """log(½ N(θ; m, V) + ½ t₅(θ; m, Σ)), (S,)."""
    dim = apart.shape[-1]
    near = torch.linalg.solve(own, apart.mT).square().sum(0)
    far = torch.linalg.solve_triangular(wide, apart.mT, upper=False).square().sum(0)
    normal = -0.5 * near - torch.linalg.slogdet(own)[1] - dim * _LOG_TAU
    constant = (
        math.lgamma(0.5 * (_DEGREES + dim)) - math.lgamma(0.5 * _DEGREES) - 0.5 * dim * math.log(_DEGREES * math.pi)
    )
    student = constant - wide.diagonal().log().sum() - 0.5 * (_DEGREES + dim) * torch.log1p(far / _DEGREES)
    return torch.logaddexp(normal, student) - math.log(2)
