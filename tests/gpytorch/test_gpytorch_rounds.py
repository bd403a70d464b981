"""Hyper-parameters without an optimizer: where the rounds end, what stays, what may be given, what is refused."""

import copy
import math
import re
from dataclasses import replace

import pytest
import torch
import torch.utils.data as tud
from sparse_models import SparseModel, tightening

from torchngvi.adapters.gpytorch import (
    NaturalGradientVariationalDistribution,
    engines,
    refine_svgp,
    train_svgp,
    train_svgp_in_batches,
)
from torchngvi.adapters.gpytorch.engines import Rounds
from torchngvi.adapters.gpytorch.model import lent_posterior
from torchngvi.adapters.gpytorch.sparse_gp import ProfiledELBO
from torchngvi.adapters.gpytorch.starts import choose_inducing_points, left_open, pivots
from torchngvi.errors import InputError, PairError
from torchngvi.fitting import Evaluations

gp = pytest.importorskip("gpytorch")
N, M = 200, 8
WHITENED, UNWHITENED = gp.variational.VariationalStrategy, gp.variational.UnwhitenedVariationalStrategy
OWN = [
    gp.variational.CholeskyVariationalDistribution,
    gp.variational.NaturalVariationalDistribution,
    gp.variational.TrilNaturalVariationalDistribution,
]
pytestmark = pytest.mark.usefixtures("exact_probit")


@pytest.fixture
def short(monkeypatch):
    """Rounds of few iterations."""
    monkeypatch.setattr(engines, "_ROUNDS", engines.RoundSettings(iterations=4))


class Model(SparseModel):
    def __init__(self, kind=NaturalGradientVariationalDistribution, Z=None, learn=True, shape=(), strategy=WHITENED):
        Z = torch.linspace(-2, 2, M)[:, None] if Z is None else Z
        q = kind(len(Z), torch.Size(shape))
        super().__init__(q, Z, strategy=strategy, learn_inducing_locations=learn)


def data(name="gaussian"):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(N, 1, generator=generator).double() - 2
    y = torch.sin(3 * x[:, 0]) + 0.2 * torch.randn(N, generator=generator).double()
    if name == "bernoulli":
        y = (y > 0).double()
    if name == "student":
        y[::20] += 3.0
    return x, y


def likelihood_of(name="gaussian"):
    kinds = {
        "gaussian": gp.likelihoods.GaussianLikelihood,
        "bernoulli": gp.likelihoods.BernoulliLikelihood,
        "student": gp.likelihoods.StudentTLikelihood,
    }
    return kinds[name]().double()


def set_up(name="gaussian", **options):
    torch.manual_seed(0)
    return Model(**options).double(), likelihood_of(name), data(name)


def learn(model, likelihood, rows, **options):
    return train_svgp(model, likelihood, rows, progress=False, **options)


def loss_of(model, likelihood, x, y):
    """GPyTorch's own: the negative ELBO per datum with priors; for Gaussian noise less what the tighter bound adds."""
    model.train()
    likelihood.train()
    elbo = gp.mlls.VariationalELBO(likelihood, model, num_data=len(y))(model(x), y)
    return -elbo - tightening(model, likelihood, x) / len(y)


def steepest(model, likelihood, x, y):
    """The largest entry of the gradient of that loss."""
    parameters = [p for p in (*model.parameters(), *likelihood.parameters()) if p.requires_grad]
    return max(float(g.abs().max()) for g in torch.autograd.grad(loss_of(model, likelihood, x, y), parameters))


