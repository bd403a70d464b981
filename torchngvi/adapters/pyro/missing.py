"""Rows that are missing: what ``pyro.sample(name, fn, obs=y, obs_mask=mask)`` makes of them.

Pyro makes two sites of such a call, ``name_observed`` and ``name_unobserved``, both of all rows, of which the second is
latent and masked where a row is observed.  What it holds there has no density, and nothing depends on it: it is idle.
Here it is N(0, 1) in unconstrained space, independent of everything, so that the posterior of all else and the evidence
are those of the missing rows alone.
"""

import math
from typing import Any

import torch
from torch import Tensor


def is_missing(site: Any) -> bool:
    """Whether a latent site is the missing part of one with ``obs_mask``."""
    return site["name"].endswith("_unobserved") and isinstance(site["mask"], Tensor)


def idle_of(
    site: Any,
    free: torch.Size,  # the shape of the unconstrained value
) -> Tensor | None:
    """Which unconstrained values of a latent site are idle."""
    if not is_missing(site):
        return None
    mask = site["mask"].expand(site["fn"].batch_shape)
    return ~mask.reshape(*mask.shape, *(1,) * (len(free) - mask.ndim)).expand(free)


def standing_alone(
    u: Tensor,  # (*sample, *free)
    log_jacobian: Tensor,  # (*sample, *batch)
    idle: Tensor,  # (*free,)
) -> Tensor:
    """The log Jacobian of a site, with log N(u | 0, 1) in its place for what is idle."""
    alone = -0.5 * (u.square() + math.log(2 * math.pi))
    members = log_jacobian.shape[u.ndim - idle.ndim :]
    return torch.where(idle.reshape(*members, -1)[..., 0], alone.reshape(*log_jacobian.shape, -1).sum(-1), log_jacobian)
