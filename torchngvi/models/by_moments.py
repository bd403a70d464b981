"""Log joints whose expectations need the mean of q, and its covariance in the pattern of a forest, alone."""

from abc import abstractmethod

from torch import Tensor

from torchngvi.interfaces import Frame, Framed, Raw, TractableTarget
from torchngvi.structures import Forest
from torchngvi.structures.pattern import Structured


class ByMoments(TractableTarget):
    """The abstract base of mixed models: `expected_energy` for every Gaussian, from `moments` in the model's structure.

    Attributes:
        structure: the arrow or the forest of the model.
    """

    structure: Forest
    dim: int

    @property
    def all_dim(self) -> int:
        """The number of coordinates, those of other processes included."""
        return self.dim

    @abstractmethod
    def moments(
        self,
        mean: Tensor,  # m, (*batch, D)
        covariance: Structured,  # V in the pattern of the structure
    ) -> tuple[Tensor, Tensor, Structured]:
        """Compute E_q[ℓ], g = E_q[∇ℓ] and H = E_q[∇²ℓ], which has the pattern of the structure."""

    def expected_energy(self, frame: Frame) -> tuple[Tensor, Framed | Raw]:  # type: ignore[override]
        """Compute E_q[ℓ] (*batch,), differentiable in the frame, and its derivative.

        A q over the structure of the model gives a packet in its frame, and nothing is D x D; any other Gaussian, such
        as a dense one of few groups, one in θ.
        """
        structure = self.structure
        if frame.structure == structure and frame.upper:
            value, g, H = self.moments(frame.mean, frame.marginals())
            return value, Framed(frame.pull(g), structure.congruence(frame.root, H))
        root = frame.dense()
        value, g, H = self.moments(frame.mean, structure.from_dense(root @ root.mT))
        return value, Raw(g, structure.full(H))
