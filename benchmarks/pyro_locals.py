"""A Pyro model with 100,000 local latents, 1,000 of them a run: our guide and AutoNormal against the exact optimum.

    python benchmarks/pyro_locals.py [--members 100000] [--batch 1000] [--seconds 60] [--rates 0.01 0.05] [--times]

Counts with an intercept of each member, five rows each (`benchmarks/mixed.py`), two coefficients and the precision of
the intercepts in common.  `whole` is the same problem as a `MixedLogJoint`, all members at once and all expectations
exact: its least negative ELBO is what a full covariance reaches.  `ours` is `fit_guide` with `AutoLocalGaussian` as it
comes; `AutoNormal` is Pyro's mean field by SVI with Adam, 1 particle, at each of some rates, for so many seconds.  The
negative ELBO of each q is computed without draws, by the `MixedLogJoint`.  Each runs in a process of its own: seconds
of CPU on one core, in float64, and the memory beyond that of data and imports.

``--times`` follows ours on its way: the exact negative ELBO of q after each tenth of the first visits and after each
pass, against the seconds, from which the looks are left out.  A member that was not visited yet has the mean of those
that were.
"""

import argparse
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from unittest.mock import patch

import pyro
import pyro.distributions as dist
import torch
from mixed import ROWS, problem
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal

from torchngvi import PrecisionCholeskyGaussian, fit
from torchngvi.adapters.pyro import AutoLocalGaussian, fit_guide
from torchngvi.adapters.pyro.local_guide import Visits
from torchngvi.models import MixedLogJoint, MixedPrior, Wishart
from torchngvi.structures.forest import Part

LOOKS = 6  # at the ELBO of AutoNormal
LOOKS_ON_THE_WAY = 10  # at that of ours in the first visits
VISIT = Visits.visit


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def whole_of(members):
    return MixedLogJoint(*problem(members, 1, "poisson_log"), prior=MixedPrior(10.0, Wishart(2.0, [[0.5]])))


def model_of(members, batch):
    """The same as a Pyro model, whose precision has the logarithm 2ω."""
    X, y, _, _ = problem(members, 1, "poisson_log")
    X, y = X.reshape(members, ROWS, 2), y.reshape(members, ROWS)
    zero, one = X.new_zeros(()), X.new_ones(())

    def model(X, y):
        beta = pyro.sample("beta", dist.Normal(zero, 10.0).expand([2]).to_event(1))
        precision = pyro.sample("precision", dist.Gamma(one, one))
        with pyro.plate("members", members, subsample_size=batch, dim=-2) as index:
            b = pyro.sample("b", dist.Normal(zero, precision.rsqrt()))
            with pyro.plate("rows", ROWS, dim=-1):
                eta = b + (X[index] * beta[..., None, None, :]).sum(-1)
                pyro.sample("y", dist.Poisson(eta.exp()), obs=y[index])

    return model, (X, y)


def exact(whole, centre, precision, slope, mean, root):
    """The negative ELBO of q in the coordinates of the Pyro model."""
    scale = mean.new_tensor([1.0, 1.0, 2.0])
    leaf, top = precision.sqrt(), scale[:, None] * root
    q = PrecisionCholeskyGaussian(whole.dim, structure=whole.structure, dtype=torch.float64)
    parts = [Part(leaf, scale[:, None] * slope @ leaf), Part(top[None], top[None, :0, :])]
    at = torch.cat([(centre - mean @ slope).flatten(), mean / scale])
    q.restore(q._coordinates_with(at, whole.structure.matrix(parts)))
    with torch.no_grad():
        return float(whole.negative_elbo(q))


def run_whole(options):
    before, clock = memory(), time.process_time()
    whole = whole_of(options.members)
    result = fit(whole.posterior(), whole, tolerance=1e-2, progress=False)
    print(
        f"whole       {result.loss:.3f}: {time.process_time() - clock:.1f} s, {result.evaluations} evaluations, "
        f"converged {result.converged}, {memory() - before:.0f} MB",
        flush=True,
    )


