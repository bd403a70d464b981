"""Public Pyro models: each of our guides, and Pyro's best, against long chains.

    python -m benchmarks.pyro_public --log FILE [--only NAME ...] [--guides dense auto marginal refine] [--seeds 0 1]
    python -m benchmarks.pyro_public --log FILE --chains 120 [--draws 300] [--only NAME ...]
    python -m benchmarks.pyro_public --log FILE --report

The models are those of `benchmarks.pyro_public_models`.  Ours are "dense", `AutoGaussian(model)`, "auto", the same with
``structure="auto"``, "refine", `AutoMarginal(model)`, and "marginal", the same with ``refine=False``, each with
`fit_guide` as it comes, for ``--longest`` seconds at most.  "pyro" is the best by its ELBO of AutoDiagonalNormal,
AutoLowRankMultivariateNormal and AutoMultivariateNormal, by Adam at four rates on 16 draws a step from the vectorised
log joint, which is faster than Pyro's SVI; each has as many seconds of the processor as the dense guide had, and
``--most`` at most.  An entry is written to the log once it is done, and a run that is started again goes on after it.

``--chains`` runs the long chains of which `benchmarks/pyro_public_truths.json` has none that mixed, for so many seconds
of CPU each (`benchmarks.pyro_truths`).  The table has a row a model: the word of the verdict, the worst error of a mean
in sds of the truth, the worst ratio of an sd to the truth, that of the scales of groups on their log scale, gradients
of the log joint with the examination (of the marginal one for "marginal"), and seconds of the processor.  A verdict is
wrong if it is "fits" with a mean off by more than 0.3 sd or an sd by more than a factor 1.35.  A truth whose R-hat is
above 1.02 or whose ESS is below 400 is marked with a star, and counts in no summary.
"""

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDiagonalNormal, AutoLowRankMultivariateNormal, AutoMultivariateNormal
from torch import Tensor

from benchmarks.pyro_public_models import MODELS, Model
from benchmarks.pyro_truths import Truth, keep, kept, truth_of
from torchngvi.adapters.pyro import AutoGaussian, AutoMarginal, ModelLogJoint, fit_guide, log_joint

TRUTHS = Path(__file__).with_name("pyro_public_truths.json")
GUIDES = ("dense", "auto", "marginal", "refine", "pyro")
KINDS, RATES, PARTICLES, DRAWS = (
    (AutoDiagonalNormal, AutoLowRankMultivariateNormal, AutoMultivariateNormal),
    (1e-3, 3e-3, 1e-2, 3e-2),
    16,
    1000,
)
MEAN, SD, SCALE = (
    0.3,
    1.35,
    1.15,
)  # a mean that is off, in sds; ratios of an sd that is off, and of a scale that is right

Entry = dict[str, Any]
Errors = tuple[float, float, float | None]


# ------------------------------------------------------------------------------------ fits


def made(kind: str, model: Model) -> AutoGaussian:
    """A guide of ours."""
    if kind in ("dense", "auto"):
        return AutoGaussian(model, structure="auto" if kind == "auto" else "dense")
    return AutoMarginal(model, refine=kind == "refine")


@torch.no_grad()
def moments(guide: AutoGaussian) -> tuple[Tensor, Tensor]:
    """Means and sds of all unconstrained coordinates, in the order of the sites."""
    if isinstance(guide, AutoMarginal) and guide.integrates:
        draws = guide.draw(DRAWS)
        return draws.mean(0), draws.std(0)
    return guide.posterior.mean, guide.posterior.stddev


def ours(kind: str, model: Model, longest: float) -> Entry:
    """The fit of a guide of ours."""
    begun = time.process_time()
    guide = made(kind, model)
    result = fit_guide(model, guide, options={"progress": False, "max_seconds": longest})
    seconds = time.process_time() - begun
    mean, sd = moments(guide)
    return {
        "word": result.verdict.word,
        "converged": result.converged,
        "gradients": result.gradients,
        "values": result.values,
        "seconds": seconds,
        "mean": mean.tolist(),
        "sd": sd.tolist(),
        "said": str(result),
    }


