"""The guide as Pyro's conventions have it: moved by whoever steps, read as a distribution, told from Pyro's own."""

import copy
import io
import re
import warnings

import pytest
import torch
from helpers import DTYPE, IDENTITY, POSTERIORS, close

import torchngvi as ngvi
from torchngvi.errors import InputError, PairError

pyro = pytest.importorskip("pyro", reason="needs Pyro: pip install 'torchngvi[pyro]'")

import pyro.distributions as dist  # noqa: E402
from pyro.infer import SVI, EnergyDistance, Trace_ELBO  # noqa: E402
from pyro.infer.autoguide import AutoGaussian as PyrosAutoGaussian  # noqa: E402
from pyro.infer.autoguide import AutoGuideList  # noqa: E402
from torch.distributions import kl_divergence  # noqa: E402

from torchngvi.adapters.pyro import AutoGaussian, NaturalSVI, fit_guide  # noqa: E402
from torchngvi.adapters.pyro.guide import LatentGaussian  # noqa: E402
from torchngvi.ifvb import IFVB  # noqa: E402
from torchngvi.posteriors.flat import AffineCoupling, Beta, FlatCholesky, ModuleFlow  # noqa: E402
from torchngvi.rules import LocalExponential, NaturalGradient, Retraction  # noqa: E402
from torchngvi.structures import FullAlgebra  # noqa: E402

QUIET = {"progress": False}
X = torch.linspace(-1, 1, 12, dtype=DTYPE)[:, None] ** torch.arange(3)
Y = torch.sin(3 * X[:, 1])


pytestmark = pytest.mark.usefixtures("pyro_in_float64")


def regression(X, y):
    w = pyro.sample("w", dist.Normal(0, 2).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.Normal((X * w).sum(-1), 0.5), obs=y)


def exact_moments():
    covariance = torch.linalg.inv(4 * X.mT @ X + torch.eye(3) / 4)
    return covariance @ (4 * X.mT @ Y), covariance


def eight_draws():
    return Trace_ELBO(num_particles=8, vectorize_particles=True, max_plate_nesting=1)


def rule_for(q):
    if isinstance(q.structure, FullAlgebra):
        return Retraction()
    return LocalExponential() if LocalExponential.emits in q.takes else NaturalGradient()


families = pytest.mark.parametrize("family", POSTERIORS.values(), ids=POSTERIORS)


@pytest.mark.sparse(3)
@families
def test_a_step_of_an_optimizer_is_a_step_of_the_rule(family):
    """By SVI and by torch's own optimizer, of a loss in nats or of a mean, with the same draws: the same q."""
    ends = []
    for how in ("natural", "svi", "torch", "mean"):
        torch.manual_seed(3)
        guide = AutoGaussian(regression, family).setup(X, Y)
        elbo = eight_draws()
        if how == "natural":
            radius = ngvi.KLRadius(0.5)
            opt = ngvi.NaturalGradientVI(guide.posterior, rule_for(guide.posterior), lr=0.04, step_size=radius)
            elbo(regression, guide)(X, Y).backward()
            opt.step()
        elif how == "svi":
            SVI(regression, guide, pyro.optim.SGD({"lr": 0.01}), elbo).step(X, Y)
        else:
            loss = elbo(regression, guide)
            sgd, adam = (
                torch.optim.SGD(loss.parameters(), lr=0.01),
                torch.optim.Adam(loss.parameters(), lr=0.01, eps=0.0),
            )
            owner = sgd if how == "torch" else adam
            (loss(X, Y) / (len(Y) if how == "mean" else 1)).backward()
            owner.step()
        ends.append((guide.posterior.mean.clone(), guide.posterior.covariance.clone()))
        assert not torch.equal(ends[-1][0], AutoGaussian(regression, family).setup(X, Y).posterior.mean)
    for mean, covariance in ends[1:]:
        close(mean, ends[0][0], IDENTITY)
        close(covariance, ends[0][1], IDENTITY)


@pytest.mark.accuracy
@pytest.mark.parametrize("vectorized", [False, True])
@pytest.mark.parametrize("optim", [pyro.optim.Adam, pyro.optim.ClippedAdam], ids=["adam", "clipped"])
def test_svi_alone_ends_at_the_exact_posterior(optim, vectorized):
    """Also an optimizer that writes past torch's count of writes."""
    guide = AutoGaussian(regression)
    elbo = Trace_ELBO(num_particles=4, vectorize_particles=vectorized, max_plate_nesting=1)
    svi = SVI(regression, guide, optim({"lr": 0.05}), elbo)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(60):
            svi.step(X, Y)
    mean, covariance = exact_moments()
    assert float(((guide.posterior.mean - mean) / covariance.diagonal().sqrt()).abs().max()) < 0.1
    assert float((guide.posterior.covariance / covariance - 1).diagonal().abs().max()) < 0.1


