"""A fit judged on draws that it was not fitted to."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.expectations.draws import Fixed
from torchngvi.models.guarded import Guarded
from torchngvi.posteriors.gaussian import Gaussian

DRAWS = 1024


class Fresh(NamedTuple):
    """q on fresh draws."""

    elbo: Tensor  # (*batch,)
    error: Tensor  # (*batch,)
    share: float  # effective sample size over the number of draws, the smallest
    lost: str  # why there is no such number, or nothing

    def __str__(self) -> str:
        return f"on {DRAWS} fresh draws the ELBO is {float(self.elbo.sum()):.6g} ± {float(self.error.norm()):.1g}"


def judge(q: Gaussian, target: Guarded, seed: int) -> Fresh:
    """The log weights of draws that were not fitted to, by that seed."""
    failed = target.failures()
    z = Fixed(DRAWS, seed=seed)(q.mean_probe.detach())
    theta = q.push_noise(z).detach()
    reason = ""
    try:
        with torch.enable_grad():  # as in the fit, for functions that differentiate
            value = target.log_joint(theta).detach()
    except InputError as error:  # of a batch of another size: the fit is not lost for it
        value = theta.new_full(theta.shape[:-1], torch.nan)
        reason = f"because the check on {DRAWS} fresh draws could not be made: {error}"
    terms = value - target.temperature * q.log_prob(theta)
    bad = int((~torch.isfinite(terms)).sum())
    if bad and not reason and target.failures() != failed:
        reason = f"because the log joint fails at {bad} of {terms.numel()} draws from q.{target.failures()}"
    elif bad and not reason:
        reason = (
            f"because the log joint is not finite at {bad} of {terms.numel()} draws from q: no Gaussian fits "
            "inside its support. Transform the constrained coordinates."
        )
    weights = torch.softmax(terms / (target.temperature or 1.0), 0)
    share = float((1 / weights.square().sum(0)).min()) / DRAWS
    return Fresh(terms.mean(0), terms.std(0) / math.sqrt(DRAWS), share, reason)
