"""The table that decides what the engine of `fit` keeps: log joints, with parts of it off, in gradients and nats.

    python -m benchmarks.engine_table --log FILE [--label now] [--seeds 0 1 2] [--groups truths ...] [--only NAMES]
    python -m benchmarks.engine_table --log FILE --off pool other-starts ... --lot 60 --seeds 0
    python -m benchmarks.engine_table --log FILE --set bold=0.0 far=1e9 ... --lot 60 --but 1000 --seeds 0
    python -m benchmarks.engine_table --log FILE --report [--against before]

Rows are the log joints of `benchmarks.engine` and its held ones, of `benchmarks.tuning_free`, posteriordb,
`benchmarks.truths`, `benchmarks.published` and the classic `benchmarks.posteriors_examples`.  A row is written
to the log once it is done, and a run that is started again goes on after the last one.  ``--lot`` draws so many rows,
the same each time.  ``--label`` names the column; run an older checkout with a copy of this file to have it beside.  A
column of a part that is off has the name of the part, and one of another number that number.

An entry: gradients and values of the log joint, seconds of the processor, all with the examination; the ELBO on 16,384
common draws with its standard error; whether the fit has converged, and the word of its verdict.  The report compares
each row and seed with the same of another column: ELBO by nats below the best that any entry of the row has reached.
"""

import argparse
import ast
import contextlib
import functools
import json
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from torchngvi import CholeskyGaussian, DiagonalGaussian, fit

try:
    from torchngvi.fitting.pool import antithetic
except ImportError:  # of an older checkout
    antithetic = None
try:
    from torchngvi.fitting.starts import EngineSettings
except ImportError:  # of an older checkout
    EngineSettings = None  # type: ignore[assignment,misc]

LOST, DEARER = 0.02, 1.5  # nats, and times: what a row loses by a part before that is called needed
VALUE = 0.4  # of a gradient
DRAWS = 16_384
SHOWN = ("row", "column", "seed", "gradients", "seconds", "failed")

LogJoint = Callable[[Tensor], Tensor]
Row = tuple[type, int, LogJoint]  # the family, D, the log joint


# ---------------------------------------------------------------- rows


def engine_rows() -> Iterator[tuple[str, Callable[[], Row]]]:
    """Those of `benchmarks.engine`, and its held ones."""
    from benchmarks.engine import HELD, models, problems

    for name, problem in {**problems(), **models(HELD)}.items():
        yield name, lambda problem=problem: (CholeskyGaussian, *(problem() if callable(problem) else problem))


def tuning_free_rows() -> Iterator[tuple[str, Callable[[], Row]]]:
    """The grid of shapes, dimensions and condition numbers."""
    from benchmarks.tuning_free.targets import DIMS, SHAPES, WIDEST, stacks

    known = functools.lru_cache(2)(stacks)
    for dim, settings in DIMS.items():
        for shape in SHAPES:
            if (shape == "funnel" and dim == 1) or (shape == "skew normal" and dim > WIDEST):
                continue
            for member, setting in enumerate(settings):

                def row(dim: int = dim, shape: str = shape, member: int = member) -> Row:
                    (stack,) = (stack for stack in known(dim) if stack.shape == shape)
                    return (CholeskyGaussian if dim <= WIDEST else DiagonalGaussian), dim, stack.one(member)

                yield f"{shape}, {dim}, {setting.condition:.0e}", row


def posteriordb_rows() -> Iterator[tuple[str, Callable[[], Row]]]:
    """The posteriors that have reference draws."""
    from benchmarks.posteriordb.load import NAMES, load

    for name in NAMES:

        def row(name: str = name) -> Row:
            posterior = load(name)
            return CholeskyGaussian, posterior.dim, posterior.log_joint

        yield name, row


def truths_rows() -> Iterator[tuple[str, Callable[[], Row]]]:
    """Those whose moments are known."""
    from benchmarks.truths import targets

    for target in targets():
        yield target.name, lambda target=target: (CholeskyGaussian, target.dim, target.log_joint)


def published_rows() -> Iterator[tuple[str, Callable[[], Row]]]:
    """Published models."""
    from benchmarks.published import MODELS

    for name, model in MODELS.items():
        yield name, lambda model=model: (CholeskyGaussian, model.dim, model.log_joint)


