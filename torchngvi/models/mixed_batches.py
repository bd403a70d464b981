"""A mixed model batch by batch of groups: the bound as a function of q(g) alone, each group at its best given q(g).

Given q(g) = N(m_g, (T_g T_gᵀ)⁻¹) of the global parameters g = (β, ω) the groups are independent under the best q.  With

    b_i | g ~ N(m_i - K_iᵀ(g - m_g), S_i⁻¹)        L*(m_g, T_g) = min over all (m_i, S_i, K_i) of L

the minimum is where S_i = H_ii, S_i K_iᵀ = H_ig and g_i = 0: VN for each group, whose steps are judged group by group
by the exact bound.  By the envelope theorem the derivative of L* is that of L with the groups held (Danskin 1967):

    g* = g_0 + Σ_i (g_g - K_i g_i)        H* = H_0 + Σ_i (H_gg - K_i H_ig - H_gi K_iᵀ + K_i H_ii K_iᵀ).

Sums over groups are made batch by batch, so that the work of a pass needs memory for one batch of rows only, beside
m_i, S_i and K_i, which are kept.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Frame, Posterior, Raw, TractableTarget
from torchngvi.models import checks
from torchngvi.models.mixed import MixedLogJoint
from torchngvi.models.mixed_prior import Effects, half_squares
from torchngvi.numerics import linalg
from torchngvi.numerics.arrays import tracked
from torchngvi.structures.forest import Part
from torchngvi.structures.pattern import Structured

_SHORTER, _LONGER = 0.35, 2.0  # factors of a member's step size after a failure and after a success
_SHARE = 0.1  # of the norm of the globals that the members may leave
_CLOSE = 0.3  # of the tolerance that they may leave in the end


class Locals(NamedTuple):
    """b_i | g ~ N(m_i - K_iᵀ(g - m_g), S_i⁻¹) of some members, with the length of the next step."""

    mean: Tensor  # m_i, (n, r)
    precision: Tensor  # S_i, (n, r, r)
    slope: Tensor  # K_i, (n, P, r)
    rho: Tensor  # (n,)

    @property
    def root(self) -> Tensor:
        """The Cholesky factors T_i of S_i; NaN where that is not positive definite."""
        root, ok = linalg.small_cholesky(self.precision)
        return torch.where(ok[:, None, None], root, torch.nan)

    def cliques(self, root: Tensor, V: Tensor) -> Tensor:
        """The covariances of (b_i, g), (n, r + P, r + P), of g with the covariance V."""
        inverse, gb = linalg.small_inverse(root), -V @ self.slope
        bb = inverse.mT @ inverse - self.slope.mT @ gb
        return torch.cat([torch.cat([bb, gb.mT], -1), torch.cat([gb, V.expand(len(gb), -1, -1)], -1)], -2)


class Seen(NamedTuple):
    """The terms of some members at their marginals, with the entropy of b_i given g."""

    value: Tensor  # E_q[-log p(y_i, b_i | g)] + log|T_i| - (r/2)(1 + log 2π), (n,)
    g: Tensor  # (n, r + P)
    H: Tensor  # (n, r + P, r + P)
    root: Tensor  # T_i, (n, r, r)

    @classmethod
    def of(cls, value: Tensor, g: Tensor, H: Tensor, root: Tensor) -> Self:
        """Add the entropies, less (r/2) log 2π, to the terms."""
        entropy = root.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * root.shape[-1]
        return cls(value + entropy, g, H, root)

    def norm2(self, slope: Tensor, dense: Tensor) -> Tensor:
        """The part of the squared natural norm of ∇L that is of the members, (n,), for the root C of q(g)."""
        r = self.root.shape[-1]
        a = linalg.small_solve(self.root, self.g[:, :r, None])
        W = linalg.small_solve(self.root, linalg.small_solve(self.root, self.H[:, :r, :r]).mT)
        border = self.H[:, r:, :r] - slope @ self.H[:, :r, :r]
        border = dense.mT @ linalg.small_solve(self.root, border.mT).mT
        eye = torch.eye(r, dtype=W.dtype, device=W.device)
        return a.square().sum((1, 2)) + 0.5 * (W - eye).square().sum((1, 2)) + border.square().sum((1, 2))

    def onto_globals(self, slope: Tensor) -> tuple[Tensor, Tensor]:
        """g_g - K g_i, (n, P), and H_gg - K H_ig - H_gi Kᵀ + K H_ii Kᵀ, (n, P, P)."""
        eye = torch.eye(slope.shape[1], dtype=slope.dtype, device=slope.device)
        turn = torch.cat([-slope, eye.expand(len(slope), -1, -1)], -1)  # (n, P, r + P)
        return (turn @ self.g[..., None])[..., 0], turn @ self.H @ turn.mT


def moved(here: Locals, seen: Seen) -> Locals:
    """A step of VN in (m_i, S_i, S_i K_iᵀ)."""
    r, rho = here.mean.shape[1], here.rho[:, None, None]
    precision = torch.lerp(here.precision, seen.H[:, :r, :r], rho)
    across = torch.lerp(here.slope @ here.precision, seen.H[:, r:, :r], rho)
    root, _ = linalg.small_cholesky(precision)

    def solved(x: Tensor) -> Tensor:
        return linalg.small_tsolve(root, linalg.small_solve(root, x))

    mean = here.mean - here.rho[:, None] * solved(seen.g[:, :r, None])[..., 0]
    return Locals(mean, precision, solved(across.mT).mT, here.rho)


def settled(
    here: Locals,
    see: Callable[[Locals], Seen],
    dense: Tensor,  # the root C of q(g)
    share: float,  # of the squared natural norm, that a member may leave
    goes_on: Callable[[Tensor], bool],  # for the squared norms that are left, (n,)
    most: int,  # steps
    near: float = 0.0,  # the squared norm up to which a step is judged by it, and not by the bound
    least: float = 0.05,
    rounding: float = 1e-12,
) -> tuple[Locals, Seen, Tensor]:
    """VN for each member alone, q(g) as it is: where they end, what is seen there, the squared norms left."""
    # least: step size with which a member begins a pass
    # rounding: relative rise of a member's bound that is rounding
    here = here._replace(rho=here.rho.clamp_min(least))
    seen = see(here)
    norm2 = seen.norm2(here.slope, dense)
    for _ in range(most):
        if not goes_on(norm2):
            break
        there = moved(here, seen)
        new = see(there)
        new_norm2 = new.norm2(there.slope, dense)
        rise = rounding * seen.value.abs().clamp_min(1.0)
        lower = (new.value <= seen.value + rise) | (seen.value.isnan() & new.value.isfinite())  # NaN is not
        better = torch.where(norm2 <= near, new_norm2 < norm2, lower)
        wait = norm2 <= share  # at its share already
        keep = better & ~wait
        rho = torch.where(better, (_LONGER * here.rho).clamp_max(1.0), _SHORTER * here.rho)
        rho = torch.where(wait, here.rho, rho)
        here = Locals(*(_where(keep, x, y) for x, y in zip(there, here, strict=True)))._replace(rho=rho)
        seen = Seen(*(_where(keep, x, y) for x, y in zip(new, seen, strict=True)))
        norm2 = torch.where(keep, new_norm2, norm2)
    return here, seen, norm2


def _where(mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """torch.where for a mask over members, (n,)."""
    return torch.where(mask.reshape(-1, *(1,) * (x.ndim - 1)), x, y)


def natural_norm(frame: Frame, g: Tensor, H: Tensor) -> float:
    """The natural norm of q(g) for a slope (P,) and a curvature (P, P)."""
    dense = frame.dense()
    a, W = dense.mT @ g, dense.mT @ H @ dense
    eye = torch.eye(len(W), dtype=W.dtype, device=W.device)
    return float((a.square().sum() + 0.5 * (W - eye).square().sum()).sqrt())


class BoundOfMembers(TractableTarget):
    """L* as a target for q(g), a Gaussian over the P global parameters: abstract."""

    temperature = 1.0
    left, gradient = 0.0, 1.0  # the natural norms of what the members have left for the last q(g), and of the globals
    tolerance: float
    dim: int
    like: Tensor
    kind: str  # in words

    def check(self, q: Posterior) -> None:
        """Check that q is over the global parameters."""
        checks.posterior(q, self.dim, torch.Size(), self.like)

    def log_joint(self, theta: Tensor) -> Tensor:
        """There is none of the globals alone."""
        raise InputError(f"a bound {self.kind} has no log joint of the globals alone.")

    @torch.no_grad()
    def expected_energy(self, frame: Frame) -> tuple[Tensor, Raw]:
        """Solve all members for this q(g), batch by batch, and sum: L* + entropy(q(g)) and its derivative."""
        allowed = max(_SHARE * min(self.gradient, 10.0), _CLOSE * self.tolerance)
        value, g, H, left = self.summed(frame, allowed)
        self.left, self.gradient = float(left.sqrt()), natural_norm(frame, g, H)
        return value, Raw(g, H)

    @abstractmethod
    def summed(self, frame: Frame, allowed: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """L* + entropy, its slope and curvature, and the squared norm that the members leave, up to ``allowed``²."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Copy what a pass begins from."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a state."""


@final
class MixedInBatches(BoundOfMembers):
    """L* of a mixed model."""

    kind = "in batches of groups"
    most = 100  # steps of the groups of a batch in one pass

    def __init__(self, model: MixedLogJoint, groups: int, tolerance: float) -> None:
        self.model, self.groups, self.tolerance, rows = model, groups, tolerance, model.rows
        self.processes, self.like = model.processes, rows.X
        self.dim = model.dim - rows.n * rows.r
        order = torch.argsort(rows.groups, stable=True)
        ends = torch.bincount(rows.groups).cumsum(0).tolist()
        firsts = range(0, rows.n, groups)
        self.parts = [(k, min(k + groups, rows.n)) for k in firsts]
        self.order = [order[(ends[k - 1] if k else 0) : ends[last - 1]] for k, last in self.parts]
        like, size = rows.X, (rows.n, rows.r)
        self.locals = Locals(
            like.new_zeros(size),
            torch.eye(rows.r, dtype=like.dtype, device=like.device).repeat(rows.n, 1, 1),
            like.new_zeros(rows.n, self.dim, rows.r),
            like.new_ones(rows.n),
        )
        self.mean = like.new_zeros(self.dim)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the model."""
        return self.model.tensors()

    def settings(self) -> tuple[object, ...]:
        """Return the settings of the model."""
        return self.model.settings()

    def known_data(self) -> tuple[Tensor, ...]:
        """Return the tensors of the model that tell it from another."""
        return self.model.known_data()

    # ---------------------------------------------------------------------------- a pass

    def summed(self, frame: Frame, allowed: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Solve all groups, those of all processes."""
        dense = frame.dense()
        V = dense @ dense.mT

        def here() -> list[Tensor]:
            value, g, H = self._shared(frame.mean, V)
            if not self.model.rows.leads:
                value, g, H = (torch.zeros_like(x) for x in (value, g, H))
            left = value.new_zeros(())
            for part, rows in zip(self.parts, self.order, strict=True):
                seen, slope, norm2 = self._solve(part, rows, frame.mean, V, dense, allowed)
                more_g, more_H = seen.onto_globals(slope)
                value, left = value + seen.value.sum(), left + norm2.sum()
                g, H = g + more_g.sum(0), H + more_H.sum(0)
            return [value, g, H, left]

        value, g, H, left = here() if self.processes is None else self.processes.summed(here, (frame.mean, frame.root))
        self.mean = frame.mean.clone()
        return value, g, H, left

    def _solve(
        self,
        part: tuple[int, int],
        rows: Tensor,
        mean: Tensor,
        V: Tensor,
        dense: Tensor,
        allowed: float,  # natural norm of all groups
    ) -> tuple[Seen, Tensor, Tensor]:
        """VN for the groups of a batch: what is seen at the end, their slopes, and the squared norms that are left."""
        first, last = part
        here = Locals(*(x[first:last] for x in self.locals))
        here = here._replace(mean=here.mean - (mean - self.mean) @ here.slope)
        of_rows = self._rows(rows, first)
        enough = allowed**2 * (last - first) / self.model.rows.all_groups
        share = enough / (last - first)  # of each group

        def goes_on(norm2: Tensor) -> bool:  # not where it is NaN, of a q(g) that no step can help
            # of several processes each group for itself, so that it does not depend on which others are there
            return bool(norm2.sum() > enough if self.processes is None else (norm2 > share).any())

        here, seen, norm2 = settled(here, lambda at: self._see(at, of_rows, mean, V), dense, share, goes_on, self.most)
        for whole, x in zip(self.locals, here, strict=True):
            whole[first:last] = x
        return seen, here.slope, norm2

    # ---------------------------------------------------------------------------- expectations

    def _rows(self, index: Tensor, first: int) -> tuple[Tensor, ...]:
        """The rows of a batch: (z, x), group, y, weight, offset."""
        rows = self.model.rows
        x = torch.cat([rows.Z[index], rows.X[index]], -1)
        return x, rows.groups[index] - first, rows.y[index], rows.weights[index], rows.offset[index]

    def _see(self, here: Locals, rows: tuple[Tensor, ...], mean: Tensor, V: Tensor) -> Seen:
        """The terms of the groups of a batch; NaN where S_i is not positive definite."""
        root, m = here.root, torch.cat([here.mean, mean.expand(len(here.mean), -1)], -1)
        clique = here.cliques(root, V)
        value, g, H = self._data(rows, m, clique)
        more, more_g, more_H = self._effects(m, clique)
        return Seen.of(value + more, g + more_g, H + more_H, root)

    def _data(self, rows: tuple[Tensor, ...], m: Tensor, V: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Σ_j E[w f(η_ij)] of each group, and its derivative."""
        x, group, y, weights, offset = rows
        likelihood, present, k = self.model.rows.likelihood, weights > 0, x.shape[-1]
        eta = torch.where(present, (x * m[group, :k]).sum(-1) + offset, 0.0)
        variance = torch.where(present, ((x[:, None, :] @ V[group, :k, :k])[:, 0] * x).sum(-1), 1.0)
        value, alpha, beta = (weights * part.detach() for part in likelihood.expected(eta, variance, y))
        g, H = torch.zeros_like(m), torch.zeros_like(V)
        g[:, :k] = g[:, :k].index_add(0, group, alpha[:, None] * x)
        H[:, :k, :k] = H[:, :k, :k].index_add(0, group, (beta[:, None] * x)[:, :, None] * x[:, None, :])
        return value.new_zeros(len(m)).index_add(0, group, value), g, H

    def _effects(self, m: Tensor, V: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """E[½ b_iᵀΩb_i - Σ_k ω_kk] of each group, less (r/2) log 2π of the entropy, and its derivative."""
        r = self.model.rows.r
        diagonal, w = torch.as_tensor(self.model.covariance_prior.diagonal, device=m.device), r + self.model.rows.p

        def of(m: Tensor, V: Tensor) -> Tensor:
            parts = m[:, None, :r], m[:, w:], V[:, None, :r, :r], V[:, None, w:, :r], V[:, w:, w:]
            return half_squares(Effects(*parts))[:, 0]

        value, g, H = _differentiated(of, m, V)
        g[:, w + diagonal] -= 1.0
        return value - m[:, w + diagonal].sum(-1), g, H

    def _shared(self, mean: Tensor, V: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """E[-log p(β) - log p(ω)], and its derivative."""
        value, g, H = _differentiated(self.model.shared_energy, mean[None], V[None])
        return value[0], g[0], H[0]

    # ---------------------------------------------------------------------------- the whole q

    def state(self) -> dict[str, Any]:
        """Copy what a pass begins from."""
        groups = {name: x.clone() for name, x in self.locals._asdict().items()}
        return {**groups, "m_g": self.mean.clone(), "left": self.left, "gradient": self.gradient}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.locals = Locals(*(state[name].clone() for name in Locals._fields))
        self.mean, self.left, self.gradient = state["m_g"].clone(), state["left"], state["gradient"]

    def begin_at(
        self,
        mean: Tensor,  # (D,)
        root: Structured,  # T in the arrow
    ) -> Tensor:
        """Begin at a Gaussian over all coordinates."""
        leaves, (top, _) = self.model.structure.parts(root)
        b, rows = mean[: -self.dim], self.model.rows
        slope = linalg.small_tsolve(leaves.square, leaves.border.mT).mT
        precision = leaves.square @ leaves.square.mT
        self.locals = Locals(b.reshape(rows.n, rows.r).clone(), precision, slope, torch.ones_like(b[: rows.n]))
        self.mean = mean[-self.dim :].clone()
        return top[0]

    def whole(
        self,
        mean: Tensor,  # m_g, (P,)
        root: Tensor,  # T_g, (P, P)
    ) -> tuple[Tensor, Structured]:
        """The Gaussian over all coordinates of q(g) and of the groups given g."""
        here = self.locals
        b = here.mean - (mean - self.mean) @ here.slope
        leaf, _ = linalg.small_cholesky(here.precision)
        parts = [Part(leaf, here.slope @ leaf), Part(root[None], root[None, :0, :])]
        return torch.cat([b.flatten(), mean]), self.model.structure.matrix(parts)


@tracked
@torch.enable_grad()
def _differentiated(
    of: Callable[[Tensor, Tensor], Tensor],  # of n means and covariances, (n,)
    m: Tensor,
    V: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Values, gradients and Hessians by Bonnet's and Price's theorems, dF = gᵀdm + ½⟨H, dV⟩."""
    m, V = m.detach().clone().requires_grad_(), V.detach().clone().requires_grad_()
    value = of(m, V)
    g, G = torch.autograd.grad(value.sum(), [m, V])
    return value.detach(), g, G + G.mT
