"""Mixtures of Gaussians: q(θ) = Σ_k π_k N(θ; m_k, V_k), the components in whatever coordinates a Gaussian has here.

The components are one Gaussian with the batch shape (K,), so that rules and estimators move all of them in one call.
What is to be approximated by component k is h = log p - log q, the same function for all k: with the Fisher matrix of
the allocation and θ together the factors π_k cancel (Lin, Khan and Schmidt 2019), and

    component k     a natural-gradient step of the Gaussian rule on h, see `torchngvi.models.MixtureIntegrand`
    weights         log π_k' = log π_k + ρ E_k h + const, see `Mixture.reweigh_`

At a fixed point the gradients of all components vanish, and all E_k h are equal, to the ELBO.
"""

import math
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, Self

import torch
from torch import Tensor

from torchngvi.arguments import read_generator, read_tensor
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Coordinates
from torchngvi.numerics.arrays import tracked, writable
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors.gaussian import CholeskyGaussian, Gaussian
from torchngvi.posteriors.shapes import ProbedPosterior, Shape, refused, sizes
from torchngvi.structures.pattern import NoMatrix

_REFUSAL = (
    "a Mixture has no mean with one root, and no step of its own. Its components have: use q.components, with "
    "MixtureIntegrand(q, log_joint) of torchngvi.models as their target; or torchngvi.fit(q, log_joint)."
)

# The state of a mixture of Gaussians: K components as one batch, their weights, and what such a posterior refuses


class Placed(Coordinates):
    """A copy of the weights, and of the coordinates of the components."""

    components: Coordinates


class WeightedGaussians(ProbedPosterior):
    """K Gaussians with weights, in buffers, with no mean and root of their own: abstract, the ground of `Mixture`."""

    takes = frozenset()  # of its components, not of the mixture
    framed = False
    upper = False
    domain = "positive weights, and positive definite covariances"
    components: Gaussian
    log_weights: Tensor
    no_matrix: Tensor

    @tracked
    def __init__(self, components: Gaussian, weights: Tensor | Sequence[float] | None = None) -> None:
        super().__init__()
        if not isinstance(components, Gaussian) or len(components.batch_shape) != 1:
            got = type(components).__name__
            if isinstance(components, Gaussian):
                got = f"{got} of batch shape {tuple(components.batch_shape)}"
            raise InputError(
                f"the components of a Mixture are one Gaussian of batch shape (K,), such as CholeskyGaussian(3, (2,)) "
                f"for two of them; got {got}."
            )
        number = components.batch_shape[0]
        self.dim, self.batch_shape, self.structure = components.dim, torch.Size(), NoMatrix(components.dim)
        self.components = components
        like = components.mean_probe.detach()[..., 0]
        log_weights = torch.full_like(like, -math.log(number)) if weights is None else _checked(weights, like).log()
        self.register_buffer("log_weights", log_weights)
        self.register_buffer("no_matrix", like.new_zeros(0), persistent=False)
        self._add_probes(like.new_zeros(self.dim), self.no_matrix)

    def __len__(self) -> int:
        """The number K of components."""
        return len(self.log_weights)

    @property
    def weights(self) -> Tensor:
        """The weights π, (K,)."""
        return self.log_weights.exp()

    @property
    def coordinates(self) -> Coordinates:
        """The buffer log π, and an empty matrix; those of the components are ``q.components.coordinates``."""
        return Coordinates(self.log_weights, self.no_matrix)

    def snapshot(self) -> Placed:
        """Copy weights and components, for `restore`."""
        new = Placed(*super().snapshot())
        new.components = self.components.snapshot()
        return new

    def assign(self, new: Coordinates, where: Tensor) -> None:
        """Write weights, and the components that a snapshot holds."""
        super().assign(new, where)
        if isinstance(new, Placed):
            self.components.assign(new.components, where.expand(self.components.batch_shape))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.components._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def _refuse(self, *_: Any) -> NoReturn:
        """Refuse what only one Gaussian has."""
        raise PairError(_REFUSAL)

    frame = probed = _refuse
    unframe, tangent, moved = refused(_REFUSAL, "unframe", "tangent", "moved")

    def entropy(self) -> Tensor:
        """Refuse, since the entropy of a mixture is not known in closed form."""
        raise PairError(
            "the entropy of a Mixture is not known in closed form. Take it from draws: "
            "-q.log_prob(q.sample(10000)).mean()."
        )


