"""Importance weights: what draws of q say of the density that it stands for, p^(1/γ) with p = exp(log joint).

At the temperature γ = 1 it is the posterior.  With log w = (log joint)/γ - log q the ELBO is γ E_q[log w]; Pareto
smoothing says how far weights can be trusted, and moments of the density itself are by weights of draws from a
proposal that is wider than q where linear response is.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchngvi.arguments import read_size, read_tensor
from torchngvi.errors import InputError
from torchngvi.interfaces import Target
from torchngvi.models.factors import FAILING
from torchngvi.models.log_joint import as_target, read_posterior
from torchngvi.numerics.linalg import eigh
from torchngvi.posteriors.gaussian import Gaussian

USELESS = 0.7  # k̂ above which weights are of no use

# Means over draws of q: the evidence lower bound, and the weights themselves


class Estimate(NamedTuple):
    """A Monte Carlo mean with its standard error, one a member.

    Attributes:
        estimate: the mean over the draws, (*batch,).
        standard_error: the standard deviation of the draws over the root of their number, (*batch,).

    >>> found = Estimate(torch.tensor(-1.0), torch.tensor(0.1))
    >>> found.standard_error < found.estimate.abs()
    tensor(True)
    """

    estimate: Tensor
    standard_error: Tensor


@torch.no_grad()
def log_weights(
    q: Gaussian, target: Target | Callable[[Tensor], Tensor], num_samples: int, generator: torch.Generator | None = None
) -> Tensor:
    """Compute log importance weights (log joint)/γ - log q at draws of q, as `k_hat` takes them.

    Args:
        q: the posterior, which is drawn from.
        target: the model, or a function of theta that returns the log joint.
        num_samples: S, at least 2.
        generator: of the draws; torch's default generator if None.

    Returns:
        One weight a draw and member, (S, *batch), in nats.

    Raises:
        InputError: fewer than 2 draws, a target at temperature 0.

    >>> from torchngvi import CholeskyGaussian
    >>> log_weights(CholeskyGaussian(2), lambda theta: -0.5 * theta.square().sum(-1), 4).round(decimals=3)
    tensor([1.8380, 1.8380, 1.8380, 1.8380])
    """
    model = as_target(target)
    if model.temperature == 0:
        raise InputError(
            "log weights compare q with the density exp(log joint / temperature); got temperature 0, where there is "
            "none. Use elbo, or a positive temperature."
        )
    draws, log_joint = _at_draws(q, model, num_samples, generator)
    return log_joint / model.temperature - q.log_prob(draws)


def _at_draws(
    q: Gaussian, model: Target, num_samples: int, generator: torch.Generator | None, at_once: int = 256
) -> tuple[Tensor, Tensor]:
    """Draws (S, *batch, D) and their log joint (S, *batch), by parts that bound the memory."""
    read_posterior("an estimate by draws", q, model)
    num_samples = read_size("num_samples", num_samples, "counts draws of a mean and its error", at_least=2)
    draws = q.sample((num_samples,), generator)
    return draws, torch.cat([model.log_joint(part) for part in draws.split(at_once)])


@torch.no_grad()
def elbo(
    q: Gaussian, target: Target | Callable[[Tensor], Tensor], num_samples: int, generator: torch.Generator | None = None
) -> Estimate:
    """Estimate the evidence lower bound E_q[log joint] + γ entropy(q) from draws of q.

    Wanted as a check by draws that the fit has not seen, or for a model without an expectation in closed form.

    Args:
        q, target, num_samples, generator: those of `log_weights`; a temperature of 0 is allowed.

    Returns:
        The bound in nats, and its standard error, both (*batch,).

    Raises:
        InputError: fewer than 2 draws.

    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(2)
    >>> found = elbo(q, lambda theta: q.log_prob(theta) - 1, 8)  # q is the posterior, of evidence exp(-1)
    >>> round(found.estimate.item(), 5), found.standard_error.item() < 1e-6
    (-1.0, True)
    """
    model = as_target(target)
    draws, log_joint = _at_draws(q, model, num_samples, generator)
    terms = log_joint - model.temperature * q.log_prob(draws)
    return Estimate(terms.mean(0), terms.std(0) / math.sqrt(num_samples))


# Pareto smoothing: is q close enough to the density it stands for?
#
# k̂ is the shape of a generalised Pareto distribution fitted to the largest importance weights, by the estimate of
# Zhang and Stephens (2009, Technometrics 51); the largest weights are then replaced by its quantiles (Vehtari, Simpson,
# Gelman, Yao and Gabry 2024, Journal of Machine Learning Research 25).


class Smoothed(NamedTuple):
    """Importance weights after Pareto smoothing, with the k-hat that says how far they can be trusted.

    Attributes:
        log_weights: the logarithms of weights that sum to one, (S, *batch).
        k_hat: the shape of the tail, (*batch,): below 0.5 all is well, above 0.7 the weights are of no use.

    >>> even = Smoothed(torch.full((4,), 0.25).log(), torch.tensor(0.0))
    >>> round(even.effective.item(), 6)
    4.0
    """

    log_weights: Tensor
    k_hat: Tensor

    @property
    def effective(self) -> Tensor:
        """The effective number of draws 1/Σ w², (*batch,)."""
        return 1 / (2 * self.log_weights).exp().sum(0)


@torch.no_grad()
def smoothed(log_weights: Tensor) -> Smoothed:
    """Pareto-smoothed importance weights and their k̂, in float64.

    Importance weights correct expectations under q to those under p; their largest ones carry most of the noise.  The
    largest min(S/5, 3√S) are replaced by quantiles of the generalised Pareto distribution that is fitted to them, and
    none exceeds the largest that was observed (Vehtari et al. 2024, section 2).

    Args:
        log_weights: log p - log q at draws of q, up to a constant, (S, *batch); -∞ where p vanishes.

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
    count, fewest = len(log_weights) if log_weights.ndim else 1, 100
    if count < fewest:
        raise InputError(f"k-hat needs at least {fewest} draws; got {count}. Raise num_samples.")
    size = torch.where(log_weights.isfinite(), log_weights.abs(), 0.0).amax(0).clamp_min(1.0)
    rounding = math.sqrt(torch.finfo(log_weights.dtype).eps) * size
    equal = (log_weights.amax(0) - log_weights.amin(0) <= rounding).flatten()
    x = log_weights.double().flatten(1) if log_weights.ndim > 1 else log_weights.double()[:, None]
    usable = torch.isfinite(x.amax(0)) & ~torch.isnan(x).any(0)
    x = x - x.amax(0)
    ordered, order = x.sort(0)
    new, k = _smoothed_tail(ordered, math.ceil(min(count / 5, 3 * math.sqrt(count))))
    weights = torch.where(equal, x, torch.zeros_like(x).scatter(0, order, new))
    weights = torch.where(usable, weights - torch.logsumexp(weights, 0), math.nan)
    k = torch.where(usable, torch.where(equal, 0.0, k), math.nan)
    return Smoothed(weights.reshape(log_weights.shape), k.reshape(log_weights.shape[1:]))


