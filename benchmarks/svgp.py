"""Sparse GPs side by side with GPyTorch's own natural gradients, in one run, on one thread.

    python benchmarks/svgp.py [--sizes 256 512] [--rounds 12] [--rows 20000] [--budget 60] [--dtypes float64 float32]
        [--only steps|counts|accuracy|convergence] [--device cpu|cuda]

First, the time of a step, the best of several rounds that take turns: of q alone, and of q with the gradient of
every hyper-parameter; with ``--only counts`` instead the multiplications of a step of q alone beside the fewest that it
can do with.  Second, the error of a full step on all data where K_ZZ has a condition number of 1e8.  Third,
with fixed hyper-parameters and a Bernoulli likelihood, the time until the negative ELBO per datum is within 1e-2 ..
1e-5 nats of the optimum, in seconds of the processor: NGD, its triangular form and Adam, each at several constant
learning rates on the same mini-batches, and `refine_svgp`.  All with the same log Φ, that of torch: GPyTorch's own
jumps at -1, and has no optimum to be near to.
"""

import argparse
import itertools
import time
import warnings

import clocks
import torch
from torch.utils._python_dispatch import TorchDispatchMode

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import gpytorch as gp

from torchngvi import VN, CholeskyGaussian, NaturalGaussian
from torchngvi.adapters.gpytorch import (
    NaturalGradientVariationalDistribution,
    SparseGP,
    natural_optimizer,
    refine_svgp,
    training,
    variational_posteriors,
)
from torchngvi.stepsizes import Constant

BATCH = 1024
GAPS = (1e-2, 1e-3, 1e-4, 1e-5)
EVERY = 10  # mini-batches between two looks at the gap
v = gp.variational


class Model(gp.models.ApproximateGP):
    def __init__(self, q, Z):
        super().__init__(v.VariationalStrategy(self, Z, q))
        self.mean_module = gp.means.ConstantMean()
        self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel())

    def forward(self, x):
        return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def made(q, Z, learn):
    """A model in the dtype of Z, whose hyper-parameters ask for gradients, or not."""
    model = Model(q.to(Z.dtype), Z).to(Z.dtype).train()
    model.covar_module.outputscale = 4.0
    for parameter in model.hyperparameters():
        parameter.requires_grad_(learn)
    return model


def through_autograd(q, Z, likelihood, x, y, rows, learn):
    model = made(q, Z, learn)
    mll = gp.mlls.VariationalELBO(likelihood, model, num_data=rows)
    ours = isinstance(q, NaturalGradientVariationalDistribution)
    natural = natural_optimizer(mll, 0.1) if ours else gp.optim.NGD(model.variational_parameters(), rows, 0.1)

    def run():
        natural.zero_grad()
        model.zero_grad()
        (-mll(model(x), y)).backward()
        natural.step()

    return run


def direct(family, Z, likelihood, x, y, rows, learn, kept=False):
    size = len(Z)
    model = made(NaturalGradientVariationalDistribution(size, posterior=family), Z, learn)
    first = SparseGP(model, likelihood, [(x, y)], rows)
    natural = VN(first.posterior, lr=0.1)

    def run():
        target = first if kept else SparseGP(model, likelihood, [(x, y)], rows, learn=learn)
        model.zero_grad()
        natural.step(target)
        if learn:
            target.backward()

    return run


