"""Euclidean gradient descent in the mean and a root: plain, projected and proximal."""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.errors import PairError
from torchngvi.interfaces import Coordinates, Expectation, LogTangent, Path, Posterior, Root, RootTangent, Rule
from torchngvi.numerics.linalg import eigh
from torchngvi.structures import FullAlgebra, Pattern
from torchngvi.structures.pattern import Structured

# ------------------------------------------------------------------------------------ speeds
# The speed of q along a curve that does not follow the natural gradient, in the Fisher metric: with u = C⁻¹ ṁ and
# Q = C⁻¹ V̇ C⁻ᵀ it is |q̇|²_F = |u|² + ½‖Q‖²_F, so that KL(q'‖q) = ½ρ²|q̇|²_F + O(ρ³).


def covariance_speed2(q: Posterior, mean: Tensor, covariance: Structured) -> Tensor:
    """The squared Fisher length of a velocity of the mean, (*batch, D), and of the covariance."""
    root, structure = q.frame().root, q.structure
    assert isinstance(structure, FullAlgebra)
    whitener = structure.inverse(root)
    u = structure.mv(whitener, mean)
    Q = structure.matmul(structure.matmul(whitener, covariance), structure.transpose(whitener))
    return structure.dot(u, u) + 0.5 * structure.entries_norm2(Q)


def map_speed2(q: Posterior, mean: Tensor, B: Structured) -> Tensor:
    """The squared Fisher length of the velocity θ ↦ ṁ + B(θ - m), with which V̇ = BV + VBᵀ."""
    root, structure = q.frame().root, q.structure
    assert isinstance(structure, FullAlgebra)
    BV = structure.matmul(structure.matmul(B, root), structure.transpose(root))
    return covariance_speed2(q, mean, BV + structure.transpose(BV))


def root_speed2(q: Posterior, velocity: Coordinates) -> Tensor:
    """The squared Fisher length of a velocity of the mean and of the triangular root Λ that q stores."""
    root, structure = q.coordinates.matrix, q.structure
    u = structure.tmv(root, velocity.vector) if q.upper else structure.solve(root, velocity.vector)
    return triangular_speed2(structure, u, structure.matmul(structure.inverse(root), velocity.matrix))


def triangular_speed2(structure: Pattern, u: Tensor, K: Structured) -> Tensor:
    """The squared Fisher length |u|² + ½‖K + Kᵀ‖²_F of a velocity of the root C' = C(I + ρK) in the frame."""
    diagonal = structure.diagonal(K)
    return structure.dot(u, u) + structure.entries_norm2(K) + structure.dot(diagonal, diagonal)


def _descent(q: Posterior, e: Expectation, gradient: Coordinates, at: Callable[[Tensor], Any]) -> Path:
    """A path that begins along the negative Euclidean gradient in the mean and the root that q stores."""
    structure = q.structure

    def slope() -> Tensor:
        # dL/dρ = -|∂L/∂m|² - ‖∂L/∂Λ‖²_F
        return structure.dot(gradient.vector, gradient.vector) + structure.entries_norm2(gradient.matrix)

    return Path(at, lambda: q.norm2(q.local(e)), slope, speed2=lambda: root_speed2(q, gradient))


# ------------------------------------------------------------------------------------ rules


