"""Processor time to a gap of 1 and of 0.01 nats: fit's default against AutoMultivariateNormal with Adam.

    python -m benchmarks.peers [--data breast_cancer german.numer_scale a9a dense indicators] [--patience 300]
        [--log FILE] [--settings 0.03f:10 0.1f:10] [--peers Pyro NumPyro] [--growth]

The peers are Pyro and NumPyro, the latter compiled (chunks of steps in one `lax.scan`, compilation not
counted) and skipped where it is not installed.  Beside them stand a Laplace approximation by iteratively
reweighted least squares in NumPy, with the gap at which it ends, and scikit-learn's mode by ``newton-cholesky``,
without a covariance.  ``--growth`` prints how the time of a fit grows with rows, columns and members instead.  "dense"
and "indicators" are simulated, see `benchmarks.newton_rule`.  Logistic regression; the gap is that of the exact
negative ELBO at the guide's mean and root, read with the clock stopped: every 50 steps at first, every 2 %
of the steps later on.  All guides start from the prior mean with their own scale.  A peer gets the best of
a grid of learning rates, constant or falling as 1/√(1 + t/1000), and particles, each until it is at 0.01 nats
or its patience is over, in seconds of the processor; one whose lowest gap lies before the last third of its
time is stopped from half of its patience on, and marked.  "Not reached in T s" gives the shortest time of the
grid.  Large data sets get a smaller grid, and ``--settings`` names the rates, an f for falling, and the particles
of one's own.  Everything runs in float64 on one core.  A log has one JSON object
a line, which `benchmarks.speed_page` reads.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"

import numpy
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, init_to_mean
from sklearn.datasets import load_breast_cancer, load_svmlight_file
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from benchmarks.newton_rule import SETS
from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
from torchngvi.fitting.records import Record

try:
    import jax
    import numpyro
except ImportError:
    numpyro = None

OWN = {"dense": "dense, 4,000 x 300", "indicators": "indicators, 2,500 x 260"}
DATA = ("breast_cancer", "german.numer_scale", "a9a", *OWN)
COLUMNS = {"german.numer_scale": 24, "a9a": 123}
GAPS = (1.0, 0.01)
CHUNK = 50  # steps of a peer between two looks at its clock
RATES = tuple((lr, False) for lr in (0.001, 0.003, 0.01, 0.03)) + tuple((lr, True) for lr in (0.01, 0.03, 0.1))
GRID = tuple((lr, falls, particles) for particles in (1, 10, 100) for lr, falls in RATES)
LARGE_GRID = tuple((lr, falls, particles) for particles in (1, 10) for lr, falls in RATES if 0.001 < lr < 0.1)
FALL = 1000  # steps after which a falling rate is 1/√2 of the first
LARGE = 10_000  # rows

Guide = tuple[Callable[[], None], Callable[[], tuple[Tensor, Tensor]]]  # CHUNK steps; mean and root


class Run(NamedTuple):
    """A peer with one setting."""

    setting: str
    steps: int
    seconds: float
    lowest: float  # gap
    plateau: bool  # stopped before its time
    reached: dict[float, float]  # gap -> seconds


def load(name: str) -> GeneralizedLinear:
    if name in OWN:
        return SETS[OWN[name]]()
    if name == "breast_cancer":
        X, y = load_breast_cancer(return_X_y=True)
        X = torch.cat([torch.tensor((X - X.mean(0)) / X.std(0)), torch.ones(len(y), 1)], 1)
        return GeneralizedLinear(X, y, prior_precision=0.1)
    path = Path(os.environ["TORCHNGVI_DATA"]) / "libsvm" / f"{name}.svm.gz"
    X, y = load_svmlight_file(str(path), n_features=COLUMNS[name])
    return GeneralizedLinear(torch.tensor(X.toarray()), y, prior_precision=1e-2)


def ours(model: GeneralizedLinear, lowest: float) -> dict[float, float]:
    """Seconds to each gap, the median of three fits after one that warms up."""
    times: dict[float, list[float]] = {gap: [] for gap in GAPS}
    for repeat in range(4):
        seen, start = [], time.process_time()

        def note(record: Record, seen: list = seen, start: float = start) -> None:
            seen.append((time.process_time() - start, record.loss))

        fit(CholeskyGaussian(model.dim, dtype=torch.float64), model, progress=False, callbacks=[note])
        for gap in GAPS if repeat else ():
            times[gap].append(next(seconds for seconds, loss in seen if loss - lowest < gap))
    return {gap: statistics.median(seconds) for gap, seconds in times.items()}


def least(run: Callable[[], Any], repeats: int = 5) -> tuple[Any, float]:
    """The result of a run and the least of its seconds."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        result = run()
        times.append(time.process_time() - start)
    return result, min(times)