class Watch:
    """Seconds of CPU without those of the looks at the ELBO, which it takes and prints."""

    def __init__(self, options):
        self.whole = whole_of(options.members) if options.times else None
        self.every = max(1, options.members // options.batch // LOOKS_ON_THE_WAY)
        self.clock, self.away, self.visits = time.process_time(), 0.0, 0

    def seconds(self):
        return time.process_time() - self.clock - self.away

    def look(self, sites, q, what):
        start = time.process_time()
        mean = q.mean.detach()
        here = sites.of(torch.arange(len(sites.visited)), mean)
        root = q.precision_tril.detach()
        loss = exact(self.whole, here.mean + mean @ here.slope, here.precision, here.slope, mean, root)
        print(f"    {self.seconds() - time.process_time() + start:.1f} s: {loss:.1f} {what}", flush=True)
        self.away += time.process_time() - start

    def visit(self, visits, q, *args):
        """In the place of a visit of a batch."""
        VISIT(visits, q, *args)
        self.visits += 1
        if self.visits % self.every == 0:
            self.look(visits.sites, q, f"after {self.visits} batches")


def run_ours(options):
    model, args = model_of(options.members, options.batch)
    watch, before = Watch(options), memory()
    guide = AutoLocalGaussian(model, "members")
    ended = []

    def see(record):
        ended.append(watch.seconds())
        print(f"    {ended[-1]:.1f} s: norm {record.norm:.2g}, {record.loss:.1f} on the draws of the run", flush=True)
        if watch.whole is not None:
            watch.look(guide.memo, guide.posterior, "after a pass")

    with patch.object(Visits, "visit", lambda *a, **k: watch.visit(*a, **k)) if options.times else nullcontext():
        result = fit_guide(model, guide, *args, options={"progress": False, "callbacks": [see]})
    seconds, more = watch.seconds(), memory() - before
    memo, q = guide.memo, guide.posterior
    mean, root = q.mean.detach(), q.precision_tril.detach()
    loss = exact(whole_of(options.members), memo.centre, memo.precision, memo.slope, mean, root)
    took = ", ".join(f"{each:.0f}" for each in ended)
    print(f"ours        {loss:.3f}: {seconds:.1f} s (passes ended at {took}), {more:.0f} MB; {result}", flush=True)


def run_normal(options):
    model, args = model_of(options.members, options.batch)
    whole = whole_of(options.members)

    def plates(X, y):
        return [
            pyro.plate("members", options.members, subsample_size=options.batch, dim=-2),
            pyro.plate("rows", ROWS, dim=-1),
        ]

    for rate in options.rates:
        pyro.clear_param_store()
        torch.manual_seed(0)
        before = memory()
        guide = AutoNormal(model, create_plates=plates)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": rate}), Trace_ELBO())
        seconds, steps, shown, looked = 0.0, 0, [], 0
        pyro.enable_validation(False)
        while seconds < options.seconds:
            clock = time.process_time()
            svi.step(*args)
            seconds, steps = seconds + time.process_time() - clock, steps + 1
            if seconds > options.seconds * (looked + 1) / LOOKS:
                looked += 1
                loc, sd = guide.locs, guide.scales
                mean = torch.cat([loc.beta, loc.precision.reshape(1)]).detach()
                root = torch.cat([sd.beta, sd.precision.reshape(1)]).detach().reciprocal().diag()
                b, precision = loc.b.detach().reshape(-1, 1), sd.b.detach().reshape(-1, 1, 1) ** -2
                slope = mean.new_zeros(len(b), 3, 1)
                shown.append(f"{exact(whole, b, precision, slope, mean, root):.1f} ({seconds:.0f} s)")
        more = memory() - before
        print(f"AutoNormal  rate {rate}, {steps} steps: {', '.join(shown)}, {more:.0f} MB", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.01, 0.05])
    parser.add_argument("--times", action="store_true", help="follow ours on its way")
    parser.add_argument("--only", choices=["whole", "ours", "normal"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.only:
        {"whole": run_whole, "ours": run_ours, "normal": run_normal}[options.only](options)
        return
    for part in ("whole", "ours", "normal"):
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", part], check=True)


if __name__ == "__main__":
    main()