def steps(sizes, rounds, dtype, device):
    print(f"milliseconds a step on {clocks.named(device)}, batch of {BATCH}, {dtype}, best of {rounds}; ", end="")
    print("in brackets NGD's time over this")
    dtype = getattr(torch, dtype)
    likelihoods = gp.likelihoods.GaussianLikelihood(), gp.likelihoods.BernoulliLikelihood()
    for size, likelihood in itertools.product(sizes, likelihoods):
        torch.manual_seed(0)
        likelihood.to(device, dtype)  # GPyTorch makes the nodes of its quadrature on the CPU
        x, Z = torch.rand(BATCH, 8).to(dtype), torch.rand(size, 8).to(dtype)
        y = (torch.sin(3 * x.sum(-1)) > 0).to(dtype)
        for learn in (False, True):
            common = (Z, likelihood, x, y, 20000, learn)
            runs = {
                "NGD": through_autograd(v.NaturalVariationalDistribution(size), *common),
                "TrilNatural": through_autograd(v.TrilNaturalVariationalDistribution(size), *common),
                "ours, drop-in": through_autograd(NaturalGradientVariationalDistribution(size), *common),
                "ours, direct, C": direct(CholeskyGaussian, *common),
                "ours, direct, S": direct(NaturalGaussian, *common),
            }
            if not learn:
                runs["ours, direct, S, batch seen before"] = direct(NaturalGaussian, *common, kept=True)
            best = dict.fromkeys(runs, float("inf"))
            for _ in range(rounds):  # in turns, so that a busy machine is busy for all
                for name, run in runs.items():
                    start = clocks.seconds(device)
                    run()
                    best[name] = min(best[name], clocks.seconds(device) - start)
            print(f"M = {size}, {type(likelihood).__name__}, {'q and hyper-parameters' if learn else 'q alone'}")
            for name, seconds in best.items():
                print(f"  {name:<36}{seconds * 1e3:8.1f}  ({best['NGD'] / seconds:.2f})", flush=True)


class Multiplications(TorchDispatchMode):
    """Multiplications of matrices in multiples of M²B and M³, and how many products, substitutions, factorisations."""

    def __init__(self, size):
        super().__init__()
        self.size, self.kinds, self.batch, self.cubic = size, dict.fromkeys(("product", "solve", "factor"), 0), 0.0, 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            left, right = args[-2:]
            self._add("product", left.shape[-1], left.shape[-2], right.shape[-1])
        elif name == "linalg_solve_triangular":
            self._add("solve", args[0].shape[-1] / 2, *args[1].shape[-2:])
        elif name in ("linalg_cholesky_ex", "cholesky_inverse"):
            self._add("factor", *(args[0].shape[-1],) * 2, args[0].shape[-1] / (6 if "ex" in name else 3))
        return result

    def _add(self, kind, *sides):
        if min(sides) < 16:  # a vector, or the features of the inputs
            return
        self.kinds[kind] += 1
        count = sides[0] * sides[1] * sides[2]
        if BATCH in sides:
            self.batch += count / (self.size**2 * BATCH)
        else:
            self.cubic += count / self.size**3


def counts(sizes, dtype):
    """In the floor every symmetric or triangular product is done by half, and K_ZZ was factored before."""
    print(f"multiplications of a step of q alone, batch of {BATCH}, {dtype}, all parts of a product by blocks counted")
    gaussian, dtype = dtype == "float64", getattr(torch, dtype)
    likelihoods = gp.likelihoods.GaussianLikelihood().to(dtype), gp.likelihoods.BernoulliLikelihood().to(dtype)
    for size, likelihood in itertools.product(sizes, likelihoods):
        torch.manual_seed(0)
        x, Z = torch.rand(BATCH, 8).to(dtype), torch.rand(size, 8).to(dtype)
        common = (Z, likelihood, x, (torch.sin(3 * x.sum(-1)) > 0).to(dtype), 20000, False)
        no_variances = gaussian and likelihood is likelihoods[0]
        runs = {
            "NGD": (through_autograd(v.NaturalVariationalDistribution(size), *common), None),
            "ours, direct, C": (direct(CholeskyGaussian, *common), (3 / 2, 1 / 2)),
            "ours, direct, S": (direct(NaturalGaussian, *common), (1, 1 / 2) if no_variances else (3 / 2, 1 / 3)),
        }
        print(f"M = {size}, {type(likelihood).__name__}")
        for name, (run, floor) in runs.items():
            run(), run()
            with Multiplications(size) as seen:
                run()
            total = seen.batch * BATCH / size + seen.cubic
            line = f"{seen.batch:5.2f} M²B + {seen.cubic:5.2f} M³ = {total:5.2f} M³"
            if floor is not None:
                line += f"   floor {floor[0]:.2f} M²B + {floor[1]:.2f} M³ = {floor[0] * BATCH / size + floor[1]:.2f} M³"
            print(f"  {name:<20}{line}   {', '.join(f'{n} {kind}s' for kind, n in seen.kinds.items())}", flush=True)


