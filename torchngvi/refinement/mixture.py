"""A mixture of Gaussians, one at each mode that was found."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchngvi import posteriors
from torchngvi.mode import Mode, find_modes, search_points
from torchngvi.refinement.density import Density, Joint
from torchngvi.refinement.tracing import Batched, fitted

_APART = 3.0  # standard deviations, by either curvature, between two modes
_SAME = 1.0  # the same, between two Gaussians that were fitted
_LEAST = 5.0  # nats below the largest evidence, or the ELBO of q, down to which a mode counts
_SHARED = 512  # draws of each member, by which the shares are found
_SWEEPS = 200  # of the shares
_SMALLEST = 1e-3  # share below which a member is left out
_LOG_TAU = 0.5 * math.log(2 * math.pi)


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

    def member_log_prob(
        self,
        theta: Tensor,  # (N, D)
    ) -> Tensor:
        """log N(θ; m_k, C_k C_kᵀ), (N, K)."""
        apart = (theta[:, None] - self.centres).movedim(0, -1)  # (K, D, N)
        z = torch.linalg.solve_triangular(self.roots, apart, upper=False)
        log_det = self.roots.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -0.5 * z.square().sum(-2).mT - log_det - self.dim * _LOG_TAU

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
    modes = [mode for mode in _searched(*own, joint, starts, seed, known) if mode is not None and mode.found]
    kept = _distinct(modes, own, elbo)
    if not kept:
        return None
    mean, root = torch.stack([mode.theta for mode in kept]), torch.stack([mode.root for mode in kept])
    target = Batched(lambda theta: joint(theta.flatten(0, -2)).unflatten(0, theta.shape[:-1]))
    with torch.enable_grad():
        fits = fitted(target, mean, root, seed)
    members = [own]
    for m, r, ok in zip(fits.mean, fits.root, fits.ok.tolist(), strict=True):
        if ok and all(_distance((m, r), other) > _SAME for other in members):
            members.append((m, r))
    if len(members) == 1:
        return None
    mean, root = (torch.stack(part) for part in zip(*members, strict=True))
    shares = best_shares(mean, root, joint, seed)
    large = shares > _SMALLEST
    if int(large.sum()) < 2:
        return None
    return Mixture(shares[large] / shares[large].sum(), mean[large], root[large])


def _searched(
    mean: Tensor, root: Tensor, joint: Joint, starts: Tensor | None, seed: int, known: Sequence[Tensor]
) -> list[Mode | None]:
    points = search_points(mean, root.norm(dim=1), seed)
    if starts is not None:
        points = starts.to(points)
    if known:
        points = torch.cat([points, torch.stack(list(known)).to(points)])
    with torch.enable_grad():
        return find_modes(joint.target, points, 200 + 20 * len(mean))


def _distinct(modes: list[Mode], own: tuple[Tensor, Tensor], elbo: float) -> list[Mode]:
    """Those that are not q's own, each once, with enough evidence."""
    kept: list[Mode] = []
    least = max([elbo, *(mode.log_evidence for mode in modes)]) - _LEAST
    for mode in sorted((mode for mode in modes if mode.log_evidence > least), key=lambda one: -one.log_evidence):
        here = mode.theta, mode.root
        if all(_distance(here, (one.theta, one.root)) > _APART for one in kept) and _distance(here, own) > _SAME:
            kept.append(mode)
    return kept


def _distance(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> float:
    """Between two means, in standard deviations of the Gaussian for which it is less."""
    apart = (first[0] - second[0])[:, None]
    return min(float(torch.linalg.solve_triangular(root, apart, upper=False).norm()) for _, root in (first, second))


def best_shares(mean: Tensor, root: Tensor, joint: Joint, seed: int) -> Tensor:
    """The shares π (K,) at which Σ_k π_k E_k[log p - log Σ_l π_l q_l] is largest, over fixed draws of each member."""
    count, dim = mean.shape
    generator = torch.Generator(mean.device).manual_seed(seed)
    z = torch.randn(_SHARED, 1, dim, dtype=mean.dtype, device=mean.device, generator=generator)
    theta = (mean + (root @ z[..., None])[..., 0]).flatten(0, 1)
    log_joint = joint(theta).reshape(_SHARED, count)
    uniform = torch.full_like(mean[:, 0], 1 / count)
    each = Mixture(uniform, mean, root).member_log_prob(theta).reshape(_SHARED, count, count)
    log_shares = uniform.log()
    for _ in range(_SWEEPS):
        gain = (log_joint - (each + log_shares).logsumexp(-1)).mean(0).nan_to_num(-torch.inf, neginf=-1e30)
        new = (log_shares + gain).log_softmax(0)
        moved = float((new.exp() - log_shares.exp()).abs().max())
        log_shares = new
        if moved < 1e-6:
            break
    return log_shares.exp()
