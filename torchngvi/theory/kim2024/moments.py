"""Second moments of the gradient estimators, exact for Gaussian targets, and the divergences that bound them.

For q = N(m, CCᵀ), a target N(z̄, Λ⁻¹) and A = ΛC, G = ΛC - C⁻ᵀ, h = Λ(m - z̄), with the weights v, W of the pattern,

    sticking the landing    E|g|² = Σ v_i h_i² + Σ W_ij G_ij²
    closed entropy          E|g|² = Σ v_i h_i² + Σ W_ij A_ij² - 2⟨Π[A], E⟩ + ‖E‖²_F,    E = ∇ log|det C|
    Fisher-Hyvärinen        D_F = |h|² + ‖G‖²_F,   D_F4 = D_F² + 2 tr K² + 4 hᵀKh,   K = GGᵀ

(the setting of Kim, Ma and Gardner 2024, who bound these from above.)
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_instance, read_number, read_tensor
from torchngvi.derivatives import energy_and_gradient
from torchngvi.errors import InputError
from torchngvi.expectations import Draws, Independent
from torchngvi.interfaces import Posterior, Target
from torchngvi.models.arguments import as_target, read_posterior
from torchngvi.numerics.linalg import cholesky
from torchngvi.theory.kim2024.scales import Gaussian, Gradient, Scale


class Residuals(NamedTuple):
    """The parts of r = ∇ℓ - ∇ℓ_q at z = m + Cu, which is h + Gu, and of ∇ℓ = h + Au."""

    h: Tensor  # (D,)
    A: Tensor  # (D, D)
    G: Tensor  # (D, D)


class GaussianTarget(NamedTuple):
    """A Gaussian target ℓ(z) = ½(z - z̄)ᵀΛ(z - z̄) - ½ log|Λ/2π|, for which all second moments are exact.

    >>> target = GaussianTarget(torch.zeros(2), torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
    >>> target.fisher_hyvarinen(*target.mean_field_optimum()).item()  # 2 · 0.5²
    0.5
    """

    mean: Tensor  # z̄, (D,)
    precision: Tensor  # Λ, (D, D)

    def log_joint(
        self,
        theta: Tensor,  # (*sample, D)
    ) -> Tensor:
        """The log joint -ℓ, with its constant.

        Args:
            theta: the points, (*sample, D).

        Returns:
            One value for each θ, (*sample,).

        >>> GaussianTarget(torch.zeros(1), torch.eye(1)).log_joint(torch.zeros(3, 1)).shape
        torch.Size([3])
        """
        shift = theta - self.mean
        constant = cholesky(self.precision)[0].diagonal().log().sum() - 0.5 * len(self.mean) * math.log(2 * math.pi)
        return constant - 0.5 * (shift @ self.precision * shift).sum(-1)

    def residuals(
        self,
        mean: Tensor,  # m, (D,)
        C: Tensor,  # (D, D)
    ) -> Residuals:
        """The linear parts of the residual and of the gradient under q = N(m, CCᵀ).

        Args:
            mean: m, (D,).
            C: the scale matrix, (D, D).

        Returns:
            h, A and G.
        """
        A = self.precision @ C
        inverse = torch.linalg.solve(C.mT, torch.eye(len(C), dtype=C.dtype, device=C.device))
        return Residuals(self.precision @ (mean - self.mean), A, A - inverse)

    def gradient(self, scale: Scale, mean: Tensor, C: Tensor) -> Gradient:
        """The gradient ∇F = (h, Π[A] - ∇ log|det C|), which both estimators have as their mean.

        Args:
            scale: the pattern of C.
            mean: m, (D,).
            C: the scale matrix, (D, D).

        Returns:
            The gradient in m and C.
        """
        h, A, _ = self.residuals(mean, C)
        return Gradient(h, scale.kept(A) - scale.entropy_gradient(C))

    def landing_moment(self, scale: Scale, mean: Tensor, C: Tensor) -> Tensor:
        """The second moment E|g|² of one draw that sticks the landing, for a Gaussian q, whose score is linear in u.

        Args:
            scale: the pattern of C.
            mean: m, (D,).
            C: the scale matrix, (D, D).

        Returns:
            The moment, ().
        """
        h, _, G = self.residuals(mean, C)
        return _weighted(scale, h, G, Gaussian.kurtosis)

    def closed_entropy_moment(self, scale: Scale, mean: Tensor, C: Tensor, kurtosis: float = 3.0) -> Tensor:
        """The second moment E|g|² of one draw with the closed-form entropy, for any base of that kurtosis.

        Args:
            scale: the pattern of C.
            mean: m, (D,).
            C: the scale matrix, (D, D).
            kurtosis: the fourth moment k of the base, 3 for the Gaussian.

        Returns:
            The moment, ().
        """
        h, A, _ = self.residuals(mean, C)
        E = scale.entropy_gradient(C)
        return _weighted(scale, h, A, kurtosis) - 2 * (scale.kept(A) * E).sum() + E.square().sum()

    def fisher_hyvarinen(self, mean: Tensor, C: Tensor) -> Tensor:
        """The Fisher-Hyvärinen divergence D_F = E|∇log q - ∇log π|².

        Args:
            mean: m, (D,).
            C: the scale matrix, (D, D).

        Returns:
            D_F, ().
        """
        h, _, G = self.residuals(mean, C)
        return h.square().sum() + G.square().sum()

    def fisher_hyvarinen_4(self, mean: Tensor, C: Tensor) -> Tensor:
        """The divergence of fourth order, D_F4 = E|∇log q - ∇log π|⁴.

        Args:
            mean: m, (D,).
            C: the scale matrix, (D, D).

        Returns:
            D_F4, ().
        """
        h, _, G = self.residuals(mean, C)
        K = G @ G.mT
        return (K.trace() + h.square().sum()).square() + 2 * K.square().sum() + 4 * h @ K @ h

    def mean_field_optimum(self) -> tuple[Tensor, Tensor]:
        """The optimum of mean field, m* = z̄ and C* = diag(Λ)^-½.

        The paper prints diag(Λ⁻¹)^½, which its own first-order condition contradicts.  At the optimum
        D_F = Σ_{i ≠ j} Λ_ij²/Λ_jj, 2ρ²/(1 - ρ²) for two variables of variance 1 and correlation ρ.

        Returns:
            m*, (D,), and C*, (D, D).
        """
        return self.mean, torch.diag(self.precision.diagonal().rsqrt())


def _weighted(scale: Scale, h: Tensor, G: Tensor, kurtosis: float) -> Tensor:
    v, W = (part.to(h) for part in scale.second_moment_weights(len(h), kurtosis))
    return (v * h.square()).sum() + (W * G.square()).sum()


def fisher_hyvarinen(
    q: Posterior,  # without a batch
    target: Target,
    order: int = 2,  # p, 2 or 4 in the theorems
    draws: Draws | None = None,  # 1024 independent ones
) -> Tensor:
    """The divergence E_q|∇log q - ∇log π|ᵖ by Monte Carlo.

    √D_F4 is the misspecification that keeps the variance of sticking the landing above zero; D_F is at most the second
    moment of that estimator, and at least 2μ KL(q‖π) for a μ-strongly log-concave π.

    Args:
        q: the posterior, without a batch.
        target: the target π.
        order: the power p, 2 or 4 in the theorems, at least 1.
        draws: the draws from q; 1024 independent ones by default.

    Returns:
        The mean over the draws, ().

    Raises:
        InputError: if the order is below 1.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> target = LogJoint(lambda theta: -0.5 * theta.square().sum(-1))
    >>> fisher_hyvarinen(CholeskyGaussian(2), target).item()
    0.0
    """
    read_number("order", order, "is the power of the norm", at_least=1)
    q, target = read_posterior("fisher_hyvarinen", q, target), as_target(target)
    if draws is not None:
        read_instance("draws", draws, Draws, "are draws, such as Independent(1024)")
    frame = q.frame()
    z = (draws or Independent(1024))(q.mean_probe.detach())
    theta = frame.mean + frame.push(z)
    _, gradient = energy_and_gradient(target, theta)
    with torch.enable_grad():
        copy = theta.detach().requires_grad_()
        (score,) = torch.autograd.grad(q.log_prob(copy).sum(), copy)  # type: ignore[operator]
    return (gradient + score).norm(dim=-1).pow(order).mean()


def wasserstein_to_point(
    mean: Tensor,  # m, (D,)
    C: Tensor,  # (D, D)
    point: Tensor,  # (D,)
) -> Tensor:
    """The Wasserstein distance W₂(N(m, CCᵀ), δ_point) = √(|m - point|² + ‖C‖²_F).

    It sets the noise floor of the closed entropy, where the point is the mode of the target.

    Args:
        mean: m, (D,).
        C: the scale matrix, (D, D).
        point: the point, (D,).

    Returns:
        The distance, (), in the units of θ.

    >>> wasserstein_to_point(torch.zeros(1), 2 * torch.eye(1), torch.zeros(1)).item()
    2.0
    """
    mean = read_tensor("mean", mean, shape=(None,))
    point = read_tensor("point", point, like=mean, shape=mean.shape)
    C = read_tensor("C", C, like=mean, shape=(len(mean), len(mean)))
    return ((mean - point).square().sum() + C.square().sum()).sqrt()


class EmpiricalVariance(NamedTuple):
    """The constants of E|g(λ)|² ≤ α̂|λ - λ*|² + β̂ on the points that were looked at, from `empirical_variance`.

    Attributes:
        alpha: the least α̂ that holds at all of the points.
        slope: the slope of the line through β̂ by least squares.
        beta: β̂ = E|g(λ*)|².

    >>> EmpiricalVariance(alpha=3.0, slope=2.5, beta=1.0).alpha
    3.0
    """

    alpha: float  # the least that holds at all of them
    slope: float  # by least squares
    beta: float  # E|g(λ*)|²


def empirical_variance(
    moments: Tensor,  # E|g(λ)|² at N points, (N,)
    distances2: Tensor,  # |λ - λ*|², (N,)
    at_optimum: float | Tensor,  # E|g(λ*)|²
) -> EmpiricalVariance:
    """Estimate α̂ and β̂ from second moments that were measured along a path or on a grid.

    Args:
        moments: E|g(λ)|² at N points, (N,).
        distances2: |λ - λ*|² at these points, (N,), positive.
        at_optimum: E|g(λ*)|².

    Returns:
        The constants, with the slope of a least-squares line.

    Raises:
        InputError: if the lengths differ, or a distance is not positive.

    >>> empirical_variance(torch.tensor([3.0, 5.0]), torch.tensor([1.0, 2.0]), 1.0)
    EmpiricalVariance(alpha=2.0, slope=2.0, beta=1.0)
    """
    moments = read_tensor("moments", moments)
    distances2 = read_tensor("distances2", distances2, like=moments)
    at_optimum = read_number("at_optimum", at_optimum, "is E|g(λ*)|²", at_least=0)
    if not len(moments.shape) or not moments.numel() or moments.shape != distances2.shape or moments.ndim != 1:
        raise InputError(
            "moments and distances2 are one number a point, (N,) each; got "
            f"{tuple(moments.shape)} and {tuple(distances2.shape)}."
        )
    if not bool((distances2 > 0).all()):
        raise InputError("distances2 must be positive: the value at the optimum is passed as at_optimum.")
    above = moments - at_optimum
    slope = (above * distances2).sum() / distances2.square().sum()
    return EmpiricalVariance(float((above / distances2).max()), float(slope), float(at_optimum))
