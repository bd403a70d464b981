"""The log joint of the globals of a mixed model, its random effects integrated out: what both ways to do so share.

The globals are β, ω and, where a parameter of the likelihood is learned, its coordinate φ behind them.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from torchngvi.arguments import read_instance
from torchngvi.distributed import Processes
from torchngvi.interfaces import Posterior, Target
from torchngvi.models import checks
from torchngvi.models.learned import Learned
from torchngvi.models.mixed import MixedLogJoint
from torchngvi.models.multilevel_prior import CovariancePrior
from torchngvi.models.scale_priors import ScalesPrior, omega_of_scales, scales_of_omega
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian


class IntegratedMixed(Target):
    """The abstract base of the log joints log p(y, β, ω, φ) of a mixed model without its random effects.

    Args:
        model: the log joint of all coordinates.
        learned: the likelihood of which a parameter is learned; None for that of the model as it is.
        scales: the prior of standard deviations and correlations; None for the prior of the model.

    Attributes:
        dim: p + r(r + 1)/2, and one more where a parameter is learned.
    """

    temperature = 1.0

    def __init__(self, model: MixedLogJoint, learned: Learned | None = None, scales: ScalesPrior | None = None) -> None:
        read_instance("model", model, MixedLogJoint, "is a mixed model, such as MixedModel(X, y, random)")
        if learned is not None:
            read_instance("learned", learned, Learned, "is a likelihood whose parameter is learned, or None")
        if scales is not None:
            read_instance("scales", scales, ScalesPrior, "is the prior of standard deviations, or None")
        model.rows.check_one("a model whose random effects are integrated out")
        self.model, self.rows, self.learned = model, model.rows, learned
        self.scales: CovariancePrior = model.covariance_prior if scales is None else scales
        self.processes = model.processes
        self.in_passes = model.processes is not None  # q is where it should begin: no differences of gradients
        self.joint_dim = self.rows.p + self.rows.r * (self.rows.r + 1) // 2  # of β and ω
        self.dim = self.joint_dim + (learned is not None)
        self.parameter_prior = None if learned is None else learned.settled(self.rows)

    @property
    def blocks(self) -> list[tuple[slice, int]]:
        """Where an ω stands of which standard deviations and correlations are the better coordinates."""
        r = self.rows.r
        return [(slice(self.rows.p, self.joint_dim), r)] if r > 1 and isinstance(self.scales, ScalesPrior) else []

    @property
    @abstractmethod
    def how(self) -> str:
        """How the random effects are integrated out, for a sentence."""

    @abstractmethod
    def data(
        self,
        theta: Tensor,  # (S, P)
    ) -> Tensor:
        """Compute log p(y | β, ω, φ) of all values of the globals in one go, (S,)."""

    @abstractmethod
    def chunks(
        self,
        theta: Tensor,  # (S, P)
    ) -> tuple[Tensor, ...]:
        """Split values of the globals so that no table is too large for the memory."""

    @abstractmethod
    def moments(
        self,
        theta: Tensor,  # (S, P)
    ) -> tuple[Tensor, Tensor]:
        """Means (S, n, r) and covariances (S, n, r, r) of the random effects given the data and the globals."""

    def check(self, q: Posterior) -> None:
        """Check that q is over the globals.

        Raises:
            InputError: if their number, the dtype or the device is another.
        """
        checks.posterior(q, self.dim, torch.Size(), self.rows.X)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that a value depends on."""
        return self.model.tensors()

    def known_data(self) -> tuple[Tensor, ...]:
        """Return the tensors of the model that tell it from another."""
        return self.model.known_data()

    def settings(self) -> tuple[object, ...]:
        """Return the settings of the model, what is learned, and the priors."""
        learned = () if self.learned is None else (self.learned.name, *(self.parameter_prior or ()))
        return (*self.model.settings(), *learned, *self.scales.settings())

    def log_joint(self, theta: Tensor) -> Tensor:
        """Compute log p(y, β, ω, φ) with all its constants, (*sample, *batch), differentiable once."""
        return InChunks.apply(theta.reshape(-1, self.dim), self).reshape(theta.shape[:-1])

    def value(
        self,
        theta: Tensor,  # (S, P)
    ) -> Tensor:
        """Compute log p(y, β, ω, φ) of all values of the globals in one go, (S,); of several processes its part."""
        if not self.rows.leads:
            return self.data(theta)
        beta, omega = self.parts(theta)
        prior = self.model.fixed.prior.energy(beta) + self.scales.energy(omega)
        if self.learned is not None and self.parameter_prior is not None:
            prior = prior + self.learned.prior_energy(theta[..., -1], self.parameter_prior)
        return self.data(theta) - prior

    def parts(
        self,
        theta: Tensor,  # (*any, P)
    ) -> tuple[Tensor, Tensor]:
        """Take the globals apart: β (*any, p) and ω (*any, r(r + 1)/2)."""
        p = self.rows.p
        return theta[..., :p], theta[..., p : self.joint_dim]

    def parameter(
        self,
        theta: Tensor,  # (*any, P)
    ) -> Tensor | None:
        """φ (*any,), the logarithm of the learned parameter; None where none is."""
        return None if self.learned is None else theta[..., -1]


