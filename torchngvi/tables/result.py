"""The result of a regression or a mixed model: parameters, groups, new rows, effects of columns, comparisons."""

import math
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import read_list, read_number, read_seed, read_size
from torchngvi.diagnostics.importance import USELESS
from torchngvi.errors import InputError
from torchngvi.messages import listed, needing
from torchngvi.models import checks
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.tables import effects
from torchngvi.tables.columns import Separation, describe_separation, separating
from torchngvi.tables.effects import (
    Asked,
    EffectTable,
    GroupsLeftOut,
    Prediction,
    Predictor,
    RowsLeftOut,
    TableDraws,
    check_kind,
    check_population,
)
from torchngvi.tables.families import Family, Held
from torchngvi.tables.parts import Design, Factor, Posterior
from torchngvi.tables.priors import Priors
from torchngvi.tables.table import (
    ByFactor,
    FactorTable,
    Marginals,
    SummaryTable,
    probability,
    remark_on_bounds,
    remark_on_dispersion,
    remark_on_spreads,
    remark_on_tails,
)

DRAWS, FEWEST = 1000, 100  # joint draws by default, and where there are so many groups that 256 MB do not hold these
HELD = 2**25  # numbers in 256 MB
FORMAT = 1  # of the content of a file
SAID = {"converged": bool, "reason": str, "method": str, "k_hat": float, "effective": float, "gradients": int}
BLUE, GREY = "#1f5a94", "0.6"
NAMED = 40  # groups whose names are written at the axis
BINS = 30  # of a histogram at most


