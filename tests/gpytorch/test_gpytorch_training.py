"""Joint training: the length of natural steps, interruption and resumption, what cannot be trained on."""

import copy
import errno
import math
import os
import random

import pytest
import torch
import torch.utils.data as tud
from sparse_models import SparseModel, several

from torchngvi import VN
from torchngvi.adapters.gpytorch import (
    NaturalGradientVariationalDistribution,
    SparseGP,
    refine_svgp,
    train_svgp_in_batches,
    variational_posteriors,
)
from torchngvi.adapters.gpytorch.engines import Epochs, NaturalSteps, penalty
from torchngvi.adapters.gpytorch.training import TrainingResult
from torchngvi.errors import CheckpointWarning, InputError, PairError
from torchngvi.fitting import Evaluations, Seconds, SlopeBelow
from torchngvi.fitting.checkpoints import Checkpoint
from torchngvi.fitting.loop import Loop
from torchngvi.fitting.records import FitResult, Record

gp = pytest.importorskip("gpytorch")
N, M = 200, 8


def told(result):
    """All that two runs of one problem have in common, which is not the time."""
    return result.losses, result.rejections, result.refined, result.interrupted, result.reason


class Model(SparseModel):
    def __init__(self, size=M):
        q = NaturalGradientVariationalDistribution(size, mean_init_std=0.0)
        super().__init__(q, torch.linspace(-2, 2, size)[:, None])


def data():
    torch.manual_seed(0)
    x = 4 * torch.rand(N, 1).double() - 2
    return x, torch.sin(3 * x[:, 0]) + 0.2 * torch.randn(N).double()


def several_tasks():
    """Two tasks with a function of their own each."""
    q = NaturalGradientVariationalDistribution(M, torch.Size([2]), mean_init_std=0.0)
    return several(q, torch.linspace(-2, 2, M)[:, None].repeat(2, 1, 1), 2)


def fresh(model, make):
    """Another model with the same coordinates and hyper-parameters, which remembers nothing."""
    other = make().double().train(model.training)
    other.load_state_dict(model.state_dict())
    return other


def set_up(noise=0.05):
    torch.manual_seed(0)
    model, likelihood = Model().double(), gp.likelihoods.GaussianLikelihood().double()
    likelihood.noise = noise
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.02)
    x, y = data()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=20, shuffle=True)
    return model, likelihood, adam, loader


def adam_of(model):
    return torch.optim.Adam(model.parameters(), lr=0.02)


