"""``python -m examples.demo``: three uses of the library, each beside what one would do without it, and one picture of all."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from examples.compare_methods import drawing
from torchngvi.app.outputs import OutputFolder
from torchngvi.extras import install
from torchngvi.fitting.fit import fit
from torchngvi.posteriors import CholeskyGaussian

_QUICK = 20  # how many times shorter the runs of a test are
_LEAST, _MARKED = 1e-3, 50  # nats that are drawn as none; points of a curve that are drawn one by one
_OURS, _OTHER = "#1f5a94", "#d1672b"


class Curve(NamedTuple):
    """The loss of one way of fitting against its cost."""

    label: str
    cost: list[float]
    loss: list[float]


class Use(NamedTuple):
    """One use: its title, what the cost counts, and a curve of each way."""

    title: str
    cost: str
    curves: tuple[Curve, ...]
    said: str  # a sentence


def run(out: str = "runs/demo", *, overwrite: bool = False, quick: bool = False) -> list[Use]:
    """Run the three uses, print a sentence on each, and draw one picture.

    Args:
        out: the folder of the picture.
        overwrite: whether an earlier picture may be replaced.
        quick: whether runs are 20 times shorter, to try that everything is installed.

    Returns:
        The uses whose packages are installed.

    Raises:
        InputError: a folder that cannot be used.
    """
    folder = OutputFolder(out, overwrite=overwrite)
    found, start = [], time.perf_counter()
    for number, (use, package) in enumerate(((_script, ""), (_svgp, "gpytorch"), (_pyro, "pyro")), 1):
        try:
            found.append(use(_QUICK if quick else 1))
        except ImportError as error:
            if (error.name or "").partition(".")[0] != package:
                raise
            print(f"{number}. left out: {package} is not installed; {install(package)}.")
            continue
        print(f"{number}. {found[-1].title}: {found[-1].said}", flush=True)
    with folder.writing() as place:
        _figure(found).savefig(place / "demo.png", dpi=150)
    drawing.show(f"written to {folder.path}/demo.png, after {time.perf_counter() - start:.0f} s")
    return found


def _watched() -> bool:
    """Whether somebody sees the bars."""
    return sys.stderr.isatty()


def _bar(count: int, what: str) -> Iterator[int]:
    return iter(tqdm(range(count), desc=what, leave=False, disable=None))


# ------------------------------------------------------------------------------------ a training script


def _script(shorter: int) -> Use:
    """A logistic regression as a log joint: `fit`, and Adam on the ELBO of 32 draws a step."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(300, 10, generator=generator, dtype=torch.float64) @ _mixing(10)
    y = (torch.rand(300, generator=generator) < torch.sigmoid(X[:, 0] - X[:, 1])).double()

    def log_joint(theta: Tensor) -> Tensor:
        eta = theta @ X.T
        return (y * eta - torch.nn.functional.softplus(eta)).sum(-1) - 0.05 * theta.square().sum(-1)

    q = CholeskyGaussian(10, dtype=torch.float64)
    result = fit(q, log_joint, progress=_watched(), examine=False)
    ours = Curve("fit(q, log_joint)", [r.gradients for r in result.trace], [r.loss for r in result.trace])
    mean = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    root = (0.1 * torch.eye(10, dtype=torch.float64)).requires_grad_()
    loss_of = _reparametrized(log_joint, mean, root, generator)
    adam = _by_adam(loss_of, [mean, root], 2000 // shorter, 32, "Adam, lr 0.01", lr=0.01)
    said = f"{result.gradients} gradients of the log joint to {result.loss:.2f}; Adam took {adam.cost[-1]:.0f} to "
    return Use("A training script", "gradients of the log joint", (ours, adam), f"{said}{adam.loss[-1]:.2f}.")


def _mixing(dim: int) -> Tensor:
    """Columns that are correlated, as those of tables are."""
    return torch.eye(dim, dtype=torch.float64) + 0.5


def _reparametrized(
    log_joint: Callable[[Tensor], Tensor], mean: Tensor, root: Tensor, generator: torch.Generator
) -> Callable[[], Tensor]:
    """The negative ELBO of N(m, LLᵀ) by 32 draws."""

    def loss() -> Tensor:
        lower = root.tril()
        z = torch.randn(32, len(mean), generator=generator, dtype=mean.dtype)
        entropy = lower.diagonal().abs().log().sum() + 0.5 * len(mean) * (1 + torch.log(torch.tensor(2 * torch.pi)))
        return -log_joint(mean + z @ lower.T).mean() - entropy

    return loss


def _by_adam(
    loss: Callable[[], Tensor], parameters: list[Tensor], steps: int, draws: int, label: str, lr: float
) -> Curve:
    """Steps of Adam; the loss is the mean of the last 50."""
    optimizer, losses = torch.optim.Adam(parameters, lr=lr), []
    for _ in _bar(steps, label):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return Curve(label, [float(draws * (k + 1)) for k in range(steps)], _smoothed(losses))


def _smoothed(losses: list[float], over: int = 50) -> list[float]:
    return [sum(losses[max(0, k - over) : k]) / min(k, over) for k in range(1, len(losses) + 1)]


# ------------------------------------------------------------------------------------ GPyTorch


def _svgp(shorter: int) -> Use:
    """A sparse GP on 3000 rows: `train_svgp_in_batches`, and GPyTorch's natural gradients beside the same Adam."""
    import gpytorch

    from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, train_svgp_in_batches

    class SparseGP(gpytorch.models.ApproximateGP):
        def __init__(self, distribution: Any) -> None:
            inducing = torch.linspace(-2, 2, 30)[:, None]
            super().__init__(gpytorch.variational.VariationalStrategy(self, inducing, distribution(30)))
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    torch.manual_seed(0)
    rows, epochs = 3000 // shorter, max(2, 12 // shorter)
    x = 4 * torch.rand(rows, 1) - 2
    y = torch.sin(3 * x[:, 0]) + 0.5 * torch.sin(11 * x[:, 0]) * (x[:, 0] > 0) + 0.2 * torch.randn(rows)
    batches = list(zip(x.split(256), y.split(256), strict=True))

    def hyper(model: Any, likelihood: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([*model.hyperparameters(), *likelihood.parameters()], lr=0.02)

    curves, said = [], []
    for ours in (True, False):
        torch.manual_seed(1)
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        kind = NaturalGradientVariationalDistribution if ours else gpytorch.variational.NaturalVariationalDistribution
        model = SparseGP(kind)
        mll = gpytorch.mlls.VariationalELBO(likelihood, model, rows)
        losses: list[float] = []
        ngd = None if ours else gpytorch.optim.NGD(model.variational_parameters(), num_data=rows, lr=0.1)
        adam = hyper(model, likelihood)
        if ngd is None:
            each = partial(_look, losses, model, mll, x, y)
            train_svgp_in_batches(
                model,
                likelihood,
                batches,
                rows,
                adam,
                epochs=epochs,
                refine=True,
                callbacks=[each],
                progress=_watched(),
            )
            losses.append(_elbo(model, mll, x, y))  # of the exact optimum of q at the end
        for _ in _bar(epochs if ngd else 0, "NGD"):
            _ngd_epoch(model, mll, batches, ngd, adam)
            losses.append(_elbo(model, mll, x, y))
        label = "train_svgp_in_batches" if ours else "NGD(lr=0.1)"
        curves.append(Curve(label, [float(k + 1) for k in range(len(losses))], losses))
        said.append(f"{label} {losses[-1]:.4f}")
    return Use("A sparse GP", "epochs", tuple(curves), f"negative ELBO a row: {', '.join(said)}.")


def _ngd_epoch(model: Any, mll: Any, batches: list[Any], ngd: Any, adam: torch.optim.Optimizer) -> None:
    model.train()
    for part, target in batches:
        ngd.zero_grad()
        adam.zero_grad()
        (-mll(model(part), target)).backward()
        ngd.step()
        adam.step()


def _look(losses: list[float], model: Any, mll: Any, x: Tensor, y: Tensor, epoch: int, loss: float) -> None:
    """Keep the ELBO of all rows after an epoch."""
    losses.append(_elbo(model, mll, x, y))


@torch.no_grad()
def _elbo(model: Any, mll: Any, x: Tensor, y: Tensor) -> float:
    model.train()
    return -float(mll(model(x), y))


# ------------------------------------------------------------------------------------ Pyro


def _pyro(shorter: int) -> Use:
    """A Pyro model with correlated latents: `fit_guide`, and AutoMultivariateNormal by Adam."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoMultivariateNormal
    from pyro.optim import Adam  # type: ignore[attr-defined]

    from torchngvi.adapters.pyro import AutoGaussian, fit_guide

    generator = torch.Generator().manual_seed(0)
    X = torch.randn(200, 8, generator=generator, dtype=torch.float64) @ _mixing(8)
    y = torch.poisson(torch.exp(0.1 * X.sum(-1).clamp(-20, 20)), generator=generator)

    def model() -> None:
        theta = pyro.sample("theta", dist.Normal(torch.zeros(8, dtype=torch.float64), 1.0).to_event(1))
        with pyro.plate("rows", 200):
            pyro.sample("y", dist.Poisson(torch.exp((theta @ X.T).clamp(-20, 20))), obs=y)

    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    result = fit_guide(model, AutoGaussian(model), options={"progress": _watched(), "examine": False})
    ours = Curve("fit_guide", [r.gradients for r in result.trace], [r.loss for r in result.trace])
    pyro.clear_param_store()
    svi = SVI(model, AutoMultivariateNormal(model), Adam({"lr": 0.01}), Trace_ELBO())
    losses = [float(svi.step()) for _ in _bar(3000 // shorter, "AutoMultivariateNormal")]
    other = Curve("AutoMultivariateNormal", [float(k + 1) for k in range(len(losses))], _smoothed(losses))
    said = f"{result.gradients} gradients to {result.loss:.2f}; AutoMultivariateNormal by Adam took {len(losses)} to "
    return Use("A Pyro model", "gradients of the log joint", (ours, other), f"{said}{other.loss[-1]:.2f}.")


# ------------------------------------------------------------------------------------ the picture


def _figure(uses: list[Use]) -> Figure:
    """One panel a use: the loss above the best that either way has reached; Adam's is an average of noisy ones."""
    figure = Figure(figsize=(4.2 * len(uses), 3.6), layout="constrained")
    for axes, use in zip(figure.subplots(1, len(uses), squeeze=False)[0], uses, strict=True):
        best = min(min(curve.loss) for curve in use.curves)
        for curve, color in zip(use.curves, (_OURS, _OTHER), strict=True):
            above = [max(loss - best, _LEAST) for loss in curve.loss]
            marker = "o" if len(above) < _MARKED else None
            axes.plot(curve.cost, above, color=color, label=curve.label, marker=marker, markersize=4)
        axes.set(xlabel=use.cost, title=use.title, yscale="log")
        axes.set_xscale("linear" if use.cost == "epochs" else "log")
        axes.legend(fontsize=8, frameon=False)
        axes.grid(True, color="#e8eaed")
        axes.set_axisbelow(True)
    figure.axes[0].set_ylabel("negative ELBO above the best (nats; of the GP a row)")
    return figure


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--out", default="runs/demo", help="folder of the picture (runs/demo)")
    flags.add_argument("--quick", action="store_true", help="runs that are 20 times shorter")
    flags.add_argument("--overwrite", action="store_true", help="replace an earlier picture")
    run(**vars(flags.parse_args()))
