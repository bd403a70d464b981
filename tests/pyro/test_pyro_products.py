"""Products of families read from a Pyro model: against conjugate posteriors, CAVI, and Pyro's own bound."""

import pytest
import torch
from helpers import vec

pyro = pytest.importorskip("pyro")
import pyro.distributions as dist  # noqa: E402
from pyro.infer import Predictive, Trace_ELBO, config_enumerate  # noqa: E402
from pyro.ops.indexing import Vindex  # noqa: E402

from torchngvi import DiagonalGaussian  # noqa: E402
from torchngvi.adapters.pyro import AutoProduct, fit_guide  # noqa: E402
from torchngvi.errors import InputError  # noqa: E402
from torchngvi.posteriors.flat import Beta, Categorical, Dirichlet, Gamma, InverseGamma  # noqa: E402

DTYPE = torch.float64
QUIET = {"progress": False}


Y = vec(0.3, -1.2, 2.0, 0.7, -0.1)


@pytest.fixture(autouse=True)
def clean():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)


def fitted(model, *args, **options):
    guide = AutoProduct(model)
    return guide, fit_guide(model, guide, *args, options={**QUIET, **options})


def normal(y):
    mu = pyro.sample("mu", dist.Normal(vec(0.0)[0], 10.0))
    tau = pyro.sample("tau", dist.Gamma(vec(1.0)[0], vec(0.1)[0]))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mu, tau.rsqrt()), obs=y)


def counts(y):
    """Rates of groups with a half-Cauchy scale, which is not conjugate."""
    scale = pyro.sample("scale", dist.HalfCauchy(vec(1.0)[0]))
    with pyro.plate("groups", y.shape[1], dim=-1):
        rate = pyro.sample("rate", dist.Gamma(vec(2.0)[0], 1 / scale))
        with pyro.plate("rows", y.shape[0], dim=-2):
            pyro.sample("y", dist.Poisson(rate), obs=y)


def mixture(y):
    weights = pyro.sample("weights", dist.Dirichlet(vec(2.0, 2.0)))
    locs = pyro.sample("locs", dist.Normal(torch.zeros(2, dtype=DTYPE), 10.0).to_event(1))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(Vindex(locs)[..., z], 1.0), obs=y)


