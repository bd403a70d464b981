"""Memoised sites of the members of a plate, and the bound of q(g) with each member at its best given g.

    q(g) ∝ exp(-½ gᵀΛg + hᵀg),   Λ = Λ_0 + Σ_i M_i,   h = h_0 + Σ_i μ_i        b_i | g ~ N(c_i - K_iᵀg, S_i⁻¹)

The site of a member is the pair of natural parameters of its clique (b_i, g), and (M_i, μ_i) is its message, what is
left of the site when b_i is integrated out:

    site precision  [S, SKᵀ; KS, KSKᵀ + M]        site shift  [Sc; KSc + μ].

A step on a batch of members takes the expected gradients g_i and Hessians H_i of their terms at their marginals,

    site_i ← (1 - ρ) site_i + ρ (H_i, H_i m_i - g_i)        Λ_0, h_0 the same, from the terms that all share

and changes the two sums by the differences of the messages.  With all members in the batch it is the step of VN (Khan
and Rue 2023, Eq 12) in the arrow; with some of them it costs what these cost, and its fixed point is the same.

The guard keeps the precision of q(g) and of each member positive definite.  Given q(g) the members are independent:
one whose natural norm is above 0.3 takes steps of VN alone, judged by its own bound at the draws of the visit, ρ_i
times .35 after a failure and doubled after a success, and one that does not get below 0.7 has no say in this visit
(below 1/√2 an H_ii is positive definite).  The step of the globals is ρ ≤ 0.7/ν, ν their natural norm with the others'
messages as they are: then ρ|P|_F < 1 in the frame of q(g), and the damped sites, whose messages are concave in the
sites, keep Λ positive definite.

At its first visit a batch takes steps until ν < 0.3 that are judged by its own bound with the messages of the others,
which may then be long: the start can be far.  From there on the bound is a function of q(g) alone, whose derivative is
that with the members held (Danskin 1967), as in `torchngvi.models.mixed_batches`, here with expectations over draws
that a batch keeps from pass to pass.
"""

import math
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from torchngvi.adapters.pyro.local_density import PlateDensity, Terms
from torchngvi.errors import InputError
from torchngvi.expectations import Antithetic, Quasi
from torchngvi.expectations.draws import drawn_seed
from torchngvi.interfaces import Frame, Posterior, Raw, TractableTarget
from torchngvi.models import checks
from torchngvi.models.mixed_batches import Locals, Seen, where
from torchngvi.numerics import small_blocks

_NEAR, _GUARD = 0.3, 0.7  # natural norms: where a batch solve ends, and beyond which a site is not taken
_MOST, _ROUNDS = 40, 40  # steps of the members alone, and of the globals at the first visit
_HALVINGS = 20  # of a step whose Λ is not positive definite
_SHORTER, _LONGER = 0.35, 2.0  # factors of a step size after a failure and after a success
_LEAST = 0.05  # step size with which a member begins a visit
_ROUNDING = 1e-12  # relative rise of a member's bound that is rounding
_SHARE = 0.1  # of the norm of the globals that the members may leave
_CLOSE = 0.3  # of the tolerance that they may leave in the end
_DRAWS = 64  # of a fresh ELBO, in mirrored pairs


class Globals(NamedTuple):
    """q(g) = N(m, (T Tᵀ)⁻¹)."""

    mean: Tensor  # m, (P,)
    root: Tensor  # T, (P, P)

    @property
    def covariance(self) -> Tensor:
        """V, (P, P)."""
        return torch.cholesky_inverse(self.root)


class Message(NamedTuple):
    """What members say of the globals, exp(-½ gᵀMg + μᵀg)."""

    precision: Tensor  # M, (*batch, P, P)
    shift: Tensor  # μ, (*batch, P)


