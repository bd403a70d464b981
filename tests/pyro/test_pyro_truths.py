"""Chains of NUTS against closed forms, their file, and the words for a verdict."""

import pytest
import torch

pyro = pytest.importorskip("pyro", reason="needs Pyro: pip install 'torchngvi[pyro]'")
pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")

import pyro.distributions as dist  # noqa: E402

from benchmarks.pyro_truths import Truth, against, chain, keep, kept, spoken  # noqa: E402
from torchngvi import CholeskyGaussian  # noqa: E402
from torchngvi.adapters.pyro import log_joint  # noqa: E402

pytestmark = pytest.mark.usefixtures("pyro_in_float64")


def model(shift=0.0):
    """x ~ N(1, 1) given y, by conjugacy, and z ~ N(0, 4)."""
    x = pyro.sample("x", dist.Normal(0.0, 2.0**0.5))
    pyro.sample("z", dist.Normal(0.0, 2.0))
    pyro.sample("y", dist.Normal(x, 2.0**0.5), obs=torch.tensor(2.0 + shift))


def test_a_chain_has_the_moments_and_comes_back_from_its_file(tmp_path):
    density, path = log_joint(model), tmp_path / "truths.json"
    truth = chain(density, torch.zeros(2), 60.0, 300)
    assert isinstance(truth, Truth)
    assert truth.draws == 300
    assert truth.r_hat < 1.1
    exact_mean, exact_sd = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 2.0])
    assert bool(((truth.mean - exact_mean).abs() < 5 * exact_sd * truth.ess.rsqrt()).all())
    assert bool(((truth.sd / exact_sd).log().abs() < 5 * (2 * truth.ess_of_squares).rsqrt()).all())
    assert kept(path, "model", density) is None
    keep(path, "model", truth)
    found = kept(path, "model", density)
    torch.testing.assert_close(found.mean, truth.mean, rtol=1e-5, atol=1e-5)
    assert str(found) == str(truth)
    with pytest.raises(SystemExit, match="has a truth of model for other data; give another file"):
        kept(path, "model", log_joint(model, 1.0))


def test_a_chain_that_is_cut_off_in_its_warm_up_is_no_truth():
    assert "of 300 of the warm-up and 0 draws within 0 s" in chain(log_joint(model), torch.zeros(2), 0.0, 300)


def exact(ess):
    """A standard normal in two dimensions, known with so many effective draws."""
    number = torch.full((2,), float(ess))
    return Truth(torch.zeros(2), torch.ones(2), number, number, 1.0, 300, 1.0, 1, 0.0)


@pytest.mark.parametrize(
    ("scale", "ess", "level"),
    [(1.0, 1e6, "right"), (1.4, 1e6, "wrong"), (0.5, 1e6, "far off"), (1.0, 10.0, "between right and far off")],
)
def test_a_fit_is_as_good_as_its_worst_error_allowing_for_the_chain(scale, ess, level):
    q = CholeskyGaussian(2, mean=torch.zeros(2), scale=scale, dtype=torch.float64)
    line = against(exact(ess), q, None)
    assert line == f"means 0.00 sd, sds by a factor {scale:.2f}: {level}; no verdict"
    unmixed = against(exact(ess)._replace(r_hat=1.5), q, None)
    assert unmixed.endswith("the chain has not mixed, so that the verdict is open")


@pytest.mark.parametrize(
    ("word", "level", "said"),
    [
        ("fits", "right", "true"),
        ("fits", "wrong", "false: missed"),
        ("about right", "wrong", "true"),
        ("about right", "far off", "false: missed"),
        ("does not fit", "right", "false: an alarm"),
        ("does not fit", "wrong", "true"),
    ],
)
def test_verdicts_are_true_or_false_as_in_the_benchmark_of_verdicts(word, level, said):
    assert spoken(word, level) == said
