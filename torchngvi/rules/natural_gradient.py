"""Natural gradients in the coordinates of q, and along other curves that start in the same direction."""

from typing import final

from torch import Tensor

from torchngvi.interfaces import (
    Congruence,
    Coordinates,
    Expectation,
    LogTangent,
    Path,
    Posterior,
    RootTangent,
    Rule,
    Tangent,
)
from torchngvi.numerics.arrays import less_product
from torchngvi.structures import FullAlgebra


@final
class NaturalGradient(Rule):
    """Natural-gradient descent along a straight line in the coordinates that the posterior stores, λ' = λ - ρλ̇.

    The natural gradient λ̇ = F⁻¹∇L is the one that the posterior gives for its own coordinates, so that the choice of
    the posterior decides the curve: with a `CholeskyGaussian` this is SR-VN, C' = C - ρ C tril½[P] and m' = m - ρ C a
    (Kumar et al. 2025, Eq 17, equal to Tan 2025, Theorem 2), with a `NaturalGaussian` it is VN.  Use it as the plain
    natural-gradient method of a posterior; a step that is too long may leave the positive definite cone, and is then
    not taken.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # V = 1
    >>> opt = NaturalGradientVI(q, NaturalGradient(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that P = 3
    >>> round(q.variance.item(), 4)  # (1 - 0.1 · ½ · 3)²
    0.7225
    """

    emits = Tangent
    natural = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the straight line from q, in its own coordinates, along the negative natural gradient."""
        velocity = q.tangent(e)

        def at(rho: Tensor) -> Tangent:
            change = Coordinates(-rho[..., None] * velocity.vector, q.structure.scaled(-rho, velocity.matrix))
            return Tangent(change)

        def norm2() -> Tensor:
            return q.norm2(q.local(e))

        return Path(at, norm2, norm2)


@final
class LogNaturalGradient(Rule):
    """Natural-gradient descent in the logarithms of the diagonal of q's root and its entries below the diagonal.

        change of log Λ_ii = -ρ Λ̇_ii / Λ_ii        change of Λ_ij = -ρ Λ̇_ij

    with Λ̇ the natural gradient in Λ (Tan 2025, Eq 4 and section 3, R*⊙∇̃L), so that the diagonal of the root stays
    positive for every step size.  Use it to follow that paper, or where `NaturalGradient` in the same root takes steps
    that are rejected because a diagonal entry would change its sign.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> opt = NaturalGradientVI(CholeskyGaussian(3), LogNaturalGradient(), lr=0.1)
    """

    emits = LogTangent
    natural = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path that is straight in the logarithms of the diagonal, along the negative natural gradient."""
        vector, matrix = q.tangent(e)
        structure = q.structure
        diagonal = structure.diagonal(matrix) / structure.diagonal(q.coordinates.matrix)
        velocity = structure.with_diagonal(matrix, diagonal)

        def at(rho: Tensor) -> LogTangent:
            return LogTangent(Coordinates(-rho[..., None] * vector, structure.scaled(-rho, velocity)))

        def norm2() -> Tensor:
            return q.norm2(q.local(e))

        return Path(at, norm2, norm2)


