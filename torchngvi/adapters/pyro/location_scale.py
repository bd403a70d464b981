"""The location-scale sites of a Pyro model whose location or scale depends on other latents."""

from dataclasses import replace
from typing import Any

import torch
from torch.distributions import Independent, constraints

from torchngvi.adapters.pyro.density import ModelLogJoint
from torchngvi.fitting.records import FitResult

_DONE = "_decentered"  # the end of the names that LocScaleReparam gives


def unwrapped(fn: Any) -> Any:
    """The distribution of one element of a site."""
    while isinstance(fn, Independent):
        fn = fn.base_dist
    return fn


def location_scale(density: ModelLogJoint) -> list[str]:
    """Name the latent sites of location-scale families whose location or scale depends on other latents.

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     tau = pyro.sample("tau", dist.HalfNormal(1.0))
    ...     pyro.sample("b", dist.Normal(0.0, tau))
    >>> location_scale(ModelLogJoint(model))
    ['b']
    """
    with torch.enable_grad():
        values = density.layout.constrained(density.initial)[0]
        trace = density.trace({name: value.detach().clone().requires_grad_() for name, value in values.items()})
    found = []
    for site in density.layout.sites:
        node: Any = trace.nodes[site.name]
        fn = unwrapped(node["fn"])
        known = getattr(fn, "arg_constraints", {})
        if site.name.endswith(_DONE) or not {"loc", "scale"} <= set(known) or fn.support is not constraints.real:
            continue
        if fn.loc.requires_grad or fn.scale.requires_grad:
            found.append(site.name)
    return found


def advised(result: FitResult, density: ModelLogJoint) -> FitResult:
    """Name the sites that `centred` would look at, where a Gaussian does not fit or is about right."""
    verdict = result.examination
    if verdict is None or not verdict.next or verdict.modes or not (names := location_scale(density)):
        return result
    clause = f"other coordinates of {', '.join(names)}, which torchngvi.adapters.pyro.centred(model, ...) finds"
    return replace(result, examination=replace(verdict, coordinates=clause))
