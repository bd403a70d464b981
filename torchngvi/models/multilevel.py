"""Generalised linear mixed models with several grouping factors, nested or crossed.

y ~ family(xᵀβ + Σ_k z_kᵀb_k[g_k]) with b_k[i] ~ N(0, Ω_k⁻¹) for each group i of the factor k, and

    -log p(y, θ) = Σ w f(η, y) - log p(β)
                   + Σ_k (½ Σ_i b_k[i]ᵀΩ_k b_k[i] - n_k Σ_j ω_k,jj - log p(ω_k) + (n_k r_k/2) log 2π),

Ω_k = W_k W_kᵀ and ω_k the entries of W_k.  Under a Gaussian q all expectations are sums of one-dimensional ones and of
closed forms, as with one factor (`torchngvi.models.mixed`).  The precision of q has the pattern of a forest, in which q
loses nothing: see `torchngvi.models.multilevel_rows`.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from torchngvi.arguments import read_list
from torchngvi.errors import InputError
from torchngvi.interfaces import Coordinates, Posterior, Prior
from torchngvi.models import checks
from torchngvi.models.by_moments import ByMoments
from torchngvi.models.generalized_linear import GeneralizedLinear
from torchngvi.models.likelihoods import Likelihood
from torchngvi.models.mixed import RandomEffects
from torchngvi.models.mixed_prior import Effects, MixedPrior, Precision, checked_prior, root_of, starts
from torchngvi.models.mixed_rows import GroupedRows
from torchngvi.models.mixed_units import Levels, covariance_prior_of, set_columns, set_effects
from torchngvi.models.multilevel_prior import CovariancePrior, derivative, expected_energy, prior_of
from torchngvi.models.multilevel_rows import MultilevelRows
from torchngvi.models.multilevel_start import blocks_of, started
from torchngvi.numerics.versions import settings_of, tensors_of, tracked
from torchngvi.posteriors import PrecisionCholeskyGaussian
from torchngvi.structures.pattern import Structured

_NARROWER = (1.0, 3.0, 10.0, 30.0, 100.0)  # factors of the root of the precision of a start, as long as they help

Several = Mapping[str, RandomEffects | tuple[Any, Any]] | Sequence[RandomEffects]


class MultilevelLogJoint(ByMoments):
    """Log joint of a generalised linear mixed model with several grouping factors, with its expectation in closed form.

    One wants it for pupils in classes in schools, for answers of subjects to items, and other data whose rows belong to
    groups of several kinds.  ``fit(q, model)`` with ``q = model.posterior()`` needs no learning rate and no draws; its
    cost is linear in the number of groups of the largest factor, and grows with the square of that of all effects of
    factors that cross it.

    Args:
        X: the design of the fixed effects β, (N, p), dense.
        y: the targets, (N,), as in `torchngvi.GeneralizedLinear`.
        random: a dict from the name of each grouping factor to `RandomEffects`, or to a pair (Z, groups); or a sequence
            of `RandomEffects`, whose names are then "0", "1", ...
        family: the likelihood, as in `torchngvi.models.MixedLogJoint`.
        prior: `MixedPrior`; ``precision``, ``sd`` and ``concentration`` are those of all factors, or dicts with one
            entry for each. By default in the units of the data, as that of `torchngvi.models.MixedLogJoint`.
        weights: factors of the log likelihood of each row, (N,), not negative.
        offset: what is added to the linear predictor, (N,), as the logarithm of an exposure.

    Attributes:
        names: of the grouping factors.
        rows: the data, `torchngvi.models.multilevel_rows.MultilevelRows`, which say where each coordinate stands.
        structure: the forest of θ = (b, β, ω).

    Raises:
        InputError: as `torchngvi.models.MixedLogJoint`; no factor, a name that is no string, more effects of crossed
            factors than fit into a dense matrix, or priors for other factors.

    >>> from torchngvi import fit
    >>> subject, item = torch.arange(40) // 4, torch.arange(40) % 4
    >>> X = torch.ones(40, 1, dtype=torch.float64)
    >>> y = (subject + item) % 3
    >>> model = MultilevelLogJoint(X, y, {"subject": (X, subject), "item": (X, item)}, "poisson_log")
    >>> model.structure
    Forest(10 of 1 below 7, 1 of 7)
    >>> fit(model.posterior(), model, progress=False).converged
    True
    """

    temperature = 1.0

    @tracked
    def __init__(
        self,
        X: Any,
        y: Any,
        random: Several,
        family: str | Likelihood = "bernoulli_logit",
        *,
        prior: MixedPrior | None = None,
        weights: Any = None,
        offset: Any = None,
    ) -> None:
        self.asked = prior = checked_prior(prior)
        scale = 1.0 if prior.fixed_scale is None else prior.fixed_scale
        named = by_name(random)
        self.names = tuple(named)
        self.fixed = GeneralizedLinear(X, y, family, prior_precision=scale**-2, weights=weights, offset=offset)
        self.coding = self.fixed.coding
        factors = [_grouped(self.fixed, name, *named[name]) for name in self.names]
        levels = Levels.of(factors[0])
        for of in factors:
            of.unit = levels.unit
        if prior.fixed_scale is None:
            set_columns(factors, self.fixed, levels)
        for name, of in zip(self.names, factors, strict=True):
            if prior_of(prior, name, self.names).usual:
                set_effects(of)
        self.priors = self._priors(factors)
        self.rows = MultilevelRows(factors)
        self.structure, self.dim = self.rows.structure, self.rows.dim

    def _priors(self, factors: Sequence[GroupedRows]) -> list[CovariancePrior]:
        """The prior of each factor."""
        return [self._prior(name, of) for name, of in zip(self.names, factors, strict=True)]

    def _prior(self, name: str, of: GroupedRows) -> CovariancePrior:
        try:
            return covariance_prior_of(prior_of(self.asked, name, self.names), of)
        except InputError as error:
            raise InputError(f"of the grouping factor {name}: {error}") from error

    def with_likelihood(self, likelihood: Likelihood) -> Self:
        """The same model with another likelihood."""
        new = copy.copy(self)
        new.rows = copy.copy(self.rows)
        new.rows.likelihood = likelihood
        return new

    # ---------------------------------------------------------------------------- the target

    def check(self, q: Posterior) -> None:
        """Check that q is over these coordinates.

        Raises:
            InputError: if their number, the dtype or the device is another.
        """
        checks.posterior(q, self.dim, torch.Size(), self.rows.X)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that a value depends on."""
        rows = self.rows
        scales = [prior.scale for prior in self.priors if isinstance(prior, Precision)]
        designs = [x for of in rows.factors for x in (of.Z, of.groups)]
        return (
            rows.X,
            rows.y,
            rows.weights,
            rows.offset,
            *designs,
            *scales,
            *self.fixed.prior,
            *tensors_of(rows.likelihood),
        )

    def settings(self) -> tuple[object, ...]:
        """Return the settings of the likelihood and of the priors."""
        return (*settings_of(self.rows.likelihood), *(p.settings() for p in self.priors))

    def log_joint(self, theta: Tensor) -> Tensor:
        """Compute log p(y, θ) with all its constants, (*sample, *batch)."""
        rows = self.rows
        data = (rows.weights * rows.likelihood.energy(rows.present(rows.predictor(theta), 0.0), rows.y)).sum(-1)
        return -(data + self.prior_energy(theta))

    def prior_energy(self, theta: Tensor) -> Tensor:
        """Compute -log p(θ), (*sample, *batch)."""
        effects, beta, omegas = self.rows.parts(theta)
        total = self.fixed.prior.energy(beta)
        for b, omega, prior in zip(effects, omegas, self.priors, strict=True):
            n, r = b.shape[-2:]
            turned = (b @ root_of(omega, r)).square().sum((-2, -1))
            total = total + 0.5 * turned - n * omega[..., starts(r)].sum(-1) + prior.energy(omega)
            total = total + 0.5 * n * r * math.log(2 * math.pi)
        return total

    def moments(
        self,
        mean: Tensor,  # m, (*batch, D)
        covariance: Structured,  # V in the pattern of the forest
    ) -> tuple[Tensor, Tensor, Structured]:
        """Compute E_q[ℓ], g = E_q[∇ℓ] and H = E_q[∇²ℓ], which has the pattern of the forest."""
        rows, prior = self.rows, self.fixed.prior
        assert isinstance(prior, Prior)
        eta, variance = rows.present(rows.predictor(mean), 0.0), rows.present(rows.variances(covariance), 1.0)
        expected = rows.likelihood.expected(eta, variance, rows.y)
        value, alpha, beta = (rows.weights * part for part in expected)
        g, H = rows.gathered(alpha.detach(), self.dim), rows.gram(beta.detach(), self.structure)
        at = rows.beta
        top = slice(at.start - rows.root, at.stop - rows.root)
        V = self.structure.parts(covariance)[-1].square[..., 0, top, top]
        spread = 0.5 * (prior.precision * V.diagonal(dim1=-2, dim2=-1)).sum(-1)
        total = value.sum(-1) + prior.energy(mean[..., at]) + spread
        g[..., at] += prior.force(mean[..., at])
        self.structure.parts(H)[-1].square[..., 0, top, top].diagonal(dim1=-2, dim2=-1).add_(prior.precision)
        known, places = self._effects(mean, covariance), self._effects(g, H)  # the latter are views
        for of, into, hyper in zip(known, places, self.priors, strict=True):
            total = total + expected_energy(of, hyper)
            for place, part in zip(into, derivative(of, hyper), strict=True):
                place += part
        self._mirror(H)
        return total, g, H

    def _effects(
        self,
        vector: Tensor,  # (*batch, D)
        matrix: Structured,
    ) -> list[Effects]:
        """For each factor the parts of its effects and of its ω, as views where the tensors are contiguous."""
        rows, parts = self.rows, self.structure.parts(matrix)
        effects, _, omegas = rows.parts(vector)
        squares, top = blocks_of(rows, self.structure, matrix), parts[-1].square[..., 0, :, :]
        found = []
        for k, (of, at, place) in enumerate(zip(rows.factors, rows.omegas, rows.places, strict=True)):
            own = slice(at.start - rows.root, at.stop - rows.root)
            if k in rows.arrangement.chain:
                border = parts[rows.arrangement.chain.index(k)].border
                behind = slice(at.start - rows.dim, at.stop - rows.dim or None)  # the root's rows are the last
                between = border[..., behind, :]
            else:
                columns = slice(place.start - rows.root, place.stop - rows.root)
                between = top[..., own, columns].unflatten(-1, (of.n, of.r)).movedim(-3, -2)
            found.append(Effects(effects[k], omegas[k], squares[k], between, top[..., own, own]))
        return found

    def _mirror(self, H: Structured) -> None:
        """Copy the rows of ω in the root to its columns of crossed effects: the root is stored whole."""
        rows, top = self.rows, self.structure.parts(H)[-1].square[..., 0, :, :]
        crossed, omegas = slice(0, rows.beta.start - rows.root), slice(rows.beta.stop - rows.root, None)
        top[..., crossed, omegas] = top[..., omegas, crossed].mT

    # ---------------------------------------------------------------------------- the posterior

    @tracked
    @torch.no_grad()
    def posterior(self) -> PrecisionCholeskyGaussian:
        """Make a q over the forest of the model, at a start from which few steps are needed.

        It stands at the mode of the penalised quasi-likelihood, as that of `torchngvi.models.MixedLogJoint`.

        Returns:
            A new posterior of the dtype and on the device of X.
        """
        like = self.rows.X
        q = PrecisionCholeskyGaussian(self.dim, structure=self.structure, dtype=like.dtype, device=like.device)
        mode, root = started(self.rows, self.priors)
        best, here = math.inf, q.snapshot()
        for factor in _NARROWER:
            q.restore(Coordinates(mode, factor * root))
            loss = float(self.expected_energy(q.frame())[0] - q.entropy())
            if loss < best:
                best, here = loss, q.snapshot()
            elif best < math.inf:
                break
        q.restore(here)
        return q


