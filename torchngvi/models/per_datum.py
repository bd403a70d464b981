"""A log joint that tells its terms apart: one log likelihood a datum, and a log prior."""

from collections.abc import Callable
from typing import final

from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import SeparableTarget
from torchngvi.models.log_joint import LogJoint


@final
class PerDatum(SeparableTarget):
    """log p(θ) + Σ_n log p(y_n | θ), whose terms `GaussNewton` needs one by one.

    Args:
        log_likelihoods: θ (S, D) -> (S, N).
        log_prior: θ (S, D) -> (S,).
        temperature: γ, the weight of the entropy.

    Raises:
        InputError: something that cannot be called; on use, a result of another shape.

    >>> import torch
    >>> y = torch.tensor([1.0, 2.0])
    >>> target = PerDatum(lambda theta: -0.5 * (y - theta).square(), lambda theta: -0.5 * theta.square().sum(-1))
    >>> target.log_joint(torch.zeros(1, 1)).item()
    -2.5
    """

    def __init__(
        self,
        log_likelihoods: Callable[[Tensor], Tensor],
        log_prior: Callable[[Tensor], Tensor],
        temperature: float = 1.0,
    ) -> None:
        if not callable(log_likelihoods):
            raise InputError(f"log_likelihoods must be a function of theta; got {type(log_likelihoods).__name__}.")
        self.log_likelihoods, self.prior = log_likelihoods, LogJoint(log_prior, temperature)
        self.temperature = self.prior.temperature

    def terms(self, theta: Tensor) -> Tensor:
        """log p(y_n | θ), (S, N)."""
        terms = self.log_likelihoods(theta)
        if terms.ndim != 2 or len(terms) != len(theta):
            raise InputError(
                f"log_likelihoods must map theta of shape {tuple(theta.shape)} to (S, N), one value a draw and datum; "
                f"got shape {tuple(terms.shape)}. Do not sum over the data."
            )
        return terms

    def tensors(self) -> tuple[Tensor, ...]:
        """Unknown, as of any function."""
        return ()
