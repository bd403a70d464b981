"""Leave-one-out predictive densities of rows, or groups of rows, of a regression, and comparisons by them.

First come the cavities, from which sites are taken out while the others respond; where they respond by more than a
bound, the optimum without the rows is found by a fit.  Then come the densities of several rows together.
"""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.diagnostics import certificate, log_expected_likelihood
from torchngvi.diagnostics.predictive import LeftOut
from torchngvi.errors import InputError, PairError
from torchngvi.fitting.records import FitResult
from torchngvi.interfaces import Sites
from torchngvi.models import GeneralizedLinear, checks
from torchngvi.models.log_joint import read_posterior
from torchngvi.numerics import linalg
from torchngvi.numerics.arrays import tracked
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.solved.response import check_optimum, fit_again, read_regression

# The optimum as prior plus sites, and Gaussians from which the sites of some rows are taken out
#
# At the optimum S = Λ + Σ β_j x_jx_jᵀ.  Without the rows of B
#
#     S_B = S - Σ_B β_j x_jx_jᵀ        m_B = m + S_B⁻¹ Σ_B α_j x_j
#
# is the optimum while the other sites stand still.  They do not: along row j this cavity is off by de and dv, and to
# third order the gradient of L without B there is
#
#     r = (Cᵀ Σ ra_j x_j,  tril(Cᵀ Σ rb_j x_jx_jᵀ C))     ra = ½β_e(dv + de²) + ½β_ee de(dv + de²/3)
#                                                         rb = β_e de + ½β_ee(dv + de²)              over j not in B
#
# with C the root of the cavity and β_e, β_ee derivatives of β in e.  With H the Hessian of L in (m, C) at q the
# response is -H⁻¹r, and ν² = rᵀH⁻¹r tells how far it goes.

_AT_ONCE = 20_000_000  # numbers
Moments = tuple[Tensor, Tensor]  # means (G, D) or (D,), roots (G, D, D) or (D, D)


class Cavities(NamedTuple):
    """Gaussians without the sites of some rows."""

    mean: Tensor  # (n, D)
    root: Tensor  # (n, D, D)
    left: Tensor  # whether enough is left of S in every direction, (n,)


@dataclass(frozen=True)
class Optimum:
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

    widest: ClassVar[int] = 60  # coefficients up to which it is written out
    lost: ClassVar[float] = 1e-3  # what is inexact of q over what is left of S, above which nothing is divided out

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
        check_optimum("leave_one_out takes rows out of an optimum", q, norm)
        norm = max(norm, torch.finfo(q.dtype).eps)
        bend, bend2 = (model.weights * part for part in sites.bends(*sites.at))
        bend2 = 2 * bend2  # ∂_v = ½∂_ee
        factor = None if q.dim > cls.widest else _factor(A, W0, bend, bend2)
        e, v = model.predictor(q.mean), A.square().sum(-1)  # of rows of weight 0 too
        return cls(model.X, model.weights, e, v, sites.alpha, sites.beta, bend, bend2, q.mean, C, V, norm, factor)

    @torch.no_grad()
    def without_rows(self, rows: Tensor) -> tuple[Cavities, Tensor]:
        """Take out one row (n,) each; the cavities after the response of the others, and ν² (n,)."""
        x, alpha, beta = self.X[rows], self.alpha[rows], self.beta[rows]
        a = x @ self.V  # V x_i
        k = 1 / (1 - beta * (a * x).sum(-1))  # mean m + kα a, covariance V + kβ aaᵀ; along row j kα V_ji and kβ V_ji²
        mean = self.mean + (k * alpha)[:, None] * a
        root, info = torch.linalg.cholesky_ex(self.V + (k * beta)[:, None, None] * a[:, :, None] * a[:, None, :])
        found = self._kept(mean, root, (info == 0) & (k > 0) & (k * self.inexact <= self.lost))
        if self.hessian is None:
            return found, torch.where(found.left, self._own_change(rows, k), math.inf)
        across = a @ self.X.mT  # V_ji
        out = torch.zeros_like(across, dtype=torch.bool)
        out[torch.arange(len(rows), device=rows.device), rows] = True
        return self._respond(found, (k * alpha)[:, None] * across, (k * beta)[:, None] * across.square(), out)

    @torch.no_grad()
    def without(self, out: Tensor) -> tuple[Cavities, Tensor]:
        """Take out several rows each, by masks (n, N); the cavities after the response of the others, and ν² (n,)."""
        found = self.divided(out, -1.0)
        if self.hessian is None:
            return found, torch.full_like(found.mean[:, 0], math.inf)
        de = (found.mean - self.mean) @ self.X.mT
        dv = (self.X @ found.root).square().sum(-1) - self.v
        return self._respond(found, de, dv, out)

    @torch.no_grad()
    def divided(self, out: Tensor, times: float) -> Cavities:
        """Multiply q by a power of the sites of some rows, masked (n, N): -1 takes out sites, which stand still."""
        beta, alpha = (torch.where(out, site, 0.0) for site in (self.beta, self.alpha))  # (n, N)
        A = self.X @ self.C
        eye = torch.eye(len(self.C), dtype=A.dtype, device=A.device)
        W = eye + times * ((A.mT * beta[:, None, :]) @ A)  # Cᵀ S_B C
        values, vectors, ok = linalg.eigh(W)
        left = ok & (values[:, 0] * self.lost >= self.inexact)
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
        ra, rb = (torch.where(out, 0.0, part) for part in _changes(self.bend, self.bend2, de, dv))
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
        ra, rb = _changes(self.bend[rows], self.bend2[rows], de, dv)
        return ra.square() * v + 0.5 * (rb * v).square()


