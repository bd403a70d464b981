"""Proximal gradient descent in Bures-Wasserstein space: a step on E_q[ℓ], then the proximal map of the entropy there.

    θ⁺ = θ - α(g + H(θ - m))        V' = ½(V⁺ + 2αγI + (V⁺(V⁺ + 4αγI))^½)

(Diao, Balasubramanian, Chewi and Salim 2023, Algorithm 1.)  In the eigenbasis of V⁺ a standard deviation s becomes
½(s + √(s² + 4αγ)), which is what `ProximalRootGradient` makes of the diagonal of a triangular root.
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.interfaces import Affine, Expectation, Path, Posterior, Rule
from torchngvi.rules import BuresWasserstein


@final
class ProximalBuresWasserstein(Rule):
    """The transport of a study: of a full covariance, with an eigendecomposition a step.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # C = 1
    >>> opt = NaturalGradientVI(q, ProximalBuresWasserstein(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that s = 0.6
    >>> round(q.variance.sqrt().item(), 4)  # ½(0.6 + √(0.36 + 0.4)), as in parameter space
    0.7359
    """

    emits = Affine
    natural = False
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the curve from q of the proximal steps, which starts as that of `BuresWasserstein`."""
        explicit, local, C = BuresWasserstein()(q, e), q.local(e), q.frame().dense()
        eye = torch.eye(q.dim, dtype=C.dtype, device=C.device)
        g, H = q.unframe(local.a, local.P + e.temperature * eye)

        def at(rho: Tensor) -> Affine:
            step = rho[..., None]
            forward = eye - step[..., None] * H
            moved = forward @ C
            plus = moved @ moved.mT
            finite = plus.isfinite().all(-1).all(-1)[..., None, None]  # others leave the cone by their mean
            variances, axes = torch.linalg.eigh(torch.where(finite, plus, eye))
            sd = variances.clamp_min(torch.finfo(C.dtype).tiny).sqrt()
            stretch = 0.5 * (sd + (sd.square() + 4 * step * e.temperature).sqrt()) / sd
            return Affine(axes * stretch[..., None, :] @ axes.mT @ forward, -step * g)

        return Path(at, explicit.norm2, explicit.slope)
