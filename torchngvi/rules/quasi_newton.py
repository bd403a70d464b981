"""L-BFGS in q's frame: the natural gradient, bent by what the last steps showed.

In the frame the Fisher metric is the identity, so limited-memory BFGS (Nocedal 1980; Nocedal and
Wright 2006, Algorithm 7.4) with the initial inverse Hessian 1 starts as the natural gradient and
learns where the objective curves otherwise: the slow tail of weakly identified directions, and the
off-diagonal coupling a mean-field q cannot hold.  Pairs s = ρ direction, y = change of the gradient
are kept in frame coordinates and carried to the next frame unchanged, which is parallel transport
up to the rotation between two triangular roots, of the order of the step.  Steps longer than
`_NEAR` in the natural norm say nothing about the tail: they clear the memory.

A gradient goes in, a gradient comes out, and any natural-gradient rule may follow its curve.  The
memory of each batch member is its own.
"""

from typing import NamedTuple, final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Local, Posterior, Structure

_NEAR = 1.0  # length of a step, √(2 KL), beyond which its pair is not kept
_CURVED = 1e-8  # smallest cosine of the angle between s and y


class Bent(NamedTuple):
    """A gradient after the memory has acted on it."""

    local: Local  # B∇L: the rules take it for the gradient
    slope: Tensor  # ⟨∇L, B∇L⟩, (*batch,)


@final
class QuasiNewton:
    """B∇L with B the L-BFGS inverse Hessian in the frame.

    Args:
        memory: number of pairs; each costs two gradients of storage.

    Raises:
        InputError: a memory below 1.
    """

    def __init__(self, memory: int = 5) -> None:
        if memory < 1:
            raise InputError(f"memory is the number of pairs kept, at least 1; got {memory}.")
        self.memory = memory

    def init(self, q: Posterior) -> dict[str, Tensor]:
        """An empty memory: the pairs (s, y), the last gradient and direction, and how far q went along it."""
        vector, matrix = q.mean_probe.detach(), q.root_probe.detach()
        state = {}
        for name, count in (("s", self.memory), ("y", self.memory), ("gradient", 1), ("direction", 1)):
            state[f"{name}_a"] = vector.new_zeros((count, *vector.shape))
            state[f"{name}_P"] = matrix.new_zeros((count, *matrix.shape))
        state["kept"] = vector.new_zeros((self.memory, *q.batch_shape))
        state["went"] = vector.new_zeros(q.batch_shape)
        return state

    def __call__(
        self,
        q: Posterior,
        gradient: Local,
        state: dict[str, Tensor],
    ) -> tuple[Bent, dict[str, Tensor]]:
        """Learn from the step before, then bend the gradient; returns what of the state is to change."""
        inner = _Inner(q.structure)
        new = self._learned(inner, gradient, state)
        pairs = [
            (Local(sa, sP), Local(ya, yP), kept)
            for sa, sP, ya, yP, kept in zip(*(new[k] for k in ("s_a", "s_P", "y_a", "y_P", "kept")), strict=True)
        ]
        bent, shares = gradient, []
        for s, y, kept in pairs:  # the newest first
            curvature = torch.where(kept > 0, inner(s, y), 1.0)
            share = kept * inner(s, bent) / curvature
            bent = inner.add(bent, -share, y)
            shares.append((share, curvature))
        for (s, y, kept), (share, curvature) in zip(reversed(pairs), reversed(shares), strict=True):
            bent = inner.add(bent, share - kept * inner(y, bent) / curvature, s)
        slope, norm2 = inner(gradient, bent), inner(gradient, gradient)
        downhill = slope > 0
        bent = inner.where(downhill, bent, gradient)
        slope = torch.where(downhill, slope, norm2)
        new["kept"] = new["kept"] * downhill
        nothing = Local(torch.zeros_like(gradient.a), torch.zeros_like(gradient.P))
        for name, value in (("gradient", gradient), ("direction", bent)):
            finite = inner.where(norm2.isfinite(), value, nothing)  # a NaN is not remembered
            new[f"{name}_a"], new[f"{name}_P"] = finite.a[None], finite.P[None]
        return Bent(bent, slope), new

    def _learned(self, inner: "_Inner", gradient: Local, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The memory with the pair of the last step, for the members that moved."""
        went = state["went"]
        before = Local(state["gradient_a"][0], state["gradient_P"][0])
        s = inner.scaled(-went, Local(state["direction_a"][0], state["direction_P"][0]))
        y = inner.add(gradient, -torch.ones_like(went), before)
        sy, ss, yy = inner(s, y), inner(s, s), inner(y, y)
        moved = went > 0
        near = ss.sqrt() <= _NEAR
        useful = moved & near & (sy > _CURVED * (ss * yy).sqrt())
        new = {}
        for name, value in (("s_a", s.a), ("s_P", s.P), ("y_a", y.a), ("y_P", y.P), ("kept", torch.ones_like(went))):
            shifted = torch.cat([value[None], state[name][:-1]])
            mask = useful.reshape(useful.shape + (1,) * (value.ndim - useful.ndim))
            new[name] = torch.where(mask, shifted, state[name])
        new["kept"] = new["kept"] * (near | ~moved)
        return new


class _Inner:
    """The inner product of the frame, ⟨x, x'⟩ = a·a' + ½ tr(P P'), and what goes with it."""

    def __init__(self, structure: Structure) -> None:
        self.structure = structure

    def __call__(self, x: Local, y: Local) -> Tensor:
        matrix = x.P * y.P
        return (x.a * y.a).sum(-1) + 0.5 * matrix.sum(tuple(range(-self.structure.rank, 0)))

    def scaled(self, factor: Tensor, x: Local) -> Local:
        return Local(factor[..., None] * x.a, self.structure.scaled(factor, x.P))

    def add(self, x: Local, factor: Tensor, y: Local) -> Local:
        step = self.scaled(factor, y)
        return Local(x.a + step.a, x.P + step.P)

    def where(self, mask: Tensor, x: Local, y: Local) -> Local:
        wide = mask.reshape(mask.shape + (1,) * self.structure.rank)
        return Local(torch.where(mask[..., None], x.a, y.a), torch.where(wide, x.P, y.P))
