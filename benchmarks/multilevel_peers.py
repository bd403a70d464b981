"""Models with two grouping factors beside statsmodels.MixedLM and GPBoost: python benchmarks/multilevel_peers.py.

Linear models with Gaussian noise, 60 x 12 crossed groups in 600 rows, and 80 classes in 20 schools in 800 rows; and a
logistic one of 60 x 12 crossed groups in 600 rows.  GPBoost (Sigrist 2022) maximises the likelihood, by Laplace's
approximation of that of binary data; a peer that is not installed is left out.
"""

import importlib.util
import time
from typing import Any

import numpy as np
import pandas

import torchngvi

HERE = {name: importlib.util.find_spec(name) is not None for name in ("statsmodels", "gpboost")}
Found = tuple[float, np.ndarray, np.ndarray, dict[str, float]]  # seconds, fixed effects, their errors, sds


def crossed(rng: np.random.Generator) -> pandas.DataFrame:
    """Answers of subjects to items."""
    subject, item, x = rng.integers(0, 60, 600), rng.integers(0, 12, 600), rng.normal(size=600)
    eta = 0.5 + 0.3 * x + 0.8 * rng.normal(size=60)[subject] + 0.5 * rng.normal(size=12)[item]
    y, right = eta + 0.6 * rng.normal(size=600), np.random.default_rng(1).random(600) < 1 / (1 + np.exp(-eta))
    columns = {"y": y, "right": right.astype(float), "x": x, "outer": subject, "inner": item, "one": 1}
    return pandas.DataFrame(columns)


def nested(rng: np.random.Generator) -> pandas.DataFrame:
    """Pupils of classes of schools."""
    room, x = rng.integers(0, 80, 800), rng.normal(size=800)
    school = room // 4
    y = 0.5 + 0.3 * x + 0.8 * rng.normal(size=20)[school] + 0.5 * rng.normal(size=80)[room]
    return pandas.DataFrame({"y": y + 0.6 * rng.normal(size=800), "x": x, "outer": school, "inner": room})


def ours(table: pandas.DataFrame, y: str) -> tuple[Found, dict[str, float]]:
    """Posterior means, and the standard deviations of those of variance parameters."""
    begun = time.process_time()
    family = "gaussian" if y == "y" else "bernoulli_logit"
    made = torchngvi.mixed(f"{y} ~ x + (1 | outer) + (1 | inner)", table, family).fit(progress=False).summary()
    took = time.process_time() - begun
    sds = {key: (float(of.sd.mean[0]), float(of.sd.sd[0])) for key, of in made.random.items()}
    if made.likelihood is not None:
        sds["residual"] = (float(made.likelihood.mean[0]), float(made.likelihood.sd[0]))
    means, errors = ({key: pair[k] for key, pair in sds.items()} for k in (0, 1))
    return (took, made.fixed.mean.numpy(), made.fixed.sd.numpy(), means), errors


def mixed_lm(table: pandas.DataFrame, y: str) -> Found:
    """The estimates of statsmodels, of linear models alone."""
    import statsmodels.formula.api as smf

    inside = {"inner": "0 + C(inner)"}
    begun = time.process_time()
    if "one" in table:
        parts: dict[str, Any] = {"vc_formula": {"outer": "0 + C(outer)", **inside}, "re_formula": "0"}
        model = smf.mixedlm(f"{y} ~ x", table, groups="one", **parts)
    else:
        model = smf.mixedlm(f"{y} ~ x", table, groups="outer", vc_formula=inside, re_formula="1")
    made = model.fit()
    took = time.process_time() - begun
    sds = {name: float(v) ** 0.5 for name, v in zip(made.model.exog_vc.names, made.vcomp, strict=True)}
    if "one" not in table:
        sds["outer"] = float(np.asarray(made.cov_re)[0, 0]) ** 0.5
    sds["residual"] = float(made.scale) ** 0.5
    return took, made.fe_params.to_numpy(), made.bse_fe.to_numpy(), sds


def gpboost(table: pandas.DataFrame, y: str) -> Found:
    """The estimates of GPBoost."""
    import gpboost as gpb

    X = np.stack([np.ones(len(table)), table.x], 1)
    begun = time.process_time()
    likelihood = "gaussian" if y == "y" else "bernoulli_logit"
    groups = table[["outer", "inner"]].to_numpy()
    model = gpb.GPModel(group_data=groups, likelihood=likelihood, num_parallel_threads=1)
    model.fit(y=table[y].to_numpy(), X=X)
    fixed = model.get_coef(std_err=True).to_numpy()
    took = time.process_time() - begun
    variances = model.get_cov_pars().iloc[0].to_numpy()
    names = [*(["residual"] if y == "y" else []), "outer", "inner"]
    return took, fixed[0], fixed[1], dict(zip(names, np.sqrt(variances).tolist(), strict=True))


def main() -> None:
    """Print all estimates of each model."""
    rng = np.random.default_rng(0)
    answers, pupils = crossed(rng), nested(rng)
    for name, table, y in (("crossed", answers, "y"), ("nested", pupils, "y"), ("crossed, binary", answers, "right")):
        (took, fixed, spread, sds), errors = ours(table, y)
        found = {"ours": (took, fixed, spread, sds)}
        if HERE["statsmodels"] and y == "y":
            found["MixedLM"] = mixed_lm(table, y)
        if HERE["gpboost"]:
            found["GPBoost"] = gpboost(table, y)
        print(name)
        for who, (seconds, means, sd, of) in found.items():
            fixed_text = ", ".join(f"{a:.4f} ({b:.4f})" for a, b in zip(means, sd, strict=True))
            sd_text = ", ".join(
                f"{key} {of[key]:.4f}" + (f" ({errors[key]:.4f})" if who == "ours" else "") for key in sorted(of)
            )
            print(f"  {who}: {seconds:.2f} s of the processor; fixed effects {fixed_text}; sds {sd_text}")


if __name__ == "__main__":
    main()
