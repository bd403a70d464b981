"""READ FIRST: the four axes, and everything that passes between them.

q = N(m, V) with V = C Cᵀ, ℓ = -log joint, L(q) = E_q[ℓ] - γ entropy(q); with g = E_q[∇ℓ] and
H = E_q[∇²ℓ], all methods speak of the gradient in the *frame* of q,

    a = Cᵀ g        W = Π(Cᵀ H C)        P = W - γ I        (Π keeps the pattern of q)

which vanish at the optimum and give the natural norm, |∇L|²_F⁻¹ = |a|² + ½‖P‖²_F.

| axis        | question                           | folder         |
|-------------|------------------------------------|----------------|
| posterior   | which family, which coordinates    | `posteriors`   |
| expectation | how E_q[ℓ] and its derivatives come| `expectations` |
| rule        | along which curve                  | `rules`        |
| step size   | how far                            | `stepsizes`    |

A step is the axes in order:  expectation -> `Expectation`;  rule -> `Path`;  step size -> ρ;
`q.moved(path.at(ρ))`.  `optim` owns that loop, and the trial: q moves, is evaluated, is kept or
restored.  Parts never call one another, they exchange the packets and moves below.

A part of your own has its check in `torchngvi.testing`, and a worked example in CONTRIBUTING.md.

Three known methods as combinations:

    VN        = CovarianceRoot   x VariationalNewton x Constant(ρ)       V' = C (I + ρP)⁻¹ Cᵀ
    VN (NGVI) = NaturalGaussian  x NaturalGradient   x Constant(ρ)       S' = (1 - γρ) S + ρH
    SR-VN     = CovarianceRoot   x NaturalGradient   x Constant(ρ)       C' = C - ρ C tril½[P]

A posterior over a flat vector λ has no frame: ∇L in λ takes the place of a, there is no matrix, and a `Metric` makes
of it what the rule follows, so that

    IFVB      = FlatPosterior    x RootGradient      x KLRadius(0.1)     λ' = λ - ρ t P ∇L, P learnt by `Recursive`
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchngvi.errors import InputError, PairError
from torchngvi.numerics import sparse
from torchngvi.numerics.gaussian_integrals import Moments
from torchngvi.numerics.linalg import gram
from torchngvi.structures import FullAlgebra, Pattern
from torchngvi.structures.pattern import Structured


@dataclass(frozen=True)
class Frame:
    """q as mean and root, θ = m + C z: what an expectation may read, in any coordinates.

    The root is lower triangular in q's pattern: C itself, or, where q holds the precision S = T Tᵀ, L = T⁻¹ with
    C = Lᵀ upper triangular.  Differentiable where it came from :meth:`Posterior.probed`.
    """

    mean: Tensor  # (*batch, D)
    root: Structured  # L
    structure: Pattern
    upper: bool = False  # C = Lᵀ

    def push(self, z: Tensor) -> Tensor:
        """C z, (*sample, *batch, D)."""
        return (self.structure.tmv if self.upper else self.structure.mv)(self.root, z)

    def pull(self, gradient: Tensor) -> Tensor:
        """Cᵀ g, (*sample, *batch, D)."""
        return (self.structure.mv if self.upper else self.structure.tmv)(self.root, gradient)

    def rows(self, rows: Tensor) -> Tensor:
        """X C, (*batch, N, D); the marginal variances of X θ are its squared row norms."""
        return self.structure.rows(rows, self.root, self.upper)

    @property
    def variance(self) -> Tensor:
        """diag(V), (*batch, D)."""
        return self.structure.row_norms(self.root, self.upper)

    def dense(self) -> Tensor:
        """C written out, (*batch, D, D)."""
        root = self.structure.to_dense(self.root)
        return root.mT if self.upper else root

    def marginals(self) -> Structured:
        """The stored entries of V = C Cᵀ."""
        structure, root = self.structure, self.root
        if not isinstance(structure, FullAlgebra):
            dense = self.dense()
            return structure.from_dense(dense @ dense.mT)
        pair = (structure.transpose(root), root) if self.upper else (root, structure.transpose(root))
        return structure.matmul(*pair)

    def gram(
        self,
        weights: Tensor,  # broadcasts to (*batch, D)
    ) -> Structured:
        """Π(Cᵀ diag(w) C)."""
        return self.structure.gram(self.root, weights, self.upper)

    def conjugate(
        self,
        H: Tensor,  # (*batch, D, D), symmetric
    ) -> Structured:
        """Π(Cᵀ H C)."""
        return self.structure.conjugate(self.root, H, self.upper)


def where_members(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """New for the members (*batch,) of the mask, old for the others; of tensors (*batch, ...)."""
    if mask.device.type == "cpu":  # where asking costs nothing, most masks need no copy
        if bool(mask.all()):
            return new
        if not bool(mask.any()):
            return old
    return torch.where(mask.reshape(mask.shape + (1,) * (old.ndim - mask.ndim)), new, old)


# ------------------------------------------------------------------------------------ packets


class Prior(NamedTuple):
    """N(m₀, Λ⁻¹) with a diagonal Λ."""

    mean: Tensor  # m₀, broadcasts to (*batch, D)
    precision: Tensor  # diag Λ, broadcasts to (*batch, D)

    def energy(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """-log p(θ), (*sample, *batch)."""
        square = self.precision * (theta - self.mean).square()
        return 0.5 * (square - torch.log(self.precision / (2 * torch.pi)).expand(square.shape)).sum(-1)

    def expected_energy(self, frame: Frame) -> Tensor:
        """E_q[-log p(θ)], (*batch,)."""
        return self.energy(frame.mean) + 0.5 * (self.precision * frame.variance).sum(-1)

    def force(
        self,
        mean: Tensor,  # (*batch, D)
    ) -> Tensor:
        """Λ(m - m₀), (*batch, D)."""
        return self.precision * (mean - self.mean)

    def framed(self, frame: Frame) -> Structured:
        """Π(CᵀΛC)."""
        return frame.gram(self.precision)

    def add_to(
        self,
        H: Tensor,  # (*batch, D, D)
    ) -> Tensor:
        """H + Λ, in place."""
        H.diagonal(dim1=-2, dim2=-1).add_(self.precision)
        return H

    def scaled(self, factor: float) -> "Prior":
        """Λ times a factor."""
        return Prior(self.mean, factor * self.precision)


class FullPrior(NamedTuple):
    """N(m₀, Λ⁻¹) with a full Λ = RᵀR."""

    mean: Tensor  # m₀, broadcasts to (*batch, D)
    precision: Tensor  # Λ, (D, D)
    root: Tensor  # R, (D, D) upper triangular

    def energy(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """-log p(θ) = ½|R(θ - m₀)|² - log|R| + ½D log 2π, (*sample, *batch)."""
        square = ((theta - self.mean) @ self.root.mT).square().sum(-1)
        constant = 0.5 * theta.shape[-1] * math.log(2 * math.pi) - self.root.diagonal().log().sum()
        return 0.5 * square + constant

    def expected_energy(self, frame: Frame) -> Tensor:
        """E_q[-log p(θ)] = -log p(m) + ½‖RC‖²_F, (*batch,)."""
        return self.energy(frame.mean) + 0.5 * frame.rows(self.root).square().sum((-2, -1))

    def force(
        self,
        mean: Tensor,  # (*batch, D)
    ) -> Tensor:
        """Λ(m - m₀), (*batch, D)."""
        return (mean - self.mean) @ self.precision

    def framed(self, frame: Frame) -> Structured:
        """Π((RC)ᵀRC)."""
        projected = frame.rows(self.root)
        return frame.structure.lower(projected, projected)

    def add_to(
        self,
        H: Tensor,  # (*batch, D, D)
    ) -> Tensor:
        """H + Λ, in place."""
        return H.add_(self.precision)

    def scaled(self, factor: float) -> "FullPrior":
        """Λ times a factor."""
        return FullPrior(self.mean, factor * self.precision, math.sqrt(factor) * self.root)


class Framed(NamedTuple):
    """The derivative of E_q[ℓ] in q's frame, symmetric and in q's pattern."""

    a: Tensor  # Cᵀ g, (*batch, D)
    W: Structured  # Π(Cᵀ H C)

    def framed(self, frame: Frame) -> "Framed":
        """The packet itself."""
        return self

    def merged(self, where: Tensor, old: "Framed") -> "Framed":
        """Itself for the members (*batch,) of the mask, the old packet for the others."""
        return Framed(where_members(where, self.a, old.a), where_members(where, self.W, old.W))


class Raw(NamedTuple):
    """The derivative of E_q[ℓ] in θ."""

    g: Tensor  # (*batch, D)
    H: Tensor  # (*batch, D, D), symmetric

    def framed(self, frame: Frame) -> Framed:
        """Whiten: two products of D x D matrices."""
        return Framed(frame.pull(self.g), frame.conjugate(self.H))

    def merged(self, where: Tensor, old: "Raw") -> "Raw":
        """Itself for the members (*batch,) of the mask, the old packet for the others."""
        return Raw(where_members(where, self.g, old.g), where_members(where, self.H, old.H))


class Sites(NamedTuple):
    """The derivative of Σ_n F_n(e_n, v_n) + E_q[-log prior], e_n and v_n the moments of x_nᵀθ."""

    rows: Tensor  # X, (N, D) or (*batch, N, D); or (N, D) sparse CSR
    projected: Tensor | None  # X C, (*batch, N, D); a sparse X has none
    alpha: Tensor  # ∂F/∂e, (*batch, N)
    beta: Tensor  # 2 ∂F/∂v, (*batch, N)
    prior: Prior | FullPrior  # tempered
    mean: Tensor  # m, (*batch, D)

    def framed(self, frame: Frame) -> Framed:
        """a = (XC)ᵀα + Cᵀ Λ(m - m₀),  W = Π((XC)ᵀ diag(β) XC + CᵀΛC)."""
        prior = self.prior.framed(frame)
        if self.projected is None:
            W = frame.structure.sparse_gram(frame.root, self.rows, self.beta, frame.upper)
            return Framed(frame.pull(self._gradient()), W + prior)
        pulled = (self.alpha[..., None, :] @ self.projected)[..., 0, :]
        a = pulled + frame.pull(self.prior.force(self.mean))
        W = frame.structure.lower(self.projected * self.beta[..., None], self.projected)
        return Framed(a, W + prior)

    def raw(self) -> Raw:
        """g = Xᵀα + Λ(m - m₀),  H = Xᵀ diag(β) X + Λ."""
        H = sparse.gram(self.rows, self.beta) if self.projected is None else gram(self.rows, self.beta)
        return Raw(self._gradient(), self.prior.add_to(H))

    def _gradient(self) -> Tensor:
        """Xᵀα + Λ(m - m₀)."""
        if self.projected is None:
            data = self.rows.mT @ self.alpha
        else:
            data = (self.alpha[..., None, :] @ self.rows)[..., 0, :]
        return data + self.prior.force(self.mean)

    def merged(self, where: Tensor, old: "Sites") -> "Sites":
        """Itself for the members (*batch,) of the mask, the old packet for the others; rows and prior are shared."""
        projected = self.projected
        if projected is not None and old.projected is not None:
            projected = where_members(where, projected, old.projected)
        return self._replace(
            projected=projected,
            alpha=where_members(where, self.alpha, old.alpha),
            beta=where_members(where, self.beta, old.beta),
            mean=where_members(where, self.mean, old.mean),
        )


Derivative = Framed | Raw | Sites


class Cost(NamedTuple):
    """What an expectation took, in passes over the whole data or calls of the user's function."""

    gradients: int
    hessians: int  # of D Hessian-vector products each
    values: int = 0  # without a derivative


