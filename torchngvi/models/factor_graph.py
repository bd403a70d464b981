"""Factors of a model, their messages, and log joints as sums of factors over named sites."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from torchngvi.arguments import read_callable, read_count, read_instance, read_list, read_names, read_number, read_sizes
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Posterior, Target
from torchngvi.numerics.linalg import shortest_fit
from torchngvi.posteriors.product import NaturalForm, Product, natural_form
from torchngvi.stepsizes import PowerSchedule

# Factors of a model: what they are asked for, and those whose expectation the user knows
#
# A factor sends each of its sites the message ∇_ω E_q log f, ω = E T of the site (Winn and Bishop 2005): what it adds
# to the natural parameters.

_SEED = 20240407


class Factor(ABC):
    """One term of a log joint over named sites of a product: abstract, see `SiteFactor` and `ExpectedFactor`."""

    exact: bool = True  # whether its messages are, once it was prepared

    def __init__(self, sites: Sequence[str], scale: float = 1.0) -> None:
        if not sites or not all(isinstance(name, str) for name in sites) or len(set(sites)) < len(sites):
            raise InputError(f"a factor reads at least one site, each by its name and once; got {tuple(sites)}.")
        self.scale = read_number("scale", scale, "is the weight of a factor in the log joint", above=0)
        self.sites = tuple(sites)

    def _check_sites(self, q: Product) -> None:
        missing = [name for name in self.sites if name not in q.sites]
        if missing:
            raise InputError(f"a factor reads the sites {list(self.sites)}; the product lacks {missing}.")

    @abstractmethod
    def prepare(self, q: Product) -> int:
        """Make ready for messages at q, by a test or by draws; return how many values of log f it took."""

    def at(
        self,
        values: Mapping[str, Tensor],  # (S, *batch, d) by site
        q: Product,
    ) -> Tensor:  # (S,)
        """Compute log f at values of the sites, summed over all members, without the scale."""
        raise NotImplementedError  # asked of no ExpectedFactor

    @abstractmethod
    def value(
        self,
        omega: Mapping[str, Tensor],  # (*batch, p) by site
    ) -> Tensor:  # ()
        """Compute E_q log f, summed over all members, without the scale."""

    @abstractmethod
    def message(
        self,
        site: str,
        omega: Mapping[str, Tensor],  # (*batch, p) by site
    ) -> Tensor:  # (*batch, p)
        """Compute ∇_ω E_q log f for a site, which is what the factor adds to its natural parameters."""


@final
class ExpectedFactor(Factor):
    """A term whose expectation the user knows as a function of the expectation parameters ω = E T of its sites.

    Use it for sums over latent classes or counts, which no table has: the bound with these summed out, such as
    Σ x log Σ_k exp(E log θ_k + E log β_k) of topics, whose gradient in ω is the sum of the expected counts.

    Args:
        function: v(ω_1, ω_2, ...), one argument (*batch, p) a site, summed over all members, differentiable.
        sites: the names of the sites, in the order of the arguments.
        scale: the weight of the term, N/B for a batch of B out of N members.

    Raises:
        InputError: something that cannot be called, as `Factor`.

    >>> factor = ExpectedFactor(lambda omega: 5 * omega[..., 0] + 2 * omega[..., 1], "rate")  # five events in time two
    >>> factor.message("rate", {"rate": torch.zeros(2)}).tolist()
    [5.0, 2.0]
    """

    def __init__(self, function: Callable[..., Tensor], *sites: str, scale: float = 1.0) -> None:
        super().__init__(sites, scale)
        read_callable("function", function, "is a function of expectation parameters")
        self.function = function

    @classmethod
    def prior(cls, law: Posterior, site: str, scale: float = 1.0) -> "ExpectedFactor":
        """Make the factor of a prior that is in the family of its site, the same for all members of the site.

        E log p = ⟨η + b, ω⟩ - A, with η of the prior and log h = ⟨b, T⟩.

        Args:
            law: the prior, one member without batch dimensions.
            site: the name of the site.
            scale: the weight of the term.

        Raises:
            InputError: a batch of priors.
            PairError: a posterior that is no exponential family, or a Gaussian with a structure.

        >>> from torchngvi.posteriors.flat import Gamma
        >>> factor = ExpectedFactor.prior(Gamma(torch.tensor([2.0, 3.0])), "rate")
        >>> factor.message("rate", {"rate": torch.zeros(5, 2)})[0].tolist()  # (2 - 1) log x - 3x
        [1.0, 3.0]
        """
        form = natural_form(law)
        if law.batch_shape:
            raise InputError(f"a prior is one law for all members of its site; got a batch {tuple(law.batch_shape)}.")
        density: Any = law.log_prob
        x = form.reference(1, torch.Generator().manual_seed(_SEED)).to(form.natural())[0]
        slope = (form.natural() + form.base()).detach().clone()
        constant = (density(x) - (slope * form.statistics(x)).sum()).detach()
        return cls(lambda omega: omega @ slope + constant, site, scale=scale)

    def prepare(self, q: Product) -> int:
        """Check that the product has the sites."""
        self._check_sites(q)
        return 0

    def value(self, omega: Mapping[str, Tensor]) -> Tensor:
        """Call the function, and add up."""
        return self.function(*(omega[name] for name in self.sites)).sum()

    def message(self, site: str, omega: Mapping[str, Tensor]) -> Tensor:
        """Differentiate the function in ω of the site."""
        with torch.enable_grad():
            point = omega[site].detach().clone().requires_grad_()
            value = self.function(*(point if name == site else omega[name].detach() for name in self.sites)).sum()
            return torch.autograd.grad(value, point)[0]


# Factors of a model, and the messages that they send to the sites of a product: conjugacy is found, not declared
#
# A log factor over sites i, j, ... is fitted by least squares on the products of their sufficient statistics,
#
#     log f(x_i, x_j) = [1, T_i(x_i)]ᵀ M [1, T_j(x_j)]      E log f = [1, ω_i]ᵀ M [1, ω_j]      message to i: M [1, ω_j]
#
# without its first entry (Winn and Bishop 2005 for the messages; the table M by regression).  Where the residual at
# other points is below 1e-9 of the spread (1e-5 of spread and size for a factor that computes in single precision) the
# factor *is* multilinear: it is conjugate for each of its sites given the others, and M is its table for ever.
# Elsewhere M is fitted again at draws of q, and then its messages are estimates of the natural gradients ∇_ω E_q log f,
# as `torchngvi.expectations.StatisticRegression` has them.  A factor that is linear in T_i at fixed values of the
# others sends i the mean of its coefficients over draws of these: a message without the noise of a fit.

_TIMES = 4  # draws for each column of a fit
_LEAST = 32
_FEW = 3  # values of the other sites at which one is looked at alone
_WIDEST = 2000  # columns

_LETTERS = "abcdefgh"


class _Site(NamedTuple):
    """A site of a product, as a factor needs it."""

    form: NaturalForm
    batch: torch.Size
    scalar: bool  # d = 1: its values have no last dimension


@final
class SiteFactor(Factor):
    """A log factor given as a function of the values of its sites, whose table is found by least squares.

    Args:
        function: log f of the values of the sites, one argument each, with draws on the left of the plates: a site of
            one coordinate (d = 1) has values (S, *plates), every other one (S, *plates, d), where the plates of all
            sites are aligned on the right and have size 1 where a site is not in them. It returns (S, *plates).
        sites: the names of the sites, in the order of the arguments.
        plates: the shape of the factor's own plates, such as (N,) for N observations, beside those of the sites.
        scale: the weight of the term, N/B for a batch of B out of N members.

    Raises:
        InputError: something that cannot be called, as `Factor`; on use, sites that the product lacks, plates that do
            not fit, more than 2000 products of statistics, values of another shape or, at draws of q, not finite.

    >>> from torchngvi.posteriors.flat import Gamma
    >>> q = Product(rate=Gamma(torch.ones(2, dtype=torch.float64)))
    >>> counts = torch.tensor([3.0, 0.0, 2.0])
    >>> poisson = SiteFactor(lambda rate: torch.distributions.Poisson(rate).log_prob(counts), "rate", plates=(3,))
    >>> _ = poisson.prepare(q)
    >>> poisson.exact, poisson.message("rate", {"rate": q["rate"].expectation()}).round(decimals=9).tolist()
    (True, [5.0, 3.0])
    """

    def __init__(
        self, function: Callable[..., Tensor], *sites: str, plates: Sequence[int] = (), scale: float = 1.0
    ) -> None:
        super().__init__(sites, scale)
        read_callable("function", function, "is a function of the values of its sites")
        self.function, self.plates = function, read_sizes("plates", plates, "are sizes of dimensions")
        self._table: Tensor | None = None  # M, (*batch, 1 + p_1, 1 + p_2, ...)
        self.exact = False
        self._known = False
        self._given: list[str] = []  # the sites for which the factor is conjugate given the others
        self._averaged: dict[str, Tensor] = {}  # messages to them, (*batch, p)

    def prepare(self, q: Product) -> int:
        """Find the table where it was not looked for; fit it again at draws of q where it is not exact."""
        spent = 0
        sites = self._read(q)
        if not self._known:
            spent += self._look(sites, q)
            if not self.exact and len(sites) > 1:
                spent += sum(self._look_alone(k, sites, q) for k in range(len(sites)))
        if not self.exact:
            spent += self._draw(sites, q) + sum(self._average(self.sites.index(name), sites, q) for name in self._given)
        return spent

    def conjugate(self, q: Product) -> bool:
        """Whether the factor is conjugate for all of its sites, in the families that they have in q."""
        if not self._known:
            self._look(self._read(q), q)
        return self.exact

    def at(self, values: Mapping[str, Tensor], q: Product) -> Tensor:
        """Call the function, and add up over the members."""
        value = self._values(self._read(q), [values[name] for name in self.sites])
        return value.flatten(1).sum(-1) if value.ndim > 1 else value

    def _read(self, q: Product) -> list[_Site]:
        self._check_sites(q)
        return [_Site(natural_form(q[name]), q[name].batch_shape, q[name].dim == 1) for name in self.sites]

    def _shapes(self, sites: list[_Site]) -> tuple[torch.Size, torch.Size]:
        """The plates of the factor, and those of them that its sites are in."""
        try:
            own = torch.broadcast_shapes(*(site.batch for site in sites))
            full = torch.broadcast_shapes(own, self.plates)
        except RuntimeError as error:
            batches = ", ".join(f"{name} {tuple(site.batch)}" for name, site in zip(self.sites, sites, strict=True))
            raise InputError(
                f"the plates of a factor and of its sites are aligned on the right, with 1 where a site is not in a "
                f"plate; got the plates {self.plates} with {batches}."
            ) from error
        return own, full

    def _columns(self, sites: list[_Site]) -> int:
        columns = math.prod(1 + site.form.size for site in sites)
        if columns > _WIDEST:
            raise InputError(
                f"the factor over {', '.join(self.sites)} has {columns} products of statistics, and {_WIDEST} can be "
                "fitted. Split its sites into members of a batch, or give its expectation by an ExpectedFactor."
            )
        return columns

    def _values(self, sites: list[_Site], points: list[Tensor]) -> Tensor:  # (S, *own)
        """Log f, summed over the plates in which no site is."""
        own, full = self._shapes(sites)
        number, nesting = len(points[0]), len(full)
        given = []
        for site, x in zip(sites, points, strict=True):
            batch = x.shape[1:-1]
            x = x.reshape(number, *(1,) * (nesting - len(batch)), *batch, x.shape[-1])
            given.append(x[..., 0] if site.scalar else x)
        value = self.function(*given)
        if not isinstance(value, Tensor) or value.shape != (number, *full):
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"the factor over {', '.join(self.sites)} must return one value a draw and member, of shape "
                f"{(number, *full)}; got {got}. Give the shape of its own plates by plates=."
            )
        return value.detach().sum_to_size(number, *(1,) * (nesting - len(own)), *own).reshape(number, *own)

    def _look(self, sites: list[_Site], q: Product) -> int:
        """Fit at reference points in float64, the same for all members, and test at others."""
        generator = torch.Generator().manual_seed(_SEED)
        number = max(_LEAST, _TIMES * self._columns(sites))
        device = q.device
        points = [site.form.reference(2 * number, generator).to(device) for site in sites]
        spread = [x.reshape(2 * number, *(1,) * len(site.batch), -1) for site, x in zip(sites, points, strict=True)]
        values = self._values(sites, [x.expand(2 * number, *s.batch, -1) for s, x in zip(sites, spread, strict=True)])
        batch, self._known = values.shape[1:], True
        values = values.reshape(2 * number, -1)
        if not bool(values.isfinite().all()):
            return 2 * number
        design = _products([site.form.statistics(x) for site, x in zip(sites, points, strict=True)])
        table, self.exact = _fitted(design, values)
        if self.exact:
            self._keep(table.mT.reshape(*batch, -1).to(q.dtype), sites)
        return 2 * number

    def _crossed(self, k: int, sites: list[_Site], others: list[Tensor], grid: Tensor) -> Tensor:
        """Log f at each point of site k, (n, d), with each draw of the others: (R, n, M), M members."""
        number, n = len(others[k]), len(grid)
        points = [x.repeat_interleave(n, 0) for x in others]
        points[k] = grid.repeat(number, 1).reshape(number * n, *(1,) * len(sites[k].batch), -1).expand_as(points[k])
        return self._values(sites, points).reshape(number, n, -1)

    def _look_alone(self, k: int, sites: list[_Site], q: Product) -> int:
        """Whether the factor is linear in the statistics of site k at each of a few values of the others."""
        generator, number = torch.Generator().manual_seed(_SEED), max(_LEAST, _TIMES * (1 + sites[k].form.size))
        grid = sites[k].form.reference(2 * number, generator).to(q.device)
        few = [site.form.reference(_FEW, generator).to(q.device) for site in sites]
        others = [
            x.reshape(_FEW, *(1,) * len(site.batch), -1).expand(_FEW, *site.batch, -1)
            for x, site in zip(few, sites, strict=True)
        ]
        values = self._crossed(k, sites, others, grid).movedim(1, 0).flatten(1)
        if bool(values.isfinite().all()) and _fitted(_products([sites[k].form.statistics(grid)]), values)[1]:
            self._given.append(self.sites[k])
        return _FEW * 2 * number

    def _average(self, k: int, sites: list[_Site], q: Product) -> int:
        """The message to site k, exact given the others, over draws of these."""
        number = max(_LEAST, _TIMES * self._columns(sites))
        grid = sites[k].form.reference(_TIMES * (1 + sites[k].form.size), torch.Generator().manual_seed(_SEED))
        grid = grid.to(q.device)
        others = [q[name].sample(number).double() for name in self.sites]
        values = self._crossed(k, sites, others, grid).mean(0).double()
        slopes = shortest_fit(_products([sites[k].form.statistics(grid)]), values)[1:].mT  # (M, p)
        own, _ = self._shapes(sites)
        message = slopes.reshape(*own, -1).sum_to_size((*sites[k].batch, sites[k].form.size))
        self._averaged[self.sites[k]] = message.to(q.dtype)
        return number * len(grid)

    def _draw(self, sites: list[_Site], q: Product) -> int:
        """Fit at draws of q, member by member."""
        number = max(_LEAST, _TIMES * self._columns(sites))
        points = [q[name].sample(number) for name in self.sites]
        values = self._values(sites, points).to(q.dtype)
        if not bool(values.isfinite().all()):
            raise InputError(
                f"the factor over {', '.join(self.sites)} is not finite at draws of q. Its density has to be positive "
                "wherever the families of its sites are."
            )
        own, _ = self._shapes(sites)
        statistics = [
            site.form.statistics(x).reshape(number, *(1,) * (len(own) - len(site.batch)), *site.batch, -1)
            for site, x in zip(sites, points, strict=True)
        ]
        centres = [x.mean(0, keepdim=True) for x in statistics]
        scales = [x.std(0, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny) for x in statistics]
        units = [(x - c) / s for x, c, s in zip(statistics, centres, scales, strict=True)]
        design = _products(units)
        design = design.expand(number, *own, -1).movedim(0, -2)
        level = values.mean(0)
        fit = shortest_fit(design, (values - level).movedim(0, -1)[..., None])[..., 0]
        fit[..., 0] += level
        self._keep(fit, sites)
        assert self._table is not None
        self._table = _shifted(self._table, [c[0] for c in centres], [s[0] for s in scales])
        return number

    def _keep(self, flat: Tensor, sites: list[_Site]) -> None:
        self._table = flat.reshape(*flat.shape[:-1], *(1 + site.form.size for site in sites))

    def _contracted(self, omega: Mapping[str, Tensor], kept: str | None) -> Tensor:
        """The table with [1, ω] at every site but one."""
        assert self._table is not None
        axes, operands, terms = _LETTERS[: len(self.sites)], [self._table], [f"...{_LETTERS[: len(self.sites)]}"]
        left = ""
        for axis, name in zip(axes, self.sites, strict=True):
            if name == kept:
                left = axis
                continue
            moments = omega[name]
            operands.append(torch.cat([torch.ones_like(moments[..., :1]), moments], -1))
            terms.append(f"...{axis}")
        return torch.einsum(f"{','.join(terms)}->...{left}", *operands)

    def value(self, omega: Mapping[str, Tensor]) -> Tensor:
        """Contract the table with [1, ω] of all sites."""
        return self._contracted(omega, None).sum()

    def message(self, site: str, omega: Mapping[str, Tensor]) -> Tensor:
        """Contract the table with [1, ω] of the other sites, and add up over the plates that the site is not in."""
        if site in self._averaged:
            return self._averaged[site]
        return self._contracted(omega, site)[..., 1:].sum_to_size(omega[site].shape)


def _fitted(
    design: Tensor,  # (2 n, P)
    values: Tensor,  # (2 n, M)
    multilinear: float = 1e-9,
    in_single: float = 1e-5,
) -> tuple[Tensor, bool]:  # (P, M)
    """Fit the first half of the points, and say whether nothing is left over at the others."""
    # multilinear: residual over spread up to which a factor is multilinear
    # in_single: the same over spread and size, of a factor that computes in single precision
    number = len(design) // 2
    single, values, design = torch.finfo(values.dtype).bits < 64, values.double(), design.double()
    table = shortest_fit(design[:number], values[:number])
    residual = (values[number:] - design[number:] @ table).abs().amax(0)
    size, deviation = values.abs().amax(0), values.std(0)
    exact = residual <= (in_single * (deviation + size) if single else multilinear * deviation)
    return table, bool((exact | (values.amax(0) == values.amin(0))).all())


def _products(statistics: list[Tensor]) -> Tensor:  # (S, *batch, P)
    """Products of the entries of [1, T] of all sites, the last site fastest."""
    rows = [torch.cat([torch.ones_like(T[..., :1]), T], -1) for T in statistics]
    design = rows[0]
    for row in rows[1:]:
        design = (design[..., :, None] * row[..., None, :]).flatten(-2)
    return design


def _shifted(table: Tensor, centres: list[Tensor], scales: list[Tensor]) -> Tensor:
    """The table over [1, T] from that over [1, (T - c)/s], site by site."""
    number = len(centres)
    for axis, (centre, scale) in enumerate(zip(centres, scales, strict=True)):
        table = table.movedim(axis - number, -1)
        extra = (1,) * (number - 1)
        centre, scale = (x.reshape(*x.shape[:-1], *extra, x.shape[-1]) for x in (centre, scale))
        slope = table[..., 1:] / scale
        constant = table[..., :1] - (slope * centre).sum(-1, keepdim=True)
        table = torch.cat([constant, slope], -1).movedim(-1, axis - number)
    return table


# A log joint as a sum of factors over named sites, for a product of posteriors: all of the data, or in batches

USUAL = PowerSchedule(0.7, 9.0)  # (10 + t)^-0.7


@final
class FactorGraph(Target):
    """The log joint Σ_j scale_j log f_j of the sites of a `torchngvi.posteriors.Product`.

    ``fit(q, graph)`` moves one site after the other to η = Σ_j message_j - b, which for factors that are conjugate is
    coordinate ascent (CAVI; Bishop 2006, section 10.1), without a step size.

    Args:
        factors: `torchngvi.models.SiteFactor` and `torchngvi.models.ExpectedFactor`; or, where there are batches, a
            function of a batch that returns them, each with the scale N/B where it sees B out of N members.
        local: the sites of a batch, such as the shares of its documents: at each step they are solved from where q
            had them at the start of the fit, given the other sites, and are not remembered. Topic models need this
            also without batches: locals that are kept while the others move fast do not find their way.
        batches: what is passed to the function, one after the other, over and over; all of one size.
        memory: of Anderson acceleration in log η, for factors that are all conjugate over families whose natural
            parameters are positive; 0 for plain sweeps. Two is enough where sweeps are slow, as in factorisations.
        schedule: γ after t steps, of the sites that are not local where there are batches; (10 + t)^-0.7 by default.

    Raises:
        InputError: no factor, something that is none, batches without a function or a function without batches, a
            memory together with batches or local sites.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, fit
    >>> from torchngvi.models import SiteFactor
    >>> from torchngvi.posteriors.flat import Gamma
    >>> y = torch.tensor([0.3, -1.2, 2.0, 0.7, -0.1], dtype=torch.float64)
    >>> q = Product(mu=CholeskyGaussian(1, dtype=torch.float64), tau=Gamma(torch.ones(2, dtype=torch.float64)))
    >>> normal = SiteFactor(lambda mu, tau: 0.5 * tau.log() - 0.5 * tau * (y - mu) ** 2, "mu", "tau", plates=(5,))
    >>> prior_of_mu = SiteFactor(lambda mu: -0.005 * mu**2, "mu")
    >>> prior_of_tau = SiteFactor(lambda tau: -0.1 * tau, "tau")
    >>> result = fit(q, FactorGraph([normal, prior_of_mu, prior_of_tau]), progress=False)
    >>> result.converged, [round(x, 3) for x in (q["mu"].mean.item(), *q["tau"].vector.tolist())]
    (True, [0.339, 3.5, 3.296])
    """

    temperature = 1.0
    batches: Sequence[Any]

    def __init__(
        self,
        factors: Sequence[Factor] | Callable[[Any], Sequence[Factor]],
        *,
        local: Sequence[str] = (),
        batches: Sequence[Any] | None = None,
        memory: int = 0,
        schedule: Callable[[int], float] = USUAL,
    ) -> None:
        memory = read_count("memory", memory, "counts sweeps that are kept", at_least=0)
        local = read_names("local", local, "are the names of sites")
        if batches is not None:
            read_instance("batches", batches, Sequence, "is a list of batches, or None")
        read_callable("schedule", schedule, "is a function of the number of steps", arguments="t")
        if (batches is not None) != callable(factors) or (batches is not None and not len(batches)):
            raise InputError(
                "factors are a list, or together with batches= a function of a batch that returns a list; got "
                f"{type(factors).__name__} and {'no batches' if not batches else f'{len(batches)} batches'}."
            )
        if memory and (batches is not None or local):
            raise InputError("memory= accelerates sweeps over all sites and data; leave local= and batches= out.")
        self.memory = memory
        self._made = None if callable(factors) else _checked(factors)
        self._make = factors if callable(factors) else None
        self.local, self.batches, self.schedule = tuple(local), [] if batches is None else batches, schedule
        self.comparable = batches is None

    def factors(self, step: int = 0) -> list[Factor]:
        """Return the factors that a step sees: all, or those of the next batch."""
        if self._made is not None:
            return self._made
        assert self._make is not None
        return _checked(self._make(self.batches[step % len(self.batches)]))

    def check(self, q: Posterior) -> None:
        """Check that q is a product that has the local sites.

        Raises:
            PairError: another posterior.
            InputError: a local site that it lacks.
        """
        if not isinstance(q, Product):
            raise PairError(
                f"a FactorGraph is a log joint of named sites, which a Product has; got {type(q).__name__}. Make one: "
                "Product(mu=CholeskyGaussian(1), tau=Gamma(...))."
            )
        missing = [name for name in self.local if name not in q.sites]
        if missing:
            raise InputError(f"the local sites are sites of the product; it lacks {missing} of {list(self.local)}.")

    def log_joint(self, theta: Any) -> Tensor:
        """Refuse; `value_at` takes the values of the sites by name.

        Raises:
            PairError: always.
        """
        raise PairError(
            "a FactorGraph is a log joint of named sites and not of a vector theta: use graph.value_at(values, q)."
        )

    def value_at(self, values: Mapping[str, Tensor], q: Product) -> Tensor:
        """Compute the log joint of values of all sites, (S,).

        Args:
            values: draws by site, (S, *batch, d), as ``q.sample(S)`` gives them.
            q: the product, which knows the shapes of its sites.

        Returns:
            The sum of all factors with their scales, of the first batch where there are some.

        Raises:
            InputError: an `ExpectedFactor`, which is no function of values.
        """
        factors = self.factors()
        if any(isinstance(factor, ExpectedFactor) for factor in factors):
            raise InputError("an ExpectedFactor is a function of expectations, which has no value at draws.")
        parts = [factor.scale * factor.at(values, q) for factor in factors]
        return sum(parts[1:], parts[0])

    def tensors(self) -> tuple[Tensor, ...]:
        """Return no tensors: those that the factors depend on are unknown."""
        return ()


def _checked(factors: Any) -> list[Factor]:
    factors = read_list("factors", factors, "are SiteFactors and ExpectedFactors in a list")
    others = [each for each in factors if not isinstance(each, Factor)]
    if others or not factors:
        raise InputError(
            f"the factors are SiteFactors and ExpectedFactors, at least one; got {others[0] if others else 'none'!r}. "
            "Wrap a function: SiteFactor(function, 'name of its site')."
        )
    return factors
