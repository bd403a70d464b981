"""An automatic guide of Pyro around a posterior of this library, and q as a distribution that code of Pyro steps.

The coordinates of q are buffers, so that no other optimizer moves them, and its probes get gradients: the guide's
density is log q(θ) with constant coordinates, so that the gradient of Trace_ELBO in the probes is

    a = E[r]        P = E[(r zᵀ + z rᵀ)/2],        r = Cᵀ∇ℓ(m + C z) - z

which sticks the landing (Roeder, Wu and Duvenaud 2017): where q is exact, no draw has a gradient.

Code that owns the optimizer, Pyro's SVI and all that is built on it, moves the parameters that a guide has.  Ours has a
single number ℓ, zero, in whose direction every loss has the slope 1.  An optimizer that steps takes ℓ to minus its
rate, and when the guide is used next, q makes a step along the natural gradient that the same backward pass left in its
probes,

    ρ = min(-4ℓ, 1),        by iBLR and no further than half a nat,

and ℓ is zero again.  The rate, its schedule, and whether there is a step at all stay with the owner.  Under Adam with
the rate r a standard deviation of Pyro's guides grows by a factor of at most eʳ, and that of a q too narrow by e²ʳ.
A posterior over a flat vector λ has a parameter p as long, and λ + p in its draws: plain gradients, as Pyro's guides.
"""

import copy
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any, Self, final

import pyro
import pyro.distributions as dist
import torch
from pyro import infer, poutine
from pyro.distributions import MultivariateNormal, TorchDistribution
from pyro.infer.autoguide import AutoContinuous
from pyro.infer.autoguide.guides import prototype_hide_fn
from pyro.infer.autoguide.initialization import init_to_median
from pyro.poutine.runtime import effectful
from torch import Tensor
from torch.distributions import constraints, transform_to
from torch.distributions.kl import kl_divergence, register_kl
from torch.distributions.transforms import AffineTransform

from torchngvi.adapters.pyro.density import ModelLogJoint
from torchngvi.adapters.pyro.layout import Layout, is_enumerable, latents, start
from torchngvi.adapters.pyro.structure import found
from torchngvi.arguments import read_callable, read_choice, read_instance, read_number, read_shares, read_sizes
from torchngvi.errors import InputError
from torchngvi.fitting.laplace import laplace
from torchngvi.interfaces import Coordinates, Posterior, Tangent
from torchngvi.metrics.recursive import free_bytes
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian, NaturalGaussian, PrecisionCholeskyGaussian
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


_WEIGHING = (infer.CSIS, infer.RenyiELBO, infer.ReweightedWakeSleep, infer.TraceTailAdaptive_ELBO)
_COMPILED = (infer.JitTrace_ELBO, infer.JitTraceEnum_ELBO, infer.JitTraceGraph_ELBO)


