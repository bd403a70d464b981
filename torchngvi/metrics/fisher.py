"""Metrics of the empirical Fisher matrix: of one batch of draws, and of a window of steps."""

from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_generator, read_number
from torchngvi.errors import InputError
from torchngvi.metrics.preconditioner import (
    Preconditioner,
    State,
    check_count,
    check_damping,
    check_warmup,
    damped_solve,
    finite_rows,
)
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior

# The Fisher matrix of S fresh scores at the current λ, with no memory of earlier ones
#
# Without damping it is Eq 4.1 of Godichon-Baggioni, Nguyen and Tran (2023), of rank S at most; they reject it.
# With damping it is the plain alternative to their recursion: scores cost no likelihood.


@final
class BatchFisher(Preconditioner):
    """The direction (F̂ + ρ tr(F̂)/D I)⁻¹∇L, with F̂ the mean of the outer products of S fresh scores.

    Use it as the metric without memory: `Recursive` and `Window` keep what earlier scores have shown.

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


# The Fisher matrix of the last M scores, exact for that sum: O(MD) memory, O(MD + M³) an update


@final
class Window(Preconditioner):
    """The direction (F̂ + ρ tr(F̂)/D I)⁻¹∇L over the M newest scores, by Woodbury's identity.

    Use it where the D x D matrix of `Recursive` does not fit: it costs O(MD) memory, and is exact for the sum
    that is kept.

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