def modes(model: GeneralizedLinear, lowest: float) -> None:
    """Print the seconds of two searches for the mode, and the gap of the Laplace approximation there."""
    X, signs, precision = (part.numpy() for part in (model.X, model.y, model.prior.precision))

    def laplace() -> tuple[numpy.ndarray, numpy.ndarray]:
        theta, decrement = numpy.zeros(X.shape[1]), numpy.inf
        while decrement > 1e-10:
            share = 1 / (1 + numpy.exp(signs * (X @ theta)))
            gradient = precision * theta - X.T @ (signs * share)
            root = numpy.linalg.cholesky((X.T * (share * (1 - share))) @ X + numpy.diag(precision))
            step = numpy.linalg.solve(root.T, numpy.linalg.solve(root, gradient))
            theta, decrement = theta - step, gradient @ step
        return theta, numpy.linalg.cholesky(numpy.linalg.inv(root @ root.T))

    (mean, root), seconds = least(laplace)
    q = CholeskyGaussian(model.dim, dtype=torch.float64).initialize_(torch.tensor(mean), torch.tensor(root))
    gap = model.negative_elbo(q).item() - lowest
    print(f"  IRLS and Laplace in NumPy: {1e3 * seconds:.1f} ms, and its gap is {gap:.3g} nats")
    mode = LogisticRegression(C=1 / precision[0], fit_intercept=False, solver="newton-cholesky", tol=1e-8)
    seconds = least(lambda: mode.fit(X, signs))[1]
    print(f"  scikit-learn, the mode alone: {1e3 * seconds:.1f} ms", flush=True)


def growth() -> None:
    """Print the time of a fit as rows, columns or members grow, with the exponent between the last two."""
    cases = {
        "rows, D = 20": [(rows, 20, ()) for rows in (1000, 10_000, 100_000)],
        "columns, 4,000 rows": [(4000, columns, ()) for columns in (20, 80, 320)],
        "members, 50 x 5": [(50, 5, (members,)) for members in (10, 100, 1000, 10_000)],
    }
    for name, sizes in cases.items():
        found = []  # numbers that grow, with the seconds
        for rows, columns, batch in sizes:
            generator = torch.Generator().manual_seed(0)
            X = torch.randn(*batch, rows, columns, generator=generator) / columns**0.5
            noise = torch.randn(*batch, rows, generator=generator)
            model = GeneralizedLinear(X, (X.sum(-1) + noise > 0).double(), classes=(0, 1))
            run = lambda: fit(CholeskyGaussian(columns, batch), model, progress=False)  # noqa: E731, B023
            found.append((model.X.numel(), least(run, 3)[1]))
        (before, shorter), (after, longer) = found[-2:]
        exponent = math.log(longer / shorter) / math.log(after / before)
        print(f"{name}: {', '.join(f'{1e3 * at:.3g} ms' for _, at in found)}; exponent {exponent:.2f}", flush=True)


def rate(lr: float, falls: bool, step: Any) -> Any:
    """The learning rate of a step."""
    return lr / (1 + step / FALL) ** 0.5 if falls else lr


