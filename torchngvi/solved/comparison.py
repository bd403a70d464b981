"""Models of the same rows beside each other: how each predicts rows that were left out, and its ELBO with a proof."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.diagnostics import certificate
from torchngvi.diagnostics.predictive import LeftOut
from torchngvi.errors import InputError, PairError
from torchngvi.fitting.records import FitResult
from torchngvi.models import GeneralizedLinear, checks
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.solved.leave_one_out import leave_one_out

# Stacking: weights of models in one predictive distribution, by how well they predict rows that were left out


@torch.no_grad()
def stacking_weights(log_density: Any) -> tuple[Tensor, float]:
    """Compute the weights of K models whose mixture predicts left-out rows best.

    Use them to predict with several models at once: unlike weights by the evidence they do not end at one model
    when none is true (Yao, Vehtari, Simpson and Gelman 2018).  They are the maximum of the concave function

        F(w) = 1/N Σ_i log Σ_k w_k p_ik        over w_k ≥ 0, Σ_k w_k = 1,

    by a primal-dual interior-point method.  Since Σ_k w_k ∂_kF = 1, no weights are better than w by more than
    max_k ∂_kF - 1, which proves how far it came.

    Args:
        log_density: log p_ik of row i under model k without that row, (N, K), in nats, as `leave_one_out` has it; a
            tensor, an array or lists.

    Returns:
        The weights, (K,), and the proved bound of F* - F(w), in nats a row.

    Raises:
        InputError: if it is not a matrix of finite numbers.

    >>> likely = torch.tensor([[0.9, 0.1, 0.2], [0.8, 0.2, 0.3], [0.1, 0.9, 0.2]])
    >>> weights, gap = stacking_weights(likely.double().log())
    >>> [round(w, 4) for w in weights.tolist()], gap < 1e-9  # the third is never needed
    ([0.6776, 0.3224, 0.0], True)
    """
    log_density = checks.numbers("log_density", log_density, None)
    if log_density.ndim != 2 or not log_density.numel():
        raise InputError(
            "stacking_weights takes log densities of rows (N) under models (K), (N, K); got "
            f"{tuple(log_density.shape)}."
        )
    p = log_density.double()
    p = (p - p.amax(-1, keepdim=True)).exp()  # F but for a constant
    count = p.shape[1]
    w = torch.full((count,), 1 / count, dtype=p.dtype, device=p.device)
    z = w.clone()  # the multipliers of w ≥ 0: 1 - ∂_kF at the end
    for _ in range(100):
        ratio = p / (p @ w)[:, None]
        slope = ratio.mean(0)
        if float(slope.max() * w.sum()) - 1 <= 1e-10:  # nats a row
            break
        barrier = 0.1 * float(w @ z) / count
        curvature = ratio.mT @ ratio / len(p) + (z / w).diag()
        dw = torch.linalg.solve(curvature, slope - 1 + barrier / w)
        dz = (barrier - z * dw) / w - z
        w, z = w + _step(w, dw) * dw, z + _step(z, dz) * dz
    w = torch.where(w < 1e-9 * w.sum(), 0.0, w)
    w = w / w.sum()
    gap = float((p / (p @ w)[:, None]).mean(0).max()) - 1
    return w.to(log_density.dtype), max(gap, 0.0)


def _step(x: Tensor, direction: Tensor, inside: float = 0.99) -> Tensor:
    """The step up to 1 that goes so much of the way to where an x would be 0."""
    towards = torch.where(direction < 0, -x / direction, torch.inf)
    return (inside * towards.min()).clamp_max(1.0)


_TAKES = (
    "compare_models takes results of fit, or pairs of a Gaussian and its GeneralizedLinear (of regressions and mixed "
    "models of tables it is torchngvi.tables.compare);"
)
_HEAD = ["", "elpd", "se", "p_loo", "difference", "dse", "stacking", "ELBO", "proved to"]
_WIDTHS = (0, 8, 5, 5, 10, 5, 8, 10, 9)  # at least
CLOSE = 4.0  # nats of elpd within which models may predict alike (Sivula, Magnusson and Vehtari 2020)


class Comparison(NamedTuple):
    """Models beside each other, the one that predicts best first; names as in ArviZ's ``compare``.

    Attributes:
        names: of the models, K of them.
        elpd: Σ_i log p(y_i | the other rows), (K,), in nats.
        se: its standard errors, (K,).
        p_loo: effective numbers of parameters, (K,).
        elpd_diff: by how much the first has more, (K,), in nats, not negative.
        dse: the standard errors of that difference, √(N var of the differences of rows), (K,).
        weight: in a mixture of the models that predicts best, `stacking_weights`, (K,).
        pseudo_bma: weights ∝ exp(elpd), (K,), which trust differences of elpd as if they had no error.
        elbo: the ELBOs, (K,), in nats.
        certificate: by how much at most the largest ELBO is above each, (K,); infinite where nothing is proved.
        loo: what `leave_one_out` has found, model by model.

    >>> y = [0.1, 0.9, 2.2, 2.8, 4.1, 5.0]
    >>> X = torch.stack([torch.ones(6), torch.arange(6.0)], 1).double()
    >>> from torchngvi import CholeskyGaussian, fit
    >>> def fitted(columns):
    ...     model = GeneralizedLinear(X[:, :columns], y, "gaussian")
    ...     return fit(CholeskyGaussian(columns, dtype=torch.float64), model, progress=False)
    >>> print(compare_models({"a constant": fitted(1), "a line": fitted(2)}))
                    elpd     se  p_loo  difference    dse  stacking        ELBO  proved to
    a line         -6.59   0.23   0.32        0.00   0.00     1.000       -8.60      <1e-6
    a constant    -16.53   4.32   2.70        9.93   4.09     0.000      -17.86      <1e-6
    With 6 rows standard errors are too small: below a hundred, two of them say little.
    """

    names: tuple[str, ...]
    elpd: Tensor
    se: Tensor
    p_loo: Tensor
    elpd_diff: Tensor
    dse: Tensor
    weight: Tensor
    pseudo_bma: Tensor
    elbo: Tensor
    certificate: Tensor
    loo: tuple[LeftOut, ...]

    def elbo_difference(self, first: str, second: str) -> tuple[float, float]:
        """Return an interval that holds the difference of the largest ELBOs of two models: a proof, not an estimate.

        With E the ELBO of each q and c its certificate it is [E_1 - E_2 - c_2, E_1 - E_2 + c_1].  It is of the bounds:
        the evidences differ from them by KL(q‖p), which is another one for each model.

        Raises:
            InputError: of a name that is not among the models.
        """
        for name in (first, second):
            if name not in self.names:
                raise InputError(f"the models are {', '.join(self.names)}; got {name!r}.")
        one, two = self.names.index(first), self.names.index(second)
        difference = float(self.elbo[one] - self.elbo[two])
        return difference - float(self.certificate[two]), difference + float(self.certificate[one])

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        columns = (self.elpd, self.se, self.p_loo, self.elpd_diff, self.dse, self.weight, self.elbo)
        formats = (".2f", ".2f", ".2f", ".2f", ".2f", ".3f", ".2f")
        cells = [
            [name, *(f"{float(of[k]):{how}}" for of, how in zip(columns, formats, strict=True)), _proved(bound)]
            for k, (name, bound) in enumerate(zip(self.names, self.certificate.tolist(), strict=True))
        ]
        lines = [_HEAD, *cells]
        widths = [max(least, *(len(line[k]) for line in lines)) for k, least in enumerate(_WIDTHS)]
        made = [
            "  ".join([f"{line[0]:{widths[0]}}", *(f"{x:>{w}}" for x, w in zip(line[1:], widths[1:], strict=True))])
            for line in lines
        ]
        return "\n".join([*made, *self._cautions()])

    def _cautions(self) -> list[str]:
        found, rows, what = [], len(self.loo[0].density), self.loo[0].parts
        pairs = zip(self.names, self.elpd_diff.tolist(), self.dse.tolist(), strict=True)
        alike = [name for name, behind, error in pairs if behind < CLOSE and behind <= 2 * error][1:]
        if alike:
            predict = "predicts" if len(alike) == 1 else "predict"
            found.append(
                f"{', '.join(alike)} {predict} as well as {self.names[0]}, as far as these {what} can tell: less than "
                f"{CLOSE:g} nats and 2 standard errors behind."
            )
        if rows < 100:  # (Sivula, Magnusson and Vehtari 2020)
            found.append(f"With {rows} {what} standard errors are too small: below a hundred, two of them say little.")
        return found


Entry = tuple[Gaussian, GeneralizedLinear]
Given = FitResult | Entry


def compare_models(
    models: Mapping[str, Given],
    flag: float = 1e-3,
    *,
    groups: Any = None,  # (N,)
) -> Comparison:
    """Compare regressions of the same rows by how they predict rows that were left out, and by their ELBOs.

    Use it to choose columns, a prior, a link or a likelihood, or to weigh models that all have something to say.
    Differences of elpd are of the same rows, so that their standard errors are much smaller than those of either.
    Where `groups` are given, whole groups are left out.

    Args:
        models: the result of `torchngvi.fit`, or q and the model it is the optimum of, by name; at least two.  All
            models are of the same y, with the same weights.
        flag: of `leave_one_out`.
        groups: of `leave_one_out`.

    Returns:
        The models, the best first, with everything that was computed of them.

    Raises:
        InputError: fewer than two models, or two of one name, neither a result nor a pair, a result without its model,
            other rows, weights or groups, densities beside probabilities, or a density that is not finite.
        PairError: a model or posterior that `leave_one_out` does not take.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
    >>> x = torch.linspace(-1, 1, 8, dtype=torch.float64)
    >>> designs = {"slope": torch.stack([x.new_ones(8), x], 1), "constant": x.new_ones(8, 1)}
    >>> fits = {}
    >>> for name, X in designs.items():
    ...     model = GeneralizedLinear(X, [0, 0, 0, 1, 0, 1, 1, 1])
    ...     fits[name] = fit(CholeskyGaussian(model.dim, dtype=torch.float64), model, progress=False)
    >>> found = compare_models(fits)
    >>> found.names, round(found.elpd_diff[1].item(), 1)  # nats by which the second is behind
    (('slope', 'constant'), 1.6)
    """
    if not isinstance(models, Mapping) or len(models) < 2:
        raise InputError(
            "compare_models takes at least two models by name, such as {'a': result_a, 'b': (q_b, model_b)}; got "
            f"{f'{len(models)}' if isinstance(models, Mapping) else type(models).__name__}."
        )
    entries = {str(name): _entry(str(name), given) for name, given in models.items()}
    if len(entries) < len(models):
        raise InputError(f"the names of models must differ as texts; got {', '.join(map(repr, models))}.")
    _same_rows(entries)
    loo = {name: leave_one_out(*entry, flag=flag, groups=groups) for name, entry in entries.items()}
    names = sorted(entries, key=lambda name: -float(loo[name].density.double().sum()))  # as elpd below, of float32 too
    density = torch.stack([loo[name].density.double().cpu() for name in names], 1)
    _check_finite(density, names, loo[names[0]].parts)
    behind = density[:, :1] - density
    elpd = density.sum(0)
    bounds = [_bound(entries[name]) for name in names]
    elbo, certified = torch.tensor(bounds, dtype=torch.float64, device=elpd.device).unbind(1)
    return Comparison(
        tuple(names),
        elpd,
        _error(density),
        torch.tensor([loo[name].complexity for name in names], dtype=torch.float64, device=elpd.device),
        behind.sum(0),
        _error(behind),
        stacking_weights(density)[0],
        torch.softmax(elpd, 0),
        elbo,
        certified,
        tuple(loo[name] for name in names),
    )


def _bound(entry: Entry) -> tuple[float, float]:
    """The ELBO, and by how much the largest one is at most above."""
    q, model = entry
    with torch.no_grad():
        return -float(model.negative_elbo(q)), certificate(q, model).bound


def _proved(bound: float) -> str:
    return "-" if math.isinf(bound) else "<1e-6" if bound < 1e-6 else f"{bound:.1e}"


def _error(terms: Tensor) -> Tensor:
    """The standard error of sums over rows like these, (N, K) -> (K,)."""
    return (len(terms) * terms.var(0)).sqrt()


def _entry(name: str, given: Given) -> Entry:
    pair = (given.posterior, given.target) if isinstance(given, FitResult) else given
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise InputError(f"{_TAKES} of {name!r} it got a {type(given).__name__}.")
    q, model = pair
    if isinstance(given, FitResult) and model is None:
        raise InputError(
            f"the result of {name!r} has no model, since it is a copy, or was read from a file: give the pair of its "
            "posterior and the model."
        )
    if not isinstance(model, GeneralizedLinear) or not isinstance(q, Gaussian):
        raise PairError(f"{_TAKES} of {name!r} it got {type(q).__name__} and {type(model).__name__}.")
    return q, model


def _check_finite(density: Tensor, names: list[str], parts: str) -> None:
    """Check that every model allows for every row."""
    wrong = (~density.isfinite()).nonzero()
    if len(wrong):
        part, model = wrong[0].tolist()
        raise InputError(
            f"compare_models compares finite log densities of {parts}; that of number {part} under {names[model]!r} is "
            f"{float(density[part, model])}, and {len(wrong)} in all are not finite."
        )


def _same_rows(entries: Mapping[str, Entry]) -> None:
    rows = {name: model for name, (_, model) in entries.items()}
    (first, mine), *others = rows.items()
    for name, theirs in others:
        for what in ("y", "weights"):
            one, two = (getattr(each, what).cpu() for each in (mine, theirs))
            dtype = min(one.dtype, two.dtype, key=lambda of: of.itemsize)  # rows in float32 are those in float64
            one, two = one.to(dtype), two.to(dtype)
            if one.shape != two.shape or not torch.equal(one, two):
                raise InputError(
                    f"compare_models compares predictions of the same rows in the same order; the {what} of {name!r}, "
                    f"{tuple(two.shape)}, are not those of {first!r}, {tuple(one.shape)}."
                )
        if mine.likelihood.continuous != theirs.likelihood.continuous:
            raise InputError(
                f"compare_models got a density of real numbers and a probability of counts or classes ({first!r} and "
                f"{name!r}), whose logarithms cannot be compared."
            )
