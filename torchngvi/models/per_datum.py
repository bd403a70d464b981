"""A log joint that tells its terms apart: one log likelihood a datum, and a log prior."""

from collections.abc import Callable
from typing import final

from torch import Tensor

from torchngvi.arguments import read_callable
from torchngvi.errors import InputError
from torchngvi.interfaces import SeparableTarget
from torchngvi.models.log_joint import LogJoint


@final
class PerDatum(SeparableTarget):
    """A log joint whose terms are known one by one, log p(θ) + Σ_n log p(y_n | θ), as `GaussNewton` needs them.

    Args:
        log_likelihoods: the log likelihood of every datum, θ (S, D) -> (S, N).
        log_prior: the log prior, θ (S, D) -> (S,).
        temperature: the weight γ of the entropy, finite and not negative.

    Raises:
        InputError: if something cannot be called; on use, if a result has another shape.

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
        read_callable("log_likelihoods", log_likelihoods, "must be a function of theta", arguments="theta")
        self.log_likelihoods, self.prior = log_likelihoods, LogJoint(log_prior, temperature)
        self.temperature = self.prior.temperature

    def terms(self, theta: Tensor) -> Tensor:
        """Return log p(y_n | θ), (S, N).

        Raises:
            InputError: if the function gives a result of another shape.
        """
        terms = self.log_likelihoods(theta)
        if terms.ndim != 2 or len(terms) != len(theta):
            raise InputError(
                f"log_likelihoods must map theta of shape {tuple(theta.shape)} to (S, N), one value a draw and datum; "
                f"got shape {tuple(terms.shape)}. Do not sum over the data."
            )
        return terms

    def tensors(self) -> tuple[Tensor, ...]:
        """Return no tensors: those that the functions depend on are unknown."""
        return ()
