"""The standard deviations that q ought to have: the linear response of its mean, to third order and in closed form.

Tilt the density to p exp(t θ_k): the mean of the posterior moves by its covariance with θ_k.  The mean m(t) of the best
Gaussian moves too, and

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

from torchngvi.arguments import read_instance, read_tensor, shown
from torchngvi.errors import InputError
from torchngvi.interfaces import Frame
from torchngvi.numerics.linalg import eigh
from torchngvi.structures import Dense, Pattern

_GROUPS = 8  # of draws, one of which is left out at a time
_FLOOR = 0.02  # of the eigenvalues of I - M: a standard deviation grows sevenfold at most
_ENTRIES = 20_000_000  # of one table of pairs of draws


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

    z: Tensor  # standard normal, the second half minus the first, (S, D)
    residual: Tensor  # Cᵀ∇ℓ/γ - z, (S, D)

    @property
    def halves(self) -> tuple[Tensor, Tensor, Tensor]:
        """The noise z, and the even and the odd part of the residual, (S/2, D) each."""
        plus, minus = self.residual.chunk(2)
        return self.z[: len(plus)], 0.5 * (plus + minus), 0.5 * (plus - minus)

    @property
    def rise(self) -> bool:
        """Whether the mean curvature of the log joint under q is positive, by three standard errors.

        That of the best Gaussian is -1 in each direction of its frame, as the slope 0 of r along z says.
        """
        slopes = (self.residual * self.z).mean(-1)
        return len(slopes) > 1 and bool(slopes.mean() < -1 - 3 * slopes.std() / len(slopes) ** 0.5)


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


def _jackknife(
    values: Tensor,  # (G, ...)
) -> Tensor:
    return math.sqrt(len(values) - 1) * values.std(0, correction=0)


def response_covariance(
    frame: Frame,
    M: Tensor,  # (D, D), symmetric
) -> Tensor:
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


def response_log_sd(
    frame: Frame,
    M: Tensor,  # (..., D, D), symmetric
) -> Tensor:
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


def _spectral(frame: Frame, M: Tensor) -> tuple[Tensor, Tensor]:
    """C u_j for each eigenvector u_j of M, (..., D, D) by rows, and 1/(1 - λ_j), (..., D)."""
    read_instance("frame", frame, Frame, "is the one of a posterior, q.frame()", other=M)
    dim = frame.mean.shape[-1]
    M = read_tensor("M", M, like=frame.mean, finite=False)
    if M.shape[-2:] != (dim, dim):
        raise InputError(f"M must be (..., {dim}, {dim}); got shape {tuple(M.shape)}.")
    values, vectors, _ = eigh(M)
    return frame.push(vectors.mT), 1 / (1 - values).clamp_min(_FLOOR)


def third_order(
    z: Tensor,  # (S, D), the second half minus the first
    residuals: Tensor,  # Cᵀ∇ℓ/γ - z, (S, D)
    structure: Pattern | None = None,  # of q; dense by default
) -> ThirdOrder:
    """M from residuals at antithetic draws: those of the last sample average of a fit cost no new gradient.

    Only the even part of r counts, and <zzᵀ - I, wwᵀ - I> = (zᵀw)² - |z|² - |w|² + D, so that no third derivative is
    formed: M is the mean of ½ r_s r_tᵀ times this over the pairs s ≠ t of draws, S² D operations.  About 16 D draws
    and at least 512 tell its largest eigenvalue from noise.

    Args:
        z: standard normal draws.
        residuals: at θ = m + C z.
        structure: of a mean field or of blocks the pattern; its second derivatives outside the pattern are included.

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
        table = kernel(half[rows], half[columns], structure).masked_fill_(rows[:, None] == columns, 0.0)
        return even[rows].mT @ (table @ even[columns])

    result = _over_pairs(half, block, 1 if structure.widest in (1, structure.dim) else structure.dim)
    if structure.widest == structure.dim:
        return result
    groups = torch.arange(len(half), device=z.device).tensor_split(_GROUPS)
    sums = torch.stack([_outside_pattern(half[rows], odd[rows], structure) for rows in groups])
    sizes = torch.tensor([len(rows) for rows in groups], dtype=z.dtype, device=z.device)[:, None, None]
    total = sums.sum(0)
    return ThirdOrder(result.matrix - total / len(half), result.without - (total - sums) / (len(half) - sizes))


def third_order_of_values(
    z: Tensor,  # (S, D), the second half minus the first
    log_weights: Tensor,  # log p/γ - log q, (S,)
) -> ThirdOrder:
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


def kernel(z: Tensor, w: Tensor, structure: Pattern) -> Tensor:
    """Σ (z_j z_k - δ_jk)(w_j w_k - δ_jk) over the entries (j, k) of the pattern, for each pair of draws."""
    if structure.widest == structure.dim:
        squares = (z @ w.mT).square_()
    elif structure.widest == 1:
        squares = z.square() @ w.square().mT
    else:
        products = z[:, None] * w
        squares = (products * structure.neighbours(products)).sum(-1)
    return squares - z.square().sum(1)[:, None] - w.square().sum(1) + z.shape[1]


def _outside_pattern(z: Tensor, odd: Tensor, structure: Pattern) -> Tensor:
    """Σ_s ½(r zᵀ + z rᵀ) without the entries of the pattern, (D, D)."""
    product = odd.mT @ z
    product = 0.5 * (product + product.mT)
    return product - structure.full(structure.from_dense(product))


def _over_pairs(z: Tensor, block: Callable[[Tensor, Tensor], Tensor], width: int = 1) -> ThirdOrder:
    """½ of the mean over pairs s ≠ t of what a block sums over rows and columns, all of it and without each group."""
    count = len(z)
    every = torch.arange(count, device=z.device)
    groups = every.tensor_split(_GROUPS)
    most = max(1, _ENTRIES // (count * width))  # rows at once
    across = torch.stack([_summed([block(rows, every) for rows in group.split(most)]) for group in groups])
    within = torch.stack([_summed([block(rows, group) for rows in group.split(most)]) for group in groups])
    total = across.sum(0)
    left = total - across - across.mT + within
    rest = torch.tensor([count - len(group) for group in groups], dtype=total.dtype, device=total.device)
    matrix = 0.5 * total / (count * (count - 1))
    without = 0.5 * left / (rest * (rest - 1))[:, None, None]
    return ThirdOrder(0.5 * (matrix + matrix.mT), 0.5 * (without + without.mT))


def _summed(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


# ------------------------------------------------------------------------------------ tails


def tails(
    z: Tensor,  # (S, D), the second half minus the first
    residuals: Tensor,  # Cᵀ∇ℓ/γ - z, (S, D)
) -> tuple[Tensor, Tensor]:
    """κ_i = E[r_i He_3(z_i)] = E[∂_i⁴ ℓ] in the frame of q, He_3(z) = z³ - 3z, (D,), and its standard error.

    It sees what the third order cannot: where κ_i is well below zero a density that may be symmetric has heavier tails
    than q.  The mean of r He_3 itself has a variance that He_3² dominates; κ_i is therefore six times the coefficient
    of He_3 in the regression of the odd part of r_i on z_i and He_3(z_i), which has the same limit, as the two are
    uncorrelated, and no noise at all where ℓ is a quartic.

    Args:
        z: antithetic standard normal draws, (S, D), the second half minus the first.
        residuals: r = Cᵀ∇ℓ/γ - z at θ = m + C z, (S, D).

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
