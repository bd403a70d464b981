"""The flow on a differential equation: its solutions in closed form, the evidence, a short run."""

import math

import pandas as pd
import pytest
import torch

from examples.papers import godichon2023
from examples.papers.godichon2023 import ode

DTYPE = torch.float64


def test_far_below_and_far_above_saturation_the_decay_is_known():
    """K ≫ C: log C = -(V/K) t.  K ≪ C: C = 1 - V t."""
    rate, half = math.log(30.0), math.log(1e6)
    linear = ode.log_concentrations(torch.tensor([rate + half - math.log(30.0), half], dtype=DTYPE))
    assert linear.numpy() == pytest.approx([-0.5, -1.0, -1.5, -2.0], abs=1e-5)
    straight = ode.log_concentrations(torch.tensor([math.log(0.3), math.log(1e-9)], dtype=DTYPE))
    assert straight.exp().numpy() == pytest.approx([0.85, 0.70, 0.55, 0.40], abs=1e-5)


def test_at_one_it_is_the_implicit_solution():
    """C + K log C = 1 - V t for V = K = 1."""
    x = ode.log_concentrations(torch.zeros(2, dtype=DTYPE))
    assert (x.exp() + x).numpy() == pytest.approx([0.5, 0.0, -0.5, -1.0], abs=1e-5)


def test_the_grid_is_fine_and_wide_enough():
    assert ode.evidence() == pytest.approx(ode.evidence(500, 8.0), abs=1e-6)


@pytest.mark.accuracy
def test_the_study_runs_and_draws_from_its_log(tmp_path, capsys):
    study = godichon2023.STUDIES["ode"]
    log = study.run(iterations=3, seeds=1, draws=4, methods=("IFVB", "Adam, 0.03"))
    log.to_csv(tmp_path / "log.csv", index=False)
    study.draw(pd.read_csv(tmp_path / "log.csv"), tmp_path / "ode")
    assert (tmp_path / "ode.svg").exists()
    assert "beyond" in capsys.readouterr().out
    assert log["log_joint_draws"].max() == 12
    assert log["gap"].min() > 0
    assert log["gaussian"].iloc[0] > 0
