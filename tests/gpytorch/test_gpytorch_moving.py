"""Moving into the GPyTorch adapter and out of it: checkpoints, fantasies, tracing, compiling, loops that stay."""

import copy
import functools
import json
import pickle
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

gpytorch = pytest.importorskip("gpytorch", reason="needs the extra gpytorch: pip install torchngvi[gpytorch]")

from helpers import EXACT, IDENTITY, close  # noqa: E402
from test_gpytorch import FULL, NGVD, M, N, data, gaussian, model_with, step, strategies  # noqa: E402

from torchngvi import DiagonalGaussian  # noqa: E402
from torchngvi.adapters.gpytorch import distribution, natural_optimizer, refine_svgp, variational_posteriors  # noqa: E402
from torchngvi.errors import InputError, PairError  # noqa: E402
from torchngvi.posteriors.flat import FlatCholesky  # noqa: E402

gp = gpytorch
v = gp.variational
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
THEIRS = [
    v.CholeskyVariationalDistribution,
    v.MeanFieldVariationalDistribution,
    v.NaturalVariationalDistribution,
    v.TrilNaturalVariationalDistribution,
]


def elbo(model, likelihood=None, **options):
    return gp.mlls.VariationalELBO(likelihood or gaussian(0.05), model, num_data=N, **options)


@functools.cache
def trained_by_gpytorch(kind, batch=(), steps=5):
    """A model of GPyTorch's own, as it is checkpointed."""
    torch.manual_seed(0)
    x, y = data()
    model = model_with(kind(M, torch.Size(batch)), batch=batch)
    mll, own = elbo(model), list(model.variational_parameters())
    if hasattr(model.variational_strategy._variational_distribution, "natural_vec"):
        optimizer = gp.optim.NGD(own, num_data=N, lr=0.1)
    else:
        optimizer = torch.optim.Adam(own, lr=0.05)
    for _ in range(steps):
        step(model, mll, optimizer, x, y)
    model.variational_strategy._clear_cache()  # of the last pass, with its graph, which cannot be copied
    return model


def stepped(strategy=v.VariationalStrategy, **options):
    """A model of ours after a full step, with its objective and its optimizer."""
    x, y = data()
    model = model_with(NGVD(M, **options), strategy=strategy)
    model.likelihood = gaussian(0.05)
    mll = elbo(model, model.likelihood)
    natural = natural_optimizer(mll, lr=1.0)
    step(model, mll, natural, x, y)
    return model, mll, natural


class TestCheckpoints:
    @pytest.mark.parametrize("posterior", [*FULL, FlatCholesky])
    @pytest.mark.parametrize("kind", THEIRS)
    def test_loaded(self, kind, posterior):
        """A checkpoint of GPyTorch's own has the same predictions here, and is refined from there."""
        x, y = data()
        theirs = trained_by_gpytorch(kind)
        model = model_with(NGVD(M, posterior=posterior))
        kept = {name: part.clone() for name, part in theirs.state_dict().items()}
        model.load_state_dict(kept)
        assert all(torch.equal(part, kept[name]) for name, part in theirs.state_dict().items())
        with torch.no_grad():
            a, b = theirs.eval()(x), model.eval()(x)
        close(b.mean, a.mean, EXACT)
        close(b.variance, a.variance, EXACT)
        if posterior in FULL:
            refined = refine_svgp(model.train(), gaussian(0.05), [(x, y)], progress=False)
            assert refined.converged
            with torch.no_grad():
                assert refined.loss < -float(elbo(theirs)(theirs.train()(x), y)) * N - 1e-3

    def test_columns_of_either_sign(self):
        """Adam may leave a factor with a negative diagonal, whose covariance is as good."""
        theirs = copy.deepcopy(trained_by_gpytorch(v.CholeskyVariationalDistribution))
        chol = theirs.variational_strategy._variational_distribution.chol_variational_covar
        chol.data[:, 3] *= -1
        model = model_with(NGVD(M))
        model.load_state_dict(theirs.state_dict())
        q = variational_posteriors(model)[0]
        assert bool((q.scale_tril.diagonal() > 0).all())
        close(q.covariance, chol.detach().tril() @ chol.detach().tril().mT, EXACT)

    def test_marginals_of_a_full_covariance(self):
        theirs = trained_by_gpytorch(v.CholeskyVariationalDistribution)
        model = model_with(NGVD(M, posterior=DiagonalGaussian))
        model.load_state_dict(theirs.state_dict())
        with torch.no_grad():
            expected = theirs.variational_strategy._variational_distribution()
        close(variational_posteriors(model)[0].variance, expected.variance, EXACT)

    def test_a_batch(self):
        theirs = trained_by_gpytorch(v.CholeskyVariationalDistribution, batch=(3,))
        model = model_with(NGVD(M, (3,)), batch=(3,))
        model.load_state_dict(theirs.state_dict())
        with torch.no_grad():
            close(model.eval()(data()[0]).variance, theirs.eval()(data()[0]).variance, EXACT)

    def test_another_size(self):
        with pytest.raises(RuntimeError, match=r"size mismatch for variational_mean.*\[12\].*\[11\]"):
            model_with(NGVD(M - 1)).variational_strategy._variational_distribution.load_state_dict(
                v.CholeskyVariationalDistribution(M).state_dict()
            )

    def test_back(self):
        """What `to_cholesky` gives is a checkpoint for a model of GPyTorch's own."""
        model, _, _ = stepped()
        strategy = model.variational_strategy
        with torch.no_grad():
            expected = model.eval()(data()[0])
        strategy._variational_distribution = strategy._variational_distribution.to_cholesky()
        theirs = model_with(v.CholeskyVariationalDistribution(M))
        theirs.load_state_dict({name: part for name, part in model.state_dict().items() if "likelihood" not in name})
        with torch.no_grad():
            got = theirs.eval()(data()[0])
        close(got.mean, expected.mean, IDENTITY)
        close(got.variance, expected.variance, IDENTITY)