class Rows(tud.Dataset):
    """A dataset that nobody can look into."""

    def __init__(self, x, y):
        self.rows = list(zip(x, y, strict=True))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Stream:
    """An iterable of batches."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        return zip(self.x.split(20), self.y.split(20), strict=True)


def parts(nu=2.5, noise=0.1):
    model = Model().double()
    model.covar_module.base_kernel = gp.kernels.MaternKernel(nu=nu).double()
    noises = torch.full((20,), noise).double()
    return model, gp.likelihoods.FixedNoiseGaussianLikelihood(noises)


def loader_of(dataset, size=20):
    return tud.DataLoader(dataset, batch_size=size, shuffle=True)


SAME = lambda other: (Model().double(), gp.likelihoods.GaussianLikelihood().double())  # noqa: E731
PLAIN = lambda x, y, other: Stream(x, y)  # noqa: E731
ANOTHER = r"run.pt belongs to another problem: at its q the negative ELBO was [\d.-]+, here it is [\d.-]+. Remove it"
CHANGES = {
    "dataset": (SAME, lambda x, y, other: loader_of(Rows(x, -y if other else y)), ANOTHER),
    "subset": (
        SAME,
        lambda x, y, other: loader_of(tud.Subset(tud.TensorDataset(x, -y if other else y), list(range(N)))),
        ANOTHER,
    ),
    "iterable": (SAME, lambda x, y, other: Stream(x, -y if other else y), ANOTHER),
    "noise": (lambda other: parts(noise=0.5 if other else 0.1), PLAIN, ANOTHER),
    "kernel": (lambda other: parts(nu=0.5 if other else 2.5), PLAIN, r"base_kernel nu is 2\.5, here it is 0\.5\. Rem"),
    "batch size": (
        SAME,
        lambda x, y, other: loader_of(Rows(x, y), 25 if other else 20),
        r"its batch size is 20, here it is 25\. Remove it, or name another file\.$",
    ),
}


class TestLength:
    def run(self):
        model, likelihood, _, _ = set_up()
        return NaturalSteps(SparseGP(model.train(), likelihood.train(), []), N)

    def test_the_start(self):
        """ρ = min(½, max(B/N, B/(5M))), and 1 on all rows of a Gaussian likelihood."""
        run = self.run()
        run.set_length(4)
        assert math.isclose(float(run.optimizer.param_groups[0]["lr"]), 4 / (5 * M))
        run.set_length(N)
        assert run.optimizer.param_groups[0]["lr"] == 1.0

    def test_follows_the_cosine_of_successive_gradients(self):
        """Up by the full rate where they agree, down where they are opposed, and within its bounds."""
        run = self.run()
        run.set_length(4)
        force = torch.ones(M).double()
        run.follow(force, 4)
        start = float(run.log_rho)
        run.follow(force, 4)
        assert math.isclose(float(run.log_rho), start + 0.1)
        run.follow(-force, 4)
        assert math.isclose(float(run.log_rho), start)
        run.follow(force * torch.nan, 4)
        assert math.isclose(float(run.log_rho), start)
        run.force = force
        for _ in range(200):
            run.follow(force, 4)
        assert math.isclose(float(run.log_rho.exp()), 0.5)
        for _ in range(200):
            run.follow(-run.force, 4)
        assert math.isclose(float(run.log_rho.exp()), 0.1 * 4 / N)

    def test_at_rest_successive_gradients_are_opposed(self):
        """E⟨g_t, g_t+1⟩ = -½ρ E|g|² for steps ρ on x with gradients x + noise: within 5 standard errors."""
        generator = torch.Generator().manual_seed(0)
        for rho in (0.1, 0.5):
            x, before, products, squares = torch.zeros(400).double(), None, [], []
            for step in range(4000):
                g = x + torch.randn(400, generator=generator).double()
                if step > 200:
                    products.append(float(g @ before))
                    squares.append(float(g @ g))
                x, before = x - rho * g, g
            ratio = sum(products) / sum(squares)
            assert abs(ratio + rho / 2) < 5 / math.sqrt(400 * 3800)

    @pytest.mark.accuracy
    def test_the_length_falls_where_nothing_moves(self):
        """With hyper-parameters at rest the noise of the batches prevails: ρ falls, and the loss with it."""
        model, likelihood, _, loader = set_up()
        still = torch.optim.SGD([*model.parameters(), *likelihood.parameters()], lr=1e-12)
        run = Epochs(model.train(), likelihood.train(), loader, N, still, 16)
        run.advance()
        first = float(run.natural.log_rho)
        for _ in range(15):
            run.advance()
        assert float(run.natural.log_rho) < first - 1.0


class TestParts:
    def test_a_radius_where_the_likelihood_is_not_log_concave(self):
        """4 nats a step, and more than 2 where it is what stops."""
        model, _, _, _ = set_up()
        likelihood, (x, y) = gp.likelihoods.StudentTLikelihood().double(), data()
        likelihood.noise = 1e-3
        run = NaturalSteps(SparseGP(model.train(), likelihood.train(), []), N)
        for _ in range(4):
            before = copy.deepcopy(run.q)
            run.step(SparseGP(model, likelihood, [(x, y)], N, learn=True), N)
            assert 2.0 < float(run.q.kl(before).detach()) < 4.0

    def test_what_is_left_behind(self):
        """A model in training mode, from whichever, and a q of its dtype, though it was in float64 for a while."""
        model, likelihood, _, _ = set_up()
        model, likelihood = model.float().eval(), likelihood.float().eval()
        adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.02)
        x, y = (part.float() for part in data())

        def convert(*_):
            variational_posteriors(model)[0].double()

        train_svgp_in_batches(model, likelihood, [(x, y)], N, adam, epochs=3, callbacks=[convert], progress=False)
        assert model.training
        assert likelihood.training
        assert variational_posteriors(model)[0].dtype == torch.float32

    def test_refining_visits_first_and_goes_on_after(self):
        """Visits to the sites save steps by trial; a q that is there already stays; the modes are given back."""
        x, y = data()
        y = torch.bernoulli(torch.special.ndtr(y), generator=torch.Generator().manual_seed(0))
        model, likelihood = set_up()[0].eval(), gp.likelihoods.BernoulliLikelihood()
        assert refine_svgp(model, likelihood, [(x, y)], progress=False).evaluations <= 4  # 7 without
        assert refine_svgp(model, likelihood, [(x, y)], progress=False).evaluations == 1
        assert not model.training
        assert likelihood.training
        exact = refine_svgp(set_up()[0], gp.likelihoods.GaussianLikelihood().double(), [(x, y)], progress=False)
        assert exact.evaluations == 1

    @pytest.mark.parametrize("several", [False, True])
    @pytest.mark.parametrize("who", ["eval", "eval_and_train", "as_it_is"])
    def test_callbacks_that_evaluate_the_model(self, several, who):
        """They see the model of their epoch, in whichever mode they call it; what trains is in the modes it had."""
        x, y = data()
        torch.manual_seed(0)
        make = several_tasks if several else Model
        model = make().double()
        likelihood = gp.likelihoods.GaussianLikelihood().double()
        if several:
            likelihood, y = gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=2).double(), torch.stack([y, -y], -1)
        adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.1)
        seen, modes = [], []  # predicted means beside those of a model without a memory
        new = torch.linspace(-1.5, 1.5, 5)[:, None].double()

        def look(*_):
            modes.append({module.training for owner in (model, likelihood) for module in owner.modules()})
            if who != "as_it_is":
                model.eval()
                likelihood.eval()
            with torch.no_grad():
                seen.append((model(new).mean, fresh(model, make)(new).mean))
            if who == "eval_and_train":
                model.train()
                likelihood.train()

        train_svgp_in_batches(model, likelihood, [(x, y)], N, adam, epochs=4, callbacks=[look], progress=False)
        who = "as_it_is"
        look()
        errors = [float((got - expected).abs().max()) for got, expected in seen]
        assert max(errors) < 1e-12, errors
        moves = [float((a - b).abs().max()) for (_, a), (_, b) in zip(seen[:4], seen[1:4], strict=False)]
        assert min(moves) > 1e-3
        assert modes == [{True}] * 5

    def test_parts_in_another_mode(self):
        """A part that the callback, or `refine_svgp`, finds in eval mode is left in it."""
        model, likelihood, adam, loader = set_up()
        model.covar_module.eval()
        refine_svgp(model, likelihood, [data()], progress=False)
        assert model.training
        assert not model.covar_module.training
        assert not model.covar_module.base_kernel.training

        def look(*_):
            model.eval()
            raise KeyboardInterrupt

        assert train_svgp_in_batches(model, likelihood, loader, N, adam, callbacks=[look], progress=False).interrupted
        assert all(module.training for module in model.modules())

    def test_priors_and_added_losses(self):
        """Of the model and of the likelihood; the first divided by the number of data, as in GPyTorch's objectives."""
        model, _, _, _ = set_up()
        prior = gp.priors.GammaPrior(2.0, 3.0)
        likelihood = gp.likelihoods.GaussianLikelihood(noise_prior=prior).double()
        model.covar_module.register_prior("scale", prior, "outputscale")

        class Added(gp.mlls.AddedLossTerm):
            def loss(self):
                return 3 * model.mean_module.constant.square()

        model.register_added_loss_term("added")
        model.update_added_loss_term("added", Added())
        model.mean_module.constant = 0.7
        penalty(model, likelihood, N).backward()
        learnt = likelihood.raw_noise, model.covar_module.raw_outputscale, *model.mean_module.parameters()
        found = [p.grad.clone() for p in learnt]
        for module in (model, likelihood):
            module.zero_grad()
        prior_terms = prior.log_prob(likelihood.noise).sum() + prior.log_prob(model.covar_module.outputscale).sum()
        (Added().loss() - prior_terms / N).backward()
        for a, p in zip(found, learnt, strict=True):
            assert float((a - p.grad).abs().max()) < 1e-14
            assert float(a.abs().max()) > 0


