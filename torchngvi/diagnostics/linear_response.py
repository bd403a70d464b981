"""The standard deviations that q ought to have: the linear response of its mean, and what else it tells.

Tilt the density to p exp(t θ_k): the mean of the posterior moves by its covariance with θ_k.  The mean m(t) of the best
Gaussian moves too, and to third order, in closed form,

    Cov_LR[:, k] = dm/dt = C (I - M)⁻¹ Cᵀ e_k,        M_il = ½ Σ_jk B_ijk B_ljk,        B_ijk = E_q[∂_i ∂_j ∂_k ℓ]

in the frame θ = m + C z of q, where its derivatives of fourth order are left out.  (Opper and Winther 2004; Giordano,
Broderick and Jordan 2018, Journal of Machine Learning Research 19.)  Where Cov_LR differs from V the family does not
fit, and Cov_LR is nearer to the truth.  By Stein's identity B_ijk = E[r_i (z_j z_k - δ_jk)], where
r = Cᵀ∇ℓ/γ - z is the residual that the fit makes small on average; so that M is a mean over pairs of draws.

Where q has the pattern of a mean field or of blocks, j and k run over the entries of the pattern, and the second
derivatives outside of it, N = E[Cᵀ∇²ℓ C]/γ - I, are part of the response: Cov_LR = C (I + N - M)⁻¹ Cᵀ.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_callable, read_count, read_instance, read_number, read_sizes, read_tensor, shown
from torchngvi.derivatives import energy_and_gradient
from torchngvi.errors import InputError
from torchngvi.expectations.draws import Fixed
from torchngvi.interfaces import Frame, Target
from torchngvi.models.factors import Guarded
from torchngvi.models.log_joint import as_target, read_gaussian
from torchngvi.numerics.linalg import eigh
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures import Dense, Pattern
from torchngvi.structures.pattern import Structured

LARGEST = math.log(3.0)  # a log sd beyond which the size is not told
PAIRS = 2048  # that `flatness` uses at most
_GROUPS = 8  # of draws, one of which is left out at a time


class Residuals(NamedTuple):
    """How far the whitened gradient is from that of -log q, at antithetic draws of q.

    Attributes:
        z: standard normal draws, the second half minus the first, (S, D).
        residual: r = Cᵀ∇ℓ/γ - z at θ = m + C z, (S, D); 0 where q is the density itself.

    >>> z = torch.tensor([[1.0], [-1.0]])
    >>> half, even, odd = Residuals(z, z.square() + 2 * z).halves
    >>> even.item(), odd.item()
    (1.0, 2.0)
    """

    z: Tensor
    residual: Tensor

    @property
    def halves(self) -> tuple[Tensor, Tensor, Tensor]:
        """The noise z, and the even and the odd part of the residual, (S/2, D) each."""
        plus, minus = self.residual.chunk(2)
        return self.z[: len(plus)], 0.5 * (plus + minus), 0.5 * (plus - minus)

    @property
    def rise(self) -> bool:
        """Whether the mean curvature of the log joint under q is positive, by three standard errors."""
        slopes = (self.residual * self.z).mean(-1)
        return len(slopes) > 1 and bool(slopes.mean() < -1 - 3 * slopes.std() / len(slopes) ** 0.5)


def finite_pairs(residuals: Residuals) -> Residuals:
    """Those of the pairs of draws at which both are finite."""
    pair = residuals.residual.isfinite().all(-1).reshape(2, -1).all(0).repeat(2)
    return Residuals(residuals.z[pair], residuals.residual[pair])


@dataclass(frozen=True)
class ThirdOrder:
    """The matrix M, or M - N of a pattern, as it is estimated from draws.

    Attributes:
        matrix: (D, D), symmetric; unbiased.
        without: the same with one group of the draws left out, (G, D, D).

    >>> ThirdOrder(torch.diag(torch.tensor([0.5, 0.25])), torch.zeros(8, 2, 2)).eigenvalue
    0.5
    """

    matrix: Tensor
    without: Tensor

    @property
    def eigenvalue(self) -> float:
        """The largest eigenvalue of M: 0 for a Gaussian, and the response is singular at 1."""
        return float(eigh(self.matrix)[0][-1])

    @property
    def noise(self) -> float:
        """The jackknife's standard error of the largest eigenvalue."""
        return float(_jackknife(eigh(self.without)[0][:, -1]))

    def log_sd(self, frame: Frame) -> tuple[Tensor, Tensor]:
        """log(sd by linear response / sd of q), (D,), and the jackknife's standard error, (D,)."""
        return response_log_sd(frame, self.matrix), _jackknife(response_log_sd(frame, self.without))


def _jackknife(values: Tensor) -> Tensor:
    """The standard error by what is found without each group, (G, ...)."""
    return math.sqrt(len(values) - 1) * values.std(0, correction=0)


def response_covariance(frame: Frame, M: Tensor) -> Tensor:
    """Compute the covariance by linear response, C (I - M)⁻¹ Cᵀ; eigenvalues of I - M below 0.02 are raised to it.

    Args:
        frame: of q, with mean m and root C.
        M: the matrix of third derivatives, (D, D), symmetric, as `third_order` estimates it.

    Returns:
        The covariance, (D, D).

    >>> from torchngvi import CholeskyGaussian
    >>> response_covariance(CholeskyGaussian(1, scale=2.0).frame(), torch.tensor([[0.5]])).item()
    8.0
    """
    columns, growth = _spectral(frame, M)
    return columns.mT @ (growth[..., None] * columns)