@final
class Sites(torch.nn.Module):
    """The sites of n members and of the terms that they share, from b_i (r,) and g (P,), as buffers."""

    centre: Tensor  # c, (n, r)
    precision: Tensor  # S, (n, r, r)
    slope: Tensor  # K, (n, P, r)
    message: Tensor  # M, (n, P, P)
    pull: Tensor  # μ, (n, P)
    rho: Tensor  # (n,), the next step of the locals alone
    visited: Tensor  # (n,)
    shared: Tensor  # Λ_0, (P, P)
    shared_pull: Tensor  # h_0, (P,)
    total: Tensor  # ΣM, (P, P)
    total_pull: Tensor  # Σμ, (P,)

    def __init__(self, n: int, start: tuple[Tensor, Tensor], scale: float) -> None:
        super().__init__()
        b, g = start
        r, P = len(b), len(g)
        eye, precision = torch.eye(r, dtype=b.dtype, device=b.device), scale**-2
        for name, value in {
            "centre": b.repeat(n, 1),
            "precision": (precision * eye).repeat(n, 1, 1),
            "slope": g.new_zeros(n, P, r),
            "message": g.new_zeros(n, P, P),
            "pull": g.new_zeros(n, P),
            "rho": g.new_ones(n),
            "visited": torch.zeros(n, dtype=torch.bool, device=g.device),
            "shared": precision * torch.eye(P, dtype=g.dtype, device=g.device),
            "shared_pull": precision * g,
            "total": g.new_zeros(P, P),
            "total_pull": g.new_zeros(P),
        }.items():
            self.register_buffer(name, value)

    def sum_up(self) -> None:
        """Form the sums over the members again, which steps change by differences."""
        self.total.copy_(self.message.sum(0))
        self.total_pull.copy_(self.pull.sum(0))

    def sums(self) -> list[Tensor]:
        """Λ_0, h_0, ΣM and Σμ, the buffers themselves."""
        return [getattr(self, name) for name in ("shared", "shared_pull", "total", "total_pull")]

    def top(self) -> Globals:
        """q(g) of the sums; NaN where the precision is not positive definite."""
        shared, shared_pull, total, total_pull = self.sums()
        root, info = torch.linalg.cholesky_ex(shared + total)
        root = torch.where(info == 0, root, torch.nan)
        return Globals(torch.cholesky_solve((shared_pull + total_pull)[:, None], root)[:, 0], root)

    def come_to(self, top: Globals) -> None:
        """Let the shared site make up for what the messages lack of a q(g)."""
        precision = top.root @ top.root.mT
        self.sum_up()
        self.shared.copy_(precision - self.total)
        self.shared_pull.copy_(precision @ top.mean - self.total_pull)

    def of(self, index: Tensor, mean: Tensor) -> tuple[Locals, Message]:
        """What is kept of some members (B,) at m_g; those never visited begin at the mean of all that were."""
        get = {name: value[index] for name, value in self.named_buffers() if len(value) == len(self.visited)}
        new = ~get["visited"]
        if bool(self.visited.any()) and bool(new.any()):
            for name in ("centre", "precision", "slope"):
                get[name][new] = getattr(self, name)[self.visited].mean(0)
        at = get["centre"] - (mean @ get["slope"])
        return Locals(at, get["precision"], get["slope"], get["rho"]), Message(get["message"], get["pull"])

    def keep(self, index: Tensor, mean: Tensor, here: Locals, message: Message) -> None:
        """Take what was found for some members, b_i given g and their messages, at q(g) of this mean."""
        self.total += (message.precision - self.message[index]).sum(0)
        self.total_pull += (message.shift - self.pull[index]).sum(0)
        found = [here.mean + mean @ here.slope, here.precision, here.slope, *message, here.rho]
        names = ("centre", "precision", "slope", "message", "pull", "rho")
        for name, value in zip(names, found, strict=True):
            getattr(self, name)[index] = value
        self.visited[index] = True


def _chosen(mask: Tensor, new: Any, old: Any) -> Any:
    """The new ones of some members, and the old ones of the others."""
    return type(new)(*(where(mask, x, y) for x, y in zip(new, old, strict=True)))


def covariance(here: Locals, top: Globals) -> Tensor:
    """The covariances of the cliques (b_i, g), (B, r + P, r + P)."""
    root, _ = small_blocks.cholesky(here.precision)
    inverse, V = small_blocks.inverse(root), top.covariance
    gb = -V @ here.slope
    bb = inverse.mT @ inverse - here.slope.mT @ gb
    return torch.cat([torch.cat([bb, gb.mT], -1), torch.cat([gb, V.expand(len(gb), -1, -1)], -1)], -2)


