"""The posterior of the globals with the random effects integrated out: a Gaussian, and draws weighted to the density.

The number of quadrature nodes is the smallest with which the log joint, at draws near the posterior, agrees with that
of more nodes.  The Gaussian is fitted over fixed draws from the marginal of the q over all coordinates, and then serves
to draw from: importance weights say how far it is from the density, and mend the rest.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.diagnostics.importance import Proposal
from torchngvi.diagnostics.psis import smoothed
from torchngvi.fitting.fit import fit
from torchngvi.fitting.records import FitResult
from torchngvi.interfaces import Target
from torchngvi.mixed_models.locals import Conditional, gaussian
from torchngvi.models import GaussianNoise, MarginalMixed, MixedLogJoint
from torchngvi.models.mixed_integrated import InScales, IntegratedMixed
from torchngvi.models.multilevel_gaussian import GaussianMultilevel
from torchngvi.posteriors.gaussian import Gaussian

_NODES: dict[int, Sequence[int]] = {1: (9, 15, 25, 41, 61), 2: (5, 7, 11, 17, 25)}  # by r, in each dimension
_MORE = (5, 7, 9)  # of three dimensions and more
_SETTLED = 0.02  # nats by which the log joint may change from draw to draw with more nodes
_LOOKED = 16  # draws at which that is looked at
_FINE, _AGAIN = 0.5, 2  # k-hat from which draws come from their own moments again, and how often
_PART, _LEAST = 8, 400  # of the draws an eighth, or so many, are looked at before the others
_WIDER = 1.3  # times the standard deviation of q, which is too narrow


class Weighted(NamedTuple):
    """Draws of the globals with normalised importance weights."""

    theta: Tensor  # (S, P)
    weights: Tensor  # (S,)
    k_hat: float  # of the weights
    effective: float  # draws

    @classmethod
    def equally(cls, theta: Tensor, log_weights: Tensor) -> "Weighted":
        """Draws of q as they are, with what their weights would be for the k-hat alone."""
        smooth = smoothed(log_weights)
        weights = theta.new_full((len(theta),), 1 / len(theta))
        return cls(theta, weights, float(smooth.k_hat), float(smooth.effective))

    def resampled(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Equally likely draws, (count, P), by systematic resampling in random order: distinct if weights are equal."""
        places = (torch.arange(count, dtype=torch.float64) + torch.rand((), generator=generator)) / count
        index = torch.searchsorted(self.weights.double().cpu().cumsum(0), places).clamp_max(len(self.theta) - 1)
        order = torch.randperm(count, generator=generator)
        return self.theta[index[order].to(self.theta.device)]


class Integrated(NamedTuple):
    """What came of it."""

    target: IntegratedMixed | GaussianMultilevel
    posterior: Gaussian
    fit: FitResult
    draws: Weighted
    elbo: float
    log_evidence: float


@torch.no_grad()
def enough_nodes(model: MixedLogJoint, near: Conditional, seed: int = 0) -> int:
    """The smallest of some numbers of nodes with which more make no difference of 0.02 nats between draws near q."""
    r = model.rows.r
    if isinstance(model.rows.likelihood, GaussianNoise):
        return MarginalMixed(model).nodes
    q, numbers = near.marginal(), _NODES.get(r, _MORE)
    z = torch.randn(_LOOKED, q.dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    frame = q.frame()
    theta = frame.mean + _WIDER * frame.push(z.to(frame.mean))
    before = MarginalMixed(model, numbers[0], near.start).log_joint(theta)
    for fewer, more in zip(numbers[:-1], numbers[1:], strict=True):
        after = MarginalMixed(model, more, near.start).log_joint(theta)
        change = after - before
        if float((change - change.mean()).abs().max()) < _SETTLED:
            return fewer
        before = after
    return numbers[-1]


def integrated(
    target: IntegratedMixed | GaussianMultilevel,
    q: Gaussian,
    draws: int,
    seed: int,
    progress: bool,
    fitted: bool = False,
    **budget: Any,
) -> Integrated:
    """Fit a Gaussian to the posterior of the globals, and weight draws of it."""
    turned = InScales(target, target.blocks)
    seen: Target = turned if turned.blocks else target
    q = turned.start(q) if turned.blocks and not fitted else q
    with torch.random.fork_rng(devices=[]):  # the fit takes the seed of its draws from torch's generator
        torch.manual_seed(seed)
        result = fit(q, seen, examine=False, progress=progress, **budget)
    found, elbo, log_evidence = weighted(q, seen, draws, seed, _FINE)
    for again in range(1, _AGAIN + 1):
        wider = None if found.k_hat < _FINE and len(found.theta) == draws else _moments_of(found)
        if wider is None and len(found.theta) == draws:
            break
        last = again == _AGAIN or wider is None
        found, _, log_evidence = weighted(wider or q, seen, draws, seed + again, math.inf if last else _FINE)
    with torch.no_grad():
        found = found._replace(theta=turned.globals(found.theta)[0])
    return Integrated(target, q, result, found, elbo, log_evidence)


def _moments_of(draws: Weighted) -> Gaussian | None:
    """The Gaussian of the weighted moments, from which weights have lighter tails (Oh and Berger 1992)."""
    mean = draws.weights @ draws.theta
    apart = draws.theta - mean
    return gaussian(mean, apart.mT @ (draws.weights[:, None] * apart))


@torch.no_grad()
def weighted(
    q: Gaussian, target: Target, draws: int, seed: int, most: float = math.inf
) -> tuple[Weighted, float, float]:
    """Draws from a mixture of q and wider distributions, weighted to the posterior; the ELBO of q; log evidence."""
    proposal, frame = Proposal(q, None), q.frame()
    x = proposal.sample(draws, torch.Generator().manual_seed(seed + 1))
    first = torch.zeros(draws, dtype=torch.bool, device=x.device)
    first[:: max(1, min(_PART, draws // _LEAST))] = True
    log_joint, (mixture, own) = x.new_empty(draws), proposal.log_density(x)

    def look(part: Tensor) -> None:
        theta = frame.mean + frame.push(x[part])
        log_joint[part] = target.log_joint(theta).nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)

    look(first)
    there = first
    if not bool(first.all()) and float(smoothed((log_joint - mixture)[first]).k_hat) < most:
        look(~first)
        there = torch.ones_like(first)
    theta, log_weights = (frame.mean + frame.push(x))[there], (log_joint - mixture)[there]
    smooth = smoothed(log_weights)
    inner = there.clone()
    inner[draws // 2 :] = False
    elbo = float((log_joint - own)[inner].mean())
    log_evidence = float(torch.logsumexp(log_weights, 0)) - math.log(len(theta))
    weights = smooth.log_weights.exp().to(theta)
    return Weighted(theta, weights, float(smooth.k_hat), float(smooth.effective)), elbo, log_evidence