def response_log_sd(frame: Frame, M: Tensor) -> Tensor:
    """Compute log(sd by linear response / sd of q): ½ log of the ratio of the diagonals of C (I - M)⁻¹ Cᵀ and of V.

    Args:
        frame: of q, with mean m and root C.
        M: the matrix of third derivatives, (..., D, D), symmetric.

    Returns:
        One logarithm a coordinate, (..., D): 0 where q has the standard deviation of the response.

    >>> from torchngvi import CholeskyGaussian
    >>> response_log_sd(CholeskyGaussian(1, scale=2.0).frame(), torch.tensor([[0.75]])).exp().item()
    2.0
    """
    columns, growth = _spectral(frame, M)
    return 0.5 * (columns.square() * growth[..., None]).sum(-2).div(frame.variance).log()


def _spectral(frame: Frame, M: Tensor, floor: float = 0.02) -> tuple[Tensor, Tensor]:
    """C u_j for each eigenvector u_j of M, (..., D, D) by rows, and 1/(1 - λ_j), fifty at most, (..., D)."""
    read_instance("frame", frame, Frame, "is the one of a posterior, q.frame()", other=M)
    dim = frame.mean.shape[-1]
    M = read_tensor("M", M, like=frame.mean, finite=False)
    if M.shape[-2:] != (dim, dim):
        raise InputError(f"M must be (..., {dim}, {dim}); got shape {tuple(M.shape)}.")
    values, vectors, _ = eigh(M)
    return frame.push(vectors.mT), 1 / (1 - values).clamp_min(floor)


def third_order(z: Tensor, residuals: Tensor, structure: Pattern | None = None) -> ThirdOrder:
    """M from residuals at antithetic draws: those of the last sample average of a fit cost no new gradient.

    Only the even part of r counts, and <zzᵀ - I, wwᵀ - I> = (zᵀw)² - |z|² - |w|² + D, so that no third derivative is
    formed: M is the mean of ½ r_s r_tᵀ times this over the pairs s ≠ t of draws, S² D operations.  About 16 D draws
    and at least 512 tell its largest eigenvalue from noise.

    Args:
        z: standard normal draws, (S, D), the second half minus the first.
        residuals: Cᵀ∇ℓ/γ - z at θ = m + C z, (S, D).
        structure: of a mean field or of blocks the pattern; its second derivatives outside the pattern are included.
            Dense by default.

    Returns:
        The estimate, which is unbiased, and what it is without one group of draws.

    Raises:
        InputError: draws that are not antithetic pairs, or fewer than 32; a pattern that is not closed under products.

    >>> z = torch.randn(512, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> z = torch.cat([z, -z])
    >>> round(third_order(z, 0.5 * (z.square() - 1)).eigenvalue, 1)  # of l = z³/6 + z²/2 - z/2: B = 1, M = 1/2
    0.5
    """
    _check_pairs(z, residuals)
    structure = Dense(z.shape[-1]) if structure is None else structure
    read_instance("structure", structure, Pattern, "is a pattern of torchngvi.structures, or None")
    if structure.dim != z.shape[-1] or residuals.shape != z.shape:
        raise InputError(
            f"z, residuals and the structure are of one number of coordinates; got {tuple(z.shape)}, "
            f"{tuple(residuals.shape)} and {structure}."
        )
    if not structure.closed:
        raise InputError(
            f"the third order needs second derivatives that are the identity within the pattern of q; {structure} is "
            "not closed under products. Use `confirm`, or a dense or block-diagonal structure."
        )
    half, even, odd = Residuals(z, residuals).halves

    def block(rows: Tensor, columns: Tensor) -> Tensor:
        table = _kernel(half[rows], half[columns], structure).masked_fill_(rows[:, None] == columns, 0.0)
        return even[rows].mT @ (table @ even[columns])

    def outside(rows: Tensor) -> Tensor:
        """Σ_s ½(r zᵀ + z rᵀ) without the entries of the pattern, (D, D)."""
        product = odd[rows].mT @ half[rows]
        product = 0.5 * (product + product.mT)
        return product - structure.full(structure.from_dense(product))

    result = _over_pairs(half, block, 1 if structure.widest in (1, structure.dim) else structure.dim)
    if structure.widest == structure.dim:
        return result
    groups = torch.arange(len(half), device=z.device).tensor_split(_GROUPS)
    sums = torch.stack([outside(rows) for rows in groups])
    sizes = torch.tensor([len(rows) for rows in groups], dtype=z.dtype, device=z.device)[:, None, None]
    total = sums.sum(0)
    return ThirdOrder(result.matrix - total / len(half), result.without - (total - sums) / (len(half) - sizes))


