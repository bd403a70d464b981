"""What every Gaussian posterior offers its user, whatever its coordinates.

Sampling and densities depend on the probes p = 0 and R = 0 through θ = m + C(p + (I + R)z), so
that a backward pass leaves a = Cᵀg in ``mean_probe.grad`` and W in ``root_probe.grad``
(Bonnet 1964; Price 1958, in the frame of q).
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Coordinates, Frame, FullPrior, Posterior, Prior, where_members
from torchngvi.numerics.inference_mode import tracked
from torchngvi.numerics.linalg import cholesky, eigh
from torchngvi.numerics.versions import Versions
from torchngvi.structures import Dense, Diagonal, FullAlgebra, Pattern
from torchngvi.structures.pattern import Structured


class Tested(Coordinates):
    """Coordinates after a move, with what the test of the cone has computed from them."""

    known: dict[str, Tensor]  # (*batch, ...), by the names under which they are remembered

    @classmethod
    def of(cls, vector: Tensor, matrix: Tensor, **known: Tensor) -> "Tested":
        """These, with what is known of them."""
        new = cls(vector, matrix)
        new.known = known
        return new


class Memory:
    """What was computed from coordinates, and of which."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.of: Versions | None = None
        self.settled = False  # nothing but `assign` changes the coordinates now

    def forget(self) -> None:
        """The coordinates were changed."""
        self.values, self.of = {}, None


