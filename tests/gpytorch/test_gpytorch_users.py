"""What those who come with a model of their own may do wrong, or may rightly expect."""

import warnings

import pytest
import torch

gp = pytest.importorskip("gpytorch", reason="needs the extra gpytorch: pip install torchngvi[gpytorch]")

from sparse_models import SparseModel, several  # noqa: E402

from torchngvi.adapters.gpytorch import refine_svgp, train_svgp, train_svgp_in_batches  # noqa: E402
from torchngvi.adapters.gpytorch.engines import Rounds  # noqa: E402
from torchngvi.adapters.gpytorch.model import lent_posterior  # noqa: E402
from torchngvi.adapters.gpytorch.starts import lengthen  # noqa: E402
from torchngvi.errors import InputError, PairError, ScaleWarning  # noqa: E402

N, M = 120, 8
v = gp.variational
OWN = [v.CholeskyVariationalDistribution, v.NaturalVariationalDistribution, v.TrilNaturalVariationalDistribution]


class Model(SparseModel):
    """As in GPyTorch's tutorials, with a network in front if there is one."""

    def __init__(self, net=None, Z=None):
        Z = torch.linspace(-2, 2, M)[:, None] if Z is None else Z
        super().__init__(v.CholeskyVariationalDistribution(len(Z)), Z)
        self.net = net

    def forward(self, x):
        return SparseModel.forward(self, x if self.net is None else self.net(x))


def Several(kind, mixed, spread):  # noqa: N802
    """Several functions over a q of GPyTorch's."""
    Z = torch.linspace(-2, 2, M)[:, None]
    q = kind(M, batch_shape=torch.Size([2]))
    return several(q, Z.repeat(2, 1, 1) if spread else Z, 2, 3 if mixed else None)


def problem(net=None, noise=0.2):
    torch.manual_seed(0)
    x = 4 * torch.rand(N, 1).double() - 2
    y = torch.sin(3 * x[:, 0]) + noise * torch.randn(N).double()
    return Model(net).double(), gp.likelihoods.GaussianLikelihood().double(), x, y


def adam_of(model, likelihood):
    return torch.optim.Adam([*model.hyperparameters(), *likelihood.parameters()], lr=0.02)


DOORS = {
    "train_svgp": lambda model, likelihood, x, y: train_svgp(model, likelihood, (x, y), rounds=1, progress=False),
    "refine_svgp": lambda model, likelihood, x, y: refine_svgp(model, likelihood, [(x, y)], progress=False),
    "train_svgp_in_batches": lambda model, likelihood, x, y: train_svgp_in_batches(
        model, likelihood, [(x, y)], N, adam_of(model, likelihood), epochs=2, progress=False
    ),
}


class TestWhatIsHandedOver:
    @pytest.mark.parametrize("door", [name for name in DOORS if name != "train_svgp_in_batches"])
    def test_no_likelihood(self, door):
        model, likelihood, x, y = problem()
        mll = gp.mlls.VariationalELBO(likelihood, model, num_data=N)
        with pytest.raises(PairError, match=r"got VariationalELBO.* Give mll.likelihood in the place of mll."):
            DOORS[door](model, mll, x, y)
        with pytest.raises(
            PairError, match="takes the model, its likelihood and the data; got tuple as the likelihood"
        ):
            DOORS[door](model, (x, y), x, y)

    @pytest.mark.parametrize("door", DOORS)
    def test_no_rows(self, door):
        model, likelihood, x, y = problem()
        with pytest.raises(InputError, match="no rows"):
            DOORS[door](model, likelihood, x[:0], y[:0])

    @pytest.mark.parametrize("door", DOORS)
    def test_data_with_a_graph(self, door):
        """They are numbers here: what made them is not trained, and gets no gradient."""
        ends = []
        for attached in (False, True):
            model, likelihood, x, y = problem()
            scale = torch.ones((), dtype=x.dtype, requires_grad=attached)
            DOORS[door](model, likelihood, x * scale, y * scale)
            assert scale.grad is None
            ends.append(torch.cat([p.detach().flatten() for p in (*model.parameters(), *likelihood.parameters())]))
        assert torch.equal(*ends)

    def test_a_data_set(self):
        model, likelihood, x, y = problem()
        expected = DOORS["train_svgp"](model, likelihood, x, y).losses
        model, likelihood, x, y = problem()
        rows = torch.utils.data.TensorDataset(x, y)
        assert train_svgp(model, likelihood, rows, rounds=1, progress=False).losses == expected