def pyros(model: GeneralizedLinear, lr: float, falls: bool, particles: int) -> Guide:
    X, y, precision = model.X, (model.y > 0).double(), model.prior.precision

    def joint() -> None:
        theta = pyro.sample("theta", dist.Normal(torch.zeros_like(precision), precision.rsqrt()).to_event(1))
        eta = theta @ X.mT
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=eta if eta.ndim == 1 else eta.squeeze(-2)), obs=y)

    pyro.clear_param_store()
    pyro.enable_validation(False)
    pyro.set_rng_seed(0)
    guide = AutoMultivariateNormal(joint, init_loc_fn=init_to_mean)
    loss = Trace_ELBO(num_particles=particles, vectorize_particles=particles > 1, max_plate_nesting=1)
    adam = {"optimizer": torch.optim.Adam, "optim_args": {"lr": lr}, "lr_lambda": lambda step: rate(1.0, falls, step)}
    scheduler = pyro.optim.LambdaLR(adam)
    svi = SVI(joint, guide, scheduler, loss)

    def advance() -> None:
        for _ in range(CHUNK):
            svi.step()
            if falls:
                scheduler.step()

    def moments() -> tuple[Tensor, Tensor]:
        return guide.loc.detach(), (guide.scale[:, None] * guide.scale_tril).detach()

    return advance, moments


def numpyros(model: GeneralizedLinear, lr: float, falls: bool, particles: int) -> Guide:
    jax.config.update("jax_enable_x64", True)
    X, y = jax.numpy.array(model.X.numpy()), jax.numpy.array((model.y > 0).double().numpy())
    sd = jax.numpy.array(model.prior.precision.rsqrt().numpy())

    def joint(X: jax.Array, y: jax.Array) -> None:
        theta = numpyro.sample("theta", numpyro.distributions.Normal(jax.numpy.zeros_like(sd), sd).to_event(1))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", numpyro.distributions.Bernoulli(logits=X @ theta), obs=y)

    guide = numpyro.infer.autoguide.AutoMultivariateNormal(joint, init_loc_fn=numpyro.infer.init_to_mean)
    adam = numpyro.optim.Adam(lambda step: rate(lr, falls, step))
    svi = numpyro.infer.SVI(joint, guide, adam, numpyro.infer.Trace_ELBO(num_particles=particles))
    state = svi.init(jax.random.PRNGKey(0), X, y)

    @jax.jit
    def chunk(state, X, y):
        return jax.lax.scan(lambda state, _: (svi.update(state, X, y)[0], None), state, None, length=CHUNK)[0]

    jax.block_until_ready(chunk(state, X, y))  # compiles; the state stays where it is

    def advance() -> None:
        nonlocal state
        state = jax.block_until_ready(chunk(state, X, y))

    def moments() -> tuple[Tensor, Tensor]:
        values = svi.get_params(state)
        return tuple(torch.tensor(values[name].tolist()) for name in ("auto_loc", "auto_scale_tril"))

    return advance, moments


