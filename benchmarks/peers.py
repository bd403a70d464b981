"""Wall time to a gap of 1 and of 0.01 nats: VN's default against Pyro's AutoMultivariateNormal with Adam.

    python benchmarks/peers.py [--data breast_cancer german.numer_scale] [--seconds 60]

Logistic regression; the gap is that of the exact negative ELBO at the guide's mean and root, read from
time to time with the clock stopped.  Pyro gets the best of a grid of learning rates and particles, each
until it is there or its seconds are over.  Both sides run in float64 on one thread.
"""

import argparse
import os
import time
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal
from sklearn.datasets import load_breast_cancer, load_svmlight_file

from torchngvi import VN, CholeskyGaussian, GeneralizedLinear, fit

COLUMNS = {"german.numer_scale": 24, "a9a": 123}
GAPS = (1.0, 0.01)


def load(name):
    if name == "breast_cancer":
        X, y = load_breast_cancer(return_X_y=True)
        X = torch.cat([torch.tensor((X - X.mean(0)) / X.std(0)), torch.ones(len(y), 1)], 1)
        return GeneralizedLinear(X, y, prior_precision=0.1)
    path = Path(os.environ["TORCHNGVI_DATA"]) / "libsvm" / f"{name}.svm.gz"
    X, y = load_svmlight_file(str(path), n_features=COLUMNS[name])
    return GeneralizedLinear(torch.tensor(X.toarray()), y, prior_precision=1e-2)


def ours(model, lowest):
    q = CholeskyGaussian(model.dim, dtype=torch.float64)
    result = fit(q, model, VN(q), progress=False)
    return {gap: next(r.seconds for r in result.trace if r.loss - lowest < gap) for gap in GAPS}


def pyros(model, lowest, lr, particles, seconds):
    X, y, precision = model.X, (model.y > 0).double(), model.prior.precision

    def joint():
        theta = pyro.sample("theta", dist.Normal(torch.zeros_like(precision), precision.rsqrt()).to_event(1))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=X @ theta), obs=y)

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoMultivariateNormal(joint)
    svi = SVI(joint, guide, pyro.optim.Adam({"lr": lr}), Trace_ELBO(num_particles=particles))
    q = CholeskyGaussian(model.dim, dtype=torch.float64)
    clock, steps, reached, gap = 0.0, 0, {}, float("inf")
    while clock < seconds and GAPS[-1] not in reached:
        start = time.perf_counter()
        for _ in range(50):
            svi.step()
        clock, steps = clock + time.perf_counter() - start, steps + 50
        with torch.no_grad():
            root = guide.scale.diag() @ guide.scale_tril if guide.scale.ndim == 1 else guide.scale_tril
            gap = model.negative_elbo(q.initialize_(guide.loc.detach(), root.detach())).item() - lowest
        for wanted in GAPS:
            if gap < wanted:
                reached.setdefault(wanted, clock)
    return reached, steps, gap


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["breast_cancer"])
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for name in arguments.data:
        model = load(name)
        q = CholeskyGaussian(model.dim, dtype=torch.float64)
        lowest = fit(q, model, tolerance=1e-7, progress=False).loss
        ours(model, lowest)  # warm
        mine = ours(model, lowest)
        print(f"{name}: VN  " + ", ".join(f"{gap:g} nats {1e3 * mine[gap]:.1f} ms" for gap in GAPS))
        best = {}
        for particles in (1, 10):
            for lr in (0.003, 0.01, 0.03, 0.1):
                reached, steps, gap = pyros(model, lowest, lr, particles, arguments.seconds)
                print(
                    f"  Pyro lr {lr}, {particles} particles: {steps} steps, gap {gap:.3g}, reached {reached}",
                    flush=True,
                )
                for wanted, seconds in reached.items():
                    best[wanted] = min(seconds, best.get(wanted, float("inf")))
        for gap in GAPS:
            if gap in best:
                print(f"  {gap:g} nats: best Pyro {best[gap]:.1f} s, ratio {best[gap] / mine[gap]:.0f}")
            else:
                ratio = arguments.seconds / mine[gap]
                print(f"  {gap:g} nats: not reached by Pyro in {arguments.seconds:g} s, ratio above {ratio:.0f}")


if __name__ == "__main__":
    main()
