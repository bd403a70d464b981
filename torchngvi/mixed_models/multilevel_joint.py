"""The posterior of a model with several grouping factors from Gaussians over all coordinates.

A learned parameter e^φ of the likelihood is no coordinate of these Gaussians: for some values of φ the best of them is
found, and the bounds of these, with the prior of φ, are its posterior up to a constant,

    log p(φ | y) ≈ max_q ELBO(q; φ) + log p(φ),

as integrated nested Laplace approximations explore their hyperparameters (Rue, Martino and Chopin 2009).  The means of
the other coordinates are those of the Gaussians, linear between these values.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.diagnostics.psis import smoothed
from torchngvi.interfaces import Coordinates
from torchngvi.mixed_models.integrated import Weighted
from torchngvi.models.learned import Learned
from torchngvi.models.multilevel import MultilevelLogJoint
from torchngvi.models.scale_priors import ScalePrior
from torchngvi.posteriors import CholeskyGaussian, PrecisionCholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures import Forest

_DEEP = 6.0  # nats below the maximum up to which values of φ are looked at
_MOST = 10  # values on each side
_GROWTH = 1.3  # of their spacing
_SEARCH = 12  # parabolas
_FEWEST = 100  # draws that say something about a tail
_SEEN = 2**26  # numbers of the draws of all coordinates of which the weights are looked at
_AT_ONCE = 2**24  # numbers of one table of them
_FINE = 2001  # points of the density of φ


class Profile(NamedTuple):
    """The bound as a function of φ, at J values, with the means of the Gaussians there."""

    phi: Tensor  # (J,), rising
    log_density: Tensor  # (J,)
    means: Tensor  # (J, D)

    @property
    def log_evidence(self) -> float:
        """log ∫ e^{bound} dφ, a lower bound of log p(y)."""
        phi, log_density = self._finely()
        return float(torch.logsumexp(log_density, 0) + (phi[1] - phi[0]).log())

    def _finely(self) -> tuple[Tensor, Tensor]:
        phi = torch.linspace(float(self.phi[0]), float(self.phi[-1]), _FINE, dtype=torch.float64)
        return phi, splined(self.phi, self.log_density, phi)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws of φ, (count,), one from each of as many equal parts of its distribution, in a random order."""
        phi, log_density = self._finely()
        share = (log_density - torch.logsumexp(log_density, 0)).exp().cumsum(0)
        u = (torch.arange(count, dtype=torch.float64) + torch.rand(count, generator=generator).double()) / count
        u = u[torch.randperm(count, generator=generator)] * share[-1]
        right = torch.searchsorted(share, u).clamp(1, _FINE - 1)
        part = (u - share[right - 1]) / (share[right] - share[right - 1]).clamp_min(1e-300)
        return phi[right - 1] + part.clamp(0, 1) * (phi[1] - phi[0])

    def log_prob(self, phi: Tensor) -> Tensor:
        """The log density of values of φ between the J, (S,)."""
        return splined(self.phi, self.log_density, phi.double().cpu()) - self.log_evidence

    def mean_at(self, phi: Tensor) -> Tensor:
        """The means of the other coordinates, (S, D)."""
        phi = phi.contiguous().to(self.phi)
        right = torch.searchsorted(self.phi, phi).clamp(1, len(self.phi) - 1)
        low, high = self.phi[right - 1], self.phi[right]
        part = ((phi - low) / (high - low)).to(self.means)[:, None]
        return self.means[right - 1] + part * (self.means[right] - self.means[right - 1])


