"""Gaussians from moments, from a prior, or from another posterior: the same q in other coordinates."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import FullPrior, Prior
from torchngvi.numerics.linalg import cholesky, eigh
from torchngvi.posteriors.roots import kept_covariance, root_of_inverse
from torchngvi.posteriors.starts import StartedGaussian
from torchngvi.structures import Dense, Diagonal, FullAlgebra, Pattern
from torchngvi.structures.pattern import Structured


class ConvertibleGaussian(StartedGaussian):
    """q = N(m, V) with its moments, made from those of others: abstract, the ground of `Gaussian`."""

    @property
    def covariance(self) -> Tensor:
        """V = C Cᵀ, (*batch, D, D)."""
        root = self.frame().dense()
        return root @ root.mT

    @property
    def variance(self) -> Tensor:
        """diag(V), (*batch, D)."""
        return self.frame().variance

    @property
    def stddev(self) -> Tensor:
        """√diag(V), (*batch, D)."""
        return self.variance.sqrt()

    def whitener(self) -> Structured:
        """C⁻¹ where C is lower triangular, its transpose where C is upper triangular."""
        raise NotImplementedError

    @classmethod
    def from_moments(
        cls,
        mean: Tensor,  # (*batch, D)
        covariance: Tensor,  # (*batch, D, D)
        *,
        structure: Pattern | None = None,
    ) -> Self:
        """The member of the family with these moments; of a structure with blocks, with the marginals of the blocks.

        Raises:
            InputError: of different shapes, not symmetric, or not positive definite.

        >>> from torchngvi import CholeskyGaussian
        >>> CholeskyGaussian.from_moments(torch.zeros(1), torch.tensor([[9.0]])).scale_tril.item()
        3.0
        """
        if covariance.shape != (*mean.shape, mean.shape[-1]):
            raise InputError(
                f"covariance must be (*batch, D, D) for a mean (*batch, D); got {tuple(covariance.shape)} "
                f"for {tuple(mean.shape)}."
            )
        scale = covariance.abs().amax((-2, -1), keepdim=True)
        if bool(((covariance - covariance.mT).abs() > 1e-6 * scale).any()):
            raise InputError("covariance must be symmetric; pass (V + V.mT) / 2.")
        factor, ok = cholesky(covariance.to(mean.dtype))
        if not bool(ok.all()):
            values, _, known = eigh(covariance)
            raise InputError(
                "covariance must be positive definite; its Cholesky factorisation failed. "
                + (
                    f"Its smallest eigenvalue is {float(values.min()):.3g}."
                    if bool(known.all())
                    else "It is not finite."
                )
            )
        return cls._start(mean, factor, cls._pattern(mean.shape[-1], structure))

    @classmethod
    def from_marginals(
        cls,
        mean: Tensor,  # (*batch, D)
        marginals: Structured,  # the entries of V in the pattern
        structure: FullAlgebra,
    ) -> Self:
        """The member of the family whose covariance has these blocks.

        >>> from torchngvi import DiagonalGaussian
        >>> from torchngvi.structures import Diagonal
        >>> DiagonalGaussian.from_marginals(torch.zeros(2), torch.tensor([4.0, 9.0]), Diagonal(2)).stddev.tolist()
        [2.0, 3.0]
        """
        root, _ = structure.cholesky(marginals)
        scale = structure.diagonal(root) if structure.widest == 1 else structure.to_dense(root)
        return cls._of(mean, scale, structure)

    @classmethod
    def from_posterior(cls, other: "ConvertibleGaussian", *, structure: Pattern | None = None) -> Self:
        """The same Gaussian in these coordinates, in the same pattern; of a mean field, with a full covariance.

        A `DiagonalGaussian` keeps the marginal variances; another ``structure`` with blocks keeps the marginals of
        the blocks.

        >>> from torchngvi import CholeskyGaussian, NaturalGaussian
        >>> NaturalGaussian.from_posterior(CholeskyGaussian(1, scale=0.5)).precision.item()
        4.0
        """
        kept = None if isinstance(other.structure, Diagonal) else other.structure
        pattern = cls._pattern(other.dim, structure, kept)
        if isinstance(pattern, Diagonal):
            return cls._of(other.mean, other.stddev, pattern)
        if other.upper and pattern == other.structure and not isinstance(pattern, FullAlgebra):
            new = cls._of(other.mean, torch.ones_like(other.mean), pattern)
            new.assign(new._coordinates_with(other.mean, other.whitener()), torch.ones_like(other.mean[..., 0]).bool())
            return new
        return cls._start(other.mean, other.scale_tril, pattern)

    @classmethod
    def from_prior(
        cls,
        prior: Prior | FullPrior,  # of a model: ``model.prior``
        batch_shape: Sequence[int] = (),
        *,
        structure: Pattern | None = None,
    ) -> Self:
        """Start at a model's prior.

        >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
        >>> model = GeneralizedLinear(torch.ones(2, 1), [0.0, 1.0], prior_precision=4.0)
        >>> CholeskyGaussian.from_prior(model.prior).stddev.item()
        0.5
        """
        mean, precision = prior.mean, prior.precision
        if isinstance(prior, FullPrior):
            factor = cholesky(torch.cholesky_inverse(prior.root, upper=True))[0]
            mean = mean.expand(factor.shape[:-1])
        else:
            mean, precision = torch.broadcast_tensors(mean, precision)
        pattern, shape = cls._pattern(mean.shape[-1], structure), (*batch_shape, mean.shape[-1])
        if not isinstance(prior, FullPrior):
            return cls._of(mean.expand(shape), precision.rsqrt().expand(shape), pattern)
        return cls._start(mean.expand(shape), factor.expand(*shape, mean.shape[-1]), pattern)

    @classmethod
    def _pattern(cls, dim: int, structure: Pattern | None, kept: Pattern | None = None) -> Pattern:
        """The structure that was asked for, or that of where it comes from, or the family's own."""
        return structure or kept or Dense(dim)

    @classmethod
    def _start(cls, mean: Tensor, scale_tril: Tensor, structure: Pattern) -> Self:
        """A new posterior of this family from a mean and a lower factor, with the marginals of a structure's blocks."""
        return cls._of(mean, kept_covariance(structure, scale_tril), structure)

    @classmethod
    def _of(cls, mean: Tensor, scale: Tensor, structure: Pattern) -> Self:
        return cls(mean.shape[-1], mean.shape[:-1], mean=mean, scale=scale, structure=structure)  # type: ignore[call-arg]

    def kept_covariance(
        self,
        scale_tril: Tensor,  # (*batch, D, D)
    ) -> Tensor:
        """The lower factor of the member of the family with the same marginals of its blocks."""
        return kept_covariance(self.structure, scale_tril)

    def kept_precision(
        self,
        scale_tril: Tensor,  # (*batch, D, D)
    ) -> Tensor:
        """The lower factor of the member of the family with the same entries of the precision: the nearest in KL."""
        structure = self.structure
        if structure.widest == structure.dim:
            return scale_tril
        root, _ = structure.cholesky(structure.from_dense(torch.cholesky_inverse(scale_tril)))
        return root_of_inverse(Dense(self.dim), structure.to_dense(root))
