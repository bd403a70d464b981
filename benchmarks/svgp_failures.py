"""Where GPyTorch's natural gradients fail, row after row, in float32 and float64: theirs and ours.

    python benchmarks/svgp_failures.py [--steps 100] [--rows 500] [--out table.md]
    TORCHNGVI_DATA=... python benchmarks/svgp_failures.py --naval

A sparse GP on sin(3x): first q and, by Adam at 0.01, hyper-parameters; then q alone on all data, theirs with as many
steps at the same rate, ours with steps found by trial.  A cell is the gap, in nats per datum, between the objective
where a run has ended and the highest one for the hyper-parameters it has found, both computed in float64; or the error
and the step at which it was raised.  "rejected" counts the natural steps of the first part that were not taken.

With ``--naval``: 3,000 rows of naval, M = 256, all of them in each step, Adam at 0.1 for the hyper-parameters; a cell
has the negative log predictive density of the test rows and the share of them within their 95 % intervals, after 80
steps.  An error would be told; none is raised.  `train_svgp` has the rows alone.
"""

import argparse
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import gpytorch as gp

from torchngvi import IBLR, VN, KLRadius
from torchngvi.adapters.gpytorch import (
    NaturalGradientVariationalDistribution,
    SparseGP,
    natural_optimizer,
    refine_svgp,
    train_svgp,
    train_svgp_in_batches,
    variational_posteriors,
)

v = gp.variational
POSITIVE = gp.constraints.GreaterThan(1e-9)
STEADY = {"step_size": KLRadius(1.0)}  # steps of a nat or so, where q is far from where it belongs
INSIDE = {"method": IBLR, "step_size": KLRadius(4.0)}  # steps that cannot leave the cone
SHORT = {"method": IBLR, "step_size": KLRadius(0.3)}


class Row(NamedTuple):
    """A setting; ``options`` are what the documents advise for ours."""

    likelihood: Callable[[], Any]
    targets: Callable[[torch.Tensor], torch.Tensor]  # of the latent function
    lr: float
    points: int = 64
    batch: int | None = None
    objective: str = "VariationalELBO"
    options: dict[str, Any] = {}


def gaussian(noise):
    likelihood = gp.likelihoods.GaussianLikelihood(noise_constraint=POSITIVE)
    likelihood.noise = noise
    return likelihood


def student(scale2):
    likelihood = gp.likelihoods.StudentTLikelihood(noise_constraint=POSITIVE)
    likelihood.noise = scale2
    return likelihood


def noisy(noise):
    return lambda f: f + noise**0.5 * torch.randn_like(f)


ROWS = {
    "Gaussian, noise 1e-4, M = 128, lr 1": Row(lambda: gaussian(1e-4), noisy(1e-4), 1.0, points=128, options=STEADY),
    "Gaussian, noise 1e-6, lr 0.1": Row(lambda: gaussian(1e-6), noisy(1e-6), 0.1, options=STEADY),
    "Gaussian, noise 1e-6, lr 1": Row(lambda: gaussian(1e-6), noisy(1e-6), 1.0, options=STEADY),
    "Gaussian, noise 1e-4, batch 16, lr 1": Row(lambda: gaussian(1e-4), noisy(1e-4), 1.0, batch=16, options=STEADY),
    "Student-t, far from the prior, lr 0.1": Row(
        lambda: student(1e-3), lambda f: 10 * noisy(1e-2)(f) + 5, 0.1, options=INSIDE
    ),
    "predictive log likelihood, lr 0.5": Row(
        lambda: gaussian(1e-2), noisy(1e-2), 0.5, objective="PredictiveLogLikelihood", options=SHORT
    ),
    "predictive log likelihood, lr 1": Row(
        lambda: gaussian(1e-2), noisy(1e-2), 1.0, objective="PredictiveLogLikelihood", options=SHORT
    ),
    "Gaussian, full batch, lr 2.1": Row(lambda: gaussian(1e-2), noisy(1e-2), 2.1),
    "Bernoulli, lr 1": Row(gp.likelihoods.BernoulliLikelihood, lambda f: (f > 0).to(f), 1.0),
    "Poisson, rates to e^7, lr 0.1": Row(
        gp.likelihoods.PoissonLikelihood, lambda f: torch.poisson((3.5 + 3.5 * f).exp()), 0.1
    ),
    "Student-t, lr 1": Row(gp.likelihoods.StudentTLikelihood, noisy(1e-2), 1.0, options=INSIDE),
}
DTYPES = (torch.float32, torch.float64)


