"""A sparse GP that goes on learning: `condition` beside a refit on all rows, and a loop of Bayesian optimisation.

    python benchmarks/svgp_learning.py [--parts batches single loop] [--rows 10000] [--seeds 0 1 2]

First, 200 rows, then 1, 10 and 100 batches of 20 by `condition`: the largest error of the mean and of the standard
deviation of the latent function at 400 test points, beside `refine_svgp` on all rows at the same hyper-parameters, and
how far the refit itself has moved since the 200 rows.  Second, 10,000 single rows after 200: the same error after 1,000
and after all, and the processor time of a row.  Third, 30 acquisitions (qLogEI) on Hartmann6 after 20 random rows, by a
`SingleTaskVariationalGP` of 60 inducing points: the best value (at most 3.322) and the processor seconds of the models,
without those of the acquisitions, where each row is a refit by `train_svgp`, or a `condition` with a refit every
tenth, or a refit by BoTorch's ``fit_gpytorch_mll`` of at most 50 iterations.
"""

import argparse
import copy
import time
import warnings

import gpytorch
import torch

from torchngvi.adapters.gpytorch import FantasizingModel, condition, refine_svgp, train_mll
from torchngvi.adapters.gpytorch.conditioning import example

LIKELIHOODS = {
    "Gaussian": (gpytorch.likelihoods.GaussianLikelihood, lambda f: f + 0.3 * torch.randn_like(f)),
    "Bernoulli": (gpytorch.likelihoods.BernoulliLikelihood, lambda f: torch.bernoulli(torch.special.ndtr(f))),
    "Poisson": (gpytorch.likelihoods.PoissonLikelihood, lambda f: torch.poisson(f.exp())),
}


def problem(name: str, rows: int) -> tuple:
    """A model of 30 inducing points at fixed hyper-parameters, its likelihood, and rows."""
    torch.manual_seed(0)
    kind, draw = LIKELIHOODS[name]
    x = 6 * torch.rand(rows, 1).double() - 3
    model, likelihood = example()[0], kind().double()
    model.variational_strategy.inducing_points = torch.nn.Parameter(torch.linspace(-3, 3, 30).double()[:, None])
    model.variational_strategy._variational_distribution = gpytorch.variational.CholeskyVariationalDistribution(30)
    model.covar_module.lengthscale = 0.5
    if name == "Gaussian":
        likelihood.noise = 0.09
    return model.double(), likelihood, x, draw(torch.sin(2 * x[:, 0]) + 0.5 * torch.cos(5 * x[:, 0]))


def errors(model: torch.nn.Module, other: torch.nn.Module) -> str:
    """The largest differences of means and of standard deviations at test points."""
    new = torch.linspace(-3, 3, 400).double()[:, None]
    with torch.no_grad():
        a, b = model.eval()(new), other.eval()(new)
    return f"{float((a.mean - b.mean).abs().max()):8.1e} {float((a.stddev - b.stddev).abs().max()):8.1e}"


def learn(name: str, size: int, steps: list[int]) -> None:
    """Condition on batches of a size; compare with a refit after some numbers of them."""
    model, likelihood, x, y = problem(name, 200 + size * steps[-1])
    refine_svgp(model, likelihood, [(x[:200], y[:200])], progress=False)
    start, spent, done = copy.deepcopy(model), 0.0, 0
    for step, (rows, targets) in enumerate(zip(x[200:].split(size), y[200:].split(size), strict=True), 1):
        begun = time.process_time()
        condition(model, likelihood, rows, targets)
        spent, done = spent + time.process_time() - begun, 200 + size * step
        if step in steps:
            whole = copy.deepcopy(start)
            refine_svgp(whole, likelihood, [(x[:done], y[:done])], progress=False)
            cost = f"{1e6 * spent / (done - 200):7.0f}"
            print(f"{name:10s} {step:6d} x {size:2d} {errors(model, whole)} {errors(start, whole)} {cost}", flush=True)


def optimise(seed: int, way: str, acquisitions: int = 30) -> None:
    """Bayesian optimisation of Hartmann6 by one way to keep the model up to date."""
    from botorch import fit_gpytorch_mll
    from botorch.acquisition import qLogExpectedImprovement
    from botorch.models import SingleTaskVariationalGP
    from botorch.models.transforms import Standardize
    from botorch.optim import optimize_acqf
    from botorch.test_functions import Hartmann

    class Model(FantasizingModel, SingleTaskVariationalGP):
        pass

    def refit() -> Model:
        spread = torch.quasirandom.SobolEngine(6, scramble=True, seed=seed).draw(60).double()
        Z = torch.cat([x, spread])[:60]
        model = Model(x, y, inducing_points=Z, outcome_transform=Standardize(1))
        mll = gpytorch.mlls.VariationalELBO(model.likelihood, model.model, num_data=len(y))
        if way == "fit_gpytorch_mll":
            fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 50}})
        else:
            fit_gpytorch_mll(mll, optimizer=train_mll)
        return model

    hartmann, bounds = Hartmann(6, negate=True).double(), torch.tensor([[0.0] * 6, [1.0] * 6]).double()
    torch.manual_seed(seed)
    x = torch.rand(20, 6).double()
    y, spent = hartmann(x)[:, None], 0.0
    first, model = float(y.max()), None
    for step in range(acquisitions):
        begun = time.process_time()
        fresh = model is None or way != "condition" or step % 10 == 0
        model = refit() if fresh else model.condition_on_observations(x[-1:], y[-1:])
        spent += time.process_time() - begun
        acquisition = qLogExpectedImprovement(model, best_f=y.max())
        new, _ = optimize_acqf(acquisition, bounds, 1, num_restarts=4, raw_samples=64, options={"maxiter": 50})
        x, y = torch.cat([x, new]), torch.cat([y, hartmann(new)[:, None]])
    print(f"{seed} {way:16s} {first:6.3f} {float(y.max()):6.3f} {spent:7.1f}", flush=True)


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["batches", "single", "loop"])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", default=["train_svgp", "condition", "fit_gpytorch_mll"])
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    for part, size, steps in (("batches", 20, [1, 10, 100]), ("single", 1, [chosen.rows // 10, chosen.rows])):
        if part in chosen.parts:
            print("likelihood  batches  error: mean, sd   refit moved: mean, sd   us a row")
            for name in LIKELIHOODS:
                learn(name, size, steps)
    if "loop" in chosen.parts:
        print("seed, way       first   best   seconds of the models")
        for seed in chosen.seeds:
            for way in chosen.ways:
                optimise(seed, way)


if __name__ == "__main__":
    main()
