"""Is the refined density the posterior?  A second examination, by draws from something wider than it.

An ELBO and a k-hat from draws of a density tell nothing of where these draws do not come.  Half of the draws here are
of the density, the others of t distributions in the space in which it is a Gaussian: as wide as the linear response of
the posterior there, or half as wide again around each member of a mixture.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.diagnostics.importance import FromQ, Proposal, Sampled, Weights, weighted_moments
from torchngvi.diagnostics.linear_response import third_order
from torchngvi.diagnostics.psis import smoothed
from torchngvi.diagnostics.rule import ABOUT, FITS, NOT, UNSEEN, Marginals, judge, undecided, unsure
from torchngvi.expectations.draws import Fixed
from torchngvi.posteriors.covariance_root import CholeskyGaussian
from torchngvi.refinement.density import Density
from torchngvi.refinement.fan import LayeredGaussian
from torchngvi.refinement.importance import Wider
from torchngvi.refinement.joint import Joint, value_and_gradient
from torchngvi.refinement.mixture import Mixture

_DRAWS, _MORE = 4096, 16_384  # at first, and where those do not decide
_FEWEST, _EACH = 512, 16  # draws of the residuals, and a coordinate
_DOF, _WIDER = 3.0, 1.5  # of the t distributions around the members of a mixture


class Second(NamedTuple):
    """What the second examination found."""

    word: str  # "fits", "about right", "does not fit" or "not examined"
    reasons: tuple[str, ...]  # clauses
    sampled: Sampled | None

    @property
    def doubtful(self) -> bool:
        """Whether the density is not the posterior, or an sd may be off by more than was found, or nobody can tell."""
        return self.word in (NOT, UNSEEN) or (self.word == ABOUT and unsure(self.sampled))

    def __str__(self) -> str:
        """One sentence."""
        why = "; ".join(self.reasons)
        if self.word == FITS:
            return "A second examination finds nothing against it."
        if self.word == NOT:
            return f"It still is NOT the posterior: {why}."
        if self.word == UNSEEN:
            return f"Whether it is the posterior cannot be told: {why or 'no importance weights'}."
        return f"It is about right: {why}."


@torch.no_grad()
def examined_again(
    density: Density, joint: Joint, seed: int, wider: Wider | None = None, names: Sequence[str] = ()
) -> Second:
    """Compare the moments of a refined density with those by importance sampling from something wider."""
    found = _sampled(density, joint, seed, wider, _DRAWS)
    if found is not None and undecided(*found):
        found = _sampled(density, joint, seed + 1, wider, _MORE)
    if found is None:
        return Second(UNSEEN, (), None)
    word, reasons = judge(found[0]._replace(names=tuple(names)), None, found[1], ())
    return Second(word, reasons, found[1])


def _sampled(
    density: Density, joint: Joint, seed: int, wider: Wider | None, draws: int
) -> tuple[Marginals, Sampled] | None:
    """Moments of the density and of the posterior by the same draws, so that noise in common cancels."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(density, LayeredGaussian):
        theta, own, wide = _of_layers(density, joint, generator, seed, draws)
    elif isinstance(density, Mixture):
        theta, own, wide = _of_mixture(density, generator, draws)
    else:
        assert wider is not None
        theta, wide = wider.draws(draws, generator)
        own = wide
    log_joint = joint(theta).nan_to_num(nan=-math.inf)
    if not bool((log_joint < math.inf).all() & log_joint.isfinite().any()):
        return None
    mean, covariance = density.moments()
    marginals = Marginals(mean, covariance.diagonal().sqrt())
    if own is not wide:
        itself = weighted_moments(theta, own - wide, marginals.sd)
        marginals = Marginals(itself.mean, itself.sd)
    alone, every = (log_joint - own)[: draws // 2], log_joint - wide
    smooth = smoothed(alone)
    nats = 0.5 * float(alone.var()) if bool(alone.isfinite().all()) else math.inf
    from_q = FromQ(float(smooth.k_hat), float(smooth.effective), nats, float(alone.mean()))
    return marginals, Sampled(weighted_moments(theta, every, marginals.sd), from_q, draws, Weights(alone, every))


def _of_layers(
    density: LayeredGaussian, joint: Joint, generator: torch.Generator, seed: int, draws: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws, and the log densities of the layered Gaussian and of the wider proposal, in the space of the noise."""
    like, dim = density.centre, density.dim
    z = Fixed(max(_FEWEST, _EACH * dim), seed=seed)(like)
    value, gradient = value_and_gradient(density.log_density(joint), z)
    residual = -gradient - z
    pair = (value.isfinite() & residual.isfinite().all(-1)).reshape(2, -1).all(0).repeat(2)
    M = third_order(z[pair], residual[pair]).matrix if int(pair.sum()) >= _FEWEST // 2 else None
    proposal = Proposal(CholeskyGaussian(dim, dtype=like.dtype, device=like.device), M)
    x = proposal.sample(draws, generator)
    wide, own = proposal.log_density(x)
    parts = [density.push(part) for part in x.split(density.at_once)]
    theta, stretch = (torch.cat(each) for each in zip(*parts, strict=True))
    return theta, own - stretch, wide - stretch


def _of_mixture(density: Mixture, generator: torch.Generator, draws: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draws, half of the mixture, half of t distributions around its members, and both log densities."""
    like, dim, half = density.centres, density.dim, draws // 2
    member = torch.multinomial(density.shares.double().cpu(), draws, replacement=True, generator=generator)
    z = torch.randn(draws, dim, generator=generator, dtype=torch.float64, device="cpu")
    gamma = torch._standard_gamma(
        torch.full((half, 1), 0.5 * _DOF, dtype=torch.float64, device="cpu"), generator=generator
    )
    z[half:] *= _WIDER * (0.5 * _DOF / gamma).sqrt()
    member = member.to(like.device)
    theta = density.centres[member] + (density.roots[member] @ z.to(like)[..., None])[..., 0]
    own = density.log_prob(theta)
    apart = (theta[:, None] - density.centres).movedim(0, -1)  # (K, D, N)
    square = torch.linalg.solve_triangular(density.roots, apart, upper=False).square().sum(-2).mT / _WIDER**2
    volume = density.roots.diagonal(dim1=-2, dim2=-1).log().sum(-1) + dim * math.log(_WIDER)
    size = math.lgamma(0.5 * (_DOF + dim)) - math.lgamma(0.5 * _DOF) - 0.5 * dim * math.log(_DOF * math.pi)
    each = size - 0.5 * (_DOF + dim) * torch.log1p(square / _DOF) - volume + density.shares.log()
    return theta, own, torch.logaddexp(own, each.logsumexp(-1)) - math.log(2)
