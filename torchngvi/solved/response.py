"""How an optimum responds: its linear system, the prior's influence, and derivatives in all that a target holds."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from torchngvi.arguments import read_names
from torchngvi.errors import InputError, PairError
from torchngvi.expectations import Quadrature
from torchngvi.fitting.fit import fit
from torchngvi.fitting.records import FitResult, read_result
from torchngvi.interfaces import AdditiveTractable, Expectation, Frame, Local, Target, TractableTarget
from torchngvi.models import GeneralizedLinear, checks
from torchngvi.models.arguments import read_posterior
from torchngvi.numerics import sparse
from torchngvi.numerics.versions import tracked
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.rules.root_system import Direction, conjugate_gradients, hessian, still_solved
from torchngvi.structures import FullAlgebra

# The linear system of everything that responds: H x = u, with H the Hessian of L in (m, C) at an optimum

_PRODUCTS = 300
_AT_OPTIMUM = 1e-3  # natural-gradient norm of q above which it is no optimum
_FINEST = 1e-8  # the same of fits in float64, and the relative residual of a system


def read_regression(name: str, q: Any, model: Any) -> tuple[Gaussian, GeneralizedLinear]:
    """One dense Gaussian and a regression with one dense design, of which sites of rows can be taken."""
    wants = f"{name} is for a GeneralizedLinear with one dense design and one y; got"
    if not isinstance(model, GeneralizedLinear):
        raise PairError(f"{wants} {type(model).__name__}.")
    X, y = model.X, model.y
    if sparse.is_sparse(X) or X.ndim > 2 or y.ndim > 1:
        raise PairError(f"{wants} X of {tuple(X.shape)}, {X.layout}, and y of {tuple(y.shape)}.")
    if not isinstance(q, Gaussian) or q.batch_shape or q.structure.widest < q.dim:
        raise PairError(
            f"{name} is for one dense Gaussian, since a mean field has no covariances with which other rows could "
            f"respond; got {q!r}."
        )
    check_temperature(name, model)
    return q, model


def check_temperature(name: str, model: Target) -> None:
    """Refuse a model of which q is no posterior."""
    if model.temperature != 1:
        raise InputError(
            f"{name} is of the sites of a posterior, at the temperature 1; this model has {model.temperature:g}."
        )


def check_optimum(what: str, q: Gaussian, norm: float) -> None:
    """Refuse a q whose natural-gradient norm is that of no optimum."""
    if not norm <= _AT_OPTIMUM:
        raise InputError(
            f"{what}, and the natural-gradient norm of q is {norm:.2g}: fit it to this model first, below "
            f"{_AT_OPTIMUM:g}{'' if q.dtype == torch.float64 else ', in float64'}."
        )


def fit_again(q: Gaussian, target: Target) -> FitResult:
    """Fit q in place, in float64 so exactly that it agrees with fits from elsewhere."""
    return fit(q, target, tolerance=_FINEST if q.dtype == torch.float64 else None, progress=False)


@torch.no_grad()
def response(q: Gaussian, target: TractableTarget, u: Direction, tolerance: float, left: float = 100.0) -> Direction:
    """Solve H x = u by conjugate gradients, to so many tolerances at least, whose products need no expectation."""
    frame, structure = q.frame(), q.structure
    assert isinstance(structure, FullAlgebra)
    e: Expectation = Quadrature()(q, target)
    local: Local = q.local(e)
    H, M = hessian(e, local, frame, exact=True), still_solved(e, local, frame)
    x, _ = conjugate_gradients(H, M, u, torch.full_like(e.value, 1e-2 * tolerance), structure, _PRODUCTS)
    beyond = u.plus(torch.full_like(e.value, -1.0), H(x), structure)
    size, rest = u.dot(M(u), structure), beyond.dot(M(beyond), structure)
    error = float(torch.where(size > 0, rest / size, 0.0).amax().sqrt())
    if not error <= left * tolerance:
        raise InputError(
            f"the system of the derivative was solved to a relative residual of {error:.2g} and no further, where "
            f"{left * tolerance:.2g} was asked: L is not convex in (m, C) here, or hardly curved in some way. "
            "Give every coefficient a proper prior, or use float64."
        )
    return x


# By how much a conclusion hangs on the prior: the optimum's derivative in the precision of its prior
#
# With the precision λΛ, the gradient r = (Cᵀg, tril(CᵀHC) - γI) of L in (m, C) moves at λ = 1 by that of the prior
# alone, and the optimum follows as in the linear system above:
#
#     H (δ, T) = -γ (CᵀΛ(m - m₀), tril(CᵀΛC))        dm/d log λ = Cδ        dC/d log λ = CT
#
# One system serves all conclusions (Giordano, Broderick and Jordan 2018, on covariances and robustness).


class Sensitivity(NamedTuple):
    """How the conclusions move if the precision of the prior doubles, in the standard deviations that they have now.

    Attributes:
        shift: of their means, to first order, log 2 times the derivative, (K,).
        spread: of their standard deviations, as a share of these, to first order, (K,).
        true_shift: of their means by a fit with the doubled precision, (K,).
        true_spread: of their standard deviations by that fit, (K,).
        names: of the conclusions.

    >>> print(Sensitivity(*torch.tensor([[0.1, -0.3], [-0.2, -0.1], [0.1, -0.28], [-0.2, -0.1]]), ("age", "weight")))
    If the precision of the prior doubles, weight moves most: by -0.30 of its standard deviations to first order, by \
