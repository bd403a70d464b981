"""Regressions and mixed models of tables beside lme4, glmmTMB, ordinal, survival, statsmodels and bambi.

    TORCHNGVI_DATA=... python benchmarks/table_peers.py [set ...] [--bambi PYTHON] [--log FILE]
    TORCHNGVI_DATA=... python benchmarks/table_peers.py --speed [set ...] [--log FILE]

Thirteen data sets: sleepstudy (Belenky et al. 2003), cbpp (Lesnoff et al. 2004), epilepsy (Thall and Vail 1990),
toenail (De Backer et al. 1998), crossed binary matings (simulated, after the salamanders of McCullagh and Nelder 1989),
penicillin (Davies and Goldsmith 1972), wine (Randall 1989), zero-inflated counts of salamanders (Price et al. 2016),
proportions and costs (simulated), survival with lung cancer (Loprinzi et al. 1994), calls of owls with the brood as
exposure (Roulin and Bersier 2007), and parties that voters feel close to (the election study of 1996 that statsmodels
has).  Those of R's packages are written out by `table_peers.R` and are left out where R or the package is not there;
epilepsy and toenail need the folder of `TORCHNGVI_DATA`.

For each set and program: the estimate and 95 % interval of each fixed effect and of each standard deviation over
groups; processor seconds of the fit with its summary, without imports, one thread, after one fit of another table;
whether the program says that it has converged; and the largest difference from ours, of fixed effects in the standard
errors of the other program, of standard deviations in our posterior sds.  Ours are posterior means under the default
priors; those of lme4, glmmTMB, ordinal and survival are (restricted) maximum likelihood with Wald intervals, of
statsmodels REML, a variational posterior or maximum likelihood, of bambi posterior means by NUTS, two chains of 1,000
draws after 1,000, under our priors of coefficients and of standard deviations over groups, left out above 60 processor
seconds.
``--bambi`` is the Python of an environment that has bambi.

``--speed`` is the table of fits with one factor: seconds of the whole fit from the table to the summary, of a fit of
the Gaussian over all coordinates, and of lme4 and glmmTMB; k-hat and effective draws; and the largest error of a mean
(in posterior sds) and the range of the ratios of sds against more draws, 3,000 of them effective, with more nodes and
another seed. The last column has the same of the averages over ten seeds: what is left there is no noise of draws.

Each fit is a line of the file ``--log``, from which an interrupted run goes on. At the end the whole table is printed.
"""

import argparse
import contextlib
import csv
import importlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas

HERE = Path(__file__).resolve().parent
SCRIPT, SUBJECTS = HERE / "table_peers.R", HERE.parent / "tests" / "tables" / "sleepstudy.csv"
LONGEST = 60  # processor seconds of NUTS
PATIENCE = 600  # seconds by the clock, after which R is left out
MORE, WORTH, SEEDS = 4096, 3000, 10  # draws of a reference, how many are to be effective; fits held against it
NODES = {"bernoulli": 41, "": 25}  # of a reference, more than a default fit takes
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Set(NamedTuple):
    """A data set: how it is read, what we and others are asked."""

    table: Callable[[], pandas.DataFrame]
    formula: str
    family: str
    R: dict[str, str]  # code by program
    statsmodels: Callable[[pandas.DataFrame], Any] | None = None
    bambi: tuple[str, str, dict[str, Any]] | None = None  # formula, family, more arguments; None as ours


class LeftError(Exception):
    """Why a program is left out."""


# ------------------------------------------------------------------------------------------------- data


def sleepstudy():
    wide = np.loadtxt(SUBJECTS, delimiter=",")
    days = np.tile(np.arange(10.0), len(wide))
    return pandas.DataFrame(
        {"Reaction": wide[:, 1:].ravel(), "Days": days, "Subject": [f"s{k:.0f}" for k in wide[:, 0].repeat(10)]}
    )


def stored(name):
    path = Path(os.environ.get("TORCHNGVI_DATA", "nowhere")) / "glmm" / f"{name}.csv.gz"
    if not path.is_file():
        raise LeftError(f"no {path.name}: set TORCHNGVI_DATA")
    return pandas.read_csv(path)


