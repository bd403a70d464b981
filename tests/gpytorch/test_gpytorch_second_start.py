"""A second start: what tells that an input was taken for noise, where it begins, what is kept of it."""

import math

import pytest
import torch
from sparse_models import SparseModel

from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, engines, train_svgp
from torchngvi.adapters.gpytorch.engines import Rounds
from torchngvi.adapters.gpytorch.starts import begin_periods, period_of, shorten, telling
from torchngvi.errors import InputError

gp = pytest.importorskip("gpytorch")
kernels = gp.kernels
FEATURES = 4


class Model(SparseModel):
    def __init__(self, kernel, size=40, features=FEATURES):
        super().__init__(NaturalGradientVariationalDistribution(size), torch.zeros(size, features), kernel)


def data(rows=600, seed=0):
    """Several periods in the first input, slow in two others, nothing in the last."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, FEATURES, generator=generator).double()
    f = torch.sin(4 * x[:, 0]) + 0.7 * x[:, 1] + 0.5 * (x[:, 2].square() - 1)
    return x, f + 0.3 * torch.randn(rows, generator=generator).double()


def ard():
    return kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=FEATURES))


def set_up(likelihood="gaussian", size=40):
    torch.manual_seed(0)
    (x, y), model = data(), Model(ard(), size).double()
    if likelihood == "bernoulli":
        return model, gp.likelihoods.BernoulliLikelihood().double(), (x, (y > 0).double())
    return model, gp.likelihoods.GaussianLikelihood().double(), (x, y)


def learn(model, likelihood, rows, **options):
    return train_svgp(model, likelihood, rows, progress=False, **options)


@pytest.fixture
def once(monkeypatch):
    """Without it."""
    monkeypatch.setattr(Rounds, "_again", lambda self: False)


class TestWhereItLeadsFurther:
    @pytest.mark.accuracy
    @pytest.mark.usefixtures("once")
    def test_it_is_needed(self):
        """From the first start alone the noise has the variance of the first input, ½, besides its own, 0.09."""
        model, likelihood, rows = set_up()
        assert learn(model, likelihood, rows).losses[-1] > 1.1
        assert likelihood.noise.item() > 0.5

    @pytest.mark.accuracy
    def test_with_gaussian_noise(self):
        model, likelihood, rows = set_up()
        losses = learn(model, likelihood, rows).losses
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.5
        assert likelihood.noise.item() < 0.2
        assert model.covar_module.base_kernel.lengthscale[0, 0].item() < 2.0

    @pytest.mark.accuracy
    def test_with_labels(self):
        assert learn(*set_up("bernoulli")).losses[-1] < 0.47  # 0.54 from the first start

    @pytest.mark.accuracy
    def test_from_a_checkpoint(self, tmp_path):
        """The file knows where the run began, and whether there was a second start."""
        wanted = learn(*set_up(), rounds=6).losses
        jump = next(k for k in range(1, 6) if wanted[k - 1] - wanted[k] > 0.3)
        for rounds in (jump, jump + 1, 6):
            losses = learn(*set_up(), rounds=rounds, checkpoint=tmp_path / "run.pt").losses
            assert losses == wanted[:rounds]


class TestInteractions:
    """Of inputs none of which tells anything for itself."""

    def learnt(self, function):
        x = torch.randn(600, 20, generator=torch.Generator().manual_seed(1)).double()
        y = function(x.mT)
        y = (y + 0.2 * y.std() * torch.randn(600, generator=torch.Generator().manual_seed(2)).double()) / y.std()
        model = Model(kernels.ScaleKernel(kernels.MaternKernel(2.5, ard_num_dims=20)), features=20).double()
        likelihood = gp.likelihoods.GaussianLikelihood().double()
        return learn(model, likelihood, (x, y)), likelihood.noise.item() ** 0.5

    @pytest.mark.accuracy
    def test_a_function_is_found(self):
        """The noise is 0.2; the first start leaves 1.0 of the pair, and 0.6 of the pair beside an input."""
        assert self.learnt(lambda x: torch.sin(2 * x[0]) * torch.sin(2 * x[1]))[1] < 0.4
        assert self.learnt(lambda x: x[3] + torch.cos(4 * x[5]) * x[1])[1] < 0.4

    @pytest.mark.filterwarnings("ignore::torchngvi.errors.ScaleWarning")
    def test_a_constant_says_what_to_do(self):
        """A product of four inputs shows in no three."""
        result, _ = self.learnt(lambda x: x[:4].sign().prod(0))
        assert result.found == "constant"
        assert "so every prediction is near the mean of the targets. If the inputs tell something" in result.reason


class TestWhereItDoesNot:
    @pytest.mark.accuracy
    def test_everything_is_as_it_was(self, monkeypatch):
        """The rounds, and the hyper-parameters, are those without it, also where the start cannot be evaluated."""
        rest = []

        def refused(*_):
            rest.append(1)
            raise InputError("not here")

        def outcome(told, instead):
            monkeypatch.setattr(engines, "telling", lambda scores, x: torch.tensor([told] * FEATURES))
            monkeypatch.setattr(engines, "shorten", instead)
            model, likelihood, (x, y) = set_up(size=10)
            losses = learn(model, likelihood, (x[:200], y[:200] - torch.sin(4 * x[:200, 0]))).losses
            return losses, list(model.hyperparameters())

        wanted = outcome(False, shorten)
        for instead in (lambda *_: False, refused):
            found = outcome(True, instead)
            assert found[0] == wanted[0]
            assert all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))
        assert rest

    @pytest.mark.accuracy
    def test_a_round_that_is_not_better(self, monkeypatch):
        monkeypatch.setattr(engines, "telling", lambda scores, x: torch.tensor([False, False, False, True]))
        model, likelihood, (x, y) = set_up()
        result = learn(model, likelihood, (x, y - torch.sin(4 * x[:, 0])))
        assert result.losses == sorted(result.losses, reverse=True)
        assert result.losses[-1] < 0.35


class TestTelling:
    def test_a_feature(self):
        x, y = data()
        left = y - 0.7 * x[:, 1] - 0.5 * (x[:, 2].square() - 1)
        assert telling(left, x).tolist() == [True, False, False, False]
        assert not telling(left - torch.sin(4 * x[:, 0]), x).any()

    def test_pairs_and_triples(self):
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            x, noise = (torch.randn(*n, generator=generator).double() for n in ((1500, 12), (1500,)))
            for pair, triple, one in (
                ([1, 7], [], []),
                ([0, 2], [], [5]),
                ([], [3, 4, 8], []),
                ([0, 1], [3, 4, 8], []),
            ):
                y = sum(x[:, part].prod(-1) for part in (pair, triple, one) if part) + 0.2 * noise
                assert telling(y, x).nonzero().flatten().tolist() == sorted(pair + triple + one)
            assert not telling(noise, x).any()

    def test_too_few_rows_and_a_constant_input(self):
        x, y = data()
        assert not telling(y[:99], x[:99]).any()
        x[:, 1] = 1.0
        assert telling(y, x).tolist()[1] is False
        x[:, 1] = torch.arange(600) % 2  # two groups, and not the order of the rows
        assert telling(torch.arange(600).double(), x).tolist()[1] is False


class TestShorten:
    told, seen = torch.tensor([True, False, False, False]), torch.tensor([True, True, True, False])

    def lengths(self, kernel):
        (x, _), model = data(), Model(kernel).double()
        changed = shorten(model, x, self.told, self.seen)
        return changed, [
            k.lengthscale.flatten().tolist() for k in model.modules() if getattr(k, "has_lengthscale", False)
        ]

    def test_short_in_the_input_and_long_in_the_others(self):
        """Longest in that of which the targets tell nothing."""
        changed, (lengths,) = self.lengths(ard())
        assert changed
        for length, sd, times in zip(lengths, data()[0].std(0), (0.5, 5, 5, 20), strict=True):
            assert abs(length - times * sd) < 1e-6

    def test_one_for_all_inputs(self):
        changed, (lengths,) = self.lengths(kernels.RBFKernel())
        assert changed
        assert len(lengths) == 1

    @pytest.mark.parametrize("case", ["periodic", "other input", "frozen", "features of its own", "a constraint"])
    def test_what_stays(self, case):
        kernel = {
            "periodic": lambda: kernels.PeriodicKernel(active_dims=[0]),
            "other input": lambda: kernels.RBFKernel(active_dims=[1]),
            "frozen": lambda: kernels.RBFKernel().requires_grad_(False),
            "features of its own": lambda: kernels.RBFKernel(ard_num_dims=2),
            "a constraint": lambda: kernels.RBFKernel(lengthscale_constraint=gp.constraints.Interval(2.0, 3.0)),
        }[case]()
        before = kernel.lengthscale.tolist()[0]
        if case == "features of its own":  # of which forward makes two
            (x, _), model = data(), Model(kernel).double()
            assert not shorten(model, x, self.told, self.seen)
        else:
            assert self.lengths(kernel)[0] is False
        assert all(abs(a - b) < 1e-6 for a, b in zip(kernel.lengthscale.tolist()[0], before, strict=True))


class TestPeriods:
    @pytest.mark.parametrize("seed", range(3))
    def test_periods_are_found(self, seed):
        generator = torch.Generator().manual_seed(seed)
        x, noise = 10 * torch.rand(400, 1, generator=generator).double(), torch.randn(400, generator=generator).double()
        line = x[:, 0]
        sine, saw = torch.sin(2 * math.pi * line / 0.7) + 0.2 * noise, (line / 1.3) % 1 + 0.3 * line + 0.1 * noise
        assert abs(period_of(x, sine, 0)[0] - 0.7) < 0.002
        assert abs(period_of(x, saw, 0)[0] - 1.3) < 0.02
        for silent in (noise, torch.sin(line / 4) + 0.1 * noise):
            assert period_of(x, silent, 0) == (math.inf, 0.0)

    @pytest.mark.parametrize("noise", [0.0, 0.1])
    def test_smooth_functions_have_none(self, noise):
        """Powers, single steps and bumps, and draws whose length scale is a sixteenth of the inputs or more."""
        generator = torch.Generator().manual_seed(0)
        x, z = (scale * (torch.rand(200, 5, generator=generator).double() - 0.5) for scale in (4, 3.5))
        distances, x = x[:, :1] - x[:, 0], x[:, :1]
        kernels = [(-0.5 * (distances / scale) ** 2).exp() + 1e-8 * torch.eye(200) for scale in (2.0, 1.0, 0.5, 0.25)]
        draws = [torch.linalg.cholesky(K) @ column for K in kernels for column in z[:, :4].mT]
        t = x[:, 0]
        for f in (t, t**2, t**3, t.exp(), t.abs(), t.sign(), (3 * t).tanh(), (-4 * t**2).exp(), *draws):
            assert period_of(x, f + noise * f.std() * z[:, 4], 0) == (math.inf, 0.0)
        assert abs(period_of(x, torch.sin(2 * math.pi * t) + noise * z[:, 4], 0)[0] - 1.0) < 0.01

    @pytest.mark.parametrize("cycles", [1.6, 2.0, 2.5])
    def test_few_cycles_where_nothing_else_is_smooth(self, cycles):
        """A polynomial explains as much of so few; with no other kernel for that input it is not asked."""
        generator = torch.Generator().manual_seed(0)
        x = cycles * torch.rand(300, 1, generator=generator).double()
        y = torch.sin(2 * math.pi * x[:, 0]) + 0.2 * torch.randn(300, generator=generator).double()
        assert period_of(x, y, 0) == (math.inf, 0.0)
        for kernel, found in (
            (gp.kernels.PeriodicKernel(), 1.0),
            (gp.kernels.PeriodicKernel() + gp.kernels.RBFKernel(), 0),
        ):
            model = SparseModel(NaturalGradientVariationalDistribution(5), torch.zeros(5, 1), kernel).double()
            begin_periods(model, x, y, lambda: 0.0)
            period = next(m for m in model.modules() if isinstance(m, gp.kernels.PeriodicKernel)).period_length.item()
            assert abs(period - (found or math.log(2))) < 0.06

    @pytest.mark.parametrize("seed", range(3))
    def test_a_weak_fundamental_in_one_of_many_inputs(self, seed):
        """Beside a linear input, the double frequency is stronger."""
        generator = torch.Generator().manual_seed(seed)
        x, noise = 10 * torch.rand(800, 8, generator=generator).double(), torch.randn(800, generator=generator).double()
        phase = 2 * math.pi * x[:, 3] / 0.5
        y = 0.4 * torch.sin(phase) + torch.sin(2 * phase) + x[:, 1] + 0.2 * noise
        assert abs(period_of(x, y, 3)[0] - 0.5) < 0.002
        assert period_of(x, y, 1)[0] == period_of(x, y, 5)[0] == math.inf

    def wave(self, kernel, span=20.0, period=2 * math.pi, dtype=torch.float64, points=30):
        generator = torch.Generator().manual_seed(0)
        x = (span * torch.rand(300, 1, generator=generator)).to(dtype)
        f = torch.sin(2 * math.pi * x[:, 0] / period)
        model = SparseModel(
            NaturalGradientVariationalDistribution(points), x[:points].clone(), kernels.ScaleKernel(kernel)
        )
        return model.to(dtype), x, f, f + 0.1 * torch.randn(300, generator=generator).to(dtype)

    @pytest.mark.accuracy
    @pytest.mark.parametrize("case", [(torch.float64, 20.0, 2 * math.pi), (torch.float32, 100.0, 20.0)])
    def test_a_fit_begins_there(self, case):
        """In float32 K_ZZ has no factor at the period of ln 2 with which GPyTorch begins."""
        dtype, span, period = case
        kernel = kernels.PeriodicKernel()
        model, x, f, y = self.wave(kernel, span, period, dtype, 80)
        learn(model, gp.likelihoods.GaussianLikelihood().to(dtype), (x, y), rounds=2)
        assert abs(kernel.period_length.item() / period - 1) < 0.01
        assert (model.eval()(x).mean - f).square().mean().sqrt().item() < 0.05

    @pytest.mark.parametrize("case", ["fixed", "a constraint", "better", "features of its own"])
    def test_what_stays(self, case):
        kernel = {
            "fixed": lambda: kernels.PeriodicKernel().requires_grad_(False),
            "a constraint": lambda: kernels.PeriodicKernel(period_length_constraint=gp.constraints.Interval(1.0, 3.0)),
            "features of its own": lambda: kernels.PeriodicKernel(active_dims=[1]),
        }.get(case, kernels.PeriodicKernel)()
        model, x, _, y = self.wave(kernel)
        values, before = iter((1.0, 2.0)), kernel.period_length.item()
        begin_periods(model, x, y, lambda: next(values))
        assert kernel.period_length.item() == before
