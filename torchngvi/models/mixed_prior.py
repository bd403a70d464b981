"""The prior of random effects under q in closed form: E[½ bᵀΩb] with Ω = W Wᵀ, and the Wishart prior of Ω.

W is lower triangular with the diagonal e^{ω_kk} and the entries ω_lk below it (Tan and Nott 2018), so that

    ½ bᵀΩb = ½ Σ_k (e^{ω_kk} b_k + Σ_{l>k} ω_lk b_l)²

is made of exponentials times polynomials.  Under a Gaussian, E[e^{cᵀx} f(x)] = e^{cᵀm + ½cᵀVc} E_{N(m + Vc, V)}[f]: the
exponentials shift the mean, and what is left are moments of fourth order (Isserlis 1918).

Priors of standard deviations and correlations, as densities of the coordinates that a fit moves.

With b ~ N(0, Σ), Σ = diag(τ) R diag(τ) = (W Wᵀ)⁻¹ and ω the entries of W (`torchngvi.models.mixed_prior`),

    log p(ω) = Σ_k log p(τ_k) + log p(R) - r Σ_k log τ_k - 2(r + 1) Σ_k ω_kk + Σ_k (r - k + 2) ω_kk:

the Jacobians of Σ by (τ, R), 2^r Π τ_k^r, of Σ by Ω, |Ω|^-(r+1), and of Ω by ω, 2^r Π W_kk^(r-k+2).

What the prior of the random effects adds to the log joint under q.

Of n groups it is E[½ Σ_i b_iᵀΩb_i - n Σ_k ω_kk - log p(ω)] + (nr/2) log 2π.  The prior of ω is that of a
Wishart matrix Ω, in closed form, or one of standard deviations and correlations, by Gauss-Hermite quadrature over ω.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import is_number
from torchngvi.errors import InputError
from torchngvi.models import checks
from torchngvi.numerics.arrays import tracked
from torchngvi.numerics.linalg import cholesky
from torchngvi.numerics.special import normal_rule


class Wishart(NamedTuple):
    """The Wishart prior of the precision matrix Ω of random effects, with E[Ω] = ν S.

    Attributes:
        dof: ν, the degrees of freedom, larger than r - 1.
        scale: S, (r, r), symmetric and positive definite, in the units of 1/b².

    >>> Wishart(3.0, [[1.0, 0.0], [0.0, 4.0]]).dof
    3.0
    """

    dof: float
    scale: object  # anything that is a matrix


class MixedPrior(NamedTuple):
    """The priors of a mixed model: of fixed effects, of the covariance of random effects, and of the likelihood.

    What is not given has a default in the units of the data (`torchngvi.models.mixed`), so that another unit or
    another origin of a column changes no prediction. With several grouping factors ``precision``, ``sd`` and
    ``concentration`` are those of each of them, or dicts from their names.

    Attributes:
        fixed_scale: the standard deviation of each fixed effect, N(0, fixed_scale²), positive and finite, for the
            columns as they are, that of ones among them. None for N(0, (2.5 s_y/s_j)²) of the column j, s_j its
            standard deviation and s_y that of y for the identity link and 1 for others; and for the intercept at the
            means of the columns N(g(ȳ), (2.5 s_y)²), g the link, with an exposure that of the rate.
        precision: a Wishart prior of Ω, the inverse covariance of the effects, or "kass-natarajan" for that of Kass
            and Natarajan (2006), whose scale is that of what the data tell of the effects of one group. It keeps
            standard deviations away from 0.
        sd: the prior of the standard deviation of each random effect, for the columns as they are:
            `torchngvi.models.HalfNormal`, `HalfT` or `Exponential`, or a sequence of r of them. None, where there is
            no ``precision`` either, for half-t with three degrees of freedom and the scale 2.5 s_y of an intercept, at
            the means of the columns of its slopes, and 2.5 s_y/s_j of the slope of the column j.
        concentration: beside ``sd``, of the LKJ density |R|^(concentration - 1) of the correlations (Lewandowski,
            Kurowicka and Joe 2009); 1 is uniform over correlation matrices.
        likelihood: the prior of a learned parameter: of the residual sd, of the scale of Student's t distribution, or,
            of negative binomial counts of size s, of 1/√s. None for half-t with three degrees of freedom and the
            scale 2.5 s_y, for 1/√s the scale 1.

    >>> MixedPrior(fixed_scale=2.5).precision is None
    True
    """

    fixed_scale: float | None = None
    precision: Any = None  # a Wishart, or "kass-natarajan"
    sd: object = None  # a prior of a standard deviation, or a sequence of them
    concentration: Any = 1.0  # a number
    likelihood: object = None  # a prior of a standard deviation

    @property
    def usual(self) -> bool:
        """Whether the covariance of the random effects has its default prior."""
        return self.sd is None and self.precision is None


KASS_NATARAJAN = "kass-natarajan"


def is_positive(value: Any) -> bool:
    """Whether this is a number, positive and finite."""
    return is_number(value, above=0)


def checked_prior(prior: object) -> MixedPrior:
    """The priors of a mixed model, after a check of what they are; the default of None."""
    if prior is None:
        return MixedPrior()
    if not isinstance(prior, MixedPrior):
        raise InputError(
            f"prior is a torchngvi.models.MixedPrior, such as MixedPrior(fixed_scale=2.5), or None; got {prior!r}."
        )
    scale = prior.fixed_scale
    if scale is not None and not (is_positive(scale) and is_positive(float(scale) ** 2)):  # its square is a precision
        raise InputError(
            f"fixed_scale is the prior standard deviation of a fixed effect, positive and finite; got {scale!r}."
        )
    return prior


def check_one_prior(prior: MixedPrior) -> None:
    """Check that the random effects have one prior."""
    if prior.sd is not None and prior.precision is not None:
        raise InputError("the random effects have one prior: give MixedPrior precision= or sd=, not both.")
    if isinstance(prior.precision, str) and prior.precision != KASS_NATARAJAN:
        raise InputError(
            f"precision of a prior is a torchngvi.models.Wishart(dof, scale), {KASS_NATARAJAN!r} or None; got "
            f"{prior.precision!r}."
        )


class Effects(NamedTuple):
    """Means and covariances under q of the effects b of groups, and of ω, the entries of W."""

    b: Tensor  # (*batch, n, r)
    omega: Tensor  # (*batch, q), q = r(r + 1)/2
    bb: Tensor  # (*batch, n, r, r)
    omega_b: Tensor  # Cov(ω, b), (*batch, n, q, r)
    omega_omega: Tensor  # (*batch, q, q)


def starts(size: int) -> list[int]:
    """Find where each column of W begins in ω: its diagonal entry, with those below it behind."""
    return [k * size - k * (k - 1) // 2 for k in range(size)]


def root_of(
    omega: Tensor,  # (*any, q)
    size: int,  # r
) -> Tensor:
    """Make W of its entries column by column, the diagonal on the log scale."""
    columns = []
    for k, start in enumerate(starts(size)):
        zeros = omega.new_zeros(*omega.shape[:-1], k)
        below = omega[..., start + 1 : start + size - k]
        columns.append(torch.cat([zeros, omega[..., start : start + 1].exp(), below], -1))
    return torch.stack(columns, -1)


def omega_of(
    root: Tensor,  # W, (*any, r, r)
) -> Tensor:
    """Take the entries ω of a lower-triangular W with a positive diagonal: the inverse of `root_of`."""
    size = root.shape[-1]
    columns = [torch.cat([root[..., k, k, None].log(), root[..., k + 1 :, k]], -1) for k in range(size)]
    return torch.cat(columns, -1)


def scales_of(
    omega: Tensor,  # (*any, q)
    size: int,  # r
) -> tuple[Tensor, Tensor]:
    """Standard deviations (*any, r) and correlations (*any, r, r) of the random effects, b ~ N(0, (W Wᵀ)⁻¹).

    >>> sd, correlation = scales_of(torch.tensor([0.0, 1.0, 0.0]), 2)
    >>> sd.square().round(decimals=5).tolist(), round(correlation[0, 1].square().item(), 5)
    ([2.0, 1.0], 0.5)
    """
    W = root_of(omega, size)
    eye = torch.eye(size, dtype=W.dtype, device=W.device)
    root = torch.linalg.solve_triangular(W, eye.expand_as(W), upper=False)
    covariance = root.mT @ root
    sd = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    return sd, covariance / (sd[..., :, None] * sd[..., None, :])


def half_squares(of: Effects) -> Tensor:
    """Compute E[½ |Wᵀb|²] of each group in closed form, b and ω being jointly Gaussian."""
    total, size = torch.zeros_like(of.b[..., 0]), of.b.shape[-1]
    for k, d in enumerate(starts(size)):
        rest, tail = slice(d + 1, d + size - k), slice(k + 1, size)
        with_log = of.omega_b[..., d, :]  # Cov(b, ω_kk), (*batch, n, r)
        level, spread = of.omega[..., d, None], of.omega_omega[..., d, d, None]
        b_k, var = of.b[..., k], of.bb[..., k, k]
        total = total + torch.exp(2 * level + 2 * spread) * ((b_k + 2 * with_log[..., k]).square() + var)
        if k == size - 1:
            break
        # s = Σ_l ω_lk b_l
        xx, xu, uu = of.bb[..., tail, tail], of.omega_b[..., rest, tail].mT, of.omega_omega[..., rest, rest]
        trace = xu.diagonal(dim1=-2, dim2=-1).sum(-1)
        x, u = of.b[..., tail], of.omega[..., None, rest]
        uu = uu[..., None, :, :]
        total = total + ((x * u).sum(-1) + trace).square() + (xx * uu).sum((-2, -1)) + (xu * xu.mT).sum((-2, -1))
        total = total + _form(u, xx, u) + _form(x, uu, x) + 2 * _form(u, xu, x)
        # e^{ω_kk} b_k s, after the shift of the means by covariances with ω_kk
        a, x = b_k + with_log[..., k], x + with_log[..., tail]
        u = u + of.omega_omega[..., None, rest, d]
        s = (x * u).sum(-1) + trace
        slope = (u * of.bb[..., k, tail]).sum(-1) + (x * of.omega_b[..., rest, k]).sum(-1)
        total = total + 2 * torch.exp(level + 0.5 * spread) * (a * s + slope)
    return 0.5 * total


def _form(left: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
    """leftᵀ A right, (*batch, n)."""
    return (left * (matrix @ right[..., None])[..., 0]).sum(-1)


class Precision:
    """The Wishart prior of Ω as a density of ω, log Wishart(W Wᵀ) + log |∂Ω/∂ω|, |∂Ω/∂ω| = 2^r Π_k W_kk^{r - k + 2}."""

    def __init__(self, prior: Wishart, like: Tensor, size: int, batch: tuple[int, ...] = ()) -> None:
        if not isinstance(prior, Wishart):
            raise InputError(
                f"precision of a prior is a torchngvi.models.Wishart(dof, scale), {KASS_NATARAJAN!r} or None; got "
                f"{prior!r}."
            )
        scale = checks.numbers("the scale of the Wishart prior", prior.scale, like)
        scale = scale.reshape(1, 1) if scale.ndim == 0 else scale
        if scale.shape not in ((size, size), (*batch, size, size)) or not bool(torch.equal(scale, scale.mT)):
            raise InputError(
                f"the scale of the Wishart prior must be a symmetric matrix ({size}, {size}), one row a random effect; "
                f"got shape {tuple(scale.shape)}{', not symmetric' if scale.shape == (size, size) else ''}."
            )
        factor, ok = cholesky(scale)
        if not bool(ok.all()):
            raise InputError(
                "the scale of the Wishart prior must be positive definite; the Cholesky factorisation fails. Add a "
                "multiple of the identity."
            )
        if not is_positive(prior.dof) or prior.dof <= size - 1:
            raise InputError(
                f"the degrees of freedom of the Wishart prior must exceed r - 1 = {size - 1}; got {prior.dof!r}."
            )
        self.dof, self.size, self.scale = float(prior.dof), size, scale
        self.inverse = torch.cholesky_inverse(factor)
        self.rows = cholesky(self.inverse)[0].mT.contiguous()  # s_c with S⁻¹ = Σ_c s_c s_cᵀ
        half = 0.5 * self.dof * size
        self.log_normaliser = (  # of the Wishart, and -log 2^r of the Jacobian, (*batch,)
            half * math.log(2)
            + self.dof * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            + 0.25 * size * (size - 1) * math.log(math.pi)
            + sum(math.lgamma(0.5 * (self.dof - j)) for j in range(size))
            - size * math.log(2)
        )
        self.diagonal = torch.tensor(starts(size), device=like.device)
        self.powers = (self.dof + 1 - torch.arange(1, size + 1)).to(like)  # ν - k + 1 of e^{ω_kk}

    def energy(
        self,
        omega: Tensor,  # (*any, q)
    ) -> Tensor:
        """-log p(ω), (*any,)."""
        turned = self.rows @ root_of(omega, self.size)
        quadratic = 0.5 * turned.square().sum((-2, -1))
        return quadratic - omega[..., self.diagonal] @ self.powers + self.log_normaliser

    def expected_energy(
        self,
        mean: Tensor,  # of ω, (*batch, q)
        covariance: Tensor,  # (*batch, q, q)
    ) -> Tensor:
        """Compute E[-log p(ω)] under a Gaussian in closed form, (*batch,)."""
        nothing = mean.new_zeros(*mean.shape[:-1], 1, 1)
        linear = self.log_normaliser - mean[..., self.diagonal] @ self.powers
        return self.expected(Effects(nothing, mean, nothing, nothing, covariance)) + linear

    def settings(self) -> tuple[object, ...]:
        """Return the degrees of freedom."""
        return (self.dof,)

    def expected(self, of: Effects) -> Tensor:
        """E[½ tr(S⁻¹ W Wᵀ)], (*batch,): that of effects known to be s_c."""
        batch, n, q = of.omega.shape[:-1], self.size, of.omega.shape[-1]
        nothing = of.b.new_zeros(())
        known = Effects(
            self.rows.expand(*batch, n, n),
            of.omega,
            nothing.expand(*batch, n, n, n),
            nothing.expand(*batch, n, q, n),
            of.omega_omega,
        )
        return half_squares(known).sum(-1)


@tracked
@torch.enable_grad()
def derivative(energy: Callable[[Effects], Tensor], of: Effects) -> Effects:
    """Differentiate an expectation by Bonnet's and Price's theorems, dF = gᵀdm + ½⟨H, dV⟩."""
    leaves = Effects(*(x.detach().clone().requires_grad_() for x in of))
    g_b, g_omega, bb, border, omegas = torch.autograd.grad(energy(leaves).sum(), list(leaves))
    return Effects(g_b, g_omega, bb + bb.mT, border, omegas + omegas.mT)


_NODES = {1: 25, 3: 9, 6: 3}  # in each dimension of ω, of one, two and three random effects


class HalfNormal(NamedTuple):
    """The prior p(τ) = 2 N(τ; 0, scale²) of a standard deviation τ > 0.

    Attributes:
        scale: in the units of τ, positive.

    >>> round(HalfNormal(2.0).log_prob(torch.tensor(0.0)).exp().item(), 6)  # 2/(2 √(2π))
    0.398942
    """

    scale: float = 1.0

    def log_prob(self, sd: Tensor) -> Tensor:
        """The log density of each standard deviation."""
        constant = 0.5 * math.log(2 / math.pi) - math.log(self.scale)
        return constant - 0.5 * (sd / self.scale).square()


class HalfT(NamedTuple):
    """The prior of |x| where x has Student's t distribution with ``dof`` degrees of freedom and a scale.

    Use it where a standard deviation may be much larger than the scale says: its tail is that of a power.

    Attributes:
        dof: the degrees of freedom, positive; 1 is the half-Cauchy distribution.
        scale: in the units of τ, positive.

    >>> round(HalfT(1.0, 1.0).log_prob(torch.tensor(0.0)).exp().item(), 6)  # 2/π
    0.63662
    """

    dof: float = 3.0
    scale: float = 1.0

    def log_prob(self, sd: Tensor) -> Tensor:
        """The log density of each standard deviation."""
        half = 0.5 * (self.dof + 1)
        constant = math.lgamma(half) - math.lgamma(0.5 * self.dof) - 0.5 * math.log(self.dof * math.pi)
        return constant + math.log(2 / self.scale) - half * torch.log1p((sd / self.scale).square() / self.dof)


class Exponential(NamedTuple):
    """The prior p(τ) = rate · exp(-rate · τ) of a standard deviation τ > 0.

    Attributes:
        rate: of the units 1/τ, positive; the mean of τ is its inverse.

    >>> Exponential(2.0).log_prob(torch.tensor(0.0)).exp().item()
    2.0
    """

    rate: float = 1.0

    def log_prob(self, sd: Tensor) -> Tensor:
        """The log density of each standard deviation."""
        return math.log(self.rate) - self.rate * sd


ScalePrior = HalfNormal | HalfT | Exponential


def checked_scale(what: str, prior: object) -> ScalePrior:
    """Check the prior of a standard deviation."""
    if not isinstance(prior, ScalePrior):
        raise InputError(f"{what} is the prior of a standard deviation, HalfNormal, HalfT or Exponential; got {prior}.")
    if not all(is_positive(x) for x in prior):
        raise InputError(f"{what} must have positive and finite numbers; got {prior}.")
    return prior


class ScalesPrior:
    """Independent priors of standard deviations, and LKJ of correlations, |R|^(concentration - 1)/Z."""

    def __init__(self, sd: object, concentration: float, size: int, unit: float | Tensor = 1.0) -> None:
        given = list(sd) if isinstance(sd, Sequence) and not isinstance(sd, ScalePrior) else [sd] * size
        if len(given) != size:
            raise InputError(f"sd must be one prior, or one for each of the {size} random effects; got {len(given)}.")
        self.sd = [checked_scale("sd", one) for one in given]
        if not is_positive(concentration):
            raise InputError(f"concentration is that of the LKJ density, positive and finite; got {concentration!r}.")
        self.concentration, self.size, self.diagonal = float(concentration), size, starts(size)
        self.unit = torch.as_tensor(unit, dtype=torch.float64)
        self.log_normaliser = 0.0  # log Z
        for k in range(1, size):
            rest = size - k
            shape = concentration + 0.5 * (rest - 1)
            beta = 2 * math.lgamma(shape) - math.lgamma(2 * shape)
            self.log_normaliser += rest * ((2 * concentration - 2 + rest) * math.log(2) + beta)

    def energy(
        self,
        omega: Tensor,  # (*any, *batch, q)
    ) -> Tensor:
        """-log p(ω), (*any, *batch)."""
        (tau, _), unit = scales_of(omega, self.size), self.unit.to(omega)
        log_tau, diagonal = tau.log().sum(-1), omega[..., self.diagonal]
        half = diagonal.sum(-1)  # ½ log|Ω|
        log_R = -2 * (half + log_tau)
        r = self.size
        powers = torch.arange(r + 1, 1, -1, dtype=omega.dtype, device=omega.device) - 2 * (r + 1)
        jacobian = -r * log_tau + diagonal @ powers  # log |∂(τ, R)/∂ω|
        of_sd = sum(prior.log_prob(tau[..., k] / unit) - unit.log() for k, prior in enumerate(self.sd))
        return -(of_sd + (self.concentration - 1) * log_R - self.log_normaliser + jacobian)

    def expected_energy(
        self,
        mean: Tensor,  # of ω, (*batch, q)
        covariance: Tensor,  # (*batch, q, q)
    ) -> Tensor:
        """Compute E[-log p(ω)] under a Gaussian, (*batch,), by quadrature, differentiable in both."""
        z, log_w = _rule(mean.shape[-1], mean)
        omega = mean + torch.einsum("kj,...ij->k...i", z, cholesky(covariance)[0])
        return torch.einsum("k,k...->...", log_w.exp(), self.energy(omega))

    def settings(self) -> tuple[object, ...]:
        """Return the numbers of the priors."""
        unit = tuple(self.unit.flatten().tolist())
        return (*((type(one).__name__, *one) for one in self.sd), self.concentration, *unit)


def _rule(dim: int, like: Tensor, points: int = 512) -> tuple[Tensor, Tensor]:
    """Nodes and log weights for expectations over ω under a standard normal distribution."""
    # points: of which each has its mirror image, in more dimensions
    if dim in _NODES:
        return normal_rule(_NODES[dim], dim, like)
    sobol = torch.quasirandom.SobolEngine(dim, scramble=True, seed=0).draw(points, dtype=torch.float64)
    z = torch.special.ndtri(sobol.clamp(1e-9, 1 - 1e-9))
    z = torch.cat([z, -z])
    z = torch.linalg.solve_triangular(torch.linalg.cholesky(z.mT @ z / len(z)), z.mT, upper=False).mT
    return z.to(like), torch.full((len(z),), -math.log(len(z)), dtype=like.dtype, device=like.device)


CovariancePrior = Precision | ScalesPrior


def expected_energy(of: Effects, prior: CovariancePrior) -> Tensor:
    """Compute what the effects add to E_q[-log p(y, θ)] but the likelihood, (*batch,)."""
    n, r = of.b.shape[-2:]
    constant = 0.5 * n * r * math.log(2 * math.pi)
    half_log_det = of.omega[..., starts(r)]
    value = half_squares(of).sum(-1) - n * half_log_det.sum(-1) + constant
    if isinstance(prior, Precision):
        return value + prior.expected(of) - half_log_det @ prior.powers + prior.log_normaliser
    return value + prior.expected_energy(of.omega, of.omega_omega)
