"""How uncertain the estimate of λ is, and the posterior with that uncertainty in it.

√s (λ̄ - λ*) → N(0, L⁻¹ Cov(g) L⁻¹),  L = ∇²L(λ*),  g the estimate of a step's gradient

(Godichon-Baggioni, Nguyen and Tran 2023, Theorem 5.3, where g is the mean of B terms and Cov(g) = Σ/B), with I_F
in the place of L (Appendix C: equal where q is the posterior).  Remark 5.2 integrates λ out,

    q(θ) = ∫ q_λ(θ) N(λ; λ̄, that covariance) dλ

which vanishes as 1/(Bs): it says what the optimisation left open, and does not repair that VB is too narrow.
"""

from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.methods.ifvb import AIFVB
from torchngvi.models.arguments import as_target
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.renamed import renamed

_ROUNDS = 100  # of redrawing what fell outside the domain


@torch.no_grad()
def asymptotic_covariance(
    optimizer: AIFVB,
    target: Any,
    repeats: int = 500,
) -> Tensor:  # (*batch, D, D)
    """Covariance of λ̄ around λ* after the steps taken: I_F⁻¹ Cov(g) I_F⁻¹/s, at the average.

    Args:
        optimizer: with an average and an inverse Fisher matrix, such as `AIFVB`; it is left as it is, but for the
            draws of its generator.
        target: as its ``step`` takes it.
        repeats: gradients drawn for Cov(g), at least 2.

    Raises:
        InputError: fewer than 2 repeats, no step taken.
        PairError: an optimizer without an average or an inverse.
    """
    if repeats < 2:
        raise InputError(f"a covariance needs at least 2 repeats; got {repeats}.")
    steps = optimizer.memory["steps"]
    if steps == 0:
        raise InputError("no step was taken yet: there is nothing to be uncertain about.")
    inverse = optimizer.inverse_fisher()
    q, state, estimator = optimizer.posterior.at(optimizer.average), dict(optimizer.memory), optimizer.estimator
    assert estimator is not None
    prepared = as_target(estimator.prepared(target))
    drawn = torch.stack([estimator(q, prepared, state).derivative.a for _ in range(repeats)])  # type: ignore[union-attr]
    away = (drawn - drawn.mean(0)).movedim(0, -1)
    return inverse @ (away @ away.mT / (repeats - 1)) @ inverse.mT / steps


@renamed(family="q")
@torch.no_grad()
def marginal_sample(
    q: FlatPosterior,
    covariance: Tensor,  # (D, D), of λ
    n: int,
    generator: torch.Generator | None = None,
    at: Tensor | None = None,
) -> Tensor:  # (n, d)
    """Draws of θ from ∫ q_λ N(λ; λ̄, covariance) dλ; a λ outside the domain is drawn anew.

    Args:
        q: without batch dimensions.
        covariance: from `asymptotic_covariance`, symmetric and positive definite.
        n: number of draws, each with a λ of its own.
        generator: of the draws.
        at: λ̄; by default that of q.

    Raises:
        InputError: a batch of λ, a covariance without a Cholesky factor, a λ̄ around which hardly any λ is allowed.
    """
    center = q.point(at).detach()
    if center.ndim != 1:
        raise InputError(f"marginal_sample integrates over one lambda; got shape {tuple(center.shape)}.")
    root, ok = cholesky(covariance)
    if not bool(ok):
        raise InputError("the covariance of lambda must be symmetric and positive definite: take more repeats than D.")
    points = center.expand(n, -1).clone()
    missing = torch.ones(n, dtype=torch.bool, device=center.device)
    for _ in range(_ROUNDS):
        noise = torch.randn(points.shape, dtype=center.dtype, device=center.device, generator=generator)
        points = torch.where(missing[:, None], center + noise @ root.mT, points)
        missing = ~q.in_domain(points)
        if not bool(missing.any()):
            return q.sample(1, generator, points)[0]
    raise InputError(
        f"{int(missing.sum())} of {n} draws of lambda stay outside the domain ({q.domain}): the covariance is too "
        "wide for a normal approximation. Take more steps."
    )
