"""Pareto-smoothed importance sampling, and log densities of data that a model was not fitted to."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_tensor
from torchngvi.errors import InputError

# Pareto-smoothed importance sampling: is q close enough to the density it stands for?
#
# k̂ is the shape of a generalised Pareto distribution fitted to the largest importance weights, by the estimate of
# Zhang and Stephens (2009, Technometrics 51); the largest weights are then replaced by its quantiles (Vehtari, Simpson,
# Gelman, Yao and Gabry 2024, Journal of Machine Learning Research 25).

USELESS = 0.7  # k̂ above which weights are of no use
_NEARLY_ALL = 0.9  # share of the draws that are effective where nearly all weights are equal
_FEWEST = 100  # draws that say something about a tail
_FEWEST_TAIL = 5  # weights to which a tail can be fitted
_PRIOR_SHAPE = (10.0, 0.5)  # weight, in draws, and value of the prior of k̂
_NEGLIGIBLE = 10  # units of rounding below which a candidate of the fit is left out


class Smoothed(NamedTuple):
    """Importance weights after Pareto smoothing, with the k-hat that says how far they can be trusted.

    Attributes:
        log_weights: the logarithms of weights that sum to one, (S, *batch).
        k_hat: the shape of the tail, (*batch,): below 0.5 all is well, above 0.7 the weights are of no use.

    >>> even = Smoothed(torch.full((4,), 0.25).log(), torch.tensor(0.0))
    >>> round(even.effective.item(), 6)
    4.0
    """

    log_weights: Tensor  # normalised, (S, *batch)
    k_hat: Tensor  # (*batch,)

    @property
    def effective(self) -> Tensor:
        """The effective number of draws 1/Σ w², (*batch,)."""
        return 1 / (2 * self.log_weights).exp().sum(0)


@torch.no_grad()
def smoothed(
    log_weights: Tensor,  # (S, *batch)
) -> Smoothed:
    """Pareto-smoothed importance weights and their k̂, in float64.

    Importance weights correct expectations under q to those under p; their largest ones carry most of the noise.  The
    largest min(S/5, 3√S) are replaced by quantiles of the generalised Pareto distribution that is fitted to them, and
    none exceeds the largest that was observed (Vehtari et al. 2024, section 2).

    Args:
        log_weights: log p - log q at draws of q, up to a constant; -∞ where p vanishes.

    Returns:
        The logarithms of weights that sum to one, and k̂: below 0.5 importance sampling has a finite variance, above
        0.7 it is of no use.  Both are NaN where a weight is NaN or +∞, or where none is positive; k̂ is 0 where the
        weights agree up to rounding, as when q is exact.

    Raises:
        InputError: fewer than 100 draws, which say nothing about a tail.

    >>> result = smoothed(torch.zeros(200))
    >>> result.k_hat.item(), round(result.effective.item(), 6)
    (0.0, 200.0)
    """
    log_weights = read_tensor("log_weights", log_weights, finite=False)
    count = len(log_weights) if log_weights.ndim else 1
    if count < _FEWEST:
        raise InputError(f"k-hat needs at least {_FEWEST} draws; got {count}. Raise num_samples.")
    size = torch.where(log_weights.isfinite(), log_weights.abs(), 0.0).amax(0).clamp_min(1.0)
    rounding = math.sqrt(torch.finfo(log_weights.dtype).eps) * size
    equal = (log_weights.amax(0) - log_weights.amin(0) <= rounding).flatten()
    x = log_weights.double().flatten(1) if log_weights.ndim > 1 else log_weights.double()[:, None]
    usable = torch.isfinite(x.amax(0)) & ~torch.isnan(x).any(0)
    x = x - x.amax(0)
    ordered, order = x.sort(0)
    most = math.ceil(min(count / 5, 3 * math.sqrt(count)))
    new, k = _smoothed_tail(ordered, most)
    placed = torch.zeros_like(x).scatter(0, order, new)
    weights = torch.where(equal, x, placed)
    weights = torch.where(usable, weights - torch.logsumexp(weights, 0), math.nan)
    k = torch.where(usable, torch.where(equal, 0.0, k), math.nan)
    return Smoothed(weights.reshape(log_weights.shape), k.reshape(log_weights.shape[1:]))


def worth(k: float, effective: float, draws: int) -> str:
    """What weighted draws are worth, in words that k̂ and the effective number of draws cannot contradict.

    >>> worth(0.31, 3000.0, 4096)
    'worth 3000 of 4096 draws, k-hat 0.31'
    >>> worth(1.4, 4000.0, 4096)
    'worth 4000 of 4096 draws, all but a few of equal weight, and these may hide more (their k-hat is 1.40)'
    """
    text = f"worth {effective:.0f} of {draws} draws"
    if k >= USELESS and effective >= _NEARLY_ALL * draws:
        return f"{text}, all but a few of equal weight, and these may hide more (their k-hat is {k:.2f})"
    return f"{text}, k-hat {k:.2f}"


def k_hat(
    log_weights: Tensor,  # (S, *batch)
) -> Tensor:
    """Compute the Pareto k̂ of log importance weights: whether q is close enough to the density it stands for.

    Weights that agree up to rounding, as when q is exact, have k̂ = 0.

    Args:
        log_weights: log p - log q at draws of q, up to a constant, (S, *batch).

    Returns:
        The shape of the tail, one a member, (*batch,); NaN where a weight is NaN or infinite.

    Raises:
        InputError: fewer than 100 draws, which say nothing about a tail.

    >>> k_hat(torch.zeros(100)).item()
    0.0
    """
    return smoothed(log_weights).k_hat


def _smoothed_tail(
    ordered: Tensor,  # log weights, rising, the largest 0, (S, N)
    most: int,  # weights in the tail
) -> tuple[Tensor, Tensor]:
    """The log weights with the tail replaced (S, N), and k̂ (N,); infinite where the tail is too short."""
    cutoff = ordered[-most - 1].clamp_min(math.log(torch.finfo(torch.float64).tiny))
    tail = ordered[-most:]
    beyond = tail > cutoff  # ties with the cutoff, and what has underflown, are no part of it
    length = beyond.sum(0)
    excess = torch.where(beyond, tail.exp() - cutoff.exp(), 0.0)
    k, sigma = fit_generalized_pareto(excess, length)
    enough = length >= _FEWEST_TAIL
    rank = torch.arange(0.5, most, dtype=torch.float64, device=ordered.device)[:, None] - (most - length)
    quantiles = _quantiles(rank / length.clamp_min(1), k, sigma)
    new = (quantiles + cutoff.exp()).log().clamp_max(0.0)
    replaced = torch.where(beyond & enough & torch.isfinite(k) & (sigma > 0), new, tail)
    return torch.cat([ordered[:-most], replaced]), torch.where(enough, k, math.inf)


def fit_generalized_pareto(
    excess: Tensor,  # (n, N), rising; the last `length` of each column are positive and count
    length: Tensor,  # (N,)
) -> tuple[Tensor, Tensor]:
    """Shape k and scale σ (N,) of the generalised Pareto distribution, by Zhang and Stephens (2009).

    The posterior mean of b = k/σ over a grid of m = 30 + ⌊√n⌋ candidates by profile likelihood; then
    k = mean log(1 - b x), and k̂ is pulled to 0.5 with the weight of 10 observations (Vehtari et al. 2024, appendix).

    >>> x = torch.linspace(0.005, 0.995, 100, dtype=torch.float64)
    >>> k, sigma = fit_generalized_pareto(2 * x[:, None], torch.tensor([100]))  # uniform on (0, 2): k = -1
    >>> -1.1 < k.item() < -0.8
    True
    """
    most = len(excess)
    n = length.double()
    grid = 30 + n.sqrt().floor()  # candidates, of each column
    index = torch.arange(30 + int(math.sqrt(most)), device=excess.device)[:, None]
    candidate = index < grid
    quarter = excess.gather(0, (most - length + (n / 4 + 0.5).floor().long() - 1).clamp(0, most - 1)[None])
    b = (1 - (grid / (index + 0.5)).sqrt()) / (3 * quarter) + 1 / excess[-1]
    weight = torch.where(candidate, _profile(b, excess, n), -math.inf).softmax(0)
    weight = torch.where(weight >= _NEGLIGIBLE * torch.finfo(torch.float64).eps, weight, 0.0)
    mean = (torch.where(weight > 0, b, 0.0) * weight).sum(0) / weight.sum(0)
    k = torch.log1p(-mean * excess).sum(0) / n
    prior, value = _PRIOR_SHAPE
    return (n * k + prior * value) / (n + prior), -k / mean


def _profile(b: Tensor, excess: Tensor, n: Tensor) -> Tensor:
    """n (log(-b/k) - k - 1) at candidates (m, N), k = mean log(1 - b x)."""
    k = torch.stack([torch.log1p(-each * excess).sum(0) for each in b]) / n
    return n * ((-b / k).log() - k - 1)


def _quantiles(share: Tensor, k: Tensor, sigma: Tensor) -> Tensor:
    """Of the generalised Pareto distribution: σ ((1 - p)^-k - 1)/k."""
    rate = -torch.log1p(-share.clamp(0.0, 1 - 1e-16))
    small = k.abs() < torch.finfo(torch.float64).eps
    return sigma * torch.where(small, rate, torch.expm1(k * rate) / torch.where(small, 1.0, k))


# What a model says of data that it was not fitted to: log densities of rows, or groups, each without itself


@dataclass(frozen=True)
class LeftOut:
    """Log predictive densities, each of a part of the data under the posterior of all other parts: abstract.

    Attributes:
        density: log p(y_i | the others), (N,), in nats.
        in_sample: log p(y_i | all), (N,).
        resolved: of which parts the posterior without them was found by a fit, (N,).
        evaluations: of those fits.
    """

    density: Tensor  # (N,)
    in_sample: Tensor  # (N,)
    resolved: Tensor  # (N,)
    evaluations: int

    parts = "rows"

    @property
    def total(self) -> float:
        """The sum of the log densities, elpd, in nats."""
        return float(self.density.sum())

    @property
    def standard_error(self) -> float:
        """The standard error of the sum over parts like these, √(N var); NaN of one part."""
        if len(self.density) < 2:
            return math.nan
        return math.sqrt(len(self.density) * float(self.density.var()))

    @property
    def complexity(self) -> float:
        """The effective number of parameters, p_loo: by how much the parts are better known in sample."""
        return float((self.in_sample - self.density).sum())

    def __str__(self) -> str:
        again, what = int(self.resolved.sum()), self.parts
        text = f"elpd {self.total:.2f} ± {self.standard_error:.2f} nats over {len(self.density)} {what}"
        return f"{text}, p_loo {self.complexity:.2f}; {again} of them by a fit without the {what.removesuffix('s')}."

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"
