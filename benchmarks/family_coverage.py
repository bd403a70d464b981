"""Do 95 % intervals of a table's model hold a fixed truth 95 times of a hundred, in each family?

    python benchmarks/family_coverage.py [--families binomial ...] [--factors 0 1] [--replicates 200] [--draws 4096]
                                         [--priors flat] [--out family_coverage.jsonl]

The truth is fixed and not drawn from the prior, so that what is measured is what a user meets: the default priors and
the fit together. There are 30 groups of 6 rows, a standard normal covariate x of each row, and a treatment of half of
the groups; with a factor the intercepts of groups have the sd .6, without one the 180 rows are independent. Data and x
are drawn again in each replicate, by NumPy and not by the families' own draws. About a fifth of the times of the
survival families is censored. Of an ordinal outcome the thresholds stand for the intercept. A multinomial outcome has
three categories, and no factor.

A share of n intervals has the standard error √(.95 · .05/n), .015 for 200: a cell agrees with 95 % where it lies within
three of these, and has a star where it does not. z is (posterior mean - truth)/(posterior sd), its mean and sd over the
replicates, so that a cell off 95 % shows whether the estimate is shifted or the interval too short. With ``--draws`` or
``--priors`` the same replicates are fitted otherwise. Each replicate is a line of the file ``--out``, from which an
interrupted run goes on.
"""

import argparse
import json
import math
import time
import warnings
from pathlib import Path

import numpy as np
import pandas

GROUPS, ROWS, SD = 30, 6, 0.6
SLOPES = {"x": 0.5, "treated": -0.4}
TRIALS = 8
AT_MOST = 3.0  # standard errors by which a share may miss .95
USELESS = 0.7  # a k-hat above it
CENSORED = (0.2, 6.0)  # times of censoring are uniform between these, in medians of the means: a fifth is censored
# the intercept (thresholds of an ordinal outcome), and the parameters of each family by their names
TRUTHS = {
    "binomial": (-0.3, {}),
    "beta_binomial": (-0.3, {"precision": 8.0}),
    "ordinal": (None, {"threshold[1]": -1.0, "threshold[2]": 0.3, "threshold[3]": 1.5}),
    "beta": (0.3, {"precision": 10.0}),
    "gamma": (1.0, {"shape": 2.0}),
    "zero_inflated_poisson": (0.8, {"surplus zeros": 0.25}),
    "zero_inflated_negative_binomial": (1.2, {"surplus zeros": 0.25, "size": 2.0}),
    "hurdle_poisson": (0.8, {"zeros": 0.3}),
    "weibull": (0.5, {"shape": 1.5}),
    "lognormal": (0.5, {"sd of log time": 0.8}),
    "multinomial": (None, {}),
}
CATEGORIES = {"b": (0.3, *SLOPES.values()), "c": (-0.5, -0.6, 0.7)}  # intercept and slopes against the category a
OUTCOME = {"binomial": "prop(y, n)", "beta_binomial": "prop(y, n)"}
OUTCOME |= dict.fromkeys(("weibull", "lognormal"), "censored(y, seen)")


def above_zero(generator, rate):
    """Counts of Poisson's distribution that are above 0, by taking zeros again."""
    counts = generator.poisson(rate)
    while (counts == 0).any():
        counts = np.where(counts == 0, generator.poisson(rate), counts)
    return counts


