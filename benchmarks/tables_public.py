"""Public questions about regressions and mixed models, rebuilt on simulated data: ours beside a peer, in one run.

    python -m benchmarks.tables_public [--only 1 7b ...] [--log tables_public.jsonl]

Every situation is a function with the address of its question.  Ours is `torchngvi.mixed` with its defaults, or the
command line.  The peer is scikit-learn where it has the model, and else maximum likelihood with Wald errors, which
lme4, glmmTMB and statsmodels compute (`benchmarks.tables_public_peers`).

The truth of a situation has for each quantity its value and the standard deviation that a right answer is about to
have, both written down before a fit was looked at.  They are those of the simulation, or of the posterior by a grid.
The score is the worst of the quantities: the error in these standard deviations, or in those that were reported where
they are smaller, or by how many of the first the reported one is larger.  Up to 3, of a grid up to 0.3, that is right.
A refusal has to name its cause, and so has what a result or a warning says of a wrong end; the verdicts are those of
`benchmarks.public`.
"""

import contextlib
import io
import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
import torch
from torch import distributions as D  # noqa: N812

import torchngvi
from benchmarks.public import End, Questions
from benchmarks.tables_public_peers import bernoulli, linear, maximum, members, poisson, tensors, usual_peer
from torchngvi import cli
from torchngvi.errors import InputError

Answers = dict[str, tuple[float, float | None]]  # estimate and standard deviation of a quantity


class Case(NamedTuple):
    """A situation: its truth, the table, and what is asked of it."""

    truth: dict[str, tuple[float, float]]
    table: Any
    formula: str = "y ~ x"
    family: str = "gaussian"
    names: tuple[str, ...] = ()  # what a refusal, or a sentence about a wrong end, has to name
    bound: float = 3.0
    columns: tuple[str, ...] = ("x",)  # covariates of the peer
    weights: str | None = None
    more: Callable[[Any], Answers] | None = None  # what is read off our result beside its summary
    peer: Callable[[], Answers] | None = None  # in the place of the usual one
    written: dict[str, str] | None = None  # the file, of the command line


def score_of(answers, truth):
    """The worst error of a quantity; "sd of x" is the reported standard deviation of x."""
    worst = []
    for name, (value, usual) in truth.items():
        estimate, sd = (answers[name.removeprefix("sd of ")][1], None) if "sd of" in name else answers[name]
        if estimate is not None:
            worst += [abs(estimate - value) / min(usual, sd or usual), 0.0 if sd is None else sd / usual - 1]
    return math.nan if any(map(math.isnan, worst)) else float(max(worst))


def play(make, method):
    case, said = make(np.random.default_rng(0)), ""
    try:
        if method == "ours":
            answers, said = fitted(case) if case.written is None else commanded(case)
        else:
            answers = usual_peer(case) if case.peer is None else case.peer()
    except InputError as error:
        if not all(name in str(error) for name in case.names):
            raise LookupError("a refusal without its cause") from error
        raise
    except ValueError as error:
        raise InputError(str(error)) if "NaN" in str(error) else error from error
    told = bool(case.names) and all(name in said for name in case.names)
    return End(score_of(answers, case.truth), case.bound, told=told)


QUESTIONS = Questions(("peer", "ours"), play)
situation = QUESTIONS.situation

# --------------------------------------------------------------------------------------- ours


