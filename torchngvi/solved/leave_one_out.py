"""Leave-one-out predictive densities of all rows of a regression, by dividing out one site at a time.

At the optimum S = Λ + Σ β_j x_jx_jᵀ, so that row i can be taken out of q in closed form: with a = Vx_i, s² = x_iᵀa and
k = 1/(1 - β_i s²) the cavity has the mean m + kα_i a and the covariance V + kβ_i aaᵀ.  It is the optimum without row i
while the other sites stand still.  They do not: along row j the cavity is off by de = kα_i V_ji and dv = kβ_i V_ji²,
and to third order the gradient of L without row i at the cavity is

    r = (Cᵀ Σ ra_j x_j,  tril(Cᵀ Σ rb_j x_jx_jᵀ C))     ra = ½β_e(dv + de²) + ½β_ee de(dv + de²/3)
                                                        rb = β_e de + ½β_ee(dv + de²)              over j ≠ i

with C the root of the cavity and β_e, β_ee derivatives of β in e.  With H the Hessian of L in (m, C) at q the response
is -H⁻¹r, and ν² = rᵀH⁻¹r tells how far it goes.  Where ν² is above a bound, the optimum without the row is found by a
fit.
"""

import copy
import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.diagnostics import log_expected_likelihood
from torchngvi.errors import InputError, PairError
from torchngvi.fitting.fit import fit
from torchngvi.interfaces import Sites
from torchngvi.models import GeneralizedLinear
from torchngvi.numerics import sparse
from torchngvi.numerics.inference_mode import tracked
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian

_FLAG = 1e-3  # ν² up to which corrected densities were right to 2e-4 on the problems it was chosen on
_AT_OPTIMUM = 1e-3  # natural-gradient norm of q above which its sites are not those of an optimum
_LOST = 1e-3  # what is inexact of q over what a row leaves, 1 - β_i s², above which a row is not divided out
_WIDEST = 60  # coefficients up to which the Hessian is written out
_AT_ONCE = 20_000_000  # numbers
_TOLERANCE = 1e-8  # of the fits of flagged rows


class LeaveOneOut(NamedTuple):
    """What q says of each row that it has not seen.

    Attributes:
        density: log p(y_i | the other rows) under the Gaussian q_-i, (N,), in nats.
        in_sample: the same under q itself, (N,).
        response: ν², by how much the other sites respond, (N,); of a design of more than 60 columns the same of the
            row's own site at its cavity.  Infinite where next to nothing but the row determines some direction, so
            that it cannot be divided out of a q that is as exact as this one.
        resolved: rows whose q_-i was found by a fit, (N,).
        shift: by how much the mean of q moves without the row, in its standard deviations, (N, D).
        evaluations: of those fits, all members of a batch at once.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
    >>> X, y = torch.ones(4, 1).double(), [0.0, 1.0, 2.0, 5.0]
    >>> model, q = GeneralizedLinear(X, y, "gaussian"), CholeskyGaussian(1, dtype=torch.float64)
    >>> result = fit(q, model, progress=False)
    >>> found = leave_one_out(q, model)
    >>> [round(x, 4) for x in found.density.tolist()]  # N(y_i; sum of the others/4, 1 + 1/4)
    [-2.6305, -1.2555, -1.1305, -8.2555]
    >>> round(found.total, 3), round(found.complexity, 3)
    (-13.272, 3.132)
    """

    density: Tensor  # (N,)
    in_sample: Tensor  # (N,)
    response: Tensor  # (N,)
    resolved: Tensor  # (N,)
    shift: Tensor  # (N, D)
    evaluations: int

    @property
    def total(self) -> float:
        """The sum of the log densities, elpd, in nats."""
        return float(self.density.sum())

    @property
    def standard_error(self) -> float:
        """The standard error of the sum over rows like these, √(N var)."""
        return math.sqrt(len(self.density) * float(self.density.var()))

    @property
    def complexity(self) -> float:
        """The effective number of parameters, p_loo: by how much the rows are better known in sample."""
        return float((self.in_sample - self.density).sum())

    def __str__(self) -> str:
        again = int(self.resolved.sum())
        text = f"elpd {self.total:.2f} ± {self.standard_error:.2f} nats over {len(self.density)} rows"
        return f"{text}, p_loo {self.complexity:.2f}; {again} of them by a fit without the row."


