"""Many small posteriors as one: 10,000 logistic regressions of 100 rows and 10 coefficients.

    python benchmarks/batched.py [--members 10000] [--loop 100] [--posterior full|diagonal] [--family logistic|poisson]
                                 [--rule default|VN|SRVN|NewtonCG] [--parts 512 2048] [--device cpu|cuda]

The batched fit against a Python loop over the members, in CPU time on one thread of one process, on a GPU in seconds;
of the loop only the first members are run, half of them before the batch and half of them after it, and the time is
scaled up. With ``--parts`` the batch is also fitted in so many members at a time, a fit each, beside the chunks that
`fit` makes itself for its default.
"""

import argparse

import clocks
import torch

import torchngvi
from torchngvi import CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, fit

ROWS, DIM = 100, 10
POSTERIORS = {"full": CholeskyGaussian, "diagonal": DiagonalGaussian}
FAMILIES = {"logistic": "bernoulli_logit", "poisson": "poisson_log"}


def data(members: int, family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Designs (members, 100, 10) of standard normal entries, and targets; coefficients N(0, 1), of counts N(0, 0.1)."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(members, ROWS, DIM, generator=generator, dtype=torch.float64)
    theta = torch.randn(members, DIM, 1, generator=generator, dtype=torch.float64)
    if family == "poisson":
        return X, torch.poisson((0.1**0.5 * X @ theta)[..., 0].exp(), generator)
    uniform = torch.rand(members, ROWS, generator=generator, dtype=torch.float64)
    return X, (uniform < torch.sigmoid((X @ theta)[..., 0])).double()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=10_000)
    parser.add_argument("--loop", type=int, default=100)
    parser.add_argument("--posterior", choices=POSTERIORS, default="full")
    parser.add_argument("--family", choices=FAMILIES, default="logistic")
    parser.add_argument("--rule", choices=["default", "VN", "SRVN", "NewtonCG"], default="default")
    parser.add_argument("--parts", type=int, nargs="*", default=[])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    device = arguments.device
    torch.set_num_threads(1)
    X, y = (part.to(device) for part in data(arguments.members, arguments.family))

    def fitted(*where):
        """The posterior of these members, the result, and the CPU time of the fit."""
        x, targets = X[where], y[where]
        q = POSTERIORS[arguments.posterior](DIM, x.shape[:-2], dtype=torch.float64, device=device)
        start = clocks.seconds(device)
        optimizer = None if arguments.rule == "default" else getattr(torchngvi, arguments.rule)(q)
        result = fit(q, GeneralizedLinear(x, targets, FAMILIES[arguments.family]), optimizer, progress=False)
        return q, result, clocks.seconds(device) - start

    def alone(first, last):
        runs = [fitted(member) for member in range(first, last)]
        return [q for q, _, _ in runs], sum(seconds for _, _, seconds in runs)

    fitted(0)  # what is made on first use
    half = arguments.loop // 2
    one, before = alone(0, half)
    q, result, batched = fitted(slice(None))
    other, after = alone(half, arguments.loop)
    for member, single in enumerate(one + other):
        torch.testing.assert_close(single.mean, q.mean[member], rtol=0, atol=1e-4)
    loop = (before + after) / arguments.loop
    print(f"loop, {arguments.loop} members run: {1e3 * loop:.2f} ms a member")

    def report(name, seconds, evaluations, converged):
        each = seconds / arguments.members
        print(f"{name}: {1e3 * each:.3f} ms a member, ratio {loop / each:.1f}, ", end="")
        print(f"{evaluations} evaluations, {converged} members converged")

    report(f"batch of {arguments.members}", batched, result.evaluations, int(result.members_converged.sum()))
    for size in arguments.parts:
        runs = [fitted(slice(first, first + size)) for first in range(0, arguments.members, size)]
        converged = sum(int(result.members_converged.sum()) for _, result, _ in runs)
        report(
            f"fits of {size}",
            sum(seconds for _, _, seconds in runs),
            max(result.evaluations for _, result, _ in runs),
            converged,
        )


if __name__ == "__main__":
    main()