def moved(here: Locals, message: Message, seen: Terms, top: Globals, rate: Tensor) -> tuple[Locals, Message, Tensor]:
    """Sites (1 - ρ) site + ρ (H, H m - g), ρ (B,), as locals about the same m_g, messages, and where they are."""
    r, rho = here.mean.shape[-1], rate[:, None, None]
    cross = here.slope @ here.precision  # K S
    c = here.mean + top.mean @ here.slope
    S = torch.lerp(here.precision, seen.H[:, :r, :r], rho)
    SK = torch.lerp(cross, seen.H[:, r:, :r], rho)
    gg = torch.lerp(cross @ here.slope.mT + message.precision, seen.H[:, r:, r:], rho)
    old = torch.cat([(here.precision @ c[..., None])[..., 0], (cross @ c[..., None])[..., 0] + message.shift], -1)
    mean = torch.cat([here.mean, top.mean.expand(len(here.mean), -1)], -1)  # of the cliques (b_i, g)
    new = (seen.H @ mean[..., None])[..., 0] - seen.g
    shift = torch.lerp(old, new, rate[:, None])
    root, ok = small_blocks.cholesky(S)

    def solved(x: Tensor) -> Tensor:
        return small_blocks.tsolve(root, small_blocks.solve(root, x))

    K, c = solved(SK.mT).mT, solved(shift[:, :r, None])[..., 0]
    M, mu = gg - K @ SK.mT, shift[:, r:] - (SK @ c[..., None])[..., 0]
    M = 0.5 * (M + M.mT)
    return Locals(c - top.mean @ K, S, K, here.rho), Message(M, mu), ok


def seen_alone(seen: Terms, here: Locals) -> Seen:
    """The terms of the members with the entropies of b_i given g, as the passes over mixed models see them."""
    root, ok = small_blocks.cholesky(here.precision)
    root = torch.where(ok[:, None, None], root, torch.nan)
    entropy = root.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * root.shape[-1]
    return Seen(seen.value + entropy, seen.g, seen.H, root)


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


def _norm2(g: Tensor, H: Tensor, top: Globals) -> Tensor:
    """The squared natural norm of q(g) for a slope (P,) and a curvature (P, P)."""
    a = torch.linalg.solve_triangular(top.root, g[:, None], upper=False)
    half = torch.linalg.solve_triangular(top.root, H, upper=False)
    W = torch.linalg.solve_triangular(top.root, half.mT, upper=False)
    eye = torch.eye(len(W), dtype=W.dtype, device=W.device)
    return a.square().sum() + 0.5 * (W - eye).square().sum()


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
    top: Globals
    ok: Tensor  # the members that have a say
    held: list[Tensor]  # the sums before a step
    norm: float
    bound: float  # of the batch with the messages of the others, but for a constant


class Visit(NamedTuple):
    """The natural norm of the globals before the last step on a batch, and whose sites took it, (B,)."""

    norm: float
    taken: Tensor


