"""Every strategy of GPyTorch at every door: served, with the identity that shows it, or refused in a sentence."""

import ast
import itertools
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

gp = pytest.importorskip("gpytorch", reason="needs the extra gpytorch: pip install torchngvi[gpytorch]")

from helpers import close  # noqa: E402
from linear_operator.operators import CholLinearOperator, TriangularLinearOperator  # noqa: E402
from test_gpytorch import FULL, NGVD, M, N, data, gaussian, model_with  # noqa: E402
from test_gpytorch_dropin import STRATEGIES, elbo  # noqa: E402

import torchngvi.adapters.gpytorch as adapter  # noqa: E402
from torchngvi import DiagonalGaussian  # noqa: E402
from torchngvi.adapters.gpytorch import (  # noqa: E402
    natural_optimizer,
    refine_svgp,
    train_svgp,
    train_svgp_in_batches,
    variational_posteriors,
)
from torchngvi.errors import PairError  # noqa: E402

v = gp.variational
pytestmark = [  # as in test_gpytorch
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.sparse.SparseTensor:UserWarning"),
]
WHITENED, SEVERAL = ("whitened", "large_batch", "unwhitened"), ("multitask", "lmc")
ELSEWHERE = ("ciq", "grid", "additive_grid", "batch_decoupled", "orthogonal")  # a loop of one's own


def adam_of(model, likelihood):
    return torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.02)


def in_batches(model, likelihood, x, y, **options):
    adam, batches = adam_of(model, likelihood), list(zip(x.split(20), y.split(20), strict=True))
    return train_svgp_in_batches(model, likelihood, batches, N, adam, epochs=3, progress=False, **options)


DOORS = {
    "train_svgp": lambda *a: train_svgp(*a[:2], a[2:], rounds=1, progress=False).refined,
    "train_svgp_in_batches": lambda *a: in_batches(*a, refine=True).refined,
    "refine_svgp": lambda *a: refine_svgp(*a[:2], [a[2:]], progress=False),
}


def problem(name):
    """The model, its likelihood and the data."""
    torch.manual_seed(0)
    x, y = data()
    if name not in SEVERAL:
        return STRATEGIES[name](FULL[0]), gaussian(0.05), x, y
    likelihood = gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=2).double()
    return STRATEGIES[name](FULL[0]), likelihood, x, torch.stack([y, y.cos()], -1)


def test_no_strategy_is_left_out():
    assert {*WHITENED, *SEVERAL, *ELSEWHERE} == STRATEGIES.keys() - {"batch"}  # of models with data of their own


@pytest.mark.accuracy
@pytest.mark.parametrize(("name", "door"), list(itertools.product([*WHITENED, *SEVERAL], DOORS)))
def test_served(name, door):
    """q ends at its optimum by GPyTorch's own objective: its gradient vanishes in the probes."""
    model, likelihood, x, y = problem(name)
    start = -float(elbo(model, likelihood)(model(x), y).detach())
    result = DOORS[door](model, likelihood, x, y)
    assert result.converged
    assert result.loss / N < start
    gradient_of_q(model, likelihood, x, y, 1e-4)


def gradient_of_q(model, likelihood, x, y, largest):
    """The gradient of N times GPyTorch's objective in the probes of every posterior is as small as that."""
    model.train()
    qs = variational_posteriors(model)
    probes = [probe for q in qs for probe in (q.mean_probe, q.root_probe)]
    loss = -N * elbo(model, likelihood)(model(x), y).sum()
    for gradient in torch.autograd.grad(loss, probes):  # of a root the lower part; the rest is a rotation
        assert float((gradient.tril() if gradient.ndim > qs[0].mean.ndim else gradient).abs().max()) < largest


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_refused(name, door):
    """In a sentence that names what serves it, before anything has moved."""
    model, likelihood, x, y = problem(name)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(PairError, match=r"steps from the derivatives of each datum .*; got .*natural_optimizer\(mll\)"):
        DOORS[door](model, likelihood, x, y)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", [*WHITENED, "multitask", *(name for name in ELSEWHERE if name != "orthogonal")])
def test_in_a_loop_of_ones_own(name):
    """A full step is exact for Gaussian noise; not for LMC, whose functions overshoot, nor an orthogonal mean."""
    model, likelihood, x, y = problem(name)
    mll = elbo(model, likelihood)
    natural = natural_optimizer(mll, lr=1.0)
    (-mll(model(x), y)).sum().backward()
    natural.step()
    gradient_of_q(model, likelihood, x, y, 1e-2 if name == "ciq" else 1e-5)