class InScales(Target):
    """A log joint of globals with standard deviations and partial correlations in the place of some ω."""

    temperature = 1.0

    def __init__(self, target: "IntegratedMixed | Any", blocks: Sequence[tuple[slice, int]]) -> None:
        self.target, self.blocks, self.dim = target, tuple(blocks), target.dim
        self.processes, self.in_passes = target.processes, target.in_passes

    def check(self, q: Posterior) -> None:
        """Check q as the target does."""
        self.target.check(q)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that a value depends on."""
        return self.target.tensors()

    def known_data(self) -> tuple[Tensor, ...]:
        """Return the tensors of the model that tell it from another."""
        return self.target.known_data()

    def settings(self) -> tuple[object, ...]:
        """Return the settings of the target."""
        return ("standard deviations", *self.target.settings())

    def globals(
        self,
        xi: Tensor,  # (*any, P)
    ) -> tuple[Tensor, Tensor]:
        """Map to the coordinates of the target, (*any, P), with the log determinant of that map, (*any,)."""
        theta, log_det = xi, xi.new_zeros(xi.shape[:-1])
        for at, size in self.blocks:
            omega, more = omega_of_scales(xi[..., at], size)
            theta = torch.cat([theta[..., : at.start], omega, theta[..., at.stop :]], -1)
            log_det = log_det + more
        return theta, log_det

    def log_joint(self, theta: Tensor) -> Tensor:
        """Compute the log density of these coordinates, (*sample, *batch), differentiable once."""
        theta, log_det = self.globals(theta)
        return self.target.log_joint(theta) + log_det

    def start(self, q: Gaussian) -> CholeskyGaussian:
        """Map a Gaussian over the globals of the target to one over these coordinates, linear about its mean."""
        xi = q.mean.detach().clone()
        for at, size in self.blocks:
            xi[at] = scales_of_omega(xi[at], size)
        with torch.enable_grad():
            slopes = torch.autograd.functional.jacobian(lambda x: self.globals(x)[0], xi)
        size = slopes.abs().amax(-1, keepdim=True)  # so that coordinates in small units are not lost in rounding
        root = torch.linalg.solve(slopes / size, q.frame().dense().detach() / size)
        return CholeskyGaussian.from_moments(xi, root @ root.mT)


class Valued(Protocol):
    """A log joint that is computed for some values of the globals at once."""

    processes: Processes | None  # over which it is summed

    def chunks(self, theta: Tensor) -> tuple[Tensor, ...]:
        """Split values of the globals so that no table is too large for the memory."""

    def value(self, theta: Tensor) -> Tensor:
        """Compute the log joint of all values in one go, (S,)."""


def in_chunks(target: Valued, theta: Tensor, differentiated: bool) -> list[Tensor]:
    """Compute the values (S,), and their gradients (S, P) where they are wanted."""
    if not differentiated:
        return [torch.cat([target.value(part) for part in target.chunks(theta)])]
    values, gradients = [], []
    for part in target.chunks(theta):
        with torch.enable_grad():
            part = part.detach().requires_grad_()
            value = target.value(part)
            (gradient,) = torch.autograd.grad(value.sum(), part)
        values.append(value.detach())
        gradients.append(gradient)
    return [torch.cat(values), torch.cat(gradients)]


class InChunks(torch.autograd.Function):
    """Values with their gradients, in chunks whose graphs are never held together; of several processes the sums."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, target: Valued) -> Tensor:
        """Compute the values, and the gradients where they will be wanted."""
        here = partial(in_chunks, target, theta, ctx.needs_input_grad[0])
        values, *gradients = here() if target.processes is None else target.processes.summed(here, [theta])
        ctx.save_for_backward(*gradients)
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        """Hand the gradients on."""
        (gradient,) = ctx.saved_tensors
        return upstream[:, None] * gradient, None
