"""Metrics of the empirical Fisher matrix: its inverse by recursion, dense and matrix-free; of a batch; of a window."""

import contextlib
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_generator, read_number, read_size
from torchngvi.errors import InputError
from torchngvi.metrics.preconditioner import (
    Preconditioner,
    State,
    check_count,
    check_warmup,
    damped_solve,
    finite_rows,
)
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior

# The recursion for the inverse of a growing sum of outer products, shared by its dense and matrix-free forms
#
#     H̃_t = εI + Σ_{j≤t} φ_j φ_jᵀ + Σ_{j≤t} β_j Z_j Z_jᵀ,   β_j = c_β j^{-β},  Z_j ~ N(0, I)       P = H̃_t⁻¹
#
# (Godichon-Baggioni, Nguyen and Tran 2023, Eqs 4.3-4.5).  S scores and their Z, the columns of Φ, enter at once:
#
#     P ← P - PΦ(I + ΦᵀPΦ)⁻¹ΦᵀP = P - WᵀW,     W = L⁻¹ΦᵀP,  LLᵀ = I + ΦᵀPΦ
#
# which equals 2S rank-one updates.  t counts all scores, those of a warm-up included, and t P estimates I_F⁻¹.

AT_ONCE = 128  # vectors in one factorisation


class Perturbation:
    """Some settings of a recursion in pickles of 0.2.0."""