class TestWhereItEnds:
    @pytest.mark.accuracy
    @pytest.mark.parametrize("name", ["gaussian", "bernoulli", "student"])
    def test_at_a_stationary_point(self, name):
        """Of GPyTorch's own objective in every parameter, with the loss that it was told to have, and q refined."""
        model, likelihood, rows = set_up(name)
        before = copy.deepcopy((model, likelihood))
        refine_svgp(*before, [rows], progress=False)
        result = learn(model, likelihood, rows)
        assert result.refined.converged
        told = 1e-9 if name == "gaussian" else 3 * engines._ROUNDS.tolerance
        assert abs(float(loss_of(model, likelihood, *rows).detach()) - result.losses[-1]) < told
        assert result.losses[-1] < float(loss_of(*before, *rows).detach()) - 0.1
        assert steepest(model, likelihood, *rows) < 0.02 * steepest(*before, *rows)
        assert result.reason.startswith(
            "training ended because a round on all rows has raised the bound by less than 0.001 nats a d"
        )
        assert result.converged
        assert str(result).startswith(f"{len(result.losses)} rounds, negative ELBO per datum {result.losses[-1]:.4f}, ")

    @pytest.mark.accuracy
    @pytest.mark.usefixtures("short")
    def test_rows_that_the_inducing_points_leave_unexplained(self):
        """Six points for three far apart stretches of rows, beside a small noise: the reason says what to raise."""
        x = torch.cat([part + data()[0] for part in (0.0, 20.0, 40.0)])
        model, likelihood = Model(Z=torch.zeros(6, 1)).double(), likelihood_of()
        likelihood.noise = 1e-3
        likelihood.requires_grad_(False)
        text = r"; 6 inducing points leave \d+% of the rows unexplained, whose variance given them is more than 10 "
        assert re.search(text, learn(model, likelihood, (x, torch.sin(x[:, 0]))).reason)
        assert "inducing points" not in learn(*set_up()).reason

    @pytest.mark.accuracy
    def test_the_verdicts_are_on_q(self):
        """They agree with the sentence, and summary() examines q as the sentence says, once."""
        model, likelihood, rows = set_up("bernoulli")
        result = learn(model, likelihood, rows, rounds=1)
        assert result.converged
        assert bool(result.members_converged)
        assert "; q converged, " in str(result)
        assert str(result).endswith("was not examined: summary() of the result does it.")
        assert result.verdict.word == "not examined"
        first, *table = result.summary().splitlines()
        assert first == str(result)
        assert first.startswith("1 rounds, negative ELBO per datum")
        assert "was not examined" not in first
        assert table
        assert result.verdict is result.refined.verdict is not None
        assert result.certificate.bound < 1e-3
        assert result.summary().splitlines() == [first, *table]

    def test_the_noise_is_found(self):
        model, likelihood, rows = set_up()
        learn(model, likelihood, rows)
        assert math.isclose(float(likelihood.noise.detach().sqrt()), 0.2, rel_tol=0.15)

    @pytest.mark.accuracy
    def test_in_float32(self):
        """Near the end in float64; q and parameters have the dtype of the model."""
        wanted = learn(*set_up()).losses[-1]
        model, likelihood, (x, y) = set_up()
        result = learn(model.float(), likelihood.float(), (x.float(), y.float()))
        assert abs(result.losses[-1] - wanted) < 0.01
        assert {p.dtype for p in (*model.parameters(), *model.buffers()) if p.is_floating_point()} == {torch.float32}

    @pytest.mark.usefixtures("short")
    @pytest.mark.parametrize("kind", OWN)
    def test_with_the_distributions_of_gpytorch(self, kind):
        """The same end as with ours, held by the model's own object, whose parameters stay the same tensors."""
        ours = set_up()
        learn(*ours, rounds=2)
        model, likelihood, rows = set_up(kind=kind)
        own = model.variational_strategy._variational_distribution
        names, tensors = list(model.state_dict()), [id(p) for p in model.parameters()]
        result = learn(model, likelihood, rows, rounds=2)
        assert model.variational_strategy._variational_distribution is own
        assert list(model.state_dict()) == names
        assert [id(p) for p in model.parameters()] == tensors
        assert own.mean_init_std == 1e-3
        for a, b in zip(ours[0].hyperparameters(), model.hyperparameters(), strict=True):
            assert float((a - b).detach().abs().max()) < 1e-9
        assert abs(float(loss_of(model, likelihood, *rows).detach()) - result.losses[-1]) < 1e-6

    @pytest.mark.parametrize(("kind", "strategy"), [*((kind, WHITENED) for kind in OWN), (OWN[0], UNWHITENED)])
    def test_refining_the_distributions_of_gpytorch(self, kind, strategy):
        """A q that is optimal already is left as it is, though Adam may leave a negative entry on a diagonal."""
        model, likelihood, rows = set_up("bernoulli", kind=kind, strategy=strategy)
        assert refine_svgp(model, likelihood, [rows], progress=False).converged
        if kind is OWN[0]:
            model.variational_strategy._variational_distribution.chol_variational_covar.data[:, 3] *= -1
        first = float(loss_of(model, likelihood, *rows).detach())
        assert refine_svgp(model, likelihood, [rows], progress=False).evaluations == 1
        assert abs(float(loss_of(model, likelihood, *rows).detach()) - first) < (1e-9 if strategy is WHITENED else 1e-6)

    @pytest.mark.sparse(3)
    @pytest.mark.usefixtures("short")
    @pytest.mark.parametrize("learnt", [True, False])
    @pytest.mark.parametrize("kind", [OWN[0], NaturalGradientVariationalDistribution])
    def test_the_unwhitened_strategy(self, learnt, kind):
        """The same end, held by its own q of the values; the strategy and its parameters are the same objects."""
        wanted = learn(*set_up(learn=learnt), rounds=2).losses
        model, likelihood, rows = set_up(kind=kind, strategy=UNWHITENED, learn=learnt)
        strategy, Z = model.variational_strategy, model.variational_strategy.inducing_points
        result = learn(model, likelihood, rows, rounds=2)
        assert max(abs(a - b) for a, b in zip(result.losses, wanted, strict=True)) < 1e-9
        assert model.variational_strategy is strategy
        assert model.variational_strategy.inducing_points is Z
        # its own bound has no jitter beside k(x, x)
        assert abs(float(loss_of(model, likelihood, *rows).detach()) - result.losses[-1]) < 2e-5
        again = refine_svgp(model, likelihood, [rows], progress=False)
        added = float(tightening(model, likelihood, rows[0]).detach())
        assert abs((again.loss - added) / N - result.losses[-1]) < 1e-9

    def test_a_q_of_this_library_is_the_one_that_is_trained(self):
        """Nothing is put in its place, though it may be registered as one of GPyTorch's; but for q of u, one of v."""
        model, _, _ = set_up()
        own = model.variational_strategy._variational_distribution
        with lent_posterior(model):
            assert model.variational_strategy._variational_distribution is own
        model, _, _ = set_up(strategy=UNWHITENED)
        own = model.variational_strategy
        with lent_posterior(model):
            assert isinstance(model.variational_strategy, WHITENED)
        assert model.variational_strategy is own

    @pytest.mark.usefixtures("short")
    def test_a_noise_for_each_row(self):
        """All rows at once, in their order."""
        model, _, (x, y) = set_up()
        likelihood = gp.likelihoods.FixedNoiseGaussianLikelihood(torch.linspace(0.02, 0.06, N).double())
        result = learn(model, likelihood, (x, y))
        assert abs(float(loss_of(model, likelihood, x, y).detach()) - result.losses[-1]) < 1e-6


