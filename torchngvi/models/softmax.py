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
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor

from torchngvi.arguments import read_size
from torchngvi.errors import InputError
from torchngvi.interfaces import AdditiveTractable, Change, Curved, Frame, Posterior, Raw, where_members
from torchngvi.models import checks
from torchngvi.numerics import sparse
from torchngvi.numerics.arrays import remembered, tracked
from torchngvi.numerics.linalg import cholesky, tril_half

# The rows of softmax regression: expectations of log Σ_k exp η_k over several jointly normal predictors, by nodes

_STEPS = {1: 0.25, 2: 0.4}  # of the grids of nodes, by dimension
_REACH = {1: 8.5, 2: 7.0}  # standard deviations the grids span


def predictors(
    mean: Tensor,  # (N, J)
    covariance: Tensor,  # (N, J, J)
    z: Tensor,  # (S, J)
) -> tuple[Tensor, Tensor]:
    """Compute the predictors of all classes at the nodes, that of the first 0, with the root L of the covariance."""
    # a row of zeros has no variance: what is added changes F by less than rounding does its derivative
    ridge = torch.finfo(mean.dtype).eps ** 0.625
    L, ok = cholesky(covariance + ridge * torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device))
    L = where_members(ok, L, torch.full_like(L, torch.nan))  # an error would make the host wait for the device
    return torch.nn.functional.pad(mean[..., None] + L @ z.mT, (0, 0, 1, 0)), L


