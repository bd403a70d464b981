"""Bent natural gradients: L-BFGS in the frame of q, and Newton's method for a regression of few rows."""

from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_size
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Acceleration, Bent, LinearTarget, Local, Posterior, known_everywhere, where_members
from torchngvi.interfaces.targets import bends_of
from torchngvi.numerics.linalg import cholesky, multiply
from torchngvi.stepsizes import raised
from torchngvi.structures import Pattern

_NEAR = 1.0  # length of a step, √(2 KL), beyond which its pair is not kept
_WHOLE = 0.5  # ρ from which a step counts as one that the model of L at q had right
_CURVED = 1e-8  # smallest cosine of the angle between s and y


@final
class QuasiNewton(Acceleration):
    """L-BFGS in the frame of q: the natural gradient ∇L becomes B∇L, with B the limited-memory inverse Hessian.

    In the frame the Fisher metric is the identity, so that limited-memory BFGS (Nocedal 1980; Nocedal and Wright 2006,
    Algorithm 7.4) with the initial inverse Hessian 1 starts as the natural gradient and learns where the objective
    curves otherwise.  Pairs s = ρ direction, y = change of the gradient are carried to the next frame unchanged, which
    is parallel transport up to the rotation between two triangular roots; a step longer than 1 in the natural norm
    clears the memory, for it says nothing of the tail.  The memory of each batch member is its own.

    Use it where the last digits of a deterministic fit come slowly, as for a mean-field q of correlated variables or
    for weakly identified directions.  Steps are judged by trial, so that it needs an objective without noise.

    Args:
        memory: the number of pairs that are kept, at least 1; each costs two gradients of storage.

    Raises:
        InputError: if the memory is below 1.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, NaturalGradientVI
    >>> from torchngvi.rules import VariationalNewton
    >>> from torchngvi.stepsizes import SufficientDecrease
    >>> q, model = CholeskyGaussian(2), GeneralizedLinear(torch.eye(2), [0.0, 1.0])
    >>> opt = NaturalGradientVI(q, VariationalNewton(), step_size=SufficientDecrease(), metric=QuasiNewton())
    >>> first, second = opt.step(model), opt.step(model)
    >>> bool(second < first)
    True
    """

    def __init__(self, memory: int = 5) -> None:
        self.memory = read_size("memory", memory, "is the number of pairs kept")

    def init(self, q: Posterior) -> dict[str, Tensor]:
        """Return an empty memory of pairs (s, y), with the last gradient and direction."""
        flat = _flat(Local(q.mean_probe.detach(), q.root_probe.detach()), q.structure)
        return {
            # a tensor each: the memory after a step shares those that it keeps
            **{name: torch.zeros_like(flat) for name in self._names()},
            "kept": flat.new_zeros((self.memory, *q.batch_shape)),
            "gradient": torch.zeros_like(flat),
            "direction": torch.zeros_like(flat),
        }

    def forget(self, keep: Tensor, state: dict[str, Tensor]) -> None:
        """Drop the pairs of the members (*batch,) that the mask leaves out."""
        state["kept"] = state["kept"] * keep

    def __call__(
        self, q: Posterior, gradient: Local, went: Tensor, state: dict[str, Tensor]
    ) -> tuple[Bent, dict[str, Tensor]]:
        """Learn from the step before, then bend the gradient; return it with what of the state is to change."""
        structure, flat, names, size = q.structure, _flat(gradient, q.structure), self._names(), self.memory + 1
        s, y = went[..., None] * state["direction"], state["gradient"] - flat  # a pair and its negative are one
        pairs = s, *(state[name] for name in names[: self.memory]), y, *(state[name] for name in names[self.memory :])
        rows = torch.stack([*pairs, flat], -2)
        products = structure.total(rows @ rows.mT)
        ss, sy, yy, norm2 = (products[..., i, j] for i, j in ((0, 0), (0, size), (size, size), (-1, -1)))
        near = ss <= _NEAR**2
        if structure.leaves > 1:
            near = ss <= torch.where(went >= _WHOLE, raised(_NEAR**2, norm2, structure.leaves), _NEAR**2)
        useful = near & (sy > _CURVED * (ss * yy).sqrt())
        useless = ~useful
        present = torch.cat([useful[None], state["kept"] * near])
        kept = torch.where(useful, present[:-1], present[1:])
        present[-1] *= useless  # a new pair pushes out the oldest
        share = _shares(products[..., :-1, :], present.movedim(0, -1))
        bent = flat - (share[..., None, :] @ rows[..., :-1, :])[..., 0, :]
        slope = structure.total(torch.linalg.vecdot(flat, bent))
        downhill = slope > 0
        bent = torch.where(downhill[..., None], bent, flat)
        if (all_ := known_everywhere(useful)) or known_everywhere(useless):  # no pair is copied
            first = 0 if all_ else 1
            memory = *pairs[first : first + self.memory], *pairs[size + first : size + first + self.memory]
        else:
            halves = rows[..., :-1, :].unflatten(-2, (2, size))
            memory = where_members(useful, halves[..., :-1, :], halves[..., 1:, :]).flatten(-3, -2).unbind(-2)
        new = {
            **dict(zip(names, memory, strict=True)),
            "kept": kept * downhill,
            "gradient": flat.nan_to_num(0.0, 0.0, 0.0),  # a NaN is not remembered
            "direction": bent.nan_to_num(0.0, 0.0, 0.0),
        }
        a, P = bent.split([q.dim, bent.shape[-1] - q.dim], -1)
        return Bent(Local(a, structure.unflat(P)), torch.where(downhill, slope, norm2)), new

    def _names(self) -> list[str]:
        """Where the state has the steps s and the changes y of the gradient, the newest of each first."""
        return [f"{kind}{n}" for kind in "sy" for n in range(self.memory)]