def epilepsy():
    rows = stored("epil")
    base, age = np.log(rows.base / 4), np.log(rows.age)
    table = {"y": rows.y, "lbase": base, "treated": (rows.trt == "progabide") * 1.0, "lage": age - age.mean()}
    return pandas.DataFrame(table | {"V4": rows.V4, "subject": [f"s{k}" for k in rows.subject]})


def toenail():
    rows = stored("toenail")
    table = {"severe": (rows.outcome == "moderate or severe") * 1, "time": rows.time}
    treated = (rows.treatment == "terbinafine") * 1.0
    return pandas.DataFrame(table | {"treated": treated, "patient": [f"p{k}" for k in rows.patientID]})


def hers():
    rows = stored("hers")
    return rows.assign(id=[f"p{k}" for k in rows.id])


def party():
    try:
        from statsmodels.datasets import anes96
    except ImportError:
        raise LeftError("no statsmodels") from None
    rows = anes96.load_pandas().data
    return rows[["logpopul", "selfLR", "age", "educ", "income"]].assign(party=[f"p{k:.0f}" for k in rows.PID])


def of_R(name, **columns):
    """A data set of an R package, some columns made texts."""

    def read():
        if shutil.which("Rscript") is None:
            raise LeftError("no R")
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["Rscript", str(SCRIPT), "sets", folder], check=True, capture_output=True)
            path = Path(folder) / f"{name}.csv"
            if not path.is_file():
                raise LeftError("its R package is not installed")
            table = pandas.read_csv(path)
        return table.assign(**{key: make(table) for key, make in columns.items()})

    return read


def text(column, before):
    return lambda table: [f"{before}{value}" for value in table[column]]


def lung():
    table = of_R("lung")()[["time", "status", "age", "sex", "ph.ecog"]].dropna()
    return table.assign(seen=table.status - 1, ecog=table["ph.ecog"])[["time", "seen", "age", "sex", "ecog"]]


def crossed():
    """Matings of 40 females and 40 males of two populations, each female with nine males."""
    rng = np.random.default_rng(1)
    female, male = np.arange(40).repeat(9), np.concatenate([rng.permutation(40)[:9] for _ in range(40)])
    wf, wm = female % 2, male % 2
    eta = 1.0 - 2.9 * wf - 0.7 * wm + 3.6 * wf * wm + 1.1 * rng.standard_normal(40)[female]
    eta = eta + rng.standard_normal(40)[male]
    mated = (rng.random(len(eta)) < 1 / (1 + np.exp(-eta))) * 1
    names = {"female": [f"f{k:02d}" for k in female], "male": [f"m{k:02d}" for k in male]}
    return pandas.DataFrame({"mated": mated, "wf": wf, "wm": wm} | names)


def groups(family, count, rows, seed, intercept=0.5, slope=0.5, sd=1.0, size=2.0):
    """Rows in groups with a covariate x of each row, and an intercept of each group."""
    rng = np.random.default_rng(seed)
    group, x = np.arange(count).repeat(rows), rng.standard_normal(count * rows)
    eta = intercept + slope * x + sd * rng.standard_normal(count)[group]
    mean, share = np.exp(eta), 1 / (1 + np.exp(-eta))
    y = {
        "poisson": lambda: rng.poisson(mean),
        "bernoulli": lambda: (rng.random(len(eta)) < share) * 1,
        "negative_binomial": lambda: rng.poisson(mean * rng.gamma(size, 1 / size, len(eta))),
        "beta": lambda: rng.beta(share * size, (1 - share) * size),
        "gamma": lambda: mean * rng.gamma(size, 1 / size, len(eta)),
    }[family]()
    return pandas.DataFrame({"y": y, "x": x, "g": [f"g{k:04d}" for k in group]})


# ------------------------------------------------------------------------------------------------- statsmodels


