"""Fitting a guide at once, to its log joint, and the coordinates in which a Gaussian fits a hierarchical model best.

Where the rows of a model come in batches, the log joint is that of one pass over all of them, a `DataLogJoint`,

    log p(θ, y) = log p(θ) + Σ_batches Σ_rows log p(y_row | θ)

The model runs once for the first term, with its rows masked, and once a batch for the others, with everything else
masked; the factors N/B by which plates scale a subsample are taken out again.

A latent y ~ N(μ, s²) whose μ and s are latents too is written with the weight w in [0, 1] as

    x ~ N(w μ, s^(2w)),        y = μ + s^(1-w) (x - w μ)

which is the same model for every w: as written at w = 1, which is best where data say much of y, and not centred at
w = 0 (Papaspiliopoulos, Roberts and Sköld 2007; Gorinova, Moore and Hoffman 2020).  Between the two

    w = 1 - s⁻² / h,        h = -∂²log p(data, θ)/∂y²

is the share of the precision of y that comes from the data, an element of the site at a time.
"""

import contextlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGaussian as PyrosAutoGaussian
from pyro.infer.autoguide import AutoGuide
from pyro.infer.reparam import LocScaleReparam
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import constraints

from torchngvi.adapters.pyro.density import ModelLogJoint, refusal
from torchngvi.adapters.pyro.guide import AutoGaussian, prefer_structure
from torchngvi.adapters.pyro.layout import (
    Call,
    Layout,
    coordinate_names,
    is_subsampled,
    listed,
    random_sites,
    unwrapped,
)
from torchngvi.adapters.pyro.local_guide import AutoLocalGaussian, fit_locals
from torchngvi.adapters.pyro.marginal import AutoMarginal, fit_marginal
from torchngvi.adapters.pyro.product import AutoProduct
from torchngvi.adapters.pyro.structure import factored, latent_field, priors_of
from torchngvi.arguments import read_callable, read_instance, shown
from torchngvi.derivatives import mean_hessian_products
from torchngvi.distributed import Processes, processes_of, synchronize
from torchngvi.errors import InputError
from torchngvi.fitting.fit import fit
from torchngvi.fitting.records import FitResult
from torchngvi.interfaces import Target
from torchngvi.models import DataLogJoint, ShardedDraws
from torchngvi.models.streamed import check_batches, rows_of, sums_that_differ

_DONE = "_decentered"  # the end of the names that LocScaleReparam gives