def test_a_converted_guide_is_moved():
    guide = AutoGaussian(regression).setup(X, Y).float().double()
    svi = SVI(regression, guide, pyro.optim.Adam({"lr": 0.05}), eight_draws())
    before = guide.posterior.mean.clone()
    svi.step(X, Y)
    assert not torch.equal(guide.posterior.mean, before)


def test_a_guide_that_is_set_up_in_inference_mode_is_moved():
    guide = AutoGaussian(regression)
    with torch.inference_mode():
        guide(X, Y)
    before = guide.posterior.mean.clone()
    SVI(regression, guide, pyro.optim.Adam({"lr": 0.05}), eight_draws()).step(X, Y)
    assert not torch.equal(guide.posterior.mean, before)


@pytest.mark.accuracy
def test_posteriors_over_a_flat_vector_move_too():
    guide = AutoGaussian(regression, FlatCholesky.standard)
    svi = SVI(regression, guide, pyro.optim.Adam({"lr": 0.05}), eight_draws())
    for _ in range(200):
        svi.step(X, Y)
    assert float(((guide.posterior.mean - exact_moments()[0]).abs()).max()) < 0.1


def flow(dim, mean, scale):
    coupling = AffineCoupling(dim, layers=4, hidden=8, scale=scale)
    with torch.no_grad():
        coupling.shift.copy_(mean)
    return ModuleFlow(coupling.double(), dim)


def bent():
    """Far from Gaussian: a parabola."""
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(x**2, 0.3))


@pytest.mark.accuracy
@pytest.mark.parametrize("how", ["ifvb", "svi"])
def test_a_flow_is_moved_by_ifvb_and_by_svi(how):
    """It begins at the start of the guide, and ends nearer to the posterior than the best Gaussian."""
    torch.manual_seed(1)
    guide = AutoGaussian(bent, flow, init_loc_fn=lambda site: torch.tensor(0.5)).setup()
    assert float((guide.posterior.sample(2000).mean(0) - 0.5).abs().max()) < 0.05
    elbo = Trace_ELBO(num_particles=16, vectorize_particles=True, max_plate_nesting=0)
    if how == "ifvb":
        loss, opt = elbo(bent, guide), IFVB(guide.posterior, lr=0.05)
        for _ in range(200):
            opt.zero_grad()
            loss().backward()
            opt.step()
    else:
        svi = SVI(bent, guide, pyro.optim.Adam({"lr": 0.02}), elbo)
        for _ in range(200):
            svi.step()
    best = fit_guide(bent, AutoGaussian(bent), options=QUIET).loss
    many = Trace_ELBO(num_particles=2000, vectorize_particles=True, max_plate_nesting=0)
    assert many.loss(bent, guide) < best - 0.1
    assert guide()["y"].shape == ()
    assert guide.get_posterior().sample((3,)).shape == (3, 2)
    for read in (guide.get_transform, lambda: guide.get_posterior().covariance_matrix, guide.get_posterior().entropy):
        with pytest.raises((InputError, PairError), match="ModuleFlow is"):
            read()


def test_posteriors_without_a_map_from_noise_are_refused():
    guide = AutoGaussian(bent, lambda dim, mean, scale: Beta(torch.ones(2)))
    for use in (guide.setup, guide):
        with pytest.raises(InputError, match="Beta has no map from noise to draws, by which a loss of Pyro reaches q"):
            use()


def test_whoever_reads_the_guide_finds_the_step():
    """Each on a copy of its own, after one step of SVI."""
    guide = AutoGaussian(regression).setup(X, Y)
    start = guide.posterior.mean.clone()
    svi = SVI(regression, guide, pyro.optim.SGD({"lr": 0.1}), eight_draws())

    def of_store():
        file = io.BytesIO()
        torch.save(pyro.get_param_store().get_state(), file)
        file.seek(0)
        return torch.load(file, weights_only=False)["params"]["AutoGaussian.q.mean"]

    reads = [
        lambda: guide.median()["w"],
        lambda: guide.posterior.mean,
        lambda: guide.state_dict()["q.mean"],
        lambda: copy.deepcopy(guide).posterior.mean,
        lambda: pyro.get_param_store()["AutoGaussian.q.mean"],
        lambda: guide.to(DTYPE).q.mean,
        lambda: torch.nn.ModuleList([guide]).double()[0].q.mean,
        lambda: copy.deepcopy(pyro.get_param_store().get_state())["params"]["AutoGaussian.q.mean"],
        of_store,
    ]
    for read in reads:
        svi.step(X, Y)
        value = read().clone()
        assert not torch.equal(value, start)
        assert torch.equal(guide.posterior.mean, value)
        start = value
    assert set(guide.state_dict()) == {"q.mean", "q.scale_tril"}
    assert [parameter.item() for parameter in guide.parameters()] == [0.0]


