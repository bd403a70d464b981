"""How many kernels a step launches on a device: counted on the CPU, with tensors that pass for a GPU's.

    python -m benchmarks.launches [--each] [--bytes] [--compiled]

An operation of torch is one launch, views and allocations left out, whose number does not depend on how many rows there
are up to 262,144.  The regressions have 500 rows of 30 coefficients, a batch of them 100 members of 100 rows and 10
coefficients, the forest is 100 groups of 5 rows with an intercept each, the sparse Gaussian process has 20 inducing
points.  ``--each`` names the operations of a row, the most frequent first; ``--bytes`` adds what they read and write,
in MB, with 100,000 rows, 10,000 members and 100,000 groups.

``--compiled`` prints the calls of the code that inductor makes of an evaluation and of steps on this machine's
processor, in a few minutes: its own kernels, of which each is one or more loops, and those of libraries.
"""

import argparse
import re
from collections import Counter
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.waits import Far, far
from torchngvi import (
    NGVI,
    SRVN,
    VN,
    CholeskyGaussian,
    GeneralizedLinear,
    NaturalGaussian,
    NewtonCG,
    PrecisionCholeskyGaussian,
)
from torchngvi.expectations import Quadrature
from torchngvi.ifvb import IFVB, MeanFieldGaussian
from torchngvi.models import TractableFactors
from torchngvi.numerics import gaussian_integrals
from torchngvi.numerics.gaussian_integrals import softplus
from torchngvi.optim import CapturedStep
from torchngvi.structures import arrow

DTYPE, ROWS, DIM = torch.float64, 500, 30


class Launches(TorchDispatchMode):
    """Counts the operations that are neither views nor allocations, and the bytes that these read and write."""

    NONE = frozenset(
        ("_record_function_enter_new", "_record_function_exit", "_reshape_alias", "_unsafe_view", "alias", "as_strided")
        + ("detach", "diagonal", "empty", "empty_like", "empty_strided", "expand", "lift_fresh", "new_empty", "permute")
        + ("new_empty_strided", "select", "slice", "split", "split_with_sizes", "squeeze", "squeeze_", "t", "transpose")
        + ("unbind", "unsqueeze", "unsqueeze_", "view")
    )

    def __init__(self):
        super().__init__()
        self.counts, self.bytes = Counter(), 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function._overloadpacket.__name__
        result = function(*arguments, **(keywords or {}))
        if name not in self.NONE:
            self.counts[name] += 1
            tensors = [x for x in tree_leaves((arguments, keywords, result)) if isinstance(x, torch.Tensor)]
            self.bytes += sum(touched(x) for x in tensors if x.layout is torch.strided)
        return result


def touched(x):
    """The bytes of a tensor, each place once where it is expanded."""
    sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or size == 0]
    return torch.Size(sizes).numel() * x.element_size()


def count(call, before=0):
    """The launches of a call, after it was made a few times."""
    for _ in range(before):
        call()
    with Launches() as launches:
        call()
    return launches


def regression(rows=ROWS):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(rows, DIM, generator=generator, dtype=DTYPE)
    y = (X[:, 0] + torch.randn(rows, generator=generator, dtype=DTYPE) > 0).double()
    return GeneralizedLinear(X, y, classes=(0, 1))


def moments(rows=ROWS):
    e = torch.linspace(-3, 3, rows, dtype=DTYPE).as_subclass(Far)
    return count(lambda: softplus(e, e.square()), 1)


def evaluation(rows=ROWS):
    q, model = far(CholeskyGaussian(DIM, dtype=DTYPE)), far(regression(rows))
    with torch.no_grad():
        return count(lambda: Quadrature()(q, model), 1)


def step(method, kind=CholeskyGaussian, **options):
    """An ordinary step of a method, after those that fill its memory."""

    def measure(rows=ROWS):
        opt, model = method(far(kind(DIM, dtype=DTYPE)), **options), far(regression(rows))
        return count(lambda: opt.step(model), 8)

    return measure


def ifvb(rows=ROWS):
    opt = IFVB(far(MeanFieldGaussian(torch.zeros(2 * DIM, dtype=DTYPE))), lr=0.1)
    model = far(regression(rows))
    return count(lambda: opt.step(model), 3)


def block(rows=ROWS):
    """Eight masked steps between two looks of the host."""
    step = CapturedStep(VN(far(CholeskyGaussian(DIM, dtype=DTYPE))), far(regression(rows)), tolerance=1e-3)
    return count(lambda: [step() for _ in range(8)], 1)


def batch(members=100):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(members, 100, 10, generator=generator, dtype=DTYPE)
    y = (X[..., 0] + torch.randn(members, 100, generator=generator, dtype=DTYPE) > 0).double()
    opt = VN(far(CholeskyGaussian(10, (members,), dtype=DTYPE)))
    model = far(GeneralizedLinear(X, y, classes=(0, 1)))
    return count(lambda: opt.step(model), 8)


