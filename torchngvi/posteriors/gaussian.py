"""What every Gaussian posterior offers its user, whatever its coordinates: draws, densities, KL divergences.

Sampling and densities depend on the probes p = 0 and R = 0 through θ = m + C(p + (I + R)z), so
that a backward pass leaves a = Cᵀg in ``mean_probe.grad`` and W in ``root_probe.grad``
(Bonnet 1964; Price 1958, in the frame of q).

How it starts is in `starts`, how it is made from moments or from another posterior in `conversions`, and what is kept
of what it has computed in `memory`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import read_instance
from torchngvi.errors import InputError
from torchngvi.interfaces import Frame
from torchngvi.numerics.linalg import finite
from torchngvi.posteriors.conversions import ConvertibleGaussian
from torchngvi.posteriors.shapes import Shape, check_points, normal
from torchngvi.posteriors.warped import Warped
from torchngvi.posteriors.warps import Warp
from torchngvi.structures.pattern import Structured


class Gaussian(ConvertibleGaussian):
    """q = N(m, V) over (*batch, D): abstract, see `CholeskyGaussian`, `NaturalGaussian`, `DiagonalGaussian`.

    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(2)
    >>> isinstance(q, Gaussian), q.sample((4,)).shape
    (True, torch.Size([4, 2]))
    """

    engine = ""  # the target names it

    def marginal_variance(
        self,
        rows: Tensor,  # X, (N, D) or (*batch, N, D)
    ) -> Tensor:
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

    def rsample(
        self,
        shape: Shape = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
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
        return self.push_noise(normal(shape, (*self.batch_shape, self.dim), self.mean_probe, generator))

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
    def sample(
        self,
        shape: Shape = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
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

    def log_prob(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
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

    def kl(
        self,
        other: "Gaussian",
    ) -> Tensor:
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
        """Where the mean is finite and every variance finite and positive, (*batch,); covariances then are finite."""
        variance = self.structure.row_norms(root, self.upper)
        return (finite(mean) & (variance > 0) & (variance < torch.inf)).all(-1)


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
