"""The optimum q* as a differentiable function of all that its target holds, by the implicit function theorem.

At the optimum the gradient r of L in (m, C) vanishes, whatever the target's tensors φ are, so that H dq = -∂_φ r dφ
with H the Hessian of L in (m, C).  For a function of q*
with the cotangents (m̄, C̄), brought into the frame as u, this gives

    H (δ, T) = u        φ̄ = -∂_φ s(φ)        s(φ) = d/dε L_φ(m + εCδ, C + εCT)    with m, C, δ and T held fixed

One system is solved by conjugate gradients, whose products need no expectation, and one scalar is differentiated:
nothing of the fit is recorded (Blondel et al. 2022, Efficient and modular implicit differentiation).
"""

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from torchngvi.errors import InputError, PairError
from torchngvi.fitting.fit import fit
from torchngvi.interfaces import Frame, TractableTarget
from torchngvi.models.arguments import read_posterior
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.rules.root_system import Direction
from torchngvi.solved.system import response
from torchngvi.structures import FullAlgebra

_TOLERANCE = {torch.float64: 1e-8}  # natural-gradient norm of the fit: derivatives are wrong by about as much
_COARSE = 1e-3  # of the other dtypes


class Solution(NamedTuple):
    """The optimum q*, as tensors in the graph of what the target was made of.

    Attributes:
        mean: m, (*batch, D).
        scale_tril: C, (*batch, D, D), lower triangular with V = C Cᵀ.
        elbo: the evidence lower bound at q*, (*batch,), in nats.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> model = GeneralizedLinear(torch.ones(3, 1).double(), [1.0, 2.0, 3.0], "gaussian")
    >>> found = solve(CholeskyGaussian(1, dtype=torch.float64), model)
    >>> round(found.mean.item(), 6), round(found.covariance.item(), 6)
    (1.5, 0.25)
    """

    mean: Tensor  # (*batch, D)
    scale_tril: Tensor  # (*batch, D, D)
    elbo: Tensor  # (*batch,)

    @property
    def covariance(self) -> Tensor:
        """V = C Cᵀ, (*batch, D, D)."""
        return self.scale_tril @ self.scale_tril.mT

    @property
    def stddev(self) -> Tensor:
        """The standard deviations, (*batch, D)."""
        return self.scale_tril.norm(dim=-1)

    @property
    def distribution(self) -> MultivariateNormal:
        """The Gaussian as a distribution of torch, whose draws and densities are in the graph too."""
        return MultivariateNormal(self.mean, scale_tril=self.scale_tril)


def solve(
    q: Gaussian,
    target: TractableTarget,
    tolerance: float | None = None,
) -> Solution:
    """Fit q to its optimum, and return the optimum as a differentiable function of all that the target was made of.

    One wants it to choose what a posterior depends on by what comes out: prior scales by a held-out score, a design by
    the covariance that it leaves, or to say by how much a conclusion moves with the prior.  Give the model tensors that
    require grad, or were computed from such: the design, the targets, weights, offset, precision and mean of the prior.
    Derivatives are exact up to about the tolerance.  To maximise the evidence lower bound itself less is enough: its
    derivative needs no system, only the last line of it, and ``elbo`` takes that way.

    Args:
        q: over a structure with all products (dense, diagonal, blocks), with any start; it is fitted in place.
        target: a `GeneralizedLinear` with a dense design and a log-concave likelihood, a `SoftmaxRegression`, or a
            target of one's own whose packets tell how they change with q.
        tolerance: on the natural-gradient norm; by default 1e-8 in float64, and 1e-3 in float32.

    Returns:
        The optimum.  It has first derivatives.

    Raises:
        PairError: a target without known changes, or a q without all products.
        InputError: a fit that does not reach the tolerance; later, in the backward pass, a system that cannot be solved
            as accurately, data that were written to since, or second derivatives.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> X = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], dtype=torch.float64)
    >>> log_precision = torch.zeros((), dtype=torch.float64, requires_grad=True)
    >>> model = GeneralizedLinear(X, [0.0, 0.0, 1.0, 1.0], prior_precision=log_precision.exp())
    >>> found = solve(CholeskyGaussian(2, dtype=torch.float64), model)
    >>> found.mean[1].backward()  # by how much the slope moves with the logarithm of the precision
    >>> round(found.mean[1].item(), 4), round(log_precision.grad.item(), 4)
    (0.741, -0.4274)
    """
    read_posterior("solve", q, target)
    if not isinstance(target, TractableTarget) or not target.curved:
        raise PairError(
            "solve differentiates through targets whose packets tell how they change with q: a GeneralizedLinear with "
            "a dense X and a log-concave likelihood, or a SoftmaxRegression, at a temperature above 0; got "
            f"{_described(target)}."
        )
    if not isinstance(q, Gaussian) or not isinstance(q.structure, FullAlgebra):
        raise PairError(
            f"solve takes a Gaussian over a structure with all products: dense, diagonal or blocks; got {q!r}."
        )
    limit = _TOLERANCE.get(q.dtype, _COARSE) if tolerance is None else tolerance
    result = fit(q, target, tolerance=limit, progress=False)
    if not result.converged:
        raise InputError(
            f"solve needs q at its optimum, to a natural-gradient norm of {limit:.2g}, and the fit ended at "
            f"{result.norm:.2g}: {result.reason} Use float64, or pass a larger tolerance: derivatives are wrong by "
            "about as much."
        )
    q, attached = copy.deepcopy(q), target.attached()  # the user's q may go elsewhere before the backward pass
    frame = q.frame()
    tensors = [x for x in attached.tensors() if x.requires_grad]
    here = _Here(q, target, attached, frame, tensors, limit, _writes(target))
    if tensors and torch.is_grad_enabled():
        mean, root = _Implicit.apply(here, *tensors)
        elbo = _Once.apply(here.entropy() - attached.expected_energy(frame)[0])
    else:
        mean, root = frame.mean.clone(), frame.root.clone()
        elbo = here.entropy() - target.expected_energy(frame)[0]
    dense = replace(frame, mean=mean, root=root).dense()
    return Solution(mean, torch.linalg.cholesky(dense @ dense.mT) if frame.upper else dense, elbo)


