"""Several Gaussians side by side, each brought to its optimum over fixed draws."""

import math
from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor

from torchngvi.expectations.draws import Fixed
from torchngvi.expectations.sample_average import SampleAverage
from torchngvi.interfaces import Target
from torchngvi.methods import VN
from torchngvi.optim import Status
from torchngvi.posteriors import CholeskyGaussian

FEWEST = 32  # draws, or 2 D + 2, over which a Gaussian target is fitted exactly
_MOST = 512  # draws, unless whitening takes more
_NOISE = 0.1  # squared standard error of a natural gradient that is put up with: 0.05 nats
_NEAR = 0.05  # norm² at which a fit ends
_FAR = 1.0  # norm² above which it has failed
_STEPS = 12
_JUDGES = 128  # draws of the ELBO, or as many as of the fit


@final
class Batched(Target):
    """A log density of points (S, *batch, D), each batch member with one of its own.

    >>> Batched(lambda y: -y.square().sum(-1)).log_joint(torch.ones(4, 3, 2)).shape
    torch.Size([4, 3])
    """

    temperature = 1.0

    def __init__(self, log_density: Callable[[Tensor], Tensor]) -> None:
        self.log_density = log_density

    def log_joint(self, theta: Tensor) -> Tensor:
        """Evaluate the log density at points (S, *batch, D)."""
        return self.log_density(theta)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return no tensors: those that the function depends on are unknown."""
        return ()


class Fits(NamedTuple):
    """Gaussians that were fitted, an entry a member."""

    mean: Tensor  # (B, D)
    root: Tensor  # lower triangular, (B, D, D)
    elbo: Tensor  # on other draws, (B,)
    ok: Tensor  # the fit has ended, and its ELBO is finite, (B,)
    draws: int  # over which they were fitted


@torch.no_grad()
def fitted(
    target: Target,
    mean: Tensor,  # (B, D)
    root: Tensor,  # (B, D, D)
    seed: int,
    draws: int | None = None,
) -> Fits:
    """Fit from these starts by VN over fixed draws; the ELBO is of others.

    >>> fits = fitted(Batched(lambda y: -2 * y.square().sum(-1)), torch.ones(1, 2), torch.eye(2)[None], seed=0)
    >>> bool(fits.ok), fits.draws, fits.root.diagonal(dim1=-2, dim2=-1).tolist()
    (True, 32, [[0.5, 0.5]])
    """
    q = CholeskyGaussian(mean.shape[-1], mean.shape[:-1], mean=mean, scale=root)
    least = max(FEWEST, 2 * q.dim + 2)
    first = least if draws is None else draws
    status = _minimised(q, target, first, seed)
    if draws is None:
        assert status.noise2 is not None
        wanted = first * float(status.noise2.nan_to_num(0.0, 0.0).max()) / _NOISE
        draws = 2 * math.ceil(0.5 * min(max(least, wanted), max(least, _MOST)))
        if draws > first:
            status = _minimised(q, target, draws, seed)
    judges = Fixed(max(draws, _JUDGES), seed=seed + 1)(q.mean)
    elbo = target.log_joint(q.push_noise(judges)).mean(0) + q.entropy()
    return Fits(q.mean.clone(), q.scale_tril.clone(), elbo, (status.norm2 < _FAR) & elbo.isfinite(), draws)


def _minimised(q: CholeskyGaussian, target: Target, draws: int, seed: int) -> Status:
    optimizer = VN(q, estimator=SampleAverage(Fixed(draws, seed=seed)))
    status = optimizer.evaluate(target)
    for _ in range(_STEPS):
        if bool(((status.norm2 < _NEAR) | ~status.loss.isfinite()).all()):
            break
        optimizer.step(target)
        status = optimizer.evaluate(target)
    optimizer.step_untried(target)  # near the optimum it is right, and costs nothing
    return status
