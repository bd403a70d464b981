"""Pyro's own validation of a model, before a fit: what `pyro.infer.SVI` refuses at a step is refused here.

The many evaluations of a fit run without these checks, since some of them draw at once what Pyro validates draw by
draw.  So the model runs as Pyro's losses run it, under the setting of `pyro.enable_validation`, at the start of the
fit and at draws about it; a model that was validated there and is given other data is validated again.
"""

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Delta
from pyro.distributions import is_validation_enabled as checks_distributions
from pyro.infer.util import is_validation_enabled as checks_inference
from pyro.poutine.trace_struct import Trace
from pyro.util import check_site_shape

from torchngvi.adapters.pyro.layout import random_sites
from torchngvi.arguments import shown
from torchngvi.errors import InputError
from torchngvi.messages import listed

_UNSUITED = (TypeError, RuntimeError, IndexError, AttributeError)  # of observations of another kind


def scored(trace: Trace) -> None:
    """Compute the log probabilities of a trace."""
    try:
        trace.compute_log_prob()
    except _UNSUITED as error:
        for site in random_sites(trace):
            if site["is_observed"]:
                _check_observations(site, error)
        raise


def _check_observations(site: Any, cause: Exception) -> None:
    """Check that the distribution of a site can take its observations."""
    try:
        site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"])
    except _UNSUITED:
        law = type(getattr(site["fn"], "base_dist", site["fn"])).__name__
        raise InputError(
            f"the distribution {law} of the site {site['name']!r} cannot take its observations, {shown(site['value'])} "
            f"({type(cause).__name__}: {str(cause).splitlines()[0]}). Give a tensor of the dtype of the "
            "parameters, y.double() or y.float(), or for classes whole numbers from 0."
        ) from cause


def warn_of_sites(trace: Trace, latents: Collection[str], given: bool) -> None:
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
        if fixed or not isinstance(value, torch.Tensor):
            continue
        law = getattr(fn, "log_factor", None)
        if law is None and value.numel() == 1:  # one number for all members is a way to write an observation
            continue
        own = value.shape[: max(value.dim() - fn.event_dim, 0)] if law is None else law.shape
        for frame in site["cond_indep_stack"]:
            if not frame.vectorized or frame.size < 2:
                continue
            stands = len(own) >= -frame.dim and own[frame.dim] > 1
            if stands and (law is None or law.stride(frame.dim)):
                continue
            what = "the factor" if law is not None else "the observation"
            warnings.warn(
                f"the plate {frame.name!r} repeats {what} of the site {site['name']!r}, of shape "
                f"{tuple(own if law is not None else value.shape)}, {frame.size} times: it counts so often. Give one "
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
        raise InputError(
            f"Pyro's validation refuses the model {where}:\n{found}\n"
            "A fit would go on from a density that is not the one meant. Correct the model or its data; "
            "pyro.enable_validation(False) switches these checks off, here as in Pyro."
        )


@torch.no_grad()
def refusals(runs: Mapping[str, tuple[Callable[[], Trace], int]]) -> str | None:
    """Run a model at draws of its latents, and count the draws at which it violates a constraint of a parameter."""
    for source, (run, draws) in runs.items():
        found = []
        with poutine.block(), torch.random.fork_rng():
            torch.manual_seed(0)
            for _ in range(draws):
                try:
                    found.append(refusal(run, math.inf))
                except Exception:  # far away a model need not run
                    found.append(None)
        breached = [each for each in found if each and "Expected parameter" in each and "nan" not in each]
        if breached:
            words = " ".join(breached[0].split())
            return f"Pyro's validation refuses the model at {len(breached)} of {draws} draws from {source}: {words}"
    return None