@final
class RootGradient(Rule):
    """Euclidean gradient descent in the mean and the triangular root that the posterior stores, or in a flat vector.

        in (m, C)   m' = m - ρ g,  C' = C - ρ tril[G C]
        in (m, T)   m' = m - ρ g,  T' = T + ρ tril[V G T⁻ᵀ]        G = H - γS

    It is what an optimizer for the mean and a Cholesky factor follows (Kumar et al. 2025, Eqs 16 and 37; with noise
    Titsias and Lázaro-Gredilla 2014; from one draw Algorithms 1a on C and 2a on T of Tan 2025).  Use it as the
    Euclidean baseline of the natural rules; for a flat posterior it follows whatever the metric has made of the
    gradient, which is how IFVB moves.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # C = 1
    >>> opt = NaturalGradientVI(q, RootGradient(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that ∂L/∂C = 3
    >>> round(q.variance.item(), 4)  # (1 - 0.1 · 3)²
    0.49
    """

    emits = RootTangent
    natural = False

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the straight line from q, in its own coordinates, along the negative Euclidean gradient."""
        gradient, structure = q.euclidean(e), q.structure

        def at(rho: Tensor) -> RootTangent:
            return RootTangent(Coordinates(-rho[..., None] * gradient.vector, structure.scaled(-rho, gradient.matrix)))

        return _descent(q, e, gradient, at)


@final
class LogRootGradient(Rule):
    """Euclidean gradient descent in the logarithms of the diagonal of q's root and its entries below the diagonal.

        change of log Λ_ii = -ρ Λ_ii ∂L/∂Λ_ii        change of Λ_ij = -ρ ∂L/∂Λ_ij

    This is what an ordinary optimizer does to the unconstrained parametrisation by log Λ_ii and Λ_ij (Tan 2025,
    section 3, R⊙∇L with Λ_ii on the diagonal of R; printed with the gradient in the new coordinates on both sides,
    where that in Λ is right).  The diagonal stays positive for every ρ.  Use it as the Euclidean baseline of
    `LogNaturalGradient`.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> opt = NaturalGradientVI(CholeskyGaussian(3), LogRootGradient(), lr=0.1)
    """

    emits = LogTangent
    natural = False

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path that is straight in the logarithms of the diagonal, along the negative Euclidean gradient."""
        vector, matrix = q.euclidean(e)
        structure = q.structure
        diagonal = structure.diagonal(matrix) * structure.diagonal(q.coordinates.matrix)
        gradient = structure.with_diagonal(matrix, diagonal)

        def at(rho: Tensor) -> LogTangent:
            return LogTangent(Coordinates(-rho[..., None] * vector, structure.scaled(-rho, gradient)))

        def slope() -> Tensor:
            return structure.dot(vector, vector) + structure.entries_norm2(gradient)

        def speed2() -> Tensor:
            root = structure.diagonal(q.coordinates.matrix)
            return root_speed2(q, Coordinates(vector, structure.with_diagonal(matrix, diagonal * root)))

        return Path(at, lambda: q.norm2(q.local(e)), slope, speed2=speed2)


