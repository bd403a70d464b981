"""Runs that are killed or interrupted at random moments, and gone on with from their checkpoint.

    python benchmarks/interruptions.py [--runs 1000] [--only KINDS] [--seed 0] [--small]
    python benchmarks/interruptions.py --lines 1 [--only KINDS]

Half of the signals are kills (SIGKILL), half are interrupts (SIGINT), up to two to a run, at moments drawn from the
duration of the whole run; then it is left to end.  Its q, its trace without the seconds and its verdict must be
those of a run without signals, to the last bit.  A run that finds a checkpoint has another seed: the file decides.

With --lines K a KeyboardInterrupt is raised at every K-th line event of the package, in one process.
"""

import argparse
import collections
import contextlib
import io
import json
import math
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import torch
from tqdm import tqdm

import torchngvi
from torchngvi import SRVN, VN, CholeskyGaussian, GeneralizedLinear, Stein, fit, ifvb
from torchngvi.errors import TorchngviError
from torchngvi.fitting.checkpoints import fingerprint
from torchngvi.stepsizes import PowerSchedule, SufficientDecrease

PACKAGE = str(Path(torchngvi.__file__).parent)
DIM, ROWS = 4, 40
_LATER = 99  # the seed of a run that goes on
_LONGEST = 60  # seconds


def logistic():
    """Labels nearly without noise, and a wide prior: a posterior that is not quite Gaussian."""
    generator = torch.Generator().manual_seed(3)
    X = 2 * torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)
    y = (X.sum(-1) + torch.randn(ROWS, generator=generator, dtype=torch.float64) > 0).double()
    return GeneralizedLinear(X, y, prior_precision=0.3)


def schools(theta):
    """Eight schools, centred, (mu, log tau, theta_1, ...): the mode is not trusted, and another start is tried."""
    mu, log_tau, effects = theta[..., :1], theta[..., 1:2], theta[..., 2:]
    seen, error = theta.new_tensor([[28, 8, -3, 7, -1, 1, 18, 12], [15, 10, 16, 11, 9, 11, 10, 18]])
    top = -0.5 * (mu / 5).square() - (1 + (log_tau.exp() / 5).square()).log() + log_tau
    each = 0.5 * ((effects - mu) * (-log_tau).exp()).square() + log_tau + 0.5 * ((seen - effects) / error).square()
    return top[..., 0] - each.sum(-1)


def fitted(target, optimizer, file, dim=DIM, **options):
    """A fit of the posterior to a target; what it gave, in plain values."""
    q = CholeskyGaussian(dim, dtype=torch.float64)
    optimizer = None if optimizer is None else optimizer(q)
    result = fit(q, target, optimizer, progress=False, checkpoint=file, checkpoint_every=3, **options)
    digest = fingerprint(q.state_dict().values())
    return repr((digest, [tuple(record)[:-1] for record in result.trace], str(result))), "interrupted" in str(result)


def glm(file, size=1):
    def careful(q):
        return VN(q, step_size=SufficientDecrease(radius=1e-3, grow=1.1))

    return fitted(logistic(), careful, file, tolerance=1e-9, max_evaluations=80 if size else 5)


def log_joint(file, size=1):
    return fitted(logistic().log_joint, None, file, tolerance=0.03 if size else 0.5, max_evaluations=100 if size else 3)


def hierarchy(file, size=1):
    return fitted(schools, None, file, 10, max_evaluations=100 if size else 3)


def stein(file, size=1):
    """By draws of torch's default generator."""
    return fitted(
        logistic().log_joint, lambda q: VN(q, lr=0.05, estimator=Stein(16)), file, max_evaluations=80 if size else 5
    )


def srvn(file, size=1):
    return fitted(logistic(), lambda q: SRVN(q, lr=0.02), file, max_evaluations=100 if size else 5)


def flat(file, size=1):
    """IFVB with an average, a learnt metric and a schedule, until its smoothed bound stops rising."""
    q = ifvb.MeanFieldGaussian(torch.zeros(2 * DIM, dtype=torch.float64))
    opt = ifvb.AIFVB(q, metric=ifvb.Recursive(20, beta=0.125), estimator=ifvb.Pathwise(4))
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, PowerSchedule(0.75, 100.0))
    steps, window = (250, 20) if size else (5, 2)
    result = ifvb.run(opt, logistic().log_joint, steps, schedule=schedule, window=window, checkpoint=file)
    digest = fingerprint(q.state_dict().values())
    return repr((digest, [tuple(record)[:-1] for record in result.trace], str(result))), "interrupted" in str(result)