class TestSeveralFunctions:
    @pytest.mark.parametrize("kind", OWN)
    @pytest.mark.parametrize("mixed", [False, True])
    def test_the_distributions_of_gpytorch(self, kind, mixed):
        """The model ends with its own q, given back without a draw, at the optimum by GPyTorch's own objective."""
        _, _, x, y = problem()
        torch.manual_seed(0)
        model = Several(kind, mixed, spread=kind is OWN[0]).double()
        likelihood = gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=3 if mixed else 2).double()
        y = torch.stack([y, y.cos(), y.square()][: 3 if mixed else 2], -1)
        mll = gp.mlls.VariationalELBO(likelihood, model, num_data=N)
        own = model.variational_strategy.base_variational_strategy._variational_distribution
        start, state = float(-mll(model(x), y).detach()), torch.get_rng_state()
        result = DOORS["train_svgp_in_batches"](model, likelihood, x, y)
        assert torch.equal(torch.get_rng_state(), state)
        assert result.rejections == 0
        refined = refine_svgp(model, likelihood, [(x, y)], max_evaluations=30 if mixed else 1000, progress=False)
        assert refined.converged or mixed
        assert model.variational_strategy.base_variational_strategy._variational_distribution is own
        model.train()
        end = -mll(model(x), y)
        assert float(end.detach()) == pytest.approx(refined.loss / N, abs=1e-6)
        assert float(end.detach()) < start - 0.1
        if not mixed and kind is OWN[0]:
            slopes = torch.autograd.grad(end, list(own.parameters()))
            assert all(float(slope.abs().max()) < 1e-4 for slope in slopes)


class TestNetworks:
    def network(self, layer):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(1, 1), layer)

    def test_dropout(self):
        """No line search could follow it."""
        model, likelihood, x, y = problem(self.network(torch.nn.Dropout(0.5)))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(PairError, match="gives other values when it is called again .* train_svgp_in_batches"):
            train_svgp(model, likelihood, (x, y), progress=False)
        # q is started where anything is asked of the model
        kept = [name for name in before if "_variational_distribution" not in name and "initialized" not in name]
        assert all(torch.equal(model.state_dict()[name], before[name]) for name in kept)

    def test_refined_for_the_function_that_predicts(self):
        """Dropout is left out, as in predictions, and a batch normalisation keeps its statistics."""
        losses = []
        for layer in (torch.nn.Dropout(0.5), torch.nn.Identity()):
            model, likelihood, x, y = problem(self.network(layer))
            losses.append(refine_svgp(model, likelihood, [(x, y)], progress=False).loss)
            assert model.net[1].training
        assert losses[0] == losses[1]
        model, likelihood, x, y = problem(self.network(torch.nn.BatchNorm1d(1)))
        result = refine_svgp(model, likelihood, [(x, y)], progress=False)
        assert model.net[1].num_batches_tracked == 0
        assert result.loss != losses[0]
        assert abs(result.loss - losses[0]) < 0.1  # mean 0, variance 1 + 1e-5


class Exact(gp.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gp.means.ConstantMean()
        self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel())

    forward = Model.forward
    net = None


def test_all_rows_as_inducing_points():
    """The bound is the marginal likelihood of GPyTorch's exact GP, and the predictions are its own."""
    model, likelihood, x, y = problem()
    strategy = v.VariationalStrategy(model, x, v.CholeskyVariationalDistribution(N), False, jitter_val=1e-10)
    model.variational_strategy = strategy.double()
    loss = refine_svgp(model, likelihood, [(x, y)], progress=False).loss
    exact = Exact(x, y, likelihood).double()  # of the same hyper-parameters
    exact.mean_module, exact.covar_module = model.mean_module, model.covar_module
    marginal = gp.mlls.ExactMarginalLogLikelihood(likelihood, exact)(exact(x), y)
    assert loss / N == pytest.approx(-float(marginal.detach()), abs=1e-7)
    inputs = torch.linspace(-3, 3, 20).double()[:, None]
    with torch.no_grad():
        ours, theirs = model.eval()(inputs), exact.eval()(inputs)
    assert torch.allclose(ours.mean, theirs.mean, atol=1e-5)
    assert torch.allclose(ours.variance, theirs.variance, atol=1e-5)


