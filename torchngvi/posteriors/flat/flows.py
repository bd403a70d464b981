"""Flows as flat posteriors: of any module, and of orthogonal matrices."""

import math
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from torchngvi.arguments import read_instance, read_number, read_size
from torchngvi.errors import InputError
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior, check_shapes, check_start
from torchngvi.posteriors.shapes import Shape, normal

# Any normalising flow written as a module, and one that is in use today: affine coupling layers
#
# θ = T(ε), ε ~ N(0, I), log q(θ) = log N(T⁻¹(θ)) + log|∂T⁻¹/∂θ|.  λ is the vector of the module's parameters, put
# into it by `torch.func.functional_call`, and scores are one gradient a draw by `vmap`.  Coupling: half of
# the coordinates is scaled and shifted by a small network of the other half (Dinh, Sohl-Dickstein and Bengio 2017).


@final
class AffineCoupling(nn.Module):
    """A normalising flow of affine coupling layers, which begins close to the given location and scale.

    The layers act in turn on the two halves of the coordinates; a scale and a shift of each coordinate follow.

    Args:
        dim: d, at least 2.
        layers: the number of coupling layers.
        hidden: the width of their networks.
        mean, scale: those of the start, numbers.

    Raises:
        InputError: d < 2, no layers.

    >>> flow = AffineCoupling(3, layers=2, hidden=4, mean=1.0, scale=2.0)
    >>> noise = torch.randn(5, 3)
    >>> bool(torch.allclose(flow(flow(noise)[0], inverse=True)[0], noise, atol=1e-5))
    True
    """

    def __init__(self, dim: int, layers: int = 4, hidden: int = 16, *, mean: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        dim = read_size("dim", dim, "is the number of coordinates", at_least=2)
        layers, hidden = read_size("layers", layers, "counts couplings"), read_size("hidden", hidden, "is a width")
        mean, scale = read_number("mean", mean), read_number("scale", scale, above=0)
        self.split = dim // 2
        self.nets = nn.ModuleList()
        for layer in range(layers):
            seen = self.split if layer % 2 == 0 else dim - self.split
            net = nn.Sequential(nn.Linear(seen, hidden), nn.Tanh(), nn.Linear(hidden, 2 * (dim - seen)))
            nn.init.normal_(net[2].weight, std=0.01)  # type: ignore[arg-type]
            nn.init.zeros_(net[2].bias)  # type: ignore[arg-type]
            self.nets.append(net)
        self.shift = nn.Parameter(torch.full((dim,), float(mean)))
        self.log_scale = nn.Parameter(torch.full((dim,), math.log(scale)))

    def forward(
        self,
        x: Tensor,  # (..., d)
        inverse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Compute T(x), or T⁻¹(x) where ``inverse``, and the log determinant of that map, (...,)."""
        if inverse:
            x, log_det = (x - self.shift) * (-self.log_scale).exp(), -self.log_scale.sum().expand(x.shape[:-1])
            for layer in reversed(range(len(self.nets))):
                x, log_scale = self._coupled(layer, x, inverse=True)
                log_det = log_det - log_scale
            return x, log_det
        log_det = self.log_scale.sum().expand(x.shape[:-1])
        for layer in range(len(self.nets)):
            x, log_scale = self._coupled(layer, x, inverse=False)
            log_det = log_det + log_scale
        return x * self.log_scale.exp() + self.shift, log_det

    def _coupled(self, layer: int, x: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        """One layer, and the sum of its log scales."""
        first = layer % 2 == 0
        seen, moved = (
            (x[..., : self.split], x[..., self.split :]) if first else (x[..., self.split :], x[..., : self.split])
        )
        raw, shift = self.nets[layer](seen).chunk(2, -1)
        log_scale = torch.tanh(raw)  # a layer scales by e at most
        moved = (moved - shift) * (-log_scale).exp() if inverse else moved * log_scale.exp() + shift
        return torch.cat([seen, moved] if first else [moved, seen], -1), log_scale.sum(-1)


@final
class ModuleFlow(FlatPosterior):
    """q = law of flow(ε), ε ~ N(0, I), over the vector of all parameters of a normalising flow.

    Take it for posteriors that are far from Gaussian.  Its Fisher matrix is not known, so that a metric estimates it.

    Args:
        flow: a module with ``flow(x, inverse)`` -> (y, log determinant), such as `AffineCoupling`; it is not
            changed: the parameters in use are those of ``vector``.
        dim: d, the number of latent variables.

    >>> q = ModuleFlow(AffineCoupling(2, layers=2, hidden=3), 2)
    >>> q.score(q.sample(4)).shape == (4, q.size)
    True
    """

    reparametrised = True

    def __init__(self, flow: nn.Module, dim: int) -> None:
        read_instance("flow", flow, nn.Module, "is a module with flow(x, inverse), such as AffineCoupling(dim)")
        dim = read_size("dim", dim, "is the number of latent variables")
        if not any(True for _ in flow.parameters()):
            raise InputError(f"flow has no parameters to fit; got {type(flow).__name__}.")
        vector = nn.utils.parameters_to_vector(flow.parameters())
        self._shapes = {name: part.shape for name, part in flow.named_parameters()}
        self._flow = (flow,)  # in a tuple: its parameters are no parameters of q
        super().__init__(vector, dim)

    def _apply_flow(
        self,
        x: Tensor,  # (*sample, *batch, d)
        at: Tensor,  # (*batch, D)
        inverse: bool,
    ) -> tuple[Tensor, Tensor]:
        if at.ndim > 1:  # one flow for each member
            flat = self._by_draw(x, at), at.flatten(0, -2)
            y, log_det = torch.func.vmap(lambda x, at: self._apply_flow(x, at, inverse), (1, 0), 1)(*flat)
            return y.reshape(x.shape), log_det.reshape(x.shape[:-1])
        pieces = at.split([shape.numel() for shape in self._shapes.values()])
        named = {name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)}
        return torch.func.functional_call(self._flow[0], named, (x, inverse))

    def rsample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = T(ε), differentiable in λ."""
        lam = self.point(at)
        return self._apply_flow(normal(shape, lam, self.dim, generator), lam, False)[0]

    def log_prob(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute log N(T⁻¹(θ)) + log|∂T⁻¹/∂θ|, the density of the flow."""
        noise, log_det = self._apply_flow(theta, self.point(at), True)
        return -0.5 * (noise.square() + math.log(2 * math.pi)).sum(-1) + log_det

    def score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute the scores by autograd, one gradient a draw."""
        lam = self.point(at).detach()

        def log_density(lam: Tensor, theta: Tensor) -> Tensor:
            return self.log_prob(theta[None], lam)[0]

        scores_of = torch.func.vmap(torch.func.grad(log_density), (None, 0))
        if lam.ndim == 1:
            scores = scores_of(lam, theta.reshape(-1, self.dim))
        else:
            scores = torch.func.vmap(scores_of, (0, 1), 1)(lam.flatten(0, -2), self._by_draw(theta, lam))
        return scores.reshape(*theta.shape[:-1], self.size)

    def _by_draw(self, x: Tensor, at: Tensor) -> Tensor:
        """Points (*sample, *batch, d) as (n, members, d)."""
        return x.expand(*x.shape[: x.ndim - at.ndim], *at.shape[:-1], self.dim).reshape(
            -1, at.shape[:-1].numel(), self.dim
        )


# The one-layer flow θ = W₂ h(W₁ε + b₁) + b₂ with orthogonal W₁, W₂ and h the logistic function
#
# (Godichon-Baggioni, Nguyen and Tran 2023, Eq 6.3 and Appendix E.)  With t = W₁ε + b₁, z = h(t) = W₂ᵀ(θ - b₂):
#
#     log q = -(d/2) log 2π - ½|t - b₁|² - Σ log h'(t)
#     δ = -(t - b₁)/h' - h''/h'²
#     ∂/∂W₁ = -(t - b₁)εᵀ    ∂/∂b₁ = t - b₁    ∂/∂W₂ = (θ - b₂)δᵀ    ∂/∂b₂ = -W₂δ
#
# Corrected: Appendix E prints h'' for h''/h'² in δ, I for diag h' in dz/db₁, and -εεᵀW₁ for the first.
#
# W₁ is not part of λ: W₁ε is standard normal whatever the orthogonal W₁, so that q does not depend on it.  λ =
# (b₁, W₂, b₂) lies on a manifold: E[W₂ᵀ ∂/∂W₂] = -I, not 0, and only the tangent part is a score,
#
#     Proj(G) = G - WWᵀG + W skew(WᵀG)        W ← qf(W + step), R with a positive diagonal
#
# The support is a rotated unit cube shifted by b₂: no standard deviation can exceed ½.


class AmbientScore(NamedTuple):
    """The derivatives of log q as if W₁ and W₂ were free matrices, before any projection."""

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
            if not bool(((matrix.mT @ matrix - eye).abs() < 1e-6).all()):
                raise InputError(f"{name} must be orthogonal, W'W = I. Take the Q of torch.linalg.qr({name}).")
        super().__init__(torch.cat([b1, W2.flatten(-2), b2], -1), d)
        self.register_buffer("W1", W1.detach().clone())

    def parts(self, at: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Take λ apart into b₁, W₂ and b₂."""
        lam, d = self.point(at), self.dim
        return lam[..., :d], lam[..., d:-d].unflatten(-1, (d, d)), lam[..., -d:]

    def rsample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = W₂ h(W₁ε + b₁) + b₂, differentiable in λ."""
        b1, W2, b2 = self.parts(at)
        t = (self.W1 @ normal(shape, b1, self.dim, generator)[..., None])[..., 0] + b1
        return (W2 @ torch.sigmoid(t)[..., None])[..., 0] + b2

    def _moments_of_the_cube(self, reach: float = 9.0, nodes: int = 145) -> tuple[Tensor, Tensor]:
        """Mean and variance of h(b₁ + ε), ε ~ N(0, 1), by the trapezoidal rule, whose error is a rounding error."""
        b1, _, _ = self.parts(self.vector)
        node = torch.linspace(-reach, reach, nodes, dtype=b1.dtype, device=b1.device)
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
