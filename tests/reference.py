"""A slow and obvious reference for Gaussian variational inference; it imports nothing of the library.

Everything is written for one posterior, without batches, from definitions: Fisher matrices are
Hessians of the Kullback-Leibler divergence by autograd, expectations are sums over a dense grid,
and update rules are the printed algorithms with explicit inverses.

Conventions: q = N(m, V), S = V⁻¹, V = C Cᵀ, ℓ = -log joint, L = E_q[ℓ] - γ entropy(q).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def gaussian_kl(m: Tensor, V: Tensor, m2: Tensor, V2: Tensor) -> Tensor:
    """KL(N(m, V) ‖ N(m2, V2))."""
    shift = m - m2
    trace = torch.trace(torch.linalg.solve(V2, V))
    square = shift @ torch.linalg.solve(V2, shift)
    return 0.5 * (trace + square - len(m) + torch.logdet(V2) - torch.logdet(V))


def gaussian_entropy(V: Tensor) -> Tensor:
    """½ log det(2πe V)."""
    return 0.5 * torch.logdet(2 * math.pi * math.e * V)


def tril_half(A: Tensor) -> Tensor:
    """The strictly lower entries and half the diagonal (Kumar et al., Eq 13)."""
    out = torch.zeros_like(A)
    for i in range(A.shape[0]):
        for j in range(i):
            out[i, j] = A[i, j]
        out[i, i] = A[i, i] / 2
    return out


def vech(A: Tensor) -> Tensor:
    """The lower triangle, column by column."""
    columns, rows = torch.triu_indices(len(A), len(A))
    return A[rows, columns]


def unvech(entries: Tensor) -> Tensor:
    """The lower triangular matrix with these entries."""
    dim = round((math.sqrt(8 * len(entries) + 1) - 1) / 2)
    columns, rows = torch.triu_indices(dim, dim)
    return entries.new_zeros(dim, dim).index_put((rows, columns), entries)


def symmetric(entries: Tensor) -> Tensor:
    """The symmetric matrix with these lower entries."""
    lower = unvech(entries)
    return lower + lower.tril(-1).mT


def vec(A: Tensor) -> Tensor:
    """The columns, one below the other."""
    return A.mT.reshape(-1)


def linear_map(function: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """The matrix of a linear map of vectors of this size."""
    return torch.stack([function(unit) for unit in torch.eye(size, dtype=torch.float64)], 1)


def commutation(dim: int) -> Tensor:
    """K vec A = vec Aᵀ."""
    return linear_map(lambda x: vec(x.reshape(dim, dim)), dim * dim)  # x = vec A holds the rows of Aᵀ


def elimination(dim: int) -> Tensor:
    """L vec A = vech A."""
    return linear_map(lambda x: vech(x.reshape(dim, dim).mT), dim * dim)


def duplication(dim: int) -> Tensor:
    """D vech A = vec A for a symmetric A."""
    return linear_map(lambda x: vec(symmetric(x)), dim * (dim + 1) // 2)


def kron(A: Tensor, B: Tensor) -> Tensor:
    """A ⊗ B."""
    return torch.einsum("ij,kl->ikjl", A, B).reshape(len(A) * len(B), -1)


def root_fisher(root: Tensor) -> Tensor:
    """I(Λ) = L{(Λ⁻¹ ⊗ Λ⁻ᵀ)K + I ⊗ Λ⁻ᵀΛ⁻¹}Lᵀ (Tan, Lemma 1)."""
    dim, inverse = len(root), torch.linalg.inv(root)
    L, eye = elimination(dim), torch.eye(dim, dtype=root.dtype)
    first = kron(inverse, inverse.mT) @ commutation(dim)
    return L @ (first + kron(eye, inverse.mT @ inverse)) @ L.mT


def root_fisher_inverse(root: Tensor) -> Tensor:
    """I(Λ)⁻¹ = ½ L(I ⊗ Λ)Lᵀ (LNLᵀ)⁻¹ L(I ⊗ Λᵀ)Lᵀ, N = (K + I)/2 (Tan, Lemma 1)."""
    dim = len(root)
    L, K, eye = elimination(dim), commutation(dim), torch.eye(dim, dtype=root.dtype)
    N = 0.5 * (K + torch.eye(dim * dim, dtype=root.dtype))
    left = L @ kron(eye, root) @ L.mT
    return 0.5 * left @ torch.linalg.inv(L @ N @ L.mT) @ left.mT


@dataclass(frozen=True)
class Coordinates:
    """A flat vector λ for N(m, V), both ways."""

    flat: Callable[[Tensor, Tensor], Tensor]  # (m, V) -> λ
    moments: Callable[[Tensor], tuple[Tensor, Tensor]]  # λ -> (m, V)


def _dim_of(flat: Tensor) -> int:
    return round((-3 + math.sqrt(9 + 8 * len(flat))) / 2)  # D + D(D + 1)/2 entries


def _split(flat: Tensor) -> tuple[Tensor, Tensor]:
    return flat[: _dim_of(flat)], flat[_dim_of(flat) :]


def _mean_root(flat: Tensor) -> tuple[Tensor, Tensor]:
    m, entries = _split(flat)
    C = unvech(entries)
    return m, C @ C.mT


def _mean_covariance(flat: Tensor) -> tuple[Tensor, Tensor]:
    m, entries = _split(flat)
    return m, symmetric(entries)


def _mean_precision_root(flat: Tensor) -> tuple[Tensor, Tensor]:
    m, entries = _split(flat)
    T = unvech(entries)
    return m, torch.linalg.inv(T @ T.mT)


def _natural(flat: Tensor) -> tuple[Tensor, Tensor]:
    vector, entries = _split(flat)
    S = symmetric(entries)
    return torch.linalg.solve(S, vector), torch.linalg.inv(S)


def _log_diagonal(root: Tensor) -> Tensor:
    return root.tril(-1) + torch.diag(root.diagonal().log())


def _exp_diagonal(root: Tensor) -> Tensor:
    return root.tril(-1) + torch.diag(root.diagonal().exp())


def _mean_log_root(flat: Tensor) -> tuple[Tensor, Tensor]:
    m, entries = _split(flat)
    C = _exp_diagonal(unvech(entries))
    return m, C @ C.mT


def _mean_log_precision_root(flat: Tensor) -> tuple[Tensor, Tensor]:
    m, entries = _split(flat)
    T = _exp_diagonal(unvech(entries))
    return m, torch.linalg.inv(T @ T.mT)


def _mean_log_scale(flat: Tensor) -> tuple[Tensor, Tensor]:
    m, c = flat.chunk(2)
    return m, torch.diag((2 * c).exp())


def _mean_scale(flat: Tensor) -> tuple[Tensor, Tensor]:
    m, c = flat.chunk(2)
    return m, torch.diag(c**2)


COORDINATES = {
    "mean_root": Coordinates(lambda m, V: torch.cat([m, vech(torch.linalg.cholesky(V))]), _mean_root),
    "mean_covariance": Coordinates(lambda m, V: torch.cat([m, vech(V)]), _mean_covariance),
    "natural": Coordinates(lambda m, V: torch.cat([torch.linalg.solve(V, m), vech(torch.linalg.inv(V))]), _natural),
    "mean_precision_root": Coordinates(
        lambda m, V: torch.cat([m, vech(torch.linalg.cholesky(torch.linalg.inv(V)))]), _mean_precision_root
    ),
    "mean_log_root": Coordinates(
        lambda m, V: torch.cat([m, vech(_log_diagonal(torch.linalg.cholesky(V)))]), _mean_log_root
    ),
    "mean_log_precision_root": Coordinates(
        lambda m, V: torch.cat([m, vech(_log_diagonal(torch.linalg.cholesky(torch.linalg.inv(V))))]),
        _mean_log_precision_root,
    ),
    "mean_log_scale": Coordinates(lambda m, V: torch.cat([m, V.diagonal().log() / 2]), _mean_log_scale),
    "mean_scale": Coordinates(lambda m, V: torch.cat([m, V.diagonal().sqrt()]), _mean_scale),
}


def fisher(coordinates: Coordinates, flat: Tensor) -> Tensor:
    """F: the Hessian of KL(q_λ ‖ q_λ') in λ' at λ' = λ."""
    return _fisher(coordinates, tuple(flat.tolist()))


@functools.cache
def _fisher(coordinates: Coordinates, entries: tuple[float, ...]) -> Tensor:
    flat = torch.tensor(entries, dtype=torch.float64)
    here = coordinates.moments(flat)
    return torch.autograd.functional.hessian(lambda there: gaussian_kl(*here, *coordinates.moments(there)), flat)


def gradient(coordinates: Coordinates, flat: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """∂L/∂λ for a loss of (m, V)."""
    return torch.func.grad(lambda x: loss(*coordinates.moments(x)))(flat)


def natural_gradient(coordinates: Coordinates, flat: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """F⁻¹ ∂L/∂λ, by a linear solve."""
    return torch.linalg.solve(fisher(coordinates, flat), gradient(coordinates, flat, loss))


def vn(m: Tensor, V: Tensor, g: Tensor, H: Tensor, rho: float, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """VN (Kumar et al., Eq 7): S' = (1 - γρ) S + ρH,  m' = m - ρ S'⁻¹ g, the new S and the old g."""
    S = (1 - gamma * rho) * torch.linalg.inv(V) + rho * H
    return m - rho * torch.linalg.solve(S, g), torch.linalg.inv(S)


def srvn(m: Tensor, C: Tensor, g: Tensor, H: Tensor, rho: float, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """SR-VN, Algorithm 1: C' = C - ρ C tril½[CᵀHC - γI],  m' = m - ρ C (Cᵀg), the old C in both."""
    P = C.mT @ H @ C - gamma * torch.eye(len(m), dtype=m.dtype)
    return m - rho * C @ (C.mT @ g), C - rho * C @ tril_half(P)


def tan(m: Tensor, C: Tensor, grad_m: Tensor, G: Tensor, rho: float) -> tuple[Tensor, Tensor]:
    """Tan's Theorem 2 for descent: m' = m - ρ CCᵀ ∂L/∂m,  C' = C - ρ C tril½[Cᵀ tril(G)], G = ∂L/∂C."""
    return m - rho * C @ C.mT @ grad_m, C - rho * C @ tril_half(C.mT @ torch.tril(G))


@dataclass(frozen=True)
class TanStep:
    """One draw of an algorithm of Tan: the printed lines, with explicit inverses."""

    form: str  # "C" or "T"
    natural: bool
    log_diagonal: bool = False

    def gradient(self, root: Tensor, z: Tensor, mean: Tensor, slope: Callable[[Tensor], Tensor]) -> tuple:
        """∇h at the draw, the lower part of G, and the step (mean, root) of ρ = 1; slope is ∇ log p(y, ·)."""
        inverse = torch.linalg.inv(root)
        if self.form == "C":
            grad = slope(root @ z + mean) + inverse.mT @ z
            G = torch.outer(grad, z).tril()
            mean_step = root @ root.mT @ grad if self.natural else grad
        else:
            grad = slope(inverse.mT @ z + mean) + root @ z
            v = inverse @ grad
            G = torch.outer(-inverse.mT @ z, v).tril()
            mean_step = inverse.mT @ v if self.natural else grad
        root_step = root @ tril_half(root.mT @ G) if self.natural else G
        if self.log_diagonal:
            scale = 1 / root.diagonal() if self.natural else root.diagonal()
            R = torch.ones_like(root).tril(-1) + torch.diag(scale)
            root_step = R * root_step
        return grad, G, mean_step, root_step

    def applied(self, mean: Tensor, root: Tensor, mean_step: Tensor, root_step: Tensor) -> tuple[Tensor, Tensor]:
        """The step taken."""
        if self.log_diagonal:
            return mean + mean_step, _exp_diagonal(_log_diagonal(root) + root_step)
        return mean + mean_step, root + root_step


def logit_energy(eta: Tensor, y: Tensor) -> Tensor:
    """-log of 1/(1 + exp(-yη)), y = ±1."""
    return torch.logaddexp(torch.zeros_like(eta), -y * eta)


def probit_energy(eta: Tensor, y: Tensor) -> Tensor:
    """-log Φ(yη), y = ±1, for yη above -37."""
    return -torch.log(0.5 * torch.erfc(-y * eta / math.sqrt(2)))


def poisson_energy(eta: Tensor, y: Tensor) -> Tensor:
    """-log Poisson(y | exp η)."""
    return torch.exp(eta) - y * eta + torch.lgamma(y + 1)


def gaussian_energy(noise: float) -> Callable[[Tensor, Tensor], Tensor]:
    """-log N(y | η, noise²)."""
    return lambda eta, y: 0.5 * (y - eta) ** 2 / noise**2 + 0.5 * math.log(2 * math.pi * noise**2)


def normal_mean(function: Callable[[Tensor], Tensor], e: Tensor, v: Tensor) -> Tensor:
    """E[f(x)] under N(e, v), v of order one, entry by entry: a trapezoid rule in z with step 0.1, |z| ≤ 10."""
    z = torch.arange(-100, 101, dtype=e.dtype) * 0.1
    weights = torch.exp(-0.5 * z**2)
    return function(e[..., None] + v.sqrt()[..., None] * z) @ (weights / weights.sum())


@dataclass(frozen=True)
class Problem:
    """A generalised linear model for one posterior."""

    X: Tensor  # (N, D)
    y: Tensor  # (N,)
    energy: Callable[[Tensor, Tensor], Tensor]
    weights: Tensor  # (N,)
    offset: Tensor  # (N,)
    prior_mean: Tensor  # (D,)
    prior_precision: Tensor  # (D,)
    temperature: float

    def expected_energy(self, m: Tensor, V: Tensor) -> Tensor:
        """E_q[Σ w f(xᵀθ + o, y)] - γ E_q[log prior]."""
        e = self.X @ m + self.offset
        v = ((self.X @ V) * self.X).sum(-1)
        data = (self.weights * normal_mean(lambda eta: self.energy(eta, self.y[:, None]), e, v)).sum()
        square = ((m - self.prior_mean) ** 2 + V.diagonal()) * self.prior_precision
        prior = 0.5 * (square - torch.log(self.prior_precision) + math.log(2 * math.pi)).sum()
        return data + self.temperature * prior

    def loss(self, m: Tensor, V: Tensor) -> Tensor:
        """L = E_q[ℓ] - γ entropy."""
        return self.expected_energy(m, V) - self.temperature * gaussian_entropy(V)

    def derivative(self, m: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
        """g = ∂E_q[ℓ]/∂m and H = 2 ∂E_q[ℓ]/∂V, by autograd."""
        m, V = m.detach().requires_grad_(), V.detach().requires_grad_()
        g, half = torch.autograd.grad(self.expected_energy(m, V), (m, V))
        return g, half + half.mT


def stationary_point(problem: Problem, kept: Callable[[Tensor], Tensor] = lambda H: H) -> tuple[Tensor, Tensor]:
    """(m, V) with g = 0 and γ V⁻¹ = H (Kumar et al., Eq 22), or what is kept of H, by damped VN."""
    dim = problem.X.shape[1]
    eye = torch.eye(dim, dtype=problem.X.dtype)
    m, V = torch.zeros_like(eye[0]), eye
    for iteration in range(400):
        g, H = problem.derivative(m, V)
        H = kept(H)
        C = torch.linalg.cholesky(V)
        size = max(float((C.mT @ g).abs().max()), float((C.mT @ H @ C - problem.temperature * eye).abs().max()))
        if size < 2e-14 * max(1.0, float(H.abs().max())):
            return m, V
        m, V = vn(m, V, g, H, (0.2 if iteration < 20 else 0.6) / problem.temperature, problem.temperature)
    raise AssertionError(f"the reference did not converge: {size:.1e}")


def _panels(e: float, s: float) -> np.ndarray:
    """Breakpoints of z in [-12, 12]: half units of z, of x = e + s z near the origin, powers of two beyond."""
    near = np.arange(-60.0, 61.0) / 2
    far = 30.0 * 2.0 ** np.arange(1, 20)
    points = np.concatenate([np.arange(-24, 25) / 2, *((x - e) / s for x in (near, far, -far))])
    return np.unique(np.clip(points, -12, 12))


def precise_mean(function: Callable[[np.ndarray], np.ndarray], e: float, s: float, nodes: int = 24) -> float:
    """E[f(x)] under N(e, s²), for an f that bends near the origin: Gauss-Legendre on each panel."""
    if s == 0:
        return float(function(np.array([e]))[0])
    x, w = np.polynomial.legendre.leggauss(nodes)
    edges = _panels(e, s)
    half, middle = np.diff(edges)[:, None] / 2, (edges[1:] + edges[:-1])[:, None] / 2
    z = middle + half * x
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return math.fsum((w * half * density * function(e + s * z)).ravel())
