"""What an expectation hands on: a value, and a derivative in one of three forms."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.interfaces.frame import Frame, where_members
from torchngvi.numerics import sparse
from torchngvi.numerics.linalg import gram
from torchngvi.structures.pattern import Structured


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

    def with_prior(
        self,
        prior: Prior | FullPrior,  # tempered
        mean: Tensor,  # m, (*batch, D)
    ) -> "Raw":
        """g + Λ(m - m₀) and H + Λ, the latter in place."""
        return Raw(self.g + prior.force(mean), prior.add_to(self.H))

    def raw(self) -> "Raw":
        """The packet itself."""
        return self

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
    prior: Prior | FullPrior | None  # tempered; None of the data alone
    mean: Tensor  # m, (*batch, D)

    def with_prior(
        self,
        prior: Prior | FullPrior,  # tempered
        mean: Tensor,  # m, (*batch, D)
    ) -> "Sites":
        """The same rows, with this prior."""
        return self._replace(prior=prior, mean=mean)

    def framed(self, frame: Frame) -> Framed:
        """a = (XC)ᵀα + Cᵀ Λ(m - m₀),  W = Π((XC)ᵀ diag(β) XC + CᵀΛC)."""
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
        """g = Xᵀα + Λ(m - m₀),  H = Xᵀ diag(β) X + Λ."""
        H = sparse.gram(self.rows, self.beta) if self.projected is None else gram(self.rows, self.beta)
        return Raw(self._gradient(), H if self.prior is None else self.prior.add_to(H))

    def _gradient(self) -> Tensor:
        """Xᵀα + Λ(m - m₀)."""
        if self.projected is None:
            data = self.rows.mT @ self.alpha
        else:
            data = (self.alpha[..., None, :] @ self.rows)[..., 0, :]
        return data if self.prior is None else data + self.prior.force(self.mean)

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
    learned: Mapping[str, Tensor] | None = None  # what the estimator wants to be told at its next call


class Local(NamedTuple):
    """The gradient of L in q's frame; both vanish at the optimum."""

    a: Tensor  # (*batch, D)
    P: Structured  # W - γ I
