"""Evaluations of (value, gradient, curvature) until the negative ELBO is within 1e-6 nats of its minimum.

    python benchmarks/evaluations.py [--rows 3000]

Default settings, no learning rate, logistic regression without intercept on LIBSVM sets found under
$TORCHNGVI_DATA, from covariance roots C = c I with c in {0.01, 1, 100} and means 0 and N(0, 10 I); and
scikit-learn's breast cancer data (standardised, with intercept, β = 0.1) from m = 0, C = β^-½ I.
Leukemia (38 rows of 7,129) is fitted in its row space, VN with `SiteNewton`, and the
starts are those of the row space.  Warnings are errors; an objective that rises by more than rounding is counted.
"""

import argparse
import itertools
import os
import warnings
from pathlib import Path

import torch
from sklearn.datasets import load_breast_cancer, load_svmlight_file

from torchngvi import SRVN, VN, CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, NaturalGaussian, fit
from torchngvi.fitting import RowSpace
from torchngvi.rules import SiteNewton

SETS = {  # file: (columns, prior precision)
    "australian_scale": (14, 1e-5),
    "diabetes_scale": (8, 1e-2),
    "breast-cancer_scale": (10, 1e-1),
    "mushrooms": (112, 1e-2),
    "phishing": (68, 1e-2),
    "a9a": (123, 1e-2),
    "a1a": (123, 1e-2),
    "heart_scale": (13, 1e-2),
    "german.numer_scale": (24, 1e-2),
    "ionosphere_scale": (34, 1e-2),
    "leukemia": (7129, 2e-1),
}
METHODS = [(VN, NaturalGaussian), (VN, CholeskyGaussian), (SRVN, CholeskyGaussian)]
CAP = 500


def breast_cancer():
    X, y = load_breast_cancer(return_X_y=True)
    X = torch.cat([torch.tensor((X - X.mean(0)) / X.std(0)), torch.ones(len(y), 1)], 1)
    return GeneralizedLinear(X, y, prior_precision=0.1)


def libsvm(name, rows):
    path = Path(os.environ.get("TORCHNGVI_DATA", ".")) / "libsvm" / f"{name}.svm.gz"
    columns, beta = SETS[name]
    X, y = load_svmlight_file(str(path), n_features=columns)
    model = GeneralizedLinear(torch.tensor(X.toarray()[:rows]), y[:rows], prior_precision=beta)
    return RowSpace(model).model if columns > 1000 else model


def minimum(model, family):
    q = family(model.dim, dtype=torch.float64)
    return fit(q, model, tolerance=1e-8, max_evaluations=3000, progress=False).loss


def evaluations(model, method, family, scale, mean, lowest):
    """How many, and how often the objective rose."""
    q = family(model.dim, scale=scale, mean=mean, dtype=torch.float64)
    few = len(model.y) < 100 and method is VN
    result = fit(
        q,
        model,
        method(q, metric=SiteNewton(model) if few else None),
        tolerance=1e-12,
        max_evaluations=CAP,
        progress=False,
        callbacks=[lambda record: record.loss - lowest < 1e-6],
    )
    losses = [record.loss for record in result.trace]
    rises = sum(b > a + 1e-12 * abs(a) + 1e-12 for a, b in itertools.pairwise(losses))
    return result.evaluations, rises


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=None, help="use only the first rows of each set")
    rows = parser.parse_args().rows
    warnings.simplefilter("error")

    model = breast_cancer()
    print(f"{'breast cancer (scikit-learn), from the prior':<46}evaluations to 1e-6 nats")
    for method, family in [*METHODS, (VN, DiagonalGaussian), (SRVN, DiagonalGaussian)]:
        count, _ = evaluations(model, method, family, 0.1**-0.5, 0.0, minimum(model, family))
        print(f"  {method.__name__ + ' on ' + family.__name__:<44}{count}")
    if "TORCHNGVI_DATA" not in os.environ:
        print("TORCHNGVI_DATA is not set: the LIBSVM table is left out")
        return
    generator = torch.Generator().manual_seed(0)
    for method, family in METHODS:
        print(f"\n{method.__name__} on {family.__name__}: c, m = " + "  ".join(f"{c:g},{m}" for c, m in STARTS))
        everything, rises = [], 0
        for name in SETS:
            model = libsvm(name, rows)
            lowest = minimum(model, NaturalGaussian)
            far = torch.randn(model.dim, generator=generator, dtype=torch.float64) * 10**0.5
            runs = [evaluations(model, method, family, c, far if m == "N" else 0.0, lowest) for c, m in STARTS]
            counts = [count for count, _ in runs]
            everything, rises = everything + counts, rises + sum(rose for _, rose in runs)
            print(f"  {name:<22}" + "".join(f"{count:>8}" for count in counts), flush=True)
        print(f"  median {torch.tensor(everything).double().quantile(0.5):g}, worst {max(everything)}, rises {rises}")


STARTS = [(c, m) for c in (0.01, 1.0, 100.0) for m in ("0", "N")]

if __name__ == "__main__":
    main()
