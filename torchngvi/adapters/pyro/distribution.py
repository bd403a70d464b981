"""q as a distribution of Pyro over the unconstrained latents, and its steps under code that owns the optimizer.

Such code, Pyro's SVI and all that is built on it, moves the parameters that a guide has.  Ours has a single number ℓ,
zero, in whose direction every loss has the slope 1.  An optimizer that steps takes ℓ to minus its rate, and when the
guide is used next, q makes a step along the natural gradient that the same backward pass left in its probes,

    ρ = min(-4ℓ, 1),        by iBLR and no further than half a nat,

and ℓ is zero again.  The rate, its schedule, and whether there is a step at all stay with the owner.  Under Adam with
the rate r a standard deviation of Pyro's guides grows by a factor of at most eʳ, and that of a q too narrow by e²ʳ.

A posterior over a flat vector λ has a parameter p as long, and λ + p in its draws: plain gradients, as Pyro's guides.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self, final

import pyro
import torch
from pyro.distributions import MultivariateNormal, TorchDistribution, constraints
from pyro.poutine.runtime import effectful
from torch import Tensor
from torch.distributions.kl import kl_divergence, register_kl

from torchngvi.arguments import read_instance, read_sizes
from torchngvi.errors import InputError
from torchngvi.interfaces import Coordinates, Tangent
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors.flat.flat_gaussian import FlatGaussian
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.rules import LocalExponential, NaturalGradient, Retraction
from torchngvi.stepsizes import KLRadius
from torchngvi.structures import FullAlgebra

_UNMOVED = (
    "q stays where it is: an optimizer of its owner moves an AutoGaussian where log q is part of the loss, as in "
    "Trace_ELBO, and where loss.backward() fills the probes of q, as torch.autograd.grad does not. For another loss "
    "step an optimizer of torchngvi on guide.posterior."
)


class Step(torch.nn.Module):
    """The parameter that stands for a step of q: zero but between the step of an optimizer and the next use of q."""

    def __init__(self, q: Gaussian | FlatPosterior) -> None:
        super().__init__()
        vector = q.coordinates.vector
        self.length = torch.nn.Parameter(torch.zeros_like(vector if isinstance(q, FlatPosterior) else vector[..., 0]))
        self.scale = torch.zeros_like(self.length).requires_grad_()  # its gradient is the factor on the loss
        self.seen: tuple[int, ...] | None = None  # the counts of writes to q when a draw was last recorded
        self.before: tuple[Tensor | None, ...] = (None, None)  # what the probes held then that belongs to no step

    def slope(self) -> Tensor:
        """Zero, with the derivative 1 where there is to be a step: to be added to log q at draws."""
        if not self.length.requires_grad:
            return self.length
        zero = self.length + self.scale
        return zero - zero.detach()

    def announce(self, q: Gaussian | FlatPosterior, name: str) -> None:
        """Tell the messengers of Pyro, SVI among them, that the guide has this parameter."""
        if not (torch.is_grad_enabled() and self.length.requires_grad):
            return
        self.take(q)
        self._begin(q)
        self.seen, full = _writes(q), f"{name}.step.length"
        pyro.get_param_store()._param_to_name[self.length] = full  # PyroOptim asks for the name
        value: Any = self.length.view_as(self.length)
        value.unconstrained = weakref.ref(self.length)
        effectful(lambda: value, type="param")(name=full)

    def take(self, q: Gaussian | FlatPosterior) -> None:
        """Make the step for which an optimizer has asked, unless q was moved by others since the draws."""
        seen = self.seen
        if seen is not None and seen != _writes(q):
            self._forget()
        elif bool(self.length.any()):  # read, since not every optimizer writes so that torch counts it
            self._make(q)
            self._forget()

    @torch.no_grad()
    def _begin(self, q: Gaussian | FlatPosterior) -> None:
        """Keep apart what the probes hold before the next step, unless the owner adds up several passes."""
        slope, grads = self.length.grad, _gradients(q)
        if isinstance(q, FlatPosterior) or (self.scale.grad is not None and slope is not None and bool(slope.any())):
            return
        if self.seen is not None and self.scale.grad is None and grads[0] is not None and self.before[0] is None:
            warnings.warn(_UNMOVED, stacklevel=2)
        self.scale.grad = None
        if not all(bool(grad.isfinite().all()) for grad in grads if grad is not None):
            q.drop_gradients()
        self.before = tuple(None if grad is None else grad.clone() for grad in _gradients(q))

    @torch.no_grad()
    def _forget(self) -> None:
        self.length.zero_()
        self.scale.grad = self.seen = None

    @torch.no_grad()
    def _make(self, q: Gaussian | FlatPosterior, per_rate: float = 4.0, radius: float = 0.5) -> None:
        # per_rate: ρ of the rate of the owner
        # radius: nats
        if isinstance(q, FlatPosterior):
            q.assign(*q.moved(Tangent(Coordinates(self.length.clone(), q.no_matrix))))
            q.drop_gradients()
            return
        rho = min(per_rate * -self.length.detach().item(), 1.0)
        if self.scale.grad is None:
            if self.seen is not None and rho > 0:
                warnings.warn(_UNMOVED, stacklevel=2)
            return
        factor = float(self.scale.grad)  # negative where the owner lets minus the loss rise
        if rho > 0 and factor and q.mean_probe.grad is not None:
            for probe, before in zip((q.mean_probe, q.root_probe), self.before, strict=True):
                if probe.grad is not None:
                    probe.grad = (probe.grad if before is None else probe.grad - before) * (1 / factor)
            NaturalGradientVI(q, safe_rule(q), lr=rho, step_size=KLRadius(radius)).step()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert, with a scale that is a leaf again."""
        super()._apply(fn, recurse)
        self.scale = torch.zeros_like(self.length).requires_grad_()
        return self

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Save nothing: the guide takes the step before."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing."""


