"""Numerics without variational inference: factorisations, sparse rows, Gaussian integrals, versions of tensors."""