def reml(formula, groups=None, crossed=(), **more):
    """`MixedLM` with effects of one factor, or with intercepts of crossed ones as components of one large group."""

    def fit(table):
        import statsmodels.formula.api as smf

        parts = {f: f"0 + C({f})" for f in crossed}
        all_of = np.ones(len(table)) if crossed else table[groups]
        m = smf.mixedlm(formula, table, groups=all_of, vc_formula=parts or None, **more).fit()
        fixed = [[name, m.fe_params[name], m.bse_fe[name]] for name in m.fe_params.index]
        if crossed:
            sd = [[f"{name} Intercept", value**0.5] for name, value in zip(m.model.exog_vc.names, m.vcomp, strict=True)]
        else:
            effects = ["Intercept", *m.cov_re.index[1:]]
            sd = [[f"{groups} {e}", v**0.5] for e, v in zip(effects, np.diag(m.cov_re), strict=True)]
        return {"fixed": fixed, "sd": sd, "family": [["residual sd", m.scale**0.5]]}, bool(m.converged)

    return fit


def variational(kind, formula, *factors):
    """`BinomialBayesMixedGLM` or that of Poisson: a Gaussian of independent coordinates, priors N(0, 2²), N(0, 1)."""

    def fit(table):
        from statsmodels.genmod import bayes_mixed_glm

        model = getattr(bayes_mixed_glm, kind).from_formula(formula, {f: f"0 + C({f})" for f in factors}, table)
        m = model.fit_vb()
        fixed = [[name, *pair] for name, *pair in zip(model.exog_names, m.fe_mean, m.fe_sd, strict=True)]
        sd = [
            [f"{f} Intercept", np.exp(mean), None, np.exp(mean - 1.96 * sd), np.exp(mean + 1.96 * sd)]
            for f, mean, sd in zip(factors, m.vcp_mean, m.vcp_sd, strict=True)
        ]
        return {"fixed": fixed, "sd": sd}, True

    return fit


def multinomial(outcome, *columns):
    """`MNLogit`, whose reference is the first category."""

    def fit(table):
        import statsmodels.api as sm

        m = sm.MNLogit(table[outcome], sm.add_constant(table[list(columns)])).fit(disp=0)
        labels, names = sorted(table[outcome].unique())[1:], ("Intercept", *columns)
        cells = np.stack([m.params, m.bse], -1)  # (columns, categories, 2)
        pairs = [(k, j) for k in range(len(labels)) for j in range(len(names))]
        fixed = [[f"{labels[k]}: {names[j]}", *cells[j, k]] for k, j in pairs]
        return {"fixed": fixed, "sd": []}, bool(m.mle_retvals["converged"])

    return fit


# ------------------------------------------------------------------------------------------------- the sets

