"""Parameters of a Pyro model, which `fit_guide` holds fixed and says so."""

import pytest
import torch

pyro = pytest.importorskip("pyro")

import pyro.distributions as dist  # noqa: E402
from pyro import poutine  # noqa: E402
from pyro.nn import PyroModule  # noqa: E402
from torch.distributions import constraints  # noqa: E402

from torchngvi.adapters.pyro import AutoGaussian, AutoLocalGaussian, AutoProduct, fit_guide  # noqa: E402

Y = torch.tensor([1.2, 0.3, 2.2, -0.5, 0.8, 25.0], dtype=torch.float64)
QUIET = {"progress": False}


def scaled(y, batch=None):
    s = pyro.param("s", torch.tensor(1.0, dtype=torch.float64), constraint=constraints.positive)
    m = pyro.sample("m", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
    with pyro.plate("n", len(y), subsample_size=batch) as index:
        pyro.sample("y", dist.Normal(m, s), obs=y[index])


class Module(PyroModule):
    """Two parameters of a module."""

    def __init__(self):
        super().__init__()
        self.b = torch.nn.Parameter(torch.tensor(0.0, dtype=torch.float64))
        self.c = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, y):
        m = pyro.sample("m", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
        with pyro.plate("n", len(y)):
            pyro.sample("y", dist.Normal(self.c * m + self.b, 1.0), obs=y)


def members(y):
    s = pyro.param("s", torch.tensor(1.0, dtype=torch.float64), constraint=constraints.positive)
    m = pyro.sample("m", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
    with pyro.plate("n", len(y), subsample_size=3) as index:
        z = pyro.sample("z", dist.Normal(m, s))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y[index])


@pytest.mark.parametrize(
    ("model", "guide", "arguments"),
    [
        (scaled, AutoGaussian, ()),
        (scaled, AutoGaussian, (3,)),
        (scaled, AutoProduct, ()),
        (members, lambda model: AutoLocalGaussian(model, "n"), ()),
    ],
    ids=["dense", "passes", "product", "locals"],
)
def test_a_parameter_is_held_and_named(model, guide, arguments):
    result = fit_guide(model, guide(model), Y, *arguments, options=QUIET)
    told = "; the parameter s of the model was held fixed, and torchngvi.adapters.pyro.NaturalSVI learns it."
    assert result.reason.endswith(told)
    assert pyro.param("s").item() == 1.0


def test_parameters_of_a_module_are_named():
    model = Module()
    result = fit_guide(model, AutoGaussian(model), Y, options=QUIET)
    assert "; the parameters c, b of the model were held fixed, and " in str(result)
    assert result.reason.endswith("NaturalSVI learns them.")


def test_what_is_fixed_on_purpose_is_not_named():
    """A parameter that requires no gradient, and one that a handler hides."""
    hidden = poutine.block(scaled, hide_types=["param"])
    assert "held fixed" not in fit_guide(hidden, AutoGaussian(hidden), Y, options=QUIET).reason
    scaled(Y)
    pyro.param("s").unconstrained().requires_grad_(False)
    assert "held fixed" not in fit_guide(scaled, AutoGaussian(scaled), Y, options=QUIET).reason


def test_without_parameters_nothing_is_said():
    def model(y):
        m = pyro.sample("m", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
        with pyro.plate("n", len(y)):
            pyro.sample("y", dist.Normal(m, 1.0), obs=y)

    assert "held" not in fit_guide(model, AutoGaussian(model), Y, options=QUIET).reason