def svgp(file, size=1):
    import gpytorch

    from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, train_svgp_in_batches

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self):
            q = NaturalGradientVariationalDistribution(6, mean_init_std=0.0)
            super().__init__(
                gpytorch.variational.VariationalStrategy(self, torch.linspace(-2, 2, 6).double()[:, None], q)
            )
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model, likelihood = Model().double(), gpytorch.likelihoods.GaussianLikelihood().double()
    x = torch.linspace(-2, 2, 60).double()[:, None]
    data = torch.utils.data.TensorDataset(x, torch.sin(3 * x[:, 0]) + 0.2 * torch.cos(40 * x[:, 0]))
    batches = torch.utils.data.DataLoader(data, batch_size=20, shuffle=True)
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.02)
    result = train_svgp_in_batches(
        model, likelihood, batches, 60, adam, epochs=10 if size else 2, progress=False, checkpoint=file
    )
    digest = fingerprint([*model.state_dict().values(), *likelihood.state_dict().values()])
    return repr((digest, result.losses, result.rejections)), result.interrupted


def guide(file, size=1):
    """A guide of Pyro over a scale and its effects."""
    import pyro
    import pyro.distributions as dist

    from torchngvi.adapters.pyro import AutoGaussian, fit_guide

    def model(y):
        tau = pyro.sample("tau", dist.HalfNormal(y.new_tensor(2.0)))
        with pyro.plate("groups", len(y)):
            pyro.sample("y", dist.Normal(pyro.sample("effect", dist.Normal(0.0 * tau, tau)), 1.0), obs=y)

    pyro.clear_param_store()
    y = torch.linspace(-2, 3, 8, dtype=torch.float64)
    q = AutoGaussian(model)
    options = {"progress": False, "checkpoint": file, "checkpoint_every": 3, "max_evaluations": 100 if size else 3}
    result = fit_guide(model, q, y, options=options)
    digest = fingerprint(q.state_dict().values())
    return repr((digest, [tuple(record)[:-1] for record in result.trace], str(result))), "interrupted" in str(result)


def command(folder, size=1):
    """The command line, a second fit over the folder of a first: what is there is whole at any moment."""
    from torchngvi.cli import main

    with tempfile.TemporaryDirectory() as own:
        table = Path(own) / "table.csv"
        rows = [f"{math.sin(k) + k % 5},{math.sin(k * k)},g{k % 5}" for k in range(40)]
        table.write_text("\n".join(["y,x,g", *rows]))
        folder = folder or Path(own) / "run"
        if folder.exists():
            written(folder)
        formulas = ["y ~ x + (1 | g)"] if folder.exists() else ["y ~ 1 + (1 | g)", "y ~ x + (1 | g)"]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            flags = ["--data", str(table), "--out", str(folder), "--overwrite", "--formula"]
            status = [main(["fit", *flags, formula]) for formula in formulas]
        return repr((status[-1], written(folder))), False


def written(folder):
    """What the command has written, without the path of its table, read as a user reads it."""
    torchngvi.load(folder)
    summary = json.loads((folder / "summary.json").read_text())
    return {key: value for key, value in summary.items() if key != "settings"}, (
        folder / "coefficients.csv"
    ).read_text()


KINDS = {
    "glm": glm,
    "log joint": log_joint,
    "hierarchy": hierarchy,
    "stein": stein,
    "srvn": srvn,
    "flat": flat,
    "svgp": svgp,
    "guide": guide,
    "command": command,
}


def attempt(kind, file, size=1):
    """Start, or go on where there is a file."""
    torch.manual_seed(_LATER if file is not None and file.exists() else 0)
    return KINDS[kind](file, size)


# ------------------------------------------------------------------------------------ signals


