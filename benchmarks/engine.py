"""What `torchngvi.fit` makes of log joints that it knows nothing about: gradients, ELBO and verdict.

    python -m benchmarks.engine [--only NAMES] [--held] [--seeds 3] [--phases] [--reference] [--long] [--float32]
                                [--family NAME] [--scale 1] [--unexamined]

One line a posterior and seed, ELBOs on 16,384 fresh draws, the same for all; the peak memory is of the process so far.
Of a regression the best ELBO of its family is known: that of its quadrature, and of the fit too.

    --phases     how many gradients, values and seconds each phase has taken
    --reference  how much better Adam on the reparametrised ELBO gets, in 384,000 gradients from three starts
    --long       the same of 20,000 stochastic natural steps of falling size from the end of the fit and from N(0, I)

The constants of the engine were chosen on the posteriors that run by default, and not on those of --held.
"""

import argparse
import functools
import math
import re
import resource
import time
from unittest import mock

import torch

import torchngvi
from benchmarks.posteriors_centred import CENTRED
from benchmarks.posteriors_held import HELD
from benchmarks.posteriors_hierarchical import MODELS
from benchmarks.posteriors_linear import REGRESSIONS
from benchmarks.reference import long_run
from torchngvi import IBLR, VN, CholeskyGaussian, Stein, fit
from torchngvi.expectations import Antithetic
from torchngvi.fitting.loop import Loop
from torchngvi.stepsizes import KLRadius


def funnel(theta):
    """Neal's, log Z = 10.288."""
    v, x = theta[..., 0], theta[..., 1:]
    return -v.square() / 18 - 0.5 * torch.exp(-v) * x.square().sum(-1) - 4.5 * v


def banana(theta):
    """A parabola, log Z = log(2 pi) + log 2 - log sqrt 10 = 1.38."""
    return -theta[..., 0].square() / 8 - 5 * (theta[..., 1] - theta[..., 0].square()).square()


def product(theta):
    """Two arms of a hyperbola."""
    return -0.5 * ((theta.prod(-1) - 1) / 0.2).square() - 0.5 * theta.square().sum(-1)


def log_gamma(shape):
    """Logarithms of Gamma(a) variables."""
    return lambda theta: (shape * theta - theta.exp()).sum(-1)


def problems():
    """Name: (D, log joint)."""
    known = {"funnel": (10, funnel), "banana": (2, banana), "product": (2, product)}
    known |= {f"log-gamma-{a:g}": (5, log_gamma(a)) for a in (1.0, 3.0)}
    return known | models(MODELS | CENTRED | REGRESSIONS)


def models(makers):
    """The same of hierarchical models."""
    return {name: (lambda make=make: make()[1:3]) for name, make in makers.items()}


@torch.no_grad()
def elbo(q, log_joint, draws=16384, seed=12345):
    """On fresh draws, with its standard error."""
    z = torch.randn(draws, q.dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(q.dtype)
    values = torch.cat([log_joint(q.push_noise(part)) for part in z.split(2048)]).double()
    return float(values.mean() + q.entropy()), float(values.std()) / math.sqrt(draws)


def polished(q, log_joint, steps, seed=0, blocks=16):
    """So many stochastic natural steps from where q is."""
    generator = torch.Generator().manual_seed(seed)
    estimator = Stein(Antithetic(16, generator))
    for block in range(blocks):
        rate = 0.1 * 0.01 ** (block / (blocks - 1))
        optimizer = IBLR(q, lr=rate, step_size=KLRadius(0.5), estimator=estimator)
        for _ in range(steps // blocks):
            optimizer.step(log_joint)
    return q


def phased(run):
    """The result of a run, and by phase the gradients, values and seconds that it has taken."""
    seen = []

    def show(loop, phase):
        target = loop.engine.target
        seen.append((re.sub(", block.*", "", phase), target.gradients, target.values, time.perf_counter()))

    with mock.patch.object(Loop, "_show_phase", show):
        result = run()
    seen.append(("", result.gradients, result.values, time.perf_counter()))
    taken = {}
    for before, after in zip(seen, seen[1:], strict=False):
        taken[before[0]] = [
            a + c - b for a, b, c in zip(after[1:], before[1:], taken.get(before[0], [0] * 3), strict=True)
        ]
    return result, taken


def gap(q, model):
    """Nats of q above the best of its family, both by quadrature; None where that is not known."""
    if model is None:
        return None
    best = fit(type(q)(q.dim, dtype=torch.float64), model, progress=False).loss
    return float(VN(q.to(torch.float64)).evaluate(model).loss) - best


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known, held = problems(), models(HELD)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--held", action="store_true", help="those that no constant was chosen on")
    parser.add_argument("--scale", type=float, default=1.0, help="standard deviation of q before the fit")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--family", default="CholeskyGaussian")
    parser.add_argument("--words", action="store_true", help="print the whole verdict")
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--unexamined", action="store_true", help="without the check whether a Gaussian fits")
    options = parser.parse_args()
    dtype = torch.float32 if options.float32 else torch.float64
    names, known = options.only or list(held if options.held else known), known | held
    for name in names:
        dim, log_joint = known[name]() if callable(known[name]) else known[name]
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            q, start = getattr(torchngvi, options.family)(dim, scale=options.scale, dtype=dtype), time.perf_counter()
            result, taken = phased(functools.partial(fit, q, log_joint, progress=False, examine=not options.unexamined))
            seconds, (value, error) = time.perf_counter() - start, elbo(q, log_joint)
            gradients = getattr(result, "gradients", result.trace[-1].gradients)
            verdict = "converged" if result.converged else "not converged"
            line = f"{name}, D = {dim}, seed {seed}: {gradients} gradients, {getattr(result, 'values', 0)} values, "
            exact = gap(q, REGRESSIONS[name]().exact) if name in REGRESSIONS else None
            above = "" if exact is None else f", {exact:.4f} nats above the best"
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            print(f"{line}ELBO {value:.3f} ± {error:.2g}{above}, {verdict}, {seconds:.1f} s, {peak:.1f} GB", flush=True)
            for phase, (some, values, spent) in taken.items() if options.phases else ():
                print(f"    {phase:40} {some:8} gradients {values:8} values {spent:8.1f} s", flush=True)
            if options.reference and seed == 0:
                start, better, noise, used = long_run(q, log_joint)
                print(f"    reference: {better:+.3f} ± {noise:.2g} from {start}, {used} gradients", flush=True)
            if options.words:
                print(f"    {result.reason}", flush=True)
            if options.long and seed == 0:
                best, _ = elbo(polished(q, log_joint, options.steps), log_joint)
                cold = polished(CholeskyGaussian(dim, dtype=dtype), log_joint, options.steps)
                print(f"    long runs: {best:.3f} from there, {elbo(cold, log_joint)[0]:.3f} from N(0, I)", flush=True)


if __name__ == "__main__":
    main()
