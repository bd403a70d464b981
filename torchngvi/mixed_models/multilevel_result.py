"""The result of fitting a model with several grouping factors: its parameters, its groups, and new rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from torchngvi.arguments import read_seed, read_size
from torchngvi.errors import InputError
from torchngvi.fitting.records import FitResult
from torchngvi.mixed_models import exports, predictions
from torchngvi.mixed_models.fitted import Fitted
from torchngvi.mixed_models.integrated import Weighted
from torchngvi.mixed_models.multilevel_table import FactorTable, MultilevelDraws, MultilevelTable
from torchngvi.mixed_models.predictions import NewRows, Prediction
from torchngvi.mixed_models.table import ByFactor, Marginals, names_of, probability, ratio_of
from torchngvi.models.learned import Learned
from torchngvi.models.mixed_prior import scales_of
from torchngvi.models.mixed_units import omega_to_user, to_user
from torchngvi.models.multilevel import MultilevelLogJoint
from torchngvi.posteriors import PrecisionCholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian

_DRAWS = 1000  # joint draws, of all groups too
_HELD = 2**25  # numbers of joint draws that are held


class Effects(Protocol):
    """What draws the effects of all groups of all factors given the globals."""

    def draw(
        self,
        globals: Tensor,  # (S, P)
        generator: torch.Generator,
    ) -> Tensor:
        """Draw the effects, one of each for each value of the globals, in the order of θ, (S, local)."""


@dataclass(frozen=True)
class MultilevelResult(Fitted):
    """A fitted model with several grouping factors, as `MultilevelModel.fit` returns it.

    Attributes:
        converged: whether the fit of the global parameters has converged.
        method: what was computed, in one sentence.
        fit: the `FitResult` of the Gaussian over the global parameters.
        elbo: a lower bound of log p(y), the evidence lower bound of that Gaussian.
        log_evidence: log p(y) by importance sampling; None where the random effects were not integrated out.
        k_hat: of the importance weights of the draws; above 0.7 what is said is not to be trusted.
        effective: the effective number of draws.
        posterior: the Gaussian that the draws are of: over the variance parameters (ω, φ) where noise is Gaussian, and
            over (β, ω, φ) otherwise; in the coordinates of ``model``, whose columns may be centred and scaled.
        model: what was fitted.
        designs: what makes (X, random, offset) of a table, where the model was made by a formula.

    ``print`` shows the table of `summary`.
    """

    model: MultilevelLogJoint = field(repr=False)
    method: str
    fit: FitResult = field(repr=False)
    elbo: float
    log_evidence: float | None
    posterior: Gaussian = field(repr=False)
    weighted: Weighted = field(repr=False)  # of (β, ω, φ)
    locals: Effects = field(repr=False)
    joint_of: Callable[[], PrecisionCholeskyGaussian] = field(repr=False)
    learned: Learned | None = field(repr=False)
    fixed_names: tuple[str, ...] = field(repr=False)
    random_names: Mapping[str, tuple[str, ...]] = field(repr=False)
    group_names: Mapping[str, tuple[str, ...]] = field(repr=False)
    designs: Callable[[Any], Any] | None = field(default=None, repr=False)
    _kept: dict[tuple[int, int], MultilevelDraws] = field(default_factory=dict, repr=False, compare=False)

    # ---------------------------------------------------------------------------- names

    def named(
        self,
        fixed: Sequence[str] | None = None,
        random: Mapping[str, Sequence[str]] | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
        designs: Callable[[Any], Any] | None = None,
    ) -> Self:
        """The same, with names for the columns of X, and for the columns of Z and the groups of each factor.

        Args:
            fixed: names of the fixed effects, p of them.
            random: for some factors the names of their random effects.
            groups: for some factors the labels of their groups, in the order of their numbers.
            designs: what makes (X, random, offset) of a table.

        Returns:
            A new result.

        Raises:
            InputError: another number of names, or a factor that the model does not have.
        """
        random, groups, factors = random or {}, groups or {}, self._factors()
        for name in (*random, *groups):
            self._check_factor(name)
        effects = {
            name: names_of(f"random[{name!r}]", random.get(name), of.r, self.random_names[name])
            for name, of in factors.items()
        }
        labels = {
            name: names_of(f"groups[{name!r}]", groups.get(name), of.n, self.group_names[name])
            for name, of in factors.items()
        }
        return replace(
            self,
            fixed_names=names_of("fixed", fixed, self.model.rows.p, self.fixed_names),
            random_names=effects,
            group_names=labels,
            designs=designs or self.designs,
        )

    def _factors(self) -> dict[str, Any]:
        return dict(zip(self.model.names, self.model.rows.factors, strict=True))

    def _check_factor(self, name: str) -> None:
        if name not in self.model.names:
            raise InputError(f"the grouping factors are {', '.join(self.model.names)}; got {name!r}.")

    # ---------------------------------------------------------------------------- what it says

    def summary(self, interval: float = 0.95) -> MultilevelTable:
        """Posterior means, sds and equal-tailed intervals of fixed effects, standard deviations and correlations.

        Args:
            interval: the probability of the intervals, between 0 and 1.

        Returns:
            A table with the random effects of each factor; ``str`` prints it.

        Raises:
            InputError: an interval that is no probability.
        """
        interval, (theta, weights, *_) = probability(interval), self.weighted
        beta, omegas, parameter = self._parts(theta)
        random: dict[str, FactorTable] = ByFactor()
        for name, of in self._factors().items():
            sd, correlation = scales_of(omegas[name], of.r)
            pairs = [(i, k) for i in range(of.r) for k in range(i)]
            between = [f"{self.random_names[name][k]}, {self.random_names[name][i]}" for i, k in pairs]
            places = torch.tensor(pairs, dtype=torch.long, device=theta.device).reshape(-1, 2)
            random[name] = FactorTable(
                Marginals.of(self.random_names[name], sd, weights, interval),
                Marginals.of(between, correlation[:, places[:, 0], places[:, 1]], weights, interval),
            )
        fixed, learned = Marginals.of(self.fixed_names, beta, weights, interval), None
        if parameter is not None:
            learned = Marginals.of([self._parameter], parameter[:, None], weights, interval)
        ratio = ratio_of(self.model.rows.likelihood)
        return MultilevelTable(
            fixed, random, learned, interval, self._head(), self._foot(self.fixed_names, learned), ratio
        )

    def _parts(
        self,
        theta: Tensor,  # (S, P)
    ) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """β (S, p) and ω of each factor (S, q) in the units of the user, and the learned parameter (S,)."""
        rows = self.model.rows
        first = rows.beta.start
        omegas = {
            name: omega_to_user(theta[:, at.start - first : at.stop - first], of.within, of.r)
            for name, at, of in zip(self.model.names, rows.omegas, rows.factors, strict=True)
        }
        beta = to_user(theta[:, : rows.p], rows.columns)
        return beta, omegas, None if self.learned is None else theta[:, -1].exp()

    @property
    def _parameter(self) -> str:
        """The name of the learned parameter."""
        return "" if self.learned is None else self.learned.name

    def _head(self) -> str:
        rows = self.model.rows
        counts = ", ".join(f"{of.n} of {name}" for name, of in self._factors().items())
        return f"mixed model, {type(rows.likelihood).__name__}: {len(rows.y)} rows; groups: {counts}"

    @property
    def random(self) -> dict[str, list[Marginals]]:
        """The random effects of each grouping factor: one `Marginals` over its groups for each of its effects."""
        return self.effects()

    def effects(self, interval: float = 0.95) -> dict[str, list[Marginals]]:
        """Posterior means, sds and intervals of the random effects of all groups of each factor.

        Args:
            interval: the probability of the intervals, between 0 and 1.

        Returns:
            For each factor a list of r, each over its n groups.

        Raises:
            InputError: an interval that is no probability.
        """
        interval = probability(interval)
        found: dict[str, list[Marginals]] = ByFactor()
        for name, b in self.draws().effects.items():
            weights = b.new_full((len(b),), 1 / len(b))
            found[name] = [
                Marginals.of(self.group_names[name], b[..., k], weights, interval) for k in range(b.shape[-1])
            ]
        return found

    def draws(self, count: int | None = None, seed: int = 0) -> MultilevelDraws:
        """Draw from the posterior of all coordinates: globals first, and random effects given the globals.

        Args:
            count: the number of draws; by default 1000, or as many as fit into 256 MB where there are many groups.
            seed: of the draws.

        Returns:
            Equally likely draws; the same ones for the same arguments.
        """
        rows, names = self.model.rows, self.model.names
        count = min(_DRAWS, max(100, _HELD // rows.beta.start)) if count is None else read_size("count", count)
        if (count, seed) not in self._kept:
            generator = torch.Generator().manual_seed(read_seed("seed", seed))
            theta = self.weighted.resampled(count, generator)
            beta, omegas, parameter = self._parts(theta)
            b = self.locals.draw(theta, generator)
            effects = {
                name: to_user(b[:, at].unflatten(-1, (of.n, of.r)), of.within)
                for name, at, of in zip(names, rows.places, rows.factors, strict=True)
            }
            scales = {name: scales_of(omegas[name], of.r) for name, of in self._factors().items()}
            sd, correlation = ({name: scales[name][k] for name in names} for k in (0, 1))
            self._kept[count, seed] = MultilevelDraws(beta, sd, correlation, effects, omegas, parameter)
        return self._kept[count, seed]

    def predict(
        self,
        X: Any,  # (M, p)
        random: Mapping[str, Any] | None = None,
        *,
        offset: Any = None,  # (M,)
        kind: str = "mean",
        interval: float = 0.95,
        seed: int = 0,
    ) -> Prediction:
        """Predict new rows, of groups that the data have or of others, with intervals over the whole posterior.

        Args:
            X: the design of the fixed effects, (M, p); or, of a model made by a formula, a table, and nothing else.
            random: for each factor a pair (Z, groups): the design of its effects, (M, r), and the group of each row,
                (M,): numbers of groups of the data, or negative ones, each a group that the data do not have, whose
                effects are drawn from N(0, Ω⁻¹). Groups None where all rows are of one such group.
            offset: what is added to the linear predictor, (M,).
            kind: "mean" of y given the effects of its groups, the inverse link of the linear predictor; "linear", that
                predictor; or "response", y itself, whose intervals are those of new data.
            interval: the probability of the intervals, between 0 and 1.
            seed: of the draws.

        Returns:
            Means, sds, intervals and the draws that they are of.

        Raises:
            InputError: rows of another width, groups that are none of the data, a factor left out, another kind.
        """
        predictions.check_kind(kind)
        if self.designs is not None and random is None:
            X, random, offset = self.designs(X)
        if random is None or set(random) != set(self.model.names):
            got = ", ".join(random) if random else "none"
            raise InputError(
                f"new rows need a pair (Z, groups) of each grouping factor, {', '.join(self.model.names)}, with groups "
                f"None where they are new; got {got}."
            )
        interval, draws = probability(interval), self.draws(seed=seed)
        generator, eta = torch.Generator().manual_seed(read_seed("seed", seed) + 2), None
        for name, of in self._factors().items():
            try:
                Z, groups = random[name]
                rows = NewRows.of(of, X, Z, groups, offset)
            except InputError as error:
                raise InputError(f"of the grouping factor {name}: {error}") from error
            if eta is None:
                eta = draws.fixed @ rows.X.mT + rows.offset
            eta = eta + predictions.varying(rows, draws.omega[name], draws.effects[name], generator)
        assert eta is not None
        likelihood = self.model.rows.likelihood
        return predictions.of_kind(likelihood, eta, kind, interval, generator, draws.parameter)

    # ---------------------------------------------------------------------------- elsewhere

    def to_arviz(self) -> Any:
        """Export the joint draws for ArviZ, one chain with named dimensions.

        Returns:
            An ``arviz.InferenceData``, from ArviZ 1.0 on an ``xarray.DataTree``. Its ``posterior`` has ``beta``
            (fixed), for each factor ``sd_<factor>``, ``correlation_<factor>`` and ``b_<factor>``, and, where
            it is learned, ``residual_sd``, ``scale`` or ``size``; its ``observed_data`` has ``y``.

        Raises:
            ImportError: without ArviZ.
        """
        draws = self.draws()
        values = {"beta": draws.fixed}
        if draws.parameter is not None:
            values[self._parameter.replace(" ", "_")] = draws.parameter
        coords: dict[str, Sequence[str]] = {"fixed": self.fixed_names}
        dims = {"beta": ["fixed"], "y": ["row"]}
        for name in self.model.names:
            of, bis = f"random_{name}", f"random_{name}_bis"
            values |= {
                f"sd_{name}": draws.sd[name],
                f"correlation_{name}": draws.correlation[name],
                f"b_{name}": draws.effects[name],
            }
            coords |= {of: self.random_names[name], bis: self.random_names[name], name: self.group_names[name]}
            dims |= {f"sd_{name}": [of], f"correlation_{name}": [of, bis], f"b_{name}": [name, of]}
        y = exports.observed(self.model.rows.likelihood, self.model.rows.y)
        return exports.inference_data(values, y, coords, dims)

    def plot_effects(self, factor: str, effect: int | str = 0, interval: float = 0.95, ax: Any = None) -> Any:
        """Draw a caterpillar plot: the effects of all groups of one factor in rising order, with intervals.

        Args:
            factor: the name of the grouping factor.
            effect: which of its random effects, its number or its name.
            interval: the probability of the intervals, between 0 and 1.
            ax: matplotlib axes to draw on; new ones by default.

        Returns:
            The axes.

        Raises:
            ImportError: without matplotlib.
            InputError: a factor or an effect that the model does not have.
        """
        self._check_factor(factor)
        place = exports.effect_number(effect, self.random_names[factor])
        label = f"{factor}: {self.random_names[factor][place]}"
        return exports.caterpillar(self.effects(interval)[factor][place], label, ax)
