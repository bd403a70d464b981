"""What Pyro's own validation refuses is refused by every door to a Pyro model, under the user's setting."""

import warnings

import pytest
import torch

pyro = pytest.importorskip("pyro")

import pyro.distributions as dist  # noqa: E402

from torchngvi.adapters.pyro import (  # noqa: E402
    AutoGaussian,
    AutoLocalGaussian,
    AutoProduct,
    NaturalSVI,
    fit_guide,
    log_joint,
)
from torchngvi.errors import InputError  # noqa: E402

pytestmark = pytest.mark.usefixtures("pyro_in_float64")

QUIET = {"progress": False}


def fitted(model, *args, guide=AutoGaussian, **kwargs):
    return fit_guide(model, guide(model), *args, options=QUIET, **kwargs)


def line(x, y):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(a * x, 0.5), obs=y)


def a_line(n=20):
    x = torch.randn(n)
    return x, x + 0.1 * torch.randn(n)


def rows(law, values):
    """A model of rows with one latent coordinate."""

    def model():
        t = pyro.sample("t", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(values)):
            pyro.sample("y", law(t), obs=torch.tensor(values))

    return model


OUTSIDE = {
    "a label of two": (lambda t: dist.Bernoulli(logits=t), [0.0, 1.0, 2.0]),
    "a count that is no integer": (lambda t: dist.Poisson(t.exp()), [0.0, 1.5, 2.0]),
    "a negative count": (lambda t: dist.Poisson(t.exp()), [0.0, -1.0, 2.0]),
    "a negative duration": (lambda t: dist.Exponential(t.exp()), [0.5, 2.0, -1.0]),
    "more successes than trials": (lambda t: dist.Binomial(5, logits=t), [0.0, 1.0, 7.0]),
}


class TestObservations:
    @pytest.mark.sparse(2)
    @pytest.mark.parametrize("guide", [AutoGaussian, AutoProduct, lambda model: AutoGaussian(model, structure="auto")])
    @pytest.mark.parametrize("case", OUTSIDE.values(), ids=OUTSIDE)
    def test_outside_of_their_support(self, case, guide):
        with pytest.raises(InputError, match=r"Pyro's validation refuses .*\n.*'y'(.|\n)*within the support"):
            fitted(rows(*case), guide=guide)

    @pytest.mark.parametrize("case", OUTSIDE.values(), ids=OUTSIDE)
    def test_outside_of_their_support_for_a_log_joint_and_for_steps(self, case):
        model = rows(*case)
        with pytest.raises(InputError, match="within the support"):
            log_joint(model)
        with pytest.raises(InputError, match="within the support"):
            NaturalSVI(model, AutoGaussian(model)).step()

    def test_in_a_later_batch(self):
        y = torch.ones(40)
        y[33] = 2.0

        def model(y):
            t = pyro.sample("t", dist.Normal(0.0, 1.0))
            with pyro.plate("rows", len(y)):
                pyro.sample("y", dist.Bernoulli(logits=t), obs=y)

        with pytest.raises(InputError, match="on batch 4"):
            fit_guide(model, AutoGaussian(model), batches=y.split(10), options=QUIET)
        svi = NaturalSVI(model, AutoGaussian(model))
        for part in y.split(10)[:3]:
            svi.step(part)
        with pytest.raises(InputError, match="with the arguments of this step"):
            svi.step(y.split(10)[3])

    @pytest.mark.parametrize("local", [False, True])
    def test_in_a_member_that_the_first_subsample_leaves_out(self, local):
        y = torch.ones(40)
        y[33] = 2.0

        def model(y):
            t = pyro.sample("t", dist.Normal(0.0, 1.0))
            with pyro.plate("rows", len(y), subsample_size=8) as index:
                eta = pyro.sample("b", dist.Normal(t, 1.0)) if local else t
                pyro.sample("y", dist.Bernoulli(logits=eta), obs=y[index])

        guide = (lambda model: AutoLocalGaussian(model, "rows")) if local else AutoGaussian
        with pytest.raises(InputError, match="some members of the plate 'rows'"):
            fitted(model, y, guide=guide)


class TestShapes:
    @pytest.mark.filterwarnings("ignore:the plate 'rows' repeats the observation")
    @pytest.mark.parametrize("guide", [AutoGaussian, AutoProduct])
    def test_a_column_of_observations(self, guide):
        """y (n, 1) against a mean (n,) makes n² terms of n rows."""
        x, y = a_line()
        with pytest.raises(InputError, match=r'site "y", invalid log_prob shape(.|\n)*pyro.plate'):
            fitted(line, x, y[:, None], guide=guide)
        if guide is AutoGaussian:
            result = fitted(line, x, y)
            truth = (x @ y / 0.25) / (1 + x @ x / 0.25)
            torch.testing.assert_close(result.posterior.mean, truth[None], atol=1e-4, rtol=0)

    def test_rows_without_a_plate(self):
        def model(y):
            t = pyro.sample("t", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(t, 1.0), obs=y)

        with pytest.raises(InputError, match="Expected .., actual .5."):
            fitted(model, torch.randn(5))


class TestConstraints:
    def test_a_scale_that_may_be_negative(self):
        """It is positive at the start and at draws about it, so that only draws of the prior tell."""

        def model(y):
            s = pyro.sample("s", dist.Normal(1.0, 1.0))
            with pyro.plate("rows", len(y)):
                pyro.sample("y", dist.Normal(0.0, s), obs=y)

        with pytest.warns(UserWarning, match="draws from the prior: Expected parameter scale"):
            result = fitted(model, torch.linspace(-1.0, 1.0, 10))
        assert "GreaterThan(lower_bound=0.0)" in result.reason

    def test_a_probability_above_one_at_the_start(self):
        def model():
            p = pyro.sample("p", dist.LogNormal(0.5, 0.1))
            pyro.sample("y", dist.Bernoulli(p), obs=torch.tensor(1.0))

        with pytest.raises(InputError, match="Expected parameter probs"):
            fitted(model)


class TestTheUsersSetting:
    def test_switched_off_as_in_pyro(self):
        x, y = a_line()
        with pyro.validation_enabled(False), pytest.warns(UserWarning, match="repeats the observation of the site 'y'"):
            assert fitted(line, x, y[:, None]).converged

    def test_it_is_as_before_after_a_fit(self):
        x, y = a_line()
        for setting in (True, False):
            with pyro.validation_enabled(setting):
                fitted(line, x, y)
                assert dist.is_validation_enabled() == setting
                assert pyro.infer.util.is_validation_enabled() == setting

    def test_a_sound_model_passes_in_silence_and_moves_no_generator(self):
        """Plates, enumeration, masks and subsamples of the global generator are as without validation."""
        x, y = a_line()

        def model(x, y):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            k = pyro.sample("k", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
            with pyro.plate("rows", len(x)), pyro.poutine.mask(mask=x > -10.0):
                pyro.sample("y", dist.Normal(a * x + 0.1 * k, 0.5), obs=y)

        ends = []
        for setting in (True, False):
            torch.manual_seed(1)
            with warnings.catch_warnings(), pyro.validation_enabled(setting):
                warnings.simplefilter("error")
                fitted(model, x, y)
            ends.append(torch.rand(()))
        assert ends[0] == ends[1]
