"""Log joints that break things: each ends in a stated verdict.

    python benchmarks/hard_cases.py [--only NAMES]

One line a case and dtype: gradients, seconds, and the sentence of `fit`.
"""

import argparse
import random
import time

import torch

from torchngvi import CholeskyGaussian, fit


def funnel(theta):
    """Neal's, scale of the neck 3, four coordinates below."""
    neck, rest = theta[..., :1], theta[..., 1:]
    return -0.5 * (neck[..., 0] / 3).square() - 0.5 * (rest.square() * torch.exp(-neck) + neck).sum(-1)


def banana(theta):
    """A parabola, ten times as narrow as wide."""
    return -theta[..., 0].square() / 8 - 5 * (theta[..., 1] - theta[..., 0].square()).square()


def cauchy(theta):
    """No mean, no variance."""
    return -torch.log1p(theta.square()).sum(-1)


def ridge(theta):
    """Condition number 1e12, across the axes."""
    along, across = theta.sum(-1) - 3, theta[..., 0] - theta[..., 1]
    return -0.5 * (along.square() + 1e12 * across.square())


def half_space(theta):
    """-inf where the first coordinate is not positive."""
    inside = -theta.sum(-1) - 0.5 * theta.square().sum(-1)
    return torch.where(theta[..., 0] > 0, inside, -torch.inf)


class RaisesOnceInAHundred:
    """A quartic that fails at one call in a hundred."""

    def __init__(self):
        self.random = random.Random(0)

    def __call__(self, theta):
        """The log joint, or an error."""
        if self.random.random() < 0.01:
            raise RuntimeError("lost the connection")
        return -0.5 * (theta - 1).square().sum(-1) - 0.1 * theta.pow(4).sum(-1)


def flat(theta):
    """Improper."""
    return 0 * theta.sum(-1)


def never_finite(theta):
    """NaN everywhere."""
    return theta.sum(-1) * torch.nan


def two_modes(theta):
    """Two normals, six standard deviations apart."""
    modes = torch.stack([-0.5 * (theta - 3).square().sum(-1), -0.5 * (theta + 3).square().sum(-1)])
    return torch.logsumexp(modes, 0)


def one_coordinate(theta):
    """A Gumbel density."""
    return -(theta.exp() - 2 * theta).sum(-1)


def many_coordinates(theta):
    """A weak quartic in each."""
    return -0.5 * theta.square().sum(-1) - 0.01 * theta.pow(4).sum(-1)


CASES = {  # name: (log joint or its class, dimensions)
    "funnel": (funnel, 5),
    "banana": (banana, 2),
    "cauchy": (cauchy, 3),
    "ridge": (ridge, 2),
    "half space": (half_space, 2),
    "raises": (RaisesOnceInAHundred, 3),
    "flat": (flat, 3),
    "never finite": (never_finite, 2),
    "two modes": (two_modes, 2),
    "d = 1": (one_coordinate, 1),
    "d = 2000": (many_coordinates, 2000),
}


def run(name, dtype, seed=0):
    """The fit of a case."""
    function, dim = CASES[name]
    torch.manual_seed(seed)
    q = CholeskyGaussian(dim, dtype=dtype)
    return fit(q, function() if isinstance(function, type) else function, progress=False), q


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES))
    for name in parser.parse_args().only:
        for dtype in (torch.float64, torch.float32):
            if dtype == torch.float32 and CASES[name][1] > 100:
                continue
            start = time.perf_counter()
            result, _ = run(name, dtype)
            seconds = time.perf_counter() - start
            print(f"{name}, {str(dtype)[6:]}: {result.trace[-1].gradients} gradients, {seconds:.1f} s\n    {result}")


if __name__ == "__main__":
    main()
