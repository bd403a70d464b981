"""Posteriors over one flat vector λ: any distribution with a density, draws and scores.

The coordinates are λ and no matrix.  There is no mean and no root, so no frame: the gradient that passes through the
axes is ∇L in λ itself, the entropy in it, and the natural gradient is I_F⁻¹∇L with I_F = E[φφᵀ], φ = ∇_λ log q_λ(θ)
(Godichon-Baggioni, Nguyen and Tran 2023, Eq 3.1), which depends on q alone, never on data.  Where I_F is known in
closed form `NaturalGradient` follows it; elsewhere `RootGradient` follows the gradient as a metric has bent it.

Everything here takes λ from the buffer ``vector``, with the probe added where gradients are recorded, or from ``at``
where another point is asked for: the average of the iterates, or a trial.
"""

from abc import abstractmethod
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor

from torchngvi.arguments import read_generator, shown
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Coordinates, Expectation, Frame, Framed, Local, Move, RootTangent, Tangent
from torchngvi.numerics.arrays import tracked
from torchngvi.posteriors.shapes import ProbedPosterior, Shape, sizes
from torchngvi.structures.pattern import NoMatrix, Structured

# What flat posteriors draw, and the checks of their starts


def gammas(
    shape: Shape,
    a: Tensor,  # (*batch,), positive
    generator: torch.Generator | None,
) -> Tensor:  # (*shape, *batch)
    """Draw from Gamma(a, 1), for each entry of the shape parameters a, without a gradient."""
    draw: Any = torch._standard_gamma  # torch.distributions takes no generator
    generator = read_generator("generator", generator, a.device)
    return draw(a.detach().expand((*sizes(shape), *a.shape)).contiguous(), generator=generator)


def check_start(posterior: str, **parts: Any) -> None:
    """Check that the parts of a start, which are named by the keywords, are floating-point vectors or matrices."""
    for name, part in parts.items():
        numeric = isinstance(part, Tensor) and part.ndim > 0 and part.is_floating_point() and not part.is_meta
        if not numeric:
            got = f"{part.dtype} of shape {tuple(part.shape)}" if isinstance(part, Tensor) else shown(part)
            raise InputError(
                f"{posterior} starts at floating-point tensors ({', '.join(parts)}), such as torch.zeros(4); got "
                f"{name} = {got}."
            )
    kinds = {(part.dtype, part.device) for part in parts.values()}
    if len(kinds) > 1:
        got = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise InputError(f"{posterior} starts at tensors of one dtype on one device; got {got}.")


def check_shapes(posterior: str, mean: Tensor, **shapes: tuple[Tensor, tuple[int, ...]]) -> None:
    """Check the shapes of the parts of a start beside its mean, (*batch, d)."""
    for name, (part, shape) in shapes.items():
        if part.shape != shape:
            raise InputError(
                f"{posterior} with a mean of shape {tuple(mean.shape)} needs {name} of shape {tuple(shape)}; got "
                f"{tuple(part.shape)}."
            )