def accuracy(sizes, dtype):
    """Largest errors of mean and deviation at the data after a full step, over the largest mean and in relation."""
    for size in sizes:
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 4 * size)[:, None].to(getattr(torch, dtype))
        y, Z = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(len(x)).to(x), x[::4].clone()
        likelihood = gp.likelihoods.GaussianLikelihood().to(x)
        likelihood.noise = 0.01
        kernel = made(NaturalGradientVariationalDistribution(size).double(), Z.double(), False).covar_module
        K = kernel(Z.double()).to_dense()
        jitter = float(torch.linalg.eigvalsh(K)[-1]) * 1e-8  # the smallest eigenvalue is 0 to rounding without it
        K.diagonal().add_(jitter)
        # a least-squares problem, by QR: no normal equations
        A = torch.linalg.solve_triangular(
            torch.linalg.cholesky(K), kernel(Z.double(), x.double()).to_dense(), upper=False
        )
        noise = float(likelihood.noise)
        Q, R = torch.linalg.qr(torch.cat([A.mT / noise**0.5, torch.eye(size).double()]))
        m = torch.linalg.solve_triangular(R, (Q[: len(x)].mT @ y.double() / noise**0.5)[:, None], upper=True)
        mean = (A.mT @ m)[:, 0]
        root = torch.linalg.solve_triangular(R.mT, A, upper=False)
        stddev = root.square().sum(0).sqrt()  # of the part that q explains
        print(f"a full step on {len(x)} rows, M = {size}, {dtype}, cond K_ZZ = {float(torch.linalg.cond(K)):.1e}")
        for name in ("NGD", "ours, drop-in", "ours, direct, C", "ours, direct, S"):
            kind = NaturalGaussian if name.endswith("S") else CholeskyGaussian
            q = v.NaturalVariationalDistribution(size) if name == "NGD" else None
            model = made(q or NaturalGradientVariationalDistribution(size, posterior=kind), Z, False)
            model.variational_strategy.jitter_val = jitter
            mll = gp.mlls.VariationalELBO(likelihood, model, num_data=len(x))
            try:
                if "direct" in name:
                    target = SparseGP(model, likelihood, [(x, y)])
                    VN(target.posterior, lr=1.0, step_size=Constant()).step(target)
                else:
                    parameters = model.variational_parameters() if q else ()
                    natural = gp.optim.NGD(parameters, len(x), 1.0) if q else natural_optimizer(mll, 1.0)
                    (-mll(model(x), y)).backward()
                    natural.step()
                q = model.variational_strategy._variational_distribution()
                moments = q.mean.detach().double(), q.lazy_covariance_matrix.root.to_dense().detach().double()
            except Exception as error:
                print(f"  {name:<36}{type(error).__name__}", flush=True)
                continue
            got = A.mT @ moments[0], (A.mT @ moments[1]).square().sum(-1).sqrt()
            errors = float((got[0] - mean).abs().max() / mean.abs().max()), float((got[1] / stddev - 1).abs().max())
            print(f"  {name:<36}mean {errors[0]:.1e}, deviation {errors[1]:.1e}", flush=True)


def reached(gap, start, pause, times):
    for wanted in GAPS:
        if gap < wanted:
            times.setdefault(wanted, time.process_time() - start - pause)


def line(name, times, gap):
    shown = "  ".join(f"{wanted:g}: {times[wanted]:.2f} s" if wanted in times else f"{wanted:g}: -" for wanted in GAPS)
    print(f"  {name:<28}{shown}   last gap {gap:.1e}", flush=True)