@dataclass(frozen=True, repr=False)
class TableResult:
    """A fitted regression or mixed model, of a table or of arrays, as `torchngvi.regression` and `torchngvi.mixed` do.

    Attributes:
        design: the rows that were fitted.
        family: of the likelihood.
        fitted: the posterior of the globals, `torchngvi.tables.parts.Posterior`.
        settled: the priors, `torchngvi.tables.priors.Priors`; `priors` is their text.
        formula: what makes the design of a table; None where the model was made of arrays.
        refit: a function that fits the same rows with other weights, (N,), under the same priors and in the same
            coordinates, for `leave_one_group_out`; None where there is no such function.

    ``print`` shows the table of `summary`.

    >>> from torchngvi.tables.model import MixedModel
    >>> X = torch.ones(6, 1, dtype=torch.float64)
    >>> result = MixedModel(X, [3, 4, 0, 1, 2, 6], (X, [0, 0, 1, 1, 2, 2]), "poisson").fit(progress=False)
    >>> result.summary().fixed.names, result.effects()[0].names
    (('Intercept',), ('0', '1', '2'))
    >>> result.predict(X, X, [0, 0, 1, 1, 2, -1]).draws.shape  # the last of a group that the data do not have
    torch.Size([1000, 6])
    """

    design: Design
    family: Family
    fitted: Posterior
    settled: Priors
    formula: Any = None
    refit: Callable[[Tensor], Posterior] | None = None
    _kept: dict[tuple[int, int], TableDraws] = field(default_factory=dict, compare=False)

    # ---------------------------------------------------------------------------- how the fit went

    @property
    def converged(self) -> bool:
        """Whether the search for the mode of the globals has ended well."""
        return self.fitted.converged

    @property
    def reason(self) -> str:
        """Why it ended, one sentence."""
        return self.fitted.reason

    @property
    def method(self) -> str:
        """What was computed, one sentence."""
        return self.fitted.method

    @property
    def log_evidence(self) -> float | None:
        """The logarithm log p(y) of the evidence, in nats; None where it is not known."""
        return self.fitted.log_evidence

    @property
    def k_hat(self) -> float:
        """The Pareto k̂ of the importance weights of the draws; above 0.7 what is said is not to be trusted."""
        return self.fitted.weighted.k_hat

    @property
    def effective(self) -> float:
        """The effective number of draws."""
        return self.fitted.weighted.effective

    @property
    def priors(self) -> str:
        """The priors of the fit in one line."""
        return self.settled.describe()

    @property
    def posterior(self) -> CholeskyGaussian:
        """The Gaussian over the coordinates of the globals that has the mean and covariance of the weighted draws."""
        theta, weights = self.fitted.weighted.theta, self.fitted.weighted.weights
        apart = theta - weights @ theta
        root = torch.linalg.cholesky((apart.mT * weights) @ apart)
        return CholeskyGaussian(theta.shape[1], mean=weights @ theta, scale=root, dtype=theta.dtype)

    # ---------------------------------------------------------------------------- names

    @property
    def fixed_names(self) -> tuple[str, ...]:
        """Names of the fixed effects, p of them; of categories without an order "label: column" of each."""
        return self.fitted.coordinates.names

    @property
    def random_names(self) -> ByFactor[tuple[str, ...]]:
        """For each grouping factor the names of its effects; where there is one factor, an index is one of these."""
        return ByFactor({of.name: of.effects for of in self.design.factors})

    @property
    def group_names(self) -> ByFactor[tuple[str, ...]]:
        """For each grouping factor the labels of its groups; where there is one factor, an index is one of these."""
        return ByFactor({of.name: of.levels for of in self.design.factors})

    @property
    def response(self) -> str:
        """What the outcome is called."""
        return "y" if self.formula is None else str(self.formula.response)

    @property
    def outcomes(self) -> tuple[str, ...]:
        """Labels of the categories of the outcome, else none."""
        return tuple(getattr(self.formula, "outcomes", None) or self.family.outcomes or ())

    # ---------------------------------------------------------------------------- what it says

    def summary(self, interval: float = 0.95) -> SummaryTable:
        """Summarise the posterior: means, sds and equal-tailed intervals of all parameters, in the units of the table.

        Args:
            interval: the probability of the intervals, between 0 and 1.

        Returns:
            A table; ``str`` prints it. It has the fixed effects, ``fixed``; for each grouping factor the standard
            deviations and correlations of its effects, ``random[factor].sd`` and ``.correlation``; and the parameters
            of the likelihood, ``likelihood``, of an ordinal one its thresholds.

        Raises:
            InputError: an interval that is no probability.
        """
        interval = probability(interval)
        theta, weights, *_ = self.fitted.weighted
        user, random = self.fitted.coordinates.to_user(theta), ByFactor[FactorTable]()
        for factor, sd, correlation in zip(self.design.factors, user.sd, user.correlation, strict=True):
            pairs = [(i, k) for i in range(len(factor.effects)) for k in range(i)]
            between = [f"{factor.effects[k]}, {factor.effects[i]}" for i, k in pairs]
            i, k = torch.tensor(pairs, dtype=torch.long, device=theta.device).reshape(-1, 2).unbind(-1)
            random[factor.name] = FactorTable(
                Marginals.of(factor.effects, sd, weights, interval),
                Marginals.of(between, correlation[:, i, k], weights, interval),
            )
        family, likelihood, natural = self.family, None, self.family.natural(user.phi)
        if family.parameters:
            likelihood = Marginals.of(family.parameters, natural, weights, interval)
        fixed = Marginals.of(self.fixed_names, user.coefficients, weights, interval)
        title = "likelihood" if family.outcomes is None else "thresholds"
        foot = self._foot()
        return SummaryTable(fixed, random, likelihood, interval, self._head(), foot, family.ratio, title)

    def __str__(self) -> str:
        return str(self.summary())

    __repr__ = __str__

    @property
    def random(self) -> ByFactor[list[Marginals]]:
        """The random effects of all groups by the name of the grouping factor, `effects` with intervals of 95 %."""
        return self.effects()

    def effects(self, interval: float = 0.95) -> ByFactor[list[Marginals]]:
        """Summarise the random effects: posterior means, sds and intervals of all groups of each factor.

        Args:
            interval: the probability of the intervals, between 0 and 1.

        Returns:
            For each factor a list of r, one `Marginals` over its n groups for each effect; where there is one factor,
            an integer is the place of an effect.

        Raises:
            InputError: an interval that is no probability.
        """
        interval, drawn = probability(interval), self.draws().effects
        return ByFactor(
            {
                of.name: [Marginals.of(of.levels, b, None, interval) for b in drawn[of.name].unbind(-1)]
                for of in self.design.factors
            }
        )

    def draws(self, count: int | None = None, seed: int = 0) -> TableDraws:
        """Draw from the posterior of all parameters: globals first, and random effects given the globals.

        Args:
            count: the number of draws; by default 1000, or as many as fit into 256 MB where there are many groups.
            seed: of the draws.

        Returns:
            Equally likely draws; the same ones for the same arguments.
        """
        held = sum(len(of.levels) * len(of.effects) for of in self.design.factors)
        most = min(DRAWS, max(FEWEST, HELD // max(held, 1)))
        count = most if count is None else read_size("count", count, "counts draws")
        seed = read_seed("seed", seed)
        if (count, seed) not in self._kept:
            generator = torch.Generator().manual_seed(seed)
            self._kept[count, seed] = self.drawn(self.fitted.weighted.resampled(count, generator), generator)
        return self._kept[count, seed]

    @torch.no_grad()
    def drawn(self, theta: Tensor, generator: torch.Generator) -> TableDraws:  # theta (S, dim)
        """Bring draws of the globals to the units of the user, with effects drawn given them.

        Returns:
            Draws that are as likely as those of the globals.
        """
        names, fitted = [of.name for of in self.design.factors], self.fitted
        user = fitted.coordinates.to_user(theta)
        effects = zip(fitted.coordinates.within, fitted.effects(theta, generator) if names else (), strict=True)
        b = (units.to_user(of_groups) for units, of_groups in effects)
        sd, correlation, drawn = (ByFactor(zip(names, some, strict=True)) for some in (user.sd, user.correlation, b))
        return TableDraws(user.coefficients, sd, correlation, drawn, self.family.natural(user.phi), user.phi, theta)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n times from the posterior of the globals, in the units of the table.

        The columns are those of `summary`, in its order: fixed effects; of each factor standard deviations, and
        correlations row by row of their lower triangle; parameters of the likelihood.

        Args:
            n: the number of draws.
            generator: the source of the noise, on the CPU; torch's default generator if None.

        Returns:
            Equally likely draws, (n, P).
        """
        theta = self.fitted.weighted.resampled(read_size("n", n, "counts draws"), generator)
        user, parts = self.fitted.coordinates.to_user(theta), []
        for sd, correlation in zip(user.sd, user.correlation, strict=True):
            i, k = torch.tril_indices(sd.shape[1], sd.shape[1], -1, device=sd.device)
            parts += [sd, correlation[:, i, k]]
        return torch.cat([user.coefficients, *parts, self.family.natural(user.phi)], -1)

    # ---------------------------------------------------------------------------- new rows

    @torch.no_grad()
    def predict(
        self,
        X: Any,  # (M, p)
        Z: Any = None,  # (M, r)
        groups: Any = None,  # (M,)
        *,
        offset: Any = None,  # (M,)
        extra: Sequence[Any] = (),
        kind: str = "mean",
        population: bool | str = False,
        interval: float = 0.95,
        seed: int = 0,
    ) -> Prediction:
        """Predict rows, of groups that the data have or of others, with intervals over the whole posterior.

        Args:
            X: of a model made by a formula a table, and nothing else; otherwise the design of fixed effects, (M, p).
            Z: the design of the random effects, (M, r); of several grouping factors a dict from the name of each to a
                pair (Z, groups).
            groups: the groups of the rows, (M,): numbers of groups of the data, or negative ones, each a group that the
                data do not have, whose effects are drawn from N(0, Σ). None where all rows are of one such group.
            offset: what is added to the linear predictor, (M,).
            extra: what is known with the outcome, as the trials of a binomial one, each (M,); for responses.
            kind: "mean" of y given the effects of its group; "linear", the linear predictor; "response", y itself,
                whose intervals are those of new data, of counts between whole numbers; or "probability" of each
                category of an outcome, which is its "mean" too.
            population: False for the groups of the rows; "typical" for effects of 0; "average", or True, for the
                average over new groups, E over b ~ N(0, Σ) of the mean.
            interval: the probability of the intervals, between 0 and 1.
            seed: of the draws.

        Returns:
            Means, sds, intervals and the draws that they are of.

        Raises:
            InputError: rows of another width, groups that are none of the data, another kind or population.
        """
        kind, population, interval = check_kind(kind, self.family), check_population(population), probability(interval)
        rows = self.formula.of(X) if self.formula is not None and Z is None else self._rows(X, Z, groups, offset, extra)
        if not len(rows.X):
            raise InputError("a prediction is of at least one row; the table, or X, has none.")
        whole = kind == "response" and self.family.discrete
        return Prediction.of(self.predictor(rows, population, seed).all(kind), interval, whole=whole)

    def predictor(self, rows: Design, population: str, seed: int, draws: TableDraws | None = None) -> Predictor:
        """Make what draws linear predictors of rows; the same seed gives the same effects."""
        generator = torch.Generator().manual_seed(read_seed("seed", seed) + 2)
        draws = draws or self.draws(seed=seed)
        return Predictor(self.family, self.fitted.coordinates, rows, draws, population, generator)

    def _rows(self, X: Any, Z: Any, groups: Any, offset: Any, extra: Sequence[Any]) -> Design:
        """The design of new rows of arrays."""
        fit = self.design
        X = checks.numbers("X", X, fit.X)
        if X.ndim != 2 or X.shape[1] != len(fit.names):
            raise InputError(f"new rows need X of shape (M, {len(fit.names)}); got {tuple(X.shape)}.")
        if not isinstance(Z, Mapping):
            Z = {of.name: (Z, groups) for of in fit.factors[:1]}
        if set(Z) != {of.name for of in fit.factors}:
            raise InputError(
                "new rows need a pair (Z, groups) of each grouping factor, "
                f"{', '.join(of.name for of in fit.factors)}; got {', '.join(map(str, Z)) or 'none'}."
            )
        factors = tuple(_of_new_rows(of, Z[of.name][0], Z[of.name][1], len(X)) for of in fit.factors)
        shift = torch.zeros_like(X[:, 0]) if offset is None else checks.numbers("offset", offset, fit.X)
        if self.family.nominal:
            self.family.settled(fit.y, fit.weights, shift)  # which refuses an offset
        extra = read_list("extra", extra, "is a list of what stands beside the outcome, as the trials, or an empty one")
        beside = tuple(checks.numbers(name, x, fit.X) for name, x in zip(self.family.extra, extra, strict=False))
        for name, x in (("offset", shift), *zip(self.family.extra, beside, strict=False)):
            if x.shape != (len(X),):
                raise InputError(f"{name} must have one entry for each of the {len(X)} rows; got {tuple(x.shape)}.")
        return Design(X, fit.names, factors, shift, beside, torch.ones_like(shift))

    # ---------------------------------------------------------------------------- effects of columns

    def marginal_effects(
        self,
        x: str,
        at: Mapping[str, Any] | None = None,
        by: str | Sequence[str] = (),
        *,
        new: Any = None,
        kind: str = "mean",
        population: bool | str = False,
        interval: float = 0.95,
        seed: int = 0,
    ) -> EffectTable:
        """Compute what a change of one column does to the outcome, averaged over rows: average marginal effects.

        Of a column of numbers it is the average over rows of dE[y]/dx, by central differences of predictions, with a
        step of 1e-5 standard deviations of the column in the fit to both sides, or to one side where the other has no
        value, as of a root at 0; of categories the difference of the average prediction between each level and the
        first.  Both are found draw by draw, all else in a row as it is.

        Args:
            x: a column of the table; the numbers of a grouping factor are levels.
            at: for some columns the values that all rows are given, such as ``{"z": [0, 1]}``: one average for each
                combination.
            by: a column, or several, of whose values each has an average over its own rows.
            new: a table of rows to average over, in the place of that of the fit, whose rows count by their weights.
            kind: "mean" of y, of categories the probability of each, or "linear".
            population, interval, seed: as in `predict`.

        Returns:
            A table with draws; ``str`` prints it, and ``.table`` is a `pandas.DataFrame`.

        Raises:
            InputError: a model of arrays, a column that the formula does not name as a predictor, one that jumps where
                its derivative is asked for, or categories that ``at`` or ``by`` sets too.

        >>> import pandas
        >>> from torchngvi.tables.model import regression
        >>> table = pandas.DataFrame({"y": [1.0, 2.0, 4.0, 5.0], "x": [0.0, 1.0, 2.0, 3.0], "z": [0, 1, 1, 0]})
        >>> result = regression("y ~ x * z", table).fit(progress=False)
        >>> result.marginal_effects("x", at={"z": [0, 1]}).table.columns.tolist()
        ['z', 'mean', 'sd', 'low', 'high']
        """
        return Asked(self, at, by, new, kind, population, interval, seed).marginal_effects(x)

    def contrasts(
        self,
        x: str,
        by: str | Sequence[str] = (),
        at: Mapping[str, Any] | None = None,
        *,
        values: Sequence[Any] | None = None,
        scale: str = "mean",
        new: Any = None,
        population: bool | str = False,
        interval: float = 0.95,
        seed: int = 0,
    ) -> EffectTable:
        """Compare average predictions between all pairs of levels of one column, all else in a row as it is.

        Args:
            x: a column of the table, of categories, or of numbers with ``values``.
            by, at, new: as in `marginal_effects`.
            values: which levels or numbers are compared, and in which order; by default all levels, or both values of a
                column that has two.
            scale: "mean" for differences of average means of y, "linear" for those of linear predictors, or "ratio" for
                ratios of average means.
            population, interval, seed: as in `predict`.

        Returns:
            A table with a row for each pair, the later less, or over, the earlier one.

        Raises:
            InputError: a model of arrays, another scale, or fewer than two values.
        """
        kind = "linear" if scale == "linear" else "mean"
        return Asked(self, at, by, new, kind, population, interval, seed).contrasts(x, values, scale)

    def predictions(
        self,
        new: Any = None,
        by: str | Sequence[str] = (),
        at: Mapping[str, Any] | None = None,
        *,
        kind: str = "mean",
        population: bool | str | None = None,
        interval: float = 0.95,
        seed: int = 0,
    ) -> EffectTable:
        """Predict rows, or averages over rows, in a table that has the columns they are of.

        Args:
            new: a table of rows; a dict such as ``{"x": [0, 1], "sex": ["f", "m"]}`` for a grid of all combinations, in
                which other columns are at their means or most frequent levels and groups are left out; by default the
                rows of the fit.
            by, at: as in `marginal_effects`.
            kind: "mean" of y or "linear", its predictor.
            population: as in `predict`; by default "typical" for a grid without the columns of groups, else False.
            interval, seed: as in `predict`.

        Returns:
            A table: without ``by`` and ``at`` a line for each row.

        Raises:
            InputError: a model of arrays, or a column that the formula does not name.
        """
        if isinstance(new, Mapping) and not hasattr(new, "columns"):
            new, grouped = effects.grid(self, new)
            population = population if grouped or population is not None else "typical"
        return Asked(self, at, by, new, kind, population or False, interval, seed).predictions()

    # ---------------------------------------------------------------------------- what was not seen

    def leave_one_out(self, worst: float = math.inf, count: int | None = None, seed: int = 0) -> RowsLeftOut:
        """Compute the log predictive density of each row given the other rows, by Pareto-smoothed importance weights.

        Of a mixed model it is given the effects of the row's group, which the other rows of the group tell of: what is
        left out is a row and not a group. Rows of weight 0 are left out of the result.

        Args:
            worst: the k-hat above which the model is fitted without the row, where there is `refit`; 0.7 for all whose
                weights are of no use, by default none, since a mixed model may have many of them.
            count: how many draws of the effects, as `draws` has it; with 1000 the sum over 240 rows of 30 groups had a
                Monte Carlo error of 0.3 nats, which falls with the root of their number.
            seed: of these draws.

        Returns:
            The densities, with their sum and its standard error, and k-hats, which say what rows are not to be trusted.

        Raises:
            InputError: a bound that is negative.
        """
        worst = read_number("worst", worst, "bounds a k-hat", at_least=0, infinite=True)
        return effects.leave_one_out(self, worst, count, seed)

    def leave_one_group_out(self, worst: float = USELESS, groups: Factor | None = None) -> GroupsLeftOut:
        """Compute the log predictive density of all rows of each group given the other groups.

        Use it to compare models of groups, and to find groups that a model does not expect: the density is that of a
        group which the data do not have, its effects integrated out, and rows count by their weights.

        Args:
            worst: the k-hat above which the model is fitted without the group, where there is `refit`; 0 for all
                groups, infinity for none.
            groups: of a model without grouping factors, those whose rows are left out together.

        Returns:
            The densities, with their sum and its standard error over groups, and k-hats.

        Raises:
            InputError: of a model without grouping factors, or with several; a negative bound.
        """
        worst = read_number("worst", worst, "bounds a k-hat", at_least=0, infinite=True)
        return effects.leave_one_group_out(self, worst, groups)

    # ---------------------------------------------------------------------------- elsewhere

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result to a file, with what it needs to say and predict the same; `torchngvi.tables.load` reads it.

        The file has the columns of the table that the formula names, and tensors, numbers and texts alone.

        Args:
            path: of the file.

        Raises:
            InputError: a table with cells that are no texts and no numbers.
        """
        torch.save(state_of(self), path)

    def to_arviz(self, seed: int = 0) -> Any:
        """Export the joint draws for ArviZ, with what its checks of a model need: ``arviz.loo``, ``arviz.plot_ppc``.

        Args:
            seed: of the draws, and of the new data.

        Returns:
            An ``arviz.InferenceData``, from ArviZ 1.0 on an ``xarray.DataTree``. Its ``posterior`` has ``beta``
            (fixed); of one grouping factor ``sd`` (random), ``correlation`` (random, random_bis) and ``b`` (group,
            random), of several ``sd_<factor>``, ``correlation_<factor>`` and ``b_<factor>``; and each parameter of the
            likelihood. ``log_likelihood``, ``posterior_predictive`` and ``observed_data`` have ``y`` over the rows of
            positive weight; a row of weight w counts w times in its log likelihood.

        Raises:
            ImportError: without ArviZ.
        """
        draws, one = self.draws(seed=seed), len(self.design.factors) == 1
        values, coords = {"beta": draws.fixed}, {"fixed": list(self.fixed_names)}
        dims = {"beta": ["fixed"]}
        for of in self.design.factors:
            end = "" if one else f"_{of.name}"
            random, bis, group = f"random{end}", f"random{end}_bis", "group" if one else of.name
            values |= {f"sd{end}": draws.sd[of.name], f"correlation{end}": draws.correlation[of.name]}
            values |= {f"b{end}": draws.effects[of.name]}
            coords |= {random: list(of.effects), bis: list(of.effects), group: list(of.levels)}
            dims |= {f"sd{end}": [random], f"correlation{end}": [random, bis], f"b{end}": [group, random]}
        values |= dict(
            zip((name.replace(" ", "_") for name in self.family.parameters), draws.parameters.mT, strict=True)
        )
        predictor, here = self.predictor(self.design, "", seed), self.design.weights > 0
        eta = predictor.linear(slice(None))[0]
        log_p = self.design.weights * self.family.log_prob(eta, self.design.y, draws.phi[:, None])
        new = predictor.all("response")
        return inference_data(values, coords, dims, log_p, new, self.design.y[0], here)

    def plot(self, interval: float = 0.95, per_sd: bool = True, ax: Any = None) -> Any:
        """Draw the fixed effects but the intercept, with intervals, on matplotlib's axes, or on new ones.

        Args:
            interval: the probability of the intervals.
            per_sd: whether each is per standard deviation of its column, so that all have one scale; else per unit.
            ax: matplotlib axes to draw on; new ones by default.

        Returns:
            The axes.
        """
        fixed = self.summary(interval).fixed
        scales = self.fitted.coordinates.scales.to(fixed.mean) if per_sd else torch.ones_like(fixed.mean)
        scaled = fixed._replace(**{end: getattr(fixed, end) * scales for end in ("mean", "sd", "low", "high")})
        return coefficients(scaled, f"coefficient, per {'sd' if per_sd else 'unit'} of its column", ax)

    def plot_effects(
        self, factor: str | int | None = None, effect: int | str = 0, interval: float = 0.95, ax: Any = None
    ) -> Any:
        """Draw a caterpillar plot: the effects of all groups of one factor in rising order, with intervals.

        Args:
            factor: the name of the grouping factor; None where there is one.
            effect: which of its random effects, its number or its name.
            interval, ax: as in `plot`.

        Returns:
            The axes.

        Raises:
            ImportError: without matplotlib.
            InputError: a factor or an effect that the model does not have.
        """
        known = self.random_names
        if factor not in known and len(known) == 1:  # an effect alone, of the one factor
            factor, effect = next(iter(known)), effect if factor is None else factor
        names = known[str(factor)]
        place = names.index(effect) if isinstance(effect, str) and effect in names else effect
        if isinstance(place, str) or not 0 <= place < len(names):
            raise InputError(
                f"effect is the number of a random effect, 0 to {len(names) - 1}, or one of the names "
                f"{', '.join(names)}; got {effect!r}."
            )
        label = names[place] if len(known) == 1 else f"{factor}: {names[place]}"
        return caterpillar(self.effects(interval)[str(factor)][place], label, ax)

    def plot_marginal(self, x: str, points: int = 50, interval: float = 0.95, ax: Any = None, **asked: Any) -> Any:
        """Draw the average prediction over rows along one column, all else in a row as it is.

        Args:
            x: a column of the table.
            points: how many values of a column of numbers, over its range in the fit.
            interval, ax: as in `plot`.
            asked: what `predictions` takes, such as ``kind`` or ``population``.

        Returns:
            The axes.
        """
        at = effects.along(self, x, points)
        return marginal(self.predictions(at={x: at}, interval=interval, **asked), x, self.response, ax)

    def plot_predictive(self, draws: int = 50, seed: int = 0, ax: Any = None) -> Any:
        """Draw a posterior predictive check: the outcomes of the fit, and those that the model draws for its rows.

        Of survival the former end where they were censored, and the latter do not.

        Args:
            draws: how many sets of outcomes are drawn.
            seed: of the draws.
            ax: as in `plot`.

        Returns:
            The axes.
        """
        here = self.design.weights > 0
        drawn = self.predictor(self.design, "", seed).all("response")[: read_size("draws", draws), here]
        return predictive(self.design.y[0][here], drawn, self.family.discrete, self.response, ax)

    # ---------------------------------------------------------------------------- lines of the table

    def _head(self) -> str:
        factors = self.design.factors
        success = getattr(self.formula, "success", "")
        lines = []
        if self.family.nominal:
            lines = [f"each category of {self.response} is against {self.outcomes[0]}, which comes first"]
        if success:
            made = self.formula
            why = f", which {made.why}; positive={made.failure!r} takes the other" if made.why else ""
            lines = [f"the success is {made.columns.response[0]} = {success}{why}"]
        said = f"{'mixed model' if factors else 'regression'}, {self.family.name}: {len(self.design.X)} rows"
        groups = ", ".join(f"{len(of.levels)} of {of.name}" for of in factors)
        return "\n".join([*lines, f"{said}; groups: {groups}" if factors else said])

    def _foot(self, width: int = 100) -> str:
        """The priors, the method with what its draws are worth, and remarks."""
        # width: of a line below a table
        theta, _, k_hat, effective = self.fitted.weighted
        worth = f"k-hat {k_hat:.2f}, {effective:.0f} of {len(theta)} draws effective."
        lines = [textwrap.fill(text, width) for text in (f"priors: {self.priors}", f"{self.method} {worth}")]
        return "\n".join([*lines, *self.remarks])

    @property
    def remarks(self) -> list[str]:
        """What should be said of data and answers that are not what a user may think they are, a sentence each."""
        theta, weights, k_hat, _ = self.fitted.weighted
        coordinates, rows, lines = self.fitted.coordinates, self.design, list[str]()
        natural = self.family.natural(coordinates.to_user(theta).phi)
        here, said = rows.weights > 0, dict[str, list[str]]()
        if self.family.name in ("bernoulli", "probit") or self.family.nominal:
            for k, label in enumerate(self.family.outcomes[1:] if self.family.outcomes else ("",), 1):
                pair = here & ((rows.y[0] == 0) | (rows.y[0] == k))  # the first and each of the others
                for line in describe_separation(rows.names, separating(rows.X[pair], rows.y[0][pair] > 0)):
                    said.setdefault(line, []).append(label)
            first = f" against {self.outcomes[0]}: " if self.family.nominal else ""
            lines += [f"{listed(labels)}{first}{line}" for line, labels in said.items()]
        if "trials" in self.family.extra:  # the rows with a success, and those with a failure
            some = here & (rows.y[0] > 0), here & (rows.y[0] < rows.y[1])
            X, won = torch.cat([rows.X[part] for part in some]), torch.cat([some[0][some[0]], ~some[1][some[1]]])
            lines += describe_separation(rows.names, separating(X, won))
        if self.family.outcomes and not self.family.intercept:  # ordered: what separates them at every threshold
            cuts = [separating(rows.X[here], rows.y[0][here] >= k) for k in range(1, len(self.family.outcomes))]
            found = (sorted(set.intersection(*map(set, places))) for places in zip(*cuts, strict=True))
            lines += describe_separation(rows.names, Separation(*map(tuple, found)))
        lines += self._unbounded()
        if self.family.name == "poisson":
            predictor = self.predictor(rows, "", 0, self.draws(FEWEST))
            eta = torch.cat([predictor.linear(at)[0] for at in predictor.parts()], 1)
            lines += remark_on_dispersion(eta, rows.y[0], rows.weights)
        lines += remark_on_tails(self.family.parameters, natural, weights) if self.family.outcomes is None else []
        _, xis, _ = coordinates.split(theta)
        for of, xi in zip(rows.factors, xis, strict=True):
            over = [f"{effect} over {of.name}" if len(xis) > 1 else effect for effect in of.effects]
            lines += remark_on_spreads(over, xi[:, : len(of.effects)].exp(), weights)
        if not self.converged:
            lines.append(f"NOT CONVERGED: {self.reason}")
        if not k_hat < USELESS:
            lines.append(
                f"k-hat {k_hat:.2f} is above {USELESS}: take means and intervals for rough, and draw no conclusion "
                "from this table alone."
            )
        return lines

    def _unbounded(self, shift: float = 0.1) -> list[str]:
        """Sentences about fixed effects that hardly anything but the prior bounds, by how their log prior bends."""
        # shift: posterior sds by which a coefficient is moved to see how its prior bends: exact for a normal one
        theta, weights, *_ = self.fitted.weighted
        p, mean = len(self.fixed_names), weights @ theta
        sd = (weights @ (theta - mean).square()).sqrt()[:p]
        step = torch.zeros(p, theta.shape[1], dtype=theta.dtype, device=theta.device)
        step.diagonal().copy_(shift * sd)
        up, down, here = self.settled.log_prob(torch.cat([mean + step, mean - step, mean[None]])).split((p, p, 1))
        precision = (2 * here - up - down) / (shift * sd).square()
        unit = self.fitted.coordinates.scales.abs().to(sd)
        return remark_on_bounds(self.fixed_names, sd / unit, precision.clamp_min(0.0).rsqrt() / unit)


def _of_new_rows(of: Factor, Z: Any, groups: Any, count: int) -> Factor:
    """A grouping factor on new rows of arrays, checked."""
    Z = checks.numbers("Z", Z, of.Z)
    if Z.shape != (count, len(of.effects)):
        raise InputError(f"new rows need Z of {of.name} of shape ({count}, {len(of.effects)}); got {tuple(Z.shape)}.")
    if groups is None:
        return of._replace(Z=Z, groups=torch.full((count,), -1, device=Z.device))
    numbers = checks.numbers("groups", groups, of.Z)
    whole = numbers.round().long()
    if whole.shape != (count,) or bool((whole != numbers).any()) or bool((whole >= len(of.levels)).any()):
        raise InputError(
            f"groups of new rows must be one whole number for each of the {count} rows, 0 to {len(of.levels) - 1} as "
            f"in the data of {of.name}, or negative for groups that the data do not have."
        )
    return of._replace(Z=Z, groups=whole)


# ------------------------------------------------------------------------------------ files, ArviZ and pictures


# Pictures are on matplotlib's axes; nothing is drawn on a screen, or remembered by pyplot.


def inference_data(
    values: Mapping[str, Tensor],  # draws of each variable, (S, ...)
    coords: Mapping[str, Sequence[str]],
    dims: Mapping[str, list[str]],
    log_likelihood: Tensor,  # (S, N)
    replicated: Tensor,  # (S, N)
    y: Tensor,  # (N,)
    here: Tensor,  # (N,), whether a row has a positive weight
) -> Any:
    """Make what ArviZ takes, an ``InferenceData``, from 1.0 on a ``DataTree``; rows without a weight are left out."""
    with needing("to_arviz", "test"):
        import arviz
    draws = {"log_likelihood": log_likelihood, "posterior_predictive": replicated}
    groups: dict[str, Any] = {
        "posterior": {name: x[None].cpu().numpy() for name, x in values.items()},
        **{name: {"y": x[:, here][None].double().cpu().numpy()} for name, x in draws.items()},
        "observed_data": {"y": y[here].double().cpu().numpy()},
    }
    named: dict[str, Any] = {
        "coords": {**{name: list(labels) for name, labels in coords.items()}, "row": here.nonzero()[:, 0].tolist()},
        "dims": {**dims, "y": ["row"]},
    }
    if int(arviz.__version__.partition(".")[0]) < 1:
        return arviz.from_dict(**groups, **named)
    return arviz.from_dict(groups, **named)


def state_of(result: Any) -> dict[str, Any]:
    """Return all that `result_of` makes the same result of, in tensors, numbers and texts."""
    fitted, design, family = result.fitted, result.design, result.family
    generator, weighted = torch.Generator().manual_seed(0), fitted.weighted
    theta = weighted.resampled(len(result.draws().theta), generator)  # those of result.draws()
    drawn = fitted.effects(theta, generator) if design.factors else ()
    made = result.formula.state() if result.formula is not None else _arrays(design)
    held = family.values if isinstance(family, Held) else {}
    return {
        "format": FORMAT,
        "made": made,
        "family": family.name,
        "held": dict(held),
        "outcomes": None if family.outcomes is None else list(family.outcomes),
        "priors": {name: repr(prior) for name, prior in result.settled.rows() if name in result.settled.named},
        "weighted": [weighted.theta, weighted.weights],
        "theta": theta,
        "effects": list(drawn),
        "log_evidence": None if fitted.log_evidence is None else float(fitted.log_evidence),
        **{name: kind(getattr(result, name, getattr(fitted, name, None))) for name, kind in SAID.items()},
    }


def _arrays(design: Design) -> dict[str, Any]:
    factors = [
        {"name": of.name, "effects": list(of.effects), "levels": list(of.levels), "Z": of.Z, "groups": of.groups}
        for of in design.factors
    ]
    parts = {"X": design.X, "offset": design.offset, "weights": design.weights, "y": list(design.y)}
    return {**parts, "names": list(design.names), "factors": factors}


def axes(ax: Any) -> Any:
    """The axes that were given, or new ones."""
    if ax is not None:
        return ax
    with needing("a picture", "cli"):
        from matplotlib.figure import Figure
    return Figure(layout="constrained").add_subplot()


def coefficients(of: Marginals, label: str, ax: Any) -> Any:
    """Draw coefficients but the intercept with intervals, the first on top."""
    places = [k for k, name in enumerate(of.names) if name.split(": ")[-1] != "Intercept" or len(of.names) == 1]
    return _dots(of, places[::-1], label, ax)


def caterpillar(of: Marginals, label: str, ax: Any) -> Any:
    """Draw the effects of all groups in rising order with intervals."""
    ax = _dots(of, of.mean.argsort().tolist(), label, ax)
    ax.set_ylabel("group")
    return ax


def _dots(of: Marginals, order: list[int], label: str, ax: Any) -> Any:
    """Draw points with intervals, one above the other."""
    ax = axes(ax)
    mean, low, high = (x[order].cpu().numpy() for x in (of.mean, of.low, of.high))
    places = range(len(order))
    ax.hlines(places, low, high, color=GREY, linewidth=1)
    ax.plot(mean, places, "o", color=BLUE, markersize=3)
    ax.axvline(0.0, color="0.3", linewidth=0.8)
    named = len(order) <= NAMED
    ax.set_yticks(list(places) if named else [], [of.names[k] for k in order] if named else [])
    ax.set_xlabel(label)
    return ax


def marginal(of: EffectTable, x: str, response: str, ax: Any) -> Any:
    """Draw average predictions along a column: a line with a band, or points with intervals; of categories one each."""
    ax, table = axes(ax), of.table
    groups = table.groupby("outcome", sort=False) if "outcome" in table else [(None, table)]
    for name, part in groups:
        if part[x].dtype.kind in "fi":
            (line,) = ax.plot(part[x], part["mean"], label=name)
            ax.fill_between(part[x], part["low"], part["high"], color=line.get_color(), alpha=0.2, linewidth=0)
        else:
            ends = [part["mean"] - part["low"], part["high"] - part["mean"]]
            ax.errorbar(part[x].astype(str), part["mean"], ends, fmt="o", capsize=3, label=name)
    if "outcome" in table:
        ax.legend()
    ax.set_xlabel(x)
    ax.set_ylabel(response)
    return ax


def predictive(y: Tensor, drawn: Tensor, discrete: bool, response: str, ax: Any) -> Any:  # y (N,), drawn (S, N)
    """Draw how often outcomes were seen in each bin, and the frequencies of drawn outcomes."""
    ax = axes(ax)
    least, most = torch.cat([y, drawn.flatten()]).aminmax()
    reach = 0.5 * (y.max() - y.min()).clamp_min(1e-9)  # beyond what was seen
    low, high = float(least.maximum(y.min() - reach)), float(most.minimum(y.max() + reach))
    edges = torch.linspace(low, high, BINS + 1, dtype=y.dtype, device="cpu")
    if discrete:
        width = max(1, math.ceil((high - low + 1) / BINS))
        edges = (
            math.floor(low)
            - 0.5
            + width * torch.arange(math.ceil((high - low + 1) / width) + 1, dtype=y.dtype, device="cpu")
        )
    seen, *sets = (torch.histogram(part.cpu().to(edges), edges).hist / len(y) for part in (y, *drawn))
    below, above = torch.quantile(torch.stack(sets), torch.tensor([0.05, 0.95], dtype=edges.dtype, device="cpu"), dim=0)
    ax.stairs(above.numpy(), edges.numpy(), baseline=below.numpy(), fill=True, color=GREY, label="drawn, 90 %")
    ax.stairs(seen.numpy(), edges.numpy(), color=BLUE, linewidth=1.5, label="seen")
    ax.set_xlabel(response)
    ax.set_ylabel("share of rows")
    ax.legend()
    return ax
