"""A mixture of Gaussians, one at each mode that was found."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchngvi import posteriors
from torchngvi.mode import distinct_modes, find_modes, search_points
from torchngvi.models import LogJoint
from torchngvi.refinement.density import LOG_TAU, Density, Joint
from torchngvi.refinement.fan import fitted


class Mixture(Density):
    """The mixture of Gaussians Σ_k π_k N(m_k, C_k C_kᵀ).

    Args:
        shares: π, (K,), which sum to one.
        mean: (K, D).
        root: lower triangular, (K, D, D).

    >>> q = Mixture(torch.tensor([0.5, 0.5]), torch.tensor([[-3.0], [3.0]]), torch.ones(2, 1, 1))
    >>> q.mean.item(), q.variance.item()
    (0.0, 10.0)
    """

    shares: Tensor
    centres: Tensor
    roots: Tensor

    def __init__(self, shares: Tensor, mean: Tensor, root: Tensor) -> None:
        super().__init__()
        self.register_buffer("shares", shares.detach().clone())
        self.register_buffer("centres", mean.detach().clone())
        self.register_buffer("roots", root.detach().clone())
        self.dim = mean.shape[-1]

    def member_log_prob(self, theta: Tensor) -> Tensor:
        """log N(θ; m_k, C_k C_kᵀ) at θ (N, D), (N, K)."""
        square, log_det = distances(self, theta)
        return -0.5 * square - log_det - self.dim * LOG_TAU

    @torch.no_grad()
    def log_prob(self, theta: Tensor) -> Tensor:
        """Compute the log density of the mixture, (*sample,)."""
        each = self.member_log_prob(self._flat(theta)) + self.shares.log()
        return each.logsumexp(-1).reshape(theta.shape[:-1])

    @torch.no_grad()
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n times θ, (n, D), from each member its share of them, in any order."""
        like = self.centres
        place = torch.rand((), dtype=like.dtype, device=like.device, generator=generator)
        ranks = (torch.randperm(n, device=like.device, generator=generator) + place) / n
        member = torch.searchsorted(self.shares.cumsum(0), ranks).clamp_max(len(self.shares) - 1)
        z = torch.randn(n, self.dim, dtype=like.dtype, device=like.device, generator=generator)
        return like[member] + (self.roots[member] @ z[..., None])[..., 0]

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (D,) and covariance (D, D), in closed form."""
        mean = self.shares @ self.centres
        within = (self.shares[:, None, None] * (self.roots @ self.roots.mT)).sum(0)
        apart = self.centres - mean
        return mean, within + (apart.mT * self.shares) @ apart

    def as_posterior(self) -> posteriors.Mixture:
        """The same mixture as a posterior that `torchngvi.fit` improves, where the members overlap.

        Returns:
            A new mixture, whose components are `torchngvi.CholeskyGaussian`.

        >>> Mixture(torch.tensor([0.5, 0.5]), torch.tensor([[-3.0], [3.0]]), torch.ones(2, 1, 1)).as_posterior()
        Mixture(2 x CholeskyGaussian, D = 1, weights 0.5, 0.5)
        """
        number = len(self.shares)
        return posteriors.Mixture(
            posteriors.CholeskyGaussian(self.dim, (number,), mean=self.centres, scale=self.roots), self.shares
        )

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> "Mixture":
        """The mixture that a state_dict is of."""
        return cls(state["shares"], state["centres"], state["roots"])


def distances(mixture: Mixture, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distances of θ (N, D) from the means in the standard deviations of each member, (N, K), and log |C_k|."""
    apart = (theta[:, None] - mixture.centres).movedim(0, -1)  # (K, D, N)
    square = torch.linalg.solve_triangular(mixture.roots, apart, upper=False).square().sum(-2).mT
    return square, mixture.roots.diagonal(dim1=-2, dim2=-1).log().sum(-1)


@torch.no_grad()
def mix(
    mean: Tensor,
    root: Tensor,
    joint: Joint,
    elbo: float,
    starts: Tensor | None,
    seed: int,
    known: Sequence[Tensor] = (),
) -> Mixture | None:
    """Search modes, fit a Gaussian at each, and find the shares with which their mixture has the largest ELBO."""
    own = mean, root
    points = search_points(mean, root.norm(dim=1), seed)
    points = points if starts is None else starts.to(points)
    if known:
        points = torch.cat([points, torch.stack(list(known)).to(points)])
    with torch.enable_grad():
        found = find_modes(joint.target, points, 200 + 20 * len(mean))
    modes = [mode for mode in found if mode is not None and mode.found]
    least = max([elbo, *(mode.log_evidence for mode in modes)]) - 5.0
    kept = distinct_modes((mode for mode in modes if _distance((mode.theta, mode.root), own) > 1), least)
    if not kept:
        return None
    mean, root = torch.stack([mode.theta for mode in kept]), torch.stack([mode.root for mode in kept])
    target = LogJoint(lambda theta: joint(theta.flatten(0, -2)).unflatten(0, theta.shape[:-1]))
    with torch.enable_grad():
        fits = fitted(target, mean, root, seed)
    members = [own]
    for m, r, ok in zip(fits.mean, fits.root, fits.ok.tolist(), strict=True):
        if ok and all(_distance((m, r), other) > 1 for other in members):
            members.append((m, r))
    if len(members) == 1:
        return None
    mean, root = (torch.stack(part) for part in zip(*members, strict=True))
    shares = best_shares(mean, root, joint, seed)
    large = shares > 1e-3
    if int(large.sum()) < 2:
        return None
    return Mixture(shares[large] / shares[large].sum(), mean[large], root[large])


def _distance(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> float:
    """Between two means, in standard deviations of the Gaussian for which it is less."""
    apart = (first[0] - second[0])[:, None]
    return min(float(torch.linalg.solve_triangular(root, apart, upper=False).norm()) for _, root in (first, second))


def best_shares(mean: Tensor, root: Tensor, joint: Joint, seed: int, draws: int = 512) -> Tensor:
    """The shares π (K,) at which Σ_k π_k E_k[log p - log Σ_l π_l q_l] is largest, over fixed draws of each member."""
    count, dim = mean.shape
    generator = torch.Generator(mean.device).manual_seed(seed)
    z = torch.randn(draws, 1, dim, dtype=mean.dtype, device=mean.device, generator=generator)
    theta = (mean + (root @ z[..., None])[..., 0]).flatten(0, 1)
    log_joint = joint(theta).reshape(draws, count)
    uniform = torch.full_like(mean[:, 0], 1 / count)
    each = Mixture(uniform, mean, root).member_log_prob(theta).reshape(draws, count, count)
    log_shares = uniform.log()
    for _ in range(200):
        gain = (log_joint - (each + log_shares).logsumexp(-1)).mean(0).nan_to_num(-torch.inf, neginf=-1e30)
        new = (log_shares + gain).log_softmax(0)
        moved = float((new.exp() - log_shares.exp()).abs().max())
        log_shares = new
        if moved < 1e-6:
            break
    return log_shares.exp()
