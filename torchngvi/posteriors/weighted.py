"""The state of a mixture of Gaussians: K components as one batch, their weights, and what such a posterior refuses."""

import math
from collections.abc import Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from torchngvi.arguments import read_tensor
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Coordinates, Expectation, Move, Posterior
from torchngvi.numerics.inference_mode import tracked
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures.no_matrix import NoMatrix
from torchngvi.structures.pattern import Structured


class Placed(Coordinates):
    """A copy of the weights, and of the coordinates of the components."""

    components: Coordinates


class WeightedGaussians(Posterior):
    """K Gaussians with weights, in buffers: abstract, the ground of `Mixture`.

    There is no mean with one root, so no frame and no move: `torchngvi.optim` moves the components, a batch of
    Gaussians.

    Raises:
        InputError: components of another batch shape, or weights that are none.

    >>> from torchngvi import CholeskyGaussian
    >>> from torchngvi.posteriors import Mixture
    >>> q = Mixture(CholeskyGaussian(1, (2,)))
    >>> isinstance(q, WeightedGaussians), len(q), sorted(q.state_dict())
    (True, 2, ['components.mean', 'components.scale_tril', 'log_weights'])
    """

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
        probe = torch.zeros(self.dim, dtype=like.dtype, device=like.device)
        self.register_buffer("no_matrix", probe[:0].clone(), persistent=False)
        self.register_buffer("mean_probe", probe.requires_grad_(), persistent=False)
        self.register_buffer("root_probe", torch.zeros_like(self.no_matrix, requires_grad=True), persistent=False)

    def __len__(self) -> int:
        """The number K of components."""
        return len(self.log_weights)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and of the components."""
        return self.log_weights.dtype

    @property
    def device(self) -> torch.device:
        """The device that the weights and the components are on."""
        return self.log_weights.device

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
        raise PairError(
            "a Mixture has no mean with one root, and no step of its own. Its components have: use q.components, with "
            "MixtureIntegrand(q, log_joint) of torchngvi.models as their target; or torchngvi.fit(q, log_joint)."
        )

    frame = probed = _refuse

    def unframe(self, a: Tensor, W: Structured) -> tuple[Tensor, Structured]:
        """Refuse, since there is no frame."""
        self._refuse()

    def tangent(self, e: Expectation) -> Coordinates:
        """Refuse: the components and the weights have natural gradients of their own."""
        self._refuse()

    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """Refuse: the components move, and `reweigh_` moves the weights."""
        self._refuse()

    def entropy(self) -> Tensor:
        """Refuse, since the entropy of a mixture is not known in closed form.

        Raises:
            PairError: always.
        """
        raise PairError(
            "the entropy of a Mixture is not known in closed form. Take it from draws: "
            "-q.log_prob(q.sample(10000)).mean()."
        )


@torch.no_grad()
def overlaps(components: Gaussian) -> Tensor:
    """The overlaps ∫√(N_j N_k) of all pairs of Gaussians (Bhattacharyya's coefficients), 1 for two that are the same.

    >>> from torchngvi import CholeskyGaussian
    >>> round(overlaps(CholeskyGaussian(1, (2,), mean=torch.tensor([[0.0], [2.0]])))[0, 1].item(), 4)  # exp(-½)
    0.6065
    """
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
