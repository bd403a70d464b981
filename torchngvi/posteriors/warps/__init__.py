"""Monotone curves of one coordinate that keep the mean 0 and the standard deviation 1 of a standard normal variable.

    w(ξ; φ) = (u(ξ; φ) - E u) / sd u        ξ ~ N(0, 1)

with a curve u that is known in closed form.  So the moments of what is warped do not depend on φ, and at the identity
φ = 0 the scores of φ are uncorrelated with those of a shift and of a scale.

E u and sd u are sums over the nodes of Gauss and Legendre on [-10, 0] and [0, 10], under the normal density.  A curve
may be bent at 0 alone, and has its singularities off the real line: the sums are exact to rounding.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self, final

import torch
from torch import Tensor

from torchngvi.arguments import read_flag
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Coordinates
from torchngvi.numerics.arrays import remembered, tracked, writable
from torchngvi.numerics.linalg import eigh
from torchngvi.posteriors.conversions import ConvertibleGaussian
from torchngvi.posteriors.shapes import ProbedPosterior, Shape, normal

__all__ = ["SinhArcsinh", "Warp", "YeoJohnson"]


class Warp(ABC):
    """A family of increasing curves w(ξ; φ), with E w = 0 and Var w = 1 under N(0, 1), the identity at φ = 0: abstract.

    A class says its ``parameters`` and the curve before it is standardised, with its logarithmic slope and its inverse.
    All functions act on each coordinate for itself: ξ is (*sample, *batch, D), φ is (*batch, D, ``parameters``).

    Attributes:
        parameters: numbers a coordinate.
        names: of these numbers.

    >>> from torchngvi.posteriors.warps import SinhArcsinh
    >>> warp, phi = SinhArcsinh(), torch.tensor([[0.5, -0.2]], dtype=torch.float64)
    >>> xi = torch.tensor([[-1.0], [2.0]], dtype=torch.float64)
    >>> torch.allclose(warp.inverse(warp.forward(xi, phi), phi), xi)
    True
    """

    parameters: int
    names: tuple[str, ...]

    @abstractmethod
    def curve(
        self,
        xi: Tensor,  # (*sample, *batch, D)
        phi: Tensor,  # (*batch, D, parameters)
    ) -> tuple[Tensor, Tensor]:
        """Compute u(ξ; φ) and log ∂u/∂ξ, each (*sample, *batch, D), differentiable in both."""

    @abstractmethod
    def curve_inverse(self, u: Tensor, phi: Tensor) -> Tensor:
        """Compute the ξ with u(ξ; φ) = u."""

    @abstractmethod
    def bend(self, xi: Tensor, phi: Tensor) -> Tensor:
        """Compute the derivative of the logarithmic slope, w''/w', (*sample, *batch, D); scales do not enter it."""

    def moments(
        self,
        phi: Tensor,  # (*batch, D, parameters)
    ) -> tuple[Tensor, Tensor]:
        """Compute the mean and the standard deviation of u(ξ; φ) under ξ ~ N(0, 1), each (*batch, D)."""
        xi, weights = _nodes_of_curves(phi)
        u = self.curve(xi, phi)[0]
        mean = (weights * u).sum(0)
        return mean, (weights * (u - mean).square()).sum(0).sqrt()

    def with_log_slope(
        self,
        xi: Tensor,  # (*sample, *batch, D)
        phi: Tensor,  # (*batch, D, parameters)
    ) -> tuple[Tensor, Tensor]:
        """Compute w(ξ; φ) and log w'(ξ; φ), each (*sample, *batch, D), differentiable in both.

        Args:
            xi: standardised coordinates.
            phi: the numbers of the curves.

        Returns:
            The values and the logarithms of the slopes.
        """
        mean, sd = self.moments(phi)
        u, log_slope = self.curve(xi, phi)
        return (u - mean) / sd, log_slope - sd.log()

    def forward(self, xi: Tensor, phi: Tensor) -> Tensor:
        """Compute w(ξ; φ), (*sample, *batch, D)."""
        return self.with_log_slope(xi, phi)[0]

    def log_slope(self, xi: Tensor, phi: Tensor) -> Tensor:
        """Compute log ∂w/∂ξ, (*sample, *batch, D)."""
        return self.with_log_slope(xi, phi)[1]

    def inverse(self, w: Tensor, phi: Tensor) -> Tensor:
        """Compute the ξ with w(ξ; φ) = w, (*sample, *batch, D)."""
        mean, sd = self.moments(phi)
        return self.curve_inverse(mean + sd * w, phi)

    @torch.no_grad()
    def fisher(
        self,
        phi: Tensor,  # (parameters,)
    ) -> Tensor:
        """Compute the Fisher matrix of φ for the density of w(ξ; φ), (parameters, parameters).

        The score is (ξ + ∂_ξ log w') w_φ/w' - ∂_φ log w', and its second moment a sum over nodes.

        Args:
            phi: of one coordinate.

        Returns:
            The matrix.

        >>> from torchngvi.posteriors.warps import SinhArcsinh
        >>> SinhArcsinh().fisher(torch.zeros(2, dtype=torch.float64)).diagonal().round(decimals=3).tolist()
        [0.51, 0.227]
        """
        xi, weights = normal_nodes(phi)
        with torch.enable_grad():
            each = phi.detach().expand(len(xi), -1).clone().requires_grad_()  # a copy a node, for its derivative
            w, log_slope = self.with_log_slope(xi, each)
            (change,) = torch.autograd.grad(w.sum(), each, retain_graph=True)
            (stretch,) = torch.autograd.grad(log_slope.sum(), each)
        bend, slope = self.bend(xi, each.detach()), log_slope.detach().exp()
        score = ((xi + bend) / slope)[:, None] * change - stretch
        return score.mT @ (weights[:, None] * score)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def normal_nodes(like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights of E[f(ξ)] ≈ Σ_k w_k f(ξ_k) for ξ ~ N(0, 1), of functions that are smooth but at 0."""
    with torch.inference_mode(False):
        nodes, weights = _halves()
        return nodes.to(like), weights.to(like)


def _nodes_of_curves(phi: Tensor) -> tuple[Tensor, Tensor]:
    """The nodes for each of the curves, (K, *batch, D), and their weights beside them, (K, 1, .., 1)."""
    shape = (-1, *(1,) * (phi.ndim - 1))
    xi, weights = (x.reshape(shape) for x in normal_nodes(phi))
    return xi.expand(-1, *phi.shape[:-1]), weights


@remembered
def _halves(half: int = 56, end: float = 10.0) -> tuple[Tensor, Tensor]:
    """By the rule of Gauss and Legendre on [-end, 0] and [0, end], in float64 (Golub and Welsch 1969)."""
    k = torch.arange(1, half, dtype=torch.float64, device="cpu")
    beside = k / (4 * k.square() - 1).sqrt()
    nodes, vectors, _ = eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    right, weights = 0.5 * end * (1 + nodes), end * vectors[0].square()
    density = weights * (-0.5 * right.square()).exp()
    both = torch.cat([density.flip(0), density])
    return torch.cat([-right.flip(0), right]), both / both.sum()


# The sinh-arcsinh curves of Jones and Pewsey (2009): both tails, light or heavy, and skewness


@final
class SinhArcsinh(Warp):
    """u = sinh(δ asinh ξ + ε), φ = (ε, log δ): ε > 0 skews to the right, δ > 1 makes both tails heavier than normal.

    (Jones and Pewsey 2009, Biometrika 96, with ε and δ of the inverse curve.)  The first choice, for a
    `torchngvi.posteriors.Warped` has it by default.

    >>> warp = SinhArcsinh()
    >>> warp.forward(torch.ones(1), torch.zeros(1, 2)).item()  # the identity
    1.0
    """

    parameters, names = 2, ("epsilon", "log_delta")

    def curve(self, xi: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Compute u and log u' = log cosh(δ asinh ξ + ε) + log δ - ½ log(1 + ξ²)."""
        log_delta = phi[..., 1]
        inner = log_delta.exp() * torch.asinh(xi) + phi[..., 0]
        return torch.sinh(inner), _log_cosh(inner) + log_delta - 0.5 * torch.log1p(xi.square())

    def curve_inverse(self, u: Tensor, phi: Tensor) -> Tensor:
        """Compute ξ = sinh((asinh u - ε)/δ)."""
        return torch.sinh((torch.asinh(u) - phi[..., 0]) * (-phi[..., 1]).exp())

    def bend(self, xi: Tensor, phi: Tensor) -> Tensor:
        """Compute δ tanh(δ asinh ξ + ε)/√(1 + ξ²) - ξ/(1 + ξ²)."""
        delta, square = phi[..., 1].exp(), 1 + xi.square()
        return delta * torch.tanh(delta * torch.asinh(xi) + phi[..., 0]) * square.rsqrt() - xi / square


def _log_cosh(x: Tensor) -> Tensor:
    """log cosh x, for any x, smooth at 0: log((1 + e^-2x)/2) + x on the right, and its mirror image."""
    size = torch.where(x < 0, -x, x)
    return size + torch.log1p(torch.expm1(-2 * size) / 2)


# The inverse of the power curves of Yeo and Johnson (2000): skewness in one number


@final
class YeoJohnson(Warp):
    """u = (1 + λξ)^(1/λ) - 1 on the right of 0, 1 - (1 - (2 - λ)ξ)^(1/(2-λ)) on its left, λ = 2/(1 + e^-φ).

    θ so warped is what the transform of Yeo and Johnson (2000, Biometrika 87) with that λ makes normal: φ < 0 skews to
    the right.  One number a coordinate, for skewness alone; its second derivative jumps at 0.

    >>> warp = YeoJohnson()
    >>> round(warp.forward(torch.ones(1), torch.zeros(1, 1)).item(), 6)  # the identity
    1.0
    """

    parameters, names = 1, ("phi",)

    def curve(self, xi: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Compute u and log u' = (1/λ - 1) log(1 + λξ), or (1/(2-λ) - 1) log(1 - (2-λ)ξ)."""
        right, power, log_base, _ = _side(xi, phi)
        size = torch.expm1(log_base / power)
        return torch.where(right, size, -size), (1 / power - 1) * log_base

    def curve_inverse(self, u: Tensor, phi: Tensor) -> Tensor:
        """Compute ((1 + u)^λ - 1)/λ, or (1 - (1 - u)^(2-λ))/(2 - λ)."""
        right, power, *_ = _side(u, phi)
        size = torch.expm1(power * torch.log1p(torch.where(right, u, -u))) / power
        return torch.where(right, size, -size)

    def bend(self, xi: Tensor, phi: Tensor) -> Tensor:
        """Compute (1 - λ)/(1 + λξ) on both sides, with 2 - λ and -ξ on the left, where its sign turns."""
        right, power, log_base, _ = _side(xi, phi)
        size = (1 - power) * (-log_base).exp()
        return torch.where(right, size, -size)


def _side(xi: Tensor, phi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which side of 0, the power λ or 2 - λ there, log(1 + power |ξ|), and |ξ|."""
    right = xi >= 0
    power = torch.where(right, 2 * torch.sigmoid(phi[..., 0]), 2 * torch.sigmoid(-phi[..., 0]))
    size = torch.where(right, xi, -xi)
    return right, power, torch.log1p(power * size), size


# ------------------------------------------------------------------------------------ Gaussians with bent coordinates
# Gaussians whose coordinates are bent, each for itself, by curves that keep its mean and its standard deviation.
#
#     x ~ N(m, C Cᵀ)        ξ_i = (x_i - m_i)/s_i        θ_i = m_i + s_i w(ξ_i; φ_i)        s_i² = (C Cᵀ)_ii
#
# w is standardised, see `torchngvi.posteriors.warps`: m and s are the means and standard deviations of θ whatever φ is,
# and quantiles are in closed form.  How coordinates depend on one another stays that of the Gaussian: a copula.
#
# Or, inside the root, along directions that need be no coordinates, with an orthogonal matrix Q,
#
#     θ = m + C Q w(ξ; φ)        ξ = Qᵀ C⁻¹(x - m)
#
# so that mean and covariance of θ are those of the Gaussian, and its margins are sums, of which quantiles are by draws.


class Warped(ProbedPosterior):
    """A Gaussian posterior with a curve around each coordinate: for skewed margins and tails unlike normal ones.

        log q(θ) = log N(x; m, C Cᵀ) - Σ_i log w'(ξ_i; φ_i)

    `torchngvi.fit` fits m, C and φ together.  No optimizer of natural gradients moves it, since its φ is none of a
    Gaussian.  It has no more correlations than the Gaussian has, and does nothing for funnels: what is not in the
    margins it does not see.

    Args:
        base: any Gaussian posterior of the library; it is held, not copied, and moves with this one.
        warp: the family of the curves; `SinhArcsinh` by default.
        inside: whether the curves are inside the root, along directions that `torchngvi.fit` finds, and not around the
            coordinates; for one dense Gaussian.

    Attributes:
        base: the Gaussian of x.
        warp: the family of the curves.
        inside: where they are.
        turn: Q, (D, D), where they are inside.
        phi: the numbers of the curves, (*batch, D, P); zeros are the identity.

    Raises:
        PairError: a base that is no Gaussian with a mean and a root.
        InputError: a warp of another package, curves inside a batch.

    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(2, scale=3.0).warped()
    >>> q, q.stddev.tolist()
    (Warped(
      SinhArcsinh()
      (base): CholeskyGaussian(2, dtype=torch.float32)
    ), [3.0, 3.0])
    """

    takes = frozenset()
    framed = False
    engine = "warped"
    domain = "every number is finite, and the base positive definite"
    base: ConvertibleGaussian
    phi: Tensor
    turn: Tensor

    @tracked
    def __init__(self, base: ConvertibleGaussian, warp: Warp | None = None, inside: bool = False) -> None:
        super().__init__()
        if not isinstance(base, ConvertibleGaussian):
            got = f"the class {base.__name__}" if isinstance(base, type) else type(base).__name__
            raise PairError(f"Warped bends a Gaussian posterior, such as CholeskyGaussian(2); got {got}.")
        warp = SinhArcsinh() if warp is None else warp
        if not isinstance(warp, Warp):
            got = f"the class {warp.__name__}" if isinstance(warp, type) else repr(warp)
            raise InputError(f"warp is a family of curves of torchngvi.posteriors.warps, as SinhArcsinh(); got {got}.")
        inside = read_flag("inside", inside)
        if inside and (base.structure.widest < base.dim or base.batch_shape):
            raise InputError(
                "curves inside the root mix all coordinates, and are for one dense Gaussian, without batch dimensions; "
                f"got {base!r}."
            )
        self.base, self.warp, self.inside = base, warp, inside
        self.dim, self.batch_shape, self.structure, self.upper = base.dim, base.batch_shape, base.structure, base.upper
        like = base.mean_probe.detach()
        self.register_buffer("phi", like.new_zeros(*like.shape, warp.parameters))
        if inside:
            self.register_buffer("turn", torch.eye(base.dim, dtype=like.dtype, device=like.device))
        self._add_probes(like, base.root_probe.detach())

    # -------------------------------------------------------------------------------- moments and quantiles

    @property
    def mean(self) -> Tensor:
        """The means of θ, (*batch, D), which are those of the base."""
        return self.base.mean

    @property
    def variance(self) -> Tensor:
        """The variances of θ, (*batch, D), which are those of the base."""
        return self.base.variance

    @property
    @torch.no_grad()
    def covariance(self) -> Tensor:
        """The covariance of θ, (*batch, D, D): s_i s_j Σ_k c_ik c_jk ρ_ij^k, by Mehler's formula.

        ρ are the correlations of x, and c_ik = E[w(ξ; φ_i) He_k(ξ)]/√k! the coefficients of the curves on Hermite's
        polynomials, of which the first 32 are taken.  With curves inside it is that of the base.
        """
        if self.inside:
            return self.base.covariance
        xi, weights = _nodes_of_curves(self.phi)
        w = weights * self.warp.forward(xi, self.phi)
        sd, whole = self.stddev, self.base.covariance
        rho = whole / (sd[..., None] * sd[..., None, :])
        total, power = torch.zeros_like(rho), torch.ones_like(rho)
        before, here = torch.zeros_like(xi), torch.ones_like(xi)
        for k in range(32):
            c = (here * w).sum(0)
            total = total + c[..., None] * c[..., None, :] * power
            power = power * rho
            before, here = here, (xi * here - math.sqrt(k) * before) / math.sqrt(k + 1)
        total.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        return total * sd[..., None] * sd[..., None, :]

    @torch.no_grad()
    def quantile(self, levels: Sequence[float] | Tensor) -> Tensor:
        """Compute quantiles of each coordinate, m + s w(Φ⁻¹(p)); with curves inside, those of 65,536 draws.

        Args:
            levels: probabilities p between 0 and 1, (K,).

        Returns:
            The quantiles, (K, *batch, D).

        Raises:
            InputError: a level outside of (0, 1).

        >>> from torchngvi import DiagonalGaussian
        >>> DiagonalGaussian(1, mean=1.0).warped().quantile([0.5]).tolist()
        [[1.0]]
        """
        at = torch.as_tensor(writable(levels), dtype=self.dtype, device=self.device).reshape(-1)
        if not bool(((at > 0) & (at < 1)).all()):
            raise InputError(f"levels are probabilities between 0 and 1; got {at.tolist()}.")
        if self.inside:
            draws = self.sample(65_536, torch.Generator(self.device).manual_seed(0))
            return torch.quantile(draws, at, 0)
        xi = torch.special.ndtri(at).reshape(-1, *(1,) * (self.phi.ndim - 1)).expand(-1, *self.phi.shape[:-1])
        return self.mean + self.stddev * self.warp.forward(xi, self.phi)

    # -------------------------------------------------------------------------------- draws and densities

    def bent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map x to θ, differentiable in x.

        Args:
            x: points in the space of the base, (*sample, *batch, D).

        Returns:
            θ, (*sample, *batch, D), and the log volume Σ log w'(ξ_i), (*sample, *batch).
        """
        mean, sd = self.mean, self.stddev
        if self.inside:
            root = self.base.frame().dense() @ self.turn
            xi = torch.linalg.solve(root, (x - mean)[..., None])[..., 0]
            w, log_slope = self.warp.with_log_slope(xi, self.phi)
            return mean + w @ root.mT, log_slope.sum(-1)
        w, log_slope = self.warp.with_log_slope((x - mean) / sd, self.phi)
        return mean + sd * w, log_slope.sum(-1)

    def unbent(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Map θ to x, (*sample, *batch, D), differentiable in θ: the inverse of `bent`."""
        mean, sd = self.mean, self.stddev
        if self.inside:
            root = self.base.frame().dense() @ self.turn
            w = torch.linalg.solve(root, (theta - mean)[..., None])[..., 0]
            return mean + self.warp.inverse(w, self.phi) @ root.mT
        return mean + sd * self.warp.inverse((theta - mean) / sd, self.phi)

    @torch.no_grad()
    def sample(self, shape: Shape = (), generator: torch.Generator | None = None) -> Tensor:
        """Draw θ ~ q without recording gradients.

        Args:
            shape: the shape of the sample, or a number of draws.
            generator: the source of the noise; torch's default generator if None.

        Returns:
            Draws, (*shape, *batch, D).

        >>> from torchngvi import CholeskyGaussian
        >>> CholeskyGaussian(2, (3,)).warped().sample((4,), torch.Generator().manual_seed(0)).shape
        torch.Size([4, 3, 2])
        """
        frame = self.base.frame()
        z = normal(shape, self.base.mean_probe, self.dim, generator)
        return self.bent(frame.mean + frame.push(z))[0]

    def log_prob(self, theta: Tensor) -> Tensor:
        """Compute log q(θ), differentiable in θ.

        Args:
            theta: where, (*sample, *batch, D).

        Returns:
            The log densities, (*sample, *batch).

        Raises:
            InputError: θ of another width than D.

        >>> from torchngvi import CholeskyGaussian
        >>> round(CholeskyGaussian(2).warped().log_prob(torch.zeros(2)).item(), 4)  # -log 2π
        -1.8379
        """
        if theta.shape[-1] != self.dim:
            raise InputError(f"theta must end in D = {self.dim}; got shape {tuple(theta.shape)}.")
        frame = self.base.frame()
        x = self.unbent(theta)
        solve = frame.structure.tsolve if frame.upper else frame.structure.solve
        z = solve(frame.root, x - frame.mean)
        square = frame.structure.dot(z, z) + self.dim * math.log(2 * math.pi)
        return -0.5 * square - frame.structure.log_det(frame.root) - self.bent(x)[1]

    @torch.no_grad()
    def entropy(self) -> Tensor:
        """Compute -E_q[log q] = log|C| + D/2 log(2πe) + Σ_i E[log w'(ξ_i)] in nats, (*batch,)."""
        xi, weights = _nodes_of_curves(self.phi)
        return self.base.entropy() + (weights * self.warp.log_slope(xi, self.phi)).sum((0, -1))

    # -------------------------------------------------------------------------------- as every posterior

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates of the base; the curves are in ``phi``."""
        return self.base.coordinates

    def frame(self) -> NoReturn:
        """Refuse, since θ is no linear function of standard normal noise.

        Raises:
            PairError: always.
        """
        raise PairError(
            "a Warped posterior has no root to be read, and no optimizer of natural gradients moves it. Fit it by "
            "torchngvi.fit(q, log_joint); its Gaussian is q.base."
        )

    probed = frame

    def unframe(self, a: Any, W: Any) -> NoReturn:
        """Refuse, as `frame` does."""
        self.frame()

    def tangent(self, e: Any) -> NoReturn:
        """Refuse, as `frame` does."""
        self.frame()

    def moved(self, move: Any) -> NoReturn:
        """Refuse, as `frame` does."""
        self.frame()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.base._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """Describe the curves for ``repr``."""
        return repr(self.warp) + ", inside" * self.inside
