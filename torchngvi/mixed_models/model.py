"""`torchngvi.MixedModel`: the log joint of a mixed model, with the fit that a statistician wants of it."""

import copy
import math
from functools import partial
from typing import Any, Self, final

from torch import Tensor, finfo

from torchngvi.arguments import read_size
from torchngvi.distributed import Processes
from torchngvi.errors import InputError
from torchngvi.fitting.fit import fit
from torchngvi.mixed_models import asked, remarks, response, starting
from torchngvi.mixed_models.asked import Marginalise
from torchngvi.mixed_models.budget import Budget
from torchngvi.mixed_models.fitted import Joint
from torchngvi.mixed_models.integrated import Integrated, enough_nodes, integrated
from torchngvi.mixed_models.locals import ByQuadrature, Conditional
from torchngvi.mixed_models.multilevel import MultilevelModel
from torchngvi.mixed_models.result import MixedResult
from torchngvi.models import GaussianMixed, GaussianNoise, Likelihood, MarginalMixed, MixedLogJoint, MixedPrior
from torchngvi.models.mixed import RandomEffects
from torchngvi.models.mixed_integrated import IntegratedMixed
from torchngvi.models.mixed_prior import checked_prior
from torchngvi.models.mixed_units import covariance_prior_of
from torchngvi.models.multilevel import Several
from torchngvi.numerics.linalg import eigh
from torchngvi.numerics.versions import tracked
from torchngvi.posteriors import PrecisionCholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian

_ROWS = {1: 32_000, 2: 12_000}  # up to which random effects are integrated out by default, by their number
_FEWEST = 100  # draws


