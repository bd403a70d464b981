"""Generalised linear mixed models with one grouping factor: y_ij ~ family(x_ijᵀβ + z_ijᵀb_i), b_i ~ N(0, Ω⁻¹).

With Ω = W Wᵀ and ω the entries of W (`torchngvi.models.mixed_prior`), θ = (b_1, ..., b_n, β, ω), and

    -log p(y, θ) = Σ_ij w_ij f(η_ij, y_ij) + ½ Σ_i b_iᵀΩb_i - n Σ_k ω_kk - log p(β) - log p(ω) + (nr/2) log 2π.

Under a Gaussian q all expectations are sums of one-dimensional ones and of closed forms.  Its precision has the pattern
of an arrow, in which q loses nothing: given (β, ω) the groups are independent (Tan and Nott 2018).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Frame, Framed, Posterior, Prior, Raw, TractableTarget
from torchngvi.models import checks
from torchngvi.models.generalized_linear import GeneralizedLinear
from torchngvi.models.likelihoods import Likelihood
from torchngvi.models.mixed_prior import (
    Effects,
    MixedPrior,
    Precision,
    derivative,
    quadratic_terms,
    root_of,
)
from torchngvi.models.mixed_start import information, started
from torchngvi.models.mixed_summary import MixedSummary, drawn_precisions, summarised
from torchngvi.numerics import sparse
from torchngvi.numerics.inference_mode import tracked
from torchngvi.numerics.versions import settings_of, tensors_of
from torchngvi.posteriors import PrecisionCholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures import arrow
from torchngvi.structures.pattern import Structured
from torchngvi.structures.storage import Part


class RandomEffects(NamedTuple):
    """The random effects of a `MixedModel`: r effects a group, of which each row has one group.

    Attributes:
        Z: their design, (N, r): a column of ones for an intercept that varies, a covariate for a slope that varies.
        groups: the group of each row, (N,), integers 0, ..., n - 1, in any order of the rows.

    >>> RandomEffects([[1.0], [1.0]], [0, 1]).groups
    [0, 1]
    """

    Z: Any
    groups: Any


class MixedModel(TractableTarget):
    """Log joint of a generalised linear mixed model with one grouping factor, with its expectation in closed form.

    One wants it for repeated measurements of patients, pupils of schools, and other data in groups whose levels, and
    perhaps slopes, vary.  ``fit(q, model)`` with ``q = model.posterior()`` needs no learning rate and no draws, and its
    cost is linear in the number of groups.

    Args:
        X: the design of the fixed effects β, (N, p), dense.
        y: the targets, (N,), as in `torchngvi.GeneralizedLinear`.
        random: `RandomEffects`, or a pair (Z, groups): the design (N, r) and the group of each row.
        family: the likelihood, "bernoulli_logit", "bernoulli_probit", "poisson_log", "gaussian" (noise 1), or a
            `Likelihood` such as ``GaussianNoise(0.1)`` or ``NegativeBinomial(2.0)``.
        prior: `MixedPrior`; by default N(0, 10²) of each fixed effect, and of Ω the Wishart prior of Kass and Natarajan
            (2006): ν = 1, S = J for r = 1, else ν = r + 1, S = J/(r + 1), where J is the mean over groups of
            Z_iᵀ diag(A'') Z_i at the estimate of β without random effects (under its prior).
        weights: factors of the log likelihood of each row, (N,), not negative.
        offset: what is added to the linear predictor, (N,), as the logarithm of an exposure.

    Attributes:
        structure: the arrow of θ = (b_1, ..., b_n, β, ω), n blocks of r coordinates before p + r(r + 1)/2 global ones.

    Raises:
        InputError: as `torchngvi.GeneralizedLinear`; designs of other numbers of rows, groups that are no numbers
            0, ..., n - 1 or have no rows, columns of Z that depend on one another, or a prior out of range.

    >>> from torchngvi import fit
    >>> groups = torch.arange(20) // 5
    >>> X = torch.ones(20, 1, dtype=torch.float64)
    >>> y = torch.tensor([1.0, 0, 2, 1, 0, 5, 7, 4, 6, 5, 2, 3, 1, 2, 2, 0, 0, 1, 0, 0])
    >>> model = MixedModel(X, y, RandomEffects(X, groups), "poisson_log")
    >>> q = model.posterior()
    >>> fit(q, model, progress=False).converged
    True
    >>> model.summary(q).fixed_sd.shape
    torch.Size([1])
    """

    temperature = 1.0

    @tracked
    def __init__(
        self,
        X: Any,
        y: Any,
        random: RandomEffects | tuple[Any, Any],
        family: str | Likelihood = "bernoulli_logit",
        *,
        prior: MixedPrior | None = None,
        weights: Any = None,
        offset: Any = None,
    ) -> None:
        prior = MixedPrior() if prior is None else prior
        if not (prior.fixed_scale > 0 and math.isfinite(prior.fixed_scale)):
            raise InputError(
                f"fixed_scale is the prior standard deviation of a fixed effect, positive and finite; got "
                f"{prior.fixed_scale}."
            )
        self.fixed = GeneralizedLinear(
            X, y, family, prior_precision=prior.fixed_scale**-2, weights=weights, offset=offset
        )
        self.X, self.likelihood, self.coding = self.fixed.X, self.fixed.likelihood, self.fixed.coding
        if sparse.is_sparse(self.X) or self.X.ndim > 2 or self.fixed.y.ndim > 1:
            raise InputError(
                "a MixedModel has one dense design X (N, p) and targets y (N,); got X of shape "
                f"{tuple(self.X.shape)}, {self.X.layout}, and y of {tuple(self.fixed.y.shape)}."
            )
        self.Z, self.groups = _random(*random, self.X)
        self.y, self.weights, self.offset = self.fixed.y, self.fixed.weights, self.fixed.offset
        self.n, self.r, self.p = int(self.groups.max()) + 1, self.Z.shape[1], self.X.shape[1]
        self.structure = arrow(groups=self.n, local=self.r, globals=self.p + self.r * (self.r + 1) // 2)
        self.dim = self.structure.dim
        chosen = information(self) if prior.precision is None else prior.precision
        self.precision = Precision(chosen, self.X, self.r)

    # ---------------------------------------------------------------------------- the target

    def check(self, q: Posterior) -> None:
        """Check that q is over these coordinates.

        Raises:
            InputError: if their number, the dtype or the device is another.
        """
        checks.posterior(q, self.dim, torch.Size(), self.X)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that a value depends on."""
        prior = (self.precision.scale, *self.fixed.prior)
        return (self.X, self.Z, self.groups, self.y, self.weights, self.offset, *prior, *tensors_of(self.likelihood))

    def settings(self) -> tuple[object, ...]:
        """Return the settings of the likelihood, and the degrees of freedom of the prior."""
        return (*settings_of(self.likelihood), self.precision.dof)

    def parts(
        self,
        theta: Tensor,  # (*any, D)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take θ apart: b (*any, n, r), β (*any, p) and ω (*any, r(r + 1)/2)."""
        b, beta, omega = theta.split([self.n * self.r, self.p, self.structure.dim - self.n * self.r - self.p], -1)
        return b.unflatten(-1, (self.n, self.r)), beta, omega

    def predictor(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Compute η = Xβ + Z b + offset, (*sample, *batch, N)."""
        b, beta, _ = self.parts(theta)
        return beta @ self.X.mT + self.offset + (b.index_select(-2, self.groups) * self.Z).sum(-1)

    def log_joint(self, theta: Tensor) -> Tensor:
        """Compute log p(y, θ) with all its constants, (*sample, *batch)."""
        b, beta, omega = self.parts(theta)
        energy = self.likelihood.energy(self.predictor(theta), self.y)
        data = torch.where(self.weights > 0, self.weights * energy, 0.0).sum(-1)
        effects = 0.5 * (b @ root_of(omega, self.r)).square().sum((-2, -1)) + self._linear(omega)
        return -(data + effects + self.fixed.prior.energy(beta) + self.precision.energy(omega))

    def _linear(self, omega: Tensor) -> Tensor:
        """What normalises the densities of b: (nr/2) log 2π - n Σ_k ω_kk."""
        constant = 0.5 * self.n * self.r * math.log(2 * math.pi)
        return constant - self.n * omega[..., self.precision.diagonal].sum(-1)

    def expected_energy(self, frame: Frame) -> tuple[Tensor, Framed | Raw]:
        """Compute E_q[ℓ] (*batch,), differentiable in the frame, and its derivative.

        A q over the arrow of the model gives a packet in its frame, and nothing is D x D; any other Gaussian, such as
        a dense one of few groups, one in θ.
        """
        structure = self.structure
        if frame.structure == structure and frame.upper:
            value, g, H = self.moments(frame.mean, frame.marginals())
            return value, Framed(frame.pull(g), structure.congruence(frame.root, H))
        root = frame.dense()
        value, g, H = self.moments(frame.mean, structure.from_dense(root @ root.mT))
        return value, Raw(g, structure.to_dense(structure.full(H)))

    def moments(
        self,
        mean: Tensor,  # m, (*batch, D)
        covariance: Structured,  # V in the pattern of the arrow
    ) -> tuple[Tensor, Tensor, Structured]:
        """Compute E_q[ℓ], g = E_q[∇ℓ] and H = E_q[∇²ℓ], which has the pattern of the arrow."""
        groups, roots = self.structure.parts(covariance)
        V, p = roots.square[..., 0, :, :], self.p
        b, beta, omega = self.parts(mean)
        of = Effects(b, omega, groups.square, groups.border[..., p:, :], V[..., p:, p:])
        value, row_g, row_H = self._rows(mean, groups, V[..., :p, :p])
        prior = self.fixed.prior
        assert isinstance(prior, Prior)
        spread = 0.5 * (prior.precision * V[..., :p, :p].diagonal(dim1=-2, dim2=-1)).sum(-1)
        diagonal, powers = self.precision.diagonal, self.precision.powers
        linear = self._linear(omega) - omega[..., diagonal] @ powers + self.precision.log_normaliser
        value = value + quadratic_terms(of, self.precision) + prior.energy(beta) + spread + linear
        d = derivative(of, self.precision)
        g_omega = d.omega.index_add(-1, diagonal, -(powers + self.n).expand(*d.omega.shape[:-1], -1))
        g = torch.cat([(row_g[0] + d.b).flatten(-2), row_g[1] + prior.force(beta), g_omega], -1)
        bb, border, bebe = row_H
        bebe = bebe + torch.diag(prior.precision)
        between = bebe.new_zeros(*bebe.shape[:-1], d.omega.shape[-1])
        top = torch.cat([torch.cat([bebe, between], -1), torch.cat([between.mT, d.omega_omega], -1)], -2)
        leaves = Part(bb + d.bb, torch.cat([border, d.omega_b], -2))
        return value, g, self.structure.matrix([leaves, Part(top[..., None, :, :], top[..., None, :0, :])])

    def _rows(
        self,
        mean: Tensor,
        groups: Part,  # of V
        between: Tensor,  # V_ββ
    ) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """The likelihood: value, gradients (b, β), and Hessians (b, b), (β, b), (β, β)."""
        here = self.weights > 0  # a row of weight 0 is not there, also where its loss would be infinite
        eta = torch.where(here, self.predictor(mean), 0.0)
        variance = torch.where(here, self.variances(self.X, self.Z, self.groups, groups, between), 1.0)
        moments = self.likelihood.expected(eta, variance, self.y)
        value, alpha, beta = (self.weights * part for part in moments)
        return value.sum(-1), *self.summed(alpha.detach(), beta.detach())

    @staticmethod
    def variances(X: Tensor, Z: Tensor, groups: Tensor, parts: Part, between: Tensor) -> Tensor:
        """The variances of the predictors of rows, zᵀV_bb z + 2 xᵀV_βb z + xᵀV_ββ x, (*batch, N)."""
        square = parts.square.index_select(-3, groups)
        border = parts.border[..., : X.shape[-1], :].index_select(-3, groups)
        local = (Z[:, None, :] * square).sum(-1) + 2 * (X[:, :, None] * border).sum(-2)
        return (local * Z).sum(-1) + ((X @ between) * X).sum(-1)

    def summed(
        self,
        alpha: Tensor,  # of each row, (*batch, N)
        beta: Tensor,
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Σ α (z, x) and Σ β (z, x)(z, x)ᵀ: by group in the parts of b, over all rows in that of the fixed effects."""
        X, Z, batch = self.X, self.Z, alpha.shape[:-1]
        empty = alpha.new_zeros(*batch, self.n, self.r)
        g = empty.index_add(-2, self.groups, alpha[..., None] * Z), alpha @ X
        scaled = beta[..., None] * Z
        bb = empty.new_zeros(*batch, self.n, self.r, self.r)
        bb = bb.index_add(-3, self.groups, scaled[..., None, :] * Z[:, :, None])
        border = empty.new_zeros(*batch, self.n, self.p, self.r)
        border = border.index_add(-3, self.groups, scaled[..., None, :] * X[:, :, None])
        return g, (bb, border, (X * beta[..., None]).mT @ X)

    # ---------------------------------------------------------------------------- the posterior

    @tracked
    @torch.no_grad()
    def posterior(self) -> PrecisionCholeskyGaussian:
        """Make a q over the arrow of the model, at a start from which few steps are needed.

        It stands at the mode of the penalised quasi-likelihood (Breslow and Clayton 1993), with Ω by an EM iteration, and
        has the curvature there for its precision.

        Returns:
            A new posterior of the dtype and on the device of X.
        """
        like = self.X
        q = PrecisionCholeskyGaussian(self.dim, structure=self.structure, dtype=like.dtype, device=like.device)
        q.assign(started(self), torch.ones((), dtype=torch.bool, device=like.device))
        return q

    @torch.no_grad()
    def summary(self, q: Gaussian, draws: int = 4000, seed: int = 0) -> MixedSummary:
        """Summarise q: fixed effects, standard deviations and correlations of the random effects, effects of groups.

        Standard deviations and correlations are functions of ω, and are summarised by draws of ω from q.

        Args:
            q: the fitted posterior, over the arrow of the model.
            draws: the number of draws of ω.
            seed: of the draws.

        Returns:
            Means and standard deviations, in the units of the predictor and of the columns of X and Z.

        Raises:
            InputError: a q over other coordinates.
        """
        self.check(q)
        return summarised(self, q, draws, seed)

    @torch.no_grad()
    def predict(
        self,
        q: Gaussian,
        X: Any,  # (M, p)
        Z: Any,  # (M, r)
        groups: Any = None,  # (M,)
        *,
        draws: int = 1000,
        seed: int = 0,
    ) -> Tensor:
        """Draw the linear predictors of new rows from the posterior predictive distribution.

        Apply the inverse link to the draws, ``.sigmoid()`` or ``.exp()``, for means of responses; add offsets first.

        Args:
            q: the fitted posterior, over the arrow of the model.
            X: the design of the fixed effects, (M, p).
            Z: the design of the random effects, (M, r).
            groups: the groups of the rows, (M,), numbers of groups of the data; None where all rows are of one group
                that the data do not have, b ~ N(0, Ω⁻¹) with Ω drawn from q.
            draws: the number of draws.
            seed: of the draws.

        Returns:
            Draws of η, (draws, M).

        Raises:
            InputError: rows of another width, groups that are none of the data, a q over other coordinates.
        """
        self.check(q)
        X, Z = checks.numbers("X", X, self.X), checks.numbers("Z", Z, self.X)
        if X.shape[1:] != (self.p,) or Z.shape != (len(X), self.r):
            raise InputError(
                f"new rows need X of shape (M, {self.p}) and Z of shape (M, {self.r}); got {tuple(X.shape)} and "
                f"{tuple(Z.shape)}."
            )
        generator = torch.Generator(self.X.device).manual_seed(seed)
        b, beta, omega = self.parts(q.sample((draws,), generator))
        if groups is not None:
            index = _integers(groups, len(X), self.X)
            if bool(((index < 0) | (index >= self.n)).any()):
                raise InputError(
                    f"groups of new rows must be those of the data, 0 to {self.n - 1}; got {int(index.min())} to "
                    f"{int(index.max())}. Leave groups= out for a group that the data do not have."
                )
            return beta @ X.mT + (b.index_select(-2, index) * Z).sum(-1)
        noise = torch.randn(draws, self.r, 1, generator=generator, dtype=X.dtype, device=X.device)
        new = torch.linalg.solve_triangular(drawn_precisions(omega, self.r).mT, noise, upper=True)
        return beta @ X.mT + new[..., 0] @ Z.mT


def _integers(groups: Any, rows: int, like: Tensor) -> Tensor:
    """The group of each row."""
    try:
        index = torch.as_tensor(groups)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"groups must be integers, one a row; got {type(groups).__name__} ({error}).") from error
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise InputError(
            f"groups must be integers; got {index.dtype}. Of labels, pass numpy.unique(labels, return_inverse=True)[1]."
        )
    if index.shape != (rows,):
        raise InputError(
            f"groups must have one integer for each of the {rows} rows of X; got shape {tuple(index.shape)}."
        )
    return index.to(device=like.device, dtype=torch.long)


def _random(Z: Any, groups: Any, X: Tensor) -> tuple[Tensor, Tensor]:
    """The design of the random effects and the groups, checked."""
    Z = checks.numbers("Z", Z, X)
    if Z.ndim != 2 or len(Z) != len(X) or Z.shape[1] == 0:
        raise InputError(
            f"Z must have one row for each of the {len(X)} rows of X, and a column a random effect; got shape "
            f"{tuple(Z.shape)}."
        )
    index = _integers(groups, len(X), X)
    lowest = int(index.min())
    counts = torch.bincount(index) if lowest >= 0 else None
    if counts is None or bool((counts == 0).any()):
        which = f"a group {lowest}" if counts is None else f"no row of group {int((counts == 0).nonzero()[0, 0])}"
        raise InputError(
            f"groups must be numbered 0, ..., n - 1, each with a row; got {which}. Pass torch.unique(groups, "
            "return_inverse=True)[1]."
        )
    lengths = torch.linalg.vector_norm(Z, dim=0)
    rank = int(torch.linalg.matrix_rank(Z / lengths.clamp_min(torch.finfo(Z.dtype).tiny)))
    if rank < Z.shape[1]:
        raise InputError(
            f"the {Z.shape[1]} columns of Z, the design of the random effects, must be linearly independent; their rank "
            f"is {rank}. Leave a column out."
        )
    return Z, index