class Expectation(NamedTuple):
    """E_q[ℓ] and its derivative at one q; q adds the entropy, once."""

    value: Tensor  # E_q[ℓ], (*batch,)
    derivative: Derivative
    temperature: float  # γ
    comparable: bool  # deterministic, and the derivative is that of `value`: decrease may be tested
    cost: Cost
    noise2: Tensor | None = (
        None  # |standard error of the derivative|²_F⁻¹ (*batch,), where it is one of `value` up to that
    )


class Local(NamedTuple):
    """The gradient of L in q's frame; both vanish at the optimum."""

    a: Tensor  # (*batch, D)
    P: Structured  # W - γ I


# ------------------------------------------------------------------------------------ moves


class Coordinates(NamedTuple):
    """What a posterior stores: (m, C), (m, T), (Sm, S)."""

    vector: Tensor  # (*batch, D)
    matrix: Structured


class Congruence(NamedTuple):
    """V' = C N⁻¹ Cᵀ,  m' = m + C N⁻¹ f: the same q' in all coordinates."""

    N: Structured
    force: Tensor  # f, (*batch, D)


class Tangent(NamedTuple):
    """λ' = λ + change, in the posterior's own coordinates: another curve in each."""

    change: Coordinates


class RootTangent(Tangent):
    """A tangent for posteriors with a Euclidean gradient: in mean and root of V or of S, or in a flat vector."""


