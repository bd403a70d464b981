"""The Fisher matrix of S fresh scores at the current λ, with no memory of earlier ones.

Without damping it is Eq 4.1 of Godichon-Baggioni, Nguyen and Tran (2023), of rank S at most; they reject it.
With damping it is the plain alternative to their recursion: scores cost no likelihood.
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_generator
from torchngvi.errors import InputError
from torchngvi.metrics.damped import check_damping, damped_solve
from torchngvi.metrics.preconditioner import Preconditioner, State, check_count, finite_rows
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior


@final
class BatchFisher(Preconditioner):
    """The direction (F̂ + ρ tr(F̂)/D I)⁻¹∇L, with F̂ the mean of the outer products of S fresh scores.

    One wants it as the metric without memory: `Recursive` and `Window` keep what earlier scores have shown.

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
        self.samples, self.rho = check_count("samples", samples), check_damping(rho)
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
