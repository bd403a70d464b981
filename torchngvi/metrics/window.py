"""The Fisher matrix of the last M scores, exact for that sum: O(MD) memory, O(MD + M³) an update."""

from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_generator, read_number
from torchngvi.errors import InputError
from torchngvi.metrics.damped import damped_solve
from torchngvi.metrics.preconditioner import Preconditioner, State, check_count, check_warmup, finite_rows
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior


@final
class Window(Preconditioner):
    """The direction (F̂ + ρ tr(F̂)/D I)⁻¹∇L over the M newest scores, by Woodbury's identity.

    One wants it where the D x D matrix of `Recursive` does not fit: it costs O(MD) memory, and is exact for the sum
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
