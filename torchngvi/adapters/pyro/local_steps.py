"""A visit to some members of a plate: first each member alone, then the step of `local_sites` on all of them.

The guard.  With sites as they come the precision of q(g) or of a member can stop being positive definite, and the run
is lost.  Two things keep it:

1. Given q(g) the members are independent.  A member whose natural norm is above 0.3 takes steps of VN alone, judged by
   its own bound at the draws of the visit, ρ_i times .35 after a failure and doubled after a success.  A member that
   does not get below 0.7 has no say in this visit: its site stays as it was.  Below 1/√2 an H_ii is positive definite.
2. The step of the globals is ρ ≤ 0.7/ν, ν their natural norm with the others' messages as they are.  Then ρ|P|_F < 1
   in the frame of q(g), and the damped sites, whose messages are concave in the sites, keep Λ positive definite.

At its first visit a batch takes steps until ν < 0.3 that are judged by its own bound with the messages of the others,
which may then be long: the start can be far.
"""

import math
from typing import NamedTuple, final

import torch
from torch import Tensor

from torchngvi.adapters.pyro.local_density import PlateDensity, Terms
from torchngvi.adapters.pyro.local_sites import Globals, Message, Sites, covariance, moved, seen_alone
from torchngvi.expectations import Antithetic, Quasi
from torchngvi.expectations.draws import drawn_seed
from torchngvi.models.mixed_batches import Locals, Seen, where
from torchngvi.numerics import small_blocks

_NEAR, _GUARD = 0.3, 0.7  # natural norms: where a batch solve ends, and beyond which a site is not taken
_MOST, _ROUNDS = 40, 40  # steps of the members alone, and of the globals at the first visit
_HALVINGS = 20  # of a step whose Λ is not positive definite
_SHORTER, _LONGER = 0.35, 2.0  # factors of a step size after a failure and after a success
_LEAST = 0.05  # step size with which a member begins a visit
_ROUNDING = 1e-12  # relative rise of a member's bound that is rounding


class Visit(NamedTuple):
    """What was seen of a batch before its last step."""

    value: Tensor  # of the negative ELBO, that of each member, (B,)
    norm2: Tensor  # of the members' natural gradient, (B,)
    shared: Tensor  # E[ℓ_0], ()
    norm: float  # of the globals' natural gradient
    taken: Tensor  # whose sites took the step, (B,)
    draws: int  # for which the model was run with derivatives


