"""The optimum as prior plus sites, and Gaussians from which the sites of some rows are taken out.

At the optimum S = Λ + Σ β_j x_jx_jᵀ.  Without the rows of B

    S_B = S - Σ_B β_j x_jx_jᵀ        m_B = m + S_B⁻¹ Σ_B α_j x_j

is the optimum while the other sites stand still.  They do not: along row j this cavity is off by de and dv, and to
third order the gradient of L without B there is

    r = (Cᵀ Σ ra_j x_j,  tril(Cᵀ Σ rb_j x_jx_jᵀ C))     ra = ½β_e(dv + de²) + ½β_ee de(dv + de²/3)
                                                        rb = β_e de + ½β_ee(dv + de²)              over j not in B

with C the root of the cavity and β_e, β_ee derivatives of β in e.  With H the Hessian of L in (m, C) at q the response
is -H⁻¹r, and ν² = rᵀH⁻¹r tells how far it goes.
"""

import copy
import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.fitting.fit import fit
from torchngvi.interfaces import Sites
from torchngvi.models import GeneralizedLinear
from torchngvi.numerics import linalg
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian

WIDEST = 60  # coefficients up to which the Hessian is written out
_AT_OPTIMUM = 1e-3  # natural-gradient norm of q above which its sites are not those of an optimum
_LOST = 1e-3  # what is inexact of q over what is left of S along some direction, above which nothing is divided out
_TOLERANCE = 1e-8  # of the fits without rows


class Cavities(NamedTuple):
    """Gaussians without the sites of some rows."""

    mean: Tensor  # (n, D)
    root: Tensor  # (n, D, D)
    left: Tensor  # whether enough is left of S in every direction, (n,)


