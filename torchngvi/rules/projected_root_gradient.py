"""Projected gradient descent in (m, C): a Euclidean step, then every diagonal entry of C lifted to the floor.

    m' = m - ρg        C⁺ = C - ρ tril[GC]        C'_ij = C⁺_ij,  C'_ii = max(C⁺_ii, c)

(Kim, Ma and Gardner 2024, section 3.1, with c = 1/√L for an L-smooth ℓ: then the set C_ii ≥ c holds the optimum and
log|C| is L-smooth on it.)  The projection costs D operations where that of a symmetric root costs D³.
"""

from typing import final

from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.interfaces import Expectation, Path, Posterior, Root, Rule
from torchngvi.rules.lengths import root_speed2


@final
class ProjectedRootGradient(Rule):
    """Projected gradient descent in the mean and the root, with a floor under the diagonal of the root.

    The step is m' = m - ρg and C' = C - ρ tril[GC], after which every diagonal entry of C' that is below c becomes c.
    One wants it for the convergence guarantees of black-box VI, which hold on the set C_ii ≥ c; in practice
    `ProximalRootGradient` needs no smoothness constant.

    Args:
        floor: the smallest diagonal entry c of the root, in the units of a standard deviation, positive.

    Raises:
        InputError: if the floor is not positive and finite.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # C = 1
    >>> opt = NaturalGradientVI(q, ProjectedRootGradient(0.8), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that C - ρGC = 0.7
    >>> round(q.variance.item(), 4)  # 0.8²
    0.64
    """

    emits = Root
    natural = False

    def __init__(self, floor: float) -> None:
        what = "is the smallest diagonal entry of the root (1/√L for a log joint with curvature at most L)"
        self.floor = read_number("floor", floor, what, above=0)

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the straight line from (m, C), each point of which is projected onto C_ii ≥ c."""
        gradient, frame, structure = q.euclidean(e), q.frame(), q.structure

        def at(rho: Tensor) -> Root:
            root = frame.root - structure.scaled(rho, gradient.matrix)
            diagonal = structure.diagonal(root)
            mean = frame.mean - rho[..., None] * gradient.vector
            return Root(mean, structure.with_diagonal(root, diagonal.clamp_min(self.floor)))

        def slope() -> Tensor:
            # where the floor does not bind
            return structure.dot(gradient.vector, gradient.vector) + structure.entries_norm2(gradient.matrix)

        return Path(at, lambda: q.norm2(q.local(e)), slope, speed2=lambda: root_speed2(q, gradient))