class TestWhatStays:
    @pytest.mark.usefixtures("short")
    def test_frozen_parameters(self):
        """A length scale, the noise and inducing points that are told to stay do."""
        model, likelihood, rows = set_up(learn=False)
        model.covar_module.base_kernel.raw_lengthscale.requires_grad_(False)
        likelihood.raw_noise.requires_grad_(False)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        learn(model, likelihood, rows)
        moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
        q = "variational_strategy._variational_distribution.posterior."
        assert {name for name in moved if not name.startswith(q)} == {
            "mean_module.raw_constant",
            "covar_module.raw_outputscale",
            "variational_strategy.variational_params_initialized",
        }
        assert abs(float(likelihood.noise) - 0.6933) < 1e-3

    def test_nothing_is_learnt(self):
        """Then q is refined alone."""
        model, likelihood, rows = set_up()
        for p in (*model.parameters(), *likelihood.parameters()):
            p.requires_grad_(False)
        result = learn(model, likelihood, rows)
        assert result.losses == []
        assert result.refined.converged

    @pytest.mark.accuracy
    def test_priors(self):
        """They weigh as in GPyTorch's objective: the end is stationary for it, and elsewhere than without them."""
        free = set_up()
        learn(*free)
        model, likelihood, rows = set_up()
        prior = gp.priors.LogNormalPrior(3.0, 0.05)
        model.covar_module.base_kernel.register_prior("long", prior, "lengthscale")
        result = learn(model, likelihood, rows)
        lengths = [float(m.covar_module.base_kernel.lengthscale.detach()) for m in (free[0], model)]
        assert lengths[1] > 1.5 * lengths[0]
        assert abs(float(loss_of(model, likelihood, *rows).detach()) - result.losses[-1]) < 1e-6
        assert steepest(model, likelihood, *rows) < 0.01

    def test_constraints(self):
        model, _, rows = set_up()
        low = gp.constraints.Interval(0.1, 1.0)
        likelihood = gp.likelihoods.GaussianLikelihood(noise_constraint=low).double()
        learn(model, likelihood, rows)
        assert 0.1 <= float(likelihood.noise.detach()) < 0.11  # without it 0.04


