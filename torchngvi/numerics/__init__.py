"""Numerics without variational inference: factorisations, sparse rows, Gaussian integrals, versions of tensors."""

from torchngvi.numerics.kernels import show_config

__all__ = ["show_config"]
