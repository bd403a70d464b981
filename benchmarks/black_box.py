"""Gap to the best q when a budget of gradients is used up: `fit` on a log joint that is only a function.

    python benchmarks/black_box.py [--seeds 20] [--first 0]

Logistic regression on scikit-learn's breast cancer data (standardised, with intercept, β = 0.1; D = 31),
handed over as a function theta -> log joint, default settings.  A gradient is ∇ log p at one draw; the
call that would exceed the budget is refused, and q stays where its last accepted step left it.  The gap is
that of the exact negative ELBO, by quadrature, to its minimum.
"""

import argparse
import math

import torch
from evaluations import breast_cancer, minimum
from torch import Tensor

from torchngvi import CholeskyGaussian, GeneralizedLinear, fit

BUDGETS = (600, 900, 1100, 2000, 4000, 6000, math.inf)  # gradients
GAPS = (0.2, 0.1, 0.05, 0.02, 0.01)  # nats


class Budget:
    """A log joint that interrupts the fit instead of giving more than so many gradients."""

    def __init__(self, model: GeneralizedLinear, most: float) -> None:
        self.model, self.most, self.taken = model, most, 0

    def __call__(self, theta: Tensor) -> Tensor:
        if theta.requires_grad:
            gradients = theta[..., 0].numel()
            if self.taken + gradients > self.most:
                raise KeyboardInterrupt
            self.taken += gradients
        return self.model.log_joint(theta)


def gap(model: GeneralizedLinear, lowest: float, seed: int, budget: float) -> tuple[float, int, bool]:
    """Nats to the minimum, gradients taken, and whether the fit ended of itself."""
    torch.manual_seed(seed)
    q, target = CholeskyGaussian(model.dim, dtype=torch.float64), Budget(model, budget)
    result = fit(q, target, progress=False)
    with torch.no_grad():
        return model.negative_elbo(q).item() - lowest, target.taken, result.converged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = breast_cancer()
    lowest = minimum(model, CholeskyGaussian)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    print(f"breast cancer as a black box, D = {model.dim}, seeds {seeds.start}..{seeds.stop - 1}")
    print("budget   median gap    worst gap" + "".join(f"  within {g:g}" for g in GAPS) + "  converged  gradients")
    for budget in BUDGETS:
        gaps, taken, converged = zip(*(gap(model, lowest, seed, budget) for seed in seeds), strict=True)
        median = torch.tensor(gaps).quantile(0.5).item()
        reached = "".join(f"{sum(g <= wanted for g in gaps):{9 + len(f'{wanted:g}')}}" for wanted in GAPS)
        print(f"{budget:6g}{median:13.4f}{max(gaps):13.4f}{reached}{sum(converged):11}{max(taken):11}", flush=True)


if __name__ == "__main__":
    main()
