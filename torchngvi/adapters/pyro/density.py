"""The log joint of a Pyro model in unconstrained space, for all draws at once.

    log p(θ) = Σ_sites scale · mask · log p(x_site | parents) + Σ_latents log|∂x/∂θ|,        x = biject_to(support)(θ)

as `pyro.infer.mcmc.util.initialize_model` has it for one θ, and Trace_ELBO with an AutoContinuous guide (Kucukelbir et
al. 2017, Eq 5); the log Jacobian is neither scaled nor masked.  Discrete sites that are marked for parallel
enumeration are summed out.  How many θ are evaluated at once is in `batching`.

What `pyro.infer.SVI` refuses at a step is refused before a fit.  The many evaluations run without these checks, since
some draw at once what Pyro validates draw by draw; so the model runs as Pyro's losses run it, under the setting of
`pyro.enable_validation`, at the start and at draws about it, and again where it is given other data.
"""

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any, Self, cast, final

import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta
from pyro.distributions import is_validation_enabled as checks_distributions
from pyro.infer.util import is_validation_enabled as checks_inference
from pyro.poutine.trace_struct import Trace
from pyro.util import check_site_shape
from torch import Tensor
from torch.distributions import biject_to

from torchngvi.adapters.pyro.batching import Enumerated, Factors, Largest, best_way, draws_at_once, points_about
from torchngvi.adapters.pyro.layout import (
    Call,
    Conditioned,
    Layout,
    Scored,
    Values,
    is_enumerated,
    is_subsampled,
    latents_of,
    listed,
    plates_of,
    random_sites,
)
from torchngvi.arguments import read_callable, read_instance, read_list, shown
from torchngvi.errors import InputError
from torchngvi.interfaces import Posterior, Target

_UNSUITED = (TypeError, RuntimeError, IndexError, AttributeError)  # of observations of another kind


