"""How many kernels a step launches on a device: counted on the CPU, with tensors that pass for a GPU's.

    python -m benchmarks.launches [--each]

An operation of torch is one launch, views and allocations left out, whose number does not depend on how many rows there
are.  The regressions have 500 rows of 30 coefficients, the sparse Gaussian process 20 inducing points.  ``--each``
names the operations of a row, the most frequent first.
"""

import argparse
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.waits import Far, far
from torchngvi import NGVI, SRVN, VN, CholeskyGaussian, GeneralizedLinear, NaturalGaussian, NewtonCG
from torchngvi.expectations import Quadrature
from torchngvi.ifvb import IFVB, MeanFieldGaussian
from torchngvi.numerics.gaussian_integrals import softplus

DTYPE, ROWS, DIM = torch.float64, 500, 30


class Launches(TorchDispatchMode):
    """Counts the operations that are neither views nor allocations."""

    NONE = frozenset(
        ("_record_function_enter_new", "_record_function_exit", "_reshape_alias", "_unsafe_view", "alias", "as_strided")
        + ("detach", "diagonal", "empty", "empty_like", "empty_strided", "expand", "lift_fresh", "new_empty", "permute")
        + ("new_empty_strided", "select", "slice", "split", "split_with_sizes", "squeeze", "squeeze_", "t", "transpose")
        + ("unbind", "unsqueeze", "unsqueeze_", "view")
    )

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function._overloadpacket.__name__
        if name not in self.NONE:
            self.counts[name] += 1
        return function(*arguments, **(keywords or {}))


def count(call, before=0):
    """The launches of a call, by operation, after it was made a few times."""
    for _ in range(before):
        call()
    with Launches() as launches:
        call()
    return launches.counts


def regression():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(ROWS, DIM, generator=generator, dtype=DTYPE)
    y = (X[:, 0] + torch.randn(ROWS, generator=generator, dtype=DTYPE) > 0).double()
    return far(GeneralizedLinear(X, y, classes=(0, 1)))


def moments():
    e = torch.linspace(-3, 3, ROWS, dtype=DTYPE).as_subclass(Far)
    return count(lambda: softplus(e, e.square()), 1)


def evaluation():
    q, model = far(CholeskyGaussian(DIM, dtype=DTYPE)), regression()
    with torch.no_grad():
        return count(lambda: Quadrature()(q, model), 1)


def step(method, kind=CholeskyGaussian, **options):
    """An ordinary step of a method, after those that fill its memory."""
    opt, model = method(far(kind(DIM, dtype=DTYPE)), **options), regression()
    return count(lambda: opt.step(model), 8)


def ifvb():
    opt, model = IFVB(MeanFieldGaussian(torch.zeros(2 * DIM, dtype=DTYPE)), lr=0.1), regression()
    return count(lambda: opt.step(model), 3)


def svgp():
    """A step of q and of Adam in a loop of GPyTorch's own, with a Bernoulli likelihood."""
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

    def loop():
        adam.zero_grad()
        (-objective(model(x), y)).backward()
        natural.step()
        adam.step()

    return count(loop, 3)


TABLE = {
    "moments of logistic rows": moments,
    "evaluation": evaluation,
    "step of VN, by trial": lambda: step(VN),
    "step of VN, lr = 0.5": lambda: step(VN, lr=0.5),
    "step of NewtonCG, by trial": lambda: step(NewtonCG),
    "step of SRVN, lr = 0.5": lambda: step(SRVN, lr=0.5),
    "step of NGVI, lr = 0.5": lambda: step(NGVI, NaturalGaussian, lr=0.5),
    "step of IFVB, lr = 0.1": ifvb,
    "step of a sparse Gaussian process, with Adam": svgp,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", action="store_true")
    asked = parser.parse_args()
    print("| what | launches |\n| --- | --- |")
    for name, measure in TABLE.items():
        counts = measure()
        print(f"| {name} | {sum(counts.values())} |")
        if asked.each:
            print(", ".join(f"{each} {number}" for each, number in counts.most_common()))


if __name__ == "__main__":
    main()
