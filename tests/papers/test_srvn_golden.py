"""Converged values of srvn experiments on LIBSVM data: Kumar et al. (2025), Table 3, made precise.

The published column is Σ_train F + β/2 |m|² - ½ log det V (no trace, no constants); "full" adds the
trace term, and the negative ELBO the constants -D/2 log β - D/2.  The split is
``train_test_split(test_size=0.2, random_state=42)`` of the rows in file order, without intercept.
"""

import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from sklearn.datasets import load_svmlight_file
from sklearn.model_selection import train_test_split

from torchngvi import SRVN, VN, CholeskyGaussian, GeneralizedLinear, NaturalGaussian, fit


class Golden(NamedTuple):
    file: str
    dim: int
    beta: float
    # as printed, with the digits printed
    published: str
    full: str
    negative_elbo: str
    nll: str
    plug_in: str
    accuracy: str


GOLDEN = [
    Golden("australian_scale", 14, 1e-5, "196.7765", "196.7765", "270.367", "54.598", "52.625", "0.8768"),
    Golden("diabetes_scale", 8, 1e-2, "301.1287", "301.1347", "315.555", "79.707", "78.612", "0.7403"),
    Golden("breast-cancer_scale", 10, 1e-1, "52.8071", "53.1473", "59.660", "13.610", "11.451", "0.9562"),
    Golden("phishing", 68, 1e-2, "1217.965", "1232.755", "1355.33", "331.17", "326.28", "0.9398"),
    Golden("mushrooms", 112, 1e-2, "-152.746", "-124.713", "77.176", "1.696", "0.0", "1.0"),
]


def libsvm(golden: Golden) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    folder = os.environ.get("TORCHNGVI_DATA")
    path = Path(folder or ".") / "libsvm" / f"{golden.file}.svm.gz"
    if not path.exists():
        pytest.skip(f"needs {path.name}: set TORCHNGVI_DATA to a folder with libsvm/{path.name}")
    X, y = load_svmlight_file(str(path), n_features=golden.dim)
    split = train_test_split(X.toarray(), y, test_size=0.2, random_state=42)
    return tuple(torch.as_tensor(part, dtype=torch.float64) for part in split)  # type: ignore[return-value]


def close(value: float, printed: str) -> None:
    """Equal to every printed digit."""
    digits = len(printed.split(".")[1])
    assert f"{value:.{digits}f}" == printed


@pytest.mark.accuracy
@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: g.file)
@pytest.mark.parametrize(
    ("method", "family"),
    [(VN, NaturalGaussian), (VN, CholeskyGaussian), (SRVN, CholeskyGaussian)],
    ids=["vn-natural", "vn-root", "srvn"],
)
def test_converged_values(golden, method, family):
    X, X_test, y, y_test = libsvm(golden)
    model = GeneralizedLinear(X, y, prior_precision=golden.beta)
    held_out = GeneralizedLinear(X_test, y_test, prior_precision=golden.beta)
    q = family(golden.dim, dtype=torch.float64)

    result = fit(q, model, method(q), progress=False, max_evaluations=2000)

    assert result.converged, result.reason
    beta, mean = golden.beta, q.mean
    trace = 0.5 * beta * q.variance.sum()
    constants = -0.5 * golden.dim * (torch.tensor(beta).double().log() + 1)
    full = result.loss - constants
    close(float(full - trace), golden.published)
    close(float(full), golden.full)
    close(result.loss, golden.negative_elbo)
    with torch.no_grad():
        variance = q.marginal_variance(X_test)
    moments = held_out.likelihood.expected(X_test @ mean, variance, held_out.y)
    close(float(moments.value.sum()), golden.nll)
    close(float(held_out.likelihood.energy(X_test @ mean, held_out.y).sum()), golden.plug_in)
    close(float(((X_test @ mean) * held_out.y > 0).double().mean()), golden.accuracy)
