"""A linear mixed model with its random effects integrated out in closed form (Laird and Ware 1982).

With residuals e_i = y_i - X_iβ - o_i, weights w of the log likelihood, A_i = Z_iᵀW_iZ_i and c_i = Z_iᵀW_ie_i,

    log p(y_i | β, ω, σ) = -½ Σ_j w_ij log 2πσ² - e_iᵀW_ie_i/(2σ²)
                           + ½ log|Ω| - ½ log|M_i| + c_iᵀM_i⁻¹c_i/(2σ⁴),        M_i = Ω + A_i/σ²,

by Woodbury's identity, and b_i | y, β, ω, σ ~ N(M_i⁻¹c_i/σ², M_i⁻¹).  The rows enter through sums that are made once,
so that a value costs r x r operations for each group, however many rows there are; groups with the same A_i, as where
all are measured at the same times, share their factorisation.
"""

import math
from typing import NamedTuple, final

import torch
from torch import Tensor

from torchngvi.models.learned import Learned
from torchngvi.models.likelihoods import GaussianNoise
from torchngvi.models.mixed import MixedLogJoint
from torchngvi.models.mixed_integrated import IntegratedMixed
from torchngvi.models.mixed_prior import root_of
from torchngvi.models.mixed_rows import GroupedRows
from torchngvi.models.scale_priors import ScalesPrior
from torchngvi.numerics import linalg, small_blocks

_AT_ONCE = 2**17  # numbers of one table of values of the globals and groups: what a cache holds
_FEWER = 2  # times fewer tables that patterns must make to be worth their while


class Sums(NamedTuple):
    """What the likelihood knows of the rows: sums of products, about the least-squares estimate β̂ of β alone."""

    centre: Tensor  # β̂, (p,)
    A: Tensor  # Σ w z zᵀ of each group, (n, r, r)
    C: Tensor  # Σ w z (e, -xᵀ) of each group, e the residual at β̂, (n, r, 1 + p)
    square: Tensor  # Σ w (e, -xᵀ)(e, -xᵀ)ᵀ, (1 + p, 1 + p)
    weight: Tensor  # Σ w, ()

    @classmethod
    def of(cls, rows: GroupedRows) -> "Sums":
        """Sum over the rows of each group, and over all."""
        X, w = rows.X, rows.weights[:, None]
        y = torch.where(rows.weights > 0, rows.y - rows.offset, 0.0)
        gram, slope = rows.total(X.mT @ (w * X), X.mT @ (w[:, 0] * y))
        centre = linalg.pseudo_solve(gram, slope)
        table = torch.cat([(y - X @ centre)[:, None], -X], -1)
        scaled = w * rows.Z
        products = torch.cat([rows.Z, table], -1)
        summed = X.new_zeros(rows.n, rows.r, products.shape[-1]).index_add(
            0, rows.groups, scaled[:, :, None] * products[:, None, :]
        )
        A, C = summed.split([rows.r, table.shape[-1]], -1)
        return cls(centre, A, C, table.mT @ (w * table), rows.weights.sum())


class Patterns(NamedTuple):
    """Groups by their A: what groups of one pattern say is a sum of K squares, K no more than r(1 + p)."""

    A: Tensor  # (r, r, U)
    groups: Tensor  # how many have each pattern, (U,)
    C: Tensor  # (r, 1 + p, U, K)

    @classmethod
    def of(cls, sums: Sums) -> "Patterns":
        """Find groups with the same A, and replace their C by a root of its second moments where that saves much."""
        A, C = sums.A, sums.C
        n, r, width = C.shape
        single = cls(
            A.permute(1, 2, 0).contiguous(), torch.ones_like(A[:, 0, 0]), C.permute(1, 2, 0)[..., None].contiguous()
        )
        generator = torch.Generator().manual_seed(0)
        key = A.flatten(1) @ torch.rand(r * r, generator=generator, dtype=torch.float64).to(A)
        names, place, count = torch.unique(key, return_inverse=True, return_counts=True)
        size = r * width
        if _FEWER * len(names) * size > n:
            return single
        shared = A.new_zeros(len(names), r, r)
        shared[place] = A
        if not bool(torch.equal(shared[place], A)):  # two of them have one key
            return single
        flat = C.flatten(1)
        moments = A.new_zeros(len(names), size, size)
        for k in range(size):  # no table of all products
            moments[:, k] = moments[:, k].index_add(0, place, flat[:, k, None] * flat)
        values, vectors, ok = linalg.eigh(moments)
        if not bool(ok.all()):
            return single
        root = (vectors * values.clamp_min(0.0).sqrt()[:, None, :]).mT
        C = root.unflatten(-1, (r, width)).permute(2, 3, 0, 1)  # from (U, K, r, 1 + p)
        return cls(shared.permute(1, 2, 0).contiguous(), count.to(A), C.contiguous())


