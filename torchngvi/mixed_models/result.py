"""The result of fitting a mixed model: what it says of its parameters, its groups, and of new rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchngvi.arguments import read_seed, read_size
from torchngvi.fitting.records import FitResult
from torchngvi.mixed_models import exports, predictions
from torchngvi.mixed_models.fitted import Fitted
from torchngvi.mixed_models.integrated import Weighted
from torchngvi.mixed_models.left_out import GroupsLeftOut, leave_one_group_out
from torchngvi.mixed_models.locals import Locals
from torchngvi.mixed_models.predictions import NewRows, Prediction
from torchngvi.mixed_models.table import ByFactor, Marginals, MixedTable, names_of, probability, ratio_of
from torchngvi.models.learned import Learned
from torchngvi.models.mixed import MixedLogJoint
from torchngvi.models.mixed_prior import scales_of
from torchngvi.models.mixed_units import omega_to_user, to_user
from torchngvi.posteriors import PrecisionCholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian

_DRAWS = 1000  # joint draws, of all groups too
_HELD = 2**25  # numbers of joint draws that are held


class MixedDraws(NamedTuple):
    """Equally likely draws from the posterior of all coordinates.

    Attributes:
        fixed: β, (S, p).
        sd: the standard deviations of the random effects, (S, r).
        correlation: their correlations, (S, r, r).
        effects: the random effects of the groups, (S, n, r).
        omega: the coordinates of their covariance, (S, r(r + 1)/2); see `torchngvi.models.mixed_prior`.
        parameter: the residual sd, scale or size of the likelihood, (S,); None where it is not learned.
    """

    fixed: Tensor
    sd: Tensor
    correlation: Tensor
    effects: Tensor
    omega: Tensor
    parameter: Tensor | None = None


@dataclass(frozen=True)
class MixedResult(Fitted):
    """A fitted mixed model, as `MixedModel.fit` returns it.

    Attributes:
        converged: whether the fit of the global parameters has converged.
        method: what was computed, in one sentence.
        fit: the `FitResult` of the Gaussian over the global parameters.
        elbo: the evidence lower bound of that Gaussian.
        log_evidence: log p(y) by importance sampling; None where the random effects were not integrated out.
        k_hat: of the importance weights of the draws; above 0.7 what is said is not to be trusted.
        effective: the effective number of draws.
        posterior: the Gaussian over the global parameters: β, ω and the logarithm of one of the likelihood, if learned;
            in the coordinates of ``model``, whose columns may be centred and scaled. `sample` is in the user's units.
        model: what was fitted.
        designs: what makes (X, Z, groups, offset) of a table, where the model was made by a formula.
        factor: the name of the grouping factor.

    ``print`` shows the table of `summary`.
    """

    model: MixedLogJoint = field(repr=False)
    method: str
    fit: FitResult = field(repr=False)
    elbo: float
    log_evidence: float | None
    posterior: Gaussian = field(repr=False)
    weighted: Weighted = field(repr=False)
    locals: Locals = field(repr=False)
    joint_of: Callable[[], PrecisionCholeskyGaussian] = field(repr=False)
    fixed_names: tuple[str, ...] = field(repr=False)
    random_names: tuple[str, ...] = field(repr=False)
    group_names: tuple[str, ...] = field(repr=False)
    designs: Callable[[Any], Any] | None = field(default=None, repr=False)
    factor: str = field(default="group", repr=False)
    _kept: dict[tuple[int, int], MixedDraws] = field(default_factory=dict, repr=False, compare=False)

    # ---------------------------------------------------------------------------- names

    def named(
        self,
        fixed: Sequence[str] | None = None,
        random: Sequence[str] | None = None,
        groups: Sequence[str] | None = None,
        designs: Callable[[Any], Any] | None = None,
        factor: str | None = None,
    ) -> Self:
        """The same, with names for the columns of X and Z and for the groups.

        Args:
            fixed: names of the fixed effects, p of them.
            random: names of the random effects, r of them.
            groups: labels of the groups, n of them, in the order of their numbers.
            designs: what makes (X, Z, groups, offset) of a table.
            factor: the name of the grouping factor.

        Returns:
            A new result.

        Raises:
            InputError: another number of names.
        """
        rows = self.model.rows
        return replace(
            self,
            fixed_names=names_of("fixed", fixed, rows.p, self.fixed_names),
            random_names=names_of("random", random, rows.r, self.random_names),
            group_names=names_of("groups", groups, rows.n, self.group_names),
            designs=designs or self.designs,
            factor=factor or self.factor,
        )

    # ---------------------------------------------------------------------------- what it says

    def summary(self, interval: float = 0.95) -> MixedTable:
        """Posterior means, sds and equal-tailed intervals of fixed effects, standard deviations and correlations.

        Standard deviations and correlations of random effects are those of b, not coordinates of a Cholesky factor.

        Args:
            interval: the probability of the intervals, between 0 and 1.

        Returns:
            A table; ``str`` prints it.

        Raises:
            InputError: an interval that is no probability.
        """
        interval = probability(interval)
        rows, (theta, weights, *_) = self.model.rows, self.weighted
        beta, omega, parameter = self._parts(theta)
        sd, correlation = scales_of(omega, rows.r)
        pairs = [(i, k) for i in range(rows.r) for k in range(i)]
        between = [f"{self.random_names[k]}, {self.random_names[i]}" for i, k in pairs]
        places = torch.tensor(pairs, dtype=torch.long, device=theta.device).reshape(-1, 2)
        fixed, learned = Marginals.of(self.fixed_names, beta, weights, interval), None
        if parameter is not None:
            learned = Marginals.of([self._parameter], parameter[:, None], weights, interval)
        return MixedTable(
            fixed,
            Marginals.of(self.random_names, sd, weights, interval),
            Marginals.of(between, correlation[:, places[:, 0], places[:, 1]], weights, interval),
            learned,
            interval,
            self._head(),
            self._foot(self.fixed_names, learned),
            ratio_of(self.model.rows.likelihood),
        )

    def _parts(
        self,
        theta: Tensor,  # (S, P)
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """β (S, p) and ω (S, q) in the units of the user, and the learned parameter of the likelihood (S,)."""
        rows = self.model.rows
        end = rows.p + rows.r * (rows.r + 1) // 2
        omega = omega_to_user(theta[:, rows.p : end], rows.within, rows.r)
        parameter = theta[:, end].exp() if theta.shape[-1] > end else None
        return to_user(theta[:, : rows.p], rows.columns), omega, parameter

    @property
    def _parameter(self) -> str:
        """The name of the learned parameter."""
        learned = getattr(self.model, "learned", None)
        return learned.name if isinstance(learned, Learned) else ""

    def _head(self) -> str:
        rows = self.model.rows
        family = type(rows.likelihood).__name__
        return f"mixed model, {family}: {rows.all_rows} rows, {rows.all_groups} group{'s' * (rows.all_groups > 1)}"

    @property
    def random(self) -> dict[str, list[Marginals]]:
        """The random effects by the name of the grouping factor, as those of several factors have them: `effects`."""
        return ByFactor({self.factor: self.effects()})

    def effects(self, interval: float = 0.95) -> list[Marginals]:
        """Posterior means, sds and intervals of the random effects of all groups, one `Marginals` each effect.

        Args:
            interval: the probability of the intervals, between 0 and 1.

        Returns:
            r of them, each over the n groups.

        Raises:
            InputError: an interval that is no probability.
        """
        interval, b = probability(interval), self.draws().effects
        weights = b.new_full((len(b),), 1 / len(b))
        return [Marginals.of(self.group_names, b[..., k], weights, interval) for k in range(b.shape[-1])]

    def draws(self, count: int | None = None, seed: int = 0) -> MixedDraws:
        """Draw from the posterior of all coordinates: globals first, and random effects given the globals.

        Args:
            count: the number of draws; by default 1000, or as many as fit into 256 MB where there are many groups.
            seed: of the draws.

        Returns:
            Equally likely draws; the same ones for the same arguments.
        """
        rows = self.model.rows
        count = (
            min(_DRAWS, max(100, _HELD // (rows.n * rows.r)))
            if count is None
            else read_size("count", count, "counts draws")
        )
        seed = read_seed("seed", seed)
        if (count, seed) not in self._kept:
            generator = torch.Generator().manual_seed(seed)
            theta = self.weighted.resampled(count, generator)
            beta, omega, parameter = self._parts(theta)
            b = to_user(self.locals.draw(theta, rows.own(generator)), rows.within)
            self._kept[count, seed] = MixedDraws(beta, *scales_of(omega, rows.r), b, omega, parameter)
        return self._kept[count, seed]

    def predict(
        self,
        X: Any,  # (M, p)
        Z: Any = None,  # (M, r)
        groups: Any = None,  # (M,)
        *,
        offset: Any = None,  # (M,)
        kind: str = "mean",
        interval: float = 0.95,
        seed: int = 0,
    ) -> Prediction:
        """Predict new rows, of groups that the data have or of others, with intervals over the whole posterior.

        Args:
            X: the design of the fixed effects, (M, p); or, of a model made by a formula, a table, and nothing else.
            Z: the design of the random effects, (M, r).
            groups: the groups of the rows, (M,): numbers of groups of the data, or negative ones, each a group that the
                data do not have, whose effects are drawn from N(0, Ω⁻¹). None where all rows are of one such group.
            offset: what is added to the linear predictor, (M,).
            kind: "mean" of y given the effects of its group, the inverse link of the linear predictor; "linear", that
                predictor; or "response", y itself, whose intervals are those of new data.
            interval: the probability of the intervals, between 0 and 1.
            seed: of the draws.

        Returns:
            Means, sds, intervals and the draws that they are of.

        Raises:
            InputError: rows of another width, groups that are none of the data, another kind.
        """
        predictions.check_kind(kind)
        seed = read_seed("seed", seed)
        if self.designs is not None and Z is None:
            X, Z, groups, offset = self.designs(X)
        interval, rows = probability(interval), NewRows.of(self.model.rows, X, Z, groups, offset)
        generator = torch.Generator().manual_seed(seed + 2)
        draws = self.draws(seed=seed)
        eta = predictions.predictors(rows, draws.fixed, draws.omega, draws.effects, generator)
        likelihood = self.model.rows.likelihood
        return predictions.of_kind(likelihood, eta, kind, interval, generator, draws.parameter)

    def leave_one_group_out(self, worst: float = 0.7, seed: int = 0) -> GroupsLeftOut:
        """Compute the log predictive density of all rows of each group given the other groups.

        One wants it to compare models of groups, and to find groups that a model does not expect: the density is that
        of a group which the data do not have, by draws of the globals that the group is weighted out of.  A sum of
        densities of single rows is another thing, in which the other rows of a group tell of it.  Rows are taken as
        they are, without their weights, as by `torchngvi.leave_one_out`.

        Args:
            worst: the k-hat of these weights above which the model is fitted without the group, about a fit each; 0
                for all groups, infinity for none.
            seed: of the draws of those fits.

        Returns:
            The densities, with their sum and its standard error over groups.

        Raises:
            InputError: if the random effects were not integrated out, of several processes, or a negative bound.

        >>> from torchngvi import MixedModel
        >>> X = torch.ones(12, 1, dtype=torch.float64)
        >>> y = torch.tensor([0.1, -0.2, 0.3, 1.1, 0.8, 1.0, -1.0, -0.6, -1.1, 0.2, 0.4, 0.3])
        >>> result = MixedModel(X, y, (X, torch.arange(12) // 3), "gaussian").fit(progress=False)
        >>> found = result.leave_one_group_out()
        >>> found.density.shape, bool(found.total < found.in_sample.sum())
        (torch.Size([4]), True)
        """
        return leave_one_group_out(self.locals, self.weighted, self.posterior, self.group_names, worst, seed)

    # ---------------------------------------------------------------------------- elsewhere

    def to_arviz(self) -> Any:
        """Export the joint draws for ArviZ, one chain with named dimensions.

        Returns:
            An ``arviz.InferenceData``, from ArviZ 1.0 on an ``xarray.DataTree``.
            Its ``posterior`` has ``beta`` (fixed), ``sd`` (random), ``correlation`` (random, random_bis), ``b``
            (group, random) and, where it is learned, ``residual_sd``, ``scale`` or ``size``; its ``observed_data`` has
            ``y``.

        Raises:
            ImportError: without ArviZ.
        """
        draws = self.draws()
        values = {"beta": draws.fixed, "sd": draws.sd, "correlation": draws.correlation, "b": draws.effects}
        if draws.parameter is not None:
            values[self._parameter.replace(" ", "_")] = draws.parameter
        coords = {
            "fixed": self.fixed_names,
            "random": self.random_names,
            "random_bis": self.random_names,
            "group": self.group_names,
        }
        dims = {
            "beta": ["fixed"],
            "sd": ["random"],
            "correlation": ["random", "random_bis"],
            "b": ["group", "random"],
            "y": ["row"],
        }
        y = exports.observed(self.model.rows.likelihood, self.model.rows.y)
        return exports.inference_data(values, y, coords, dims)

    def plot_effects(self, effect: int | str = 0, interval: float = 0.95, ax: Any = None) -> Any:
        """Draw a caterpillar plot: the effects of all groups in rising order, with intervals.

        Args:
            effect: which of the r random effects, its number or its name.
            interval: the probability of the intervals, between 0 and 1.
            ax: matplotlib axes to draw on; new ones by default.

        Returns:
            The axes.

        Raises:
            ImportError: without matplotlib.
            InputError: an effect that the model does not have.
        """
        place = exports.effect_number(effect, self.random_names)
        return exports.caterpillar(self.effects(interval)[place], self.random_names[place], ax)