class TestServed:
    @pytest.mark.sparse(3)
    @pytest.mark.filterwarnings("ignore:A not p.d.")  # GPyTorch's pseudo-points
    @pytest.mark.parametrize("strategy", [v.VariationalStrategy, v.UnwhitenedVariationalStrategy])
    @pytest.mark.parametrize("posterior", [FULL[1], DiagonalGaussian])
    def test_fantasies(self, strategy, posterior):
        """`get_fantasy_model` of q is that of the same q as GPyTorch's own, also after a further step."""
        x, y = data()
        model, mll, natural = stepped(strategy, posterior=posterior)
        for shift in (0.0, 1.0):
            step(model.train(), mll, natural, x, y + shift)
            other = copy.deepcopy(model).eval()
            held = other.variational_strategy
            held._variational_distribution = held._variational_distribution.to_cholesky()
            with torch.no_grad():
                told, expected = (m.eval().get_fantasy_model(x[:3], y[:3] + 2.0)(x) for m in (model, other))
                close(told.mean, expected.mean, EXACT)
                close(told.variance, expected.variance, EXACT)
                assert float((told.mean - model(x).mean).abs().max()) > 0.1

    def test_tracing(self, tmp_path):
        """TorchScript: a trace in eval mode, saved and loaded, predicts elsewhere."""
        model, _, _ = stepped()

        class Moments(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model.eval()

            def forward(self, x):
                f = self.model(x)
                return f.mean, f.variance

        x, wrapped = data()[0], Moments()
        with warnings.catch_warnings(), torch.no_grad(), gp.settings.trace_mode():
            warnings.simplefilter("ignore")  # of torch, for every branch in GPyTorch
            wrapped(x)
            torch.jit.trace(wrapped, x).save(tmp_path / "model.pt")
            loaded = torch.jit.load(tmp_path / "model.pt")
            for got, expected in zip(loaded(0.9 * x[:7]), wrapped(0.9 * x[:7]), strict=True):
                close(got, expected, EXACT)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")  # of dynamo, which breaks the graph at what GPyTorch memoises
    def test_compiling(self):
        """`torch.compile` of a model: the steps are those without."""
        x, y = data()
        losses = []
        for compiled in (False, True):
            model = model_with(NGVD(M, mean_init_std=0.0))
            mll = elbo(model)
            natural = natural_optimizer(mll, lr=0.5)
            called = torch.compile(model, backend="eager") if compiled else model
            losses.append([float(step(called, mll, natural, x, y)) for _ in range(3)])
        assert losses[0] == losses[1]

    @pytest.mark.parametrize("distribution", [NGVD, v.CholeskyVariationalDistribution])
    def test_training_what_was_compiled(self, distribution):
        """It is refused, and what was compiled can be trained, which the compiled one sees."""
        rows = data()
        model = model_with(distribution(M))
        compiled = torch.compile(model, backend="eager")
        own = model.variational_strategy._variational_distribution
        text = "the model was compiled by torch.compile, .* Give the model that was compiled: both hold the same"
        with pytest.raises(PairError, match=text):
            refine_svgp(compiled, gaussian(0.05), [rows], progress=False)
        assert model.variational_strategy._variational_distribution is own
        refine_svgp(model, gaussian(0.05), [rows], progress=False)
        held = compiled.variational_strategy._variational_distribution
        assert held is own
        with torch.no_grad():
            assert float(held().mean.abs().max()) > 0.1

    @pytest.mark.parametrize("strategy", [v.VariationalStrategy, v.UnwhitenedVariationalStrategy])
    def test_autocast(self, strategy):
        """A float32 model is refused; a float64 model, which autocast leaves alone, is as it was."""
        x, y = data()
        text = "autocast evaluates the kernel matrix of the inducing points in half precision, where it is not positive"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model = model_with(NGVD(M), strategy=strategy).float()
            with pytest.raises(InputError, match=text):
                model(x.float())
            with torch.autocast("cpu", enabled=False):
                model(x.float())
            model = model_with(NGVD(M, mean_init_std=0.0), strategy=strategy)
            inside = elbo(model)(model(x), y)
        close(inside, elbo(model)(model(x), y), EXACT)

    def test_no_factorisation_where_the_strategy_avoids_it(self):
        """CIQ and mean field: q starts at the prior without a Cholesky factor of its covariance."""
        x, _ = data()
        model = strategies()["ciq"](FULL[0])
        mean_field = model_with(NGVD(M, posterior=DiagonalGaussian), strategy=v.UnwhitenedVariationalStrategy)
        expected = mean_field.variational_strategy.prior_distribution.variance.detach()
        with patch("torch.linalg.cholesky_ex", side_effect=AssertionError("a factorisation")):
            model(x)
            q = mean_field.variational_strategy._variational_distribution
            q.initialize_variational_distribution(mean_field.variational_strategy.prior_distribution)
        close(q.posterior.variance, expected, EXACT)


def by_hand(model, likelihood, x, y, rounds):
    """The loop of two optimizers."""
    mll = elbo(model, likelihood)
    natural = natural_optimizer(mll, lr=0.5)
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    for _ in range(rounds):
        adam.zero_grad()
        (-mll(model(x), y)).backward()
        natural.step()
        adam.step()


def switched(model, likelihood, x, y, rounds):
    """GPyTorch's own loop."""
    mll = elbo(model, likelihood)
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    natural_optimizer(mll, lr=0.9, hyper_optimizer=adam)
    natural_optimizer(mll, lr=0.5, hyper_optimizer=adam)  # a cell that is run again
    for _ in range(rounds):
        adam.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        adam.step()


class TestHyperOptimizer:
    def test_the_same_steps(self):
        """q steps after each step of Adam, once, by the last optimizer that was built."""
        ends = []
        for loop in (by_hand, switched):
            model, likelihood = model_with(NGVD(M, mean_init_std=0.0)), gaussian(0.05)
            loop(model, likelihood, *data(), 10)
            ends.append({**model.state_dict(), **likelihood.state_dict()})
        assert all(torch.equal(part, ends[1][name]) for name, part in ends[0].items())

    def test_by_hand_again(self):
        """An optimizer that is built without one ends the steps beside Adam."""
        x, y = data()
        model, likelihood = model_with(NGVD(M)), gaussian(0.05)
        mll = elbo(model, likelihood)
        adam = torch.optim.Adam(model.parameters(), lr=0.05)
        natural_optimizer(mll, lr=0.5, hyper_optimizer=adam)
        natural = natural_optimizer(mll, lr=0.5)
        (-mll(model(x), y)).backward()
        before = natural.posteriors[0].mean.clone()
        adam.step()
        assert torch.equal(natural.posteriors[0].mean, before)
        natural.step()
        assert not torch.equal(natural.posteriors[0].mean, before)

    def test_a_loss_without_q(self):
        model = model_with(NGVD(M))
        adam = torch.optim.Adam(model.parameters(), lr=0.05)
        natural = natural_optimizer(elbo(model), lr=0.5, hyper_optimizer=adam)
        before = natural.posteriors[0].mean.clone()
        model.covar_module.outputscale.square().backward()
        adam.step()
        assert torch.equal(natural.posteriors[0].mean, before)

    def test_copies(self):
        """A copy of the model does not step with the optimizer of the original."""
        x, y = data()
        model = model_with(NGVD(M))
        mll = elbo(model)
        adam = torch.optim.Adam(model.parameters(), lr=0.05)
        natural_optimizer(mll, lr=0.5, hyper_optimizer=adam)
        step(model, mll, adam, x, y)
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        step(model, mll, adam, x, y)
        a, b, c = (variational_posteriors(each)[0].mean for each in (model, *copies))
        assert torch.equal(b, c)
        assert not torch.equal(a, b)

    def test_what_it_refuses(self):
        model = model_with(NGVD(M))
        mll = elbo(model)
        lbfgs = torch.optim.LBFGS(model.parameters())
        with pytest.raises(InputError, match="LBFGS evaluates the loss several times a step, and q would step on the"):
            natural_optimizer(mll, hyper_optimizer=lbfgs)
        for other, name in ((natural_optimizer(mll), "VN"), (model, "Model")):
            with pytest.raises(InputError, match=rf"hyper_optimizer is a torch optimizer of the .*; got {name}\."):
                natural_optimizer(mll, hyper_optimizer=other)


class TestWrongUse:
    def test_gpytorchs_own_optimizers(self):
        """NGD, and Adam by groups, over parameters that q does not have."""
        model = model_with(NGVD(M))
        text = r"variational_parameters\(\) has nothing for an optimizer to move: q steps by .* build natural_optimizer"
        with pytest.raises(InputError, match=text):
            gp.optim.NGD(model.variational_parameters(), num_data=N, lr=0.1)
        with pytest.raises(InputError, match=text):
            torch.optim.Adam([{"params": model.hyperparameters()}, {"params": model.variational_parameters()}])
        q = model.variational_strategy._variational_distribution
        assert len(list(model.hyperparameters())) == len(list(model.parameters())) == 4
        assert list(q.parameters()) == list(q.named_parameters(recurse=False)) == []

    def test_q_that_nothing_moves(self, monkeypatch):
        """Adam alone, after a switch of the distribution only: a warning, once."""
        monkeypatch.setattr(distribution, "_PATIENCE", 10)
        x, y = data()
        model = model_with(NGVD(M))
        mll = elbo(model)
        adam = torch.optim.Adam(model.parameters(), lr=1e-3)
        natural = natural_optimizer(mll, lr=0.1)

        def loop(rounds, natural=None):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for _ in range(rounds):
                    step(model, mll, adam, x[:5], y[:5])
                    if natural is not None:
                        natural.step()
            return [str(each.message) for each in said]

        assert not loop(10)
        (text,) = loop(10)
        assert text.startswith("q has not been stepped in 10 passes and stays where it is: model.parameters() does not")
        natural.zero_grad()
        assert not loop(15, natural)

    def test_q_that_nothing_moved_before_a_prediction(self):
        """A loop of fewer passes, and two predictions: a warning, once."""
        x, y = data()
        model = model_with(NGVD(M))
        for _ in range(12):
            step(model, elbo(model), torch.optim.Adam(model.parameters(), lr=1e-3), x[:5], y[:5])
        with pytest.warns(UserWarning, match="q has not been stepped in 11 passes") as said, torch.no_grad():
            model.eval()(x[:5]), model(x[5:])
        assert len(said) == 1


TUTORIAL = """%matplotlib inline
import torch
import gpytorch
from scipy.io import loadmat
data = torch.Tensor(loadmat('../elevators.mat')['data'])
train_x, train_y, test_x, test_y = data[:200, :-1], data[:200, -1], data[200:, :-1], data[200:, -1]
from gpytorch.variational import CholeskyVariationalDistribution
class Sparse(gpytorch.models.ApproximateGP):
    def __init__(self, Z):
        q = CholeskyVariationalDistribution(Z.size(0))
        super().__init__(gpytorch.variational.VariationalStrategy(self, Z, q))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
model, likelihood = Sparse(train_x[:20]), gpytorch.likelihoods.GaussianLikelihood()
optimizer = torch.optim.Adam([{'params': model.parameters()}, {'params': likelihood.parameters()}], lr=0.01)
mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=200)
for _ in range(15):
    optimizer.zero_grad()
    loss = -mll(model(train_x), train_y)
    loss.backward()
    optimizer.step()
"""


def test_a_switch_in_three_lines(tmp_path, monkeypatch, capsys):
    """Of a loop in the manner of GPyTorch's tutorials three lines change, and it ends lower."""
    monkeypatch.delenv("TORCHNGVI_DATA", raising=False)
    notebook = tmp_path / "examples" / "04_Variational_and_Approximate_GPs" / "SVGP_Regression_CUDA.ipynb"
    notebook.parent.mkdir(parents=True)
    notebook.write_text(json.dumps({"cells": [{"cell_type": "code", "source": [TUTORIAL]}]}))
    main = runpy.run_path(str(BENCHMARKS / "gpytorch_tutorials.py"))["main"]
    threads = torch.get_num_threads()
    results = main([str(tmp_path), "regression", "--rows", "300"])
    torch.set_num_threads(threads)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line[:1] in ("+", "-")] == [
        "+from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, natural_optimizer",
        "-        q = CholeskyVariationalDistribution(Z.size(0))",
        "+        q = NaturalGradientVariationalDistribution(Z.size(0))",
        "+natural_optimizer(mll, lr=0.5, hyper_optimizer=optimizer)",
    ]
    theirs, ours = (results["regression", who, 0] for who in ("GPyTorch", "ours"))
    assert ours["loss"] < theirs["loss"] - 0.1
    assert ours["test NLL"] < theirs["test NLL"]


