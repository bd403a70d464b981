"""Noisy observations of differential equations."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .densities import cauchy, lognormal, normal
from .model import Model, Values
from .transforms import positive

LARGEST = 20.0  # log population; beyond e²⁰ predation no longer grows, so that no step overflows
SMALLEST = 1e-10  # concentration


def runge_kutta(
    field: Callable[[float, Tensor], Tensor], state: Tensor, times: Sequence[float], steps: int
) -> list[Tensor]:
    """The states at times[1:] of dx/dt = field(t, x), x(times[0]) = state, by `steps` classical steps each."""
    states = []
    for start, end in pairwise(times):
        h = (end - start) / steps
        for i in range(steps):
            t = start + i * h
            k1 = field(t, state)
            k2 = field(t + h / 2, state + h / 2 * k1)
            k3 = field(t + h / 2, state + h / 2 * k2)
            k4 = field(t + h, state + h * k3)
            state = state + h / 6 * (k1 + 2 * (k2 + k3) + k4)
        states.append(state)
    return states


def lotka_volterra(data: Values) -> Model:
    """Hares and lynxes, counted with lognormal errors at the start and once a year."""
    y, y_init, times = data["y"], data["y_init"], [0.0, *data["ts"].tolist()]

    def log_density(p: Values) -> Tensor:
        theta, z_init, sigma = p["theta"], p["z_init"], p["sigma"]
        prior = normal(theta[..., 0::2], 1, 0.5) + normal(theta[..., 1::2], 0.05, 0.05)
        prior = prior + lognormal(sigma, -1, 1) + lognormal(z_init, math.log(10), 1)
        log_z = log_populations(theta, z_init, times)
        likelihood = lognormal(y_init, z_init.log(), sigma) + lognormal(y, log_z, sigma[..., None, :]).sum(-2)
        return (prior + likelihood).sum(-1)

    return Model({"theta": positive(4), "z_init": positive(2), "sigma": positive(2)}, log_density)


def log_populations(theta: Tensor, z_init: Tensor, times: Sequence[float], steps: int = 40) -> Tensor:
    """(log u, log v) at times[1:], (..., N, 2), of u' = (α - β v) u, v' = (-γ + δ u) v, θ = (α, β, γ, δ)."""
    growth = torch.stack([theta[..., 0], -theta[..., 2]], -1)
    effect = torch.stack([-theta[..., 1], theta[..., 3]], -1)

    def field(t: float, log_z: Tensor) -> Tensor:
        return growth + effect * log_z.flip(-1).clamp(max=LARGEST).exp()

    return torch.stack(runge_kutta(field, z_init.log(), times, steps), -2)


def one_comp_mm_elim_abs(data: Values) -> Model:
    """A drug's concentration, absorbed at a first-order rate and eliminated with Michaelis-Menten kinetics."""
    dose, volume = float(data["D"]), float(data["V"])
    observed, times = data["C_hat"], [float(data["t0"]), *data["times"].tolist()]

    def log_density(p: Values) -> Tensor:
        k_a, K_m, V_m, sigma = p["k_a"], p["K_m"], p["V_m"], p["sigma"]
        prior = cauchy(k_a, 1) + cauchy(K_m, 1) + cauchy(V_m, 1) + cauchy(sigma, 1)
        log_C = concentrations(k_a, K_m, V_m, dose, volume, times).clamp(min=SMALLEST).log()
        return prior + lognormal(observed, log_C, sigma[..., None]).sum(-1)

    return Model({name: positive() for name in ("k_a", "K_m", "V_m", "sigma")}, log_density)


def concentrations(
    k_a: Tensor, K_m: Tensor, V_m: Tensor, dose: float, volume: float, times: Sequence[float], steps: int = 8
) -> Tensor:
    """C at times[1:], (..., N), of V C' = D kₐ e^(-kₐ t) - Vₘ C / (Kₘ + C), C(times[0]) = 0.

    C rises past a small Kₘ within moments: the first interval is cut into halves towards its start.
    """

    def field(t: float, C: Tensor) -> Tensor:
        C = C.clamp(min=0)
        return (dose * k_a * (-k_a * t).exp() - V_m * C / (K_m + C)) / volume

    start, first, *_ = times
    cuts = [start + (first - start) / 2**i for i in range(16, 0, -1)]
    states = runge_kutta(field, torch.zeros_like(k_a), [start, *cuts, *times[1:]], steps)
    return torch.stack(states[len(cuts) :], -1)
