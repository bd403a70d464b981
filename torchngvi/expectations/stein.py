"""Estimators from gradients alone, by Stein's identity."""

from typing import final

import torch

from torchngvi.errors import InputError
from torchngvi.expectations.draws import Drawing
from torchngvi.interfaces import Cost, Expectation, Framed, Posterior, Target

# Monte Carlo from gradients alone: Stein's identity with the sticking-the-landing residual
#
#     r = Cᵀ∇ℓ(m + C z) - γz        a = E[r]        W = γI + E[r zᵀ]
#
# (Lin, Khan and Schmidt 2019; Roeder, Wu and Duvenaud 2017).  γz is a control variate: where q is the
# exact Gaussian posterior, r = 0 for each draw, and neither a nor W has any variance.


@final
class Stein(Drawing):
    """a and W from gradients at S draws; the default for a log joint that is only a function.

    Of E[r zᵀ] the symmetric part is taken, which has about half the variance of a triangle of it.  With
    `Fixed` draws a and W are the exact derivative of the mean of ℓ over them, steps can be found by
    trial, and the residual makes no difference: such draws have mean 0 and covariance I.  In natural
    coordinates that mean is a function of (S m, S) through the root T⁻ᵀ, S = T Tᵀ.

    Args:
        draws: the number S of antithetic draws, which make a exact for quadratic ℓ; or draws such as `Independent`,
            `Antithetic`, `Quasi` and `Fixed`.

    Raises:
        InputError: if draws is neither, or the number is not positive and even; on use, if the log joint does not
            depend
            on theta, or fixed draws are fewer than 2D for a full covariance.

    >>> import torch
    >>> from torchngvi import VN, CholeskyGaussian, Stein
    >>> from torchngvi.expectations import Fixed
    >>> q = CholeskyGaussian(1, dtype=torch.float64)
    >>> opt = VN(q, estimator=Stein(Fixed(64)))  # no learning rate
    >>> for _ in range(10):
    ...     loss = opt.step(lambda theta: -2 * (theta - 3).square().sum(-1))
    >>> round(q.mean.item(), 9), round(q.variance.item(), 9)
    (3.0, 0.25)
    """

    derives_value = True

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], a and W at q, from the gradients at the draws."""
        seen, gamma = self.see(q, target), target.temperature
        if self.comparable:
            packet = self.derivative_of_mean(q, seen)
        else:
            residual = (seen.pulled - gamma * seen.z) / len(seen.z)
            a = residual.sum(0)
            packet = Framed(a, q.sym_outer(residual, seen.z) + gamma * q.structure.eye(a))
        comparable, cost = self.comparable and target.comparable, Cost(self.draws.num_samples, 0)
        return Expectation(seen.energy.mean(0), packet, gamma, comparable, cost)


# Stein's identity with a quadratic control variate: a and W from a linear regression of the gradients
#
#     Cᵀ∇ℓ(m + C z_s) ≈ a + W z_s,   s = 1 .. S,   by least squares
#
# In place of the moments of the draws, which are I only on average, stand those they have (least squares
# as in Salimans and Knowles 2013; the quadratic as a control variate: Geffner and Domke 2020).  Whatever
# in ℓ is quadratic costs no variance at all: for a quadratic ℓ value, a and W are exact.


@final
class LeastSquaresStein(Drawing):
    """a and W from gradients at S > D draws, exact for a quadratic ℓ whatever the draws.

    Where ℓ is not quadratic, value, a and W are consistent with a bias of order 1/S.  With S ≥ 4D antithetic
    draws W has a fraction of the noise of `Stein` far from the optimum and as much at it, and the value a
    fraction everywhere; with S barely above 2D there is more noise, not less.  The regression has D² coefficients
    for a diagonal covariance too, where `Stein` keeps D numbers.

    Args:
        draws: the number S of antithetic draws, S ≥ 2D; or draws, `Independent` or `Quasi` with S > D, `Antithetic`
            or `Fixed` with S ≥ 2D.

    Raises:
        InputError: if draws is neither, or the number is not positive and even; on use, if there are too few draws for
            D,
            or the log joint does not depend on theta.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(1, dtype=torch.float64), LogJoint(lambda theta: -2 * (theta - 3).square().sum(-1))
    >>> e = LeastSquaresStein(2)(q, target)
    >>> round(e.value.item(), 9), round(e.derivative.a.item(), 9), round(e.derivative.W.item(), 9)
    (20.0, -12.0, 4.0)
    """

    unbiased = False

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], a and W at q by a regression of the gradients on the draws."""
        self._check_number(q.dim)
        seen = self.see(q, target)
        z, pulled = seen.z.movedim(0, -2), seen.pulled.movedim(0, -2)  # (*batch, S, D)
        design = torch.cat([torch.ones_like(z[..., :1]), z], -1)
        basis, triangle = torch.linalg.qr(design)
        fit = torch.linalg.solve_triangular(triangle, basis.mT @ pulled, upper=True)
        a, W = fit[..., 0, :], 0.5 * (fit[..., 1:, :] + fit[..., 1:, :].mT)
        # ℓ less its quadratic part, whose mean is ½ tr W
        quadratic = (z @ a[..., None])[..., 0] + 0.5 * (z @ W * z).sum(-1)
        value = (seen.energy.movedim(0, -1) - quadratic).mean(-1) + 0.5 * W.diagonal(dim1=-2, dim2=-1).sum(-1)
        packet = Framed(a, q.structure.from_dense(W))
        return Expectation(value, packet, target.temperature, False, Cost(self.draws.num_samples, 0))

    def _check_number(self, dim: int) -> None:
        """The regression on 1 and z has one solution; mirror images add nothing to the span of z."""
        least = 2 * dim if self.draws.mirrored else dim + 1
        if self.draws.num_samples < least:
            kind = "antithetic draws" if self.draws.mirrored else "draws"
            raise InputError(
                f"LeastSquaresStein needs at least {least} {kind} in {dim} dimensions; got {self.draws.num_samples}. "
                "Use more, or Stein."
            )