class AutoGaussian(AutoContinuous):
    """An `AutoContinuous` guide q(θ) = N(m, C Cᵀ) over the unconstrained latents, in any coordinates of this library.

    There are three ways to fit it: `fit_guide(model, guide, *args)`, without anything to tune; `NaturalSVI`, if the
    model has parameters or mini-batches; ``Trace_ELBO()(model, guide)`` with an optimizer of this library on
    ``guide.posterior``. (Kucukelbir, Tran, Ranganath, Gelman and Blei: *Automatic differentiation variational
    inference*, 2017.)

    Args:
        model: a Pyro model; discrete sites that are marked for enumeration are left to TraceEnum_ELBO.
        posterior: makes q of D dimensions, ``posterior(D, mean=..., scale=...)``: `CholeskyGaussian`,
            `NaturalGaussian`, `DiagonalGaussian`; ``FlatCholesky.standard``, or a function that makes a `ModuleFlow`,
            for `IFVB`.
        structure: "dense", every latent correlated with every other; or "auto", the forest of the plates of the model,
            as `structure` shows it on set-up: blocks for the members of plates and a dense one for what they share, at
            a cost that grows with the number of members. q is then a `PrecisionCholeskyGaussian` unless the posterior
            is a `NaturalGaussian`. θ has the order of the sites in either. Without local latents q is dense. By
            default `fit_guide` sets up "auto" for all data at once in one process, and every other use "dense".
        init_loc_fn: a strategy of `pyro.infer.autoguide.initialization` for m.
        init_scale: C = init_scale · I at the start, in unconstrained space.
        name: under which Pyro's parameter store holds q, one guide a name; a module that holds the guide names it.

    Raises:
        InputError: a model, a posterior or a structure that is none, a posterior that no structure can be given, an
            init_scale that is not positive; on set-up, sites that θ cannot hold (`latents`), a guide from a pickle,
            which holds no model; on use, a guide that was not set up, a loss that cannot fit it (`check_loss`), a
            parameter store that holds another posterior.

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
        posterior: Callable[..., Gaussian | FlatPosterior] = CholeskyGaussian,
        *,
        structure: str | None = None,
        init_loc_fn: Callable[..., Any] = init_to_median,
        init_scale: float = 0.1,
        name: str = "AutoGaussian",
    ) -> None:
        kinds = isinstance(posterior, type) and not issubclass(posterior, Posterior)
        if isinstance(posterior, torch.nn.Module) or not callable(posterior) or kinds:
            raise InputError(
                f"posterior makes q once its size is known: pass a class such as CholeskyGaussian; got {posterior!r}."
            )
        read_callable("model", model, "is a function or a module that samples")
        read_callable("init_loc_fn", init_loc_fn, "is a strategy such as init_to_median")
        init_scale = read_number("init_scale", init_scale, "is a standard deviation in unconstrained space", above=0)
        what = 'is "dense", or "auto", that of the plates of the model'
        read_choice("structure", "dense" if structure is None else structure, ("dense", "auto"), what)
        if structure == "auto" and posterior not in _STRUCTURED:
            raise InputError(
                'structure="auto" gives the precision of a Gaussian the pattern of the model. Leave posterior out, or '
                f"take PrecisionCholeskyGaussian or NaturalGaussian; got {posterior!r}."
            )
        self._posterior_class, self.init_scale = posterior, float(init_scale)
        self._automatic = None if structure is None else structure == "auto"
        self._bare = (model,)  # without the start
        super().__init__(model, init_loc_fn=partial(start, init_loc_fn))
        self._pyro_name = read_instance("name", name, str, "is the name of the guide, a text")

    @staticmethod
    def _prototype_hide_fn(msg: Any) -> bool:
        return prototype_hide_fn(msg) or is_enumerable(msg)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        # what is wrong is said in our words; tensors made in inference mode could not be moved outside
        with torch.inference_mode(False), torch.no_grad(), pyro.validation_enabled(False):
            for site in latents(poutine.block(poutine.trace(self.model).get_trace)(*args, **kwargs)):
                for frame in site["cond_indep_stack"]:
                    if not frame.vectorized:
                        raise InputError(
                            f"the latent site {site['name']!r} is in the loop over the plate {frame.name!r}, which "
                            "Pyro's automatic guides do not take. Write it as `with pyro.plate(...)`, loop over a "
                            "range, or fit log_joint(model, *args) itself."
                        )
            super()._setup_prototype(*args, **kwargs)
            trace: Any = self.prototype_trace
            for name in ("_INPUT", "_RETURN"):  # the data are no part of the guide
                trace.remove_node(name)
            with poutine.block():
                self._layout = found(self._bare[0], args, kwargs, trace) if self._automatic else Layout(trace)
            try:
                self.q = made(self._posterior_class, self._layout, self._init_loc(), self.init_scale)
            except InputError:
                self.prototype_trace = None
                raise

    def setup(self, *args: Any, **kwargs: Any) -> Self:
        """Run the model once with these arguments to size q, unless that was done before; returns the guide."""
        if self.prototype_trace is None:
            self._check_model()
            self._setup_prototype(*args, **kwargs)
            self._create_plates(*args, **kwargs)
        _write(self, self.posterior)
        return self

    def laplace_approximation(self, *args: Any, **kwargs: Any) -> Self:
        """Set q to N(mode, H⁻¹), H the Hessian of the negative log joint, by Newton's method from where q is now.

        The start of a fit, or an approximation of its own, of the same name as that of AutoLaplaceApproximation, but
        in place and without training.  Where H has eigenvalues that are not positive it is repaired, with a warning;
        see `torchngvi.fitting.laplace`, which returns what it found.

        Args:
            args, kwargs: of the model, all of whose continuous latents the guide covers.

        Returns:
            The guide.

        Raises:
            InputError: a model that subsamples its data, a guide from a pickle; as `ModelLogJoint` and `laplace`.

        >>> import pyro
        >>> _ = torch.manual_seed(0)
        >>> def model(y):
        ...     rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Poisson(rate), obs=y)
        >>> guide = AutoGaussian(model).laplace_approximation(torch.tensor([3.0, 2.0]))
        >>> round(guide.median()["rate"].item(), 3), round(guide.posterior.variance.item(), 3)  # 7/3, 1/7
        (2.333, 0.143)
        """
        self._check_model()
        density = self.setup(*args, **kwargs).density(self._bare[0], args, kwargs)
        density.check_comparable("Newton's method")
        result = laplace(self.gaussian("laplace_approximation"), density)
        if bool(result.repaired):
            warnings.warn(
                f"{int(result.repaired)} of the {density.dim} eigenvalues of the Hessian at the mode are not positive, "
                f"the smallest is {float(result.smallest):.2g}: their absolute values took their place, and q is no "
                "approximation in these directions. Fit the guide from here.",
                stacklevel=2,
            )
        if not bool(result.converged):
            warnings.warn(
                f"Newton's method ended at a decrement of {float(result.decrement):.2g} after {result.iterations} "
                "steps: q is not at a mode. Start from another init_loc_fn, or fit the guide from here.",
                stacklevel=2,
            )
        return self

    def density(
        self, model: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> ModelLogJoint:
        """The log joint of a model over the θ of this guide, as a target; the guide has to be set up."""
        density = ModelLogJoint(model, args, kwargs, self.prototype_trace)
        density.check(self.posterior)
        return density

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Draw θ and give the values of the latent sites by name, as `AutoContinuous` does."""
        check_loss()
        if self.prototype_trace is None:
            self._check_model()
            self._setup_prototype(*args, **kwargs)
        q = self.posterior
        self._step.announce(q, self._pyro_name)
        result = super().forward(*args, **kwargs)
        _write(self, q)
        return result

    @property
    def _step(self) -> Step:
        """The parameter for a step of q, which as a plain attribute Pyro would put into its parameter store."""
        step, q = self._modules.get("step"), self._modules["q"]
        if step is None:  # at the set-up, and in a pickle of an earlier release
            assert isinstance(q, Gaussian | FlatPosterior)
            with torch.inference_mode(False):
                step = self._modules["step"] = Step(q)
        assert isinstance(step, Step)
        return step

    def _check_model(self) -> None:
        if self._model is None:
            raise InputError(
                "the guide comes from a pickle, which holds no model: set it up before it is pickled, or build a new "
                "one on the model and load the state_dict of the old."
            )

    @property
    def posterior(self) -> Gaussian | FlatPosterior:
        """The posterior q over unconstrained θ (D,).

        Raises:
            InputError: a guide that was not set up, a parameter store that holds another posterior.
        """
        q = self._modules.get("q")
        if q is None:
            raise InputError(_NOT_SET_UP)
        assert isinstance(q, Gaussian | FlatPosterior)
        _sync(self, q)
        if self._step.seen is not None:
            self._step.take(q)
        return q

    @property
    def structure(self) -> Layout:
        """What was found of the model: printed, a line for each level of latents, and why others are no levels.

        Raises:
            InputError: a guide that was not set up.

        >>> def model():
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("groups", 3):
        ...         pyro.sample("x", dist.Normal(mu, 1.0))
        >>> print(AutoGaussian(model, structure="auto").setup().structure)
        x: 1 coordinate for each member of groups (3)
        mu: 1 coordinate shared by all
        """
        if self.prototype_trace is None:
            raise InputError(_NOT_SET_UP)
        if "_layout" not in self.__dict__:  # in a pickle of 0.2.0
            self._layout = _pickled_layout(self.prototype_trace, self.__dict__.get("_structure"))
        return self._layout

    def gaussian(self, reader: str) -> Gaussian:
        """The posterior, for a ``reader`` that needs its mean and root and is named in the message.

        Raises:
            InputError: as `posterior`; a posterior over a flat vector, which has none.
        """
        q = self.posterior
        if not isinstance(q, Gaussian):
            raise InputError(
                f"{reader} reads the mean and the root of q, and {type(q).__name__} is a vector of parameters without "
                "them. Step IFVB(guide.posterior) after the gradient of Trace_ELBO, or on guide.density(model, args)."
            )
        return q

    def get_posterior(self, *args: Any, **kwargs: Any) -> LatentGaussian:
        """The posterior q as a distribution of Pyro over θ."""
        return LatentGaussian(self.posterior)

    def sample_latent(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draw θ, (D,), as the auxiliary site of the guide, through which a loss of Pyro reaches q."""
        fn = LatentGaussian(self.posterior, step=self._step)
        return pyro.sample(f"_{self._pyro_name}_latent", fn, infer={"is_auxiliary": True})

    def quantiles(self, quantiles: Any, *args: Any, **kwargs: Any) -> Any:
        """The quantiles of each latent, at levels between 0 and 1, as Pyro's guides give them."""
        return super().quantiles(read_shares("quantiles", quantiles), *args, **kwargs)

    def get_base_dist(self) -> TorchDistribution:
        """The standard normal N(0, I), which `get_transform` takes to q."""
        zeros = torch.zeros_like(self.get_posterior().loc)
        return dist.Normal(zeros, torch.ones_like(zeros)).to_event(1)

    def get_transform(self, *args: Any, **kwargs: Any) -> torch.distributions.Transform:
        """The map θ = m + C z with C lower triangular, as NeuTraReparam asks for it."""
        q = self.get_posterior()
        return dist.transforms.LowerCholeskyAffine(q.loc, scale_tril=q.scale_tril)

    def _loc_scale(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.posterior.mean, self.posterior.stddev

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self.settle()
        super()._save_to_state_dict(destination, prefix, *args, **kwargs)
        if self.prototype_trace is not None and self.structure.order is not None:
            destination[f"{prefix}order"] = self.structure.order

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        _check_structure(self, state_dict, prefix)
        others = {name: value for name, value in state_dict.items() if name != f"{prefix}order"}
        super()._load_from_state_dict(others, prefix, *args, **kwargs)

    def settle(self) -> None:
        """Bring q up to date: take what was put into the parameter store, and the step that an optimizer asked for."""
        if self.prototype_trace is not None:
            _ = self.posterior

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert q, after the step that an optimizer asked for: its gradients are not converted."""
        self.settle()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Without the model, as Pyro's guides, and without a change to this one."""
        self.settle()
        return {**self.__dict__, "_model": None, "_bare": None, "master": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A guide of its own for the same model."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        new.__dict__.update(_model=self._model, _bare=self._bare)
        return new


def prefer_structure(guide: AutoGaussian) -> None:
    """Set up the structure of the plates, where that was left open and the posterior can have it."""
    if guide._automatic is None and guide._posterior_class in _STRUCTURED:
        guide._automatic = True


def _pickled_layout(trace: Any, structure: Any) -> Layout:
    """The layout of a guide that 0.2.0 has pickled, unless its latents stand in another order."""
    layout = Layout(trace)
    _check_order(layout, getattr(structure, "order", None), "the pickle")
    for name in ("levels", "forest", "terms", "reasons"):
        setattr(layout, name, getattr(structure, name, getattr(layout, name)))
    return layout


def _check_structure(guide: AutoGaussian, state_dict: dict[str, Any], prefix: str) -> None:
    """Refuse the state of a q with the structure of plates for one without, the reverse, and one in another order."""
    theirs = f"{prefix}q.precision_tril" in state_dict
    ours = isinstance(guide.posterior, PrecisionCholeskyGaussian)  # what the store had before does not come back later
    if theirs is not ours and guide._posterior_class is CholeskyGaussian:
        other = '"auto"' if theirs else '"dense"'
        raise InputError(
            f"the state_dict is of a guide whose structure is {other}, and this one has another. Make it with that."
        )
    _check_order(guide.structure, state_dict.get(f"{prefix}order"), "the state_dict")


def _check_order(layout: Layout, order: Tensor | None, what: str, first: str = "") -> None:
    """Refuse a q whose latents stand in another order than those of a layout."""
    ours = layout.order
    if not (ours is order if ours is None or order is None else torch.equal(ours, order.to(ours))):
        raise InputError(
            f"{what} is of a guide whose latents stand in another order: make this one with the same model and "
            f"arguments, or, since 0.2.0 had another order with plates, fit again. {first}".rstrip()
        )


_NOT_SET_UP = (
    "the guide has no posterior before it has seen the model: call guide.setup(*args, **kwargs) with the arguments of "
    "the model first."
)


# -------------------------------------------------------------------------------- the posterior


def made(posterior: Callable[..., Any], layout: Layout, mean: Tensor, scale: float) -> Any:
    """Make q over a layout, of a mean (D,)."""
    dim, free, apart = len(mean), free_bytes(mean.device), layout.forest is not None
    # twice, since a step makes the new beside the old
    needed = 2.0 * mean.element_size() * (math.prod(layout.pattern.shape) if apart else dim**2)
    if posterior in _STRUCTURED and needed > free:
        what = "correlations within the members of plates of" if apart else "all correlations of"
        other = "" if apart else ', or structure="auto" for latents of the members of plates'
        raise InputError(
            f"a Gaussian with {what} {dim:,} latents needs {needed / 2**30:.3g} GiB, and {free / 2**30:.3g} GiB of "
            f"{mean.device.type} memory are free. Take posterior=DiagonalGaussian{other}."
        )
    if apart:
        return _STRUCTURED[posterior](dim, mean=mean, scale=scale, structure=layout.pattern)
    q = posterior(dim, mean=mean, scale=scale)
    if not (isinstance(q, Gaussian) or getattr(q, "reparametrised", False)):
        raise InputError(
            f"{type(q).__name__} has no map from noise to draws, by which a loss of Pyro reaches q. Take a "
            "Gaussian or a flow, or fit log_joint(model, *args) itself."
        )
    return q


_STRUCTURED: dict[Any, type[Gaussian]] = {  # by what is asked for: only a precision has the pattern of a forest
    CholeskyGaussian: PrecisionCholeskyGaussian,
    PrecisionCholeskyGaussian: PrecisionCholeskyGaussian,
    NaturalGaussian: NaturalGaussian,
}


# -------------------------------------------------------------------------------- losses of Pyro


def check_loss() -> None:
    """Check that the loss of Pyro that is calling the guide at this moment is one that can fit it."""
    loss = _loss_in_progress()
    if isinstance(loss, _WEIGHING) and torch.is_grad_enabled():
        why = "it needs the derivative of log q in the coordinates of q, which this guide holds constant"
    elif isinstance(loss, infer.TraceMeanField_ELBO):
        why = "it leaves out the log Jacobians of the supports of the latent sites"
    elif isinstance(loss, _COMPILED):
        why = "torch.jit takes no probes, through which the gradient reaches q"
    else:
        return
    raise InputError(
        f"{type(loss).__name__} cannot fit an AutoGaussian: {why}. Use Trace_ELBO or TraceEnum_ELBO, fit_guide "
        "or NaturalSVI."
    )


def _loss_in_progress() -> infer.ELBO | infer.CSIS | None:
    """The innermost one on the call stack, since Pyro tells its guides nothing of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("pyro.infer."):
            caller = frame.f_locals.get("self")
            if isinstance(caller, infer.ELBO | infer.CSIS):
                return caller
        frame = frame.f_back
    return None


def refuse_loss(why: str) -> None:
    """Refuse every loss of Pyro that is calling the guide at this moment."""
    if (loss := _loss_in_progress()) is not None:
        raise InputError(f"{type(loss).__name__} cannot fit this guide: {why}.")


# -------------------------------------------------------------------------------- the parameter store of Pyro

# The store holds the coordinates of q themselves, under the name of the guide, so that it always saves what q is.  They
# require no gradient, so that no optimizer moves them.  What `load`, `set_state` or an assignment put there goes into q
# at the next use of the guide, as for a PyroModule; unlike there, what another guide of the same name wrote does not.


class _Written(type(constraints.real)):  # type: ignore[misc]
    """The constraint of the entries of one guide: the store puts the plain one in its place where a state is set."""

    def __init__(self, guide: AutoGaussian, entries: dict[str, Tensor], others: Iterable[AutoGaussian]) -> None:
        self.guides, self.entries = weakref.WeakSet({guide, *others}), entries
        self.name = guide._pyro_name
        super().__init__()

    def settle(self) -> Self:
        """Bring the entries up to date, in place, with a step that an optimizer asked for."""
        for guide in self.guides:
            guide.settle()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """The plain constraint, which takes this one's place in a file."""
        self.settle()
        count = sum(guide._pyro_name == self.name for guide in self.guides)
        if count > 1:
            warnings.warn(
                f"{count} guides in use are named {self.name!r}, and the parameter store saves one of them, the one "
                "set up or called last. Give each a name, AutoGaussian(model, name=...).",
                stacklevel=3,
            )
        return type(constraints.real), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The plain constraint; the entries were copied before the step, and are copied again."""
        plain, _ = self.__reduce__()
        for entry in self.entries.values():
            if id(entry) in memo:
                memo[id(entry)].copy_(entry)
        return plain()


transform_to.register(_Written, lambda written: written.settle() and AffineTransform(0.0, 1.0))  # to read is to copy


def _write(guide: AutoGaussian, q: Posterior) -> None:
    """Put the coordinates of q into the parameter store, in the place of what another guide of this name wrote."""
    store, entries = pyro.get_param_store(), _entries(guide, q)
    if all(store._params.get(key) is entry and _mark(store, key) for key, entry in entries.items()):
        return
    stale = {key: _mark(store, key) for key in store if key.startswith(_prefix(guide))}
    mark = _Written(guide, entries, {other for old in stale.values() if old for other in old.guides})
    for key in stale:
        del store[key]
    for key, entry in entries.items():
        store._params[key], store._param_to_name[entry], store._constraints[key] = entry, key, mark


def _sync(guide: AutoGaussian, q: Posterior) -> None:
    """Set q to what was put into the parameter store under the name of the guide; if there is nothing, put q there."""
    store, entries = pyro.get_param_store(), _entries(guide, q)
    if all(store._params.get(key) is entry for key, entry in entries.items()):
        return
    found = {key: store._params[key] for key in store if key.startswith(_prefix(guide))}
    if not found:
        _write(guide, q)
    if all(entries.get(key) is entry or _mark(store, key) for key, entry in found.items()):
        return
    theirs, mine = _shown(found), _shown(entries)
    if theirs != mine:
        raise InputError(
            f"the parameter store holds another posterior than that of the guide: {theirs} where it has {mine}. Load "
            "the store of this guide, or call pyro.clear_param_store()."
        )
    state = {key.removeprefix(_prefix(guide)): entry for key, entry in found.items()}
    _check_order(guide.structure, state.pop("order", None), "the parameter store", "Call pyro.clear_param_store(). ")
    q.load_state_dict(state)
    _write(guide, q)


def stored_parameters() -> dict[str, Tensor]:
    """The unconstrained parameters of models in the parameter store, by name: all entries but those of our guides."""
    store = pyro.get_param_store()
    return {key: store._params[key] for key in store if not isinstance(store._constraints.get(key), _Written)}


def _prefix(guide: AutoGaussian) -> str:
    return f"{guide._pyro_name}.q."


def _entries(guide: AutoGaussian, q: Posterior) -> dict[str, Tensor]:
    """The coordinates of q, and the order of θ; nothing where modules keep their parameters to themselves."""
    if pyro.settings.get("module_local_params"):
        return {}
    named = {**q.state_dict(keep_vars=True), "order": guide.structure.order}
    return {_prefix(guide) + name: entry for name, entry in named.items() if entry is not None}


def _mark(store: Any, key: str) -> _Written | None:
    """Of an entry that a guide wrote, where nobody has put another in its place."""
    mark = store._constraints.get(key)
    return mark if isinstance(mark, _Written) and mark.entries.get(key) is store._params[key] else None


def _shown(entries: dict[str, Tensor]) -> str:
    """The entries of q but for the order, which stores of 0.2.0 do not have."""
    return ", ".join(f"{key} {tuple(x.shape)}" for key, x in sorted(entries.items()) if not key.endswith(".order"))