def fit_guide(
    model: Callable[..., Any],
    guide: AutoGaussian | AutoLocalGaussian | AutoProduct,
    *args: Any,
    options: dict[str, Any] | None = None,
    batches: Iterable[Any] | None = None,
    **kwargs: Any,
) -> FitResult:
    """Fit the guide to the model, in place, by `torchngvi.fit`: no learning rate, no number of draws.

    Parameters of the model stay as they are, and the reason of the result names those that require a gradient and are
    not hidden by `poutine.block`; `NaturalSVI` fits them too.  A model with a plate that subsamples is
    fitted to all members of it, in passes over batches of ``subsample_size``, see `torchngvi.DataLogJoint`.

    The method is that of Giordano, Ingram and Broderick (2024), see `torchngvi.fitting.sample_average`.

    Args:
        model: a Pyro model, all of whose continuous latents the guide covers.
        guide: the guide, which is set up if it was not, and holds the posterior afterwards; an `AutoProduct` takes the
            options of `torchngvi.fit` but group, and no batches; of an `AutoLocalGaussian`
            the options are those of `torchngvi.adapters.pyro.local_guide.fit_locals`.
        args, kwargs: the arguments of the model.
        options: keywords of `torchngvi.fit`: tolerance, max_gradients, max_seconds, progress, callbacks,
            checkpoint, optimizer. ``group``, a `torchngvi.Processes` or a group of torch.distributed, spreads the
            draws over processes that all have the same model and data, see `torchngvi.models.ShardedDraws`.
        batches: a DataLoader without ``drop_last``, or a list, where the data are passed in batches: tensors, tuples
            of arguments that stand before ``args``, or dicts of arguments by name, with as many rows in each tensor.
            A plate over the rows may scale them, ``pyro.plate(name, num_data, subsample_size=len(y))``, or not.

    Returns:
        The verdict of `torchngvi.fit` with its trace; whether a Gaussian fits is said in the names of the sites.

    Raises:
        InputError: a guide of another kind; rows that come in batches beside sites that are summed out, in two plates
            that subsample, whose log densities do not add up, or for a guide with a structure; a model that no longer
            has the structure of its guide, a group for a guide with one; as `ModelLogJoint`.

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(3.0, 0.5))
    >>> guide = AutoGaussian(model)
    >>> _ = fit_guide(model, guide, options={"progress": False})
    >>> guide.posterior.mean.round(decimals=2), guide.posterior.stddev.round(decimals=2)
    (tensor([3.]), tensor([0.5000]))
    """
    read_callable("model", model, "is a function or a module that samples")
    if options is not None:
        read_instance("options", options, Mapping, "are keywords of torchngvi.fit, such as {'tolerance': 0.1}, or None")
    if batches is not None and (isinstance(batches, str | bytes | Tensor) or not isinstance(batches, Iterable)):
        raise InputError(f"batches is a DataLoader or a list, or None; got {shown(batches)}.")
    call = Call(model, args, kwargs)
    _check_options(call)
    with poutine.trace(param_only=True) as tracer:
        result = _fitted(call, guide, dict(options or {}), batches)
    clauses = _held(parameters_of(tracer.trace)), _refused(call, guide) if batches is None else ""
    for clause in filter(None, clauses):
        result = replace(result, reason=f"{result.reason.rstrip('.')}; {clause}.")
    return result


def _check_options(call: Call) -> None:
    """Refuse keywords that are those of a fit and not of the model."""
    try:
        inspect.signature(call.model).bind_partial(**call.kwargs)
    except (TypeError, ValueError):
        astray = sorted(set(call.kwargs) & set(inspect.signature(fit).parameters))
        if astray:
            raise InputError(
                f"keywords are those of the model, which has no {listed(astray)}; those of the fit are options: "
                f"fit_guide(model, guide, *args, options={{{astray[0]!r}: {call.kwargs[astray[0]]!r}}})."
            ) from None


def _refused(call: Call, guide: AutoGuide) -> str:
    """Say, and warn, at how many draws from q or from the prior parameters violate their constraints."""

    def at_guide() -> poutine.Trace:
        return call._replace(model=poutine.replay(call.model, call._replace(model=guide).trace())).trace()

    # a scale that is negative at a share .16 of the prior escapes 24 draws of it in 1.5 % of the models
    for source, run, draws in (("q", at_guide, 8), ("the prior", call.trace, 24)):
        breached = list[str]()
        with torch.no_grad(), poutine.block(), torch.random.fork_rng():
            torch.manual_seed(0)
            for _ in range(draws):
                with contextlib.suppress(Exception):  # far away a model need not run
                    found = refusal(run, math.inf) or ""
                    breached += [found] if "Expected parameter" in found and "nan" not in found else []
        if breached:
            words = " ".join(breached[0].split())
            clause = f"Pyro's validation refuses the model at {len(breached)} of {draws} draws from {source}: {words}"
            warnings.warn(
                f"{clause}. The fit took the density there for zero, or for what the distribution makes of it. Give "
                "the latent sites supports that keep to the constraints, such as LogNormal or HalfNormal for a scale.",
                stacklevel=3,
            )
            return clause
    return ""


