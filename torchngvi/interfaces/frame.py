"""The frame of q: its mean and its root, which are all that an expectation may read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchngvi.structures import Pattern
from torchngvi.structures.pattern import Structured


@dataclass(frozen=True)
class Frame:
    """The mean and the root of a Gaussian q, θ = m + C z with z ~ N(0, I): all that an expectation may read of it.

    An estimator that is written for the frame works for every system of coordinates.  `Posterior.frame` returns it
    without gradients, `Posterior.probed` as a differentiable function of the probes.  The stored matrix L is lower
    triangular in the pattern of q: C itself, or, where q holds the precision S = T Tᵀ, L = T⁻¹ with C = Lᵀ upper
    triangular.

    Attributes:
        mean: m, (*batch, D).
        root: L, (*batch, *structure.shape), as the structure stores it.
        structure: the pattern of L, which computes all products with it.
        upper: whether C = Lᵀ; otherwise C = L.

    >>> from torchngvi import CholeskyGaussian
    >>> frame = CholeskyGaussian(2, scale=3.0).frame()
    >>> frame.push(torch.ones(2)).tolist(), frame.variance.tolist()
    ([3.0, 3.0], [9.0, 9.0])
    """

    mean: Tensor  # (*batch, D)
    root: Structured  # L
    structure: Pattern
    upper: bool = False  # C = Lᵀ

    def push(self, z: Tensor) -> Tensor:
        """Multiply vectors by the root: C z, (*sample, *batch, D), turns noise into deviations of θ from the mean."""
        return (self.structure.tmv if self.upper else self.structure.mv)(self.root, z)

    def pull(self, gradient: Tensor) -> Tensor:
        """Multiply vectors by the transposed root: Cᵀ g, (*sample, *batch, D), brings gradients in θ into the frame."""
        return (self.structure.mv if self.upper else self.structure.tmv)(self.root, gradient)

    def rows(self, rows: Tensor) -> Tensor:
        """Multiply a design by the root: X C, (*batch, N, D); its squared row norms are the variances of X θ."""
        return self.structure.rows(rows, self.root, self.upper)

    @property
    def variance(self) -> Tensor:
        """The marginal variances of θ, diag(V), (*batch, D)."""
        return self.structure.row_norms(self.root, self.upper)

    def dense(self) -> Tensor:
        """Write C out as a matrix, (*batch, D, D): for small D and for comparisons, since it drops the pattern."""
        root = self.structure.to_dense(self.root)
        return root.mT if self.upper else root

    def marginals(self) -> Structured:
        """Compute those entries of the covariance V = C Cᵀ that the pattern stores."""
        return self.structure.marginals(self.root, self.upper)

    def gram(
        self,
        weights: Tensor,  # broadcasts to (*batch, D)
    ) -> Structured:
        """Bring a diagonal curvature into the frame: Π(Cᵀ diag(w) C), as the structure stores it."""
        return self.structure.gram(self.root, weights, self.upper)

    def conjugate(
        self,
        H: Tensor,  # (*batch, D, D), symmetric
    ) -> Structured:
        """Bring a dense symmetric curvature into the frame: Π(Cᵀ H C), as the structure stores it."""
        return self.structure.conjugate(self.root, H, self.upper)


def may_be_asked(mask: Tensor) -> bool:
    """Say whether a mask may decide on the host which way the code goes: on the CPU, outside of ``torch.compile``.

    Args:
        mask: any tensor.

    Returns:
        True where reading its entries neither waits for a device nor breaks a graph.

    >>> may_be_asked(torch.tensor(True)), may_be_asked(torch.ones((), dtype=torch.bool, device="meta"))
    (True, False)
    """
    return mask.is_cpu and not torch.compiler.is_compiling()


def known_everywhere(mask: Tensor) -> bool:
    """Say whether a mask is known to be true for every member: where it is, and asking does not wait for a device.

    Args:
        mask: of the members, (*batch,), boolean.

    Returns:
        True if all entries are true and the mask is on the CPU.

    >>> known_everywhere(torch.tensor([True, True])), known_everywhere(torch.tensor([True, False]))
    (True, False)
    """
    return may_be_asked(mask) and bool(mask.all() if mask.ndim else mask)


def where_members(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Choose between two tensors member by member, as ``torch.where`` does with a mask over the batch alone.

    Args:
        mask: which members are new, (*batch,), boolean.
        new: the values of those members, (*batch, ...).
        old: the values of the others, of the same shape.

    Returns:
        A tensor of that shape; on the CPU it is ``new`` or ``old`` itself where the mask is all true or all false.

    >>> where_members(torch.tensor([True, False]), torch.ones(2, 2), torch.zeros(2, 2)).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    if may_be_asked(mask):  # where asking costs nothing, most masks need no copy
        if mask.ndim == 0:
            return new if bool(mask) else old
        if bool(mask.all()):
            return new
        if not bool(mask.any()):
            return old
    return torch.where(mask.reshape(mask.shape + (1,) * (old.ndim - mask.ndim)), new, old)
