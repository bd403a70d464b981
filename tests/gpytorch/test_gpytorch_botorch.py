"""Models of BoTorch: in a loop, in one call with their transforms, by BoTorch's own call, and with fantasies."""

import math
import warnings
from functools import partial

import pytest
import torch

gp = pytest.importorskip("gpytorch", reason="needs the extra gpytorch: pip install torchngvi[gpytorch]")

from test_gpytorch import NGVD, step  # noqa: E402

from torchngvi.adapters.gpytorch import (  # noqa: E402
    FantasizingModel,
    condition,
    natural_optimizer,
    refine_svgp,
    train_mll,
    train_svgp,
)
from torchngvi.adapters.gpytorch.training import _enforced_bounds  # noqa: E402
from torchngvi.errors import InputError, PairError  # noqa: E402

v, c = gp.variational, gp.constraints
GREATER, LESS, BETWEEN = (partial(kind, transform=None) for kind in (c.GreaterThan, c.LessThan, c.Interval))


class TransformedGP(gp.models.GP):
    """A wrapper in the manner of BoTorch: an ApproximateGP at ``model``, transforms of x and y beside it."""

    class Inner(gp.models.ApproximateGP):
        def __init__(self, inducing_points, outputs, variational_distribution):
            batch = torch.Size([outputs] if outputs > 1 else [])
            if variational_distribution is None:
                variational_distribution = v.CholeskyVariationalDistribution(inducing_points.shape[-2], batch)
            strategy = v.VariationalStrategy(self, inducing_points, variational_distribution)
            if outputs > 1:
                strategy = v.IndependentMultitaskVariationalStrategy(strategy, num_tasks=outputs, task_dim=-1)
            super().__init__(strategy)
            self.mean_module = gp.means.ConstantMean(batch_shape=batch)
            kernel = gp.kernels.MaternKernel(
                nu=2.5, batch_shape=batch, lengthscale_prior=gp.priors.GammaPrior(3.0, 6.0)
            )
            self.covar_module = gp.kernels.ScaleKernel(
                kernel, batch_shape=batch, outputscale_prior=gp.priors.GammaPrior(2.0, 0.15)
            )

        def forward(self, x):
            return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def __init__(self, train_X, train_Y, variational_distribution=None, inducing_points=None):
        super().__init__()
        outputs = train_Y.shape[-1]
        self.low, self.span = train_X.min(0).values, train_X.max(0).values - train_X.min(0).values
        self.center, self.scale = train_Y.mean(0), train_Y.std(0)
        self.model = self.Inner(self.transform_inputs(inducing_points), outputs, variational_distribution)
        self.model.train_inputs = [self.transform_inputs(train_X)]
        self.model.train_targets = self.outcome_transform(train_Y)[0].squeeze(-1)
        multitask = gp.likelihoods.MultitaskGaussianLikelihood
        self.likelihood = multitask(num_tasks=outputs) if outputs > 1 else gp.likelihoods.GaussianLikelihood()
        self.to(train_X)

    def transform_inputs(self, x):
        return (x - self.low) / self.span

    def outcome_transform(self, y):
        return (y - self.center) / self.scale, None

    def forward(self, x):
        return self.model(self.transform_inputs(x) if self.training else x)

    def posterior(self, x):
        f = self.eval().model(self.transform_inputs(x))
        return f.mean * self.scale + self.center