class Model(gp.models.ApproximateGP):
    def __init__(self, q):
        Z = torch.linspace(-2, 2, q.num_inducing_points)[:, None]
        super().__init__(v.VariationalStrategy(self, Z, q))
        self.mean_module = gp.means.ConstantMean()
        self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel())

    def forward(self, x):
        return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Attempt(NamedTuple):
    """How a run has ended."""

    gap: float  # nats per datum above the optimum of q at the hyper-parameters reached
    objective: float  # there, per datum
    rejections: int
    error: str  # and the step at which it was raised, or nothing

    def __str__(self):
        if self.error:
            return self.error
        shown = "not finite" if not math.isfinite(self.gap) else f"{max(self.gap, 0.0):.1e}"
        return f"{shown}, {self.rejections} rejected" if self.rejections else shown


def data(row, rows, dtype):
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(0)
    x = 4 * torch.rand(rows, 1, dtype=torch.float64) - 2
    y = row.targets(torch.sin(3 * x[:, 0]))
    torch.random.set_rng_state(generator_state)
    return x.to(dtype), y.to(dtype)


def batches_of(row, x, y, steps, more):
    """Mini-batches, the same for every method; then all data, with hyper-parameters that stand still."""
    order = torch.Generator().manual_seed(1)
    for _ in range(steps):
        some = torch.randperm(len(y), generator=order)[: row.batch]
        yield x[some], y[some], True
    for _ in range(more):
        yield x, y, False


def double(model, likelihood, mean, root):
    """The same hyper-parameters and q in float64, with the jitter of the dtype trained in."""
    copied = Model(NaturalGradientVariationalDistribution(len(mean)))
    state = {name: value for name, value in model.state_dict().items() if "_variational_distribution" not in name}
    copied.load_state_dict(state, strict=False)
    copied = copied.double().train()
    copied.variational_strategy.jitter_val = model.variational_strategy.jitter_val
    copied.variational_strategy.variational_params_initialized.fill_(1)
    exact = type(likelihood)(noise_constraint=POSITIVE) if hasattr(likelihood, "noise") else type(likelihood)()
    exact.load_state_dict(likelihood.state_dict())
    variational_posteriors(copied)[0].initialize_(mean, root)
    return copied, exact.double()


def judged(row, model, likelihood, x, y):
    """The objective at the end of a run and its best value for the hyper-parameters, per datum."""
    strategy = model.variational_strategy
    strategy._clear_cache()
    with torch.no_grad():
        q = strategy._variational_distribution()
        mean, root = q.mean.double(), q.lazy_covariance_matrix.root.to_dense().double()
    root = root * root.diagonal().sign()
    if not bool(torch.isfinite(mean).all() and torch.isfinite(root).all() and (root.diagonal() > 0).all()):
        return math.inf, math.inf
    model, likelihood = double(model, likelihood, mean, root)
    x, y, count = x.double(), y.double(), len(y)
    if row.objective == "VariationalELBO":
        target = SparseGP(model, likelihood, [(x, y)])
        reached = float(target.negative_elbo(target.posterior)) / count
        return reached, refine_svgp(model, likelihood, [(x, y)], progress=False).loss / count
    mll = getattr(gp.mlls, row.objective)(likelihood, model, num_data=count)
    q = variational_posteriors(model)[0]
    reached = -mll(model(x), y).item()
    return reached, min(reached, finished(q, lambda: -mll(model(x), y), count, 40))


def finished(q, loss, rows, steps):
    """Steps of q by trial, on all data; the last loss."""
    natural = VN(q, loss_scale=rows)
    return min(natural.step(loss).item() for _ in range(steps))


def ended(row, model, likelihood, x, y, rejections=0, error=""):
    if error:
        return Attempt(math.inf, math.inf, rejections, error)
    reached, best = judged(row, model, likelihood, x, y)
    return Attempt(reached - best, reached, rejections, "")


def started(row, q, dtype):
    torch.manual_seed(0)
    model, likelihood = Model(q).to(dtype).train(), row.likelihood().to(dtype).train()
    return model, likelihood, torch.optim.Adam([*model.hyperparameters(), *likelihood.parameters()], lr=0.01)


