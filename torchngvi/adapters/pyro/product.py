"""Products of families as a guide: each latent site has the family of its support, and conjugate parts exact steps.

Pyro's record of dependencies (`pyro.infer.inspect.get_dependencies`) says which latents a site reads; its log density
with its scale and mask, at draws of these that stand on the left of all plates, is a `torchngvi.models.SiteFactor`.
"""

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Self

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.initialization import InitMessenger, init_to_median
from pyro.infer.inspect import get_dependencies
from torch import Tensor
from torch.distributions import constraints

from torchngvi.adapters.pyro.density import validate
from torchngvi.adapters.pyro.layout import (
    Call,
    Scored,
    check_size,
    is_subsampled,
    listed,
    random_sites,
    start,
    unwrapped,
)
from torchngvi.arguments import read_callable, read_instance
from torchngvi.errors import InputError
from torchngvi.interfaces import Posterior
from torchngvi.models import FactorGraph, SiteFactor
from torchngvi.posteriors import CholeskyGaussian, Product
from torchngvi.posteriors.flat import Beta, Categorical, Dirichlet, Gamma, InverseGamma

_REMEDY = (
    "Write the model so that draws can stand on the left of its plates; what is read by a class, as one vector "
    ".expand([K]).to_event(1) without a plate, by pyro.ops.indexing.Vindex(x)[..., z]."
)


class Read(NamedTuple):
    """What was read of a model in one run."""

    call: Call
    sites: dict[str, Any]  # that have a density
    latents: dict[str, Any]
    reads: dict[str, tuple[str, ...]]  # the latents that the density of a site reads, by site
    nesting: int  # dimensions of the plates, from the right


def read(call: Call, init_loc_fn: Callable[..., Tensor]) -> Read:
    """Run a model once, and follow what its sites read."""
    trace = call.prototype(init_loc_fn)
    begun = InitMessenger(partial(start, init_loc_fn))(call.model)
    with pyro.validation_enabled(False), torch.no_grad():
        for site in random_sites(trace):
            for frame in site["cond_indep_stack"]:
                _check_plate(site["name"], frame)
        try:
            record: Any = get_dependencies(begun, call.args, call.kwargs)["prior_dependencies"]
        except Exception as error:  # whatever a model does with a tensor that is no plain one
            line = str(error).splitlines()[0] if str(error) else ""
            raise InputError(
                f"the dependencies of the sites could not be followed ({type(error).__name__}: {line}). Fit the model "
                "with AutoGaussian."
            ) from error
    sites = {site["name"]: site for site in random_sites(trace) if not isinstance(unwrapped(site["fn"]), dist.Delta)}
    latents = {name: site for name, site in sites.items() if not site["is_observed"]}
    reads = {name: tuple(one for one in latents if one in record.get(name, ()) or one == name) for name in sites}
    reads = {name: those for name, those in reads.items() if those}
    nesting = max((len(site["fn"].batch_shape) for site in sites.values()), default=0)
    values = {site["name"]: site["value"] for site in random_sites(trace)}
    at_start = call._replace(model=pyro.poutine.condition(call.model, data=values))
    with torch.no_grad():
        validate(pyro.poutine.block(at_start.trace), math.inf, "at its start")
    return Read(call, sites, latents, reads, nesting)


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


