"""The recursion for the inverse of a growing sum of outer products, shared by its dense and matrix-free forms.

    H̃_t = εI + Σ_{j≤t} φ_j φ_jᵀ + Σ_{j≤t} β_j Z_j Z_jᵀ,   β_j = c_β j^{-β},  Z_j ~ N(0, I)       P = H̃_t⁻¹

(Godichon-Baggioni, Nguyen and Tran 2023, Eqs 4.3-4.5).  S scores and their Z, the columns of Φ, enter at once:

    P ← P - PΦ(I + ΦᵀPΦ)⁻¹ΦᵀP = P - WᵀW,     W = L⁻¹ΦᵀP,  LLᵀ = I + ΦᵀPΦ

which equals 2S rank-one updates.  t counts all scores, those of a warm-up included, and t P estimates I_F⁻¹.
"""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from torchngvi.arguments import read_generator, read_number
from torchngvi.metrics.preconditioner import Preconditioner, State, check_count, check_warmup, finite_rows
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior

_RELATIVE_C_BETA = 0.03
AT_ONCE = 128  # vectors in one factorisation


class Perturbation:
    """ε and the terms β_j Z_j Z_jᵀ of the recursion, with their constants checked.

    >>> terms = Perturbation(1, 2.0, 0.0, 0.1)
    >>> terms.start(terms.init(torch.zeros(3))).item()
    2.0
    """

    def __init__(self, samples: int, eps: float | None, c_beta: float | None, beta: float) -> None:
        self.samples = check_count("samples", samples)
        if eps is not None:
            eps = read_number("eps", eps, "is that of H_0 = eps I, None for the scale of the scores,", above=0)
        if c_beta is not None:
            c_beta = read_number("c_beta", c_beta, at_least=0)
        beta = read_number("beta", beta, "lies in (0, alpha - 1/2)", above=0, below=0.5)
        self.eps, self.c_beta, self.beta = eps, c_beta, beta

    def init(self, like: Tensor) -> State:
        """Start a recursion for vectors of the shape, dtype and device of ``like``, (*batch, D)."""
        count = torch.zeros_like(like[..., 0], requires_grad=False)
        return {"count": count, "scale": torch.ones_like(count), "started": False}

    def rows(
        self,
        state: State,
        scores: Tensor,  # (S, *batch, D)
        generator: torch.Generator | None,
    ) -> tuple[Tensor, State]:  # (*batch, S or 2 S, D)
        """Count S scores and, at the first, take their scale; a score that is not finite is left out with its Z."""
        scores, fine = finite_rows(scores)
        index = state["count"] + fine.cumsum(0)
        new = state | {"count": index[-1], "started": True}
        if not state["started"]:
            mean_square = scores.square().mean(-1).sum(0) / fine.sum(0)  # tr(F̂)/D
            new["scale"] = torch.where(mean_square > 0, mean_square, 1.0)
        if self.c_beta == 0:
            return scores.movedim(0, -2), new
        size = _RELATIVE_C_BETA * new["scale"] if self.c_beta is None else self.c_beta
        weight = fine.to(scores) * size * index.clamp_min(1) ** -self.beta
        both = scores.new_empty(2 * len(scores), *scores.shape[1:])
        both[: len(scores)] = scores
        Z = torch.randn(scores.shape, generator=generator, out=both[len(scores) :])
        Z *= weight.sqrt()[..., None]
        return both.movedim(0, -2), new

    def start(self, state: State) -> Tensor:  # (*batch,)
        """Return ε as given, or the scale of the scores, (*batch,)."""
        return state["scale"] if self.eps is None else torch.full_like(state["scale"], self.eps)


class Recursion(Preconditioner):
    """The abstract base of `Recursive` and `MatrixFree`, which keep P in two ways and have these settings in common.

    Args:
        samples, eps, c_beta, beta, warmup, generator: as those of `Recursive`.

    Raises:
        InputError: if a value is out of range.
    """

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
        self.perturbation = Perturbation(samples, eps, c_beta, beta)
        self.samples, self.warmup = self.perturbation.samples, check_warmup(warmup)
        self.generator = read_generator("generator", generator)

    @abstractmethod
    def times(
        self,
        state: State,
        rows: Tensor,  # (*batch, k, D)
    ) -> Tensor:
        """Multiply rows by P from the right, (*batch, k, D)."""

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Return t P ∇L, the estimate of the natural gradient."""
        return state["count"][..., None] * self.times(state, gradient[..., None, :])[..., 0, :]


def downdate(
    rows: Tensor,  # (*batch, k, D), Φᵀ
    times: Callable[[Tensor], Tensor],  # rows -> rows P
) -> Tensor:  # (*batch, k, D)
    """The factor W of a downdate P_new = P - WᵀW, by which the columns of Φ enter the inverse P.

    >>> downdate(torch.tensor([[1.0, 0.0]]), lambda rows: rows).square().round(decimals=4).tolist()  # 1 - ½
    [[0.5, 0.0]]
    """
    U = times(rows)
    if rows.shape[-2] == 1:  # one vector: no factorisation
        return U * (1 + (U * rows).sum(-1, keepdim=True)).rsqrt().nan_to_num(0.0)
    inner = U @ rows.mT
    inner.diagonal(dim1=-2, dim2=-1).add_(1)
    L, ok = cholesky(inner)
    W = torch.linalg.solve_triangular(L, U, upper=False)
    return W.masked_fill_(~ok[..., None, None], 0.0)