def third_order_of_values(z: Tensor, log_weights: Tensor) -> ThirdOrder:
    """M from values of the log joint alone, for a dense q.

    log w has minus the third derivatives of ℓ, B_ijk = -E[log w He_ijk(z)] with Hermite's polynomials
    He_ijk = z_i z_j z_k - δ_ij z_k - δ_ik z_j - δ_jk z_i, and with G = zᵀw

        Σ_jk He_ijk(z) He_ljk(w) = (G² - |z|² - |w|² + D + 4) z_i w_l + 2 w_i z_l - 2 G (z_i z_l + w_i w_l) + 2 G δ_il

    Its noise is about three times that of `third_order` at as many draws.

    Args:
        z: antithetic standard normal draws, (S, D), the second half minus the first.
        log_weights: log p/γ - log q at θ = m + C z, (S,), up to a constant.

    Returns:
        The estimate, which is unbiased up to the regression of log w on z, and what it is without one group of draws.

    Raises:
        InputError: draws that are not antithetic pairs, or fewer than 32.

    >>> z = torch.randn(4096, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> z = torch.cat([z, -z])
    >>> found = third_order_of_values(z, -z[:, 0].pow(3) / 6)  # B = 1, M = 1/2
    >>> abs(found.eigenvalue - 0.5) < 3 * found.noise
    True
    """
    log_weights = read_tensor("log_weights", log_weights, shape=(None,))
    _check_pairs(z, log_weights[:, None])
    plus, minus = log_weights.chunk(2)
    half, odd = z[: len(plus)], 0.5 * (plus - minus)
    if len(half) > half.shape[-1]:
        odd = odd - half @ torch.linalg.lstsq(half, odd[:, None]).solution[:, 0]
    norms = half.square().sum(1)
    eye = torch.eye(half.shape[-1], dtype=z.dtype, device=z.device)

    def block(rows: Tensor, columns: Tensor) -> Tensor:
        v, w = half[rows], half[columns]
        G, own = v @ w.mT, rows[:, None] == columns
        products = (odd[rows, None] * odd[columns]).masked_fill_(own, 0.0)
        table = G.square() - norms[rows, None] - norms[columns] + (v.shape[-1] + 4)
        weighted = products * G
        straight = v.mT @ ((products * table) @ w)
        crossed = w.mT @ (products.mT @ v)
        squares = (v.mT * weighted.sum(1)) @ v + (w.mT * weighted.sum(0)) @ w
        return straight + 2 * crossed - 2 * squares + 2 * weighted.sum() * eye

    return _over_pairs(half, block)


def _check_pairs(z: Tensor, others: Tensor) -> None:
    for name, part in (("z", z), ("the values at z", others)):
        what = "must be a tensor of real numbers"
        if not read_instance(name, part, Tensor, what).is_floating_point() or part.is_meta or not part.ndim:
            raise InputError(f"{name} {what}; got {shown(part)}.")
    if z.ndim != 2 or len(z) % 2 or len(z) < 4 * _GROUPS or len(others) != len(z):
        raise InputError(
            f"the third order needs antithetic draws z (S, D), S even and at least {4 * _GROUPS}, and as many values; "
            f"got shapes {tuple(z.shape)} and {tuple(others.shape)}."
        )
    first, second = z.chunk(2)
    if not torch.equal(first, -second):
        raise InputError(
            "the third order needs antithetic draws, z[S/2:] = -z[:S/2]; got others. Draw them by Antithetic(S) or "
            "Fixed(S)."
        )


def _kernel(z: Tensor, w: Tensor, structure: Pattern) -> Tensor:
    """Σ (z_j z_k - δ_jk)(w_j w_k - δ_jk) over the entries (j, k) of the pattern, for each pair of draws."""
    if structure.widest == structure.dim:
        squares = (z @ w.mT).square_()
    elif structure.widest == 1:
        squares = z.square() @ w.square().mT
    else:
        products = z[:, None] * w
        squares = (products * structure.neighbours(products)).sum(-1)
    return squares - z.square().sum(1)[:, None] - w.square().sum(1) + z.shape[1]


