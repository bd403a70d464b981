"""Moments of the density itself, by importance sampling from a proposal that is wider than q where linear response is.

    ½ q  +  ¼ t_3 with the covariance by linear response  +  ¼ the same with heavy tails in its widest directions only

Half of the draws are those of q, so that no weight exceeds twice what it would be under q (a defensive mixture:
Hesterberg 1995, Technometrics 37), and an exact q keeps half of its draws at the least.  The wide parts reach what q
has missed; in many dimensions a t distribution is nowhere near where most of the mass is, and only the last part is
of use.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.diagnostics.psis import smoothed
from torchngvi.interfaces import Target
from torchngvi.models.guarded import FAILING
from torchngvi.numerics.linalg import eigh
from torchngvi.posteriors.gaussian import Gaussian

_DOF = 3.0  # of the t distributions
_FLOOR = 0.1  # of the eigenvalues of I - M: about three times as wide
_TOP = 4  # directions with heavy tails
_OWN = 16  # coordinates whose variances have a k̂ of their own
_AT_ONCE = 1024  # draws a call of the log joint
_HEAVIEST, _AMONG, _APART = 4, 64, 2.0  # draws that are kept for their weights, of so many, in sds of q


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


class FromQ(NamedTuple):
    """What the draws of q alone say."""

    k_hat: float
    effective: float
    nats: float  # ½ var(log w), about KL(q‖p)
    elbo: float  # mean of the log weights


class Weights(NamedTuple):
    """The logarithms of importance weights before they are smoothed, of which the exponentials have the mean one."""

    from_q: Tensor  # at draws of q, (S/2,)
    corrected: Tensor  # at draws of the wider proposal, (S,)


class Sampled(NamedTuple):
    """Both, from one set of draws."""

    corrected: Corrected
    from_q: FromQ
    draws: int
    weights: Weights | None = None
    heaviest: Tensor | None = None  # draws of the largest weights, far from one another, (K, D)


class Proposal:
    """The mixture, in the frame θ = m + C x of q."""

    def __init__(self, q: Gaussian, M: Tensor | None) -> None:
        self.q, self.dim = q, q.dim
        self.basis: Tensor | None = None  # columns are directions
        self.scale = torch.ones_like(q.mean_probe.detach())
        if M is not None:
            values, self.basis, _ = eigh(M)
            self.scale = (1 - values).clamp(_FLOOR, 1.0).rsqrt()
        self.top = torch.arange(self.dim, device=self.scale.device) >= self.dim - _TOP  # eigenvalues rise

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw x, (S, D), its first half from q; the noise is float64 on the CPU whatever the posterior."""
        normal = torch.randn(count, self.dim, generator=generator, dtype=torch.float64, device="cpu")
        half, quarter = count // 2, count - count // 4
        gamma = torch._standard_gamma(
            torch.full((count,), 0.5 * _DOF, dtype=torch.float64, device="cpu"), generator=generator
        )
        stretch = (0.5 * _DOF / gamma).sqrt()[:, None].to(self.scale)
        x = normal.to(self.scale)
        wide = x[half:quarter] * self.scale * stretch[half:quarter]
        some = x[quarter:] * self.scale * torch.where(self.top, stretch[quarter:], 1.0)
        turned = torch.cat([wide, some])
        return torch.cat([x[:half], turned if self.basis is None else turned @ self.basis.mT])

    def log_density(
        self,
        x: Tensor,  # (S, D)
    ) -> tuple[Tensor, Tensor]:
        """Compute the log densities of the mixture and of q in θ, (S,) each."""
        u = (x if self.basis is None else x @ self.basis) / self.scale
        volume, square = self.scale.log().sum(), u.square()
        near = self._normal(x.square().sum(-1), self.dim)
        wide = self._student(square.sum(-1), self.dim) - volume
        top, rest = square[:, self.top], square[:, ~self.top]
        some = self._student(top.sum(-1), top.shape[1]) + self._normal(rest.sum(-1), rest.shape[1]) - volume
        parts = torch.stack([near + math.log(0.5), wide + math.log(0.25), some + math.log(0.25)])
        root = self.q.log_det_root()
        return parts.logsumexp(0) - root, near - root

    @staticmethod
    def _normal(square: Tensor, dim: int) -> Tensor:
        return -0.5 * square - 0.5 * dim * math.log(2 * math.pi)

    @staticmethod
    def _student(square: Tensor, dim: int) -> Tensor:
        size = math.lgamma(0.5 * (_DOF + dim)) - math.lgamma(0.5 * _DOF) - 0.5 * dim * math.log(_DOF * math.pi)
        return size - 0.5 * (_DOF + dim) * torch.log1p(square / _DOF)


