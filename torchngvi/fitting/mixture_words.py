"""What is said of a mixture at the end of a fit: which components have lost a weight, a place or a mode."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.interfaces import Target
from torchngvi.numerics.linalg import finite
from torchngvi.posteriors.mixture import Mixture, overlaps

GONE = 1e-6  # weight below which a component is left behind
_SAME = 0.95  # overlap from which two components are one
_ENTRIES = 2**24  # of all covariances of pairs together, up to which overlaps are asked for
_MISSED = 5.0  # nats of log p - log q above the ELBO at which q misses the density
_DENSE = 10.0  # nats, beside one a coordinate, below the largest density at a mean: further out is a tail


class Seen(NamedTuple):
    """What is seen of a mixture over draws of its components."""

    gains: Tensor  # E_k h, (K,)
    norms: Tensor  # of the natural gradient of each component, (K,)
    elbo: float  # Σ π_k E_k h, in nats
    norm: float  # of the worst component that has a weight, the gap of E_k h to the ELBO included
    error: float = 0.0  # standard error of the ELBO


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _components(which: list[int]) -> str:
    """Some of them, counted from 1."""
    return f"component{'s' * (len(which) > 1)} {_listed([str(k + 1) for k in which])}"


def converged(fresh: Seen, draws: int, q: Mixture) -> str:
    """The reason of a run that has come to a fixed point."""
    told = (
        f"all gradients vanish over {draws} draws of each component; on fresh draws their norm is {fresh.norm:.2g} and "
        f"the ELBO {fresh.elbo:.6g} ± {fresh.error:.1g}."
    )
    if len(q) == 1:
        return told
    held = q.weights.cpu() >= GONE
    gap = float((fresh.gains - fresh.elbo)[held].abs().max())
    weights = _listed([f"{weight:.3g}" for weight in q.weights.tolist()])
    return f"{told} E_k[log p - log q] is the same for all components within {gap:.1g} nats. The weights are {weights}."


def not_finite(seen: Seen) -> str:
    """Why no step can help, where an expectation is not finite."""
    bad = (~(finite(seen.gains) & finite(seen.norms))).nonzero().flatten().tolist()
    if not bad:
        return ""
    return (
        f"because log p - log q or its gradient is not finite at draws of {_components(bad)}: begin nearer to a mode, "
        "or narrower."
    )


def too_noisy(draws: int, norm: float, tolerance: float) -> str:
    """Why a run ends that has come to the fixed point of its draws, and not near enough to that of all."""
    return (
        f"because q is at the fixed point over {draws} draws of each component, which are the most, and on fresh draws "
        f"the norm is {norm:.2g} against a tolerance of {tolerance:.2g}: the log joint is far from Gaussian where the "
        "components are. More components, a warp or a larger tolerance may help."
    )


def remarks(q: Mixture, target: Target, origin: Tensor, elbo: float) -> str:
    """What became of the components, where it is not what a user expects."""
    told = ""
    weights = q.weights.cpu()
    gone = (weights < GONE).nonzero().flatten().tolist()
    if gone:
        one = len(gone) == 1
        told += (
            f" {_components(gone).capitalize()} {'has' if one else 'have'} a vanishing weight "
            f"({float(weights[gone].max()):.1g}): without {'it' if one else 'them'} q is the same."
        )
    if len(q) > 1 and (len(q) * q.dim) ** 2 <= _ENTRIES:
        near = (overlaps(q.components).cpu() > _SAME) & (weights >= GONE) & (weights >= GONE)[:, None]
        for j, k in near.triu(1).nonzero().tolist():
            told += f" {_components([j, k]).capitalize()} have come to one place, where one of them would do."
    for k in _missed(q, target, origin, elbo):
        told += (
            f" Where {_components([k])} began the log joint is far above q: a mode is lost there. Begin with a "
            "component at each mode, or with smaller steps."
        )
    return told


@torch.no_grad()
def _missed(q: Mixture, target: Target, origin: Tensor, elbo: float) -> list[int]:
    """The components in whose first places q misses a density that is no tail."""
    mean = q.components.frame().mean
    there, here = (target.log_joint(torch.cat([origin, mean])) / target.temperature).chunk(2)
    highest = torch.where(finite(here), here, -math.inf).max()
    dense = there > highest - (_DENSE + q.dim)
    return (dense & (there - q.log_prob(origin) > elbo + _MISSED)).nonzero().flatten().tolist()
