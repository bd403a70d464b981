"""Sparse designs of group-wise and global columns, on an arrow and a deeper forest: as written out, and linear in n."""

import warnings

import pytest
import torch
from helpers import DTYPE, FORESTS, IDENTITY, PRECISION, Watch, close, randn

from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
from torchngvi.structures import Forest, Pattern, arrow
from torchngvi.structures.forest import placed
from torchngvi.testing.claims import root_in


def compressed(X):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return X.to_sparse_csr()


def rows_of_cliques(pattern, count=24):
    """Each row over one node and its ancestors, some columns missing, one row without any."""
    X, places = torch.zeros(count, pattern.dim, dtype=DTYPE), pattern.gather(torch.arange(pattern.dim))
    for row in range(count - 1):
        clique = places[row % len(places)]
        columns = clique[row % len(clique)]
        X[row, columns] = randn(len(columns), seed=row)
        X[row, columns[row % 3 :][:1]] = 0.0
    return X


@pytest.mark.parametrize("name", ["arrow", "unequal arrow", "three levels", "ragged"])
class TestVerbs:
    def test_rows_of_cliques(self, name):
        pattern = FORESTS[name]
        X, T, b = rows_of_cliques(pattern), root_in(pattern, (), 1), randn(24, seed=2)
        rows, root = compressed(X), pattern.from_dense(T)
        assert sum(len(part.rows) for part in placed(pattern, rows)) == 23
        close(pattern.full(pattern.sparse_gram(root, rows, b, True)), T @ X.mT @ torch.diag(b) @ X @ T.mT, IDENTITY)
        close(pattern.sparse_row_norms(root, rows, True), (X @ T.mT).square().sum(-1), IDENTITY)

    def test_rows_across_branches_go_by_the_whole_matrix(self, name):
        """H then leaves the pattern; the frame of what is kept is that of every pattern."""
        pattern = FORESTS[name]
        rows, root = compressed(randn(5, pattern.dim, seed=1)), pattern.from_dense(root_in(pattern, (), 1))
        assert placed(pattern, rows) is None
        for upper in (False, True):
            whole = Pattern.sparse_gram(pattern, root, rows, torch.ones(5, dtype=DTYPE), upper)
            close(pattern.sparse_gram(root, rows, torch.ones(5, dtype=DTYPE), upper), whole, 0.0)


def intercepts(groups, rows=3):
    """A logistic regression with one intercept a group and two common coefficients."""
    X = torch.zeros(groups * rows, groups + 2, dtype=DTYPE)
    X[torch.arange(groups * rows), torch.arange(groups * rows) // rows] = 1.0
    X[:, -2:] = randn(groups * rows, 2, seed=1)
    y = (X[:, -1] + 0.3 * randn(groups * rows, seed=2) > 0).to(DTYPE)
    return X, y


@pytest.mark.parametrize("kind", PRECISION)
class TestFits:
    def test_the_optimum_is_the_dense_one(self, kind):
        X, y = intercepts(6)
        q, full = kind(8, structure=arrow(groups=6, local=1, globals=2), dtype=DTYPE), CholeskyGaussian(8, dtype=DTYPE)
        result = fit(q, GeneralizedLinear(compressed(X), y), tolerance=1e-9, progress=False)
        best = fit(full, GeneralizedLinear(X, y), tolerance=1e-9, progress=False)
        assert result.converged, result.reason
        assert result.loss == pytest.approx(best.loss, abs=1e-10)
        close(q.mean, full.mean, 1e-8)
        close(q.covariance, full.covariance, 1e-8)

    def test_nothing_is_d_by_d(self, kind):
        X, y = intercepts(1000, rows=1)
        model = GeneralizedLinear(compressed(X), y)
        q = kind(1002, structure=Forest((1000,) * 1000 + (-1,), (1,) * 1000 + (2,)), dtype=DTYPE)
        with Watch(q.dim):
            assert fit(q, model, progress=False).converged
