"""How noisy is a gradient?  Estimators of E_q[ℓ] side by side at one q, in the natural norm; and extremes of a run.

    ‖(a, P)‖² = |a|² + ½‖P‖²_F        variance = E‖ĝ - Eĝ‖²        bias = ‖mean of ĝ - g‖

with ĝ the gradient (a, P) of L in the frame of q as one call estimates it, and g that of the most exact estimator.  The
norm is free of coordinates: a natural step of size ρ moves q by ρ‖ĝ‖ standard deviations or so.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_generator, read_list, read_size, shown
from torchngvi.errors import InputError, PairError
from torchngvi.expectations import (
    BonnetPrice,
    ClosedEntropyStein,
    Hessian,
    Independent,
    LeastSquaresStein,
    MonteCarlo,
    PathDerivative,
    Quadrature,
    Reparametrized,
    ScoreFunction,
    Stein,
)
from torchngvi.expectations.draws import Drawing
from torchngvi.interfaces import Cost, Estimator, Target
from torchngvi.interfaces.packets import Local
from torchngvi.messages import hint
from torchngvi.models.log_joint import as_target, read_gaussian
from torchngvi.posteriors.gaussian import Gaussian

_DRAWN: tuple[type[Drawing], ...] = (
    MonteCarlo, BonnetPrice, Hessian, Stein, PathDerivative, ClosedEntropyStein, Reparametrized, LeastSquaresStein,
    ScoreFunction,
)  # fmt: skip


class EstimatorRow(NamedTuple):
    """What one estimator does at q.

    Attributes:
        name: of the estimator.
        variance: E‖ĝ - Eĝ‖² of one call, in the squared natural norm.
        bias: the natural norm of the mean over the calls, less the gradient of the most exact estimator.
        standard_error: what the noise of both means makes of ``bias`` where there is none, as a root mean square.
        cost: gradients, Hessians and values of the log joint a call.
        unbiased: whether the estimator says that it has no bias.

    >>> row = EstimatorRow("Stein", variance=4.0, bias=0.5, standard_error=0.4, cost=Cost(8, 0), unbiased=True)
    >>> row.variance / row.cost.gradients
    0.5
    """

    name: str
    variance: float
    bias: float
    standard_error: float
    cost: Cost
    unbiased: bool


@dataclass(frozen=True)
class EstimatorComparison:
    """What `compare_estimators` has found: a row for each estimator, which ``print`` shows as a table.

    Attributes:
        rows: in the order of the estimators.
        exact: the name of the most exact one, from which biases are counted.
        norm: the natural norm of its gradient, with which the noise competes.
        repeats: the number R of calls that the means are of.

    >>> row = EstimatorRow("Stein", variance=4.0, bias=0.5, standard_error=0.4, cost=Cost(8, 0), unbiased=True)
    >>> print(EstimatorComparison((row,), "Stein", 3.0, 100))
    natural norm of the gradient 3 (Stein); noise and bias in that norm, of 100 calls
    estimator     noise  bias   s.e.   gradients  Hessians  values
    Stein         2      0.5    0.4    8          0         0
    """

    rows: tuple[EstimatorRow, ...]
    exact: str
    norm: float
    repeats: int

    def __getitem__(self, name: str) -> EstimatorRow:
        """Return the row of an estimator by its name."""
        found = {row.name: row for row in self.rows}
        if name not in found:
            raise KeyError(f"{name} was not compared.{hint(name, found)} There are: {', '.join(found)}.")
        return found[name]

    def __str__(self) -> str:
        """Return the table: the standard deviation of a call, the bias beside its standard error, the cost."""
        width = max(12, *(len(row.name) for row in self.rows)) + 2
        heads = [("noise", 7), ("bias", 7), ("s.e.", 7), ("gradients", 11), ("Hessians", 10), ("values", 6)]
        lines = ["estimator".ljust(width) + "".join(head.ljust(size) for head, size in heads)]
        for row in self.rows:
            numbers = [math.sqrt(row.variance), row.bias, row.standard_error]
            cells = [f"{number:.2g}" for number in numbers] + [str(count) for count in row.cost]
            sized = (cell.ljust(size) for cell, (_, size) in zip(cells, heads, strict=True))
            lines.append(row.name.ljust(width) + "".join(sized))
        first = f"natural norm of the gradient {self.norm:.3g} ({self.exact}); noise and bias in that norm, of "
        return "\n".join([f"{first}{self.repeats} calls", *(line.rstrip() for line in lines)])


@torch.no_grad()
def compare_estimators(
    q: Gaussian,
    target: Target | Callable[[Tensor], Tensor],
    estimators: Mapping[str, Estimator] | Sequence[Estimator] | None = None,
    *,
    draws: int = 8,
    repeats: int = 100,
    generator: torch.Generator | None = None,
) -> EstimatorComparison:
    """Measure noise, bias and cost of the gradient at q as each estimator gives it.

    Wanted before a run with steps of one's own: the noise of a call, squared, over the squared norm of the gradient
    says how many calls one step is worth, and it differs between estimators by orders of magnitude, at the start of a
    run in another order than at its end.  q is left as it is.

    Args:
        q: one Gaussian, without a batch.
        target: the model, or a function of theta (S, D) that returns the log joint (S,).
        estimators: by name, or as a list; without them, all those of `torchngvi.expectations` that evaluate this target
            at this q, with independent draws.
        draws: S, the draws a call, where the estimators are not given.
        repeats: R, the calls of each.
        generator: of the draws, where the estimators are not given; torch's default generator if None.

    Returns:
        A row for each estimator.

    Raises:
        InputError: a batch of posteriors, fewer than two calls, two estimators of one name, none that is unbiased.
        PairError: an estimator that was given and cannot evaluate this target at this q.

    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(2, dtype=torch.float64)  # it is the posterior: no gradient is left
    >>> found = compare_estimators(q, lambda theta: -0.5 * theta.square().sum(-1), generator=torch.Generator())
    >>> found["Stein"].variance, found["ClosedEntropyStein"].variance > 0.1, found["Hessian"].cost
    (0.0, True, Cost(gradients=8, hessians=8, values=0))
    """
    q, model = read_gaussian("compare_estimators", q, target), as_target(target)
    draws, generator = read_size("draws", draws, "counts draws"), read_generator("generator", generator, q.device)
    if q.batch_shape:
        raise InputError(
            f"estimators are compared at one Gaussian; got a batch of the shape {tuple(q.batch_shape)}. "
            "Compare them at one of its members."
        )
    repeats = read_size("repeats", repeats, "counts calls of a variance", at_least=2)
    chosen = _defaults(q, model, draws, generator) if estimators is None else _named(estimators)
    calls = {name: _calls(q, model, estimator, repeats) for name, estimator in chosen.items()}
    variances = {name: _variance(q, gradients) for name, (gradients, _) in calls.items()}
    sound = [name for name, estimator in chosen.items() if estimator.unbiased and not estimator.fixed]
    if not sound:
        raise InputError(
            "biases are counted from the most exact estimator that is unbiased and draws again at each call; got none "
            f"such among {', '.join(chosen)}. Add one, such as Stein(64)."
        )
    exact = min(sound, key=variances.__getitem__)
    reference = _mean(calls[exact][0])
    rows = []
    for name, (gradients, cost) in calls.items():
        mean = _mean(gradients)
        noise2 = 0.0 if name == exact else variances[name] + variances[exact]
        away = float(q.norm2(Local(mean.a - reference.a, mean.P - reference.P)))
        rows.append(
            EstimatorRow(name, variances[name], away**0.5, (noise2 / repeats) ** 0.5, cost, chosen[name].unbiased)
        )
    return EstimatorComparison(tuple(rows), exact, float(q.norm2(reference)) ** 0.5, repeats)


def _defaults(q: Gaussian, model: Target, draws: int, generator: torch.Generator | None) -> dict[str, Estimator]:
    """The estimators of the library that can evaluate the target at q, and have draws enough for it."""
    kinds: list[Callable[[], Estimator]] = [Quadrature]
    kinds += [lambda kind=kind: kind(Independent(draws, generator)) for kind in _DRAWN]  # type: ignore[misc]
    found: dict[str, Estimator] = {}
    for make in kinds:
        estimator = make()
        if isinstance(estimator, LeastSquaresStein) and draws <= q.dim:
            continue
        try:
            estimator.check(q)
            if isinstance(model, estimator.needs):
                estimator(q, model)
                found[type(estimator).__name__] = estimator
        except PairError:
            continue
    return found


def _named(estimators: Mapping[str, Estimator] | Sequence[Estimator]) -> dict[str, Estimator]:
    """Estimators by their name, by default that of their class."""
    what = "are estimators in a list, or by name, such as {'few draws': Stein(8)}"
    listed = estimators.values() if isinstance(estimators, Mapping) else read_list("estimators", estimators, what)
    if not listed or not all(isinstance(estimator, Estimator) for estimator in listed):
        raise InputError(f"estimators {what}; got {shown(estimators)}.")
    if isinstance(estimators, Mapping):
        return dict(estimators)
    names = [type(estimator).__name__ for estimator in estimators]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two estimators are called {name!r}. Give a dictionary with a name for each.")
    return dict(zip(names, estimators, strict=True))


def _calls(q: Gaussian, model: Target, estimator: Estimator, repeats: int) -> tuple[Local, Cost]:
    """The gradients (R, ..) of R calls, one by one for no more memory than a step takes, and the cost of one."""
    estimator.check(q)
    if not isinstance(model, estimator.needs):
        raise PairError(
            f"{type(estimator).__name__} evaluates a {estimator.needs.__name__}; got {type(model).__name__}. "
            "Leave it out."
        )
    packets = [estimator(q, model) for _ in range(1 if estimator.comparable else repeats)]
    locals_ = [q.local(e) for e in packets]
    return Local(torch.stack([g.a for g in locals_]), torch.stack([g.P for g in locals_])), packets[0].cost


def _mean(gradients: Local) -> Local:
    """The mean over the calls."""
    return Local(gradients.a.mean(0), gradients.P.mean(0))


def _variance(q: Gaussian, gradients: Local) -> float:
    """E‖ĝ - Eĝ‖² of one call, 0 for an estimator that always says the same."""
    count = len(gradients.a)
    mean = _mean(gradients)
    away = q.norm2(Local(gradients.a - mean.a, gradients.P - mean.P))
    return float(away.sum()) / max(count - 1, 1)


class Extremes:
    """What Kumar et al. (2025) assume of a run, measured on it: a callback of `fit`.

    Assumption 4 bounds ξ_l ≤ ‖C_t‖_F ≤ ξ_u and λ_min ≤ V_t; Remark 1 bounds V_t by λ_max ≤ ξ_u².

    Attributes:
        xi_l, xi_u, lambda_min, lambda_max: extremes so far, over steps and batch members.

    >>> from torchngvi import CholeskyGaussian
    >>> seen = Extremes(CholeskyGaussian(4, scale=0.5))
    >>> seen.xi_l, seen.xi_u, seen.lambda_min, seen.lambda_max
    (1.0, 1.0, 0.25, 0.25)
    """

    def __init__(self, q: Gaussian) -> None:
        self.q = read_gaussian("Extremes", q)
        self.xi_l = self.lambda_min = math.inf
        self.xi_u = self.lambda_max = 0.0
        self()

    @torch.no_grad()
    def __call__(self, record: object = None) -> None:
        """Take q as it is now into account."""
        size = self.q.variance.sum(-1).sqrt()  # ‖C‖²_F = tr V
        diagonal = self.q.structure.widest == 1
        eigenvalues = self.q.variance if diagonal else torch.linalg.svdvals(self.q.scale_tril).square()
        self.xi_l, self.xi_u = min(self.xi_l, float(size.min())), max(self.xi_u, float(size.max()))
        self.lambda_min = min(self.lambda_min, float(eigenvalues.min()))
        self.lambda_max = max(self.lambda_max, float(eigenvalues.max()))
