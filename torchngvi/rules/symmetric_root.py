"""SR-VN with the symmetric half: C' = C (I - ½ρP) up to a rotation, V' = C (I - ½ρP)² Cᵀ, m' = m - ρ C a.

Any square root of V may take the place of the Cholesky factor, with ½ in the place of tril½ (Kumar
et al. 2025, the remark on other square roots).  V' is then the same for every root, and does not depend on the
order of the coordinates of θ, as it does on the triangular root.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Expectation, Path, Posterior, Root, Rule
from torchngvi.structures import FullAlgebra


@final
class SymmetricRoot(Rule):
    """Root(m - ρCa, qr(C (I - ½ρP)))."""

    emits = Root
    natural = True
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """The path ρ -> C (I - ½ρP)² Cᵀ."""
        local, frame, structure = q.local(e), q.frame(), q.structure
        assert isinstance(structure, FullAlgebra)
        push, eye = frame.push(local.a), structure.eye(local.a)

        def at(rho: Tensor) -> Root:
            factor = eye - structure.scaled(0.5 * rho, local.P)
            root = structure.lower_root(structure.matmul(frame.root, factor))
            return Root(frame.mean - rho[..., None] * push, root)

        norm2 = q.norm2(local)
        return Path(at, lambda: norm2, lambda: norm2)