def _fitted(call: Call, guide: AutoGuide, options: dict[str, Any], batches: Iterable[Any] | None) -> FitResult:
    """The fit of each kind of guide."""
    if isinstance(guide, AutoLocalGaussian):
        if batches is not None:
            raise InputError("AutoLocalGaussian takes its batches from the plate that subsamples; leave batches= out.")
        return fit_locals(call, guide, options)
    if isinstance(guide, AutoProduct):
        if batches is not None:
            raise InputError("AutoProduct is fitted to all rows at once; leave batches= out.")
        graph = guide.setup(*call.args, **call.kwargs).graph(*call)
        return fit(guide.posterior, graph, **options)
    check_guide(guide)
    assert isinstance(guide, AutoGaussian)
    if isinstance(guide, AutoMarginal) and guide.setup(*call.args, **call.kwargs).integrates:
        if batches is not None or "group" in options:
            raise InputError("AutoMarginal is fitted to all rows in one process; leave batches= and group= out.")
        return fit_marginal(guide, guide.density(*call), options)
    processes = processes_of(options.pop("group", None))
    if batches is None and processes.world == 1:
        prefer_structure(guide)
    with processes.together():
        target = _target_of(call, guide, batches)
    if guide.structure.forest is None:
        whole: Target = spread(target, guide, processes)
    elif isinstance(target, DataLogJoint):
        raise InputError('rows in batches are fitted with one dense block; leave structure="auto" out.')
    elif processes.world == 1:
        whole = factored(target, guide.structure)
    else:
        raise InputError('the draws of a guide with structure="auto" are not spread over processes; leave group= out.')
    result = fit(guide.posterior, whole, **options).named(coordinate_names(guide.structure.sites))
    return advised(result, target, guide.structure) if isinstance(target, ModelLogJoint) else result


def _target_of(call: Call, guide: AutoGaussian, batches: Iterable[Any] | None) -> ModelLogJoint | DataLogJoint:
    """The log joint of a model in the coordinates of a guide, in passes where its rows come in batches."""
    if batches is not None:
        return pass_over_batches(call, guide, batches)
    density = guide.setup(*call.args, **call.kwargs).density(*call)
    if (plate := subsampled_plate(density)) is not None:
        return pass_over_plate(call, guide, plate)
    density.check_comparable("fit_guide")
    return density


def spread(density: ModelLogJoint | DataLogJoint, guide: AutoGaussian, processes: Processes) -> Target:
    """The log joint with its draws over processes, which all begin from the guide and the generator of the first."""
    if processes.world == 1:
        return density
    synchronize(guide.posterior, group=processes)
    processes.same_draws()
    return ShardedDraws(density, processes)


def check_guide(guide: object, *, steps: bool = False) -> None:
    """Check that a guide is an `AutoGaussian` of this library, and can take steps by a loss of Pyro."""
    if steps and isinstance(guide, AutoMarginal):
        raise InputError("AutoMarginal is fitted by fit_guide alone; take an AutoGaussian for NaturalSVI.")
    if isinstance(guide, PyrosAutoGaussian):
        raise InputError(
            "the guide is pyro.infer.autoguide.AutoGaussian, another class of this name; import AutoGaussian from "
            "torchngvi.adapters.pyro."
        )
    if not isinstance(guide, AutoGaussian):
        raise InputError(
            f"the guide must be an AutoGaussian of torchngvi; got {type(guide).__name__}. Lists of guides go "
            "through NaturalSVI, others through Pyro's SVI."
        )


def parameters_of(trace: poutine.Trace) -> dict[str, Tensor]:
    """The unconstrained tensors behind the parameters that a model has read, by name."""
    values: Any = {name: node["value"] for name, node in trace.nodes.items()}
    return {name: x.unconstrained() if hasattr(x, "unconstrained") else x for name, x in values.items()}


def _held(found: dict[str, Tensor]) -> str:
    """Name the parameters that an optimizer could move and that were held fixed."""
    names = [name for name, value in found.items() if isinstance(value, Tensor) and value.requires_grad]
    if not names:
        return ""
    s, were, them = ("s", "were", "them") if len(names) > 1 else ("", "was", "it")
    learns = f"torchngvi.adapters.pyro.NaturalSVI learns {them}"
    return f"the parameter{s} {listed(names)} of the model {were} held fixed, and {learns}"