@final
class LocalExponential(Rule):
    """Natural-gradient steps in a triangular root that stay positive definite for every step size, in every structure.

        in (m, T)   T' = T Λ,  Λ = I + ρK + ½ρ²K²,   m' = m - ρ T⁻ᵀ a        K = tril½[P], P = K + Kᵀ
        in (m, C)   C' = C Λ,  Λ = I - ρK + ½ρ²K²,   m' = m - ρ C a

    These are the first terms of the exponential of the triangular group (Lin, Nielsen, Khan and Schmidt 2021, local
    coordinates).  The diagonal of Λ is 1 ± x + ½x² ≥ ½, whatever ρ and H, and products of triangular matrices keep the
    pattern.  Use it for sparse structures, such as arrows and forests, where the expected Hessian may be indefinite;
    for dense structures `Retraction` does not depend on the order of the coordinates.  The posterior must hold a mean
    and a triangular root.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> opt = NaturalGradientVI(CholeskyGaussian(3), LocalExponential(), lr=1.0)
    """

    emits = RootTangent
    natural = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path ρ -> q's root times I ± ρK + ½ρ²K²."""
        local, structure = q.local(e), q.structure
        half, root, push = structure.tril_half(local.P), q.coordinates.matrix, q.frame().push(local.a)
        sign = 1.0 if q.upper else -1.0  # a root of the precision grows where one of the covariance shrinks

        def at(rho: Tensor) -> RootTangent:
            step = structure.scaled(sign * rho, half)
            change = structure.matmul(root, step + 0.5 * structure.matmul(step, step))
            return RootTangent(Coordinates(-rho[..., None] * push, change))

        norm2 = q.norm2(local)
        return Path(at, lambda: norm2, lambda: norm2)


@final
class Retraction(Rule):
    """The improved Bayesian learning rule (iBLR): natural-gradient steps that keep S positive definite.

        S' = (1 - γρ) S + ρH + ½ρ² G S⁻¹ G,  G = H - γS;   m' = m - ρ S⁻¹ g, with the old S

    (Lin, Schmidt and Khan 2020).  In the frame it is S' = C⁻ᵀ N C⁻¹ with N = I + ρP + ½ρ²P² = ½(I + (I + ρP)²), whose
    eigenvalues are at least ½ for every ρ and every H.  Use it where the expected Hessian may be indefinite;
    `VariationalNewton` is cheaper where it is not.  The structure of q must admit products of symmetric matrices;
    `LocalExponential` serves the others.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # V = 1
    >>> opt = NaturalGradientVI(q, Retraction(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that P = 3
    >>> round(1 / q.variance.item(), 4)  # 1 + 0.3 + ½ · 0.09
    1.345
    """

    emits = Congruence
    natural = True
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path ρ -> C (I + ρP + ½ρ²P²)⁻¹ Cᵀ of the covariance."""
        local, structure = q.local(e), q.structure
        eye = structure.eye(local.a)

        def at(rho: Tensor) -> Congruence:
            step = structure.scaled(rho, local.P)
            N = eye + step + 0.5 * structure.matmul(step, step)
            return Congruence(N, less_product(rho[..., None], structure.mv(N, local.a)))

        norm2 = q.norm2(local)
        return Path(at, lambda: norm2, lambda: norm2)


@final
class Geodesic(Rule):
    """Natural-gradient steps along a geodesic of the positive definite cone, which no step size can leave.

    With N = exp(ρP) the step is S' = C⁻ᵀ N C⁻¹ and m' = m - ρCa, the exponential map in local coordinates (Lin,
    Nielsen, Khan and Schmidt 2021); for the covariance alone it is the geodesic of the Fisher metric.  Use it where the
    expected Hessian may be indefinite, as with log joints that are not concave or with noisy estimates; `Retraction` is
    the same to second order without the matrix exponential, and `LocalExponential` does the same for sparse structures.
    The structure of q must admit products of symmetric matrices.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # V = 1
    >>> opt = NaturalGradientVI(q, Geodesic(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that P = 3
    >>> round(q.variance.item(), 4)  # exp(-0.1 · 3)
    0.7408
    """

    emits = Congruence
    natural = True
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path ρ -> C exp(-ρP) Cᵀ of the covariance."""
        local, structure = q.local(e), q.structure
        assert isinstance(structure, FullAlgebra)

        def at(rho: Tensor) -> Congruence:
            N = structure.exp(structure.scaled(rho, local.P))
            return Congruence(N, less_product(rho[..., None], structure.mv(N, local.a)))

        norm2 = q.norm2(local)
        return Path(at, lambda: norm2, lambda: norm2)
