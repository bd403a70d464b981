"""Newton steps on the covariance and on its root."""

from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_count
from torchngvi.interfaces import Congruence, Expectation, Frame, Local, Path, Posterior, Root, Rule, once
from torchngvi.numerics.arrays import less_product
from torchngvi.rules.root_gradient import triangular_speed2
from torchngvi.rules.root_system import Direction, conjugate_gradients, hessian, still_solved
from torchngvi.structures import FullAlgebra
from torchngvi.structures.pattern import plus


@final
class VariationalNewton(Rule):
    """Variational Newton (VN): the precision moves towards the expected Hessian, and the mean takes a Newton step.

    With N = I + ρP the step is S' = C⁻ᵀ N C⁻¹ = (1 - γρ)S + ρH and m' = m - ρS'⁻¹g, the same q' in all coordinates
    (Kumar et al. 2025, Eq 7; Khan and Rue 2023, the Bayesian learning rule for full Gaussians).  Use it as the default
    for convex ℓ, where it is positive definite for every ρ < 1/γ and a full step is exact for a Gaussian target; where
    the expected Hessian may be indefinite, `Retraction` and `Geodesic` stay in the cone.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # S = 1
    >>> opt = NaturalGradientVI(q, VariationalNewton(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4
    >>> round(1 / q.variance.item(), 4)  # 0.9 · 1 + 0.1 · 4
    1.3
    """

    emits = Congruence
    natural = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path ρ -> C (I + ρP)⁻¹ Cᵀ of the covariance."""
        local = q.local(e)
        eye = q.structure.eye(local.a)

        def at(rho: Tensor) -> Congruence:
            return Congruence(plus(q.structure, eye, rho, local.P), less_product(rho[..., None], local.a))

        norm2 = once(lambda: q.norm2(local))  # a constant step does not ask for it
        return Path(at, norm2, norm2)  # dL/dρ = -|∇L|²_F⁻¹


_RESIDUAL = 0.3  # relative residual of the system, and its share of the natural norm where that is below 1
_INSIDE = 0.9  # share of the way to the border of the cone that a step may go


@final
class RootNewton(Rule):
    """Newton's step in (m, C), along the line on which the bound of a log-concave model is convex.

    The step is m' = m + ρCδ, C' = C(I + ρT).  The system (`torchngvi.rules.root_system`) is solved by conjugate
    gradients to a relative residual that falls with the gradient (Dembo, Eisenstat and Steihaug 1982), which makes the
    convergence faster than linear.  Use it for generalised linear models and others whose expectations are exact and
    cheap beside their products: from Laplace's approximation it needs about four evaluations.  `torchngvi.NewtonCG` is
    the method with this rule.  The structure of q must admit products of symmetric matrices.

    Args:
        most: the largest number of products with the Hessian in one step, at least 1; each costs two products of the
            size of the design.

    Raises:
        InputError: if ``most`` is below 1.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, NaturalGradientVI
    >>> from torchngvi.stepsizes import Backtracking
    >>> q, model = CholeskyGaussian(2), GeneralizedLinear(torch.eye(2), [0.0, 1.0])
    >>> opt = NaturalGradientVI(q, RootNewton(), step_size=Backtracking())
    >>> first, second = opt.step(model), opt.step(model)
    >>> bool(second < first)
    True
    """

    emits = Congruence
    natural = False
    full_algebra = True

    def __init__(self, most: int = 40) -> None:
        self.most = read_count("most", most, "is the number of products in one step")
        self._products = 0

    @property
    def products(self) -> int:
        """The number of products with the Hessian so far, of all members of a batch at once."""
        return self._products

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path ρ -> (m + γρCδ, C(I + γρT)), whose step of Newton is that of ρ = 1/γ."""
        local, frame, structure = q.local(e), q.frame(), q.structure
        assert isinstance(structure, FullAlgebra)
        unit = e.temperature or 1.0
        norm2 = once(lambda: q.norm2(local))
        gradient = Direction(local.a, structure.tril(local.P))
        found: list[Direction] = []

        def move() -> Direction:
            if not found:
                accuracy = _RESIDUAL * (norm2().sqrt() / unit).clamp_max(1.0)
                found.append(self._solved(e, local, frame, gradient, accuracy))
            return found[0]

        def at(rho: Tensor) -> Congruence:
            delta, T = move()
            share = unit * rho
            inverse = structure.inverse(plus(structure, structure.eye(delta), share, T))
            N = structure.gram(inverse, torch.ones_like(delta), frame.upper)
            return Congruence(N, structure.smv(N, share[..., None] * delta))

        slope = once(lambda: -unit * gradient.dot(move(), structure))

        def speed2() -> Tensor:
            delta, T = move()
            return unit**2 * triangular_speed2(structure, delta, T)

        return Path(at, norm2, slope, speed2=speed2)

    def _solved(self, e: Expectation, local: Local, frame: Frame, gradient: Direction, accuracy: Tensor) -> Direction:
        """The direction of Newton, cut short before it leaves the cone."""
        structure = frame.structure
        assert isinstance(structure, FullAlgebra)
        downhill = Direction(-gradient.delta, -gradient.T)
        x, products = conjugate_gradients(
            hessian(e, local, frame), still_solved(e, local, frame), downhill, accuracy, structure, self.most
        )
        self._products += products
        shrinks = -structure.diagonal(x.T).amin(-1)
        share = (_INSIDE / shrinks).masked_fill(shrinks < 1, 1.0)
        return Direction(share[..., None] * x.delta, structure.scaled(share, x.T))


@final
class SymmetricRoot(Rule):
    """SR-VN with the symmetric half of P in the place of the triangular one.

    The step is V' = C (I - ½ρP)² Cᵀ and m' = m - ρCa, of which the triangular root is found by a QR decomposition
    (Kumar et al. 2025, the remark on other square roots).  Use it where the steps of SR-VN should not depend on the
    order of the coordinates of θ.  A step so long that I - ½ρP is not positive definite is not taken.  The structure of
    q must admit products of symmetric matrices.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # V = 1
    >>> opt = NaturalGradientVI(q, SymmetricRoot(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that P = 3
    >>> round(q.variance.item(), 4)  # (1 - ½ · 0.1 · 3)²
    0.7225
    """

    emits = Root
    natural = True
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path ρ -> C (I - ½ρP)² Cᵀ of the covariance."""
        local, frame, structure = q.local(e), q.frame(), q.structure
        assert isinstance(structure, FullAlgebra)
        push, eye = frame.push(local.a), structure.eye(local.a)

        def at(rho: Tensor) -> Root:
            factor = eye - structure.scaled(0.5 * rho, local.P)
            inside = torch.where(structure.cholesky(factor)[1], torch.ones_like(rho), torch.nan)
            root = structure.lower_root(structure.matmul(frame.root, factor))
            return Root(frame.mean - rho[..., None] * push, structure.scaled(inside, root))

        norm2 = q.norm2(local)
        return Path(at, lambda: norm2, lambda: norm2)
