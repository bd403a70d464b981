"""Gaussian noise and normal priors of coefficients: the coefficients are integrated out as well, in closed form.

What is left are the coordinates ρ = (ξ, φ) of the scales, three of a random intercept however many columns there are.
With Σ = σ² W⁻¹ + Z C Cᵀ Zᵀ, prior mean m and precision P of the coefficients, and e = y - offset - X m,

    Q = XᵀΣ⁻¹X + P,  h = XᵀΣ⁻¹e,  a | y, ρ ~ N(m + Q⁻¹h, Q⁻¹),
    log p(y, ρ) = log p(ρ) + log N(e; 0, Σ) + ½ log|P| - ½ log|Q| + ½ hᵀQ⁻¹h,

all of it from sums over the rows of each group that are taken once (Woodbury in each group, Lindley and Smith 1972).
"""

import math

import torch
from torch import Tensor

from torchngvi.numerics import small_blocks
from torchngvi.numerics.linalg import cholesky
from torchngvi.tables.integrated import Integrated, LogJoint, Valued, finite
from torchngvi.tables.parts import covariance_root
from torchngvi.tables.priors import Normal


class Closed(LogJoint):
    """log p(y, ρ) of a model with Gaussian noise and at most one factor, effects and coefficients integrated out.

    Args:
        joint: the log joint of all globals.
    """

    scales = 0

    def __init__(self, joint: Integrated) -> None:
        self.joint, self.p, self.gradients = joint, joint.coordinates.p, 0
        p, r = self.p, joint.r
        self.begin = joint.start()[0]
        self.location = joint.priors.location.to(self.begin)
        self.precision = -joint.of_prior(torch.cat([self.location, self.begin[p:]]))[:p, :p]
        self.of_rows = self.begin.new_zeros(p + 1, p + 1)
        inner, cross = [], []
        self.log_weight = self.begin.new_zeros(())
        for block in joint.blocks:
            apart = block.y[0].reshape(block.offset.shape) - block.offset - block.X @ self.location
            V = torch.cat([block.X, apart[..., None]], -1)
            WV, WZ = block.weighted(V), block.weighted(block.Z)
            self.of_rows += V.flatten(0, 1).mT @ WV.flatten(0, 1)
            self.log_weight += block.weighted(torch.ones_like(apart)).sum()
            inner.append(block.Z.mT @ WZ)
            cross.append(block.Z.mT @ WV)
        self.inner, self.cross = torch.cat(inner), torch.cat(cross)  # (n, r, r), (n, r, p + 1)
        self.together = self.most = max(
            1, joint.settings.at_once // ((p + 1) ** 2 + (len(self.inner) * r * (p + 1) if r else 0))
        )

    @classmethod
    def fits(cls, joint: Integrated) -> bool:
        """Whether noise is Gaussian, with a standard deviation that is learned, and priors of coefficients normal."""
        normal = all(isinstance(prior, Normal) for prior in joint.priors.coefficients)
        return joint.family.name == "gaussian" and len(joint.family.parameters) == 1 and normal

    def start(self) -> tuple[Tensor, Tensor]:
        """Where the scales of the log joint of all globals begin."""
        return self.begin[self.p :], self.begin.new_zeros(0, 1, 0)

    def with_gradient(self, theta: Tensor, modes: Tensor) -> Valued:
        """Evaluate the log joint and its gradient by automatic differentiation."""
        self.gradients += len(theta)
        parts = []
        for part in theta.detach().split(self.most):
            with torch.enable_grad():
                value = self._value(part.requires_grad_())
                parts.append((value.detach(), torch.autograd.grad(value.sum(), part)[0].nan_to_num(0.0, 0.0, 0.0)))
        value, gradient = (torch.cat(some) for some in zip(*parts, strict=True))
        return Valued(finite(value), gradient, modes, value[None])

    @torch.no_grad()
    def log_joint(self, theta: Tensor, modes: Tensor) -> Tensor:
        """Evaluate the log joint, (S,)."""
        return finite(torch.cat([self._value(part) for part in theta.split(self.most)]))

    def curvature(self, theta: Tensor, modes: Tensor) -> Tensor:
        """Central differences of gradients."""
        h, dim = self.joint.settings.difference, len(theta)
        shift = h * torch.eye(dim, dtype=theta.dtype, device=theta.device)
        gradient = self.with_gradient(torch.cat([theta + shift, theta - shift]), modes).gradient
        assert gradient is not None
        H = (gradient[dim:] - gradient[:dim]) / (2 * h)
        return 0.5 * (H + H.mT)

    @torch.no_grad()
    def completed(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """Draw the coefficients given the scales, θ = (a, ρ), (S, dim)."""
        parts = []
        for part in theta.split(self.most):
            _, root, half, _ = self._solved(part)
            z = torch.randn(len(part), self.p, generator=generator, dtype=torch.float64, device="cpu").to(part)
            apart = torch.linalg.solve_triangular(root.mT, half + z[..., None], upper=True)[..., 0]
            parts.append(torch.cat([self.location + apart, part], -1))
        return torch.cat(parts)

    def _value(self, theta: Tensor) -> Tensor:
        """log p(y, ρ), (S,)."""
        log_noise, root, half, rest = self._solved(theta)
        prior = self.joint.priors.log_prob(torch.cat([self.location.expand(len(theta), -1), theta], -1))
        volume = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        data = -self.log_weight * (0.5 * math.log(2 * math.pi) + log_noise) + rest + 0.5 * half.square().sum((-2, -1))
        return prior + data - volume + 0.5 * self.p * math.log(2 * math.pi)

    def _solved(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """log σ (S,), the root L of Q (S, p, p), L⁻¹h (S, p, 1), and what groups and e alone add to log N(e; 0, Σ)."""
        p, r = self.p, self.joint.r
        log_noise = theta[:, -1]
        scale = (-2 * log_noise).exp()[:, None, None]
        G, log_det = scale * self.of_rows, torch.zeros_like(log_noise)
        if r:
            C = covariance_root(theta[:, :-1], r)
            eye = torch.eye(r, dtype=theta.dtype, device=theta.device)
            inner = small_blocks.product(C.mT, small_blocks.product(self.inner[:, None], C))
            factor, _ = small_blocks.cholesky(eye + scale * inner)  # (n, S, r, r)
            half = small_blocks.solve(factor, scale * small_blocks.product(C.mT, self.cross[:, None]))
            half = half.transpose(0, 1).flatten(1, 2)  # (S, n r, p + 1)
            G = G - half.mT @ half
            log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum((0, -1))
        root, ok = cholesky(G[:, :p, :p] + self.precision)
        root = torch.where(ok[:, None, None], root, math.nan)
        half = torch.linalg.solve_triangular(root, G[:, :p, p:], upper=False)
        return log_noise, root, half, -0.5 * G[:, p, p] - log_det
