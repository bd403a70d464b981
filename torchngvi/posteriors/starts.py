"""Where a Gaussian posterior starts: its sizes, its buffers, and their first values."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from torchngvi.arguments import read_device, read_dtype, read_size, read_sizes, read_tensor
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Coordinates
from torchngvi.numerics.inference_mode import tracked
from torchngvi.posteriors.memory import RememberingPosterior
from torchngvi.structures import Dense, Diagonal, Pattern
from torchngvi.structures.pattern import Structured


class StartedGaussian(RememberingPosterior):
    """q = N(m, V) over (*batch, D), with buffers that a start is written to: abstract, the ground of `Gaussian`.

    A class says the names of its two buffers, and how their values follow from a mean with standard deviations, or from
    a mean with a lower factor of the covariance.
    """

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
        self._register(mean, scale, dtype, device)

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

    @tracked
    def _register(
        self,
        mean: Tensor | float,
        scale: Tensor | float,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        """Create the two buffers and the probes, and write the start into them."""
        given = [x for x in (mean, scale) if isinstance(x, Tensor)]
        usual = given[0].dtype if given else torch.get_default_dtype()
        dtype = read_dtype("dtype", usual if dtype is None else dtype)
        device = read_device("device", device if device is not None or not given else given[0].device)
        vector = torch.zeros(*self.batch_shape, self.dim, dtype=dtype, device=device)
        matrix = torch.zeros(*self.batch_shape, *self.structure.shape, dtype=dtype, device=device)
        self._hold(vector, matrix)
        self.initialize_(mean, scale)

    def _hold(
        self,
        vector: Tensor,  # (*batch, D)
        matrix: Structured,
    ) -> None:
        """Take two tensors as the buffers, with probes beside them."""
        for name, buffer in zip(self.coordinate_names, (vector, matrix), strict=True):
            self._buffers[name] = buffer  # a property of the class may write the same matrix out
        for name, like in zip(("mean_probe", "root_probe"), (vector, matrix), strict=True):
            self.register_buffer(name, torch.zeros_like(like, requires_grad=True), persistent=False)

    @property
    def coordinates(self) -> Coordinates:
        """The two buffers, a vector and a matrix."""
        vector, matrix = self.coordinate_names
        return Coordinates(self._buffers[vector], self._buffers[matrix])  # type: ignore[arg-type]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the coordinates, which is that of the mean."""
        return self.mean_probe.dtype

    @property
    def device(self) -> torch.device:
        """The device that the coordinates are on."""
        return self.mean_probe.device

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
    def initialize_(
        self,
        mean: Tensor | float = 0.0,  # broadcasts to (*batch, D)
        scale: Tensor | float = 1.0,  # scalar, (*batch, D) standard deviations, or (*batch, D, D) lower factor
    ) -> Self:
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
            try:
                torch.broadcast_shapes(value.shape, shape)
                fits = value.ndim <= len(shape) and torch.broadcast_shapes(value.shape, shape) == shape
            except RuntimeError:
                fits = False
            if not fits:
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
        """Describe the posterior for ``repr``: its dimension, batch, dtype, and what its structure is if not dense.

        >>> from torchngvi import CholeskyGaussian, DiagonalGaussian
        >>> from torchngvi.structures import block_diagonal
        >>> CholeskyGaussian(3), DiagonalGaussian(2, (5,))
        (CholeskyGaussian(3, dtype=torch.float32), DiagonalGaussian(2, batch_shape=(5,), dtype=torch.float32))
        >>> CholeskyGaussian(3, structure=block_diagonal([1, 2]))
        CholeskyGaussian(3, dtype=torch.float32, structure=UnequalBlocks(sizes=(1, 2)))
        """
        batch = f", batch_shape={tuple(self.batch_shape)}" if self.batch_shape else ""
        own = self.structure.widest < self.dim and not isinstance(self.structure, Diagonal)
        structure = f", structure={self.structure}" if own else ""
        return f"{self.dim}{batch}, dtype={self.dtype}{structure}"
