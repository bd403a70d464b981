"""Pyro's own tests of its automatic guides, with our guide in the place of AutoMultivariateNormal.

    git clone --branch 1.9.1 https://github.com/pyro-ppl/pyro   # the version installed, or the tag before it
    python -m benchmarks.pyro_suite pyro [--only test_median]

Every case of tests/infer/test_autoguide.py that is parametrised with AutoMultivariateNormal is run three times, each in
a process of its own: as it stands; with `torchngvi.adapters.pyro.AutoGaussian` as the class under test; and with ours
where the cases that compile the loss by torch.jit take the same loss uncompiled.  Printed are the counts, and a row for
each case that is not passed, with what it said.  The tests are not changed and not copied: a plugin of pytest selects
the cases and puts one class for the other.

A case that Pyro marks as an expected failure, because no guide of its own passes, counts as one here too.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

THEIRS, OURS, UNCOMPILED = "AutoMultivariateNormal", "AutoGaussian", "AutoGaussian, no torch.jit"
TEST = "tests/infer/test_autoguide.py"


class Substitute:
    """A plugin of pytest: the cases of AutoMultivariateNormal, with another class or another loss in their place."""

    def __init__(self, who: str) -> None:
        self.who, self.outcomes = who, {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the cases of AutoMultivariateNormal, and put the class and the loss of this run into them."""
        from pyro.infer.autoguide import AutoMultivariateNormal

        from torchngvi.adapters.pyro import AutoGaussian

        kept = [
            item
            for item in items
            if AutoMultivariateNormal in getattr(item, "callspec", item).__dict__.get("params", {}).values()
        ]
        items[:] = kept
        if self.who == THEIRS:
            return
        for item in items:
            params = item.callspec.params
            for name, value in params.items():
                if value is AutoMultivariateNormal:
                    params[name] = AutoGaussian
                elif self.who == UNCOMPILED and getattr(value, "__name__", "").startswith("Jit"):
                    params[name] = getattr(item.module, value.__name__.removeprefix("Jit"))
            if self.who == UNCOMPILED:
                item.module.JitTrace_ELBO = item.module.Trace_ELBO

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note how a case ended and, if it did not pass, the first line of what it said."""
        if report.when == "call" or report.failed:
            outcome = "expected failure" if hasattr(report, "wasxfail") and report.skipped else report.outcome
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message.strip().splitlines()[0] if crash is not None else ""
            self.outcomes[report.nodeid.partition("::")[2]] = (outcome, said)


def run(source: Path, who: str, only: str) -> dict[str, tuple[str, str]]:
    """The outcomes of one run, by the name of the case, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.pyro_suite", str(source), "--who", who, "--only", only]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not any(outcomes):
        raise SystemExit(f"pytest gave no outcomes for {who}:\n{done.stdout}\n{done.stderr}")
    return outcomes[0]


def inside(source: Path, who: str, only: str) -> None:
    """Run the cases here, and print their outcomes as JSON."""
    import pytest

    plugin = Substitute(who)
    sys.path.insert(0, os.getcwd())
    os.chdir(source)
    sys.path.insert(0, os.getcwd())
    arguments = [TEST, "-q", "-p", "no:cacheprovider", "-k", only] if only else [TEST, "-q", "-p", "no:cacheprovider"]
    pytest.main(arguments, plugins=[plugin])
    print("\n" + json.dumps(plugin.outcomes))


def main() -> None:
    """Read the arguments, run the cases, and print the counts and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a copy of Pyro's source, with its tests")
    parser.add_argument("--only", default="", help="an expression that selects cases, as pytest -k")
    parser.add_argument("--who", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.who:
        return inside(given.source, given.who, given.only)
    results = {who: run(given.source.resolve(), who, given.only) for who in (THEIRS, OURS, UNCOMPILED)}
    print(f"{'':30s}{'cases':>8s}{'passed':>8s}{'expected failures':>20s}{'failed':>8s}")
    for who, outcomes in results.items():
        counts = Counter(outcome for outcome, _ in outcomes.values())
        print(f"{who:30s}{len(outcomes):8d}{counts['passed']:8d}{counts['expected failure']:20d}{counts['failed']:8d}")
    print("\n| case | AutoMultivariateNormal | AutoGaussian | without torch.jit | what AutoGaussian said |")
    print("|---|---|---|---|---|")
    for case, (outcome, said) in results[OURS].items():
        if outcome != "passed":
            print(f"| {case} | {results[THEIRS][case][0]} | {outcome} | {results[UNCOMPILED][case][0]} | {said} |")
    return None


if __name__ == "__main__":
    main()
