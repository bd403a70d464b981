"""Independent runs of projected SGD on a Gaussian target, as one batch."""

import numpy as np
import torch
from torch import Tensor

from examples.compare_methods.stepping import unguarded
from torchngvi.expectations import Independent, PathDerivative, Reparametrized
from torchngvi.interfaces import Estimator
from torchngvi.methods import BBVI
from torchngvi.models import LogJoint
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.stepsizes import Constant
from torchngvi.theory.kim2024 import (
    GaussianTarget,
)

LANDING, CLOSED = "STL", "CFE"


def reference_target(dim: int = 5, kappa: float = 4.0, seed: int = 3) -> GaussianTarget:
    """The target of the reference run, for d = 5 and κ = 4: precision Q diag(1 .. κ) Qᵀ, mean ~ N(0, I)."""
    rng = np.random.default_rng(seed)
    Q = torch.as_tensor(np.linalg.qr(rng.normal(size=(dim, dim))).Q)
    precision = Q @ torch.diag(torch.linspace(1, kappa, dim, dtype=torch.float64)) @ Q.mT
    return GaussianTarget(torch.as_tensor(rng.normal(size=dim)), 0.5 * (precision + precision.mT))


def optimum(target: GaussianTarget) -> Tensor:
    """The root C* = chol Λ⁻¹ of the covariance of a Gaussian target, the optimum among lower-triangular roots."""
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(target.precision)))


def start(target: GaussianTarget, runs: int, *, mean_field: bool = False, at_optimum: bool = False) -> Gaussian:
    """R posteriors as one batch, all at N(0, I), or at the optimum λ*."""
    kind = DiagonalGaussian if mean_field else CholeskyGaussian
    q = kind(len(target.mean), (runs,), dtype=torch.float64)
    if at_optimum:
        star = _star(target, q)
        q.initialize_(target.mean, star.expand(runs, *star.shape))
    return q


def noisy(method: str, draws: int = 1, seed: int = 0) -> Estimator:
    """The estimator that sticks the landing, or the one with the closed entropy, on so many draws."""
    noise = Independent(draws, torch.Generator().manual_seed(seed))
    return PathDerivative(noise) if method == LANDING else Reparametrized(noise)


def _star(target: GaussianTarget, q: Gaussian) -> Tensor:
    """The optimal root C*, as q stores it."""
    return target.mean_field_optimum()[1].diagonal() if q.structure.widest == 1 else optimum(target)


class Runs:
    """R independent runs of projected SGD as one batch, with their distances to the optimum λ*."""

    def __init__(
        self, target: GaussianTarget, q: Gaussian, estimator: Estimator, gamma: float, smoothness: float
    ) -> None:
        self.target, self.q, self.star = target, q, _star(target, q)
        self.log_joint = LogJoint(target.log_joint)
        self.opt = unguarded(BBVI(q, gamma, smoothness, step_size=Constant(), estimator=estimator))

    def advance(self, steps: int) -> None:
        """Take so many steps of every run."""
        for _ in range(steps):
            self.opt.step(self.log_joint)

    def distances2(self) -> Tensor:
        """The squared distance |λ - λ*|² of each run, (R,)."""
        mean, root = self.q.coordinates
        return (mean - self.target.mean).square().sum(-1) + (root - self.star).square().flatten(1).sum(-1)