# Monte Carlo from gradients alone, nothing subtracted: the entropy enters in closed form only
#
#     a = E[Cᵀ∇ℓ]        W = E[Cᵀ∇ℓ zᵀ]
#
# (the reparametrisation gradient of Kingma and Welling 2014; CFE in Kim, Ma and Gardner 2024, Definition
# 4).  Its noise does not vanish at the optimum.  `Stein` is the better choice for q that fits well; far
# from the optimum, or where q cannot fit, neither is always ahead (Kim et al. 2024, section 3).


@final
class ClosedEntropyStein(Drawing):
    """a and W from gradients at S draws, without the control variate of `Stein`.

    Use it to compare with the gradient estimator of most black-box VI, or where q cannot fit the target well.

    Args:
        draws: the number S of antithetic draws, or draws such as `Independent`, `Antithetic`, `Quasi` and `Fixed`; with
            fixed draws it is the same as `Stein`.

    Raises:
        InputError: if draws is neither, or the number is not positive and even; on use, if the log joint does not
            depend
            on theta, or fixed draws are fewer than 2D for a full covariance.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(2), LogJoint(lambda theta: -theta.sum(-1))
    >>> ClosedEntropyStein(4)(q, target).derivative.a.tolist()
    [1.0, 1.0]
    """

    derives_value = True

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], a and W at q, from the gradients at the draws."""
        seen = self.see(q, target)
        if self.comparable:
            packet = self.derivative_of_mean(q, seen)
        else:
            pulled = seen.pulled / len(seen.z)
            packet = Framed(pulled.sum(0), q.sym_outer(pulled, seen.z))
        comparable = self.comparable and target.comparable
        return Expectation(seen.energy.mean(0), packet, target.temperature, comparable, Cost(self.draws.num_samples, 0))
