"""Which rows `train_svgp` learns from without an optimizer, and what is the model's own while it runs."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.utils.data as tud

gp = pytest.importorskip("gpytorch")

from test_gpytorch_rounds import OWN, UNWHITENED, M, Model, N, data, learn, likelihood_of, loss_of, set_up  # noqa: E402

from torchngvi.adapters.gpytorch import engines, refine_svgp, starts, training  # noqa: E402
from torchngvi.adapters.gpytorch.starts import choose_inducing_points  # noqa: E402
from torchngvi.errors import InputError, PairError  # noqa: E402


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Rounds of few iterations."""
    monkeypatch.setattr(engines, "_ROUNDS", engines.RoundSettings(iterations=4))


def of_the_first(first):
    """The losses of a run on the first rows."""
    x, y = data()
    return learn(*set_up()[:2], (x[:first], y[:first]), rounds=1).losses


class TestLoaders:
    @pytest.mark.parametrize("kind", ["sampler", "batch sampler", "subset"])
    def test_rows_left_out(self, kind):
        """Rows that a sampler leaves out, as those kept for a test, are not learnt from."""
        dataset = tud.TensorDataset(*data())
        if kind == "subset":
            loader = tud.DataLoader(tud.Subset(dataset, range(60)), batch_size=20)
        elif kind == "sampler":
            loader = tud.DataLoader(dataset, batch_size=20, sampler=range(60))
        else:
            loader = tud.DataLoader(dataset, batch_sampler=tud.BatchSampler(range(60), 20, False))
        assert learn(*set_up()[:2], loader, rounds=1).losses == of_the_first(60)

    def test_what_a_loader_does_to_rows(self):
        """A function that collates them is called."""

        def scaled(rows):
            x, y = tud.default_collate(rows)
            return x, 2 * y

        x, y = data()
        loader = tud.DataLoader(tud.TensorDataset(x, y), batch_size=20, collate_fn=scaled)
        assert learn(*set_up()[:2], loader, rounds=1).losses == learn(*set_up()[:2], (x, 2 * y), rounds=1).losses

    def test_draws_with_replacement(self):
        """Are taken as they come."""
        x, y = data()
        sampler = tud.RandomSampler(range(N), replacement=True, generator=torch.Generator().manual_seed(1))
        drawn = torch.tensor(list(tud.RandomSampler(range(N), True, generator=torch.Generator().manual_seed(1))))
        loader = tud.DataLoader(tud.TensorDataset(x, y), batch_size=20, sampler=sampler)
        wanted = learn(*set_up()[:2], (x[drawn], y[drawn]), rounds=1).losses
        assert learn(*set_up()[:2], loader, rounds=1).losses == wanted

    @pytest.mark.parametrize("refine", [False, True])
    def test_a_noise_for_each_row_is_not_shuffled(self, refine):
        model, _, (x, y) = set_up()
        likelihood = gp.likelihoods.FixedNoiseGaussianLikelihood(torch.linspace(0.02, 0.06, N).double())
        dataset = tud.TensorDataset(x, y)
        do = (lambda rows: refine_svgp(model, likelihood, rows, progress=False)) if refine else None
        do = do or (lambda rows: learn(model, likelihood, rows, rounds=1))
        for shuffled in (
            tud.DataLoader(dataset, batch_size=N, shuffle=True),
            tud.DataLoader(dataset, batch_sampler=tud.BatchSampler(tud.RandomSampler(dataset), N, False)),
        ):
            with pytest.raises(InputError, match="noise for each row in their order, and the DataLoader gives the row"):
                do(shuffled)
        do(tud.DataLoader(dataset, batch_size=N))

    def test_a_noise_for_each_of_many_rows(self, monkeypatch):
        """More than a visit of `refine_svgp` has, which is exact as for fewer."""
        model, _, (x, y) = set_up()
        likelihood = gp.likelihoods.FixedNoiseGaussianLikelihood(torch.linspace(0.02, 0.06, N).double())
        monkeypatch.setattr(training, "_REFINING", training.RefineSettings(rows=64))
        assert refine_svgp(model, likelihood, [(x, y)], progress=False).evaluations == 1


class TestInducingPoints:
    @pytest.mark.parametrize("how", ["frozen", "no rounds"])
    def test_are_chosen_where_nothing_is_learnt(self, how):
        """Points left open are none: q at the origin alone would explain nothing."""
        model, likelihood, (x, y) = set_up(Z=torch.zeros(M, 1))
        if how == "frozen":
            for p in (*model.parameters(), *likelihood.parameters()):
                p.requires_grad_(False)
        assert learn(model, likelihood, (x, y), rounds=10 if how == "frozen" else 0).refined.converged
        assert len(set(model.variational_strategy.inducing_points[:, 0].tolist())) == M

    def test_from_all_over_the_data(self, monkeypatch):
        """In whatever order the rows are, as those with a noise of their own."""
        monkeypatch.setattr(starts, "STARTS", starts.StartSettings(rows=50))
        x = torch.linspace(-2, 2, N).double()[:, None]
        strategy = Model(Z=torch.zeros(M, 1)).double().variational_strategy
        choose_inducing_points(strategy, x)
        assert float(strategy.inducing_points.detach().max()) > 1.5

    def test_of_several_functions(self):
        """Are the same rows for all of them."""
        model = Model(shape=(2,)).double()
        model.variational_strategy.inducing_points.data = torch.zeros(2, M, 1).double()
        learn(model, likelihood_of(), data(), rounds=0)
        first, second = model.variational_strategy.inducing_points[..., 0].tolist()
        assert first == second
        assert len(set(first)) == M