OWLS = "calls ~ FoodTreatment * SexParent + offset(log(BroodSize)) + (1 | Nest)"
SETS = {
    "sleepstudy": Set(
        sleepstudy,
        "Reaction ~ Days + (1 + Days | Subject)",
        "gaussian",
        {
            "lme4": "lmer(Reaction ~ Days + (Days | Subject), d)",
            "glmmTMB": "glmmTMB(Reaction ~ Days + (Days | Subject), d)",
        },
        reml("Reaction ~ Days", groups="Subject", re_formula="~Days"),
    ),
    "cbpp": Set(
        of_R("cbpp", herd=text("herd", "h"), period=text("period", "p")),
        "prop(incidence, size) ~ period + (1 | herd)",
        "binomial",
        {
            "lme4": "glmer(cbind(incidence, size - incidence) ~ period + (1 | herd), d, binomial, nAGQ = 9)",
            "glmmTMB": "glmmTMB(cbind(incidence, size - incidence) ~ period + (1 | herd), d, binomial)",
        },
        bambi=("p(incidence, size) ~ period + (1 | herd)", "binomial", {}),
    ),
    "epilepsy": Set(
        epilepsy,
        "y ~ lbase * treated + lage + V4 + (1 | subject)",
        "poisson",
        {
            "lme4": "glmer(y ~ lbase * treated + lage + V4 + (1 | subject), d, poisson, nAGQ = 9)",
            "glmmTMB": "glmmTMB(y ~ lbase * treated + lage + V4 + (1 | subject), d, poisson)",
        },
        variational("PoissonBayesMixedGLM", "y ~ lbase * treated + lage + V4", "subject"),
    ),
    "toenail": Set(
        toenail,
        "severe ~ treated * time + (1 | patient)",
        "bernoulli",
        {
            "lme4": "glmer(severe ~ treated * time + (1 | patient), d, binomial, nAGQ = 25)",
            "glmmTMB": "glmmTMB(severe ~ treated * time + (1 | patient), d, binomial)",
        },
        variational("BinomialBayesMixedGLM", "severe ~ treated * time", "patient"),
    ),
    "crossed binary": Set(
        crossed,
        "mated ~ wf * wm + (1 | female) + (1 | male)",
        "bernoulli",
        {
            "lme4": "glmer(mated ~ wf * wm + (1 | female) + (1 | male), d, binomial)",
            "glmmTMB": "glmmTMB(mated ~ wf * wm + (1 | female) + (1 | male), d, binomial)",
        },
        variational("BinomialBayesMixedGLM", "mated ~ wf * wm", "female", "male"),
    ),
    "penicillin": Set(
        of_R("penicillin"),
        "diameter ~ 1 + (1 | plate) + (1 | sample)",
        "gaussian",
        {
            "lme4": "lmer(diameter ~ 1 + (1 | plate) + (1 | sample), d)",
            "glmmTMB": "glmmTMB(diameter ~ 1 + (1 | plate) + (1 | sample), d)",
        },
        reml("diameter ~ 1", crossed=("plate", "sample")),
    ),
    "wine": Set(
        of_R(
            "wine",
            judge=text("judge", "j"),
            warm=lambda table: (table.temp == "warm") - 0.5,  # centred, since bambi's thresholds are those at 0
            contact=lambda table: (table.contact == "yes") - 0.5,
        ),
        "rating ~ warm + contact + (1 | judge)",
        "ordinal",
        {"ordinal": "clmm(factor(rating) ~ warm + contact + (1 | judge), data = d, nAGQ = 9)"},
        bambi=("rating ~ warm + contact + (1 | judge)", "cumulative", {}),
    ),
    "zero-inflated": Set(
        of_R("salamanders"),
        "count ~ mined + cover + (1 | site)",
        "zero_inflated_poisson",
        {"glmmTMB": "glmmTMB(count ~ mined + cover + (1 | site), d, poisson, ziformula = ~1)"},
    ),
    "proportions": Set(
        lambda: groups("beta", 20, 8, 2, sd=0.6, size=10.0),
        "y ~ x + (1 | g)",
        "beta",
        {"glmmTMB": "glmmTMB(y ~ x + (1 | g), d, beta_family())"},
    ),
    "costs": Set(
        lambda: groups("gamma", 25, 8, 3, intercept=6.0, sd=0.4),
        "y ~ x + (1 | g)",
        "gamma",
        {
            "lme4": 'glmer(y ~ x + (1 | g), d, Gamma("log"))',
            "glmmTMB": 'glmmTMB(y ~ x + (1 | g), d, Gamma("log"))',
        },
        bambi=("y ~ x + (1 | g)", "gamma", {"link": "log"}),
    ),
    "survival": Set(
        lung,
        "censored(time, seen) ~ age + sex + ecog",
        "weibull",
        {"survival": "survreg(Surv(time, seen) ~ age + sex + ecog, d)"},
        bambi=("censored(time, status) ~ age + sex + ecog", "weibull", {"link": "log"}),
    ),
    "exposure": Set(
        of_R("owls", calls=lambda table: table.SiblingNegotiation),
        OWLS,
        "negative_binomial",
        {"lme4": f"glmer.nb({OWLS}, d)", "glmmTMB": f"glmmTMB({OWLS}, d, nbinom2)"},
        bambi=(OWLS, "negativebinomial", {}),
    ),
    "party": Set(
        party,
        "party ~ logpopul + selfLR + age + educ + income",
        "multinomial",
        {},
        multinomial("party", "logpopul", "selfLR", "age", "educ", "income"),
        bambi=("party ~ logpopul + selfLR + age + educ + income", "categorical", {}),
    ),
}


