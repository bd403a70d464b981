"""Models that no Gaussian can be fitted to, each refused in a sentence; and what looks like one of them and is none."""

import pytest
import torch
from helpers import EXACT, close, raises

from torchngvi import DiagonalGaussian

pyro = pytest.importorskip("pyro", reason="needs Pyro: pip install 'torchngvi[pyro]'")

import pyro.distributions as dist  # noqa: E402
from pyro import poutine  # noqa: E402
from pyro.infer import config_enumerate  # noqa: E402
from pyro.infer.autoguide import init_to_value  # noqa: E402
from pyro.ops.indexing import Vindex  # noqa: E402

from torchngvi.adapters.pyro import (  # noqa: E402
    AutoGaussian,
    AutoLocalGaussian,
    LatentGaussian,
    ModelLogJoint,
    fit_guide,
    log_joint,
)
from torchngvi.adapters.pyro.layout import listed  # noqa: E402
from torchngvi.posteriors.flat import AffineCoupling, FlatCholesky, ModuleFlow  # noqa: E402

USES = (log_joint, lambda model: AutoGaussian(model).setup().density(model))


def test_a_list_of_sites_has_six_names_at_most():
    """And the sentence says how many more there are."""
    assert listed(f"x{k}" for k in range(6)) == "x0, x1, x2, x3, x4, x5"
    assert listed(f"x{k}" for k in range(300)) == "x0, x1, x2, x3, x4, x5 and 294 more"

    def many(count):
        for k in range(count):
            pyro.sample(f"y{k}", dist.Normal(0.0, 1.0), obs=torch.tensor(0.0))

    with raises("sites are y0 (observed), y1 (observed), y2 (observed), y3 (observed), y4 (observed), y5 (observed)."):
        log_joint(lambda: many(6))
    with raises("y4 (observed), y5 (observed) and 94 more."):
        log_joint(lambda: many(100))

    def shrinking(count=100):
        for k in range(count):
            pyro.sample(f"x{k}", dist.Normal(0.0, 1.0))

    with raises("x1, x2, x3, x4, x5, x6 and 93 more came or went."):
        log_joint(shrinking).on(count=1)(torch.zeros(100))
    with raises("got none for x0, x1, x2, x3, x4, x5 and 94 more."):
        log_joint(shrinking).pack({})


@pytest.mark.parametrize("how", ["numpy", "item"])
def test_a_simulator_without_derivatives_is_refused(how):
    """It has values, by which a search without gradients could go, and gradients ask for more."""

    def model():
        speed = pyro.sample("speed", dist.Normal(1.0, 0.1))
        time = 2.0 / (speed.numpy() if how == "numpy" else speed.item())
        pyro.factor("seen", torch.tensor(-((time - 2.0) ** 2)))

    def without_prior():
        speed = pyro.sample("speed", dist.Normal(1.0, 0.1).mask(False))
        pyro.factor("seen", torch.tensor(-((2.0 / speed.item() - 2.0) ** 2)))

    for use in USES:
        with raises("the log density of the model has no derivative by its latents ("):
            use(model if how == "numpy" else without_prior)


def test_a_derivative_that_is_not_of_the_values_is_refused():
    """Of what .item() reads autograd sees nothing, and the guide would take the prior for the posterior."""

    def model():
        speed = pyro.sample("speed", dist.Normal(torch.zeros(()).double(), 1.0))
        pyro.sample("seen", dist.Normal(3 * torch.tensor(speed.item()), 0.1), obs=torch.tensor(2.0))

    for use in USES:
        with raises("the log density of the model has another derivative by its latents than its values have: along"):
            use(model)


def test_a_latent_in_a_plate_without_size_is_refused():
    """With its size it is fitted, and so is a plate without size that holds observations alone."""

    def model(size=None):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("rows", size):
            pyro.sample("b", dist.Normal(mu, 1.0).expand([4]))

    for use in (*USES, lambda model: AutoLocalGaussian(model, "rows").setup()):
        with raises("the plate 'rows' has no size, and a guide has to know how many members its latents have: write"):
            use(model)
        use(lambda: model(4))

    def observed():
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("rows"):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=torch.zeros(4))

    close(log_joint(observed)(torch.zeros(1, 1)), 5 * dist.Normal(0.0, 1.0).log_prob(torch.zeros(1)), 1e-6)


