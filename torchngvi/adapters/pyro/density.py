"""The log joint of a Pyro model in unconstrained space, for all draws at once.

    log p(θ) = Σ_sites scale · mask · log p(x_site | parents) + Σ_latents log|∂x/∂θ|,        x = biject_to(support)(θ)

as `pyro.infer.mcmc.util.initialize_model` has it for one θ, and Trace_ELBO with an AutoContinuous guide (Kucukelbir et
al. 2017, Eq 5); the log Jacobian is neither scaled nor masked.  Discrete sites that are marked for parallel
enumeration are summed out.

All draws are evaluated in one run of the model, their dimension on the left of those of its plates, if the model
broadcasts over it; else one θ at a time under `torch.func.vmap`; else so with every tensor that the model makes one
of each draw, into which it may write; else one after another.  Which of them is right is not assumed but tried, at
three points, against the last.

What `pyro.infer.SVI` refuses at a step is refused before a fit.  The many evaluations run without these checks, since
some draw at once what Pyro validates draw by draw; so the model runs as Pyro's losses run it, under the setting of
`pyro.enable_validation`, at the start and at draws about it, and again where it is given other data.
"""

import functools
import math
import string
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast, final

import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta
from pyro.distributions import is_validation_enabled as checks_distributions
from pyro.infer.util import is_validation_enabled as checks_inference
from pyro.ops import packed
from pyro.ops.contract import contract_to_tensor
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from pyro.util import check_site_shape
from torch import Tensor
from torch.distributions import biject_to
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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

Batched = Callable[[Tensor], Tensor]  # (S, D) -> (S,)


class Runs(ABC):
    """A log joint by runs of a model at given values of its latents: what the ways of many draws ask of it."""

    layout: Layout
    nesting: int  # dimensions of the plates
    enumerates: bool

    @abstractmethod
    def scored(self, values: Values) -> list[Tensor]:
        """The log probabilities of a run of the model at these values, without enumerated sites."""

    def trace(self, values: Values, plate: pyro.plate | None = None) -> Trace:
        """The run as a trace, with log probabilities at its sites, where sites are enumerated."""
        raise NotImplementedError

    def one(self, theta: Tensor) -> Tensor:
        """The log joint of one θ, (D,) -> ()."""
        values, log_jacobian = self.layout.constrained(theta)
        if self.enumerates:
            return log_jacobian + Factors.of(self.trace(values)).sum_out(frozenset())
        return log_jacobian + sum(log_prob.sum() for log_prob in self.scored(values))


_PLATE = "_torchngvi_draws"
_MAKERS = ("zeros", "empty", "ones", "full", "clone")  # of tensors that a model may write into


class Largest(TorchDispatchMode):
    """A context that counts the numbers of the largest floating tensor that is made in it, 1 at least."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, and look at what it makes; a view is not made."""
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.is_floating_point() and not func.is_view:
            self.numbers = max(self.numbers, made.numel())
        return made