class TestResume:
    @pytest.mark.accuracy
    def test_bit_for_bit(self, tmp_path):
        """Two epochs, then two more from the file, as four in one go: the shuffling included."""
        whole = set_up()
        result = train_svgp_in_batches(*whole[:2], whole[3], N, whole[2], epochs=4, progress=False)
        path = tmp_path / "run.pt"
        first = set_up()
        train_svgp_in_batches(*first[:2], first[3], N, first[2], epochs=2, progress=False, checkpoint=path)
        again = set_up()
        torch.manual_seed(99)
        resumed = train_svgp_in_batches(*again[:2], again[3], N, again[2], epochs=4, progress=False, checkpoint=path)
        assert resumed.losses == result.losses
        for a, b in zip(whole[0].state_dict().values(), again[0].state_dict().values(), strict=True):
            assert torch.equal(a, b)
        done = train_svgp_in_batches(*again[:2], again[3], N, again[2], epochs=4, progress=False, checkpoint=path)
        assert done.losses == result.losses

    def test_an_interrupt_keeps_what_was_done(self):
        model, likelihood, adam, loader = set_up()
        count = []

        def batches():
            for batch in loader:
                count.append(1)
                if len(count) == 15:
                    raise KeyboardInterrupt
                yield batch

        class Loader:
            __iter__ = staticmethod(batches)

        result = train_svgp_in_batches(model, likelihood, Loader(), N, adam, epochs=5, refine=True, progress=False)
        assert result.interrupted
        assert result.refined is None
        assert len(result.losses) == 1
        assert str(result).startswith("1 epochs, then interrupted, negative ELBO per datum")
        assert all(bool(p.isfinite().all()) for p in model.parameters())

    def test_within_the_first_epoch(self, tmp_path):
        """There is a result of no epoch; from the file, written at the start, the run is as one that was not cut."""
        path, seen = tmp_path / "run.pt", []
        for cut in (3, 0):
            model, likelihood, adam, loader = set_up()
            torch.manual_seed(0 if cut else 99)
            forward = likelihood.expected_log_prob

            def counted(y, values, forward=forward, cut=cut):
                seen.append(1)
                if len(seen) == cut:
                    raise KeyboardInterrupt
                return forward(y, values)

            likelihood.expected_log_prob = counted
            result = train_svgp_in_batches(
                model, likelihood, loader, N, adam, epochs=2, progress=False, checkpoint=path
            )
            if cut:
                assert told(result)[:4] == ([], 0, None, True)
                assert result.reason.startswith("training ended because it was interrupted before ")
                assert str(result).startswith("0 epochs, then interrupted, none complete")
        whole = set_up()
        torch.manual_seed(0)
        whole[1].expected_log_prob = lambda y, values, forward=whole[1].expected_log_prob: forward(y, values)
        assert (
            train_svgp_in_batches(*whole[:2], whole[3], N, whole[2], epochs=2, progress=False).losses == result.losses
        )

    def test_callbacks_are_told_once(self, tmp_path):
        """Of an epoch that is in the file they were told by the run that wrote it."""
        path, seen = tmp_path / "run.pt", []
        for epochs in (2, 2, 1, 4):
            model, likelihood, adam, loader = set_up()
            callbacks = [lambda epoch, loss: seen.append((epoch, loss))]
            result = train_svgp_in_batches(
                model, likelihood, loader, N, adam, epochs=epochs, callbacks=callbacks, progress=False, checkpoint=path
            )
            assert len(result.losses) == max(epochs, 2)
        assert seen == list(enumerate(result.losses))

    def test_other_files(self, tmp_path):
        model, likelihood, adam, loader = set_up()
        path = tmp_path / "run.pt"
        path.write_text("no")
        with pytest.raises(
            InputError, match=r"run.pt is no checkpoint of this version of torchngvi. Remove it, or nam"
        ):
            train_svgp_in_batches(model, likelihood, loader, N, adam, checkpoint=path)
        path.unlink()
        train_svgp_in_batches(model, likelihood, loader, N, adam, epochs=1, progress=False, checkpoint=path)
        other = Model(5).double()
        text = (
            r"is the checkpoint of another run: its model \S*inducing_points is \(8, 1\) \w+, here it is \(5, 1\) \w+."
        )
        with pytest.raises(InputError, match=text):
            train_svgp_in_batches(other, likelihood, loader, N, torch.optim.Adam(other.parameters()), checkpoint=path)

    def test_other_runs(self, tmp_path):
        """Of other data, another rate, another kernel: each in a sentence, and nothing is changed."""
        path = tmp_path / "run.pt"

        def run(parts, epochs=1):
            return train_svgp_in_batches(
                *parts[:2], parts[3], N, parts[2], epochs=epochs, progress=False, checkpoint=path
            )

        def another_rate(parts):
            return (*parts[:2], torch.optim.Adam([*parts[0].parameters(), *parts[1].parameters()], lr=0.5), parts[3])

        def another_optimizer(parts):
            return (*parts[:2], torch.optim.SGD(parts[0].parameters(), lr=0.1), parts[3])

        def another_kernel(parts):
            parts[0].covar_module.base_kernel = gp.kernels.MaternKernel().double()
            return another_rate(parts)

        def other_data(parts):
            x, y = parts[3].dataset.tensors
            dataset = torch.utils.data.TensorDataset(x, -y)
            return (*parts[:3], torch.utils.data.DataLoader(dataset, batch_size=20, shuffle=True))

        run(set_up())
        before = path.read_bytes()
        for change, text in {
            another_rate: r"its hyper_optimizer lr is \[0\.02\], here it is \[0\.5\]\. Remove it, or name",
            another_optimizer: "of another run: its hyper_optimizer is Adam, here it is SGD. Remove it, o",
            another_kernel: r"its model covar_module\.base_kernel is RBFKernel, here it is MaternKernel\. Remove it",
            other_data: r"its fingerprint of the data is \w+, here it is \w+\. Remove it, or name another file\.$",
        }.items():
            parts = change(set_up())
            SparseGP(*parts[:2], [])  # q is initialised
            start = copy.deepcopy(parts[0].state_dict())
            with pytest.raises(InputError, match=text):
                run(parts)
            changed = [name for name, value in parts[0].state_dict().items() if not torch.equal(value, start[name])]
            assert changed == []
            assert path.read_bytes() == before

    @pytest.mark.accuracy
    @pytest.mark.parametrize("where", ["loader", "sampler", "batch_sampler"])
    def test_a_generator_of_its_own(self, tmp_path, where):
        """Of the loader or of its sampler: its state is in the file, and is missed where it is not there."""
        ends = []
        for stops in ((4,), (2, 4)):
            for epochs in stops:
                model, likelihood, adam, loader = set_up()
                generator = torch.Generator().manual_seed(3)
                sampler = tud.RandomSampler(loader.dataset, generator=generator)
                options = {
                    "loader": {"batch_size": 20, "shuffle": True, "generator": generator},
                    "sampler": {"batch_size": 20, "sampler": sampler},
                    "batch_sampler": {"batch_sampler": tud.BatchSampler(sampler, 20, False)},
                }[where]
                own, path = tud.DataLoader(loader.dataset, **options), tmp_path / f"{len(stops)}.pt"
                train_svgp_in_batches(model, likelihood, own, N, adam, epochs=epochs, progress=False, checkpoint=path)
            ends.append(model.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(ends[0].values(), ends[1].values(), strict=True))
        text = "its number of generators in the batches is 1, here it is not there. Remove it, or name another file."
        with pytest.raises(InputError, match=text):
            train_svgp_in_batches(
                model, likelihood, tud.DataLoader(loader.dataset, 20), N, adam, progress=False, checkpoint=path
            )

    @pytest.mark.sparse(2)
    @pytest.mark.parametrize("change", CHANGES)
    def test_what_has_no_fingerprint(self, tmp_path, change):
        """Other data behind a dataset or an iterable, other settings: refused, and nothing changes; the same go on."""
        path, (make, wrap, text) = tmp_path / "run.pt", CHANGES[change]

        def run(other):
            batches = wrap(*data(), other)
            torch.manual_seed(99 if other else 1)
            model, likelihood = make(other)
            SparseGP(model, likelihood, [])  # q is initialised
            start, before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
            try:
                return train_svgp_in_batches(
                    model, likelihood, batches, N, adam_of(model), epochs=2, progress=False, checkpoint=path
                )
            except InputError:
                assert all(torch.equal(a, b) for a, b in zip(start.values(), model.state_dict().values(), strict=True))
                assert torch.equal(before, torch.get_rng_state())
                raise

        losses, before = run(False).losses, path.read_bytes()
        with pytest.raises(InputError, match=text):
            run(True)
        assert path.read_bytes() == before
        assert run(False).losses == losses

    def test_order_that_nobody_can_restore(self, tmp_path):
        """Data that come in an order of their own tell nothing, and an iterator is not looked into."""
        path, (x, y) = tmp_path / "run.pt", data()
        order = random.Random(0)

        class Shuffled:
            def __iter__(self):
                return iter(order.sample([(a, b) for a, b in zip(x.split(20), y.split(20), strict=True)], 10))

        for batches, epochs in ((Shuffled(), 1), (Shuffled(), 2), (iter(Shuffled()), 3)):
            model, likelihood, adam, _ = set_up()
            result = train_svgp_in_batches(
                model, likelihood, batches, N, adam, epochs=epochs, progress=False, checkpoint=path
            )
            assert len(result.losses) == epochs

    def test_a_checkpoint_does_not_change_the_run(self, tmp_path):
        """Nor do the draws of the evaluation that it holds."""
        plain = set_up()
        wanted = train_svgp_in_batches(*plain[:2], plain[3], N, plain[2], epochs=3, progress=False)
        kept = set_up()
        path = tmp_path / "run.pt"
        found = train_svgp_in_batches(*kept[:2], kept[3], N, kept[2], epochs=3, progress=False, checkpoint=path)
        assert told(found) == told(wanted)

    def test_a_full_disk_loses_nothing(self, tmp_path, monkeypatch):
        """The epochs go on, and the earlier file stays."""
        path, replaced, replace = tmp_path / "run.pt", [], os.replace

        def full(old, new):
            replaced.append(1)
            if len(replaced) > 2:  # the first is a trial
                raise OSError(errno.ENOSPC, "No space left on device")
            replace(old, new)

        monkeypatch.setattr(os, "replace", full)
        model, likelihood, adam, loader = set_up()
        with pytest.warns(
            CheckpointWarning, match=r"run.pt could not be written \(No space left on device\); the earlier"
        ):
            result = train_svgp_in_batches(
                model, likelihood, loader, N, adam, epochs=3, progress=False, checkpoint=path
            )
        assert len(result.losses) == 3
        monkeypatch.undo()
        model, likelihood, adam, loader = set_up()
        again = train_svgp_in_batches(model, likelihood, loader, N, adam, epochs=3, progress=False, checkpoint=path)
        assert again.losses == result.losses

    def test_a_float64_q_in_a_float32_model(self, tmp_path):
        """What the file holds of q is not rounded."""
        model, likelihood, adam, loader = set_up()
        model, likelihood = model.float(), likelihood.float()
        batches = [(x.float(), y.float()) for x, y in loader]
        adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.02)
        run = Epochs(model.train(), likelihood.train(), batches, N, adam, 2)
        file = Checkpoint(tmp_path / "run.pt", run.settings(), run.q.device)
        run.q.double()
        run.q.initialize_(1 / 3, 0.1)
        wanted, rejected = copy.deepcopy(run.q), run.natural.optimizer._state(0)["rejections"]
        rejected += 3
        run.losses.append(1.0)
        file.save(file.captured(**run.state_dict()))
        rejected -= 3
        run.losses.clear()
        run.q.initialize_(0.0, 1.0).float()
        run.load_state_dict(file.load({}))
        assert run.losses == [1.0]
        assert torch.equal(run.q.mean, wanted.mean)
        assert run.q.dtype == torch.float64
        assert run.natural.optimizer.rejections == 3