def one_factor(family, count, rows, seed=0, against=True, **truth):
    """A simulated set with one factor, as others write its model."""
    theirs = {"poisson": "poisson", "bernoulli": "binomial", "negative_binomial": "nbinom2"}[family]
    R = {"glmmTMB": f"glmmTMB(y ~ x + (1 | g), d, {theirs})"}
    if family != "negative_binomial":
        R["lme4"] = f"glmer(y ~ x + (1 | g), d, {theirs}, nAGQ = 9)"
    return Set(lambda: groups(family, count, rows, seed, **truth), "y ~ x + (1 | g)", family, R), against


HERS = "response ~ age + bmi + htn + visit + (1 | id)"
HERS_R = {"lme4": f"glmer({HERS}, d, binomial, nAGQ = 15)", "glmmTMB": f"glmmTMB({HERS}, d, binomial)"}
SPEED = {  # and whether more draws are a reference
    "epilepsy": (SETS["epilepsy"], True),
    "toenail": (SETS["toenail"], True),
    "Poisson 500 x 3": one_factor("poisson", 500, 3),
    "Bernoulli 60 x 6": one_factor("bernoulli", 60, 6),
    "NB 60 x 5": one_factor("negative_binomial", 60, 5),
    "Poisson 1,000 x 3": one_factor("poisson", 1000, 3, against=False),
    "Poisson 3,000 x 3": one_factor("poisson", 3000, 3, against=False),
    "Bernoulli 3,000 x 4": one_factor("bernoulli", 3000, 4, against=False),
    "NB 900 x 3": one_factor("negative_binomial", 900, 3, against=False),
    "HERS": (Set(hers, HERS, "bernoulli", HERS_R), False),
}


# ------------------------------------------------------------------------------------------------- the programs


def ours(this, table, seed=0, **settings):
    """Estimates, and how the fit went."""
    from torchngvi.tables.model import regression

    clock = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = regression(this.formula, table, this.family).fit(progress=False, seed=seed, **settings)
    said = result.summary()
    seconds = time.process_time() - clock
    found = {"fixed": rows(said.fixed), "family": rows(said.likelihood) if said.likelihood else []}
    found["sd"] = [[f"{name} {of[0]}", *of[1:]] for name, factor in said.random.items() for of in rows(factor.sd)]
    how = {"k_hat": result.k_hat, "effective": result.effective, "converged": result.converged, "said": result.method}
    return {"found": found, "seconds": seconds, **how}


def rows(block):
    """Name, mean, sd, and the ends of the interval of each quantity."""
    return [[name, *row] for name, *row in zip(block.names, *(column.tolist() for column in block[1:]), strict=True)]


def in_R(code, table):
    """Estimates of a program of R."""
    if code is None or shutil.which("Rscript") is None:
        raise LeftError("no R" if code else "has no such model")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d.csv"
        table.to_csv(path, index=False, quoting=csv.QUOTE_NONNUMERIC)
        done = subprocess.run(
            ["Rscript", str(SCRIPT), "fit", str(path), code],
            capture_output=True,
            text=True,
            env=os.environ | THREADS,
            timeout=PATIENCE,
        )
    if done.returncode:
        raise LeftError(done.stderr.strip().splitlines()[-1][:120] if done.stderr else "R has failed")
    found: dict[str, Any] = {"fixed": [], "sd": [], "family": []}
    more: dict[str, Any] = {"said": []}
    for line in done.stdout.splitlines():
        what, name, *cells = line.split("\t")
        values = [None if cell in ("NA", "NaN") else float(cell) for cell in cells]
        if what in found:
            found[what].append([name.replace("(Intercept)", "Intercept"), *values])
        elif what == "said":
            more["said"].append(name)
        else:
            more[what] = bool(values[0]) if what == "converged" else values[0]
    return {"found": found, **more}


def in_statsmodels(this, table):
    """Estimates of statsmodels, where it has such a model."""
    if this.statsmodels is None:
        raise LeftError("has no such model")
    try:
        import statsmodels  # noqa: F401
    except ImportError:
        raise LeftError("not installed") from None
    clock = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, converged = this.statsmodels(table)
    found = {
        key: [[*row, *([row[1] - 1.96 * row[2], row[1] + 1.96 * row[2]] if len(row) == 3 else [])] for row in block]
        for key, block in found.items()
    }
    return {"found": found, "converged": converged, "seconds": time.process_time() - clock}