class GivenGlobals:
    """The distribution of the random effects given (β, ω, φ) under a Gaussian q over a forest."""

    def __init__(self, q: PrecisionCholeskyGaussian, local: int, profile: Profile | None = None) -> None:
        self.q, self.local, self.profile = q, local, profile
        structure = q.structure
        assert isinstance(structure, Forest)
        self.structure, self.root = structure, q.coordinates.matrix.detach().clone()
        size = q.dim - local
        self.top = structure.parts(self.root)[-1].square[0, -size:, -size:]  # T_g
        self.mean = q.mean.detach().clone()

    def marginal(self) -> CholeskyGaussian:
        """Return q's marginal over (β, ω)."""
        return CholeskyGaussian.from_moments(self.mean[self.local :], torch.cholesky_inverse(self.top))

    def mean_at(
        self,
        globals: Tensor,  # (S, P), φ behind the others
    ) -> Tensor:
        """The means of all coordinates of q, (S, D)."""
        return self.mean.expand(len(globals), -1) if self.profile is None else self.profile.mean_at(globals[:, -1])

    @torch.no_grad()
    def draw(self, globals: Tensor, generator: torch.Generator) -> Tensor:
        """Draw the effects of all groups of all factors, (S, local)."""
        return self.with_density(globals, generator)[0][:, : self.local]

    @torch.no_grad()
    def with_density(self, globals: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw the effects: all coordinates (S, D), and log q(b | g), (S,)."""
        mean, size = self.mean_at(globals), self.q.dim - self.local
        g = globals[:, :size]
        z = torch.randn(len(g), self.local, generator=generator, dtype=torch.float64).to(g)
        behind = (g - mean[:, self.local :]) @ self.top
        theta = mean + self.structure.tsolve(self.root, torch.cat([z, behind], -1))
        log_det = self.structure.log_det(self.root) - self.top.diagonal().log().sum()
        return theta, log_det - 0.5 * z.square().sum(-1) - 0.5 * self.local * math.log(2 * math.pi)


def drawn(
    model: MultilevelLogJoint,
    near: GivenGlobals,
    spread: Gaussian,  # over (β, ω), at the best φ
    draws: int,
    seed: int,
) -> tuple[Weighted, int]:
    """Draws of the globals, with the k-hat of draws of all coordinates, of as many of them as the memory allows."""
    generator = torch.Generator().manual_seed(seed + 1)
    theta = spread.sample((draws,), generator).detach()
    log_q = spread.log_prob(theta).detach()
    if near.profile is not None:
        phi = near.profile.draw(draws, generator)
        theta = theta - near.mean[near.local :] + near.profile.mean_at(phi)[:, near.local :]
        log_q = log_q + near.profile.log_prob(phi).to(log_q)
        theta = torch.cat([theta, phi.to(theta)[:, None]], -1)
    size = model.dim + len(model.rows.y)
    seen = min(draws, max(_FEWEST, _SEEN // size))
    log_weights = []
    at_once = max(1, _AT_ONCE // size)
    for g, own in zip(theta[:seen].split(at_once), log_q[:seen].split(at_once), strict=True):
        all_of, log_b = near.with_density(g, generator)
        log_weights.append(_log_joint(model, near, all_of, g) - log_b - own)
    smooth = smoothed(torch.cat(log_weights))
    weights = theta.new_full((draws,), 1 / draws)
    return Weighted(theta, weights, float(smooth.k_hat), float(smooth.effective)), seen


@torch.no_grad()
def _log_joint(model: MultilevelLogJoint, near: GivenGlobals, theta: Tensor, g: Tensor) -> Tensor:
    """log p(y, θ, φ), (S,)."""
    learned: Learned | None = getattr(model, "learned", None)
    if near.profile is None or learned is None:
        return model.log_joint(theta)
    rows, phi = model.rows, g[:, -1]
    eta = rows.present(rows.predictor(theta), 0.0)
    data = (rows.weights * learned.energy(eta, rows.y, phi[:, None])).sum(-1)
    return -(data + model.prior_energy(theta) + learned.prior_energy(phi, learned.settled(rows.factors[0])))


def moments_of(theta: Tensor) -> CholeskyGaussian:
    """The Gaussian with the moments of equally likely draws."""
    return CholeskyGaussian.from_moments(theta.mean(0), theta.mT.cov())


def profiled(
    model: MultilevelLogJoint,
    learned: Learned,
    prior: ScalePrior,
    start: float,
    run: Callable[[PrecisionCholeskyGaussian, MultilevelLogJoint], float],
) -> tuple[PrecisionCholeskyGaussian, float, Profile]:
    """Explore a learned parameter."""
    known: dict[float, tuple[float, Coordinates]] = {}
    at_first = model.with_likelihood(learned.at(math.exp(start))).posterior()

    def value(phi: float) -> float:
        if phi not in known:
            if known:  # from the nearest
                at_first.restore(known[min(known, key=lambda other: abs(other - phi))][1])
            elbo = run(at_first, model.with_likelihood(learned.at(math.exp(phi))))
            energy = float(learned.prior_energy(torch.tensor(phi, dtype=torch.float64), prior))
            known[phi] = elbo - energy, at_first.snapshot()
        return known[phi][0]

    best, sd = _peak(value, _coordinate(model, learned, prior, at_first, start))
    nodes = [best]
    for side in (-1, 1):
        phi, step = best, sd
        for _ in range(_MOST):
            phi += side * step
            nodes.append(phi)
            if value(phi) < value(best) - _DEEP:
                break
            step *= _GROWTH
    value(best)
    nodes = sorted(nodes)
    q = at_first
    means = torch.stack([known[phi][1].vector for phi in nodes]).detach()
    like = torch.tensor(nodes, dtype=torch.float64)
    q.restore(known[best][1])
    return q, best, Profile(like, torch.tensor([value(phi) for phi in nodes], dtype=torch.float64), means)


def _coordinate(
    model: MultilevelLogJoint, learned: Learned, prior: ScalePrior, q: PrecisionCholeskyGaussian, start: float
) -> float:
    """The best φ beside q as it is, from three ever finer searches."""
    rows = model.rows
    eta, variance = rows.present(rows.predictor(q.mean), 0.0), rows.present(rows.variances(q.frame().marginals()), 1.0)
    reach, best = 3.0, start
    for _ in range(3):
        values = {}
        for phi in (best + reach * x / 6 for x in range(-6, 7)):
            moments = learned.at(math.exp(phi)).expected(eta, variance, rows.y)
            energy = learned.prior_energy(torch.tensor(phi, dtype=torch.float64), prior)
            values[phi] = float((rows.weights * moments.value).sum()) + float(energy)
        best = min(values, key=lambda phi: values[phi])
        reach /= 4
    return best


def _peak(value: Callable[[float], float], start: float) -> tuple[float, float]:
    """The maximum of a function by parabolas through three points, and the length on which it falls by half a nat."""
    best, step = start, 0.3
    for _ in range(_SEARCH):
        left, here, right = value(best - step), value(best), value(best + step)
        bend = (2 * here - left - right) / step**2
        if bend <= 0:
            best += 3 * step if right > left else -3 * step
            step *= 1.5
            continue
        move, sd = 0.5 * (right - left) / (bend * step), bend**-0.5
        move = max(-3 * step, min(3 * step, move))
        if abs(move) < 0.3 * sd:
            return best + move, min(sd, 1.0)
        best, step = best + move, max(0.2 * step, min(sd, 2 * step))
    return best, min(step, 1.0)


def splined(
    x: Tensor,  # (J,), rising
    y: Tensor,  # (J,)
    at: Tensor,  # (S,)
) -> Tensor:
    """The natural cubic spline through J points.

    >>> x = torch.linspace(0, 1, 5, dtype=torch.float64)
    >>> splined(x, 2 * x, torch.tensor([0.3], dtype=torch.float64)).item()
    0.6
    """
    h, count = x.diff(), len(x)
    A, right = torch.eye(count, dtype=x.dtype), torch.zeros_like(y)
    for j in range(1, count - 1):
        A[j, j - 1 : j + 2] = torch.stack([h[j - 1], 2 * (h[j - 1] + h[j]), h[j]]) / 6
        right[j] = (y[j + 1] - y[j]) / h[j] - (y[j] - y[j - 1]) / h[j - 1]
    second = torch.linalg.solve(A, right)
    k = torch.searchsorted(x, at).clamp(1, count - 1)
    low, high = (x[k] - at) / h[k - 1], (at - x[k - 1]) / h[k - 1]
    bend = (low**3 - low) * second[k - 1] + (high**3 - high) * second[k]
    return low * y[k - 1] + high * y[k] + bend * h[k - 1].square() / 6
