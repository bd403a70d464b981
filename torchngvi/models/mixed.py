"""Generalised linear mixed models with one grouping factor: y_ij ~ family(x_ijᵀβ + z_ijᵀb_i), b_i ~ N(0, Ω⁻¹).

With Ω = W Wᵀ and ω the entries of W (`torchngvi.models.mixed_prior`), θ = (b_1, ..., b_n, β, ω), and

    -log p(y, θ) = Σ_ij w_ij f(η_ij, y_ij) + ½ Σ_i b_iᵀΩb_i - n Σ_k ω_kk - log p(β) - log p(ω) + (nr/2) log 2π.

Under a Gaussian q all expectations are sums of one-dimensional ones and of closed forms.  Its precision has the pattern
of an arrow, in which q loses nothing: given (β, ω) the groups are independent (Tan and Nott 2018).

Mixed models whose groups are spread over processes: what is counted once, and what depends on all of the data.

Each process has the rows of its own groups, and of q the effects of these beside the globals.  Sums over groups, and
over their rows, are completed by `torchngvi.models.mixed_rows.GroupedRows.total`.

What a fitted mixed model says in the units of its data: fixed effects, sds and correlations of random effects.
"""

import copy
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchngvi.arguments import shown
from torchngvi.distributed import Processes
from torchngvi.errors import InputError
from torchngvi.interfaces import Coordinates, Frame, Framed, Posterior, Prior, Raw, TractableTarget
from torchngvi.models import checks
from torchngvi.models.generalized_linear import GeneralizedLinear
from torchngvi.models.likelihoods import Likelihood
from torchngvi.models.mixed_prior import (
    CovariancePrior,
    Effects,
    MixedPrior,
    Precision,
    check_one_prior,
    checked_prior,
    derivative,
    expected_energy,
    root_of,
    scales_of,
)
from torchngvi.models.mixed_rows import (
    GroupedRows,
    Levels,
    covariance_prior_of,
    omega_to_user,
    rows_of_user,
    set_columns,
    set_effects,
    started,
    to_user,
)
from torchngvi.models.standardize import Standardization
from torchngvi.numerics.versions import settings_of, tensors_of, tracked
from torchngvi.posteriors import PrecisionCholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.renamed import warn_renamed
from torchngvi.structures import Forest, arrow
from torchngvi.structures.pattern import Structured
from torchngvi.structures.storage import Part

_GROUPS_AT_ONCE = 10_000  # groups of one process that are worked on together


