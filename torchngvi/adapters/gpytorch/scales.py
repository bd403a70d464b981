"""What would end a fit at a poor optimum without an error: data on another scale than the model, a forward that draws.

Targets on another scale are told by the prior: their squared distances from its mean, over its variances, are near 1
where they are standardised.  Where the fit ends it is compared with a constant function: N(y; ȳ, s²), or the share of
each class.  Length scales so short that a row is hardly correlated with any other are lengthened: the gradient of the
bound vanishes there.
"""

import math
import warnings

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from gpytorch.settings import min_variance
from linear_operator.operators import DiagLinearOperator
from scipy.optimize import minimize_scalar
from torch import Tensor

from torchngvi.adapters.gpytorch.energies import conjugate, energy
from torchngvi.adapters.gpytorch.kernels import evaluated
from torchngvi.errors import PairError, ScaleWarning

_ROWS = 2048  # that are looked at
_FAR = 10.0  # times as far from the mean as the prior says, or as near
_NO_BETTER = 1e-3  # nats a row
_ALONE = 0.5  # the correlation of a row with the nearest of M others; where it is smaller, the start tells little
_DOUBLINGS = 30


@torch.no_grad()
def check_start(
    model: ApproximateGP,
    likelihood: Likelihood,
    x: Tensor,  # (N, features)
    y: Tensor,  # (N,)
) -> None:
    """Warn where targets with Gaussian noise are on another scale than the model begins with."""
    if not conjugate(likelihood) or likelihood.noise.shape[-1] not in (1, len(y)):  # the latter is refused elsewhere
        return
    y = y[:_ROWS].double()
    with evaluated():
        prior = model.forward(x[:_ROWS])
        variance = prior.variance.double() + likelihood.noise[..., :_ROWS].double()
    ratio = float(((y - prior.mean.double()).square() / variance).mean().sqrt())
    if math.isfinite(ratio) and not 1 / _FAR <= ratio <= _FAR:
        warnings.warn(
            f"the targets, of mean {float(y.mean()):.3g} and standard deviation {float(y.std(correction=0)):.3g}, are "
            f"{ratio:.2g} times as far from the mean of the model as its prior and its noise say: from there the "
            "hyper-parameters may end at a poor optimum. Standardise the targets, or set the mean, the output scale "
            "and the noise to their scale first.",
            ScaleWarning,
            stacklevel=4,
        )


def constant_function(
    likelihood: Likelihood,
    y: Tensor,  # (N,)
    loss: float,
) -> str:
    """Say that a fit is no better than a constant function, with a warning, and what to do; "" where it is better."""
    constant = _of_a_constant(likelihood, y.double())
    if not loss > constant - _NO_BETTER:
        return ""
    noise = " with noise" if conjugate(likelihood) else ""
    advice = (
        "If the inputs tell something about the targets, standardise both, leave out inputs that do not matter "
        "(active_dims of the kernel), begin with a short length scale in those that do, or use more rows."
    )
    warnings.warn(
        f"the negative ELBO per datum, {loss:.4f}, is no better than that of a constant function{noise}, "
        f"{constant:.4f}. {advice}",
        ScaleWarning,
        stacklevel=3,
    )
    return (
        f"what was found is no better than a constant function{noise}, so every prediction is near the mean of the "
        f"targets. {advice}"
    )


def _within_bounds(likelihood: Likelihood, noise: float) -> float:
    """The variance nearest to this one that the noise of a Gaussian likelihood may have."""
    bounds = getattr(getattr(likelihood, "noise_covar", None), "raw_noise_constraint", None)
    if bounds is None:
        return noise
    return min(max(noise, float(bounds.lower_bound.max())), float(bounds.upper_bound.min()))


@torch.no_grad()
def _of_a_constant(likelihood: Likelihood, y: Tensor) -> float:
    """The negative log likelihood per datum of the best constant function; infinite where every target is the same."""
    if bool((y == y[0]).all()):
        return math.inf
    if conjugate(likelihood) and any(p.requires_grad for p in likelihood.parameters()):
        variance = float(y.var(correction=0))
        noise = _within_bounds(likelihood, variance)
        return 0.5 * (math.log(2 * math.pi * noise) + variance / noise)
    nothing = torch.full_like(y, 2 * min_variance.value(y.dtype))  # the function itself is certain

    def at(value: float) -> float:
        return float(energy(likelihood, y, MultivariateNormal(value + 0.0 * y, DiagLinearOperator(nothing))).mean())

    reach = 10.0 + float(y.abs().max())
    found = minimize_scalar(at, bounds=(-reach, reach), method="bounded")
    return found.fun if math.isfinite(found.fun) else math.inf


@torch.no_grad()
@evaluated()
def check_repeats(
    model: ApproximateGP,
    x: Tensor,  # (N, features)
) -> None:
    """Check that ``forward`` gives the same when it is called again, as a line search has to assume."""
    rows = torch.cat([model.variational_strategy.inducing_points, x[:8]], -2)
    first, second = (model.forward(rows) for _ in range(2))
    pairs = zip((first.mean, first.covariance_matrix), (second.mean, second.covariance_matrix), strict=True)
    if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-6, equal_nan=True) for a, b in pairs):
        raise PairError(
            f"{type(model).__name__}.forward gives other values when it is called again with the same inputs, as with "
            "dropout in training mode, and no line search could follow that. Use train_svgp_in_batches, whose steps "
            "may be noisy."
        )


@torch.no_grad()
@evaluated()
def lengthen(
    model: ApproximateGP,
    x: Tensor,  # (N, features)
) -> bool:
    """Double the length scales that are learnt, until the prior relates the median row to the nearest of M others."""
    kernels = [m for m in model.modules() if isinstance(m, Kernel) and m.has_lengthscale]
    kernels = [kernel for kernel in kernels if kernel.raw_lengthscale.requires_grad]
    if not kernels or len(x) < 2:
        return False
    before = [kernel.raw_lengthscale.clone() for kernel in kernels]
    size = min(model.variational_strategy.inducing_points.shape[-2], len(x) // 2)
    rows = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: size + _ROWS // 4].to(x.device)]
    for doublings in range(_DOUBLINGS):
        if not _nearest(model, rows, size) < _ALONE:
            return doublings > 0
        longer = [2 * kernel.lengthscale for kernel in kernels]
        free = [kernel.raw_lengthscale_constraint.check(value) for kernel, value in zip(kernels, longer, strict=True)]
        if not any(free):
            break
        for kernel, value, may in zip(kernels, longer, free, strict=True):
            if may:
                kernel.lengthscale = value
    for kernel, value in zip(kernels, before, strict=True):
        kernel.raw_lengthscale.copy_(value)
    return False


def _nearest(model: ApproximateGP, rows: Tensor, size: int) -> float:
    """The median, over the rows after the first ``size``, of the largest prior correlation with one of these."""
    covariance = model.forward(rows).covariance_matrix
    scale = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    correlation = covariance / (scale[..., :, None] * scale[..., None, :])
    return float(correlation[..., size:, :size].abs().amax(-1).median())