def worth(k: float, effective: float, draws: int) -> str:
    """What weighted draws are worth, in words that k̂ and the effective number of draws cannot contradict."""
    text = f"worth {effective:.0f} of {draws} draws"
    if k >= USELESS and effective >= 0.9 * draws:
        few = f"nearly all have the same weight, and the others, of k-hat {k:.2f}, may hide a part of the posterior"
        return f"{text} ({few})"
    return f"{text}, k-hat {k:.2f}"


def k_hat(log_weights: Tensor) -> Tensor:
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


def _smoothed_tail(ordered: Tensor, most: int, fewest: int = 5) -> tuple[Tensor, Tensor]:
    """Replace the tail, so many at most, of log weights that rise to 0, (S, N); k̂ (N,) is infinite of a short one."""
    cutoff = ordered[-most - 1].clamp_min(math.log(torch.finfo(torch.float64).tiny))
    tail = ordered[-most:]
    beyond = tail > cutoff  # ties with the cutoff, and what has underflown, are no part of it
    length = beyond.sum(0)
    excess = torch.where(beyond, tail.exp() - cutoff.exp(), 0.0)
    k, sigma = fit_generalized_pareto(excess, length)
    enough = length >= fewest
    rank = torch.arange(0.5, most, dtype=torch.float64, device=ordered.device)[:, None] - (most - length)
    quantiles = _quantiles(rank / length.clamp_min(1), k, sigma)
    new = (quantiles + cutoff.exp()).log().clamp_max(0.0)
    replaced = torch.where(beyond & enough & torch.isfinite(k) & (sigma > 0), new, tail)
    return torch.cat([ordered[:-most], replaced]), torch.where(enough, k, math.inf)


