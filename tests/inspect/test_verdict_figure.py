"""The picture of a verdict: what is drawn, for whatever was examined, and the sentence where matplotlib is missing."""

import builtins
import math
import re

import pytest
import torch

from torchngvi import CholeskyGaussian
from torchngvi.diagnostics import examine
from torchngvi.diagnostics.verdict import Effort, Marginals, Verdict
from torchngvi.errors import InputError
from torchngvi.messages import install

F64 = torch.float64


def log_gamma(theta):
    return (theta - theta.exp()).sum(-1)


def verdict(dim=2, **options):
    q = CholeskyGaussian(dim, mean=-0.5, scale=1.0, dtype=F64)  # the best Gaussian
    return examine(q, log_gamma, modes=(), **options)


def series(axes):
    """What is drawn, by its label."""
    lines = {line.get_label(): line for line in axes.get_lines()}
    return {**lines, **{each.get_label(): each[0] for each in axes.containers}}


def test_the_picture_shows_the_numbers(tmp_path):
    found = verdict().named(["$cost", "b"])
    figure = found.plot()
    left, right = figure.axes
    assert [tick.get_text() for tick in left.get_yticklabels()] == [found.marginals.name(k) for k in found.worst(2)]
    drawn = series(left)["by importance sampling"].get_xdata()
    expected = (found.sampled.corrected.sd / found.marginals.sd)[found.worst(2)]
    assert list(drawn) == pytest.approx(expected.tolist())
    response = series(left)["by linear response, to third order"].get_xdata()
    assert list(response) == pytest.approx(found.shape.log_sd.exp()[found.worst(2)].tolist())
    for part, label in ((found.sampled.weights.from_q, "draws of q: "), (found.sampled.weights.corrected, "a wider ")):
        (line,) = (line for name, line in series(right).items() if name.startswith(label))
        weight, share = line.get_xdata(), line.get_ydata()
        assert float(part.exp().mean()) == pytest.approx(1.0)
        assert weight[0] == pytest.approx(float(part.exp().max()))
        assert share[0] == pytest.approx(1 / len(part))
        assert list(weight) == sorted(weight, reverse=True)
    file = tmp_path / "verdict.png"
    figure.savefig(file)
    assert file.stat().st_size > 10_000


def test_bounds_and_many_coordinates():
    found = verdict(30, max_gradients=600)
    assert "the 25 most doubtful of 30" in found.plot().axes[0].get_title(loc="left")
    found.shape.log_sd.clamp_(max=0.2)
    found.shape.singular[found.worst(1)] = True
    found.shape.confirmed[found.worst(2)[1]] = True
    drawn = series(found.plot().axes[0])
    assert list(drawn["by linear response, 3 or more"].get_xdata()) == pytest.approx([3.0])
    assert len(drawn["by linear response, confirmed"].get_xdata()) == 1


def test_what_was_not_examined_is_left_out():
    two = torch.ones(2)
    bare = Verdict("not examined", (), Marginals(two, two), None, None, (), Effort(0, 0, 0, ()))
    left, right = bare.plot().axes
    assert not left.containers
    assert [text.get_text() for text in right.texts] == ["no importance weights"]
    few = verdict(max_gradients=1)
    assert few.shape is None or not bool(few.shape.confirmed.any())
    assert math.isclose(few.plot().axes[0].get_xlim()[0], 0.6)


def test_without_matplotlib(monkeypatch):
    found, load = verdict(), builtins.__import__

    def without(name, *args, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return load(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=re.escape(f"needs matplotlib, which is not installed: {install('cli')}.")):
        found.plot()