@final
class ProjectedRootGradient(Rule):
    """Projected gradient descent in the mean and the root, with a floor under the diagonal of the root.

    The step is m' = m - ρg and C' = C - ρ tril[GC], after which every diagonal entry of C' that is below c becomes c
    (Kim, Ma and Gardner 2024, section 3.1, with c = 1/√L for an L-smooth ℓ).  Use it for the convergence guarantees of
    black-box VI, which hold on the set C_ii ≥ c; in practice `ProximalRootGradient` needs no smoothness constant.

    Args:
        floor: the smallest diagonal entry c of the root, in the units of a standard deviation, positive.

    Raises:
        InputError: if the floor is not positive and finite.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # C = 1
    >>> opt = NaturalGradientVI(q, ProjectedRootGradient(0.8), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that C - ρGC = 0.7
    >>> round(q.variance.item(), 4)  # 0.8²
    0.64
    """

    emits = Root
    natural = False

    def __init__(self, floor: float) -> None:
        what = "is the smallest diagonal entry of the root (1/√L for a log joint with curvature at most L)"
        self.floor = read_number("floor", floor, what, above=0)

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the straight line from (m, C), each point of which is projected onto C_ii ≥ c."""
        gradient, frame, structure = q.euclidean(e), q.frame(), q.structure

        def at(rho: Tensor) -> Root:
            root = frame.root - structure.scaled(rho, gradient.matrix)
            diagonal = structure.diagonal(root)
            mean = frame.mean - rho[..., None] * gradient.vector
            return Root(mean, structure.with_diagonal(root, diagonal.clamp_min(self.floor)))

        return _descent(q, e, gradient, at)  # where the floor does not bind


@final
class ProximalRootGradient(Rule):
    """Proximal gradient descent in the mean and the root: a step on E_q[ℓ], then the proximal map of the entropy.

        m' = m - ρg        C⁺ = C - ρ tril[HC]        C'_ii = ½(C⁺_ii + √(C⁺_ii² + 4γρ))

    C'_ii minimises -γρ log c + ½(c - C⁺_ii)² (Domke 2020, section 4), and stays positive for every step size.  Use it
    for black-box VI with guarantees where no smoothness constant of ℓ is known, with an estimator that leaves the
    entropy out, such as `Reparametrized`; those that stick the landing draw it.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # C = 1
    >>> opt = NaturalGradientVI(q, ProximalRootGradient(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that C⁺ = 0.6
    >>> round(q.variance.sqrt().item(), 4)  # ½(0.6 + √(0.36 + 0.4))
    0.7359
    """

    emits = Root
    natural = False

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the curve from (m, C) of the proximal steps, which starts along -∇L."""
        gradient, frame, structure = q.euclidean(e), q.frame(), q.structure
        inverse = e.temperature / structure.diagonal(frame.root)  # of the entropy: γ tril[C⁻ᵀ]

        def at(rho: Tensor) -> Root:
            step = rho[..., None]
            root = frame.root - structure.scaled(rho, gradient.matrix)
            diagonal = structure.diagonal(root)
            forward = diagonal - step * inverse
            backward = 0.5 * (forward + (forward.square() + 4 * e.temperature * step).sqrt())
            return Root(frame.mean - step * gradient.vector, structure.with_diagonal(root, backward))

        return _descent(q, e, gradient, at)


@final
class ProjectedSquareRoot(Rule):
    """Projected gradient descent in the mean and the symmetric root R of V, with a floor under the eigenvalues of R.

    The step is m' = m - ρg and R' = R - ½ρ(GR + RG), after which every eigenvalue of R' that is below c becomes c, so
    that ‖R⁻¹‖ ≤ 1/c.  Use it as the baseline of Domke (2020); `ProjectedRootGradient` does without the two
    eigendecompositions a step.

    Args:
        floor: the smallest eigenvalue c of R, in the units of a standard deviation, positive.

    Raises:
        InputError: if the floor is not positive and finite.
        PairError: on use, if the posterior does not have a full covariance.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # R = 1
    >>> opt = NaturalGradientVI(q, ProjectedSquareRoot(0.8), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that R - ρGR = 0.7
    >>> round(q.variance.item(), 4)  # 0.8²
    0.64
    """

    emits = Root
    natural = False
    full_algebra = True

    def __init__(self, floor: float) -> None:
        what = "is the smallest eigenvalue of the symmetric root (1/√L for a log joint with curvature at most L)"
        self.floor = read_number("floor", floor, what, above=0)

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the straight line from (m, R), each point of which is projected onto roots with eigenvalues ≥ c."""
        if q.structure.widest < q.dim:
            raise PairError(
                f"ProjectedSquareRoot moves a full covariance; got {type(q).__name__}. "
                "Use a CholeskyGaussian, or ProjectedRootGradient."
            )
        local, frame, structure = q.local(e), q.frame(), q.structure
        assert isinstance(structure, FullAlgebra)
        g, G = q.unframe(local.a, local.P)
        # C = UΣWᵀ has the symmetric root UΣUᵀ
        U, sizes, _ = torch.linalg.svd(frame.root)
        R = (U * sizes[..., None, :]) @ U.mT
        gradient = 0.5 * (G @ R + R @ G)

        def at(rho: Tensor) -> Root:
            stepped = R - structure.scaled(rho, gradient)
            values, Q, ok = eigh(stepped)
            root = structure.lower_root(Q * values.clamp_min(self.floor)[..., None, :])
            return Root(frame.mean - rho[..., None] * g, torch.where(ok[..., None, None], root, torch.nan))

        def slope() -> Tensor:
            return structure.dot(g, g) + structure.entries_norm2(gradient)

        def speed2() -> Tensor:
            half = gradient @ R
            return covariance_speed2(q, g, half + half.mT)

        return Path(at, lambda: q.norm2(local), slope, speed2=speed2)