@final
class GaussianMixed(IntegratedMixed):
    """The log joint log p(y, β, ω, φ) of the globals of a linear mixed model: random effects integrated out exactly.

    One wants it where noise is Gaussian, for any number of random effects: nothing is approximated, and the cost of a
    value does not depend on the number of rows.

    Args:
        model: the log joint of all coordinates, with `torchngvi.models.GaussianNoise`.
        learned: `torchngvi.models.learned.LearnedNoise` where the residual sd is learned, else None.
        scales: the prior of standard deviations and correlations; None for the prior of the model.

    >>> from torchngvi.models import MixedLogJoint
    >>> X = torch.ones(4, 1, dtype=torch.float64)
    >>> model = MixedLogJoint(X, [1.0, 2.0, 0.0, 1.0], (X, [0, 0, 1, 1]), GaussianNoise(0.5))
    >>> GaussianMixed(model).log_joint(torch.zeros(5, 2, dtype=torch.float64)).shape
    torch.Size([5])
    """

    def __init__(self, model: MixedLogJoint, learned: Learned | None = None, scales: ScalesPrior | None = None) -> None:
        super().__init__(model, learned, scales)
        self.sums = Sums.of(model.rows)
        self.patterns = Patterns.of(self.sums)

    @property
    def how(self) -> str:
        """How the random effects are integrated out, for a sentence."""
        return "in closed form"

    def data(
        self,
        theta: Tensor,  # (S, P)
    ) -> Tensor:
        """Compute log p(y | β, ω, φ) of all values of the globals in one go, (S,)."""
        beta, omega = self.parts(theta)
        log_sd = self.log_sd(theta)
        precision = torch.exp(-2 * log_sd)  # σ⁻², (S,)
        along = torch.cat([torch.ones_like(beta[:, :1]), beta - self.sums.centre], -1)  # (S, 1 + p)
        square = ((along @ self.sums.square) * along).sum(-1)
        log_det, quadratic = self._reduced(omega, along, precision)
        of_rows = self.sums.weight * (log_sd + 0.5 * math.log(2 * math.pi)) + 0.5 * precision * square
        half = omega[:, self.scales.diagonal].sum(-1)  # ½ log|Ω|
        return self.rows.n * half - 0.5 * log_det + 0.5 * precision.square() * quadratic - of_rows

    def log_sd(
        self,
        theta: Tensor,  # (S, P)
    ) -> Tensor:
        """log σ of the noise, (S,)."""
        phi = self.parameter(theta)
        if phi is not None:
            return phi
        likelihood = self.rows.likelihood
        assert isinstance(likelihood, GaussianNoise)
        return torch.full_like(theta[:, 0], math.log(likelihood.noise))

    def _reduced(
        self,
        omega: Tensor,  # (S, q)
        along: Tensor,  # (S, 1 + p)
        precision: Tensor,  # (S,)
    ) -> tuple[Tensor, Tensor]:
        """Σ log|M_i| and Σ c_iᵀM_i⁻¹c_i, (S,), by M = L D Lᵀ written out over r: elementwise over the groups."""
        of, W = self.patterns, root_of(omega, self.rows.r)
        Omega, size = W @ W.mT, self.rows.r
        pivots: list[Tensor] = []
        lower: list[list[Tensor]] = []  # L
        scaled: list[list[Tensor]] = []  # L D
        left: list[Tensor] = []  # L⁻¹ c
        quadratic = torch.zeros_like(precision)
        for i in range(size):
            lower.append([])
            scaled.append([])
            for k in range(i + 1):
                entry = torch.addcmul(Omega[:, i, k, None], precision[:, None], of.A[i, k])  # (S, U)
                for j in range(k):
                    entry = torch.addcmul(entry, lower[i][j], scaled[k][j], value=-1)
                if k == i:
                    pivots.append(entry)
                else:
                    scaled[i].append(entry)
                    lower[i].append(entry / pivots[k])
            c = (along @ of.C[i].flatten(1)).unflatten(-1, of.C.shape[-2:])  # (S, U, K)
            for j in range(i):
                c = torch.addcmul(c, lower[i][j][..., None], left[j], value=-1)
            left.append(c)
            quadratic = quadratic + torch.linalg.vecdot((c / pivots[i][..., None]).flatten(1), c.flatten(1))
        product = pivots[0]
        for pivot in pivots[1:]:
            product = product * pivot
        return product.log() @ of.groups, quadratic

    def chunks(
        self,
        theta: Tensor,  # (S, P)
    ) -> tuple[Tensor, ...]:
        """Split values of the globals so that tables of values and groups stay small."""
        return theta.split(max(1, _AT_ONCE // self.patterns.C[0, 0].numel()))

    @torch.no_grad()
    def moments(
        self,
        theta: Tensor,  # (S, P)
    ) -> tuple[Tensor, Tensor]:
        """Means (S, n, r) and covariances (S, n, r, r) of the random effects given the data and the globals."""
        beta, omega = self.parts(theta)
        W, precision = root_of(omega, self.rows.r), torch.exp(-2 * self.log_sd(theta))[:, None, None]
        along = torch.cat([torch.ones_like(beta[:, :1]), beta - self.sums.centre], -1)
        c = (along @ self.sums.C.flatten(0, 1).mT).unflatten(-1, self.sums.C.shape[:2]) * precision
        M = (W @ W.mT)[:, None] + precision[..., None] * self.sums.A
        inverse = small_blocks.inverse(small_blocks.cholesky(M)[0])
        covariance = inverse.mT @ inverse
        return (covariance @ c[..., None])[..., 0], covariance
