"""The linear system of everything that responds: H x = u, with H the Hessian of L in (m, C) at an optimum."""

import torch

from torchngvi.errors import InputError
from torchngvi.expectations import Quadrature
from torchngvi.interfaces import Expectation, Local, TractableTarget
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.rules.root_system import Direction, conjugate_gradients, hessian, still_solved
from torchngvi.structures import FullAlgebra

_PRODUCTS = 300
_SHARE = 1e-2  # of the tolerance, the relative residual of the system in the metric of its preconditioner
_LEFT = 100.0  # tolerances, the relative residual above which a solution is refused


@torch.no_grad()
def response(q: Gaussian, target: TractableTarget, u: Direction, tolerance: float) -> Direction:
    """Solve H x = u by conjugate gradients, whose products need no expectation, beside one at q.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> q, model = CholeskyGaussian(1, scale=0.5), GeneralizedLinear(torch.ones(3, 1), [1.0, 2.0, 3.0], "gaussian")
    >>> response(q, model, Direction(torch.ones(1), torch.ones(1, 1)), 1e-3)  # W is 1: of the root there is γ too
    Direction(delta=tensor([1.]), T=tensor([[0.5000]]))
    """
    frame, structure = q.frame(), q.structure
    assert isinstance(structure, FullAlgebra)
    e: Expectation = Quadrature()(q, target)
    local: Local = q.local(e)
    H, M = hessian(e, local, frame, exact=True), still_solved(e, local, frame)
    x, _ = conjugate_gradients(H, M, u, torch.full_like(e.value, _SHARE * tolerance), structure, _PRODUCTS)
    left = u.plus(torch.full_like(e.value, -1.0), H(x), structure)
    size, rest = u.dot(M(u), structure), left.dot(M(left), structure)
    error = float(torch.where(size > 0, rest / size, 0.0).amax().sqrt())
    if not error <= _LEFT * tolerance:
        raise InputError(
            f"the system of the derivative was solved to a relative residual of {error:.2g} and no further, where "
            f"{_LEFT * tolerance:.2g} was asked: L is not convex in (m, C) here, or hardly curved in some way. "
            "Give every coefficient a proper prior, or use float64."
        )
    return x
