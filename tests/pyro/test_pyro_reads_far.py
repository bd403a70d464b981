"""Structures found by what terms read where it is hard to see: away from the start, and in the last digits."""

import re

import pytest
import torch
from helpers import DTYPE

from torchngvi.errors import InputError
from torchngvi.structures import Forest, arrow

pyro = pytest.importorskip("pyro", reason="needs Pyro: pip install 'torchngvi[pyro]'")

import pyro.distributions as dist  # noqa: E402

from torchngvi.adapters.pyro import AutoGaussian, fit_guide  # noqa: E402

pytestmark = pytest.mark.usefixtures("pyro_in_float64")


def reading(predictor, obs=0.5, dtype=DTYPE):
    """Rows that read what a function makes of six members."""

    def model():
        with pyro.plate("groups", 6):
            b = pyro.sample("b", dist.Normal(torch.zeros((), dtype=dtype), 1.0))
        mean = predictor(b)
        with pyro.plate("rows", mean.shape[-1]):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=torch.full(mean.shape[-1:], obs, dtype=dtype))

    return AutoGaussian(model, structure="auto").setup().structure.forest


@pytest.mark.parametrize(
    "predictor",
    [
        lambda b: torch.maximum(b[..., :1], b[..., 1:2]),
        lambda b: b.max(-1, keepdim=True).values,
        lambda b: torch.relu(b[..., :1] - b[..., 1:2] - 1),
        lambda b: b - b.mean(-1, keepdim=True).clamp(min=1.0),
        lambda b: torch.where(b[..., :1] > 1, b[..., 1:2], 0.0),
    ],
    ids=["maximum", "max", "relu", "clamp", "where"],
)
def test_members_that_are_joined_away_from_the_start_are_joined(predictor):
    assert reading(predictor) is None


def test_members_are_joined_beside_large_data_in_float32():
    """A move of b changes the terms, of about y², in their last digits alone."""
    assert reading(lambda b: b + 0.1 * b.sum(-1, keepdim=True), 1e4, torch.float32) is None
    assert reading(lambda b: b[[0, 1, 2, 3, 4, 5, 0]], 1e4, torch.float32) == Forest((-1,) * 6, (1,) * 6)


def test_a_forest_by_plates_agrees_with_what_is_read():
    def model():
        with pyro.plate("groups", 6):
            b = pyro.sample("b", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(b - b.mean(-1, keepdim=True).clamp(min=1.0), 1.0), obs=torch.zeros(6))

    structure = AutoGaussian(model, structure="auto").setup().structure
    assert str(structure).endswith("(the site 'y' joins members of the plate 'groups')")
    assert structure.forest is None


def test_a_model_that_does_not_run_far_away_is_read_near_the_start():
    def predictor(b):
        if bool((b.detach().abs() > 2).any()):
            raise RuntimeError("far away")
        return b

    assert reading(predictor) == Forest((-1,) * 6, (1,) * 6)


def test_rows_that_come_and_go_leave_one_block():
    def predictor(b):
        return b if float(b.detach().flatten()[0]) < 0.5 else b[..., :5]

    assert reading(predictor) is None


def test_data_that_join_the_members_of_another_plate_are_refused():
    """Plates of one size, of which the first data join the one, and the second the other: the forests are equal."""

    def model(joined):
        with pyro.plate("rooms", 4):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with pyro.plate("items", 4):
            b = pyro.sample("b", dist.Normal(0.0, 1.0))
        mean = torch.cat([a.cumsum(-1), b] if joined == "rooms" else [a, b.cumsum(-1)], -1)
        with pyro.plate("rows", 8):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=torch.ones(8))

    guide = AutoGaussian(model, structure="auto").setup("rooms")
    assert guide.structure.forest == arrow(groups=4, local=1, globals=4)
    with pytest.raises(InputError, match=re.escape("its terms read other members together. Set another guide up")):
        fit_guide(model, guide, "items", options={"progress": False})
