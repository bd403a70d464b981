"""Constant steps for which SR-VN provably descends (Kumar et al. 2025, section 4), and the rates that go with them.

They hold where ∇²ℓ ⪯ M, V_t ⪰ λ_min I, ‖V_t‖ ≤ λ_max and ξ_l ≤ ‖C_t‖_F ≤ ξ_u along the run.  There are two forms:

* `theorem_2_step`: Eq 55 with min in the place of the printed max, which leaves η ≤ 0 in Theorem 2
  for a large share of problems.  The bounds on which its proof rests are not all sound;
* `descent_step`: ρ = 1/((M + γ/λ_min) λ_max), for which each step takes off at least half of the
  natural norm, L' ≤ L - ½ρ aᵀa - ¼ρ ‖P‖²_F, so that with ∇²ℓ ⪰ δ the gap shrinks by 1 - ½ρδλ_min.
  The entropy is not M-smooth in (m, C), as the paper's Assumption 3 has it: its curvature γ/C_ii²
  is the γ/λ_min here.  λ_min must bound V before and after the step, C must keep its positive diagonal.

All are tiny beside the steps that work: use them to check, and `SufficientDecrease` to fit.
"""

import math

from torchngvi.errors import InputError


def theorem_2_step(
    M: float,  # largest curvature of ℓ
    lambda_min: float,  # smallest eigenvalue of V_t
    lambda_max: float,  # largest eigenvalue of V_t; ξ_u² always is one
    xi_l: float,  # smallest ‖C_t‖_F
    xi_u: float,  # largest ‖C_t‖_F
) -> float:
    """The constant step size up to which Theorem 2 has SR-VN descend, for γ = 1.

        ρ ≤ min{λ_min/(λ_max² M), √(2/5) ξ_l²/(M ξ_u⁴)}        (Kumar et al. 2025, Eq 55; printed with max)

    >>> theorem_2_step(4.0, 0.25, 1.0, 0.5, 1.0)
    0.03952847075210474
    """
    _positive(M=M, lambda_min=lambda_min, lambda_max=lambda_max, xi_l=xi_l, xi_u=xi_u)
    return min(lambda_min / (lambda_max**2 * M), math.sqrt(2 / 5) * xi_l**2 / (M * xi_u**4))


def theorem_2_descent(
    rho: float,
    M: float,  # largest curvature of ℓ
    lambda_min: float,  # smallest eigenvalue of V_t
    xi_l: float,  # smallest ‖C_t‖_F
    xi_u: float,  # largest ‖C_t‖_F
) -> float:
    """The constant η of the linear rate of SR-VN, L_{t+1} - L* ≤ (1 - 2ηδ)(L_t - L*) (Kumar et al. 2025, Eq 25).

        η = min{λ_min ρ - ½ M ρ² ξ_u⁴, √(5/2) ρ ξ_l² - 5/4 M ρ² ξ_u⁴}

    >>> theorem_2_descent(0.01, 4.0, 0.25, 0.5, 1.0)
    0.0023
    """
    _positive(rho=rho, M=M, lambda_min=lambda_min, xi_l=xi_l, xi_u=xi_u)
    square = M * rho**2 * xi_u**4
    return min(lambda_min * rho - square / 2, math.sqrt(5 / 2) * rho * xi_l**2 - 5 * square / 4)


def descent_step(
    M: float,  # largest curvature of ℓ
    lambda_min: float,  # smallest eigenvalue of V_t and V_{t+1}
    lambda_max: float,  # largest eigenvalue of V_t
    temperature: float = 1.0,  # γ
) -> float:
    """A constant step size that suffices for SR-VN to descend, L' ≤ L - ½ρ|a|² - ¼ρ‖P‖²_F.

        ρ = 1/((M + γ/λ_min) λ_max)

    >>> descent_step(4.0, 0.25, 1.0)
    0.125
    """
    _positive(M=M, lambda_min=lambda_min, lambda_max=lambda_max)
    if temperature < 0:
        raise InputError(f"temperature is the weight of the entropy, not negative; got {temperature}.")
    return 1 / ((M + temperature / lambda_min) * lambda_max)


def iterations_to(
    gap: float,  # in nats
    start: float,  # L_0 - L*
    rate: float,  # share of the gap a step takes off: 2ηδ, or ½ρδλ_min
) -> int:
    """The number of steps after which a gap that shrinks by 1 - rate a step is below ``gap``.

    This is Eq 58 of Kumar et al. (2025), which prints the lower bound on t as an upper one.  Of the two cases it
    distinguishes the larger number of steps holds, where min is printed: η is the smaller of two.

    >>> iterations_to(1e-3, 1.0, 0.5)
    10
    """
    _positive(gap=gap, start=start)
    if not 0 < rate < 1:
        raise InputError(f"rate is the share of the gap a step takes off, in (0, 1); got {rate}.")
    return max(0, math.ceil(math.log(gap / start) / math.log1p(-rate)))


def _positive(**constants: float) -> None:
    for name, value in constants.items():
        if not (value > 0 and math.isfinite(value)):
            raise InputError(f"{name} must be positive and finite; got {value}.")
