"""A mixed model with its random effects integrated out: the log joint of the global parameters (β, ω) alone.

    log p(y_i | β, ω) ≈ log Σ_k w_k exp(½|z_k|² + log|L_i| + (r/2) log 2π + log p(y_i, b̂_i + L_i z_k | β, ω))

is adaptive Gauss-Hermite quadrature (Liu and Pierce 1994; Pinheiro and Bates 1995): nodes z_k and weights w_k of the
standard normal distribution are moved to the mode b̂_i of the integrand and scaled by L_i L_iᵀ, the inverse of its
Hessian there, for each group and each value of the globals.  The integral does not depend on where the nodes are, so
that its gradient is that of the integrand at nodes that are held where they are, up to the error of the quadrature.

Tensors have the rows or the groups first, (N or n, S, ..), for S values of the globals: what is summed by group is then
contiguous.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor

from torchngvi.arguments import read_size
from torchngvi.models.learned import Learned
from torchngvi.models.likelihoods import GaussianNoise
from torchngvi.models.mixed import MixedLogJoint
from torchngvi.models.mixed_integrated import IntegratedMixed
from torchngvi.models.mixed_prior import root_of
from torchngvi.models.scale_priors import ScalesPrior
from torchngvi.numerics import small_blocks
from torchngvi.numerics.special import normal_rule

_NODES = {1: 15, 2: 7}  # in each dimension, by the number of random effects
_MORE = 5  # nodes in each of three dimensions or more
_GAUSSIAN = 3  # nodes that are exact for Gaussian noise: a quadratic times another
_NEWTON = (8, 3)  # steps to the mode, from 0 and from a start that is near
_AT_ONCE = 2**21  # numbers of one table of rows, values of the globals and nodes: bounds the memory

Start = Callable[[Tensor], Tensor]  # globals (S, P) -> where to begin the search for the modes, (n, S, r)


class Integrand(NamedTuple):
    """log p(y_i, b | β, ω) at the nodes of every group, and what the quadrature makes of it."""

    points: Tensor  # b̂_i + L_i z_k, (n, S, K, r)
    terms: Tensor  # the logarithms of the terms of the sum, (n, S, K)

    @property
    def value(self) -> Tensor:
        """log p(y | β, ω), (S,)."""
        return self.of_groups.sum(0)

    @property
    def of_groups(self) -> Tensor:
        """log p(y_i | β, ω) of each group, (n, S)."""
        return torch.logsumexp(self.terms, -1)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (S, n, r) and covariance (S, n, r, r) of the effects of each group, given the globals."""
        share = self.terms.softmax(-1)[..., None]
        mean = (share * self.points).sum(-2)
        apart = self.points - mean[..., None, :]
        covariance = (share * apart).mT @ apart
        return mean.transpose(0, 1), covariance.transpose(0, 1)


