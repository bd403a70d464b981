"""Projected gradient descent in (m, C): a Euclidean step, then every diagonal entry of C lifted to the floor.

    m' = m - ρg        C⁺ = C - ρ tril[GC]        C'_ij = C⁺_ij,  C'_ii = max(C⁺_ii, c)

(Kim, Ma and Gardner 2024, section 3.1, with c = 1/√L for an L-smooth ℓ: then the set C_ii ≥ c holds the optimum and
log|C| is L-smooth on it.)  The projection costs D operations where that of a symmetric root costs D³.
"""

from typing import final

from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Expectation, Path, Posterior, Root, Rule


@final
class ProjectedRootGradient(Rule):
    """Root(m - ρg, C - ρ tril[GC] with a diagonal of at least c).

    Args:
        floor: c, in the units of a standard deviation, positive.

    Raises:
        InputError: a floor that is not positive.
    """

    emits = Root
    natural = False

    def __init__(self, floor: float) -> None:
        if not 0 < floor < float("inf"):
            raise InputError(
                f"floor is the smallest diagonal entry of the root, positive and finite; got {floor:g}. "
                "Use 1/√L for a log joint with curvature at most L."
            )
        self.floor = float(floor)

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """The straight line from (m, C), projected point by point."""
        gradient, frame, structure = q.euclidean(e), q.frame(), q.structure

        def at(rho: Tensor) -> Root:
            root = frame.root - structure.scaled(rho, gradient.matrix)
            diagonal = structure.diagonal(root)
            mean = frame.mean - rho[..., None] * gradient.vector
            return Root(mean, structure.with_diagonal(root, diagonal.clamp_min(self.floor)))

        def slope() -> Tensor:
            # where the floor does not bind
            return structure.dot(gradient.vector, gradient.vector) + structure.entries_norm2(gradient.matrix)

        return Path(at, lambda: q.norm2(q.local(e)), slope)
