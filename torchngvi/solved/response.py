"""How an optimum responds: its linear system, the prior's influence, derivatives, and rows taken out or put in."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from torchngvi.arguments import read_list, read_names
from torchngvi.errors import InputError, PairError
from torchngvi.expectations import Quadrature
from torchngvi.fitting.fit import fit
from torchngvi.fitting.records import FitResult, read_result
from torchngvi.fitting.starts import SiteSum, natural_parameters
from torchngvi.interfaces import AdditiveTractable, Expectation, Frame, Local, Target, TractableTarget
from torchngvi.models import GeneralizedLinear, checks
from torchngvi.models.log_joint import read_posterior
from torchngvi.numerics import sparse
from torchngvi.numerics.arrays import tracked, writable
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors import CholeskyGaussian
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
        likelihood = getattr(target, "likelihood", None)
        raise PairError(
            "solve differentiates through targets whose packets tell how they change with q: a GeneralizedLinear with "
            "a dense X and a log-concave likelihood, or a SoftmaxRegression, at a temperature above 0; got "
            f"{type(target).__name__}{f' with {type(likelihood).__name__}' if likelihood is not None else ''}."
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
            # the cotangents, brought into the frame
            at, structure = here.frame, here.frame.structure
            assert isinstance(structure, FullAlgebra)
            zero = Direction(torch.zeros_like(at.mean).requires_grad_(), torch.zeros_like(at.root).requires_grad_())
            moved = here.along(zero, at.mean, at.root)
            delta, T = torch.autograd.grad(moved, (zero.delta, zero.T), cotangents)
            x = response(here.q, here.target, Direction(delta, structure.tril(T)), here.tolerance)
            mean, root = here.frame.mean.clone().requires_grad_(), here.frame.root.clone().requires_grad_()
            energy = here.attached.expected_energy(replace(here.frame, mean=mean, root=root))[0].sum()
            slopes = torch.autograd.grad(energy, (mean, root), create_graph=True)
            ways = here.along(x, mean.detach(), root.detach())
            s = (slopes[0] * ways[0]).sum() + (slopes[1] * ways[1]).sum()
            found = torch.autograd.grad(s, here.tensors, allow_unused=True)
        return None, *(None if part is None else -part for part in found)


# ------------------------------------------------------------------------------------ rows taken out and put in
# Rows taken out of a posterior and put into it, and posteriors of parts that never meet, added.
#
# At the optimum q is the prior plus what the rows say, their *sites*: with g and H the mean gradient and the mean
# Hessian of -log p(y | θ) under q,
#
#     S = Λ + Σ_n H_n        S m = Λm₀ + Σ_n (H_n m - g_n)
#
# (Khan and Lin 2017, on conjugate-computation variational inference), so that rows are taken out by subtraction and
# put in by addition.  Where g is linear and H constant in θ, as for normal targets, sites know nothing of q, and sums
# of them are exact.  Elsewhere the other sites respond, and a fit from there lets them.


_INTEGERS = (torch.int64, torch.int32, torch.int16)  # of row numbers; bytes may be meant as a mask


@torch.no_grad()
def site_sum(q: Gaussian, model: AdditiveTractable) -> SiteSum:
    """Sum the sites of the rows of a model at q: of the optimum of this model the posterior less the prior.

    Args:
        q: where they are evaluated, without batch dimensions: the optimum of the model, or in a further round of
            `merge` that of its last round.
        model: a part of the data, with expectations that are known and the temperature 1.

    Returns:
        The sum, without the prior.

    Raises:
        PairError: a model whose expectations are not known.
        InputError: a batch of posteriors, or another temperature than 1.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> model = GeneralizedLinear(torch.ones(3, 1), [1.0, 2.0, 3.0], "gaussian")
    >>> site_sum(CholeskyGaussian(1), model)
    SiteSum(vector=tensor([6.]), precision=tensor([[3.]]))
    """
    if not isinstance(model, AdditiveTractable):
        raise PairError(
            "site_sum takes a model whose expectations are known, such as a GeneralizedLinear or a SoftmaxRegression; "
            f"got {type(model).__name__}."
        )
    if not isinstance(read_posterior("site_sum", q, model), Gaussian) or q.batch_shape:
        raise InputError(f"site_sum is of one Gaussian, without batch dimensions; got {q!r}.")
    check_temperature("site_sum", model)
    model.check(q)
    g, H = model.data_energy(q.frame())[1].raw()[:2]
    return SiteSum((H @ q.mean) - g, H)


def merge(sums: Iterable[SiteSum], prior_precision: Any = 1.0, prior_mean: Any = 0.0) -> CholeskyGaussian:
    """Merge what parts of the data say, which never meet, with one prior: S = Λ + ΣP, S m = Λm₀ + Σv.

    Use it for data that may not leave where they are: each part fits q to its own rows under *the whole prior*,
    and sends `site_sum`.  For normal targets the result is the posterior of all rows.  For others it is near, and each
    further round, in which the parts send `site_sum` at the merged q, is a step of VN with step size 1 on all rows.
    Such steps mostly approach the optimum, but nothing holds them to it: few rows a part, or classes that are well
    separated, can make them rise or stall.  Where the parts can answer while a fit runs, `torchngvi.Sharded` finds the
    optimum itself.

    Args:
        sums: of each part, one.
        prior_precision: Λ, as of a `torchngvi.GeneralizedLinear`; counted once.
        prior_mean: m₀.

    Returns:
        The merged posterior, dense.

    Raises:
        InputError: no sums, something else, sums over different coefficients, or a precision that is not positive
            definite.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> q, parts = CholeskyGaussian(1), ([1.0, 2.0], [3.0])
    >>> models = [GeneralizedLinear(torch.ones(len(y), 1), y, "gaussian") for y in parts]
    >>> merged = merge([site_sum(q, model) for model in models])
    >>> merged.mean.item(), merged.variance.item()  # 6/(1 + 3) and 1/(1 + 3)
    (1.5, 0.25)
    """
    what = "are what site_sum returns, one of each part, in a list"
    sums = [sums] if isinstance(sums, SiteSum) else read_list("sums", sums, what)
    strangers = [type(part).__name__ for part in sums if not isinstance(part, SiteSum)]
    if strangers:
        raise InputError(f"merge takes what site_sum returns, one of each part; got {', '.join(strangers)}.")
    if not sums:
        raise InputError("merge takes the site sum of at least one part; got none.")
    dims = sorted({len(part.vector) for part in sums})
    if len(dims) > 1:
        raise InputError(f"parts that are merged have the same coefficients; got sums over {dims} of them.")
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    prior = checks.prior(prior_mean, prior_precision, dims[0], total.vector)
    mean, covariance = _moments(
        SiteSum(total.vector + prior.product(prior.mean.expand(dims[0])), prior.add_to(total.precision.clone()))
    )
    if mean is None or covariance is None:
        raise InputError(
            "the merged precision is not positive definite: the sites of a part are not those of a log-concave "
            "likelihood, or it was sent in a precision that rounding has spoilt. Send them in float64."
        )
    return CholeskyGaussian.from_moments(mean, covariance)


def forget(result: FitResult, rows: Any) -> FitResult:
    """Take rows out of a fitted regression, as if they had never been there.

    Use it where people withdraw their data, or to see what a conclusion is without some rows.  Their sites are
    subtracted, and a fit from there lets the others respond: the result is that of a fit to the remaining rows, up to
    its tolerance.  What is returned holds nothing else of the rows; the old result, q and model do, and are yours to
    delete.

    Args:
        result: of `torchngvi.fit`, of a dense Gaussian and a `torchngvi.GeneralizedLinear`; it stays as it is.
        rows: their numbers, or a mask of all rows.

    Returns:
        The result of the new fit, with its ``posterior``, of the same class, and its ``target``, of the other rows.

    Raises:
        PairError: another model, or a posterior that is not one dense Gaussian.
        InputError: rows that are not there, or all of them; a temperature other than 1.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
    >>> model = GeneralizedLinear(torch.ones(3, 1).double(), [1.0, 2.0, 9.0], "gaussian")
    >>> result = fit(CholeskyGaussian(1, dtype=torch.float64), model, progress=False)
    >>> found = forget(result, [2])
    >>> round(result.posterior.mean.item(), 6), round(found.posterior.mean.item(), 6)  # 12/4 and 3/3
    (3.0, 1.0)
    """
    q, model = _to_site_sum(result, "forget")
    gone = _numbered(rows, len(model.y), model.X.device)
    kept = torch.ones(len(model.y), dtype=torch.bool, device=gone.device).index_fill(0, gone, False)
    if not bool(kept.any()):
        raise InputError(f"all {len(kept)} rows are to be forgotten, which leaves the prior: leave at least one.")
    start = natural_parameters(q) - site_sum(q, _with_rows(model, lambda name: getattr(model, name)[~kept]))
    return _fitted(q, start, _with_rows(model, lambda name: getattr(model, name)[kept]))


def add(result: FitResult, X: Any, y: Any, *, weights: Any = None, offset: Any = None) -> FitResult:
    """Add rows to a fitted regression.

    The sites of the new rows, evaluated at the old q, are added to it, and a fit from there lets all of them respond:
    the result is that of a fit to all rows, up to its tolerance.

    Args:
        result: of `torchngvi.fit`, of a dense Gaussian and a `torchngvi.GeneralizedLinear`; it stays as it is.
        X: the new rows, (n, D).
        y: their targets, (n,), with the same classes, written as they were.
        weights, offset: of the new rows, (n,), as the model has them; 1 and 0 by default.

    Returns:
        The result of the new fit, with its ``posterior``, of the same class, and its ``target``, of all rows, the new
        ones last.

    Raises:
        PairError: another model, or a posterior that is not one dense Gaussian.
        InputError: rows that do not fit the model, a temperature other than 1.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
    >>> model = GeneralizedLinear(torch.ones(2, 1).double(), [1.0, 2.0], "gaussian")
    >>> result = fit(CholeskyGaussian(1, dtype=torch.float64), model, progress=False)
    >>> round(add(result, [[1.0]], [9.0]).posterior.mean.item(), 6)
    3.0
    """
    q, model = _to_site_sum(result, "add")
    rows = checks.numbers("X", X, model.X)
    if sparse.is_sparse(rows):
        raise InputError("the rows of this model are dense; pass X.to_dense().")
    y = checks.numbers("y", y, model.X)
    classes = model.coding or None
    if model.coding == (0.0, 1.0) and bool((y == -1).any()):
        classes = (-1.0, 1.0)  # the other way to write failure and success, of which a model keeps one
    more = GeneralizedLinear(rows, y, model.likelihood, weights=weights, offset=offset, classes=classes)
    if more.y.ndim > 1 or more.dim != model.dim:
        raise InputError(f"the rows of this model are (n, {model.dim}); got X of shape {tuple(more.X.shape)}.")
    together = _with_rows(model, lambda name: torch.cat([getattr(model, name), getattr(more, name)]))
    return _fitted(q, natural_parameters(q) + site_sum(q, more), together)


def _to_site_sum(result: FitResult, name: str) -> tuple[Gaussian, GeneralizedLinear]:
    """The posterior and the model of a result."""
    result = read_result(name, result)
    q, model = result.posterior, result.target
    if model is None:
        raise PairError(f"{name} needs the model of the result, and this one is a copy or was read from a file: fit q.")
    return read_regression(name, q, model)


def _numbered(rows: Any, count: int, device: torch.device) -> Tensor:
    """Row numbers of a list or of a mask, (n,)."""
    try:
        tensor = torch.as_tensor(writable(rows), device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"rows are a list of row numbers, or a mask; got {type(rows).__name__} ({error}).") from error
    if tensor.dtype == torch.bool and tensor.shape == (count,):
        tensor = tensor.nonzero()[:, 0]
    if tensor.ndim != 1 or not len(tensor) or tensor.dtype not in _INTEGERS:
        raise InputError(
            f"rows are a list of at least one row number, or a mask of all {count} rows; got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}."
        )
    checks.check_no_mask(tensor, count)
    low, high = int(tensor.min()), int(tensor.max())
    if low < 0 or high >= count:
        raise InputError(f"row numbers run from 0 to {count - 1}; got {low if low < 0 else high}.")
    return tensor.long()


def _with_rows(model: GeneralizedLinear, rows: Callable[[str], Tensor]) -> GeneralizedLinear:
    """The model on other rows, each as it is."""
    new = copy.copy(model)
    for name in ("X", "y", "weights", "offset"):
        setattr(new, name, rows(name))
    new.num_data = len(new.y)
    return new


def _moments(natural: SiteSum) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Mean and covariance; None where the precision is not positive definite."""
    factor, ok = cholesky(natural.precision)
    if not bool(ok):
        return None, None
    mean = torch.cholesky_solve(natural.vector[:, None], factor)[:, 0]
    return mean, torch.cholesky_inverse(factor)


def _fitted(q: Gaussian, start: SiteSum, model: GeneralizedLinear) -> FitResult:
    """Fit a posterior of the class of q, from a sum of prior and sites; from q, where that is none."""
    mean, covariance = _moments(start)
    if mean is None or covariance is None:
        mean, covariance = q.mean, q.covariance
    new = type(q).from_moments(mean.clone(), 0.5 * (covariance + covariance.mT))
    return fit_again(new, model)
