"""How often the host reads a number back in a fit, counted by dispatch: on a GPU each of them is a wait.

    python benchmarks/scale_waits.py [--lines]

Runs on the CPU.  Branches that ask a mask only where that costs nothing, on the CPU, are switched off, as they are on a
GPU, and so is the comparison of contents.  What `Sharded` reads of its header is one more an evaluation.  ``--lines``
names the lines that read.
"""

import argparse
import collections
import sys
import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchngvi import VN, CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, NaturalGaussian, Sharded, fit
from torchngvi.interfaces import frame
from torchngvi.numerics import versions

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default}


class Reads(TorchDispatchMode):
    """Counts them, by the line of the library that asks."""

    def __init__(self):
        super().__init__()
        self.lines = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in READS:
            ours = [f for f in traceback.extract_stack() if "/torchngvi/" in f.filename]
            last = ours[-1]
            self.lines[f"{last.filename.split('/torchngvi/')[-1]}:{last.lineno} {last.line[:70]}"] += 1
        return function(*args, **(kwargs or {}))


def as_on_a_gpu():
    """Without the branches that are for the CPU alone."""

    def where_members(mask, new, old):
        return torch.where(mask[(...,) + (None,) * (new.ndim - mask.ndim)], new, old)

    replaced = {"known_everywhere": lambda mask: False, "where_members": where_members}
    known = {name: getattr(frame, name) for name in replaced}
    for module in list(sys.modules.values()):
        for name, other in replaced.items():
            if getattr(module, name, None) is known[name]:
                setattr(module, name, other)
    versions._holds = lambda tensor, content: True


def problem():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(300, 5, generator=generator, dtype=torch.float64)
    return GeneralizedLinear(X, (X.sum(-1) > 0).double(), classes=(0, 1))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", action="store_true")
    options = parser.parse_args(arguments)
    as_on_a_gpu()
    for kind in (CholeskyGaussian, NaturalGaussian, DiagonalGaussian):
        q, model = kind(5, dtype=torch.float64), problem()
        opt = VN(q)
        opt.step(model)
        with Reads() as steps:
            for _ in range(5):
                opt.step(model)
        q = kind(5, dtype=torch.float64)
        with Reads() as reads:
            result = fit(q, model, progress=False)
        q = kind(5, dtype=torch.float64)
        with Reads() as alone:
            fit(q, Sharded(model, 300), progress=False)
        count, both = sum(reads.lines.values()), sum(alone.lines.values())
        print(
            f"{kind.__name__}: {sum(steps.lines.values()) / 5:.1f} a step; fit: {count / result.evaluations:.1f} an "
            f"evaluation of {result.evaluations}; the same through Sharded: {both / result.evaluations:.1f}"
        )
        for line, number in reads.lines.most_common(20) if options.lines else ():
            print(f"    {number:4} {line}")


if __name__ == "__main__":
    main()