class TestConjugate:
    def test_a_mean_and_a_precision(self):
        """The fixed point of CAVI: m = Σy E τ/s, s = n E τ + 1/100, a = 1 + n/2, b = .1 + ½ E Σ(y - μ)²."""
        guide, result = fitted(normal, Y, tolerance=1e-9)
        assert result.converged
        q = guide.posterior
        assert isinstance(q["tau"], Gamma)
        t, s = q["tau"].mean.item(), q["mu"].precision.item()
        assert s == pytest.approx(5 * t + 0.01, rel=1e-6)
        assert q["mu"].mean.item() == pytest.approx(float(Y.sum()) * t / s, rel=1e-6)
        squares = (Y - q["mu"].mean).square().sum() + 5 / s
        assert torch.allclose(q["tau"].vector, vec(3.5, 0.1 + 0.5 * float(squares)), rtol=1e-6)

    @pytest.mark.accuracy
    def test_the_loss_is_that_of_pyro(self):
        guide, result = fitted(normal, Y)
        losses = torch.tensor([Trace_ELBO().loss(normal, guide, Y) for _ in range(300)])
        assert abs(losses.mean() - result.loss) < 5 * losses.std() / 300**0.5

    def test_successes_and_shares_with_scale_and_mask(self):
        def model(y, seen):
            p = pyro.sample("p", dist.Beta(vec(2.0)[0], vec(3.0)[0]))
            shares = pyro.sample("shares", dist.Dirichlet(vec(1.0, 1.0, 1.0)))
            with pyro.plate("rows", len(y)), pyro.poutine.mask(mask=seen):
                pyro.sample("y", dist.Bernoulli(p), obs=y)
            with pyro.poutine.scale(scale=2.0):
                pyro.sample("n", dist.Multinomial(6, shares), obs=vec(3.0, 2.0, 1.0))

        seen = torch.tensor([True, True, True, False])
        guide, result = fitted(model, vec(1.0, 0.0, 1.0, 1.0), seen)
        q = guide.posterior
        assert result.converged
        assert isinstance(q["p"], Beta)
        assert isinstance(q["shares"], Dirichlet)
        assert torch.allclose(q["p"].vector, vec(4.0, 4.0), rtol=1e-8)
        assert torch.allclose(q["shares"].vector, vec(7.0, 5.0, 3.0), rtol=1e-8)

    def test_a_variance_has_the_family_that_is_conjugate(self):
        def model(y):
            v = pyro.sample("v", dist.InverseGamma(vec(2.0)[0], vec(1.0)[0]))
            with pyro.plate("rows", len(y)):
                pyro.sample("y", dist.Normal(0.0, v.sqrt()), obs=y)

        guide, result = fitted(model, Y)
        assert result.converged
        assert isinstance(guide.posterior["v"], InverseGamma)
        assert torch.allclose(guide.posterior["v"].vector, vec(4.5, 1 + 0.5 * float(Y.square().sum())), rtol=1e-8)

    def test_classes(self):
        """A mixture of two normals: every message is exact, and the rows are told apart."""
        y = vec(0.0, 1.0, 10.0, 11.0, 12.0)
        guide, result = fitted(mixture, y)
        q = guide.posterior
        assert result.converged
        assert isinstance(q["z"], Categorical)
        assert q["locs"].dim == 2
        means = q["locs"].mean.sort().values
        assert torch.allclose(means, vec(0.5, 11.0), rtol=0.02)
        first = q["z"].probabilities[:, 0]
        assert ((first - first[0]).abs().lt(0.01)).tolist() == [True, True, False, False, False]


class TestNotConjugate:
    @pytest.mark.accuracy
    def test_rates_with_a_half_cauchy_scale(self):
        """Given the scale the rates are conjugate, Gamma(2 + Σy, 6 + 1/scale), the last averaged."""
        y = torch.poisson(torch.tensor([1.0, 4.0, 9.0], dtype=DTYPE).expand(6, 3), torch.Generator().manual_seed(0))
        guide, result = fitted(counts, y, max_evaluations=200)
        q = guide.posterior
        assert not result.converged
        assert torch.allclose(q["rate"].mean[:, 0], y.mean(0), rtol=0.2)
        assert torch.allclose(q["rate"].vector[:, 0], 2 + y.sum(0), rtol=1e-8)
        losses = torch.tensor([Trace_ELBO().loss(counts, guide, y) for _ in range(200)])
        assert abs(losses.mean() - result.loss) < 5 * losses.std() / 200**0.5 + 0.2


class TestAsAGuide:
    def test_draws_and_predictions(self):
        guide, _ = fitted(normal, Y)
        drawn = guide(Y)
        assert {name: tuple(x.shape) for name, x in drawn.items()} == {"mu": (), "tau": ()}
        assert Predictive(normal, guide=guide, num_samples=7)(Y)["tau"].numel() == 7
        y = vec(0.0, 1.0, 10.0)
        drawn = AutoProduct(mixture).setup(y)(y)
        assert drawn["z"].dtype == torch.int64
        assert drawn["locs"].shape == (2,)

    def test_families_of_ones_own(self):
        guide = AutoProduct(normal, {"mu": lambda batch, value: DiagonalGaussian(1, batch, dtype=DTYPE)}).setup(Y)
        assert isinstance(guide.posterior["mu"], DiagonalGaussian)