class SpreadGroups(TractableTarget):
    """The abstract base of mixed models with one grouping factor, whose groups may be spread over processes.

    Attributes:
        structure: the arrow of the model.
        dim: the number of coordinates of q here.
        fixed: the model of the same rows without random effects.
        rows: the rows with their groups.
        asked: the prior as the user gave it.
        covariance_prior: the prior of ω.
        groups_at_once: of a fit in passes over groups, where they are spread over processes; None for one process.
    """

    structure: Forest
    dim: int
    fixed: GeneralizedLinear
    rows: GroupedRows
    asked: MixedPrior
    covariance_prior: CovariancePrior

    @property
    def precision(self) -> CovariancePrior:
        """The prior of ω under its old name ``precision``, with a warning."""
        warn_renamed(type(self).__name__, "precision", "covariance_prior")
        return self.covariance_prior

    @property
    def all_dim(self) -> int:
        """The number of coordinates of all processes."""
        return self.dim + (self.rows.all_groups - self.rows.n) * self.rows.r

    def spread(self, processes: Processes) -> Self:
        """Make the part of this process of a model whose groups several processes have; see `torchngvi.Sharded`."""
        new = copy.copy(self)
        new.rows, new.processes, new.groups_at_once = self.rows.spread(processes), processes, _GROUPS_AT_ONCE
        new.settle()
        return new

    def settle(self) -> None:
        """Set what depends on the data of all processes: centres and scales of columns, and the priors."""
        levels = Levels.of(self.rows)
        self.rows.unit = levels.unit
        if self.asked.fixed_scale is None:
            self.fixed = self.rows.fixed = copy.copy(self.fixed)
            set_columns(self.rows, self.fixed, levels)
        if self.asked.usual:
            set_effects(self.rows)
        self.covariance_prior = covariance_prior_of(self.asked, self.rows)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that a value depends on."""
        covariance = (self.covariance_prior.scale,) if isinstance(self.covariance_prior, Precision) else ()
        return (
            self.rows.X,
            self.rows.Z,
            self.rows.groups,
            self.rows.y,
            self.rows.weights,
            self.rows.offset,
            *covariance,
            *self.fixed.prior,
            *tensors_of(self.rows.likelihood),
        )

    def settings(self) -> tuple[object, ...]:
        """Return the settings of the likelihood, and of the prior of ω."""
        return (*settings_of(self.rows.likelihood), *self.covariance_prior.settings())

    def known_data(self) -> tuple[Tensor, ...]:
        """Return the tensors that a value depends on; of groups of other processes the value of the loss tells."""
        return self.tensors() if self.processes is None else ()

    def expected_energy(self, frame: Frame) -> tuple[Tensor, Framed | Raw]:  # type: ignore[override]
        """Compute E_q[ℓ] (*batch,), differentiable in the frame, and its derivative.

        A q over the structure of the model gives a packet in its frame, and nothing is D x D; any other Gaussian, such
        as a dense one of few groups, one in θ.

        Raises:
            InputError: groups that are spread over processes, and q with them.
        """
        self.rows.check_one_process("a step or a bound over all coordinates")
        structure = self.structure
        if frame.structure == structure and frame.upper:
            value, g, H = self.moments(frame.mean, frame.marginals())
            return value, Framed(frame.pull(g), structure.congruence(frame.root, H))
        root = frame.dense()
        value, g, H = self.moments(frame.mean, structure.from_dense(root @ root.mT))
        return value, Raw(g, structure.full(H))

    @abstractmethod
    def moments(
        self,
        mean: Tensor,  # m, (*batch, D)
        covariance: Structured,  # V in the pattern of the structure
    ) -> tuple[Tensor, Tensor, Structured]:
        """Compute E_q[ℓ], g = E_q[∇ℓ] and H = E_q[∇²ℓ], which has the pattern of the structure."""

    def shared_energy(
        self,
        mean: Tensor,  # of the globals, (*any, P)
        covariance: Tensor,  # (*any, P, P)
    ) -> Tensor:
        """Compute E[-log p(β) - log p(ω)], the terms that no group has, (*any,)."""
        p, prior = self.rows.p, self.fixed.prior
        assert isinstance(prior, Prior)
        spread = 0.5 * (prior.precision * covariance[..., :p, :p].diagonal(dim1=-2, dim2=-1)).sum(-1)
        of_omega = self.covariance_prior.expected_energy(mean[..., p:], covariance[..., p:, p:])
        return prior.energy(mean[..., :p]) + spread + of_omega

    def _loss(self, q: PrecisionCholeskyGaussian) -> Tensor:
        """The negative ELBO, (*batch,); what is of the globals alone is counted once."""
        if self.processes is None:
            return self.expected_energy(q.frame())[0] - q.entropy()
        frame, size = q.frame(), self.dim - self.rows.n * self.rows.r
        V = frame.marginals()
        loss = self.moments(frame.mean, V)[0] - q.entropy()
        if not self.rows.leads:
            shared = self.structure.parts(V)[-1].square
            entropy = 0.5 * torch.linalg.slogdet(shared[..., 0, :, :])[1] + 0.5 * size * (1 + math.log(2 * math.pi))
            loss = loss - self.shared_energy(frame.mean[..., None, -size:], shared)[..., 0] + entropy
        return self.rows.total(loss)[0]


@dataclass(frozen=True)
class MixedSummary:
    """Posterior means and standard deviations of a `torchngvi.MixedModel`, as `MixedModel.summary` returns them.

    Those of random effects are of the standard deviations and correlations in Ω⁻¹, the covariance of b.  A Gaussian q
    understates their uncertainty.  Of many sets of targets every shape has that of the batch in front.

    Attributes:
        fixed: means of β, (p,).
        fixed_sd: their standard deviations, (p,).
        sd: means of the standard deviations of the random effects, (r,).
        sd_sd: their standard deviations, (r,).
        sd_interval: their 2.5 % and 97.5 % quantiles, (2, r).
        correlation: means of the correlations of the random effects, (r, r).
        correlation_sd: their standard deviations, (r, r).
        group: means of the effects of each group, (n, r).
        group_sd: their standard deviations, (n, r).

    >>> one = torch.ones(1)
    >>> print(MixedSummary(one, one, one, one, torch.ones(2, 1), one[None], one[None], one[None], one[None]))
    fixed effects        mean         sd
      0                     1          1
    sd of random         mean         sd      2.5 %     97.5 %
      0                     1          1          1          1
    1 group
    """

    fixed: Tensor  # (p,)
    fixed_sd: Tensor  # (p,)
    sd: Tensor  # (r,)
    sd_sd: Tensor  # (r,)
    sd_interval: Tensor  # (2, r)
    correlation: Tensor  # (r, r)
    correlation_sd: Tensor  # (r, r)
    group: Tensor  # (n, r)
    group_sd: Tensor  # (n, r)

    def member(self, index: int | tuple[int, ...]) -> "MixedSummary":
        """Take the summary of one of many sets of targets.

        Args:
            index: its place in the batch.

        Returns:
            Its numbers, without the shape of the batch in front.

        >>> many = torch.ones(3, 1)
        >>> square = many[..., None]
        >>> MixedSummary(many, many, many, many, torch.ones(3, 2, 1), square, square, square, square).member(2).fixed
        tensor([1.])
        """
        return MixedSummary(*(getattr(self, part.name)[index] for part in fields(self)))

    def __str__(self) -> str:
        if self.fixed.ndim > 1:
            return f"{self.fixed[..., 0].numel()} mixed models of one design: member(k) is the table of one"
        lines = [f"{'fixed effects':<14}{'mean':>11}{'sd':>11}"]
        lines += _lines(self.fixed, self.fixed_sd)
        lines.append(f"{'sd of random':<14}{'mean':>11}{'sd':>11}{'2.5 %':>11}{'97.5 %':>11}")
        lines += _lines(self.sd, self.sd_sd, *self.sd_interval)
        size = len(self.sd)
        if size > 1:
            lines.append(f"{'correlations':<14}{'mean':>11}{'sd':>11}")
            pairs = [(i, k) for i in range(size) for k in range(i)]
            columns = [torch.stack([x[i, k] for i, k in pairs]) for x in (self.correlation, self.correlation_sd)]
            lines += _lines(*columns, names=[f"{i} with {k}" for i, k in pairs])
        n = len(self.group)
        return "\n".join([*lines, f"{n} group{'s' if n > 1 else ''}"])


def _lines(*columns: Tensor, names: Sequence[object] | None = None) -> list[str]:
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        f"  {index:<12}" + "".join(f"{x:>11.4g}" for x in row)
        for index, row in zip(names or range(len(columns[0])), rows, strict=True)
    ]


def summarised(
    rows: GroupedRows, structure: Forest, q: Gaussian, draws: int, seed: int, at_once: int = 2**23
) -> MixedSummary:
    """Summarise q over the coordinates of a mixed model."""
    # at_once: numbers of which quantiles are found together
    frame = q.frame()
    b, beta, omega = rows.parts(frame.mean)
    generator = torch.Generator(omega.device).manual_seed(seed)
    z = torch.randn(draws, omega.shape[-1], generator=generator, dtype=omega.dtype, device=omega.device)
    V_b, V = _covariances(rows, structure, q)
    root = torch.linalg.cholesky(V[..., rows.p :, rows.p :])
    around = root @ z.mT  # (*batch, q, draws), the same draws for all members
    sd, correlation = scales_of(omega_to_user(omega + around.movedim(-1, 0), rows.within, rows.r), rows.r)
    ends = torch.tensor([0.025, 0.975], dtype=sd.dtype, device=sd.device)
    some = sd.flatten(1).split(max(1, at_once // draws), -1)
    interval = torch.cat([torch.quantile(part, ends, dim=0) for part in some], -1).unflatten(-1, sd.shape[1:])
    return MixedSummary(
        to_user(beta, rows.columns),
        _sd_to_user(V[..., : rows.p, : rows.p], rows.columns),
        sd.mean(0),
        sd.std(0),
        interval.movedim(0, -2),
        correlation.mean(0),
        correlation.std(0),
        to_user(b, rows.within),
        _sd_to_user(V_b, rows.within),
    )


def _sd_to_user(
    V: Tensor,  # (*any, D, D)
    units: Standardization | None,
) -> Tensor:
    """The standard deviations of coefficients in the units of the user, (*any, D)."""
    if units is None:
        return V.diagonal(dim1=-2, dim2=-1).sqrt()
    root = units.to_user(torch.linalg.cholesky(V), -2)
    return torch.linalg.vector_norm(root, dim=-1)


def _covariances(rows: GroupedRows, structure: Forest, q: Gaussian) -> tuple[Tensor, Tensor]:
    """The covariances under q of the effects of each group (*batch, n, r, r), and of the globals (*batch, P, P)."""
    frame, local = q.frame(), rows.n * rows.r
    if frame.structure == structure:
        groups, roots = structure.parts(frame.marginals())
        return groups.square, roots.square[..., 0, :, :]
    root = frame.dense()
    b, g = root[..., :local, :].unflatten(-2, (rows.n, rows.r)), root[..., local:, :]
    return b @ b.mT, g @ g.mT


def predicted(
    rows: GroupedRows,
    q: Gaussian,
    X: Any,  # (M, p)
    Z: Any,  # (M, r)
    groups: Any,  # (M,), or None
    draws: int,
    seed: int,
) -> Tensor:
    """Draw linear predictors of new rows, of groups of the data or of one group that the data do not have."""
    X, Z = checks.numbers("X", X, rows.X), checks.numbers("Z", Z, rows.X)
    if X.shape[1:] != (rows.p,) or Z.shape != (len(X), rows.r):
        raise InputError(
            f"new rows need X of shape (M, {rows.p}) and Z of shape (M, {rows.r}); got {tuple(X.shape)} and "
            f"{tuple(Z.shape)}."
        )
    X, Z = rows_of_user(X, rows.columns), rows_of_user(Z, rows.within)
    generator = torch.Generator(X.device).manual_seed(seed)
    b, beta, omega = rows.parts(q.sample((draws,), generator))
    if groups is not None:
        index = checks.group_index(groups, len(X), X)
        if bool(((index < 0) | (index >= rows.n)).any()):
            raise InputError(
                f"groups of new rows must be those of the data, 0 to {rows.n - 1}; got {int(index.min())} to "
                f"{int(index.max())}. Leave groups= out for a group that the data do not have."
            )
        return beta @ X.mT + (b.index_select(-2, index) * Z).sum(-1)
    noise = torch.randn(draws, *rows.batch, rows.r, 1, generator=generator, dtype=X.dtype, device=X.device)
    new = torch.linalg.solve_triangular(root_of(omega, rows.r).mT, noise, upper=True)
    return beta @ X.mT + new[..., 0] @ Z.mT


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
        d = derivative(lambda of: expected_energy(of, self.covariance_prior), of)
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