@tracked
def leave_one_out(
    q: Gaussian,
    model: GeneralizedLinear,
    flag: float = _FLAG,
) -> LeaveOneOut:
    """Compute the log predictive density of each row under the Gaussian fitted to the others, without N refits.

    One wants it to compare models and to find rows that a model does not expect.  A row is divided out of q as a site;
    the response of the other sites follows from the Hessian of L; and rows that they respond to strongly are fitted
    anew, all in a few batches.  Pareto-smoothed importance sampling, which ArviZ has, misses such rows: its k speaks
    of draws, and not of the sites.

    Args:
        q: the optimum of the model, dense, without batch dimensions.
        model: one design with rows of weights that are not negative, at the temperature 1.  Densities are of a row as
            it is, without its weight; a row of weight 0 is one that was left out anyway.
        flag: the ν² above which a row is fitted anew; 0 for all rows, infinity for none but those that cannot be
            divided out.

    Returns:
        The densities, and how they were found.

    Raises:
        PairError: another model, or a posterior that is not dense.
        InputError: a q of another size or dtype than the model, or not at its optimum, a flag that is negative.
    """
    _check(q, model, flag)
    here = _Sites.of(q, model)
    count = len(here.X)
    rows = torch.arange(count, device=here.X.device)
    per_row = count * q.dim if q.dim <= _WIDEST else q.dim**2
    parts = [here.without(chunk) for chunk in rows.split(max(1, _AT_ONCE // per_row))]
    mean, root, response = (torch.cat([part[k] for part in parts]) for k in range(3))
    resolved = ((response > flag) | ~response.isfinite()) & (here.weights > 0)
    evaluations = 0
    for chunk in resolved.nonzero()[:, 0].split(max(1, _AT_ONCE // (count * q.dim))):
        evaluations += _resolve(model, chunk, mean, root) if len(chunk) else 0
    spread = (root.mT @ here.X[..., None])[..., 0].square().sum(-1)
    density = _log_density(model, (here.X * mean).sum(-1) + model.offset, spread.sqrt())
    inside = _log_density(model, here.e, here.v.sqrt())
    shift = (mean - q.mean) / q.stddev
    return LeaveOneOut(density, inside, response, resolved, shift, evaluations)


def _check(q: Gaussian, model: GeneralizedLinear, flag: float) -> None:
    if not isinstance(model, GeneralizedLinear) or sparse.is_sparse(model.X) or model.X.ndim > 2 or model.y.ndim > 1:
        raise PairError(
            f"leave_one_out takes a GeneralizedLinear with one dense design and one y; got {type(model).__name__}."
        )
    if not isinstance(q, Gaussian) or q.batch_shape or q.structure.widest < q.dim:
        raise PairError(
            "leave_one_out divides rows out of one dense Gaussian, since a mean field has no covariances with which "
            f"the others could respond; got {q!r}."
        )
    model.check(q)
    if model.temperature != 1:
        raise InputError(
            f"leave_one_out is of a posterior, at the temperature 1; this model has {model.temperature:g}."
        )
    if not flag >= 0:
        raise InputError(f"flag bounds ν², which is not negative; got {flag}.")


class _Sites(NamedTuple):
    """The optimum as prior plus sites."""

    X: Tensor
    weights: Tensor
    e: Tensor
    v: Tensor
    alpha: Tensor
    beta: Tensor
    bend: Tensor  # β_e
    bend2: Tensor  # β_ee
    mean: Tensor
    C: Tensor
    V: Tensor
    inexact: float  # the natural-gradient norm of q, or rounding
    hessian: Tensor | None  # the Cholesky factor of H, (P, P), where it is not too large

    @classmethod
    @torch.no_grad()
    def of(cls, q: Gaussian, model: GeneralizedLinear) -> "_Sites":
        """Evaluate the sites, and the Hessian."""
        frame = q.frame()
        _, sites = model.data_energy(frame)
        assert isinstance(sites, Sites)
        assert sites.at is not None
        assert sites.bends is not None
        prior = model.prior
        V = q.covariance
        C = torch.linalg.cholesky(V)
        g = model.X.mT @ sites.alpha + prior.force(q.mean)
        H = prior.add_to((model.X.mT * sites.beta) @ model.X)
        A = model.X @ C
        W0 = C.mT @ H @ C
        eye = torch.eye(len(C), dtype=C.dtype, device=C.device)
        norm = math.sqrt(float((C.mT @ g).square().sum() + 0.5 * (W0 - eye).square().sum()))
        if not norm <= _AT_OPTIMUM:
            raise InputError(
                f"leave_one_out takes rows out of an optimum, and the natural-gradient norm of q is {norm:.2g}: fit it "
                f"to this model first, below {_AT_OPTIMUM:g}{'' if q.dtype == torch.float64 else ', in float64'}."
            )
        norm = max(norm, torch.finfo(q.dtype).eps)
        bend, bend2 = (model.weights * part for part in sites.bends(*sites.at))
        bend2 = 2 * bend2  # ∂_v = ½∂_ee
        factor = None if q.dim > _WIDEST else _factor(A, W0, sites.beta, bend, bend2)
        e, v = model.predictor(q.mean), A.square().sum(-1)  # of rows of weight 0 too
        return cls(model.X, model.weights, e, v, sites.alpha, sites.beta, bend, bend2, q.mean, C, V, norm, factor)

    @torch.no_grad()
    def without(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, root and ν² without each of some rows: (n, D), (n, D, D), (n,)."""
        x, alpha, beta = self.X[rows], self.alpha[rows], self.beta[rows]
        a = x @ self.V  # V x_i
        k = 1 / (1 - beta * (a * x).sum(-1))
        mean = self.mean + (k * alpha)[:, None] * a
        root, info = torch.linalg.cholesky_ex(self.V + (k * beta)[:, None, None] * a[:, :, None] * a[:, None, :])
        left = (info == 0) & (k > 0) & (k * self.inexact <= _LOST)
        mean, root = torch.where(left[:, None], mean, self.mean), torch.where(left[:, None, None], root, self.C)
        if self.hessian is None:
            change = self._own_change(rows, k)
            return mean, root, torch.where(left, change, math.inf)
        across = a @ self.X.mT  # V_ji
        de, dv = (k * alpha)[:, None] * across, (k * beta)[:, None] * across.square()
        square = dv + de.square()
        ra = 0.5 * self.bend * square + 0.5 * self.bend2 * de * (dv + de.square() / 3)
        rb = self.bend * de + 0.5 * self.bend2 * square
        own = torch.arange(len(rows), device=rows.device)
        ra[own, rows] = 0.0
        rb[own, rows] = 0.0
        A = self.X @ root  # (n, N, D)
        low = torch.tril_indices(*self.C.shape, device=rows.device)
        r = torch.cat([(ra[:, None, :] @ A)[:, 0], ((A * rb[..., None]).mT @ A)[:, low[0], low[1]]], -1)
        x_ = -torch.cholesky_solve(r.mT, self.hessian).mT
        delta, T = x_[:, : len(self.C)], torch.zeros_like(root)
        T[:, low[0], low[1]] = x_[:, len(self.C) :]
        T.diagonal(dim1=-2, dim2=-1).add_(1.0)
        inside = (T.diagonal(dim1=-2, dim2=-1) > 0).all(-1) & left
        moved = torch.where(inside[:, None, None], root @ T, root)
        shifted = torch.where(inside[:, None], (root @ delta[..., None])[..., 0], 0.0)
        return mean + shifted, moved, torch.where(inside, -(r * x_).sum(-1), math.inf)

    def _own_change(self, rows: Tensor, k: Tensor) -> Tensor:
        """The squared change of the row's own site at its cavity, to third order: a second-best flag."""
        v = self.v[rows]
        de, dv = k * self.alpha[rows] * v, k * self.beta[rows] * v.square()
        square = dv + de.square()
        ra = 0.5 * self.bend[rows] * square + 0.5 * self.bend2[rows] * de * (dv + de.square() / 3)
        rb = self.bend[rows] * de + 0.5 * self.bend2[rows] * square
        return ra.square() * v + 0.5 * (rb * v).square()


def _factor(A: Tensor, W0: Tensor, beta: Tensor, bend: Tensor, bend2: Tensor) -> Tensor:
    """The Cholesky factor of the Hessian of L in the frame, over (δ, T_kl for k ≥ l), (P, P)."""
    dim = A.shape[1]
    low = torch.tril_indices(dim, dim, device=A.device)
    features = A[:, low[0]] * A[:, low[1]]
    mixed = (A.mT * bend) @ features
    of_root = (features.mT * bend2) @ features
    same = low[1][:, None] == low[1][None, :]  # the same column of T
    of_root = of_root + torch.where(same, W0[low[0]][:, low[0]], 0.0)
    of_root.diagonal().add_((low[0] == low[1]).to(A.dtype))
    H = torch.cat([torch.cat([W0, mixed], 1), torch.cat([mixed.mT, of_root], 1)], 0)
    return torch.linalg.cholesky(H)


def _resolve(model: GeneralizedLinear, rows: Tensor, mean: Tensor, root: Tensor) -> int:
    """Fit q without each of these rows, from where it is thought to be, and write it there."""
    count = len(rows)
    without = copy.copy(model)
    without.y = model.y.expand(count, -1)
    without.weights = model.weights.repeat(count, 1)
    without.weights[torch.arange(count, device=rows.device), rows] = 0.0
    q = CholeskyGaussian(model.dim, (count,), mean=mean[rows], scale=root[rows], dtype=mean.dtype).to(mean.device)
    result = fit(q, without, tolerance=_TOLERANCE if mean.dtype == torch.float64 else None, progress=False)
    mean[rows], root[rows] = q.mean, q.scale_tril
    return result.evaluations


def _log_density(model: GeneralizedLinear, mean: Tensor, sd: Tensor) -> Tensor:
    """log E p(y_i | η) under η ~ N(e_i, s_i²), (N,)."""
    found = log_expected_likelihood(model.likelihood, *(x.double() for x in (mean, sd, model.y)))
    return found.to(mean.dtype)
