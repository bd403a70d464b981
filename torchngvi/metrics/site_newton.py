"""Newton's method on the negative ELBO of a generalised linear model with few rows.

The natural gradient treats the expected Hessian as if it stood still.  With A = XC, δe = Aδ and
δv_n = -(ADAᵀ)_nn to first order in the move m' = m + Cδ, V' = C(1 + D)⁻¹Cᵀ, its change is known too:
∂α/∂e = β, ∂α/∂v = ½β_e and, of the curvatures, β_e = ∂β/∂e and β_v = ∂β/∂v (Price 1958).  The
stationary conditions of the move are then

    Wδ = -a - ½Aᵀ(β_e ∘ δv)        D = P + Aᵀ diag(t) A,  t = β_e ∘ δe + β_v ∘ δv

These are N linear equations in δv: quadratic convergence where the natural gradient has a linear tail, for one
solve with an N x N matrix a step.
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Acceleration, Bent, LinearTarget, Local, Marginals, Posterior
from torchngvi.numerics.linalg import cholesky

_SHORT = 0.2  # ρ below which a step of Newton has failed
_NEAR = 3.0  # length of a step, √(2 KL), beyond which the expansion is not trusted


@final
class SiteNewton(Acceleration):
    """The gradient that leads `VariationalNewton` to the Newton point, where q is near it.

    Farther off, and where the Newton point is no descent or leaves the cone, the gradient is left as it is.  One wants
    it for few rows, N ≤ 1000 or so, where the natural gradient has a linear tail: `RowSpace.fit` uses it.

    Args:
        model: the generalised linear model that is the target of the steps.

    Raises:
        InputError: if the model is at temperature 0.
        PairError: if the model has no scalar sites; on use, if q is not dense.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, NaturalGradientVI
    >>> from torchngvi.rules import VariationalNewton
    >>> from torchngvi.stepsizes import SufficientDecrease
    >>> q, model = CholeskyGaussian(2), GeneralizedLinear(torch.eye(2), [0.0, 1.0])
    >>> opt = NaturalGradientVI(q, VariationalNewton(), step_size=SufficientDecrease(), metric=SiteNewton(model))
    >>> first, second = opt.step(model), opt.step(model)
    >>> bool(second < first)
    True
    """

    def __init__(self, model: LinearTarget) -> None:
        if not isinstance(model, LinearTarget):
            raise PairError(f"SiteNewton reads the rows of a generalised linear model; got {type(model).__name__}.")
        if model.temperature == 0:
            raise InputError("SiteNewton needs a positive temperature; got 0.")
        self.model = model

    def init(self, q: Posterior) -> dict[str, Tensor]:
        """Return that the last step of no member was one of Newton's.

        Raises:
            PairError: if q is not dense.
        """
        if q.structure.widest < q.dim:
            raise PairError(
                f"SiteNewton moves a full covariance; got {type(q).__name__}. Use a CholeskyGaussian, or QuasiNewton()."
            )
        like = q.mean_probe.detach()[..., 0]
        return {"newton": torch.zeros_like(like, dtype=torch.bool)}

    def forget(self, keep: Tensor, state: dict[str, Tensor]) -> None:
        """Forget what became of the last step, for the members (*batch,) that the mask leaves out."""
        state["newton"] = state["newton"] & keep

    def __call__(
        self,
        q: Posterior,
        gradient: Local,
        went: Tensor,
        state: dict[str, Tensor],
    ) -> tuple[Bent, dict[str, Tensor]]:
        """Bend the gradient of L/γ at q towards the Newton point; return it with what of the state is to change."""
        a, P = gradient
        eye = q.structure.eye(a)
        A, beta_e, beta_v = self._sites(q)
        L, solvable = cholesky(P + eye)  # W

        # δ = δ₀ - ½W⁻¹Aᵀ(β_e ∘ δv) and δv = δv₀ - (AAᵀ)²t, hence (1 + (AAᵀ)² T) δv = δv₀ - (AAᵀ)² t₀
        start = -_solve(L, a)
        t0 = beta_e * _mv(A, start)
        bends = beta_e[..., None] * A  # t = t₀ + T δv
        T = torch.diag_embed(beta_v) - 0.5 * bends @ torch.cholesky_solve(bends.mT, L)
        squares = (A @ A.mT).square()
        rows = torch.eye(A.shape[-2], dtype=a.dtype, device=a.device)
        delta_v = torch.linalg.solve_ex(rows + squares @ T, -(A @ P * A).sum(-1) - _mv(squares, t0))[0]
        D = P + A.mT @ ((t0 + _mv(T, delta_v))[..., None] * A)
        delta = start - 0.5 * _solve(L, _mv(A.mT, beta_e * delta_v))

        # VariationalNewton at ρ = 1 goes to V' = C(1 + D)⁻¹Cᵀ and m' = m - C(1 + D)⁻¹ a'
        bent = -_mv(eye + D, delta)
        slope = q.structure.total((a * bent).sum(-1) + 0.5 * (P * D).sum((-2, -1)))
        length2 = q.structure.dot(delta, delta) + 0.5 * q.structure.entries_norm2(D)
        # after a step of Newton that had to be cut short, one of the natural gradient
        failed = state["newton"] & (went < _SHORT)
        possible = q.structure.everywhere(solvable & cholesky(eye + D)[1])
        use = ~failed & possible & (slope > 0) & (length2 <= _NEAR**2)
        local = Local(torch.where(use[..., None], bent, a), torch.where(use[..., None, None], D, P))
        return Bent(local, torch.where(use, slope, q.norm2(gradient))), {"newton": use}

    def _sites(self, q: Posterior) -> tuple[Tensor, Tensor, Tensor]:
        """A = XC (*batch, N, D), and β_e, β_v (*batch, N) of L/γ."""
        rows = self.model.marginals(q.frame())
        if rows.projected is None:
            raise PairError("SiteNewton needs a dense X; got a sparse one. Use RowSpace(model).fit(), or X.to_dense().")
        beta_e, beta_v = (rows.weights * slope / self.model.temperature for slope in _curvature_slopes(rows))
        return rows.projected, beta_e, beta_v


def _curvature_slopes(rows: Marginals) -> tuple[Tensor, Tensor]:
    """The derivatives of β with respect to e and v, (*batch, N)."""
    with torch.enable_grad():
        mean, variance = rows.mean.detach().requires_grad_(), rows.variance.detach().requires_grad_()
        _, _, curvature = rows.likelihood.expected(mean, variance, rows.y)
        if not curvature.requires_grad:  # a quadratic
            return torch.zeros_like(mean), torch.zeros_like(mean)
        slope, bend = torch.autograd.grad(curvature.sum(), (mean, variance), materialize_grads=True)
        return slope, bend


def _mv(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]


def _solve(factor: Tensor, vector: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹ x."""
    return torch.cholesky_solve(vector[..., None], factor)[..., 0]
