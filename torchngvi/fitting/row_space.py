"""Many more coefficients than rows: the exact posterior of a generalised linear model in its row space.

A likelihood that sees θ through Xθ alone leaves the prior as it is outside the rows of X.  With
Λ^-½ Xᵀ = Q R, Q of D x r with orthonormal columns,

    θ = m₀ + Λ^-½ [Q φ + (1 - QQᵀ) ξ],   ξ ~ N(0, 1),   Xθ = X m₀ + Rᵀ φ,   φ ~ N(0, 1) a priori,

so that the posterior of θ is that of an r-dimensional model with the design Rᵀ and a standard normal
prior, r ≤ N, and the objective is the same number.  Every method and every posterior of the library
works on it; nothing of size D x D is ever made.  The precision of the optimum is Λ + Xᵀ diag(β/γ) X.

R comes from the N x N matrix K = X Λ⁻¹ Xᵀ = U s Uᵀ: Rᵀ = U √s, and Q = Λ^-½ Xᵀ U s^-½ is applied, not
stored (the dual of kernel methods; Seeger 2008, section 3, keeps the site weights instead).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import read_instance
from torchngvi.errors import InputError
from torchngvi.fitting.fit import fit
from torchngvi.fitting.records import FitResult
from torchngvi.interfaces import Prior
from torchngvi.models import GeneralizedLinear
from torchngvi.numerics import sparse
from torchngvi.numerics.linalg import eigh
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.shapes import Shape, sizes

__all__ = ["LiftedGaussian", "RowSpace"]


class RowSpace:
    """A generalised linear model in the r ≤ N coordinates φ that its data can see.

    Use it where there are many more coefficients than rows: nothing of size D x D is made, and
    the objective is the same number.  With more rows than coefficients, fit the model itself.

    Args:
        model: one data set, (N, D), dense or sparse CSR, with a diagonal prior precision.

    Raises:
        InputError: a batch of data sets, or a full prior precision.

    >>> X = torch.randn(3, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> space = RowSpace(GeneralizedLinear(X, [0.0, 1.0, 1.0]))
    >>> space.model.dim
    3
    """

    _width = 4096  # columns of X at a time, so that memory stays near N x 4096

    def __init__(self, model: GeneralizedLinear) -> None:
        read_instance("model", model, GeneralizedLinear, "is a GeneralizedLinear with few rows")
        X, prior = model.X, model.prior
        if X.ndim != 2 or model.y.ndim != 1:
            raise InputError(f"RowSpace takes one data set; got X {tuple(X.shape)} and y {tuple(model.y.shape)}.")
        if not isinstance(prior, Prior):
            raise InputError("RowSpace needs a diagonal prior precision, a scalar or (D,); got a full matrix.")
        self.original = model
        dim = X.shape[1]
        self.prior_mean, self.prior_precision = (part.expand(dim) for part in prior)
        rows = X.shape[0]
        K = torch.zeros(rows, rows, dtype=X.dtype, device=X.device)
        for columns, part in self._columns():
            K += (part / self.prior_precision[columns]) @ part.mT
        values, vectors, ok = eigh(K)
        if not bool(ok):
            raise InputError(
                f"RowSpace needs the products of the rows, X Λ⁻¹ Xᵀ, to be finite; in {X.dtype} some of them overflow. "
                "Scale the columns of X."
            )
        seen = values > 1e-12 * values[-1]  # the others are zero
        root = values[seen].sqrt()
        self.basis = vectors[:, seen] / root  # B: Q = Λ^-½ XᵀB
        self.model = GeneralizedLinear(
            vectors[:, seen] * root,
            model.y,
            model.likelihood,
            weights=model.weights,
            offset=model.predictor(self.prior_mean),
            temperature=model.temperature,
        )

    def _columns(self) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of columns of X one after another, dense."""
        X, by_column = self.original.X, None
        if X.layout != torch.strided:
            by_column = sparse.by_column(X)
            pointers, rows, values = by_column.ccol_indices(), by_column.row_indices(), by_column.values()
        for start in range(0, X.shape[1], self._width):
            stop = min(start + self._width, X.shape[1])
            if by_column is None:
                yield slice(start, stop), X[:, start:stop]
                continue
            first, last = int(pointers[start]), int(pointers[stop])
            part = values.new_zeros(X.shape[0], stop - start)
            where = torch.arange(stop - start, device=part.device).repeat_interleave(pointers[start : stop + 1].diff())
            part[rows[first:last], where] = values[first:last]
            yield slice(start, stop), part

    def _blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Blocks of columns, each with their Λ^-½ and their rows of Q."""
        for columns, part in self._columns():
            scale = self.prior_precision[columns].rsqrt()
            yield columns, scale, (part * scale).mT @ self.basis

    def fit(self, **options: Any) -> tuple["LiftedGaussian", FitResult]:
        """Fit the posterior from the prior.

        Args:
            options: keywords of `torchngvi.fit`, such as ``tolerance`` and ``progress``.

        Returns:
            The posterior of θ, to draw θ from, and the verdict, whose own ``sample`` gives the coordinates φ.

        >>> X = torch.eye(2, 5, dtype=torch.float64)
        >>> posterior, result = RowSpace(GeneralizedLinear(X, [0.0, 1.0])).fit(progress=False)
        >>> result.converged, tuple(posterior.variance.shape)
        (True, (5,))
        """
        q = CholeskyGaussian.from_prior(self.model.prior)
        result = fit(q, self.model, **options)
        return self.lift(q), result

    def lift(self, q: Gaussian) -> "LiftedGaussian":
        """The posterior of θ that belongs to a posterior of φ.

        Args:
            q: a posterior over the r coordinates φ, without batch dimensions.

        Returns:
            The posterior over the D coefficients, which follows q.

        Raises:
            InputError: a q of another dimension than ``model``.
        """
        if q.dim != self.model.dim or q.batch_shape:
            raise InputError(
                f"q must be one posterior over the {self.model.dim} coordinates of RowSpace.model; got {q.dim} and a "
                f"batch {tuple(q.batch_shape)}."
            )
        return LiftedGaussian(self, q)


class LiftedGaussian:
    """A Gaussian N(m, V) over D coefficients that is held by its r x r part.

    V = Λ^-½ (1 + Q (V_φ - 1) Qᵀ) Λ^-½ is never formed; moments and draws are computed block by block of columns.

    Args:
        space: the row space, which knows Λ, m₀ and Q.
        q: the posterior of φ.

    >>> space = RowSpace(GeneralizedLinear(torch.eye(2, 5), [0.0, 1.0]))
    >>> posterior = LiftedGaussian(space, CholeskyGaussian(2))  # the prior, N(0, 1)
    >>> posterior.variance, posterior.sample((3,)).shape
    (tensor([1., 1., 1., 1., 1.]), torch.Size([3, 5]))
    """

    def __init__(self, space: RowSpace, q: Gaussian) -> None:
        self.space, self.q = space, q

    def _per_column(self, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """function(Λ^-½ of some columns, their rows of Q), (D,)."""
        space = self.space
        # one result, written in place: small tensors kept between large ones would pin the memory of all
        result = torch.empty_like(space.prior_mean)
        for columns, scale, Q in space._blocks():
            result[columns] = function(scale, Q)
        return result

    @property
    def mean(self) -> Tensor:
        """The mean m = m₀ + Λ^-½ Q E[φ], (D,)."""
        phi = self.q.mean
        return self.space.prior_mean + self._per_column(lambda scale, Q: scale * (Q @ phi))

    @property
    def variance(self) -> Tensor:
        """The diagonal of the covariance V, (D,)."""
        change = self.q.covariance - torch.eye(self.q.dim, dtype=self.q.dtype, device=self.q.device)
        return self._per_column(lambda scale, Q: scale**2 * (1 + ((Q @ change) * Q).sum(-1)))

    @property
    def stddev(self) -> Tensor:
        """The standard deviation of each coefficient, √diag(V), (D,)."""
        return self.variance.sqrt()

    @torch.no_grad()
    def sample(self, shape: Shape = (), generator: torch.Generator | None = None) -> Tensor:
        """Draw coefficients θ from the posterior.

        Args:
            shape: the shape of the draws, or a number of them; one draw by default.
            generator: the source of the draws; without one, torch's default generator.

        Returns:
            θ, (*shape, D).
        """
        space, q, shape = self.space, self.q, sizes(shape)
        phi = q.sample(shape, generator)
        noise = torch.randn((*shape, len(space.prior_mean)), dtype=q.dtype, device=q.device, generator=generator)
        # ξ and its coordinates Qᵀξ = Bᵀ X Λ^-½ ξ
        theta = noise * space.prior_precision.rsqrt()
        inside = self._rows(theta) @ space.basis
        change = (phi - inside).reshape(-1, q.dim)
        for columns, scale, Q in space._blocks():
            theta[..., columns] += ((change @ Q.mT) * scale).reshape(*shape, -1)
        return theta + space.prior_mean

    def _rows(self, theta: Tensor) -> Tensor:
        """Xθ without the offset, (*sample, N)."""
        model = self.space.original
        return model.predictor(theta) - model.offset

    def log_prob(self, theta: Tensor) -> Tensor:
        """The log density log q(θ), (*sample,), of coefficients (*sample, D)."""
        space = self.space
        shift = theta - space.prior_mean
        phi = self._rows(shift) @ space.basis
        outside = (space.prior_precision * shift.square()).sum(-1) - phi.square().sum(-1)
        free = theta.shape[-1] - self.q.dim
        constant = 0.5 * space.prior_precision.log().sum() - 0.5 * free * math.log(2 * math.pi)
        return self.q.log_prob(phi) - 0.5 * outside + constant

    def entropy(self) -> Tensor:
        """The entropy -E[log q] of the posterior in nats, 0-d."""
        free = len(self.space.prior_mean) - self.q.dim
        return (
            self.q.entropy() + 0.5 * free * (1 + math.log(2 * math.pi)) - 0.5 * self.space.prior_precision.log().sum()
        )

    def predictor(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The moments of the linear predictor Zθ at new rows, without the offset.

        Args:
            rows: the new rows Z, (M, D), dense.

        Returns:
            Mean and variance, (M,) each.
        """
        space = self.space
        prior, seen = rows @ space.prior_mean, rows.new_zeros(len(rows), self.q.dim)
        variance = (rows.square() / space.prior_precision).sum(-1)
        for columns, part in space._columns():
            # Z Λ^-½ Q
            seen += (rows[:, columns] / space.prior_precision[columns]) @ part.mT @ space.basis
        frame = self.q.frame()
        return prior + seen @ frame.mean, variance - seen.square().sum(-1) + frame.rows(seen).square().sum(-1)