@final
class Visits:
    """Visits to members of a plate, which move their sites and q(g).

    Attributes:
        asked: for how many draws of a batch the model was run with derivatives so far.
    """

    def __init__(self, sites: Sites, density: PlateDensity, num_particles: int) -> None:
        self.sites, self.density, self.num_particles = sites, density, num_particles
        self.asked = 0

    def noise(self, members: int) -> tuple[Tensor, Tensor]:
        """z of the members, (S, B, r), and of the globals, (S, P), in antithetic pairs."""
        layout, like = self.density.layout, self.sites.shared_pull
        seed = drawn_seed()
        quasi = Quasi(self.num_particles // 2, seed=seed)
        half = quasi(like.new_zeros(members, layout.r)).movedim(0, -1)  # (B, r, S/2)
        root, _ = small_blocks.cholesky(half @ half.mT / half.shape[-1])
        half = small_blocks.solve(root, half).movedim(-1, 0)
        return torch.cat([half, -half]), Antithetic(self.num_particles)(like)

    def visit(
        self,
        index: Tensor,  # (B,)
        rate: float,
        first: bool = False,
    ) -> Visit:
        """A step on a batch of members."""
        z, before = self.noise(len(index)), self.asked
        if not first:
            at = self._look(index, z)
            taken = self._step(at, min(rate, _GUARD / max(at.norm, 1e-12)))
        else:
            at, taken = self._solved(index, rate, z)
        return Visit(at.alone.value, at.norm2, at.seen.value[-1], at.norm, taken, self.asked - before)

    def _solved(self, index: Tensor, rate: float, z: tuple[Tensor, Tensor]) -> tuple["_Look", Tensor]:
        """Steps on a batch, judged by its bound with the messages of the others, and a last one from near its best."""
        at, rho = self._look(index, z), rate
        for _ in range(_ROUNDS):
            if at.norm <= _NEAR:
                break
            self._step(at, rho)
            there = self._look(index, z)
            lower = there.bound <= at.bound + _ROUNDING * abs(at.bound) or not math.isfinite(at.bound)
            if lower and bool((there.ok | ~at.ok).all()):
                at, rho = there, min(_LONGER * rho, rate)
            else:
                self._undo(at)
                rho *= _SHORTER
        return at, self._step(at, min(rate, _GUARD / max(at.norm, 1e-12)))

    def _look(self, index: Tensor, z: tuple[Tensor, Tensor]) -> "_Look":
        """The members of a batch at their best for q(g) as it is, and what is seen there."""
        sites = self.sites
        held = [x.clone() for x in sites.sums()]
        top = sites.top()
        here, message = sites.of(index, top.mean)
        here, seen, norm2 = self.settled(index, here._replace(rho=here.rho.clamp_min(_LEAST)), top, z)
        alone = seen_alone(seen.members, here)
        ok = norm2 <= _GUARD**2  # NaN is not
        cavity = held[2] - message.precision[ok].sum(0), held[3] - message.shift[ok].sum(0)
        norm = self._norm(alone, seen, here, cavity, top, ok)
        of_others = 0.5 * (cavity[0] * (top.covariance + top.mean[:, None] * top.mean)).sum() - cavity[1] @ top.mean
        bound = alone.value.sum() + seen.value[-1] + of_others + top.root.diagonal().log().sum()
        return _Look(index, here, message, seen, alone, norm2, top, ok, held, norm, float(bound))

    def _undo(self, at: "_Look") -> None:
        """Go back to before a step; the members stay where they were at their best."""
        self.sites.keep(at.batch, at.top.mean, at.here, at.message)
        for buffer, x in zip(self.sites.sums(), at.held, strict=True):
            buffer.copy_(x)

    def settled(
        self,
        index: Tensor,  # (B,)
        here: Locals,
        top: Globals,
        z: tuple[Tensor, Tensor],
        share: float = _NEAR**2,
    ) -> tuple[Locals, Terms, Tensor]:
        """VN for each member alone, q(g) as it is, until all are near or as near as they get."""
        seen = self.seen(index, here, top, z)
        silent = Message(torch.zeros_like(top.root).expand(len(index), -1, -1), top.mean.expand(len(index), -1))
        alone = seen_alone(seen.members, here)
        norm2 = alone.norm2(here.slope, top.root)
        for _ in range(_MOST):
            far = ~(norm2 <= share)  # NaN is far
            if not bool(far.any()):
                break
            there, _, _ = moved(here, silent, seen.members, top, here.rho)
            new = self.seen(index, there, top, z)
            new_alone = seen_alone(new.members, there)
            new_norm2 = new_alone.norm2(there.slope, top.root)
            rise = _ROUNDING * alone.value.abs().clamp_min(1.0)
            lower = (new_alone.value <= alone.value + rise) | (alone.value.isnan() & new_alone.value.isfinite())
            better = torch.where(norm2 <= _NEAR**2, new_norm2 < norm2, lower)
            rho = torch.where(better, (_LONGER * here.rho).clamp_max(1.0), _SHORTER * here.rho)
            rho = torch.where(far, rho, here.rho)
            keep = far & better
            here = Locals(*(where(keep, x, y) for x, y in zip(there, here, strict=True)))._replace(rho=rho)
            alone = Seen(*(where(keep, x, y) for x, y in zip(new_alone, alone, strict=True)))
            norm2 = torch.where(keep, new_norm2, norm2)
            shared = torch.cat([keep, keep.new_zeros(1)])
            seen = Terms(*(where(shared, x, y) for x, y in zip(new, seen, strict=True)))
        return here, seen, norm2

    def seen(self, index: Tensor, here: Locals, top: Globals, z: tuple[Tensor, Tensor]) -> Terms:
        """The terms of a batch at draws from its marginals."""
        self.asked += self.num_particles
        return self.density.terms(index, *drawn(here, top, z))

    def _norm(
        self, alone: Seen, seen: Terms, here: Locals, cavity: tuple[Tensor, Tensor], top: Globals, ok: Tensor
    ) -> float:
        """The natural norm of the globals, with the messages of the members that have a say at what they would be."""
        r = here.mean.shape[-1]
        g, H = (x[ok].sum(0) for x in turned(alone, here.slope))
        g = g + seen.g[-1, r:] + cavity[0] @ top.mean - cavity[1]
        H = H + seen.H[-1, r:, r:] + cavity[0]
        a = torch.linalg.solve_triangular(top.root, g[:, None], upper=False)
        W = framed(H, top.root)
        eye = torch.eye(len(W), dtype=W.dtype, device=W.device)
        return float((a.square().sum() + 0.5 * (W - eye).square().sum()).sqrt())

    def _step(self, at: "_Look", rate: float) -> Tensor:
        """Take new sites, with a shorter step where Λ would not be positive definite after all."""
        sites, here, top, mean = self.sites, at.here, at.top, at.top.mean
        r = here.mean.shape[-1]
        H = at.seen.H[-1, r:, r:]
        pull = H @ mean - at.seen.g[-1, r:]
        for _ in range(_HALVINGS):
            each = torch.full_like(here.rho, rate)
            there, told, positive = moved(here, at.message, at.seen.members, top, each)
            keep = at.ok & positive
            new = Locals(*(where(keep, x, y) for x, y in zip(there, here, strict=True)))
            message = Message(*(where(keep, x, y) for x, y in zip(told, at.message, strict=True)))
            sites.keep(at.batch, mean, new, message)
            shared, shared_pull, _, _ = sites.sums()
            shared.lerp_(H, rate)
            shared_pull.lerp_(pull, rate)
            if bool(sites.top().root.isfinite().all()):
                return keep
            self._undo(at)
            rate *= 0.5
        return torch.zeros_like(at.ok)


def corrected(seen: Terms, here: Locals, top: Globals, z: tuple[Tensor, Tensor]) -> Terms:
    """Terms whose values have the mean of ½ δᵀHδ over the draws replaced by its expectation ½ tr(HV)."""
    (b, g), r = drawn(here, top, z), here.mean.shape[-1]
    off = torch.cat([b - here.mean, (g - top.mean)[:, None].expand(-1, len(here.mean), -1)], -1)
    error = covariance(here, top) - torch.einsum("sbi,sbj->bij", off, off) / len(off)
    of_members, of_all = seen.H[:-1] * error, seen.H[-1:, r:, r:] * error[:1, r:, r:]
    return seen._replace(value=seen.value + 0.5 * torch.cat([of_members.sum((1, 2)), of_all.sum((1, 2))]))


class _Look(NamedTuple):
    """A batch at its best for a q(g)."""

    batch: Tensor  # the index of its members, (B,)
    here: Locals
    message: Message
    seen: Terms
    alone: Seen
    norm2: Tensor
    top: Globals
    ok: Tensor  # the members that have a say
    held: list[Tensor]  # the sums before a step
    norm: float
    bound: float  # of the batch with the messages of the others, but for a constant


def drawn(here: Locals, top: Globals, z: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Draws from the marginals of members: b_i, (S, B, r), and g, (S, P)."""
    off = torch.linalg.solve_triangular(top.root.mT, z[1].mT, upper=True).mT
    root, _ = small_blocks.cholesky(here.precision)
    own = small_blocks.tsolve(root, z[0].movedim(0, -1)).movedim(-1, 0)
    return here.mean - torch.einsum("sp,bpr->sbr", off, here.slope) + own, top.mean + off


def turned(seen: Seen, slope: Tensor) -> tuple[Tensor, Tensor]:
    """What members see of the globals once b_i follows g, by Schur complements about b_i given g."""
    eye = torch.eye(slope.shape[1], dtype=slope.dtype, device=slope.device)
    turn = torch.cat([-slope, eye.expand(len(slope), -1, -1)], -1)
    return (turn @ seen.g[..., None])[..., 0], turn @ seen.H @ turn.mT


def framed(
    H: Tensor,  # (P, P)
    root: Tensor,  # T, (P, P)
) -> Tensor:
    """T⁻¹ H T⁻ᵀ."""
    half = torch.linalg.solve_triangular(root, H, upper=False)
    return torch.linalg.solve_triangular(root, half.mT, upper=False)
