"""A step of q as parameters, so that any optimizer of torch or of Pyro can take it.

    θ = m + C(p + (I + ½S) z)        p and S zero, z ~ N(0, I)

has the mean m + C p and, to first order, the covariance C(I + S)Cᵀ.  In p and the isometric vector u of S, |u|² = ½‖S‖²_F,
the Fisher metric is |dp|² + |du|², so that plain gradients with respect to them are natural gradients: after a step of
SGD with the rate ρ they are p = -ρ a and S = -ρ P, and q is moved as a rule of this library moves it.  Other optimizers
take their steps in these coordinates, which are normal coordinates at q (Lin, Duruisseaux, Leok, Nielsen, Khan and
Schmidt 2023: *Simplifying momentum-based positive-definite submanifold optimization*).

A posterior over a flat vector λ has p alone, λ + p: plain gradients, as those of Pyro's own guides.
"""

import weakref
from typing import Any

import pyro
import torch
from pyro.poutine.runtime import effectful
from torch import Tensor

from torchngvi.interfaces import Coordinates, Cost, Expectation, Framed, Move, Tangent
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.rules import LocalExponential, NaturalGradient, Retraction
from torchngvi.structures import FullAlgebra


class Displacement(torch.nn.Module):
    """The parameters p and u of a posterior, zero but between the step of an optimizer and the next use of q.

    Args:
        q: the posterior.

    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(2)
    >>> step = Displacement(q)
    >>> [tuple(parameter.shape) for parameter in step.parameters()]
    [(2,), (3,)]
    >>> with torch.no_grad():
    ...     _ = step.mean.fill_(0.5)
    >>> step.carry_out(q)
    >>> q.mean.tolist(), step.mean.tolist()
    ([0.5, 0.5], [0.0, 0.0])
    """

    def __init__(self, q: Gaussian | FlatPosterior) -> None:
        super().__init__()
        self.mean = torch.nn.Parameter(torch.zeros_like(q.coordinates.vector))
        size = 0 if isinstance(q, FlatPosterior) else q.structure.parameters
        self.root = torch.nn.Parameter(self.mean.new_zeros(size)) if size else None
        self.seen: tuple[int, ...] | None = None  # the count of writes to q when a draw was last recorded

    def noise(
        self,
        q: Gaussian,
        z: Tensor,  # (*sample, D)
    ) -> Tensor:
        """The noise p + (I + ½S) z of displaced draws, (*sample, D), which is z wherever the displacement is zero."""
        assert self.root is not None
        return z + self.mean + 0.5 * q.structure.smv(q.structure.unflat(self.root), z)

    def announce(self, q: Gaussian | FlatPosterior, name: str) -> None:
        """Tell the messengers of Pyro, SVI among them, that the guide has these parameters.

        Args:
            q: the posterior, of which draws are about to be made.
            name: that of the guide.
        """
        if not torch.is_grad_enabled():
            return
        self.seen = _writes(q)
        for key, parameter in self.named_parameters():
            if parameter.requires_grad:
                full = f"{name}.displacement.{key}"
                pyro.get_param_store()._param_to_name[parameter] = full  # PyroOptim asks for the name
                value: Any = parameter.view_as(parameter)
                value.unconstrained = weakref.ref(parameter)
                effectful(lambda value=value: value, type="param")(name=full)

    @torch.no_grad()
    def carry_out(self, q: Gaussian | FlatPosterior) -> None:
        """Move q by the displacement, and make that zero; where q was moved by others since, it is dropped.

        Args:
            q: the posterior.
        """
        seen, self.seen = self.seen, None
        if not any(bool(parameter.any()) for parameter in self.parameters()):
            self.seen = seen
            return
        if seen in (None, _writes(q)):
            q.assign(*q.moved(self._move(q)))
        for parameter in self.parameters():
            parameter.zero_()

    def _move(self, q: Gaussian | FlatPosterior) -> Move:
        """The step of a rule at ρ = 1 along a = -p and P = -S, whichever rule q can follow and stays in the cone by."""
        if self.root is None:
            return Tangent(Coordinates(self.mean.clone(), q.coordinates.matrix))
        identity, S = q.structure.eye(self.mean), q.structure.unflat(self.root)
        packet = Framed(-self.mean, identity - S)
        e = Expectation(self.mean.new_zeros(()), packet, 1.0, False, Cost(0, 0))
        if isinstance(q.structure, FullAlgebra):
            rule: Any = Retraction()
        else:
            rule = LocalExponential() if LocalExponential.emits in q.takes else NaturalGradient()
        return rule(q, e).at(self.mean.new_ones(()))

    # -------------------------------------------------------------------------------- no part of what is saved

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the guide carries the displacement out before."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


def _writes(q: Gaussian | FlatPosterior) -> tuple[int, ...]:
    return tuple(buffer._version for buffer in q.coordinates)