def by_adam(model: Model, seconds: float) -> Entry:
    """The best guide of Pyro by its ELBO, each trained for so many seconds."""
    density, best = log_joint(model), None
    for kind in KINDS:
        for rate in RATES:
            pyro.clear_param_store()
            guide = kind(poutine.block(model, hide_fn=lambda site: bool(site["infer"].get("enumerate"))))
            guide()
            optimizer = torch.optim.Adam(guide.parameters(), lr=rate)
            begun, gradients = time.process_time(), 0
            try:
                while time.process_time() - begun < seconds:
                    optimizer.zero_grad()
                    (-log_weights(guide, density, PARTICLES).mean()).backward()
                    optimizer.step()
                    gradients += PARTICLES
                with torch.no_grad():
                    elbo, q = float(log_weights(guide, density, DRAWS).mean()), guide.get_posterior()
            except ValueError:  # it has diverged to NaN
                continue
            if best is None or elbo > best["elbo"]:
                mean, sd = (getattr(q, name).detach().tolist() for name in ("mean", "stddev"))
                best = {
                    "elbo": elbo,
                    "said": f"{kind.__name__}, {rate:g}",
                    "gradients": gradients,
                    "mean": mean,
                    "sd": sd,
                }
    return {"word": "", "seconds": seconds, **(best or {"failed": "every guide diverges"})}


def log_weights(guide: AutoDiagonalNormal, density: ModelLogJoint, draws: int) -> Tensor:
    """log p - log q at draws from a guide of Pyro."""
    q = guide.get_posterior()
    theta = q.rsample((draws,))
    return density(theta) - q.log_prob(theta)


def entry(name: str, kind: str, seed: int, longest: float, seconds: float) -> Entry:
    """One line of the log."""
    pyro.clear_param_store()
    model = MODELS[name].make()
    pyro.set_rng_seed(seed)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found = by_adam(model, seconds) if kind == "pyro" else ours(kind, model, longest)
        except Exception as error:  # noqa: BLE001  a finding
            found = {"failed": f"{type(error).__name__}: {error}"}
    texts = sorted({str(each.message) for each in warned})
    return {"model": name, "guide": kind, "seed": seed, **found, "warned": texts}


# ------------------------------------------------------------------------------------ the table


class Compared(NamedTuple):
    """A fit against its truth."""

    mean: float  # the worst error of a mean, in sds
    ratio: float  # the worst ratio of an sd to the truth
    scales: float | None  # the same of the scales of groups
    worst: str  # which coordinates these are

    @property
    def off(self) -> bool:
        """Whether "fits" is a wrong word for it."""
        return not (self.mean <= MEAN and 1 / SD <= self.ratio <= SD)

    @property
    def scaled(self) -> bool:
        """Whether the scales of groups are right."""
        return self.scales is not None and 1 / SCALE <= self.scales <= SCALE


def compared(row: Entry, truth: Truth, sites: dict[str, slice]) -> Compared:
    """The errors of an entry."""

    def furthest(ratios: Tensor) -> int:
        return int(ratios.log().abs().nan_to_num(torch.inf).argmax())

    def site(index: int) -> str:
        (name, where), *_ = ((name, where) for name, where in sites.items() if where.start <= index < where.stop)
        return name if where.stop - where.start == 1 else f"{name}[{index - where.start}]"

    errors = (torch.tensor(row["mean"]) - truth.mean).abs() / truth.sd
    ratios = torch.tensor(row["sd"]) / truth.sd
    at, scales = furthest(ratios), [ratios[sites[name]] for name in MODELS[row["model"]].scales]
    of_scales = torch.cat(scales) if scales else None
    return Compared(
        float(errors.max()),
        float(ratios[at]),
        None if of_scales is None else float(of_scales[furthest(of_scales)]),
        f"mean of {site(int(errors.argmax()))}, sd of {site(at)}",
    )


def cell(row: Entry | None, found: Compared | None) -> str:
    """What an entry says in the table."""
    if row is None:
        return ""
    if "failed" in row:
        return "fails"
    words = [row["word"] or row["said"].removeprefix("Auto"), "" if row.get("converged", True) else "not converged"]
    numbers = "" if found is None else f"{found.mean:.2f}, {found.ratio:.2f}"
    if found is not None and found.scales is not None:
        numbers += f", {found.scales:.2f}"
    parts = (", ".join(filter(None, words)), numbers, f"{row['gradients']:,}", f"{row['seconds']:.1f} s")
    return "; ".join(filter(None, parts))