def fit_generalized_pareto(
    excess: Tensor,  # (n, N), rising; the last `length` of each column are positive and count
    length: Tensor,  # (N,)
    prior: tuple[float, float] = (10.0, 0.5),  # of k̂: its weight, in draws, and its value
) -> tuple[Tensor, Tensor]:
    """Shape k and scale σ (N,) of a generalised Pareto distribution (Zhang and Stephens 2009; Vehtari et al. 2024)."""
    most = len(excess)
    n = length.double()
    grid = 30 + n.sqrt().floor()  # candidates, of each column
    index = torch.arange(30 + int(math.sqrt(most)), device=excess.device)[:, None]
    quarter = excess.gather(0, (most - length + (n / 4 + 0.5).floor().long() - 1).clamp(0, most - 1)[None])
    b = (1 - (grid / (index + 0.5)).sqrt()) / (3 * quarter) + 1 / excess[-1]
    shape = torch.stack([torch.log1p(-each * excess).sum(0) for each in b]) / n
    profile = n * ((-b / shape).log() - shape - 1)
    weight = torch.where(index < grid, profile, -math.inf).softmax(0)
    weight = torch.where(weight >= 10 * torch.finfo(torch.float64).eps, weight, 0.0)
    mean = (torch.where(weight > 0, b, 0.0) * weight).sum(0) / weight.sum(0)
    k = torch.log1p(-mean * excess).sum(0) / n
    return (n * k + prior[0] * prior[1]) / (n + prior[0]), -k / mean


def _quantiles(share: Tensor, k: Tensor, sigma: Tensor) -> Tensor:
    """Of the generalised Pareto distribution: σ ((1 - p)^-k - 1)/k."""
    rate = -torch.log1p(-share.clamp(0.0, 1 - 1e-16))
    small = k.abs() < torch.finfo(torch.float64).eps
    return sigma * torch.where(small, rate, torch.expm1(k * rate) / torch.where(small, 1.0, k))


# Moments of the density itself, by weights of draws from a wider proposal
#
#     ½ q  +  ¼ t_3 with the covariance by linear response  +  ¼ the same with heavy tails in its widest directions only
#
# Half of the draws are those of q, so that no weight exceeds twice what it would be under q (a defensive mixture:
# Hesterberg 1995, Technometrics 37), and an exact q keeps half of its draws at the least.  The wide parts reach what q
# has missed; in many dimensions a t distribution is nowhere near where most of the mass is, and only the last part is
# of use.


class Corrected(NamedTuple):
    """Moments of the density, and how far to trust them."""

    mean: Tensor  # (D,)
    sd: Tensor  # (D,)
    mean_error: Tensor  # standard error, (D,)
    log_sd_error: Tensor  # of log sd, (D,)
    k_hat: float
    effective: float  # draws
    sd_k_hat: Tensor | None = None  # of the weighted squares that make up an sd, where it is most in doubt, (D,)
    skewness: Tensor | None = None  # third moments in cubes of the sd, (D,)
    log_evidence: float = math.nan  # log ∫ p^(1/γ)


class Quality(NamedTuple):
    """How near a density comes to p^(1/γ), by importance weights w = p^(1/γ)/q at its own draws."""

    elbo: float  # mean of log w, in nats at temperature 1; -∞ where a draw has no finite log joint
    error: float  # its standard error
    log_evidence: float  # log of the mean of w
    effective: float  # what the smoothed weights are worth, of so many draws
    k_hat: float
    nats: float = math.nan  # ½ var(log w), about KL(q‖p); not there where a pickle of 0.2 is read, as are the draws
    draws: int = 1024

    @property
    def worth(self) -> str:
        """What the importance weights are worth, in words."""
        return worth(self.k_hat, self.effective, self.draws)

    @classmethod
    def of(cls, log_weights: Tensor, draws: int = 0) -> Self:
        """Judge a density by its log weights (S,), whose worth is said of so many draws, or of S."""
        smooth, count = smoothed(log_weights), len(log_weights)
        nats, elbo, error = math.inf, -math.inf, math.nan
        if bool(log_weights.isfinite().all()):
            nats, elbo = 0.5 * float(log_weights.var()), float(log_weights.mean())
            error = float(log_weights.std()) / math.sqrt(count)
        effective = (draws or count) / count * float(smooth.effective)
        evidence = float(log_weights.logsumexp(0)) - math.log(count)
        return cls(elbo, error, evidence, effective, float(smooth.k_hat), nats, draws or count)


