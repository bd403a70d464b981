"""Compare several methods: ``python -m examples.compare_methods CONFIG.toml``, or with flags instead of a file."""

import argparse
import sys

from examples.compare_methods.comparison import compare
from torchngvi.errors import TorchngviError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.compare_methods",
        description="Several methods from the same starts: a log, a table and curves with bands over the starts.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="as configs/compare.toml")
    parser.add_argument("--data", metavar="NAME_OR_FILE", help="as for torchngvi fit, instead of a file of settings")
    parser.add_argument("--methods", nargs="+", metavar="METHOD[=LR]", help="vn srvn bwgd=1e-3")
    parser.add_argument("--target", metavar="COLUMN", help="the column to predict")
    parser.add_argument("--success", metavar="CLASS", help="the class to predict, against all others")
    parser.add_argument("--family", metavar="FAMILY", help="bernoulli_logit, poisson_log, gaussian, ..")
    for name, what in (("prior-precision", "of N(0, 1/B)"), ("noise", "of gaussian"), ("dispersion", "of counts")):
        parser.add_argument(f"--{name}", type=float, metavar="X", help=f"{what} (1)")
    parser.add_argument("--dof", type=float, metavar="NU", help="of student_t (4)")
    parser.add_argument("--iterations", type=int, metavar="N", help="steps of each run (50)")
    parser.add_argument("--starts", type=int, metavar="N", help="means drawn from N(0, 1) (5)")
    parser.add_argument("--out", metavar="DIR", help="folder of the results (runs/compare)")
    parser.add_argument("--overwrite", action="store_true", help="replace files of an earlier run in the folder")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a comparison; 2 where its settings are wrong."""
    try:
        print(f"written to {compare(**vars(_parser().parse_args(argv)))}/")
    except TorchngviError as error:
        print(f"compare_methods: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