class LogTangent(RootTangent):
    """The same with the diagonal of the root moving by its logarithm: Λ_ii' = Λ_ii exp(change_ii)."""


class Affine(NamedTuple):
    """θ' = m + s + M (θ - m)."""

    M: Structured
    s: Tensor  # (*batch, D)


class Root(NamedTuple):
    """m' and C' themselves, V' = C'C'ᵀ, for posteriors that hold a root; entries that are not finite leave the cone."""

    mean: Tensor  # (*batch, D)
    root: Structured  # lower triangular


Move = Congruence | Tangent | Affine | Root


@dataclass(frozen=True)
class Path:
    """A curve of moves from q.  The norms are functions: a constant step never reads them."""

    at: Callable[[Tensor], Move]  # ρ (*batch,) -> move
    norm2: Callable[[], Tensor]  # squared natural norm of the gradient that it follows, (*batch,)
    slope: Callable[[], Tensor]  # -dL/dρ at 0, (*batch,)

    def in_units_of(self, unit: float) -> "Path":
        """The same curve with ρ measured in another unit."""
        if unit == 1.0:
            return self
        return Path(lambda rho: self.at(unit * rho), lambda: unit**2 * self.norm2(), lambda: unit * self.slope())


# ------------------------------------------------------------------------------------ targets

