"""The frame of q, Gaussian priors, and the packets in which an expectation hands on a value and a derivative."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import PairError
from torchngvi.numerics import sparse
from torchngvi.numerics.arrays import anyone, everyone
from torchngvi.numerics.linalg import gram, multiply
from torchngvi.structures import Dense, Forest, Pattern
from torchngvi.structures.pattern import Structured

# The frame of q: its mean and its root, which are all that an expectation may read


@dataclass(frozen=True)
class Frame:
    """The mean and the root of a Gaussian q, θ = m + C z with z ~ N(0, I): all that an expectation may read of it.

    An estimator that is written for the frame works for every system of coordinates.  `Posterior.frame` returns it
    without gradients, `Posterior.probed` as a differentiable function of the probes.  The stored matrix L is lower
    triangular in the pattern of q: C itself, or, where q holds the precision S = T Tᵀ, L = T⁻¹ with C = Lᵀ upper
    triangular.

    Attributes:
        mean: m, (*batch, D).
        root: L, (*batch, *structure.shape), as the structure stores it.
        structure: the pattern of L, which computes all products with it.
        upper: whether C = Lᵀ; otherwise C = L.

    >>> from torchngvi import CholeskyGaussian
    >>> frame = CholeskyGaussian(2, scale=3.0).frame()
    >>> frame.push(torch.ones(2)).tolist(), frame.variance.tolist()
    ([3.0, 3.0], [9.0, 9.0])
    """

    mean: Tensor  # (*batch, D)
    root: Structured  # L
    structure: Pattern
    upper: bool = False  # C = Lᵀ

    def push(self, z: Tensor) -> Tensor:
        """Multiply vectors by the root: C z, (*sample, *batch, D), turns noise into deviations of θ from the mean."""
        return (self.structure.tmv if self.upper else self.structure.mv)(self.root, z)

    def pull(self, gradient: Tensor) -> Tensor:
        """Multiply vectors by the transposed root: Cᵀ g, (*sample, *batch, D), brings gradients in θ into the frame."""
        return (self.structure.mv if self.upper else self.structure.tmv)(self.root, gradient)

    def rows(self, rows: Tensor) -> Tensor:
        """Multiply a design by the root: X C, (*batch, N, D); its squared row norms are the variances of X θ."""
        return self.structure.rows(rows, self.root, self.upper)

    @property
    def variance(self) -> Tensor:
        """The marginal variances of θ, diag(V), (*batch, D)."""
        return self.structure.row_norms(self.root, self.upper)

    def dense(self) -> Tensor:
        """Write C out as a matrix, (*batch, D, D): for small D and for comparisons, since it drops the pattern."""
        root = self.structure.to_dense(self.root)
        return root.mT if self.upper else root

    def marginals(self) -> Structured:
        """Compute those entries of the covariance V = C Cᵀ that the pattern stores."""
        return self.structure.marginals(self.root, self.upper)

    def gram(
        self,
        weights: Tensor,  # broadcasts to (*batch, D)
    ) -> Structured:
        """Bring a diagonal curvature into the frame: Π(Cᵀ diag(w) C), as the structure stores it."""
        return self.structure.gram(self.root, weights, self.upper)

    def conjugate(
        self,
        H: Tensor,  # (*batch, D, D), symmetric
    ) -> Structured:
        """Bring a dense symmetric curvature into the frame: Π(Cᵀ H C), as the structure stores it."""
        return self.structure.conjugate(self.root, H, self.upper)


def may_be_asked(mask: Tensor) -> bool:
    """Say whether a mask may decide on the host which way the code goes: on the CPU, outside of ``torch.compile``.

    Args:
        mask: any tensor.

    Returns:
        True where reading its entries neither waits for a device nor breaks a graph.

    >>> may_be_asked(torch.tensor(True)), may_be_asked(torch.ones((), dtype=torch.bool, device="meta"))
    (True, False)
    """
    return mask.is_cpu and not torch.compiler.is_compiling()


def known_everywhere(mask: Tensor) -> bool:
    """Say whether a mask is known to be true for every member: where it is, and asking does not wait for a device.

    Args:
        mask: of the members, (*batch,), boolean.

    Returns:
        True if all entries are true and the mask is on the CPU.

    >>> known_everywhere(torch.tensor([True, True])), known_everywhere(torch.tensor([True, False]))
    (True, False)
    """
    return may_be_asked(mask) and everyone(mask)


def where_members(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Choose between two tensors member by member, as ``torch.where`` does with a mask over the batch alone.

    Args:
        mask: which members are new, (*batch,), boolean.
        new: the values of those members, (*batch, ...).
        old: the values of the others, of the same shape.

    Returns:
        A tensor of that shape; on the CPU it is ``new`` or ``old`` itself where the mask is all true or all false.

    >>> where_members(torch.tensor([True, False]), torch.ones(2, 2), torch.zeros(2, 2)).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    if new is old:
        return old
    if may_be_asked(mask):  # where asking costs nothing, most masks need no copy
        if everyone(mask):
            return new
        if not anyone(mask):
            return old
    return torch.where(mask.reshape(mask.shape + (1,) * (old.ndim - mask.ndim)), new, old)


# The Gaussian priors, whose part of an expectation and of its derivative is known exactly


class Prior(NamedTuple):
    """A Gaussian prior N(m₀, Λ⁻¹) with a diagonal precision Λ.

    Attributes:
        mean: m₀, broadcasts to (*batch, D).
        precision: diag Λ, positive, broadcasts to (*batch, D).

    >>> prior = Prior(torch.zeros(2), torch.full((2,), 2 * torch.pi))
    >>> prior.energy(torch.zeros(2)).item()
    0.0
    """

    mean: Tensor  # m₀, broadcasts to (*batch, D)
    precision: Tensor  # diag Λ, broadcasts to (*batch, D)

    def energy(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Compute -log p(θ) with its constants, (*sample, *batch)."""
        return self._energy((theta - self.mean).square())

    def expected_energy(self, frame: Frame) -> Tensor:
        """Compute E_q[-log p(θ)] = -log p(m) + ½ Σ_i Λ_ii V_ii, (*batch,), differentiable in the frame."""
        away = frame.mean - self.mean
        return self._energy(torch.addcmul(frame.variance, away, away))

    def _energy(self, square: Tensor) -> Tensor:
        return 0.5 * (self.precision * square - torch.log(self.precision / (2 * torch.pi))).sum(-1)

    def force(
        self,
        mean: Tensor,  # (*batch, D)
    ) -> Tensor:
        """Compute the gradient of E_q[-log p(θ)] in the mean, Λ(m - m₀), (*batch, D)."""
        return self.precision * (mean - self.mean)

    def product(
        self,
        x: Tensor,  # (*batch, D)
    ) -> Tensor:
        """Multiply vectors by the precision: Λx, (*batch, D)."""
        return self.precision * x

    def framed(self, frame: Frame) -> Structured:
        """Bring the curvature of the prior into the frame: Π(CᵀΛC)."""
        return frame.gram(self.precision)

    def add_to(
        self,
        H: Tensor,  # (*batch, D, D)
    ) -> Tensor:
        """Add the precision to a Hessian in place, H + Λ, and return it."""
        H.diagonal(dim1=-2, dim2=-1).add_(self.precision)
        return H

    def scaled(self, factor: float) -> "Prior":
        """Return the prior with its precision times a factor, as a temperature or a share of the data weighs it."""
        return self if factor == 1 else Prior(self.mean, factor * self.precision)


