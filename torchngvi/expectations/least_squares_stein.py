"""Stein's identity with a quadratic control variate: a and W from a linear regression of the gradients.

    Cᵀ∇ℓ(m + C z_s) ≈ a + W z_s,   s = 1 .. S,   by least squares

In place of the moments of the draws, which are I only on average, stand those they have (least squares
as in Salimans and Knowles 2013; the quadratic as a control variate: Geffner and Domke 2020).  Whatever
in ℓ is quadratic costs no variance at all: for a quadratic ℓ value, a and W are exact.
"""

from typing import final

import torch

from torchngvi.errors import InputError
from torchngvi.expectations.drawing import Drawing
from torchngvi.interfaces import Cost, Expectation, Framed, Posterior, Target


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