class TestRefusals:
    def test_data_with_a_batch_shape(self):
        model, likelihood, (x, y) = set_up()
        text = r"takes inputs \(rows, features\) and targets \(rows,\); got \(3, 200, 1\) and \(3, 200\)"
        with pytest.raises(InputError, match=text):
            learn(model, likelihood, (x.expand(3, -1, -1), y.expand(3, -1)))

    def test_a_missing_target_before_anything_is_learnt(self, monkeypatch):
        """Wherever it is."""
        monkeypatch.setattr(engines, "_ROUNDS", replace(engines._ROUNDS, first=32))
        model, likelihood, (x, y) = set_up()
        y[torch.randperm(N, generator=torch.Generator().manual_seed(0))[-1]] = torch.nan
        before = copy.deepcopy(model.covar_module.state_dict())
        with pytest.raises(InputError, match="1 of 200 targets are NaN"):
            learn(model, likelihood, (x, y))
        assert all(torch.equal(part, before[name]) for name, part in model.covar_module.state_dict().items())

    def test_autocast(self):
        """Also of a model that has been trained."""
        model, likelihood, (x, y) = set_up()
        model, likelihood, rows = model.float(), likelihood.float(), (x.float(), y.float())
        learn(model, likelihood, rows, rounds=1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with pytest.raises(InputError, match="autocast evaluates the kernel matrix"):
                learn(model, likelihood, rows)
            with pytest.raises(InputError, match="autocast evaluates the kernel matrix"):
                refine_svgp(model, likelihood, [rows], progress=False)

    def test_a_checkpoint_with_another_noise_for_each_row(self, tmp_path):
        x, y = data()
        noise, path = torch.linspace(0.02, 0.06, N).double(), tmp_path / "run.pt"
        kind = gp.likelihoods.FixedNoiseGaussianLikelihood
        learn(set_up()[0], kind(noise), (x, y), rounds=1, checkpoint=path)
        with pytest.raises(InputError, match="its fingerprint of the data is"):
            learn(set_up()[0], kind(2 * noise), (x, y), rounds=1, checkpoint=path)


class TestTheModelsOwn:
    @pytest.mark.parametrize("strategy", [None, UNWHITENED])
    def test_callbacks_see_it(self, strategy):
        """Its own q and strategy, with what was found: a state that is saved can be loaded later."""
        options = {} if strategy is None else {"strategy": strategy}
        model, likelihood, (x, y) = set_up(kind=OWN[0], **options)
        own, saved = model.variational_strategy._variational_distribution, []

        def keep(number, loss):
            assert model.variational_strategy._variational_distribution is own
            model.eval()
            saved.append((loss, copy.deepcopy((model.state_dict(), likelihood.state_dict()))))

        wanted = learn(*set_up(kind=OWN[0], **options)[:2], (x, y), rounds=2).losses
        assert learn(model, likelihood, (x, y), rounds=2, callbacks=[keep]).losses == wanted
        assert own.training
        loss, (first, noise) = saved[0]
        model.load_state_dict(first)
        likelihood.load_state_dict(noise)
        assert abs(float(loss_of(model, likelihood, x, y).detach()) - loss) < 2e-5

    @pytest.mark.parametrize("strategy", [None, UNWHITENED])
    def test_one_mode_afterwards(self, strategy):
        """A model that was in evaluation mode is in training mode as a whole, and keeps no older values."""
        model, likelihood, rows = set_up(kind=OWN[0], **({} if strategy is None else {"strategy": strategy}))
        model.eval()
        learn(model, likelihood, rows, rounds=1)
        assert all(module.training for module in model.modules())

    def test_a_q_with_a_formula_of_its_own(self):
        """Is not taken for the Gaussian from which its class inherits, nor a strategy for the one it comes from."""

        class Shifted(OWN[0]):
            def forward(self):
                q = super().forward()
                return gp.distributions.MultivariateNormal(q.mean + 1.0, q.lazy_covariance_matrix)

        class Same(OWN[0]):
            pass

        class Doubled(UNWHITENED):
            def forward(self, x, *arguments, **options):
                return super().forward(2 * x, *arguments, **options)

        rows = data()
        assert learn(Model(kind=Same).double(), likelihood_of(), rows, rounds=1).refined.converged
        with pytest.raises(PairError, match="the model's q is a Shifted. Give its strategy a Natural"):
            learn(Model(kind=Shifted).double(), likelihood_of(), rows)
        with pytest.raises(PairError, match="for the whitened VariationalStrategy; got Doubled"):
            learn(Model(kind=OWN[0], strategy=Doubled).double(), likelihood_of(), rows)