def child(kind, file, size, out):
    """In a process of its own: say that it begins, then how it ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have switched it off
    os.write(out, b"!")
    try:
        text, interrupted = attempt(kind, file, size)
        answer = "interrupted" if interrupted else f"done {text}"
    except KeyboardInterrupt:
        answer = "interrupted"
    except TorchngviError as error:
        answer = f"refused {error}"
    except BaseException as error:
        answer = f"crashed {type(error).__name__}: {error}"
    with os.fdopen(out, "wb") as pipe:
        pipe.write(answer.encode())


def process(kind, file, size, delay=None, which=signal.SIGKILL):
    """How a run ended that is sent a signal after a delay, and the seconds it took."""
    inlet, out = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(inlet)
        try:
            child(kind, file, size, out)
        finally:
            os._exit(0)
    os.close(out)
    os.read(inlet, 1)
    begun = time.perf_counter()
    if delay is not None and not select.select([inlet], [], [], delay)[0]:
        os.kill(pid, which)
    parts = []
    while True:
        if not select.select([inlet], [], [], _LONGEST)[0]:
            os.kill(pid, signal.SIGKILL)
            parts = [b"hung"]
            break
        if not (part := os.read(inlet, 2**16)):
            break
        parts.append(part)
    seconds = time.perf_counter() - begun
    os.close(inlet)
    os.waitpid(pid, 0)
    return b"".join(parts).decode() or "killed", seconds


def signals(runs, kinds, seed, size):
    """The counts of each kind of run, and what went wrong."""
    chance, wrong = random.Random(seed), []
    counts = {kind: collections.Counter() for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        wanted = {kind: (process(kind, None, size)[0], process(kind, Path(folder) / kind, size)[1]) for kind in kinds}
        for number in range(runs):
            kind, which = kinds[number % len(kinds)], (signal.SIGKILL, signal.SIGINT)[number // len(kinds) % 2]
            text, count = wanted[kind][0], counts[kind]
            file = Path(folder) / f"{number}.pt"
            left = chance.choice((1, 1, 2))  # signals to this run
            while True:
                found, delay = file.exists(), chance.uniform(0, wanted[kind][1]) if left else None
                answer, seconds = process(kind, file, size, delay, which)
                if answer not in ("killed", "interrupted"):
                    if not found:  # a whole run: the shortest tells best how long one takes
                        wanted[kind] = text, min(wanted[kind][1], seconds)
                    break
                left, count[which.name] = left - 1, count[which.name] + 1
                count["of runs that had gone on"] += found
            count["runs"] += 1
            count["went on to their end from a checkpoint"] += found
            if answer != text:
                count["refused" if answer.startswith("refused") else "another result"] += 1
                wrong.append(f"{kind}, run {number}: {answer[:300]}")
    return counts, wrong


# ------------------------------------------------------------------------------------ every line


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line event in a file of the package; counts them."""

    def __init__(self, at):
        self.at, self.count = at, 0

    def __call__(self, frame, event, argument):
        """The trace function of new frames."""
        return self.line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def line(self, frame, event, argument):
        """That of the package's frames."""
        if event == "line":
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.line

    def run(self, kind, file):
        """The text of the run, or nothing where it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            text, interrupted = attempt(kind, file, 0)
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(before)
        return None if interrupted else text


def lines(kind, every, folder, first=1):
    """Interrupt at every so many lines; how many there were, and what went wrong."""
    counter, wrong, tried = Interrupter(0), [], 0
    wanted = counter.run(kind, Path(folder) / "whole.pt")
    for at in range(first, counter.count + 1, every):
        file, tried = Path(folder) / f"{at}.pt", tried + 1
        try:
            Interrupter(at).run(kind, file)
            text = attempt(kind, file, 0)[0]
        except TorchngviError as error:
            text = f"refused {error}"
        if not torch.is_grad_enabled():
            wrong.append(f"{kind}, line event {at}: gradients are no longer recorded")
            torch.set_grad_enabled(True)
        if text != wanted:
            wrong.append(f"{kind}, line event {at}: {text[:300]}")
        if rest := [path for path in Path(folder).iterdir() if path.suffix == ".tmp"]:
            wrong.append(f"{kind}, line event {at}: left {rest}")
        shutil.rmtree(file, ignore_errors=True) if file.is_dir() else file.unlink(missing_ok=True)
    return tried, counter.count, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="runs of a few steps")
    parser.add_argument("--only", nargs="+", default=list(KINDS), choices=list(KINDS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)
    wrong = []
    if options.lines:
        for kind in options.only:
            with tempfile.TemporaryDirectory() as folder:
                tried, count, bad = lines(kind, options.lines, folder)
            print(f"{kind:10} interrupted at {tried} of {count} lines, {len(bad)} wrong", flush=True)
            wrong += bad
    else:
        tqdm.set_lock(threading.RLock())  # its own is shared by forks, and a killed one would never give it back
        tqdm.monitor_interval = 0  # no thread
        for kind in options.only:  # what is imported late is imported once, for all forks
            attempt(kind, None, 0)
        counts, wrong = signals(options.runs, options.only, options.seed, 0 if options.small else 1)
        for kind, count in counts.items():
            print(f"{kind:10} " + ", ".join(f"{number} {name}" for name, number in count.items()))
        total = sum(counts.values(), collections.Counter())
        print(f"{'all':10} " + ", ".join(f"{number} {name}" for name, number in total.items()))
    print("\n".join(wrong) or "every run ended as if nothing had happened")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