@final
class ModelLogJoint(Target):
    """The log joint log p(data, θ) of a Pyro model over unconstrained θ, as a target; `log_joint` makes one.

    Args:
        model: a Pyro model.
        args, kwargs: the arguments of the model.
        latents: a trace whose latent sites make up θ; by default all of the model's that are continuous.
        order: which coordinate, in the order of the sites, is the first, second, ... of θ; by default it is theirs.

    Raises:
        InputError: latent sites that θ cannot hold, a model that writes into the value of one, a density that is NaN
            at the start; on use, sites that change.

    >>> target = ModelLogJoint(lambda: pyro.sample("x", pyro.distributions.Normal(0.0, 1.0)))
    >>> round(target.log_joint(torch.zeros(1)).item(), 4)  # -½ log 2π
    -0.9189
    """

    temperature = 1.0

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        latents: Trace | None = None,
        order: Tensor | None = None,
    ) -> None:
        read_callable("model", model, "is a function or a module that samples")
        if kwargs is not None:
            read_instance("kwargs", kwargs, Mapping, "are arguments of the model by name, or None")
        args = tuple(read_list("args", args, "are the arguments of the model, a tuple"))
        self.model, self.args, self.kwargs = model, args, dict(kwargs or {})
        if latents is not None:
            read_instance("latents", latents, Trace, "is a trace of Pyro, or None")
        if order is not None:
            what = "is a tensor of the indices of coordinates, (D,), or None"
            if read_instance("order", order, Tensor, what).ndim != 1 or order.dtype != torch.int64:
                raise InputError(f"order {what}; got {shown(order)}.")
        with torch.no_grad():
            latents = Call(model, args, self.kwargs).prototype() if latents is None else latents
            self.layout, nodes = Layout(latents, order), cast(Any, latents.nodes)
            values = {site.name: nodes[site.name]["value"] for site in self.layout.sites}
            self.initial = self.layout.unconstrained(values).detach()
        self._indices: dict[str, Tensor] = {}
        self.enumerates, self.nesting = False, 0
        trace, largest = self._first_run()
        uncovered = [site["name"] for site in latents_of(trace)]
        if uncovered:
            raise InputError(
                f"the guide must cover every continuous latent site of the model; it lacks {listed(uncovered)}. "
                "Build it on the whole model, or fit it beside the others with Trace_ELBO."
            )
        sites: Any = [site for site in trace.nodes.values() if site["type"] == "sample"]
        frames = [frame for site in sites for frame in site["cond_indep_stack"] if frame.vectorized]
        self.nesting = max((-frame.dim for frame in frames), default=0)
        self.enumerates = any(is_enumerated(site) for site in sites)
        self.comparable = not self._indices and not any(map(is_subsampled, frames))
        self._check_density()
        points = points_about(self.initial, torch.Generator().manual_seed(0))
        self._check_supports(points[0])
        self.validate("at its initial point")
        for point in points:
            self.validate("at a draw about its initial point", point)
        self.batched_by, self._batched = best_way(self, points)
        self.draws_at_once = draws_at_once(largest, self.initial, Target.draws_at_once)

    @property
    def target(self) -> "ModelLogJoint":
        """The target to fit, which is this object."""
        return self

    @property
    def dim(self) -> int:
        """The number D of unconstrained coordinates."""
        return self.layout.dim

    def unpack(self, theta: Tensor) -> Values:
        """The values of the latent sites at θ (*sample, D): constrained, (*sample, *shape), by the name of the site."""
        return self.layout.constrained(theta)[0]

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `unpack`: θ (*sample, D) of constrained values (*sample, *shape).

        Raises:
            InputError: a site without a value.
        """
        return self.layout.unconstrained(values)

    def on(self, *args: Any, **kwargs: Any) -> Self:
        """Go on with other arguments of the model, of the same structure, and new random subsamples; returns itself."""
        self.args, self.kwargs = args, kwargs
        self._indices.clear()
        return self

    def log_joint(self, theta: Tensor) -> Tensor:
        """The log joint at θ (*sample, D), (*sample,), in the dtype of θ, whatever that of the data."""
        if theta.shape[-1:] != (self.dim,):
            raise InputError(f"theta must end in D = {self.dim}; got shape {tuple(theta.shape)}.")
        flat = theta.reshape(-1, self.dim)
        if theta.requires_grad and torch.is_grad_enabled() or len(flat) <= self.draws_at_once:
            return self._batched(flat).to(theta.dtype).reshape(theta.shape[:-1])
        values = torch.cat([self._batched(part) for part in flat.split(self.draws_at_once)])
        return values.to(theta.dtype).reshape(theta.shape[:-1])

    __call__ = log_joint

    def check(self, q: Posterior) -> None:
        """Check that q is one posterior of the size and dtype of θ, and raise an InputError otherwise."""
        if q.dim != self.dim or q.batch_shape:
            raise InputError(
                f"the model has {self.dim} unconstrained latents and q is over {(*q.batch_shape, q.dim)}; "
                f"build one q with dim={self.dim}."
            )
        if q.mean_probe.dtype != self.initial.dtype:
            raise InputError(
                f"the latents of the model are in {self.initial.dtype} and q in {q.mean_probe.dtype}; "
                f"build q with dtype={self.initial.dtype}, or convert one of them."
            )

    @torch.no_grad()
    def check_comparable(self, method: str) -> None:
        """Check that every run of the model has the same objective, for a method that minimises it.

        Raises:
            InputError: a model that subsamples its data, or that draws.
        """
        if not self.comparable:
            raise InputError(
                f"{method} minimises one objective, and a model that subsamples its data has another in each run. "
                "Pass all data, or take the steps of NaturalSVI."
            )
        first, second = (self(self.initial + 1) for _ in range(2))  # at zero dropout changes nothing
        if bool(((first - second).abs() > 1e3 * torch.finfo(first.dtype).eps * first.abs().clamp_min(1.0)).any()):
            raise InputError(
                f"{method} minimises one objective, and the model gives {float(first):.6g} and then "
                f"{float(second):.6g} at the same θ: it draws. Look for a latent site that poutine.block hides, or "
                "dropout, or take the steps of NaturalSVI."
            )

    def tensors(self) -> tuple[Tensor, ...]:
        """No tensors: what the model reads is not known, as for any function."""
        return ()

    # -------------------------------------------------------------------------------- one run of the model

    def scored(self, values: Values) -> list[Tensor]:
        """The log probabilities of a run of the model at these values, without enumerated sites."""
        return list(Scored(values, self.layout.shapes, self._indices).run(self).values())

    def trace(self, values: Values, plate: pyro.plate | None = None) -> Trace:
        """The run as a trace, with log probabilities at its sites."""
        trace, conditioned = self._traced(values, plate)
        conditioned.check()
        with pyro.validation_enabled(False):
            _score(trace)
        return trace

    @torch.no_grad()
    def validate(self, where: str, theta: Tensor | None = None) -> None:
        """Run the model at θ (D,), by default the initial one, under Pyro's own validation; ``where`` is its name.

        Raises:
            InputError: what Pyro refuses.
        """
        values = self.unpack(self.initial if theta is None else theta)
        room = self.nesting if self.enumerates else math.inf  # further dimensions on the left are of enumerated sites
        validate(lambda: self._traced(values, validated=True)[0], room, where)

    def _traced(
        self, values: Values, plate: pyro.plate | None = None, validated: bool = False
    ) -> tuple[Trace, Conditioned]:
        model = self.model
        if self.enumerates:
            model = Enumerated(-1 - self.nesting - (plate is not None))(model)
        model = model if plate is None else plate(model)
        conditioned = Conditioned(values, self.layout.shapes, self._indices)
        quiet = nullcontext() if validated else pyro.validation_enabled(False)
        with quiet, poutine.trace() as tracer, conditioned:
            model(*self.args, **self.kwargs)
        return tracer.trace, conditioned

    def one(self, theta: Tensor) -> Tensor:
        """The log joint of one θ, (D,) -> ()."""
        values, log_jacobian = self.layout.constrained(theta)
        if self.enumerates:
            return log_jacobian + Factors.of(self.trace(values)).sum_out(frozenset())
        return log_jacobian + sum(log_prob.sum() for log_prob in self.scored(values))

    # -------------------------------------------------------------------------------- checks at the start

    def _first_run(self) -> tuple[Trace, int]:
        """The trace at the initial point, after a check that values stay as they are; the largest tensor of the run."""
        values = {name: value.clone() for name, value in self.unpack(self.initial).items()}
        before = {name: _writes(value) for name, value in values.items()}
        with Largest() as largest:
            trace = self._traced(values)[0]
        for name, value in values.items():
            if _writes(value) != before[name]:
                raise InputError(
                    f"the model writes in place into the value of the latent site {name!r}, whose density is that of "
                    "the value before. Write into a copy, value.clone(), or choose by torch.where."
                )
        return trace, largest.numbers

    def _check_density(self) -> None:
        """Check that the log density is not NaN at the initial point."""
        trace = self.trace(self.unpack(self.initial))
        shapes = [getattr(argument, "shape", ()) for argument in (*self.args, *self.kwargs.values())]
        given = any(isinstance(shape, tuple) and math.prod(shape) > 1 for shape in shapes)
        _warn_of_sites(trace, self.layout.shapes, given)
        for site in random_sites(trace):
            if bool(site["log_prob"].isnan().any()):
                raise InputError(
                    f"the log density of the model is NaN at its initial point, at the site {site['name']!r}. "
                    "Look for missing data or parameters out of range there, or choose another init_loc_fn."
                )

    def _check_supports(self, theta: Tensor) -> None:
        """Check that the supports at θ (D,) are those of the prototype."""
        values = self.unpack(theta)
        trace, theta = self.trace(values), self.layout.by_site(theta)
        for site in self.layout.sites:
            u = theta[site.where].reshape(site.free)
            fn: Any = trace.nodes[site.name]["fn"]
            now = biject_to(fn.support)(u)
            if now.shape != site.shape or not torch.allclose(now, values[site.name], equal_nan=True):
                raise InputError(
                    f"the support of the latent site {site.name!r} depends on other latents, and θ has one transform "
                    "a site. Scale or shift a site of fixed support instead."
                )


def _writes(value: Tensor) -> int:
    """How often was written into a tensor; not counted in inference mode."""
    return 0 if value.is_inference() else value._version


def log_joint(model: Callable[..., Any], *args: Any, **kwargs: Any) -> ModelLogJoint:
    """log p(data, θ) = Σ log p(site) + log|∂x/∂θ| of a Pyro model, as a target for `torchngvi.fit`.

    Kucukelbir, Tran, Ranganath, Gelman and Blei: *Automatic differentiation variational inference*, 2017, Eq 5.

    Args:
        model: with plates, masks, `poutine.scale`, any support that `biject_to` knows, data in subsampled plates, and
            discrete latent sites that are marked for parallel enumeration.
        args, kwargs: the arguments of the model.

    Returns:
        A target of ``dim`` unconstrained latents, called with θ (*sample, D) for (*sample,); ``unpack(theta)`` gives
        the values of the sites, ``pack(values)`` is its inverse, ``initial`` a start.  Data are subsampled once, so
        that values and derivatives see the same rows; ``on(*args)`` subsamples again.

    Raises:
        InputError: as `ModelLogJoint`.

    >>> import pyro.distributions as dist
    >>> def model():
    ...     scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(0.0, scale), obs=torch.tensor(1.0))
    >>> density = log_joint(model)
    >>> density(torch.zeros(4, 1)).exp().round(decimals=4)  # N(0 | 0, 1) N(1 | 0, 1)
    tensor([0.0965, 0.0965, 0.0965, 0.0965])
    >>> density.unpack(torch.zeros(1))
    {'scale': tensor(1.)}
    """
    return ModelLogJoint(model, args, kwargs)


# -------------------------------------------------------------------------------- Pyro's own validation


def _score(trace: Trace) -> None:
    """Compute the log probabilities of a trace, where the distributions can take their observations."""
    try:
        trace.compute_log_prob()
    except _UNSUITED as error:
        for site in (site for site in random_sites(trace) if site["is_observed"]):
            fn, value = site["fn"], site["value"]
            try:
                fn.log_prob(value, *site["args"], **site["kwargs"])
            except _UNSUITED:
                raise InputError(
                    f"the distribution {type(getattr(fn, 'base_dist', fn)).__name__} of the site {site['name']!r} "
                    f"cannot take its observations, {shown(value)} ({type(error).__name__}: "
                    f"{str(error).splitlines()[0]}). Give a tensor of the dtype of the parameters, y.double() or "
                    "y.float(), or for classes whole numbers from 0."
                ) from error
        raise


def _warn_of_sites(trace: Trace, latents: Collection[str], given: bool) -> None:
    """Warn of a model that observes nothing, and of one observation that a plate repeats."""
    sites = random_sites(trace)
    seen = [site for site in sites if site["is_observed"] and site["name"] not in latents]
    if given and sites and not seen:
        names = [site["name"] for site in sites]
        warnings.warn(
            f"the model is given data and observes nothing: its sites {listed(names)} are all latent, so that the "
            "guide is fitted to the prior. Pass the data, obs=y, or pyro.condition by the name of a site.",
            stacklevel=2,
        )
    for site in seen:
        fn, value = site["fn"], site["value"]
        fixed = isinstance(getattr(fn, "base_dist", fn), Delta)  # of pyro.deterministic, which has no density
        if fixed or not isinstance(value, Tensor):
            continue
        law = getattr(fn, "log_factor", None)
        if law is None and value.numel() == 1:  # one number for all members is a way to write an observation
            continue
        own = value.shape[: max(value.dim() - fn.event_dim, 0)] if law is None else law.shape
        for plate in plates_of(site):
            stands = len(own) >= -plate.dim and own[plate.dim] > 1
            if stands and (law is None or law.stride(plate.dim)):
                continue
            what, shape = ("the observation", value.shape) if law is None else ("the factor", own)
            warnings.warn(
                f"the plate {plate.name!r} repeats {what} of the site {site['name']!r}, of shape "
                f"{tuple(shape)}, {plate.size} times: it counts so often. Give one "
                "value for each member, without .sum() or .to_event() over the plate, or take the site out of it.",
                stacklevel=2,
            )


def refusal(run: Callable[[], Trace], nesting: float) -> str | None:
    """Run a model once as a loss of Pyro does, and give what Pyro has against it under the user's setting."""
    if not (checks_distributions() or checks_inference()):
        return None
    try:
        trace = run()
        trace.compute_log_prob()
        for site in random_sites(trace) if checks_inference() else ():
            check_site_shape(site, nesting)  # type: ignore[arg-type]  # infinity, as Trace_ELBO has it
    except InputError:
        raise
    except ValueError as error:
        lines = [line.rstrip() for line in str(error).split("Trace Shapes:")[0].splitlines()]
        return "\n".join(line for line in lines if line)
    return None


def validate(run: Callable[[], Trace], nesting: float, where: str) -> None:
    """Check that Pyro's validation passes a model."""
    found = refusal(run, nesting)
    if found is not None:
        masked = " Where a mask leaves out a missing value, put a possible one there, such as 0." * ("nan" in found)
        raise InputError(
            f"Pyro's validation refuses the model {where}:\n{found}\n"
            "A fit would go on from a density that is not the one meant. Correct the model or its data; "
            f"pyro.enable_validation(False) switches these checks off, here as in Pyro.{masked}"
        )