@final
class MixedModel(MixedLogJoint):
    """A generalised linear mixed model with one grouping factor: y_ij ~ family(x_ijᵀβ + z_ijᵀb_i), b_i ~ N(0, Ω⁻¹).

    One wants it for repeated measurements of patients, pupils of schools, and other data in groups whose levels, and
    perhaps slopes, vary.  `fit` answers in the units of the data, with random effects integrated out where that can be
    done; as a log joint over all coordinates, with closed-form expectations, it is a target for `torchngvi.fit` too.

    Args:
        X: the design of the fixed effects β, (N, p), dense.
        y: the targets, (N,), as in `torchngvi.GeneralizedLinear`.
        random: `torchngvi.models.RandomEffects`, or a pair (Z, groups): the design (N, r) and the group of each row. A
            dict from the names of several grouping factors to such pairs, or a sequence of `RandomEffects`, makes a
            `torchngvi.mixed_models.MultilevelModel` instead, of nested or crossed factors.
        family: the likelihood, "bernoulli_logit", "bernoulli_probit", "poisson_log", for short "bernoulli", "probit",
            "poisson"; "gaussian", "student_t" (of four degrees of freedom) or "negative_binomial", of which `fit`
            learns the residual sd, the scale or the size; or a `Likelihood` whose parameters are held, such as
            ``GaussianNoise(0.1)`` or ``NegativeBinomial(2.0)``. As a log joint over all coordinates the model
            holds what is learned at an estimate, `rows.likelihood`.
        prior: `torchngvi.models.MixedPrior`; by default in the units of the data. As a log joint over all coordinates
            the model then has those of columns that are centred and scaled, see `torchngvi.models.MixedLogJoint`; what
            `fit` answers is in the units of the user. A column of ones of X is the intercept.
        weights: factors of the log likelihood of each row, (N,), not negative.
        offset: what is added to the linear predictor, (N,), as the logarithm of an exposure.

    Raises:
        InputError: as `torchngvi.GeneralizedLinear`; designs of other numbers of rows, groups that are no numbers
            0, ..., n - 1 or have no rows, columns of Z that depend on one another, a prior out of range, or one of a
            parameter that the family does not learn.

    >>> import torch
    >>> X = torch.ones(6, 1, dtype=torch.float64)
    >>> model = MixedModel(X, [3, 4, 0, 1, 2, 6], (X, [0, 0, 1, 1, 2, 2]), "poisson_log")
    >>> model.dim  # three effects of groups, a fixed one, and a variance
    5
    """

    def __new__(cls, X: Any = None, y: Any = None, random: Any = None, *args: Any, **settings: Any) -> Any:
        """Make a model with one grouping factor, or, of several, a `torchngvi.mixed_models.MultilevelModel`."""
        if asked.several(random):
            return MultilevelModel(X, y, random, *args, **settings)
        return super().__new__(cls)

    members = False  # what `fit` answers is of one set of targets
    column_names: tuple[str, ...] = ()  # of X, where a formula has made it

    @tracked
    def __init__(
        self,
        X: Any,
        y: Any,
        random: RandomEffects | tuple[Any, Any] | Several,
        family: str | Likelihood = "bernoulli_logit",
        *,
        prior: MixedPrior | None = None,
        weights: Any = None,
        offset: Any = None,
    ) -> None:
        prior, only = checked_prior(prior), asked.only(random)
        prior = asked.prior_for(prior, random)
        learned = self.learned = asked.learned_of(family, prior)
        super().__init__(
            X, y, only, family if learned is None else learned.at(1.0), prior=prior, weights=weights, offset=offset
        )
        if learned is not None and learned.units:
            asked.check_varies(self.rows.y)

    def settle(self) -> None:
        """Set what depends on the data of all processes: centres and scales of columns, a learned parameter, priors."""
        super().settle()
        if self.learned is None:
            return
        self.fixed = self.rows.fixed = copy.copy(self.fixed)
        self.value = self.learned.begin(self.rows)
        self.rows.likelihood = self.fixed.likelihood = self.learned.at(self.value)
        self.covariance_prior = covariance_prior_of(self.asked, self.rows)  # which may depend on the likelihood

    def holding(self, value: float) -> Self:
        """Make the same model, with a learned parameter held at a value in the log joint over all coordinates.

        Args:
            value: of the parameter, positive.

        Returns:
            A new model, with the same prior of Ω.

        Raises:
            InputError: if the model learns no parameter.
        """
        if self.learned is None:
            raise InputError(f"the likelihood {type(self.rows.likelihood).__name__} has no parameter that is learned.")
        new = copy.copy(self)
        new.rows, new.value = copy.copy(self.rows), value
        new.rows.likelihood = self.learned.at(value)
        return new

    @tracked
    def fit(
        self,
        *,
        marginalise: Marginalise | None = None,
        nodes: int | None = None,
        draws: int = 4096,
        seed: int = 0,
        progress: bool = True,
        max_evaluations: int = 1000,
        max_seconds: float | None = None,
    ) -> MixedResult:
        """Fit the model: fixed effects and variance components with intervals that are theirs, and all random effects.

        A Gaussian over all coordinates makes the posterior of variance components too narrow and, of binary data,
        shifts it. So random effects are integrated out, by adaptive Gauss-Hermite quadrature over the r effects of each
        group, or in closed form where noise is Gaussian; the few global parameters, one of the likelihood among them
        where it is learned, have a Gaussian by natural-gradient variational inference, whose draws are weighted to
        their posterior, with a k-hat; random effects have their moments given the globals.

        Args:
            marginalise: "quadrature" as above, the default for Gaussian noise, for a learned parameter, which only it
                can fit, and otherwise for r = 1 up to 32,000 rows and for r = 2 up to 12,000, beyond which it takes
                minutes; "response" for the means of a Gaussian over all coordinates and covariances of the globals by
                linear response, the default otherwise; "none" for that Gaussian as it is.
            nodes: quadrature nodes in each dimension; by default as many as make no difference, and none where noise
                is Gaussian.
            draws: the number of weighted draws of the globals, at least 100.
            seed: of all draws.
            progress: show a bar.
            max_evaluations: budget of each of the fits that this is made of, in expectations.
            max_seconds: budget of all of them, in seconds; draws and their weights come on top.

        Returns:
            The result, which prints as a table and says what was used.

        Raises:
            InputError: another word for marginalise, a seed that is no whole number, nodes without quadrature, too few
                draws, or a model that needs the random effects integrated out with another word than that.

        >>> import torch
        >>> groups = torch.arange(20) // 5
        >>> X = torch.ones(20, 1, dtype=torch.float64)
        >>> y = torch.tensor([1.0, 0, 2, 1, 0, 5, 7, 4, 6, 5, 2, 3, 1, 2, 2, 0, 0, 1, 0, 0])
        >>> result = MixedModel(X, y, (X, groups), "poisson_log").fit(progress=False)
        >>> result.converged, result.k_hat < 0.7
        (True, True)
        >>> low, high = result.summary().sd.low.item(), result.summary().sd.high.item()
        >>> 0.3 < low < 1.5 < high < 8.0  # of four groups
        True
        """
        everyone = self.processes or Processes.alone()
        with everyone.together():
            budget = Budget(max_evaluations, max_seconds)
            way, seed = self._way(marginalise, nodes, draws), asked.seed_of(seed)
        everyone.agree(marginalise=way, nodes=nodes, draws=draws, seed=seed)
        X = self.rows.X  # or, of several processes, a root of its Gram matrix
        X = X if self.processes is None else _root(self.rows.total(X.mT @ X)[0])
        if self.rows.leads:
            names = self.column_names or asked.numbers(self.rows.p)
            own_noise = self.rows.likelihood.link == "identity"
            groups = {"the grouping factor": self.rows.all_groups}
            remarks.warn_of(X, self.rows.columns, groups, names, own_noise)
        if way == "quadrature":
            return self._integrated(nodes, draws, seed, progress, budget)
        q = self.posterior()
        first = fit(q, self, progress=progress, **budget.left())
        near = Conditional(q)
        posterior: Gaussian = near.marginal()
        clause = "covariances of q"
        if way == "response":
            posterior, clause = response.wider(self, near, progress, **budget.left())
        weighted = response.responded(self, near, posterior, draws, seed)
        return MixedResult(
            self,
            asked.unweighted(weighted, clause, draws, self.all_dim),
            first,
            -first.loss,
            None,
            posterior,
            weighted,
            near,
            Joint(q),
            asked.numbers(self.rows.p),
            asked.numbers(self.rows.r),
            asked.numbers(self.rows.n),
        )

    def _way(self, marginalise: Marginalise | None, nodes: int | None, draws: int) -> Marginalise:
        """What is done with the random effects, checked."""
        asked.check_way(marginalise)
        if nodes is not None and marginalise in ("response", "none"):
            raise InputError(f"nodes are those of marginalise='quadrature'; got marginalise={marginalise!r}.")
        read_size("draws", draws, "counts draws, which are to say something about a tail,", at_least=_FEWEST)
        way = self._default() if marginalise is None and nodes is None else marginalise or "quadrature"
        if way != "quadrature" and self.learned is not None:
            raise InputError(
                f"marginalise={way!r} fits a Gaussian over all coordinates, which cannot have a {self.learned.name} "
                "that is learned; use 'quadrature', or give a likelihood with its parameter."
            )
        if way == "response":
            self.rows.check_one_process("linear response")
        return way

    def _integrated(self, nodes: int | None, draws: int, seed: int, progress: bool, budget: Budget) -> MixedResult:
        """Fit with the random effects integrated out."""
        near: Conditional | None = None
        if isinstance(self.rows.likelihood, GaussianNoise) and nodes is None:
            closed = GaussianMixed(self, self.learned)
            target: IntegratedMixed = closed
            start: Gaussian = starting.of_gaussian(closed)
        else:
            target, start, near = self._by_quadrature(nodes, seed, progress, budget)
        found = integrated(target, start, draws, seed, progress, **budget.left())
        return MixedResult(
            self,
            _exact(found, draws),
            found.fit,
            found.elbo,
            found.log_evidence,
            found.posterior,
            found.draws,
            ByQuadrature(target),
            Joint(None if near is None else near.q, partial(self._joint_at, found.posterior)),
            asked.numbers(self.rows.p),
            asked.numbers(self.rows.r),
            asked.numbers(self.rows.n),
        )

    def _by_quadrature(
        self, nodes: int | None, seed: int, progress: bool, budget: Budget
    ) -> tuple[MarginalMixed, Gaussian, Conditional]:
        """The log joint of the globals, where to begin, and the Gaussian over all coordinates that found that."""
        q, model = self.posterior(), self
        fit(q, model, progress=progress, **budget.left())
        near, phi, sd = Conditional(q), 0.0, 0.0
        if self.learned is not None:
            guess = MarginalMixed(model, nodes, near.start, learned=self.learned)
            phi, sd = starting.parameter(guess, near, self.value)
            model = self.holding(math.exp(phi))
            fit(q, model, progress=progress, **budget.left())
            near = Conditional(q)
        nodes = enough_nodes(model, near, seed) if nodes is None else nodes
        target = MarginalMixed(model, nodes, near.start, learned=self.learned)
        start = near.marginal() if self.learned is None else starting.beside(near, phi, sd)
        return target, start, near

    def _joint_at(self, posterior: Gaussian) -> PrecisionCholeskyGaussian:
        """The best Gaussian over all coordinates, a learned parameter held at the mean of its logarithm."""
        model = self if self.learned is None else self.holding(math.exp(float(posterior.mean[-1])))
        q = model.posterior()
        fit(q, model, progress=False)
        return q

    def _default(self) -> Marginalise:
        if self.learned is not None or isinstance(self.rows.likelihood, GaussianNoise):
            return "quadrature"
        if self.rows.all_rows <= _ROWS.get(self.rows.r, 0):
            return "quadrature"
        return "response" if self.processes is None else "none"


def _root(gram: Tensor) -> Tensor:
    """A root R of a Gram matrix, RᵀR, which may be singular."""
    sizes = gram.diagonal().sqrt().clamp_min(finfo(gram.dtype).tiny)
    values, vectors, _ = eigh(gram / sizes[:, None] / sizes)
    return values.clamp_min(0.0).sqrt()[:, None] * vectors.mT * sizes


def _exact(found: Integrated, draws: int) -> str:
    return (
        f"random effects integrated out {found.target.how}; a Gaussian on the {found.target.dim}\n"
        f"global parameters, its draws weighted to their posterior: {asked.worth(found.draws, draws)}"
    )
