"""The posterior of the globals from a Gaussian q over all coordinates: as it is, or wider by linear response.

Tilt the log joint by t θ_k: the mean of the posterior moves by t times its covariances with θ_k, and so does, nearly,
the mean of the best q.  That response,

    Cov[:, k] = d m_g/dt,

by central differences of refits, is nearer to the posterior's covariance than q's own, which leaves out what the
uncertainty of the random effects adds to that of their variances (Giordano, Broderick and Jordan 2018, Journal of
Machine Learning Research 19).  The means stay those of q.
"""

import gc
from typing import Any

import torch
from torch import Tensor

from torchngvi.fitting.fit import fit
from torchngvi.interfaces import Coordinates, Frame, Framed, Posterior, TractableTarget
from torchngvi.mixed_models.integrated import Weighted
from torchngvi.mixed_models.locals import Conditional, gaussian
from torchngvi.models import MixedLogJoint
from torchngvi.posteriors import PrecisionCholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian

_SHIFT = 0.1  # of a mean by a tilt, in its standard deviations under q
_TOLERANCE = 1e-6  # of the refits
_AT_ONCE = 2**24  # numbers of one table of draws and coordinates
_REFITS = 2**22  # numbers of the matrices of refits in one batch, of which quasi-Newton memory holds many


class Tilted(TractableTarget):
    """A mixed model with the log joint log p(y, θ) + tᵀθ, one t for each member of a batch of posteriors."""

    temperature = 1.0

    def __init__(self, model: TractableTarget, tilt: Tensor) -> None:
        self.model, self.tilt = model, tilt

    def check(self, q: Posterior) -> None:
        """Check q as the model does."""
        self.model.check(q)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that a value depends on."""
        return (*self.model.tensors(), self.tilt)

    def settings(self) -> tuple[object, ...]:
        """Return the settings of the model."""
        return self.model.settings()

    def log_joint(self, theta: Tensor) -> Tensor:
        """Compute log p(y, θ) + tᵀθ, (*sample, *batch)."""
        return self.model.log_joint(theta) + (self.tilt * theta).sum(-1)

    def expected_energy(self, frame: Frame) -> tuple[Tensor, Framed]:  # type: ignore[override]
        """Compute E_q[ℓ] of each member, (*batch,), and its derivative in the frame."""
        value, packet = self.model.expected_energy(frame)
        a, W = packet.framed(frame)
        return value - (self.tilt * frame.mean).sum(-1), Framed(a - frame.pull(self.tilt), W)


def response_covariance(
    model: TractableTarget,
    q: PrecisionCholeskyGaussian,  # fitted
    local: int,
    progress: bool = False,
    **settings: Any,
) -> tuple[Tensor, bool]:
    """The covariance (P, P) of the globals by linear response: two refits a coordinate, many of them in one batch.

    Args:
        model: the mixed model.
        q: its best Gaussian over a forest.
        local: the number of coordinates before the globals.
        progress: show a bar.
        settings: of `torchngvi.fit`, for each batch of refits; the tolerance is 1e-6 by default.

    Returns:
        The covariance, and whether all refits have converged.
    """
    size = q.dim - local
    sd = q.variance[local:].sqrt()
    at_once = max(1, _REFITS // q.coordinates.matrix.numel())
    columns, converged = [], True
    for some in torch.arange(size).split(at_once):
        moved, fine = _moved(model, q, local, some, (_SHIFT / sd)[some], {"progress": progress, **settings})
        columns.append(moved * (sd[some] / (2 * _SHIFT))[:, None])
        converged = converged and fine
        if at_once < size:
            gc.collect()  # what a fit was made of is in cycles of references, and holds its quasi-Newton memory
    covariance = torch.cat(columns)
    return 0.5 * (covariance + covariance.mT), converged


def _moved(
    model: TractableTarget,
    q: PrecisionCholeskyGaussian,
    local: int,
    some: Tensor,  # (K,), which globals are tilted
    shifts: Tensor,  # (K,)
    settings: dict[str, Any],
) -> tuple[Tensor, bool]:
    """By how much the means of the globals (K, P) differ between opposite tilts, and whether the refits converged."""
    count = len(some)
    tilt = q.mean.new_zeros(2, count, q.dim)
    tilt[0, torch.arange(count), local + some] = shifts
    tilt[1] = -tilt[0]
    like = q.mean
    many = PrecisionCholeskyGaussian(q.dim, (2, count), structure=q.structure, dtype=like.dtype, device=like.device)
    many.restore(Coordinates(*(x.detach().expand(2, count, -1).clone() for x in q.coordinates)))
    tolerance = max(_TOLERANCE, 100 * torch.finfo(like.dtype).eps)
    result = fit(many, Tilted(model, tilt), **{"tolerance": tolerance, **settings})
    return many.mean[0, :, local:] - many.mean[1, :, local:], bool(result.members_converged.all())


def responded(model: MixedLogJoint, near: Conditional, posterior: Gaussian, draws: int, seed: int) -> Weighted:
    """Draws of a Gaussian over the globals, with the k-hat of draws of all coordinates, b from q given the globals."""
    generator = torch.Generator().manual_seed(seed + 1)
    own = model.rows.own(generator)
    theta, log_weights = [], []
    for count in _counts(draws, model.all_dim):
        g = posterior.sample((count,), generator)
        b = near.draw(g, own)
        log_q = posterior.log_prob(g) + model.rows.total(near.log_prob(b, g))[0]
        with torch.no_grad():
            log_weights.append(model.log_joint(torch.cat([b.flatten(-2), g], -1)) - log_q)
        theta.append(g)
    return Weighted.equally(torch.cat(theta).detach(), torch.cat(log_weights).detach())


def _counts(draws: int, dim: int) -> list[int]:
    """So many draws at once that the memory is bounded."""
    most = max(1, _AT_ONCE // dim)
    return [min(most, draws - done) for done in range(0, draws, most)]


def wider(model: MixedLogJoint, near: Conditional, progress: bool, **budget: Any) -> tuple[Gaussian, str]:
    """The Gaussian of q's means and the covariance by linear response, and a clause about it."""
    covariance, converged = response_covariance(model, near.q, model.rows.n * model.rows.r, progress, **budget)
    return chosen(near.global_mean, covariance, converged, near.marginal())


def chosen(mean: Tensor, covariance: Tensor, converged: bool, marginal: Gaussian) -> tuple[Gaussian, str]:
    """The Gaussian with the covariance by linear response, or q's own marginal where that is not to be had."""
    posterior = gaussian(mean, covariance)
    if posterior is None or not converged:
        why = "the refits did not converge" if not converged else "it is not positive definite"
        return marginal, f"covariances of q, since those by linear response are not to be had: {why}"
    return posterior, "covariances by linear response"