class TestBoTorch:
    @pytest.mark.accuracy
    @pytest.mark.parametrize("outputs", [1, 2])
    def test_a_model_of_its_structure(self, outputs):
        """q at ``variational_distribution=``, the optimizer from an objective over ``model.model``."""
        torch.manual_seed(0)
        x = 50 + 100 * torch.rand(80, 2, dtype=torch.float64)
        y = 1e3 * torch.stack([torch.sin(x.sum(-1) / 30), torch.cos(x[:, 0] / 20)], -1)[:, :outputs] + 5e3
        q = NGVD(20, (outputs,) if outputs > 1 else ())
        model = TransformedGP(x, y, variational_distribution=q, inducing_points=x[:20])
        mll = gp.mlls.VariationalELBO(model.likelihood, model.model, num_data=80)
        natural = natural_optimizer(mll, lr=0.5)
        adam = torch.optim.Adam(model.parameters(), lr=0.05)
        model.train()
        for _ in range(60):
            adam.zero_grad()
            loss = step(model, mll, natural, x, model.outcome_transform(y)[0].squeeze(-1))
            adam.step()
        assert natural.rejections == 0
        assert float(loss) < 0.5
        with torch.no_grad():
            error = (model.posterior(x) - (y if outputs > 1 else y[:, 0])).square().mean().sqrt()
        assert float(error) < 0.15 * float(y.std())
        assert all(p.numel() != 20 * 20 for p in model.parameters())

    def wave(self):
        torch.manual_seed(0)
        x = 50 + 100 * torch.rand(80, 2, dtype=torch.float64)
        return x, 1e3 * torch.sin(x.sum(-1, keepdim=True) / 30) + 5e3

    @pytest.mark.accuracy
    def test_in_one_call(self):
        """Likelihood, rows and transforms are those of the wrapper."""
        x, y = self.wave()
        models = [TransformedGP(x, y, inducing_points=x[:25]) for _ in range(2)]
        results = [train_svgp(models[0], progress=False), train_svgp(models[1], data=(x, y), progress=False)]
        assert results[0].losses == results[1].losses
        assert (models[0].posterior(x) - y[:, 0]).square().mean().sqrt().item() < 0.02 * float(y.std())
        with pytest.raises(InputError, match="the rows for a model of BoTorch are one pair"):
            train_svgp(models[0], data=[(x, y)])
        with pytest.raises(InputError, match="takes a model, a likelihood and data"):
            train_svgp(models[0].model)
        with pytest.raises(
            PairError, match="holds the sparse GP as its model, behind its transforms. Give model.model"
        ):
            refine_svgp(models[0], models[0].likelihood, [(x, y[:, 0])])
        models[0].model.train_targets = None
        with pytest.raises(InputError, match="TransformedGP was built without train_Y"):
            train_svgp(models[0])

    BOUNDS = (GREATER(0.5), 1.4), (LESS(0.2), 0.2), (BETWEEN(0.3, 0.4), 0.4), (GREATER(0.01), 1.4)

    @pytest.mark.accuracy
    @pytest.mark.parametrize(("bound", "wanted"), BOUNDS)
    def test_bounds_that_an_optimizer_is_to_keep(self, bound, wanted):
        """Constraints without a transform, as those of BoTorch, hold, and are as they were at the end."""
        x, y = self.wave()
        model = TransformedGP(x, y, inducing_points=x[:25])
        kernel, seen = model.model.covar_module.base_kernel, []
        kernel.register_constraint("raw_lengthscale", bound)
        kernel.raw_lengthscale.data.fill_(0.3)  # outside of the first two, and at the end of the third
        train_svgp(model, rounds=3, callbacks=[lambda *_: seen.append(kernel.lengthscale.item())], progress=False)
        assert kernel.lengthscale.item() == kernel.raw_lengthscale.item()
        assert not bound.enforced
        assert all(bound.check(torch.tensor(value)) for value in (*seen, kernel.lengthscale.item()))
        assert abs(kernel.lengthscale.item() / wanted - 1) < 0.1

    def bounded(self, bound, value):
        x, y = self.wave()
        model = TransformedGP(x, y, inducing_points=x[:25])
        kernel = model.model.covar_module.base_kernel
        kernel.register_constraint("raw_lengthscale", bound)
        kernel.raw_lengthscale.data.fill_(value)
        return model, kernel

    def test_what_lies_within_bounds_begins_where_it_is(self):
        """And is to the bit as it was where nothing is learnt, as in a call that is refused."""
        model, kernel = self.bounded(BETWEEN(1e-3, 1e3), 0.5)
        with _enforced_bounds(model, model.likelihood) as released:
            assert kernel.raw_lengthscale.item() != 0.5
            assert abs(kernel.lengthscale.item() - 0.5) < 1e-12
            with released():
                assert kernel.raw_lengthscale.item() == 0.5
            assert abs(kernel.lengthscale.item() - 0.5) < 1e-12
        assert kernel.raw_lengthscale.item() == 0.5
        model, kernel = self.bounded(GREATER(1e-4), 5e-5)
        with pytest.raises(InputError, match="NaN"):
            train_svgp(model.model, model.likelihood, (self.wave()[0], self.wave()[1][:, 0] * math.nan), progress=False)
        assert kernel.raw_lengthscale.item() == 5e-5

    @pytest.mark.accuracy
    def test_callbacks_see_what_can_be_loaded(self):
        model, kernel = self.bounded(GREATER(0.01), 0.3)
        kept = []
        keep = lambda *_: kept.append((kernel.raw_lengthscale.item(), kernel.lengthscale.item()))  # noqa: E731
        train_svgp(model, rounds=2, callbacks=[keep], progress=False)
        assert all(raw == value for raw, value in kept)
        assert abs(kept[-1][0] - kernel.raw_lengthscale.item()) < 1e-12

    @pytest.mark.parametrize("bound", [GREATER(-math.inf), GREATER(torch.tensor([0.01], dtype=torch.float64))])
    def test_bounds_of_another_kind(self, bound):
        model, kernel = self.bounded(bound, 0.3)
        with _enforced_bounds(model.model.float()):
            assert kernel.lengthscale.dtype == torch.float32
            assert abs(kernel.lengthscale.item() - 0.3) < 1e-6

    def botorch_model(self):
        models = pytest.importorskip("botorch.models", reason="botorch is not installed")
        from botorch.models import transforms

        class Fantasizing(FantasizingModel, models.SingleTaskVariationalGP):
            pass

        x, y = self.wave()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transforms with mini-batches
            scaled = {"input_transform": transforms.Normalize(2), "outcome_transform": transforms.Standardize(1)}
            return Fantasizing(x, y, inducing_points=25, **scaled), x, y

    @pytest.mark.accuracy
    def test_fit_gpytorch_mll(self):
        model, x, y = self.botorch_model()
        from botorch import fit_gpytorch_mll

        other, *_ = self.botorch_model()
        mll = gp.mlls.VariationalELBO(model.likelihood, model.model, num_data=80)
        assert fit_gpytorch_mll(mll, optimizer=train_mll, optimizer_kwargs={"rounds": 3}) is mll
        train_svgp(other, rounds=3, progress=False)
        assert torch.equal(model.posterior(x).mean, other.posterior(x).mean)
        assert (model.posterior(x).mean - y).square().mean().sqrt().item() < 0.02 * float(y.std())
        with pytest.raises(PairError, match="train_mll maximises the ELBO .*; got PredictiveLogLikelihood"):
            train_mll(gp.mlls.PredictiveLogLikelihood(model.likelihood, model.model, num_data=80))

    @pytest.mark.accuracy
    def test_fantasies(self):
        """As rows that are added, in the units of the user; functions that look ahead have gradients at its inputs."""
        model, x, y = self.botorch_model()
        from botorch.acquisition import qKnowledgeGradient
        from botorch.sampling import SobolQMCNormalSampler

        train_svgp(model, rounds=1, progress=False)
        before, new = model.posterior(x).mean.detach(), x[:6].reshape(3, 2, 2) + 5.0
        fantasy = model.fantasize(new, SobolQMCNormalSampler(torch.Size([4]), seed=0))
        assert fantasy.batch_shape == (4, 3)
        assert fantasy.posterior(x[:1]).mean.shape == (4, 3, 1, 1)
        one = model.condition_on_observations(new[0], y[:2] + 100.0)
        condition(
            model.model,
            model.likelihood,
            model.transform_inputs(new[0]),
            model.outcome_transform(y[:2] + 100.0)[0][:, 0],
        )
        assert torch.allclose(one.posterior(x).mean, model.posterior(x).mean)
        assert not torch.allclose(model.posterior(x).mean, before)
        candidates = x[None, :5].clone().requires_grad_()  # of one step, and of four fantasies
        qKnowledgeGradient(model, num_fantasies=4)(candidates).sum().backward()
        assert float(candidates.grad[0, 0].abs().max()) > 0.0

    @pytest.mark.filterwarnings("ignore:Data .outcome observations. is not standardized")
    def test_botorch(self):
        """The class itself, where it is installed."""
        models = pytest.importorskip("botorch.models", reason="botorch is not installed")
        torch.manual_seed(0)
        x = torch.rand(60, 2, dtype=torch.float64)
        y = torch.sin(6 * x.sum(-1, keepdim=True))
        model = models.SingleTaskVariationalGP(x, y, variational_distribution=NGVD(15), inducing_points=15)
        mll = gp.mlls.VariationalELBO(model.likelihood, model.model, num_data=60)
        natural = natural_optimizer(mll, lr=0.5)
        adam = torch.optim.Adam([*model.parameters()], lr=0.05)
        model.train()
        losses = []
        for _ in range(40):
            adam.zero_grad()
            losses.append(float(step(model, mll, natural, x, y[:, 0])))
            adam.step()
        assert losses[-1] < losses[0] - 0.5
        assert model.posterior(x).mean.shape == (60, 1)
