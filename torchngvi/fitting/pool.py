"""Every gradient used again: a regression over the draws of many Gaussians, weighted by how likely q is to make them.

Draws θ_s that were made from q_1 .. q_K, n_k of each, stand for draws of another q with the weights of a mixture
(Veach and Guibas 1995; adaptive multiple importance sampling, Cornuet et al. 2012),

    w_s ∝ q(θ_s) / Σ_k n_k q_k(θ_s),        z_s = C⁻¹(θ_s - m),        r_s = Cᵀ∇ℓ(θ_s) - γ z_s,

and by Stein's identity a and P = W - γI are the coefficients of r on (1, z), here of the weighted regression with P
symmetric.  It is exact for a quadratic ℓ, whatever the draws.  With G the weighted scatter of z,

    G P + P G = Σ_s w_s (z_s r_sᵀ + r_s z_sᵀ)        about the weighted means,        a = mean r - P mean z.

The standard error is that of the weighted residuals, by antithetic pairs, with the degrees of freedom taken off.
"""

from typing import NamedTuple, final

import torch
from torch import Tensor

from torchngvi.interfaces import Coordinates, Cost, Estimator, Expectation, Framed, Posterior, Target
from torchngvi.numerics.linalg import eigh
from torchngvi.posteriors.gaussian import Gaussian


class Lot(NamedTuple):
    """The draws of one Gaussian, the second half of which mirrors the first, with what the log joint is there."""

    mean: Tensor  # m_k, (D,)
    whitener: Tensor  # C_k⁻ᵀ, (D, D)
    log_det: Tensor  # log|det C_k|, 0-d
    theta: Tensor  # (n, D)
    energy: Tensor  # ℓ, (n,)
    gradient: Tensor  # ∇ℓ, (n, D)

    @classmethod
    def of(cls, q: Gaussian, theta: Tensor, energy: Tensor, gradient: Tensor) -> "Lot":
        """The draws of q as it is, in antithetic pairs."""
        mean = q.frame().mean
        whitener = q.whiten(torch.eye(q.dim, dtype=mean.dtype, device=mean.device))
        return cls(mean.clone(), whitener, q.log_det_root().clone(), theta, energy, gradient)

    @property
    def finite(self) -> bool:
        """Whether the log joint and its gradient are finite at all draws."""
        return bool(self.energy.isfinite().all() & self.gradient.isfinite().all())

    def log_density(self, theta: Tensor) -> Tensor:
        """n q_k at (S, D), without the constant (2π)^(-D/2): (S,)."""
        z = (theta - self.mean) @ self.whitener
        return torch.log(torch.full_like(self.log_det, len(self.theta))) - 0.5 * z.square().sum(-1) - self.log_det


class Pool:
    """All draws so far.

    Attributes:
        lots: one a Gaussian.
    """

    def __init__(self, lots: list[Lot]) -> None:
        self.lots = lots
        self.theta, self.energy, self.gradient = (
            torch.cat([_by_pairs(getattr(lot, name)) for lot in lots]) for name in ("theta", "energy", "gradient")
        )
        self.log_mixture = torch.stack([lot.log_density(self.theta) for lot in lots]).logsumexp(0)

    def __len__(self) -> int:
        return len(self.theta)


def _by_pairs(x: Tensor) -> Tensor:
    """Mirror images beside each other."""
    return torch.stack(x.chunk(2), 1).flatten(0, 1)


class _Regression(NamedTuple):
    """What the draws of a pool tell at one q."""

    coordinates: Coordinates  # of q
    effective: Tensor  # number of draws, 0-d
    expectation: Expectation


@final
class PooledAverage(Estimator):
    """a, W and noise² at q by the weighted regression over a pool, without a new gradient."""

    comparable = True
    unbiased = False
    needs = Target

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._seen: list[_Regression] = []

    def effective(self, q: Gaussian, target: Target) -> Tensor:
        """The effective number of draws at q, 0-d."""
        return self._at(q, target).effective

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], a, W and noise² at q."""
        assert isinstance(q, Gaussian)
        return self._at(q, target).expectation

    def _at(self, q: Gaussian, target: Target) -> "_Regression":
        """The regression at q, which was made already where q is one of the last two."""
        here = q.snapshot()
        for seen in self._seen:
            if all(map(torch.equal, seen.coordinates, here)):
                return seen
        self._seen = [*self._seen[-1:], _Regression(here, *self._regression(q, target))]
        return self._seen[-1]

    def _regression(self, q: Gaussian, target: Target) -> tuple[Tensor, Expectation]:
        """The effective number of draws, and the estimate."""
        pool, gamma = self.pool, target.temperature
        z = q.whiten(pool.theta - q.frame().mean)
        w = (-0.5 * z.square().sum(-1) - pool.log_mixture).softmax(0)
        r = q.frame().pull(pool.gradient) - gamma * z
        mean_z, mean_r = w @ z, w @ r
        near, share = z - mean_z, w[:, None] * (z - mean_z)
        moment = share.mT @ (r - mean_r)
        P = _symmetric_solution(share.mT @ near, moment + moment.mT)
        a = mean_r - P @ mean_z
        eye = torch.eye(q.dim, dtype=P.dtype, device=P.device)
        # ℓ less its quadratic part, whose mean is ½ tr W
        W = P + gamma * eye
        value = w @ (pool.energy - z @ a - 0.5 * (z @ W * z).sum(-1)) + 0.5 * W.diagonal().sum()
        effective = 1 / w.square().sum()
        parameters = 1 + 0.5 * (q.dim + 1)  # a coordinate
        lost = effective / torch.maximum(effective - parameters, 0.25 * effective)
        noise2 = lost * _noise2(z, w[:, None] * (r - a - z @ P))
        packet = Framed(a, q.structure.from_dense(W))
        return effective, Expectation(value, packet, gamma, target.comparable, Cost(0, 0), noise2)


def _symmetric_solution(G: Tensor, B: Tensor) -> Tensor:
    """The symmetric X with G X + X G = B; along what no draw has seen it is nought, and NaN where G is not finite."""
    values, basis, ok = eigh(G)
    basis = torch.where(ok, basis, torch.nan)
    sums = values + values[:, None]
    seen = sums > 1e3 * torch.finfo(G.dtype).eps * values[-1]
    return basis @ torch.where(seen, (basis.mT @ B @ basis) / torch.where(seen, sums, 1.0), 0.0) @ basis.mT


def _noise2(
    z: Tensor,  # (S, D), mirror images beside each other
    e: Tensor,  # weighted residuals, (S, D)
) -> Tensor:
    """Σ over pairs of |Σ e|² + ½‖Σ ½(e zᵀ + z eᵀ)‖²_F, 0-d."""
    e, z = e.unflatten(0, (-1, 2)), z.unflatten(0, (-1, 2))
    ee, zz, ez = e @ e.mT, z @ z.mT, e @ z.mT  # (pairs, 2, 2)
    return e.sum(1).square().sum() + 0.25 * ((ee * zz).sum() + (ez * ez.mT).sum())