def test_a_latent_from_a_delta_is_refused():
    """A deterministic value is none, and changes nothing."""

    def model(fixed):
        origin = torch.zeros(2)
        if fixed:
            pyro.sample("origin", dist.Delta(origin, event_dim=1))
        else:
            pyro.deterministic("origin", origin, event_dim=1)
        pyro.sample("x", dist.Normal(origin, 1.0).to_event(1))

    for use in USES:
        with raises("the latent site 'origin' is drawn from a Delta, which has no density to fit: give it as pyro.det"):
            use(lambda: model(True))
        close(use(lambda: model(False))(torch.zeros(1, 2)), 2 * dist.Normal(0.0, 1.0).log_prob(torch.zeros(1)), 1e-6)


def test_discrete_rows_that_are_missing_are_refused_with_what_to_do():
    """Under a mask in its place, or summed out, the posterior is that of the rows that are seen."""
    y, seen = torch.tensor([3.0, 0.0, 1.0]).double(), torch.tensor([True, False, True])

    def model(how):
        x = pyro.sample("x", dist.Normal(torch.zeros(()).double(), 1.0))
        keep = seen if how == "mask" else torch.ones(3, dtype=torch.bool)
        with pyro.plate("rows", 3), poutine.mask(mask=keep):
            pyro.sample("y", dist.Binomial(4, logits=x), obs=y, obs_mask=seen if how == "obs_mask" else None)

    for use in USES:
        with raises("the rows of 'y' that obs_mask= takes for missing are discrete latents, 'y_unobserved', and a Gau"):
            use(lambda: model("obs_mask"))
    theta = torch.randn(4, 1).double()
    here = log_joint(lambda: model("mask"))(theta)
    close(log_joint(config_enumerate(lambda: model("obs_mask")))(theta), here, EXACT)
    y[1] = 2.0  # whatever stands there
    close(log_joint(lambda: model("mask"))(theta), here, EXACT)


def test_a_subsampled_latent_is_shown_the_guide_for_it():
    """Which takes the same model."""

    def model():
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("rows", 10, subsample_size=4):
            pyro.sample("x", dist.Normal(mu, 1.0))

    with raises("would have to hold all of them. Fit it with AutoLocalGaussian(model, 'rows'), run the plate in full"):
        AutoGaussian(model).setup()
    assert AutoLocalGaussian(model, "rows").setup().median()["x"].shape == (10,)


def test_a_dense_gaussian_that_does_not_fit_into_memory_is_refused(monkeypatch):
    """Before it is asked for; a mean field of the same model is made, and so is the dense one where there is room."""

    def model():
        with pyro.plate("pixels", 1000):
            pyro.sample("x", dist.Normal(torch.zeros(1000), 1.0))

    monkeypatch.setattr("torchngvi.adapters.pyro.guide.free_bytes", lambda device: 2**22)  # 4 MiB
    guide = AutoGaussian(model)
    for _ in range(2):  # it does not count as set up
        with raises(
            "all correlations of 1,000 latents needs 0.00745 GiB, and 0.00391 GiB of cpu memory are free. Take"
        ):
            guide.setup()
    assert AutoGaussian(model, DiagonalGaussian).setup().posterior.dim == 1000
    assert AutoGaussian(model, structure="auto").setup().posterior.dim == 1000  # of 1,000 blocks of one number
    monkeypatch.setattr("torchngvi.adapters.pyro.guide.free_bytes", lambda device: 2**10)
    with raises("correlations within the members of plates of 1,000 latents needs"):
        AutoGaussian(model, structure="auto").setup()
    monkeypatch.setattr("torchngvi.adapters.pyro.guide.free_bytes", lambda device: 2**23)
    assert guide.setup().posterior.dim == 1000