def _gradients(q: Gaussian | FlatPosterior) -> tuple[Tensor | None, ...]:
    return q.mean_probe.grad, q.root_probe.grad


def safe_rule(q: Gaussian) -> Any:
    """The rule that stays in the cone for every step, if there is one for the coordinates and the structure of q."""
    if isinstance(q.structure, FullAlgebra):
        return Retraction()
    return LocalExponential() if LocalExponential.emits in q.takes else NaturalGradient()


def _writes(q: Gaussian | FlatPosterior) -> tuple[int, ...]:
    return tuple(buffer._version for buffer in q.coordinates)


@final
class LatentGaussian(TorchDistribution):
    """q as a distribution of Pyro: it draws through the probes, and its log density has constant coordinates.

    It has what a `MultivariateNormal` has, under the same names, and `torch.distributions.kl_divergence` takes it with
    another one of its kind and with a `MultivariateNormal`.

    Args:
        q: the posterior.
        batch_shape: the batch of the distribution, whose members are all q; () for one.
        step: the parameter that stands for a step of q, if this distribution is drawn from to fit q.

    >>> from torchngvi import CholeskyGaussian
    >>> q = LatentGaussian(CholeskyGaussian(2))
    >>> q.expand([3]).rsample().shape, q.covariance_matrix.tolist()
    (torch.Size([3, 2]), [[1.0, 0.0], [0.0, 1.0]])
    >>> kl_divergence(q, MultivariateNormal(torch.ones(2), torch.eye(2))).item()
    1.0
    """

    arg_constraints: dict[str, Any] = {}
    support = constraints.real_vector
    has_rsample = True

    def __init__(self, q: Gaussian | FlatPosterior, batch_shape: Sequence[int] = (), step: Step | None = None) -> None:
        read_instance("q", q, (Gaussian, FlatPosterior), "is a Gaussian or a flat posterior")
        self.q, self.step = q, step
        batch_shape = read_sizes("batch_shape", batch_shape, "is a tuple of integers", at_least=0)
        super().__init__(torch.Size(batch_shape), torch.Size([q.dim]), validate_args=False)

    def _expanded(self, value: Tensor) -> Tensor:
        return value.detach().expand(self.batch_shape + value.shape)

    def _gaussian(self) -> Gaussian | FlatGaussian:
        if not isinstance(self.q, Gaussian | FlatGaussian):
            raise InputError(
                f"{type(self.q).__name__} is no Gaussian, and its covariance and entropy are not known. Take them from "
                "draws, guide.get_posterior().sample((10_000,))."
            )
        return self.q

    @property
    def mean(self) -> Tensor:
        """The mean m of q, (*batch, D)."""
        return self._expanded(self.q.mean)

    loc = mode = mean

    @property
    def variance(self) -> Tensor:
        """The diagonal of the covariance V of q, (*batch, D)."""
        return self._expanded(self.q.variance)

    @property
    def covariance_matrix(self) -> Tensor:
        """The covariance V of q, written out, (*batch, D, D)."""
        return self._expanded(self._gaussian().covariance)

    @property
    def scale_tril(self) -> Tensor:
        """The lower Cholesky factor of the covariance, written out, (*batch, D, D)."""
        return self._expanded(self._gaussian().scale_tril)

    @property
    def precision_matrix(self) -> Tensor:
        """The precision V⁻¹ of q, written out, (*batch, D, D)."""
        q = self._gaussian()
        return self._expanded(q.precision if isinstance(q, Gaussian) else torch.cholesky_inverse(q.scale_tril))

    @torch.no_grad()
    def entropy(self) -> Tensor:
        """The entropy of q in nats, (*batch,), without gradients."""
        q = self._gaussian()
        log_det = q.log_det_root() if isinstance(q, Gaussian) else q.scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return self._expanded(log_det + 0.5 * q.dim * (1 + math.log(2 * math.pi)))

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw θ = m + C z, (*sample, *batch, D), differentiable in the probes."""
        shape = torch.Size(sample_shape) + self.batch_shape
        q = self.q
        if isinstance(q, FlatPosterior):
            at = None if self.step is None else q.point(None) + self.step.length
            return q.rsample(shape.numel(), at=at).reshape(shape + self.event_shape)
        if torch.jit.is_tracing():  # which takes no functions with a derivative of their own
            frame = q.frame()
            return frame.mean + frame.push(torch.randn(shape + self.event_shape, dtype=q.dtype, device=q.device))
        return q.rsample(shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """log q(θ) = -½|C⁻¹(θ - m)|² - log|C| - ½D log 2π, (*sample, *batch): differentiable in θ alone."""
        if isinstance(self.q, FlatPosterior):
            return self.q.log_prob(value, self.q.vector)
        z = self.q.whiten(value - self.q.frame().mean)
        value = -0.5 * z.square().sum(-1) - self.q.log_det_root() - 0.5 * self.q.dim * math.log(2 * math.pi)
        return value if self.step is None else value + self.step.slope()

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> "LatentGaussian":
        """The same distribution with another batch shape."""
        return LatentGaussian(self.q, batch_shape, self.step)


@register_kl(LatentGaussian, torch.distributions.MultivariateNormal)
@register_kl(torch.distributions.MultivariateNormal, LatentGaussian)
def _written_out(p: Any, other: Any) -> Tensor:
    """The divergence where one of two is no posterior of ours, by full covariances."""
    p, other = (
        MultivariateNormal(x.mean, scale_tril=x.scale_tril) if isinstance(x, LatentGaussian) else x for x in (p, other)
    )
    return kl_divergence(p, other)


@register_kl(LatentGaussian, LatentGaussian)
def _between(p: LatentGaussian, other: LatentGaussian) -> Tensor:
    if not (isinstance(p.q, Gaussian) and isinstance(other.q, Gaussian)):
        return _written_out(p, other)
    with torch.no_grad():
        return p.q.kl(other.q).expand(torch.broadcast_shapes(p.batch_shape, other.batch_shape))