def _described(target: Any) -> str:
    likelihood = getattr(target, "likelihood", None)
    return type(target).__name__ + (f" with {type(likelihood).__name__}" if likelihood is not None else "")


class _Here(NamedTuple):
    """An optimum and what it was made of."""

    q: Gaussian
    target: TractableTarget
    attached: TractableTarget  # the target in the graph
    frame: Frame
    tensors: list[Tensor]  # φ
    tolerance: float
    writes: tuple[int, ...]  # to the tensors of the target, when the optimum was found

    def entropy(self) -> Tensor:
        """The entropy of q, weighed by the temperature, (*batch,)."""
        return self.target.temperature * self.q.entropy().detach()

    def along(self, x: Direction, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        """The direction of the mean and of the stored root, Cδ and CT, at a mean and a root."""
        structure = self.frame.structure
        assert isinstance(structure, FullAlgebra)
        at = replace(self.frame, mean=mean, root=root)
        return at.push(x.delta), structure.matmul(x.T, root) if at.upper else structure.matmul(root, x.T)


def _writes(target: TractableTarget) -> tuple[int, ...]:
    """How often each tensor of a target was written to."""
    return tuple(-1 if x.is_inference() else x._version for x in target.tensors())


def _refuse_second() -> None:
    if torch.is_grad_enabled():
        raise InputError(
            "solve has first derivatives only: leave out create_graph=True, and take second ones by differences."
        )


class _Once(torch.autograd.Function):
    """The identity, whose derivative has no graph: that of the largest bound moves with the optimum too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        _refuse_second()
        return cotangents[0]


class _Implicit(torch.autograd.Function):
    """The mean and the stored root of q*, as functions of the tensors of its target."""

    @staticmethod
    def forward(ctx: Any, here: _Here, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.here = here
        return here.frame.mean.clone(), here.frame.root.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second()
        here: _Here = ctx.here
        if _writes(here.target) != here.writes:
            raise InputError(
                "the data of the model were written to between solve and the backward pass, so that its optimum is "
                "another one now: clone what is to be changed in place."
            )
        with torch.enable_grad():
            x = _solved(here, *cotangents)
            mean, root = here.frame.mean.clone().requires_grad_(), here.frame.root.clone().requires_grad_()
            energy = here.attached.expected_energy(replace(here.frame, mean=mean, root=root))[0].sum()
            slopes = torch.autograd.grad(energy, (mean, root), create_graph=True)
            ways = here.along(x, mean.detach(), root.detach())
            s = (slopes[0] * ways[0]).sum() + (slopes[1] * ways[1]).sum()
            found = torch.autograd.grad(s, here.tensors, allow_unused=True)
        return None, *(None if part is None else -part for part in found)


def _solved(here: _Here, of_mean: Tensor, of_root: Tensor) -> Direction:
    """Bring the cotangents into the frame, and solve the system."""
    frame, structure = here.frame, here.frame.structure
    assert isinstance(structure, FullAlgebra)
    zero = Direction(torch.zeros_like(frame.mean).requires_grad_(), torch.zeros_like(frame.root).requires_grad_())
    ways = here.along(zero, frame.mean, frame.root)
    delta, T = torch.autograd.grad(ways, (zero.delta, zero.T), (of_mean, of_root))
    return response(here.q, here.target, Direction(delta, structure.tril(T)), here.tolerance)
