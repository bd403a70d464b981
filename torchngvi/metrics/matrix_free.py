"""The recursion without a matrix: P x = x/ε - Vᵀ(Vx), one vector of V a score and one a Z.

It is exact while nothing is dropped, and cheaper than the dense form while V has fewer than D rows.
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_size
from torchngvi.metrics.preconditioner import State
from torchngvi.metrics.recursion import AT_ONCE, Recursion, downdate
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior


@final
class MatrixFree(Recursion):
    """The recursion of `Recursive` with vectors in the place of the matrix P: O(jD) an iteration for j vectors.

    One wants it where the D x D matrix of `Recursive` does not fit, and runs are short.

    Args:
        samples, eps, c_beta, beta, warmup, generator: as those of `Recursive`.
        keep: the number of vectors kept, at least 2S; None keeps all.  What is left after dropping the oldest is
            positive
            definite but *not* the inverse of the remaining sum, and t then multiplies a direction that is hardly
            preconditioned: clip it, or use `Window`.

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
        return self.perturbation.init(lam) | {"V": lam.new_zeros(*lam.shape[:-1], 0, q.size)}

    def absorb(self, state: State, scores: Tensor, generator: torch.Generator | None = None) -> State:
        """Append the vectors of S scores, and drop the oldest beyond ``keep``."""
        rows, new = self.perturbation.rows(state, scores, generator)
        for part in rows.split(AT_ONCE, -2):
            W = downdate(part, lambda x: self.times(new, x))
            vectors = torch.cat([new["V"], W], -2)
            new["V"] = vectors if self.keep is None else vectors[..., -self.keep :, :]
        return new

    def times(self, state: State, rows: Tensor) -> Tensor:
        """Multiply rows by P from the right, by one product with V and one with its transpose."""
        V = state["V"]
        return rows / self.perturbation.start(state)[..., None, None] - (rows @ V.mT) @ V

    def inverse(self, state: State) -> Tensor:  # (*batch, D, D)
        """Write out t P, (*batch, D, D), the estimate of I_F⁻¹."""
        eye = torch.eye(state["V"].shape[-1], dtype=state["V"].dtype, device=state["V"].device)
        return state["count"][..., None, None] * self.times(state, eye.expand(*state["V"].shape[:-2], *eye.shape))