SUITE = """
import unittest
import gpytorch
import torch


class TestSubstituted(unittest.TestCase):
    def test_trained(self):
        x = torch.linspace(0, 1, 20)[:, None]
        strategy = gpytorch.variational.VariationalStrategy
        class Model(gpytorch.models.ApproximateGP):
            def __init__(self):
                super().__init__(strategy(self, x[::4], gpytorch.variational.CholeskyVariationalDistribution(5)))
                self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
            def forward(self, x):
                return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        model = Model()
        mll = gpytorch.mlls.VariationalELBO(gpytorch.likelihoods.GaussianLikelihood(), model, 20)
        adam = torch.optim.Adam(model.parameters(), lr=0.0)
        for _ in range(20):
            adam.zero_grad()
            (-mll(model(x), 3 * x[:, 0])).backward()
            adam.step()
        self.assertLess(float((model(x).mean - 3 * x[:, 0]).abs().mean()), 0.2)

    def test_unexplained(self):
        self.assertEqual(1, 2)
"""


def clone_of_gpytorch(folder):
    """What the script looks for in a clone, with a test of our own."""
    (folder / "test" / "variational").mkdir(parents=True)
    (folder / "test" / "variational" / "test_it.py").write_text(SUITE)
    copied = folder / "gpytorch" / "variational"
    shutil.copytree(Path(gpytorch.__file__).parent / "variational", copied)
    return copied