def example_rows() -> Iterator[tuple[str, Callable[[], Row]]]:
    """Classic examples of BUGS, as Stan's folder of examples has them."""
    from benchmarks.posteriors_examples import EXAMPLES

    for name, make in EXAMPLES.items():
        yield name, lambda make=make: (CholeskyGaussian, *make())


GROUPS = {
    "engine": engine_rows,
    "examples": example_rows,
    "posteriordb": posteriordb_rows,
    "published": published_rows,
    "truths": truths_rows,
    "tuning_free": tuning_free_rows,
}


# ---------------------------------------------------------------- parts


def without(path: str, new: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which an attribute of a class or a module of `torchngvi.fitting` is another."""
    return mock.patch(f"torchngvi.fitting.{path}", new=new)


def _nothing() -> Iterator[None]:
    """A path that finds nothing better."""
    return False
    yield


# what of `torchngvi.fitting` is replaced, and by what: a function with the arguments of the one that it stands for
PARTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "pool": ("pool.PoolLoop.begin", lambda self, *, rough: None),
    "other-starts": ("sample_average.SampleAverages._better_start", lambda self: _nothing()),
    "sets": ("pool.Descent.averages_sets", lambda self, tame=0.0: False),
    "along": ("pool.PoolLoop._onward", lambda self, there: None),
    "mean-field": ("pool.PoolLoop._rough", lambda self, here: True),
    "orthogonal": ("pool.antithetic", lambda place, number, seed, near: antithetic(place, number, seed, False)),
    "mode": ("starts.Starts._searched", lambda self, budget=0, farther=0: None),
    "units": ("starts.Starts._in_other_units", lambda self, loss: False),
}


def with_number(text: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which a field of the settings has another value, by FIELD=VALUE."""
    name, value = text.split("=", 1)
    new = functools.partial(EngineSettings, **{name: ast.literal_eval(value)})
    return without("sample_average.EngineSettings", new)


# ---------------------------------------------------------------- the runs


@torch.no_grad()
def elbo(q: Any, log_joint: LogJoint) -> tuple[float, float]:
    """On common draws, with its standard error."""
    generator, values = torch.Generator().manual_seed(12345), []
    for _ in range(0, DRAWS, 1024):
        half = torch.randn(512, q.dim, generator=generator, dtype=torch.float64)
        values.append(log_joint(q.push_noise(torch.cat([half, -half]))).unflatten(0, (2, -1)).mean(0))
    each = torch.cat(values)
    return float(each.mean() + q.entropy()), float(each.std()) / math.sqrt(len(each))


def entry(row: Row, seed: int) -> dict[str, Any]:
    """What `fit` makes of a row."""
    family, dim, log_joint = row
    torch.manual_seed(seed)
    q, start = family(dim, dtype=torch.float64), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fit(q, log_joint, progress=False)
    seconds = time.process_time() - start
    value, error = elbo(q, log_joint)
    return {
        "dim": dim,
        "gradients": result.gradients,
        "fit": result.trace[-1].gradients if result.trace else 0,
        "values": result.values,
        "seconds": round(seconds, 3),
        "elbo": value,
        "error": error,
        "converged": result.converged,
        "word": result.verdict.word,
        "reason": "" if result.converged else result.reason,
    }


def rows(groups: list[str], only: list[str], lot: int) -> list[tuple[str, Callable[[], Row]]]:
    """Those that are asked for, by the name of their group and their own."""
    found = [(f"{group}: {name}", make) for group in groups for name, make in GROUPS[group]()]
    found = [(name, make) for name, make in found if not only or any(part in name for part in only)]
    return random.Random(1).sample(found, lot) if 0 < lot < len(found) else found


def run(options: argparse.Namespace) -> None:
    """Each row, column and seed that the log has not."""
    known = {(e["row"], e["column"], e["seed"]) for e in read(options.log)}
    parts = {part: functools.partial(without, *PARTS[part]) for part in options.off}
    numbers = {text: functools.partial(with_number, text) for text in options.set}
    columns = {**parts, **numbers} or {options.label: contextlib.nullcontext}
    for seed in options.seeds:
        for name, make in rows(options.groups, options.only, options.lot):
            if any(part in name for part in options.but):
                continue
            for column, off in columns.items():
                if (name, column, seed) in known:
                    continue
                row = make()
                try:
                    with off():
                        found = entry(row, seed)
                except Exception as error:  # a row of the table
                    found = {"failed": f"{type(error).__name__}: {error}"[:300]}
                found = {"row": name, "column": column, "seed": seed, **found}
                with options.log.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                print(*(found.get(key, "") for key in SHOWN), flush=True)


# ---------------------------------------------------------------- the report


def read(log: Path) -> list[dict[str, Any]]:
    """The entries of a log."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def cost(e: dict[str, Any]) -> float:
    """Gradients and values together, in gradients."""
    return float(e["gradients"] + VALUE * e["values"])


def report(options: argparse.Namespace) -> None:
    """The table of one column, and what others lose or gain beside it."""
    entries = [e for e in read(options.log) if not options.only or any(part in e["row"] for part in options.only)]
    best: dict[str, float] = {}
    for e in entries:
        if "elbo" in e and math.isfinite(e["elbo"]):
            best[e["row"]] = max(best.get(e["row"], -math.inf), e["elbo"])
    table = {(e["row"], e["column"], e["seed"]): e for e in entries}
    columns = list(dict.fromkeys(e["column"] for e in entries))
    for column in columns:
        own = [e for e in entries if e["column"] == column]
        done = [e for e in own if "elbo" in e]
        converged = [e for e in done if e["converged"]]
        false_ends = [e for e in converged if best[e["row"]] - e["elbo"] > 10 * LOST]
        print(
            f"{column}: {len(own)} entries, {len(own) - len(done)} failed, {len(done) - len(converged)} not converged, "
            f"{len(false_ends)} converged more than {10 * LOST:g} nats below the best known; "
            f"{sum(map(cost, done)):,.0f} gradients, {sum(e['seconds'] for e in done):,.0f} s"
        )
    against = options.against
    for column in columns:
        if column == against:
            continue
        pairs = [(e, table.get((e["row"], against, e["seed"]))) for e in entries if e["column"] == column]
        both = [(e, other) for e, other in pairs if other is not None and "elbo" in e and "elbo" in other]
        if not both:
            continue
        ratios = [cost(e) / cost(other) for e, other in both]
        times = [e["seconds"] / max(other["seconds"], 1e-3) for e, other in both]
        print(
            f"\n{column} against {against}, {len(both)} pairs: median of gradients {statistics.median(ratios):.2f}, "
            f"geometric mean {statistics.geometric_mean(ratios):.2f}, of seconds {statistics.median(times):.2f}"
        )
        print("| row | seed | D | gradients | against | s | against | nats above | converged | word |\n|" + "---|" * 10)
        for (e, other), ratio in zip(both, ratios, strict=True):
            gain, noise = e["elbo"] - other["elbo"], e["error"]
            changed = abs(gain) > LOST or e["converged"] != other["converged"] or not 1 / DEARER < ratio < DEARER
            if changed or options.all:
                print(
                    f"| {e['row']} | {e['seed']} | {e['dim']} | {cost(e):.0f} | {cost(other):.0f} | {e['seconds']:.2f} "
                    f"| {other['seconds']:.2f} | {gain:+.3f} ± {noise:.1g} | {e['converged']}, {other['converged']} "
                    f"| {e['word']}, {other['word']} |"
                )


def main() -> None:
    """Run what the log has not, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, required=True, help="one JSON object a line")
    parser.add_argument("--label", default="now", help="the name of the column")
    parser.add_argument("--off", nargs="+", choices=list(PARTS), default=[], help="parts, each a column")
    parser.add_argument("--set", nargs="+", default=[], help="FIELD=VALUE of EngineSettings, each a column")
    parser.add_argument("--but", nargs="+", default=[], help="parts of names that are left out, after the lot")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--only", nargs="+", default=[], help="parts of names")
    parser.add_argument("--lot", type=int, default=0, help="so many rows, drawn by lot")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--against", default="before")
    parser.add_argument("--all", action="store_true", help="print rows that are alike, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.report:
        report(options)
    else:
        run(options)


if __name__ == "__main__":
    main()