class TestScales:
    @pytest.mark.parametrize(("scale", "shift"), [(30.0, 0.0), (0.01, 0.0), (1.0, 100.0)])
    def test_targets_of_another_scale(self, scale, shift):
        model, likelihood, x, y = problem()
        with pytest.warns(ScaleWarning) as told:
            train_svgp(model, likelihood, (x, scale * y + shift), rounds=1, progress=False)
        assert "times as far from the mean of the model" in str(told[0].message)
        assert "Standardise the targets" in str(told[0].message)
        assert all(each.filename == __file__ for each in told)  # of the line that calls

    def test_inputs_of_another_scale(self):
        """All rows are far from one another, and the length scale may not grow: nothing but noise is found."""
        model, likelihood, x, y = problem()
        model.covar_module.base_kernel.raw_lengthscale.requires_grad_(False)
        model.variational_strategy.inducing_points.data.mul_(1e4)
        constant = -torch.distributions.Normal(y.mean(), y.std(correction=0)).log_prob(y).mean()
        message = f"constant function with noise, {float(constant):.4f}. If the inputs"
        with pytest.warns(ScaleWarning, match=message) as told:
            train_svgp(model, likelihood, (1e4 * x, y), progress=False)
        assert told[0].filename == __file__

    def test_two_classes_by_their_share(self):
        """The tutorial of GPyTorch on classification: from its length scale the bound prefers a constant function."""
        x = torch.linspace(0, 1, 10).double()[:, None]
        y = (torch.cos(4 * torch.pi * x[:, 0]) > 0).double()  # six of ten
        constant = -(0.6 * torch.tensor(0.6).log() + 0.4 * torch.tensor(0.4).log())
        for length in (None, 0.1):
            model = Model(Z=x).double()
            if length is None:
                expected = pytest.warns(
                    ScaleWarning, match=f"a constant function, {float(constant):.4f}. If the inputs"
                )
            else:
                model.covar_module.base_kernel.lengthscale, expected = length, warnings.catch_warnings()
            with expected:
                warnings.simplefilter("always" if length is None else "error", ScaleWarning)
                loss = train_svgp(model, gp.likelihoods.BernoulliLikelihood(), (x, y), progress=False).losses[-1]
        assert loss < float(constant) - 0.01

    @pytest.mark.parametrize("scale", [2.0**-17, *(pytest.param(2.0**k, marks=pytest.mark.accuracy) for k in (4, 14))])
    def test_units_of_the_inputs(self, scale):
        """Points move in small units, and short length scales are doubled: the fit ends where the other one does."""
        ends = []
        for unit in (1.0, scale):
            model, likelihood, x, y = problem()
            model.variational_strategy.inducing_points.data.mul_(unit)
            with warnings.catch_warnings():
                warnings.simplefilter("error", ScaleWarning)
                ends.append(train_svgp(model, likelihood, (unit * x, y), progress=False).losses[-1])
            length = float(model.covar_module.base_kernel.lengthscale.detach())
            assert 0.3 * unit < length < unit
        assert ends[1] == pytest.approx(ends[0], abs=0.01)

    @pytest.mark.parametrize(("rows", "columns"), [(1, 1), (N, 1), (N, 4)])
    def test_inputs_of_whole_numbers(self, rows, columns):
        generator, (_, likelihood, *_) = torch.Generator().manual_seed(0), problem()
        x = torch.randint(9, (rows, columns), generator=generator)
        model = Model(Z=torch.linspace(-2.0, 2.0, M)[:, None].expand(M, columns).clone()).double()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", ScaleWarning)
            train_svgp(model, likelihood, (x, x[:, 0].sin().double()), progress=False)

    def test_models_of_a_batch(self):
        """Each has targets of its own, and the one of another scale is named."""
        q = gp.variational.CholeskyVariationalDistribution(M, batch_shape=torch.Size([2]))
        model = SparseModel(q, torch.linspace(-2, 2, M)[:, None], batch=(2,)).double()
        likelihood = gp.likelihoods.GaussianLikelihood(batch_shape=torch.Size([2])).double()
        _, _, x, y = problem()
        with pytest.warns(ScaleWarning, match="the targets of model 1, of mean .* are 6. times as far from"):
            train_svgp(model, likelihood, (x, torch.stack([y, 100 * y])), rounds=1, progress=False)

    def test_inducing_points_in_other_units(self):
        model, likelihood, x, y = problem()
        away, none = "points are in -2 to 2 in input 0, and the rows in 1998 to 2002: so far", "than that of a constant"
        with pytest.warns(ScaleWarning, match=none), pytest.warns(ScaleWarning, match=away) as told:
            train_svgp(model, likelihood, (2000 + x, y), rounds=1, progress=False)
        assert all(each.filename == __file__ for each in told)

    def test_a_short_length_scale_that_is_better(self):
        """That of a model which was trained before: independent values, which a point for each row explains."""
        _, likelihood, x, _ = problem()
        torch.manual_seed(0)
        model, y = Model(Z=x).double(), torch.randn(N).double()
        model.covar_module.base_kernel.lengthscale, likelihood.noise = 1e-3, 0.01
        with lent_posterior(model):
            model.train()
            Rounds(model, likelihood, x, y, 1).begin()
        assert float(model.covar_module.base_kernel.lengthscale.detach()) == pytest.approx(1e-3)

    def test_length_scales_that_stay(self):
        """Those that relate rows, those that cannot, and none at all."""
        model, _, x, _ = problem()
        kernel = model.covar_module.base_kernel
        before = kernel.raw_lengthscale.detach().clone()
        for scale in (1.0, 1e60):  # as far as doublings go
            assert not lengthen(model, scale * x)
            assert torch.equal(kernel.raw_lengthscale, before)
        kernel.register_constraint("raw_lengthscale", gp.constraints.Interval(0.1, 2.0))
        kernel.lengthscale = 0.7
        before = kernel.raw_lengthscale.detach().clone()
        lengthen(model, 1e4 * x)
        assert torch.equal(kernel.raw_lengthscale, before)
        model.covar_module = gp.kernels.LinearKernel().double()
        lengthen(model, 1e4 * x)

    def test_a_length_scale_within_bounds_stays_beside_one_that_is_doubled(self):
        model, _, x, _ = problem()
        held, free = gp.kernels.RBFKernel(), gp.kernels.RBFKernel()
        little = gp.kernels.ScaleKernel(held)
        little.outputscale = 0.01
        model.covar_module = (little + free).double()
        held.register_constraint("raw_lengthscale", gp.constraints.Interval(0.1, 1.0))
        held.lengthscale = free.lengthscale = 0.7
        assert lengthen(model, 1e3 * x)
        assert float(held.lengthscale.detach()) == pytest.approx(0.7)
        assert float(free.lengthscale.detach()) > 2.0

    @pytest.mark.parametrize(
        "case", ["standardised", "constant", "noise for each row", "noise beside it", "two classes"]
    )
    def test_nothing_is_said(self, case):
        model, likelihood, x, y = problem()
        if case == "constant":
            y = torch.ones_like(y)
        if case.startswith("noise"):
            noise, more = torch.full_like(y, 0.04), case == "noise beside it"
            likelihood = gp.likelihoods.FixedNoiseGaussianLikelihood(noise, learn_additional_noise=more).double()
        if case == "two classes":
            y, likelihood = (y > 0).double(), gp.likelihoods.BernoulliLikelihood()
        with warnings.catch_warnings():
            warnings.simplefilter("error", ScaleWarning)
            train_svgp(model, likelihood, (x, y), rounds=2, progress=False)