def test_who_moves_q_itself_is_not_moved_twice():
    """Adam over all parameters of an ELBO beside an optimizer of q, in both orders: what Adam did is dropped."""
    ends = []
    for order in ("alone", "first", "last"):
        torch.manual_seed(1)
        guide = AutoGaussian(regression).setup(X, Y)
        loss = eight_draws()(regression, guide)
        natural, adam = ngvi.IBLR(guide.posterior, lr=0.1), torch.optim.Adam(loss.parameters(), lr=0.3)
        for _ in range(3):
            natural.zero_grad()
            adam.zero_grad()
            loss(X, Y).backward()
            for who in {"alone": [natural], "first": [adam, natural], "last": [natural, adam]}[order]:
                who.step()
        ends.append(guide.posterior.mean.clone())
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.filterwarnings("ignore:Encountered NaN")
@pytest.mark.parametrize("before", ["nothing", "dropped", "not finite", "frozen", "loaded", "own loss", "rising"])
def test_a_step_is_along_its_own_gradients_alone(before):
    """Whatever passes without a step went before, q makes the one step of the rule."""
    ends = []
    for how in ("by hand", "owner"):
        torch.manual_seed(1)
        guide = AutoGaussian(regression).setup(X, Y)
        start, loss, sign = copy.deepcopy(guide.state_dict()), eight_draws()(regression, guide), 1
        owner = torch.optim.SGD(loss.parameters(), lr=0.01, maximize=before == "rising")
        if how == "owner":
            torch.manual_seed(8)
            if before == "dropped":
                loss(X, Y).backward()
            elif before == "not finite":
                (loss(X, Y) * torch.nan).backward()
            elif before == "frozen":
                guide.requires_grad_(False)
                for _ in range(2):
                    loss(X, Y).backward()
                guide.requires_grad_(True)
            elif before == "loaded":
                loss(X, Y).backward()
                guide.load_state_dict(start)
            elif before == "own loss":
                guide.posterior.rsample(4).square().sum().backward()
            else:
                sign = -1 if before == "rising" else 1
            owner.zero_grad()
        torch.manual_seed(3)
        (sign * loss(X, Y)).backward()
        if how == "owner":
            owner.step()
        else:
            radius = ngvi.KLRadius(0.5)
            ngvi.NaturalGradientVI(guide.posterior, Retraction(), lr=0.04, step_size=radius).step()
        assert not torch.equal(guide.posterior.mean, start["q.mean"])
        ends.append(guide.posterior)
    close(ends[1].mean, ends[0].mean, IDENTITY)
    close(ends[1].covariance, ends[0].covariance, IDENTITY)


def test_an_owner_who_cannot_move_q_is_told():
    """One that takes its gradients past the probes, and losses without log q."""
    text = "q stays where it is: an optimizer of its owner moves an AutoGaussian where log q is part of the loss"
    guide = AutoGaussian(regression).setup(X, Y)
    loss, start = eight_draws()(regression, guide), guide.posterior.mean.clone()
    (slope,) = torch.autograd.grad(loss(X, Y), [*loss.parameters()])
    with torch.no_grad():
        next(loss.parameters()).sub_(0.1 * slope)
    with pytest.warns(UserWarning, match=text):
        assert torch.equal(guide.posterior.mean, start)
    svi = SVI(regression, guide, pyro.optim.Adam({"lr": 0.1}), EnergyDistance(num_particles=2))
    svi.step(X, Y)
    with pytest.warns(UserWarning, match=text):
        svi.step(X, Y)
    assert torch.equal(guide.posterior.mean, start)


def test_an_evaluation_meets_no_other_process(monkeypatch):
    """One process may evaluate alone; only steps spread their draws."""
    svi = NaturalSVI(regression, AutoGaussian(regression))
    monkeypatch.setattr("torchngvi.adapters.pyro.svi.spread", lambda *_: pytest.fail("spread"))
    assert svi.evaluate_loss(X, Y) > 0