def location_scale(density: ModelLogJoint) -> list[str]:
    """Name the latent sites of location-scale families whose location or scale depends on other latents."""
    _, priors = priors_of(density)
    known = {name: fn for name, fn in priors.items() if {"loc", "scale"} <= set(getattr(fn, "arg_constraints", {}))}
    found = [name for name, fn in known.items() if fn.loc.requires_grad or fn.scale.requires_grad]
    return [name for name in found if known[name].support is constraints.real and not name.endswith(_DONE)]


def advised(result: FitResult, density: ModelLogJoint, layout: Layout) -> FitResult:
    """Name what `AutoMarginal` integrates out, and the sites that `centred` would look at, where q is in doubt."""
    verdict = result.examination
    if verdict is None or not verdict.next or verdict.modes:
        return result
    clauses, members = [], list[str]()
    with contextlib.suppress(InputError):
        members = [site.name for site in latent_field(density, layout)]
    if members := members or layout.apart:
        clauses.append(f"torchngvi.adapters.pyro.AutoMarginal(model), which integrates {', '.join(members)} out")
    if names := location_scale(density):
        clauses.append(
            f"other coordinates of {', '.join(names)}, which torchngvi.adapters.pyro.centred(model, ...) finds"
        )
    return replace(result, examination=replace(verdict, coordinates=", or ".join(clauses)))


# -------------------------------------------------------------------------------- rows in batches


@final
class Portion(Messenger):
    """A messenger that keeps the density of the rows of a model, or that of everything else, and masks the other."""

    def __init__(self, rows: bool, plate: str | None = None) -> None:
        super().__init__()
        self.rows, self.plate = rows, plate
        self.index: Tensor | None = None  # of the members that are the rows of this run, not more than are subsampled

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg):
            size = msg["fn"].subsample_size
            if msg["value"] is None and size is not None and size < msg["fn"].size:
                index = torch.arange(size)
                if msg["name"] == self.plate and self.index is not None:  # the members that fill it up are masked
                    index = torch.cat([self.index, self.index[:1].expand(size - len(self.index))])
                msg["value"] = index
            return
        frames = [frame for frame in msg["cond_indep_stack"] if self.plate is None or frame.name == self.plate]
        if (bool(frames) if self.plate else msg["is_observed"]) != self.rows:
            msg["mask"] = False
        elif self.rows:
            for frame in filter(is_subsampled, frames):
                msg["scale"] = msg["scale"] * frame.size / frame.full_size
                if self.index is not None and len(self.index) < frame.size:
                    real = torch.arange(frame.size, device=msg["value"].device) < len(self.index)
                    real = real.reshape(-1, *(1,) * (-frame.dim - 1))
                    msg["mask"] = real if msg["mask"] is None else msg["mask"] & real


def subsampled_plate(density: ModelLogJoint) -> tuple[str, int, int] | None:
    """The one plate of a model that subsamples its members: its name, their number, and that of a subsample."""
    trace = density.trace(density.unpack(density.initial))
    frames = [frame for site in random_sites(trace) for frame in site["cond_indep_stack"] if is_subsampled(frame)]
    found = {frame.name: (frame.name, frame.full_size, frame.size) for frame in frames}
    if len(found) > 1:
        raise InputError(
            f"the plates {listed(found)} all subsample, and a pass goes over one. Pass all data of the others, or "
            "take the steps of NaturalSVI."
        )
    return next(iter(found.values()), None)


def pass_over_plate(call: Call, guide: AutoGaussian, plate: tuple[str, int, int]) -> DataLogJoint:
    """The log joint of all members of a plate that subsamples them, so many at once as it does."""
    name, members, size = plate
    prior, rows, portion = _portions(call, guide, name)
    batches = torch.randperm(members, generator=torch.Generator().manual_seed(0)).split(size)
    for portion.index in batches:
        rows.on(*call.args, **call.kwargs).validate(f"at its initial point, on some members of the plate {name!r}")

    def log_likelihood(theta: Tensor, index: Tensor) -> Tensor:
        portion.index = index
        return without_jacobian(rows, theta)

    return DataLogJoint(log_likelihood, prior.log_joint, batches, members)


