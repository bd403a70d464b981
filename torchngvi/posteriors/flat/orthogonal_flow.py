"""The one-layer flow θ = W₂ h(W₁ε + b₁) + b₂ with orthogonal W₁, W₂ and h the logistic function.

(Godichon-Baggioni, Nguyen and Tran 2023, Eq 6.3 and Appendix E.)  With t = W₁ε + b₁, z = h(t) = W₂ᵀ(θ - b₂):

    log q = -(d/2) log 2π - ½|t - b₁|² - Σ log h'(t)
    δ = -(t - b₁)/h' - h''/h'²
    ∂/∂W₁ = -(t - b₁)εᵀ    ∂/∂b₁ = t - b₁    ∂/∂W₂ = (θ - b₂)δᵀ    ∂/∂b₂ = -W₂δ

Corrected: Appendix E prints h'' for h''/h'² in δ, I for diag h' in dz/db₁, and -εεᵀW₁ for the first.

W₁ is not part of λ: W₁ε is standard normal whatever the orthogonal W₁, so that q does not depend on it.  λ =
(b₁, W₂, b₂) lies on a manifold: E[W₂ᵀ ∂/∂W₂] = -I, not 0, and only the tangent part is a score,

    Proj(G) = G - WWᵀG + W skew(WᵀG)        W ← qf(W + step), R with a positive diagonal

The support is a rotated unit cube shifted by b₂: no standard deviation can exceed ½.
"""

import math
from typing import NamedTuple, final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.posteriors.flat.drawing import normal
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior, check_shapes, check_start
from torchngvi.posteriors.shapes import Shape

_NOT_ORTHOGONAL = 1e-6
_REACH, _NODES = 9.0, 145  # of the rule for the moments, in standard deviations


class AmbientScore(NamedTuple):
    """The derivatives of log q as if W₁ and W₂ were free matrices, before any projection.

    >>> q = OrthogonalFlow(torch.zeros(2), torch.eye(2), torch.zeros(2))
    >>> q.ambient_score(q.sample(9)).W2.shape
    torch.Size([9, 2, 2])
    """

    W1: Tensor  # (n, *batch, d, d)
    b1: Tensor  # (n, *batch, d)
    W2: Tensor
    b2: Tensor


