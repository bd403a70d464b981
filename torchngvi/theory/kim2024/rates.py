"""Steps and iteration counts for stochastic gradients of quadratic variance, and the constants of black-box VI.

    E|g(λ)|² ≤ α|λ - λ*|² + β,  F μ-strongly convex:      E|λ_{t+1} - λ*|² ≤ (1 - 2γμ + γ²α) E|λ_t - λ*|² + γ²β

(Kim, Ma and Gardner 2024, sections 2.5 and 3; Domke et al. 2023.)  Δ = |λ_0 - λ*|, ε the wanted E|λ_T - λ*|².  Three of
their constants are corrected here: of the adaptive decreasing step, whose δ and 1/δ are exchanged in print; of the ε^-¾
term of sticking the landing, 2 for 1/√2; and of the fixed step's δ for it, without the factor 4.

The bounds of the triangular full-rank scale hold where ‖C⁻¹‖ is at most √S.  A floor on the diagonal of C does not
give that: from three dimensions on no α holds on the whole domain.  Start from a diagonal C, or watch ‖C⁻¹‖.  For mean
field and the symmetric root the floor is enough.
"""

import math
from typing import NamedTuple

from torchngvi.arguments import read_flag, read_number
from torchngvi.errors import InputError


class QuadraticVariance(NamedTuple):
    """The constants α and β of E|g(λ)|² ≤ α|λ - λ*|² + β; β = 0 is interpolation, with a linear rate.

    The methods give the step sizes and the iteration counts that follow from it, all from the same numbers: the
    constant μ of strong convexity as ``mu``, the wanted ε = E|λ_T - λ*|² as ``eps`` and Δ² = |λ_0 - λ*|² as ``delta2``.
    Each raises an `InputError` where one of them is not positive and finite.

    >>> QuadraticVariance(4.0, 0.0).fixed_iterations(1.0, 1e-6, 1.0)  # 8 log(2 · 10⁶)
    117
    """

    alpha: float
    beta: float

    def fixed_step(self, mu: float, eps: float) -> float:
        """Return the fixed step size min(εμ/(4β), μ/(2α), 2/μ) for the error ε.

        >>> QuadraticVariance(4.0, 0.0).fixed_step(1.0, 1e-6)
        0.125
        """
        _positive(mu=mu, eps=eps)
        noise = eps * mu / (4 * self.beta) if self.beta > 0 else math.inf
        return min(noise, mu / (2 * self.alpha), 2 / mu)

    def fixed_iterations(self, mu: float, eps: float, delta2: float) -> int:
        """Return the number of fixed steps that suffices, T ≥ max(4β/(μ²ε), 2α/μ², ½) log(2Δ²/ε)."""
        _positive(mu=mu, eps=eps, delta2=delta2)
        return _count(math.log(2 * delta2 / eps) / (self.fixed_step(mu, eps) * mu))

    def fixed_bound(self, mu: float, gamma: float, T: int, delta2: float) -> float:
        """Return the bound (1 - γμ)ᵀΔ² + 2γβ/μ ≥ E|λ_T - λ*|² after T fixed steps γ.

        Raises:
            InputError: if the step is above μ/(2α), for which the bound is not proved, or a constant is not positive.
        """
        _positive(mu=mu, gamma=gamma, delta2=delta2)
        if gamma > mu / (2 * self.alpha):
            raise InputError(f"gamma must be at most μ/(2α) = {mu / (2 * self.alpha):.3g}; got {gamma:.3g}.")
        return (1 - gamma * mu) ** T * delta2 + 2 * gamma * self.beta / mu

    def two_stage_step(self, mu: float, t: int) -> float:
        """Return the step size after t steps, min(μ/(2α), (4t + 2)/(μ(t + 1)²)), for ``LambdaLR`` with lr=1."""
        _positive(mu=mu)
        return min(mu / (2 * self.alpha), (4 * t + 2) / (mu * (t + 1) ** 2))

    def two_stage_iterations(self, mu: float, eps: float, delta2: float) -> int:
        """Return the number of two-stage steps that suffices, T ≥ 16β/(μ²ε) + 8αΔ/(μ²√ε)."""
        _positive(mu=mu, eps=eps, delta2=delta2)
        return _count(16 * self.beta / (mu**2 * eps) + 8 * self.alpha * math.sqrt(delta2 / eps) / mu**2)

    def two_stage_bound(self, mu: float, T: int, delta2: float) -> float:
        """Return the bound 64α²Δ²/(μ⁴T²) + 16β/(μ²T) ≥ E|λ_T - λ*|² after T two-stage steps.

        With 64α/μ², as printed in one place, it fails.
        """
        _positive(mu=mu, T=T, delta2=delta2)
        return 64 * self.alpha**2 * delta2 / (mu**4 * T**2) + 16 * self.beta / (mu**2 * T)


