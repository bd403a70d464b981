"""The bound of a Pyro model with memoised locals as a function of q(g) alone, each member at its best given q(g).

Given q(g) the members are independent under the best q, and by the envelope theorem the derivative of the bound is that
with the members held (Danskin 1967), as in `torchngvi.models.mixed_batches`, here with expectations over draws that a
batch keeps from pass to pass.  An evaluation is a pass over all batches, whose order and draws are fixed.
"""

import math
from typing import final

import torch
from torch import Tensor

from torchngvi.adapters.pyro.local_sites import Globals, Message, Sites, seen_alone
from torchngvi.adapters.pyro.local_steps import Visits, corrected, framed, turned
from torchngvi.errors import InputError
from torchngvi.expectations.draws import drawn_seed
from torchngvi.interfaces import Frame, Posterior, Raw, TractableTarget
from torchngvi.models import checks
from torchngvi.models.mixed_batches import where

_SHARE = 0.1  # of the norm of the globals that the members may leave
_CLOSE = 0.3  # of the tolerance that they may leave in the end
_ALONE = 0.09  # squared natural norm beyond which a member has no say


@final
class MemoisedBound(TractableTarget):
    """L* as a target for q(g): its energy is L* + entropy(q(g)), so that L of q(g) is the negative ELBO.

    Attributes:
        left: the natural norm that the members have left at the q(g) that was seen last.
        gradient: that of the globals there.
    """

    temperature = 1.0

    def __init__(self, visits: Visits, tolerance: float) -> None:
        self.visits, self.tolerance = visits, tolerance
        self.batches: list[tuple[Tensor, Tensor]] = batches_of(visits)
        self.seed = drawn_seed()
        self.left, self.gradient = 0.0, 1.0

    @property
    def dim(self) -> int:
        """The number P of globals."""
        return self.visits.density.layout.P

    @property
    def members(self) -> int:
        """The number n of members."""
        return self.visits.density.layout.size

    @property
    def sites(self) -> Sites:
        """Those of all members."""
        return self.visits.sites

    def check(self, q: Posterior) -> None:
        """Check that q is over the globals."""
        checks.posterior(q, self.dim, torch.Size(), self.sites.shared_pull)

    def tensors(self) -> tuple[Tensor, ...]:
        """No tensors: what the model reads is not known."""
        return ()

    def log_joint(self, theta: Tensor) -> Tensor:
        """There is none of the globals alone."""
        raise InputError("a bound with memoised locals has no log joint of the globals alone.")

    @torch.no_grad()
    def expected_energy(self, frame: Frame) -> tuple[Tensor, Raw]:
        """Solve all members for this q(g), batch by batch, and sum: L* + entropy(q(g)) and its derivative."""
        allowed = max(_SHARE * min(self.gradient, 10.0), _CLOSE * self.tolerance)
        dense = frame.dense()
        top = Globals(frame.mean, torch.linalg.inv(dense).mT)
        value, g, H, self.left = self._pass(top, self.seed, allowed)
        a, W = dense.mT @ g, dense.mT @ H @ dense
        eye = torch.eye(self.dim, dtype=W.dtype, device=W.device)
        self.gradient = float((a.square().sum() + 0.5 * (W - eye).square().sum()).sqrt())
        return value, Raw(g, H)

    @torch.no_grad()
    def norm_at(self, top: Globals) -> float:
        """The natural norm over all coordinates on fresh draws, without a step of anything."""
        seed = drawn_seed()
        _, g, H, left = self._pass(top, seed, math.inf, keeps=False)
        a = torch.linalg.solve_triangular(top.root, g[:, None], upper=False)
        W = framed(H, top.root)
        eye = torch.eye(self.dim, dtype=W.dtype, device=W.device)
        return float((a.square().sum() + 0.5 * (W - eye).square().sum() + left**2).sqrt())

    def _pass(
        self, top: Globals, seed: int, allowed: float, keeps: bool = True
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """L* + entropy, its slope and curvature, and the norm that the members leave."""
        sites, P = self.sites, self.dim
        members = self.members
        value, g, H = top.mean.new_zeros(()), top.mean.new_zeros(P), top.mean.new_zeros(P, P)
        left = value.clone()
        for number, (index, new) in enumerate(self.batches):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed + number)
                z = self.visits.noise(len(index))
            here, message = sites.of(index, top.mean)
            here, seen, norm2 = self.visits.settled(index, here, top, z, allowed**2 / members)
            seen = corrected(seen, here, top, z)
            alone = seen_alone(seen.members, here)
            each_g, each_H = turned(alone, here.slope)
            if keeps:
                ok = norm2 <= _ALONE
                said = Message(each_H, each_H @ top.mean - each_g)
                sites.keep(
                    index, top.mean, here, Message(*(where(ok, x, y) for x, y in zip(said, message, strict=True)))
                )
            value = value + alone.value[new].sum()
            g, H = g + each_g[new].sum(0), H + each_H[new].sum(0)
            left = left + norm2[new].sum()
            share = 1 / len(self.batches)  # of the terms that all share, seen at the draws of each batch
            value = value + share * seen.value[-1]
            g, H = g + share * seen.g[-1, -P:], H + share * seen.H[-1, -P:, -P:]
        r = self.visits.density.layout.r
        return value - 0.5 * members * r * math.log(2 * math.pi), g, H, float(left.sqrt())


def batches_of(visits: Visits) -> list[tuple[Tensor, Tensor]]:
    """All members in random batches of the size of the subsample; which of each batch were in none before."""
    layout, device = visits.density.layout, visits.sites.visited.device
    n, size = layout.size, layout.members
    order = torch.arange(n) if size == n else torch.randperm(n)
    batches = []
    for first in range(0, n, size):
        places = torch.arange(first, first + size)
        batches.append((order[places % n].to(device), (places < n).to(device)))
    return batches
