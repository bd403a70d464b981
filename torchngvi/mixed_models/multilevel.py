"""Mixed models with several grouping factors, nested or crossed, and their fit: see `torchngvi.MixedModel`."""

import math
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from torchngvi.arguments import read_size
from torchngvi.errors import InputError
from torchngvi.fitting.fit import fit
from torchngvi.fitting.records import FitResult
from torchngvi.mixed_models import asked, remarks, response
from torchngvi.mixed_models.asked import Marginalise
from torchngvi.mixed_models.budget import Budget
from torchngvi.mixed_models.fitted import Joint
from torchngvi.mixed_models.integrated import Weighted, integrated
from torchngvi.mixed_models.multilevel_joint import GivenGlobals, drawn, moments_of, profiled
from torchngvi.mixed_models.multilevel_result import Effects, MultilevelResult
from torchngvi.models import GaussianNoise, Likelihood, MixedPrior
from torchngvi.models.mixed_prior import checked_prior, units_of
from torchngvi.models.multilevel import MultilevelLogJoint, Several
from torchngvi.models.multilevel_gaussian import GaussianMultilevel
from torchngvi.models.multilevel_start import started
from torchngvi.numerics.versions import tracked
from torchngvi.posteriors import CholeskyGaussian, PrecisionCholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian

_FEWEST = 100  # draws
_DRAWS, _FEW = 4096, 400  # weighted draws, and where one is costly
_REFIT = 1e-4  # tolerance of refits that move means by a tenth of a standard deviation: a thousandth of it
_COSTLY = 2**38  # multiplications of all of them