def in_bambi(name, python):
    """Posterior means of bambi, in a process of its own that ends after so many processor seconds."""
    command = [python, "-P", str(HERE / "table_peers.py"), name, "--nuts"]
    limit = (LONGEST, LONGEST)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | THREADS,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, limit),
    )
    if done.returncode < 0:
        raise LeftError(f"over {LONGEST} s")
    if done.returncode:
        raise LeftError(done.stderr.strip().splitlines()[-1][:120])
    return json.loads(done.stdout.splitlines()[-1])


def same_priors(this, bambi):
    """Our default priors of coefficients and of standard deviations over groups, in the words of bambi."""
    from torchngvi.tables.model import regression

    model = regression(this.formula, this.table(), this.family)
    design, units = model.design, {}
    unit = 2.5 * (float(design.y[0].std()) if this.family == "gaussian" else 1.0)
    for name, x in zip(design.names, design.X.mT, strict=True):
        if name != "Intercept":
            units.setdefault(re.sub(r"\[.*?\]", "", name), []).append(unit / float(x.std(correction=0)))
    priors = {name: bambi.Prior("Normal", mu=0, sigma=of[0] if len(of) == 1 else of) for name, of in units.items()}
    if "Intercept" in design.names:
        at = float(model.priors.location[design.names.index("Intercept")])
        priors["Intercept"] = bambi.Prior("Normal", mu=at, sigma=unit)
    else:  # of an ordinal outcome
        ordered = importlib.import_module("pymc").distributions.transforms.ordered
        at = np.linspace(-1, 1, len(model.family.parameters))
        priors["threshold"] = bambi.Prior("StudentT", nu=3, mu=0 * at, sigma=2.5, initval=at, transform=ordered)
    for of in design.factors:
        for effect, z in zip(of.effects, of.Z.mT, strict=True):
            half_t = bambi.Prior("HalfStudentT", nu=3, sigma=unit / (float(z.std(correction=0)) or 1.0))
            name = f"{'1' if effect == 'Intercept' else effect}|{of.name}"
            priors[name] = bambi.Prior("Normal", mu=0, sigma=half_t)
    return priors


def nuts(this):
    """What the process of bambi prints."""
    import arviz
    import bambi

    formula, family, more = this.bambi or (this.formula, this.family, {})
    table = this.table()
    if "seen" in table:
        table = table.assign(status=np.where(table.seen > 0, "none", "right"))
    if "rating" in table:
        table = table.assign(rating=pandas.Categorical(table.rating, ordered=True))
    clock = time.process_time()
    with contextlib.redirect_stdout(sys.stderr):
        model = bambi.Model(formula, table, family=family, priors=same_priors(this, bambi), **more)
        drawn = model.fit(draws=1000, tune=1000, chains=2, cores=1, random_seed=0, progressbar=False)
    seconds = time.process_time() - clock
    found: dict[str, Any] = {"fixed": [], "sd": [], "family": []}
    for key, values in drawn.posterior.data_vars.items():
        if "|" in key and not key.endswith("_sigma"):
            continue
        flat = np.asarray(values).reshape(2000, -1)
        extra = [str(label) for coord in values.dims[2:] for label in values[coord].values]
        for at, column in enumerate(flat.T):
            row = [float(column.mean()), float(column.std()), *map(float, np.quantile(column, [0.025, 0.975]))]
            if key.endswith("_sigma") and "|" in key:
                effect, factor = key.removesuffix("_sigma").split("|")
                found["sd"].append([f"{factor} {'Intercept' if effect == '1' else effect}", *row])
            elif key in model.components[model.family.likelihood.parent].terms or key == "Intercept":
                found["fixed"].append([f"{key}[{extra[at]}]" if extra else key, *row])
            else:
                found["family"].append([f"{key}[{at + 1}]" if len(flat.T) > 1 else key, *row])
    worst = float(max(np.max(np.asarray(one)) for one in arviz.rhat(drawn.posterior).data_vars.values()))
    print(json.dumps({"found": found, "seconds": seconds, "r_hat": worst, "converged": worst < 1.01}))