def report(rows: list[Entry]) -> Iterator[str]:
    """The table of the first seed, and the summaries of all."""
    kinds = [kind for kind in GUIDES if any(row["guide"] == kind for row in rows)]
    yield f"| model | D | R-hat, ESS | {' | '.join(kinds)} |"
    yield f"|---{'|---' * (len(kinds) + 2)}|"
    known: list[tuple[Entry, Compared]] = []
    for name, public in MODELS.items():
        of_model = [row for row in rows if row["model"] == name]
        if not of_model:
            continue
        density = log_joint(public.make())
        truth = kept(TRUTHS, name, density)
        sites = {site.name: site.where for site in density.layout.sites}
        found = {id(row): compared(row, truth, sites) for row in of_model if truth is not None and "failed" not in row}
        if truth is not None and truth.sure:
            known += ((row, found[id(row)]) for row in of_model if id(row) in found)
        first = {row["guide"]: row for row in reversed(of_model)}
        cells = (cell(first.get(kind), found.get(id(first.get(kind)))) for kind in kinds)
        sure = "" if truth is None else f"{truth.r_hat:.3f}, {truth.ess:.0f}{'' if truth.sure else ' *'}"
        yield f"| [{name}](https://{public.source}) | {density.dim} | {sure} | {' | '.join(cells)} |"
    for kind in kinds:
        yield from summary(kind, rows, [(row, found) for row, found in known if row["guide"] == kind])


def summary(kind: str, rows: list[Entry], known: list[tuple[Entry, Compared]]) -> Iterator[str]:
    """How often a guide is right, and where it is not."""
    groups = [pair for pair in known if pair[1].scales is not None]
    fits = sum(row["word"] in ("fits", "about right") for row, _ in groups)
    right = sum(found.scaled for _, found in groups)
    yield f"\n{kind}: {len(groups)} fits of hierarchies, {fits} fit or are about right, {right} with scales within 15 %"
    for row, found in known:
        if row["word"] == "fits" and found.off:
            yield f"  wrong: {row['model']}, seed {row['seed']}: {cell(row, found)}; {found.worst}"
    for row in rows:
        if row["guide"] != kind:
            continue
        where = f"{row['model']}, seed {row['seed']}"
        if "failed" in row:
            yield f"  fails: {where}: {row['failed'].splitlines()[0]}"
        elif kind != "pyro" and (row["gradients"] > 40_000 or row["seconds"] > 30):
            yield f"  dear: {where}: {row['gradients']:,} gradients, {row['seconds']:.0f} s"


# ------------------------------------------------------------------------------------ the command


def run_chains(names: list[str], seconds: float, draws: int) -> None:
    """The truths that are not there yet."""
    for name in names:
        public = MODELS[name]
        model = public.make()
        density = log_joint(model)
        found = kept(TRUTHS, name, density) if public.mixes else None
        if not public.mixes or (found is not None and found.sure):
            continue
        truth = truth_of(model, public.non_centred, seconds, draws)
        print(f"{name}, D = {density.dim}: {truth}", flush=True)
        if isinstance(truth, Truth):
            keep(TRUTHS, name, truth, density)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, required=True, help="a file of JSON lines, which is gone on with")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--guides", nargs="+", choices=GUIDES, default=list(GUIDES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--longest", type=float, default=120.0, help="seconds by the clock, for a guide of ours")
    parser.add_argument("--most", type=float, default=5.0, help="seconds of CPU, for a guide of Pyro at one rate")
    parser.add_argument("--chains", type=float, default=0.0, help="seconds of CPU for a chain; 0 runs none")
    parser.add_argument("--draws", type=int, default=300, help="of a chain, after its warm-up")
    parser.add_argument("--report", action="store_true", help="only print the table")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if args.chains:
        run_chains(args.only, args.chains, args.draws)
    rows = [json.loads(line) for line in args.log.read_text().splitlines()] if args.log.exists() else []
    done = {(row["model"], row["guide"], row["seed"]): row for row in rows}
    wanted = [(name, kind, seed) for seed in args.seeds for name in args.only for kind in args.guides]
    for name, kind, seed in [] if args.report or args.chains else wanted:
        if (name, kind, seed) in done:
            continue
        seconds = min(done.get((name, "dense", seed), {}).get("seconds", args.most), args.most)
        row = entry(name, kind, seed, args.longest, seconds)
        with args.log.open("a") as file:
            file.write(json.dumps(row) + "\n")
        done[name, kind, seed] = row
        print(f"{name}, {kind}, seed {seed}: {row.get('failed') or cell(row, None)}", flush=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        print("\n".join(report(list(done.values()))))


if __name__ == "__main__":
    main()
