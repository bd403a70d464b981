"""The 28 posteriors of posteriordb with reference draws: one unchanged default against a long run and other libraries.

    python -m benchmarks.posteriordb.compare [--only NAMES] [--methods default long ...] [--seconds 20] [--log FILE]
    python -m benchmarks.posteriordb.compare --table FILE

The second prints the table of docs/appendix/black_box_measurements.md from such a log.

All methods get the same log joint, a PyTorch function, start at mean 0 unless said otherwise, and end in a Gaussian
with full covariance:

    default      torchngvi.fit(q, log_joint)
    long         the same at a tolerance of 0.01 and another seed
    reference    as long, from the mean of the reference draws: is there a better mode?
    pyro         AutoMultivariateNormal and Adam, the best of four learning rates by its final ELBO, --seconds of CPU
                 for each (on the differential equations that is fewer steps); gradients = steps x particles of that
                 run
    pathfinder   BlackJAX's with up to 200 iterations, the best of four random starts by its own ELBO; gradients
                 are those of L-BFGS over all four; its seconds include compilation and calls of PyTorch from
                 JAX.  Skipped where it is not installed

The errors of mean (in posterior sd) and of sd (as a logarithm) are the largest over the published quantities,
against 10,000 draws of Hamiltonian Monte Carlo, whose own error is about 0.01 each, 0.03 the largest of
many.  Moments, ELBO (with its standard error) and k-hat of every q come from the same 8 x 4096 scrambled
Sobol points.  Float64 on one core.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, init_to_mean
from torch import Tensor

from torchngvi import CholeskyGaussian, FitResult, fit
from torchngvi.diagnostics.importance import smoothed

from . import regressions
from .load import NAMES, Posterior, load

try:
    import blackjax
    import jax
except ImportError:
    blackjax = None

SCRAMBLES, POINTS, CHUNK = 8, 4096, 2048
LONG = 0.01  # tolerance
RATES, PARTICLES = (0.003, 0.01, 0.03, 0.1), 10
STARTS, ITERATIONS = 4, 200  # of pathfinder
SHORTFALL = 0.1  # nats
MEAN, SD, GRADIENTS = 0.05, math.log(1.05), 2000  # what the regressions are held to


class Counted:
    """The log joint, and the gradients taken of it."""

    def __init__(self, posterior: Posterior) -> None:
        self.log_joint, self.gradients = posterior.log_joint, 0

    def __call__(self, theta: Tensor) -> Tensor:
        self.gradients += theta[..., 0].numel() if theta.requires_grad else 0
        return self.log_joint(theta)


class Ended(NamedTuple):
    """A q and what it took."""

    q: CholeskyGaussian
    gradients: int
    seconds: float
    verdict: str


class Row(NamedTuple):
    """A method on a posterior."""

    mean: float  # error, in sd
    sd: float  # |log ratio|
    k: float
    elbo: float
    error: float
    gradients: int
    seconds: float
    verdict: str

    @property
    def failed(self) -> bool:
        return not all(map(math.isfinite, (self.mean, self.sd, self.elbo)))


FAILED = Row(*5 * [math.nan], 0, math.nan, "failed")


# ---------------------------------------------------------------- the same measure for all


def measured(posterior: Posterior, ended: Ended) -> Row:
    log_weights, draws = [], []
    with torch.no_grad():
        for scramble in range(SCRAMBLES):
            points = torch.quasirandom.SobolEngine(posterior.dim, scramble=True, seed=scramble).draw(POINTS)
            z = torch.special.ndtri(points.double().clamp(1e-9, 1 - 1e-9))
            for theta in ended.q.push_noise(z).split(CHUNK):
                log_weights.append(posterior.log_joint(theta) - ended.q.log_prob(theta))
                draws.append(posterior.constrain(theta))
    log_weight = torch.cat(log_weights)
    elbos = log_weight.unflatten(0, (SCRAMBLES, POINTS)).mean(1)
    mean, sd = 0.0, 0.0
    for name, reference in posterior.mean.items():
        values, scale = torch.cat([draw[name] for draw in draws]), posterior.sd[name]
        mean = max(mean, ((values.mean(0) - reference) / scale).abs().max().item())
        sd = max(sd, (values.std(0) / scale).log().abs().max().item())
    error = elbos.std().item() / math.sqrt(SCRAMBLES)
    return Row(mean, sd, smoothed(log_weight).k_hat.item(), elbos.mean().item(), error, *ended[1:])


# ---------------------------------------------------------------- the methods


def default(posterior: Posterior, seconds: float) -> Row:
    return fitted(posterior, 0, lambda q, target: fit(q, target, progress=False))


def long(posterior: Posterior, seconds: float) -> Row:
    return fitted(posterior, 1, lambda q, target: fit(q, target, tolerance=LONG, progress=False))


def reference(posterior: Posterior, seconds: float) -> Row:
    def run(q: CholeskyGaussian, target: Counted) -> FitResult:
        q.initialize_(posterior.unconstrained_draws.mean(0))
        return fit(q, target, tolerance=LONG, progress=False)

    return fitted(posterior, 2, run)


def fitted(posterior: Posterior, seed: int, run: Callable[[CholeskyGaussian, Counted], FitResult]) -> Row:
    torch.manual_seed(seed)
    q, target, start = CholeskyGaussian(posterior.dim, dtype=torch.float64), Counted(posterior), time.perf_counter()
    result = run(q, target)
    verdict = "converged" if result.converged else f"not converged, {result.reason}"
    return measured(posterior, Ended(q, target.gradients, time.perf_counter() - start, verdict))


def pyros(posterior: Posterior, seconds: float) -> Row:
    """The best learning rate."""
    rows = [adam(posterior, rate, seconds) for rate in RATES]
    best = max(rows, key=lambda row: -math.inf if row.failed else row.elbo)
    lost = sum(row.failed for row in rows)
    return best._replace(verdict=best.verdict + f"; {lost} of {len(rows)} learning rates failed" * bool(lost))


def adam(posterior: Posterior, rate: float, seconds: float) -> Row:
    flat = pyro.distributions.Normal(torch.zeros(posterior.dim), 1.0).to_event(1).mask(False)

    def joint() -> None:
        pyro.factor("log_joint", posterior.log_joint(pyro.sample("theta", flat)))

    pyro.clear_param_store()
    pyro.enable_validation(False)
    pyro.set_rng_seed(0)
    guide = AutoMultivariateNormal(joint, init_loc_fn=init_to_mean)
    loss = Trace_ELBO(num_particles=PARTICLES, vectorize_particles=True, max_plate_nesting=0)
    svi = SVI(joint, guide, pyro.optim.Adam({"lr": rate}), loss)
    steps, alive, start = 0, True, time.process_time()
    while alive and time.process_time() - start < seconds:
        alive, steps = math.isfinite(svi.step()), steps + 1
    spent, mean, root = (
        time.process_time() - start,
        guide.loc.detach(),
        (guide.scale[:, None] * guide.scale_tril).detach(),
    )
    verdict = f"lr {rate:g}, {steps} steps" + ", then not finite" * (not alive)
    if not bool(torch.isfinite(root).all() & torch.isfinite(mean).all()):
        return FAILED._replace(gradients=steps * PARTICLES, seconds=spent, verdict=verdict)
    q = CholeskyGaussian(posterior.dim, dtype=torch.float64).initialize_(mean, root)
    return measured(posterior, Ended(q, steps * PARTICLES, spent, verdict))


def pathfinder(posterior: Posterior, seconds: float) -> Row:
    """The best start."""
    jax.config.update("jax_enable_x64", True)
    target, start, found = Counted(posterior), time.perf_counter(), []
    log_joint = in_jax(target)
    for key in jax.random.split(jax.random.PRNGKey(0), STARTS):
        first, second = jax.random.split(key)
        theta = jax.random.uniform(first, (posterior.dim,), minval=-2.0, maxval=2.0, dtype="float64")
        state, _ = blackjax.vi.pathfinder.approximate(second, log_joint, theta, maxiter=ITERATIONS)
        found.append(state)
    spent, best = time.perf_counter() - start, max(found, key=lambda state: np.nan_to_num(state.elbo, nan=-np.inf))
    names = ("position", "grad_position", "alpha", "beta", "gamma")
    position, gradient, alpha, beta, gamma = (torch.tensor(np.array(getattr(best, name))) for name in names)
    covariance = torch.diag(alpha) + beta @ gamma @ beta.mT
    root, info = torch.linalg.cholesky_ex(covariance)
    if info or not bool(torch.isfinite(root).all()):
        return FAILED._replace(gradients=target.gradients, seconds=spent, verdict="no positive definite covariance")
    mean = position + covariance @ gradient  # as BlackJAX samples it
    q = CholeskyGaussian(posterior.dim, dtype=torch.float64).initialize_(mean, root)
    return measured(posterior, Ended(q, target.gradients, spent, f"best of {STARTS} starts"))


def in_jax(target: Counted) -> Callable:
    """The log joint of a JAX array."""

    def value(theta: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return target(torch.tensor(np.asarray(theta))).numpy()

    def value_and_gradient(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.enable_grad():
            theta = torch.tensor(np.asarray(theta)).requires_grad_()
            values = target(theta)
            (gradient,) = torch.autograd.grad(values.sum(), theta)
        return values.detach().numpy(), gradient.numpy()

    def shape(theta: "jax.Array") -> "jax.ShapeDtypeStruct":
        return jax.ShapeDtypeStruct(theta.shape[:-1], theta.dtype)

    @jax.custom_vjp
    def log_joint(theta: "jax.Array") -> "jax.Array":
        return jax.pure_callback(value, shape(theta), theta, vmap_method="expand_dims")

    def forward(theta: "jax.Array") -> "tuple[jax.Array, jax.Array]":
        return jax.pure_callback(value_and_gradient, (shape(theta), theta), theta, vmap_method="expand_dims")

    log_joint.defvjp(forward, lambda gradient, weight: (weight[..., None] * gradient,))
    return log_joint


METHODS = {"default": default, "long": long, "reference": reference, "pyro": pyros, "pathfinder": pathfinder}


# ---------------------------------------------------------------- the table


def line(method: str, row: Row) -> str:
    return (
        f"  {method:11}{row.mean:9.3f}{row.sd:9.3f}{row.k:7.2f}{row.gradients:10}{row.seconds:9.2f}"
        f"{row.elbo:16.4f} ±{row.error:7.4f}  {row.verdict}"
    )


def tried(method: str, posterior: Posterior, seconds: float) -> Row:
    try:
        return METHODS[method](posterior, seconds)
    except Exception as error:  # a failure is a result
        return FAILED._replace(verdict=f"failed: {type(error).__name__}: {error}")


def read(log: Path) -> dict[str, dict[str, Row]]:
    """The rows of a log, the last of each kind."""
    table: dict[str, dict[str, Row]] = {}
    for entry in map(json.loads, log.read_text().splitlines()):
        name, method = entry.pop("name"), entry.pop("method")
        table.setdefault(name, {})[method] = Row(**entry)
    return {name: table[name] for name in NAMES if name in table}


def markdown(table: dict[str, dict[str, Row]]) -> str:
    """The tables of the docs: the default, and the other libraries where they were run."""
    head = "| posterior | D | mean error, sd | log sd error | k-hat | gradients | ELBO |"
    lines = [head, "|---" * 7 + "|"]
    for name, rows in table.items():
        row = rows["default"]
        cells = (name, load(name).dim, f"{row.mean:.3f}", f"{row.sd:.3f}", f"{row.k:.2f}", row.gradients)
        lines.append(f"| {' | '.join(map(str, (*cells, f'{row.elbo:.3f}')))} |")
    for method in ("pyro", "pathfinder"):
        if any(method in rows for rows in table.values()):
            lines += ["", f"| {method} | mean error, sd | log sd error | gradients | ELBO below |", "|---" * 5 + "|"]
        for name, rows in table.items():
            if method in rows and not rows[method].failed:
                row, below = rows[method], rows["default"].elbo - rows[method].elbo
                lines.append(f"| {name} | {row.mean:.3f} | {row.sd:.3f} | {row.gradients} | {below:.2f} |")
    return "\n".join(lines)


def is_regression(name: str) -> bool:
    return name.rsplit("-", 1)[1] in vars(regressions)


def summary(table: dict[str, dict[str, Row]]) -> None:
    """What the default is held to."""
    print("\nsummary of the default, unchanged for all")
    rows = {name: row["default"] for name, row in table.items() if "default" in row}
    print(f"  failed or NaN: {[name for name, row in rows.items() if row.failed] or 'none'}")
    print(f"  not converged: {[name for name, row in rows.items() if row.verdict.startswith('not')] or 'none'}")
    best = {name: max((row.elbo for row in table[name].values() if not row.failed), default=math.nan) for name in rows}
    gaps = {name: best[name] - row.elbo for name, row in rows.items()}
    worst = max(gaps, key=lambda name: gaps[name])
    over = {name: round(gap, 3) for name, gap in gaps.items() if not gap <= SHORTFALL}
    print(f"  largest ELBO shortfall against the best of any method: {gaps[worst]:.4f} nats ({worst})")
    print(f"  shortfall above {SHORTFALL} nats: {over or 'none'}")
    outside = {
        name: row["long"]
        for name, row in table.items()
        if is_regression(name) and "long" in row and (row["long"].mean > MEAN or row["long"].sd > SD)
    }
    for name, row in outside.items():
        print(f"  no Gaussian is near: {name}, whose best q has mean error {row.mean:.3f}, sd error {row.sd:.3f}")
    near = {name: row for name, row in rows.items() if is_regression(name) and name not in outside}
    print(f"  near-Gaussian regressions ({len(near)}): {', '.join(near)}")
    for label, field, bound in (
        ("mean error", "mean", MEAN),
        ("|log sd ratio|", "sd", SD),
        ("gradients", "gradients", GRADIENTS),
    ):
        worst = max(near, key=lambda name: getattr(near[name], field), default="")
        if worst:
            print(f"    largest {label}: {getattr(near[worst], field):.4g} ({worst}), to be at most {bound:.4g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES, metavar="NAME")
    parser.add_argument("--methods", nargs="+", default=tuple(METHODS), choices=tuple(METHODS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of CPU, for each learning rate of Pyro")
    parser.add_argument("--log", type=Path, help="a file to which each row is added, one JSON object a line")
    parser.add_argument("--table", type=Path, help="print the table of such a file, and run nothing")
    arguments = parser.parse_args()
    if arguments.table:
        table = read(arguments.table)
        print(markdown(table))
        summary(table)
        return
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    methods = [method for method in METHODS if method in arguments.methods]
    if blackjax is None and "pathfinder" in methods:
        print("BlackJAX is not installed: pathfinder is skipped.")
        methods.remove("pathfinder")
    fit(CholeskyGaussian(2), lambda theta: -theta.square().sum(-1), progress=False)  # warms up
    print("             mean err  sd err  k-hat gradients  seconds            ELBO           verdict")
    table: dict[str, dict[str, Row]] = {}
    for name in arguments.only:
        posterior = load(name)
        print(f"{name}, D = {posterior.dim}", flush=True)
        rows = table[name] = {}
        for method in methods:
            rows[method] = tried(method, posterior, arguments.seconds)
            print(line(method, rows[method]), flush=True)
            if arguments.log:
                with arguments.log.open("a") as file:
                    file.write(json.dumps({"name": name, "method": method} | rows[method]._asdict()) + "\n")
    if "default" in methods:
        summary(table)


if __name__ == "__main__":
    main()