class FlatPosterior(ProbedPosterior):
    """A distribution q_λ(θ) with its density, draws and scores, over one flat vector λ: abstract.

    λ may have batch dimensions: many runs side by side, each with draws of its own.  It is a buffer behind a probe, as
    the coordinates of every posterior: ``parameters()`` is empty, and a loss that is computed from ``rsample`` or
    ``log_prob`` leaves its gradient in λ in ``mean_probe.grad``.  In all methods ``at`` is another λ to stand at.

    Args:
        vector: the start, (*batch, D), floating-point with finite entries inside the domain.
        dim: d, the number of latent variables θ.

    Raises:
        InputError: a start that cannot be used.

    >>> from torchngvi.posteriors.flat import Beta
    >>> isinstance(Beta(torch.ones(2)), FlatPosterior)
    True
    """

    takes = frozenset({Tangent, RootTangent})
    framed = False
    upper = False
    engine = "flat"
    reparametrised = False  # whether rsample exists
    flat = True  # no manifold: λ may be averaged
    vector: Tensor
    no_matrix: Tensor

    @tracked
    def __init__(
        self,
        vector: Tensor,  # (*batch, D)
        dim: int,
    ) -> None:
        super().__init__()
        self.dim = dim
        check_start(type(self).__name__, vector=vector)
        if not vector.numel() or not bool(vector.isfinite().all()):
            raise InputError(
                f"{type(self).__name__} starts at a vector of finite floating-point numbers; got {vector}."
            )
        self._place(vector)
        if not bool(self.in_domain().all()):
            raise InputError(
                f"{type(self).__name__} starts outside its domain: {self.domain}. Got {self.vector.tolist()}."
            )

    def _place(self, vector: Tensor) -> None:
        """New buffers for λ, its probe, and the matrix that it has not."""
        vector = vector.detach().clone(memory_format=torch.contiguous_format)
        self.batch_shape = vector.shape[:-1]
        self.structure = NoMatrix(vector.shape[-1])
        self.register_buffer("vector", vector)
        self.register_buffer("no_matrix", vector.new_zeros(*self.batch_shape, 0), persistent=False)
        self._add_probes(vector, self.no_matrix)

    def extra_repr(self) -> str:
        """Describe the posterior for ``repr``: the length of its vector, its batch, its dtype.

        >>> from torchngvi.posteriors.flat import Gamma
        >>> Gamma(torch.ones(5, 2))
        Gamma(2, batch_shape=(5,), dtype=torch.float32)
        """
        batch = f", batch_shape={tuple(self.batch_shape)}" if self.batch_shape else ""
        return f"{self.size}{batch}, dtype={self.dtype}"

    domain = "every entry is finite"  # in words, for messages

    @property
    def size(self) -> int:
        """The length D of the vector λ."""
        return self.vector.shape[-1]

    def point(self, at: Tensor | None) -> Tensor:
        """Return λ, differentiable in the probe, or the point that is asked for."""
        if at is not None:
            return at
        return self.vector + self.mean_probe if torch.is_grad_enabled() else self.vector

    def at(self, vector: Tensor) -> Self:
        """Return a copy of this posterior that stands at another λ."""
        new = deepcopy(self)
        new._place(vector)
        return new

    # -------------------------------------------------------------------------------- what a posterior must say

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ without a gradient, (*shape, *batch, d), where a number of draws n stands for the shape (n,)."""
        with torch.no_grad():
            return self.rsample(shape, generator, at)

    @abstractmethod
    def log_prob(
        self,
        theta: Tensor,  # (*sample, *batch, d)
        at: Tensor | None = None,
    ) -> Tensor:  # (*sample, *batch)
        """Compute log q_λ(θ), (*sample, *batch), differentiable in λ and θ."""

    @abstractmethod
    def score(
        self,
        theta: Tensor,  # (*sample, *batch, d)
        at: Tensor | None = None,
    ) -> Tensor:  # (*sample, *batch, D)
        """Compute φ = ∇_λ log q_λ(θ), (*sample, *batch, D); on a manifold its tangent part."""

    def rsample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = T(ε, λ), (*shape, *batch, d), differentiable in λ.

        Raises:
            PairError: a posterior without such a map.
        """
        raise PairError(
            f"{type(self).__name__} has no map from noise to draws. Use the estimator ControlVariate(draws)."
        )

    def in_domain(self, at: Tensor | None = None) -> Tensor:  # (*batch,)
        """Say where λ is a distribution, (*batch,)."""
        return self.point(at).isfinite().all(-1)

    def projected(
        self,
        at: Tensor,  # (*batch, D)
        vector: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Project a direction on the tangent space of the manifold that λ lies on: here the direction itself."""
        return vector

    def retracted(
        self,
        at: Tensor,  # (*batch, D)
        change: Tensor,  # (*batch, D)
    ) -> Tensor:
        """Compute λ after a step: λ + change, brought back to the manifold or clamped where the class says so."""
        return at + change

    def exact_fisher_solve(
        self,
        gradient: Tensor,  # (*batch, D)
        at: Tensor | None = None,
    ) -> Tensor:
        """Compute I_F⁻¹ times a gradient in closed form, (*batch, D); NaN for members where I_F is singular.

        Raises:
            PairError: a posterior whose Fisher matrix is not known, or is singular everywhere.
        """
        raise PairError(
            f"the Fisher matrix of {type(self).__name__} is not known in closed form. Use IFVB, or BatchFisher."
        )

    # -------------------------------------------------------------------------------- as every posterior

    @property
    def mean(self) -> Tensor:  # (*batch, d)
        """The mean of θ under q, (*batch, d), where it is known; PairError elsewhere."""
        raise PairError(f"the mean of {type(self).__name__} is not known. Take it from draws, q.sample(10000).mean(0).")

    @property
    def variance(self) -> Tensor:  # (*batch, d)
        """The marginal variances of θ under q, (*batch, d), where they are known; PairError elsewhere."""
        raise PairError(
            f"the variance of {type(self).__name__} is not known. Take it from draws, q.sample(10000).var(0)."
        )

    @property
    def coordinates(self) -> Coordinates:
        """The buffer λ, and an empty matrix."""
        return Coordinates(self.vector, self.no_matrix)

    def frame(self) -> Frame:
        """Refuse, since there is no mean and no root.

        Raises:
            PairError: always.
        """
        raise PairError(
            f"{type(self).__name__} is a vector of parameters, with no mean and no root to be read. Use an estimator "
            "of torchngvi.ifvb such as Pathwise(10) or ControlVariate(100), and draws by sample or rsample."
        )

    probed = frame

    def unframe(self, a: Tensor, W: Structured) -> tuple[Tensor, Structured]:
        """Return the gradient itself, which is in λ already."""
        return a, W

    def local(self, e: Expectation) -> Local:
        """Return ∇L in λ, projected on the manifold where there is one."""
        if not isinstance(e.derivative, Framed | Local):
            self.frame()
            raise AssertionError("frame refuses")
        a, W = e.derivative
        return Local(self.projected(self.vector, a), W)

    def loss(self, e: Expectation) -> Tensor:
        """Return the value itself: what is differentiated in λ holds the entropy already."""
        return e.value

    def norm2(self, local: Local) -> Tensor:
        """Compute the squared natural norm ∇LᵀI_F⁻¹∇L, (*batch,), where I_F is known."""
        return (local.a * self.exact_fisher_solve(local.a)).sum(-1).clamp_min(0.0)  # where it is all rounding

    def tangent(self, e: Expectation) -> Coordinates:
        """Compute the natural gradient I_F⁻¹∇L, where I_F is known."""
        gradient = self.local(e)
        return Coordinates(self.projected(self.vector, self.exact_fisher_solve(gradient.a)), gradient.P)

    def euclidean(self, e: Expectation) -> Coordinates:
        """Return ∇L, or what a metric has made of it."""
        return Coordinates(*self.local(e))

    def carried(self, vector: Tensor) -> Tensor:
        """Project a change of an earlier step on the manifold at this λ."""
        return self.projected(self.vector, vector)

    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """Compute λ after a tangent, and where it is finite and inside the domain."""
        assert isinstance(move, Tangent)  # `takes` refuses others before
        change, new = move.change.vector, self.retracted(self.vector, move.change.vector)
        ok = new.isfinite().all(-1) & change.isfinite().all(-1) & self.in_domain(new)
        return Coordinates(new, self.no_matrix), ok

    def entropy(self) -> Tensor:
        """Refuse, since the entropy is not known in closed form.

        Raises:
            PairError: always.
        """
        raise PairError(
            f"the entropy of {type(self).__name__} is not known in closed form. Write the loss with log q at draws: "
            "theta = q.rsample(10); loss = (q.log_prob(theta) - log_joint(theta)).mean()."
        )