class AdaptiveVariance(NamedTuple):
    """The constants of a bound with a free δ, E|g(λ)|² ≤ (1 + Cδ)α̃|λ - λ*|² + (1 + 1/(Cδ))β̃ for every δ > 0.

    The methods are those of `QuadraticVariance` at the best δ, from the same numbers ``mu``, ``eps`` and ``delta2``,
    and raise as they do.

    >>> AdaptiveVariance(4.0, 1.0, 1.0).at(1.0)
    QuadraticVariance(alpha=8.0, beta=2.0)
    """

    alpha: float  # α̃
    beta: float  # β̃
    constant: float  # C

    def at(self, slack: float) -> QuadraticVariance:
        """Return the bound at the δ that is given as ``slack``, or at its limit δ = 0 where β̃ = 0."""
        if self.beta == 0 and slack == 0:  # the limit
            return QuadraticVariance(self.alpha, 0.0)
        _positive(slack=slack)
        share = self.constant * slack
        return QuadraticVariance((1 + share) * self.alpha, (1 + 1 / share) * self.beta)

    def fixed_slack(self, eps: float) -> float:
        """Return the slack δ* = 2β̃/(Cα̃ε), where both branches of the fixed step agree."""
        _positive(eps=eps)
        return 2 * self.beta / (self.constant * self.alpha * eps)

    def fixed_step(self, mu: float, eps: float) -> float:
        """Return the fixed step size min(μ/(2(α̃ + 2β̃/ε)), 2/μ) for the error ε."""
        _positive(mu=mu, eps=eps)
        return min(mu / (2 * (self.alpha + 2 * self.beta / eps)), 2 / mu)

    def fixed_iterations(self, mu: float, eps: float, delta2: float) -> int:
        """Return the number of fixed steps that suffices, T ≥ (2/μ²) max(α̃ + 2β̃/ε, μ²/4) log(2Δ²/ε)."""
        _positive(mu=mu, eps=eps, delta2=delta2)
        return _count(math.log(2 * delta2 / eps) / (self.fixed_step(mu, eps) * mu))

    def two_stage_slack(self, eps: float, delta2: float) -> float:
        """Return the slack δ* = √(2β̃/(α̃Δ)) ε^-¼/C, which minimises the two-stage count."""
        _positive(eps=eps, delta2=delta2)
        return math.sqrt(2 * self.beta / (self.alpha * math.sqrt(delta2))) * eps**-0.25 / self.constant

    def two_stage_step(self, mu: float, eps: float, delta2: float, t: int) -> float:
        """Return the step size after t steps, min(μ/(2α̃ + 2√2 √(α̃β̃/Δ) ε^-¼), (4t + 2)/(μ(t + 1)²))."""
        return self.at(self.two_stage_slack(eps, delta2)).two_stage_step(mu, t)

    def two_stage_iterations(self, mu: float, eps: float, delta2: float) -> int:
        """Return the number of two-stage steps that suffices, T ≥ 16β̃/(μ²ε) + (16√2/μ²)√(α̃β̃Δ) ε^-¾ + 8α̃Δ/(μ²√ε)."""
        return self.at(self.two_stage_slack(eps, delta2)).two_stage_iterations(mu, eps, delta2)


def landing_variance(
    L: float,  # ∇²ℓ ⪯ L, and S = L
    dim: int,
    fisher4: float,  # D_F4(q*, π), 0 where q* is π
    kurtosis: float = 3.0,
    mean_field: bool = False,
) -> AdaptiveVariance:
    """The adaptive constants of sticking the landing: α̃ = 4L²(d + k), β̃ = (2d + k)√D_F4, C = ½.

    For mean field they are 4L²(2k√d + 1) and (1 + √(dk))√D_F4.  With D_F4 = 0 a fixed step μ/(8L²(d + k)) converges
    linearly.

    Args:
        L: the largest curvature, ∇²ℓ ⪯ L, which is taken for S too.
        dim: d.
        fisher4: D_F4(q*, π), 0 where q* is π.
        kurtosis: the fourth moment k of the base, 3 for the Gaussian.
        mean_field: whether C is diagonal.

    Returns:
        The constants.

    Raises:
        InputError: if a constant is out of range.

    >>> landing_variance(1.0, 2, 0.0).at(0.0)
    QuadraticVariance(alpha=20.0, beta=0.0)
    """
    _check(L, dim, kurtosis, mean_field, fisher4=fisher4)
    factor = 1 + math.sqrt(dim * kurtosis) if mean_field else 2 * dim + kurtosis
    return AdaptiveVariance(4 * L**2 * _jacobian(dim, kurtosis, mean_field), factor * math.sqrt(fisher4), 0.5)


