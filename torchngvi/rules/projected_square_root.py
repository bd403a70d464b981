"""Projected gradient descent in (m, R), R = V^½ symmetric: a step, then the spectrum of R lifted to the floor.

    m' = m - ρg        R⁺ = R - ½ρ(GR + RG)        R' = Q max(Λ, c) Qᵀ,  R⁺ = QΛQᵀ

(Domke 2020; the baseline of Kim, Ma and Gardner 2024, section 3.1.)  On this set ‖R⁻¹‖ ≤ 1/c, which a floor on the
diagonal of a triangular root does not give, at the cost of two eigendecompositions a step.
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Expectation, Path, Posterior, Root, Rule
from torchngvi.numerics.linalg import eigh
from torchngvi.structures import FullAlgebra


@final
class ProjectedSquareRoot(Rule):
    """Root(m - ρg, a lower root of R'²).

    Args:
        floor: c, the smallest eigenvalue of R, in the units of a standard deviation, positive.

    Raises:
        InputError: a floor that is not positive.
        PairError: on use, a posterior without a full covariance.
    """

    emits = Root
    natural = False
    full_algebra = True

    def __init__(self, floor: float) -> None:
        if not 0 < floor < float("inf"):
            raise InputError(
                f"floor is the smallest eigenvalue of the symmetric root, positive and finite; got {floor:g}. "
                "Use 1/√L for a log joint with curvature at most L."
            )
        self.floor = float(floor)

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """The straight line from (m, R), projected point by point."""
        if q.structure.widest < q.dim:
            raise PairError(
                f"ProjectedSquareRoot moves a full covariance; got {type(q).__name__}. "
                "Use a CholeskyGaussian, or ProjectedRootGradient."
            )
        local, frame, structure = q.local(e), q.frame(), q.structure
        assert isinstance(structure, FullAlgebra)
        g, G = q.unframe(local.a, local.P)
        # C = UΣWᵀ has the symmetric root UΣUᵀ
        U, sizes, _ = torch.linalg.svd(frame.root)
        R = (U * sizes[..., None, :]) @ U.mT
        gradient = 0.5 * (G @ R + R @ G)

        def at(rho: Tensor) -> Root:
            stepped = R - structure.scaled(rho, gradient)
            values, Q, ok = eigh(stepped)
            root = structure.lower_root(Q * values.clamp_min(self.floor)[..., None, :])
            return Root(frame.mean - rho[..., None] * g, torch.where(ok[..., None, None], root, torch.nan))

        def slope() -> Tensor:
            return structure.dot(g, g) + structure.entries_norm2(gradient)

        return Path(at, lambda: q.norm2(local), slope)