def pass_over_batches(call: Call, guide: AutoGaussian, batches: Iterable[Any]) -> DataLogJoint:
    """The log joint of all rows of batches that are arguments of the model."""
    check_batches(batches, 1)
    sizes = [rows_of(batch) for batch in batches]
    check_batches(batches, sum(sizes))

    def with_rows(batch: Any) -> Call:
        if isinstance(batch, Mapping):
            return call._replace(kwargs={**batch, **call.kwargs})
        return call._replace(args=(*(batch if isinstance(batch, tuple | list) else (batch,)), *call.args))

    def on(batch: Any) -> ModelLogJoint:
        _, args, kwargs = with_rows(batch)
        return rows.on(*args, **kwargs)

    def log_likelihood(theta: Tensor, batch: Any) -> Tensor:
        return without_jacobian(on(batch), theta)

    first = next(iter(batches))
    whole = with_rows(first)
    prior, rows, _ = _portions(whole, guide.setup(*whole.args, **whole.kwargs), None)
    for number, batch in enumerate(batches, 1):
        on(batch).validate(f"at its initial point, on batch {number}")
    if sizes[0] > 1 and (found := sums_that_differ(log_likelihood, prior.initial[None], first)):
        raise InputError(
            f"the observed sites must be a sum over the rows of a batch; a batch gives {found[0]:.6g}, its two halves "
            f"together {found[1]:.6g}. Observe every row in a plate, pyro.plate(name, num_data, "
            "subsample_size=len(y)), without poutine.scale and without pyro.factor outside it."
        )
    return DataLogJoint(log_likelihood, prior.log_joint, batches, sum(sizes))


def _portions(call: Call, guide: AutoGaussian, plate: str | None) -> tuple[ModelLogJoint, ModelLogJoint, Portion]:
    """The log joint without rows, that of the rows alone, and the messenger that says which rows."""
    portion = Portion(True, plate)
    prior = guide.density(*call._replace(model=Portion(False, plate)(call.model)))
    rows = guide.density(*call._replace(model=portion(call.model)))
    if rows.enumerates:
        raise InputError(
            "fit_guide does not sum out discrete sites in a model whose rows come in batches. Pass all data, or take "
            "the steps of NaturalSVI."
        )
    for density in (prior, rows):
        density.comparable = True  # every run sees the rows that it is given
        density.check_comparable("fit_guide")
    return prior, rows, portion


def without_jacobian(density: ModelLogJoint, theta: Tensor) -> Tensor:
    """The log joint without log|∂x/∂θ|, which goes with the prior."""
    return density.log_joint(theta) - density.layout.constrained(theta)[1].to(theta.dtype)


