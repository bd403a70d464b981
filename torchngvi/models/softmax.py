"""Softmax regression: K classes, several correlated predictors a row, a Gaussian prior.

p(y = k | x) = e^{η_k}/Σ_j e^{η_j}, η_0 = 0 for the first class and η_k = θ_kᵀx for the others: θ has
K - 1 blocks of D coefficients, and two classes are logistic regression.  Under q a row's predictors
are jointly normal, N(e, Σ) in K - 1 dimensions, and with fixed nodes z_s and weights w_s

    F(e, Σ) = Σ_s w_s log Σ_k exp η_sk - e_y,   η_s = e + L z_s,   Σ = L Lᵀ

g and H come from the exact derivatives of this sum, α = ∂F/∂e and, with M = Lᵀ ∂F/∂L,
B = 2 ∂F/∂Σ = L⁻ᵀ (tril½[M] + tril½[M]ᵀ) L⁻¹ (the adjoint of the Cholesky factorisation; Murray 2016):

    g_k = Xᵀα_k     H_kj = Xᵀ diag(B_kj) X
"""

import copy
import functools
import math
from typing import Any, Self, final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import AdditiveTractable, Frame, Posterior, Raw, where_members
from torchngvi.models import checks
from torchngvi.numerics import sparse
from torchngvi.numerics.inference_mode import tracked
from torchngvi.numerics.linalg import cholesky, tril_half

_STEPS = {1: 0.25, 2: 0.4}  # of the grids of nodes, by dimension
_REACH = {1: 8.5, 2: 7.0}  # standard deviations the grids span
_CELLS = 1_000_000  # rows times nodes at once


