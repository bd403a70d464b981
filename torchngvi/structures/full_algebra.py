"""Patterns whose squares are closed under all products, not only those of triangular matrices."""

from abc import abstractmethod

from torch import Tensor

from torchngvi.structures.pattern import Pattern, Structured


class FullAlgebra(Pattern):
    """A pattern whose squares are closed under all products: block-diagonal matrices, dense and diagonal among them.

    Here `matmul` and `mv` take any matrix of squares, not only triangular ones.  Rules that follow a root of the
    covariance, or that need P², exp(P) or an orthogonal factor, ask for it; arrows and forests do not have it.
    """

    @abstractmethod
    def transpose(self, matrix: Structured) -> Structured:
        """Aᵀ."""

    def marginals(self, root: Structured, transposed: bool = False) -> Structured:
        """C Cᵀ of C = L, or of C = Lᵀ."""
        turned = self.transpose(root)
        return self.matmul(turned, root) if transposed else self.matmul(root, turned)

    @abstractmethod
    def exp(self, symmetric: Structured) -> Structured:
        """The matrix exponential."""

    @abstractmethod
    def reverse_cholesky(self, symmetric: Structured) -> tuple[Structured, Tensor]:
        """The lower-triangular L with A = Lᵀ L, and for which members (*batch,) it exists."""

    @abstractmethod
    def right_solve(self, matrix: Structured, root: Structured) -> Structured:
        """A L⁻¹."""

    @abstractmethod
    def lower_root(self, matrix: Structured) -> Structured:
        """A lower-triangular L with L Lᵀ = A Aᵀ, by an orthogonal factor."""

    @abstractmethod
    def unconjugate(
        self,
        root: Structured,
        vector: Tensor,  # (*batch, D)
        matrix: Structured,
    ) -> tuple[Tensor, Structured]:
        """L⁻ᵀ a and L⁻ᵀ W L⁻¹."""
