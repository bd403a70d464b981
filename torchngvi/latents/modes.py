"""The modes of the latents at many values of the hyperparameters, by a guarded Newton's method.

Newton's step -H⁻¹∇ℓ is halved until ℓ falls by a share of what the step promises.  Where H is not positive definite,
λI is added, with λ the first of 10⁻³, 10⁻², .. times the largest entry of the diagonal at which H + λI is; a mode has
to be reached without.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.interfaces import where_members
from torchngvi.latents.chain import Factor, Layout
from torchngvi.latents.curvature import Curvature, Jet

_STEPS = 100
_HALVINGS = 40  # of a step
_DAMPINGS = 7  # of a Hessian, from 10⁻³ of its diagonal on
_ENOUGH = 1e-4  # share of the promised decrease a step must reach
_NEAR, _TIGHT = 1e-4, 1.25  # squared decrements, in nats: so near that values tell no more; rounding to this power
_ROUNDED = 0.1  # factor by which a step that is near reduces it, unless by rounding


class Modes(NamedTuple):
    """Where Newton's method ended.

    Attributes:
        u: the modes û, (S, D).
        energy: ℓ there, (S,).
        factor: of the Hessians there.
        found: where the curvature is positive definite and the decrement is at the level of rounding, (S,).
        damped: where the curvature is not positive definite, so that the factor is that of H + λI, (S,).
        square: the squared decrements gᵀH⁻¹g, (S,): ℓ is about half of it above its minimum.
        steps: the number of Newton steps, the largest of the S.
    """

    u: Tensor
    energy: Tensor
    factor: Factor
    found: Tensor
    damped: Tensor
    square: Tensor
    steps: int


@torch.no_grad()
def find_modes(
    curvature: Curvature,
    layout: Layout,
    theta: Tensor,  # (S, P)
    start: Tensor,  # (S, D)
) -> Modes:
    """Minimise ℓ(u) for each θ, from a start."""
    u = start
    found = torch.zeros(len(theta), dtype=torch.bool, device=theta.device)
    lost = found  # no way on
    before = u.new_full((len(u),), torch.inf)
    eps = torch.finfo(u.dtype).eps
    near = max(_NEAR, 1e3 * eps)
    for steps in range(_STEPS + 1):
        jet = curvature.jet(theta, u)
        factor, damped, usable = _definite(layout, jet)
        direction = -factor.solve(jet.gradient)
        square = -(jet.gradient * direction).sum(-1)
        lost = lost | ~(usable & square.isfinite())
        small = (square <= eps**_TIGHT) | ((before <= near) & (square > _ROUNDED * before))
        found = found | (~damped & ~lost & (square <= near) & small)
        waiting = ~(found | lost)
        if steps == _STEPS or not bool(waiting.any()):
            break
        u, moved = _moved(curvature, theta, u, jet.energy, direction, square, waiting, ~damped & (square <= near))
        lost, before = lost | (waiting & ~moved), square
    return Modes(u, jet.energy, factor, found & ~damped, damped, square, steps)


def _definite(layout: Layout, jet: Jet) -> tuple[Factor, Tensor, Tensor]:
    """A factor of H, or of H + λI where that is not positive definite; where it was damped; and where there is one."""
    usable = jet.energy.isfinite() & jet.gradient.isfinite().all(-1) & jet.entries.isfinite().all(-1)
    eye = torch.zeros_like(jet.entries)
    eye[:, : layout.dim] = 1.0
    entries = where_members(usable, jet.entries, eye)
    factor = Factor(layout, entries)
    damped = ~factor.ok
    scale = entries[:, : layout.dim].abs().amax(-1)
    size = torch.zeros_like(scale)
    for k in range(_DAMPINGS):
        if bool(factor.ok.all()):
            break
        size = torch.where(factor.ok, size, 10.0 ** (k - 3) * scale)
        factor = Factor(layout, entries + size[:, None] * eye)
    return factor, damped, usable & factor.ok


def _moved(
    curvature: Curvature,
    theta: Tensor,
    u: Tensor,
    energy: Tensor,
    direction: Tensor,
    square: Tensor,
    waiting: Tensor,
    near: Tensor,
) -> tuple[Tensor, Tensor]:
    """The longest of the steps 1, ½, ¼, .. along which ℓ falls enough, for each θ, near a mode the first; who moved."""
    result, moved, length = u, torch.zeros_like(waiting), torch.ones_like(energy)
    rounding = 8 * torch.finfo(u.dtype).eps * energy.abs().clamp_min(1.0)
    for _ in range(_HALVINGS):
        trial = u + length[:, None] * direction
        fallen = energy - curvature.energy(theta, trial)
        falls = (fallen >= _ENOUGH * length * square - rounding) | (near & fallen.isfinite())
        enough = waiting & ~moved & falls
        result, moved = where_members(enough, trial, result), moved | enough
        if bool((moved | ~waiting).all()):
            break
        length = 0.5 * length
    return result, moved