class SiteDensity:
    """The log density of a site as a function of draws of the latents that it reads."""

    def __init__(self, found: Read, name: str) -> None:
        self.call, self.name, self.sites = found.call, name, found.reads[name]
        self.fixed = {other: site["value"] for other, site in found.latents.items()}
        batch = tuple(found.sites[name]["fn"].batch_shape)
        self.plates = (1,) * (found.nesting - len(batch)) + batch

    def at(self, values: Mapping[str, Tensor]) -> Tensor:
        """The log densities at values as the model has them."""
        given = {name: values.get(name, fixed) for name, fixed in self.fixed.items()}
        given = {
            name: x if (kind := self.fixed[name].dtype).is_floating_point else x.to(kind) for name, x in given.items()
        }
        messenger = Scored(given, {}, {}, self.name.__eq__)
        try:
            with pyro.validation_enabled(False), pyro.poutine.block(), messenger:
                self.call.model(*self.call.args, **self.call.kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            line = str(error).splitlines()[0] if str(error) else ""
            raise InputError(f"{self._refusal()} ({type(error).__name__}: {line}). {_REMEDY}") from error
        return messenger.log_probs[self.name]

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

    def check(self, q: Product, same: float = 1e-4) -> None:
        """Check that the site reads member by member, and at two draws of q that many at once are as each alone."""
        # same: relative error at which two values of one density differ
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
            one = {name: x[k][..., 0] if q[name].dim == 1 else x[k] for name, x in draws.items()}
            alone = float(self.at(one).sum().detach())  # parameters of the model require a gradient
            if abs(alone - float(together[k])) > same * max(abs(alone), 1.0):
                raise InputError(
                    f"{self._refusal()}: it is {float(together[k]):.6g} there and {alone:.6g} alone. {_REMEDY}"
                )


# -------------------------------------------------------------------------------- the guide


class AutoProduct(AutoGuide):
    """A guide that is a product over the latent sites of a model, each of the family of its support.

    Real numbers and vectors have Gaussians, positive numbers gamma laws (inverse gamma laws where these are conjugate
    and gamma laws are not), probabilities beta laws, shares Dirichlet laws, and classes categorical laws. What is
    conjugate is found from values of the densities, and then fitted by coordinate ascent; the rest by least squares on
    draws. It is fitted by `torchngvi.adapters.pyro.fit_guide`.

    Args:
        model: a Pyro model, whose plates are vectorised and run in full.
        families: for some sites by name, what makes the posterior of the site from its batch shape and its value at
            the start, a function ``(batch_shape, value) -> Posterior``.
        init_loc_fn: a strategy of `pyro.infer.autoguide.initialization`: where the means of the sites begin.

    Raises:
        InputError: a model that is none; on set-up, a site with another support, and as
            `torchngvi.adapters.pyro.product.read`; on use, a guide that was not set up.

    >>> from torchngvi.adapters.pyro import fit_guide
    >>> def model(y):
    ...     rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Poisson(rate), obs=y)
    >>> guide = AutoProduct(model)
    >>> result = fit_guide(model, guide, torch.tensor([3.0, 2.0]), options={"progress": False})
    >>> guide.posterior["rate"].vector.round(decimals=3).tolist()  # Gamma(2 + 5, 1 + 2)
    [7.0, 3.0]
    """

    def __init__(
        self,
        model: Callable[..., Any],
        families: Mapping[str, Callable[[torch.Size, Tensor], Posterior]] | None = None,
        *,
        init_loc_fn: Callable[..., Tensor] = init_to_median,
    ) -> None:
        read_callable("model", model, "is a function or a module that samples")
        read_callable("init_loc_fn", init_loc_fn, "is a strategy such as init_to_median")
        if families is not None:
            read_instance("families", families, Mapping, "are functions that make posteriors, by the names of sites")
        super().__init__(model)
        self._families, self._init_loc_fn = dict(families or {}), init_loc_fn

    def setup(self, *args: Any, **kwargs: Any) -> Self:
        """Run the model with these arguments to find its sites, unless that was done before; returns the guide."""
        if self.prototype_trace is None:
            found = read(Call(self.model, args, kwargs), self._init_loc_fn)
            if not found.latents:
                raise InputError("the model has no latent site, so that there is nothing to fit.")
            unknown = set(self._families) - set(found.latents)
            if unknown:
                raise InputError(f"families= names {listed(sorted(unknown))}, which the model does not sample.")
            kinds = [x.dtype for site in found.latents.values() if (x := site["value"]).is_floating_point()]
            dtype = functools.reduce(torch.promote_types, kinds) if kinds else torch.get_default_dtype()
            q = Product({name: self._made(site, dtype) for name, site in found.latents.items()})
            for name in found.reads:
                SiteDensity(found, name).check(q)
            self._setup_prototype(*args, **kwargs)
            self.q = self._with_inverses(found, q)
        return self

    def _made(self, site: Any, dtype: torch.dtype) -> Posterior:
        """The posterior of a site before the fit."""
        value, made = site["value"].to(dtype), self._families.get(site["name"], partial(_of_support, site))
        return made(value.shape[: value.ndim - site["fn"].event_dim], value)

    def _with_inverses(self, found: Read, q: Product) -> Product:
        """The product with inverse gamma laws where these are conjugate to all factors and gamma laws are not."""
        for name in q.names:
            if name in self._families or not isinstance(q[name], Gamma):
                continue
            own = [site for site, reads in found.reads.items() if name in reads]
            other = Product({each: InverseGamma(q[each].vector) if each == name else q[each] for each in q})
            # a factor remembers what it found, so that each product has factors of its own
            now, then = (all(SiteDensity(found, site).factor().conjugate(p) for site in own) for p in (q, other))
            if then and not now:
                q = other
        return q

    @property
    def posterior(self) -> Product:
        """The product over the sites, by name; the values of a site have a last dimension more than in the model.

        Raises:
            InputError: a guide that was not set up.
        """
        q = self._modules.get("q")
        if q is None:
            raise InputError("the guide has no posterior before it has seen the model: call guide.setup(*args) first.")
        assert isinstance(q, Product)
        return q

    def graph(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> FactorGraph:
        """The log joint of a model in factors of the sites of this guide, which has to be set up.

        Raises:
            InputError: a model with other latent sites.
        """
        found = read(Call(model, args, kwargs), self._init_loc_fn)
        moved = sorted(set(found.latents) ^ set(self.posterior.sites))
        if moved:
            raise InputError(f"the model has other latent sites than the guide was set up with: {listed(moved)}.")
        return FactorGraph([SiteDensity(found, name).factor() for name in found.reads])

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw the latent sites, with the log density of each, and return them by name."""
        self.setup(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        trace: Any = self.prototype_trace
        values = {}
        for name in self.posterior:
            q, site = self.posterior[name], trace.nodes[name]
            x, event = q.sample(), site["fn"].event_dim
            law = dist.Delta((x if event else x[..., 0]).to(site["value"].dtype), q.log_prob(x), event_dim=event)
            with ExitStack() as stack:
                for frame in site["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                values[name] = pyro.sample(name, law)
        return values


def _of_support(site: Any, batch: torch.Size, value: Tensor) -> Posterior:
    """The posterior of a site by its support, around its first value."""
    fn, events = site["fn"], site["fn"].event_dim
    support = fn.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if isinstance(support, type(constraints.real)) and events <= 1:
        x = value if events else value[..., None]
        return CholeskyGaussian(x.shape[-1], tuple(batch), mean=x, dtype=x.dtype, device=x.device)
    if support.is_discrete and events == 0 and fn.has_enumerate_support:
        classes = fn.enumerate_support(expand=False).flatten()
        if classes.tolist() == list(range(len(classes))):
            return Categorical(torch.randn(*batch, len(classes) - 1, dtype=value.dtype, device=value.device))
    positive = isinstance(support, type(constraints.positive) | type(constraints.nonnegative))
    if positive and events == 0 and _all(support.lower_bound, 0):
        return Gamma(torch.stack([torch.full_like(value, 2.0), 2.0 / value], -1))
    between = isinstance(support, type(constraints.unit_interval))
    if between and events == 0 and _all(support.lower_bound, 0) and _all(support.upper_bound, 1):
        return Beta(torch.full((*batch, 2), 2.0, dtype=value.dtype, device=value.device))
    if isinstance(support, type(constraints.simplex)) and events == 1:
        return Dirichlet(torch.full_like(value, 2.0))
    raise InputError(
        f"the latent site {site['name']!r} has the support {fn.support} with {events} dimensions of its own, for which "
        "AutoProduct has no family: it takes real numbers and vectors, positive numbers, numbers between 0 and 1, "
        "shares and classes. Put its members into a plate, give families=, or fit the model with AutoGaussian."
    )


def _all(bound: Any, number: float) -> bool:
    """Whether a bound of a support is this number for every member."""
    return bool((torch.as_tensor(bound) == number).all())