class Optimum(NamedTuple):
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
    def of(cls, q: Gaussian, model: GeneralizedLinear) -> "Optimum":
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
        factor = None if q.dim > WIDEST else _factor(A, W0, sites.beta, bend, bend2)
        e, v = model.predictor(q.mean), A.square().sum(-1)  # of rows of weight 0 too
        return cls(model.X, model.weights, e, v, sites.alpha, sites.beta, bend, bend2, q.mean, C, V, norm, factor)

    @torch.no_grad()
    def without_rows(
        self,
        rows: Tensor,  # (n,)
    ) -> tuple[Cavities, Tensor]:
        """Take out one row each; the cavities after the response of the others, and ν² (n,)."""
        x, alpha, beta = self.X[rows], self.alpha[rows], self.beta[rows]
        a = x @ self.V  # V x_i
        k = 1 / (1 - beta * (a * x).sum(-1))
        mean = self.mean + (k * alpha)[:, None] * a
        root, info = torch.linalg.cholesky_ex(self.V + (k * beta)[:, None, None] * a[:, :, None] * a[:, None, :])
        found = self._kept(mean, root, (info == 0) & (k > 0) & (k * self.inexact <= _LOST))
        if self.hessian is None:
            return found, torch.where(found.left, self._own_change(rows, k), math.inf)
        across = a @ self.X.mT  # V_ji
        out = torch.zeros_like(across, dtype=torch.bool)
        out[torch.arange(len(rows), device=rows.device), rows] = True
        return self._respond(found, (k * alpha)[:, None] * across, (k * beta)[:, None] * across.square(), out)

    @torch.no_grad()
    def without(
        self,
        out: Tensor,  # (n, N), bool
    ) -> tuple[Cavities, Tensor]:
        """Take out several rows each; the cavities after the response of the others, and ν² (n,)."""
        found = self.divided(out, -1.0)
        if self.hessian is None:
            return found, torch.full_like(found.mean[:, 0], math.inf)
        de = (found.mean - self.mean) @ self.X.mT
        dv = (self.X @ found.root).square().sum(-1) - self.v
        return self._respond(found, de, dv, out)

    @torch.no_grad()
    def divided(
        self,
        out: Tensor,  # (n, N), bool
        times: float,  # -1 takes the sites of these rows out, 1 puts them in once more
    ) -> Cavities:
        """Multiply q by a power of the sites of some rows, which stand still."""
        beta, alpha = (torch.where(out, site, 0.0) for site in (self.beta, self.alpha))  # (n, N)
        A = self.X @ self.C
        eye = torch.eye(len(self.C), dtype=A.dtype, device=A.device)
        W = eye + times * ((A.mT * beta[:, None, :]) @ A)  # Cᵀ S_B C
        values, vectors, ok = linalg.eigh(W)
        left = ok & (values[:, 0] * _LOST >= self.inexact)
        inverse = (vectors / values[:, None, :].clamp_min(self.inexact)) @ vectors.mT
        mean = self.mean - times * (inverse @ (alpha @ A)[..., None])[..., 0] @ self.C.mT
        root, info = torch.linalg.cholesky_ex(inverse)
        return self._kept(mean, self.C @ root, left & (info == 0))

    def _kept(self, mean: Tensor, root: Tensor, left: Tensor) -> Cavities:
        """The cavities, and q itself where too little would be left."""
        mean, root = torch.where(left[:, None], mean, self.mean), torch.where(left[:, None, None], root, self.C)
        return Cavities(mean, root, left)

    def _respond(self, found: Cavities, de: Tensor, dv: Tensor, out: Tensor) -> tuple[Cavities, Tensor]:
        """Let the other sites respond; ν² is infinite where the step would leave the cone."""
        assert self.hessian is not None
        mean, root, left = found
        square = dv + de.square()
        ra = 0.5 * self.bend * square + 0.5 * self.bend2 * de * (dv + de.square() / 3)
        rb = self.bend * de + 0.5 * self.bend2 * square
        ra, rb = torch.where(out, 0.0, ra), torch.where(out, 0.0, rb)
        A = self.X @ root  # (n, N, D)
        low = torch.tril_indices(*self.C.shape, device=A.device)
        r = torch.cat([(ra[:, None, :] @ A)[:, 0], ((A * rb[..., None]).mT @ A)[:, low[0], low[1]]], -1)
        x = -torch.cholesky_solve(r.mT, self.hessian).mT
        delta, T = x[:, : len(self.C)], torch.zeros_like(root)
        T[:, low[0], low[1]] = x[:, len(self.C) :]
        T.diagonal(dim1=-2, dim2=-1).add_(1.0)
        inside = (T.diagonal(dim1=-2, dim2=-1) > 0).all(-1) & left
        moved = torch.where(inside[:, None, None], root @ T, root)
        shifted = torch.where(inside[:, None], (root @ delta[..., None])[..., 0], 0.0)
        return Cavities(mean + shifted, moved, left), torch.where(inside, -(r * x).sum(-1), math.inf)

    def _own_change(self, rows: Tensor, k: Tensor) -> Tensor:
        """The squared change of the row's own site at its cavity, to third order: a second-best flag."""
        v = self.v[rows]
        de, dv = k * self.alpha[rows] * v, k * self.beta[rows] * v.square()
        square = dv + de.square()
        ra = 0.5 * self.bend[rows] * square + 0.5 * self.bend2[rows] * de * (dv + de.square() / 3)
        rb = self.bend[rows] * de + 0.5 * self.bend2[rows] * square
        return ra.square() * v + 0.5 * (rb * v).square()


def refit(
    model: GeneralizedLinear,
    out: Tensor,  # (n, N), bool
    mean: Tensor,  # (n, D)
    root: Tensor,  # (n, D, D)
) -> tuple[Tensor, Tensor, int]:
    """Fit q without these rows, each from where it is thought to be: means, roots, and evaluations of the batch."""
    without = copy.copy(model)
    without.y = model.y.expand(len(out), -1)
    without.weights = torch.where(out, 0.0, model.weights)
    q = CholeskyGaussian(model.dim, (len(out),), mean=mean, scale=root, dtype=mean.dtype).to(mean.device)
    result = fit(q, without, tolerance=_TOLERANCE if mean.dtype == torch.float64 else None, progress=False)
    return q.mean, q.scale_tril, result.evaluations


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
