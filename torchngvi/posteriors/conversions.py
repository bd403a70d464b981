"""Gaussians from moments, from a prior or from another posterior; their roots, starts, and what they keep computed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from torchngvi.arguments import read_size, read_sizes, read_tensor
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import (
    Coordinates,
    FullPrior,
    LogTangent,
    Move,
    Prior,
    Tangent,
    known_everywhere,
    where_members,
)
from torchngvi.numerics.arrays import Versions, outside_transforms, tracked
from torchngvi.numerics.linalg import cholesky, eigh
from torchngvi.posteriors.shapes import ProbedPosterior, fits, zeros_for
from torchngvi.structures import Dense, Diagonal, FullAlgebra, Pattern
from torchngvi.structures.pattern import Structured

# Triangular roots in a pattern, moved along their logarithm, inverted, and cut to the marginals of a pattern


def kept_covariance(structure: Pattern, scale_tril: Tensor) -> Tensor:
    """Keep the marginal distributions of the blocks of a pattern, as the nearest q in KL(p‖q) does."""
    if structure.widest == structure.dim or not structure.closed:
        return scale_tril
    root, _ = structure.cholesky(structure.from_dense(scale_tril @ scale_tril.mT))
    return structure.to_dense(root)


def tangent_moved(
    structure: Pattern,
    here: Coordinates,  # m and a triangular root Λ
    move: Move,
) -> tuple[Coordinates, Tensor]:
    """Move mean and root along a tangent: Λ + change, the diagonal by its logarithm where the move says so."""
    match move:
        case LogTangent((vector, matrix)):
            diagonal = structure.diagonal(here.matrix) * structure.diagonal(matrix).exp()
            new = Coordinates(here.vector + vector, structure.with_diagonal(here.matrix + matrix, diagonal))
            return new, (diagonal > 0).all(-1)
        case Tangent((vector, matrix)):
            root = here.matrix + matrix
            diagonal = structure.diagonal(root)  # columns of what is refused are turned, so that it is a root too
            return Coordinates(here.vector + vector, structure.scale_columns(root, diagonal.sign())), (
                diagonal > 0
            ).all(-1)
    raise NotImplementedError  # `takes` refuses it before


def root_of_inverse(
    structure: Pattern,
    root: Structured,  # A, lower triangular
) -> Structured:
    """Find the lower root of (A Aᵀ)⁻¹, by a QR factorisation of A⁻ᵀ."""
    assert isinstance(structure, FullAlgebra)  # it is closed: for the type alone
    return structure.positive_root(structure.lower_root(structure.transpose(structure.inverse(root))))[0]


def covariance_root(structure: Pattern, factor: Structured) -> Tensor:
    """Write the lower root of (T Tᵀ)⁻¹ out, (*batch, D, D), of a T that may be triangular in another order than θ's."""
    dense = Dense(structure.dim)
    return dense.positive_root(dense.lower_root(structure.to_dense(structure.inverse(factor)).mT))[0]


# What a posterior has computed from its coordinates, which is kept until they change, and handed over by a step


class Tested(Coordinates):
    """Coordinates after a move, with what the test of the cone has computed from them on the way."""

    known: dict[str, Tensor]  # (*batch, ...), by the names under which they are remembered

    @classmethod
    def of(cls, vector: Tensor, matrix: Tensor, **known: Tensor) -> "Tested":
        """Make coordinates that carry what is known of them, under the names by which it is remembered."""
        new = cls(vector, matrix)
        new.known = known
        return new