def convergence(rows, size, budget):
    torch.manual_seed(0)
    x = 6 * torch.rand(rows, 2).double()
    f = 3 * torch.sin(2 * x[:, 0]) * torch.cos(1.5 * x[:, 1]) + torch.sin(x.sum(-1))
    y = (torch.rand(rows).double() < torch.special.ndtr(f)).double()
    Z, likelihood = x[torch.randperm(rows)[:size]], gp.likelihoods.BernoulliLikelihood().double()
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    exact = made(NaturalGradientVariationalDistribution(size), Z, False)
    lowest = refine_svgp(exact, likelihood, batches, tolerance=1e-6, progress=False).loss / rows
    judge = SparseGP(exact, likelihood, batches)
    print(f"seconds to a gap in nats per datum; Bernoulli, {rows} rows, M = {size}, fixed hyper-parameters")

    def gap_of(mean, root):
        with torch.no_grad():
            judge.posterior.initialize_(mean, root)
            return float(judge.negative_elbo(judge.posterior)) / rows - lowest

    # by its parts: the search, and full steps from there
    for count in (0, 1, 2, 3):
        torch.manual_seed(1)
        model = made(NaturalGradientVariationalDistribution(size, posterior=NaturalGaussian), Z, False)
        q, start = variational_posteriors(model)[0], time.process_time()
        if count:
            refine_svgp(model, likelihood, batches, max_evaluations=count, progress=False)
        else:
            target = SparseGP(model, likelihood, [])
            target.batches = training._pieces(batches, target)
            with torch.no_grad():
                training._search(target)
        took, gap = time.process_time() - start, gap_of(q.mean, q.scale_tril)
        what = f"refine_svgp, {count} evaluations" if count else "refine_svgp, search alone"
        print(f"  {what:<28}{took:.2f} s   gap {gap:.1e}", flush=True)
    for name, kind, rates in (
        ("NGD", v.NaturalVariationalDistribution, (0.01, 0.02, 0.04, 0.1)),
        ("TrilNatural", v.TrilNaturalVariationalDistribution, (0.01, 0.02, 0.04, 0.1)),
        ("Adam", v.CholeskyVariationalDistribution, (0.003, 0.01, 0.03)),
    ):
        for rate in rates:
            torch.manual_seed(1)
            model = made(kind(size), Z, False)
            mll = gp.mlls.VariationalELBO(likelihood, model, num_data=rows)
            adam = name == "Adam"
            parameters = list(model.variational_parameters())
            optimizer = torch.optim.Adam(parameters, rate) if adam else gp.optim.NGD(parameters, rows, rate)
            times, start, pause, gap, step = {}, time.process_time(), 0.0, float("inf"), 0
            while time.process_time() - start - pause < budget and GAPS[-1] not in times:
                for some in torch.randperm(rows).split(BATCH):
                    optimizer.zero_grad()
                    (-mll(model(x[some]), y[some])).backward()
                    optimizer.step()
                    step += 1
                    if step % EVERY == 0:
                        stop = time.process_time()
                        q = model.variational_strategy._variational_distribution()
                        gap = gap_of(q.mean.detach(), torch.linalg.cholesky(q.covariance_matrix.detach()))
                        pause += time.process_time() - stop
                        reached(gap, start, pause, times)
            line(f"{name} {rate:g}", times, gap)


gp.likelihoods.bernoulli_likelihood.log_normal_cdf = torch.special.log_ndtr


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for each method and learning rate")
    parser.add_argument("--dtypes", nargs="+", choices=("float64", "float32"), default=["float64"], help="of the steps")
    parser.add_argument("--only", choices=("steps", "counts", "accuracy", "convergence"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in arguments.dtypes:
        if arguments.only in (None, "steps"):
            with torch.device(arguments.device):
                steps(arguments.sizes, arguments.rounds, dtype, arguments.device)
        if arguments.only == "counts":
            counts(arguments.sizes, dtype)
        if arguments.only in (None, "accuracy"):
            accuracy(arguments.sizes, dtype)
    if arguments.only in (None, "convergence"):
        convergence(arguments.rows, arguments.sizes[0], arguments.budget)


if __name__ == "__main__":
    main()
