"""What Gaussians that hold a precision S = V⁻¹ = T Tᵀ have in common: the frame C = T⁻ᵀ, and what follows from T."""

from torch import Tensor

from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.roots import root_of_inverse
from torchngvi.structures import Dense
from torchngvi.structures.pattern import Structured


class PrecisionGaussian(Gaussian):
    """N(m, (T Tᵀ)⁻¹): abstract, see `PrecisionCholeskyGaussian`, which stores T, and `NaturalGaussian`, which stores S.

    >>> from torchngvi import NaturalGaussian, PrecisionCholeskyGaussian
    >>> NaturalGaussian(1, scale=0.5).factor().item(), PrecisionCholeskyGaussian(1, scale=0.5).factor().item()
    (2.0, 2.0)
    """

    upper = True

    def factor(self) -> Structured:
        """Return T with S = T Tᵀ, in the pattern."""
        raise NotImplementedError

    def _compute_root(self) -> Structured:
        return self.structure.inverse(self.factor())

    @property
    def scale_tril(self) -> Tensor:
        """The lower Cholesky factor of the covariance V, (*batch, D, D)."""
        structure, factor = self.structure, self.factor()
        if structure.closed:
            return structure.to_dense(root_of_inverse(structure, factor))
        return root_of_inverse(Dense(self.dim), structure.to_dense(factor))

    def whiten(self, x: Tensor) -> Tensor:
        """Divide vectors by the root of the frame: C⁻¹ x = Tᵀ x, (*sample, *batch, D)."""
        return self.structure.tmv(self.factor(), x)

    def whitener(self) -> Structured:
        """Return T, the transpose of C⁻¹."""
        return self.factor()

    def log_det_root(self) -> Tensor:
        """Compute log|det C| = -Σ log T_ii, (*batch,)."""
        return -self.structure.log_det(self.factor())

    def unframe(self, a: Tensor, W: Structured) -> tuple[Tensor, Structured]:
        """Take a and W out of the frame by products with T: T a and T W Tᵀ."""
        factor = self.factor()
        return self.structure.mv(factor, a), self.structure.congruence(factor, W)