def draws_at_once(largest: int, like: Tensor, most: int, cached: int = 2**21, fewest: int = 16) -> int:
    """The number of draws in one call of a log joint, so that its largest tensors stay in the cache of a CPU."""
    # cached: bytes of the largest tensor of a call on a CPU: beyond its cache a draw takes two to three times as long
    # fewest: draws of a call, or what Pyro takes for each run shows
    if like.device.type != "cpu":
        return most
    return min(max(cached // (largest * like.element_size()), fewest), most)


def by_broadcasting(runs: Runs, theta: Tensor) -> Tensor:
    """All draws in one run, the dimension of draws on the left of those of the plates."""
    if runs.enumerates:
        return _by_plate(runs, theta)
    count = len(theta)
    values, log_jacobian = runs.layout.constrained(theta, runs.nesting)
    terms = [log_jacobian[:, None]]
    for log_prob in runs.scored(values):
        if log_prob.ndim <= runs.nesting:  # it does not depend on θ
            log_prob = log_prob.sum().expand(count)
        terms.append(log_prob.reshape(count, -1))
    return torch.cat(terms, -1).sum(-1)


def _by_plate(runs: Runs, theta: Tensor) -> Tensor:
    """The same in an outermost plate, which Pyro's contraction of enumerated sites asks for."""
    count = len(theta)
    if count == 1:  # the packing of factors drops dimensions of size one
        return by_loop(runs, theta)
    values, log_jacobian = runs.layout.constrained(theta, runs.nesting)
    with pyro.validation_enabled(False):
        plate = pyro.plate(_PLATE, count, dim=-1 - runs.nesting)
    trace = runs.trace(values, plate)
    return log_jacobian + Factors.of(trace).sum_out(frozenset(trace.plate_to_symbol[_PLATE]))


def by_vmap(runs: Runs, theta: Tensor, within: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext) -> Tensor:
    """One θ at a time under `torch.func.vmap`, each ``within`` a context of its own."""
    seen: list[Factors] = []

    def one(each: Tensor) -> Tensor:
        with within(each):
            return runs.one(each)

    def factors(each: Tensor) -> tuple[Tensor, list[Tensor]]:
        values, log_jacobian = runs.layout.constrained(each)
        with within(each):
            seen.append(Factors.of(runs.trace(values)))
        return log_jacobian, [factor.log_prob for factor in seen[-1].factors]

    if not runs.enumerates:
        return torch.func.vmap(one, randomness="same")(theta)
    # vmap cannot take Pyro's contraction, which is made for all draws, as of one plate
    log_jacobian, log_probs = torch.func.vmap(factors, randomness="same")(theta)
    return log_jacobian + seen[-1].for_all_draws(log_probs)


def by_loop(runs: Runs, theta: Tensor) -> Tensor:
    """One θ after another."""
    return torch.stack([runs.one(each) for each in theta.unbind()])


class _ForEachDraw(TorchFunctionMode):
    """New tensors are those of each draw, so that what depends on the draw can be written into them."""

    def __init__(self, theta: Tensor) -> None:
        super().__init__()
        self.zero = torch.zeros_like(theta[0])

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").removeprefix("new_").removesuffix("_like")
        return made + self.zero.to(made.dtype) if name in _MAKERS and made.is_floating_point() else made


def points_about(theta: Tensor, generator: torch.Generator, count: int = 3, spread: float = 0.1) -> Tensor:
    """Draw the points (count, D) about a start (D,) at which the ways are compared."""
    return theta + spread * torch.randn(count, len(theta), generator=generator, dtype=torch.float64).to(theta)


def best_way(runs: Runs, points: Tensor) -> tuple[str, Batched]:
    """The first way that agrees with the loop, in value and gradient, at `points_about` a start."""
    reasons: list[str] = []
    loop = functools.partial(by_loop, runs)
    try:
        truth = _derivative(loop, points)
    except RuntimeError as error:
        with torch.no_grad():
            loop(points)  # an error that is not of the derivative says itself
        raise InputError(
            "the log density of the model has no derivative by its latents "
            f"({str(error).splitlines()[0].partition('. ')[0].rstrip('.')}): a guide that follows gradients cannot fit "
            "it. Compute it in torch from the latents on, without .item(), .numpy() and .detach(), or draw by "
            "importance or SMC."
        ) from error
    # the last for models that write into tensors which they make, such as OrderedLogistic and loops over time
    in_place = functools.partial(by_vmap, within=_ForEachDraw)
    for name, function in (("plate", by_broadcasting), ("vmap", by_vmap), ("vmap", in_place)):
        way = functools.partial(function, runs)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answers = [_derivative(way, points), _derivative(way, points[:2])]
        except Exception as error:  # whatever a model does that was not written for a batch
            reasons.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            continue
        if all(_agree(answer, truth) for answer in answers):
            return name, way
        reasons.append("other values")
    _check_slope(loop, points, truth)
    warnings.warn(
        "the model is run for one draw after another, which is slow: it does not broadcast over draws "
        f"({reasons[0]}), and torch.func.vmap cannot take it ({reasons[1]}).",
        stacklevel=5,
    )
    return "loop", loop


@torch.no_grad()
def _check_slope(way: Batched, points: Tensor, truth: tuple[Tensor, Tensor]) -> None:
    """The values may not change otherwise than the derivative says, at all points: what .item() reads has no slope."""
    values, eps = truth[0], torch.finfo(truth[0].dtype).eps
    if not torch.equal(way(points).to(values), values):
        return  # a model that draws
    direction = torch.randn(points.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(points)
    h = eps ** (1 / 3)
    changes = (way(points + h * direction).to(values) - way(points - h * direction).to(values)) / (2 * h)
    slopes = truth[1] @ direction
    noise = 100 * eps * values.abs() / h
    if bool(((changes - slopes).abs() > 0.5 * torch.maximum(changes.abs(), slopes.abs()) + noise).all()):
        raise InputError(
            "the log density of the model has another derivative by its latents than its values have: along one "
            f"direction they change at a rate of {float(changes[0]):.3g} where it is {float(slopes[0]):.3g}. "
            "Compute it in torch from the latents on, without .item(), .numpy() and .detach()."
        )


def _agree(answer: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> bool:
    """Up to rounding: gradients through an ill-conditioned factorisation lose most digits, values few."""
    eps, (values, gradients), count = torch.finfo(truth[0].dtype).eps, truth, len(answer[0])
    largest = float(gradients.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(1.0))
    close = torch.allclose(answer[0], values[:count], rtol=eps**0.6, atol=eps**0.6, equal_nan=True)
    return close and torch.allclose(answer[1], gradients[:count], rtol=0, atol=eps ** (1 / 3) * largest, equal_nan=True)


def _derivative(way: Batched, points: Tensor) -> tuple[Tensor, Tensor]:
    """The values and gradients of the log joint at some points, by one of the ways."""
    with torch.enable_grad():
        leaf = points.clone().requires_grad_()
        values = way(leaf).to(leaf.dtype)
        if values.shape != points.shape[:1]:
            raise ValueError
        (gradient,) = torch.autograd.grad(values.sum(), leaf, allow_unused=True)
    return values.detach(), torch.zeros_like(points) if gradient is None else gradient


# -------------------------------------------------------------------------------- enumerated sites


class Enumerated(EnumMessenger):
    """Pyro's messenger of parallel enumeration, without reading the ``data`` of a value, which vmap forbids."""

    def _pyro_post_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or msg["value"] is None:
            return
        value, dims = msg["value"], msg["infer"].setdefault("_dim_to_id", {})
        shape = value.shape[: value.ndim - msg["fn"].event_dim]
        dims.update(self._param_dims.get(msg["name"], {}))
        self._value_dims[msg["name"]] = {d: i for d, i in dims.items() if len(shape) >= -d and shape[d] > 1}


class Factor(NamedTuple):
    """The log probability of one site, or of one site for all draws."""

    plates: frozenset[str]
    dims: str  # a letter for each of its dimensions
    log_prob: Tensor


@dataclass
class Factors:
    """A trace with enumerated sites as a product of factors, with the letters of the dimensions to sum out."""

    factors: list[Factor]
    summed: frozenset[str]
    scale: Any

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """The factors of a trace."""
        trace.pack_tensors()
        summed = frozenset(trace.symbol_to_dim) - set(trace.plate_to_symbol.values())
        factors, scales = [], []
        for site in random_sites(trace):
            parts: Any = site["packed"]
            log_prob = parts["log_prob"]
            if not summed.isdisjoint(log_prob._pyro_dims):
                scales.append(site["scale"])
                mask = None if is_enumerated(site) else parts["mask"]
                log_prob = packed.scale_and_mask(parts["unscaled_log_prob"], mask=mask)
            frames = [frame for frame in site["cond_indep_stack"] if frame.vectorized]
            plates = frozenset(trace.plate_to_symbol[frame.name] for frame in frames)
            factors.append(Factor(plates, log_prob._pyro_dims, log_prob))
        # the widest dtype: Pyro gives the density of a Delta in the default one, whatever its value
        dtype = functools.reduce(torch.promote_types, (factor.log_prob.dtype for factor in factors))
        factors = [factor._replace(log_prob=factor.log_prob.to(dtype)) for factor in factors]
        for factor in factors:
            factor.log_prob._pyro_dims = factor.dims  # type: ignore[attr-defined]
        return cls(factors, summed, _common(scales))

    def for_all_draws(self, log_probs: list[Tensor]) -> Tensor:
        """The sum for each draw, where the draws are in front of the log probabilities and count as one more plate."""
        known = "".join(factor.dims for factor in self.factors)
        draw = next(letter for letter in string.ascii_letters if letter not in known)
        factors = []
        for (plates, dims, _), log_prob in zip(self.factors, log_probs, strict=True):
            log_prob._pyro_dims = draw + dims  # type: ignore[attr-defined]
            factors.append(Factor(plates | {draw}, draw + dims, log_prob))
        return Factors(factors, self.summed, self.scale).sum_out(frozenset(draw))

    def sum_out(self, draws: frozenset[str]) -> Tensor:
        """Sum out the enumerated dimensions, and add up over plates but that of the draws."""
        inside: OrderedDict[frozenset, list[Tensor]] = OrderedDict()
        outside: OrderedDict[frozenset, list[Tensor]] = OrderedDict()
        for plates, dims, log_prob in self.factors:
            (outside if self.summed.isdisjoint(dims) else inside).setdefault(plates, []).append(log_prob)
        total = contract_to_tensor(outside, set(), target_ordinal=draws) if outside else 0.0
        if not inside:
            return torch.as_tensor(total)
        return self.scale * contract_to_tensor(inside, set(self.summed), target_ordinal=draws) + total


def _common(scales: list[Any]) -> Any:
    """The one scale of all sites that hang together with enumerated ones."""
    if any(isinstance(scale, Tensor) and scale.ndim for scale in scales) or len({float(scale) for scale in scales}) > 1:
        raise InputError(
            "all sites that depend on an enumerated one must have the same scale, one number, since it multiplies the "
            "log of their sum: subsample them by the same plate, or give poutine.scale to all of them."
        )
    return scales[0] if scales else 1.0  # where no enumerated site has more than one value


_UNSUITED = (TypeError, RuntimeError, IndexError, AttributeError)  # of observations of another kind


@final
class ModelLogJoint(Target, Runs):
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
