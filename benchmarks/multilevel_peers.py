"""Models with two grouping factors beside statsmodels.MixedLM (REML): python benchmarks/multilevel_peers.py.

Linear models with Gaussian noise, 60 x 12 crossed groups in 600 rows, and 80 classes in 20 schools in 800 rows.
"""

import time

import numpy as np
import pandas
import statsmodels.formula.api as smf

import torchngvi


def crossed(rng: np.random.Generator) -> pandas.DataFrame:
    """Answers of subjects to items."""
    subject, item, x = rng.integers(0, 60, 600), rng.integers(0, 12, 600), rng.normal(size=600)
    y = 0.5 + 0.3 * x + 0.8 * rng.normal(size=60)[subject] + 0.5 * rng.normal(size=12)[item]
    return pandas.DataFrame({"y": y + 0.6 * rng.normal(size=600), "x": x, "outer": subject, "inner": item, "one": 1})


def nested(rng: np.random.Generator) -> pandas.DataFrame:
    """Pupils of classes of schools."""
    room, x = rng.integers(0, 80, 800), rng.normal(size=800)
    school = room // 4
    y = 0.5 + 0.3 * x + 0.8 * rng.normal(size=20)[school] + 0.5 * rng.normal(size=80)[room]
    return pandas.DataFrame({"y": y + 0.6 * rng.normal(size=800), "x": x, "outer": school, "inner": room})


def main() -> None:
    """Print both estimates of each model."""
    rng = np.random.default_rng(0)
    for name, table, groups, parts in (
        ("crossed", crossed(rng), "one", {"outer": "0 + C(outer)", "inner": "0 + C(inner)"}),
        ("nested", nested(rng), "outer", {"inner": "0 + C(inner)"}),
    ):
        begun = time.process_time()
        ours = torchngvi.mixed("y ~ x + (1 | outer) + (1 | inner)", table).fit(progress=False).summary()
        ours_took, begun = time.process_time() - begun, time.process_time()
        model = smf.mixedlm("y ~ x", table, groups=groups, vc_formula=parts, re_formula="0" if groups == "one" else "1")
        theirs = model.fit()
        took = time.process_time() - begun
        sds = dict(zip(theirs.model.exog_vc.names, np.sqrt(theirs.vcomp), strict=True))
        if groups != "one":
            sds["outer"] = float(np.sqrt(np.asarray(theirs.cov_re)[0, 0]))
        print(f"{name}: {ours_took:.1f} s and {took:.1f} s of the processor")
        for k, of in enumerate(ours.fixed.names):
            print(
                f"  {of}: {ours.fixed.mean[k]:.4f} ({ours.fixed.sd[k]:.4f}), "
                f"MixedLM {theirs.fe_params.iloc[k]:.4f} ({theirs.bse_fe.iloc[k]:.4f})"
            )
        for key, of in ours.random.items():
            print(f"  sd of {key}: {of.sd.mean[0]:.4f} ({of.sd.sd[0]:.4f}), MixedLM {sds[key]:.4f}")
        print(f"  residual sd: {ours.likelihood.mean[0]:.4f}, MixedLM {np.sqrt(theirs.scale):.4f}")


if __name__ == "__main__":
    main()