class TestRefusals:
    def refused(self, model, match, *args):
        with pytest.raises(InputError, match=match):
            AutoProduct(model).setup(*args)

    def test_sites(self):
        def matrix():
            pyro.sample("L", dist.LKJCholesky(3, 1.0))

        def positive_vector():
            pyro.sample("s", dist.Gamma(torch.ones(3), 1.0).to_event(1))

        def count():
            pyro.sample("n", dist.Poisson(3.0))

        def interval():
            pyro.sample("u", dist.Uniform(0.0, 2.0))

        for model, name in ((matrix, "L"), (positive_vector, "s"), (count, "n"), (interval, "u")):
            self.refused(model, f"the latent site {name!r} has the support .* AutoProduct has no family")

    def test_plates(self):
        def subsampled():
            with pyro.plate("rows", 10, subsample_size=5):
                pyro.sample("x", dist.Normal(0.0, 1.0))

        def loop():
            for _ in pyro.plate("rows", 2):
                pyro.sample(f"x{_}", dist.Normal(0.0, 1.0))

        self.refused(subsampled, "the site 'x' is in the plate 'rows', of which 5 of 10 members are subsampled")
        self.refused(loop, "the site 'x0' is in the loop over the plate 'rows'")

    def test_models_that_take_one_draw(self):
        def indexed(y):
            locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            with pyro.plate("rows", len(y)):
                z = pyro.sample("z", dist.Categorical(torch.ones(2)))
                pyro.sample("y", dist.Normal(locs[z], 1.0), obs=y)

        def branching():
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(1.0 if x > 0 else 2.0, 1.0), obs=torch.tensor(0.0))

        self.refused(indexed, "density of the site 'locs' cannot be evaluated at many draws at once", torch.zeros(3))
        self.refused(branching, "cannot be evaluated at many draws at once .RuntimeError: Boolean value of Tensor")

        def stacked():
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.factor("f", torch.stack([x, x]))

        def averaged():
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(x.mean(), 1.0), obs=torch.tensor(0.0))

        self.refused(stacked, 'site "f", invalid log_prob shape')
        self.refused(averaged, "density of the site 'y' cannot be evaluated at many draws at once: it is .* alone")

        def unfollowed():
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            if type(x) is not torch.Tensor:
                raise TypeError("a plain tensor")
            pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(0.0))

        self.refused(unfollowed, "dependencies of the sites could not be followed .TypeError: a plain tensor.. Fit the")

        def joined():
            with pyro.plate("groups", 3):
                x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(x.sum(-1, keepdim=True), 1.0), obs=torch.zeros(1))

        self.refused(joined, "site 'y' joins members of a plate of 'x', of shape .3,., which AutoProduct takes one by")

    def test_use(self):
        with pytest.raises(InputError, match=r"model is a function or a module that samples; got 3\."):
            AutoProduct(3)
        with pytest.raises(InputError, match="no posterior before it has seen the model"):
            _ = AutoProduct(normal).posterior
        with pytest.raises(InputError, match="families= names nu, which the model does not sample"):
            AutoProduct(normal, {"nu": Gamma}).setup(Y)
        with pytest.raises(InputError, match="no latent site, so that there is nothing to fit"):
            AutoProduct(lambda: None).setup()
        guide = AutoProduct(normal).setup(Y)
        with pytest.raises(InputError, match="other latent sites than the guide was set up with: locs, mu, tau"):
            fit_guide(mixture, guide, Y, options=QUIET)
        with pytest.raises(InputError, match="fitted to all rows at once; leave batches= out"):
            fit_guide(normal, guide, batches=[Y])


def test_enumerated_classes_in_single_precision():
    y = torch.tensor([0.0, 1.0, 5.0, 4.0, 0.5])

    @config_enumerate
    def model(y):
        shares = pyro.sample("shares", dist.Dirichlet(y.new_ones(2)))
        with pyro.plate("rows", len(y)):
            label = pyro.sample("label", dist.Categorical(shares))
            pyro.sample("y", dist.Normal(4 * label.to(y), y.new_ones(())), obs=y)

    single, double = (fit_guide(model, AutoProduct(model), of, options=QUIET) for of in (y, y.double()))
    assert single.loss == pytest.approx(double.loss, rel=1e-5)
