"""Where the latents of a Pyro model stand in θ, and runs of the model at given values of them.

Of ``pyro.sample(name, fn, obs=y, obs_mask=mask)`` Pyro makes two sites of all rows, of which ``name_unobserved`` is
latent and masked where a row is observed.  What it holds there is idle: it has no density, and nothing depends on it.
Here it is N(0, 1) in unconstrained space, so that the posterior of all else and the evidence are those of the missing
rows alone.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta
from pyro.distributions.util import scale_and_mask
from pyro.infer.autoguide.initialization import InitMessenger, init_to_median
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import Transform, biject_to, transforms

from torchngvi.arguments import shown
from torchngvi.errors import InputError
from torchngvi.structures import Forest

Values = dict[str, Tensor]  # constrained, by the name of the site


class Call(NamedTuple):
    """A model with its arguments."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def trace(self) -> Trace:
        """A run of the model as a trace."""
        return poutine.trace(self.model).get_trace(*self.args, **self.kwargs)

    def prototype(self, init_loc_fn: Callable[..., Any] = init_to_median) -> Trace:
        """A run at the initial values of the latent sites, unseen by Pyro, and without its checks: we have ours."""
        begun = self._replace(model=InitMessenger(partial(start, init_loc_fn))(self.model))
        with torch.inference_mode(False), torch.no_grad(), pyro.validation_enabled(False), poutine.block():
            return begun.trace()


def listed(names: Iterable[str], most: int = 6) -> str:
    """Names for a sentence: the first six, and how many more there are."""
    names = list(names)
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


# -------------------------------------------------------------------------------- where the sites begin


def start(init_loc_fn: Callable[..., Tensor], site: Any) -> Tensor:
    """The initial value of a site; 0 in unconstrained space for an improper prior, from which nothing can be drawn."""
    fn = site["fn"]
    if fn.support.is_discrete:
        return fn.sample()
    try:
        value = init_loc_fn(site)
    except NotImplementedError:  # an improper prior
        transform = biject_to(fn.support)
        return transform(torch.zeros(transform.inverse_shape(fn.shape())))
    if not isinstance(value, Tensor | Real):
        raise InputError(f"init_loc_fn must give the latent site {site['name']!r} a tensor; got {shown(value)}.")
    shape = fn.shape()
    value = value if isinstance(value, Tensor) else torch.tensor(float(value))
    if value.numel() == shape.numel():  # one number in brackets is one number
        return value.reshape(shape)
    try:
        return value.expand(shape)
    except RuntimeError as error:
        raise InputError(
            f"init_loc_fn gives the latent site {site['name']!r} a value of shape {tuple(value.shape)}, and the model "
            f"has {tuple(shape)} there."
        ) from error


# -------------------------------------------------------------------------------- the layout


class Plate(NamedTuple):
    """A plate of a model, at a dimension counted from the right."""

    name: str
    dim: int
    size: int


@dataclass(frozen=True)
class Site:
    """The place of a latent site in θ, with the map to its support."""

    name: str
    transform: Transform
    shape: torch.Size  # of its value
    free: torch.Size  # of its unconstrained value
    batch_dims: int  # of its plates
    plates: tuple[Plate, ...]  # of more than one member, outermost first
    where: slice  # of the coordinates in the order of the sites
    idle: Tensor | None = None  # which of the unconstrained values stand for rows that are observed, (*free,)

    def by_member(self, plates: tuple[Plate, ...]) -> Tensor:
        """The coordinates for each member of some of its plates, (members, m)."""
        index = torch.arange(self.where.start, self.where.stop, device="cpu").reshape(self.free)
        own = {plate.name: plate.dim for plate in self.plates}
        axes = [self.batch_dims + own.get(plate.name, plate.dim) for plate in plates]
        members = math.prod(plate.size for plate in plates)
        return index.movedim(axes, list(range(len(axes)))).reshape(members, -1)


