"""A fit judged on draws that it was not fitted to, and the loss of a place by draws that are the same for all."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.diagnostics.importance import smoothed
from torchngvi.errors import InputError
from torchngvi.expectations.draws import Fixed
from torchngvi.models.factors import FAILING, Guarded
from torchngvi.posteriors.gaussian import Gaussian


class Fresh(NamedTuple):
    """What fresh draws say of q: the ELBO, its standard error and the worth of the importance weights."""

    elbo: Tensor  # (*batch,)
    error: Tensor  # (*batch,)
    share: float  # of the draws, what their Pareto-smoothed importance weights are worth, the smallest
    lost: str  # why there is no such number, or nothing
    dropped: int = 0  # draws at which the log joint failed or was NaN, left out where they are few
    k_hat: float = 0.0  # the largest
    draws: int = 1024

    @property
    def kept(self) -> str:
        """What importance sampling would keep, about where k-hat says that it is a rough number."""
        rough = "about " if self.k_hat >= 0.5 and self.share < 0.9 else ""  # unless nearly all weights are equal
        return f"importance sampling would keep {rough}{self.share:.0%} of them"

    def __str__(self) -> str:
        return f"on {self.draws} fresh draws the ELBO is {float(self.elbo.sum()):.6g} ± {float(self.error.norm()):.1g}"


def judge(q: Gaussian, target: Guarded, seed: int, draws: int = 1024) -> Fresh:
    """The log weights of draws that were not fitted to, by that seed."""
    failed = target.failures()
    z = Fixed(draws, seed=seed)(q.mean_probe.detach())
    theta = q.push_noise(z).detach()
    reason = ""
    try:
        with torch.enable_grad():  # as in the fit, for functions that differentiate
            value = target.log_joint(theta).detach()
    except InputError as error:  # of a batch of another size: the fit is not lost for it
        value = theta.new_full(theta.shape[:-1], torch.nan)
        reason = f"because the check on {draws} fresh draws could not be made: {error}"
    terms = value - target.temperature * q.log_prob(theta)
    failing = terms.isnan()
    few = bool((failing.sum(0) <= FAILING * draws).all())
    bad, dropped = int((~torch.isfinite(terms)).sum()), int(failing.sum())
    if few and dropped == bad and not reason:
        return _kept(terms, failing, target.temperature or 1.0)
    if bad and not reason and target.failures() != failed:
        reason = f"because the log joint fails at {bad} of {terms.numel()} draws from q.{target.failures()}"
    elif bad and not reason:
        reason = (
            f"because the log joint is not finite at {bad} of {terms.numel()} draws from q: no Gaussian fits "
            "inside its support. Transform the constrained coordinates."
        )
    return _kept(terms, torch.zeros_like(failing), target.temperature or 1.0)._replace(lost=reason)


def _kept(
    terms: Tensor,  # log weights (S, *batch)
    failing: Tensor,  # to be left out, (S, *batch)
    temperature: float,
) -> Fresh:
    """What the others say."""
    count = (~failing).sum(0)
    elbo = torch.where(failing, 0.0, terms).sum(0) / count
    scatter = torch.where(failing, 0.0, (terms - elbo).square()).sum(0) / (count - 1)
    weights = smoothed(torch.where(failing, -torch.inf, terms) / temperature)
    share = float(weights.effective.nan_to_num(0.0).min()) / len(terms)
    k_hat = float(weights.k_hat.nan_to_num(torch.inf).max())
    return Fresh(elbo, (scatter / count).sqrt(), share, "", int(failing.sum()), k_hat, len(terms))


def sampled_loss(q: Gaussian, target: Guarded, draws: int, seed: int, *, failing: float = FAILING) -> float:
    """L of q from whitened draws, the same for every q, of a batch the sum; infinite where it is not finite.

    Of one q those draws at which the log joint is NaN are left out, if they are a small share.
    """
    with torch.no_grad():
        values = target.log_joint(q.push_noise(Fixed(draws, seed=seed)(q.mean_probe.detach())).detach())
        bad = values.isnan()
        if not q.batch_shape and 0 < int(bad.sum()) <= max(2 * (failing > 0), failing * draws):
            values = values[~bad]
        loss = float((-values.mean(0) - target.temperature * q.entropy()).sum())
    return loss if math.isfinite(loss) else math.inf


def allowance(dim: int, trust: tuple[float, float]) -> float:
    """The nats by which a mode may miss its promise and be trusted, of a number and a number a coordinate."""
    return max(trust[0], trust[1] * dim)
