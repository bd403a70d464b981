"""Estimators of the gradient in the root itself, and from values of the log joint alone."""

from typing import final

import torch

from torchngvi.errors import InputError, PairError
from torchngvi.expectations.draws import Drawing, Draws, Independent
from torchngvi.interfaces import Cost, Expectation, Framed, Posterior, Target

# The gradient of a reparametrised draw as backpropagation through a Cholesky factor gives it: one triangle
#
#     a = E[Cᵀ∇ℓ]        W = M + Mᵀ on the triangle of the root, M = tril½ E[Cᵀ∇ℓ zᵀ]
#
# (Wu and Gardner 2024, Algorithm 1: θ = m + C z with C = chol(V), differentiated to (m, V); Kim, Ma and
# Gardner 2024, Definition 4, whose ∂L/∂C = tril(∇ℓ zᵀ) - diag(1/C_ii) is what `RootGradient` makes of it.)
# W is unbiased and symmetric, but not positive semi-definite, not even where ℓ is convex: a step in natural
# coordinates can leave the cone at any ρ, which `Hessian` and `BonnetPrice` never do on convex ℓ.


@final
class Reparametrized(Drawing):
    """a and W from gradients at S draws, taking of E[Cᵀ∇ℓ zᵀ] the triangle that belongs to the root.

    Use it to compare with the papers above; `ClosedEntropyStein` averages both triangles, with less noise.

    Args:
        draws: the number S of antithetic draws, or draws such as `Independent`, `Antithetic`, `Quasi` and `Fixed`.

    Raises:
        InputError: if draws is neither, or the number is not positive and even; on use, if the log joint does not
            depend
            on theta, or fixed draws are fewer than 2D for a full covariance.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(2), LogJoint(lambda theta: -theta.sum(-1))
    >>> Reparametrized(4)(q, target).derivative.a.tolist()
    [1.0, 1.0]
    """

    derives_value = True

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], a and W at q, from the gradients at the draws."""
        seen = self.see(q, target)
        packet = self.derivative_of_mean(q, seen) if self.comparable else self.one_triangle(q, seen.pulled, seen.z)
        comparable, cost = self.comparable and target.comparable, Cost(self.draws.num_samples, 0)
        return Expectation(seen.energy.mean(0), packet, target.temperature, comparable, cost)


# Monte Carlo from gradients alone, as an optimizer over the root itself would see it: a triangle of E[r zᵀ]
#
#     r = Cᵀ∇ℓ(m + C z) - γz        a = E[r]        M = E[r zᵀ]        W = γI + tril½[M] + tril½[M]ᵀ
#
# the path derivative of Roeder, Wu and Duvenaud (2017), as in Tan (2025), section 3.2: the gradient of L in
# C is C⁻ᵀM, of which a triangular root has the lower part, and that part depends on the lower part of M only.
# In coordinates whose frame is upper triangular it is Mᵀ that counts.


@final
class PathDerivative(Drawing):
    """a and W from one draw, as published; `Stein` averages both triangles and has less variance.

    The value has the same control variate, ℓ - ½γ(|z|² - D), so that the loss of a step is
    -log joint + γ log q at the draw.  Where q is the exact Gaussian posterior, a, W and the loss have no
    variance.  With `Fixed` draws it is the same as `Stein`.

    Args:
        draws: one independent draw by default; else the number S of antithetic draws, or draws such as `Independent`,
            `Antithetic`, `Quasi` and `Fixed`.

    Raises:
        InputError: if draws is neither, or the number is not positive and even; on use, if the log joint does not
            depend
            on theta, or fixed draws are fewer than 2D for a full covariance.

    >>> import torch
    >>> from torchngvi import SRVN, CholeskyGaussian
    >>> q = CholeskyGaussian(2, dtype=torch.float64)
    >>> opt = SRVN(q, lr=0.1, estimator=PathDerivative())
    >>> round(opt.step(lambda theta: -0.5 * theta.square().sum(-1)).item(), 9)  # -log 2π, at any draw
    -1.837877066
    """

    derives_value = True

    def __init__(self, draws: Draws | int | None = None) -> None:
        super().__init__(Independent(1) if draws is None else draws)

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], a and W at q, from the gradients at the draws."""
        seen, gamma = self.see(q, target), target.temperature
        energy = seen.energy
        if self.comparable:
            packet = self.derivative_of_mean(q, seen)
        else:
            a, W = self.one_triangle(q, seen.pulled - gamma * seen.z, seen.z)
            packet = Framed(a, W + gamma * q.structure.eye(a))
            energy = energy - 0.5 * gamma * (q.structure.dot(seen.z, seen.z) - q.structure.total_dim)
        comparable, cost = self.comparable and target.comparable, Cost(self.draws.num_samples, 0)
        return Expectation(energy.mean(0), packet, gamma, comparable, cost)


# Monte Carlo from values of the log joint alone: no gradient is taken
#
#     h = ℓ(m + C z) - ½γ|z|²        a = E[(h - b) z]        W = γI + E[(h - b) zzᵀ]
#
# the score function estimator (Williams 1992; Ranganath, Gerrish and Blei 2014) in the frame, where the
# scores are z and zzᵀ - I and the natural gradient needs no solve (from Tan 2025, section 3.1).  b is the
# mean of h over the other draws (leave-one-out baseline: Kool, van Hoof and Welling 2019); h - b then has
# mean 0 over the draws, which is why I is not subtracted.  With γ log q in it, h is constant where q is
# the exact Gaussian posterior, and neither a nor W has any variance there.


@final
class ScoreFunction(Drawing):
    """a and W from values at S draws, for a log joint that has no gradient, such as that of a simulator.

    The variance grows with D as that of gradients does not, so that it is of use in few dimensions or with many draws.

    Args:
        draws: the number S of antithetic draws, or draws, `Independent` or `Antithetic`; at least two draws or pairs.

    Raises:
        InputError: if draws is neither, or the number is not positive and even, or there are fewer than two draws or
            pairs.
        PairError: if the draws depend on one another.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(1), LogJoint(lambda theta: -theta.detach().square().sum(-1) / 2)
    >>> ScoreFunction(4)(q, target).derivative.W.item()
    1.0
    """

    def __init__(self, draws: Draws | int = 64) -> None:
        super().__init__(draws)
        if not self.draws.independent:
            raise PairError(
                "ScoreFunction subtracts from each value the mean of the others, which must not depend on its draw; "
                f"those of {type(self.draws).__name__} depend on one another. Use Independent or Antithetic."
            )
        self._block = 2 if self.draws.mirrored else 1
        if self.draws.num_samples < 2 * self._block:
            raise InputError(
                "ScoreFunction compares a draw with others, and needs at least 2 independent draws or 4 antithetic "
                f"ones; got {self.draws.num_samples}."
            )

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], a and W at q, from the values at new draws."""
        frame, gamma, count = q.frame(), target.temperature, self.draws.num_samples
        z = self.draws(q.mean_probe.detach())
        with torch.no_grad():
            energy = -target.log_joint(frame.mean + frame.push(z))
        h = energy - 0.5 * gamma * q.structure.dot(z, z)
        blocks = h.unflatten(0, (self._block, -1))  # a draw beside its mirror image
        others = (h.sum(0) - blocks.sum(0)) / (count - self._block)
        weighted = (blocks - others).flatten(0, 1)[..., None] * z / count
        a = weighted.sum(0)
        W = q.sym_outer(weighted, z) + gamma * q.structure.eye(a)
        return Expectation(energy.mean(0), Framed(a, W), gamma, False, Cost(0, 0, count))
