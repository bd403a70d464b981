"""The choice of a radius by short trainings."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchngvi
from torchngvi.errors import InputError
from torchngvi.networks import choose_radius


def test_it_keeps_the_best_factor_and_asks_for_short_runs():
    asked = []

    def train(steps, radius):
        asked.append((steps, radius))
        return abs(radius - 0.3 * 0.04 / 10)

    found = choose_radius(train, 400)
    assert [steps for steps, _ in asked] == [100] * 3
    assert [radius for _, radius in asked] == pytest.approx([0.004, 0.0012, 0.0004])  # of 100 steps
    assert found.factor == 0.3
    assert found.radius == pytest.approx(0.3 * 0.04 / 20)  # of 400
    assert found.steps == 300
    assert found.tried == pytest.approx({1.0: 0.0028, 0.3: 0.0, 0.1: 0.0008})


def test_what_fails_is_not_chosen_and_the_first_of_equal_ones_is():
    assert choose_radius(lambda steps, radius: math.nan if radius > 0.01 else radius, 100, (2.0, 1.0)).factor == 1
    assert choose_radius(lambda steps, radius: torch.tensor(1.0), 100, (0.5, 2.0), share=1.0).factor == 0.5


def test_a_radius_and_steps_together():
    """The radius is the one that is said, and the start of q is forgotten over the share of the steps as without it."""
    memory = {}
    for name, keywords in {"both": {"steps": 2000, "radius": 0.01}, "steps": {"steps": 2000}}.items():
        model = nn.Linear(2, 3)
        q = torchngvi.network(model, 100)
        attachment = torchngvi.attach(torch.optim.SGD(model.parameters(), lr=1.0), q, **keywords)
        memory[name] = q.memory
        assert attachment.radius == (0.01 if name == "both" else 0.04 / math.sqrt(2000))
    assert memory["both"] == memory["steps"] == 60


def test_a_training_with_it():
    """Of labels that are mostly noise: one radius that hardly moves loses to one that fits."""
    torch.manual_seed(0)
    x = torch.randn(400, 3)
    y = (x @ torch.randn(3, 2) + torch.randn(400, 2)).argmax(1)

    def train(steps, radius):
        torch.manual_seed(1)
        model = nn.Linear(3, 2)
        q = torchngvi.network(model, 200)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
        torchngvi.attach(optimizer, q, steps=steps, radius=radius)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for k in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(x[k % 4 : 200 : 4]), y[k % 4 : 200 : 4]).backward()
            optimizer.step()
            scheduler.step()
        model.eval()
        return -q.log_prob(x[200:], y[200:]).mean()

    found = choose_radius(train, 200, factors=(1e-9, 1.0))
    assert found.factor == 1
    assert found.tried[1.0] < found.tried[1e-9] - 0.05


def test_what_cannot_be():
    def fine(steps, radius):
        return 1.0

    with pytest.raises(InputError, match=r"choose_radius takes a function train\(steps, radius\) .*; got a float"):
        choose_radius(0.1, 100)
    with pytest.raises(
        InputError,
        match="steps is the number of optimizer steps of the training and must be a whole number, at least 1; got 0",
    ):
        choose_radius(fine, 0)
    for factors in ((), (1.0, 0.0), (math.inf,), ("1",)):
        with pytest.raises(InputError, match="factors are of the default radius, one at least, larger than 0; got"):
            choose_radius(fine, 100, factors)
    for share, bounds in ((0, "above 0, at most 1, finite"), (1.5, "above 0, at most 1, finite"), (True, "a number")):
        text = f"share of the steps that a trial takes and must be {bounds}; got {share}"
        with pytest.raises(InputError, match=text):
            choose_radius(fine, 100, share=share)
    with pytest.raises(InputError, match="None of the 3 trainings of choose_radius returned a finite negative log"):
        choose_radius(lambda steps, radius: math.nan, 100)
    with pytest.raises(InputError, match=r"train\(steps, radius\) of choose_radius returns the .*; got a NoneType"):
        choose_radius(lambda steps, radius: None, 100)
    model = nn.Linear(2, 3)
    with pytest.raises(InputError, match="Say steps=, .* or radius=, in nats a datum, or both; got neither"):
        torchngvi.attach(torch.optim.SGD(model.parameters(), lr=1.0), torchngvi.network(model, 100))
