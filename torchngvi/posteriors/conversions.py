"""Gaussians from moments, from a prior, or from another posterior: the same q in other coordinates."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from torchngvi.arguments import read_tensor
from torchngvi.errors import InputError
from torchngvi.interfaces import FullPrior, Prior
from torchngvi.numerics.linalg import cholesky, eigh
from torchngvi.posteriors.roots import kept_covariance, root_of_inverse
from torchngvi.posteriors.starts import StartedGaussian
from torchngvi.structures import Dense, Pattern
from torchngvi.structures.pattern import Structured


class ConvertibleGaussian(StartedGaussian):
    """q = N(m, V) with its moments, and made from those of others: abstract, the ground of `Gaussian`.

    >>> from torchngvi import CholeskyGaussian, DiagonalGaussian
    >>> q = CholeskyGaussian.from_moments(torch.zeros(2), torch.tensor([[4.0, 1.0], [1.0, 9.0]]))
    >>> DiagonalGaussian.from_posterior(q).stddev.round(decimals=5)  # the marginals
    tensor([2., 3.])
    """

    @property
    def covariance(self) -> Tensor:
        """The covariance V = C Cᵀ, (*batch, D, D)."""
        root = self.frame().dense()
        return root @ root.mT

    @property
    def variance(self) -> Tensor:
        """The marginal variances diag(V), (*batch, D)."""
        return self.frame().variance

    @property
    def stddev(self) -> Tensor:
        """The marginal standard deviations √diag(V), (*batch, D), in the units of θ."""
        return self.variance.sqrt()

    def whitener(self) -> Structured:
        """Return C⁻¹ where C is lower triangular, and its transpose where C is upper triangular."""
        raise NotImplementedError

    @classmethod
    def from_moments(
        cls,
        mean: Tensor,  # (*batch, D)
        covariance: Tensor,  # (*batch, D, D)
        *,
        structure: Pattern | None = None,
    ) -> Self:
        """Make the posterior with this mean and covariance.

        With a structure of blocks, the posterior has the marginal distributions of the blocks, which minimises
        KL(N(mean, covariance)‖q).

        Args:
            mean: m, (*batch, D).
            covariance: V, (*batch, D, D), symmetric positive definite.
            structure: the pattern of the posterior; by default every entry, or that of the class.

        Returns:
            A posterior of this class, with the dtype and device of ``mean``.

        Raises:
            InputError: the shapes do not fit, or the covariance is not symmetric or not positive definite.
            PairError: a structure that the class does not have.

        >>> from torchngvi import CholeskyGaussian
        >>> CholeskyGaussian.from_moments(torch.zeros(1), torch.tensor([[9.0]])).scale_tril.item()
        3.0
        """
        mean = read_tensor("mean", mean)
        covariance = read_tensor("covariance", covariance, like=mean)
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
        structure: Pattern,
    ) -> Self:
        """Make the posterior whose covariance has these entries; for a mean field without a D x D matrix.

        Args:
            mean: m, (*batch, D).
            marginals: the entries of V in the pattern, as `Frame.marginals` returns them.
            structure: the pattern, also that of the posterior; it is ``closed``, as a covariance has it.

        Returns:
            A posterior of this class, with the dtype and device of ``mean``.

        Raises:
            InputError: entries that are those of no covariance.

        >>> from torchngvi import DiagonalGaussian
        >>> from torchngvi.structures import Diagonal
        >>> DiagonalGaussian.from_marginals(torch.zeros(2), torch.tensor([4.0, 9.0]), Diagonal(2)).stddev.tolist()
        [2.0, 3.0]
        """
        root, ok = structure.cholesky(marginals)
        if not bool(ok.all()):
            raise InputError(
                "marginals must be the entries of a covariance, which is positive definite; the Cholesky factorisation "
                f"of {int((~ok).sum())} of {ok.numel()} failed. Variances must be positive and finite."
            )
        scale = structure.diagonal(root) if structure.widest == 1 else structure.to_dense(root)
        return cls._of(mean, scale, structure)

    @classmethod
    def from_posterior(cls, other: "ConvertibleGaussian", *, structure: Pattern | None = None) -> Self:
        """Make the same Gaussian in these coordinates.

        Args:
            other: the Gaussian to convert.
            structure: the pattern of the new posterior.  By default it is that of ``other``, or, of a mean field, every
                entry.  One with blocks keeps the marginal distributions of the blocks, a `DiagonalGaussian` the
                variances, and one of the precision alone the entries of the precision.

        Returns:
            A new posterior of this class, at the same mean and, where the structure allows it, the same covariance.

        >>> from torchngvi import CholeskyGaussian, NaturalGaussian
        >>> NaturalGaussian.from_posterior(CholeskyGaussian(1, scale=0.5)).precision.item()
        4.0
        """
        kept = None if other.structure.widest == 1 else other.structure
        pattern = cls._pattern(other.dim, structure, kept)
        if pattern.widest == 1:
            return cls._of(other.mean, other.stddev, pattern)
        if other.upper and pattern == other.structure and not pattern.closed:
            new = cls._of(other.mean, torch.ones_like(other.mean), pattern)
            new.restore(new._coordinates_with(other.mean, other.whitener()))
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
        """Make the posterior that starts at the prior of a model.

        Args:
            prior: the ``prior`` of a model.
            batch_shape: the number of independent posteriors that start there.
            structure: the pattern of the posterior; by default every entry, or that of the class.

        Returns:
            A posterior of this class, with the dtype and device of the prior.

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
        """The structure that was asked for, or that of where it comes from, or the default of the class."""
        return structure or kept or Dense(dim)

    @classmethod
    def _start(cls, mean: Tensor, scale_tril: Tensor, structure: Pattern) -> Self:
        """Make a posterior of this class from a mean and a lower factor, with the marginals of a structure's blocks."""
        return cls._of(mean, kept_covariance(structure, scale_tril), structure)

    @classmethod
    def _of(cls, mean: Tensor, scale: Tensor, structure: Pattern) -> Self:
        return cls(mean.shape[-1], mean.shape[:-1], mean=mean, scale=scale, structure=structure)

    def kept_covariance(
        self,
        scale_tril: Tensor,  # (*batch, D, D)
    ) -> Tensor:
        """Keep the marginal distributions of the blocks: the lower factor of their covariance, (*batch, D, D)."""
        return kept_covariance(self.structure, scale_tril)

    def kept_precision(
        self,
        scale_tril: Tensor,  # (*batch, D, D)
    ) -> Tensor:
        """Keep the entries of the precision in the pattern: the lower factor of the covariance, (*batch, D, D).

        Of all q in the pattern this one is the nearest in KL(q‖p).
        """
        structure = self.structure
        if structure.widest == structure.dim:
            return scale_tril
        root, _ = structure.cholesky(structure.from_dense(torch.cholesky_inverse(scale_tril)))
        return root_of_inverse(Dense(self.dim), structure.to_dense(root))