def forest(groups=100):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(groups, 5, 4, generator=generator, dtype=DTYPE)
    X[..., 0] = 1.0
    y = (X[..., 1] + torch.randn(groups, 5, generator=generator, dtype=DTYPE) > 0).double()
    structure = arrow(groups=groups, local=1, globals=3)
    target = TractableFactors(structure, [(0, far(GeneralizedLinear(X, y, classes=(0, 1))))])
    opt = VN(far(PrecisionCholeskyGaussian(structure.dim, structure=structure, dtype=DTYPE)))
    return count(lambda: opt.step(target), 8)


def svgp(inside=False):
    """A step of q and of Adam in a loop of GPyTorch's own, with a Bernoulli likelihood; or of it what is of q alone."""
    import gpytorch as gp

    from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, natural_optimizer

    class Model(gp.models.ApproximateGP):
        def __init__(self, Z):
            q = NaturalGradientVariationalDistribution(len(Z))
            super().__init__(gp.variational.VariationalStrategy(self, Z, q))
            self.mean_module, self.covar_module = gp.means.ZeroMean(), gp.kernels.RBFKernel()

        def forward(self, x):
            return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    x = torch.linspace(-2, 2, 100, dtype=DTYPE)[:, None]
    y, model = (x[:, 0] > 0).double(), Model(x[::5].clone()).double().train()
    objective = gp.mlls.VariationalELBO(gp.likelihoods.BernoulliLikelihood().double(), model, len(x))
    natural, adam = natural_optimizer(objective, 0.1), torch.optim.Adam(model.hyperparameters(), 0.01)
    distribution = model.variational_strategy._variational_distribution
    model(x)  # which starts q
    far(distribution.posterior)

    def loop():
        adam.zero_grad()
        (-objective(model(x), y)).backward()
        natural.step()
        adam.step()

    if not inside:
        return count(loop, 3)
    loop()
    (-objective(model(x), y)).backward()
    return count(lambda: (distribution(), natural.step()))


TABLE = {
    "moments of logistic rows": moments,
    "evaluation": evaluation,
    "step of VN, by trial": step(VN),
    "step of VN, lr = 0.5": step(VN, lr=0.5),
    "step of NewtonCG, by trial": step(NewtonCG),
    "step of SRVN, lr = 0.5": step(SRVN, lr=0.5),
    "step of NGVI, lr = 0.5": step(NGVI, NaturalGaussian, lr=0.5),
    "step of IFVB, lr = 0.1": ifvb,
    "eight masked steps of VN, by trial": block,
    "step of VN, by trial, of a batch": batch,
    "step of VN, by trial, over a forest": forest,
    "step of a sparse Gaussian process, with Adam": svgp,
    "of it, q and its step": lambda: svgp(inside=True),
}
LARGE = {"step of VN, by trial, of a batch": 10_000, "step of VN, by trial, over a forest": 100_000}
ALONE = ("step of a sparse Gaussian process, with Adam", "of it, q and its step")


# ------------------------------------------------------------------------------------------ compiled


def compiled(call):
    """Calls of inductor's code: its own kernels, loops within these, and kernels of libraries."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    text = run_and_get_code(call)[1][0]
    own, body = text.split("def call(")
    body = body[: body.index("runner = ")]
    fused = re.findall(r"^ *cpp_fused\w*\(", body, re.MULTILINE)
    loops = re.findall(r"^    \{$", own, re.MULTILINE)
    other = re.findall(r"= torch\.ops\.\S+\(|^ *extern_kernels\.\w+\(", body, re.MULTILINE)
    return len(fused), len(loops), len(other)


def graphs():
    """What is compiled, by name; the moments are the body in C, or operators of the graph as on a device."""
    model, q = regression(), CholeskyGaussian(DIM, dtype=DTYPE)
    packet = torch.compile(lambda: Quadrature()(q, model), fullgraph=True)

    def captured(**options):
        return CapturedStep(VN(CholeskyGaussian(DIM, dtype=DTYPE), **options), model, backend="inductor")

    calls = {
        "evaluation": torch.no_grad()(lambda: packet()),
        "step of VN, by trial": captured(),
        "step of VN, lr = 0.5": captured(lr=0.5),
    }
    yield from calls.items()

    def operators(e, v, count):
        return torch.stack(gaussian_integrals._formula(e, v, 0, count))

    with mock.patch.object(gaussian_integrals, "_operator", operators):
        yield "evaluation, moments as operators", calls["evaluation"]
        yield "step of VN, by trial, moments as operators", captured()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    asked = parser.parse_args()
    if asked.compiled:
        print("| what | calls | own kernels | loops in them | of libraries |\n| --- | --- | --- | --- | --- |")
        for name, call in graphs():
            fused, loops, other = compiled(call)
            print(f"| {name} | {fused + other} | {fused} | {loops} | {other} |", flush=True)
        return
    print("| what | launches | MB |\n| --- | --- | --- |" if asked.bytes else "| what | launches |\n| --- | --- |")
    for name, measure in TABLE.items():
        counts = measure().counts
        cells = [name, f"{sum(counts.values())}"]
        if asked.bytes:
            large = measure() if name in ALONE else measure(LARGE.get(name, 100_000))
            cells.append(f"{large.bytes / 1e6:,.3g}")
        print(f"| {' | '.join(cells)} |", flush=True)
        if asked.each:
            print(", ".join(f"{each} {number}" for each, number in counts.most_common()))


if __name__ == "__main__":
    main()