@final
class MultilevelModel(MultilevelLogJoint):
    """A generalised linear mixed model with several grouping factors, as `torchngvi.MixedModel` makes it of these.

    One wants it for pupils in classes in schools, for answers of subjects to items, and other data whose rows belong to
    groups of several kinds.  As a log joint over all coordinates, with closed-form expectations, it is a target for
    `torchngvi.fit` too.

    Args:
        X: the design of the fixed effects β, (N, p), dense.
        y: the targets, (N,), as in `torchngvi.GeneralizedLinear`.
        random: a dict from the name of each grouping factor to a pair (Z, groups), or a sequence of
            `torchngvi.models.RandomEffects`. A factor may be named twice, with other designs: its effects are then
            independent of one another.
        family: the likelihood, as in `torchngvi.MixedModel`.
        prior: `torchngvi.models.MixedPrior`; ``precision``, ``sd`` and ``concentration`` are those of all factors, or
            dicts with one entry for each.
        weights: factors of the log likelihood of each row, (N,), not negative.
        offset: what is added to the linear predictor, (N,), as the logarithm of an exposure.

    Raises:
        InputError: as `torchngvi.models.MultilevelLogJoint` and `torchngvi.MixedModel`.

    >>> import torch
    >>> subject, item = torch.arange(40) // 4, torch.arange(40) % 4
    >>> X = torch.ones(40, 1, dtype=torch.float64)
    >>> model = MultilevelModel(X, (subject * item) % 3, {"subject": (X, subject), "item": (X, item)}, "poisson_log")
    >>> model.dim  # fourteen effects of groups, a fixed one, and two variances
    17
    """

    @tracked
    def __init__(
        self,
        X: Any,
        y: Any,
        random: Several,
        family: str | Likelihood = "bernoulli_logit",
        *,
        prior: MixedPrior | None = None,
        weights: Any = None,
        offset: Any = None,
    ) -> None:
        prior = checked_prior(prior)
        learned = self.learned = asked.learned_of(family, prior)
        super().__init__(
            X, y, random, family if learned is None else learned.at(1.0), prior=prior, weights=weights, offset=offset
        )
        if learned is None:
            return
        if learned.units:
            asked.check_varies(self.rows.y)
        self.value = learned.begin(self.leaves)
        self.rows.likelihood = self.fixed.likelihood = learned.at(self.value)
        for of in self.rows.factors:
            of.likelihood = self.rows.likelihood
        self.priors = self._priors(self.rows.factors)  # that of Kass and Natarajan depends on the likelihood

    column_names: tuple[str, ...] = ()  # of X, where a formula has made it

    @property
    def leaves(self) -> Any:
        """The rows with the groups of the largest factor."""
        return self.rows.factors[self.rows.arrangement.chain[0]]

    @tracked
    def fit(
        self,
        *,
        marginalise: Marginalise | None = None,
        draws: int | None = None,
        seed: int = 0,
        progress: bool = True,
        max_evaluations: int = 1000,
        max_seconds: float | None = None,
    ) -> MultilevelResult:
        """Fit the model: fixed effects and variance components of each factor, and all random effects.

        Where noise is Gaussian, random and fixed effects are integrated out in closed form; the few variance parameters
        have a Gaussian by natural-gradient variational inference, whose draws are weighted to their posterior. Other
        families have a Gaussian over all coordinates, whose precision has the pattern of a forest, with its exact
        evidence lower bound; the covariance of fixed effects and variance parameters is then by linear response, and a
        learned parameter is explored by the bounds at some of its values. Such a Gaussian may shift variance components
        of binary data.

        Args:
            marginalise: "quadrature" to integrate the random effects out, the default for Gaussian noise, and only for
                it; "response" for a Gaussian over all coordinates with covariances of the globals by linear response,
                the default otherwise; "none" for that Gaussian as it is.
            draws: the number of draws of the globals, at least 100; by default 4096, and fewer, down to 400, where one
                takes long.
            seed: of all draws.
            progress: show a bar.
            max_evaluations: budget of each of the fits that this is made of, in expectations.
            max_seconds: budget of all of them, in seconds; draws and their weights come on top.

        Returns:
            The result, which prints as a table and says what was used.

        Raises:
            InputError: another word for marginalise, too few draws, or "quadrature" where noise is not Gaussian.

        >>> import torch
        >>> subject, item = torch.arange(60) // 6, torch.arange(60) % 6
        >>> X = torch.ones(60, 1, dtype=torch.float64)
        >>> y = 0.3 * (subject % 4) + 0.5 * item + torch.linspace(-1, 1, 60).sin() * (-1.0) ** torch.arange(60)
        >>> result = MultilevelModel(X, y, {"subject": (X, subject), "item": (X, item)}, "gaussian").fit(progress=False)
        >>> result.converged, result.k_hat < 0.7
        (True, True)
        >>> result.summary().random["item"].sd.mean.shape
        torch.Size([1])
        """
        budget, seed = Budget(max_evaluations, max_seconds), asked.seed_of(seed)
        asked.check_way(marginalise)
        if draws is not None:
            read_size("draws", draws, "counts draws, which are to say something about a tail,", at_least=_FEWEST)
        noisy = isinstance(self.rows.likelihood, GaussianNoise)
        way = ("quadrature" if noisy else "response") if marginalise is None else marginalise
        if way == "quadrature" and not noisy:
            raise InputError(
                "marginalise='quadrature' integrates random effects out, which with several grouping factors is done "
                f"where noise is Gaussian; the likelihood is {type(self.rows.likelihood).__name__}. Leave it out, or "
                "use 'response'."
            )
        groups = {f"the grouping factor {name}": of.n for name, of in zip(self.names, self.rows.factors, strict=True)}
        names = self.column_names or asked.numbers(self.rows.p)
        own_noise = self.rows.likelihood.link == "identity"
        remarks.warn_of(self.rows.X, self.rows.columns, groups, names, own_noise)
        if way != "quadrature":
            return self._over_all(way, _DRAWS if draws is None else draws, seed, progress, budget)
        return self._closed(draws, seed, progress, budget)

    def _closed(self, draws: int | None, seed: int, progress: bool, budget: Budget) -> MultilevelResult:
        """Fit the variance parameters with fixed and random effects integrated out."""
        target = GaussianMultilevel(self, self.learned)
        if draws is None:  # as many as a factorisation for each of them allows
            draws = max(_FEW, min(_DRAWS, _COSTLY // target.cost))
        found = integrated(target, self._start(target), draws, seed, progress, **budget.left())
        locals_ = _Exact(target)
        theta = locals_.beside(found.draws.theta, seed)
        weighted = found.draws._replace(theta=theta)
        method = (
            f"fixed and random effects integrated out in closed form; a Gaussian on the {target.dim}\n"
            f"variance parameters, its draws weighted to their posterior: {asked.worth(weighted, draws)}"
        )
        parameter = None if self.learned is None else float(found.posterior.mean[-1])
        return self._result(
            method,
            found.fit,
            found.elbo,
            found.log_evidence,
            found.posterior,
            weighted,
            locals_,
            Joint(None, partial(self._joint_at, parameter)),
        )

    def _start(self, target: GaussianMultilevel) -> CholeskyGaussian:
        """A Gaussian over the variance parameters where some EM steps lead, as wide as numbers of groups suggest."""
        rows = self.rows
        omega = started(rows, self.priors).vector[rows.bare.dim :]
        own = torch.empty_like(omega)
        for at, of in zip(rows.omegas, rows.factors, strict=True):
            here = slice(at.start - rows.bare.dim, at.stop - rows.bare.dim)
            own[here] = units_of(omega[here], of.r) * of.n**-0.5
        mean, sds = [omega], [own]
        if self.learned is not None:
            mean.append(omega.new_tensor([math.log(self.value)]))
            sds.append(omega.new_tensor([(2 * len(rows.y)) ** -0.5]))
        return CholeskyGaussian.from_moments(torch.cat(mean), torch.cat(sds).square().diag())

    def _over_all(self, way: str, draws: int, seed: int, progress: bool, budget: Budget) -> MultilevelResult:
        """Fit a Gaussian over all coordinates."""
        local = self.rows.beta.start
        results: list[FitResult] = []

        def run(q: PrecisionCholeskyGaussian, model: MultilevelLogJoint) -> float:
            results.append(fit(q, model, progress=progress, **budget.left()))
            return -results[-1].loss

        model, profile, clause = self.with_likelihood(self.rows.likelihood), None, "covariances of q"
        if self.learned is None:
            q = model.posterior()
            elbo = run(q, model)
        else:
            prior = self.learned.settled(self.leaves)
            q, phi, profile = profiled(model, self.learned, prior, math.log(self.value), run)
            model, elbo = model.with_likelihood(self.learned.at(math.exp(phi))), profile.log_evidence
        near = GivenGlobals(q, local, profile)
        spread: Gaussian = near.marginal()
        if way == "response":
            covariance, converged = response.response_covariance(
                model, q, local, progress, tolerance=_REFIT, **budget.left()
            )
            spread, clause = response.chosen(near.mean[local:], covariance, converged, spread)
        if profile is not None and self.learned is not None:
            clause += f";\nthe {self.learned.name} by the bounds at {len(profile.phi)} of its values"
        weighted, seen = drawn(self, near, spread, draws, seed)
        method = asked.unweighted(weighted, clause, seen, self.dim)
        posterior = spread if profile is None else moments_of(weighted.theta)
        found = next((result for result in results if not result.converged), results[-1])
        return self._result(method, found, elbo, None, posterior, weighted, near, Joint(q))

    def _joint_at(self, phi: float | None) -> PrecisionCholeskyGaussian:
        """The best Gaussian over all coordinates, a learned parameter held at the logarithm phi."""
        likelihood = self.rows.likelihood
        if self.learned is not None and phi is not None:
            likelihood = self.learned.at(math.exp(phi))
        model = self.with_likelihood(likelihood)
        q = model.posterior()
        fit(q, model, progress=False)
        return q

    def _result(
        self,
        method: str,
        found: FitResult,
        elbo: float,
        log_evidence: float | None,
        posterior: Gaussian,
        weighted: Weighted,
        effects: Effects,
        joint: Joint,
    ) -> MultilevelResult:
        """The result, with numbers for names."""
        factors = dict(zip(self.names, self.rows.factors, strict=True))
        return MultilevelResult(
            self,
            method,
            found,
            elbo,
            log_evidence,
            posterior,
            weighted,
            effects,
            joint,
            self.learned,
            asked.numbers(self.rows.p),
            {name: asked.numbers(of.r) for name, of in factors.items()},
            {name: asked.numbers(of.n) for name, of in factors.items()},
        )


class _Exact:
    """The distribution of all effects given the globals where noise is Gaussian."""

    def __init__(self, target: GaussianMultilevel) -> None:
        self.target = target

    def beside(self, theta: Tensor, seed: int) -> Tensor:
        """Put draws of β in front of those of the variance parameters."""
        beta = self.target.fixed(theta, torch.Generator().manual_seed(seed + 3))
        return torch.cat([beta.nan_to_num(0.0, 0.0, 0.0), theta], -1)  # where a draw has no weight

    def draw(self, globals: Tensor, generator: torch.Generator) -> Tensor:
        """Draw the effects of all groups of all factors, (S, local)."""
        p = self.target.rows.p
        return self.target.effects(globals[:, p:], globals[:, :p], generator)
