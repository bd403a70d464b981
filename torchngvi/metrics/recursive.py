"""The inverse Fisher matrix by recursion, dense (Godichon-Baggioni, Nguyen and Tran 2023, Theorem 4.1, Eqs 4.3-4.6).

The matrix P of `recursion` is kept in full.  The last vectors W wait beside it and are subtracted many at a time,

    P = P₀ - VᵀV,        P x = P₀ x - Vᵀ(Vx),

so that a score costs one product with P₀, and the D² writes of its rank-one update are shared by a block.
"""

import contextlib
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.metrics.preconditioner import State
from torchngvi.metrics.recursion import AT_ONCE, Recursion, downdate
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior

_WAITING = 128  # vectors beside P₀, for large D
_TILE = 128  # rows symmetrised at a time
_SYMMETRISE = 32  # blocks between two symmetrisations
_GIB = 2**30


@final
class Recursive(Recursion):
    """The recursion of IFVB: the direction t P ∇L with P = (εI + Σ φφᵀ + Σ β_j ZZᵀ)⁻¹, from scores at past iterates.

    One wants it for a posterior whose Fisher matrix is not known in closed form, with D up to some thousands, since P
    is dense; `Exact` is better where it exists.

    Args:
        samples: the number S of scores an iteration, at least 1.
        eps: ε of H₀ = εI, positive; None takes the mean square of the first scores, which is tr(I_F)/D.
        c_beta: c_β of β_j = c_β j^{-β}; 0 leaves the Z terms out, None takes 0.03 of that scale. The theory
            wants it positive; its bias c_β/(1 - β) t^{-β} I decays slowly and hides small eigenvalues of I_F.
        beta: β in (0, α - ½) for steps that decay as k^{-α}.
        warmup: the number of scores before the first step; by default max(2D, 1000).
        generator: the generator of the scores and of Z; torch's own by default.

    Raises:
        InputError: if a value is out of range; at construction of an optimizer, if there is not enough memory.

    >>> from torchngvi.ifvb import Beta
    >>> rule, q = Recursive(eps=1.0, c_beta=0.0), Beta(torch.ones(2))
    >>> state = rule.fresh(q)
    >>> state = rule.absorb(state, torch.tensor([[1.0, 0.0]]), torch.Generator())
    >>> rule.inverse(state).tolist()  # (I + φφᵀ)⁻¹, t = 1
    [[0.5, 0.0], [0.0, 1.0]]
    """

    def fresh(self, q: FlatPosterior) -> State:
        """Return an empty sum; P₀ is set by the first scores.

        Raises:
            InputError: if the matrix does not fit into the memory that is free.
        """
        lam, D = q.vector, q.size
        waiting = min(_WAITING, D // 8)
        needed = 2 * lam.element_size() * lam.numel() * (D + waiting)  # an update makes the new beside the old
        free = free_bytes(lam.device)
        if needed > free:
            raise InputError(
                f"the inverse Fisher matrix of {D:,} variational parameters needs {needed / _GIB:.3g} GiB and "
                f"{free / _GIB:.3g} GiB of {lam.device.type} memory are free. Use Blocks, Window or BatchFisher, or a "
                "posterior with fewer parameters."
            )
        empty = {
            "P": lam.new_zeros(*lam.shape, D),
            "V": lam.new_zeros(*lam.shape[:-1], waiting, D),
            "waiting": 0,
            "blocks": 0,
        }
        return self.perturbation.init(lam) | empty

    def absorb(self, state: State, scores: Tensor, generator: torch.Generator | None = None) -> State:
        """Make the two updates of Eqs 4.4 and 4.5 for S scores at once."""
        rows, new = self.perturbation.rows(state, scores, generator)
        if not state["started"]:
            start = (1 / self.perturbation.start(new))[..., None]
            _copied_once("P", new, state).diagonal(dim1=-2, dim2=-1).copy_(start)
        for part in rows.split(AT_ONCE, -2):
            self._take(downdate(part, lambda x: self.times(new, x)), new, state)
        if new["blocks"] >= _SYMMETRISE:
            new["blocks"] = 0
            _symmetrise(_copied_once("P", new, state))
        return new

    def _take(self, W: Tensor, new: State, old: State) -> None:
        """P ← P - WᵀW: now if two such blocks would not fit beside P₀, else with the others that wait."""
        count, room = W.shape[-2], new["V"].shape[-2]
        if 2 * count > room:
            self._subtract(W, new, old)
            return
        if new["waiting"] + count > room:
            self._subtract(new["V"][..., : new["waiting"], :], new, old)
            new["waiting"] = 0
        _copied_once("V", new, old)[..., new["waiting"] : new["waiting"] + count, :] = W
        new["waiting"] += count

    def _subtract(self, V: Tensor, new: State, old: State) -> None:
        """P₀ ← P₀ - VᵀV, in a tensor that is not that of the old state."""
        P = _copied_once("P", new, old)
        if P.ndim == 2:
            P.addmm_(V.mT, V, alpha=-1)
        else:
            P.flatten(0, -3).baddbmm_(V.flatten(0, -3).mT, V.flatten(0, -3), alpha=-1)
        new["blocks"] += 1

    def times(self, state: State, rows: Tensor) -> Tensor:
        """Multiply rows by P from the right, up to five times faster than P x columns where there are a few of them."""
        product = rows @ state["P"]
        if state["waiting"]:
            V = state["V"][..., : state["waiting"], :]
            product -= (rows @ V.mT) @ V
        return product

    def inverse(self, state: State) -> Tensor:  # (*batch, D, D)
        """Write out t P, (*batch, D, D), the estimate of I_F⁻¹."""
        V = state["V"][..., : state["waiting"], :]
        return state["count"][..., None, None] * (state["P"] - V.mT @ V)


def _copied_once(name: str, new: State, old: State) -> Tensor:
    """The tensor of that name in the new state, to be written to: a copy of that of the old state, made once."""
    if new[name] is old[name]:
        new[name] = old[name].clone()
    return new[name]


def _symmetrise(P: Tensor) -> None:
    """P ← (P + Pᵀ)/2 in place, a strip at a time."""
    for start in range(0, P.shape[-1], _TILE):
        stop = min(start + _TILE, P.shape[-1])
        strip = 0.5 * (P[..., start:stop, start:] + P[..., start:, start:stop].mT)
        P[..., start:stop, start:] = strip
        P[..., start:, start:stop] = strip.mT


def free_bytes(device: torch.device) -> float:
    """The memory that can still be had on a device.

    >>> free_bytes(torch.device("cpu")) > 0
    True
    """
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    limits = [float("inf")]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(1024 * float(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        group = Path("/sys/fs/cgroup")
        limits.append(float((group / "memory.max").read_text()) - float((group / "memory.current").read_text()))
    return min(limits)
