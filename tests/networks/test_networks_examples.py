"""The examples of networks run, at small size, and say what they promise."""

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers import exponentials
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(tmp_path):
    def main(name, *arguments):
        out = tmp_path / f"{name}.png"
        returned = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](["--out", str(out), *arguments])
        assert out.stat().st_size > 10_000
        return returned

    return main


def test_all_are_tested():
    text = Path(__file__).read_text(encoding="utf-8")
    assert all(f'run("{path.stem}"' in text for path in EXAMPLES.glob("network_*.py"))


@pytest.mark.accuracy
def test_a_table(run, capsys):
    nll, inside = run("network_table", "--steps", "150")
    assert nll < 1.3  # 1.42 is the mean alone
    assert 0.85 < inside <= 1
    assert "95 % interval" in capsys.readouterr().out


@pytest.mark.accuracy
@exponentials
def test_images(run, capsys):
    nll, point, area = run("network_images", "--steps", "120")
    assert nll < 0.3
    assert nll < 1.1 * point
    assert area > 0.7
    assert "temperature" in capsys.readouterr().out


@pytest.mark.accuracy
def test_characters(run):
    nll, _ = run("network_characters", "--steps", "60", "--width", "16")
    assert nll < 3.8  # 4.3 is the logarithm of the alphabet


@pytest.mark.accuracy
def test_a_last_layer(run):
    nll = run("network_last_layer")
    assert nll["posterior, exact"] < nll["point estimate"]
    assert nll["posterior, attached"] < nll["point estimate"]
    assert nll["posterior, exact"] < 1.4  # 1.61 is chance


@pytest.mark.accuracy
def test_adapters(run, capsys):
    nll = run("network_lora", "--steps", "200")
    assert nll["posterior"] < nll["point estimate"] + 0.1
    assert "test NLL" in capsys.readouterr().out


class Trainer:
    """Lightning's loop for one optimizer, where Lightning is not installed: the closure does all but the step."""

    def __init__(self, max_epochs, **keywords):
        self.epochs = max_epochs

    def fit(self, module, loader):
        module.trainer, self.estimated_stepping_batches = self, self.epochs * len(loader)
        [optimizer], [schedule] = module.configure_optimizers()
        assert schedule["interval"] == "step"
        module.train()
        for _ in range(self.epochs):
            for number, batch in enumerate(loader):

                def closure(batch=batch, number=number):
                    loss = module.training_step(batch, number)
                    optimizer.zero_grad()
                    loss.backward()
                    return loss

                optimizer.step(closure)
                schedule["scheduler"].step()


@pytest.mark.accuracy
@pytest.mark.filterwarnings("ignore:The temperature chosen")  # in so short a run the mean alone may be as good
@pytest.mark.filterwarnings("ignore::FutureWarning:lightning", "ignore:`isinstance:FutureWarning")
@pytest.mark.filterwarnings("ignore:GPU available but not used")
def test_lightning(run, capsys, monkeypatch):
    if importlib.util.find_spec("lightning") is None:
        stand_in = ModuleType("lightning")
        stand_in.LightningModule, stand_in.Trainer = nn.Module, Trainer
        monkeypatch.setitem(sys.modules, "lightning", stand_in)
    nll = run("network_lightning", "--epochs", "12")
    assert nll["posterior"] < nll["point estimate"] + 0.02
    assert nll["posterior"] < 0.2  # 2.3 is chance
    assert "test NLL" in capsys.readouterr().out


@pytest.mark.accuracy
def test_tasks_in_turn(run, capsys):
    found = run("network_continual", "--steps", "100")
    for setting, least in (("split", 0.9), ("permuted", 0.5)):
        assert found[setting, "posterior"] > max(least, found[setting, "fine-tuning"] + 0.01)
        assert found[setting, "joint"] > found[setting, "posterior"]
    assert "permuted EWC" in capsys.readouterr().out


@pytest.mark.accuracy
def test_fine_tuning(run, capsys):
    nll = run("network_finetuning", "--seeds", "1", "--steps", "150")
    assert nll["posterior, prior=q"] < nll["posterior, prior N(0, 1)"] - 0.05
    assert nll["posterior, prior=state_dict"] < nll["posterior, prior N(0, 1)"] - 0.05
    assert nll["posterior, prior=q"] < nll["L2-SP"] + 0.1
    assert "L2-SP" in capsys.readouterr().out