class TestEnds:
    @pytest.mark.accuracy
    def test_by_criteria(self, tmp_path):
        """One of `torchngvi.fitting` beside the epochs, which remembers across a checkpoint; the reason is told."""
        path, parts = tmp_path / "run.pt", set_up()

        def run(stop, **options):
            model, likelihood, adam, loader = set_up()
            return train_svgp_in_batches(model, likelihood, loader, N, adam, progress=False, stop=stop, **options)

        result = run(Evaluations(25))
        assert len(result.losses) == 3
        assert result.reason.startswith(
            "training ended because the budget of 25 evaluations is used up (a negative ELBO per datum of "
        )
        assert len(run(Seconds(1e-6)).losses) == 1
        whole = run(SlopeBelow(1e9, block=2, blocks=2), epochs=9)
        assert len(whole.losses) == 4
        assert run(SlopeBelow(1e9, block=2, blocks=2), epochs=3, checkpoint=path).reason.startswith(
            "training ended because the budget of 3 gradients is used up ("
        )
        cut = run(SlopeBelow(1e9, block=2, blocks=2), epochs=9, checkpoint=path)
        assert told(cut) == told(whole)
        with pytest.raises(InputError, match="^stop is a criterion of torchngvi.fitting"):
            train_svgp_in_batches(*parts[:2], parts[3], N, parts[2], stop=3, progress=False)

    def test_no_epochs(self):
        model, likelihood, adam, loader = set_up()
        result = train_svgp_in_batches(model, likelihood, loader, N, adam, epochs=0)
        assert told(result) == ([], 0, None, False, "training ended because no epoch was run.")

    def test_the_bar_counts_rows(self, capsys, monkeypatch):
        """Within an epoch too, with the loss so far."""
        told, tell = [], Loop._tell
        monkeypatch.setattr(Loop, "_tell", lambda loop, *what: (tell(loop, *what), told.append((loop.bar.n, what[1]))))
        model, likelihood, adam, loader = set_up()
        result = train_svgp_in_batches(model, likelihood, loader, N, adam, epochs=2)
        assert [rows for rows, _ in told] == [*range(20, 201, 20), 200, *range(220, 401, 20), 400]
        assert told[-1][1] == told[-2][1] == {"loss": f"{result.losses[-1]:.4f}"}
        assert "SVGP" in capsys.readouterr().err


