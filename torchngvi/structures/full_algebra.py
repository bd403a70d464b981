"""Patterns whose squares are closed under all products, not only under those of triangular matrices."""

from abc import abstractmethod

from torch import Tensor

from torchngvi.structures.pattern import Pattern, Structured


class FullAlgebra(Pattern):
    """A pattern whose squares are closed under all products, as those of block-diagonal matrices are: abstract.

    Here `matmul` and `mv` take any matrix of squares, not only a triangular one.  Rules that follow a root of the
    covariance, or that need P², exp(P) or an orthogonal factor, ask for it; arrows and forests do not have it.

    >>> from torchngvi.structures import Dense, arrow
    >>> Dense(2).closed, arrow(groups=3, local=2, globals=1).closed
    (True, False)
    """

    closed = True

    @abstractmethod
    def transpose(self, matrix: Structured) -> Structured:
        """Transpose any matrix of squares: Aᵀ."""

    def marginals(self, root: Structured, transposed: bool = False) -> Structured:
        """Compute C Cᵀ for C = L, or for C = Lᵀ where ``transposed``."""
        turned = self.transpose(root)
        return self.matmul(turned, root) if transposed else self.matmul(root, turned)

    @abstractmethod
    def exp(self, symmetric: Structured) -> Structured:
        """Compute the matrix exponential of a symmetric matrix."""

    @abstractmethod
    def reverse_cholesky(self, symmetric: Structured) -> tuple[Structured, Tensor]:
        """Factor A = Lᵀ L with L lower triangular, and say for which members (*batch,) the factor exists."""

    @abstractmethod
    def right_solve(self, matrix: Structured, root: Structured) -> Structured:
        """Divide any matrix of squares by a root from the right: A L⁻¹."""

    @abstractmethod
    def lower_root(self, matrix: Structured) -> Structured:
        """Find a lower-triangular L with L Lᵀ = A Aᵀ, by an orthogonal factor; its diagonal may have any signs."""

    @abstractmethod
    def unconjugate(
        self,
        root: Structured,
        vector: Tensor,  # (*batch, D)
        matrix: Structured,
    ) -> tuple[Tensor, Structured]:
        """Take a vector and a matrix out of the frame of C = L: L⁻ᵀ a and L⁻ᵀ W L⁻¹."""