class TestTargets:
    """Those that a likelihood cannot take."""

    @pytest.mark.parametrize("door", DOORS)
    def test_no_labels(self, door):
        """GPyTorch would weigh the latent values by them."""
        model, _, x, y = problem()
        with pytest.raises(InputError, match="takes the labels 0 and 1, or -1 and 1; got targets from -1.* to 1"):
            DOORS[door](model, gp.likelihoods.BernoulliLikelihood(), x, y)

    @pytest.mark.parametrize("kind", ["bool", "long", "-1 and 1"])
    def test_labels(self, kind):
        """All forms of them are the same."""
        losses = []
        for form in ("0 and 1", kind):
            model, _, x, y = problem()
            y = {"0 and 1": (y > 0).double(), "bool": y > 0, "long": (y > 0).long(), "-1 and 1": y.sign()}[form]
            losses.append(refine_svgp(model, gp.likelihoods.BernoulliLikelihood(), [(x, y)], progress=False).loss)
        assert losses[0] == losses[1]

    @pytest.mark.parametrize("door", DOORS)
    def test_outside_of_the_support(self, door):
        model, _, x, y = problem()
        message = r"PoissonLikelihood cannot take these targets, of which the least is -1.* the support"
        with pytest.raises(InputError, match=message) as told:
            DOORS[door](model, gp.likelihoods.PoissonLikelihood(), x, y)
        assert len(str(told.value)) < 400  # not all of them

    def test_classes_of_one_function(self):
        model, _, x, y = problem()
        likelihood = gp.likelihoods.SoftmaxLikelihood(num_features=1, num_classes=3).double()
        with pytest.raises(PairError, match="takes 1 latent values a datum in a dimension of their own, .* Wrap"):
            train_svgp(model, likelihood, (x, (y > 0).long()), progress=False)

    def test_inputs_that_are_not_finite(self):
        model, likelihood, x, y = problem()
        x[3] = torch.nan
        with pytest.raises(InputError, match="check the targets and the inputs for NaN and infinities"):
            train_svgp(model, likelihood, (x, y), progress=False)
        model, likelihood, _, _ = problem()
        model.variational_strategy.inducing_points.data[3] = torch.nan
        with pytest.raises(InputError, match="K_ZZ is not finite: check the inputs, the inducing points and the hyper"):
            refine_svgp(model, likelihood, [(problem()[2], y)], progress=False)