class FromQ:
    """The `Quality` of draws of q in pickled verdicts of 0.2, by these four numbers."""

    def __new__(cls, k_hat: float, effective: float, nats: float, elbo: float) -> Any:
        """Make the `Quality`."""
        return Quality(elbo, math.nan, math.nan, effective, k_hat, nats, 0)


class Weights(NamedTuple):
    """The logarithms of importance weights before they are smoothed, of which the exponentials have the mean one."""

    from_q: Tensor  # at draws of q, (S/2,)
    corrected: Tensor  # at draws of the wider proposal, (S,)


class Sampled(NamedTuple):
    """Both, from one set of draws."""

    corrected: Corrected
    from_q: Quality
    draws: int
    weights: Weights | None = None
    heaviest: Tensor | None = None  # draws of the largest weights, far from one another, (K, D)


class Proposal:
    """The mixture, in the frame θ = m + C x of q."""

    dof = 3.0  # of the t distributions
    floor = 0.1  # of the eigenvalues of I - M: about three times as wide
    heavy = 4  # directions with heavy tails

    def __init__(self, q: Gaussian, M: Tensor | None) -> None:
        self.q, self.dim = q, q.dim
        self.basis: Tensor | None = None  # columns are directions
        self.scale = torch.ones_like(q.mean_probe.detach())
        if M is not None:
            values, self.basis, _ = eigh(M)
            self.scale = (1 - values).clamp(self.floor, 1.0).rsqrt()
        self.top = torch.arange(self.dim, device=self.scale.device) >= self.dim - self.heavy  # eigenvalues rise

    @classmethod
    def stretch(cls, count: int, generator: torch.Generator) -> Tensor:
        """Draw what makes normal noise that of a t distribution, (S, 1), in float64 on the CPU."""
        shape = torch.full((count, 1), 0.5 * cls.dof, dtype=torch.float64, device="cpu")
        return (0.5 * cls.dof / torch._standard_gamma(shape, generator=generator)).sqrt()

    @classmethod
    def student(cls, square: Tensor, dim: int) -> Tensor:
        """The log density of a t distribution where the squared distance from its middle is so large."""
        size = math.lgamma(0.5 * (cls.dof + dim)) - math.lgamma(0.5 * cls.dof) - 0.5 * dim * math.log(cls.dof * math.pi)
        return size - 0.5 * (cls.dof + dim) * torch.log1p(square / cls.dof)

    def draws(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw θ and x, (S, D) each."""
        x, frame = self.sample(count, generator), self.q.frame()
        return frame.mean + frame.push(x), x

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw x, (S, D), its first half from q; the noise is float64 on the CPU whatever the posterior."""
        x = torch.randn(count, self.dim, generator=generator, dtype=torch.float64, device="cpu").to(self.scale)
        half, quarter = count // 2, count - count // 4
        stretch = self.stretch(count, generator).to(self.scale)
        wide = x[half:quarter] * self.scale * stretch[half:quarter]
        some = x[quarter:] * self.scale * torch.where(self.top, stretch[quarter:], 1.0)
        turned = torch.cat([wide, some])
        return torch.cat([x[:half], turned if self.basis is None else turned @ self.basis.mT])

    def log_density(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the log densities of the mixture and of q in θ, (S,) each."""
        u = (x if self.basis is None else x @ self.basis) / self.scale
        volume, square = self.scale.log().sum(), u.square()
        near = _normal(x.square().sum(-1), self.dim)
        wide = self.student(square.sum(-1), self.dim) - volume
        top, rest = square[:, self.top], square[:, ~self.top]
        some = self.student(top.sum(-1), top.shape[1]) + _normal(rest.sum(-1), rest.shape[1]) - volume
        parts = torch.stack([near + math.log(0.5), wide + math.log(0.25), some + math.log(0.25)])
        root = self.q.log_det_root()
        return parts.logsumexp(0) - root, near - root


def _normal(square: Tensor, dim: int) -> Tensor:
    """The log density of standard normal noise by its squared length."""
    return -0.5 * square - 0.5 * dim * math.log(2 * math.pi)


def weighted_moments(theta: Tensor, log_weights: Tensor, expected: Tensor, doubtful: int = 16) -> Corrected:
    """Moments by draws (S, D) with smoothed weights; their errors by the delta method, the weights as if given."""
    smooth = smoothed(log_weights)
    w, draws = smooth.log_weights.exp(), theta.double()
    mean = w @ draws
    deviation = draws - mean
    sd = (w @ deviation.square()).sqrt()
    mean_error = (w.square() @ deviation.square()).sqrt()
    log_sd_error = 0.5 * (w.square() @ (deviation.square() / sd.square() - 1).square()).sqrt()
    # weights that are well behaved do not make an average so: the terms of a variance have a k̂ of their own, above 0.5
    # of which its error has no bound (Vehtari et al. 2024, section 2.4)
    farthest = (sd / expected.double()).log().abs().nan_to_num(0.0).topk(min(doubtful, len(sd))).indices
    own = torch.full_like(sd, torch.nan)
    own[farthest] = smoothed(log_weights.double()[:, None] + deviation[:, farthest].square().log()).k_hat
    skewness = w @ (deviation / sd).pow(3)
    quality = float(smooth.k_hat), float(smooth.effective)
    evidence = float(log_weights.double().logsumexp(0)) - math.log(len(log_weights))
    mean, sd, mean_error, log_sd_error, own, skewness = (
        part.to(theta) for part in (mean, sd, mean_error, log_sd_error, own, skewness)
    )
    return Corrected(mean, sd, mean_error, log_sd_error, *quality, own, skewness, evidence)


@torch.no_grad()
def corrected_moments(
    q: Gaussian,
    target: Target,
    M: Tensor | None = None,  # (D, D)
    *,
    num_samples: int = 4096,
    seed: int = 0,
    over: Callable[[], bool] = lambda: False,
) -> Sampled | None:
    """Means and standard deviations of p^(1/γ) by smoothed importance weights, from values of the log joint."""
    proposal = Proposal(q, M)
    theta, x = proposal.draws(num_samples, torch.Generator().manual_seed(seed))
    parts = []
    for part in theta.split(1024):
        if over():
            return None
        parts.append(target.log_joint(part))
    log_joint = torch.cat(parts) / target.temperature
    mixture, own = proposal.log_density(x)
    if float(log_joint.isnan().double().mean()) <= FAILING:  # the posterior is cut there, as in a fit
        log_joint = log_joint.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    if bool(log_joint.isnan().any()) or not bool((log_joint < math.inf).all() & log_joint.isfinite().any()):
        return None
    found = weigh(target.outward(theta), log_joint, own, mixture, q.stddev)
    return found._replace(heaviest=theta[heaviest(x, log_joint - mixture)])


def weigh(theta: Tensor, log_joint: Tensor, own: Tensor, wide: Tensor, expected: Tensor) -> Sampled:
    """What draws of a wider proposal, the first half of them q's own, say by their log joint and both densities."""
    alone, every = (log_joint - own)[: len(theta) // 2], log_joint - wide
    scaled = Weights(*((part - part.logsumexp(0) + math.log(len(part))).cpu() for part in (alone, every)))
    return Sampled(weighted_moments(theta, every, expected), Quality.of(alone), len(theta), scaled)


def heaviest(x: Tensor, log_weights: Tensor, most: int = 4, among: int = 64) -> Tensor:
    """Choose up to four draws (S, D) of q's frame with large weights, each as far from the others as draws of q are."""
    first = log_weights.argsort(descending=True)[:among]
    apart = torch.cdist(x[first], x[first]) >= max(2.0, math.sqrt(x.shape[1]))
    rows, kept = apart.tolist(), list[int]()
    for k, row in enumerate(rows):
        if len(kept) < most and all(row[j] for j in kept):
            kept.append(k)
    return first[kept]