class Recursion(Preconditioner):
    """The abstract base of `Recursive` and `MatrixFree`, which keep P in two ways and have these settings in common."""

    remembers = True

    def __init__(
        self,
        samples: int = 10,
        *,
        eps: float | None = None,
        c_beta: float | None = None,
        beta: float = 0.1,
        warmup: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.samples = check_count("samples", samples)
        if eps is not None:
            eps = read_number("eps", eps, "is that of H_0 = eps I, None for the scale of the scores,", above=0)
        if c_beta is not None:
            c_beta = read_number("c_beta", c_beta, at_least=0)
        beta = read_number("beta", beta, "lies in (0, alpha - 1/2)", above=0, below=0.5)
        self.eps, self.c_beta, self.beta = eps, c_beta, beta
        self.warmup, self.generator = check_warmup(warmup), read_generator("generator", generator)

    def __setstate__(self, state: State) -> None:
        """Take the settings as they are, or as they stand in pickles of 0.2.0."""
        vars(self).update(state | vars(state.pop("perturbation", Perturbation())))

    def _begun(self, like: Tensor) -> State:
        """A recursion of no scores, for vectors of the shape, dtype and device of ``like``, (*batch, D)."""
        count = torch.zeros_like(like[..., 0], requires_grad=False)
        return {"count": count, "scale": torch.ones_like(count), "started": False}

    def _rows(
        self, state: State, scores: Tensor, generator: torch.Generator | None, relative_c_beta: float = 0.03
    ) -> tuple[Tensor, State]:
        """Count S scores (S, *batch, D), and return them with their Z, (*batch, S or 2 S, D), and the new state."""
        # at the first the scale of the scores is taken; a score that is not finite is left out with its Z
        scores, fine = finite_rows(scores)
        index = state["count"] + fine.cumsum(0)
        new = state | {"count": index[-1], "started": True}
        if not state["started"]:
            mean_square = scores.square().mean(-1).sum(0) / fine.sum(0)  # tr(F̂)/D
            new["scale"] = torch.where(mean_square > 0, mean_square, 1.0)
        if self.c_beta == 0:
            return scores.movedim(0, -2), new
        size = relative_c_beta * new["scale"] if self.c_beta is None else self.c_beta
        weight = fine.to(scores) * size * index.clamp_min(1) ** -self.beta
        both = scores.new_empty(2 * len(scores), *scores.shape[1:])
        both[: len(scores)] = scores
        Z = torch.randn(scores.shape, generator=generator, out=both[len(scores) :])
        Z *= weight.sqrt()[..., None]
        return both.movedim(0, -2), new

    def _epsilon(self, state: State) -> Tensor:
        """ε as given, or the scale of the scores, (*batch,)."""
        return state["scale"] if self.eps is None else torch.full_like(state["scale"], self.eps)

    @abstractmethod
    def times(self, state: State, rows: Tensor) -> Tensor:
        """Multiply rows (*batch, k, D) by P from the right."""

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Return t P ∇L, the estimate of the natural gradient."""
        return state["count"][..., None] * self.times(state, gradient[..., None, :])[..., 0, :]


def downdate(rows: Tensor, times: Callable[[Tensor], Tensor]) -> Tensor:
    """The factor W of a downdate P - WᵀW, by which the rows of Φᵀ, (*batch, k, D), enter P, from ``rows -> rows P``."""
    U = times(rows)
    if rows.shape[-2] == 1:  # one vector: no factorisation
        return U * (1 + (U * rows).sum(-1, keepdim=True)).rsqrt().nan_to_num(0.0)
    inner = U @ rows.mT
    inner.diagonal(dim1=-2, dim2=-1).add_(1)
    L, ok = cholesky(inner)
    W = torch.linalg.solve_triangular(L, U, upper=False)
    return W.masked_fill_(~ok[..., None, None], 0.0)


_WAITING = 128  # vectors beside P₀, for large D
_SYMMETRISE = 32  # blocks between two symmetrisations
_GIB = 2**30


@final
class Recursive(Recursion):
    """The recursion of IFVB: the direction t P ∇L with P = (εI + Σ φφᵀ + Σ β_j ZZᵀ)⁻¹, from scores at past iterates.

    (Godichon-Baggioni, Nguyen and Tran 2023, Theorem 4.1, Eqs 4.3-4.6).  P is kept as P₀ - VᵀV: the last vectors wait
    and are subtracted many at a time, so that a score costs one product with P₀.  Use it for a posterior whose Fisher
    matrix is not known in closed form, with D up to some thousands, since P is dense; `Exact` is better where it
    exists.

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
        return self._begun(lam) | empty

    def absorb(self, state: State, scores: Tensor, generator: torch.Generator | None = None) -> State:
        """Make the two updates of Eqs 4.4 and 4.5 for S scores at once."""
        rows, new = self._rows(state, scores, generator)
        if not state["started"]:
            start = (1 / self._epsilon(new))[..., None]
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


def _symmetrise(P: Tensor, tile: int = 128) -> None:
    """P ← (P + Pᵀ)/2 in place, a strip at a time."""
    # tile: rows symmetrised at a time
    for start in range(0, P.shape[-1], tile):
        stop = min(start + tile, P.shape[-1])
        strip = 0.5 * (P[..., start:stop, start:] + P[..., start:, start:stop].mT)
        P[..., start:stop, start:] = strip
        P[..., start:, start:stop] = strip.mT


def free_bytes(device: torch.device) -> float:
    """The memory that can still be had on a device."""
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


@final
class MatrixFree(Recursion):
    """The recursion of `Recursive` with vectors in the place of the matrix P: O(jD) an iteration for j vectors.

    P x = x/ε - Vᵀ(Vx), with one vector of V a score and one a Z, is exact while nothing is dropped.  Use it where the D
    x D matrix of `Recursive` does not fit, and runs are short.

    Args:
        samples, eps, c_beta, beta, warmup, generator: as those of `Recursive`.
        keep: the number of vectors kept, at least 2S; None keeps all.  What is left after dropping the oldest is
            positive definite but *not* the inverse of the remaining sum, and t then multiplies a direction that is
            hardly preconditioned: clip it, or use `Window`.

    Raises:
        InputError: if a value is out of range, or fewer vectors are kept than enter at once.

    >>> from torchngvi.ifvb import MeanFieldGaussian
    >>> metric, q = MatrixFree(eps=1.0, c_beta=0.0), MeanFieldGaussian(torch.zeros(2))
    >>> state = metric.fresh(q)
    >>> state = metric.absorb(state, torch.tensor([[1.0, 0.0]]))
    >>> metric.inverse(state).round(decimals=4).tolist()  # (I + φφᵀ)⁻¹, t = 1
    [[0.5, 0.0], [0.0, 1.0]]
    """

    def __init__(
        self,
        samples: int = 10,
        *,
        eps: float | None = None,
        c_beta: float | None = None,
        beta: float = 0.1,
        keep: int | None = None,
        warmup: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(samples, eps=eps, c_beta=c_beta, beta=beta, warmup=warmup, generator=generator)
        what = "counts the vectors of one iteration or more"
        self.keep = None if keep is None else read_size("keep", keep, what, at_least=2 * self.samples)

    def fresh(self, q: FlatPosterior) -> State:
        """Return a recursion of no vectors."""
        lam = q.vector
        return self._begun(lam) | {"V": lam.new_zeros(*lam.shape[:-1], 0, q.size)}

    def absorb(self, state: State, scores: Tensor, generator: torch.Generator | None = None) -> State:
        """Append the vectors of S scores, and drop the oldest beyond ``keep``."""
        rows, new = self._rows(state, scores, generator)
        for part in rows.split(AT_ONCE, -2):
            W = downdate(part, lambda x: self.times(new, x))
            vectors = torch.cat([new["V"], W], -2)
            new["V"] = vectors if self.keep is None else vectors[..., -self.keep :, :]
        return new

    def times(self, state: State, rows: Tensor) -> Tensor:
        """Multiply rows by P from the right, by one product with V and one with its transpose."""
        V = state["V"]
        return rows / self._epsilon(state)[..., None, None] - (rows @ V.mT) @ V

    def inverse(self, state: State) -> Tensor:  # (*batch, D, D)
        """Write out t P, (*batch, D, D), the estimate of I_F⁻¹."""
        eye = torch.eye(state["V"].shape[-1], dtype=state["V"].dtype, device=state["V"].device)
        return state["count"][..., None, None] * self.times(state, eye.expand(*state["V"].shape[:-2], *eye.shape))


# -------------------------------------------------------------------------------- of a batch, and of a window


@final
class BatchFisher(Preconditioner):
    """The direction (F̂ + ρ tr(F̂)/D I)⁻¹∇L, with F̂ the mean of the outer products of S fresh scores.

    Use it as the metric without memory: `Recursive` and `Window` keep what earlier scores have shown.  Undamped it is
    Eq 4.1 of Godichon-Baggioni, Nguyen and Tran (2023), of rank S at most, which they reject.

    Args:
        samples: the number S of scores a step, at least 1.
        rho: the damping ρ in units of the mean eigenvalue of F̂; 0 is the undamped estimate, for S ≥ D alone.
        generator: the generator of the draws for the scores; torch's own by default.

    Raises:
        InputError: if S < 1 or ρ < 0; at construction of an optimizer, if ρ = 0 and S < D.

    >>> from torchngvi.ifvb import MeanFieldGaussian
    >>> metric, q = BatchFisher(2, rho=0.0), MeanFieldGaussian(torch.zeros(2))
    >>> state = metric.fresh(q)
    >>> state = metric.absorb(state, torch.tensor([[1.0, 0.0], [0.0, 2.0]]))  # F̂ = diag(½, 2)
    >>> metric.direction(state, torch.ones(2), q).tolist()
    [2.0, 0.5]
    """

    def __init__(self, samples: int = 50, rho: float = 0.01, *, generator: torch.Generator | None = None) -> None:
        self.samples = check_count("samples", samples)
        self.rho = read_number("rho", rho, "is the damping in units of the mean eigenvalue", at_least=0)
        self.generator = read_generator("generator", generator)

    def fresh(self, q: FlatPosterior) -> State:
        """Return a batch of no scores.

        Raises:
            InputError: if ρ = 0 and S < D, so that the matrix would be singular.
        """
        if self.rho == 0 and self.samples < q.size:
            raise InputError(
                f"{self.samples} scores give a Fisher matrix of rank {self.samples} at most, singular for "
                f"D = {q.size}. Use rho > 0, samples of D and more, or IFVB."
            )
        return {"rows": q.vector.new_zeros(self.samples, *q.vector.shape), "count": None}

    def absorb(self, state: State, scores: Tensor, generator: torch.Generator | None = None) -> State:
        """Replace the last batch of scores; a score that is not finite is left out."""
        rows, fine = finite_rows(scores)
        return {"rows": rows, "count": fine.sum(0).to(scores)}

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Solve with the damped matrix, by Woodbury's identity where S < D, else by Cholesky factorisation."""
        return damped_solve(state["rows"], state["count"], self.rho, gradient)


@final
class Window(Preconditioner):
    """The direction (F̂ + ρ tr(F̂)/D I)⁻¹∇L over the M newest scores, by Woodbury's identity.

    Use it where the D x D matrix of `Recursive` does not fit: it costs O(MD) memory and O(MD + M³) an update, and is
    exact for the sum that is kept.

    Args:
        keep: the number M of scores that are kept.
        samples: the number S of new scores an iteration, at most M.
        rho: the damping ρ in units of the mean eigenvalue of F̂, positive.
        warmup: the number of scores before the first step; by default max(2D, 1000).
        generator: the generator of the draws for the scores; torch's own by default.

    Raises:
        InputError: if a count is below 1, S > M, or ρ ≤ 0.

    >>> from torchngvi.ifvb import MeanFieldGaussian
    >>> metric, q = Window(2, 1, rho=1e-6), MeanFieldGaussian(torch.zeros(2))
    >>> state = metric.fresh(q)
    >>> for score in ([5.0, 5.0], [1.0, 0.0], [0.0, 2.0]):  # of which the first is gone in the end
    ...     state = metric.absorb(state, torch.tensor([score]))
    >>> metric.direction(state, torch.ones(2), q).round(decimals=3).tolist()
    [2.0, 0.5]
    """

    remembers = True

    def __init__(
        self,
        keep: int = 100,
        samples: int = 10,
        rho: float = 0.01,
        *,
        warmup: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.keep, self.samples = check_count("keep", keep), check_count("samples", samples)
        if self.samples > self.keep:
            raise InputError(f"samples are new scores among the {keep} kept; got {samples}.")
        self.rho = read_number("rho", rho, "is the damping, since a window has fewer scores than D,", above=0)
        self.warmup, self.generator = check_warmup(warmup), read_generator("generator", generator)

    def fresh(self, q: FlatPosterior) -> State:
        """Return a window of no scores."""
        lam = q.vector
        return {"rows": lam.new_zeros(0, *lam.shape), "kept": lam.new_zeros(0, *lam.shape[:-1])}

    def absorb(self, state: State, scores: Tensor, generator: torch.Generator | None = None) -> State:
        """Take the scores in and drop the oldest; a score that is not finite is kept as zero and not counted."""
        rows, fine = finite_rows(scores)
        return {
            "rows": torch.cat([state["rows"], rows])[-self.keep :],
            "kept": torch.cat([state["kept"], fine.to(scores)])[-self.keep :],
        }

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Solve with the damped matrix, by Woodbury's identity where M < D, else by Cholesky factorisation."""
        return damped_solve(state["rows"], state["kept"].sum(0), self.rho, gradient)