# likelihood, e (*batch, N), v (*batch, N), y (*batch, N) -> E[f(η, y)] under N(e, v), and its derivatives
ScalarRule = Callable[[Any, Tensor, Tensor, Tensor], Moments]


class Target(ABC):
    """What q approximates: ℓ(θ), with the temperature γ of its Gaussian or other prior."""

    temperature: float
    comparable: bool = True  # every evaluation sees one objective: False for a mini-batch
    coupled: bool = False  # the objective is no sum over the batch members of q: they are judged together
    coding: tuple[float, ...] = ()  # the classes that its labels are, in their order
    draws_at_once: int = 2048  # of a call of log_joint that is differentiated: bounds the memory
    batches: Iterable[Any] = ()  # what a pass over the data iterates over; its generators belong to the run

    @abstractmethod
    def log_joint(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """-ℓ(θ), (*sample, *batch)."""

    def check(self, q: "Posterior") -> None:  # noqa: B027  nothing to check is a fair answer
        """Raise where this target cannot be approximated by this q."""

    def admit(self, q: "Posterior") -> None:
        """`check`, and that q was not evaluated on labels of other classes, which it remembers.

        Raises:
            InputError: as `check`; parts of the data coded by what they happen to hold, which would fit one q to
                several problems.
        """
        self.check(q)
        if self.coding and q.coding and self.coding != q.coding:
            first, other = (", ".join(f"{label:g}" for label in coding) for coding in (q.coding, self.coding))
            raise InputError(
                f"this posterior began on a model of the classes {first}; got one of the classes {other}, told from "
                "the labels that its part of the data happens to hold. Name all classes in classes= of every model; "
                "for another problem use a new posterior, or restart this one by initialize_()."
            )
        q.coding = q.coding or self.coding

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors a value depends on; when one changes, an old packet is not used again."""

    def settings(self) -> tuple[object, ...]:
        """What else a value depends on, compared by ``==``: the settings of its parts."""
        return ()

    def known_data(self) -> tuple[Tensor, ...]:
        """The tensors that tell this problem from another, as far as they are known."""
        return self.tensors()


class TractableTarget(Target):
    """A target that knows E_q[ℓ] for a Gaussian q."""

    @abstractmethod
    def expected_energy(self, frame: Frame) -> tuple[Tensor, Raw | Sites]:
        """E_q[ℓ] (*batch,), differentiable in the frame, and its derivative."""

    def negative_elbo(self, q: "Posterior") -> Tensor:
        """L(q) = E_q[ℓ] - γ entropy(q), (*batch,), differentiable in the probes of q.

        For γ = 1 the negative evidence lower bound, all constants included.
        """
        self.admit(q)
        return self.expected_energy(q.probed())[0] - self.temperature * q.entropy()


class LinearTarget(TractableTarget):
    """ℓ(θ) = Σ_n f_n(x_nᵀθ + o_n) - γ log prior, all expectations one-dimensional."""

    @abstractmethod
    def expected_energy(self, frame: Frame, expected: ScalarRule | None = None) -> tuple[Tensor, Sites]:
        """E_q[ℓ] (*batch,), differentiable in the frame, and its derivative as sites.

        ``expected`` takes the place of the likelihood's own E[f_n] and its derivatives: a bound, or draws.
        """


class SeparableTarget(Target):
    """A target whose likelihood is a sum over data, each term to be had alone."""

    prior: Target  # its log joint is log p(θ)

    @abstractmethod
    def terms(
        self,
        theta: Tensor,  # (S, D)
    ) -> Tensor:
        """log p(y_n | θ), (S, N)."""


# ------------------------------------------------------------------------------------ the parts


class Estimator(ABC):
    """Value and derivative of E_q[ℓ]."""

    comparable: bool  # see Expectation.comparable
    needs: type[Target]  # the targets it can evaluate
    unbiased: bool = True  # the means over its draws are those of E_q[ℓ]; else of a quadratic ℓ in the right model only

    def prepared(self, source: Any) -> Any:
        """What a user handed to ``step``, as this estimator takes it: by default as it is."""
        return source

    def check(self, q: "Posterior") -> None:
        """Raise where it cannot evaluate this q: by default, one without a frame.

        Raises:
            PairError: a flat posterior.
        """
        if not q.framed:
            raise PairError(
                f"{type(self).__name__} reads the mean and the root of q, and {type(q).__name__} is a vector of "
                "parameters without them. Use an estimator of torchngvi.ifvb, such as ControlVariate(100)."
            )

    @abstractmethod
    def __call__(self, q: "Posterior", target: Target, state: dict) -> Expectation:
        """Evaluate at q; anything that changes from call to call lives in ``state``."""

    @property
    def fixed(self) -> bool:
        """Whether every call sees the same draws: exact for their average, which is not E_q[ℓ]."""
        return False

    def fresh(self, number: int) -> "Estimator":
        """The same on draws that have not been fitted to, the number-th such set; itself unless `fixed`."""
        return self


class Rule(ABC):
    """Which curve a step follows."""

    emits: type  # the kind of move
    natural: bool  # the path starts along the natural gradient, in the frame -(a, P)
    full_algebra: bool = False  # it needs products that leave a pattern: the structure of q must be a FullAlgebra

    @abstractmethod
    def __call__(self, q: "Posterior", e: Expectation) -> Path:
        """The path from q."""


class Trial(NamedTuple):
    """A step that was tried, each (*batch,)."""

    before: Tensor  # L
    after: Tensor  # L
    slope: Tensor  # -dL/dρ at 0
    length: Tensor  # ρ times the natural norm of the direction
    rho: Tensor
    slack: Tensor | float = 0.0  # nats a kept step may lose, where the derivative is one up to noise


class StepSize(ABC):
    """How far along the path."""

    needs_trial: bool  # judge compares values before and after
    needs_natural: bool = False  # it reads the natural norm as the length of a step
    needs_tangent: bool = False  # it reads the change of q's own coordinates as the length of a step

    @abstractmethod
    def init(self, like: Tensor) -> dict[str, Tensor]:
        """State tensors, one entry a batch member, of the dtype and device of ``like`` (*batch,)."""

    @abstractmethod
    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict) -> Tensor:
        """ρ (*batch,)."""

    @abstractmethod
    def judge(self, trial: Trial, state: dict) -> tuple[Tensor, dict]:
        """Accept the trial?  (*batch,), with the state for the next step."""


class Bent(NamedTuple):
    """A gradient after a metric has acted on it."""

    local: Local  # B∇L: the rules take it for the gradient
    slope: Tensor  # ⟨∇L, B∇L⟩, (*batch,)


class Metric(ABC):
    """A gradient of L in, a bent one out, which the rule then follows: B∇L with a B that may be learnt.

    Of two kinds.  An `Acceleration` improves on a natural gradient, which q gives it in its frame, and is judged by
    trial.  Other metrics are given the plain gradient of a q that has no frame and take the part of the inverse
    Fisher matrix, or of another B; they need no trial.
    """

    natural: bool  # B∇L is, or estimates, the natural gradient: its slope is a squared natural norm

    @abstractmethod
    def init(self, q: "Posterior") -> dict[str, Any]:
        """The state: tensors, counts and dicts of them, which are saved with the optimizer.

        ``state["went"]`` (*batch,) is set to the ρ of each step, 0 where rejected.
        """

    @abstractmethod
    def __call__(self, q: "Posterior", gradient: Local, state: dict[str, Any]) -> tuple[Bent, dict[str, Any]]:
        """The bent gradient at q, and what of the state is to change when the step is taken."""

    def forget(self, keep: Tensor, state: dict[str, Any]) -> None:  # noqa: B027  what depends on q alone stays true
        """q or the target was changed: drop what is known, but for the members (*batch,) of the mask."""


class Acceleration(Metric):
    """A natural gradient of L/γ in, a better one out; judged by trial."""

    natural = True

    @abstractmethod
    def forget(self, keep: Tensor, state: dict[str, Any]) -> None:
        """q or the target was changed: drop what is known, but for the members (*batch,) of the mask."""


class Momentum(ABC):
    """Averages the changes of q's own coordinates over the steps; state, in raw coordinates.

    Where a step takes a diagonal entry of q's root through zero, q turns that column of the root, so that the diagonal
    stays positive; the optimizer then turns the same columns of the state tensors that are named in ``signed``.
    """

    needs_natural: bool  # it normalises natural gradients
    signed: tuple[str, ...]  # names of the state tensors that average changes of the matrix, in its shape
    carried: tuple[str, ...] = ()  # names of those that average changes of the vector, to be carried on a manifold
    of_steps: bool = False  # it averages steps as long as the step size lets them be, and is not limited afterwards

    @abstractmethod
    def init(self, q: "Posterior") -> dict[str, Tensor]:
        """State tensors, (*batch, ...)."""

    @abstractmethod
    def __call__(
        self,
        q: "Posterior",
        change: Coordinates,  # -λ̇, of a step of ρ = 1
        norm2: Callable[[], Tensor],  # squared natural norm of λ̇, (*batch,)
        state: dict[str, Tensor],
    ) -> tuple[Coordinates, dict[str, Tensor]]:
        """The change to make instead, and what of the state is new once the step is taken."""


class Posterior(torch.nn.Module, ABC):
    """A variational family in one system of coordinates, kept in buffers.

    The coordinates never require grad, so ``parameters()`` hands nothing to another optimizer.
    What requires grad is a pair of zero buffers, the *probes* p and R in θ = m + C(p + (I + R)z), R lower triangular,
    or (I + R)ᵀ in its place where C is upper triangular: the gradient of any loss with respect to p is a, and that
    with respect to R has the lower triangle of W (or of P, if the entropy is in the loss).
    """

    structure: Pattern
    batch_shape: torch.Size
    dim: int
    takes: frozenset[type]  # the moves it can make
    framed: bool = True  # it has a mean and a root: `frame` and `probed` return them
    upper: bool  # the root C of its frame is upper triangular
    domain: str = "the positive definite cone"  # what a step must not leave, in words
    mean_probe: Tensor  # (*batch, D), zero
    root_probe: Structured  # zero
    coding: tuple[float, ...] = ()  # the classes of the first target that has some; a copy has it, a state_dict not

    @property
    @abstractmethod
    def coordinates(self) -> Coordinates:
        """The buffers."""

    @abstractmethod
    def frame(self) -> Frame:
        """Mean and root."""

    @abstractmethod
    def probed(self) -> Frame:
        """Mean and root as differentiable functions of the probes."""

    @abstractmethod
    def unframe(self, a: Tensor, W: Structured) -> tuple[Tensor, Structured]:
        """C⁻ᵀ a and C⁻ᵀ W C⁻¹, in the pattern."""

    @abstractmethod
    def tangent(self, e: Expectation) -> Coordinates:
        """The natural gradient λ̇ = F⁻¹∇L in q's own coordinates."""

    def euclidean(self, e: Expectation) -> Coordinates:
        """∇L in q's own coordinates, lower triangular, where q takes a `RootTangent`."""
        raise NotImplementedError  # `takes` refuses it before

    @abstractmethod
    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """The coordinates after a move, and for which members (*batch,) it stays in the cone."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """(*batch,), differentiable in the probes."""

    def local(self, e: Expectation) -> Local:
        """a and P = W - γI: the entropy enters here and nowhere else."""
        frame = self.frame()
        a, W = e.derivative.framed(frame)
        return Local(a, W - e.temperature * self.structure.eye(a))

    def loss(self, e: Expectation) -> Tensor:
        """L = E_q[ℓ] - γ entropy, (*batch,)."""
        return e.value - e.temperature * self.entropy()

    def carried(
        self,
        vector: Tensor,  # (*batch, D), of a change made at an earlier q
    ) -> Tensor:
        """That change at this q: itself, or on a manifold its part along it."""
        return vector

    def sym_outer(
        self,
        left: Tensor,  # (*sample, *batch, D)
        right: Tensor,  # (*sample, *batch, D)
    ) -> Structured:
        """Π(Σ_s ½(left_s right_sᵀ + right_s left_sᵀ))."""
        return self.structure.sym_lower(self._by_member(left), self._by_member(right))

    def one_triangle(
        self,
        force: Tensor,  # (*sample, *batch, D)
        z: Tensor,  # (*sample, *batch, D)
    ) -> Structured:
        """The symmetric matrix whose triangle is right in M = Σ_s f_s z_sᵀ: the lower one of M, or that of Mᵀ.

        Only that triangle reaches a triangular root: the lower one for a lower triangular C, else the upper one.
        """
        left, right = (z, force) if self.upper else (force, z)
        return self.structure.one_sided(self.structure.lower(self._by_member(left), self._by_member(right)))

    def _by_member(self, x: Tensor) -> Tensor:
        """Samples (*sample, *batch, D) as (*batch, S, D)."""
        return x.reshape(-1, *self.batch_shape, self.dim).movedim(0, -2)

    def norm2(self, local: Local) -> Tensor:
        """Squared natural norm |a|² + ½‖P‖²_F of ∇L, (*batch,)."""
        return local.a.square().sum(-1) + 0.5 * self.structure.norm2(local.P)

    def settled(self) -> AbstractContextManager[None]:
        """A block in which nothing but :meth:`assign` changes the coordinates, so that they need not be compared."""
        return nullcontext()

    def snapshot(self) -> Coordinates:
        """A copy of the coordinates, to restore by :meth:`assign`."""
        return Coordinates(*(buffer.clone() for buffer in self.coordinates))

    def assign(self, new: Coordinates, where: Tensor) -> None:
        """Write the coordinates in place for the members (*batch,) of the mask."""
        for old, value in zip(self.coordinates, new, strict=True):
            old.copy_(where_members(where, value, old))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert in place, as torch does for Parameters: optimizers keep the tensors they hold."""
        for name, buffer in self._buffers.items():
            if buffer is None:
                continue
            with torch.no_grad():
                new = fn(buffer)
            if torch._has_compatible_shallow_copy_type(buffer, new):
                grad = buffer.grad
                buffer.data = new
                if grad is not None:
                    buffer.grad = fn(grad)
            else:  # to or from the meta device: a new tensor, as for Parameters
                self._buffers[name] = new.detach().requires_grad_(buffer.requires_grad)
        return self
