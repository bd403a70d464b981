"""Which two classes of MNIST Table 3 of Kumar et al. (2025) has: each digit against the rest, at its optimum.

All methods go down to the optimum of one convex problem, so that a task whose optimum is above a printed objective is
not the one that was run.
"""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from examples.compare_methods.datasets import mnist_images
from examples.compare_methods.experiments import Problem, measured
from torchngvi import fit
from torchngvi.expectations import Quadrature
from torchngvi.models import GeneralizedLinear
from torchngvi.posteriors import CholeskyGaussian

PRINTED = {"train": 6301.87, "test_nll": 1012.37, "test_accuracy": 0.989}  # of SR-VN, the lowest of the three methods
_DATA = "MNIST of Table 3"


def run_digits(
    digits: Sequence[int] = tuple(range(10)),
    prior_precision: float = 0.1,
    rows: int = 60_000,
    full: bool = False,  # noqa: ARG001 (there is no longer form)
) -> pd.DataFrame:
    """Fit each digit against the rest to the optimum, and measure it as Table 3 does."""
    (X, labels), (X_test, test_labels) = mnist_images(_DATA), mnist_images(_DATA, "t10k")
    log = []
    for digit in digits:
        model = GeneralizedLinear(X[:rows], (labels[:rows] == digit).to(X), prior_precision=prior_precision)
        held_out = GeneralizedLinear(X_test, (test_labels == digit).to(X), prior_precision=prior_precision)
        q = CholeskyGaussian(model.dim, (1,), dtype=X.dtype)
        result = fit(q, model, tolerance=0.1, progress=False)  # half a hundredth of a nat is left
        found = measured(q, Problem(model, model, held_out, Quadrature()), 0, 0, 0.0, 0).iloc[0]
        log.append({"digit": digit, "evaluations": result.evaluations, "converged": result.converged}
                   | {key: float(found[key]) for key in PRINTED})  # fmt: skip
        print(line(log[-1]), flush=True)
    return pd.DataFrame(log)


def line(row: dict[str, float]) -> str:
    """A row of the table."""
    possible = "possible" if row["train"] <= PRINTED["train"] else "not it: its optimum is above the printed objective"
    return (f"{row['digit']} against the rest: train {row['train']:.1f}, test NLL {row['test_nll']:.1f}, "
            f"accuracy {row['test_accuracy']:.4f}; {possible}")  # fmt: skip


def show_digits(log: pd.DataFrame, path: Path) -> None:
    """Print the tasks beside what is printed, and write them as a text file."""
    lines = [line({str(key): value for key, value in row.items()}) for row in log.to_dict("records")]
    lines.append("printed: train {train}, test NLL {test_nll}, accuracy {test_accuracy}".format(**PRINTED))
    print(lines[-1])
    path.with_suffix(".txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
