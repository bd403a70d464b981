"""Products of families as a guide: each latent site has the family of its support, and conjugate parts exact steps."""

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Self

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.initialization import init_to_median
from torch import Tensor
from torch.distributions import constraints

from torchngvi.adapters.pyro.site_densities import Call, SiteDensity, read
from torchngvi.adapters.pyro.starting import listed
from torchngvi.arguments import read_callable, read_instance
from torchngvi.errors import InputError
from torchngvi.fitting.fit import fit
from torchngvi.fitting.records import FitResult
from torchngvi.interfaces import Posterior
from torchngvi.models import FactorGraph
from torchngvi.posteriors import CholeskyGaussian, Product
from torchngvi.posteriors.flat import Beta, Categorical, Dirichlet, Gamma, InverseGamma


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
            `torchngvi.adapters.pyro.site_densities.read`; on use, a guide that was not set up.

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
        self._event_dims: dict[str, int] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def setup(self, *args: Any, **kwargs: Any) -> Self:
        """Run the model with these arguments to find its sites, unless that was done before; returns the guide."""
        if self.prototype_trace is None:
            call = read(self.model, args, kwargs, self._init_loc_fn)
            trace: Any = call.trace
            latents = [trace.nodes[name] for name in call.reads if not trace.nodes[name]["is_observed"]]
            if not latents:
                raise InputError("the model has no latent site, so that there is nothing to fit.")
            unknown = set(self._families) - {site["name"] for site in latents}
            if unknown:
                raise InputError(f"families= names {listed(sorted(unknown))}, which the model does not sample.")
            kinds = [site["value"].dtype for site in latents if site["value"].is_floating_point()]
            dtype = functools.reduce(torch.promote_types, kinds) if kinds else torch.get_default_dtype()
            q = Product({site["name"]: self._made(site, dtype) for site in latents})
            for name in call.reads:
                SiteDensity(call, name).check(q)
            self._event_dims = {site["name"]: len(site["fn"].event_shape) for site in latents}
            self._dtypes = {site["name"]: site["value"].dtype for site in latents}
            self._setup_prototype(*args, **kwargs)
            self.q = self._with_inverses(call, q)
        return self

    def _made(self, site: Any, dtype: torch.dtype) -> Posterior:
        """The posterior of a site before the fit."""
        name, value, fn = site["name"], site["value"].to(dtype), site["fn"]
        batch = value.shape[: value.ndim - len(fn.event_shape)]
        if name in self._families:
            return self._families[name](batch, value)
        return _of_support(name, fn, batch, value)

    def _with_inverses(self, call: Call, q: Product) -> Product:
        """The product with inverse gamma laws where these are conjugate to all factors and gamma laws are not."""
        for name in q.names:
            if name in self._families or not isinstance(q[name], Gamma):
                continue
            own = [site for site, reads in call.reads.items() if name in reads]
            other = Product({each: InverseGamma(q[each].vector) if each == name else q[each] for each in q})
            if not _exact(call, own, q) and _exact(call, own, other):
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
        call = read(model, args, kwargs, self._init_loc_fn)
        trace: Any = call.trace
        latents = {name for name in call.reads if not trace.nodes[name]["is_observed"]}
        if latents != set(self.posterior.sites):
            moved = sorted(latents ^ set(self.posterior.sites))
            raise InputError(f"the model has other latent sites than the guide was set up with: {listed(moved)}.")
        return FactorGraph([SiteDensity(call, name).factor() for name in call.reads])

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw the latent sites, with the log density of each, and return them by name."""
        self.setup(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        trace: Any = self.prototype_trace
        values = {}
        for name, event in self._event_dims.items():
            q = self.posterior[name]
            x = q.sample()
            law = dist.Delta((x if event else x[..., 0]).to(self._dtypes[name]), q.log_prob(x), event_dim=event)
            with ExitStack() as stack:
                for frame in trace.nodes[name]["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                values[name] = pyro.sample(name, law)
        return values


def fit_product(
    model: Callable[..., Any],
    guide: AutoProduct,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> FitResult:
    """Fit a product to a model, in place."""
    graph = guide.setup(*args, **kwargs).graph(model, args, kwargs)
    return fit(guide.posterior, graph, **options)


def _exact(call: Call, sites: list[str], q: Product) -> bool:
    """Whether the densities of these sites are all conjugate."""
    factors = [SiteDensity(call, name).factor() for name in sites]
    return all(factor.conjugate(q) for factor in factors)


def _of_support(name: str, fn: Any, batch: torch.Size, value: Tensor) -> Posterior:
    """The posterior of a site by its support, around its first value."""
    support, events = fn.support, len(fn.event_shape)
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
        f"the latent site {name!r} has the support {fn.support} with {events} dimensions of its own, for which "
        "AutoProduct has no family: it takes real numbers and vectors, positive numbers, numbers between 0 and 1, "
        "shares and classes. Put its members into a plate, give families=, or fit the model with AutoGaussian."
    )


def _all(bound: Any, number: float) -> bool:
    """Whether a bound of a support is this number for every member."""
    return bool((torch.as_tensor(bound) == number).all())