@final
class SoftmaxRegression(AdditiveTractable):
    """Log joint of K-class softmax regression with a Gaussian prior.

    The expectations are deterministic sums, so that values may be compared and steps found by
    trial.  For K ≤ 3 a trapezoid rule on a grid of nodes: errors in F and α below 1e-8 for standard
    deviations of the predictors up to 2, 2e-4 at 5, 1e-2 at 10.  For K > 3 Sobol points in antithetic
    pairs, whitened so that quadratic functions are exact: about 1e-3 at a standard deviation of 1
    with 512 nodes.  B is less accurate where a row's predictors nearly coincide, by ten times and more.

    Args:
        X: the design, (N, D), dense. Add a column of ones for an intercept.
        y: the class labels, (N,), any numbers.
        prior_precision: of all (K - 1) D coefficients, class by class: a scalar, (K - 1) D numbers,
            or a matrix.
        prior_mean: the mean of the prior, a scalar or (K - 1) D numbers.
        weights: factors of the log likelihood of each row, (N,), not negative.
        temperature: γ, the weight of KL(q‖prior).
        num_nodes: the number of nodes of the Sobol rule, even and at least 2K.
        classes: all labels there are, the first with η = 0. A part of the data need not hold all of them then, and
            all parts are coded alike; without them the labels of this y, sorted, are the classes.

    Raises:
        InputError: if shapes do not fit, values are not finite, there are fewer than two classes, a label is none of
            them,
            X is sparse, or the number of nodes is odd or too small.

    >>> model = SoftmaxRegression(torch.eye(3), [0, 1, 2])
    >>> model.dim, model.classes.tolist()  # 2 classes beside the first, 3 coefficients each
    (6, [0.0, 1.0, 2.0])
    """

    @tracked
    def __init__(
        self,
        X: Any,
        y: Any,
        *,
        prior_precision: Any = 1.0,
        prior_mean: Any = 0.0,
        weights: Any = None,
        temperature: float = 1.0,
        num_nodes: int = 512,
        classes: Any = None,
    ) -> None:
        self.X = checks.design(X)
        if self.X.ndim != 2 or sparse.is_sparse(self.X):
            raise InputError(
                f"softmax regression takes one dense matrix X; got shape {tuple(self.X.shape)}, {self.X.layout}. "
                "Pass X.to_dense(), or fit the members one by one."
            )
        labels = checks.per_row("y", y, self.X)
        self.classes = torch.unique(labels) if classes is None else checks.class_values(classes, labels)
        if len(self.classes) < 2 or labels.ndim > 1:
            raise InputError(
                f"y must be ({self.num_rows},) labels of at least two classes; got shape {tuple(labels.shape)} with "
                f"{len(self.classes)}. Check the target column, or that the split has every class."
            )
        self.coding = tuple(self.classes.tolist())
        if num_nodes < 2 * len(self.classes) or num_nodes % 2:
            raise InputError(
                f"num_nodes must be even, since nodes come in antithetic pairs, and at least twice the number of "
                f"classes, {len(self.classes)}; got {num_nodes}."
            )
        self.y = checks.class_codes(labels, self.classes)
        self.weights = checks.row_weights(weights, labels, self.X)
        self.temperature = checks.temperature(temperature)
        self.prior = checks.prior(prior_mean, prior_precision, self.dim, self.X)
        self.num_nodes = num_nodes
        self.num_data = self.num_rows  # N, of a mini-batch that of all the data

    @property
    def num_rows(self) -> int:
        """The number of rows of X."""
        return self.X.shape[-2]

    @property
    def num_classes(self) -> int:
        """The number K of classes."""
        return len(self.classes)

    @property
    def dim(self) -> int:
        """The number (K - 1) D of coefficients; ``theta.unflatten(-1, (K - 1, D))`` has a block a class."""
        return (self.num_classes - 1) * self.X.shape[-1]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move and convert every tensor, with the arguments of ``torch.nn.Module.to``.

        Returns:
            A new model.
        """
        new = copy.copy(self)
        for name in ("X", "weights", "classes"):
            setattr(new, name, getattr(self, name).to(*args, **kwargs))
        new.y = self.y.to(new.X.device)
        new.prior = type(self.prior)(*(tensor.to(*args, **kwargs) for tensor in self.prior))
        return new

    def minibatch(
        self,
        index: Any,  # row numbers, (B,)
    ) -> Self:
        """The model on some of its rows, scaled as by :meth:`GeneralizedLinear.minibatch`.

        Args:
            index: the row numbers of the mini-batch, (B,).

        Returns:
            A new model.

        Raises:
            InputError: if it is anything but row numbers of X, at least one.
        """
        index = checks.batch_index(index, self.X)
        new = copy.copy(self)
        new.X, new.y = self.X[index], self.y[index]
        new.weights = self.weights[index] * (self.num_rows / len(index))
        new.comparable = False
        return new

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that a value depends on."""
        return (self.X, self.y, self.weights, *self.prior)

    def predictors(
        self,
        theta: Tensor,  # (*sample, *batch, (K - 1) D)
        X: Tensor | None = None,  # new rows, (M, D)
    ) -> Tensor:
        """Compute the linear predictors of all classes but the first, at the rows of the data by default.

        Args:
            theta: the coefficients, (*sample, *batch, (K - 1) D).
            X: other rows, (M, D).

        Returns:
            η_1, .., η_K-1, (*sample, *batch, N, K - 1).
        """
        X = self.X if X is None else X
        return X @ theta.unflatten(-1, (self.num_classes - 1, -1)).mT

    def data_log_likelihood(
        self,
        theta: Tensor,  # (*sample, *batch, (K - 1) D)
    ) -> Tensor:
        """Return Σ w log p(y | θ), (*sample, *batch)."""
        return -(self.weights * self._energy(self.predictors(theta), self.y)).sum(-1)

    @staticmethod
    def _energy(eta: Tensor, y: Tensor) -> Tensor:
        """log(1 + Σ e^η_k) - η_y, (..., N)."""
        eta = torch.nn.functional.pad(eta, (1, 0))
        chosen = eta.gather(-1, y.expand(eta.shape[:-1])[..., None])[..., 0]
        return eta.logsumexp(-1) - chosen

    def data_energy(self, frame: Frame) -> tuple[Tensor, Raw]:
        """Return E_q[-Σ w log p(y | θ)], (*batch,), and its derivative."""
        mean, covariance = self._marginals(frame, self.X)
        value, slope, curvature = self._integrate(mean, covariance)
        one_hot = torch.nn.functional.one_hot(self.y, self.num_classes)[:, 1:].to(slope.dtype)
        value = value - (one_hot * mean).sum(-1)
        alpha = self.weights[:, None] * (slope - one_hot)
        g = (alpha.mT @ self.X).flatten(-2)
        blocks = self.weights[:, None, None] * curvature  # (*batch, N, K - 1, K - 1)
        H = torch.einsum("...nkj,nd,ne->...kdje", blocks, self.X, self.X)
        return (self.weights * value).sum(-1), Raw(g, H.flatten(-4, -3).flatten(-2))

    def probabilities(
        self,
        q: Posterior,
        X: Tensor | None = None,  # new rows, (M, D)
    ) -> Tensor:
        """The predictive probabilities E_q[p(y = k | x)], by the same nodes, at the rows of the data by default.

        Args:
            q: the posterior over the coefficients.
            X: other rows, (M, D).

        Returns:
            The probabilities in the order of ``classes``, (*batch, M, K).
        """
        with torch.no_grad():
            mean, covariance = self._marginals(q.frame(), self.X if X is None else X.to(self.X))
            others = self._integrate(mean, covariance)[1]
        return torch.cat([1 - others.sum(-1, keepdim=True), others], -1)

    def probabilities_sd(
        self,
        q: Posterior,
        X: Tensor | None = None,  # new rows, (M, D)
    ) -> Tensor:
        """The standard deviations of p(y = k | x, θ) under q, by the same nodes, at the rows of the data by default.

        One wants them where it matters how well a probability itself is known.

        Args:
            q: the posterior over the coefficients.
            X: other rows, (M, D).

        Returns:
            The standard deviations in the order of ``classes``, (*batch, M, K).
        """
        with torch.no_grad():
            mean, covariance = self._marginals(q.frame(), self.X if X is None else X.to(self.X))
            z, w = nodes(self.num_classes - 1, self.num_nodes, mean.dtype, mean.device)
            parts = []
            rows = max(_CELLS // len(w), 1)
            for e, V in zip(mean.flatten(0, -2).split(rows), covariance.flatten(0, -3).split(rows), strict=True):
                p = _predictors(e, V, z)[0].softmax(-2)  # (N, K, S)
                center = p @ w
                parts.append(((p - center[..., None]).square() @ w).sqrt())
        return torch.cat(parts).reshape(*mean.shape[:-1], self.num_classes)

    def _marginals(self, frame: Frame, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (*batch, N, K - 1) and covariance (*batch, N, K - 1, K - 1) of a row's predictors."""
        root = frame.dense()
        projected = X @ root.unflatten(-2, (self.num_classes - 1, -1))  # (*batch, K - 1, N, (K - 1) D)
        by_row = projected.transpose(-3, -2)
        return self.predictors(frame.mean, X), by_row @ by_row.mT

    def _integrate(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """E[log(1 + Σ e^η_k)] (*batch, N), its derivative in e and twice that in Σ, a few rows at a time."""
        z, w = nodes(self.num_classes - 1, self.num_nodes, mean.dtype, mean.device)
        shape = mean.shape[:-1]
        rows = max(_CELLS // len(w), 1)
        blocks = zip(mean.flatten(0, -2).split(rows), covariance.flatten(0, -3).split(rows), strict=True)
        parts = [torch.cat(part) for part in zip(*(_block(e, V, z, w) for e, V in blocks), strict=True)]
        value, slope, curvature = (part.reshape(*shape, *part.shape[1:]) for part in parts)
        return value, slope, curvature


def _predictors(
    mean: Tensor,  # (N, J)
    covariance: Tensor,  # (N, J, J)
    z: Tensor,  # (S, J)
) -> tuple[Tensor, Tensor]:
    """The predictors of all classes at the nodes, that of the first 0, (N, K, S), and the root L of the covariance."""
    # a row of zeros has no variance: what is added changes F by less than rounding does its derivative
    ridge = torch.finfo(mean.dtype).eps ** 0.625
    L, ok = cholesky(covariance + ridge * torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device))
    L = where_members(ok, L, torch.full_like(L, torch.nan))  # an error would make the host wait for the device
    return torch.nn.functional.pad(mean[..., None] + L @ z.mT, (0, 0, 1, 0)), L


def _block(
    mean: Tensor,  # (N, J)
    covariance: Tensor,  # (N, J, J)
    z: Tensor,  # (S, J)
    w: Tensor,  # (S,)
) -> tuple[Tensor, Tensor, Tensor]:
    eta, L = _predictors(mean, covariance, z)
    top = eta.amax(-2)
    powers = (eta - top[:, None]).exp_()
    total = powers.sum(-2)
    value = (top + total.log()) @ w
    weighted = powers[:, 1:] * (w / total)[:, None]  # (N, K - 1, S)
    slope = weighted.sum(-1)
    half = tril_half(L.mT @ (weighted @ z))  # ∂F/∂L = Σ w p zᵀ
    inner = torch.linalg.solve_triangular(L.mT, half + half.mT, upper=True)
    return value, slope, torch.linalg.solve_triangular(L, inner, upper=False, left=False)


@functools.cache
def nodes(dim: int, count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights for the standard normal distribution in J = K - 1 dimensions.

    They are a grid for J ≤ 2, else ``count`` Sobol points with mean 0 and covariance I.

    Args:
        dim: the dimension J.
        count: the number of Sobol points, even.
        dtype, device: of the nodes and weights.

    Returns:
        The nodes, (S, J), and the weights, (S,).

    >>> z, w = nodes(1, 512, torch.float64, torch.device("cpu"))
    >>> round((w @ z.square()).item(), 6)  # the variance
    1.0
    """
    with torch.inference_mode(False):
        z, w = _grid(dim) if dim in _STEPS else _sobol(dim, count)
        return z.to(device, dtype), w.to(device, dtype)


def _grid(dim: int) -> tuple[Tensor, Tensor]:
    number = math.floor(_REACH[dim] / _STEPS[dim])
    axis = torch.arange(-number, number + 1, dtype=torch.float64, device="cpu") * _STEPS[dim]
    z = torch.cartesian_prod(*[axis] * dim).reshape(-1, dim)
    z = z[z.square().sum(-1) <= _REACH[dim] ** 2]
    w = torch.exp(-0.5 * z.square().sum(-1))
    return z, w / w.sum()


def _sobol(dim: int, count: int) -> tuple[Tensor, Tensor]:
    uniform = torch.quasirandom.SobolEngine(dim, scramble=True, seed=0).draw(count // 2, dtype=torch.float64)
    half = torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12))
    factor = torch.linalg.cholesky(half.mT @ half / len(half))
    z = torch.linalg.solve_triangular(factor, half.mT, upper=False).mT
    return torch.cat([z, -z]), torch.full((count,), 1 / count, dtype=torch.float64, device="cpu")
