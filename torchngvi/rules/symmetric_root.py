"""SR-VN with the symmetric half: C' = C (I - ½ρP) up to a rotation, V' = C (I - ½ρP)² Cᵀ, m' = m - ρ C a.

Any square root of V may take the place of the Cholesky factor, with ½ in the place of tril½ (Kumar
et al. 2025, the remark on other square roots).  V' is then the same for every root, and does not depend on the
order of the coordinates of θ, as it does on the triangular root.
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.interfaces import Expectation, Path, Posterior, Root, Rule
from torchngvi.structures import FullAlgebra


@final
class SymmetricRoot(Rule):
    """SR-VN with the symmetric half of P in the place of the triangular one.

    The step is V' = C (I - ½ρP)² Cᵀ and m' = m - ρCa, of which the triangular root is found by a QR decomposition.  One
    wants it where the steps of SR-VN should not depend on the order of the coordinates of θ.  A step so long that
    I - ½ρP is not positive definite is not taken.  The structure of q must admit products of symmetric matrices.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # V = 1
    >>> opt = NaturalGradientVI(q, SymmetricRoot(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that P = 3
    >>> round(q.variance.item(), 4)  # (1 - ½ · 0.1 · 3)²
    0.7225
    """

    emits = Root
    natural = True
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path ρ -> C (I - ½ρP)² Cᵀ of the covariance."""
        local, frame, structure = q.local(e), q.frame(), q.structure
        assert isinstance(structure, FullAlgebra)
        push, eye = frame.push(local.a), structure.eye(local.a)

        def at(rho: Tensor) -> Root:
            factor = eye - structure.scaled(0.5 * rho, local.P)
            inside = torch.where(structure.cholesky(factor)[1], torch.ones_like(rho), torch.nan)
            root = structure.lower_root(structure.matmul(frame.root, factor))
            return Root(frame.mean - rho[..., None] * push, structure.scaled(inside, root))

        norm2 = q.norm2(local)
        return Path(at, lambda: norm2, lambda: norm2)
