"""The ELBO of a guide with memoised locals, on draws that it was not fitted to."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.adapters.pyro.local_sites import Globals
from torchngvi.adapters.pyro.local_steps import Visits, drawn
from torchngvi.expectations.draws import drawn_seed

DRAWS = 64  # in mirrored pairs


class FreshElbo(NamedTuple):
    """An unbiased estimate of an ELBO in nats, with its standard error.

    >>> str(FreshElbo(-1234.5, 0.21))
    'on 64 fresh draws the ELBO is -1234.5 ± 0.2'
    """

    elbo: float
    error: float

    def __str__(self) -> str:
        return f"on {DRAWS} fresh draws the ELBO is {self.elbo:.9g} ± {self.error:.1g}"


@torch.no_grad()
def fresh_elbo(visits: Visits, top: Globals, batches: list[tuple[Tensor, Tensor]]) -> FreshElbo:
    """Average log p - log q over joint draws of the globals and all members, which are seen a batch at a time."""
    layout, like = visits.density.layout, top.mean
    generator = torch.Generator().manual_seed(drawn_seed())

    def mirrored(*shape: int) -> Tensor:
        half = torch.randn(DRAWS // 2, *shape, generator=generator, dtype=like.dtype).to(like.device)
        return torch.cat([half, -half])

    z_g = mirrored(layout.P)
    log_weight = 0.5 * z_g.square().sum(-1) - top.root.diagonal().log().sum()  # -log q(g), (S,)
    for number, (index, new) in enumerate(batches):
        z = mirrored(len(index), layout.r), z_g
        here, _ = visits.sites.of(index, top.mean)
        weights = torch.cat([new.to(like), like.new_full((1,), float(number == 0))])  # what all share counts once
        log_q = torch.linalg.cholesky(here.precision).diagonal(dim1=-2, dim2=-1).log() - 0.5 * z[0].square()
        log_weight = log_weight + visits.density.log_joint(index, *drawn(here, top, z), weights)
        log_weight = log_weight - log_q.sum(-1)[:, new].sum(-1)
    constant = 0.5 * (layout.P + layout.size * layout.r) * math.log(2 * math.pi)
    pairs = constant + log_weight.reshape(2, -1).mean(0)
    return FreshElbo(float(pairs.mean()), float(pairs.std() / len(pairs) ** 0.5))
