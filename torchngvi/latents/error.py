"""How far Laplace's approximation of an integral over latents is off, by draws of its own Gaussian.

With u = û + w ± L⁻ᵀz, w the first-order difference of mean and mode, the integral is Laplace's times E[exp r],
r = log p(y, u, θ) - log p(y, û, θ) + ½ zᵀz.  Where the variance of r is small its error is log E[exp r], by weights; where
it is larger, as over thousands of latents, E[r] + ½ Var[r], in which all terms of third and fourth derivatives of the
usual expansion are (Shun and McCullagh 1995).  Pairs ±z part odd from even terms, so that neither adds to the noise of
the other.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchngvi.latents.curvature import Curvature
from torchngvi.latents.modes import Modes

_VARIES = 3.0  # variance of r up to which weights are used


@dataclass(frozen=True)
class LaplaceError:
    """The error of Laplace's log p(y, θ) at values of the hyperparameters, in nats: what has to be added to it.

    A constant error does not change the posterior of θ.  What changes it is how the error varies: to first order a mean
    moves by the covariance of θ and the error over the posterior, which is `shift`, in standard deviations.

    Attributes:
        theta: the values, (S, P).
        error: log p(y, θ) minus its approximation, (S,).
        standard_error: of each, (S,); the draws of the latents are common to all θ, so that differences are known
            better.
        expanded: where the latents vary too much for weights and the expansion was used, (S,).

    >>> found = LaplaceError(torch.zeros(2, 1), torch.tensor([0.1, 0.2]), torch.tensor([0.01, 0.01]), torch.zeros(2) > 0)
    >>> print(found)
    Laplace's log p(y, theta) is off by 0.1 to 0.2 nats, standard error 0.01, at 2 values of theta.
    """

    theta: Tensor  # (S, P)
    error: Tensor  # (S,)
    standard_error: Tensor  # (S,)
    expanded: Tensor  # (S,)

    @property
    def shift(self) -> Tensor:
        """By how many standard deviations the error moves the posterior mean of each hyperparameter, (P,)."""
        apart = self.theta - self.theta.mean(0)
        moved = (apart * (self.error - self.error.mean())[:, None]).mean(0)
        return moved / apart.square().mean(0).sqrt().clamp_min(torch.finfo(moved.dtype).tiny)

    def __str__(self) -> str:
        low, high, noise = (float(x) for x in (self.error.amin(), self.error.amax(), self.standard_error.amax()))
        off = f"{low:.2g}" if len(self.theta) == 1 else f"{low:.2g} to {high:.2g}"
        where = "1 value" if len(self.theta) == 1 else f"{len(self.theta)} values"
        how = " (by expansion)" if bool(self.expanded.any()) else ""
        text = f"Laplace's log p(y, theta) is off by {off} nats{how}, standard error {noise:.1g}, at {where} of theta."
        if len(self.theta) < 4 * self.theta.shape[-1]:
            return text
        shift = self.shift.abs()
        return f"{text} That moves the mean of theta[{int(shift.argmax())}] by {float(shift.amax()):.2g} sd, the others less."


@torch.no_grad()
def laplace_error(
    theta: Tensor,  # (S, P)
    z: Tensor,  # (N, D)
    curvature: Curvature,
    given: Iterable[tuple[Tensor, Modes, Tensor]],
) -> LaplaceError:
    """Estimate the error at each θ from the same noise.

    Args:
        theta: the hyperparameters, (S, P).
        z: standard normal noise, of which the pairs ±z are used, (N, D).
        curvature: the log joint.
        given: the θ in parts, with modes and means of the latents.

    Returns:
        The errors.
    """
    every = [_parts(z, curvature, *one) for one in given]
    even, odd = (torch.cat(some, 1) for some in zip(*every, strict=True))  # (N, S)
    expanded = (even.var(0) + odd.square().mean(0)) > _VARIES
    by_weights, noise = _by_weights(even, odd)
    pairs = even + 0.5 * odd.square() + 0.5 * (even - even.mean(0)).square()
    by_terms = pairs.mean(0)
    rough = pairs.std(0) / math.sqrt(len(z))
    return LaplaceError(
        theta, torch.where(expanded, by_terms, by_weights), torch.where(expanded, rough, noise), expanded
    )


def _parts(z: Tensor, curvature: Curvature, theta: Tensor, modes: Modes, mean: Tensor) -> tuple[Tensor, Tensor]:
    """The even and the odd part of r at each draw, (N, S)."""
    even, odd = [], []
    for some in z.split(8):
        apart = modes.factor.spread(some.mT.expand(len(theta), -1, -1)).movedim(-1, 0)  # (n, S, D)
        ends = []
        for u in (mean + apart, mean - apart):
            copies = theta.expand(len(some), -1, -1).flatten(0, 1)
            energy = curvature.energy(copies, u.flatten(0, 1)).unflatten(0, u.shape[:2])
            ends.append(modes.energy - energy + 0.5 * some.square().sum(-1)[:, None])
        even.append(0.5 * (ends[0] + ends[1]))
        odd.append(0.5 * (ends[0] - ends[1]))
    return torch.cat(even), torch.cat(odd)


def _by_weights(even: Tensor, odd: Tensor) -> tuple[Tensor, Tensor]:
    """log E[exp r] over the pairs and its standard error, (S,)."""
    terms = torch.logaddexp(even + odd, even - odd) - math.log(2)
    value = torch.logsumexp(terms, 0) - math.log(len(terms))
    return value, (terms - value).exp().std(0) / math.sqrt(len(terms))
