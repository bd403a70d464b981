"""Covariances of q as linear operators of GPyTorch that tell how much of their log determinant a loss holds."""

from collections.abc import Callable
from typing import Any

import torch
from linear_operator.operators import CholLinearOperator, DiagLinearOperator, TriangularLinearOperator
from torch import Tensor


class _Watched:
    """Of a linear operator: tells how much of its log determinant a loss holds."""

    watch: Callable[[Tensor], None] | None = None  # called in the backward pass, with that weight

    def inv_quad_logdet(self, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        """GPyTorch's result, with a hook on the gradient that reaches the log determinant."""
        inv_quad, logdet = super().inv_quad_logdet(*arguments, **options)  # type: ignore[misc]
        if self.watch is not None and logdet is not None and logdet.requires_grad:
            logdet.register_hook(self.watch)
        return inv_quad, logdet

    def _expand_batch(self, batch_shape: Any) -> "_Watched":
        expanded = super()._expand_batch(batch_shape)  # type: ignore[misc]
        expanded.watch = self.watch
        return expanded


class DiagonalCovariance(_Watched, DiagLinearOperator):
    """The covariance diag(c)² of a diagonal root."""


class RootCovariance(_Watched, CholLinearOperator):
    """C Cᵀ for a triangular root, upper or lower, where GPyTorch's own takes every root for a lower one."""

    def solve(self, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        """Solve with C Cᵀ by two substitutions."""
        solved = self.root._transpose_nonbatch().solve(self.root.solve(right_tensor))
        return solved if left_tensor is None else left_tensor @ solved

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int | None = 0) -> Any:
        return super()._solve(rhs, preconditioner, num_tridiag) if num_tridiag else self.solve(rhs)

    def _cholesky(self, upper: bool = False) -> TriangularLinearOperator:
        """The lower factor, or its transpose: C, or of an upper C the one with Cᵀ = Q Lᵀ, without forming C Cᵀ."""
        lower = self.root
        if lower.upper:
            R = torch.linalg.qr(lower.to_dense().mT).R
            signs = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(R)
            lower = TriangularLinearOperator(R.mT * signs[..., None, :])
        return lower._transpose_nonbatch() if upper else lower
