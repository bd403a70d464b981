"""What the log says: the share of targets solved, by the default and by the five settings that together solve most."""

import itertools
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from matplotlib.figure import Figure

from .targets import WIDEST

ASKED = 0.1  # nats
FIGURE = Path(__file__).parents[2] / "docs" / "tuning_free.png"
COLOURS = {"fit": "#1f5a94", "the best five": "#d1672b"}

Target = tuple[str, int, float]  # shape, dimensions, condition number
Gaps = dict[Target, dict[str, float]]


def read(log: Path) -> tuple[Gaps, dict[Target, dict]]:
    """The gap of each method on each target, infinite where it failed; and the rows of `fit`."""
    gaps: Gaps = {}
    rows: dict[Target, dict] = {}
    for row in map(json.loads, log.read_text().splitlines()):
        key = (row["shape"], row["dim"], row["condition"])
        gap = row["gap"] if row["gap"] is not None and math.isfinite(row["gap"]) else math.inf
        gaps.setdefault(key, {})[row["method"]] = gap
        if row["method"] == "fit":
            rows[key] = row
    return gaps, rows


def best_five(gaps: Gaps) -> tuple[str, ...]:
    """Of the settings that were run on every target, the five that together solve most."""
    names = sorted(set.intersection(*(set(of) for of in gaps.values())) - {"fit"})
    solved = {name: {key for key, of in gaps.items() if of[name] <= ASKED} for name in names}
    five = itertools.combinations(names, min(5, len(names)))
    return max(five, key=lambda of: (len(set.union(*(solved[one] for one in of))), sum(len(solved[one]) for one in of)))


def share(values: Iterable[float]) -> str:
    """How many are within what is asked, in words."""
    values = list(values)
    solved = sum(value <= ASKED for value in values)
    return f"{solved} of {len(values)} ({solved / len(values):.0%})"


def table(gaps: Gaps, rows: dict[Target, dict], five: tuple[str, ...], by: Callable[[Target], str]) -> str:
    """A line for each group of targets."""
    spread = "| | fit within 0.1 nats | its gradients, median and 90 % | the best five together | best one of them |\n"
    lines = [spread + "|---|---|---|---|---|"]
    groups: dict[str, list[Target]] = {}
    for key in gaps:
        groups.setdefault(by(key), []).append(key)
    for name, keys in {**groups, "all": list(gaps)}.items():
        spent = sorted(rows[key]["gradients"] for key in keys)
        middle, most = spent[len(spent) // 2], spent[min(len(spent) - 1, int(0.9 * len(spent)))]
        line = f"| {name} | {share(gaps[key]['fit'] for key in keys)} | {middle:,}, {most:,} "
        seen = [key for key in keys if len(gaps[key]) > 1]
        if seen:
            single = max(five, key=lambda one: sum(gaps[key][one] <= ASKED for key in seen))
            line += f"| {share(min(gaps[key][one] for one in five) for key in seen)} "
            line += f"| {single}: {share(gaps[key][single] for key in seen)} |"
        lines.append(line if seen else line + "| not run | not run |")
    return "\n".join(lines)


def failures(gaps: Gaps, rows: dict[Target, dict], five: tuple[str, ...]) -> str:
    """Where the default is not within what is asked, and what it says of it."""
    lines = []
    for key, of in gaps.items():
        if of["fit"] > ASKED:
            said = "converged" if rows[key]["converged"] else "not converged"
            best = f"{min(of[one] for one in five):.2g}" if len(of) > 1 else "not run"
            lines.append(
                f"{key[0]}, D = {key[1]}, condition {key[2]:.0e}: {of['fit']:.2g} nats, {said}; the five {best}"
            )
    return "\n".join(lines)


def figure(gaps: Gaps, five: tuple[str, ...], path: Path) -> None:
    """The share of targets against the gap, and what is solved of each shape by its condition number."""
    picture = Figure(figsize=(10, 3.8), dpi=130, layout="constrained")
    left, right = picture.subplots(1, 2)
    together = {key: min(of[one] for one in five) for key, of in gaps.items()}
    curves = {"fit": [of["fit"] for of in gaps.values()], "the best five": list(together.values())}
    curves |= {one: [of[one] for of in gaps.values()] for one in five}
    for name, values in curves.items():
        ordered = sorted(max(value, 1e-4) for value in values)
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        left.step(
            ordered, shares, where="post", color=COLOURS.get(name, "#9aa0a6"), linewidth=2 if name in COLOURS else 1
        )
        if name in COLOURS:
            left.plot([], [], color=COLOURS[name], label=name)
    left.plot([], [], color="#9aa0a6", label="each of the five")
    left.axvline(ASKED, color="black", linewidth=0.8, linestyle=":")
    left.set(xscale="log", xlim=(1e-4, 1e4), ylim=(0, 1), xlabel="nats below the best q of the family", ylabel="share")
    left.set_title(f"{len(gaps)} targets")
    left.legend(frameon=False)
    shapes, conditions = list(dict.fromkeys(key[0] for key in gaps)), sorted({key[2] for key in gaps})
    for row, (shape, (at, name)) in enumerate(itertools.product(shapes, enumerate(COLOURS))):
        for column, condition in enumerate(conditions):
            of = fit_or_five(gaps, together, name, (shape, condition))
            solved = sum(value <= ASKED for value in of) / len(of)
            right.barh(row // 2 + 0.38 * at - 0.19, 0.9 * solved, 0.36, left=column, color=COLOURS[name])
    right.set_yticks(range(len(shapes)), shapes)
    right.set_xticks([column + 0.45 for column in range(len(conditions))], [f"{value:.0e}" for value in conditions])
    for column in range(len(conditions)):
        right.axvline(column + 0.9, color="#9aa0a6", linewidth=0.6)
    right.invert_yaxis()
    right.set(xlabel="condition number", title="solved, of each (full width: all)")
    picture.savefig(path)


def fit_or_five(gaps: Gaps, together: dict[Target, float], name: str, group: tuple[str, float]) -> list[float]:
    """The gaps of one of the two on a shape and condition number."""
    keys = [key for key in gaps if (key[0], key[2]) == group]
    return [gaps[key]["fit"] if name == "fit" else together[key] for key in keys]


def main(log: Path) -> None:
    """Print the tables and the failures, and draw the figure of the targets that all methods have seen."""
    every, rows = read(log)
    every = {key: of for key, of in every.items() if "fit" in of}
    gaps = {key: of for key, of in every.items() if len(of) > 1}
    print(f"fit: {share(of['fit'] for of in every.values())}; compared on {len(gaps)} targets: ", end="")
    print(f"{share(of['fit'] for of in gaps.values())}\n")
    five = best_five(gaps)
    print(f"the best five: {'; '.join(five)}\n")
    print(table(every, rows, five, lambda key: f"D = {key[1]}{'' if key[1] <= WIDEST else ', mean field'}"), "\n")
    print(table(every, rows, five, lambda key: key[0]), "\n")
    print(failures(every, rows, five))
    figure(gaps, five, FIGURE)
    print(f"\n{FIGURE}")


if __name__ == "__main__":
    main(Path(__file__).with_name("results.jsonl"))