class TestRefusals:
    def test_missing_targets(self):
        """Named, before any hyper-parameter is touched; or masked, as the setting says."""
        model, likelihood, adam, _ = set_up()
        x, y = data()
        y[3] = torch.nan
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(
            InputError, match="of a batch is nan: 1 of 100 targets of this batch are NaN. Everything is"
        ):
            train_svgp_in_batches(model, likelihood, [(x[:100], y[:100]), (x[100:], y[100:])], N, adam, progress=False)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        known = torch.arange(N) != 3
        for policy in ("mask", "fill"):
            masked, without = set_up()[0], set_up()[0]
            with gp.settings.observation_nan_policy(policy):
                assert refine_svgp(masked, likelihood, [(x, y)], progress=False).converged
            refine_svgp(without, likelihood, [(x[known], y[known])], progress=False)
            a, b = variational_posteriors(masked)[0], variational_posteriors(without)[0]
            assert float((a.mean - b.mean).abs().max()) < 1e-8
            assert float((a.covariance - b.covariance).abs().max()) < 1e-8

    def test_batches(self):
        """What is no pair of tensors, or does not fit the model or itself; where the data are read at all."""
        model, likelihood, adam, _ = set_up()
        x, y = data()
        wrong = {
            "batches are pairs \\(x, y\\) of tensors; got Tensor. Give a DataLoader over TensorDataset": (x, y),
            "batches are pairs \\(x, y\\) of tensors; got Tensor, Tensor, Tensor. Give": [(x, y, y)],
            "batches are pairs \\(x, y\\) of tensors; got ndarray, Tensor. Give": [(x.numpy(), y)],
            "have 1 features; got inputs of shape \\(200, 2\\). Give x as": [(x.repeat(1, 2), y)],
            "has 200 rows of inputs and targets of shape \\(200, 1\\): check the shape": [(x, y[:, None])],
            "has 200 rows of inputs and targets of shape \\(150,\\): check the shape": [(x, y[:150])],
            "has 200 rows of inputs and targets of shape \\(\\): check the shape": [(x, y[0])],
        }
        for text, batches in wrong.items():
            for ask in (
                lambda b: train_svgp_in_batches(model, likelihood, b, N, adam, progress=False),
                lambda b: refine_svgp(model, likelihood, b, progress=False),
                lambda b: VN(variational_posteriors(model)[0]).step(SparseGP(model, likelihood, iter(b))),
            ):
                with pytest.raises(InputError, match=text):
                    ask(batches)
        two = NaturalGradientVariationalDistribution(M)
        model.variational_strategy = gp.variational.VariationalStrategy(model, torch.randn(M, 2), two)
        with pytest.raises(InputError, match="have 2 features; got inputs of shape \\(200,\\). Give x as"):
            refine_svgp(model, likelihood, [(x[:, 0], y)], progress=False)

    def test_an_iterator_that_is_used_up(self):
        model, likelihood, adam, _ = set_up()
        x, y = data()
        with pytest.raises(InputError, match="the batches of an epoch are empty: an iterator is used up after one"):
            train_svgp_in_batches(
                model, likelihood, zip(x.split(50), y.split(50), strict=True), N, adam, progress=False
            )

    def test_optimizers(self):
        model, likelihood, _, loader = set_up()
        for wrong, text in (
            (0.1, "hyper_optimizer is a torch optimizer of the hyper-parameters; got float. Give torch.optim.Adam"),
            (
                torch.optim.LBFGS(model.parameters()),
                "LBFGS evaluates the loss several times a step, and q would step on",
            ),
            (set_up()[2], "hyper_optimizer holds no parameter of this model or likelihood; was it built over an earl"),
        ):
            with pytest.raises(InputError, match=text):
                train_svgp_in_batches(model, likelihood, loader, N, wrong, progress=False)
        some = torch.optim.SGD(likelihood.parameters(), lr=0.01)
        before = [p.detach().clone() for p in (*model.parameters(), *likelihood.parameters())]
        train_svgp_in_batches(model, likelihood, loader, N, some, epochs=1, progress=False)
        after = [*model.parameters(), *likelihood.parameters()]
        changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert changed == [False] * (len(changed) - 1) + [True]

    def test_a_callback_alone(self):
        model, likelihood, adam, loader = set_up()
        with pytest.raises(InputError, match="callbacks is a list of functions of the epoch and its loss; put the one"):
            train_svgp_in_batches(model, likelihood, loader, N, adam, callbacks=lambda *_: True)
        seen = []
        stop = lambda epoch, loss: seen.append((epoch, loss)) or epoch == 1  # noqa: E731
        result = train_svgp_in_batches(model, likelihood, loader, N, adam, callbacks=[stop], progress=False)
        assert seen == list(enumerate(result.losses))
        assert len(seen) == 2

    def test_checkpoints(self, tmp_path):
        model, likelihood, adam, loader = set_up()
        with pytest.raises(InputError, match="run.pt is in a folder that does not exist. Name a file in a folder that"):
            train_svgp_in_batches(
                model, likelihood, loader, N, adam, checkpoint=tmp_path / "runs" / "run.pt", progress=False
            )

    def test_a_call_of_its_own(self):
        """A network in ``__call__`` is not trained without a word; in ``forward`` it is."""
        _, likelihood, adam, loader = set_up()
        x, y = data()

        class InCall(Model):
            def __init__(self):
                super().__init__()
                self.network = torch.nn.Linear(1, 1)

            def __call__(self, inputs, **options):
                return super().__call__(self.network(inputs), **options)

        class InForward(InCall):
            __call__ = Model.__call__

            def forward(self, inputs):
                return super().forward(self.network(inputs))

        model = InCall().double()
        before = copy.deepcopy(model.state_dict())
        text = "InCall overrides __call__, and steps from the derivatives of each datum call forward: what .* Do it"
        for ask in (
            lambda: train_svgp_in_batches(model, likelihood, loader, N, adam, progress=False),
            lambda: refine_svgp(model, likelihood, [(x, y)], progress=False),
        ):
            with pytest.raises(PairError, match=text):
                ask()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        model = InForward().double()
        start = model.network.weight.detach().clone()
        adam = torch.optim.Adam(model.parameters(), lr=0.02)
        result = train_svgp_in_batches(model, likelihood, loader, N, adam, epochs=3, progress=False)
        assert result.losses[-1] < result.losses[0]
        assert float((model.network.weight.detach() - start).abs().min()) > 1e-3

    def test_infinite_loss(self):
        model, likelihood, adam, _ = set_up()
        x, y = data()
        y[0] = torch.inf
        with pytest.raises(InputError, match="of a batch is inf: check the data and hyper-parameters"):
            train_svgp_in_batches(model, likelihood, [(x, y)], N, adam, progress=False)

    def test_a_noise_for_each_row(self):
        model, _, _, _ = set_up()
        x, y = data()
        likelihood = gp.likelihoods.FixedNoiseGaussianLikelihood(torch.full((N,), 0.05).double())
        assert refine_svgp(model, likelihood, [(x, y)], progress=False).converged
        with pytest.raises(InputError, match="holds a noise for each of 200 rows and cannot tell which a batch of 100"):
            refine_svgp(model, likelihood, [(x[:100], y[:100]), (x[100:], y[100:])], progress=False)


def test_the_line_of_a_result():
    records = [Record(1, 2.0, math.nan, 0.1, 0, 1, 0.0), Record(2, 1.5, math.nan, 0.1, 3, 2, 0.0)]
    result = TrainingResult(False, "", 1.5, math.nan, 2, torch.tensor(False), records, rejections=3)
    assert isinstance(result, FitResult)
    assert str(result) == (
        "2 epochs, negative ELBO per datum 1.5000, 0.5 less than an epoch before, 3 natural steps not taken"
    )
    result = TrainingResult(False, "", math.nan, math.nan, 0, torch.tensor(False), [])
    assert str(result) == "0 epochs, none complete, 0 natural steps not taken"
