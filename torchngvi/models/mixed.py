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

from torchngvi.arguments import shown
from torchngvi.errors import InputError
from torchngvi.interfaces import Coordinates, Posterior, Prior
from torchngvi.models import checks
from torchngvi.models.effects_prior import derivative, expected_energy
from torchngvi.models.generalized_linear import GeneralizedLinear
from torchngvi.models.likelihoods import Likelihood
from torchngvi.models.mixed_prior import Effects, MixedPrior, check_one_prior, checked_prior, root_of
from torchngvi.models.mixed_rows import GroupedRows
from torchngvi.models.mixed_spread import SpreadGroups
from torchngvi.models.mixed_start import started
from torchngvi.models.mixed_summary import MixedSummary, predicted, summarised
from torchngvi.numerics.versions import tracked
from torchngvi.posteriors import PrecisionCholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures import arrow
from torchngvi.structures.pattern import Structured
from torchngvi.structures.storage import Part

_NARROWER = (1.0, 3.0, 10.0, 30.0, 100.0)  # factors of the root of the precision of a start, as long as they help


class RandomEffects(NamedTuple):
    """The random effects of a mixed model: r effects a group, of which each row has one group.

    Attributes:
        Z: their design, (N, r): a column of ones for an intercept that varies, a covariate for a slope that varies.
        groups: the group of each row, (N,), integers 0, ..., n - 1, in any order of the rows.

    >>> RandomEffects([[1.0], [1.0]], [0, 1]).groups
    [0, 1]
    """

    Z: Any
    groups: Any


