"""What is known of the latents: their marginals, which are mixtures over the hyperparameters, and joint draws."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import shown
from torchngvi.errors import InputError
from torchngvi.latents.modes import Modes
from torchngvi.models.checks import numbers
from torchngvi.posteriors.shapes import number_of_draws

_BISECTIONS = 60  # of an interval that holds a quantile
_WIDE = 40.0  # standard deviations within which every quantile in double precision lies


@dataclass(frozen=True)
class Latents:
    """The distribution of the latents given the data, an even mixture of Gaussians: one for each value of θ.

    Attributes:
        theta: the values of the hyperparameters, (S, P).
        means: of the latents given each θ, (S, D).
        stddevs: the same, (S, D).
        modes: finds the modes of the latents at values of θ anew.

    >>> def joint(theta, u):
    ...     return -0.5 * (u - theta).square().sum(-1)
    >>> from torchngvi import marginal
    >>> target = marginal(joint, latents=3, at=torch.zeros(1, dtype=torch.float64))
    >>> found = target.latents(torch.tensor([[-1.0], [1.0]]))
    >>> [round(x, 4) for x in found.mean.tolist()], round(found.stddev[0].item() ** 2, 4)
    ([0.0, 0.0, 0.0], 2.0)
    """

    theta: Tensor  # (S, P)
    means: Tensor = field(repr=False)  # (S, D)
    stddevs: Tensor = field(repr=False)  # (S, D)
    modes: Callable[[Tensor], Iterator[tuple[Tensor, Modes]]] = field(repr=False)

    @property
    def mean(self) -> Tensor:
        """The marginal means, (D,)."""
        return self.means.mean(0)

    @property
    def stddev(self) -> Tensor:
        """The marginal standard deviations, (D,): those given θ, and the spread of the means over θ."""
        return (self.stddevs.square().mean(0) + self.means.var(0, correction=0)).sqrt()

    def quantile(
        self,
        probability: float,
    ) -> Tensor:
        """Compute a quantile of each marginal by bisection, (D,).

        Raises:
            InputError: a probability that is no number, or not between 0 and 1.
        """
        if isinstance(probability, bool) or not isinstance(probability, Real):
            raise InputError(
                f"a quantile needs one probability, a number between 0 and 1; got {probability!r}. Ask for several in "
                "turn."
            )
        if not 0 < probability < 1:
            raise InputError(f"a quantile needs a probability between 0 and 1; got {probability}.")
        low = (self.means - _WIDE * self.stddevs).amin(0)
        high = (self.means + _WIDE * self.stddevs).amax(0)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            below = torch.special.ndtr((middle - self.means) / self.stddevs).mean(0) < probability
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return 0.5 * (low + high)

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw all latents jointly, (n, D): each θ in its turn, and given it û + w + L⁻ᵀz, H = L Lᵀ.

        The factors are computed anew, since those of all θ would not fit the memory.
        """
        n = number_of_draws(n)
        some = self.theta[:n]
        rounds, drawn = -(-n // len(some)), []
        for part, modes in self.modes(some):
            shape = (len(part), self.means.shape[-1], rounds)
            z = torch.randn(shape, generator=generator, dtype=self.means.dtype, device=self.means.device)
            drawn.append(modes.factor.spread(z))
        return (self.means[:n] + torch.cat(drawn).movedim(-1, 0)).flatten(0, 1)[:n]


def thetas_of(
    source: Any,
    like: Tensor,  # (P,)
    draws: int,
    generator: torch.Generator | None,
) -> Tensor:
    """Take values of the hyperparameters from what a user has.

    >>> thetas_of([1.0, 2.0], torch.zeros(2), 8, None).tolist()
    [[1.0, 2.0]]
    """
    if isinstance(source, type):
        raise InputError(f"theta is a posterior, a result or values; got {shown(source)}.")
    posterior = getattr(source, "posterior", source)
    if hasattr(posterior, "sample"):
        shape: Any = (draws,) if hasattr(posterior, "batch_shape") else draws  # densities of refine take a number
        theta = posterior.sample(shape, generator).to(like)
    else:
        theta = numbers("theta", source, like)
    theta = theta[None] if theta.ndim == 1 else theta
    if theta.ndim != 2 or theta.shape[-1] != len(like) or not math.prod(theta.shape):
        raise InputError(
            f"values of the {len(like)} hyperparameters are (S, {len(like)}), or come from a posterior over them; got "
            f"shape {tuple(theta.shape)}."
        )
    return theta