def test_state_of_a_pyro_optimizer_comes_back(tmp_path):
    def start():
        guide, adam = AutoGaussian(regression).setup(X, Y), pyro.optim.Adam({"lr": 0.1})
        return guide, adam, SVI(regression, guide, adam, eight_draws())

    guide, adam, svi = start()
    for _ in range(3):
        svi.step(X, Y)
    pyro.get_param_store().save(tmp_path / "store")
    adam.save(tmp_path / "adam")
    assert set(adam.get_state()) == {"AutoGaussian.step.length"}
    torch.manual_seed(5)
    expected = [svi.step(X, Y) for _ in range(3)]
    pyro.clear_param_store()
    _, adam, resumed = start()
    pyro.get_param_store().load(tmp_path / "store")
    adam.load(tmp_path / "adam")
    torch.manual_seed(5)
    assert [resumed.step(X, Y) for _ in range(3)] == expected


def test_two_guides_of_one_name_have_their_own_steps():
    first, second = AutoGaussian(regression).setup(X, Y), AutoGaussian(regression).setup(X, Y)
    sgd = pyro.optim.SGD({"lr": 0.1})
    SVI(regression, first, sgd, eight_draws()).step(X, Y)
    before = second.posterior.mean.clone()
    assert not torch.equal(first.posterior.mean, before)
    second(X, Y)
    assert torch.equal(second.posterior.mean, before)


def test_the_rate_is_the_owners():
    """Its schedule, its sign, and whether it steps at all; a full step is the longest."""
    guide = AutoGaussian(regression).setup(X, Y)
    before = guide.posterior.mean.clone()

    def moved(optim, steps=1):
        twin = copy.deepcopy(guide)
        owner, loss = optim(twin.parameters()), eight_draws()(regression, twin)
        for _ in range(steps):
            loss(X, Y).backward()
            owner.step()
            owner.zero_grad()
        return twin

    assert torch.equal(moved(lambda p: torch.optim.SGD(p, lr=0.0)).posterior.mean, before)
    assert torch.equal(moved(lambda p: torch.optim.SGD(p, lr=0.1, maximize=True)).posterior.mean, before)
    torch.manual_seed(1)
    full = moved(lambda p: torch.optim.SGD(p, lr=0.25)).posterior
    torch.manual_seed(1)
    assert torch.equal(moved(lambda p: torch.optim.SGD(p, lr=30.0)).posterior.mean, full.mean)
    slow = moved(lambda p: torch.optim.Adam(p, lr=0.02), 10).posterior.stddev
    widened = (slow / guide.posterior.stddev).log().max() / 10
    assert 0.02 < float(widened) < 0.04


@pytest.mark.accuracy
def test_a_forecaster_of_pyro_moves_it():
    from pyro.contrib.forecast import Forecaster, ForecastingModel

    class Walk(ForecastingModel):
        def model(self, zero_data, covariates):
            level = pyro.sample("level", dist.Normal(0.0, 10.0))
            self.predict(dist.Normal(0.0, 1.0), level + zero_data)

    data = 3.0 + torch.randn(20, 1)
    walk = Walk()
    guide = AutoGaussian(walk)
    Forecaster(walk, data, torch.zeros(20, 0), guide=guide, num_steps=201, learning_rate=0.02, log_every=0)
    precision = 20 + 0.01
    assert abs(float(guide.median()["level"] - data.sum() / precision)) < 0.1
    assert float(guide.posterior.stddev * precision**0.5) == pytest.approx(1.0, abs=0.1)


@pytest.mark.accuracy
def test_a_loop_of_torch_over_a_gaussian_process_moves_it():
    from pyro.contrib import gp
    from pyro.nn import PyroSample

    x = torch.linspace(0, 1, 10)
    kernel = gp.kernels.RBF(1)
    kernel.lengthscale = PyroSample(dist.LogNormal(-1.0, 0.5))
    kernel.variance = PyroSample(dist.LogNormal(0.0, 0.5))
    model = gp.models.GPRegression(x, torch.sin(6 * x), kernel, noise=torch.tensor(0.01))
    guide = AutoGaussian(model.model).setup()
    elbo, start = Trace_ELBO(), guide.posterior.mean.clone()
    first = sum(elbo.loss(model.model, guide) for _ in range(8)) / 8
    adam = torch.optim.Adam(guide.parameters(), lr=0.05)
    for _ in range(60):
        adam.zero_grad()
        elbo.differentiable_loss(model.model, guide).backward()
        adam.step()
    assert not torch.equal(guide.posterior.mean, start)
    assert sum(elbo.loss(model.model, guide) for _ in range(8)) / 8 < first