# ------------------------------------------------------------------------------------------------- runs and tables


class Log:
    """Fits that are done, by what was fitted, in a file."""

    def __init__(self, path):
        lines = path.read_text().splitlines() if path.exists() else []
        self.kept = {tuple(one["of"]): one for one in map(json.loads, lines)}
        self.file = path.open("a")

    def of(self, of, call, *arguments):
        """What is kept of it, or what the call returns."""
        if of not in self.kept:
            try:
                self.kept[of] = call(*arguments)
            except LeftError as left:
                self.kept[of] = {"left": str(left)}
            except Exception as error:  # a program that fails is a row of the table
                self.kept[of] = {"left": f"{type(error).__name__}: {str(error)[:160]}"}
            self.file.write(json.dumps({"of": of, **self.kept[of]}) + "\n")
            self.file.flush()
        return self.kept[of]


def warmed():
    """Fits of another table, which load what is loaded at a first fit."""
    table, this = groups("poisson", 8, 5, 9), one_factor("poisson", 8, 5)[0]
    ours(this, table)
    joint(this, table)


def cell(row):
    """An estimate and its interval."""
    if row is None:
        return "-"
    value, ends = f"{row[1]:.4g}", row[3:5]
    return value if len(ends) < 2 or None in ends else f"{value} [{ends[0]:.3g}, {ends[1]:.3g}]"


def plain(name):
    """The name of a quantity without what programs write around a category."""
    return name.replace("[T.", "").replace("[", "").replace("]", "")


def apart(mine, other):
    """The largest difference of fixed effects in their standard errors, and of sds in our posterior sds."""
    theirs = {what: {plain(row[0]): row for row in other[what]} for what in ("fixed", "sd")}
    pairs = {what: [(row, theirs[what].get(plain(row[0]))) for row in mine[what]] for what in theirs}
    fixed = [abs(a[1] - b[1]) / b[2] for a, b in pairs["fixed"] if b is not None]
    sds = [abs(a[1] - b[1]) / a[2] for a, b in pairs["sd"] if b is not None]
    return max(fixed, default=None), max(sds, default=None)


def shown(name, fits):
    """The estimates of one data set, a column for each program."""
    there = {engine: fit for engine, fit in fits.items() if "found" in fit}
    mine = fits["torchngvi"]["found"]
    print(f"\n{name}: {SETS[name].formula}, {SETS[name].family}")
    print("| | " + " | ".join(there) + " |\n|" + "---|" * (1 + len(there)))
    for what, label in (("fixed", "{}"), ("sd", "sd {}"), ("family", "{}")):
        for row in mine[what]:
            known = [{plain(one[0]): one for one in fit["found"].get(what, [])} for fit in there.values()]
            cells = [cell(of.get(plain(row[0]))) for of in known]
            print(f"| {label.format(row[0])} | " + " | ".join(cells) + " |")
    for engine, fit in fits.items():
        if "left" in fit:
            print(f"{engine} is left out: {fit['left']}")
        elif engine != "torchngvi" and fit.get("said"):
            print(f"{engine} said: {'; '.join(fit['said'])}")
    sys.stdout.flush()


def number(value, digits=2):
    return "-" if value is None else f"{value:.{digits}f}"


def peers(options, log):
    """The table of all sets and programs."""
    lines = []
    for name in options.sets or SETS:
        this = SETS[name]
        try:
            table = this.table()
        except LeftError as left:
            print(f"\n{name} is left out: {left}")
            continue
        fits = {"torchngvi": log.of((name, "torchngvi"), ours, this, table)}
        for engine, code in this.R.items():
            fits[engine] = log.of((name, engine), in_R, code, table)
        fits["statsmodels"] = log.of((name, "statsmodels"), in_statsmodels, this, table)
        if options.bambi:
            fits["bambi"] = log.of((name, "bambi"), in_bambi, name, options.bambi)
        if "left" in fits["torchngvi"]:
            print(f"\n{name}: {fits['torchngvi']['left']}")
            continue
        shown(name, fits)
        for engine, fit in fits.items():
            if "left" not in fit:
                of = ("", "") if engine == "torchngvi" else map(number, apart(fits["torchngvi"]["found"], fit["found"]))
                how = number(fit.get("k_hat")) if engine == "torchngvi" else ""
                ended = "yes" if fit["converged"] else "no"
                lines.append(f"| {name} | {engine} | {fit['seconds']:.2f} | {how} | {ended} | {' | '.join(of)} |")
                name = ""
    print(
        "\n| | | seconds | k-hat | converged | fixed effects apart, standard errors | sds apart, our sds |\n|"
        + "---|" * 7
    )
    print("\n".join(lines))


