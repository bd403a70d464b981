"""q as a distribution of Pyro over the unconstrained latents."""

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from pyro.distributions import MultivariateNormal, TorchDistribution, constraints
from torch import Tensor
from torch.distributions.kl import kl_divergence, register_kl

from torchngvi.adapters.pyro.owned import Step
from torchngvi.arguments import read_instance, read_sizes
from torchngvi.errors import InputError
from torchngvi.posteriors.flat.flat_gaussian import FlatGaussian
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.posteriors.gaussian import Gaussian


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

    def __init__(
        self,
        q: Gaussian | FlatPosterior,
        batch_shape: Sequence[int] = (),
        step: Step | None = None,
    ) -> None:
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


def _written_out(p: LatentGaussian) -> MultivariateNormal:
    return MultivariateNormal(p.mean, scale_tril=p.scale_tril)


@register_kl(LatentGaussian, LatentGaussian)
def _between(p: LatentGaussian, other: LatentGaussian) -> Tensor:
    if isinstance(p.q, Gaussian) and isinstance(other.q, Gaussian):
        with torch.no_grad():
            return p.q.kl(other.q).expand(torch.broadcast_shapes(p.batch_shape, other.batch_shape))
    return kl_divergence(_written_out(p), _written_out(other))


@register_kl(LatentGaussian, torch.distributions.MultivariateNormal)
def _from(p: LatentGaussian, other: torch.distributions.MultivariateNormal) -> Tensor:
    return kl_divergence(_written_out(p), other)


@register_kl(torch.distributions.MultivariateNormal, LatentGaussian)
def _to(p: torch.distributions.MultivariateNormal, other: LatentGaussian) -> Tensor:
    return kl_divergence(p, _written_out(other))