def weighted_moments(
    theta: Tensor,  # (S, D)
    log_weights: Tensor,  # (S,)
    expected: Tensor,  # sd of q, (D,)
) -> Corrected:
    """Moments by draws with smoothed weights; their errors by the delta method, the weights as if they were given.

    Weights that are well behaved do not make an average so: of the terms w (θ_k - m_k)² of a variance a k̂ of their own
    is taken where that variance is farthest from what is expected (Vehtari et al. 2024, section 2.4).  Above 0.5 the
    error of the variance has no bound, and there may be more than was found.
    """
    smooth = smoothed(log_weights)
    w, draws = smooth.log_weights.exp(), theta.double()
    mean = w @ draws
    deviation = draws - mean
    sd = (w @ deviation.square()).sqrt()
    mean_error = (w.square() @ deviation.square()).sqrt()
    log_sd_error = 0.5 * (w.square() @ (deviation.square() / sd.square() - 1).square()).sqrt()
    doubtful = (sd / expected.double()).log().abs().nan_to_num(0.0).topk(min(_OWN, len(sd))).indices
    own = torch.full_like(sd, torch.nan)
    own[doubtful] = smoothed(log_weights.double()[:, None] + deviation[:, doubtful].square().log()).k_hat
    skewness = w @ (deviation / sd).pow(3)
    mean, sd, mean_error, log_sd_error, own = (part.to(theta) for part in (mean, sd, mean_error, log_sd_error, own))
    quality = float(smooth.k_hat), float(smooth.effective)
    evidence = float(log_weights.double().logsumexp(0)) - math.log(len(log_weights))
    return Corrected(mean, sd, mean_error, log_sd_error, *quality, own, skewness.to(theta), evidence)


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
    """Means and standard deviations of p^(1/γ) by smoothed importance weights, from values of the log joint.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q = CholeskyGaussian(1, dtype=torch.float64)  # too narrow
    >>> found = corrected_moments(q, LogJoint(lambda theta: -0.5 * (theta / 1.5).square().sum(-1))).corrected
    >>> abs(found.sd.item() - 1.5) < 4 * 1.5 * found.log_sd_error.item()
    True
    """
    proposal, frame = Proposal(q, M), q.frame()
    x = proposal.sample(num_samples, torch.Generator().manual_seed(seed))
    theta = frame.mean + frame.push(x)
    parts = []
    for part in theta.split(_AT_ONCE):
        if over():
            return None
        parts.append(target.log_joint(part))
    log_joint = torch.cat(parts) / target.temperature
    mixture, own = proposal.log_density(x)
    if float(log_joint.isnan().double().mean()) <= FAILING:  # the posterior is cut there, as in a fit
        log_joint = log_joint.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    if bool(log_joint.isnan().any()) or not bool((log_joint < math.inf).all() & log_joint.isfinite().any()):
        return None
    half = num_samples // 2
    weights, corrected = (log_joint - own)[:half], log_joint - mixture
    alone = smoothed(weights)
    nats = 0.5 * float(weights.var()) if bool(weights.isfinite().all()) else math.inf
    return Sampled(
        weighted_moments(target.outward(theta), corrected, q.stddev),
        FromQ(float(alone.k_hat), float(alone.effective), nats, float(weights.mean())),
        num_samples,
        Weights(_scaled(weights), _scaled(corrected)),
        theta[heaviest(x, corrected)],
    )


def heaviest(
    x: Tensor,  # in the frame of q, (S, D)
    log_weights: Tensor,  # (S,)
) -> Tensor:
    """Choose up to four draws with large weights, each as far from those before as draws of q are: indices (K,).

    >>> heaviest(torch.tensor([[0.0], [4.0], [4.1]]), torch.tensor([0.0, 1.0, 2.0])).tolist()
    [2, 0]
    """
    first = log_weights.argsort(descending=True)[:_AMONG]
    apart = torch.cdist(x[first], x[first]) >= max(_APART, math.sqrt(x.shape[1]))
    rows, kept = apart.tolist(), list[int]()
    for k, row in enumerate(rows):
        if len(kept) < _HEAVIEST and all(row[j] for j in kept):
            kept.append(k)
    return first[kept]


def _scaled(log_weights: Tensor) -> Tensor:
    """With the mean one."""
    return (log_weights - log_weights.logsumexp(0) + math.log(len(log_weights))).cpu()