def speed(options, log):
    """The table of fits with one factor."""
    head = "rows, groups | seconds | joint fit | lme4 | glmmTMB | k-hat, effective | worst mean, sds | of ten seeds"
    print(f"| | {head} |\n|" + "---|" * 9)
    for name in options.sets or SPEED:
        this, against = SPEED[name]
        try:
            table = this.table()
        except LeftError as left:
            print(f"| {name} | {left} |")
            continue
        fits = [
            log.of(("speed", name, seed), ours, this, table, seed) for seed in (range(SEEDS) if against else range(1))
        ]
        cells = ["-", "-"]
        if against:
            more = log.of(("speed", name, "reference"), reference, this, table)
            cells = [accuracy(fits[:1], more), accuracy(fits, more)]
        theirs = [log.of(("speed", name, "joint"), joint, this, table)]
        theirs += [log.of(("speed", name, of), in_R, this.R.get(of), table) for of in ("lme4", "glmmTMB")]
        seconds = " | ".join(number(fit.get("seconds")) for fit in (fits[0], *theirs))
        count, fit = table[this.formula.split("|")[-1].strip(" )")].nunique(), fits[0]
        how = f"{number(fit['k_hat'])}, {fit['effective']:.0f}{'' if fit['converged'] else ', not converged'}"
        print(f"| {name} | {len(table):,}, {count:,} | {seconds} | {how} | {' | '.join(cells)} |", flush=True)


def joint(this, table):
    """Seconds of the Gaussian over the globals and all random effects, as `torchngvi.models.MixedLogJoint` fits it."""
    from torchngvi import fit
    from torchngvi.models import MixedLogJoint, RandomEffects
    from torchngvi.tables.model import regression

    family = {"poisson": "poisson_log", "bernoulli": "bernoulli_logit"}.get(this.family)
    if family is None:
        raise LeftError("does not learn a size")
    design = regression(this.formula, table, this.family).design
    factor = design.factors[0]
    clock = time.process_time()
    model = MixedLogJoint(design.X, design.y[0], RandomEffects(factor.Z, factor.groups), family)
    result = fit(model.posterior(), model, progress=False)
    return {"seconds": time.process_time() - clock, "converged": result.converged}


def reference(this, table):
    """The same model with another seed, more nodes, and draws until 3,000 are effective."""
    draws = MORE
    while True:
        found = ours(this, table, SEEDS, draws=draws, nodes=NODES.get(this.family, NODES[""]))
        if found["effective"] >= WORTH or draws > 4 * MORE:
            return found
        draws *= 2


def accuracy(fits, more):
    """The largest error of a mean, in posterior sds, and the range of ratios of sds, of the average of some fits."""
    quantities = [row for what in ("fixed", "sd", "family") for row in more["found"][what]]
    found = [[row for what in ("fixed", "sd", "family") for row in fit["found"][what]] for fit in fits]
    mean, sd = np.array([[row[1:3] for row in of] for of in found]).mean(0).T
    truth, scale = np.array([row[1:3] for row in quantities]).T
    ratios = sd / scale
    return f"{abs((mean - truth) / scale).max():.3f}, {ratios.min():.2f} to {ratios.max():.2f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", help=", ".join(SETS))
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--bambi", help="the Python with bambi in it")
    parser.add_argument("--nuts", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, default=Path("table_peers.jsonl"))
    options = parser.parse_args()
    if options.nuts:
        nuts(SETS[options.sets[0]])
        return
    import torch

    torch.set_num_threads(1)
    warmed()
    (speed if options.speed else peers)(options, Log(options.log))


if __name__ == "__main__":
    main()
