"""How often the host waits for a device in a step and in a fit: counted on the CPU, with tensors that pass for a GPU's.

    python -m benchmarks.scale_waits [--lines] [--kernels NAME ...]

The branches are those of a device, since the tensors say that they are not on the CPU.  ``--lines`` names the lines
that read.  ``--kernels`` counts, for rows of `benchmarks.engine`, each operation of a fit that is a kernel on a device,
those of the log joint included, and how many of them bring a number to the host.
"""

import argparse

import torch

from benchmarks.launches import Launches
from benchmarks.waits import far, reads
from torchngvi import VN, CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, LogJoint, NaturalGaussian, fit


def data():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(300, 5, generator=generator, dtype=torch.float64)
    return X, (X.sum(-1) > 0).double()


def problem():
    return far(GeneralizedLinear(*data(), classes=(0, 1)))


def steps(kind):
    """Of ten steps by trial, after two."""
    q, model = far(kind(5, dtype=torch.float64)), problem()
    opt = VN(q)
    opt.step(model)
    opt.step(model)
    return reads(lambda: [opt.step(model) for _ in range(10)])[1]


def fits(kind):
    """Of a whole fit by VN, and its evaluations."""
    q, model = far(kind(5, dtype=torch.float64)), problem()
    result, lines = reads(lambda: fit(q, model, VN(q), progress=False))
    return lines, result.evaluations


def black_box():
    """Of a whole fit of a log joint, its search for a mode and its check included, and the number of its gradients."""
    X, y = map(far, data())

    def log_joint(theta):
        eta = theta @ X.mT
        return (y * eta - torch.nn.functional.softplus(eta)).sum(-1) - 0.5 * theta.square().sum(-1)

    result, lines = reads(
        lambda: fit(far(CholeskyGaussian(5, dtype=torch.float64)), LogJoint(log_joint), progress=False)
    )
    return lines, result.gradients


def kernels(name):
    """Print what a fit of one row launches and reads."""
    from benchmarks.engine import HELD, models, problems

    problem = {**problems(), **models(HELD)}[name]
    dim, log_joint = problem() if callable(problem) else problem
    torch.manual_seed(0)
    with Launches() as launches:
        result = fit(CholeskyGaussian(dim, dtype=torch.float64), log_joint, progress=False)
    launched = sum(launches.counts.values())
    read, gradients = launches.counts["_local_scalar_dense"], result.gradients
    print(
        f"{name}: D = {dim}, {gradients} gradients, {result.evaluations} evaluations; "
        f"{launched / gradients:.1f} kernels and {read / gradients:.2f} reads a gradient"
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--kernels", nargs="+", default=[], metavar="NAME")
    options = parser.parse_args(arguments)
    for name in options.kernels:
        kernels(name)
    if options.kernels:
        return
    for kind in (CholeskyGaussian, NaturalGaussian, DiagonalGaussian):
        lines, evaluations = fits(kind)
        step, whole = sum(steps(kind).values()) / 10, sum(lines.values()) / evaluations
        print(f"{kind.__name__}: {step:.1f} a step; {whole:.1f} an evaluation of a fit by VN")
        for line, number in lines.most_common() if options.lines else ():
            print(f"    {number:4} {line}")
    lines, gradients = black_box()
    print(f"a log joint: {sum(lines.values())} in a fit of {gradients} gradients")
    for line, number in lines.most_common() if options.lines else ():
        print(f"    {number:4} {line}")


if __name__ == "__main__":
    main()