class FullPrior(NamedTuple):
    """A Gaussian prior N(m₀, Λ⁻¹) with a full precision Λ = RᵀR.

    Attributes:
        mean: m₀, broadcasts to (*batch, D).
        precision: Λ, (D, D), symmetric positive definite.
        root: R, (D, D), upper triangular, so that densities and expectations need no factorisation.

    >>> R = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    >>> FullPrior(torch.zeros(2), R.mT @ R, R).force(torch.tensor([1.0, 0.0])).tolist()
    [1.0, 1.0]
    """

    mean: Tensor  # m₀, broadcasts to (*batch, D)
    precision: Tensor  # Λ, (D, D)
    root: Tensor  # R, (D, D) upper triangular

    def energy(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Compute -log p(θ) = ½|R(θ - m₀)|² - log|R| + ½D log 2π, (*sample, *batch)."""
        square = ((theta - self.mean) @ self.root.mT).square().sum(-1)
        constant = 0.5 * theta.shape[-1] * math.log(2 * math.pi) - self.root.diagonal().log().sum()
        return 0.5 * square + constant

    def expected_energy(self, frame: Frame) -> Tensor:
        """Compute E_q[-log p(θ)] = -log p(m) + ½‖RC‖²_F, (*batch,), differentiable in the frame."""
        return self.energy(frame.mean) + 0.5 * frame.rows(self.root).square().sum((-2, -1))

    def force(
        self,
        mean: Tensor,  # (*batch, D)
    ) -> Tensor:
        """Compute the gradient of E_q[-log p(θ)] in the mean, Λ(m - m₀), (*batch, D)."""
        return (mean - self.mean) @ self.precision

    def product(
        self,
        x: Tensor,  # (*batch, D)
    ) -> Tensor:
        """Multiply vectors by the precision: Λx, (*batch, D)."""
        return x @ self.precision

    def framed(self, frame: Frame) -> Structured:
        """Bring the curvature of the prior into the frame: Π((RC)ᵀRC)."""
        projected = frame.rows(self.root)
        return frame.structure.lower(projected, projected)

    def add_to(
        self,
        H: Tensor,  # (*batch, D, D)
    ) -> Tensor:
        """Add the precision to a Hessian in place, H + Λ, and return it."""
        return H.add_(self.precision)

    def scaled(self, factor: float) -> "FullPrior":
        """Return the prior with its precision times a factor, and its root times the square root of that."""
        return self if factor == 1 else FullPrior(self.mean, factor * self.precision, math.sqrt(factor) * self.root)


# The frames of the marginals of q over the cliques of a forest: each node with its ancestors


def clique_frames(frame: Frame) -> list[Frame]:
    """The frame of q restricted to each node and its ancestors, of each kind of nodes all n in one batch.

    q over a clique c is N(m_c, C_c C_cᵀ), where C_c = T_c⁻ᵀ is the part of C = T⁻ᵀ in the clique: an ordinary dense
    frame of batch shape (*batch, n), in which local work can be done.  No matrix is factorised.

    Args:
        frame: of a q whose precision has the pattern of a `Forest`.

    Returns:
        One for each kind of nodes, in the order of ``structure.kinds``; the coordinates of a node stand before those of
        its ancestors.

    Raises:
        PairError: another structure, or a root of the covariance.

    >>> from torchngvi import PrecisionCholeskyGaussian
    >>> from torchngvi.structures import arrow
    >>> q = PrecisionCholeskyGaussian(7, structure=arrow(groups=3, local=2, globals=1))
    >>> [tuple(one.mean.shape) for one in clique_frames(q.frame())]
    [(3, 3), (1, 1)]
    """
    structure = frame.structure
    if not isinstance(structure, Forest) or not frame.upper:  # a user passes q; only a forest has nodes
        raise PairError(
            "cliques are nodes with their ancestors, of a q whose precision has the pattern of a forest; got one over "
            f"{structure}. Use PrecisionCholeskyGaussian(D, structure=arrow(groups=..., local=..., globals=...))."
        )
    parts = zip(structure.gather(frame.mean), structure.cliques(frame.root), strict=True)
    return [Frame(mean, root, Dense(mean.shape[-1]), upper=True) for mean, root in parts]


# What an expectation hands on: a value, and a derivative in one of three forms
#
# `Framed` holds the derivative in the frame of q, `Raw` in θ, and `Sites` as two numbers for each row of a design.  An
# estimator returns whichever costs it least; each can be turned into a and W by ``framed``.  A `Curved` is a `Raw` that
# knows how it changes with q, as `Sites` do.

_LARGE = 2**16  # numbers of XC from which products with a direction, wanted to a few digits, are in single precision

Change = Callable[[Tensor, Structured], tuple[Tensor, Structured]]
"""A map from a move (δ, K) in the frame, m' = m + Cδ and L' = L(I + K) of the stored root, to the changes of a and W
where the frame stands still, Cᵀ dg and Π(Cᵀ dH C)."""


class Framed(NamedTuple):
    """The derivative of E_q[ℓ] in the frame of q: a = Cᵀ g, and W = Π(Cᵀ H C), symmetric and in the pattern of q.

    Estimators by Stein's identity return it, since gradients and draws give them a and W without any Hessian.

    >>> packet = Framed(torch.ones(2, 1), torch.ones(2, 1, 1))
    >>> packet.merged(torch.tensor([True, False]), Framed(0 * packet.a, 0 * packet.W)).a.tolist()
    [[1.0], [0.0]]
    """

    a: Tensor  # Cᵀ g, (*batch, D)
    W: Structured  # Π(Cᵀ H C)

    def framed(self, frame: Frame) -> "Framed":
        """Return the packet itself, which is in the frame already."""
        return self

    def change(self, frame: Frame, exact: bool = False) -> Change | None:
        """Return None: how a and W change with q is not known."""
        return None

    def merged(self, where: Tensor, old: "Framed") -> "Framed":
        """Keep this packet for the members (*batch,) of the mask, and take the old one for the others."""
        return Framed(where_members(where, self.a, old.a), where_members(where, self.W, old.W))


class Raw(NamedTuple):
    """The derivative of E_q[ℓ] in θ: the mean gradient g = E_q[∇ℓ] and the mean Hessian H = E_q[∇²ℓ].

    Models with closed forms and estimators that evaluate Hessians return it; the natural coordinates read it as it is.

    >>> packet = Raw(torch.ones(1), torch.ones(1, 1))
    >>> packet.with_prior(Prior(torch.zeros(1), torch.full((1,), 2.0)), torch.ones(1)).g.tolist()
    [3.0]
    """

    g: Tensor  # (*batch, D)
    H: Tensor  # (*batch, D, D), symmetric

    def with_prior(
        self,
        prior: Prior | FullPrior,  # tempered
        mean: Tensor,  # m, (*batch, D)
    ) -> "Raw":
        """Add the part of a Gaussian prior: g + Λ(m - m₀) and H + Λ, the latter in place."""
        return Raw(self.g + prior.force(mean), prior.add_to(self.H))

    def change(self, frame: Frame, exact: bool = False) -> Change | None:
        """Return None: how a and W change with q is not known."""
        return None

    def raw(self) -> "Raw":
        """Return the packet itself, which is in θ already."""
        return self

    def framed(self, frame: Frame) -> Framed:
        """Bring the derivative into the frame, a = Cᵀ g and W = Π(Cᵀ H C), by two products of D x D matrices."""
        return Framed(frame.pull(self.g), frame.conjugate(self.H))

    def merged(self, where: Tensor, old: "Raw") -> "Raw":
        """Keep this packet for the members (*batch,) of the mask, and take the old one for the others."""
        return Raw(where_members(where, self.g, old.g), where_members(where, self.H, old.H))


class Curved(NamedTuple):
    """The derivative of E_q[ℓ] in θ, as `Raw`, by a model that knows how it changes with q.

    Attributes:
        g: the mean gradient E_q[∇ℓ], (*batch, D).
        H: the mean Hessian E_q[∇²ℓ], (*batch, D, D), symmetric.
        at: what the data see of q, such as means and covariances of predictors, each (*batch, ...).
        along: makes of that, in the frame, the map from a move to the changes of a and W that are due to the data.
        prior: a Gaussian prior with the temperature in its precision; None for the data alone.

    >>> from torchngvi.structures import Dense
    >>> still = lambda at, frame: lambda delta, K: (frame.pull(frame.push(delta)), 0 * K)  # of |θ|²/2
    >>> packet = Curved(torch.ones(1), torch.ones(1, 1), (), still)
    >>> prior, frame = Prior(torch.zeros(1), torch.ones(1)), Frame(torch.ones(1), torch.ones(1, 1), Dense(1))
    >>> packet.with_prior(prior, frame.mean).change(frame)(torch.ones(1), torch.ones(1, 1))
    (tensor([2.]), tensor([[0.]]))
    """

    g: Tensor  # (*batch, D)
    H: Tensor  # (*batch, D, D)
    at: tuple[Tensor, ...]
    along: Callable[[tuple[Tensor, ...], Frame], Change]
    prior: Prior | FullPrior | None = None

    def with_prior(
        self,
        prior: Prior | FullPrior,  # tempered
        mean: Tensor,  # m, (*batch, D)
    ) -> "Curved":
        """Add the part of a Gaussian prior: g + Λ(m - m₀) and H + Λ, the latter in place."""
        g, H = self.raw().with_prior(prior, mean)
        return self._replace(g=g, H=H, prior=prior)

    def raw(self) -> Raw:
        """Return g and H alone."""
        return Raw(self.g, self.H)

    def framed(self, frame: Frame) -> Framed:
        """Bring the derivative into the frame, as `Raw.framed`."""
        return self.raw().framed(frame)

    def change(self, frame: Frame, exact: bool = False) -> Change:
        """Return the map from a move to the changes of a and W; that of the prior is CᵀΛCδ in a."""
        data, prior = self.along(self.at, frame), self.prior
        if prior is None:
            return data

        def change(delta: Tensor, K: Structured) -> tuple[Tensor, Structured]:
            a, W = data(delta, K)
            return a + frame.pull(prior.product(frame.push(delta))), W

        return change

    def merged(self, where: Tensor, old: "Curved") -> "Curved":
        """Keep this packet for the members (*batch,) of the mask, and take the old one for the others."""
        g, H = self.raw().merged(where, old.raw())
        return self._replace(g=g, H=H, at=_merged(where, self.at, old.at))


def _merged(where: Tensor, new: tuple[Tensor, ...], old: tuple[Tensor, ...]) -> Any:
    """The new tensors for the members of the mask, the old ones for the others."""
    return tuple(where_members(where, x, y) for x, y in zip(new, old, strict=True))


class Sites(NamedTuple):
    """The derivative of Σ_n F_n(e_n, v_n) + E_q[-log prior], where e_n and v_n are mean and variance of x_nᵀθ under q.

    It holds two numbers for each row of a design, from which a and W, or g and H, are made when they are asked for
    (Bonnet 1964; Price 1958):

        g = Xᵀα + Λ(m - m₀)        H = Xᵀ diag(β) X + Λ

    Attributes:
        rows: X, (N, D) or (*batch, N, D); or (N, D) in sparse CSR storage.
        projected: X C, (*batch, N, D); None for a sparse X.
        alpha: α = ∂F/∂e, (*batch, N).
        beta: β = 2 ∂F/∂v, (*batch, N).
        prior: a Gaussian prior with the temperature in its precision; None for the data alone.
        mean: m, (*batch, D).
        weights: w, (*batch, N).
        at: e and v, at which α and β are exact, (*batch, N) each; None where they are bounds or averages over draws.
        bends: computes, from e and v, the derivatives of β/w in them, (*batch, N) each; None where ``at`` is.

    >>> X = torch.tensor([[1.0], [2.0]])
    >>> Sites(X, X, torch.ones(2), torch.ones(2), None, torch.zeros(1)).raw()
    Raw(g=tensor([3.]), H=tensor([[5.]]))
    """

    rows: Tensor  # X, (N, D) or (*batch, N, D); or (N, D) sparse CSR
    projected: Tensor | None  # X C, (*batch, N, D); a sparse X has none
    alpha: Tensor  # ∂F/∂e, (*batch, N)
    beta: Tensor  # 2 ∂F/∂v, (*batch, N)
    prior: Prior | FullPrior | None  # tempered; None of the data alone
    mean: Tensor  # m, (*batch, D)
    weights: Tensor | None = None  # w, (*batch, N)
    at: tuple[Tensor, Tensor] | None = None  # e and v, (*batch, N) each
    bends: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def with_prior(
        self,
        prior: Prior | FullPrior,  # tempered
        mean: Tensor,  # m, (*batch, D)
    ) -> "Sites":
        """Return the same rows with this prior in the place of the one they had."""
        return self._replace(prior=prior, mean=mean)

    def framed(self, frame: Frame) -> Framed:
        """Bring the sites into the frame: a = (XC)ᵀα + CᵀΛ(m - m₀) and W = Π((XC)ᵀ diag(β) XC + CᵀΛC)."""
        structure, prior = frame.structure, self.prior
        if self.projected is None:
            a = frame.pull(self._gradient())
            W = structure.sparse_gram(frame.root, self.rows, self.beta, frame.upper)
        else:
            a = multiply(self.projected.mT, self.alpha)
            if prior is not None:
                a = a + frame.pull(prior.force(self.mean))
            W = _outer(structure, self.projected, self.beta)
        return Framed(a, W if prior is None else W + prior.framed(frame))

    def raw(self) -> Raw:
        """Sum the sites in θ: g = Xᵀα + Λ(m - m₀) and H = Xᵀ diag(β) X + Λ."""
        H = sparse.gram(self.rows, self.beta) if self.projected is None else gram(self.rows, self.beta)
        return Raw(self._gradient(), H if self.prior is None else self.prior.add_to(H))

    def _gradient(self) -> Tensor:
        """Xᵀα + Λ(m - m₀)."""
        data = self.rows.mT @ self.alpha if self.projected is None else multiply(self.rows.mT, self.alpha)
        return data if self.prior is None else data + self.prior.force(self.mean)

    def change(self, frame: Frame, exact: bool = False) -> Change | None:
        """Return the map from a move to the changes of a and W: those of e and v, through α and β; no new expectation.

        With A = XC, de = Aδ and dv_n = 2 Σ_i A_ni (AK)_ni, where the derivatives of F are known (Price 1958):

            Cᵀ dg = Aᵀ(β de + ½ β_e dv) + CᵀΛCδ        Cᵀ dH C = Aᵀ diag(β_e de + β_v dv) A

        Many rows are multiplied in single precision, which is enough for a step, unless it is to be ``exact``.
        """
        A, prior, structure = self.projected, self.prior, frame.structure
        if A is None or self.at is None or self.bends is None or self.weights is None:
            return None
        dtype = torch.float32 if A.numel() > _LARGE and not exact else A.dtype
        beta_e, beta_v = self.bends(*self.at)
        parts = A, self.beta, self.weights * beta_e, 2 * self.weights * beta_v
        A, beta, beta_e, beta_v = (part.to(dtype) for part in parts)

        def change(delta: Tensor, K: Structured) -> tuple[Tensor, Structured]:
            d, k = delta.to(dtype), K.to(dtype)
            de = multiply(A, d)
            half = torch.linalg.vecdot(A, structure.rows(A, k, frame.upper))  # ½ dv
            slope = torch.addcmul(beta * de, beta_e, half)
            a = multiply(A.mT, slope).to(delta)
            if prior is not None:
                a = a + frame.pull(prior.product(frame.push(delta)))
            return a, _outer(structure, A, torch.addcmul(beta_e * de, beta_v, half)).to(K)

        return change

    def merged(self, where: Tensor, old: "Sites") -> "Sites":
        """Keep this packet for the members (*batch,) of the mask, and the old one for the others; rows are shared."""
        projected = self.projected
        if projected is not None and old.projected is not None:
            projected = where_members(where, projected, old.projected)
        return self._replace(
            projected=projected,
            alpha=where_members(where, self.alpha, old.alpha),
            beta=where_members(where, self.beta, old.beta),
            mean=where_members(where, self.mean, old.mean),
            at=None if self.at is None or old.at is None else _merged(where, self.at, old.at),
        )


def _outer(structure: Pattern, rows: Tensor, weights: Tensor, wide: int = 128) -> Structured:
    """Keep the stored entries of Σ_n w_n x_n x_nᵀ; of a large dense matrix only one triangle is multiplied out."""
    if isinstance(structure, Dense) and structure.dim > wide:
        return gram(rows, weights)
    return structure.lower(rows * weights[..., None], rows)


Derivative = Framed | Raw | Curved | Sites
"""What an estimator may give as the derivative of E_q[ℓ]."""


class Cost(NamedTuple):
    """What an expectation cost, counted in passes over the whole data or in calls of the user's function.

    Attributes:
        gradients: evaluations with a gradient.
        hessians: evaluations of a Hessian, of D Hessian-vector products each.
        values: evaluations of the value alone.

    >>> Cost(10, 0)
    Cost(gradients=10, hessians=0, values=0)
    """

    gradients: int
    hessians: int  # of D Hessian-vector products each
    values: int = 0  # without a derivative


class Expectation(NamedTuple):
    """E_q[ℓ] and its derivative at one q, as an estimator returns them; q adds the entropy, in one place.

    Attributes:
        value: E_q[ℓ], (*batch,), in nats.
        derivative: a `Framed`, `Raw` or `Sites` packet.
        temperature: γ, the weight of the entropy in L = E_q[ℓ] - γ entropy.
        comparable: whether two calls at one q agree and the derivative is that of ``value``, exactly or up to
            ``noise2`` where that is told, so that a decrease of L may be tested.
        cost: what it took.
        noise2: the squared standard error of the derivative in the natural norm, (*batch,), where it is known and the
            derivative is that of ``value`` up to this error.
        learned: what the estimator reads at its next call, such as the constants of a control variate.

    >>> packet = Expectation(torch.tensor(1.0), Framed(torch.zeros(1), torch.ones(1, 1)), 1.0, True, Cost(1, 0))
    >>> from torchngvi import CholeskyGaussian
    >>> CholeskyGaussian(1).local(packet).P.tolist()  # at the optimum
    [[0.0]]
    """

    value: Tensor  # E_q[ℓ], (*batch,)
    derivative: Derivative
    temperature: float  # γ
    comparable: bool  # deterministic, and the derivative is that of `value`: decrease may be tested
    cost: Cost
    noise2: Tensor | None = None  # |standard error of the derivative|²_F⁻¹ (*batch,), where it is known
    learned: Mapping[str, Tensor] | None = None  # what the estimator reads at its next call


class Local(NamedTuple):
    """The gradient of L = E_q[ℓ] - γ entropy in the frame of q: a = Cᵀ g and P = W - γI, which vanish at the optimum.

    >>> Local(torch.zeros(1), torch.zeros(1, 1)).P.tolist()
    [[0.0]]
    """

    a: Tensor  # (*batch, D)
    P: Structured  # W - γ I