class Level(NamedTuple):
    """The latents that are local to the members of the same plates: one node of a forest a member."""

    plates: tuple[Plate, ...]  # outermost first; none of what all share
    sites: tuple[str, ...]
    nodes: int
    size: int  # coordinates of a node
    up: int | None  # the level of the members of outer plates


class Layout:
    """The places of the latent sites in θ: one after another, in the order of the trace, as AutoContinuous has them."""

    levels: tuple[Level, ...] = ()
    forest: Forest | None = None  # None for one dense block
    terms: Mapping[str, int] | None = None  # the level of each site, where the log joint is known by member
    reasons: tuple[str, ...] = ()  # in sentences
    call: Any = None  # with which the levels were found

    def __init__(self, trace: Trace, order: Tensor | None = None, local: str | None = None) -> None:
        self.sites: list[Site] = []
        self.dim = 0
        for site in latents(trace, local):
            transform, value = biject_to(site["fn"].support), site["value"]
            free = transform.inv(value).shape
            where = slice(self.dim, self.dim + math.prod(free))
            dims = value.ndim - site["fn"].event_dim
            plates, idle = plates_of(site), _idle(site, free)
            self.sites.append(Site(site["name"], transform, value.shape, free, dims, plates, where, idle))
            self.dim = where.stop
        if order is not None and sorted(order.flatten().tolist() if not order.is_meta else ()) != [*range(self.dim)]:
            raise InputError(f"order must have each of the {self.dim} coordinates once; got {shown(order)}.")
        self.arrange(order)
        self.shapes = {site.name: site.shape for site in self.sites}

    def arrange(self, order: Tensor | None, of_theta: bool = True) -> None:
        """Take the coordinates of the forest, and those of θ, in another order than that of the sites."""
        self.order, self.back = order, torch.argsort(order) if of_theta and order is not None else None

    @property
    def pattern(self) -> Forest:
        """The forest with its nodes at their places in the order of the sites."""
        assert self.forest is not None
        assert self.order is not None
        return Forest(self.forest.parents, self.forest.sizes, tuple(self.order.tolist()))

    @property
    def apart(self) -> list[str]:
        """The sites of members of plates that the forest has apart, given what all share."""
        shared = self.forest is not None and self.levels[-1].nodes == 1
        return [name for level in self.levels[:-1] for name in level.sites] if shared else []

    def with_field(self, field: list[Site]) -> "Layout":
        """The same sites in two levels: those of a field, and what they share."""
        other, inside = copy.copy(self), {site.name for site in field}
        parts = field, [site for site in self.sites if site.name not in inside]
        places = [torch.cat([site.by_member(()) for site in part], 1)[0] for part in parts]
        other.arrange(torch.cat(places))
        other.forest = other.terms = None
        other.levels = tuple(
            Level((), tuple(site.name for site in part), 1, len(place), None)
            for part, place in zip(parts, places, strict=True)
        )
        return other

    def __str__(self) -> str:
        lines = [] if self.levels else [f"one dense block of {self.dim} coordinates"]
        for level in self.levels:
            plates = " x ".join(f"{plate.name} ({plate.size})" for plate in reversed(level.plates))
            together = self.forest is None and level is not self.levels[-1]
            alone = "integrated out together" if together else "shared by all"
            where = f"for each member of {plates}" if plates else alone
            lines.append(f"{', '.join(level.sites)}: {level.size} coordinate{'s'[: level.size - 1]} {where}")
        return "\n".join([*lines, *(f"({reason})" for reason in self.reasons)])

    def by_site(self, theta: Tensor) -> Tensor:
        """θ (*sample, D) in the order of the sites."""
        if self.back is None:
            return theta
        if self.back.device != theta.device:  # once
            self.back = self.back.to(theta.device)
        return theta[..., self.back]

    def constrained(self, theta: Tensor, nesting: int = 0) -> tuple[Values, Tensor]:
        """The constrained values of the latent sites at θ, and the log Jacobian."""
        theta, sample, values = self.by_site(theta), theta.shape[:-1], {}
        log_jacobian = theta.new_zeros(sample)
        for site in self.sites:
            u = theta[..., site.where].reshape(sample + site.free)
            x = site.transform(u)
            each = site.transform.log_abs_det_jacobian(u, x)
            each = each if site.idle is None else _alone(u, each, site.idle)
            log_jacobian = log_jacobian + self._summed(site, each, len(sample))
            values[site.name] = x.reshape(sample + (1,) * (nesting - site.batch_dims) + site.shape)
        return values, log_jacobian

    def _summed(self, site: Site, each: Tensor, samples: int) -> Tensor:
        """The log Jacobian of a site, summed over all but the dimensions of samples."""
        return each.reshape(*each.shape[:samples], -1).sum(-1)

    def unconstrained(self, values: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `constrained`."""
        missing = [site.name for site in self.sites if site.name not in values]
        if missing:
            raise InputError(f"a value is needed for each latent site of the model; got none for {listed(missing)}.")
        parts = []
        for site in self.sites:
            value = values[site.name]
            sample = value.shape[: value.ndim - len(site.shape)]
            parts.append(site.transform.inv(value).reshape(*sample, -1))
        theta = torch.cat(parts, -1)
        return theta if self.order is None or self.back is None else theta[..., self.order.to(theta.device)]


def coordinate_names(sites: list[Site]) -> list[str]:
    """Name the coordinates of θ in the order of the sites: "mu", "log tau", "theta[0, 3]"."""
    names = []
    for site in sites:
        name = f"{_scale(site.transform)}{site.name}"
        indices = itertools.product(*map(range, site.free))
        names += [f"{name}[{', '.join(map(str, index))}]" if index else name for index in indices]
    return names


def _scale(transform: Transform) -> str:
    """On which scale θ is, in a word before the name of the site."""
    while isinstance(transform, transforms.IndependentTransform):
        transform = transform.base_transform
    parts = transform.parts if isinstance(transform, transforms.ComposeTransform) else [transform]
    parts = [part for part in parts if not (isinstance(part, transforms.AffineTransform) and _is_identity(part))]
    if not parts:
        return ""
    return "log " if len(parts) == 1 and isinstance(parts[0], transforms.ExpTransform) else "unconstrained "


def _is_identity(transform: transforms.AffineTransform) -> bool:
    """Whether a transform changes nothing, such as the shift of a bound at zero."""
    return bool((torch.as_tensor(transform.loc) == 0).all() & (torch.as_tensor(transform.scale) == 1).all())


def _idle(site: Any, free: torch.Size) -> Tensor | None:
    """Which unconstrained values of a latent site, of the shape free, are idle."""
    if not _is_missing(site):
        return None
    mask = site["mask"].expand(site["fn"].batch_shape)
    return ~mask.reshape(*mask.shape, *(1,) * (len(free) - mask.ndim)).expand(free)


def _alone(u: Tensor, log_jacobian: Tensor, idle: Tensor) -> Tensor:
    """The log Jacobian of a site (*sample, *batch), with log N(u | 0, 1) in its place for what is idle."""
    alone = -0.5 * (u.square() + math.log(2 * math.pi))
    members = log_jacobian.shape[u.ndim - idle.ndim :]
    return torch.where(idle.reshape(*members, -1)[..., 0], alone.reshape(*log_jacobian.shape, -1).sum(-1), log_jacobian)


# -------------------------------------------------------------------------------- a run at given values


class Conditioned(Messenger):
    """A messenger that gives latent sites their values, of known shapes; random subsamples are drawn once and kept."""

    def __init__(
        self,
        values: Values,
        shapes: Mapping[str, torch.Size],
        kept: dict[str, Tensor],
        wanted: Callable[[str], bool] | None = None,  # the sites whose log probabilities `Scored` keeps; None for all
    ) -> None:
        super().__init__()
        self.values, self.shapes, self.kept, self.wanted = values, shapes, kept, wanted
        self.met: set[str] = set()
        self.unknown: list[str] = []  # latent sites without a value
        self.log_probs: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if site_is_subsample(msg):
            fn = msg["fn"]
            if msg["value"] is None and fn.subsample_size is not None and fn.subsample_size < fn.size:
                if name not in self.kept:
                    self.kept[name] = fn.sample()
                msg["value"] = self.kept[name]
        elif name in self.values:
            if name in self.shapes:
                _check_shape(name, msg["fn"], self.values[name], self.shapes[name])
            msg["value"], msg["is_observed"] = self.values[name], True
            self.met.add(name)
        elif not (msg["is_observed"] or is_enumerable(msg)):
            self.unknown.append(name)

    def check(self) -> None:
        """Check after a run that each site was met, and no other."""
        moved = [name for name in self.values if name not in self.met] + self.unknown
        if moved:
            raise InputError(
                f"the model must have the same latent sites in each run; {listed(moved)} came or went. "
                "Draw every site in every run, and choose between them with torch.where or a mask."
            )


class Scored(Conditioned):
    """`Conditioned`, which keeps the log probabilities of sites as well: cheaper than a trace, for values alone."""

    def _pyro_post_sample(self, msg: Any) -> None:
        if not site_is_subsample(msg) and (self.wanted is None or self.wanted(msg["name"])):
            log_prob = msg["fn"].log_prob(msg["value"], *msg["args"], **msg["kwargs"])
            self.log_probs[msg["name"]] = self.score(log_prob, msg)

    def score(self, log_prob: Tensor, msg: Any) -> Tensor:
        """The log probability of a site with its scale and mask."""
        scored: Tensor = scale_and_mask(log_prob, msg["scale"], msg["mask"])
        return scored

    def run(self, call: Any) -> dict[str, Tensor]:
        """Run the model of a call with its arguments, and return the log probabilities by site."""
        with pyro.validation_enabled(False), self:
            call.model(*call.args, **call.kwargs)
        self.check()
        return self.log_probs


# -------------------------------------------------------------------------------- the sites of a trace


def plates_of(site: Any) -> tuple[Plate, ...]:
    """The plates of a site of a trace that have more than one member, outermost first."""
    frames = [frame for frame in site["cond_indep_stack"] if frame.vectorized and frame.size > 1]
    return tuple(sorted((Plate(frame.name, frame.dim, frame.size) for frame in frames), key=lambda each: each.dim))


def _is_missing(site: Any) -> bool:
    """Whether a latent site is the missing part of one with ``obs_mask``."""
    return site["name"].endswith("_unobserved") and isinstance(site["mask"], Tensor)


def is_enumerable(site: Any) -> bool:
    """Whether a site of a trace, or a message of Pyro, is discrete and marked for enumeration."""
    return bool(site["infer"].get("enumerate")) and getattr(site["fn"], "has_enumerate_support", False)


def is_enumerated(site: Any) -> bool:
    """Whether a site of a trace is latent and `is_enumerable`."""
    return not site["is_observed"] and is_enumerable(site)


def is_subsampled(frame: Any) -> bool:
    """Whether the plate of a frame in a site's ``cond_indep_stack`` runs over a part of its members."""
    return bool(frame.full_size) and frame.full_size > frame.size


def check_size(frame: Any) -> None:
    """Check that the plate of a latent says how many members it has."""
    if frame.size < 0:
        raise InputError(
            f"the plate {frame.name!r} has no size, and a guide has to know how many members its latents have: write "
            f"pyro.plate({frame.name!r}, n)."
        )


def random_sites(trace: Trace) -> list[Any]:
    """The sites of a trace that have a density, without those of subsampling."""
    return [site for site in trace.nodes.values() if site["type"] == "sample" and not site_is_subsample(site)]


def latents_of(trace: Trace, local: str | None = None) -> list[Any]:
    """The latent sites of a trace but those enumerated, after a check that a Gaussian can stand for them."""
    hidden = [site for site in random_sites(trace) if not site["is_observed"]]
    for site in hidden:
        _check_latent(site["name"], site, local)
    return [site for site in hidden if not is_enumerable(site)]


def latents(trace: Trace, local: str | None = None) -> list[Any]:
    """The latent sites of a trace that make up θ, one at least."""
    found = latents_of(trace, local)
    if not found:
        sites = random_sites(trace)
        seen = [f"{site['name']} ({'enumerated' if is_enumerated(site) else 'observed'})" for site in sites]
        raise InputError(
            "the model has no continuous latent site, so that there is nothing to fit: "
            f"its sample sites are {listed(seen) or 'none'}."
        )
    return found


def _check_shape(name: str, fn: Any, value: Tensor, shape: torch.Size) -> None:
    """Check that a latent site of values (*sample, 1, .., *shape) has the shape of θ under its distribution now."""
    now = fn.shape()
    fits = len(now) <= value.ndim and all(
        mine in (1, its) for mine, its in zip(reversed(now), reversed(value.shape), strict=False)
    )
    if not fits or now[max(0, len(now) - len(shape)) :] != shape:
        comes = tuple(now[value.ndim - len(shape) :] or now)  # without the dimension of draws
        raise InputError(
            f"the latent site {name!r} has shape {tuple(shape)} in the guide and comes with {comes} in this run "
            "of the model: θ has one size. Build another guide for data of another size, or for another model."
        )


def _check_latent(name: str, site: Any, local: str | None) -> None:
    """Check that a Gaussian can stand for a site, which may be in a plate of locals that is subsampled."""
    fn = site["fn"]
    if is_enumerable(site):
        if site["infer"]["enumerate"] != "parallel":
            raise InputError(
                f"the latent site {name!r} is marked for {site['infer']['enumerate']} enumeration; only parallel "
                "enumeration is summed out. Use config_enumerate(model)."
            )
        return
    if fn.support.is_discrete and _is_missing(site):
        raise InputError(
            f"the rows of {name.removesuffix('_unobserved')!r} that obs_mask= takes for missing are discrete latents, "
            f"{name!r}, and a Gaussian cannot stand for them. Leave them out: give the site under "
            "poutine.mask(mask=seen), without obs_mask."
        )
    if fn.support.is_discrete:
        raise InputError(
            f"the latent site {name!r} is discrete, and a Gaussian cannot stand for it. Sum it out, with "
            "config_enumerate(model) and TraceEnum_ELBO (https://pyro.ai/examples/enumeration.html), or hide it from "
            "the guide with poutine.block. If it stands for data, the model has not been given them."
        )
    base = fn
    while hasattr(base, "base_dist"):
        base = base.base_dist
    if isinstance(base, Delta):
        raise InputError(
            f"the latent site {name!r} is drawn from a Delta, which has no density to fit: give it as "
            "pyro.deterministic, or as a number that is no site."
        )
    for frame in site["cond_indep_stack"]:
        check_size(frame)
        if is_subsampled(frame) and frame.name != local:
            raise InputError(
                f"the latent site {name!r} is inside the plate {frame.name!r}, of which {frame.size} of "
                f"{frame.full_size} members are subsampled: θ would have to hold all of them. Fit it with "
                f"AutoLocalGaussian(model, {frame.name!r}), run the plate in full, or move the site out of it."
            )
    try:
        biject_to(fn.support)
    except NotImplementedError as error:
        if "sphere" in repr(fn.support).lower():
            raise InputError(
                f"the latent site {name!r} is on a sphere, which no bijection takes from the real numbers. Draw it "
                f"from a ProjectedNormal, and use poutine.reparam(model, {{{name!r}: ProjectedNormalReparam()}})."
            ) from error
        raise InputError(
            f"the latent site {name!r} has the support {fn.support}, to which no bijection from the real numbers is "
            "known. Register one with torch.distributions.biject_to.register."
        ) from error


def unwrapped(fn: Any) -> Any:
    """The distribution of one element of a site."""
    while isinstance(fn, torch.distributions.Independent):
        fn = fn.base_dist
    return fn
