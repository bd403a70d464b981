"""Gaussians over a flat vector: what a host needs to take one for a Gaussian, and a standard start.

A host such as a Gaussian process of GPyTorch or a guide of Pyro reads the mean and a lower factor of Σ, differentiable
in λ, and starts q at a mean and a scale.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from torchngvi.arguments import read_device, read_dtype, read_size, read_sizes, read_tensor, shown
from torchngvi.errors import InputError
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior


def mean_and_scale(
    dim: int,
    batch_shape: Sequence[int],
    mean: Tensor | float,
    scale: Tensor | float,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[Tensor, Tensor]:
    """Write out the mean and the standard deviations of a standard start, each (*batch, d).

    >>> [x.tolist() for x in mean_and_scale(2, (), 0.0, 3.0, None, None)]
    [[0.0, 0.0], [3.0, 3.0]]
    """
    dim = read_size("dim", dim, "is the number of coordinates of theta")
    batch_shape = read_sizes(
        "batch_shape", batch_shape, "must be a tuple of integers of at least 1, () for one posterior"
    )
    given = [x for x in (mean, scale) if isinstance(x, Tensor)]
    like = given[0] if given else torch.empty(0)
    dtype = read_dtype("dtype", like.dtype if dtype is None else dtype)
    zero = torch.zeros(*batch_shape, dim, dtype=dtype, device=read_device("device", device) or like.device)
    start = read_tensor("mean", mean, like=zero), read_tensor("scale", scale, like=zero)
    for name, value in zip(("mean", "scale"), start, strict=True):
        sizes = zip(value.shape[::-1], zero.shape[::-1], strict=False)
        if value.ndim > zero.ndim or any(n not in (1, m) for n, m in sizes):
            raise InputError(f"{name} must be a scalar or {tuple(zero.shape)}; got shape {tuple(value.shape)}.")
    if not bool((start[1] > 0).all()):
        raise InputError(f"scale holds standard deviations and must be positive; got {shown(scale)}.")
    return zero + start[0], zero + start[1]


class FlatGaussian(FlatPosterior):
    """N(μ, Σ) over some vector of its parameters: abstract, see `FlatCholesky` and `MeanFieldGaussian`.

    >>> from torchngvi.posteriors.flat import MeanFieldGaussian
    >>> MeanFieldGaussian.standard(2, scale=3.0).covariance.round().tolist()
    [[9.0, 0.0], [0.0, 9.0]]
    """

    @classmethod
    @abstractmethod
    def _vector_of(
        cls,
        mean: Tensor,  # (*batch, d)
        root: Tensor,  # (*batch, d, d), lower triangular
    ) -> Tensor:
        """Return λ of N(μ, root rootᵀ), or of what the posterior keeps of it."""

    @abstractmethod
    def moments(self, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return μ (*batch, d) and the lower factor of Σ (*batch, d, d), differentiable in λ."""

    @classmethod
    def standard(
        cls,
        dim: int,
        batch_shape: Sequence[int] = (),
        *,
        mean: Tensor | float = 0.0,  # broadcasts to (*batch, d)
        scale: Tensor | float = 1.0,  # scalar, or standard deviations (*batch, d)
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Make N(mean, scale²) from sizes, as the other Gaussian posteriors are made.

        Args:
            dim: d, the number of latent variables.
            batch_shape: the number of independent posteriors, as a shape.
            mean: μ, which broadcasts to (*batch, d).
            scale: a scalar, or standard deviations (*batch, d).
            dtype, device: those of λ; by default those of the start, or torch's defaults.

        Returns:
            A posterior of this class.

        Raises:
            InputError: a dimension below 1.

        >>> from torchngvi.ifvb import FlatCholesky
        >>> FlatCholesky.standard(2, scale=2.0).moments()[1].tolist()
        [[2.0, 0.0], [0.0, 2.0]]
        """
        location, spread = mean_and_scale(dim, batch_shape, mean, scale, dtype, device)
        new = cls.__new__(cls)
        FlatPosterior.__init__(new, cls._vector_of(location, spread.diag_embed()), dim)
        return new

    @property
    def mean(self) -> Tensor:
        """The mean μ of q, (*batch, d)."""
        return self.moments(self.vector)[0]

    @property
    def scale_tril(self) -> Tensor:
        """The lower factor of the covariance Σ, (*batch, d, d)."""
        return self.moments(self.vector)[1]

    @property
    def covariance(self) -> Tensor:
        """The covariance Σ of q, (*batch, d, d)."""
        return self.scale_tril @ self.scale_tril.mT

    @property
    def variance(self) -> Tensor:
        """The marginal variances diag Σ, (*batch, d)."""
        return self.scale_tril.square().sum(-1)

    @torch.no_grad()
    def initialize_(
        self,
        mean: Tensor,  # (*batch, d)
        root: Tensor,  # (*batch, d, d), lower triangular
    ) -> Self:
        """Restart in place from N(mean, root rootᵀ), or what the posterior keeps of it, and return it."""
        self.vector.copy_(self._vector_of(mean, root))
        return self

    def kept_covariance(
        self,
        root: Tensor,  # (*batch, d, d)
    ) -> Tensor:
        """Return the factor itself, of which the posterior keeps what it can."""
        return root