@dataclass(frozen=True, eq=False)
class Centred:
    """A Pyro model whose location-scale sites have a weight of centring; `centred` makes one.

    Called with the arguments of the model it is a model itself, in which such a site b is ``b_decentered`` with b as a
    function of it: `Predictive` gives both.

    Attributes:
        model: the model as it is written.
        weights: of each site that is rewritten, of its shape: 1 as it is written, 0 not centred.
        elbos: that were reached, in nats, by the name of the weights.

    >>> print(Centred(print, {"b": torch.zeros(2)}, {"as written": -3.0, "not centred": -2.5}))
    b: weight 0.00 to 0.00
    ELBO -3.00 as written, -2.50 not centred
    """

    model: Callable[..., Any]
    weights: Mapping[str, Tensor]
    elbos: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model in the other coordinates."""
        config: Any = {name: LocScaleReparam(weight) for name, weight in self.weights.items()}
        return poutine.reparam(self.model, config)(*args, **kwargs)

    def __str__(self) -> str:
        lines = [f"{name}: weight {float(w.min()):.2f} to {float(w.max()):.2f}" for name, w in self.weights.items()]
        elbos = ", ".join(f"{value:.2f} {name}" for name, value in self.elbos.items())
        return "\n".join([*(lines or ["every site as written"]), f"ELBO {elbos}"])


def centred(
    model: Callable[..., Any],
    *args: Any,
    guide: Callable[..., AutoGaussian] = AutoGaussian,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Centred:
    """Write the location-scale sites of a model in the coordinates in which a Gaussian comes nearest to the posterior.

    Sites whose location or scale depends on other latents are looked at.  The model is fitted as it is written, with
    none of them centred, and with the weights 1 - s⁻²/h by the curvature h at the better of these two fits; what has
    the largest ELBO is returned.  All three have the same posterior of the sites of the model.

    Args:
        model: a Pyro model, as for `fit_guide`.
        args, kwargs: the arguments of the model.
        guide: makes a guide of a model.
        options: of the three fits, keywords of `torchngvi.fit`; their tolerance is 0.3 by default.

    Returns:
        The model, to be fitted by a guide of its own, with the weights and the three ELBOs.

    Raises:
        InputError: a model without such sites; as `fit_guide`.

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> _ = torch.manual_seed(0)
    >>> def model(y):
    ...     tau = pyro.sample("tau", dist.LogNormal(0.0, torch.tensor(1.0).double()))
    ...     with pyro.plate("groups", len(y)):
    ...         b = pyro.sample("b", dist.Normal(0.0, tau))
    ...         pyro.sample("y", dist.Normal(b, 3.0), obs=y)
    >>> y = torch.tensor([1.0, -2.0, 0.5]).double()
    >>> better = centred(model, y)
    >>> bool(better.weights["b"].max() < 0.5)  # the data say little of b
    True
    >>> result = fit_guide(better, AutoGaussian(better), y, options={"progress": False})
    """
    if options is not None:
        read_instance("options", options, Mapping, "are keywords of torchngvi.fit, such as {'tolerance': 0.1}, or None")
    density = ModelLogJoint(model, args, kwargs)
    names = location_scale(density)
    if not names:
        raise InputError(
            "the model has no latent site of a location-scale family whose location or scale is a latent too, or "
            "LocScaleReparam has rewritten them: there is nothing to centre."
        )
    # with a tolerance of which half the square is as many nats
    chosen = {"progress": False, "examine": False, "tolerance": 0.3, **(options or {})}
    shapes = {name: density.initial.new_zeros(density.layout.shapes[name]) for name in names}
    tried: dict[str, tuple[float, Centred, AutoGaussian]] = {}

    def attempt(word: str, weights: Mapping[str, Tensor]) -> None:
        candidate = Centred(model, weights)
        fitted = guide(candidate)
        tried[word] = -fit_guide(candidate, fitted, *args, options=chosen, **kwargs).loss, candidate, fitted

    attempt("as written", {})
    attempt("not centred", shapes)
    _, candidate, fitted = max(tried.values(), key=lambda each: each[0])
    own = fitted.density(candidate, args, kwargs)
    nodes: Any = own.trace(own.unpack(fitted.posterior.mean)).nodes  # with the values of the sites as they are written
    theta = density.pack({site.name: nodes[site.name]["value"] for site in density.layout.sites}).detach()
    attempt("by curvature", _by_curvature(density, names, theta))
    elbos = {word: elbo for word, (elbo, _, _) in tried.items()}
    best = max(elbos, key=lambda word: elbos[word] + 0.05 * (word == "as written"))  # nats: the noise of an ELBO
    return Centred(model, tried[best][1].weights, elbos)


def _by_curvature(density: ModelLogJoint, names: list[str], theta: Tensor, chunk: int = 256) -> dict[str, Tensor]:
    """The weights 1 - s⁻²/h at θ (D,)."""
    # chunk: copies of θ in one call
    trace, weights = density.trace(density.unpack(theta)), {}
    for site in density.layout.sites:
        if site.name not in names:
            continue
        columns = torch.arange(site.where.start, site.where.stop, device=theta.device)
        directions = torch.nn.functional.one_hot(columns, density.dim).to(theta)
        h = mean_hessian_products(density, theta[None], directions, chunk)[torch.arange(len(columns)), columns]
        node: Any = trace.nodes[site.name]
        prior = unwrapped(node["fn"]).scale.detach().pow(-2).expand(site.shape)
        weight = 1 - prior / h.reshape(site.shape)
        weights[site.name] = weight.nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0)
    return weights
