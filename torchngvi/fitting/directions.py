"""Directions along which a posterior is skewed, as seen from the best Gaussian: where curves inside its root bend.

At the optimum among Gaussians the first skewness is that of the tensor of third derivatives,

    T_ijk = E[∂_ijk ℓ(m + Cz)]/γ = E[(Cᵀ∇ℓ)_i (z_jz_k - δ_jk)]/γ        (Stein)

and a curve z + ε(z² - 1) along a unit vector u gains about T(u, u, u)²/12 nats.  The rotation Q with the largest
Σ_i T(q_i, q_i, q_i)² is found by plane rotations, whose best angles are in closed form (Comon 1994): along one it is
a + b cos 4θ + c sin 4θ.
"""

import math

import torch
from torch import Tensor

from torchngvi.derivatives import energy_and_gradient
from torchngvi.expectations import Fixed
from torchngvi.interfaces import Target
from torchngvi.posteriors.gaussian import Gaussian

WIDEST = 64  # coordinates up to which T, of D³ numbers, is made
_DRAWS, _EACH, _MOST = 4096, 128, 16_384  # draws, as many a coordinate, and no more
_SEEN = 8.0  # variances of an entry of T by which a rotation has to gain
_NOTHING = 1e-4  # a gain of ΣT² that is worth 1e-5 nats
_SWEEPS = 30
_STILL = 1e-6  # angle at which a rotation leaves all as it is


@torch.no_grad()
def skewed_directions(q: Gaussian, target: Target, seed: int) -> Tensor:
    """Find the rotation whose columns are the directions of the largest skewness, in the frame of q.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    >>> target = LogJoint(lambda theta: (0.5 * (theta @ turn) - (0.5 * (theta @ turn)).exp()).sum(-1))
    >>> found = skewed_directions(CholeskyGaussian(2, dtype=torch.float64), target, seed=0)
    >>> bool((found.mT @ turn).abs().amax(0).min() > 0.999)
    True
    """
    frame = q.frame()
    z = Fixed(min(max(_DRAWS, _EACH * q.dim), _MOST), seed)(frame.mean)
    with torch.enable_grad():
        _, force = energy_and_gradient(target, frame.mean + frame.push(z))
    pulled = (force / (target.temperature or 1.0)) @ frame.dense()  # (Cᵀ∇ℓ)ᵀ, (S, D)
    there = pulled.isfinite().all(-1)
    z, pulled = z[there].double(), pulled[there].double()
    eye = torch.eye(q.dim, dtype=z.dtype, device=z.device)
    T = torch.einsum("si,sj,sk->ijk", pulled, z, z) / len(z) - pulled.mean(0)[:, None, None] * eye
    T = (T + T.permute(1, 2, 0) + T.permute(2, 0, 1)) / 3
    own = pulled * (z.square() - 1)  # of which T_iii is the mean, half of it over z and half over -z
    noise = float(own.unflatten(0, (2, -1)).mean(0).var(0).mean()) / (len(z) / 2) if bool(there.all()) else 0.0
    return rotated_apart(T, max(_SEEN * noise, _NOTHING)).to(q.dtype)


def rotated_apart(
    T: Tensor,  # (D, D, D), symmetric
    least: float = 0.0,
) -> Tensor:
    """Find the rotation Q with the largest Σ_i T(q_i, q_i, q_i)², by plane rotations in turn.

    >>> Q = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).double())[0]
    >>> T = torch.einsum("ia,ja,ka,a->ijk", Q, Q, Q, torch.tensor([3.0, 2.0, 1.0]).double())
    >>> bool(((rotated_apart(T).mT @ Q).abs().amax(0) - 1).abs().max() < 1e-9)
    True
    """
    dim, T = len(T), T.clone()
    turned = torch.zeros(dim, dim, dtype=torch.bool, device="cpu")  # planes in which there was something to gain
    Q = torch.eye(dim, dtype=T.dtype, device=T.device)
    for _ in range(_SWEEPS):
        largest = 0.0
        for i in range(dim):
            for j in range(i + 1, dim):
                angle, gain = _best(*(float(x) for x in (T[i, i, i], T[i, i, j], T[i, j, j], T[j, j, j])))
                if abs(angle) < _STILL or (not turned[i, j] and gain < least):
                    continue
                turned[i, j] = True
                largest = max(largest, abs(angle))
                c, s = math.cos(angle), math.sin(angle)
                for axis in range(3):
                    first, second = T.select(axis, i).clone(), T.select(axis, j).clone()
                    T.select(axis, i).copy_(c * first + s * second)
                    T.select(axis, j).copy_(c * second - s * first)
                first, second = Q[:, i].clone(), Q[:, j].clone()
                Q[:, i], Q[:, j] = c * first + s * second, c * second - s * first
        if largest < _STILL:
            break
    return Q


def _best(a: float, b: float, c: float, d: float) -> tuple[float, float]:
    """The angle in (-π/4, π/4] at which T_iii² + T_jjj² = p + q cos 4θ + r sin 4θ is largest, and by how much."""

    def value(angle: float) -> float:
        x, y = math.cos(angle), math.sin(angle)
        first = a * x**3 + 3 * b * x * x * y + 3 * c * x * y * y + d * y**3
        second = -a * y**3 + 3 * b * y * y * x - 3 * c * y * x * x + d * x**3
        return first * first + second * second

    here, middle, other = value(0.0), value(math.pi / 8), value(math.pi / 4)
    mean = 0.5 * (here + other)
    if max(abs(here - mean), abs(middle - mean)) <= 1e-12 * max(mean, 1e-300):
        return 0.0, 0.0
    return 0.25 * math.atan2(middle - mean, here - mean), math.hypot(middle - mean, here - mean) - (here - mean)