@final
class MarginalMixed(IntegratedMixed):
    """The log joint log p(y, β, ω) of the globals of a mixed model, its random effects integrated out by quadrature.

    One wants it for the posterior of fixed effects and variance components, which a Gaussian over all coordinates makes
    too narrow.  It has P = p + r(r + 1)/2 dimensions, however many groups there are, and costs (nodes)ʳ evaluations of
    the likelihood of every row; all constants are included, so that its evidence is that of the model.

    Args:
        model: the log joint of all coordinates.
        nodes: the number of nodes in each of the r dimensions; by default 15 for r = 1, 7 for r = 2 and 5 for more.
            With Gaussian noise 3 are exact.
        start: where the search for the modes of b begins, a function of (β, ω) (S, P) -> (n, S, r); by default 0.
        learned: the likelihood of which a parameter is learned; None for that of the model as it is.
        scales: the prior of standard deviations and correlations; None for the prior of the model.

    Raises:
        InputError: fewer than two nodes.

    >>> from torchngvi.models import MixedLogJoint
    >>> X = torch.ones(4, 1, dtype=torch.float64)
    >>> model = MixedLogJoint(X, [1.0, 2.0, 0.0, 1.0], (X, [0, 0, 1, 1]), "poisson_log")
    >>> MarginalMixed(model).log_joint(torch.zeros(5, 2, dtype=torch.float64)).shape
    torch.Size([5])
    """

    def __init__(
        self,
        model: MixedLogJoint,
        nodes: int | None = None,
        start: Start | None = None,
        *,
        learned: Learned | None = None,
        scales: ScalesPrior | None = None,
    ) -> None:
        super().__init__(model, learned, scales)
        rows = model.rows
        if nodes is None:
            exact = isinstance(rows.likelihood, GaussianNoise)
            nodes = _GAUSSIAN if exact else _NODES.get(rows.r, _MORE)
        nodes = read_size("nodes", nodes, "is the number of quadrature nodes in each dimension", at_least=2)
        self.nodes, self.start = nodes, start
        self.z, self.log_w = normal_rule(nodes, rows.r, rows.X)
        self._all = bool((rows.weights > 0).all())  # rows are there

    @property
    def count(self) -> int:
        """The number of nodes of each group, K."""
        return len(self.z)

    @property
    def how(self) -> str:
        """How the random effects are integrated out, for a sentence."""
        power = f"{self.nodes}" if self.rows.r == 1 else f"{self.nodes}^{self.rows.r}"
        return f"by adaptive Gauss-Hermite quadrature with {power} nodes"

    def settings(self) -> tuple[object, ...]:
        """Return the settings of the model, and the number of nodes."""
        return (*super().settings(), self.nodes)

    def data(
        self,
        theta: Tensor,  # (S, P)
    ) -> Tensor:
        """Compute log p(y | β, ω, φ) of all values of the globals in one go, (S,)."""
        return self.integrand(theta).value

    def of_groups(
        self,
        theta: Tensor,  # (S, P)
    ) -> Tensor:
        """Compute log p(y_i | β, ω, φ) of each group at all values of the globals, (S, n)."""
        return self.integrand(theta).of_groups.mT

    def chunks(
        self,
        theta: Tensor,  # (S, P)
    ) -> tuple[Tensor, ...]:
        """Split values of the globals so that no table of rows, values and nodes is too large for the memory."""
        return theta.split(max(1, _AT_ONCE // (len(self.rows.y) * self.count)))

    @torch.no_grad()
    def moments(
        self,
        theta: Tensor,  # (S, P)
    ) -> tuple[Tensor, Tensor]:
        """Means (S, n, r) and covariances (S, n, r, r) of the random effects given the data and the globals."""
        parts = [self.integrand(part).moments() for part in self.chunks(theta)]
        means, covariances = zip(*parts, strict=True)
        return torch.cat(means), torch.cat(covariances)

    def integrand(
        self,
        theta: Tensor,  # (S, P)
    ) -> Integrand:
        """Evaluate the integrand of every group at its nodes."""
        rows, r = self.rows, self.rows.r
        beta, omega = self.parts(theta)
        W = root_of(omega, r)
        fixed = rows.X @ beta.mT + rows.offset[:, None]  # (N, S)
        points, log_volume = self._nodes(theta.detach(), fixed.detach(), W.detach())
        here = points.index_select(0, rows.groups)  # (N, S, K, r)
        eta = fixed[..., None] + sum(here[..., k] * rows.Z[:, k, None, None] for k in range(r))  # r is small
        data = rows.weights[:, None, None] * self._energy(self._present(eta), self.parameter(theta))
        data = data.new_zeros(rows.n, *data.shape[1:]).index_add(0, rows.groups, data)
        prior = 0.5 * _squares(points @ W) - omega[:, self.scales.diagonal].sum(-1)[:, None]
        # log p(b | ω) has -(r/2) log 2π, which the change of variables to z gives back
        return Integrand(points, self.log_w + 0.5 * self.z.square().sum(-1) + log_volume - data - prior)

    def _energy(
        self,
        eta: Tensor,  # (N, S, ..)
        phi: Tensor | None,  # (S,)
    ) -> Tensor:
        """-log p(y | η, φ) of every row."""
        y = self.rows.y.reshape(-1, *(1,) * (eta.ndim - 1))
        if self.learned is None or phi is None:
            return self.rows.likelihood.energy(eta, y)
        return self.learned.energy(eta, y, phi.reshape(-1, *(1,) * (eta.ndim - 2)))

    def _present(
        self,
        x: Tensor,  # (N, S, ..)
    ) -> Tensor:
        """0 for rows of weight 0, which are not there, also where their loss would be infinite."""
        weights = self.rows.weights
        return x if self._all else torch.where(weights.reshape(-1, *(1,) * (x.ndim - 1)) > 0, x, 0.0)

    # ---------------------------------------------------------------------------- where the nodes are

    @torch.no_grad()
    def _nodes(
        self,
        theta: Tensor,  # (S, P)
        fixed: Tensor,  # Xβ + offset, (N, S)
        W: Tensor,  # (S, r, r)
    ) -> tuple[Tensor, Tensor]:
        """The nodes b̂_i + L_i z_k, (n, S, K, r), and log|L_i|, (n, S, 1)."""
        b, factor = self._modes(theta, fixed, W)
        around = small_blocks.tsolve(factor, self.z.mT.expand(*factor.shape[:-2], -1, -1))  # L_i = R⁻ᵀ, H = R Rᵀ
        log_volume = -factor.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)
        return b[..., None, :] + around.mT, log_volume

    def _modes(self, theta: Tensor, fixed: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
        """Damped Newton steps for all groups and globals at once: b̂ (n, S, r) and the root R of the Hessian."""
        phi = self.parameter(theta)
        b = fixed.new_zeros(self.rows.n, len(theta), self.rows.r)
        value, gradient, factor = self._quadratic(b, fixed, W, phi)
        if self.start is not None:
            guess = self.start(theta[:, : self.joint_dim])
            there = self._quadratic(guess, fixed, W, phi)
            b, value, gradient, factor = _chosen(there[0] < value, (guess, *there), (b, value, gradient, factor))
        size = torch.ones_like(value)
        for _ in range(_NEWTON[self.start is not None]):
            step = small_blocks.tsolve(factor, small_blocks.solve(factor, gradient[..., None]))[..., 0]
            new = b - size[..., None] * step
            there = self._quadratic(new, fixed, W, phi)
            better = there[0] <= value
            b, value, gradient, factor = _chosen(better, (new, *there), (b, value, gradient, factor))
            size = torch.where(better, (2 * size).clamp_max(1.0), 0.5 * size)
        return b, factor

    def _quadratic(
        self,
        b: Tensor,  # (n, S, r)
        fixed: Tensor,  # (N, S)
        W: Tensor,  # (S, r, r)
        phi: Tensor | None,  # (S,)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-log p(y_i, b | β, ω) up to a constant (n, S), its gradient, and the root R of its Hessian."""
        rows, r, Omega = self.rows, self.rows.r, W @ W.mT
        here = b.index_select(0, rows.groups)
        eta = self._present(fixed + sum(here[..., k] * rows.Z[:, k, None] for k in range(r)))
        f, slope, curvature = (rows.weights[:, None] * x for x in self._jet(eta, phi))
        Z = rows.Z[:, None, :]
        square = curvature.clamp_min(0.0)[..., None] * (Z[..., :, None] * Z[..., None, :]).flatten(-2)
        table = torch.cat([f[..., None], slope[..., None] * Z, square], -1)
        summed = table.new_zeros(rows.n, *table.shape[1:]).index_add(0, rows.groups, table)
        value = summed[..., 0] + 0.5 * _squares((b[..., None, :] @ W)[..., 0, :])
        gradient = summed[..., 1 : r + 1] + (b[..., None, :] @ Omega)[..., 0, :]
        factor, ok = small_blocks.cholesky(summed[..., r + 1 :].unflatten(-1, (r, r)) + Omega)
        eye = torch.eye(r, dtype=b.dtype, device=b.device)
        return torch.where(ok, value, math.inf), gradient, torch.where(ok[..., None, None], factor, eye)

    @torch.enable_grad()
    def _jet(
        self,
        eta: Tensor,  # (N, S)
        phi: Tensor | None,  # (S,)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-log p(y | η) of every row with two derivatives."""
        eta = eta.detach().requires_grad_()
        f = self._energy(eta, phi)
        (slope,) = torch.autograd.grad(f.sum(), eta, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), eta)
        return f.detach(), slope.detach(), curvature


def _squares(
    x: Tensor,  # (..., r)
) -> Tensor:
    """|x|², (...): a reduction over so few entries is slow."""
    return sum((x[..., k].square() for k in range(1, x.shape[-1])), x[..., 0].square())


def _chosen(where: Tensor, new: tuple[Tensor, ...], old: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One of two sets of tensors for each group and value of the globals, (n, S, ..)."""
    return tuple(
        torch.where(where.reshape(*where.shape, *(1,) * (x.ndim - where.ndim)), x, y)
        for x, y in zip(new, old, strict=True)
    )