def test_unwhitened_is_whitened():
    """The unwhitened strategy over our q: the steps of the whitened one, from the same start."""
    losses, means = [], []
    for strategy in (v.VariationalStrategy, v.UnwhitenedVariationalStrategy):
        torch.manual_seed(0)
        model, likelihood = model_with(NGVD(M, mean_init_std=0.0), strategy=strategy), gaussian(0.05)
        own = model.variational_strategy
        losses.append(in_batches(model, likelihood, *data()).losses)
        assert model.variational_strategy is own
        means.append(model.eval()(data()[0]).mean.detach())
    close(torch.tensor(losses[0]), torch.tensor(losses[1]), 1e-10)
    close(means[0], means[1], 1e-6)  # GPyTorch's jitters of the two strategies


@pytest.mark.parametrize("strategy", [v.VariationalStrategy, v.UnwhitenedVariationalStrategy])
def test_callbacks_see_the_models_own_q(strategy):
    """GPyTorch's q holds at each callback what was found so far, and keeps its object: the values of our own q."""
    values = []
    for kind in (v.CholeskyVariationalDistribution, NGVD):
        torch.manual_seed(0)
        q = kind(M, mean_init_std=0.0)
        model, likelihood, (x, y), seen = model_with(q, strategy=strategy), gaussian(0.05), data(), []

        def look(*_, model=model, likelihood=likelihood, own=q, seen=seen):
            assert model.variational_strategy._variational_distribution is own
            seen.append(-float(elbo(model, likelihood)(model(data()[0]), data()[1]).detach()))

        assert in_batches(model, likelihood, x, y, callbacks=[look], refine=True).refined.converged
        look()
        values.append(seen)
    assert len(set(values[0])) == 4
    close(torch.tensor(values[0]), torch.tensor(values[1]), 1e-9)


def test_mean_field_of_u_is_refused():
    """A diagonal covariance of u is none of v."""
    model = model_with(NGVD(M, posterior=DiagonalGaussian), strategy=v.UnwhitenedVariationalStrategy)
    with pytest.raises(PairError, match="for the whitened VariationalStrategy; got UnwhitenedVariationalStrategy"):
        in_batches(model, gaussian(0.05), *data())


@pytest.mark.parametrize(("name", "number"), [("ciq", 0), ("grid", 1), ("unwhitened", 1), ("whitened", 1)])
def test_no_factor_of_the_kernel_where_the_strategy_avoids_it(name, number):
    """From the model to the gradient the Cholesky factorisations of GPyTorch with its own q: with CIQ none."""
    for own in (False, True):
        model, likelihood, x, y = problem(name)
        if own:
            model.variational_strategy._variational_distribution = v.CholeskyVariationalDistribution(M).double()
        mll = elbo(model, likelihood)
        (-mll(model(x), y)).backward()  # q starts at the prior
        if not own:
            natural = natural_optimizer(mll, lr=0.5)
            (-mll(model(x), y)).backward()
            natural.step()
        with patch("torch.linalg.cholesky_ex", side_effect=torch.linalg.cholesky_ex) as factored:
            (-mll(model(x), y)).backward()
        assert len(factored.mock_calls) == number


# every name with an underscore that the adapter takes from GPyTorch or linear_operator, and where it stands there
PRIVATE = {
    "_ApproximateMarginalLogLikelihood": gp.mlls._approximate_mll,
    "_VariationalDistribution": v,
    "_VariationalStrategy": v,
    "_approximate_mll": gp.mlls,
    "_clear_cache": gp.Module,
    "_expand_inputs": v.VariationalStrategy,
    "_linalg_dtype_cholesky": gp.settings,
    "_transpose_nonbatch": TriangularLinearOperator,
    "_variational_distribution": model_with(NGVD(2)).variational_strategy,
}
OVERRIDDEN = {"_cholesky", "_expand_batch", "_solve"}  # of CholLinearOperator


def test_private_names():
    """Those that the adapter uses are these, and GPyTorch has them: a version without one fails here, by its name."""
    used, own = set(), set(OVERRIDDEN)
    for path in Path(adapter.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("gpytorch", "linear_operator")):
                used |= {*(node.module or "").split("."), *(name.name for name in node.names)}
            elif isinstance(node, ast.Attribute):
                target = own if isinstance(node.ctx, ast.Store) else used
                target.add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.AnnAssign):
                own.add(node.name if isinstance(node, ast.FunctionDef) else getattr(node.target, "id", ""))
    own -= PRIVATE.keys()
    private = {name for name in used - own if name.startswith("_") and not name.startswith("__")}
    assert private - {"_load_from_state_dict", "_replace"} == PRIVATE.keys()  # of torch.nn.Module and of named tuples
    missing = [name for name, place in PRIVATE.items() if not hasattr(place, name)]
    missing += [name for name in OVERRIDDEN if not hasattr(CholLinearOperator, name)]
    assert not missing, f"GPyTorch {gp.__version__} does not have {missing}"
