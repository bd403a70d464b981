"""Monte Carlo estimates under q: importance weights, the evidence lower bound, and the extremes of a run.

The density q stands for is p^(1/γ), p = exp(log joint): at the temperature γ = 1 the posterior.

    log w = (log joint)/γ - log q        ELBO = γ E_q[log w]
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_size
from torchngvi.errors import InputError
from torchngvi.interfaces import Target
from torchngvi.models.arguments import as_target, read_gaussian, read_posterior
from torchngvi.posteriors.gaussian import Gaussian

_DRAWS_AT_ONCE = 256  # draws a call of the log joint: bounds the memory, not the result


class Estimate(NamedTuple):
    """A Monte Carlo mean with its standard error, one a member.

    Attributes:
        estimate: the mean over the draws, (*batch,).
        standard_error: the standard deviation of the draws over the root of their number, (*batch,).

    >>> found = Estimate(torch.tensor(-1.0), torch.tensor(0.1))
    >>> found.standard_error < found.estimate.abs()
    tensor(True)
    """

    estimate: Tensor  # (*batch,)
    standard_error: Tensor  # (*batch,)


@torch.no_grad()
def log_weights(
    q: Gaussian,
    target: Target | Callable[[Tensor], Tensor],
    num_samples: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Compute log importance weights (log joint)/γ - log q at draws of q, as `psis.k_hat` takes them.

    Args:
        q: the posterior, which is drawn from.
        target: the model, or a function of theta that returns the log joint.
        num_samples: S, at least 2.
        generator: of the draws; torch's default generator if None.

    Returns:
        One weight a draw and member, (S, *batch), in nats.

    Raises:
        InputError: fewer than 2 draws, a target at temperature 0.

    >>> from torchngvi import CholeskyGaussian
    >>> log_weights(CholeskyGaussian(2), lambda theta: -0.5 * theta.square().sum(-1), 4).round(decimals=3)
    tensor([1.8380, 1.8380, 1.8380, 1.8380])
    """
    model = as_target(target)
    if model.temperature == 0:
        raise InputError(
            "log weights compare q with the density exp(log joint / temperature); got temperature 0, where there is "
            "none. Use elbo, or a positive temperature."
        )
    draws, log_joint = _at_draws(q, model, num_samples, generator)
    return log_joint / model.temperature - q.log_prob(draws)


def _at_draws(q: Gaussian, model: Target, num_samples: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draws (S, *batch, D) and their log joint (S, *batch)."""
    read_posterior("an estimate by draws", q, model)
    num_samples = read_size("num_samples", num_samples, "counts draws of a mean and its error", at_least=2)
    draws = q.sample((num_samples,), generator)
    return draws, torch.cat([model.log_joint(part) for part in draws.split(_DRAWS_AT_ONCE)])


@torch.no_grad()
def elbo(
    q: Gaussian,
    target: Target | Callable[[Tensor], Tensor],
    num_samples: int,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Estimate the evidence lower bound E_q[log joint] + γ entropy(q) from draws of q.

    Wanted as a check by draws that the fit has not seen, or for a model without an expectation in closed form.

    Args:
        q: the posterior, which is drawn from.
        target: the model, or a function of theta that returns the log joint.
        num_samples: S, at least 2.
        generator: of the draws; torch's default generator if None.

    Returns:
        The bound in nats, and its standard error, both (*batch,).

    Raises:
        InputError: fewer than 2 draws.

    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(2)
    >>> found = elbo(q, lambda theta: q.log_prob(theta) - 1, 8)  # q is the posterior, of evidence exp(-1)
    >>> round(found.estimate.item(), 5), found.standard_error.item() < 1e-6
    (-1.0, True)
    """
    model = as_target(target)
    draws, log_joint = _at_draws(q, model, num_samples, generator)
    terms = log_joint - model.temperature * q.log_prob(draws)
    return Estimate(terms.mean(0), terms.std(0) / math.sqrt(num_samples))


class Extremes:
    """What Kumar et al. (2025) assume of a run, measured on it: a callback of `fit`.

    Assumption 4 bounds ξ_l ≤ ‖C_t‖_F ≤ ξ_u and λ_min ≤ V_t; Remark 1 bounds V_t by λ_max ≤ ξ_u².

    Attributes:
        xi_l, xi_u, lambda_min, lambda_max: extremes so far, over steps and batch members.

    >>> from torchngvi import CholeskyGaussian
    >>> seen = Extremes(CholeskyGaussian(4, scale=0.5))
    >>> seen.xi_l, seen.xi_u, seen.lambda_min, seen.lambda_max
    (1.0, 1.0, 0.25, 0.25)
    """

    def __init__(self, q: Gaussian) -> None:
        self.q = read_gaussian("Extremes", q)
        self.xi_l = self.lambda_min = math.inf
        self.xi_u = self.lambda_max = 0.0
        self()

    @torch.no_grad()
    def __call__(self, record: object = None) -> None:
        """Take q as it is now into account."""
        # ‖C‖²_F = tr V
        size = self.q.variance.sum(-1).sqrt()
        eigenvalues = (
            self.q.variance if self.q.structure.widest == 1 else torch.linalg.svdvals(self.q.scale_tril).square()
        )
        self.xi_l, self.xi_u = min(self.xi_l, float(size.min())), max(self.xi_u, float(size.max()))
        self.lambda_min = min(self.lambda_min, float(eigenvalues.min()))
        self.lambda_max = max(self.lambda_max, float(eigenvalues.max()))
