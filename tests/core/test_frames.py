"""Tables and columns of pandas where a model takes arrays."""

import numpy as np
import pytest
import torch

from torchngvi import CholeskyGaussian, GeneralizedLinear, MixedModel, fit
from torchngvi.diagnostics.predictive import accuracy, predictor_moments
from torchngvi.models import SoftmaxRegression
from torchngvi.solved import add, forget

pd = pytest.importorskip("pandas")

DRAW = np.random.default_rng(0)
TABLE = pd.DataFrame(
    {"one": 1, "age": DRAW.normal(size=12), "smokes": DRAW.random(12) < 0.5, "week": pd.array([*range(12)], "Int64")},
    index=range(100, 112),  # no label is a position
)
DIED = pd.Series(DRAW.integers(0, 2, 12), index=TABLE.index, name="died")
X, Y = TABLE.astype(float).to_numpy(), DIED.to_numpy()


def test_a_model_of_a_table_is_that_of_its_numbers():
    weights, offset = DIED + 1.0, TABLE["age"]
    model = GeneralizedLinear(TABLE, DIED, weights=weights, offset=offset)
    same = GeneralizedLinear(X, Y, weights=weights.to_numpy(), offset=offset.to_numpy())
    assert all(torch.equal(a, b) for a, b in zip(model.tensors(), same.tensors(), strict=True))
    assert model.X.dtype == torch.float64
    assert torch.equal(model.minibatch(pd.Series([3, 0], index=[7, 9])).y, model.y[[3, 0]])
    kinds = pd.Series(np.arange(12) % 3, index=TABLE.index)
    assert torch.equal(SoftmaxRegression(TABLE, kinds).X, model.X)
    assert GeneralizedLinear(TABLE[["age"]].astype("float32"), DIED).X.dtype == torch.float32


def test_rows_of_tables_are_added_forgotten_and_predicted():
    result = fit(CholeskyGaussian(4, dtype=torch.float64), GeneralizedLinear(TABLE, DIED), progress=False)
    more, same = add(result, TABLE[:3], DIED[:3]), add(result, X[:3], Y[:3])
    assert torch.equal(more.posterior.mean, same.posterior.mean)
    assert torch.equal(
        forget(result, pd.Series([0, 2], index=[5, 6])).posterior.mean, forget(result, [0, 2]).posterior.mean
    )
    q, model = result.posterior, result.target
    assert torch.equal(predictor_moments(model, q, TABLE)[0], predictor_moments(model, q, X)[0])
    assert torch.equal(accuracy(model, q, TABLE, DIED), accuracy(model, q, X, Y))


def test_groups_and_effects_of_a_mixed_model():
    groups = pd.Series(np.arange(12) // 4, index=TABLE.index)
    model = MixedModel(TABLE[["one"]].astype(float), DIED, (TABLE[["one"]], groups))
    assert model.design.X.shape == (12, 1)
