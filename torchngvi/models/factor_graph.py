"""A log joint as a sum of factors over named sites, for a product of posteriors: all of the data, or in batches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import Tensor

from torchngvi.arguments import read_callable, read_count, read_instance, read_list, read_names
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Posterior, Target
from torchngvi.models.known_factors import ExpectedFactor, Factor
from torchngvi.posteriors.product import Product
from torchngvi.stepsizes import PowerSchedule

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