@final
class Visits:
    """Visits to members of a plate, which move their sites and q(g)."""

    def __init__(self, sites: Sites, density: PlateDensity, num_particles: int) -> None:
        self.sites, self.density, self.num_particles = sites, density, num_particles

    def noise(self, members: int) -> tuple[Tensor, Tensor]:
        """z of the members, (S, B, r), and of the globals, (S, P), in antithetic pairs."""
        layout, like = self.density.layout, self.sites.shared_pull
        quasi = Quasi(self.num_particles // 2, seed=drawn_seed())
        half = quasi(like.new_zeros(members, layout.r)).movedim(0, -1)  # (B, r, S/2)
        root, _ = small_blocks.cholesky(half @ half.mT / half.shape[-1])
        half = small_blocks.solve(root, half).movedim(-1, 0)
        return torch.cat([half, -half]), Antithetic(self.num_particles)(like)

    def visit(self, index: Tensor, rate: float, first: bool = False) -> Visit:
        """Take a step on some members (B,), at the first visit from near the best of their bound with the others."""
        z = self.noise(len(index))
        at, rho = self._look(index, z), rate
        for _ in range(_ROUNDS if first else 0):
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
        return Visit(at.norm, self._step(at, min(rate, _GUARD / max(at.norm, 1e-12))))

    def _look(self, index: Tensor, z: tuple[Tensor, Tensor]) -> _Look:
        """The members of a batch at their best for q(g) as it is, and what is seen there."""
        sites = self.sites
        held = [x.clone() for x in sites.sums()]
        top = sites.top()
        here, message = sites.of(index, top.mean)
        here, seen, norm2 = self.settled(index, here._replace(rho=here.rho.clamp_min(_LEAST)), top, z)
        alone = seen_alone(seen.members, here)
        ok = norm2 <= _GUARD**2  # NaN is not
        cavity = held[2] - message.precision[ok].sum(0), held[3] - message.shift[ok].sum(0)
        g, H = (x[ok].sum(0) for x in turned(alone, here.slope))
        P = len(top.mean)
        g = g + seen.g[-1, -P:] + cavity[0] @ top.mean - cavity[1]
        norm = _norm2(g, H + seen.H[-1, -P:, -P:] + cavity[0], top).sqrt()
        of_others = 0.5 * (cavity[0] * (top.covariance + top.mean[:, None] * top.mean)).sum() - cavity[1] @ top.mean
        bound = alone.value.sum() + seen.value[-1] + of_others + top.root.diagonal().log().sum()
        return _Look(index, here, message, seen, top, ok, held, float(norm), float(bound))

    def _undo(self, at: _Look) -> None:
        """Go back to before a step; the members stay where they were at their best."""
        self.sites.keep(at.batch, at.top.mean, at.here, at.message)
        for buffer, x in zip(self.sites.sums(), at.held, strict=True):
            buffer.copy_(x)

    def settled(
        self, index: Tensor, here: Locals, top: Globals, z: tuple[Tensor, Tensor], share: float = _NEAR**2
    ) -> tuple[Locals, Terms, Tensor]:
        """VN for each member alone, q(g) as it is, until all are near or as near as they get."""

        def look(here: Locals) -> tuple[Terms, Seen, Tensor]:
            seen = self.seen(index, here, top, z)
            alone = seen_alone(seen.members, here)
            return seen, alone, alone.norm2(here.slope, top.root)

        seen, alone, norm2 = look(here)
        silent = Message(torch.zeros_like(top.root).expand(len(index), -1, -1), top.mean.expand(len(index), -1))
        for _ in range(_MOST):
            far = ~(norm2 <= share)  # NaN is far
            if not bool(far.any()):
                break
            there, _, _ = moved(here, silent, seen.members, top, here.rho)
            new, new_alone, new_norm2 = look(there)
            rise = _ROUNDING * alone.value.abs().clamp_min(1.0)
            lower = (new_alone.value <= alone.value + rise) | (alone.value.isnan() & new_alone.value.isfinite())
            better = torch.where(norm2 <= _NEAR**2, new_norm2 < norm2, lower)
            rho = torch.where(better, (_LONGER * here.rho).clamp_max(1.0), _SHORTER * here.rho)
            rho = torch.where(far, rho, here.rho)
            keep = far & better
            here = _chosen(keep, there, here)._replace(rho=rho)
            alone, norm2 = _chosen(keep, new_alone, alone), torch.where(keep, new_norm2, norm2)
            seen = _chosen(torch.cat([keep, keep.new_zeros(1)]), new, seen)
        return here, seen, norm2

    def seen(self, index: Tensor, here: Locals, top: Globals, z: tuple[Tensor, Tensor]) -> Terms:
        """The terms of a batch at draws from its marginals."""
        return self.density.terms(index, *drawn(here, top, z))

    def _step(self, at: _Look, rate: float) -> Tensor:
        """Take new sites, with a shorter step where Λ would not be positive definite after all."""
        sites, here, mean, P = self.sites, at.here, at.top.mean, len(at.top.mean)
        H = at.seen.H[-1, -P:, -P:]
        pull = H @ mean - at.seen.g[-1, -P:]
        for _ in range(_HALVINGS):
            each = torch.full_like(here.rho, rate)
            there, message, positive = moved(here, at.message, at.seen.members, at.top, each)
            keep = at.ok & positive
            sites.keep(at.batch, mean, _chosen(keep, there, here), _chosen(keep, message, at.message))
            sites.shared.lerp_(H, rate)
            sites.shared_pull.lerp_(pull, rate)
            if bool(sites.top().root.isfinite().all()):
                return keep
            self._undo(at)
            rate *= 0.5
        return torch.zeros_like(at.ok)


@final
class MemoisedBound(TractableTarget):
    """The bound L* as a target for q(g): its energy is L* + entropy(q(g)), so that L of q(g) is the negative ELBO."""

    temperature = 1.0

    def __init__(self, visits: Visits, tolerance: float) -> None:
        self.visits, self.sites, self.tolerance = visits, visits.sites, tolerance
        self.batches: list[tuple[Tensor, Tensor]] = batches_of(visits)
        self.dim, self.members = visits.density.layout.P, visits.density.layout.size
        self.seed = drawn_seed()
        self.left, self.gradient = 0.0, 1.0  # natural norms of the members and of the globals, as seen last

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
        top = Globals(frame.mean, torch.linalg.inv(frame.dense()).mT)
        value, g, H, self.left = self._pass(top, self.seed, allowed)
        self.gradient = float(_norm2(g, H, top).sqrt())
        return value, Raw(g, H)

    @torch.no_grad()
    def norm_at(self, top: Globals) -> float:
        """The natural norm over all coordinates on fresh draws, without a step of anything."""
        _, g, H, left = self._pass(top, drawn_seed(), math.inf, keeps=False)
        return float((_norm2(g, H, top) + left**2).sqrt())

    def _pass(
        self, top: Globals, seed: int, allowed: float, keeps: bool = True
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """L* + entropy, its slope and curvature, and the norm that the members leave."""
        sites, P, share = self.sites, self.dim, 1 / len(self.batches)
        value, g, H, left = (top.mean.new_zeros(shape) for shape in ((), (P,), (P, P), ()))
        for number, (index, new) in enumerate(self.batches):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed + number)
                z = self.visits.noise(len(index))
            here, message = sites.of(index, top.mean)
            here, seen, norm2 = self.visits.settled(index, here, top, z, allowed**2 / self.members)
            seen = corrected(seen, here, top, z)
            alone = seen_alone(seen.members, here)
            each_g, each_H = turned(alone, here.slope)
            if keeps:
                said = Message(each_H, each_H @ top.mean - each_g)
                sites.keep(index, top.mean, here, _chosen(norm2 <= _NEAR**2, said, message))
            left = left + norm2[new].sum()
            # the terms that all share are seen at the draws of each batch
            value = value + alone.value[new].sum() + share * seen.value[-1]
            g = g + each_g[new].sum(0) + share * seen.g[-1, -P:]
            H = H + each_H[new].sum(0) + share * seen.H[-1, -P:, -P:]
        r = self.visits.density.layout.r
        return value - 0.5 * self.members * r * math.log(2 * math.pi), g, H, float(left.sqrt())


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


class FreshElbo(NamedTuple):
    """An unbiased estimate of an ELBO in nats, with its standard error.

    >>> str(FreshElbo(-1234.5, 0.21))
    'on 64 fresh draws the ELBO is -1234.5 ± 0.2'
    """

    elbo: float
    error: float

    def __str__(self) -> str:
        return f"on {_DRAWS} fresh draws the ELBO is {self.elbo:.9g} ± {self.error:.1g}"


@torch.no_grad()
def fresh_elbo(visits: Visits, top: Globals, batches: list[tuple[Tensor, Tensor]]) -> FreshElbo:
    """Average log p - log q over joint draws of the globals and all members, which are seen a batch at a time."""
    layout, like = visits.density.layout, top.mean
    generator = torch.Generator().manual_seed(drawn_seed())

    def mirrored(*shape: int) -> Tensor:
        half = torch.randn(_DRAWS // 2, *shape, generator=generator, dtype=like.dtype).to(like.device)
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