class Gaussian(Posterior):
    """q = N(m, V) over (*batch, D): abstract, see `CholeskyGaussian`, `NaturalGaussian`, `DiagonalGaussian`."""

    upper = False

    if TYPE_CHECKING:  # buffers or properties, as the coordinates have it

        @property
        def mean(self) -> Tensor:
            """m, (*batch, D)."""

        @property
        def scale_tril(self) -> Tensor:
            """The lower Cholesky factor of V, (*batch, D, D)."""

        @property
        def precision(self) -> Tensor:
            """S = V⁻¹, (*batch, D, D)."""

    def __init__(
        self, dim: int, batch_shape: Sequence[int], structure: Pattern | Callable[[int], Pattern] | None
    ) -> None:
        super().__init__()
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
            raise InputError(f"dim is the number of latent variables, an integer of at least 1; got {dim!r}.")
        try:
            self.batch_shape = torch.Size(map(operator.index, batch_shape))
        except TypeError as error:
            raise InputError(
                f"batch_shape must be a tuple of integers, () for one posterior; got {batch_shape!r}."
            ) from error
        if any(size < 1 for size in self.batch_shape):
            raise InputError(f"batch_shape must hold at least one posterior; got {tuple(batch_shape)}.")
        structure = Dense if structure is None else structure
        structure = structure if isinstance(structure, Pattern) else structure(dim)
        if not isinstance(structure, Pattern) or structure.dim != dim:
            raise InputError(f"the structure must have D = {dim} coordinates, as the posterior; got {structure}.")
        self.dim = dim
        self.structure = structure
        self._memory = Memory()

    @tracked
    def _register(
        self,
        names: tuple[str, str],
        mean: Tensor | float,
        scale: Tensor | float,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        """Create the two buffers and the probes, and write the start into them."""
        given = [x for x in (mean, scale) if isinstance(x, Tensor)]
        dtype = dtype or (given[0].dtype if given else torch.get_default_dtype())
        device = device or (given[0].device if given else None)
        if not dtype.is_floating_point:
            raise InputError(
                f"a Gaussian posterior needs a floating-point dtype; got {dtype}. Pass dtype=torch.float64."
            )
        vector = torch.zeros(*self.batch_shape, self.dim, dtype=dtype, device=device)
        matrix = torch.zeros(*self.batch_shape, *self.structure.shape, dtype=dtype, device=device)
        for name, buffer in zip(names, (vector, matrix), strict=True):
            self._buffers[name] = buffer  # a property of the class may write the same matrix out
        for name, like in zip(("mean_probe", "root_probe"), (vector, matrix), strict=True):
            self.register_buffer(name, torch.zeros_like(like, requires_grad=True), persistent=False)
        self.initialize_(mean, scale)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the coordinates."""
        return self.mean_probe.dtype

    @property
    def device(self) -> torch.device:
        """The device of the coordinates."""
        return self.mean_probe.device

    # -------------------------------------------------------------------------------- starts

    def _coordinates_of(self, mean: Tensor, scale: Tensor) -> Coordinates:
        """Coordinates in this family of a scale (*batch, D), or a lower factor (*batch, D, D)."""
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

        Raises:
            InputError: not finite, of a shape that does not fit, a scale whose diagonal is not positive, or one whose
                coordinates are not finite in this dtype.
        """
        like = self.mean_probe
        start = torch.as_tensor(mean, dtype=like.dtype, device=like.device)
        factor = torch.as_tensor(scale, dtype=like.dtype, device=like.device)
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
            if not torch.isfinite(value).all():
                bad = int((~torch.isfinite(value)).sum())
                raise InputError(f"{name} must be finite; got {bad} NaN or infinite entries.")
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
        self.assign(self._coordinates_of(start.expand(full), factor), everywhere)
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
    def from_posterior(cls, other: "Gaussian", *, structure: Pattern | None = None) -> Self:
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
        return cls._of(mean, _kept_covariance(structure, scale_tril), structure)

    @classmethod
    def _of(cls, mean: Tensor, scale: Tensor, structure: Pattern) -> Self:
        return cls(mean.shape[-1], mean.shape[:-1], mean=mean, scale=scale, structure=structure)  # type: ignore[call-arg]

    def kept_covariance(
        self,
        scale_tril: Tensor,  # (*batch, D, D)
    ) -> Tensor:
        """The lower factor of the member of the family with the same marginals of its blocks."""
        return _kept_covariance(self.structure, scale_tril)

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

    # -------------------------------------------------------------------------------- moments

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

    def marginal_variance(
        self,
        rows: Tensor,  # X, (N, D) or (*batch, N, D)
    ) -> Tensor:
        """Var[x_nᵀθ] = ‖Cᵀx_n‖², (*batch, N), differentiable in the probes.

        Raises:
            InputError: rows of another width than D.
        """
        if rows.shape[-1] != self.dim:
            raise InputError(f"rows must have D = {self.dim} columns; got shape {tuple(rows.shape)}.")
        return self.probed().rows(rows).square().sum(-1)

    # -------------------------------------------------------------------------------- densities

    def probed(self) -> Frame:
        """Mean and root as differentiable functions of the probes: m + C p, and C(I + R) or C(I + R)ᵀ."""
        base, R = self.frame(), self.root_probe
        if not torch.is_grad_enabled():
            return base
        change = self.structure.matmul(R, base.root) if self.upper else self.structure.matmul(base.root, R)
        return Frame(base.mean + base.push(self.mean_probe), base.root + change, self.structure, self.upper)

    def whiten(self, x: Tensor) -> Tensor:
        """C⁻¹ x, (*sample, *batch, D)."""
        raise NotImplementedError

    def whitener(self) -> Structured:
        """C⁻¹ where C is lower triangular, its transpose where C is upper triangular."""
        raise NotImplementedError

    def log_det_root(self) -> Tensor:
        """log|det C|, (*batch,)."""
        raise NotImplementedError

    def _probe_trace(self) -> Tensor:
        """tr R: zero, with the derivative of log|det(I + R)|."""
        return self.structure.diagonal(self.root_probe).sum(-1)

    def rsample(
        self,
        shape: Sequence[int] = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw θ = m + C z, (*shape, *batch, D); a backward pass leaves a and W in the probes.

        >>> from torchngvi import CholeskyGaussian
        >>> q = CholeskyGaussian(2)
        >>> q.rsample((4,)).square().sum().backward()
        >>> tuple(q.mean_probe.grad.shape), tuple(q.root_probe.grad.shape)
        ((2,), (2, 2))
        """
        z = torch.randn(
            (*shape, *self.batch_shape, self.dim), dtype=self.dtype, device=self.device, generator=generator
        )
        return self.push_noise(z)

    def push_noise(
        self,
        z: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """θ = m + C z for given standard normal z, differentiable in z and the probes."""
        return _PushNoise.apply(z, self.mean_probe, self.root_probe, self, *self.coordinates)

    @torch.no_grad()
    def sample(
        self,
        shape: Sequence[int] = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw θ ~ q, (*shape, *batch, D), without a graph."""
        return self.rsample(shape, generator)

    def log_prob(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """log q(θ), (*sample, *batch): differentiable in θ and, to first order, in the probes.

        Raises:
            InputError: θ of another width than D.
        """
        if theta.shape[-1] != self.dim:
            raise InputError(f"theta must end in D = {self.dim}; got shape {tuple(theta.shape)}.")
        z = self.whiten(theta - self.frame().mean)
        log_det = self.log_det_root()
        if torch.is_grad_enabled():
            # (I + R)⁻¹(z - p) to first order, or its transpose; p and R are zero
            turn = self.structure.tmv if self.upper else self.structure.mv
            z = z - self.mean_probe - turn(self.root_probe, z)
            log_det = log_det + self._probe_trace()
        return -0.5 * z.square().sum(-1) - log_det - 0.5 * self.dim * math.log(2 * math.pi)

    def entropy(self) -> Tensor:
        """-E_q[log q] = log|det C| + D/2 log(2πe), (*batch,), differentiable in the probes."""
        log_det = self.log_det_root()
        if torch.is_grad_enabled():
            log_det = log_det + self._probe_trace()
        return log_det + 0.5 * self.dim * (1 + math.log(2 * math.pi))

    def kl(
        self,
        other: "Gaussian",
    ) -> Tensor:
        """KL(q‖other) = ½(‖C₂⁻¹C‖²_F + |C₂⁻¹(m - m₂)|² - D) + log|C₂| - log|C|, (*batch,).

        Differentiable in the probes of this posterior.

        Raises:
            InputError: another number of dimensions.

        >>> from torchngvi import CholeskyGaussian
        >>> CholeskyGaussian(1).kl(CholeskyGaussian(1, mean=2.0)).item()
        2.0
        """
        if other.dim != self.dim:
            raise InputError(f"KL needs two posteriors over the same space; got D = {self.dim} and {other.dim}.")
        mine = self.probed()
        batch = torch.broadcast_shapes(self.batch_shape, other.batch_shape)
        spread = _spread(mine, other, batch)
        shift = other.whiten((mine.mean - other.frame().mean).expand(*batch, self.dim)).square().sum(-1)
        log_det = self.log_det_root() + (self._probe_trace() if torch.is_grad_enabled() else 0.0)
        return 0.5 * (spread + shift - self.dim) + other.log_det_root() - log_det

    # -------------------------------------------------------------------------------- moves

    def _proper(
        self,
        mean: Tensor,  # (*batch, D)
        root: Structured,  # C, or Cᵀ
    ) -> Tensor:
        """Where the mean is finite and every variance finite and positive, (*batch,); covariances then are finite."""
        variance = self.structure.row_norms(root, self.upper)
        return (mean.isfinite() & variance.isfinite() & (variance > 0)).all(-1)

    def assign(self, new: Coordinates, where: Tensor) -> None:
        """As every posterior; what the test of the cone has computed is kept."""
        known = new.known if isinstance(new, Tested) else {}
        old = self._computed(*known)
        known = {name: where_members(where, value, old[name]) for name, value in known.items()}
        # graphs through what was computed from the old coordinates are stale: let torch know
        torch.autograd.graph.increment_version(tuple(self._memory.values.values()))
        super().assign(new, where)
        if known:
            self._memory.values, self._memory.of = known, Versions(self.coordinates)

    # -------------------------------------------------------------------------------- torch

    @tracked
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As every posterior; what was computed from the coordinates is forgotten."""
        self._memory.forget()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": Memory()}

    @contextmanager
    def settled(self) -> Iterator[None]:
        """As every posterior; what was computed before is compared once."""
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
        if names and (memory.of is None or not memory.of.hold(coordinates, contents=not memory.settled)):
            memory.values, memory.of = {}, Versions(coordinates)
        values = memory.values  # one thing may be computed from another, and of tensors of inference_mode none is kept
        for name in names:
            if name not in values:
                with torch.inference_mode(False), torch.no_grad():
                    values[name] = getattr(self, f"_compute_{name}")()
        return values

    def extra_repr(self) -> str:
        """Shown by ``repr``."""
        batch = f", batch_shape={tuple(self.batch_shape)}" if self.batch_shape else ""
        return f"{self.dim}{batch}, dtype={self.dtype}"


def _kept_covariance(structure: Pattern, scale_tril: Tensor) -> Tensor:
    if structure.widest == structure.dim or not isinstance(structure, FullAlgebra):
        return scale_tril
    root, _ = structure.cholesky(structure.from_dense(scale_tril @ scale_tril.mT))
    return structure.to_dense(root)


def _spread(mine: Frame, other: Gaussian, batch: torch.Size) -> Tensor:
    """‖C₂⁻¹C‖²_F, (*batch,)."""
    structure, theirs = mine.structure, other.frame()
    if structure == theirs.structure and mine.upper == theirs.upper:
        whitener = other.whitener()  # C₂⁻¹, or its transpose
        product = structure.matmul(mine.root, whitener) if mine.upper else structure.matmul(whitener, mine.root)
        return structure.entries_norm2(product)
    if theirs.structure.widest == 1:
        return (other.whitener().square() * mine.variance).sum(-1)
    if structure.widest == 1:
        # C₂⁻¹ diag(c) has the columns of C₂⁻¹, the rows of T where C₂ = T⁻ᵀ
        return (theirs.structure.row_norms(other.whitener(), not theirs.upper) * mine.variance).sum(-1)
    columns = mine.dense().movedim(-1, 0)
    columns = columns.reshape(len(columns), *(1,) * (len(batch) + 2 - columns.ndim), *columns.shape[1:])
    columns = columns.expand(len(columns), *batch, columns.shape[-1])
    return other.whiten(columns).square().sum((0, -1))


class _PushNoise(torch.autograd.Function):
    """θ = m + C z; backward: p gets Σ Cᵀg and R the symmetric part of Σ (Cᵀg) zᵀ, in q's pattern."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, mean_probe: Tensor, root_probe: Tensor, q: Gaussian, *coordinates: Tensor) -> Tensor:
        frame = q.frame()
        return frame.mean + frame.push(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        z, _, _, q, *coordinates = inputs
        ctx.q = q
        ctx.save_for_backward(z, *coordinates)  # a step in between raises torch's own version error

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        z, *_ = ctx.saved_tensors
        q: Gaussian = ctx.q
        pulled = q.frame().pull(gradient)
        samples = pulled.ndim - len(q.batch_shape) - 1
        mean_gradient = pulled.sum(tuple(range(samples))) if samples else pulled
        root_gradient = q.sym_outer(pulled, z)
        return (pulled if ctx.needs_input_grad[0] else None), mean_gradient, root_gradient, None, None, None


def log_moved(
    structure: Pattern,
    root: Structured,  # Λ, triangular, in q's pattern
    change: Tensor,  # of log Λ_ii on the diagonal, of Λ_ij elsewhere
) -> Tensor:
    """The root after that change: Λ_ii exp(change_ii) and Λ_ij + change_ij."""
    diagonal = structure.diagonal(root) * structure.diagonal(change).exp()
    return structure.with_diagonal(root + change, diagonal)


def root_of_inverse(
    structure: FullAlgebra,
    root: Structured,  # A, lower triangular
) -> Structured:
    """The lower root of (A Aᵀ)⁻¹, by a QR factorisation of A⁻ᵀ."""
    return structure.positive_root(structure.lower_root(structure.transpose(structure.inverse(root))))[0]
