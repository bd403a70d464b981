"""A Gaussian that is bent to the posterior, one layer on the other.

    θ = m + C z₁        z₁ = T₁(z₂)        ...        z_K = T_K(x)        x ~ N(0, I)

Seen from the space of x the posterior is nearer to N(0, I) with each layer.  A layer is chosen there by what would be
gained by it, as far as third and fourth derivatives at N(0, I) tell,

    KL ≈ Σ_ijk B_ijk²/12 + Σ_i κ_i²/48 + ...        B_ijk = E[∂_i ∂_j ∂_k ℓ]        κ_i = E[∂_i⁴ ℓ]

which a fan along u lowers by all terms with an index along u, and a warp by its diagonal terms; it is kept where the
ELBO on fresh draws is the better for it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from torchngvi.diagnostics.linear_response import third_order
from torchngvi.diagnostics.verdict import name_of
from torchngvi.expectations.draws import Fixed
from torchngvi.numerics.linalg import eigh
from torchngvi.refinement.density import DRAWS, Density, Joint, LogDensity, quality, value_and_gradient
from torchngvi.refinement.layers import LOG_TAU, FanLayer, Layer, WarpLayer
from torchngvi.refinement.tracing import trace

_FEWEST, _EACH = 1024, 16  # draws of the residuals, and a coordinate
_WARPED = 512  # draws to which a warp is fitted, or as many a coordinate
_WORTH = 0.02  # nats that a layer has to gain
_HOPE = 0.01  # nats that have to be expected of one that is tried
_LAYERS = 8  # the most
_ENTRIES = 10_000_000  # of roots of one call
_ALIGNED = 0.7  # share of what the worst direction promises at which a coordinate of θ is preferred
_WARP_STEPS, _WARP_END = 20, 1e-3  # of L-BFGS, and nats in one of them at which it ends


class LayeredGaussian(Density):
    """A Gaussian in whose whitened space layers are laid: fans of conditional Gaussians, and warps.

    Args:
        mean: m, (D,).
        root: C, lower triangular (D, D).
        layers: the one nearest to θ first.

    >>> import torch
    >>> q = LayeredGaussian(torch.zeros(2), torch.eye(2))
    >>> q.log_prob(torch.zeros(2)).item() == q.log_prob(torch.zeros(3, 2))[0].item()
    True
    """

    centre: Tensor
    root: Tensor

    def __init__(self, mean: Tensor, root: Tensor, layers: tuple[Layer, ...] = ()) -> None:
        super().__init__()
        self.register_buffer("centre", mean.detach().clone())
        self.register_buffer("root", root.detach().clone())
        self.layers = nn.ModuleList(layers)
        self.dim = len(mean)

    def with_layer(self, layer: Layer) -> "LayeredGaussian":
        """The same with one layer more."""
        return LayeredGaussian(self.centre, self.root, (*self.layers, layer))

    def push(
        self,
        x: Tensor,  # (N, D)
    ) -> tuple[Tensor, Tensor]:
        """θ and log|det dθ/dx| of standard normal noise, differentiable in x."""
        total = self.root.diagonal().log().sum().expand(len(x))
        for layer in reversed(self.layers):
            x, stretch = layer.push(x)  # type: ignore[operator]
            total = total + stretch
        return self.centre + x @ self.root.mT, total

    def log_density(self, joint: Joint) -> LogDensity:
        """The posterior as a density of x."""

        def at(x: Tensor) -> Tensor:
            theta, stretch = self.push(x)
            return joint(theta) + stretch

        return at

    @torch.no_grad()
    def log_prob(self, theta: Tensor) -> Tensor:
        """Compute log q(θ) by pulling θ back to the noise, (*sample,)."""
        parts = self._flat(theta).split(self.at_once)
        return torch.cat([self._log_prob(part) for part in parts]).reshape(theta.shape[:-1])

    @property
    def at_once(self) -> int:
        """Rows for which a fan may write out its roots: bounds the memory."""
        return max(1, _ENTRIES // self.dim**2)

    def _log_prob(self, theta: Tensor) -> Tensor:
        x = torch.linalg.solve_triangular(self.root, (theta - self.centre).mT, upper=False).mT
        total = -self.root.diagonal().log().sum()
        for layer in self.layers:
            x, stretch = layer.pull(x)  # type: ignore[operator]
            total = total + stretch
        return total - 0.5 * x.square().sum(-1) - self.dim * LOG_TAU

    @torch.no_grad()
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n times θ, (n, D); along the direction of the last layer, if a fan, in n strata of equal mass."""
        device = self.root.device
        x = torch.randn(n, self.dim, dtype=self.root.dtype, device=device, generator=generator)
        last = self.layers[-1] if len(self.layers) else None
        if isinstance(last, FanLayer):
            u = last.basis[:, 0]
            place = torch.rand(n, dtype=torch.float64, device=device, generator=generator)
            order = torch.randperm(n, device=device, generator=generator)
            score = torch.special.ndtri((order + place) / n).to(x)
            x = x + (score - x @ u)[:, None] * u
        return torch.cat([self.push(part)[0] for part in x.split(self.at_once)])

    @torch.no_grad()
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (D,) and covariance (D, D): exact without layers, a quadrature for a single fan, draws for others."""
        if not self.layers:
            return self.centre, self.root @ self.root.mT
        if len(self.layers) == 1 and isinstance(self.layers[0], FanLayer):
            mean, covariance = self.layers[0].moments()
            return self.centre + self.root @ mean, self.root @ covariance @ self.root.mT
        return super().moments()

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> Self:
        """The posterior that a state_dict is of, whatever its layers.

        >>> import torch
        >>> q = LayeredGaussian(torch.zeros(2), torch.eye(2), (WarpLayer(2, torch.zeros(1)),))
        >>> len(LayeredGaussian.from_state_dict(q.state_dict()).layers)
        1
        """
        root = state["root"]
        layers: list[Layer] = []
        while any(name.startswith(f"layers.{len(layers)}.") for name in state):
            nodes = state.get(f"layers.{len(layers)}.nodes")
            layers.append(WarpLayer(len(root), root) if nodes is None else FanLayer.blank(len(root), nodes))
        density = cls(state["centre"], root, tuple(layers))
        density.load_state_dict(state)
        return density


class _Plan(NamedTuple):
    """A layer that may be tried."""

    gain: float  # nats, as far as third and fourth derivatives tell
    name: str
    make: Callable[[], Layer | None]


class Layering:
    """Lays layers while the ELBO rises.

    Attributes:
        density: as it is now.
        quality: of it.
        steps: what was kept, in words.
    """

    def __init__(self, start: LayeredGaussian, joint: Joint, seed: int, names: Sequence[str] = ()) -> None:
        self.density, self.joint, self.seed, self.names = start, joint, seed, names
        self.quality = quality(start, joint, seed)
        self.steps: list[str] = []

    def run(self, coordinate: int | None = None) -> None:
        """Lay one after the other, the first along a coordinate of θ where one is named."""
        if coordinate is not None:
            name = f"a fan along {name_of(self.names, coordinate)}"
            self._try(_Plan(torch.inf, name, self._fan(self._axes()[coordinate])))
        while not self._done and any(self._try(plan) for plan in self._plans()):
            pass

    @property
    def _done(self) -> bool:
        """Whether nothing can be hoped for: KL is about half of the variance of log w."""
        return len(self.density.layers) >= _LAYERS or 0.5 * DRAWS * self.quality.error**2 < _HOPE

    def _try(self, plan: _Plan) -> bool:
        """Make the layer, and keep it where it is worth it, or was asked for and has an ELBO."""
        layer = plan.make()
        if layer is None:
            return False
        density = self.density.with_layer(layer)
        new, old = quality(density, self.joint, self.seed), self.quality
        least = max(_WORTH, (new.error**2 + old.error**2) ** 0.5) if plan.gain < torch.inf else -torch.inf
        if not new.elbo - old.elbo > least:
            return False
        self.density, self.quality = density, new
        self.steps.append(plan.name)
        return True

    # -------------------------------------------------------------------------------- what to try

    def _axes(self) -> Tensor:
        """Along which direction of x each coordinate of θ changes most, at x = 0, (D, D) by rows."""
        zero = self.density.root.new_zeros(self.density.dim)
        jacobian = torch.autograd.functional.jacobian(lambda x: self.density.push(x[None])[0][0], zero)
        return jacobian / jacobian.norm(dim=1, keepdim=True)

    def _plans(self) -> list[_Plan]:
        """Layers by what is expected of them, the best first: a warp, and fans along two directions."""
        dim = self.density.dim
        z = Fixed(max(_FEWEST, _EACH * dim), seed=self.seed + len(self.density.layers))(self.density.centre)
        value, gradient = value_and_gradient(self.density.log_density(self.joint), z)
        residual = -gradient - z
        pair = (value.isfinite() & residual.isfinite().all(-1)).reshape(2, -1).all(0).repeat(2)
        z, residual = z[pair], residual[pair]
        if len(z) < _FEWEST // 2:
            return []
        M = third_order(z, residual).matrix
        eigenvectors = eigh(M)[1]
        axes = torch.cat([eigenvectors[:, -1:].mT, self._axes()])
        expected = _gains(axes, M, z, residual)
        best = 1 + int(expected[1:].argmax())
        fans = [(best, f"a fan along {name_of(self.names, best - 1)}"), (0, "a fan along the worst direction")]
        if not expected[best] > _ALIGNED * expected[0]:
            fans.reverse()
        plans = [_Plan(float(expected[k]), name, self._fan(axes[k])) for k, name in fans]
        if dim > 1:  # along a line a fan has it all
            warp = _Plan(_warp_gain(z, residual), "a warp of each coordinate", self._warp)
            plans.insert(0 if warp.gain > max(plan.gain for plan in plans) else len(plans), warp)
        return [plan for plan in plans if plan.gain > _HOPE]

    def _fan(self, direction: Tensor) -> Callable[[], Layer | None]:
        def make() -> Layer | None:
            nodes = trace(self.density.log_density(self.joint), direction, self.seed)
            return None if nodes is None else FanLayer(direction, nodes)

        return make

    def _warp(self) -> Layer:
        """Fitted to fixed draws by L-BFGS."""
        dim, density = self.density.dim, self.density.log_density(self.joint)
        x = Fixed(max(_WARPED, _EACH * dim), seed=self.seed + _LAYERS)(self.density.centre)
        layer = WarpLayer(dim, x)
        settings = layer.settings.clone().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [settings], max_iter=_WARP_STEPS, tolerance_change=_WARP_END, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            optimizer.zero_grad()
            layer.settings = settings
            z, stretch = layer.push(x)
            value = -(density(z) + stretch).mean()
            value.backward()
            return value

        with torch.enable_grad():
            optimizer.step(loss)
        layer.settings = settings.detach()
        return layer


def _gains(axes: Tensor, M: Tensor, z: Tensor, residual: Tensor) -> Tensor:
    """The share of KL that has to do with each direction u, by rows (K, D): of fourth derivatives those with
    u thrice.

    Σ B² over all entries with an index along u is 12 (½ uᵀMu - ¼ |B_uu|² + B_uuu²/12), Σ K² over those with three and
    more is 4 |K_uuu|² - 3 K_uuuu².
    """
    along, even, odd = z[: len(z) // 2] @ axes.mT, *_parts(residual)
    twice = _squares(along.square() - 1, even)
    thrice = _squares(along.pow(3) - 3 * along, odd)
    third = _own_squares(along.square() - 1, even @ axes.mT)
    fourth = _own_squares(along.pow(3) - 3 * along, odd @ axes.mT)
    return 0.5 * ((axes @ M) * axes).sum(1) - twice / 4 + third / 12 + (4 * thrice - 3 * fourth) / 48


def _warp_gain(z: Tensor, residual: Tensor) -> float:
    """Σ_i B_iii²/12 + κ_i²/48."""
    half, even, odd = z[: len(z) // 2], *_parts(residual)
    third, fourth = _own_squares(half.square() - 1, even), _own_squares(half.pow(3) - 3 * half, odd)
    return float((third / 12 + fourth / 48).sum())


def _parts(residual: Tensor) -> tuple[Tensor, Tensor]:
    """The even and the odd part at antithetic draws."""
    plus, minus = residual.chunk(2)
    return 0.5 * (plus + minus), 0.5 * (plus - minus)


def _own_squares(
    polynomial: Tensor,  # (S, K)
    force: Tensor,  # (S, K)
) -> Tensor:
    """E[f_k(z) r_k]², less the variance of its estimate, (K,)."""
    each = polynomial * force
    return each.mean(0).square() - each.var(0) / len(each)


def _squares(
    polynomial: Tensor,  # (S, K)
    force: Tensor,  # (S, D)
) -> Tensor:
    """|E[f_k(z) r]|², less the variance of its estimate, (K,)."""
    square = (polynomial.mT @ force / len(force)).square().sum(1)
    spread = (polynomial.square().mT @ force.square() / len(force)).sum(1)
    return square - (spread - square) / len(force)
