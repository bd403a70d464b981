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

Three known methods as combinations:

    VN        = CovarianceRoot   x VariationalNewton x Constant(ρ)       V' = C (I + ρP)⁻¹ Cᵀ
    VN (NGVI) = NaturalGaussian  x NaturalGradient   x Constant(ρ)       S' = (1 - γρ) S + ρH
    SR-VN     = CovarianceRoot   x NaturalGradient   x Constant(ρ)       C' = C - ρ C tril½[P]
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Structured = Tensor  # a matrix in the storage of q's pattern: (*batch, D, D) dense, (*batch, D) diagonal


class Structure(Protocol):
    """An algebra of matrices of one pattern; see `structures/dense.py` for what each verb means."""

    rank: int

    def eye(self, like: Tensor) -> Structured: ...
    def from_dense(self, matrix: Tensor) -> Structured: ...
    def to_dense(self, matrix: Structured) -> Tensor: ...
    def diagonal(self, matrix: Structured) -> Tensor: ...
    def scaled(self, factor: Tensor, matrix: Structured) -> Structured: ...
    def transpose(self, matrix: Structured) -> Structured: ...
    def matmul(self, left: Structured, right: Structured) -> Structured: ...
    def mv(self, matrix: Structured, vector: Tensor) -> Tensor: ...
    def rows(self, rows: Tensor, matrix: Structured) -> Tensor: ...
    def row_norms(self, matrix: Structured) -> Tensor: ...
    def outer(self, left: Tensor, right: Tensor) -> Structured: ...
    def conjugate(self, root: Structured, dense: Tensor) -> Structured: ...
    def gram(self, root: Structured, weights: Tensor) -> Structured: ...
    def symmetric_part(self, matrix: Structured) -> Structured: ...
    def one_sided(self, matrix: Structured) -> Structured: ...
    def tril_half(self, matrix: Structured) -> Structured: ...
    def norm2(self, matrix: Structured) -> Tensor: ...
    def reverse_cholesky(self, matrix: Structured) -> tuple[Structured, Tensor]: ...
    def solve_upper(self, upper: Structured, vector: Tensor) -> Tensor: ...
    def right_solve_transposed(self, matrix: Structured, upper: Structured) -> Structured: ...
    def solve_lower(self, lower: Structured, vector: Tensor) -> Tensor: ...
    def unconjugate(self, lower: Structured, vector: Tensor, matrix: Structured) -> tuple[Tensor, Structured]: ...
    def lower_root(self, matrix: Structured) -> Structured: ...
    def positive_root(self, lower: Structured) -> tuple[Structured, Tensor]: ...


@dataclass(frozen=True)
class Frame:
    """q as mean and root, θ = m + C z: what an expectation may read, in any coordinates.

    Differentiable where it came from :meth:`Posterior.probed`.
    """

    mean: Tensor  # (*batch, D)
    root: Structured  # C, V = C Cᵀ
    structure: Structure

    def push(self, z: Tensor) -> Tensor:
        """C z, (*sample, *batch, D)."""
        return self.structure.mv(self.root, z)

    def pull(self, gradient: Tensor) -> Tensor:
        """Cᵀ g, (*sample, *batch, D)."""
        return self.structure.mv(self.structure.transpose(self.root), gradient)

    def rows(self, rows: Tensor) -> Tensor:
        """X C, (*batch, N, D); the marginal variances of X θ are its squared row norms."""
        return self.structure.rows(rows, self.root)

    @property
    def variance(self) -> Tensor:
        """diag(V), (*batch, D)."""
        return self.structure.row_norms(self.root)