@families
def test_the_posterior_is_a_distribution_like_pyros(family):
    guide = AutoGaussian(regression, family)
    guide.laplace_approximation(X, Y)
    q, p = guide.posterior, guide.get_posterior()
    written = dist.MultivariateNormal(q.mean, covariance_matrix=q.covariance)
    for name in ("loc", "mean", "mode", "variance", "stddev", "covariance_matrix", "precision_matrix", "scale_tril"):
        close(getattr(p, name), getattr(written, name), IDENTITY)
        assert not getattr(p, name).requires_grad
        close(getattr(p.expand([2]), name)[1], getattr(written, name), IDENTITY)
    close(p.entropy(), written.entropy(), IDENTITY)
    assert p.expand([2, 3]).entropy().shape == (2, 3)
    other = LatentGaussian(ngvi.CholeskyGaussian(3))
    prior = dist.MultivariateNormal(torch.zeros(3), torch.eye(3))
    expected = q.kl(other.q).detach()
    close(kl_divergence(p, other), expected, IDENTITY)
    close(kl_divergence(p, prior), expected, IDENTITY)
    close(kl_divergence(prior, p), other.q.kl(q).detach(), IDENTITY)


def test_a_flat_posterior_is_one_too():
    guide = AutoGaussian(regression, FlatCholesky.standard).setup(X, Y)
    p = guide.get_posterior()
    written = dist.MultivariateNormal(guide.posterior.mean, scale_tril=guide.posterior.scale_tril)
    standard = dist.MultivariateNormal(torch.zeros(3), torch.eye(3))
    close(p.precision_matrix, written.precision_matrix, IDENTITY)
    close(p.entropy(), written.entropy(), IDENTITY)
    close(kl_divergence(p, LatentGaussian(ngvi.CholeskyGaussian(3))), kl_divergence(written, standard), IDENTITY)


def test_pyros_guide_of_the_same_name_is_told_apart():
    """By those that cannot fit it, and in the parameter store, where it has another name."""
    theirs = PyrosAutoGaussian(regression)
    listed = AutoGuideList(regression)
    listed.append(PyrosAutoGaussian(regression))
    text = "the guide is pyro.infer.autoguide.AutoGaussian, another class of this name; import AutoGaussian from torch"
    for use in (
        lambda: fit_guide(regression, theirs, X, Y),
        lambda: NaturalSVI(regression, theirs),
        lambda: NaturalSVI(regression, listed, pyro.optim.Adam({"lr": 0.1})),
    ):
        with pytest.raises(InputError, match=text):
            use()
    theirs(X, Y)
    before = set(pyro.get_param_store())
    AutoGaussian(regression).setup(X, Y)
    ours = {key for key in pyro.get_param_store() if key.startswith("AutoGaussian.")}
    assert ours == {"AutoGaussian.q.mean", "AutoGaussian.q.scale_tril"}
    assert before | ours == set(pyro.get_param_store())
    assert not before & ours


def test_hints_of_pyro_are_kept():
    def discrete():
        pyro.sample("z", dist.Bernoulli(0.5))

    def sphere():
        pyro.sample("y", dist.ProjectedNormal(torch.ones(2)))

    with pytest.raises(InputError, match=re.escape("(https://pyro.ai/examples/enumeration.html)")):
        AutoGaussian(discrete)()
    text = (
        "the latent site 'y' is on a sphere, which no bijection takes from the real numbers. Draw it from a Projected"
    )
    with pytest.raises(InputError, match=text):
        AutoGaussian(sphere)()
    with pytest.raises(InputError, match=re.escape("poutine.reparam(model, {'y': ProjectedNormalReparam()}).")):
        AutoGaussian(sphere)()


def test_torchs_tracer_takes_the_guide():
    """Draws alone, as Pyro's guides are saved for other languages; fits by a compiled loss are refused elsewhere."""
    guide = AutoGaussian(regression).setup(X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace_module(guide, {"call": (X, Y)}, check_trace=False)
    pyro.set_rng_seed(1)
    (expected,) = guide.call(X, Y)
    pyro.set_rng_seed(1)
    assert torch.equal(traced.call(X, Y)[0], expected)
