"""Memoised sites: what each member of a plate says of itself and of the globals, kept from visit to visit.

    q(g) ∝ exp(-½ gᵀΛg + hᵀg),   Λ = Λ_0 + Σ_i M_i,   h = h_0 + Σ_i μ_i        b_i | g ~ N(c_i - K_iᵀg, S_i⁻¹)

The site of a member is the pair of natural parameters of its clique (b_i, g), and (M_i, μ_i) is its message, what is
left of the site when b_i is integrated out:

    site precision  [S, SKᵀ; KS, KSKᵀ + M]        site shift  [Sc; KSc + μ].

A step on a batch of members takes the expected gradients g_i and Hessians H_i of their terms at their marginals,

    site_i ← (1 - ρ) site_i + ρ (H_i, H_i m_i - g_i)        Λ_0, h_0 the same, from the terms that all share

and changes the two sums by the differences of the messages.  With all members in the batch it is the step of VN (Khan
and Rue 2023, Eq 12) in the arrow; with some of them it costs what these cost, and its fixed point is the same.
"""

from typing import NamedTuple, final

import torch
from torch import Tensor

from torchngvi.adapters.pyro.local_density import Terms
from torchngvi.models.mixed_batches import Locals, Seen
from torchngvi.numerics import small_blocks


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
    """The sites of n members and of the terms that they share, as buffers.

    Args:
        n: the number of members.
        start: b_i and g at the start, (r,) and (P,).
        scale: the standard deviation of all of them there.
    """

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
        return _top(shared + total, shared_pull + total_pull)

    def come_to(self, top: Globals) -> None:
        """Let the shared site make up for what the messages lack of a q(g).

        Args:
            top: q(g).
        """
        precision = top.root @ top.root.mT
        self.sum_up()
        self.shared.copy_(precision - self.total)
        self.shared_pull.copy_(precision @ top.mean - self.total_pull)

    def of(
        self,
        index: Tensor,  # (B,)
        mean: Tensor,  # m_g, (P,)
    ) -> tuple[Locals, Message]:
        """What is kept of some members; those never visited begin at the mean of all that were."""
        get = {name: value[index] for name, value in self.named_buffers() if len(value) == len(self.visited)}
        if bool(self.visited.any()):
            for name in ("centre", "precision", "slope"):
                new = ~get["visited"]
                if bool(new.any()):
                    get[name][new] = getattr(self, name)[self.visited].mean(0)
        at = get["centre"] - (mean @ get["slope"])
        return Locals(at, get["precision"], get["slope"], get["rho"]), Message(get["message"], get["pull"])

    def keep(self, index: Tensor, mean: Tensor, here: Locals, message: Message) -> None:
        """Take what was found for some members, at q(g) of this mean.

        Args:
            index: of the members, (B,).
            mean: m_g, (P,).
            here: b_i given g, with the means at m_g.
            message: theirs.
        """
        self.total += (message.precision - self.message[index]).sum(0)
        self.total_pull += (message.shift - self.pull[index]).sum(0)
        found = [here.mean + mean @ here.slope, here.precision, here.slope, *message, here.rho]
        names = ("centre", "precision", "slope", "message", "pull", "rho")
        for name, value in zip(names, found, strict=True):
            getattr(self, name)[index] = value
        self.visited[index] = True


def clique(here: Locals, top: Globals) -> Tensor:
    """The means of the cliques (b_i, g), (B, r + P)."""
    return torch.cat([here.mean, top.mean.expand(len(here.mean), -1)], -1)


def covariance(here: Locals, top: Globals) -> Tensor:
    """The covariances of the cliques (b_i, g), (B, r + P, r + P)."""
    root, _ = small_blocks.cholesky(here.precision)
    inverse, V = small_blocks.inverse(root), top.covariance
    gb = -V @ here.slope
    bb = inverse.mT @ inverse - here.slope.mT @ gb
    return torch.cat([torch.cat([bb, gb.mT], -1), torch.cat([gb, V.expand(len(gb), -1, -1)], -1)], -2)


def moved(
    here: Locals,
    message: Message,
    seen: Terms,
    top: Globals,
    rate: Tensor,  # (B,)
) -> tuple[Locals, Message, Tensor]:
    """Sites (1 - ρ) site + ρ (H, H m - g) of some members, as locals about the same m_g, messages, and where
    they are.
    """
    r, rho = here.mean.shape[-1], rate[:, None, None]
    cross = here.slope @ here.precision  # K S
    c = here.mean + top.mean @ here.slope
    S = torch.lerp(here.precision, seen.H[:, :r, :r], rho)
    SK = torch.lerp(cross, seen.H[:, r:, :r], rho)
    gg = torch.lerp(cross @ here.slope.mT + message.precision, seen.H[:, r:, r:], rho)
    old = torch.cat([(here.precision @ c[..., None])[..., 0], (cross @ c[..., None])[..., 0] + message.shift], -1)
    new = (seen.H @ clique(here, top)[..., None])[..., 0] - seen.g
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


def _top(precision: Tensor, shift: Tensor) -> Globals:
    root, info = torch.linalg.cholesky_ex(precision)
    root = torch.where(info == 0, root, torch.nan)
    return Globals(torch.cholesky_solve(shift[:, None], root)[:, 0], root)
