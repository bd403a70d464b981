"""Every script of Pyro's folder of examples, with our guide: fitted, refused with a sentence, or not a case for it.

    git clone https://github.com/pyro-ppl/pyro
    python -m benchmarks.pyro_examples pyro [--longest 6] [--only baseball hmm ...]

A row of the Markdown table for each model of a script: the route, the number D of unconstrained latents, the seconds of
CPU and the verdict, or the sentence of the refusal, or why there is nothing to fit.  The models are those of the
checkout, imported as they are; their data too where they lie in it, and otherwise simulated in the same form, mostly
fewer (`benchmarks/pyro_example_models.py` says how).  Float64; a fit ends after ``--longest`` seconds of CPU, which are
asked for between two evaluations.  An error that is no sentence of ours stands in the table as RAW, and the run then
fails.
"""

import argparse
import contextlib
import importlib.util
import io
import logging
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pyro
import torch

from torchngvi.adapters.pyro import AutoGaussian, NaturalSVI, fit_guide
from torchngvi.errors import InputError
from torchngvi.fitting import Seconds
from torchngvi.fitting.records import FitResult

from .pyro_example_models import APART, CASES, Case, Problem

# what scripts import for their plots and downloads, where it is not installed
OPTIONAL = (
    *("visdom", "wget", "seaborn", "observations", "horovod", "horovod.torch", "lightning", "lightning.pytorch"),
    *("torchvision", "torchvision.datasets", "torchvision.transforms", "scanpy", "anndata", "tqdm"),
)


def module_of(examples: Path, script: str) -> ModuleType:
    """The script as a module, with its neighbours in reach while it is imported, and nothing kept of them after."""
    path = examples / script
    for name in OPTIONAL:
        try:
            known = name in sys.modules or importlib.util.find_spec(name) is not None
        except (ModuleNotFoundError, ValueError):
            known = False
        if not known:
            sys.modules[name] = MagicMock()
    sys.path.insert(0, str(path.parent))
    try:
        spec = importlib.util.spec_from_file_location(f"example_{path.stem.replace('-', '_')}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with contextlib.redirect_stdout(io.StringIO()):
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
        for name, loaded in list(sys.modules.items()):
            if str(getattr(loaded, "__file__", None) or "").startswith(str(examples)):
                del sys.modules[name]
    return module


class Processor(Seconds):
    """A budget of seconds of CPU in the place of the clock."""

    def __init__(self, most: float) -> None:
        super().__init__(most)
        self.start = time.process_time()

    def over(self, cost: float, seconds: float) -> bool:
        """Say whether the time is up."""
        return time.process_time() - self.start >= self.most


def fitted(problem: Problem, longest: float) -> str:
    """The route, D, the seconds of CPU, and the verdict."""
    start = time.process_time()
    guide = problem.guide if problem.guide is not None else AutoGaussian(problem.model)
    if problem.steps:
        svi = NaturalSVI(problem.model, guide, pyro.optim.Adam({"lr": 0.02}))
        first = last = svi.step(*problem.args)
        steps = 1
        while time.process_time() < start + longest and steps < problem.steps:
            last, steps = svi.step(*problem.args), steps + 1
        told = f"{steps} steps with its parameters by Adam, loss {first:.6g} to {last:.6g}"
        return f"`NaturalSVI` | {guide.posterior.dim} | {time.process_time() - start:.1f} | {told}"
    options = {"progress": False, "stop": Processor(longest)}
    result = fit_guide(problem.model, guide, *problem.args, batches=problem.batches, options=options)
    family = type(guide.posterior).__name__
    route, dim = f"`fit_guide`{'' if family == 'CholeskyGaussian' else ', ' + family}", guide.posterior.dim
    return f"{route} | {dim} | {time.process_time() - start:.1f} | {verdict(result)}"


def verdict(result: FitResult) -> str:
    """In a few words."""
    word = "" if result.examination is None else f", {result.verdict.word}"
    if result.converged:
        return f"converged{word}"
    if "seconds" in result.reason:
        return f"time was up{word}"
    return f"not converged{word}"


def row(examples: Path, case: Case, longest: float) -> tuple[str, bool]:
    """The row of a case, and whether it ended as it should: in a verdict or a sentence."""
    head = f"| {case.script}{', ' + case.model if case.model else ''} | {case.what} |"
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    torch.set_default_dtype(torch.float64)
    start = time.process_time()
    try:
        module = module_of(examples, case.script)
        torch.set_default_dtype(torch.float64)  # a script may set another
        problem = case.build(module)
    except Exception as error:
        return f"{head} | | | the script cannot be run: {type(error).__name__}: {line(error)} |", False
    try:
        return f"{head} {fitted(problem, longest)}{problem.note and '; ' + problem.note} |", True
    except InputError as error:
        return f"{head} refused | | {time.process_time() - start:.1f} | {line(error)} |", True
    except Exception as error:
        return f"{head} RAW | | | {type(error).__name__}: {line(error)} |", False


def line(error: Exception) -> str:
    """What an error says, in a cell of a table."""
    return " ".join(str(error).split()).replace("|", "\\|")


def main() -> None:
    """Read the arguments, run the cases, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a checkout of Pyro")
    parser.add_argument("--longest", type=float, default=6.0, help="seconds of CPU for each fit")
    parser.add_argument("--only", nargs="+", default=[], help="words of which the name of a script has one")
    given = parser.parse_args()
    examples = given.source.resolve() / "examples"
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    found = {str(path.relative_to(examples)) for path in examples.rglob("*.py") if path.name != "__init__.py"}
    missing = found - {case.script for case in CASES} - set(APART)
    print("| script | what it is | route | D | CPU, s | verdict, or why not |\n|---|---|---|---|---|---|")
    start, wrong = time.process_time(), sorted(f"{script}: not in the table" for script in missing)
    wanted = [case for case in CASES if not given.only or any(word in case.script for word in given.only)]
    for case in wanted:
        text, right = row(examples, case, given.longest)
        print(text, flush=True)
        if not right:
            wrong.append(f"{case.script} {case.model}")
    if not given.only:
        for script, (what, why) in APART.items():
            print(f"| {script} | {what} | none | | | {why} |")
    print(f"\n{len(found)} scripts, {len(wanted)} models; {time.process_time() - start:.0f} s of CPU")
    if wrong:
        raise SystemExit("not as it should be: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