class MixedLogJoint(SpreadGroups):
    """Log joint of a generalised linear mixed model with one grouping factor, with its expectation in closed form.

    Use it for repeated measurements of patients, pupils of schools, and other data in groups whose levels, and
    perhaps slopes, vary.  ``fit(q, model)`` with ``q = model.posterior()`` needs no learning rate and no draws, and its
    cost is linear in the number of groups.

    Args:
        X: the design of the fixed effects β, (N, p), dense.
        y: the targets, (N,), as in `torchngvi.GeneralizedLinear`; or many sets of them, (*batch, N), each a model of
            its own with the same rows, designs and groups, and with its own default prior of Ω.
        random: `RandomEffects`, or a pair (Z, groups): the design (N, r) and the group of each row.
        family: the likelihood, "bernoulli_logit", "bernoulli_probit", "poisson_log", "gaussian" (noise 1), or a
            `Likelihood` such as ``GaussianNoise(0.1)`` or ``NegativeBinomial(2.0)``.
        prior: `MixedPrior`; by default in the units of the data: the columns of X and Z are centred and scaled inside,
            θ is of these columns, and `summary` and `predict` are in the units of the user. Its precision
            "kass-natarajan" is the Wishart prior of Kass and Natarajan (2006): ν = 1, S = J for r = 1, else ν = r + 1,
            S = J/(r + 1), where J is the mean over groups of Z_iᵀ diag(A'') Z_i at the estimate of β without random
            effects (under its prior).
        weights: factors of the log likelihood of each row, (N,), not negative.
        offset: what is added to the linear predictor, (N,), as the logarithm of an exposure.

    Attributes:
        structure: the arrow of θ = (b_1, ..., b_n, β, ω), n blocks of r coordinates before p + r(r + 1)/2 global ones.
        rows: the data, whose ``columns`` and ``within`` say how X and Z have been centred and scaled, None where a
            prior that was given is for the columns as they are.
        covariance_prior: of ω.

    Raises:
        InputError: as `torchngvi.GeneralizedLinear`; designs of other numbers of rows, groups that are no numbers
            0, ..., n - 1 or have no rows, columns of Z that depend on one another, or a prior out of range.

    >>> from torchngvi import fit
    >>> groups = torch.arange(20) // 5
    >>> X = torch.ones(20, 1, dtype=torch.float64)
    >>> y = torch.tensor([1.0, 0, 2, 1, 0, 5, 7, 4, 6, 5, 2, 3, 1, 2, 2, 0, 0, 1, 0, 0])
    >>> model = MixedLogJoint(X, y, RandomEffects(X, groups), "poisson_log")
    >>> q = model.posterior()
    >>> fit(q, model, progress=False).converged
    True
    >>> model.summary(q).fixed_sd.shape
    torch.Size([1])
    """

    temperature = 1.0
    members = True  # whether y may be several sets of targets

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
        self.asked = prior = checked_prior(prior)
        check_one_prior(prior)
        if not isinstance(random, tuple | list) or len(random) != 2:
            parted = isinstance(random, tuple | list)
            got = f"a {type(random).__name__} of {len(random)} parts" if parted else shown(random)
            raise InputError(f"random is a pair of a design and groups, RandomEffects(Z, groups); got {got}.")
        scale = 1.0 if prior.fixed_scale is None else prior.fixed_scale
        self.fixed = GeneralizedLinear(X, y, family, prior_precision=scale**-2, weights=weights, offset=offset)
        self.coding = self.fixed.coding
        self.rows = rows = GroupedRows(self.fixed, random[0], random[1], self.members)
        self.structure = arrow(groups=rows.n, local=rows.r, globals=rows.p + rows.r * (rows.r + 1) // 2)
        self.dim = self.structure.dim
        self.settle()

    # ---------------------------------------------------------------------------- the target

    def check(self, q: Posterior) -> None:
        """Check that q is over these coordinates.

        Raises:
            InputError: if their number, the dtype, the device or the batch is another.
        """
        checks.posterior(q, self.dim, self.rows.batch, self.rows.X)

    def log_joint(self, theta: Tensor) -> Tensor:
        """Compute log p(y, θ) with all its constants, (*sample, *batch).

        Of groups that are spread over processes θ has the effects of this one, and the values are sums over all.
        """
        rows = self.rows
        b, beta, omega = rows.parts(theta)
        data = (rows.weights * rows.likelihood.energy(rows.present(rows.predictor(theta), 0.0), rows.y)).sum(-1)
        effects = 0.5 * (b @ root_of(omega, rows.r)).square().sum((-2, -1)) + self._linear(omega)
        (data_and_effects,) = rows.total(data + effects)
        return -(data_and_effects + self.fixed.prior.energy(beta) + self.covariance_prior.energy(omega))

    def _linear(self, omega: Tensor) -> Tensor:
        """What normalises the densities of b: (nr/2) log 2π - n Σ_k ω_kk."""
        constant = 0.5 * self.rows.n * self.rows.r * math.log(2 * math.pi)
        return constant - self.rows.n * omega[..., self.covariance_prior.diagonal].sum(-1)

    def moments(
        self,
        mean: Tensor,  # m, (*batch, D)
        covariance: Structured,  # V in the pattern of the arrow
    ) -> tuple[Tensor, Tensor, Structured]:
        """Compute E_q[ℓ], g = E_q[∇ℓ] and H = E_q[∇²ℓ], which has the pattern of the arrow."""
        groups, roots = self.structure.parts(covariance)
        V, p = roots.square[..., 0, :, :], self.rows.p
        b, beta, omega = self.rows.parts(mean)
        of = Effects(b, omega, groups.square, groups.border[..., p:, :], V[..., p:, p:])
        value, row_g, row_H = self._rows(mean, groups, V[..., :p, :p])
        prior = self.fixed.prior
        assert isinstance(prior, Prior)
        spread = 0.5 * (prior.precision * V[..., :p, :p].diagonal(dim1=-2, dim2=-1)).sum(-1)
        value = value + prior.energy(beta) + spread + expected_energy(of, self.covariance_prior)
        d = derivative(of, self.covariance_prior)
        g = torch.cat([(row_g[0] + d.b).flatten(-2), row_g[1] + prior.force(beta), d.omega], -1)
        bb, border, bebe = row_H
        bebe = bebe + torch.diag_embed(prior.precision)
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
        total, sums = mean.new_zeros(()), None
        for rows in self.rows.blocks():
            eta, variance = rows.present(rows.predictor(mean), 0.0), rows.present(rows.variances(groups, between), 1.0)
            value, alpha, beta = (rows.weights * part for part in rows.likelihood.expected(eta, variance, rows.y))
            total, sums = total + value.sum(-1), rows.summed(alpha.detach(), beta.detach(), sums)
        assert sums is not None
        return total, *sums

    # ---------------------------------------------------------------------------- the posterior

    @tracked
    @torch.no_grad()
    def posterior(self) -> PrecisionCholeskyGaussian:
        """Make a q over the arrow of the model, at a start from which few steps are needed.

        It stands at the mode of the penalised quasi-likelihood (Breslow and Clayton 1993), with Ω by an EM iteration,
        and has the curvature there for its precision, or a multiple of it where that raises the bound: counts that are
        all 0 say little at their mode of how steeply the likelihood falls beside it.

        Returns:
            A new posterior of the dtype and on the device of X, or a batch of them, one for each set of targets.
        """
        like, batch = self.rows.X, self.rows.batch
        q = PrecisionCholeskyGaussian(self.dim, batch, structure=self.structure, dtype=like.dtype, device=like.device)
        mode, root = started(self.rows, self.covariance_prior, self.structure)
        at, narrowest = q.snapshot()
        best = like.new_full(batch, math.inf)
        going = torch.ones_like(best, dtype=torch.bool)
        for factor in _NARROWER:
            q.restore(Coordinates(mode, factor * root))
            loss = self._loss(q)
            better = going & (loss < best)
            at = torch.where(better[..., None], mode, at)
            narrowest = torch.where(better[..., None], factor * root, narrowest)
            going = going & (better | best.isinf())
            best = torch.where(better, loss, best)
            if not bool(going.any()):
                break
        q.restore(Coordinates(at, narrowest))
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
            Means and standard deviations, in the units of the predictor and of the columns of X and Z; of many sets of
            targets one summary of all, of which ``member`` takes one.

        Raises:
            InputError: a q over other coordinates.
        """
        self.check(q)
        return summarised(self.rows, self.structure, q, draws, seed)

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
            Draws of η, (draws, M), or (draws, *batch, M) of many sets of targets.

        Raises:
            InputError: rows of another width, groups that are none of the data, a q over other coordinates.
        """
        self.check(q)
        return predicted(self.rows, q, X, Z, groups, draws, seed)