@final
class OrthogonalFlow(FlatPosterior):
    """q = law of W₂ h(W₁ε + b₁) + b₂ over λ = (b₁, vec W₂, b₂), with h the logistic function, D = d² + 2d.

    λ lies on a manifold, so that iterates cannot be averaged.  The support is a rotated unit cube: take it for bounded
    quantities, and to reproduce the paper.

    Args:
        b1: the shift before the logistic function at the start, (*batch, d).
        W2: the rotation of the cube at the start, (*batch, d, d), orthogonal.
        b2: the corner of the support at the start, (*batch, d).
        W1: a fixed orthogonal matrix, (d, d); the identity if not given.

    Raises:
        InputError: a matrix that is not orthogonal.

    >>> q = OrthogonalFlow(torch.zeros(2), torch.eye(2), torch.zeros(2))
    >>> bool(((q.sample(9) > 0) & (q.sample(9) < 1)).all())
    True
    """

    domain = "W2 is orthogonal"
    flat = False
    reparametrised = True
    W1: Tensor

    def __init__(
        self,
        b1: Tensor,  # (*batch, d)
        W2: Tensor,  # (*batch, d, d)
        b2: Tensor,  # (*batch, d)
        W1: Tensor | None = None,  # (d, d)
    ) -> None:
        parts = {"b1": b1, "W2": W2, "b2": b2} | ({} if W1 is None else {"W1": W1})
        check_start(type(self).__name__, **parts)
        d = b1.shape[-1]
        eye = torch.eye(d, dtype=b1.dtype, device=b1.device)
        W1 = eye if W1 is None else W1
        shapes = {"W2": (W2, (*b1.shape, d)), "b2": (b2, b1.shape), "W1": (W1, (d, d))}
        check_shapes(type(self).__name__, b1, **shapes)
        for name, matrix in (("W1", W1), ("W2", W2)):
            if not bool(((matrix.mT @ matrix - eye).abs() < _NOT_ORTHOGONAL).all()):
                raise InputError(f"{name} must be orthogonal, W'W = I. Take the Q of torch.linalg.qr({name}).")
        super().__init__(torch.cat([b1, W2.flatten(-2), b2], -1), d)
        self.register_buffer("W1", W1.detach().clone())

    def parts(self, at: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Take λ apart into b₁, W₂ and b₂."""
        lam, d = self.point(at), self.dim
        return lam[..., :d], lam[..., d:-d].unflatten(-1, (d, d)), lam[..., -d:]

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = W₂ h(W₁ε + b₁) + b₂ without a gradient."""
        return self.rsample(shape, generator, self.point(at).detach())

    def rsample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = W₂ h(W₁ε + b₁) + b₂, differentiable in λ."""
        b1, W2, b2 = self.parts(at)
        t = (self.W1 @ normal(shape, b1, self.dim, generator)[..., None])[..., 0] + b1
        return (W2 @ torch.sigmoid(t)[..., None])[..., 0] + b2

    def _moments_of_the_cube(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of h(b₁ + ε), ε ~ N(0, 1), by the trapezoidal rule, whose error is a rounding error."""
        b1, _, _ = self.parts(self.vector)
        node = torch.linspace(-_REACH, _REACH, _NODES, dtype=b1.dtype, device=b1.device)
        weight = torch.softmax(-0.5 * node.square(), -1)
        z = torch.sigmoid(b1[..., None] + node)
        mean = (weight * z).sum(-1)
        return mean, (weight * (z - mean[..., None]).square()).sum(-1)

    @property
    def mean(self) -> Tensor:
        """The mean W₂ E[h(b₁ + ε)] + b₂ of q, (*batch, d), by quadrature."""
        _, W2, b2 = self.parts(self.vector)
        return (W2 @ self._moments_of_the_cube()[0][..., None])[..., 0] + b2

    @property
    def variance(self) -> Tensor:
        """The marginal variances diag(W₂ diag(Var h(b₁ + ε)) W₂ᵀ) of q, (*batch, d), by quadrature."""
        _, W2, _ = self.parts(self.vector)
        return (W2.square() @ self._moments_of_the_cube()[1][..., None])[..., 0]

    def log_prob(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute -(d/2) log 2π - ½|t - b₁|² - Σ log h'(t) with h(t) = W₂ᵀ(θ - b₂); -∞ outside the support."""
        b1, W2, b2 = self.parts(at)
        z, inside = self._cube(theta, W2, b2)
        density = -0.5 * (torch.logit(z) - b1).square() - (z * (1 - z)).log() - 0.5 * math.log(2 * math.pi)
        return torch.where(inside, density.sum(-1), -torch.inf)

    def _cube(self, theta: Tensor, W2: Tensor, b2: Tensor) -> tuple[Tensor, Tensor]:
        """z kept off the faces of the cube, and where θ lies inside, up to rounding."""
        z = (W2.mT @ (theta - b2)[..., None])[..., 0]
        small = torch.finfo(z.dtype).eps
        inside = ((z > -self.dim * small) & (z < 1 + self.dim * small)).all(-1)
        return z.clamp(small, 1 - small), inside

    def ambient_score(self, theta: Tensor, at: Tensor | None = None) -> AmbientScore:
        """Compute the four derivatives of the module's docstring, before any projection."""
        b1, W2, b2 = self.parts(at)
        z, _ = self._cube(theta, W2, b2)
        slope = z * (1 - z)
        shifted = torch.logit(z) - b1  # W₁ε
        noise = (self.W1.mT @ shifted[..., None])[..., 0]
        delta = -shifted / slope - (1 - 2 * z) / slope
        return AmbientScore(
            -shifted[..., :, None] * noise[..., None, :],
            shifted,
            (theta - b2)[..., :, None] * delta[..., None, :],
            -(W2 @ delta[..., None])[..., 0],
        )

    def score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute the tangent part of the derivatives, which has mean 0."""
        parts = self.ambient_score(theta, at)
        return self.projected(self.point(at), torch.cat([parts.b1, parts.W2.flatten(-2), parts.b2], -1))

    def projected(self, at: Tensor, vector: Tensor) -> Tensor:
        """Project the W₂ part of a direction on the tangent space: Proj(G) = G - WWᵀG + W skew(WᵀG)."""
        _, W, _ = self.parts(at)
        b1, G, b2 = self.parts(vector)
        inner = W.mT @ G
        projected = G - W @ (0.5 * (inner + inner.mT))  # skew = inner - its symmetric part
        return torch.cat([b1, projected.flatten(-2), b2], -1)

    def retracted(self, at: Tensor, change: Tensor) -> Tensor:
        """Compute λ after a step: the QR retraction of W₂, with b₁ and b₂ in a straight line."""
        b1, W, b2 = self.parts(at + change)
        Q, R = torch.linalg.qr(W)
        sign = R.diagonal(dim1=-2, dim2=-1).sign()
        return torch.cat([b1, (Q * sign[..., None, :]).flatten(-2), b2], -1)