class TestParts:
    def test_the_rows_of_each_round(self, monkeypatch):
        """Doubling to all of them, or to what the memory allows; the first part is of the second."""
        model, likelihood, (x, y) = set_up()
        monkeypatch.setattr(engines, "_ROUNDS", replace(engines._ROUNDS, first=40))
        engine = Rounds(model, likelihood, x, y, 10)
        assert [engine.rows(k) for k in range(5)] == [40, 80, 200, 200, 200]
        monkeypatch.setattr(engines, "ENTRIES_AT_ONCE", 100 * M)
        assert [engine.rows(k) for k in range(4)] == [40, 100, 100, 100]
        assert [engine.rows(0, first) for first in (60, 70, 150)] == [60, 100, 100]  # as inducing="auto" asks
        first, second = engine._part(0), engine._part(1)
        assert torch.equal(second.x[:40], first.x)
        assert first.weight == N / 40
        assert learn(model, likelihood, (x, y)).reason.startswith(
            "training ended because a round on 100 rows has raised the bound by"
        )

    def test_a_trial_that_cannot_be_evaluated(self, monkeypatch):
        """The line search turns back from it, and the round ends below where it began."""
        asked, call = [], ProfiledELBO.__call__

        def sometimes(self):
            asked.append(1)
            if len(asked) == 7:
                raise InputError("K_ZZ is not positive definite")
            value = call(self)
            return value * torch.nan if len(asked) == 8 else value

        monkeypatch.setattr(ProfiledELBO, "__call__", sometimes)
        model, likelihood, (x, y) = set_up()
        engine = Rounds(model, likelihood, x, y, 10)
        engine.advance()
        assert engine.gain > 0.8
        assert engine.evaluated < 40
        assert all(bool(p.isfinite().all()) for p in engine.learnt)

    @pytest.mark.accuracy
    @pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
    def test_a_trial_at_which_gpytorch_cannot_evaluate_the_kernel(self):
        """The first line search sends length scales to zero, where a sum with a linear kernel has no factor."""
        generator, kernels = torch.Generator().manual_seed(2), gp.kernels
        x = torch.randn(300, 4, generator=generator)
        f = torch.sin(4 * x[:, 0]) + 0.7 * x[:, 1] + 0.5 * (x[:, 2].square() - 1)
        torch.randn(300, generator=generator)
        y = (f + 0.7 * torch.randn(300, generator=generator) > 0).double()
        torch.manual_seed(0)
        model = Model(kind=OWN[0], Z=torch.zeros(20, 4))
        model.covar_module = (
            kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=4))
            + kernels.ScaleKernel(kernels.PeriodicKernel(active_dims=[0]))
            + kernels.ScaleKernel(kernels.LinearKernel(active_dims=[1]))
        )
        likelihood = likelihood_of("bernoulli")
        assert (
            learn(model.double(), likelihood, (x.double(), 2 * y - 1), rounds=1).losses[-1] < 0.67
        )  # 0.69 is a constant's

    @pytest.mark.accuracy
    def test_student_t_without_noise(self):
        """Trials of the line search end at a bad q, from which the search does not come back: the rounds go on."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(200, 1, generator=generator).double()
        y = torch.tanh(x[:, 0] * torch.randn(1, generator=generator).double())
        y = (y - y.mean()) / y.std()
        torch.manual_seed(0)
        model, likelihood = Model(Z=torch.zeros(15, 1)).double(), gp.likelihoods.StudentTLikelihood().double()
        result = learn(model, likelihood, (x, y), rounds=3)
        assert result.losses[-1] < -4.0  # 0.85 is that of the noise it begins with
        assert likelihood.noise.item() < 1e-4

    def test_a_round_that_only_rises(self, monkeypatch):
        """Is undone, and the memory of L-BFGS with it."""
        model, likelihood, (x, y) = set_up()
        engine = Rounds(model, likelihood, x, y, 10)
        before = [p.detach().clone() for p in engine.learnt]

        def astray(evaluate):
            start = evaluate()
            with torch.no_grad():
                for p in engine.learnt:
                    p.add_(5.0)
            engine.optimizer.state["memory"] = 1
            return start

        monkeypatch.setattr(engine.optimizer, "step", astray)
        engine.advance()
        assert engine.gain == 0.0
        assert all(torch.equal(a, b) for a, b in zip(engine.learnt, before, strict=True))
        assert not engine.optimizer.state

    @pytest.mark.accuracy
    @pytest.mark.filterwarnings("ignore::torchngvi.errors.ScaleWarning")
    def test_a_memory_that_leads_nowhere(self):
        """Is dropped: beside one target of 10,000 the noise has to become large, and does not stop on the way."""
        torch.manual_seed(0)
        x, y = data()
        y[-1] += 1e4
        model, likelihood = Model(Z=torch.zeros(15, 1)).double(), likelihood_of()
        assert learn(model, likelihood, (x, y)).losses[-1] < 8.2  # that of a constant is 8.0
        assert steepest(model, likelihood, x, y) < 0.01

    @pytest.mark.accuracy
    def test_inducing_points_left_open(self):
        """They come from rows of the data; others stay where they are."""
        x, y = data()
        strategy = Model(Z=torch.zeros(M, 1), learn=False).double().variational_strategy
        assert left_open(strategy)
        choose_inducing_points(strategy, x)
        Z = strategy.inducing_points
        assert len(set(Z[:, 0].tolist())) == M
        assert set(Z[:, 0].tolist()) <= set(x[:, 0].tolist())
        assert not left_open(strategy)
        assert not left_open(Model().variational_strategy)
        model, likelihood, rows = set_up(Z=torch.zeros(M, 1))
        assert abs(learn(model, likelihood, rows).losses[-1] - learn(*set_up()).losses[-1]) < 0.02
        with pytest.raises(InputError, match="8 inducing points cannot be chosen among 5 rows of data: build the"):
            learn(Model(Z=torch.zeros(M, 1)).double(), likelihood_of(), (x[:5], y[:5]))

    def test_pivots(self):
        """Each has the largest variance given those before it, by a dense formula; rows that repeat come last."""
        x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0)).double()
        x[5:8] = x[0]
        K = (-0.5 * torch.cdist(x, x).square()).exp() * (1 + x[:, 0].abs())[:, None] * (1 + x[:, 0].abs())
        found = pivots(K, 12).tolist()
        assert sorted(found) == list(range(12))
        assert len({0, 5, 6, 7} & set(found[-3:])) == 3
        for k in range(6):
            past = found[:k]
            rest = K.diagonal() - (K[:, past] @ torch.linalg.solve(K[past][:, past], K[past])).diagonal()
            assert math.isclose(float(rest[found[k]]), float(rest.max()), rel_tol=1e-9)


class TestTheLoop:
    @pytest.mark.accuracy
    @pytest.mark.usefixtures("short")
    def test_what_the_data_may_be(self):
        """A pair, a list of batches, a loader, one feature as a vector: the same rows, the same end."""
        x, y = data()
        dataset = tud.TensorDataset(x, y)
        given = [
            (x, y),
            [(x, y)],
            list(zip(x.split(50), y.split(50), strict=True)),
            tud.DataLoader(dataset, batch_size=30, shuffle=True),
            tud.DataLoader(tud.Subset(dataset, range(N)), batch_size=30),
            (x[:, 0], y),
        ]
        losses = [learn(*set_up()[:2], rows, rounds=2).losses for rows in given]
        assert all(each == losses[0] for each in losses)

    @pytest.mark.usefixtures("short")
    def test_the_end_by_rounds_a_criterion_or_a_callback(self):
        model, likelihood, rows = set_up()
        result = learn(model, likelihood, rows, rounds=2)
        assert len(result.losses) == 2
        assert result.reason.startswith(
            "training ended because the budget of 2 gradients is used up (a negative bound per datum of "
        )
        assert len(learn(*set_up()[:2], rows, stop=Evaluations(5)).losses) == 1
        seen = []
        new = torch.linspace(-1.5, 1.5, 5)[:, None].double()
        model, likelihood, _ = set_up()

        def look(number, loss):
            model.eval()
            with torch.no_grad():
                error = float((model(new).mean - torch.sin(3 * new[:, 0])).abs().max())
            seen.append((number, loss, error))
            return number == 1

        result = learn(model, likelihood, rows, callbacks=[look])
        assert [(number, loss) for number, loss, _ in seen] == list(enumerate(result.losses))
        assert len(seen) == 2
        assert seen[1][2] < 0.2  # q is that of the round

    @pytest.mark.usefixtures("short")
    def test_an_interrupt_goes_back_to_the_last_round(self, monkeypatch):
        once = set_up()
        learn(*once, rounds=1)
        asked, call = [], ProfiledELBO.__call__
        rounds = []

        def counted(self):
            asked.append(1)
            if rounds and len(asked) > rounds[0] + 2:
                raise KeyboardInterrupt
            return call(self)

        monkeypatch.setattr(ProfiledELBO, "__call__", counted)
        model, likelihood, rows = set_up()
        result = learn(model, likelihood, rows, callbacks=[lambda *_: rounds.append(len(asked))])
        assert result.interrupted
        assert result.refined is None
        assert len(result.losses) == 1
        assert str(result).startswith("1 rounds, then interrupted, negative ELBO per datum")
        for a, b in zip(once[0].parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)

    @pytest.mark.accuracy
    @pytest.mark.usefixtures("short")
    @pytest.mark.parametrize("name", ["gaussian", "bernoulli"])
    def test_from_a_checkpoint(self, tmp_path, name):
        """Bit for bit, and not for other data or another method."""
        path = tmp_path / "run.pt"
        whole = set_up(name)
        wanted = learn(*whole, rounds=3)
        learn(*set_up(name), rounds=1, checkpoint=path)
        model, likelihood, (x, y) = set_up(name)
        result = learn(model, likelihood, (x, y), rounds=3, checkpoint=path)
        assert result.losses == wanted.losses
        for a, b in zip(whole[0].state_dict().values(), model.state_dict().values(), strict=True):
            assert torch.equal(a, b)
        with pytest.raises(InputError, match=r"its fingerprint of the data is \w+, here it is \w+"):
            learn(*set_up(name)[:2], (x, 1 - y), checkpoint=path)
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        with pytest.raises(InputError, match="its method is train_svgp, hyper-parameters by L-BFGS, here it is train"):
            train_svgp_in_batches(model, likelihood, [(x, y)], N, adam, progress=False, checkpoint=path)


class TestRefusals:
    def test_half_of_the_other_way(self):
        model, likelihood, rows = set_up()
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        with pytest.raises(InputError, match="num_data counts the rows of an epoch and must .*; got None."):
            train_svgp_in_batches(model, likelihood, [rows], None, adam, progress=False)
        with pytest.raises(InputError, match="hyper_optimizer is a torch optimizer .*; got NoneType. Give torch"):
            train_svgp_in_batches(model, likelihood, [rows], N, None, progress=False)

    def test_data(self):
        model, likelihood, (x, y) = set_up()
        with pytest.raises(InputError, match="train_svgp got no data: the batches are empty. Give one pair"):
            learn(model, likelihood, [])
        with pytest.raises(InputError, match="batches are pairs"):
            learn(model, likelihood, x)
        with pytest.raises(InputError, match=r"takes inputs and targets as one pair; got two tensors\. Write train"):
            train_svgp(model, likelihood, x, y, progress=False)
        y[0] = torch.inf
        with pytest.raises(InputError, match="the ELBO is not finite at these hyper-parameters: check the targets"):
            learn(model, likelihood, (x, y))
        model, likelihood, (x, y) = set_up()
        model.covar_module.raw_outputscale.register_hook(lambda gradient: gradient * torch.nan)
        with pytest.raises(InputError, match="at these hyper-parameters, or its gradient is not finite: check the"):
            learn(model, likelihood, (x, y))

    def test_models(self):
        x, y = data()
        mean_field = Model(kind=gp.variational.MeanFieldVariationalDistribution).double()
        with pytest.raises(PairError, match="the model's q is a MeanFieldVariationalDistribution. Give its strategy a"):
            learn(mean_field, likelihood_of(), (x, y))
