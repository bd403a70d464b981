"""Weighted draws: importance sampling from q and wide t distributions beside it, from values of the log joint."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.diagnostics.importance import Proposal
from torchngvi.diagnostics.linear_response import third_order
from torchngvi.diagnostics.psis import smoothed
from torchngvi.errors import InputError
from torchngvi.expectations.draws import Fixed
from torchngvi.interfaces import Frame
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.refinement.density import Density
from torchngvi.refinement.joint import Joint, Quality, quality_of, value_and_gradient

_DRAWS = 2048
_FEWEST, _EACH = 512, 16  # draws of the residuals, and a coordinate


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


class Wider(NamedTuple):
    """What weighted draws come from."""

    proposal: Proposal
    frame: Frame

    def draws(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw θ, (count, D), and compute the log density of the proposal there."""
        x = self.proposal.sample(count, generator)
        return self.frame.mean + self.frame.push(x), self.proposal.log_density(x)[0]


@torch.no_grad()
def weigh(q: Gaussian, joint: Joint, seed: int) -> tuple[WeightedDraws, Quality, Wider] | None:
    """Draw 2,048 times from q and from t distributions as wide as its linear response, and weigh by p."""
    frame = q.frame()
    z = Fixed(max(_FEWEST, _EACH * q.dim), seed=seed)(frame.mean)
    value, gradient = value_and_gradient(joint, frame.mean + frame.push(z))
    residual = -frame.pull(gradient) - z
    pair = (value.isfinite() & residual.isfinite().all(-1)).reshape(2, -1).all(0).repeat(2)
    M = third_order(z[pair], residual[pair]).matrix if int(pair.sum()) >= _FEWEST // 2 else None
    wider = Wider(Proposal(q, M), frame)
    theta, log_density = wider.draws(_DRAWS, torch.Generator().manual_seed(seed))
    log_weights = joint(theta) - log_density
    if not bool(log_weights.isfinite().any()) or bool(log_weights.isnan().any()):
        return None
    return WeightedDraws(theta, smoothed(log_weights).log_weights), quality_of(log_weights), wider