def _over_pairs(
    z: Tensor, block: Callable[[Tensor, Tensor], Tensor], width: int = 1, numbers: int = 20_000_000
) -> ThirdOrder:
    """½ of the mean over pairs s ≠ t of what a block sums over rows and columns, all of it and without each group."""
    count = len(z)
    every = torch.arange(count, device=z.device)
    groups = every.tensor_split(_GROUPS)
    most = max(1, numbers // (count * width))  # rows at once

    def summed(group: Tensor, columns: Tensor) -> Tensor:
        return torch.stack([block(rows, columns) for rows in group.split(most)]).sum(0)

    across = torch.stack([summed(group, every) for group in groups])
    within = torch.stack([summed(group, group) for group in groups])
    total = across.sum(0)
    left = total - across - across.mT + within
    rest = torch.tensor([count - len(group) for group in groups], dtype=total.dtype, device=total.device)
    matrix = 0.5 * total / (count * (count - 1))
    without = 0.5 * left / (rest * (rest - 1))[:, None, None]
    return ThirdOrder(0.5 * (matrix + matrix.mT), 0.5 * (without + without.mT))


def tails(z: Tensor, residuals: Tensor) -> tuple[Tensor, Tensor]:
    """κ_i = E[r_i He_3(z_i)] = E[∂_i⁴ ℓ] in the frame of q, He_3(z) = z³ - 3z, (D,), and its standard error.

    It sees what the third order cannot: where κ_i is well below zero a density that may be symmetric has heavier tails
    than q.  The mean of r He_3 itself has a variance that He_3² dominates; κ_i is therefore six times the coefficient
    of He_3 in the regression of the odd part of r_i on z_i and He_3(z_i), which has the same limit, as the two are
    uncorrelated, and no noise at all where ℓ is a quartic.

    Args:
        z, residuals: those of `third_order`, (S, D).

    Returns:
        κ, one a direction of the frame, (D,), and its standard error, (D,).

    Raises:
        InputError: draws that are not antithetic pairs, or fewer than 32.

    >>> z = torch.randn(512, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> z = torch.cat([z, -z])
    >>> kappa, error = tails(z, (z.pow(3) - 3 * z) / 6)  # of l = He_4(z)/24 + z²/2
    >>> round(kappa.item(), 6), error.item() < 1e-6
    (1.0, True)
    """
    _check_pairs(z, residuals)
    half, _, odd = Residuals(z, residuals).halves
    cubic = half.pow(3) - 3 * half
    square = half.square().sum(0)
    cubic = cubic - half * (cubic * half).sum(0) / square
    left = odd - half * (odd * half).sum(0) / square
    size = cubic.square().sum(0)
    slope = (left * cubic).sum(0) / size
    error = ((left - slope * cubic) * cubic).square().sum(0).sqrt() / size
    return 6 * slope, 6 * error


# The response of single coordinates, with all orders of ℓ: conjugate gradients on the Hessian of L
#
# In the frame θ = m + C (p + (I + R) z), with R symmetric and in the pattern of q, the Hessian of L/γ at an optimum is
#
#     <(p, R), A (p, R)> = E[dᵀ y] + |R|²_F,        d = p + R z,        y = Cᵀ∇²ℓ(θ) C d / γ
#
# so that A (p, R) = (E[y], Π(E[½(y zᵀ + z yᵀ)]) + R).  A tilt by θ_k pulls at p along u = Cᵀe_k/|Cᵀe_k|, and with
# A (p, R) = (u, 0) the standard deviation by linear response is sd_k √(uᵀp) (Giordano, Broderick and Jordan 2018).
# The expectations are means over fixed antithetic draws, the second derivatives differences of gradients.


class Confirmed(NamedTuple):
    """What conjugate gradients found, an entry a coordinate.

    Attributes:
        coordinates: which coordinates k were asked for, (K,).
        log_sd: log(sd by linear response / sd of q), at most log 3, (K,).
        standard_error: of log_sd, from the draws, (K,).
        singular: where the response is indefinite, or grows beyond a factor of 3, (K,).
        finished: where the iterations had come to their end; elsewhere log_sd is a lower bound, (K,).

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q = CholeskyGaussian(2, dtype=torch.float64)
    >>> found = confirm(q, LogJoint(lambda theta: -0.5 * theta.square().sum(-1)), torch.tensor([0]), num_samples=8)
    >>> abs(found.log_sd.item()) < 1e-6, found.singular.tolist()  # q is the density itself
    (True, [False])
    """

    coordinates: Tensor
    log_sd: Tensor
    standard_error: Tensor
    singular: Tensor
    finished: Tensor


def difference_step(dtype: torch.dtype) -> float:
    """The step of a central difference of gradients, in standard deviations of q."""
    return 1e-2 * (torch.finfo(dtype).eps / torch.finfo(torch.float32).eps) ** (1 / 9)


class Response:
    """The Hessian of L/γ at q, as a product with several (p, R) at once, joined to vectors x, (K, n)."""

    def __init__(self, q: Gaussian, target: Target, draws: Fixed) -> None:
        self.target, self.frame, self.structure = target, q.frame(), q.structure
        self.z = draws(q.mean_probe.detach())
        self.theta = self.frame.mean + self.frame.push(self.z)
        self.step = difference_step(self.z.dtype)
        self.cost = 2 * len(self.z)  # gradients of a product, each coordinate

    def joined(self, p: Tensor, R: Structured) -> Tensor:
        """Join p (K, D) and R (K, ...) into vectors (K, n) whose dot product is <p, p'> + <R, R'>_F."""
        return torch.cat([p, math.sqrt(2) * self.structure.flat(R)], -1)

    def parted(self, x: Tensor) -> tuple[Tensor, Structured]:
        """Part vectors that `joined` made into p and R again."""
        p, flat = x.split([self.structure.dim, x.shape[-1] - self.structure.dim], -1)
        return p, self.structure.unflat(flat / math.sqrt(2))

    def pull(self, coordinates: Tensor) -> Tensor:
        """Make the vector (u, 0) of each coordinate, u its unit vector in the frame, (K, n)."""
        units = torch.nn.functional.one_hot(coordinates, self.structure.dim).to(self.z)
        u = self.frame.pull(units)
        u = u / u.norm(dim=-1, keepdim=True)
        return torch.cat([u, u.new_zeros(len(u), self.structure.parameters)], -1)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A x (K, n), and y at the draws, (S, K, D)."""
        p, R = self.parted(x)
        y = self._curved(p + self._turned(R))
        left, right = y.movedim(0, 1) / len(y), self.z.expand(len(p), *self.z.shape)
        return self.joined(y.mean(0), self._gathered(left, right, R)), y

    def along(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute dᵀ y + |R|²_F of each draw, with y as the product gave it; its mean is <x, A x>, (S, K)."""
        p, R = self.parted(x)
        structure = self.structure
        own = structure.norm2(R) if structure.closed else structure.diagonal(R).square().sum(-1)
        return ((p + self._turned(R)) * y).sum(-1) + own

    def _turned(self, R: Structured) -> Tensor:
        """R z, (S, K, D); where products leave the pattern the triangular root with the same change of V."""
        z, structure = self.z[:, None].expand(-1, len(R), -1), self.structure
        if structure.closed:
            return structure.smv(R, z)
        root = 2 * structure.tril_half(R)
        return structure.tmv(root, z) if self.frame.upper else structure.mv(root, z)

    def _gathered(self, y: Tensor, z: Tensor, R: Structured) -> Structured:
        """The gradient in R of half the quadratic form."""
        structure = self.structure
        if structure.closed:
            return structure.sym_lower(y, z) + R
        one_triangle = structure.lower(z, y) if self.frame.upper else structure.lower(y, z)
        only_diagonal = structure.with_diagonal(torch.zeros_like(R), structure.diagonal(R))
        return structure.one_sided(one_triangle) + only_diagonal

    def _curved(self, d: Tensor) -> Tensor:
        """Cᵀ∇²ℓ C d / γ by central differences of gradients, (S, K, D)."""
        size = d.square().mean((0, 2), keepdim=True).sqrt().clamp_min(torch.finfo(d.dtype).tiny)
        h = self.step / size  # (1, K, 1)
        shift = h * self.frame.push(d)
        points = torch.stack([self.theta[:, None] + shift, self.theta[:, None] - shift])
        energy, gradient = energy_and_gradient(self.target, points.flatten(0, 2))
        gradient = torch.where(energy.isfinite()[:, None], gradient, torch.nan)
        plus, minus = gradient.unflatten(0, points.shape[:3])
        return self.frame.pull(plus - minus) / (2 * h * self.target.temperature)


@torch.no_grad()
def confirm(
    q: Gaussian,
    target: Target,
    coordinates: Tensor,
    *,
    num_samples: int = 512,
    seed: int = 0,
    max_gradients: float = math.inf,
    over: Callable[[], bool] = lambda: False,
) -> Confirmed | None:
    """The linear response of coordinates by conjugate gradients, all of them side by side.

    A product takes 2S gradients a coordinate, and three to six products are enough; uᵀp rises from one to the next.
    Where the Hessian is not positive definite along a direction the response is called singular: q is no minimum of
    these draws' average, and its standard deviation may be any multiple of that of q.

    Args:
        q: the posterior, at the optimum of L.
        target: a log joint that gives the same value twice.
        coordinates: of θ, (K,).
        num_samples: S, fixed and whitened.
        seed: of the draws.
        max_gradients: a product that would exceed it is not made.
        over: whether there is no time left; asked before each product.

    Returns:
        What was found; None where not one product was allowed, or where the log joint is not finite near the draws.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> a = 3.0  # ℓ = Σ exp θ - a θ: the best Gaussian has the variance 1/a, the response is 1/a + 1/(2 a²)
    >>> q = CholeskyGaussian(1, mean=math.log(a) - 0.5 / a, scale=a**-0.5, dtype=torch.float64)
    >>> target = LogJoint(lambda theta: (a * theta - theta.exp()).sum(-1))
    >>> found = confirm(q, target, torch.tensor([0]), num_samples=4096)
    >>> abs(found.log_sd.item() - 0.5 * math.log(1 + 0.5 / a)) < 0.02
    True
    """
    q, target = read_gaussian("confirm", q, target), as_target(target)
    what = f"are indices of coordinates from 0 to {q.dim - 1}"
    given = coordinates.tolist() if isinstance(coordinates, Tensor) and not coordinates.is_meta else coordinates
    indices = read_sizes("coordinates", given, what, at_least=0, none=False)
    if max(indices) >= q.dim:
        raise InputError(f"coordinates {what}; got {list(indices)}.")
    read_callable("over", over, "is a function that says whether the time is over", arguments="")
    max_gradients = read_number("max_gradients", max_gradients, "is a budget", above=0, infinite=True)
    A = Response(q, target, Fixed(num_samples, seed))
    return _conjugate_gradients(A, torch.tensor(indices, device=q.device), max_gradients, over)


def _conjugate_gradients(
    A: Response,
    coordinates: Tensor,
    max_gradients: float,
    over: Callable[[], bool],
    most: int = 8,  # products
    flat: float = 0.01,  # growth of the log sd in one product at which it is believed
) -> Confirmed | None:
    """Solve A x = (u, 0) for each coordinate until the response hardly grows."""
    b, dim = A.pull(coordinates), A.structure.dim
    weight = torch.cat([b.new_ones(dim), b.new_full((b.shape[1] - dim,), 0.5)])  # preconditioner
    x, residual, seen = torch.zeros_like(b), b.clone(), b.new_zeros(len(A.z), len(b), dim)
    direction = weight * residual
    log_sd = b.new_full((len(b),), -math.inf)
    singular, finished = (torch.zeros_like(log_sd, dtype=torch.bool) for _ in range(2))
    spent = 0
    for _ in range(most):
        active = (~(singular | finished)).nonzero()[:, 0]
        spent += A.cost * len(active)
        if not len(active) or spent > max_gradients or over():
            break
        p, r = direction[active], residual[active]
        Ap, y = A(p)
        if not bool(torch.isfinite(Ap).all()):
            return None
        curvature, before = (p * Ap).sum(-1), (r * weight * r).sum(-1)
        definite = curvature > 0
        length = torch.where(definite, before / curvature, 0.0)[:, None]
        x[active] += length * p
        seen[:, active] += length * y
        r = r - length * Ap
        residual[active] = r
        direction[active] = weight * r + ((r * weight * r).sum(-1) / before)[:, None] * p
        new = 0.5 * (b[active] * x[active]).sum(-1).log()
        singular[active] = ~definite | (new > LARGEST)
        finished[active] = new - log_sd[active] < flat
        log_sd[active] = torch.where(definite, new, LARGEST)
    if bool(torch.isneginf(log_sd).any()):
        return None
    each = A.along(x, seen)
    pairs = 0.5 * (each[: len(each) // 2] + each[len(each) // 2 :])
    error = 0.5 * pairs.std(0) / math.sqrt(len(pairs)) / (b * x).sum(-1)
    return Confirmed(coordinates, log_sd.clamp_max(LARGEST), error, singular, finished | singular)


# How flat the ELBO is where it is flattest: what a small natural gradient does not say
#
# Near the best q the ELBO falls by about ½ gᵀA⁻¹g where the natural gradient is g, with A the Hessian of L in the frame
# of q.  That is ½|g|² where A is the identity, as it is for a quadratic ℓ and a full covariance.  To third order the
# smallest eigenvalue of A, with the covariance at its best for each mean, is 1 - λ with λ the largest of M - N: near
# nought for a funnel, where mean and standard deviations have to move together, and for a mean field of variables that
# are highly correlated.
#
# The largest eigenvalue of an estimate of M is that of its noise where D is large.  So one half of the draws says in
# which direction it is, and the other how large it is there, which is unbiased for that direction but for one thing: of
# n whitened pairs the squares |z|² vary less, by 1 - D/n, than those of independent ones, and B with them.


class Flatness(NamedTuple):
    """The largest eigenvalue λ of M - N in the direction that was found, with its standard error.

    >>> Flatness(0.5, 0.0).growth, Flatness(0.9, 0.1).growth, Flatness(-0.3, 0.1).growth
    (2.0, inf, 1.0)
    """

    eigenvalue: float  # 0 for a Gaussian, and the ELBO is flat at 1
    error: float

    @property
    def growth(self) -> float:
        """At most how many times ½|g|² the distance from the best q is, in nats, by three standard errors."""
        left = 1 - max(self.eigenvalue + 3 * self.error, 0.0)
        return 1 / left if left > 0 else math.inf


def flatness(residuals: Residuals, structure: Pattern, fewest: int = 32, least: float = 0.25) -> Flatness | None:
    """Estimate how flat the ELBO is from residuals at hand, without a call of the log joint."""
    half, even, odd = (part[:PAIRS] for part in residuals.halves)
    if not structure.closed or len(half) < fewest or not bool(even.isfinite().all() & odd.isfinite().all()):
        return None
    parts = [_Part(*parts, structure) for parts in zip(half.chunk(2), even.chunk(2), odd.chunk(2), strict=True)]
    whitened = len(residuals.z) // 2
    shrunk = max(1 - structure.dim / whitened, least) ** 2 if structure.dim <= whitened else 1.0
    found = [one.quadratic(other.direction(), shrunk) for one, other in (parts, parts[::-1])]
    eigenvalue = 0.5 * (found[0][0] + found[1][0])
    return Flatness(eigenvalue, 0.5 * math.hypot(found[0][1], found[1][1]))


class _Part:
    """M - N by some pairs of draws, as a product with vectors: no matrix of D² numbers, unless q has one."""

    def __init__(self, z: Tensor, even: Tensor, odd: Tensor, structure: Pattern, numbers: int = 8_000_000) -> None:
        self.z, self.even, self.odd, self.structure, self.count = z, even, odd, structure, len(z)
        rows = len(z) if structure.widest in (1, structure.dim) else max(1, numbers // z.numel())
        self.table = torch.cat([_kernel(part, z, structure) for part in z.split(rows)]).fill_diagonal_(0.0)  # (n, n)
        self.inside: Structured | None = None  # of the mean of ½(r zᵀ + z rᵀ), the entries of the pattern
        if structure.widest < structure.dim:
            self.inside = structure.sym_lower(odd, z) / len(z)

    def times(self, v: Tensor) -> Tensor:
        """(M - N) v."""
        third = 0.5 * (self.even.mT @ (self.table @ (self.even @ v))) / (self.count * (self.count - 1))
        return third - self._outside(v)

    def _outside(self, v: Tensor) -> Tensor:
        """N v: the mean of ½(r zᵀ + z rᵀ) without the entries of the pattern."""
        if self.inside is None:
            return torch.zeros_like(v)
        both = self.odd.mT @ (self.z @ v) + self.z.mT @ (self.odd @ v)
        return 0.5 * both / self.count - self.structure.smv(self.inside, v)

    def direction(self, most: int = 24) -> Tensor:
        """The eigenvector of the largest eigenvalue, by Lanczos' method."""
        dim = self.even.shape[1]
        start = torch.randn(dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0), device="cpu")
        start = start.to(self.even)
        basis, images = [start / start.norm()], list[Tensor]()
        for _ in range(min(most, dim)):
            images.append(self.times(basis[-1]))
            Q = torch.stack(basis)
            rest = images[-1] - Q.mT @ (Q @ images[-1])
            rest = rest - Q.mT @ (Q @ rest)
            if not bool(rest.norm() > 1e-10 * images[0].norm()):
                break
            basis.append(rest / rest.norm())
        Q = torch.stack(basis[: len(images)])
        small = Q @ torch.stack(images).mT
        return eigh(0.5 * (small + small.mT))[1][:, -1] @ Q

    def quadratic(self, v: Tensor, shrunk: float) -> tuple[float, float]:
        """vᵀ(M - N)v, of which M is as many times too small, and the standard error of M; N has hardly any."""
        along = self.even @ v
        each = along * (self.table @ along) / (self.count - 1)  # h_s of the U-statistic, whose mean it is
        value = 0.5 * float(each.mean()) / shrunk - float(v @ self._outside(v))
        return value, float(each.std()) / math.sqrt(self.count) / shrunk


# ------------------------------------------------------------------------------------ the margin of one coordinate
# The margin of one coordinate by Laplace's method: how wide it is where no draw of q comes.
#
#     p(θ_k) ∝ max p(θ) · |∇²ℓ(θ) without k|^-1/2        the maximum and the Hessian over all coordinates but k
#
# (Tierney and Kadane 1986, Journal of the American Statistical Association 81).  It is exact where the others are
# Gaussian given θ_k, as the effects of a hierarchical model given its scale are about, and so follows the neck of a
# funnel down, of which importance weights and linear response see the upper end alone.  Nothing is drawn.


class Margin(NamedTuple):
    """One coordinate's margin, by Laplace's method.

    Attributes:
        mean: of the coordinate.
        sd: of the coordinate.
        log_evidence: log ∫ p(θ) dθ by the same method, at γ = 1; far from that of importance weights it says that
            Laplace's method does not hold.
        nodes: at which the margin was found.

    >>> Margin(0.0, 1.0, 0.0, 13).nodes
    13
    """

    mean: float
    sd: float
    log_evidence: float
    nodes: int


@torch.no_grad()
def laplace_margin(
    q: Gaussian,
    target: Target,
    coordinate: int,
    *,
    max_gradients: float = math.inf,
    over: Callable[[], bool] = lambda: False,
) -> Margin | None:
    """Follow the margin of one coordinate to both sides until what it adds to the variance has fallen by eight nats.

    The maximum at a node is looked for by Newton's method, from where the last one points; its Hessian is a difference
    of 2D + 1 gradients in one call, in the frame of q. Some 15 nodes take 20 such calls.

    Args:
        q: one posterior, near the density; it is the unit of the steps.
        target: a log joint that gives the same value twice.
        coordinate: k, of θ.
        max_gradients: a call that would exceed it is not made.
        over: whether there is no time left; asked before each call.

    Returns:
        Mean and standard deviation of the margin; None where it was not followed to both ends, because the budget is
        used up, the log joint is not finite or raises an error there, or has no maximum over the other coordinates.

    Raises:
        InputError: a batch of posteriors, a coordinate that q has not, a budget that is no number.
        PairError: a posterior that is no Gaussian.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q = CholeskyGaussian(2, scale=0.5, dtype=torch.float64)  # four times too narrow
    >>> found = laplace_margin(q, LogJoint(lambda theta: -0.125 * theta.square().sum(-1)), 0)
    >>> abs(found.sd - 2.0) < 0.02, abs(found.mean) < 1e-6
    (True, True)
    """
    q = read_gaussian("laplace_margin", q, target)
    if q.batch_shape:
        raise InputError(f"laplace_margin takes one posterior at a time; got a batch of shape {tuple(q.batch_shape)}.")
    coordinate = read_count("coordinate", coordinate, "counts the coordinates of θ from 0", at_least=0)
    if coordinate >= q.dim:
        raise InputError(f"coordinate counts the {q.dim} coordinates of θ from 0; got {coordinate}.")
    max_gradients = read_number("max_gradients", max_gradients, "is a budget of gradients", at_least=0, infinite=True)
    target = target if isinstance(target, Guarded) else Guarded(as_target(target))  # far away it need not answer
    search = _Search(q, target, coordinate, max_gradients, over)
    middle = search.settled(torch.zeros_like(search.along))
    if middle is None:
        return None
    nodes = {0.0: middle.value}
    for sign in (1.0, -1.0):
        side = search.side(middle, sign)
        if side is None:
            return None
        nodes.update(side)
    mean, sd, log_mass = _moments(nodes)
    log_evidence = log_mass + 0.5 * (q.dim - 1) * math.log(2 * math.pi) + float(q.log_det_root())
    return Margin(float(q.mean[coordinate]) + search.unit * mean, search.unit * sd, log_evidence, len(nodes))


class _Node(NamedTuple):
    """A point of the path: x whose others are at their maximum, the logarithm of the margin, and dx/ds."""

    x: Tensor
    value: float
    tangent: Tensor


class _Search:
    """The path through x of θ = m + C Q x, whose first entry moves θ_k alone and whose others leave it."""

    nodes = 24  # of a side
    first, growth, shrinking, least = 0.5, 1.5, 0.5, 0.1  # step in sds of q, its factors, and where a side is given up
    gentle, steep = 1.0, 3.0  # nats of change of the margin below which the step grows, and above which it is undone
    drop = 8.0  # nats below its top at which a side ends, of the margin times the squared distance from the middle
    newton = 4  # steps to the maximum at a node
    settles = 0.02  # square of the decrement up to which the quadratic model has the rest
    furthest = 2.0  # decrement of a step

    def __init__(self, q: Gaussian, target: Target, coordinate: int, most: float, over: Callable[[], bool]) -> None:
        self.target, self.frame, self.most, self.over, self.spent = target, q.frame(), most, over, 0
        unit = torch.nn.functional.one_hot(torch.tensor([coordinate], device="cpu"), q.dim).to(self.frame.mean)
        along = self.frame.pull(unit)[0]
        self.unit, self.along = float(along.norm()), along / along.norm()
        self.step = difference_step(along.dtype)
        self.basis: Tensor | None = None  # Q, (D, D)

    def _derivatives(self, x: Tensor) -> tuple[float, Tensor, Tensor] | None:
        """ℓ/γ, its gradient and its Hessian at x; None where it is not finite, or there is no room for it."""
        dim = len(x)
        self.spent += 2 * dim + 1
        if self.spent > self.most or self.over():
            return None
        if self.basis is None:
            eye = torch.eye(dim, dtype=x.dtype, device=x.device)
            self.basis = torch.linalg.qr(torch.cat([self.along[:, None], eye], 1))[0]
            self.basis[:, 0] = self.along
        shift = self.step * torch.eye(dim, dtype=x.dtype, device=x.device)
        points = torch.cat([x[None], x + shift, x - shift])
        energy, gradient = energy_and_gradient(self.target, self.frame.mean + self.frame.push(points @ self.basis.mT))
        gradient = self.frame.pull(gradient) @ self.basis / self.target.temperature
        if not bool(energy.isfinite().all() & gradient.isfinite().all()):
            return None
        hessian = (gradient[1 : dim + 1] - gradient[dim + 1 :]) / (2 * self.step)
        return float(energy[0]) / self.target.temperature, gradient[0], 0.5 * (hessian + hessian.mT)

    def settled(self, x: Tensor) -> _Node | None:
        """The maximum over all entries but the first, from x."""
        for _ in range(self.newton):
            found = self._derivatives(x)
            if found is None:
                return None
            energy, gradient, hessian = found
            root, failed = torch.linalg.cholesky_ex(hessian[1:, 1:])
            if bool(failed):
                return None
            right = torch.stack([gradient[1:], hessian[1:, 0]], -1)
            step, bend = torch.cholesky_solve(right, root).unbind(-1)
            decrement = float(gradient[1:] @ step)
            far = decrement > self.settles
            cut = min(1.0, self.furthest / math.sqrt(decrement)) if far else 1.0
            x = torch.cat([x[:1], x[1:] - cut * step])
            if not far:
                value = -energy + 0.5 * decrement - float(root.diagonal().log().sum())
                return _Node(x, value, torch.cat([torch.ones_like(x[:1]), -bend]))
        return None

    def side(self, node: _Node, sign: float) -> dict[float, float] | None:
        """The logarithm of the margin by the place s, in sds of q, to one side; None where it does not end."""
        place, step, found = 0.0, self.first, dict[float, float]()
        top = node.value  # of what the variance has from a node
        for _ in range(self.nodes):
            new = self.settled(node.x + sign * step * node.tangent)
            while (new is None or node.value - new.value > self.steep) and step > self.least:
                if self.spent > self.most or self.over():
                    return None
                step *= self.shrinking
                new = self.settled(node.x + sign * step * node.tangent)
            if new is None:
                return None
            place, change = place + sign * step, abs(new.value - node.value)
            node, found[place] = new, new.value
            share = new.value + 2 * math.log(max(abs(place), 1.0))
            top = max(top, share)
            if share < top - self.drop:
                return found
            step *= self.growth if change < self.gentle else 1.0
        return None


def _moments(nodes: dict[float, float], fine: int = 20) -> tuple[float, float, float]:
    """Mean, standard deviation and log mass of a density whose logarithm is known at nodes, by cubics between them."""
    s, value = torch.tensor(sorted(nodes.items()), dtype=torch.float64, device="cpu").unbind(1)
    width, rise = s.diff(), value.diff()
    chord = rise / width
    inner = (chord[1:] * width[:-1] + chord[:-1] * width[1:]) / (width[1:] + width[:-1])  # of the parabola of three
    slope = torch.cat([chord[:1], inner, chord[-1:]])
    t = ((torch.arange(fine, dtype=torch.float64, device="cpu") + 0.5) / fine)[:, None]
    bend = (1 - t) * (slope[:-1] * width - rise) - t * (slope[1:] * width - rise)
    log_mass = (value[:-1] + t * rise + t * (1 - t) * bend + (width / fine).log()).flatten()
    weight = log_mass.softmax(0)
    at = (s[:-1] + t * width).flatten()
    mean = weight @ at
    return float(mean), float((weight @ (at - mean).square()).sqrt()), float(log_mass.logsumexp(0))