class Versions:
    """Which tensors, and how often each was written to: equal as long as nothing has changed."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = tuple(tensors)  # held, so that no other tensor takes their place in memory
        self.counts = tuple(tensor._version for tensor in self.tensors)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Versions) or self.counts != other.counts:
            return False
        return all(mine is theirs for mine, theirs in zip(self.tensors, other.tensors, strict=True))

    __hash__ = None  # type: ignore[assignment]


# ------------------------------------------------------------------------------------ packets


class Prior(NamedTuple):
    """N(mean, diag(precision)⁻¹)."""

    mean: Tensor  # broadcasts to (*batch, D)
    precision: Tensor  # broadcasts to (*batch, D)

    def energy(self, mean: Tensor, variance: Tensor) -> Tensor:
        """E[-log p(θ)] for θ of that mean and marginal variance, (*batch,)."""
        square = self.precision * ((mean - self.mean).square() + variance)
        return 0.5 * (square - torch.log(self.precision / (2 * torch.pi)).expand(square.shape)).sum(-1)


class Framed(NamedTuple):
    """The derivative of E_q[ℓ] in q's frame, symmetric and in q's pattern."""

    a: Tensor  # Cᵀ g, (*batch, D)
    W: Structured  # Π(Cᵀ H C)

    def framed(self, frame: Frame) -> "Framed":
        """The packet itself."""
        return self


class Raw(NamedTuple):
    """The derivative of E_q[ℓ] in θ."""

    g: Tensor  # (*batch, D)
    H: Tensor  # (*batch, D, D), symmetric

    def framed(self, frame: Frame) -> Framed:
        """Whiten: two products of D x D matrices."""
        return Framed(frame.pull(self.g), frame.structure.conjugate(frame.root, self.H))


class Sites(NamedTuple):
    """The derivative of Σ_n F_n(e_n, v_n) + E_q[-log prior], e_n and v_n the moments of x_nᵀθ."""

    rows: Tensor  # X, (N, D) or (*batch, N, D)
    projected: Tensor  # X C, (*batch, N, D)
    alpha: Tensor  # ∂F/∂e, (*batch, N)
    beta: Tensor  # 2 ∂F/∂v, (*batch, N)
    prior: Prior  # tempered
    mean: Tensor  # m, (*batch, D)

    def framed(self, frame: Frame) -> Framed:
        """a = (XC)ᵀα + Cᵀ Λ(m - m₀),  W = Π((XC)ᵀ diag(β) XC + CᵀΛC)."""
        pulled = (self.alpha[..., None, :] @ self.projected)[..., 0, :]
        a = pulled + frame.pull(self.prior.precision * (self.mean - self.prior.mean))
        W = frame.structure.outer(self.projected * self.beta[..., None], self.projected)
        return Framed(a, W + frame.structure.gram(frame.root, self.prior.precision))

    def raw(self) -> Raw:
        """g = Xᵀα + Λ(m - m₀),  H = Xᵀ diag(β) X + Λ."""
        g = (self.alpha[..., None, :] @ self.rows)[..., 0, :]
        g = g + self.prior.precision * (self.mean - self.prior.mean)
        H = self.rows.mT @ (self.rows * self.beta[..., None])
        H.diagonal(dim1=-2, dim2=-1).add_(self.prior.precision)
        return Raw(g, H)


Derivative = Framed | Raw | Sites


class Cost(NamedTuple):
    """What an expectation took, in passes over the whole data or calls of the user's function."""

    gradients: int
    hessians: int


class Expectation(NamedTuple):
    """E_q[ℓ] and its derivative at one q; q adds the entropy, once."""

    value: Tensor  # E_q[ℓ], (*batch,)
    derivative: Derivative
    temperature: float  # γ
    comparable: bool  # deterministic, and the derivative is that of `value`: decrease may be tested
    cost: Cost


class Local(NamedTuple):
    """The gradient of L in q's frame; both vanish at the optimum."""

    a: Tensor  # (*batch, D)
    P: Structured  # W - γ I


# ------------------------------------------------------------------------------------ moves


class Coordinates(NamedTuple):
    """What a posterior stores: (m, C), (Sm, S)."""

    vector: Tensor  # (*batch, D)
    matrix: Structured


class Congruence(NamedTuple):
    """V' = C N⁻¹ Cᵀ,  m' = m + C N⁻¹ f: the same q' in all coordinates."""

    N: Structured
    force: Tensor  # f, (*batch, D)


class Tangent(NamedTuple):
    """λ' = λ + change, in the posterior's own coordinates: another curve in each."""

    change: Coordinates


class Affine(NamedTuple):
    """θ' = m + s + M (θ - m)."""

    M: Structured
    s: Tensor  # (*batch, D)


Move = Congruence | Tangent | Affine


