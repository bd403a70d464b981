"""What those who come with a model of their own may do wrong, or may rightly expect."""

import pytest
import torch

gp = pytest.importorskip("gpytorch", reason="needs the extra gpytorch: pip install torchngvi[gpytorch]")

from torchngvi.adapters.gpytorch import refine_svgp, train_svgp, train_svgp_in_batches  # noqa: E402
from torchngvi.errors import InputError, PairError  # noqa: E402

N, M = 120, 8
v = gp.variational
OWN = [v.CholeskyVariationalDistribution, v.NaturalVariationalDistribution, v.TrilNaturalVariationalDistribution]


class Model(gp.models.ApproximateGP):
    """As in GPyTorch's tutorials, with a network in front if there is one."""

    def __init__(self, net=None):
        Z = torch.linspace(-2, 2, M)[:, None]
        super().__init__(v.VariationalStrategy(self, Z, v.CholeskyVariationalDistribution(M)))
        self.mean_module = gp.means.ConstantMean()
        self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel())
        self.net = net

    def forward(self, x):
        if self.net is not None:
            x = self.net(x)
        return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Several(gp.models.ApproximateGP):
    """Several functions over a q of GPyTorch's."""

    def __init__(self, kind, mixed, spread):
        shape = torch.Size([2])
        Z = torch.linspace(-2, 2, M)[:, None]
        q = kind(M, batch_shape=shape)
        base = v.VariationalStrategy(self, Z.repeat(2, 1, 1) if spread else Z, q)
        if mixed:
            super().__init__(v.LMCVariationalStrategy(base, num_tasks=3, num_latents=2))
        else:
            super().__init__(v.IndependentMultitaskVariationalStrategy(base, num_tasks=2))
        self.mean_module = gp.means.ConstantMean(batch_shape=shape)
        self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel(batch_shape=shape), batch_shape=shape)

    forward = Model.forward
    net = None


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
        """The model ends with its own q, at the optimum by GPyTorch's own objective."""
        _, _, x, y = problem()
        torch.manual_seed(0)
        model = Several(kind, mixed, spread=kind is OWN[0]).double()
        likelihood = gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=3 if mixed else 2).double()
        y = torch.stack([y, y.cos(), y.square()][: 3 if mixed else 2], -1)
        mll = gp.mlls.VariationalELBO(likelihood, model, num_data=N)
        own, start = (
            model.variational_strategy.base_variational_strategy._variational_distribution,
            float(-mll(model(x), y).detach()),
        )
        result = DOORS["train_svgp_in_batches"](model, likelihood, x, y)
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

    def test_one_call(self):
        """Its refusal speaks of the functions, not of q."""
        _, _, x, y = problem()
        model = Several(OWN[0], mixed=True, spread=False).double()
        likelihood = gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=3).double()
        with pytest.raises(PairError, match="for one latent function; got .*Use train_svgp_in_batches."):
            train_svgp(model, likelihood, (x, y[:, None].repeat(1, 3)), progress=False)