class Memory:
    """What was computed from the coordinates of a posterior, and the versions of those coordinates."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.of: Versions | None = None
        self.settled = False  # nothing but `assign` changes the coordinates now

    def forget(self) -> None:
        """Drop everything, because the coordinates were changed."""
        self.values, self.of = {}, None


class RememberingPosterior(ProbedPosterior):
    """A posterior that has what ``_compute_<name>`` finds, or a step hands over as `Tested`, by ``_computed(name)``."""

    def __init__(self) -> None:
        super().__init__()
        self._memory = Memory()

    def assign(self, new: Coordinates, where: Tensor) -> None:
        """Write coordinates in place for the members of the mask, and keep what the test of the cone has computed."""
        known = new.known if isinstance(new, Tested) else {}
        if not known_everywhere(where):
            old = self._computed(*known)
            known = {name: where_members(where, value, old[name]) for name, value in known.items()}
        # graphs through what was computed from the old coordinates are stale: let torch know
        torch.autograd.graph.increment_version(tuple(self._memory.values.values()))
        super().assign(new, where)
        if known:
            self._memory.values, self._memory.of = known, Versions(self.coordinates)

    @tracked
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As every posterior; what was computed from the coordinates is forgotten."""
        self._memory.forget()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": Memory()}

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Open a block in which only :meth:`assign` changes the coordinates; the memory is compared once."""
        memory, outer = self._memory, self._memory.settled
        if not outer and memory.of is not None and not memory.of.hold(self.coordinates):
            memory.forget()
        memory.settled = True
        try:
            yield
        finally:
            memory.settled = outer

    def _computed(self, *names: str) -> dict[str, Tensor]:
        """What ``_compute_<name>`` makes of the coordinates, and all that is known of them: kept until they change."""
        coordinates = self.coordinates
        memory = self._memory
        traced = memory.settled and torch.compiler.is_compiling()  # where writes are not counted, nor any but assign's
        if names and (memory.of is None or not (traced or memory.of.hold(coordinates, contents=not memory.settled))):
            memory.values, memory.of = {}, Versions(coordinates)
        values = memory.values  # one thing may be computed from another, and of tensors of inference_mode none is kept
        for name in names:
            if name not in values:
                with torch.inference_mode(False), torch.no_grad(), outside_transforms(*coordinates):
                    values[name] = getattr(self, f"_compute_{name}")()
        return values


# Where a Gaussian posterior starts: its sizes, its buffers, and their first values


class StartedGaussian(RememberingPosterior):
    """q = N(m, V) with two buffers that a start is written to: abstract, the ground of `Gaussian`."""

    coordinate_names: tuple[str, str]  # the buffers of the vector and of the matrix
    upper = False  # q holds a precision, whose root gives the frame an upper triangular C
    structure: Pattern

    if TYPE_CHECKING:  # buffers or properties, as the coordinates have it

        @property
        def mean(self) -> Tensor:
            """The mean m of q, (*batch, D)."""

        @property
        def scale_tril(self) -> Tensor:
            """The lower Cholesky factor of the covariance V, (*batch, D, D)."""

        @property
        def precision(self) -> Tensor:
            """The precision S = V⁻¹, (*batch, D, D)."""

    @tracked
    def __init__(
        self,
        dim: int,
        batch_shape: Sequence[int] = (),
        *,
        mean: Tensor | float = 0.0,
        scale: Tensor | float = 1.0,
        structure: Pattern | Callable[[int], Pattern] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._size(dim, batch_shape, structure)
        vector = zeros_for((*self.batch_shape, self.dim), mean, scale, dtype, device)
        self._hold(vector, vector.new_zeros(*self.batch_shape, *self.structure.shape))
        self.initialize_(mean, scale)

    def _size(self, dim: int, batch_shape: Sequence[int], structure: Pattern | Callable[[int], Pattern] | None) -> None:
        """Take the sizes and the structure, after a check that they fit one another and the coordinates."""
        dim = read_size("dim", dim, "is the number of latent variables")
        what = "must be a tuple of integers of at least 1, () for one posterior"
        self.batch_shape = torch.Size(read_sizes("batch_shape", batch_shape, what))
        structure = Dense if structure is None else structure
        if not (isinstance(structure, Pattern) or callable(structure)):
            raise InputError(
                "structure must be a pattern of torchngvi.structures, as Diagonal, block_diagonal([1, 4]) or "
                f"arrow(groups=8, local=1, globals=2), or a class or function that makes one of D; got {structure!r}."
            )
        structure = structure if isinstance(structure, Pattern) else structure(dim)
        if not isinstance(structure, Pattern) or structure.dim != dim:
            raise InputError(f"the structure must have D = {dim} coordinates, as the posterior; got {structure}.")
        if not (self.upper or structure.closed):
            raise PairError(
                f"{type(self).__name__} holds a root of the covariance, which {type(structure).__name__} does not have "
                "in its pattern: only that of the precision. Use a PrecisionCholeskyGaussian or a NaturalGaussian."
            )
        self.dim = dim
        self.structure = structure

    def _hold(
        self,
        vector: Tensor,  # (*batch, D)
        matrix: Structured,
    ) -> None:
        """Take two tensors as the buffers, with probes beside them."""
        for name, buffer in zip(self.coordinate_names, (vector, matrix), strict=True):
            self._buffers[name] = buffer  # a property of the class may write the same matrix out
        self._add_probes(vector, matrix)

    @property
    def coordinates(self) -> Coordinates:
        """The two buffers, a vector and a matrix."""
        vector, matrix = self.coordinate_names
        return Coordinates(self._buffers[vector], self._buffers[matrix])  # type: ignore[arg-type]

    def _of_stddev(
        self,
        mean: Tensor,  # (*batch, D)
        stddev: Tensor,  # (*batch, D)
    ) -> Coordinates:
        """Compute the coordinates of a posterior with independent coordinates of these standard deviations."""
        raise NotImplementedError

    def _of_factor(
        self,
        mean: Tensor,  # (*batch, D)
        factor: Tensor,  # C, (*batch, D, D), lower triangular
    ) -> Coordinates:
        """Compute the coordinates of the posterior with this factor of the covariance, as far as its pattern goes."""
        raise NotImplementedError

    def _coordinates_with(self, mean: Tensor, whitener: Structured) -> Coordinates:
        """Coordinates in this family of a mean and a root T of the precision, in its own pattern."""
        raise NotImplementedError  # of a family over precisions

    def _diagonal_matrix(self, entries: Tensor) -> Structured:
        """A matrix of the pattern with this diagonal, (*batch, D), and zeros."""
        zeros = entries.new_zeros(*entries.shape[:-1], *self.structure.shape)
        return self.structure.with_diagonal(zeros, entries)

    @torch.no_grad()
    def initialize_(self, mean: Tensor | float = 0.0, scale: Tensor | float = 1.0) -> Self:
        """Restart in place from N(mean, scale scaleᵀ); the classes of earlier targets are forgotten.

        Args:
            mean: m, which broadcasts to (*batch, D).
            scale: a scalar, (*batch, D) standard deviations, or (*batch, D, D) a lower factor of the covariance.

        Returns:
            The posterior itself.

        Raises:
            InputError: not finite, of a shape that does not fit, a scale whose diagonal is not positive, or one whose
                coordinates are not finite in this dtype.

        >>> from torchngvi import CholeskyGaussian
        >>> CholeskyGaussian(1).initialize_(scale=2.0).variance.item()
        4.0
        """
        like = self.mean_probe
        start = read_tensor("mean", mean, like=like)
        factor = read_tensor("scale", scale, like=like)
        full = (*self.batch_shape, self.dim)
        is_matrix = factor.ndim >= 2 and factor.shape == (*full, self.dim)
        for name, value, shape in (("mean", start, full), ("scale", factor, (*full, self.dim) if is_matrix else full)):
            if not fits(value, shape):
                wanted = f"a scalar or {tuple(full)}" + (f" or {(*full, self.dim)}" if name == "scale" else "")
                raise InputError(f"{name} must be {wanted} for this posterior; got shape {tuple(value.shape)}.")
        if is_matrix and bool((factor.triu(1) != 0).any()):
            raise InputError(
                "scale must be lower triangular, V = scale scaleᵀ; got entries above the diagonal. "
                "Pass torch.linalg.cholesky(V)."
            )
        factor = factor if is_matrix else factor.expand(full)
        smallest = float((factor.diagonal(dim1=-2, dim2=-1) if is_matrix else factor).min())
        if smallest <= 0:
            raise InputError(
                f"scale must have a positive diagonal, so that the covariance is positive definite; got {smallest:.6g}."
            )
        old, everywhere = self.snapshot(), torch.ones(self.batch_shape, dtype=torch.bool, device=like.device)
        self.assign((self._of_factor if is_matrix else self._of_stddev)(start.expand(full), factor), everywhere)
        frame = self.frame()
        regular = self.structure.positive_root(frame.root)[1].all() & torch.isfinite(frame.mean).all()
        if not bool(regular):
            self.assign(old, everywhere)
            raise InputError(
                f"mean and scale must have coordinates in {like.dtype}; those of {type(self).__name__} overflow or "
                f"vanish, with a smallest scale of {smallest:.3g}. Use float64 or other units of theta."
            )
        self.coding = ()
        return self

    def extra_repr(self) -> str:
        """Describe the posterior for ``repr``: its dimension, batch, dtype, and what its structure is if not dense."""
        batch = f", batch_shape={tuple(self.batch_shape)}" if self.batch_shape else ""
        own = self.structure.widest < self.dim and not isinstance(self.structure, Diagonal)
        structure = f", structure={self.structure}" if own else ""
        return f"{self.dim}{batch}, dtype={self.dtype}{structure}"


# Gaussians from moments, from a prior, or from another posterior: the same q in other coordinates


class ConvertibleGaussian(StartedGaussian):
    """q = N(m, V) with its moments, and made from those of others: abstract, the ground of `Gaussian`."""

    @property
    def covariance(self) -> Tensor:
        """The covariance V = C Cᵀ, (*batch, D, D)."""
        root = self.frame().dense()
        return root @ root.mT

    @property
    def variance(self) -> Tensor:
        """The marginal variances diag(V), (*batch, D)."""
        return self.frame().variance

    def whitener(self) -> Structured:
        """Return C⁻¹ where C is lower triangular, and its transpose where C is upper triangular."""
        raise NotImplementedError

    @classmethod
    def from_moments(cls, mean: Tensor, covariance: Tensor, *, structure: Pattern | None = None) -> Self:
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
    def from_marginals(cls, mean: Tensor, marginals: Structured, structure: Pattern) -> Self:
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
        """Keep the entries of the precision in the pattern, the nearest in KL(q‖p): the lower factor of V."""
        structure = self.structure
        if structure.widest == structure.dim:
            return scale_tril
        root, _ = structure.cholesky(structure.from_dense(torch.cholesky_inverse(scale_tril)))
        return covariance_root(structure, root)