@pytest.mark.slow
def test_the_peer_suite(tmp_path):
    """The script substitutes q, steps it beside the test's optimizer, and a failure without a reason is an error."""
    clone_of_gpytorch(tmp_path)
    call = [sys.executable, str(BENCHMARKS / "gpytorch_suite.py"), str(tmp_path)]
    ran = subprocess.run(call, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "ours: 1 of 2 pass, 1 fail, 0 skipped" in ran.stdout
    assert "1 x NOT EXPLAINED" in ran.stdout


def test_what_the_peer_suite_reads(tmp_path):
    """A clone of the installed version; a reason is one of the test and of the error."""
    script = runpy.run_path(str(BENCHMARKS / "gpytorch_suite.py"))
    copied, tests_of, reason_of = clone_of_gpytorch(tmp_path), script["tests_of"], script["reason_of"]
    assert tests_of(tmp_path) == [str(tmp_path / "test" / "variational" / "test_it.py")]
    (copied / "variational_strategy.py").write_text("")
    with pytest.raises(SystemExit, match="is not the source of the installed GPyTorch .*: check out its tag"):
        tests_of(tmp_path)
    with pytest.raises(SystemExit, match="has no tests: give the folder of a clone of GPyTorch"):
        tests_of(tmp_path / "gpytorch")
    natural = "test/variational/test_natural_variational_distribution.py::TestNatVariational::test_natgrad"
    assert "natural parameters" in reason_of(natural, "AttributeError: 'Full' object has no attribute 'natural_vec'")
    assert reason_of(natural, "AssertionError") is None
    assert reason_of(natural.replace("natgrad", "invertible_init"), "has no attribute 'natural_vec'") is None
