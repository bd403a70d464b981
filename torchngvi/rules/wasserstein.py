"""Gradient flows of the Wasserstein and Stein geometries, and of the covariance."""

from typing import final

import torch
from torch import Tensor

from torchngvi.interfaces import Affine, Expectation, Path, Posterior, Root, Rule
from torchngvi.rules.root_gradient import covariance_speed2, map_speed2
from torchngvi.structures import FullAlgebra


@final
class BuresWasserstein(Rule):
    """Gradient descent on L in the Bures-Wasserstein metric, the geometry of optimal transport between Gaussians.

    The step is the affine map θ ↦ (m - αg) + (I - αG)(θ - m), with G = C⁻ᵀPC⁻¹ = H - γS (Lambert et al. 2022, Algorithm
    1).  Use it to compare with the Wasserstein methods of the literature; its stable step sizes are bounded by the
    largest curvature, α < 1/λ_max(H) or so, which those of the natural rules are not.  A step so long that I - αG is
    not positive definite reflects q, which is a Gaussian still; Table 3 of Kumar et al. (2025) begins with such steps,
    and under the default `KLRadius` there are none.  The structure of q must admit products of symmetric matrices
    (dense, block diagonal or diagonal).

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # V = 1
    >>> opt = NaturalGradientVI(q, BuresWasserstein(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that G = 3
    >>> round(q.variance.item(), 4)  # (1 - 0.1 · 3)²
    0.49
    """

    emits = Affine
    natural = False
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path α -> (I - αG) V (I - αG) of the covariance, with m - αg as its mean."""
        local = q.local(e)
        g, G = q.unframe(local.a, local.P)
        eye = q.structure.eye(g)

        def at(rho: Tensor) -> Affine:
            return Affine(eye - q.structure.scaled(rho, G), -rho[..., None] * g)

        def slope() -> Tensor:
            # dL/dα = -|g|² - ‖G C‖²_F
            return q.structure.dot(g, g) + q.structure.entries_norm2(q.structure.matmul(G, q.frame().root))

        return Path(at, lambda: q.norm2(local), slope, speed2=lambda: map_speed2(q, g, G))


@final
class CovarianceGradient(Rule):
    """Euclidean gradient descent in the mean and the covariance themselves.

    The step is m' = m - ρg and V' = V - ½ρG with G = H - γS (Kumar et al. 2025, Eq 4 with Eqs 33 and 34); where V' is
    not positive definite the move is NaN, and the step is not taken.  It is a baseline for comparisons: its stable step
    sizes shrink with the square of the curvature, ρ < 4γ/λ_max(H)² near the optimum, which the natural gradient avoids.
    The structure of q must admit products of symmetric matrices.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # V = 1
    >>> opt = NaturalGradientVI(q, CovarianceGradient(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that G = 3
    >>> round(q.variance.item(), 4)  # 1 - ½ · 0.1 · 3
    0.85
    """

    emits = Root
    natural = False
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the straight line from (m, V) along the negative Euclidean gradient."""
        local, frame, structure = q.local(e), q.frame(), q.structure
        assert isinstance(structure, FullAlgebra)
        g, G = q.unframe(local.a, local.P)
        V = structure.matmul(frame.root, structure.transpose(frame.root))

        def at(rho: Tensor) -> Root:
            root, ok = structure.cholesky(V - structure.scaled(0.5 * rho, G))
            factor = torch.where(ok, torch.ones_like(rho), torch.nan)
            return Root(frame.mean - rho[..., None] * g, structure.scaled(factor, root))

        def slope() -> Tensor:
            # dL/dρ = -|g|² + ½ tr(G V̇) = -|g|² - ¼‖G‖²_F
            return structure.dot(g, g) + 0.25 * structure.norm2(G)

        return Path(at, lambda: q.norm2(local), slope, speed2=lambda: covariance_speed2(q, g, 0.5 * G))


class _GaussianSVGD(Rule):
    """What the kernels with and without a centre have in common."""

    emits = Affine
    natural = False
    full_algebra = True
    _centered: bool  # whether the kernel is centered at the mean of q

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path ε -> (I + εB) V (I + εB)ᵀ of the covariance, with m + ε(Bm - g) or m - εg as its mean."""
        local, frame, structure = q.local(e), q.frame(), q.structure
        assert isinstance(structure, FullAlgebra)
        g, G = q.unframe(local.a, local.P)
        V = structure.matmul(frame.root, structure.transpose(frame.root))
        B, velocity = -structure.matmul(G, V), -g
        if not self._centered:
            B = B - structure.lower(g[..., None, :], frame.mean[..., None, :])
            velocity = structure.mv(B, frame.mean) - g

        def at(rho: Tensor) -> Affine:
            return Affine(structure.eye(g) + structure.scaled(rho, B), rho[..., None] * velocity)

        def slope() -> Tensor:
            # dL/dε = gᵀ(Bm - g) + tr(GBV) = -|g|² - ‖B‖²_F, or the same without Bm
            return structure.dot(g, g) + structure.entries_norm2(B)

        return Path(at, lambda: q.norm2(local), slope, speed2=lambda: map_speed2(q, velocity, B))


@final
class SVGD(_GaussianSVGD):
    """Stein variational gradient descent for a Gaussian, with the kernel xᵀy + 1.

    The step is the affine map θ ↦ θ + ε(Bθ - g) with B = γI - HV - g mᵀ = -(GV + g mᵀ), G = H - γS: the mean-field
    limit of Gaussian-SVGD (Liu et al. 2024, Algorithm 1), "SVGD-density" in Kumar et al. (2025), Appendix G.  The
    mean's step is stable only below about 2/(λ_max(H) (1 + |m|²)).  Use it to reproduce Gaussian SVGD as it is
    published; `CenteredSVGD` takes the same covariance steps without a dependence on the origin of θ.  The structure of
    q must admit products of symmetric matrices; a diagonal q takes one kernel x_i y_i + 1 a coordinate.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # m = 0 and V = 1
    >>> opt = NaturalGradientVI(q, SVGD(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that B = -3
    >>> round(q.variance.item(), 4)  # (1 - 0.1 · 3)²
    0.49
    """

    _centered = False


@final
class CenteredSVGD(_GaussianSVGD):
    """Stein variational gradient descent for a Gaussian, with the kernel (x - m)ᵀ(y - m) + 1, centred at the mean of q.

    The step is the affine map θ ↦ (m - εg) + (I + εB)(θ - m), with B = γI - HV.  Near the optimum the covariance
    contracts by 1 - 2γε for every conditioning, the mean by 1 - εH.  Use it where the steps of SVGD are to depend
    neither on the origin of θ nor, for the covariance, on the conditioning of the target.  The structure of q must
    admit products of symmetric matrices.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # V = 1
    >>> opt = NaturalGradientVI(q, CenteredSVGD(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that B = -3
    >>> round(q.variance.item(), 4)  # (1 - 0.1 · 3)²
    0.49
    """

    _centered = True
