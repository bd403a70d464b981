"""What an expectation hands on: a value, and a derivative in one of three forms.

`Framed` holds the derivative in the frame of q, `Raw` in θ, and `Sites` as two numbers for each row of a design.  An
estimator returns whichever costs it least; each can be turned into a and W by ``framed``.  The priors, whose part of
the derivative is known exactly, stand here too.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.interfaces.frame import Frame, where_members
from torchngvi.numerics import sparse
from torchngvi.numerics.linalg import gram
from torchngvi.structures.pattern import Structured

# from a move (δ, K) in the frame, m' = m + Cδ and L' = L(I + K) of the stored root, to the changes of a and W where the
# frame stands still, Cᵀ dg and Π(Cᵀ dH C)
Change = Callable[[Tensor, Structured], tuple[Tensor, Structured]]


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
        square = self.precision * (theta - self.mean).square()
        return 0.5 * (square - torch.log(self.precision / (2 * torch.pi)).expand(square.shape)).sum(-1)

    def expected_energy(self, frame: Frame) -> Tensor:
        """Compute E_q[-log p(θ)] = -log p(m) + ½ Σ_i Λ_ii V_ii, (*batch,), differentiable in the frame."""
        return self.energy(frame.mean) + 0.5 * (self.precision * frame.variance).sum(-1)

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
        return Prior(self.mean, factor * self.precision)


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
        return FullPrior(self.mean, factor * self.precision, math.sqrt(factor) * self.root)


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

    def change(self, frame: Frame) -> Change | None:
        """Return None: how a and W change with q is not known."""
        return None

    def merged(self, where: Tensor, old: "Framed") -> "Framed":
        """Keep this packet for the members (*batch,) of the mask, and take the old one for the others."""
        return Framed(where_members(where, self.a, old.a), where_members(where, self.W, old.W))


class Raw(NamedTuple):
    """The derivative of E_q[ℓ] in θ: the mean gradient g = E_q[∇ℓ] and the mean Hessian H = E_q[∇²ℓ].

    Models with closed forms and estimators that evaluate Hessians return it; the natural coordinates read it as it is.

    Attributes:
        g: the mean gradient, (*batch, D).
        H: the mean Hessian, (*batch, D, D), symmetric.
        bend: makes, in the frame, the map of `change`; None where it is not known.

    >>> packet = Raw(torch.ones(1), torch.ones(1, 1))
    >>> packet.with_prior(Prior(torch.zeros(1), torch.full((1,), 2.0)), torch.ones(1)).g.tolist()
    [3.0]
    """

    g: Tensor  # (*batch, D)
    H: Tensor  # (*batch, D, D), symmetric
    bend: Callable[[Frame], Change] | None = None

    def with_prior(
        self,
        prior: Prior | FullPrior,  # tempered
        mean: Tensor,  # m, (*batch, D)
    ) -> "Raw":
        """Add the part of a Gaussian prior: g + Λ(m - m₀) and H + Λ, the latter in place."""
        g, H, bend = self.g + prior.force(mean), prior.add_to(self.H), self.bend
        if bend is None:
            return Raw(g, H)

        def with_prior(frame: Frame) -> Change:
            data = bend(frame)

            def change(delta: Tensor, K: Structured) -> tuple[Tensor, Structured]:
                a, W = data(delta, K)
                return a + frame.pull(prior.product(frame.push(delta))), W

            return change

        return Raw(g, H, with_prior)

    def change(self, frame: Frame) -> Change | None:
        """Return the map from a move to the changes of a and W, where the model knows it."""
        return None if self.bend is None else self.bend(frame)

    def raw(self) -> "Raw":
        """Return the packet itself, which is in θ already."""
        return self

    def framed(self, frame: Frame) -> Framed:
        """Bring the derivative into the frame, a = Cᵀ g and W = Π(Cᵀ H C), by two products of D x D matrices."""
        return Framed(frame.pull(self.g), frame.conjugate(self.H))

    def merged(self, where: Tensor, old: "Raw") -> "Raw":
        """Keep this packet for the members (*batch,) of the mask, and take the old one for the others."""
        return Raw(where_members(where, self.g, old.g), where_members(where, self.H, old.H))


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
        bends: computes ∂β/∂e and ∂β/∂v, (*batch, N) each, for Newton's method; None where they are not known.

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
    bends: Callable[[], tuple[Tensor, Tensor]] | None = None  # ∂β/∂e and ∂β/∂v, (*batch, N) each

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
            a = (self.alpha[..., None, :] @ self.projected)[..., 0, :]
            if prior is not None:
                a = a + frame.pull(prior.force(self.mean))
            W = structure.lower(self.projected * self.beta[..., None], self.projected)
        return Framed(a, W if prior is None else W + prior.framed(frame))

    def raw(self) -> Raw:
        """Sum the sites in θ: g = Xᵀα + Λ(m - m₀) and H = Xᵀ diag(β) X + Λ."""
        H = sparse.gram(self.rows, self.beta) if self.projected is None else gram(self.rows, self.beta)
        return Raw(self._gradient(), H if self.prior is None else self.prior.add_to(H))

    def _gradient(self) -> Tensor:
        """Xᵀα + Λ(m - m₀)."""
        if self.projected is None:
            data = self.rows.mT @ self.alpha
        else:
            data = (self.alpha[..., None, :] @ self.rows)[..., 0, :]
        return data if self.prior is None else data + self.prior.force(self.mean)

    def change(self, frame: Frame) -> Change | None:
        """Return the map from a move to the changes of a and W: those of e and v, through α and β; no new expectation.

        With A = XC, de = Aδ and dv_n = 2 Σ_i A_ni (AK)_ni, where the derivatives of F are known (Price 1958):

            Cᵀ dg = Aᵀ(β de + ½ β_e dv) + CᵀΛCδ        Cᵀ dH C = Aᵀ diag(β_e de + β_v dv) A
        """
        A, prior, structure = self.projected, self.prior, frame.structure
        if A is None or self.bends is None:
            return None
        beta_e, beta_v = self.bends()

        def change(delta: Tensor, K: Structured) -> tuple[Tensor, Structured]:
            de = (A @ delta[..., None])[..., 0]
            dv = 2 * torch.linalg.vecdot(A, structure.rows(A, K, frame.upper))
            slope = self.beta * de + 0.5 * beta_e * dv
            a = (slope[..., None, :] @ A)[..., 0, :]
            if prior is not None:
                a = a + frame.pull(prior.product(frame.push(delta)))
            return a, structure.lower(A * (beta_e * de + beta_v * dv)[..., None], A)

        return change

    def merged(self, where: Tensor, old: "Sites") -> "Sites":
        """Keep this packet for the members (*batch,) of the mask, and the old one for the others; rows are shared."""
        projected, new, before = self.projected, self.bends, old.bends
        if projected is not None and old.projected is not None:
            projected = where_members(where, projected, old.projected)
        bends = None
        if new is not None and before is not None:
            bends = lambda: tuple(where_members(where, x, y) for x, y in zip(new(), before(), strict=True))  # noqa: E731
        return self._replace(
            projected=projected,
            alpha=where_members(where, self.alpha, old.alpha),
            beta=where_members(where, self.beta, old.beta),
            mean=where_members(where, self.mean, old.mean),
            bends=bends,
        )


Derivative = Framed | Raw | Sites


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
        learned: what the estimator wants to be told at its next call, such as the constants of a control variate.

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
    noise2: Tensor | None = (
        None  # |standard error of the derivative|²_F⁻¹ (*batch,), where it is one of `value` up to that
    )
    learned: Mapping[str, Tensor] | None = None  # what the estimator wants to be told at its next call


class Local(NamedTuple):
    """The gradient of L = E_q[ℓ] - γ entropy in the frame of q: a = Cᵀ g and P = W - γI, which vanish at the optimum.

    >>> Local(torch.zeros(1), torch.zeros(1, 1)).P.tolist()
    [[0.0]]
    """

    a: Tensor  # (*batch, D)
    P: Structured  # W - γ I
