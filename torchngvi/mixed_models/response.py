"""The posterior of the globals from a Gaussian q over all coordinates: as it is, or wider by linear response.

Tilt the log joint by t θ_k: the mean of the posterior moves by t times its covariances with θ_k, and so does, nearly,
the mean of the best q.  That response,

    Cov[:, k] = d m_g/dt,

by central differences of refits, is nearer to the posterior's covariance than q's own, which leaves out what the
uncertainty of the random effects adds to that of their variances (Giordano, Broderick and Jordan 2018, Journal of
Machine Learning Research 19).  The means stay those of q.
"""

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


class Tilted(TractableTarget):
    """A mixed model with the log joint log p(y, θ) + tᵀθ, one t for each member of a batch of posteriors.

    Args:
        model: the mixed model.
        tilt: t, (*batch, D).
    """

    temperature = 1.0

    def __init__(self, model: MixedLogJoint, tilt: Tensor) -> None:
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
    model: MixedLogJoint,
    q: PrecisionCholeskyGaussian,  # fitted
    progress: bool = False,
) -> tuple[Tensor, bool]:
    """The covariance (P, P) of the globals by linear response: two refits a coordinate, all of them in one batch.

    Args:
        model: the mixed model.
        q: its best Gaussian over the arrow.
        progress: show a bar.

    Returns:
        The covariance, and whether all refits have converged.
    """
    structure, rows = model.structure, model.rows
    local = rows.n * rows.r
    size = structure.dim - local
    sd = q.variance[local:].sqrt()
    tilt = q.mean.new_zeros(2, size, structure.dim)
    tilt[0, :, local:] = torch.diag(_SHIFT / sd)
    tilt[1] = -tilt[0]
    many = PrecisionCholeskyGaussian(
        structure.dim, (2, size), structure=structure, dtype=q.mean.dtype, device=q.mean.device
    )
    many.restore(Coordinates(*(x.detach().expand(2, size, -1).clone() for x in q.coordinates)))
    tolerance = max(_TOLERANCE, 100 * torch.finfo(q.mean.dtype).eps)
    result = fit(many, Tilted(model, tilt), tolerance=tolerance, progress=progress)
    moved = many.mean[0, :, local:] - many.mean[1, :, local:]
    covariance = moved * (sd / (2 * _SHIFT))[:, None]
    return 0.5 * (covariance + covariance.mT), bool(result.members_converged.all())


def responded(model: MixedLogJoint, near: Conditional, posterior: Gaussian, draws: int, seed: int) -> Weighted:
    """Draws of a Gaussian over the globals, with the k-hat of draws of all coordinates, b from q given the globals."""
    generator = torch.Generator().manual_seed(seed + 1)
    theta, log_weights = [], []
    for count in _counts(draws, model.dim):
        g = posterior.sample((count,), generator)
        b = near.draw(g, generator)
        log_q = posterior.log_prob(g) + near.log_prob(b, g)
        with torch.no_grad():
            log_weights.append(model.log_joint(torch.cat([b.flatten(-2), g], -1)) - log_q)
        theta.append(g)
    return Weighted.equally(torch.cat(theta).detach(), torch.cat(log_weights).detach())


def _counts(draws: int, dim: int) -> list[int]:
    """So many draws at once that the memory is bounded."""
    most = max(1, _AT_ONCE // dim)
    return [min(most, draws - done) for done in range(0, draws, most)]


def wider(model: MixedLogJoint, near: Conditional, progress: bool) -> tuple[Gaussian, str]:
    """The Gaussian of q's means and the covariance by linear response, and a clause about it."""
    covariance, converged = response_covariance(model, near.q, progress)
    posterior = gaussian(near.global_mean, covariance)
    if posterior is None or not converged:
        why = "the refits did not converge" if not converged else "it is not positive definite"
        return near.marginal(), f"covariances of q, since those by linear response are not to be had: {why}"
    return posterior, "covariances by linear response"