def test_an_enumerated_site_of_one_value_changes_nothing():
    """A mixture of one component is that component, whatever its scale."""
    y, zero = torch.tensor([0.5, -1.0, 2.0]).double(), torch.zeros(1).double()

    def model(mixture):
        locs = pyro.sample("locs", dist.Normal(zero, 1.0).to_event(1))
        with pyro.plate("rows", 3):
            k = torch.tensor(0)
            if mixture:
                k = pyro.sample("k", dist.Categorical(logits=zero), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(Vindex(locs)[..., k], 1.0), obs=y)

    theta = torch.randn(5, 1).double()
    mixture, plain = log_joint(lambda: model(True)), log_joint(lambda: model(False))
    close(mixture(theta), plain(theta), EXACT)


def test_a_start_has_the_shape_of_its_site():
    """One number in brackets is a number, one number for all members is that of each, and nothing else is taken."""

    def model():
        pyro.sample("x", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("members", 3):
            pyro.sample("b", dist.Normal(torch.zeros(()), 1.0))

    def guide(x, b):
        return AutoGaussian(model, init_loc_fn=init_to_value(values={"x": x, "b": b})).setup()

    mean = torch.tensor([2.0, 0.5, 0.5, 0.5])
    close(guide(torch.tensor([2.0]), torch.tensor(0.5)).posterior.mean, mean, EXACT)
    close(guide(torch.tensor(2.0), torch.full((3,), 0.5)).posterior.mean, mean, EXACT)
    with raises("init_loc_fn gives the latent site 'b' a value of shape (2,), and the model has (3,) there."):
        guide(torch.tensor(2.0), torch.zeros(2))
    close(AutoGaussian(model, init_loc_fn=lambda site: 0.5).setup().posterior.mean, torch.full((4,), 0.5), EXACT)
    with raises("init_loc_fn must give the latent site 'x' a tensor; got 'a'."):
        AutoGaussian(model, init_loc_fn=lambda site: "a").setup()

    def local():
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("members", 6, subsample_size=3):
            pyro.sample("b", dist.Normal(mu, 1.0))

    start = init_to_value(values={"mu": torch.tensor([2.0])})
    assert AutoLocalGaussian(local, "members", init_loc_fn=start).setup().median()["mu"].shape == ()


def vectors(y=None):
    x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("y", dist.MultivariateNormal(x, torch.eye(2)), obs=torch.zeros(2) if y is None else y)


@pytest.mark.parametrize("use", USES)
def test_observations_that_a_distribution_cannot_take_are_refused(use):
    """The sentence names the one of two observed sites whose density fails."""

    def model():
        vectors()
        pyro.sample("z", dist.Bernoulli(0.5), obs=torch.tensor(1))

    with raises("the distribution Bernoulli of the site 'z' cannot take its observations, tensor(1)"):
        use(model)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (torch.ones(2), "order is a tensor of the indices of coordinates, (D,), or None; got"),
        (torch.tensor([[0, 1]]), "order is a tensor of the indices of coordinates, (D,), or None; got"),
        (torch.tensor([0, 0]), "order must have each of the 2 coordinates once; got"),
    ],
)
def test_an_order_names_each_coordinate_once(order, said):
    with raises(said):
        ModelLogJoint(vectors, order=order)


def test_options_of_a_fit_are_no_arguments_of_the_model():
    with raises("which has no tolerance; those of the fit are options: fit_guide(model, guide, *args, options={'tol"):
        fit_guide(vectors, AutoGaussian(vectors), tolerance=1e-3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tolerances'"):
        fit_guide(vectors, AutoGaussian(vectors), tolerances=1e-3)


def test_what_a_posterior_over_a_flat_vector_has_not():
    flat = AutoGaussian(vectors, FlatCholesky.standard).setup()
    with raises("reads the mean and the root of q, and FlatCholesky is a vector of parameters"):
        flat.laplace_approximation()
    bent = LatentGaussian(ModuleFlow(AffineCoupling(2, layers=1), 2))
    with raises("ModuleFlow is no Gaussian, and its covariance and entropy are not known"):
        bent.entropy()