def loop(row, q, dtype, rows, steps, optimizer_of):
    """The usual one: a backward pass, a natural step, a step of Adam."""
    model, likelihood, adam = started(row, q, dtype)
    x, y = data(row, rows, dtype)
    mll = getattr(gp.mlls, row.objective)(likelihood, model, num_data=rows)
    natural, error = optimizer_of(mll), ""
    ours = isinstance(q, NaturalGradientVariationalDistribution)
    for index, (inputs, targets, learn) in enumerate(batches_of(row, x, y, steps, 0 if ours else steps)):
        try:
            natural.zero_grad()
            adam.zero_grad()
            loss = -mll(model(inputs), targets)
            loss.backward()
        except Exception as raised:  # what the user would have seen
            error = f"{type(raised).__name__} step {index}"
            break
        if not bool(torch.isfinite(loss)):
            error = f"NaN step {index}"
            break
        natural.step()
        if learn:
            adam.step()
    if ours:
        finished(q.posterior, lambda: -mll(model(x), y), rows, max(20, steps // 4))
    return ended(row, model, likelihood, x, y, getattr(natural, "rejections", 0), error)


def theirs(row, kind, dtype, rows, steps):
    def ngd(mll):
        return gp.optim.NGD(mll.model.variational_parameters(), num_data=rows, lr=row.lr)

    return loop(row, kind(row.points), dtype, rows, steps, ngd)


def drop_in(row, dtype, rows, steps):
    q = NaturalGradientVariationalDistribution(row.points)
    return loop(row, q, dtype, rows, steps, lambda mll: natural_optimizer(mll, lr=row.lr, **row.options))


def direct(row, dtype, rows, steps):
    """`train_svgp_in_batches` with the verdict at its end; no learning rate for q."""
    if row.objective != "VariationalELBO":
        return None
    model, likelihood, adam = started(row, NaturalGradientVariationalDistribution(row.points), dtype)
    x, y = data(row, rows, dtype)
    size = row.batch or rows
    batches = list(zip(x.split(size), y.split(size), strict=True))
    epochs = max(1, steps // len(batches))
    result = train_svgp_in_batches(model, likelihood, batches, rows, adam, epochs=epochs, refine=True, progress=False)
    return ended(row, model, likelihood, x, y, result.rejections)


def naval(kind, dtype, lr, steps=80):
    """NLPD and coverage on test rows after full-batch steps; of `train_svgp` of data alone where lr is None."""
    from svgp_hyperparameters import load
    from svgp_joint import Model as Joint

    x, y, x_test, y_test = load("naval", 0, "gaussian", dtype)
    x, y = x[:3000], y[:3000]
    torch.manual_seed(0)
    Z = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:256]]
    model, likelihood = Joint(kind(256), Z).to(x).train(), gp.likelihoods.GaussianLikelihood().to(x).train()
    mll = gp.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    ours = kind is NaturalGradientVariationalDistribution
    if lr is None:
        train_svgp(model, likelihood, (x, y), progress=False)
    else:
        natural = natural_optimizer(mll, lr) if ours else gp.optim.NGD(model.variational_parameters(), len(y), lr)
        hypers = [*(model.parameters() if ours else model.hyperparameters()), *likelihood.parameters()]
        adam = torch.optim.Adam(hypers, lr=0.1)
        for step in range(steps):
            try:
                adam.zero_grad()
                natural.zero_grad()
                (-mll(model(x), y)).backward()
                natural.step()
                adam.step()
            except Exception as raised:
                return f"{type(raised).__name__} step {step}"
    model.eval(), likelihood.eval()
    with torch.no_grad():
        p = likelihood(model(x_test))
        z = (y_test - p.mean) / p.stddev
        nlpd = float((0.5 * z.square() + p.stddev.log()).mean()) + 0.5 * math.log(2 * math.pi)
    return f"{nlpd:.2f}, {float((z.abs() < 1.96).float().mean()):.2f}"


def naval_table():
    kinds = {
        "NGD": v.NaturalVariationalDistribution,
        "TrilNatural": v.TrilNaturalVariationalDistribution,
        "ours, drop-in": NaturalGradientVariationalDistribution,
    }
    print("| naval | " + " | ".join([*kinds, "ours, train_svgp"]) + " |", flush=True)
    for dtype in ("float32", "float64"):
        for lr in (0.1, 1.0):
            cells = [naval(kind, dtype, lr) for kind in kinds.values()]
            cells.append(naval(NaturalGradientVariationalDistribution, dtype, None) if lr == 0.1 else "")
            print(f"| lr {lr:g}, {dtype} | " + " | ".join(cells) + " |", flush=True)


METHODS = {
    "NGD": lambda *a: theirs(a[0], v.NaturalVariationalDistribution, *a[1:]),
    "TrilNatural": lambda *a: theirs(a[0], v.TrilNaturalVariationalDistribution, *a[1:]),
    "ours, drop-in": drop_in,
    "ours, train_svgp_in_batches": direct,
}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--out", help="write the table there")
    parser.add_argument("--naval", action="store_true", help="test rows of naval instead")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.naval:
        return naval_table()
    lines = ["| setting | " + " | ".join(METHODS) + " |", "|---|" + "---|" * len(METHODS)]
    for name, row in ROWS.items():
        for dtype in DTYPES if options.only in name else ():
            cells = []
            for method in METHODS.values():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    outcome = method(row, dtype, options.rows, options.steps)
                cells.append("-" if outcome is None else str(outcome))
            lines.append(f"| {name}, {str(dtype).removeprefix('torch.')} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    if options.out:
        Path(options.out).write_text("\n".join(lines) + "\n")
    return lines


if __name__ == "__main__":
    main()