def by_name(random: Any) -> dict[str, tuple[Any, Any]]:
    """Read the random effects of several grouping factors.

    >>> list(by_name([RandomEffects([[1.0]], [0]), RandomEffects([[1.0]], [0])]))
    ['0', '1']
    """
    what = "is a dict from the name of each grouping factor to its RandomEffects(Z, groups)"
    listed = [] if isinstance(random, Mapping) else read_list("random", random, what)
    named = dict(random) if isinstance(random, Mapping) else {str(k): one for k, one in enumerate(listed)}
    if not named or not all(isinstance(name, str) for name in named):
        raise InputError(
            "random is a dict from the name of each grouping factor, a string, to its RandomEffects(Z, groups), at "
            f"least one; got {list(named)}."
        )
    for name, one in named.items():
        if not isinstance(one, tuple | list) or len(one) != 2:
            raise InputError(
                f"the random effects of {name} are a pair of a design and groups, RandomEffects(Z, groups); got a "
                f"{type(one).__name__}."
            )
    return named


def _grouped(fixed: GeneralizedLinear, name: str, Z: Any, groups: Any) -> GroupedRows:
    try:
        return GroupedRows(fixed, Z, groups)
    except InputError as error:
        raise InputError(f"of the grouping factor {name}: {error}") from error