def closed_entropy_variance(
    L: float,  # ∇²ℓ ⪯ L, and S = L
    dim: int,
    distance2: float,  # |λ̄ - λ*|² = W₂(q*, δ_z̄)², z̄ the mode
    kurtosis: float = 3.0,
    mean_field: bool = False,
) -> AdaptiveVariance:
    """The adaptive constants of the closed entropy: α̃ = L²(d + k + 4), β̃ = L²(d + k)|λ̄ - λ*|², C = 1.

    For mean field 2k√d + 1 takes the place of d + k.

    Args:
        L: the largest curvature, ∇²ℓ ⪯ L, which is taken for S too.
        dim: d.
        distance2: |λ̄ - λ*|² = W₂(q*, δ_z̄)², with z̄ the mode of the target.
        kurtosis: the fourth moment k of the base, 3 for the Gaussian.
        mean_field: whether C is diagonal.

    Returns:
        The constants.

    Raises:
        InputError: if a constant is out of range.

    >>> closed_entropy_variance(1.0, 2, 3.0)
    AdaptiveVariance(alpha=9.0, beta=15.0, constant=1.0)
    """
    _check(L, dim, kurtosis, mean_field, distance2=distance2)
    size = _jacobian(dim, kurtosis, mean_field)
    return AdaptiveVariance(L**2 * (size + 4), L**2 * size * distance2, 1.0)


def landing_bound(
    L: float,  # ∇²ℓ ⪯ L
    S: float,  # ‖C⁻¹‖² ≤ S at λ and λ*
    dim: int,
    fisher4: float,  # D_F4(q*, π)
    delta: float,
    kurtosis: float = 3.0,
    mean_field: bool = False,
) -> QuadraticVariance:
    """The variance of sticking the landing at one δ: α = (2 + δ)(d + k)(L² + S²), β = (1 + 2/δ)(d + k)√D_F4.

    For mean field 2k√d + 1 and 1 + √(dk) take the places of d + k.  Theorem 1 prints L²(d + k) + S²(d + 1), which fails
    (α = 12 where 16 is attained), and 2d + k in β, which holds.  S² is attained by ‖C⁻¹‖²‖C*⁻¹‖², the spectral norms.

    Args:
        L: the largest curvature, ∇²ℓ ⪯ L.
        S: a bound of ‖C⁻¹‖² at λ and at λ*.
        dim: d.
        fisher4: D_F4(q*, π), 0 where q* is π.
        delta: δ, positive.
        kurtosis: the fourth moment k of the base, 3 for the Gaussian.
        mean_field: whether C is diagonal.

    Returns:
        α and β.

    Raises:
        InputError: if a constant is out of range.

    >>> landing_bound(1.0, 1.0, 1, 0.0, 1e-9).alpha > 15.9
    True
    """
    _check(L, dim, kurtosis, mean_field, fisher4=fisher4)
    _positive(S=S, delta=delta)
    size = _jacobian(dim, kurtosis, mean_field)
    factor = 1 + math.sqrt(dim * kurtosis) if mean_field else dim + kurtosis
    return QuadraticVariance((2 + delta) * size * (L**2 + S**2), (1 + 2 / delta) * factor * math.sqrt(fisher4))


def closed_entropy_bound(
    L: float,  # ∇²ℓ ⪯ L
    S: float,  # C_ii ≥ S^-½
    dim: int,
    distance2: float,  # |λ̄ - λ*|²
    delta: float,
    kurtosis: float = 3.0,
    mean_field: bool = False,
) -> QuadraticVariance:
    """The variance of the closed entropy at one δ: α = L²(d + k)(1 + δ) + (L + S)², β = L²(d + k)(1 + 1/δ)|λ̄ - λ*|².

    For mean field 2k√d + 1 takes the place of d + k; that theorem is printed without L² in β.

    Args:
        L: the largest curvature, ∇²ℓ ⪯ L.
        S: a bound of 1/C_ii².
        dim: d.
        distance2: |λ̄ - λ*|², with λ̄ the point mass at the mode of the target.
        delta: δ, positive.
        kurtosis: the fourth moment k of the base, 3 for the Gaussian.
        mean_field: whether C is diagonal.

    Returns:
        α and β.

    Raises:
        InputError: if a constant is out of range.

    >>> closed_entropy_bound(1.0, 1.0, 1, 0.0, 1.0)  # 4 · 2 + 2²
    QuadraticVariance(alpha=12.0, beta=0.0)
    """
    _check(L, dim, kurtosis, mean_field, distance2=distance2)
    _positive(S=S, delta=delta)
    size = L**2 * _jacobian(dim, kurtosis, mean_field)
    return QuadraticVariance(size * (1 + delta) + (L + S) ** 2, size * (1 + 1 / delta) * distance2)


def _jacobian(dim: int, kurtosis: float, mean_field: bool) -> float:
    """E J|T_λ u - T_λ' u|² ≤ this times |λ - λ'|²."""
    return 2 * kurtosis * math.sqrt(dim) + 1 if mean_field else dim + kurtosis


def _check(L: float, dim: int, kurtosis: float, mean_field: bool, **squares: float) -> None:
    _positive(L=L, dim=dim)
    read_flag("mean_field", mean_field)
    read_number("kurtosis", kurtosis, "is E u⁴ for E u² = 1", at_least=1)
    for name, value in squares.items():
        read_number(name, value, at_least=0)


def _positive(**constants: float) -> None:
    for name, value in constants.items():
        read_number(name, value, above=0)


def _count(steps: float) -> int:
    return max(1, math.ceil(steps))
