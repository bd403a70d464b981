"""What one GPU does, in ten minutes: the benchmarks of steps, batches, sparse Gaussian processes and networks there.

    python benchmarks/gpu.py [--device cuda] [--out PAGE] [--small] [--minutes 10]

Each is a command of its own, whose text the page holds under the command: a step, an evaluation and a fit of D = 30,
300 and 1,024 coefficients in both precisions beside the products and the factorisation that they need, 10,000
regressions as one, a step of a sparse Gaussian process, and one of a network.  What is left of the minutes bounds each.
``--small`` makes the sizes such that a processor is through in a few minutes, to try the page there.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import clocks

ROOT = Path(__file__).parents[1]
REGRESSIONS, SINGLE = "-m benchmarks.bench --dims 30 300 1024 --rows 100000", "--dtype float32"
COMMANDS = {  # under its heading each, at the sizes of a GPU and small
    "Regressions": (f"{REGRESSIONS} --compiled", "-m benchmarks.bench --dims 5 10 --rows 500"),
    "Regressions in single precision": (f"{REGRESSIONS} {SINGLE}", f"-m benchmarks.bench --dims 5 --rows 500 {SINGLE}"),
    "10,000 regressions as one": ("benchmarks/batched.py --loop 20", "benchmarks/batched.py --members 20 --loop 2"),
    "Sparse Gaussian process": (
        "benchmarks/svgp.py --only steps --sizes 256 1024",
        "benchmarks/svgp.py --only steps --sizes 32 --rounds 2 --rows 500",
    ),
    "Network": ("benchmarks/network_cost.py --repeats 5", "benchmarks/network_cost.py --widths 20 --repeats 2"),
}


def run(command: str, seconds: float) -> str:
    """What a command prints, or why it ended."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks")))
    try:
        done = subprocess.run(
            [sys.executable, *command.split()],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"(not done in the {seconds:.0f} seconds that were left)"
    return done.stdout.strip() if done.returncode == 0 else f"(failed)\n{done.stderr.strip()[-2000:]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--out", type=Path, help="the page (on the screen)")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--minutes", type=float, default=10)
    asked = parser.parse_args()
    end, parts = time.monotonic() + 60 * asked.minutes, [f"# On one device: {clocks.named(asked.device)}"]
    for heading, commands in COMMANDS.items():
        command = f"{commands[asked.small]} --device {asked.device}"
        text = run(command, max(end - time.monotonic(), 1))
        parts.append(f"## {heading}\n\n    python {command}\n\n```\n{text}\n```")
        if asked.out is not None:  # what is known stays, whatever happens to the machine
            asked.out.write_text("\n\n".join(parts) + "\n")
    if asked.out is None:
        print("\n\n".join(parts))


if __name__ == "__main__":
    main()
