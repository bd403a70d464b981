"""An automatic guide of Pyro around one of our posteriors.

The coordinates of q are buffers, so that no other optimizer moves them, and its probes get gradients: the guide's
density is log q(θ) with constant coordinates, so that the gradient of Trace_ELBO in the probes is

    a = E[r]        P = E[(r zᵀ + z rᵀ)/2],        r = Cᵀ∇ℓ(m + C z) - z

which sticks the landing (Roeder, Wu and Duvenaud 2017): where q is exact, no draw has a gradient.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Self, final

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution, constraints
from pyro.infer.autoguide import AutoContinuous
from pyro.infer.autoguide.guides import prototype_hide_fn
from pyro.infer.autoguide.initialization import init_to_median
from torch import Tensor

from torchngvi.adapters.pyro.sites import check_latents, is_enumerable
from torchngvi.errors import InputError
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian


@final
class LatentGaussian(TorchDistribution):
    """q as a distribution of Pyro: draws through the probes, log density with constant coordinates.

    >>> LatentGaussian(CholeskyGaussian(2)).expand([3]).rsample().shape
    torch.Size([3, 2])
    """

    arg_constraints: dict = {}
    support = constraints.real_vector
    has_rsample = True

    def __init__(self, q: Gaussian, batch_shape: Sequence[int] = ()) -> None:
        self.q = q
        super().__init__(torch.Size(batch_shape), torch.Size([q.dim]), validate_args=False)

    @property
    def mean(self) -> Tensor:
        """m, (*batch, D)."""
        return self.q.frame().mean.expand(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        """diag(V), (*batch, D)."""
        return self.q.variance.expand(self.batch_shape + self.event_shape)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """θ = m + C z, (*sample, *batch, D)."""
        return self.q.rsample(torch.Size(sample_shape) + self.batch_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """log q(θ) = -½|C⁻¹(θ - m)|² - log|C| - ½D log 2π, (*sample, *batch): differentiable in θ alone."""
        z = self.q.whiten(value - self.q.frame().mean)
        return -0.5 * z.square().sum(-1) - self.q.log_det_root() - 0.5 * self.q.dim * math.log(2 * math.pi)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> "LatentGaussian":
        """The same for more members."""
        return LatentGaussian(self.q, batch_shape)


class AutoGaussian(AutoContinuous):
    """An `AutoContinuous` guide q(θ) = N(m, C Cᵀ) over the unconstrained latents, in any of our coordinates.

    Three ways to fit it: `fit_guide(model, guide, *args)`, without anything to tune; `NaturalSVI`, where the model has
    parameters or mini-batches; ``Trace_ELBO()(model, guide)`` with one of our optimizers on ``guide.posterior``.

    Kucukelbir, Tran, Ranganath, Gelman and Blei: *Automatic differentiation variational inference*, 2017.

    Args:
        model: a Pyro model; discrete sites that are marked for enumeration are left to TraceEnum_ELBO.
        family: makes q of D dimensions, ``family(D, mean=..., scale=...)``: `CholeskyGaussian`, `NaturalGaussian`,
            `DiagonalGaussian`.
        init_loc_fn: a strategy of `pyro.infer.autoguide.initialization` for m.
        init_scale: C = init_scale · I at the start, in unconstrained space.

    Raises:
        InputError: a family that is no class, an init_scale that is not positive; on set-up, sites that θ cannot
            hold (`check_latents`); on use, a guide that was not set up.

    >>> import pyro
    >>> def model(y):
    ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
    >>> guide = AutoGaussian(model).setup(torch.tensor(2.0))
    >>> guide.posterior
    CholeskyGaussian(1, dtype=torch.float32)
    >>> guide(torch.tensor(2.0))["mu"].shape
    torch.Size([])
    """

    def __init__(
        self,
        model: Callable[..., Any],
        family: Callable[..., Gaussian] = CholeskyGaussian,
        *,
        init_loc_fn: Callable[..., Any] = init_to_median,
        init_scale: float = 0.1,
    ) -> None:
        if isinstance(family, torch.nn.Module) or not callable(family):
            raise InputError(
                f"family makes q once its size is known: pass a class such as CholeskyGaussian; got {family!r}."
            )
        if not init_scale > 0:
            raise InputError(f"init_scale is a standard deviation in unconstrained space, positive; got {init_scale}.")
        self.family, self.init_scale = family, float(init_scale)
        super().__init__(model, init_loc_fn=init_loc_fn)

    @staticmethod
    def _prototype_hide_fn(msg: Any) -> bool:
        return prototype_hide_fn(msg) or is_enumerable(msg)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad(), pyro.validation_enabled(False):  # what is wrong is said in our words
            check_latents(poutine.block(poutine.trace(self.model).get_trace)(*args, **kwargs))
            super()._setup_prototype(*args, **kwargs)
            trace: Any = self.prototype_trace
            for name in ("_INPUT", "_RETURN"):  # the data are no part of the guide
                trace.remove_node(name)
            self.q = self.family(self.latent_dim, mean=self._init_loc(), scale=self.init_scale)

    def setup(self, *args: Any, **kwargs: Any) -> Self:
        """Run the model once to size q, unless that was done before; with the arguments of the model."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
            self._create_plates(*args, **kwargs)
        return self

    @property
    def posterior(self) -> Gaussian:
        """q, over unconstrained θ (D,).

        Raises:
            InputError: a guide that was not set up.
        """
        q = self._modules.get("q")
        if q is None:
            raise InputError(
                "the guide has no posterior before it has seen the model: call guide.setup(*args, **kwargs) with the "
                "arguments of the model first."
            )
        assert isinstance(q, Gaussian)
        return q

    def get_posterior(self, *args: Any, **kwargs: Any) -> LatentGaussian:
        """q as a distribution of Pyro over θ."""
        return LatentGaussian(self.posterior)

    def get_base_dist(self) -> TorchDistribution:
        """N(0, I), which `get_transform` takes to q."""
        zeros = torch.zeros_like(self.posterior.mean)
        return dist.Normal(zeros, torch.ones_like(zeros)).to_event(1)

    def get_transform(self, *args: Any, **kwargs: Any) -> torch.distributions.Transform:
        """θ = m + C z, C lower triangular, as NeuTraReparam asks for it."""
        q = self.posterior
        return dist.transforms.LowerCholeskyAffine(q.mean, scale_tril=q.scale_tril)

    def _loc_scale(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.posterior.mean, self.posterior.stddev

    # -------------------------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        """Without the model, as Pyro's guides, and without a change to this one."""
        return {**self.__dict__, "_model": None, "master": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A guide of its own for the same model."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        new.__dict__["_model"] = self._model
        return new
