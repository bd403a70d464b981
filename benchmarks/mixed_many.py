"""Seconds of many mixed models of one design at once: python benchmarks/mixed_many.py [members] [r] [family].

20 groups of 10 rows, counts that vary more than Poisson's (size 2), random intercepts of sd 0.6 and, with r = 2, also
slopes; beside the first five of the members, each fitted by itself.  One thread, float64.
"""

import resource
import sys
import time

import torch

from torchngvi import fit
from torchngvi.models import MixedLogJoint, NegativeBinomial, RandomEffects

FAMILIES = {"negative_binomial": NegativeBinomial(2.0), "poisson_log": "poisson_log"}
ALONE = 5


def data(members: int, r: int) -> tuple[torch.Tensor, torch.Tensor, RandomEffects]:
    """The design, targets (members, 200), and the groups."""
    torch.manual_seed(0)
    groups = torch.arange(20).repeat_interleave(10)
    x = torch.linspace(-1, 1, 10, dtype=torch.float64).repeat(20)
    X = torch.stack([torch.ones_like(x), x], -1)
    b = 0.6 * torch.randn(members, 20, r, dtype=torch.float64)
    eta = 0.5 + torch.randn(members, 1, dtype=torch.float64) + 0.3 * x + (b[:, groups] * X[:, :r]).sum(-1)
    gamma = torch.distributions.Gamma(2.0, 2.0).sample(eta.shape).double()
    return X, torch.poisson(eta.exp() * gamma), RandomEffects(X[:, :r], groups)


def fitted(X: torch.Tensor, y: torch.Tensor, random: RandomEffects, family: str) -> str:
    """Fit and summarise, and say what it took."""
    begun = time.process_time()
    model = MixedLogJoint(X, y, random, FAMILIES[family])
    q = model.posterior()
    result = fit(q, model, progress=False, examine=False)
    model.summary(q, draws=1000)
    took = time.process_time() - begun
    return f"{took:.2f} s of the processor, converged: {result.converged}, {result.trace[-1].evaluations} evaluations"


def main() -> None:
    """Fit all at once, and some one by one."""
    torch.set_num_threads(1)
    members, r, family = [*sys.argv[1:], *("1000", "1", "negative_binomial")[len(sys.argv) - 1 :]]
    X, Y, random = data(int(members), int(r))
    fitted(X, Y[0], random, family)  # what is loaded at the first use
    print(f"{members} at once, r = {r}, {family}: {fitted(X, Y, random, family)}")
    print(f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GB")
    for y in Y[:ALONE]:
        print(f"one by itself: {fitted(X, y, random, family)}")


if __name__ == "__main__":
    main()
