"""The Fisher matrix of the last M scores, exact for that sum: O(MD) memory, O(MD + M³) an update."""

from typing import final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.metrics.damped import check_damping, damped_solve
from torchngvi.metrics.preconditioner import Preconditioner, State, check_count, check_warmup, finite_rows
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior


@final
class Window(Preconditioner):
    """(F̂ + ρ tr(F̂)/D I)⁻¹∇L over the M newest scores, by Woodbury.

    Args:
        keep: M.
        samples: S, new scores an iteration, at most M.
        rho: damping in units of the mean eigenvalue, positive.
        warmup: scores before the first step; by default max(2D, 1000).
        generator: of the scores.

    Raises:
        InputError: counts below 1, S > M, ρ ≤ 0.
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
        if samples > keep:
            raise InputError(f"samples are new scores among the {keep} kept; got {samples}.")
        if not rho > 0:
            raise InputError(f"rho must be positive: a window has fewer scores than D; got {rho}.")
        self.rho = check_damping(rho)
        self.warmup, self.generator = check_warmup(warmup), generator

    def fresh(self, q: FlatPosterior) -> State:
        """An empty window."""
        lam = q.vector
        return {"rows": lam.new_zeros(0, *lam.shape), "kept": lam.new_zeros(0, *lam.shape[:-1])}

    def absorb(self, state: State, scores: Tensor, generator: torch.Generator | None = None) -> None:
        """The oldest go; a score that is not finite is kept as zero and not counted."""
        rows, fine = finite_rows(scores)
        state["rows"] = torch.cat([state["rows"], rows])[-self.keep :]
        state["kept"] = torch.cat([state["kept"], fine.to(scores)])[-self.keep :]

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """By Woodbury where M < D, else by Cholesky."""
        return damped_solve(state["rows"], state["kept"].sum(0), self.rho, gradient)