-0.28 in a fit. Standard deviations change by -20 % to -10 %.
    """

    shift: Tensor
    spread: Tensor
    true_shift: Tensor
    true_spread: Tensor
    names: tuple[str, ...]

    def __str__(self) -> str:
        most = int(self.true_shift.abs().argmax())
        low, high = (100 * float(part) for part in self.true_spread.aminmax())
        return (
            f"If the precision of the prior doubles, {self.names[most]} moves most: by {float(self.shift[most]):.2f} "
            f"of its standard deviations to first order, by {float(self.true_shift[most]):.2f} in a fit. Standard "
            f"deviations change by {low:.0f} % to {high:.0f} %."
        )


@tracked
def sensitivity(result: FitResult, of: Any = None, names: Sequence[str] | None = None) -> Sensitivity:
    """Tell by how much conclusions move if the precision of the prior doubles, in their own standard deviations.

    Use it before a conclusion is reported: what moves by a good part of its standard deviation was said by the
    prior as much as by the data.  The derivative takes one linear system, and a fit with the doubled precision from
    there stands beside it, which shows how far the derivative can be trusted.  For another change of the prior, or of
    one part of it, see `torchngvi.solved.solve`.

    Args:
        result: of `torchngvi.fit`, of a Gaussian over a structure with all products and a `torchngvi.GeneralizedLinear`
            or `torchngvi.models.SoftmaxRegression`; it stays as it is.
        of: the conclusions, linear in the coefficients, (K, D), such as contrasts or rows whose predictor is looked at;
            by default each coefficient.
        names: of the conclusions, K of them; by default those of the result, or their numbers.

    Returns:
        How each conclusion moves.

    Raises:
        PairError: a target or a posterior without known changes.
        InputError: a q that is not at its optimum; conclusions of another size or about nothing; names of another
            number.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
    >>> model = GeneralizedLinear(torch.ones(3, 1).double(), [1.0, 2.0, 3.0], "gaussian")
    >>> result = fit(CholeskyGaussian(1, dtype=torch.float64), model, progress=False)
    >>> print(sensitivity(result))  # 6/4 and 6/5, in units of 1/2
    If the precision of the prior doubles, coefficient 0 moves most: by -0.52 of its standard deviations to first \