def measure(model: GeneralizedLinear, lowest: float, guide: Guide, setting: str, seconds: float) -> Run:
    """Steps until the last gap is reached or the seconds are over."""
    advance, moments = guide
    q = CholeskyGaussian(model.dim, dtype=torch.float64)
    clock, chunks, look, best, best_at, reached, plateau = 0.0, 0, 1, float("inf"), 0.0, {}, False
    while clock < seconds and GAPS[-1] not in reached and not plateau:
        start = time.process_time()
        advance()
        clock, chunks = clock + time.process_time() - start, chunks + 1
        if chunks < look and clock < seconds:
            continue
        look = chunks + max(1, chunks // 50)
        mean, root = moments()
        gap = model.negative_elbo(q.initialize_(mean, root)).item() - lowest
        best, best_at = (gap, clock) if gap < best else (best, best_at)
        plateau = clock > seconds / 2 and best_at < clock * 2 / 3
        for wanted in GAPS:
            if gap < wanted:
                reached.setdefault(wanted, clock)
    return Run(setting, chunks * CHUNK, clock, best, plateau, reached)


def setting_of(text: str) -> tuple[float, bool, int]:
    """The rate, whether it falls, and the particles: "0.03f:10"."""
    lr, _, particles = text.partition(":")
    return float(lr.removesuffix("f")), lr.endswith("f"), int(particles)


def grid(
    model: GeneralizedLinear,
    lowest: float,
    peer: Callable[..., Guide],
    seconds: float,
    settings: Sequence[tuple[float, bool, int]] | None,
) -> list[Run]:
    """A run per setting, printed."""
    runs = []
    for lr, falls, particles in settings or (LARGE_GRID if len(model.y) > LARGE else GRID):
        setting = f"lr {lr:g}{' falling' * falls}, {particles} draw{'s' * (particles > 1)}"
        run = measure(model, lowest, peer(model, lr, falls, particles), setting, seconds)
        times = ", ".join(f"{gap:g} nats at {at:.2f} s" for gap, at in run.reached.items()) or "no gap reached"
        end = " (plateau)" if run.plateau else ""
        print(
            f"  {peer.__name__[:-1]:8}{setting:28}{run.steps:8} steps, {run.seconds:5.1f} s{end}, "
            f"lowest gap {run.lowest:.3g}: {times}",
            flush=True,
        )
        runs.append(run)
    return runs


def compared(runs: list[Run], gap: float, mine: float) -> tuple[str, str]:
    """The best run's time with its setting, and the ratio."""
    if not runs:
        return "not run", "-"
    there = [run for run in runs if gap in run.reached]
    if there:
        best = min(there, key=lambda run: run.reached[gap])
        return f"{best.reached[gap]:.2f} s ({best.setting})", f"{best.reached[gap] / mine:,.0f}"
    seconds = min(run.seconds for run in runs)
    note = f", {sum(run.plateau for run in runs)} of {len(runs)} on a plateau" * any(run.plateau for run in runs)
    return f"not reached in {seconds:.0f} s{note}", f"above {seconds / mine:,.0f}"


def log(path: Path, data: str, mine: dict[float, float], peers: dict[str, list[Run]]) -> None:
    """Append a line for each peer and gap; seconds are null where no setting got there within the patience told."""
    with path.open("a") as file:
        for peer, gap in ((peer, gap) for peer, runs in peers.items() if runs for gap in GAPS):
            runs = peers[peer]
            seconds = min((run.reached[gap] for run in runs if gap in run.reached), default=None)
            line = {"data": data, "gap": gap, "ours": mine[gap], "peer": peer, "seconds": seconds}
            file.write(json.dumps({**line, "patience": min(run.seconds for run in runs)}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=DATA, choices=DATA)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for each setting of a peer")
    parser.add_argument("--settings", nargs="+", type=setting_of, help="of the peers, in the place of the grid")
    parser.add_argument("--log", type=Path, help="a file for the results")
    parser.add_argument("--peers", nargs="+", default=("Pyro", "NumPyro"), choices=("Pyro", "NumPyro"))
    parser.add_argument("--growth", action="store_true", help="how the time of a fit grows, without peers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if arguments.growth:
        growth()
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if numpyro is None:
        print("NumPyro is not installed: that comparison is skipped.")
    rows = [("data", "gap", "torchngvi", "Pyro, best", "ratio", "NumPyro, best", "ratio")]
    for name in arguments.data:
        model = load(name)
        q = CholeskyGaussian(model.dim, dtype=torch.float64)
        lowest = fit(q, model, tolerance=1e-7, progress=False).loss
        mine = ours(model, lowest)
        times = ", ".join(f"{gap:g} nats at {1e3 * mine[gap]:.1f} ms" for gap in GAPS)
        print(f"{name}, {len(model.y)} x {model.dim}\n  fit: {times}", flush=True)
        seconds = arguments.patience
        modes(model, lowest)
        peers = {"Pyro": pyros, "NumPyro": numpyros if numpyro else None}
        runs = [
            grid(model, lowest, peer, seconds, arguments.settings) if peer and which in arguments.peers else []
            for which, peer in peers.items()
        ]
        if arguments.log is not None:
            log(arguments.log, name, mine, dict(zip(("Pyro", "NumPyro"), runs, strict=True)))
        for gap in GAPS:
            cells = (cell for each in runs for cell in compared(each, gap, mine[gap]))
            rows.append((name, f"{gap:g}", f"{1e3 * mine[gap]:.1f} ms", *cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print(" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