def fitted(case):
    """Our estimates by their names, those of groups as "Intercept|g", and what was remarked and warned of."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = torchngvi.mixed(case.formula, case.table, case.family, weights=case.weights)
        result = model.fit(progress=False)
        summary = result.summary()
    blocks = [("", summary.fixed), ("", summary.likelihood)]
    for factor, of in summary.random.items():
        blocks += [(f"|{factor}", of.sd), (f"|{factor}", of.correlation)]
    found = {} if case.more is None else case.more(result)
    for behind, block in blocks:
        if block is not None:
            values = zip(block.mean.tolist(), block.sd.tolist(), strict=True)
            found |= {name + behind: value for name, value in zip(block.names, values, strict=True)}
    return found, "\n".join([*result.remarks, *(str(each.message) for each in warned)])


def commanded(case):
    """The same of ``torchngvi fit`` on a file."""
    with tempfile.TemporaryDirectory() as folder, io.StringIO() as text:
        path, out = Path(folder) / "table.csv", Path(folder) / "out"
        case.table.to_csv(path, index=False, **case.written)
        options = ["--data", str(path), "--out", str(out), "--no-progress", "--formula", case.formula]
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            code = cli.main(["fit", *options])
        if code > 1:
            raise InputError(text.getvalue())
        rows = pandas.read_csv(out / "coefficients.csv")
        return dict(zip(rows["name"], zip(rows["mean"], rows["sd"], strict=True), strict=True)), text.getvalue()


def of_grid(log_p, y, x, a, b, size=300):
    """The posterior of the slope under the default priors, over a grid of the intercept at the mean and the slope."""
    Y, x_ = tensors(y, x - x.mean())
    level, width = math.log(y.mean() / (1 - y.mean()) if log_p is bernoulli else y.mean()), 2.5 / x.std()
    A, B = torch.meshgrid(*tensors(np.linspace(*a, size), np.linspace(*b, size)), indexing="ij")
    rows = log_p(Y, A[..., None] + B[..., None] * x_).sum(-1)
    weights = (rows - 0.5 * ((A - level) / 2.5) ** 2 - 0.5 * (B / width) ** 2).flatten().softmax(0)
    mean = float(weights @ B.flatten())
    sd = float(weights @ (B.flatten() - mean).square()) ** 0.5
    return {"x": (mean, sd), "sd of x": (sd, sd)}


def frame(**columns):
    return pandas.DataFrame(columns)


# --------------------------------------------------------------------------------------- separation, zeros, few events


@situation("1", "stats.stackexchange.com/questions/11109")
def separation(draw):
    """Perfect separation in a logistic regression; the slope, from the posterior by a grid."""
    x = draw.normal(size=40)
    y = (x > 0) * 1
    return Case(of_grid(bernoulli, y, x, (-12, 12), (-2, 25)), frame(x=x, y=y), "y ~ x", "bernoulli", ("separat",), 0.3)


@situation("2", "github.com/JenniNiku/gllvm/issues/246")
def all_zeros(draw):
    """Counts that are all zero under a treatment; its effect, from the posterior by a grid."""
    x = np.repeat([0.0, 1.0], 10)
    y = np.where(x, 0, draw.poisson(3.0, 20))
    return Case(of_grid(poisson, y, x, (-12, 3), (-25, 1)), frame(x=x, y=y), "y ~ x", "poisson", ("x",), 0.3)


@situation("3", "stats.stackexchange.com/questions/307635")
def rare_events(draw):
    """Some dozen events in 3,000 rows; intercept and slope."""
    x = draw.normal(size=3000)
    y = (draw.random(3000) < 1 / (1 + np.exp(6 - x))) * 1
    return Case({"Intercept": (-6.0, 0.45), "x": (1.0, 0.3)}, frame(x=x, y=y), "y ~ x", "bernoulli")


# --------------------------------------------------------------------------------------- spreads at the boundary


def groups_of(draw, groups, rows, sd, residual=1.0, even=False):
    """A table of groups with a covariate x of slope 0.5; even groups have means of noise that are zero."""
    g, x = np.repeat(np.arange(groups), rows), draw.normal(size=groups * rows)
    noise = residual * draw.normal(size=groups * rows)
    if even:
        noise -= pandas.Series(noise).groupby(g).transform("mean").to_numpy()
    y = 1 + 0.5 * x + sd * draw.normal(size=groups)[g] + noise
    return frame(x=x, g=[f"g{k}" for k in g], y=y)


@situation("4", "github.com/lme4/lme4/issues/644")
def singular(draw):
    """Groups that do not differ: a singular fit; slope and standard deviation over groups."""
    truth = {"x": (0.5, 0.11), "Intercept|g": (0.0, 0.2)}
    return Case(truth, groups_of(draw, 10, 8, 0.0, even=True), "y ~ x + (1 | g)")


@situation("5", "github.com/statsmodels/statsmodels/issues/10239")
def between_groups(draw):
    """A covariate of groups that do not differ otherwise, which MixedLM gave as 0; it and the intercept."""
    w = np.linspace(-1, 1, 8).repeat(10)
    table = groups_of(draw, 8, 10, 0.0, even=True).assign(w=w)
    table["y"] += 2 * w - 0.5 * table.x
    return Case({"Intercept": (1.0, 0.15), "w": (2.0, 0.2)}, table, "y ~ w + (1 | g)", columns=("w",))


@situation("6", "stats.stackexchange.com/questions/323273")
def correlation_of_one(draw):
    """Correlation of intercepts and slopes at -1 or 1, of eight groups of five rows; it, slope, both spreads."""
    draw = np.random.default_rng(4)  # the first data where both spreads of the peer are above 0.1 and r is beyond 0.99
    g, x = np.repeat(np.arange(8), 5), np.tile(np.arange(-2.0, 3.0), 8)
    y = 1 + 0.7 * draw.normal(size=8)[g] + (0.5 + 0.3 * draw.normal(size=8)[g]) * x + draw.normal(size=40)
    names = ["Intercept", "x", "Intercept|g", "x|g", "Intercept, x|g", "residual sd"]
    Y, x_, same = *tensors(y, x), members(g) @ members(g).mT

    def loss(t):
        a, b = t[2].expand(40), t[3] * x_
        C = a.outer(a) + b.outer(b) + torch.tanh(t[4]) * (a.outer(b) + b.outer(a))
        C = C * same + t[5] ** 2 * torch.eye(40)
        return -D.MultivariateNormal(t[0] + t[1] * x_, C, validate_args=False).log_prob(Y)

    def peer():
        found = maximum(loss, names, [1.0, 0.5, 0.7, 0.3, 0.1, 1.0])
        r, sd = found["Intercept, x|g"]
        return found | {"Intercept, x|g": (math.tanh(r), sd / math.cosh(r) ** 2)}

    truth = {"Intercept, x|g": (0.0, 0.5), "x": (0.5, 0.17), "Intercept|g": (0.7, 0.25), "x|g": (0.3, 0.2)}
    return Case(truth, frame(x=x, y=y, g=[f"g{k}" for k in g]), "y ~ x + (1 + x | g)", peer=peer)


@situation("7", "stats.stackexchange.com/questions/37647")
def six_groups(draw):
    """Six animals of sixteen rows; slope, intercept and standard deviation over animals."""
    truth = {"x": (0.5, 0.1), "Intercept": (1.0, 0.4), "Intercept|g": (0.8, 0.3)}
    return Case(truth, groups_of(draw, 6, 16, 0.8), "y ~ x + (1 | g)")


@situation("7b", "github.com/statsmodels/statsmodels/issues/6154")
def a_row_a_group(draw):
    """A group for each row, which lme4 refuses and MixedLM calls singular; the slope."""
    return Case({"x": (0.5, 0.13)}, groups_of(draw, 60, 1, 0.7, 0.7), "y ~ x + (1 | g)")


# --------------------------------------------------------------------------------------- units and intercepts


@situation("8", "github.com/lme4/lme4/issues/731")
def scales(draw):
    """Covariates of 1e6 and of 1e-7 in a mixed model; both slopes and the standard deviation over groups."""
    table = groups_of(draw, 15, 10, 0.7).assign(a=draw.uniform(1e6, 1e7, 150), b=draw.uniform(1e-7, 1e-6, 150))
    table["y"] += 2e-7 * table.a + 2e6 * table.b - 0.5 * table.x
    truth = {"a": (2e-7, 3.1e-8), "b": (2e6, 3.1e5), "Intercept|g": (0.7, 0.16)}
    return Case(truth, table, "y ~ a + b + (1 | g)", columns=("a", "b"))


@situation("9", "github.com/glmmTMB/glmmTMB/issues/479")
def dates(draw):
    """Julian dates, not centred, in a Poisson mixed model; slope and standard deviation over groups."""
    g, day = np.repeat(np.arange(12), 8), 2_457_000.0 + draw.integers(0, 90, 96)
    y = draw.poisson(np.exp(0.5 + 0.015 * (day - 2_457_045) + 0.5 * draw.normal(size=12)[g]))
    table = frame(day=day, y=y, g=[f"g{k}" for k in g])
    truth = {"day": (0.015, 0.003), "Intercept|g": (0.5, 0.14)}
    return Case(truth, table, "y ~ day + (1 | g)", "poisson", columns=("day",))


@situation("10", "github.com/stan-dev/rstanarm/issues/453")
def intercept(draw):
    """The intercept where covariates are far from zero and priors are those at their means; it and the slope."""
    x = draw.normal(50, 5, 60)
    return Case({"Intercept": (10.0, 2.6), "x": (0.5, 0.052)}, frame(x=x, y=10 + 0.5 * x + 2 * draw.normal(size=60)))


@situation("11", "github.com/pydata/patsy/issues/14")
def named_intercept(draw):
    """A covariate that is named Intercept; the residual standard deviation, or that the name is taken."""
    x = draw.normal(size=60)
    table, names = frame(Intercept=x, y=3 + 0.5 * x + draw.normal(size=60)), ("Intercept",)
    peer = lambda: linear(*tensors(table.y, np.stack([np.ones(60), x], -1)), ["Intercept", "x"], {})  # noqa: E731
    return Case({"residual sd": (1.0, 0.09)}, table, "y ~ Intercept", names=names, peer=peer)


# --------------------------------------------------------------------------------------- designs


@situation("12", "github.com/statsmodels/statsmodels/issues/9279")
def crossed(draw):
    """Crossed subjects and items, which MixedLM mistook; slope and all standard deviations."""
    s, i, x = np.repeat(np.arange(15), 12), np.tile(np.arange(12), 15), draw.normal(size=180)
    y = 1 + 0.5 * x + 2 * draw.normal(size=15)[s] + draw.normal(size=12)[i] + draw.normal(size=180)
    truth = {"x": (0.5, 0.08), "Intercept|s": (2.0, 0.4), "Intercept|i": (1.0, 0.22), "residual sd": (1.0, 0.06)}
    return Case(truth, frame(x=x, y=y, s=s.astype(str), i=i.astype(str)), "y ~ x + (1 | s) + (1 | i)")


@situation("13", "stats.stackexchange.com/questions/400700")
def repeated_labels(draw):
    """Classes in schools whose labels are the same in each school; all standard deviations."""
    school, room = np.repeat(np.arange(10), 16), np.tile(np.repeat(np.arange(4), 4), 10)
    each = 4 * school + room
    y = 0.8 * draw.normal(size=10)[school] + 0.6 * draw.normal(size=40)[each] + 0.7 * draw.normal(size=160)
    table = frame(y=y, school=[f"s{k}" for k in school], room=[f"7{'ABCD'[k]}" for k in room])
    parts = {"Intercept|school": members(school), "Intercept|school:room": members(each)}
    truth = {"Intercept|school": (0.8, 0.25), "Intercept|school:room": (0.6, 0.12), "residual sd": (0.7, 0.05)}
    peer = lambda: linear(torch.tensor(y), torch.ones(160, 1).double(), ["Intercept"], parts)  # noqa: E731
    return Case(truth, table, "y ~ 1 + (1 | school/room)", peer=peer)


@situation("14", "github.com/statsmodels/statsmodels/issues/3824")
def dummy_trap(draw):
    """An intercept with the indicators of both classes; the effect of one of these."""
    x, north = draw.normal(size=60), np.repeat([0.0, 1.0], 30)
    table = frame(x=x, north=north, south=1 - north, y=1 + x + 2 * north + draw.normal(size=60))
    names = ("north", "south")
    return Case({"north": (2.0, 0.26)}, table, "y ~ x + north + south", names=names, columns=("x", *names))


@situation("15", "github.com/lme4/lme4/pull/242")
def one_level(draw):
    """A factor that has one level; the slope of the other column."""
    x = draw.normal(size=40)
    table = frame(x=x, site="north", y=1 + x + draw.normal(size=40))
    return Case({"x": (1.0, 0.16)}, table, "y ~ x + site", names=("site",))


@situation("16", "github.com/lme4/lme4/issues/689")
def empty_cell(draw):
    """A product of factors with an empty cell, rank deficient; the effect of a level in the full cells."""
    a, b = np.tile(["a1", "a2", "a3"], 40), np.repeat(["b1", "b2"], 60)
    table = frame(a=a, b=b, y=(a == "a2") * 1.0 + draw.normal(size=120))[(a != "a3") | (b != "b2")]
    two, three, high = (
        np.array(column == level, float) for column, level in ((table.a, "a2"), (table.a, "a3"), (table.b, "b2"))
    )
    table = table.assign(**{"a[a2]": two, "a3": three, "b2": high, "a2b2": two * high, "a3b2": three * high})
    columns = ("a[a2]", "a3", "b2", "a2b2", "a3b2")
    return Case({"a[a2]": (1.0, 0.32)}, table, "y ~ a * b", names=("b2",), columns=columns)


@situation("17", "github.com/bambinos/bambi/issues/40")
def missing(draw):
    """Cells that are missing; the slope by the other rows, or the columns that have them."""
    x = draw.normal(size=50)
    table = frame(x=x, y=1 + x + draw.normal(size=50))
    table.loc[[3, 17], "x"] = np.nan
    table.loc[30, "y"] = np.nan
    return Case({"x": (1.0, 0.15)}, table, names=("x", "y"))


# --------------------------------------------------------------------------------------- counts


@situation("18", "github.com/paul-buerkner/brms/issues/146")
def exposure(draw):
    """Counts of days and of weeks; the rate of a day and the effect on it."""
    days, x = np.repeat([1.0, 7.0], 30), draw.normal(size=60)
    table = frame(x=x, days=days, y=draw.poisson(1.5 * days * np.exp(0.4 * x)))
    truth = {"Intercept": (math.log(1.5), 0.06), "x": (0.4, 0.055)}
    return Case(truth, table, "y ~ x + offset(log(days))", "poisson")


@situation("18b", "github.com/bambinos/bambi/issues/841")
def exposure_without_log(draw):
    """The advice offset(time), where the logarithm was forgotten; the rate."""
    time = draw.uniform(0.5, 5.0, 60)
    table, names = frame(time=time, y=draw.poisson(2 * time)), ("offset(log(time))",)
    return Case({"Intercept": (math.log(2), 0.055)}, table, "y ~ offset(time)", "poisson", names, columns=())


@situation("19", "github.com/statsmodels/statsmodels/issues/9031")
def overdispersed(draw):
    """Overdispersed counts; both coefficients and the size, of which R and statsmodels seem to differ."""
    x = draw.normal(size=150)
    y = draw.negative_binomial(1.5, 1.5 / (1.5 + np.exp(1 + 0.6 * x)))
    truth = {"Intercept": (1.0, 0.085), "x": (0.6, 0.085), "size": (1.5, 0.35)}
    return Case(truth, frame(x=x, y=y), "y ~ x", "negative_binomial")


@situation("19b", "github.com/statsmodels/statsmodels/issues/1631")
def underdispersed(draw):
    """Underdispersed counts in a negative binomial regression, whose size has no end; both coefficients."""
    x = draw.normal(size=100)
    y = draw.binomial(12, np.minimum(0.25 * np.exp(0.3 * x), 1))
    truth = {"Intercept": (math.log(3), 0.06), "x": (0.3, 0.06)}
    return Case(truth, frame(x=x, y=y), "y ~ x", "negative_binomial")


@situation("20", "github.com/statsmodels/statsmodels/issues/9156")
def many_zeros(draw):
    """Zero-inflated negative binomial counts without covariates; mean, surplus zeros and size."""
    y = draw.negative_binomial(10, 0.5, 100) * (draw.random(100) > 0.5)
    truth = {"Intercept": (math.log(10), 0.07), "surplus zeros": (0.5, 0.05), "size": (10.0, 5.0)}
    return Case(truth, frame(y=y), "y ~ 1", "zero_inflated_negative_binomial", columns=())


# --------------------------------------------------------------------------------------- other outcomes


@situation("21", "github.com/statsmodels/statsmodels/issues/8449")
def grades(draw):
    """An ordinal regression, whose thresholds differ between programs; slope and thresholds."""
    x = draw.normal(size=250)
    y = np.digitize(0.8 * x + draw.logistic(size=250), [-1.0, 0.0, 1.5])
    truth = {"x": (0.8, 0.13), "threshold[1]": (-1.0, 0.16), "threshold[2]": (0.0, 0.14), "threshold[3]": (1.5, 0.17)}
    return Case(truth, frame(x=x, y=y), "y ~ x", "ordinal")


@situation("22", "github.com/glmmTMB/glmmTMB/issues/660")
def exact_ones(draw):
    """Shares with an exact 0 and an exact 1 under a beta likelihood; the slope, or what is refused."""
    x = draw.normal(size=80)
    mean = 1 / (1 + np.exp(-0.8 * x))
    y = draw.beta(8 * mean, 8 * (1 - mean))
    y[[3, 40]] = 0.0, 1.0
    return Case({"x": (0.8, 0.1)}, frame(x=x, y=y), "y ~ x", "beta", ("beta", "0 < y < 1"))


@situation("23", "github.com/statsmodels/statsmodels/issues/2192")
def trials(draw):
    """Successes of trials whose number varies; both coefficients."""
    x, n = draw.normal(size=40), draw.integers(5, 21, 40)
    table = frame(x=x, s=draw.binomial(n, 1 / (1 + np.exp(0.5 - 0.7 * x))), n=n)
    return Case({"Intercept": (-0.5, 0.1), "x": (0.7, 0.11)}, table, "prop(s, n) ~ x", "binomial")


@situation("23b", "github.com/statsmodels/statsmodels/issues/203")
def rates(draw):
    """The rate of successes with the trials as weights, as in R; both coefficients, or the way to give them."""
    case = trials(draw)
    table = case.table.assign(rate=case.table.s / case.table.n)
    names, peer = ("prop(",), lambda: usual_peer(case)
    return Case(case.truth, table, "rate ~ x", "binomial", names, weights="n", peer=peer)


@situation("24", "github.com/bambinos/bambi/issues/541")
def censored(draw):
    """Weibull times of which some are censored; the logarithm of the mean, the slope, the shape."""
    x = draw.normal(size=120)
    full = np.exp(1 + 0.5 * x) / math.gamma(1 + 1 / 1.5) * draw.weibull(1.5, 120)
    end = draw.uniform(0.5, 7.0, 120)
    table = frame(x=x, time=np.minimum(full, end), event=(full <= end) * 1)
    truth = {"Intercept": (1.0, 0.08), "x": (0.5, 0.08), "shape": (1.5, 0.13)}
    return Case(truth, table, "censored(time, event) ~ x", "weibull")


@situation("25", "github.com/bambinos/bambi/pull/367")
def outliers(draw):
    """A line of 100 rows with three outliers; both coefficients."""
    x = np.append(np.linspace(0, 1, 100), [0.1, 0.15, 0.2])
    y = np.append(1 + 2 * x[:100] + 0.5 * draw.normal(size=100), [8.0, 6.0, 9.0])
    return Case({"Intercept": (1.0, 0.1), "x": (2.0, 0.18)}, frame(x=x, y=y), "y ~ x", "student_t")


@situation("25b", "github.com/statsmodels/statsmodels/issues/93")
def without_noise(draw):
    """A perfect fit, ten points of a line without noise; both coefficients, or what is refused."""
    x = np.arange(10.0)
    return Case({"Intercept": (1.0, 0.01), "x": (2.0, 0.01)}, frame(x=x, y=1 + 2 * x), names=("residual",))


# --------------------------------------------------------------------------------------- weights, new rows, files


@situation("26", "github.com/paul-buerkner/brms/issues/436")
def weights(draw):
    """Weights that count rows; slope and its error, from least squares on the rows repeated."""
    x, count = draw.normal(size=40), draw.integers(1, 6, 40)
    y = 1 + 0.5 * x + draw.normal(size=40)
    X, Y = np.stack([np.ones(40), x], -1).repeat(count, 0), y.repeat(count)
    b, (left,), *_ = np.linalg.lstsq(X, Y)
    sd = math.sqrt(left / (len(Y) - 2) * np.linalg.inv(X.T @ X)[1, 1])
    return Case({"x": (b[1], sd), "sd of x": (sd, sd)}, frame(x=x, y=y, count=count), bound=0.3, weights="count")


@situation("27", "github.com/bambinos/bambi/issues/953")
def new_group(draw):
    """The mean of a new group, twice: its centre, its standard deviation, and by what two calls differ."""
    table, new = groups_of(draw, 30, 6, 0.8, 0.5), frame(x=[0.0], g=["new"])

    def more(result):
        one, two = result.predict(new), result.predict(new)
        mean, sd = float(one.mean[0]), float(one.sd[0])
        return {"mean": (mean, None), "spread": (sd, None), "apart": (abs(mean - float(two.mean[0])), None)}

    def peer():
        found = usual_peer(Case({}, table, "y ~ x + (1 | g)"))
        (mean, sd), (spread, _) = found["Intercept"], found["Intercept|g"]
        return {"mean": (mean, None), "spread": (math.hypot(sd, spread), None), "apart": (0.0, None)}

    truth = {"mean": (1.0, 0.15), "spread": (math.hypot(0.8, 0.15), 0.12), "apart": (0.0, 1e-12)}
    return Case(truth, table, "y ~ x + (1 | g)", more=more, peer=peer)


@situation("28", "github.com/biolab/orange3/issues/3875")
def decimal_commas(draw):
    """A file with semicolons and decimal commas, by `torchngvi fit`; both coefficients."""
    x, written = draw.normal(20, 3, 60), {"sep": ";", "decimal": ","}
    table, truth = frame(x=x, y=3 + 0.5 * x + 0.5 * draw.normal(size=60)), {"Intercept": (3.0, 0.45), "x": (0.5, 0.022)}

    def peer():
        text = io.StringIO(table.to_csv(index=False, **written))
        return usual_peer(Case({}, pandas.read_csv(text, sep=None, engine="python")))

    return Case(truth, table, written=written, peer=peer)


def main(arguments=None):
    return QUESTIONS.main(__doc__, "tables_public.jsonl", arguments)


if __name__ == "__main__":
    main()
