"""What every Gaussian posterior offers its user, whatever its coordinates: draws, densities, KL divergences.

Sampling and densities depend on the probes p = 0 and R = 0 through θ = m + C(p + (I + R)z), so
that a backward pass leaves a = Cᵀg in ``mean_probe.grad`` and W in ``root_probe.grad``
(Bonnet 1964; Price 1958, in the frame of q).

How it starts, how it is made from moments or from another posterior, and what is kept of what it has computed is in
`conversions`; Gaussians that hold a precision are in `precision`.
"""

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from torchngvi.arguments import read_instance
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import (
    Affine,
    Congruence,
    Coordinates,
    Expectation,
    Frame,
    LogTangent,
    Move,
    Root,
    RootTangent,
    Tangent,
)
from torchngvi.posteriors.conversions import ConvertibleGaussian, tangent_moved
from torchngvi.posteriors.shapes import Shape, check_points, normal
from torchngvi.posteriors.warps import Warp, Warped
from torchngvi.structures import Diagonal, FullAlgebra, Pattern
from torchngvi.structures.pattern import Structured


class Gaussian(ConvertibleGaussian):
    """q = N(m, V) over (*batch, D): abstract, see `CholeskyGaussian`, `NaturalGaussian`, `DiagonalGaussian`."""

    engine = ""  # the target names it

    def marginal_variance(self, rows: Tensor) -> Tensor:
        """Compute the variances of linear predictors, Var[x_nᵀθ] = ‖Cᵀx_n‖², differentiable in the probes.

        Args:
            rows: X, (N, D) or (*batch, N, D).

        Returns:
            One variance a row, (*batch, N).

        Raises:
            InputError: rows of another width than D.

        >>> from torchngvi import CholeskyGaussian
        >>> CholeskyGaussian(2, scale=2.0).marginal_variance(torch.tensor([[1.0, 1.0]])).tolist()
        [8.0]
        """
        if rows.shape[-1] != self.dim:
            raise InputError(f"rows must have D = {self.dim} columns; got shape {tuple(rows.shape)}.")
        return self.probed().rows(rows).square().sum(-1)

    def probed(self) -> Frame:
        """Return mean and root as differentiable functions of the probes: m + C p, and C(I + R) or C(I + R)ᵀ."""
        base, R = self.frame(), self.root_probe
        if not torch.is_grad_enabled():
            return base
        change = self.structure.matmul(R, base.root) if self.upper else self.structure.matmul(base.root, R)
        return Frame(base.mean + base.push(self.mean_probe), base.root + change, self.structure, self.upper)

    def whiten(self, x: Tensor) -> Tensor:
        """Divide vectors by the root of the frame: C⁻¹ x, (*sample, *batch, D)."""
        raise NotImplementedError

    def log_det_root(self) -> Tensor:
        """Compute log|det C|, (*batch,), without gradients."""
        raise NotImplementedError

    def _probe_trace(self) -> Tensor:
        """tr R: zero, with the derivative of log|det(I + R)|."""
        return self.structure.total(self.structure.diagonal(self.root_probe).sum(-1))

    def rsample(self, shape: Shape = (), generator: torch.Generator | None = None) -> Tensor:
        """Draw θ = m + C z, differentiable: a backward pass through the draws leaves a and W in the probes.

        Args:
            shape: the shape of the sample, or a number of draws.
            generator: the source of the noise; torch's default generator if None.

        Returns:
            Draws, (*shape, *batch, D).

        Raises:
            InputError: if the shape is neither.

        >>> from torchngvi import CholeskyGaussian
        >>> q = CholeskyGaussian(2)
        >>> q.rsample((4,)).square().sum().backward()
        >>> tuple(q.mean_probe.grad.shape), tuple(q.root_probe.grad.shape)
        ((2,), (2, 2))
        """
        return self.push_noise(normal(shape, self.mean_probe, self.dim, generator))

    def push_noise(
        self,
        z: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Map given standard normal z to θ = m + C z, (*sample, *batch, D), differentiable in z and the probes.

        >>> from torchngvi import CholeskyGaussian
        >>> CholeskyGaussian(1, mean=1.0, scale=2.0).push_noise(torch.tensor([3.0])).item()
        7.0
        """
        return _PushNoise.apply(z, self.mean_probe, self.root_probe, self, *self.coordinates)

    @torch.no_grad()
    def sample(self, shape: Shape = (), generator: torch.Generator | None = None) -> Tensor:
        """Draw θ ~ q without recording gradients.

        Args:
            shape: the shape of the sample, or a number of draws.
            generator: the source of the noise; torch's default generator if None.

        Returns:
            Draws, (*shape, *batch, D).

        >>> from torchngvi import CholeskyGaussian
        >>> CholeskyGaussian(2, (3,)).sample((4,), torch.Generator().manual_seed(0)).shape
        torch.Size([4, 3, 2])
        """
        return self.rsample(shape, generator)

    def log_prob(self, theta: Tensor) -> Tensor:
        """Compute log q(θ), differentiable in θ and, to first order, in the probes.

        Args:
            theta: where, (*sample, *batch, D).

        Returns:
            The log densities, (*sample, *batch).

        Raises:
            InputError: θ of another width than D.

        >>> from torchngvi import CholeskyGaussian
        >>> round(CholeskyGaussian(2).log_prob(torch.zeros(2)).item(), 4)  # -log 2π
        -1.8379
        """
        check_points(theta, self.dim, self.mean_probe)
        z = self.whiten(theta - self.frame().mean)
        log_det = self.log_det_root()
        if torch.is_grad_enabled():
            # (I + R)⁻¹(z - p) to first order, or its transpose; p and R are zero
            turn = self.structure.tmv if self.upper else self.structure.mv
            z = z - self.mean_probe - turn(self.root_probe, z)
            log_det = log_det + self._probe_trace()
        return -0.5 * self.structure.dot(z, z) - log_det - 0.5 * self.structure.total_dim * math.log(2 * math.pi)

    def entropy(self) -> Tensor:
        """Compute -E_q[log q] = log|det C| + D/2 log(2πe) in nats, (*batch,), differentiable in the probes."""
        log_det = self.log_det_root()
        if torch.is_grad_enabled():
            log_det = log_det + self._probe_trace()
        return log_det + 0.5 * self.structure.total_dim * (1 + math.log(2 * math.pi))

    def kl(self, other: "Gaussian") -> Tensor:
        """Compute the Kullback-Leibler divergence from another Gaussian, differentiable in the probes of this one.

            KL(q‖other) = ½(‖C₂⁻¹C‖²_F + |C₂⁻¹(m - m₂)|² - D) + log|C₂| - log|C|

        Args:
            other: the Gaussian N(m₂, C₂C₂ᵀ), in any coordinates, whose batch broadcasts with that of q.

        Returns:
            The divergences in nats, one a member of the broadcast batch.

        Raises:
            InputError: another number of dimensions.

        >>> from torchngvi import CholeskyGaussian
        >>> CholeskyGaussian(1).kl(CholeskyGaussian(1, mean=2.0)).item()
        2.0
        """
        read_instance("other", other, Gaussian, "is the Gaussian from which KL is measured")
        if other.dim != self.dim:
            raise InputError(f"KL needs two posteriors over the same space; got D = {self.dim} and {other.dim}.")
        mine = self.probed()
        batch = torch.broadcast_shapes(self.batch_shape, other.batch_shape)
        spread = _spread(mine, other, batch)
        away = other.whiten((mine.mean - other.frame().mean).expand(*batch, self.dim))
        shift = self.structure.dot(away, away)
        log_det = self.log_det_root() + (self._probe_trace() if torch.is_grad_enabled() else 0.0)
        return 0.5 * (spread + shift - self.structure.total_dim) + other.log_det_root() - log_det

    def warped(self, warp: Warp | None = None, *, inside: bool = False) -> Warped:
        """Put a curve around each coordinate, the identity at first: for skewed margins, see `Warped`.

        Args:
            warp: the family of the curves; `torchngvi.posteriors.warps.SinhArcsinh` by default.
            inside: whether they are inside the root, along directions that `torchngvi.fit` finds.

        Returns:
            The warped posterior, which holds this one and moves it.

        Raises:
            InputError: a warp of another package, or curves inside a Gaussian that is not dense, or is a batch.

        >>> from torchngvi import CholeskyGaussian
        >>> CholeskyGaussian(2).warped().phi.tolist()
        [[0.0, 0.0], [0.0, 0.0]]
        """
        return Warped(self, warp, inside)

    def _proper(
        self,
        mean: Tensor,  # (*batch, D)
        root: Structured,  # C, or Cᵀ
    ) -> Tensor:
        """Where the mean and all variances are finite, and these and the diagonal of the root positive, (*batch,)."""
        variance = self.structure.row_norms(root, self.upper)
        least = torch.minimum(variance, self.structure.diagonal(root))
        # ∞ times what is positive is ∞, and times nothing else
        return (torch.hypot(variance, mean) < torch.inf * least).all(-1)


def _spread(mine: Frame, other: Gaussian, batch: torch.Size) -> Tensor:
    """‖C₂⁻¹C‖²_F, (*batch,)."""
    structure, theirs = mine.structure, other.frame()
    if structure == theirs.structure and mine.upper == theirs.upper:
        whitener = other.whitener()  # C₂⁻¹, or its transpose
        product = structure.matmul(mine.root, whitener) if mine.upper else structure.matmul(whitener, mine.root)
        return structure.entries_norm2(product)
    if theirs.structure.widest == 1:
        return structure.dot(other.whitener().square(), mine.variance)
    if structure.widest == 1:
        # C₂⁻¹ diag(c) has the columns of C₂⁻¹, the rows of T where C₂ = T⁻ᵀ
        return structure.dot(theirs.structure.row_norms(other.whitener(), not theirs.upper), mine.variance)
    columns = mine.dense().movedim(-1, 0)
    columns = columns.reshape(len(columns), *(1,) * (len(batch) + 2 - columns.ndim), *columns.shape[1:])
    columns = columns.expand(len(columns), *batch, columns.shape[-1])
    return structure.total(other.whiten(columns).square().sum((0, -1)))


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


class CovarianceRoot(Gaussian):
    """N(m, C Cᵀ) with C in the pattern of a structure: abstract, see `CholeskyGaussian` and `DiagonalGaussian`."""

    takes = frozenset({Congruence, Tangent, RootTangent, LogTangent, Affine, Root})
    structure: FullAlgebra

    @property
    def precision(self) -> Tensor:
        """The precision S = V⁻¹, (*batch, D, D)."""
        return torch.cholesky_inverse(self.scale_tril)

    def frame(self) -> Frame:
        """Return m and C, which are the coordinates themselves."""
        return Frame(*self.coordinates, self.structure)

    def unframe(self, a: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
        """Take a and W out of the frame by substitutions with C: C⁻ᵀ a and C⁻ᵀ W C⁻¹."""
        return self.structure.unconjugate(self.coordinates.matrix, a, W)

    def whiten(self, x: Tensor) -> Tensor:
        """Divide vectors by the root: C⁻¹ x, (*sample, *batch, D)."""
        return self.structure.solve(self.coordinates.matrix, x)

    def whitener(self) -> Tensor:
        """Invert the root: C⁻¹, in the pattern."""
        return self.structure.inverse(self.coordinates.matrix)

    def tangent(self, e: Expectation) -> Coordinates:
        """Compute the natural gradient in (m, C), which is (C a, C tril½[P]): SR-VN (Kumar et al. 2025, Eq 17)."""
        a, P = self.local(e)
        frame = self.frame()
        return Coordinates(frame.push(a), self.structure.matmul(frame.root, self.structure.tril_half(P)))

    def euclidean(self, e: Expectation) -> Coordinates:
        """Compute the plain gradient in (m, C), which is (C⁻ᵀ a, tril[C⁻ᵀ P])."""
        a, P = self.local(e)
        root, structure = self.coordinates.matrix, self.structure
        gradient = structure.transpose(structure.right_solve(P, root))  # C⁻ᵀ P = (P C⁻¹)ᵀ
        return Coordinates(structure.tsolve(root, a), structure.tril(gradient))

    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """Compute (m', C') with a positive diagonal, and where it is one and V' neither over- nor underflows."""
        mean, root = here = self.coordinates
        structure = self.structure
        match move:
            case Congruence(N, force):  # N = Lᵀ L:  C' = C L⁻¹,  m' = m + C' L⁻ᵀ f
                factor, inside = structure.reverse_cholesky(N)
                new = structure.right_solve(root, factor)
                vector = mean + structure.mv(new, structure.tsolve(factor, force))
            case Affine(M, s):
                vector = mean + s
                new, inside = structure.positive_root(structure.lower_root(structure.matmul(M, root)))
            case Root(vector, new):
                new, inside = structure.positive_root(new)
            case _:
                (vector, new), inside = tangent_moved(structure, here, move)
        return Coordinates(vector, new), structure.everywhere(inside & self._proper(vector, new))

    def log_det_root(self) -> Tensor:
        """Compute log|det C| = Σ log C_ii, (*batch,)."""
        return self.structure.log_det(self.coordinates.matrix)

    @property
    def scale_tril(self) -> Tensor:
        """The lower Cholesky factor C of the covariance, written out, (*batch, D, D)."""
        return self.structure.to_dense(self.coordinates.matrix)

    def _of_stddev(self, mean: Tensor, stddev: Tensor) -> Coordinates:
        return Coordinates(mean, self._diagonal_matrix(stddev))

    def _of_factor(self, mean: Tensor, factor: Tensor) -> Coordinates:
        return Coordinates(mean, self.structure.from_dense(factor))


class CholeskyGaussian(CovarianceRoot):
    """N(m, C Cᵀ) with a lower-triangular root C, in the buffers ``mean`` and ``scale_tril``.

    It is the first choice for a Gaussian posterior, since every kind of move can be made in these coordinates.
    Structures in which only the precision is sparse need a `PrecisionCholeskyGaussian` or a `NaturalGaussian`; for
    thousands of latent variables take blocks or a `DiagonalGaussian`.

    Args:
        dim: D, the number of latent variables.
        batch_shape: the number of independent posteriors, as a shape; () for one.
        mean: where m starts, a scalar or (*batch, D).
        scale: where C starts: a scalar, (*batch, D) standard deviations, or (*batch, D, D) a lower factor, of which the
            entries of the structure are kept.
        structure: which entries C has: every one below the diagonal by default, `block_diagonal(sizes)` for
            independent blocks of coordinates.  The buffer holds them as the structure stores them.
        dtype, device: those of the buffers; by default those of the start, or torch's defaults.

    Raises:
        InputError: a start that is not finite, not positive definite, or of the wrong shape; a structure over
            another number of coordinates.
        PairError: a structure whose pattern a covariance root does not have.

    >>> q = CholeskyGaussian(2, scale=3.0)
    >>> q.covariance.tolist()
    [[9.0, 0.0], [0.0, 9.0]]
    >>> from torchngvi.structures import block_diagonal
    >>> CholeskyGaussian(4, structure=block_diagonal([2, 2])).structure.parameters
    6
    """

    coordinate_names = ("mean", "scale_tril")


class DiagonalGaussian(CovarianceRoot):
    """N(m, diag(c)²), the mean-field Gaussian, in the buffers ``mean`` and ``scale``.

    All latent variables are independent under it, so that a step costs O(D), and variances are too small where the true
    posterior is correlated.

    Args:
        dim, batch_shape, mean, dtype, device: as in :class:`CholeskyGaussian`.
        scale: where c starts, as there; of a lower factor the diagonal is kept.

    Raises:
        InputError: as in :class:`CholeskyGaussian`.

    >>> DiagonalGaussian(2, scale=3.0).variance.tolist()
    [9.0, 9.0]
    """

    coordinate_names = ("mean", "scale")

    def __init__(
        self,
        dim: int,
        batch_shape: Sequence[int] = (),
        *,
        mean: Tensor | float = 0.0,
        scale: Tensor | float = 1.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(dim, batch_shape, mean=mean, scale=scale, structure=Diagonal, dtype=dtype, device=device)

    @classmethod
    def _pattern(cls, dim: int, structure: Pattern | None, kept: Pattern | None = None) -> Pattern:
        if structure not in (None, Diagonal(dim)):
            raise PairError(f"a DiagonalGaussian has the structure Diagonal({dim}); got {structure}.")
        return Diagonal(dim)

    @classmethod
    def _of(cls, mean: Tensor, scale: Tensor, structure: Pattern) -> Self:
        return cls(mean.shape[-1], mean.shape[:-1], mean=mean, scale=scale)