def _shares(
    products: Tensor,  # of the rows S, Y with all rows S, Y, g, (*batch, 2 m, 2 m + 1); pairs the newest first
    present: Tensor,  # 1 for each pair that counts, 0 for the others, (*batch, m)
) -> Tensor:
    """The multiples (v, t) of S and Y that are taken off g, B g = g - Sᵀv - Yᵀt, (*batch, 2 m)."""
    # the compact form of Byrd, Nocedal and Schnabel (1994): with R the lower triangle of SYᵀ, the newest pair first,
    # and D its diagonal, t = R⁻¹ S g and v = R⁻ᵀ (Y g - (D + Y Yᵀ) t); a pair that does not count has a unit row in R
    size = present.shape[-1]
    of_s, of_y = (products.unflatten(-2, (2, size)) * present[..., None, :, None]).unbind(-3)
    R = of_s[..., size:-1].tril()
    R.diagonal(dim1=-2, dim2=-1).add_(1 - present)
    t = torch.linalg.solve_triangular(R, of_s[..., -1:], upper=False)
    rest = of_y[..., -1:] - of_y[..., size:-1] @ t
    rest = torch.addcmul(rest, R.diagonal(dim1=-2, dim2=-1)[..., None], t, value=-1)
    v = torch.linalg.solve_triangular(R.mT, rest, upper=True) * present[..., None]
    return torch.cat([v, t], -2)[..., 0]


def _flat(x: Local, structure: Pattern) -> Tensor:
    """(a, P) as one vector (*batch, F) whose dot product is the inner product of the frame."""
    return torch.cat([x.a, structure.flat(x.P)], -1)


_SHORT = 0.2  # ρ below which a step of Newton has failed
_NEAR_SITE = 3.0  # length of a step, √(2 KL), beyond which the expansion is not trusted


@final
class SiteNewton(Acceleration):
    """The gradient that leads `VariationalNewton` to the Newton point, where q is near it.

        Wδ = -a - ½Aᵀ(β_e ∘ δv)        D = P + Aᵀ diag(t) A,  t = β_e ∘ δe + β_v ∘ δv

    are the stationary conditions of a move m' = m + Cδ, V' = C(1 + D)⁻¹Cᵀ, with A = XC, δe = Aδ, δv_n = -(ADAᵀ)_nn to
    first order and β_e = ∂β/∂e, β_v = ∂β/∂v (Price 1958): N linear equations in δv, and quadratic convergence where the
    natural gradient, which treats the expected Hessian as if it stood still, has a linear tail.  Farther off, and where
    the Newton point is no descent or leaves the cone, the gradient is left as it is.  Use it for few rows, N ≤ 1000 or
    so: `RowSpace.fit` uses it.

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
        self, q: Posterior, gradient: Local, went: Tensor, state: dict[str, Tensor]
    ) -> tuple[Bent, dict[str, Tensor]]:
        """Bend the gradient of L/γ at q towards the Newton point; return it with what of the state is to change."""
        a, P = gradient
        eye = q.structure.eye(a)
        A, beta_e, beta_v = self._sites(q)
        L, solvable = cholesky(P + eye)  # W

        # δ = δ₀ - ½W⁻¹Aᵀ(β_e ∘ δv) and δv = δv₀ - (AAᵀ)²t, hence (1 + (AAᵀ)² T) δv = δv₀ - (AAᵀ)² t₀
        start = -_solve(L, a)
        t0 = beta_e * multiply(A, start)
        bends = beta_e[..., None] * A  # t = t₀ + T δv
        T = torch.diag_embed(beta_v) - 0.5 * bends @ torch.cholesky_solve(bends.mT, L)
        squares = (A @ A.mT).square()
        rows = torch.eye(A.shape[-2], dtype=a.dtype, device=a.device)
        delta_v = torch.linalg.solve_ex(rows + squares @ T, -(A @ P * A).sum(-1) - multiply(squares, t0))[0]
        D = P + A.mT @ ((t0 + multiply(T, delta_v))[..., None] * A)
        delta = start - 0.5 * _solve(L, multiply(A.mT, beta_e * delta_v))

        # VariationalNewton at ρ = 1 goes to V' = C(1 + D)⁻¹Cᵀ and m' = m - C(1 + D)⁻¹ a'
        bent = -multiply(eye + D, delta)
        slope = q.structure.total((a * bent).sum(-1) + 0.5 * (P * D).sum((-2, -1)))
        length2 = q.structure.dot(delta, delta) + 0.5 * q.structure.entries_norm2(D)
        # after a step of Newton that had to be cut short, one of the natural gradient
        failed = state["newton"] & (went < _SHORT)
        possible = q.structure.everywhere(solvable & cholesky(eye + D)[1])
        use = ~failed & possible & (slope > 0) & (length2 <= _NEAR_SITE**2)
        local = Local(torch.where(use[..., None], bent, a), torch.where(use[..., None, None], D, P))
        return Bent(local, torch.where(use, slope, q.norm2(gradient))), {"newton": use}

    def _sites(self, q: Posterior) -> tuple[Tensor, Tensor, Tensor]:
        """A = XC (*batch, N, D), and β_e, β_v (*batch, N) of L/γ."""
        rows = self.model.marginals(q.frame())
        if rows.projected is None:
            raise PairError("SiteNewton needs a dense X; got a sparse one. Use RowSpace(model).fit(), or X.to_dense().")
        slopes = bends_of(rows.likelihood, rows.y, rows.mean, rows.variance)
        beta_e, beta_v = (rows.weights * slope / self.model.temperature for slope in slopes)
        return rows.projected, beta_e, beta_v


def _solve(factor: Tensor, vector: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹ x."""
    return torch.cholesky_solve(vector[..., None], factor)[..., 0]
