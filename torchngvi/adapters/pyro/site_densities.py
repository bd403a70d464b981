"""The density of each site of a Pyro model as a factor of the latent sites that it reads.

Pyro's record of dependencies (`pyro.infer.inspect.get_dependencies`) says which latents a site reads; its log density
with its scale and mask, at draws of these that stand on the left of all plates, is a `torchngvi.models.SiteFactor`.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions import Delta
from pyro.distributions.util import scale_and_mask
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.infer.inspect import get_dependencies
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from torchngvi.adapters.pyro.location_scale import unwrapped
from torchngvi.adapters.pyro.sites import check_size, is_subsampled, random_sites
from torchngvi.adapters.pyro.starting import start
from torchngvi.adapters.pyro.validation import validate
from torchngvi.errors import InputError
from torchngvi.models import SiteFactor
from torchngvi.posteriors import Product

_SAME = 1e-4  # relative error at which two values of one density differ


class Call(NamedTuple):
    """A model with its arguments, and a trace of one run."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    trace: Trace
    reads: Mapping[str, tuple[str, ...]]  # the latents that the density of a site reads, by site
    nesting: int  # dimensions of the plates, from the right


def read(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], init_loc_fn: Callable[..., Tensor]
) -> Call:
    """Run a model once, and follow what its sites read."""
    met = pyro.poutine.trace(InitMessenger(partial(start, init_loc_fn))(model))
    with pyro.validation_enabled(False), torch.no_grad():
        trace = pyro.poutine.block(met.get_trace)(*args, **kwargs)
        for site in random_sites(trace):
            for frame in site["cond_indep_stack"]:
                _check_plate(site["name"], frame)
        try:
            record: Any = get_dependencies(met, args, kwargs)["prior_dependencies"]
        except Exception as error:  # whatever a model does with a tensor that is no plain one
            line = str(error).splitlines()[0] if str(error) else ""
            raise InputError(
                f"the dependencies of the sites could not be followed ({type(error).__name__}: {line}). Fit the model "
                "with AutoGaussian."
            ) from error
    sites = [site for site in random_sites(trace) if not isinstance(unwrapped(site["fn"]), Delta)]
    latents = [site["name"] for site in sites if not site["is_observed"]]
    reads = {
        site["name"]: tuple(name for name in latents if name in record.get(site["name"], ()) or name == site["name"])
        for site in sites
    }
    nesting = max((len(site["fn"].batch_shape) for site in sites), default=0)
    conditioned = pyro.poutine.condition(model, data={site["name"]: site["value"] for site in random_sites(trace)})
    with torch.no_grad():
        validate(
            lambda: pyro.poutine.block(pyro.poutine.trace(conditioned).get_trace)(*args, **kwargs),
            math.inf,
            "at its start",
        )
    return Call(model, args, kwargs, trace, {name: sites for name, sites in reads.items() if sites}, nesting)


def _check_plate(name: str, frame: Any) -> None:
    if not frame.vectorized:
        raise InputError(
            f"the site {name!r} is in the loop over the plate {frame.name!r}. Write it as `with pyro.plate(...)`."
        )
    check_size(frame)
    if is_subsampled(frame):
        raise InputError(
            f"the site {name!r} is in the plate {frame.name!r}, of which {frame.size} of {frame.full_size} members are "
            "subsampled, and AutoProduct fits all of them: run the plate in full, or write the factors of a batch as a "
            "torchngvi.models.FactorGraph."
        )


class _Given(Messenger):
    """A messenger that gives sites their values, and keeps the log density of one of them."""

    def __init__(self, values: Mapping[str, Tensor], wanted: str) -> None:
        super().__init__()
        self.values, self.wanted = values, wanted
        self.log_prob: Tensor | None = None

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.values and not site_is_subsample(msg):
            msg["value"], msg["is_observed"] = self.values[msg["name"]], True

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] == self.wanted:
            log_prob = msg["fn"].log_prob(msg["value"], *msg["args"], **msg["kwargs"])
            self.log_prob = scale_and_mask(log_prob, msg["scale"], msg["mask"])


class SiteDensity:
    """The log density of a site as a function of draws of the latents that it reads."""

    def __init__(self, call: Call, name: str) -> None:
        self.call, self.name, self.sites = call, name, call.reads[name]
        nodes: Any = call.trace.nodes
        self.fixed = {other: nodes[other]["value"] for other in call.reads if not nodes[other]["is_observed"]}
        batch = tuple(nodes[name]["fn"].batch_shape)
        self.plates = (1,) * (call.nesting - len(batch)) + batch

    def at(self, values: Mapping[str, Tensor]) -> Tensor:
        """The log densities at values as the model has them."""
        given = {name: values.get(name, fixed) for name, fixed in self.fixed.items()}
        given = {name: x.to(self.fixed[name].dtype) if _discrete(self.fixed[name]) else x for name, x in given.items()}
        messenger = _Given(given, self.name)
        try:
            with pyro.validation_enabled(False), pyro.poutine.block(), messenger:
                self.call.model(*self.call.args, **self.call.kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            line = str(error).splitlines()[0] if str(error) else ""
            raise InputError(f"{self._refusal()} ({type(error).__name__}: {line}). {_REMEDY}") from error
        assert messenger.log_prob is not None
        return messenger.log_prob

    def __call__(self, *draws: Tensor) -> Tensor:
        """The log densities (S, *plates) at draws of the sites, (S, *plates) or (S, *plates, d)."""
        value = self.at(dict(zip(self.sites, draws, strict=True)))
        try:
            return value.expand(len(draws[0]), *self.plates)
        except RuntimeError as error:
            raise InputError(f"{self._refusal()} (log densities of shape {tuple(value.shape)}). {_REMEDY}") from error

    def _refusal(self) -> str:
        return f"the density of the site {self.name!r} cannot be evaluated at many draws at once"

    def factor(self) -> SiteFactor:
        """The factor."""
        return SiteFactor(self, *self.sites, plates=self.plates)

    def check(self, q: Product) -> None:
        """Check that the site reads member by member, and at two draws of q that many at once are as each alone."""
        for name in self.sites:
            batch = q[name].batch_shape
            if any(n > 1 and m == 1 for n, m in zip(reversed(batch), reversed(self.plates), strict=False)):
                raise InputError(
                    f"the site {self.name!r} joins members of a plate of {name!r}, of shape {tuple(batch)}, which "
                    "AutoProduct takes one by one. Draw them as one vector without a plate, by .to_event(1), or fit "
                    "the model with AutoGaussian."
                )
        draws = {name: q[name].sample(2) for name in self.sites}
        together = self.factor().at(draws, q).detach()
        for k in range(2):
            one = {name: self._plain(x[k], q[name].dim) for name, x in draws.items()}
            alone = float(self.at(one).sum().detach())  # parameters of the model require a gradient
            if abs(alone - float(together[k])) > _SAME * max(abs(alone), 1.0):
                raise InputError(
                    f"{self._refusal()}: it is {float(together[k]):.6g} there and {alone:.6g} alone. {_REMEDY}"
                )

    @staticmethod
    def _plain(x: Tensor, dim: int) -> Tensor:
        return x[..., 0] if dim == 1 else x


_REMEDY = (
    "Write the model so that draws can stand on the left of its plates; what is read by a class, by "
    "pyro.ops.indexing.Vindex(x)[..., z]."
)


def _discrete(value: Tensor) -> bool:
    return not value.is_floating_point()