def moments(
    mean: Tensor,  # (N, J)
    covariance: Tensor,  # (N, J, J)
    z: Tensor,  # (S, J)
    w: Tensor,  # (S,)
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute E[log(1 + Σ e^η_k)] of some rows, its derivative in e and twice that in Σ."""
    eta, L = predictors(mean, covariance, z)
    top = eta.amax(-2)
    powers = (eta - top[:, None]).exp_()
    total = powers.sum(-2)
    value = (top + total.log()) @ w
    weighted = powers[:, 1:] * (w / total)[:, None]  # (N, K - 1, S)
    slope = weighted.sum(-1)
    return value, slope, _curvature(L, L.mT @ (weighted @ z))  # ∂F/∂L = Σ w p zᵀ


def _curvature(L: Tensor, M: Tensor) -> Tensor:
    """L⁻ᵀ S L⁻¹ with S = tril½[M] + its transpose."""
    half = tril_half(M)
    inner = torch.linalg.solve_triangular(L.mT, half + half.mT, upper=True)
    return torch.linalg.solve_triangular(L, inner, upper=False, left=False)


class Nodes(NamedTuple):
    """Nodes with their weights, and for how many rows they are evaluated at once."""

    z: Tensor  # (S, J)
    w: Tensor  # (S,)
    rows: int


def bent(
    mean: Tensor,  # (*batch, N, J)
    covariance: Tensor,  # (*batch, N, J, J)
    at: Nodes,
    most: int = 2**23,
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Make the map from changes of e and Σ to those of the slope and the curvature that `moments` computes of them."""
    # most: probabilities at the nodes that are kept from one product to the next
    shape = mean.shape[:-1]
    parts = list(zip(mean.flatten(0, -2).split(at.rows), covariance.flatten(0, -3).split(at.rows), strict=True))
    few = mean.numel() * len(at.w) <= most
    kept = [_Bent(e, V, at) for e, V in parts] if few else None

    def change(de: Tensor, dV: Tensor) -> tuple[Tensor, Tensor]:
        moves = zip(de.flatten(0, -2).split(at.rows), dV.flatten(0, -3).split(at.rows), strict=True)
        made = kept if kept is not None else (_Bent(e, V, at) for e, V in parts)
        slopes, curvatures = zip(*(part(*move) for part, move in zip(made, moves, strict=True)), strict=True)
        return torch.cat(slopes).reshape(*shape, -1), torch.cat(curvatures).reshape(*shape, *dV.shape[-2:])

    return change


class _Bent:
    """The first derivatives of slope and curvature of a block of rows in e and Σ, by those of p at the nodes.

    With L = chol Σ, S = tril½[M] + its transpose, M = Lᵀ ∂F/∂L, the curvature is B = L⁻ᵀ S L⁻¹, and along dΣ

        dL = L tril½[L⁻¹ dΣ L⁻ᵀ],   dη = de + dL z,   dp = p ∘ (dη - pᵀdη),   dB = L⁻ᵀ dS L⁻¹ - RᵀB - BR,  R = dL L⁻¹.
    """

    def __init__(self, mean: Tensor, covariance: Tensor, at: Nodes) -> None:
        self.z = at.z
        eta, self.L = predictors(mean, covariance, at.z)
        self.p = eta.softmax(-2)[:, 1:]  # (N, J, S)
        self.weighted = self.p * at.w
        self.by_root = self.weighted @ self.z  # ∂F/∂L
        self.B = _curvature(self.L, self.L.mT @ self.by_root)

    def __call__(self, de: Tensor, dV: Tensor) -> tuple[Tensor, Tensor]:
        L = self.L
        inner = torch.linalg.solve_triangular(L, dV, upper=False)
        inner = torch.linalg.solve_triangular(L.mT, inner, upper=True, left=False)
        dL = L @ tril_half(inner)
        eta = de[..., None] + dL @ self.z.mT
        dp = (eta - (self.p * eta).sum(-2, keepdim=True)).mul_(self.weighted)
        dM = dL.mT @ self.by_root + L.mT @ (dp @ self.z)
        R = torch.linalg.solve_triangular(L, dL, upper=False, left=False)
        turned = self.B @ R
        return dp.sum(-1), _curvature(L, dM) - turned - turned.mT


@remembered
def nodes(dim: int, count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights for N(0, I) in K - 1 dimensions: a grid up to two, else whitened Sobol points."""
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
        prior_precision: of all (K - 1) D coefficients of columns as they are, class by class, 1 by default: a scalar,
            (K - 1) D numbers, or a matrix.
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

    convex = True

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
        labels = checks.labels(checks.per_row("y", y, self.X), classes)
        self.classes: Tensor = torch.unique(labels) if classes is None else checks.class_values(classes, labels)
        if len(self.classes) < 2 or labels.ndim > 1:
            raise InputError(
                f"y must be ({self.num_rows},) labels of at least two classes; got shape {tuple(labels.shape)} with "
                f"{len(self.classes)}. Check the target column, or that the split has every class."
            )
        self.coding = tuple(self.classes.tolist())
        num_nodes = read_size("num_nodes", num_nodes, "counts nodes")
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
        self._given = checks.given(
            X=X, y=y, prior_precision=prior_precision, prior_mean=prior_mean, weights=weights, temperature=temperature,
            num_nodes=num_nodes, classes=classes,
        )  # fmt: skip

    def attached(self) -> Self:
        """Return the model with its tensors in the graph of what it was made of, for `torchngvi.solved.solve`."""
        if self._given is None:
            return self
        with checks.attached():
            return type(self)(**checks.apart(self._given))

    def __getstate__(self) -> dict[str, Any]:
        """All but the graph of what the model was made of: copies, and what is saved, have none."""
        return {**vars(self), "_given": None}

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
        """Move and convert every tensor, with the arguments of ``torch.nn.Module.to``: a new model."""
        new = copy.copy(self)
        for name in ("X", "weights", "classes"):
            setattr(new, name, getattr(self, name).to(*args, **kwargs))
        new.y = self.y.to(new.X.device)
        new.prior = type(self.prior)(*(tensor.to(*args, **kwargs) for tensor in self.prior))
        return new

    def minibatch(self, index: Any) -> Self:
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

    def check(self, q: Posterior) -> None:
        """Check that q is over these coefficients, as `torchngvi.models.checks.posterior` does."""
        checks.posterior(q, self.dim, torch.Size(), self.X)

    def predictors(self, theta: Tensor, X: Tensor | None = None) -> Tensor:
        """Compute the linear predictors of all classes but the first, at the rows of the data by default.

        Args:
            theta: the coefficients, (*sample, *batch, (K - 1) D).
            X: other rows, (M, D).

        Returns:
            η_1, .., η_K-1, (*sample, *batch, N, K - 1).
        """
        X = self.X if X is None else X
        return X @ theta.unflatten(-1, (self.num_classes - 1, -1)).mT

    def data_log_likelihood(self, theta: Tensor) -> Tensor:
        """Return Σ w log p(y | θ), (*sample, *batch)."""
        return -(self.weights * self._energy(self.predictors(theta), self.y)).sum(-1)

    @staticmethod
    def _energy(eta: Tensor, y: Tensor) -> Tensor:
        """log(1 + Σ e^η_k) - η_y, (..., N)."""
        eta = torch.nn.functional.pad(eta, (1, 0))
        chosen = eta.gather(-1, y.expand(eta.shape[:-1])[..., None])[..., 0]
        return eta.logsumexp(-1) - chosen

    def data_energy(self, frame: Frame) -> tuple[Tensor, Curved]:
        """Return E_q[-Σ w log p(y | θ)], (*batch,), and its derivative."""
        mean, covariance = self._marginals(frame, self.X)
        value, slope, curvature = self._integrate(mean, covariance)
        one_hot = torch.nn.functional.one_hot(self.y, self.num_classes)[:, 1:].to(slope.dtype)
        value = value - (one_hot * mean).sum(-1)
        alpha = self.weights[:, None] * (slope - one_hot)
        summed = self._summed(alpha, self.weights[:, None, None] * curvature)
        return (self.weights * value).sum(-1), Curved(*summed, (mean, covariance), self._along)

    def _summed(
        self,
        alpha: Tensor,  # (*batch, N, K - 1), weighted
        blocks: Tensor,  # (*batch, N, K - 1, K - 1), weighted
    ) -> Raw:
        """Gradient and Hessian in θ of sums over the rows."""
        H = torch.einsum("...nkj,nd,ne->...kdje", blocks, self.X, self.X)
        return Raw((alpha.mT @ self.X).flatten(-2), H.flatten(-4, -3).flatten(-2))

    def _along(self, at: tuple[Tensor, ...], frame: Frame) -> Change:
        """The map from a move in the frame to the changes of a and W, by those of the means and covariances of rows."""
        structure, (mean, covariance) = frame.structure, at
        C = frame.dense()
        A = self._by_row(C, self.X)  # (*batch, N, K - 1, (K - 1) D)
        along = bent(mean, covariance, self._nodes(mean))

        def change(delta: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
            T = structure.to_dense(K)
            half = self._by_row(C @ (T.mT if frame.upper else T), self.X) @ A.mT
            slope, curvature = along((A @ delta[..., None, :, None])[..., 0], half + half.mT)
            weights = self.weights[:, None]
            g, H = self._summed(weights * slope, weights[..., None] * curvature)
            return frame.pull(g), frame.conjugate(H)

        return change

    @property
    def exact(self) -> bool:  # type: ignore[override]
        """Whether expectations are sums over a grid, K ≤ 3, and not over Sobol points."""
        return self.num_classes <= 3

    @property
    def curved(self) -> bool:  # type: ignore[override]
        """Whether q may be fitted by Newton's method, which takes γ > 0."""
        return self.temperature > 0

    def second_order(self, theta: Tensor) -> tuple[Tensor, Raw]:
        """Return ℓ(θ), (*batch,), with ∇ℓ and ∇²ℓ: in each row p - e_y and diag p - p pᵀ of the other classes."""
        eta = self.predictors(theta)
        p = torch.nn.functional.pad(eta, (1, 0)).softmax(-1)[..., 1:]
        one_hot = torch.nn.functional.one_hot(self.y, self.num_classes)[:, 1:].to(p.dtype)
        blocks = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
        derivative = self._summed(self.weights[:, None] * (p - one_hot), self.weights[:, None, None] * blocks)
        return -self.log_joint(theta), derivative.with_prior(self.prior.scaled(self.temperature), theta)

    def probabilities(self, q: Posterior, X: Tensor | None = None) -> Tensor:
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

    def probabilities_sd(self, q: Posterior, X: Tensor | None = None) -> Tensor:
        """The standard deviations of p(y = k | x, θ) under q, by the same nodes, at the rows of the data by default.

        Use them where it matters how well a probability itself is known.

        Args:
            q: the posterior over the coefficients.
            X: other rows, (M, D).

        Returns:
            The standard deviations in the order of ``classes``, (*batch, M, K).
        """
        with torch.no_grad():
            mean, covariance = self._marginals(q.frame(), self.X if X is None else X.to(self.X))
            (z, w, rows), parts = self._nodes(mean), []
            for e, V in zip(mean.flatten(0, -2).split(rows), covariance.flatten(0, -3).split(rows), strict=True):
                p = predictors(e, V, z)[0].softmax(-2)  # (N, K, S)
                center = p @ w
                parts.append(((p - center[..., None]).square() @ w).sqrt())
        return torch.cat(parts).reshape(*mean.shape[:-1], self.num_classes)

    def _nodes(self, like: Tensor) -> Nodes:
        z, w = nodes(self.num_classes - 1, self.num_nodes, like.dtype, like.device)
        return Nodes(z, w, max(_CELLS // len(w), 1))

    def _marginals(self, frame: Frame, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (*batch, N, K - 1) and covariance (*batch, N, K - 1, K - 1) of a row's predictors."""
        by_row = self._by_row(frame.dense(), X)
        return self.predictors(frame.mean, X), by_row @ by_row.mT

    def _by_row(
        self,
        root: Tensor,  # (*batch, (K - 1) D, (K - 1) D)
        X: Tensor,
    ) -> Tensor:
        """The predictors of a row as functions of z, (*batch, N, K - 1, (K - 1) D)."""
        return (X @ root.unflatten(-2, (self.num_classes - 1, -1))).transpose(-3, -2)

    def _integrate(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """E[log(1 + Σ e^η_k)] (*batch, N), its derivative in e and twice that in Σ, a few rows at a time."""
        (z, w, rows), shape = self._nodes(mean), mean.shape[:-1]
        blocks = zip(mean.flatten(0, -2).split(rows), covariance.flatten(0, -3).split(rows), strict=True)
        parts = [torch.cat(part) for part in zip(*(moments(e, V, z, w) for e, V in blocks), strict=True)]
        value, slope, curvature = (part.reshape(*shape, *part.shape[1:]) for part in parts)
        return value, slope, curvature