@dataclass(frozen=True)
class Path:
    """A curve of moves from q.  The norms are functions: a constant step never reads them."""

    at: Callable[[Tensor], Move]  # ρ (*batch,) -> move
    norm2: Callable[[], Tensor]  # squared natural norm of ∇L, (*batch,)
    slope: Callable[[], Tensor]  # -dL/dρ at 0, (*batch,)


# ------------------------------------------------------------------------------------ targets


class Target(ABC):
    """What q approximates: ℓ(θ), with the temperature γ of its Gaussian or other prior."""

    temperature: float

    @abstractmethod
    def log_joint(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """-ℓ(θ), (*sample, *batch)."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors a value depends on; when one changes, an old packet is not used again."""


class LinearTarget(Target):
    """ℓ(θ) = Σ_n f_n(x_nᵀθ + o_n) - γ log prior, all expectations one-dimensional."""

    @abstractmethod
    def expected_energy(self, frame: Frame) -> tuple[Tensor, Sites]:
        """E_q[ℓ] (*batch,), differentiable in the frame, and its derivative as sites."""


# ------------------------------------------------------------------------------------ the parts


class Estimator(ABC):
    """Value and derivative of E_q[ℓ]."""

    comparable: bool  # see Expectation.comparable
    needs: type[Target]  # the targets it can evaluate

    @abstractmethod
    def __call__(self, q: "Posterior", target: Target, state: dict) -> Expectation:
        """Evaluate at q; anything that changes from call to call lives in ``state``."""


class Rule(ABC):
    """Which curve a step follows."""

    emits: type  # the kind of move

    @abstractmethod
    def __call__(self, q: "Posterior", e: Expectation) -> Path:
        """The path from q."""


class StepSize(ABC):
    """How far along the path."""

    needs_trial: bool  # judge compares values before and after

    @abstractmethod
    def init(self, like: Tensor) -> dict[str, Tensor]:
        """State tensors, one entry a batch member, of the dtype and device of ``like`` (*batch,)."""

    @abstractmethod
    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict) -> Tensor:
        """ρ (*batch,)."""

    @abstractmethod
    def judge(self, before: Tensor, after: Tensor, slope: Tensor, rho: Tensor, state: dict) -> tuple[Tensor, dict]:
        """Accept the trial?  (*batch,), with the state for the next step."""


class Posterior(torch.nn.Module, ABC):
    """A variational family in one system of coordinates, kept in buffers.

    The coordinates never require grad, so ``parameters()`` hands nothing to another optimizer.
    What requires grad is a pair of zero buffers, the *probes* p and R in θ = m + C(p + (I + R)z):
    the gradient of any loss with respect to them is a and W (or P, if the entropy is in the loss).
    """

    structure: Structure
    batch_shape: torch.Size
    dim: int
    takes: frozenset[type]  # the moves it can make
    mean_probe: Tensor  # (*batch, D), zero
    root_probe: Structured  # zero

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

    def outer(
        self,
        left: Tensor,  # (*sample, *batch, D)
        right: Tensor,  # (*sample, *batch, D)
    ) -> Structured:
        """Π(Σ_s left_s right_sᵀ) in q's pattern, not symmetrised."""
        shape = (-1, *self.batch_shape, self.dim)
        return self.structure.outer(*(x.reshape(shape).movedim(0, -2) for x in (left, right)))

    def norm2(self, local: Local) -> Tensor:
        """Squared natural norm |a|² + ½‖P‖²_F of ∇L, (*batch,)."""
        return local.a.square().sum(-1) + 0.5 * self.structure.norm2(local.P)

    def snapshot(self) -> Coordinates:
        """A copy of the coordinates, to restore by :meth:`assign`."""
        return Coordinates(*(buffer.clone() for buffer in self.coordinates))

    def assign(self, new: Coordinates, where: Tensor) -> None:
        """Write the coordinates in place for the members (*batch,) of the mask."""
        for old, value in zip(self.coordinates, new, strict=True):
            old.copy_(where_members(where, value, old))


def where_members(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """New for the members (*batch,) of the mask, old for the others; of tensors (*batch, ...)."""
    return torch.where(mask.reshape(mask.shape + (1,) * (old.ndim - mask.ndim)), new, old)
