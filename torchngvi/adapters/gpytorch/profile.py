"""The ELBO as a function of the hyper-parameters alone: at each of them q is the optimal one.

The optimal q is the prior times a Gaussian site t_n f_n - ½ c_n f_n² of each datum in f_n = μ_n + a_nᵀv (Adam et al.
2021).  For a Gaussian likelihood of noise s_n² they are t_n = y_n/s_n² and c_n = 1/s_n², and the function is the
collapsed bound of Titsias (2025),

    log N(y; μ, AᵀA + diag s²) - ½ Σ log(1 + d_n/s_n²)        A = (a_1, ..., a_N),  d_n = k_nn + jitter - |a_n|²

It is that of Titsias (2009) plus ½ Σ (δ_n - log(1 + δ_n)), δ_n = d_n/s_n², since not only q(v) but q(f | v) is optimal;
q(v) is the same.  Of a row with δ_n far above 1 the inducing points say little.

For any other they are found by full natural steps, each of which replaces (t, c) by (β e - α, β) at the q before it;
a step after which the ELBO is lower is halved.  The first q is that of the model, and then the one that the sites of
the largest ELBO so far make: they change little from one kernel to the next, so that two or three steps are enough.

The rows may be a part of the data, n of N: their expected log likelihoods weigh N/n.

At the optimal q the ELBO does not change with q to first order, so that its gradient in the hyper-parameters is the one
at fixed q (the envelope theorem): neither the factor of S nor the search is differentiated.
"""

import math
from typing import NamedTuple, final

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from torch import Tensor

from torchngvi.adapters.gpytorch.batches import Batch, count
from torchngvi.adapters.gpytorch.distribution import forget
from torchngvi.adapters.gpytorch.energies import check_labels, conjugate, tightened
from torchngvi.adapters.gpytorch.kernels import Kernels, Projection, kernels
from torchngvi.adapters.gpytorch.sparse_gp import SparseGP, energies_of
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Frame, Sites
from torchngvi.numerics.gaussian_integrals import Moments
from torchngvi.numerics.linalg import cholesky, gram, triangular_inverse
from torchngvi.structures import Dense

_STEPS = 50  # of that search
_SHORTEST = 1e-3  # step by which the sites still move


class Point(NamedTuple):
    """The q that some sites make, and the negative ELBO there."""

    t: Tensor  # (B,)
    c: Tensor  # (B,)
    mean: Tensor  # m, (M,)
    inverse: Tensor  # T⁻¹ with S = T Tᵀ, (M, M)
    H: Tensor  # Σ c_n a_n a_nᵀ, (M, M)
    e: Tensor  # (B,)
    v: Tensor  # (B,)
    d: Tensor  # (B,), the variances given the inducing values
    alpha: Tensor  # (B,), weighted
    beta: Tensor  # (B,), weighted
    divergence: float  # KL(q ‖ prior)
    value: float  # the negative ELBO