@torch.no_grad()
def overlaps(components: Gaussian) -> Tensor:
    """Compute ∫√(N_j N_k) of all pairs of Gaussians (Bhattacharyya's coefficients), 1 for two that are the same."""
    mean, V = components.frame().mean, components.covariance
    between, _ = cholesky(0.5 * (V[:, None] + V))
    apart = torch.linalg.solve_triangular(between, (mean[:, None] - mean)[..., None], upper=False)
    log_det = components.log_det_root()
    mixed = between.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return (0.5 * (log_det[:, None] + log_det) - mixed - 0.125 * apart.square().sum((-2, -1))).exp()


def _checked(weights: Any, like: Tensor) -> Tensor:
    """The weights as a tensor, after a check that they are some."""
    given = read_tensor("weights", weights, like=like).detach()
    right = given.shape == like.shape and bool((given > 0).all()) and abs(float(given.sum()) - 1) < 1e-4
    if not right:
        raise InputError(f"weights are {len(like)} positive numbers with the sum 1; got {weights}.")
    return given / given.sum()


class FoundMode(Protocol):
    """What is asked of a mode: where it is, a root of the covariance there, and Laplace's log evidence."""

    @property
    def theta(self) -> Tensor:
        """The mode, (D,)."""

    @property
    def root(self) -> Tensor:
        """The lower factor of the covariance, (D, D)."""

    @property
    def log_evidence(self) -> float:
        """Laplace's log evidence in nats."""


