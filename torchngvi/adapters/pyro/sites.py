"""The sites of a Pyro model: which of them make up θ, where, and what a Gaussian over one fixed θ cannot stand for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions import Delta
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import Transform, biject_to

from torchngvi.adapters.pyro.missing import idle_of, is_missing, standing_alone
from torchngvi.adapters.pyro.starting import listed
from torchngvi.arguments import shown
from torchngvi.errors import InputError

Values = dict[str, Tensor]  # constrained, by the name of the site


@dataclass(frozen=True)
class Site:
    """The place of a latent site in θ, with the map to its support."""

    name: str
    transform: Transform
    shape: torch.Size  # of its value
    free: torch.Size  # of its unconstrained value
    batch_dims: int  # of its plates
    where: slice
    idle: Tensor | None = None  # which of the unconstrained values stand for rows that are observed, (*free,)


class Layout:
    """The places of the latent sites in θ: one after another, in the order of the trace, as AutoContinuous has them."""

    def __init__(self, trace: Trace, order: Tensor | None = None) -> None:
        self.sites: list[Site] = []
        self.dim = 0
        for site in latents(trace):
            transform, value = biject_to(site["fn"].support), site["value"]
            free = transform.inv(value).shape
            where = slice(self.dim, self.dim + math.prod(free))
            dims = value.ndim - site["fn"].event_dim
            self.sites.append(Site(site["name"], transform, value.shape, free, dims, where, idle_of(site, free)))
            self.dim = where.stop
        if order is not None and sorted(order.flatten().tolist() if not order.is_meta else ()) != [*range(self.dim)]:
            raise InputError(f"order must have each of the {self.dim} coordinates once; got {shown(order)}.")
        self.order, self.back = order, None if order is None else torch.argsort(order)
        self.shapes = {site.name: site.shape for site in self.sites}

    def by_site(self, theta: Tensor) -> Tensor:
        """θ (*sample, D) in the order of the sites."""
        if self.back is None:
            return theta
        if self.back.device != theta.device:  # once
            self.back = self.back.to(theta.device)
        return theta[..., self.back]

    def constrained(self, theta: Tensor, nesting: int = 0) -> tuple[Values, Tensor]:
        """The constrained values of the latent sites at θ."""
        theta, sample, values = self.by_site(theta), theta.shape[:-1], {}
        log_jacobian = theta.new_zeros(sample)
        for site in self.sites:
            u = theta[..., site.where].reshape(sample + site.free)
            x = site.transform(u)
            each = site.transform.log_abs_det_jacobian(u, x)
            each = each if site.idle is None else standing_alone(u, each, site.idle)
            log_jacobian = log_jacobian + each.reshape(*sample, -1).sum(-1)
            values[site.name] = x.reshape(sample + (1,) * (nesting - site.batch_dims) + site.shape)
        return values, log_jacobian

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
        return theta if self.order is None else theta[..., self.order.to(theta.device)]


class Conditioned(Messenger):
    """A messenger that gives latent sites their values; random subsamples are drawn once and kept."""

    def __init__(
        self,
        values: Values,
        shapes: Mapping[str, torch.Size],  # of the sites in θ
        kept: dict[str, Tensor],  # indices, by the name of the plate
    ) -> None:
        super().__init__()
        self.values, self.shapes, self.kept = values, shapes, kept
        self.met: set[str] = set()
        self.unknown: list[str] = []  # latent sites without a value

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if site_is_subsample(msg):
            self._keep(msg)
        elif name in self.values:
            check_shape(name, msg["fn"], self.values[name], self.shapes[name])
            msg["value"], msg["is_observed"] = self.values[name], True
            self.met.add(name)
        elif not (msg["is_observed"] or is_enumerable(msg)):
            self.unknown.append(name)

    def _keep(self, msg: Any) -> None:
        fn = msg["fn"]
        if msg["value"] is None and fn.subsample_size is not None and fn.subsample_size < fn.size:
            if msg["name"] not in self.kept:
                self.kept[msg["name"]] = fn.sample()
            msg["value"] = self.kept[msg["name"]]

    def check(self) -> None:
        """Check after a run that each site was met, and no other."""
        moved = [name for name in self.values if name not in self.met] + self.unknown
        if moved:
            raise InputError(
                f"the model must have the same latent sites in each run; {listed(moved)} came or went. "
                "Draw every site in every run, and choose between them with torch.where or a mask."
            )


class Scored(Conditioned):
    """`Conditioned`, which keeps the log probabilities of all sites as well: cheaper than a trace, for values alone."""

    def __init__(self, values: Values, shapes: Mapping[str, torch.Size], kept: dict[str, Tensor]) -> None:
        super().__init__(values, shapes, kept)
        self.log_probs: list[Tensor] = []

    def _pyro_post_sample(self, msg: Any) -> None:
        if not site_is_subsample(msg):
            log_prob = msg["fn"].log_prob(msg["value"], *msg["args"], **msg["kwargs"])
            self.log_probs.append(scale_and_mask(log_prob, msg["scale"], msg["mask"]))


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


def latents_of(trace: Trace) -> list[Any]:
    """The latent sites of a trace but those enumerated: the continuous ones, and discrete ones that are not marked."""
    return [site for site in random_sites(trace) if not site["is_observed"] and not is_enumerated(site)]


def latents(trace: Trace) -> list[Any]:
    """The sites of a trace that make up θ, after a check that a Gaussian can stand for them."""
    check_latents(trace)
    found = latents_of(trace)
    if not found:
        sites = random_sites(trace)
        seen = [f"{site['name']} ({'enumerated' if is_enumerated(site) else 'observed'})" for site in sites]
        raise InputError(
            "the model has no continuous latent site, so that there is nothing to fit: "
            f"its sample sites are {listed(seen) or 'none'}."
        )
    return found


def check_shape(
    name: str,
    fn: Any,  # the distribution of a latent site in this run
    value: Tensor,  # (*sample, 1, .., *shape)
    shape: torch.Size,  # of the site in θ
) -> None:
    """Check that a latent site is as large in this run as where θ was laid out."""
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


def check_latents(trace: Trace) -> None:
    """Check that a Gaussian over one fixed vector can stand for the latent sites of a trace."""
    for site in random_sites(trace):
        if not site["is_observed"]:
            _check_latent(site["name"], site)


def _check_latent(name: str, site: Any) -> None:
    fn = site["fn"]
    if is_enumerable(site):
        if site["infer"]["enumerate"] != "parallel":
            raise InputError(
                f"the latent site {name!r} is marked for {site['infer']['enumerate']} enumeration; only parallel "
                "enumeration is summed out. Use config_enumerate(model)."
            )
        return
    if fn.support.is_discrete and is_missing(site):
        raise InputError(
            f"the rows of {name.removesuffix('_unobserved')!r} that obs_mask= takes for missing are discrete latents, "
            f"{name!r}, and a Gaussian cannot stand for them. Leave them out: give the site under "
            "poutine.mask(mask=seen), without obs_mask."
        )
    if fn.support.is_discrete:
        raise InputError(
            f"the latent site {name!r} is discrete, and a Gaussian cannot stand for it. Sum it out, with "
            "config_enumerate(model) and TraceEnum_ELBO (https://pyro.ai/examples/enumeration.html), or hide it from "
            "the guide with poutine.block."
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
        if is_subsampled(frame):
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