def outcome(name, eta, other, generator):
    """The columns of the outcome, drawn without the library."""
    count, mean = len(eta), np.exp(eta)
    match name:
        case "binomial" | "beta_binomial":
            p = 1 / (1 + np.exp(-eta))
            if name == "beta_binomial":
                p = generator.beta(p * other["precision"], (1 - p) * other["precision"])
            n = generator.integers(TRIALS // 2, TRIALS + TRIALS // 2 + 1, count)
            return {"y": generator.binomial(n, p), "n": n}
        case "ordinal":
            latent = eta + generator.logistic(size=count)
            return {"y": (latent[:, None] > np.array(list(other.values()))).sum(1)}
        case "beta":
            p, precision = 1 / (1 + np.exp(-eta)), other["precision"]
            tiny = np.finfo(float).eps
            return {"y": generator.beta(p * precision, (1 - p) * precision).clip(tiny, 1 - tiny)}
        case "gamma":
            return {"y": mean * generator.gamma(other["shape"], 1 / other["shape"], count)}
        case "zero_inflated_poisson":
            return {"y": generator.poisson(mean) * (generator.random(count) >= other["surplus zeros"])}
        case "zero_inflated_negative_binomial":
            rate = mean * generator.gamma(other["size"], 1 / other["size"], count)
            return {"y": generator.poisson(rate) * (generator.random(count) >= other["surplus zeros"])}
        case "hurdle_poisson":
            return {"y": above_zero(generator, mean) * (generator.random(count) >= other["zeros"])}
    if name == "weibull":
        time_ = mean / math.gamma(1 + 1 / other["shape"]) * generator.weibull(other["shape"], count)
    else:
        time_ = mean * np.exp(other["sd of log time"] * generator.standard_normal(count))
    end = generator.uniform(*CENSORED, count) * np.median(mean)
    return {"y": np.minimum(time_, end), "seen": (time_ <= end).astype(int)}


def simulated(name, factors, seed):
    """A table of one replicate, and the truth of each quantity by its name."""
    generator = np.random.default_rng([seed, list(TRUTHS).index(name), factors])
    intercept, other = TRUTHS[name]
    group = np.arange(GROUPS).repeat(ROWS)
    x, treated = generator.standard_normal(len(group)), (group % 2).astype(float)
    b = SD * generator.standard_normal(GROUPS)
    if name == "multinomial":
        columns = np.stack([np.ones(len(x)), x, treated])
        eta = np.stack([0 * x, *(np.array(of) @ columns for of in CATEGORIES.values())])
        table = pandas.DataFrame({"x": x, "treated": treated})
        table["y"] = np.array(["a", *CATEGORIES])[(eta + generator.gumbel(size=eta.shape)).argmax(0)]
        names = ("Intercept", *SLOPES)
        pairs = {k: zip(names, of, strict=True) for k, of in CATEGORIES.items()}
        return table, {f"{k}: {column}": value for k, some in pairs.items() for column, value in some}
    eta = (intercept or 0.0) + SLOPES["x"] * x + SLOPES["treated"] * treated + (b[group] if factors else 0.0)
    table = pandas.DataFrame(outcome(name, eta, other, generator) | {"x": x, "treated": treated})
    table["g"] = [f"g{k:02d}" for k in group]
    truth = {} if intercept is None else {"Intercept": intercept}
    return table, truth | SLOPES | ({"sd": SD} if factors else {}) | other


def replicate(name, factors, seed, draws, priors):
    """Truth, posterior mean, sd and ends of the interval of each quantity, and how the fit went."""
    from torchngvi.tables.model import regression

    table, truth = simulated(name, factors, seed)
    formula = f"{OUTCOME.get(name, 'y')} ~ x + treated{' + (1 | g)' if factors else ''}"
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = regression(formula, table, name, priors=priors).fit(progress=False, seed=seed, draws=draws)
    said = result.summary()
    seconds = time.process_time() - began
    blocks = [said.fixed, *([said.sd._replace(names=("sd",))] if factors else []), said.likelihood]
    found = {
        quantity: [truth[quantity], *row]
        for block in blocks
        if block is not None
        for quantity, *row in zip(block.names, *(column.tolist() for column in block[1:]), strict=True)
    }
    assert found.keys() == truth.keys(), (list(found), list(truth))
    how = {"k_hat": result.k_hat, "effective": result.effective, "converged": result.converged, "seconds": seconds}
    return {"found": found, **how}


def asked():
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="*", choices=TRUTHS, default=list(TRUTHS), metavar="FAMILY")
    parser.add_argument("--factors", nargs="*", type=int, choices=(0, 1), default=[0, 1])
    parser.add_argument("--replicates", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first replicate")
    parser.add_argument("--draws", type=int, default=None)
    parser.add_argument("--priors", default=None, help="flat, instead of the default priors")
    parser.add_argument("--out", type=Path, default=Path("family_coverage.jsonl"))
    return parser.parse_args()


def read(path):
    """The replicates of a file by family, factors and seed, and how they were fitted."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {tuple(one["of"]): one for one in map(json.loads, lines)}


def show(name, factors, done):
    """The rows of a family in the table."""
    fits = [one for one in done if "found" in one]
    if not fits:
        return
    worst = sorted(one["k_hat"] for one in fits)[-1]
    doubtful, ended = sum(one["k_hat"] > USELESS for one in fits), sum(not one["converged"] for one in fits)
    seconds, effective = (np.median([one[key] for one in fits]) for key in ("seconds", "effective"))
    print(
        f"\n{name}, {'a factor' if factors else 'no factor'}: {len(fits)} fits, {len(done) - len(fits)} failed, "
        f"{ended} not converged, {doubtful} with k-hat above {USELESS} (largest {worst:.2f}), "
        f"median {effective:.0f} effective draws, {seconds:.2f} s"
    )
    for quantity in fits[0]["found"]:
        truth, mean, sd, low, high = np.array([one["found"][quantity] for one in fits]).T
        held, z = (low <= truth) & (truth <= high), (mean - truth) / sd
        off = abs(held.mean() - 0.95) / math.sqrt(0.95 * 0.05 / len(fits))
        below, above = (truth < low).mean(), (truth > high).mean()
        print(
            f"  {quantity:<16}{truth[0]:>7.2f}  {held.mean():.3f}{' *' if off > AT_MOST else '  '} below {below:.3f} "
            f"above {above:.3f}  mean {mean.mean():8.4f}  z {z.mean():6.2f} +- {z.std(ddof=1):.2f}",
            flush=True,
        )


def main():
    options = asked()
    kept = read(options.out)
    with options.out.open("a") as log:
        for factors in options.factors:
            for name in options.families:
                if factors and name == "multinomial":
                    continue
                done = []
                for seed in range(options.first, options.first + options.replicates):
                    of = (name, factors, seed, options.draws, options.priors)
                    if of not in kept:
                        try:
                            kept[of] = replicate(*of)
                        except Exception as error:  # a replicate that fails is counted
                            kept[of] = {"error": f"{type(error).__name__}: {error}"}
                            print(of, kept[of]["error"], flush=True)
                        log.write(json.dumps({"of": of, **kept[of]}) + "\n")
                        log.flush()
                    done.append(kept[of])
                show(name, factors, done)


if __name__ == "__main__":
    main()