def _changes(bend: Tensor, bend2: Tensor, de: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """The changes ra and rb of sites whose predictors are off by de and dv, to third order."""
    square = dv + de.square()
    return 0.5 * bend * square + 0.5 * bend2 * de * (dv + de.square() / 3), bend * de + 0.5 * bend2 * square


def refit(model: GeneralizedLinear, out: Tensor, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor, int]:
    """Fit q without the rows of masks (n, N), each from where it is thought to be: means, roots, and evaluations."""
    without = copy.copy(model)
    without.y = model.y.expand(len(out), -1)
    without.weights = torch.where(out, 0.0, model.weights)
    q = CholeskyGaussian(model.dim, (len(out),), mean=mean, scale=root, dtype=mean.dtype).to(mean.device)
    return q.mean, q.scale_tril, fit_again(q, without).evaluations


def _factor(A: Tensor, W0: Tensor, bend: Tensor, bend2: Tensor) -> Tensor:
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


# The log density of several rows together under a Gaussian, by draws that hardly vary
#
# p(y_B) = ∫ p(y_B | θ) q_0(θ) dθ, with q_0 the Gaussian without the rows of B, is the mean of
#
#     w = p(y_B | θ) q_0(θ) / h(θ)        over θ ~ h = ½q_0 + ½q_1,
#
# q_1 being q_0 times Gaussian sites for these rows.  Where the sites are good, w is nearly in proportion to x = q_1/h,
# whose mean is known to be 1, so that w - b(x - 1) with b by regression hardly varies (Owen and Zhou 2000); for normal
# targets it does not vary at all.  That h has half of its draws from q_0 bounds w by 2 p(y_B | θ).


@torch.no_grad()
def joint_log_density(model: GeneralizedLinear, member: Tensor, out: Moments, there: Moments) -> tuple[Tensor, Tensor]:
    """Compute log ∫ Π_B p(y_j | θ) q_0(θ) dθ of every group B, with its standard error, by the group of each row."""
    count, dim = int(member.max()) + 1, model.dim
    pairs = [(m.expand(count, dim), C.expand(count, dim, dim)) for m, C in (out, there)]
    z = _normal(dim, model.X)
    size = max(1, _AT_ONCE // (len(z) * dim))
    order = member.argsort()
    found = []
    for groups in torch.arange(count, device=member.device).split(size):
        first, last = int(groups[0]), int(groups[-1])
        rows = order[(member[order] >= first) & (member[order] <= last)]
        some = [(m[first : last + 1], C[first : last + 1]) for m, C in pairs]
        found.append(_of_some(model, rows, member[rows] - first, z, *some))
    density, error = (torch.cat(parts) for parts in zip(*found, strict=True))
    return density, error


def _of_some(
    model: GeneralizedLinear, rows: Tensor, member: Tensor, z: Tensor, out: Moments, there: Moments
) -> tuple[Tensor, Tensor]:
    """The same of some rows (n,) with their groups, by normal draws (S, D)."""
    logs, likelihoods = [], []
    for mean, root in (out, there):
        logs.append(torch.stack([_log_prob(mean, root, z, other) for other in (out, there)]))  # (2, G, S)
        likelihoods.append(_log_likelihood(model, rows, member, mean, root, z))
    (log_out, log_there), log_p = torch.cat(logs, -1), torch.cat(likelihoods, -1)  # (G, 2 S)
    log_h = torch.logaddexp(log_out, log_there) + torch.tensor(0.5, dtype=z.dtype, device=z.device).log()
    log_w, x = log_p + log_out - log_h, (log_there - log_h).exp()
    top = log_w.amax(-1, keepdim=True)
    w = (log_w - top).exp()
    plain = w.mean(-1)
    apart = x - x.mean(-1, keepdim=True)
    slope = (w * apart).sum(-1) / apart.square().sum(-1).clamp_min(torch.finfo(w.dtype).tiny)
    left = w - slope[:, None] * (x - 1)
    value = left.mean(-1)
    value = torch.where(value > 0, value, plain)
    error = left.std(-1) / left.shape[-1] ** 0.5 / value
    return value.log() + top[:, 0], error


def _log_prob(mean: Tensor, root: Tensor, z: Tensor, other: Moments) -> Tensor:
    """log N(θ; other) at θ = mean + root z, up to the constant that all have, (G, S)."""
    L = other[1]
    shift = torch.linalg.solve_triangular(L, (mean - other[0])[..., None], upper=False)
    apart = shift + torch.linalg.solve_triangular(L, root, upper=False) @ z.mT  # (G, D, S)
    return -0.5 * apart.square().sum(-2) - L.diagonal(dim1=-2, dim2=-1).log().sum(-1)[:, None]


def _log_likelihood(
    model: GeneralizedLinear, rows: Tensor, member: Tensor, mean: Tensor, root: Tensor, z: Tensor
) -> Tensor:
    """Σ_B log p(y_j | θ) at θ = mean + root z of each group, (G, S)."""
    total = mean.new_zeros(len(mean), len(z))
    for chunk in torch.arange(len(rows), device=rows.device).split(max(1, _AT_ONCE // (len(z) + model.dim**2))):
        at, to = rows[chunk], member[chunk]
        x = model.X[at]
        e = (x * mean[to]).sum(-1) + model.offset[at]
        eta = e[:, None] + (x[:, None, :] @ root[to])[:, 0] @ z.mT
        total.index_add_(0, to, -model.likelihood.energy(eta, model.y[at][:, None]))
    return total


def _normal(dim: int, like: Tensor, draws: int = 1024) -> Tensor:
    """Scrambled Sobol points as normal draws, each with its opposite, (S, D)."""
    sobol = torch.quasirandom.SobolEngine(dim, scramble=True, seed=0)
    half = torch.special.ndtri(sobol.draw(draws // 2, dtype=torch.float64).clamp(1e-12, 1 - 1e-12))
    return torch.cat([half, -half]).to(like)


@dataclass(frozen=True, repr=False)
class LeaveOneOut(LeftOut):
    """What q says of each row, or group of rows, that it has not seen.

    Attributes:
        density: log p(y_i | the other rows) under the Gaussian q_-i, (N,), in nats; of groups of all their rows
            together, (G,).
        in_sample: the same under q itself.
        resolved: where q_-i was found by a fit.
        evaluations: of those fits, all members of a batch at once.
        response: ν², by how much the other sites respond; of a design of more than 60 columns the same of the row's own
            site at its cavity.  Infinite where next to nothing but these rows determines some direction, so that they
            cannot be divided out of a q that is as exact as this one.
        shift: by how much the mean of q moves without them, in its standard deviations, (N, D).
        error: the standard error of the density of a group of several rows, which is an integral by draws; 0 of rows.
        groups: the names of the groups, sorted, in the order of all the others; None of rows.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
    >>> X, y = torch.ones(4, 1).double(), [0.0, 1.0, 2.0, 5.0]
    >>> model, q = GeneralizedLinear(X, y, "gaussian"), CholeskyGaussian(1, dtype=torch.float64)
    >>> result = fit(q, model, progress=False)
    >>> found = leave_one_out(q, model)
    >>> [round(x, 4) for x in found.density.tolist()]  # N(y_i; sum of the others/4, 1 + 1/4)
    [-2.6305, -1.2555, -1.1305, -8.2555]
    >>> round(found.total, 3), round(found.complexity, 3)
    (-13.272, 3.132)
    >>> print(leave_one_out(q, model, groups=["a", "a", "b", "b"]))
    elpd -14.72 ± 6.00 nats over 2 groups, p_loo 4.76; 0 of them by a fit without the group.
    """

    response: Tensor
    shift: Tensor
    error: Tensor
    groups: tuple[Any, ...] | None = None

    @property
    def parts(self) -> str:  # type: ignore[override]
        """What is left out, a plural."""
        return "rows" if self.groups is None else "groups"


@tracked
def leave_one_out(
    q: Gaussian,
    model: GeneralizedLinear,
    flag: float = 1e-3,
    *,
    groups: Any = None,  # (N,)
) -> LeaveOneOut:
    """Compute the log predictive density of each row under the Gaussian fitted to the others, without N refits.

    Use it to compare models and to find rows that a model does not expect.  A row is divided out of q as a site;
    the response of the other sites follows from the Hessian of L; and rows that they respond to strongly are fitted
    again, all in a few batches.  Pareto-smoothed importance sampling, which ArviZ has, misses such rows: its k speaks
    of draws, and not of the sites.  Rows that tell of one another, such as visits of a patient, are left out together
    by `groups`.

    Args:
        q: the optimum of the model, dense, without batch dimensions.
        model: one design with rows of weights that are not negative, at the temperature 1.  Densities are of a row as
            it is, without its weight; a row of weight 0 is one that was left out anyway.
        flag: the ν² above which a row, or group, is fitted again; 0 for all, infinity for none but those that cannot be
            divided out. Up to 1e-3 densities were right to 2e-4 on the problems it was chosen on.
        groups: of each row a number or name of its group, to leave out whole groups: then all that is returned is of
            groups, and the density that of all rows of one together.

    Returns:
        The densities, and how they were found.

    Raises:
        PairError: another model, or a posterior that is not dense.
        InputError: a q of another size or dtype than the model, or not at its optimum, a flag that is negative, groups
            of another number of rows or only one of them.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
    >>> model = GeneralizedLinear(torch.ones(4, 1).double(), [1.0, 2.0, 3.0, 9.0], "gaussian")
    >>> q = CholeskyGaussian(1, dtype=torch.float64)
    >>> _ = fit(q, model, progress=False)
    >>> leave_one_out(q, model).density.argmin().item()  # the row that the others expect least
    3
    """
    read_posterior("leave_one_out", q, model)
    q, model = read_regression("leave_one_out", q, model)
    model.check(q)
    read_number("flag", flag, "bounds ν²", at_least=0, infinite=True)
    here, count = Optimum.of(q, model), len(model.X)
    if groups is not None:
        names, member = numbered(groups, count)
        return _of_groups(here, model, flag, names, torch.tensor(member, device=model.X.device))
    rows = torch.arange(count, device=model.X.device)
    size = max(1, _AT_ONCE // (count * q.dim if q.dim <= Optimum.widest else q.dim**2))  # rows left out at once
    parts = [here.without_rows(chunk) for chunk in rows.split(size)]
    mean, root, response, resolved, evaluations = _resolve(model, rows, parts, here.weights > 0, flag)
    spread = (root.mT @ here.X[..., None])[..., 0].square().sum(-1)
    density = _log_density(model, rows, (here.X * mean).sum(-1) + model.offset, spread.sqrt())
    inside = _log_density(model, rows, here.e, here.v.sqrt())
    shift = (mean - q.mean) / q.stddev
    return LeaveOneOut(density, inside, resolved, evaluations, response, shift, torch.zeros_like(density))


def _of_groups(
    here: Optimum, model: GeneralizedLinear, flag: float, names: tuple[Any, ...], member: Tensor
) -> LeaveOneOut:
    """Leave out the rows of each group together, by the group of each row, (N,)."""
    groups = torch.arange(len(names), device=member.device)
    size = max(1, _AT_ONCE // here.X.numel())  # whose tables of rows are there at once, of wide designs too
    parts = [here.without(member == chunk[:, None]) for chunk in groups.split(size)]
    there = here.weights.new_zeros(len(names)).index_add(0, member, here.weights) > 0
    mean, root, response, resolved, evaluations = _resolve(model, member, parts, there, flag)
    density, error = joint_log_density(model, member, (mean, root), (here.mean, here.C))
    twice = [here.divided(member == chunk[:, None], 1.0) for chunk in groups.split(size)]
    seen = tuple(torch.cat([cavity[k] for cavity in twice]) for k in range(2))
    inside, _ = joint_log_density(model, member, (here.mean, here.C), (seen[0], seen[1]))
    counts = torch.bincount(member, minlength=len(names))
    single = (counts[member] == 1).nonzero()[:, 0]  # rows that are a group
    at = member[single]
    x, offset = here.X[single], model.offset[single]
    sd = (root[at].mT @ x[..., None])[..., 0].norm(dim=-1)
    density[at] = _log_density(model, single, (x * mean[at]).sum(-1) + offset, sd)
    inside[at] = _log_density(model, single, here.e[single], here.v[single].sqrt())
    error[at] = 0.0
    shift = (mean - here.mean) / here.V.diagonal().sqrt()
    return LeaveOneOut(density, inside, resolved, evaluations, response, shift, error, names)


def numbered(groups: Any, count: int) -> tuple[tuple[Any, ...], list[int]]:
    """Number the groups in the order of their names."""
    if isinstance(groups, Tensor) and groups.is_meta:
        raise InputError("groups names the group of each row; a tensor on a meta device has no names.")
    values = groups.tolist() if hasattr(groups, "tolist") else groups
    values = list(values) if isinstance(values, Iterable) else [values]
    values = [value.tolist() if isinstance(value, Tensor) else value for value in values]  # tensors hash as objects
    missing = [value for value in values if _missing(value)]
    if missing:
        raise InputError(f"groups names the group of each row; it is missing ({missing[0]}) in {len(missing)} rows.")
    try:
        names = tuple(sorted(set(values)))
    except TypeError as error:
        raise InputError(
            f"groups names the group of each row, all by numbers or all by texts; got {values[:2]}, .. ({error})."
        ) from error
    if len(values) != count or len(names) < 2:
        raise InputError(
            f"groups names the group of each of the {count} rows, at least two of them; got {len(values)} names of "
            f"{len(names)} groups."
        )
    number = {name: k for k, name in enumerate(names)}
    return names, [number[value] for value in values]


def _missing(name: Any) -> bool:
    """Whether it is None, or no number, time or text, of which no library says that it equals itself."""
    try:
        return name is None or bool(name != name)
    except TypeError:  # of pandas.NA
        return True
    except ValueError:  # of an array, which is refused as a name
        return False


def _resolve(
    model: GeneralizedLinear, member: Tensor, parts: list[tuple[Cavities, Tensor]], there: Tensor, flag: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Means and roots, ν², and what was fitted without its rows, where others respond too much, by evaluations."""
    mean, root = (torch.cat([cavity[k] for cavity, _ in parts]) for k in range(2))
    response, evaluations = torch.cat([change for _, change in parts]), 0
    resolved = ((response > flag) | ~response.isfinite()) & there
    for chunk in resolved.nonzero()[:, 0].split(max(1, _AT_ONCE // (len(member) * mean.shape[1]))):
        if len(chunk):
            mean[chunk], root[chunk], more = refit(model, member == chunk[:, None], mean[chunk], root[chunk])
            evaluations += more
    return mean, root, response, resolved, evaluations


def _log_density(model: GeneralizedLinear, rows: Tensor, mean: Tensor, sd: Tensor) -> Tensor:
    """log E p(y_i | η) of some rows under η ~ N(e_i, s_i²), (n,)."""
    found = log_expected_likelihood(model.likelihood, *(x.double() for x in (mean, sd, model.y[rows])))
    return found.to(mean.dtype)


# ------------------------------------------------------------------------------------ comparison of models


# Stacking: weights of models in one predictive distribution, by how well they predict rows that were left out


@torch.no_grad()
def stacking_weights(log_density: Any) -> tuple[Tensor, float]:
    """Compute the weights of K models whose mixture predicts left-out rows best.

    Use them to predict with several models at once: unlike weights by the evidence they do not end at one model
    when none is true (Yao, Vehtari, Simpson and Gelman 2018).  They are the maximum of the concave function

        F(w) = 1/N Σ_i log Σ_k w_k p_ik        over w_k ≥ 0, Σ_k w_k = 1,

    by a primal-dual interior-point method.  Since Σ_k w_k ∂_kF = 1, no weights are better than w by more than
    max_k ∂_kF - 1, which proves how far it came.

    Args:
        log_density: log p_ik of row i under model k without that row, (N, K), in nats, as `leave_one_out` has it; a
            tensor, an array or lists.

    Returns:
        The weights, (K,), and the proved bound of F* - F(w), in nats a row.

    Raises:
        InputError: if it is not a matrix of finite numbers.

    >>> likely = torch.tensor([[0.9, 0.1, 0.2], [0.8, 0.2, 0.3], [0.1, 0.9, 0.2]])
    >>> weights, gap = stacking_weights(likely.double().log())
    >>> [round(w, 4) for w in weights.tolist()], gap < 1e-9  # the third is never needed
    ([0.6776, 0.3224, 0.0], True)
    """
    log_density = checks.numbers("log_density", log_density, None)
    if log_density.ndim != 2 or not log_density.numel():
        raise InputError(
            "stacking_weights takes log densities of rows (N) under models (K), (N, K); got "
            f"{tuple(log_density.shape)}."
        )
    p = log_density.double()
    p = (p - p.amax(-1, keepdim=True)).exp()  # F but for a constant
    count = p.shape[1]
    w = torch.full((count,), 1 / count, dtype=p.dtype, device=p.device)
    z = w.clone()  # the multipliers of w ≥ 0: 1 - ∂_kF at the end
    for _ in range(100):
        ratio = p / (p @ w)[:, None]
        slope = ratio.mean(0)
        if float(slope.max() * w.sum()) - 1 <= 1e-10:  # nats a row
            break
        barrier = 0.1 * float(w @ z) / count
        curvature = ratio.mT @ ratio / len(p) + (z / w).diag()
        dw = torch.linalg.solve(curvature, slope - 1 + barrier / w)
        dz = (barrier - z * dw) / w - z
        w, z = w + _step(w, dw) * dw, z + _step(z, dz) * dz
    w = torch.where(w < 1e-9 * w.sum(), 0.0, w)
    w = w / w.sum()
    gap = float((p / (p @ w)[:, None]).mean(0).max()) - 1
    return w.to(log_density.dtype), max(gap, 0.0)


def _step(x: Tensor, direction: Tensor, inside: float = 0.99) -> Tensor:
    """The step up to 1 that goes so much of the way to where an x would be 0."""
    towards = torch.where(direction < 0, -x / direction, torch.inf)
    return (inside * towards.min()).clamp_max(1.0)


_TAKES = (
    "compare_models takes results of fit, or pairs of a Gaussian and its GeneralizedLinear (of regressions and mixed "
    "models of tables it is torchngvi.tables.compare);"
)
_HEAD = ["", "elpd", "se", "p_loo", "difference", "dse", "stacking", "ELBO", "proved to"]
_WIDTHS = (0, 8, 5, 5, 10, 5, 8, 10, 9)  # at least
CLOSE = 4.0  # nats of elpd within which models may predict alike (Sivula, Magnusson and Vehtari 2020)


class Comparison(NamedTuple):
    """Models beside each other, the one that predicts best first; names as in ArviZ's ``compare``.

    Attributes:
        names: of the models, K of them.
        elpd: Σ_i log p(y_i | the other rows), (K,), in nats.
        se: its standard errors, (K,).
        p_loo: effective numbers of parameters, (K,).
        elpd_diff: by how much the first has more, (K,), in nats, not negative.
        dse: the standard errors of that difference, √(N var of the differences of rows), (K,).
        weight: in a mixture of the models that predicts best, `stacking_weights`, (K,).
        pseudo_bma: weights ∝ exp(elpd), (K,), which trust differences of elpd as if they had no error.
        elbo: the ELBOs, (K,), in nats.
        certificate: by how much at most the largest ELBO is above each, (K,); infinite where nothing is proved.
        loo: what `leave_one_out` has found, model by model.

    >>> y = [0.1, 0.9, 2.2, 2.8, 4.1, 5.0]
    >>> X = torch.stack([torch.ones(6), torch.arange(6.0)], 1).double()
    >>> from torchngvi import CholeskyGaussian, fit
    >>> def fitted(columns):
    ...     model = GeneralizedLinear(X[:, :columns], y, "gaussian")
    ...     return fit(CholeskyGaussian(columns, dtype=torch.float64), model, progress=False)
    >>> print(compare_models({"a constant": fitted(1), "a line": fitted(2)}))
                    elpd     se  p_loo  difference    dse  stacking        ELBO  proved to
    a line         -6.59   0.23   0.32        0.00   0.00     1.000       -8.60      <1e-6
    a constant    -16.53   4.32   2.70        9.93   4.09     0.000      -17.86      <1e-6
    With 6 rows standard errors are too small: below a hundred, two of them say little.
    """

    names: tuple[str, ...]
    elpd: Tensor
    se: Tensor
    p_loo: Tensor
    elpd_diff: Tensor
    dse: Tensor
    weight: Tensor
    pseudo_bma: Tensor
    elbo: Tensor
    certificate: Tensor
    loo: tuple[LeftOut, ...]

    def elbo_difference(self, first: str, second: str) -> tuple[float, float]:
        """Return an interval that holds the difference of the largest ELBOs of two models: a proof, not an estimate.

        With E the ELBO of each q and c its certificate it is [E_1 - E_2 - c_2, E_1 - E_2 + c_1].  It is of the bounds:
        the evidences differ from them by KL(q‖p), which is another one for each model.

        Raises:
            InputError: of a name that is not among the models.
        """
        for name in (first, second):
            if name not in self.names:
                raise InputError(f"the models are {', '.join(self.names)}; got {name!r}.")
        one, two = self.names.index(first), self.names.index(second)
        difference = float(self.elbo[one] - self.elbo[two])
        return difference - float(self.certificate[two]), difference + float(self.certificate[one])

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        columns = (self.elpd, self.se, self.p_loo, self.elpd_diff, self.dse, self.weight, self.elbo)
        formats = (".2f", ".2f", ".2f", ".2f", ".2f", ".3f", ".2f")
        cells = [
            [name, *(f"{float(of[k]):{how}}" for of, how in zip(columns, formats, strict=True)), _proved(bound)]
            for k, (name, bound) in enumerate(zip(self.names, self.certificate.tolist(), strict=True))
        ]
        lines = [_HEAD, *cells]
        widths = [max(least, *(len(line[k]) for line in lines)) for k, least in enumerate(_WIDTHS)]
        made = [
            "  ".join([f"{line[0]:{widths[0]}}", *(f"{x:>{w}}" for x, w in zip(line[1:], widths[1:], strict=True))])
            for line in lines
        ]
        return "\n".join([*made, *self._cautions()])

    def _cautions(self) -> list[str]:
        found, rows, what = [], len(self.loo[0].density), self.loo[0].parts
        pairs = zip(self.names, self.elpd_diff.tolist(), self.dse.tolist(), strict=True)
        alike = [name for name, behind, error in pairs if behind < CLOSE and behind <= 2 * error][1:]
        if alike:
            predict = "predicts" if len(alike) == 1 else "predict"
            found.append(
                f"{', '.join(alike)} {predict} as well as {self.names[0]}, as far as these {what} can tell: less than "
                f"{CLOSE:g} nats and 2 standard errors behind."
            )
        if rows < 100:  # (Sivula, Magnusson and Vehtari 2020)
            found.append(f"With {rows} {what} standard errors are too small: below a hundred, two of them say little.")
        return found


Entry = tuple[Gaussian, GeneralizedLinear]
Given = FitResult | Entry


def compare_models(
    models: Mapping[str, Given],
    flag: float = 1e-3,
    *,
    groups: Any = None,  # (N,)
) -> Comparison:
    """Compare regressions of the same rows by how they predict rows that were left out, and by their ELBOs.

    Use it to choose columns, a prior, a link or a likelihood, or to weigh models that all have something to say.
    Differences of elpd are of the same rows, so that their standard errors are much smaller than those of either.
    Where `groups` are given, whole groups are left out.

    Args:
        models: the result of `torchngvi.fit`, or q and the model it is the optimum of, by name; at least two.  All
            models are of the same y, with the same weights.
        flag, groups: those of `leave_one_out`.

    Returns:
        The models, the best first, with everything that was computed of them.

    Raises:
        InputError: fewer than two models, or two of one name, neither a result nor a pair, a result without its model,
            other rows, weights or groups, densities beside probabilities, or a density that is not finite.
        PairError: a model or posterior that `leave_one_out` does not take.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
    >>> x = torch.linspace(-1, 1, 8, dtype=torch.float64)
    >>> designs = {"slope": torch.stack([x.new_ones(8), x], 1), "constant": x.new_ones(8, 1)}
    >>> fits = {}
    >>> for name, X in designs.items():
    ...     model = GeneralizedLinear(X, [0, 0, 0, 1, 0, 1, 1, 1])
    ...     fits[name] = fit(CholeskyGaussian(model.dim, dtype=torch.float64), model, progress=False)
    >>> found = compare_models(fits)
    >>> found.names, round(found.elpd_diff[1].item(), 1)  # nats by which the second is behind
    (('slope', 'constant'), 1.6)
    """
    if not isinstance(models, Mapping) or len(models) < 2:
        raise InputError(
            "compare_models takes at least two models by name, such as {'a': result_a, 'b': (q_b, model_b)}; got "
            f"{f'{len(models)}' if isinstance(models, Mapping) else type(models).__name__}."
        )
    entries = {str(name): _entry(str(name), given) for name, given in models.items()}
    if len(entries) < len(models):
        raise InputError(f"the names of models must differ as texts; got {', '.join(map(repr, models))}.")
    _same_rows(entries)
    loo = {name: leave_one_out(*entry, flag=flag, groups=groups) for name, entry in entries.items()}
    names = sorted(entries, key=lambda name: -float(loo[name].density.double().sum()))  # as elpd below, of float32 too
    density = torch.stack([loo[name].density.double().cpu() for name in names], 1)
    _check_finite(density, names, loo[names[0]].parts)
    behind = density[:, :1] - density
    elpd = density.sum(0)
    bounds = []  # the ELBO of each, and by how much the largest one is at most above
    for q, model in (entries[name] for name in names):
        with torch.no_grad():
            bounds.append((-float(model.negative_elbo(q)), certificate(q, model).bound))
    elbo, certified = torch.tensor(bounds, dtype=torch.float64, device=elpd.device).unbind(1)
    return Comparison(
        tuple(names),
        elpd,
        _error(density),
        torch.tensor([loo[name].complexity for name in names], dtype=torch.float64, device=elpd.device),
        behind.sum(0),
        _error(behind),
        stacking_weights(density)[0],
        torch.softmax(elpd, 0),
        elbo,
        certified,
        tuple(loo[name] for name in names),
    )


def _proved(bound: float) -> str:
    return "-" if math.isinf(bound) else "<1e-6" if bound < 1e-6 else f"{bound:.1e}"


def _error(terms: Tensor) -> Tensor:
    """The standard error of sums over rows like these, (N, K) -> (K,)."""
    return (len(terms) * terms.var(0)).sqrt()


def _entry(name: str, given: Given) -> Entry:
    pair = (given.posterior, given.target) if isinstance(given, FitResult) else given
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise InputError(f"{_TAKES} of {name!r} it got a {type(given).__name__}.")
    q, model = pair
    if isinstance(given, FitResult) and model is None:
        raise InputError(
            f"the result of {name!r} has no model, since it is a copy, or was read from a file: give the pair of its "
            "posterior and the model."
        )
    if not isinstance(model, GeneralizedLinear) or not isinstance(q, Gaussian):
        raise PairError(f"{_TAKES} of {name!r} it got {type(q).__name__} and {type(model).__name__}.")
    return q, model


def _check_finite(density: Tensor, names: list[str], parts: str) -> None:
    """Check that every model allows for every row."""
    wrong = (~density.isfinite()).nonzero()
    if len(wrong):
        part, model = wrong[0].tolist()
        raise InputError(
            f"compare_models compares finite log densities of {parts}; that of number {part} under {names[model]!r} is "
            f"{float(density[part, model])}, and {len(wrong)} in all are not finite."
        )


def _same_rows(entries: Mapping[str, Entry]) -> None:
    rows = {name: model for name, (_, model) in entries.items()}
    (first, mine), *others = rows.items()
    for name, theirs in others:
        for what in ("y", "weights"):
            one, two = (getattr(each, what).cpu() for each in (mine, theirs))
            dtype = min(one.dtype, two.dtype, key=lambda of: of.itemsize)  # rows in float32 are those in float64
            one, two = one.to(dtype), two.to(dtype)
            if one.shape != two.shape or not torch.equal(one, two):
                raise InputError(
                    f"compare_models compares predictions of the same rows in the same order; the {what} of {name!r}, "
                    f"{tuple(two.shape)}, are not those of {first!r}, {tuple(one.shape)}."
                )
        if mine.likelihood.continuous != theirs.likelihood.continuous:
            raise InputError(
                f"compare_models got a density of real numbers and a probability of counts or classes ({first!r} and "
                f"{name!r}), whose logarithms cannot be compared."
            )
