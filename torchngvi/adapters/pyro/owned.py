"""A guide under code that owns its optimizer: Pyro's SVI and all that is built on it, a loop over ``parameters()``.

Such code moves the parameters that a guide has.  This one has a single number ℓ, zero, in whose direction every loss
has the slope 1.  An optimizer that steps takes ℓ to minus its rate, and when the guide is used next, q makes a step
along the natural gradient that the same backward pass left in its probes,

    ρ = min(-4ℓ, 1),        by iBLR and no further than half a nat,

and ℓ is zero again.  The rate, its schedule, and whether there is a step at all stay with the owner.  Under Adam with
the rate r a standard deviation σ of Pyro's guides changes by a factor of at most eʳ, and that of a q too narrow grows
by e²ʳ, since the change of log σ is -ρP/2 and P ≥ -1 where the log joint is concave: twice as fast, for a mean that
waits until q is wide enough, while Adam moves both at once.

A posterior over a flat vector λ has a parameter p as long, and λ + p in its draws: plain gradients, as Pyro's guides.
"""

import warnings
import weakref
from collections.abc import Callable
from typing import Any, Self

import pyro
import torch
from pyro.poutine.runtime import effectful
from torch import Tensor

from torchngvi.interfaces import Coordinates, Tangent
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.rules import LocalExponential, NaturalGradient, Retraction
from torchngvi.stepsizes import KLRadius
from torchngvi.structures import FullAlgebra

_PER_RATE = 4.0  # ρ of the rate of the owner
_RADIUS = 0.5  # nats


class Step(torch.nn.Module):
    """The parameter that stands for a step of q: zero but between the step of an optimizer and the next use of q.

    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(2)
    >>> step = Step(q)
    >>> [tuple(parameter.shape) for parameter in step.parameters()]
    [()]
    """

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
        """Make the step for which an optimizer has asked; where q was moved by others since the draws, it is
        dropped.
        """
        seen = self.seen
        if seen is not None and seen != _writes(q):
            self._forget()
        elif bool(self.length.any()):  # read, since not every optimizer writes so that torch counts it
            self._make(q)
            self._forget()

    @torch.no_grad()
    def _begin(self, q: Gaussian | FlatPosterior) -> None:
        """Tell the gradients of the next step from what the probes hold, unless the owner adds up several passes."""
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
    def _make(self, q: Gaussian | FlatPosterior) -> None:
        if isinstance(q, FlatPosterior):
            q.assign(*q.moved(Tangent(Coordinates(self.length.clone(), q.no_matrix))))
            q.drop_gradients()
            return
        rho = min(_PER_RATE * -self.length.detach().item(), 1.0)
        if self.scale.grad is None:
            if self.seen is not None and rho > 0:
                warnings.warn(_UNMOVED, stacklevel=2)
            return
        factor = float(self.scale.grad)  # negative where the owner lets minus the loss rise
        if rho > 0 and factor and q.mean_probe.grad is not None:
            for probe, before in zip((q.mean_probe, q.root_probe), self.before, strict=True):
                if probe.grad is not None:
                    probe.grad = (probe.grad if before is None else probe.grad - before) * (1 / factor)
            NaturalGradientVI(q, safe_rule(q), lr=rho, step_size=KLRadius(_RADIUS)).step()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert, with a scale that is a leaf again."""
        super()._apply(fn, recurse)
        self.scale = torch.zeros_like(self.length).requires_grad_()
        return self

    # -------------------------------------------------------------------------------- no part of what is saved

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the guide takes the step before."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


_UNMOVED = (
    "q stays where it is: an optimizer of its owner moves an AutoGaussian where log q is part of the loss, as in "
    "Trace_ELBO, and where loss.backward() fills the probes of q, as torch.autograd.grad does not. For another loss "
    "step an optimizer of torchngvi on guide.posterior."
)


def _gradients(q: Gaussian | FlatPosterior) -> tuple[Tensor | None, ...]:
    return q.mean_probe.grad, q.root_probe.grad


def safe_rule(q: Gaussian) -> Any:
    """The rule that stays in the cone for every step, if there is one for the coordinates and the structure of q."""
    if isinstance(q.structure, FullAlgebra):
        return Retraction()
    return LocalExponential() if LocalExponential.emits in q.takes else NaturalGradient()


def _writes(q: Gaussian | FlatPosterior) -> tuple[int, ...]:
    return tuple(buffer._version for buffer in q.coordinates)
