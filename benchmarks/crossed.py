"""Seconds of fits with two crossed grouping factors: python benchmarks/crossed.py [family] [subjects] [items] [rows].

Each row has a subject and an item at random, a covariate, and an intercept that varies over both; the standard
deviations of the two are 0.8 and 0.5.  One thread, float64.
"""

import resource
import sys
import time

import torch

from torchngvi import MixedModel


def data(family: str, subjects: int, items: int, rows: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Designs, targets and groups."""
    generator = torch.Generator().manual_seed(seed)
    subject, item = (torch.randint(0, n, (rows,), generator=generator) for n in (subjects, items))
    subject[:subjects], item[:items] = torch.arange(subjects), torch.arange(items)
    x = torch.randn(rows, generator=generator, dtype=torch.float64)
    X = torch.stack([torch.ones_like(x), x], -1)
    b, c = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (subjects, items))
    eta = 0.5 + 0.3 * x + 0.8 * b[subject] + 0.5 * c[item]
    if family == "gaussian":
        y = eta + 0.6 * torch.randn(rows, generator=generator, dtype=torch.float64)
    elif family == "bernoulli_logit":
        y = (torch.rand(rows, generator=generator, dtype=torch.float64) < eta.sigmoid()).double()
    else:
        size = 2.0 if family == "negative_binomial" else 1e9
        shape = torch.full((rows,), size, dtype=torch.float64)
        y = torch.poisson(eta.exp() * torch._standard_gamma(shape, generator=generator) / size, generator=generator)
    return X, y, subject, item


def main() -> None:
    """Fit, and print the table with the seconds."""
    torch.set_num_threads(1)
    family, *numbers = [*sys.argv[1:], *("gaussian", "10000", "200", "100000")[len(sys.argv) - 1 :]]
    X, y, subject, item = data(family, *map(int, numbers))
    torch.linalg.eigh(torch.eye(2))  # what is loaded at the first use
    begun = time.perf_counter(), time.process_time()
    ones = X[:, :1]
    result = MixedModel(X, y, {"subject": (ones, subject), "item": (ones, item)}, family).fit(progress=False)
    print(result)
    wall, processor = time.perf_counter() - begun[0], time.process_time() - begun[1]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{family} {' x '.join(numbers)}: {wall:.1f} s, of the processor {processor:.1f} s, at most {most:.2f} GB")


if __name__ == "__main__":
    main()
