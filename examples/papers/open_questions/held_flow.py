"""The natural-gradient flow with g and H held for the length of a step, continued where it would leave the cone.

    dm/dt = -V g,  dS/dt = H - γS        in the frame  N(t) = e^{-γt} I + s W,  s = (1 - e^{-γt})/γ,  W = CᵀHC

Solved with g and H held, m' = m - s C N⁻¹ a: the step of VN of the size s.  It is the flow itself, for every t, where ℓ
is quadratic, and is positive definite for every t where W is positive semi-definite.  Along an eigenvector of W with
w < 0 the precision d(1 + x), d = e^{-γt} and x = sw/d, passes zero after a finite time; there d/(1 - x) takes its
place, which agrees with it up to a term in t² and stays positive, as far as rounding lets it.
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.errors import PairError
from torchngvi.interfaces import Congruence, Expectation, Path, Posterior, Rule


@final
class HeldFlow(Rule):
    """The curve of a study: of a full covariance, with an eigendecomposition a step.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # S = 1
    >>> opt = NaturalGradientVI(q, HeldFlow(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4
    >>> round(1 / q.variance.item(), 4)  # exp(-0.1) + 4 (1 - exp(-0.1))
    1.2855
    """

    emits = Congruence
    natural = True
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path t -> C N(t)⁻¹ Cᵀ of the covariance, with m - s C N(t)⁻¹ a as its mean."""
        if q.structure.widest < q.dim:
            raise PairError(f"HeldFlow takes a posterior with a full covariance; got {type(q).__name__}.")
        local, gamma = q.local(e), e.temperature
        eye = torch.eye(q.dim, dtype=local.a.dtype, device=local.a.device)
        W = local.P + gamma * eye
        finite = W.isfinite().all(-1).all(-1)[..., None, None]  # others leave the cone by their mean
        w, axes = torch.linalg.eigh(torch.where(finite, W, eye))

        def at(rho: Tensor) -> Congruence:
            t = rho[..., None]
            s = -torch.expm1(-gamma * t) / gamma if gamma else t
            d = torch.exp(-gamma * t)
            x = s * w / d
            n = torch.where(x < 0, d / (1 - x), d + s * w)
            return Congruence(axes * n[..., None, :] @ axes.mT, -s * local.a)

        norm2 = q.norm2(local)
        return Path(at, lambda: norm2, lambda: norm2)