@final
class ProfiledELBO:
    """The largest ELBO over q at the present hyper-parameters, of rows that weigh as much as the whole data."""

    def __init__(
        self,
        model: ApproximateGP,
        likelihood: Likelihood,
        batch: Batch,
        num_data: int | None = None,
        tolerance: float = 1e-9,
    ) -> None:
        model.train()
        likelihood.train()
        self.target = target = SparseGP(model, likelihood, [batch])
        shape = tuple(target.posterior.batch_shape)
        if target.coupled or shape:
            raise PairError(
                "learning hyper-parameters without an optimizer is for one latent function; got the batch shape "
                f"{shape}. Use train_svgp_in_batches."
            )
        assert isinstance(target.batches, list)
        self.x, self.y = target.batches[0]
        if self.x.ndim > 2 or self.y.ndim != 1:
            raise InputError(
                "learning hyper-parameters without an optimizer takes inputs (rows, features) and targets (rows,); "
                f"got {tuple(self.x.shape)} and {tuple(self.y.shape)}."
            )
        if missing := int(self.y.isnan().sum()):
            raise InputError(
                f"{missing} of {len(self.y)} targets are NaN. Leave these rows out: a row without a target tells "
                "nothing here."
            )
        check_labels(likelihood, self.y)
        self.num_data = num_data or count(self.x)
        self.weight = self.num_data / count(self.x)
        self.conjugate, self.tolerance = conjugate(likelihood), tolerance
        self.sites: tuple[Tensor, Tensor] | None = None  # t_n and c_n of the lowest value so far
        self._lowest = math.inf
        self._last: Point | None = None

    def __call__(self) -> Tensor:
        """Evaluate the bound per datum at the present hyper-parameters."""
        prior = kernels(self.target.strategy, self.x)
        with torch.no_grad():
            projection = Projection(*(part.detach() for part in prior.projection(torch.float64)))
            point = self._optimum(projection)
            gradients = self._pulled(prior, projection, point)
        self._last = point
        # a trial far off may leave sites from which a search, elsewhere, does not come back
        if point.value <= self._lowest:
            self._lowest, self.sites = point.value, (point.t, point.c)
        given_v = point.d if self.conjugate else None
        with torch.enable_grad():  # with the likelihood's parameters
            v = point.v.detach().requires_grad_()
            energies = energies_of(self.target, self.y.to(v.dtype), point.e, v, self.weight, given_v)
        loss = energies.sum() + point.divergence
        for tensor, gradient in zip(prior, gradients, strict=True):
            loss = loss + ((tensor - tensor.detach()) * gradient.to(tensor.dtype)).sum()
        return -loss / self.num_data

    @property
    def scores(self) -> Tensor:
        """Minus the derivative of each row's expected log likelihood in its latent value, at the last q, weighted."""
        assert self._last is not None
        return self._last.alpha

    @property
    def ratios(self) -> Tensor:
        """δ_n of each row at the last evaluation: for Gaussian noise its variance given v over that of the noise."""
        assert self._last is not None
        return self._last.d / self.noise

    @property
    def noise(self) -> Tensor:
        """The variance of the noise of each row at the last evaluation, where that is Gaussian."""
        assert self._last is not None
        return self.weight / self._last.beta

    @torch.no_grad()
    def assign(self) -> None:
        """Give the model the q at which the bound was evaluated last."""
        assert self._last is not None
        q = self.target.posterior
        root, _ = cholesky(self._last.inverse.mT @ self._last.inverse)
        q.initialize_(self._last.mean, q.kept_covariance(root))
        forget(self.target.model)

    # -------------------------------------------------------------------------------- the optimal q

    def _optimum(self, projection: Projection) -> Point:
        """The optimal q: at once where its sites do not depend on it, by full steps elsewhere."""
        nothing = torch.zeros_like(projection.mean)
        if self.conjugate:
            _, alpha, beta = self._moments(projection.mean, torch.ones_like(nothing))
            point = self._at(projection, beta * projection.mean - alpha, beta)
            if point is None:
                raise InputError(
                    "the ELBO is not finite at these hyper-parameters: check the targets and the inputs for "
                    "NaN and infinities, and the noise."
                )
            return point
        t, c = self._sites_of_model(projection) if self.sites is None else self.sites
        point = self._at(projection, t, c) or self._at(projection, nothing, nothing)
        if point is None:
            raise InputError(
                "the ELBO is not finite at the prior: check the targets, the inputs and the hyper-parameters"
                f"{self._outside(projection)}."
            )
        for _ in range(_STEPS):
            following = self._stepped(projection, point)
            if following is None:
                break
            gain, point = point.value - following.value, following
            if gain < self.tolerance * self.num_data:
                break
        return point

    def _sites_of_model(self, projection: Projection) -> tuple[Tensor, Tensor]:
        """t_n and c_n at the q that the model has."""
        q = self.target.posterior
        root = q.scale_tril.double()
        frame = Frame(q.mean.double(), root, Dense(q.dim))
        e, v, _ = projection.moments(frame)
        _, alpha, beta = self._moments(e, v)
        return beta * e - alpha, beta

    def _outside(self, projection: Projection) -> str:
        """Name the targets that have no finite log density at the prior; nothing where all have one."""
        v = projection.variance + projection.rows.square().sum(-1)
        rows = (~self._moments(projection.mean, v).value.isfinite()).nonzero().flatten().tolist()
        if not rows:
            return ""
        return (
            f": {len(rows)} of {len(self.y)} targets have no finite expected log density under "
            f"{type(self.target.likelihood).__name__}, the first of them {float(self.y[rows[0]]):g}, in row {rows[0]} "
            "of those that were looked at; move such targets into the support of the likelihood, or leave them out"
        )

    def _stepped(self, projection: Projection, point: Point) -> Point | None:
        """The q after a natural step, the longest of 1, ½, ¼, ... at which the ELBO is not lower."""
        t, c = point.beta * point.e - point.alpha, point.beta
        rho = 1.0
        while rho > _SHORTEST:
            trial = self._at(projection, point.t + rho * (t - point.t), point.c + rho * (c - point.c))
            if trial is not None and trial.value <= point.value:
                return trial
            rho *= 0.5
        return None

    def _at(self, projection: Projection, t: Tensor, c: Tensor) -> Point | None:
        """The q that the sites make; None where they make none, or the ELBO is not finite."""
        rows = projection.rows
        H = gram(rows, c)
        S = H.clone()
        S.diagonal().add_(1.0)
        T, ok = cholesky(S)
        if not bool(ok):
            return None
        mean = torch.cholesky_solve(((t - c * projection.mean) @ rows)[:, None], T)[:, 0]
        inverse = triangular_inverse(T)
        trace = inverse.square().sum()  # of V = S⁻¹
        e = projection.mean + rows @ mean
        if self.conjugate and bool(c[0] == c.min()) and bool(c[0] == c.max()):
            # every F_n has the same slope in v_n: their sum is that of the mean variance, and Σ a_nᵀV a_n = tr(VH)/c
            total = projection.variance.sum() + (len(mean) - trace) / c[0]
            v = (total / len(e)).expand_as(e)
        else:
            v = projection.variance + (rows @ inverse.mT).square().sum(-1)
        divergence = float(0.5 * (trace + mean.square().sum() - len(mean)) + T.diagonal().log().sum())
        energies, alpha, beta = self._moments(e, v)
        value = float(energies.sum()) + divergence
        if not abs(value) < torch.inf:
            return None
        return Point(t, c, mean, inverse, H, e, v, projection.variance, alpha, beta, divergence, value)

    def _moments(self, e: Tensor, v: Tensor) -> Moments:
        """F_n, α_n and β_n, weighted."""
        return self.target._moments(self.y.to(e.dtype), e, v, self.weight)

    def _pulled(self, prior: Kernels, projection: Projection, point: Point) -> Kernels:
        """The gradient of the negative ELBO at fixed q in what the kernels give."""
        frame = Frame(point.mean, point.inverse, Dense(len(point.mean)), upper=True)
        sites = Sites(projection.rows, None, point.alpha, point.beta, None, point.mean)
        H = point.H if self.conjugate else gram(projection.rows, point.beta)
        slack = tightened(point.beta, point.d, self.weight)[1] if self.conjugate else None
        return prior.pulled(sites, H, frame, slack)