class Mixture(WeightedGaussians):
    """The mixture Σ_k π_k N(m_k, V_k) of K Gaussians over D coordinates, in any coordinates of a Gaussian.

    Take it for a density with several modes, or of a shape that a few Gaussians make up; not for one that is skewed or
    curved, where components are basis functions and a warp or a fan does better with fewer numbers.  `torchngvi.fit`
    finds components and weights together, from where they are: start at the modes, `of_modes`.

    Args:
        components: a Gaussian with the batch shape (K,), such as ``CholeskyGaussian(D, (K,), mean=...)``.  It is held,
            not copied.
        weights: π, (K,), positive, with the sum 1; equal ones by default.

    Attributes:
        components: the K Gaussians.
        log_weights: the buffer log π, (K,).

    Raises:
        InputError: components of another batch shape, or weights that are none.

    >>> import torch
    >>> from torchngvi.posteriors import CholeskyGaussian, Mixture
    >>> q = Mixture(CholeskyGaussian(1, (2,), mean=torch.tensor([[-3.0], [3.0]])), [0.5, 0.5])
    >>> q
    Mixture(2 x CholeskyGaussian, D = 1, weights 0.5, 0.5)
    >>> q.mean.item(), round(q.variance.item(), 5), q.sample(5).shape
    (0.0, 10.0, torch.Size([5, 1]))
    """

    engine = "mixture"

    # -------------------------------------------------------------------------------- made of others

    @classmethod
    def of(cls, gaussians: Sequence[Gaussian], elbos: Sequence[float] | Tensor | None = None) -> Self:
        """Make the mixture of Gaussians that have been fitted one by one, with the weights softmax(ELBO).

        Where the components do not overlap these weights are the best ones.

        Args:
            gaussians: of one class and one structure, without batch dimensions; they are copied.
            elbos: the ELBO of each in nats; without them the weights are equal.

        Returns:
            The mixture.

        Raises:
            InputError: no Gaussians, Gaussians of several kinds, or another number of ELBOs.

        >>> import torch
        >>> from torchngvi import CholeskyGaussian
        >>> two = [CholeskyGaussian(1), CholeskyGaussian(1, mean=8.0)]
        >>> Mixture.of(two, [-3.0, -3.0 + math.log(3.0)]).weights.round(decimals=4).tolist()
        [0.25, 0.75]
        """
        first, *others = gaussians or (None,)
        alike = isinstance(first, Gaussian) and not first.batch_shape
        if not alike or any(type(q) is not type(first) or q.structure != first.structure for q in others):
            raise InputError(
                "Mixture.of takes Gaussians of one class and one structure, without batch dimensions; got "
                f"{[q if not isinstance(q, Gaussian) else type(q).__name__ for q in gaussians]}."
            )
        assert isinstance(first, Gaussian)
        components = first._of(
            torch.stack([q.frame().mean for q in gaussians]),
            torch.ones(len(gaussians), first.dim, dtype=first.dtype, device=first.device),
            first.structure,
        )
        places = zip(*(q.coordinates for q in gaussians), strict=True)
        components.restore(Coordinates(*(torch.stack(part) for part in places)))
        if elbos is None:
            return cls(components)
        values = torch.as_tensor(writable(elbos), dtype=first.dtype, device=first.device)
        if values.shape != (len(gaussians),) or not bool(values.isfinite().all()):
            raise InputError(f"elbos has one finite number a Gaussian, {len(gaussians)} of them; got {elbos}.")
        return cls(components, values.softmax(0))

    @classmethod
    def of_modes(cls, modes: Sequence[FoundMode], overlap: float = 0.95) -> Self:
        """Make the mixture of Laplace's Gaussians at modes, with the weights softmax(log evidence).

        Modes whose Gaussians overlap by more than ``overlap`` are one mode that was found several times.

        Args:
            modes: what `torchngvi.mode.find_modes` returned, without None.
            overlap: the largest ∫√(N_j N_k) of two components.

        Returns:
            The mixture, the component of the largest weight first.

        Raises:
            InputError: no modes.

        >>> import torch
        >>> from torchngvi.mode import find_modes
        >>> from torchngvi.models import LogJoint
        >>> two = LogJoint(lambda x: torch.logaddexp(-8 * (x + 1).square(), -8 * (x - 1).square() + 1).sum(-1))
        >>> starts = torch.tensor([[-2.0], [0.5], [2.0]], dtype=torch.float64)
        >>> q = Mixture.of_modes(find_modes(two, starts, 100))
        >>> q.components.mean.flatten().round(decimals=3).tolist(), q.weights.round(decimals=2).tolist()
        ([1.0, -1.0], [0.73, 0.27])
        """
        if not modes:
            raise InputError("Mixture.of_modes takes at least one mode; got none. Search from other starts.")
        found = sorted(modes, key=lambda mode: -mode.log_evidence)
        mean, root = (torch.stack([getattr(mode, name) for mode in found]) for name in ("theta", "root"))
        evidence = torch.tensor([mode.log_evidence for mode in found], dtype=mean.dtype, device=mean.device)
        every = CholeskyGaussian(mean.shape[-1], mean.shape[:1], mean=mean, scale=root)
        kept: list[int] = []
        near = overlaps(every) > overlap
        for k in range(len(found)):
            if not any(bool(near[k, other]) for other in kept):
                kept.append(k)
        components = CholeskyGaussian(mean.shape[-1], (len(kept),), mean=mean[kept], scale=root[kept])
        return cls(components, evidence[kept].softmax(0))

    # -------------------------------------------------------------------------------- the distribution

    def __repr__(self) -> str:
        """The number and the kind of the components, with their weights."""
        weights = ", ".join(f"{weight:.2g}" for weight in self.weights.tolist())
        return f"Mixture({len(self)} x {type(self.components).__name__}, D = {self.dim}, weights {weights})"

    def log_each(self, theta: Tensor) -> Tensor:
        """Compute log π_k N(θ; m_k, V_k) of each component, (*sample, K), differentiable in θ.

        Args:
            theta: where, (*sample, D).

        Returns:
            The logarithms of the summands of the density, (*sample, K).

        Raises:
            InputError: θ of another width than D.
        """
        if theta.shape[-1] != self.dim:
            raise InputError(f"theta must end in D = {self.dim}; got shape {tuple(theta.shape)}.")
        apart = theta[..., None, :].expand(*theta.shape[:-1], len(self), self.dim)
        return self.components.log_prob(apart) + self.log_weights

    def log_prob(self, theta: Tensor) -> Tensor:
        """Compute log q(θ), (*sample,), differentiable in θ.

        Args:
            theta: where, (*sample, D).

        Returns:
            The log densities, (*sample,).

        Raises:
            InputError: θ of another width than D.

        >>> from torchngvi import CholeskyGaussian
        >>> round(Mixture(CholeskyGaussian(2, (3,))).log_prob(torch.zeros(2)).item(), 4)  # -log 2π, thrice the same
        -1.8379
        """
        return self.log_each(theta).logsumexp(-1)

    def responsibilities(
        self,
        theta: Tensor,  # (*sample, D)
    ) -> Tensor:
        """Compute the probabilities r_k(θ) = π_k N_k(θ)/q(θ) that θ came from each component, (*sample, K).

        >>> from torchngvi import CholeskyGaussian
        >>> q = Mixture(CholeskyGaussian(1, (2,), mean=torch.tensor([[-1.0], [1.0]])))
        >>> q.responsibilities(torch.zeros(1)).tolist()
        [0.5, 0.5]
        """
        return self.log_each(theta).softmax(-1)

    @torch.no_grad()
    def sample(self, shape: Shape = (), generator: torch.Generator | None = None) -> Tensor:
        """Draw θ ~ q.

        Args:
            shape: the shape of the sample, or a number of draws.
            generator: the source of the noise; torch's default generator if None.

        Returns:
            Draws, (*shape, D).

        Raises:
            InputError: if the shape is neither.
        """
        size = sizes(shape)
        number = math.prod(size)
        if not number:
            return self.log_weights.new_empty(*size, self.dim)
        generator = read_generator("generator", generator, self.log_weights.device)
        member = torch.multinomial(self.weights, number, replacement=True, generator=generator)
        each = self.components.sample((number,), generator)
        return each[torch.arange(number, device=member.device), member].reshape(*size, self.dim)

    @property
    def mean(self) -> Tensor:
        """The mean Σ π_k m_k, (D,)."""
        return self.weights @ self.components.frame().mean

    @property
    def covariance(self) -> Tensor:
        """The covariance Σ π_k (V_k + (m_k - m)(m_k - m)ᵀ), (D, D)."""
        apart = self.components.frame().mean - self.mean
        return torch.einsum("k,kij->ij", self.weights, self.components.covariance) + (apart.mT * self.weights) @ apart

    @property
    def variance(self) -> Tensor:
        """The marginal variances, (D,)."""
        apart = self.components.frame().mean - self.mean
        return self.weights @ (self.components.variance + apart.square())

    # -------------------------------------------------------------------------------- steps

    @torch.no_grad()
    def reweigh_(self, gains: Tensor, lr: float = 1.0, trust: float = 0.7) -> Tensor:
        """Take a natural-gradient step of the weights, log π_k' = log π_k + ρ E_k h + const.

        Args:
            gains: E_k h with h = log p - log q, (K,), in nats.
            lr: the largest ρ; where a gain is NaN the weights stay as they are.
            trust: the largest length ρ √(Σ π_k (E_k h - mean)²) of the step in the metric of Fisher.

        Returns:
            ρ, a scalar tensor.

        >>> from torchngvi import CholeskyGaussian
        >>> q = Mixture(CholeskyGaussian(1, (2,)))
        >>> q.reweigh_(torch.tensor([0.1, 0.1 + math.log(3.0)])).item(), q.weights.round(decimals=4).tolist()
        (1.0, [0.25, 0.75])
        """
        weights = self.weights
        length = (weights * (gains - weights @ gains).square()).sum().sqrt()
        rho = torch.clamp(trust / length, max=lr)
        new = (self.log_weights + rho * gains).log_softmax(0)
        self.log_weights.copy_(torch.where(new.isnan().any(), self.log_weights, new))
        return rho
