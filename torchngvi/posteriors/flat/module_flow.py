"""Any normalising flow written as a module, and one that is in use today: affine coupling layers.

θ = T(ε), ε ~ N(0, I), log q(θ) = log N(T⁻¹(θ)) + log|∂T⁻¹/∂θ|.  λ is the vector of the module's parameters, put
into it by `torch.func.functional_call`, and scores are one gradient a draw by `vmap`.  Coupling: half of
the coordinates is scaled and shifted by a small network of the other half (Dinh, Sohl-Dickstein and Bengio 2017).
"""

import math
from typing import final

import torch
from torch import Tensor, nn

from torchngvi.arguments import read_instance, read_number, read_size
from torchngvi.errors import InputError
from torchngvi.posteriors.flat.drawing import normal, scores_by_autograd
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.posteriors.shapes import Shape


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

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = T(ε) without a gradient."""
        with torch.no_grad():
            return self.rsample(shape, generator, at)

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
        if lam.ndim == 1:
            scores = scores_by_autograd(self.log_prob, theta.reshape(-1, self.dim), lam)
        else:
            flat = self._by_draw(theta, lam), lam.flatten(0, -2)
            scores = torch.func.vmap(lambda theta, lam: scores_by_autograd(self.log_prob, theta, lam), (1, 0), 1)(*flat)
        return scores.reshape(*theta.shape[:-1], self.size)

    def _by_draw(self, x: Tensor, at: Tensor) -> Tensor:
        """Points (*sample, *batch, d) as (n, members, d)."""
        return x.expand(*x.shape[: x.ndim - at.ndim], *at.shape[:-1], self.dim).reshape(
            -1, at.shape[:-1].numel(), self.dim
        )
