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

from torchngvi.arguments import read_generator, read_instance, read_size, read_tensor
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Metric
from torchngvi.methods import AIFVB
from torchngvi.metrics.recursive import Recursion
from torchngvi.models.log_joint import as_target
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.stepsizes import PowerSchedule

__all__ = ["asymptotic_covariance", "check_exponents", "marginal_sample"]

_ROUNDS = 100  # of redrawing what fell outside the domain


def check_exponents(schedule: PowerSchedule, metric: Metric | None) -> None:
    """Check that α of the steps and β of the recursion go together, ½ < α < 1 and 0 < β < α - ½.

    What the theorems on steps α_k = c/(c' + k)^α ask for (Godichon-Baggioni, Nguyen and Tran 2023).  The schedule knows
    α and the metric β, so that neither can tell alone.

    Args:
        schedule: the schedule of the learning rate.
        metric: the metric of the steps; without Z terms (c_β = 0), or without a recursion, only α is asked.

    Raises:
        InputError: if the exponents are out of range.

    >>> from torchngvi.ifvb import Recursive
    >>> check_exponents(PowerSchedule(0.75), Recursive(beta=0.125))
    """
    alpha, split = schedule.alpha, getattr(metric, "rule", metric)  # of `Blocks`, what it splits
    if not 0.5 < alpha < 1:
        raise InputError(f"alpha must lie in (1/2, 1); got {alpha}. Use PowerSchedule(0.75).")
    if isinstance(split, Recursion) and split.c_beta != 0 and not split.beta < alpha - 0.5:
        raise InputError(
            f"beta must lie in (0, alpha - 1/2), here (0, {alpha - 0.5:.3g}); got {split.beta}. "
            f"Use Recursive(beta={(alpha - 0.5) / 2:.3g}), or a larger alpha."
        )


@torch.no_grad()
def asymptotic_covariance(optimizer: AIFVB, target: Any, repeats: int = 500) -> Tensor:
    """The covariance of λ̄ around λ* after the steps taken, I_F⁻¹ Cov(g) I_F⁻¹/s at the average.

    Use it to see what the optimisation has left open.

    Args:
        optimizer: an optimizer with an average and an inverse Fisher matrix, such as `AIFVB`; it is left as it is, but
            for
            the draws of its generator.
        target: the target, as the optimizer's ``step`` takes it.
        repeats: the number of gradients that are drawn for Cov(g), at least 2.

    Returns:
        The covariance, (*batch, D, D).

    Raises:
        InputError: if there are fewer than 2 repeats, or no step was taken.
        PairError: if the optimizer has no average or no inverse.

    >>> from torchngvi import LogJoint
    >>> from torchngvi.ifvb import MeanFieldGaussian
    >>> target = LogJoint(lambda theta: -0.5 * theta.square().sum(-1))
    >>> opt = AIFVB(MeanFieldGaussian(torch.zeros(2)), 0.1)  # which begins at the posterior, where its gradient is 0
    >>> loss = opt.step(target)
    >>> bool((asymptotic_covariance(opt, target, repeats=10) < 1e-6).all())
    True
    """
    read_instance("optimizer", optimizer, AIFVB, "is an AIFVB, which averages", error=PairError)
    repeats = read_size("repeats", repeats, "counts gradients of a covariance", at_least=2)
    steps = optimizer.memory["averaging"]["steps"]
    if steps == 0:
        raise InputError("no step was taken yet: there is nothing to be uncertain about.")
    inverse = optimizer.inverse_fisher()
    q, estimator, gradients = optimizer.posterior.at(optimizer.average), optimizer.estimator, []
    assert estimator is not None
    prepared, told = as_target(estimator.prepared(target)), estimator.recalling(optimizer.memory["estimator"])
    for _ in range(repeats):
        e = told(q, prepared)
        gradients.append(e.derivative.a)  # type: ignore[union-attr]
        told = estimator.recalling(e.learned or {})
    drawn = torch.stack(gradients)
    away = (drawn - drawn.mean(0)).movedim(0, -1)
    return inverse @ (away @ away.mT / (repeats - 1)) @ inverse.mT / steps


@torch.no_grad()
def marginal_sample(
    q: FlatPosterior, covariance: Tensor, n: int, generator: torch.Generator | None = None, at: Tensor | None = None
) -> Tensor:
    """Draw θ from ∫ q_λ N(λ; λ̄, covariance) dλ, the posterior with the uncertainty of λ in it.

    Args:
        q: a flat posterior without batch dimensions.
        covariance: that of λ, from `asymptotic_covariance`, (D, D), symmetric and positive definite.
        n: the number of draws, each with a λ of its own; a λ outside the domain is drawn again.
        generator: the generator of the draws; torch's own by default.
        at: λ̄, (D,); by default that of q.

    Returns:
        The draws, (n, d).

    Raises:
        InputError: if there is a batch of λ, the covariance has no Cholesky factor, or hardly any λ around λ̄ is
            allowed.

    >>> from torchngvi.ifvb import MeanFieldGaussian
    >>> marginal_sample(MeanFieldGaussian(torch.zeros(2)), 0.01 * torch.eye(2), 5).shape
    torch.Size([5, 1])
    """
    q = read_instance("q", q, FlatPosterior, "is a flat posterior, such as MeanFieldGaussian(vector)")
    at = None if at is None else read_tensor("at", at, like=q.vector, shape=(q.size,))
    n, generator = read_size("n", n, "counts draws"), read_generator("generator", generator, q.vector.device)
    center = q.point(at).detach()
    if center.ndim != 1:
        raise InputError(f"marginal_sample integrates over one lambda; got shape {tuple(center.shape)}.")
    covariance = read_tensor("covariance", covariance, like=center, shape=(len(center), len(center)))
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
