"""Projected gradient descent in (m, R), R = V^½ symmetric: a step, then the spectrum of R lifted to the floor.

    m' = m - ρg        R⁺ = R - ½ρ(GR + RG)        R' = Q max(Λ, c) Qᵀ,  R⁺ = QΛQᵀ

(Domke 2020; the baseline of Kim, Ma and Gardner 2024, section 3.1.)  On this set ‖R⁻¹‖ ≤ 1/c, which a floor on the
diagonal of a triangular root does not give, at the cost of two eigendecompositions a step.
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.errors import PairError
from torchngvi.interfaces import Expectation, Path, Posterior, Root, Rule
from torchngvi.numerics.linalg import eigh
from torchngvi.rules.lengths import covariance_speed2
from torchngvi.structures import FullAlgebra


@final
class ProjectedSquareRoot(Rule):
    """Projected gradient descent in the mean and the symmetric root R of V, with a floor under the eigenvalues of R.

    The step is m' = m - ρg and R' = R - ½ρ(GR + RG), after which every eigenvalue of R' that is below c becomes c.  One
    wants it as the baseline of Domke (2020); `ProjectedRootGradient` does without the eigendecompositions.

    Args:
        floor: the smallest eigenvalue c of R, in the units of a standard deviation, positive.

    Raises:
        InputError: if the floor is not positive and finite.
        PairError: on use, if the posterior does not have a full covariance.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # R = 1
    >>> opt = NaturalGradientVI(q, ProjectedSquareRoot(0.8), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that R - ρGR = 0.7
    >>> round(q.variance.item(), 4)  # 0.8²
    0.64
    """

    emits = Root
    natural = False
    full_algebra = True

    def __init__(self, floor: float) -> None:
        what = "is the smallest eigenvalue of the symmetric root (1/√L for a log joint with curvature at most L)"
        self.floor = read_number("floor", floor, what, above=0)

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the straight line from (m, R), each point of which is projected onto the roots with
        eigenvalues ≥ c.
        """
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

        def speed2() -> Tensor:
            half = gradient @ R
            return covariance_speed2(q, g, half + half.mT)

        return Path(at, lambda: q.norm2(local), slope, speed2=speed2)