order, by -0.60 in a fit. Standard deviations change by -11 % to -11 %.
    """
    q, target = _of(result)
    rows = torch.eye(q.dim, dtype=q.dtype, device=q.mean.device) if of is None else checks.numbers("of", of, q.mean)
    if rows.ndim != 2 or rows.shape[1] != q.dim or not len(rows):
        raise InputError(f"conclusions are rows (K, {q.dim}) of factors of the coefficients; got {tuple(rows.shape)}.")
    if bool((rows == 0).all(-1).any()):
        raise InputError("a conclusion whose factors are all 0 is about no coefficient; leave it out.")
    words = _named(result, names, len(rows), of is None)
    mean, covariance = _derivative(q, target)
    sd = _sd(rows, q.covariance)
    doubled = copy.copy(target)
    doubled.prior = target.prior.scaled(2.0)
    other = copy.deepcopy(q)
    fit_again(other, doubled)
    factor = math.log(2)
    return Sensitivity(
        factor * (rows @ mean) / sd,
        factor * ((rows @ covariance) * rows).sum(-1) / (2 * sd.square()),
        rows @ (other.mean - q.mean) / sd,
        _sd(rows, other.covariance) / sd - 1,
        words,
    )


def _of(result: FitResult) -> tuple[Gaussian, AdditiveTractable]:
    """The posterior and the target of a result."""
    result = read_result("sensitivity", result)
    q, target = result.posterior, result.target
    if not isinstance(target, AdditiveTractable) or not target.curved or not target.prior_alone:
        raise PairError(
            "sensitivity is for models with a Gaussian prior whose packets tell how they change with q: a "
            "GeneralizedLinear with a dense X and a log-concave likelihood, or a SoftmaxRegression; got "
            f"{'a copy of a result, without its model' if target is None else type(target).__name__}."
        )
    if not isinstance(q, Gaussian) or q.batch_shape or not isinstance(q.structure, FullAlgebra):
        raise PairError(
            f"sensitivity is of one Gaussian over a structure with all products: dense, diagonal or blocks; got {q!r}."
        )
    return q, target


def _named(result: FitResult, names: Sequence[str] | None, count: int, coefficients: bool) -> tuple[str, ...]:
    if names is None and coefficients and result.names:
        names = result.names
    if names is None:
        names = [f"{'coefficient' if coefficients else 'conclusion'} {k}" for k in range(count)]
    words = read_names("names", names, f"must have one entry a conclusion, {count}")
    if len(words) != count:
        raise InputError(f"names must have one entry a conclusion, {count}; got {names!r}.")
    return words


@torch.no_grad()
def _derivative(q: Gaussian, target: AdditiveTractable) -> tuple[Tensor, Tensor]:
    """The derivatives of mean and covariance in log λ, (D,) and (D, D)."""
    frame, structure = q.frame(), q.structure
    assert isinstance(structure, FullAlgebra)
    norm = float(q.norm2(q.local(Quadrature()(q, target))).sqrt())
    check_optimum("sensitivity is that of an optimum", q, norm)
    prior = target.prior.scaled(target.temperature)
    u = Direction(-frame.pull(prior.force(q.mean)), structure.tril(-prior.framed(frame)))
    x = response(q, target, u, max(norm, _FINEST) if q.dtype == torch.float64 else _AT_OPTIMUM)
    root = frame.root
    moved = structure.matmul(x.T, root) if frame.upper else structure.matmul(root, x.T)
    half = replace(frame, root=moved).dense() @ frame.dense().mT
    return frame.push(x.delta), half + half.mT


def _sd(rows: Tensor, covariance: Tensor) -> Tensor:
    """The standard deviations of the conclusions, (K,)."""
    return ((rows @ covariance) * rows).sum(-1).sqrt()


# The optimum q* as a differentiable function of all that its target holds, by the implicit function theorem
#
# At the optimum the gradient r of L in (m, C) vanishes, whatever the target's tensors φ are, so that H dq = -∂_φ r dφ
# with H the Hessian of L in (m, C).  For a function of q*
# with the cotangents (m̄, C̄), brought into the frame as u, this gives
#
#     H (δ, T) = u        φ̄ = -∂_φ s(φ)        s(φ) = d/dε L_φ(m + εCδ, C + εCT)    with m, C, δ and T held fixed
#
# One system is solved by conjugate gradients, whose products need no expectation, and one scalar is differentiated:
# nothing of the fit is recorded (Blondel et al. 2022, Efficient and modular implicit differentiation).


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

    mean: Tensor
    scale_tril: Tensor
    elbo: Tensor

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


def solve(q: Gaussian, target: TractableTarget, tolerance: float | None = None) -> Solution:
    """Fit q to its optimum, and return the optimum as a differentiable function of all that the target was made of.

    Use it to choose what a posterior depends on by what comes out: prior scales by a held-out score, a design by
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
    default = _FINEST if q.dtype == torch.float64 else _AT_OPTIMUM  # derivatives are wrong by about as much
    limit = default if tolerance is None else tolerance
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
