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

Several functions of a datum, independent under q, have sites each.  Where their energy is convex their means take one
Newton step together, with W_n = ∂²F_n/∂e_n∂e_nᵀ; in sites, ε_n = (a_lnᵀΔ_l)_l being what it changes at a datum,

    (I + Σ W_n ⊗ a_n a_nᵀ) Δ = -(m + Σ α_n a_n)        t_n = β_n (e_n + ε_n) - α_n - W_n ε_n        c_n = β_n

For Gaussian noise of mixed functions, or correlated between tasks, the first such step is exact.

The rows may be a part of the data, n of N: their expected log likelihoods weigh N/n.

At the optimal q the ELBO does not change with q to first order, so that its gradient in the hyper-parameters is the one
at fixed q (the envelope theorem): neither the factor of S nor the search is differentiated.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, final

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from torch import Tensor

from torchngvi.adapters.gpytorch.batches import Batch, count
from torchngvi.adapters.gpytorch.distribution import forget
from torchngvi.adapters.gpytorch.energies import (
    check_labels,
    conjugate,
    convex,
    energy,
    expected_logsumexp,
    softmax,
    tightened,
)
from torchngvi.adapters.gpytorch.kernels import Kernels, Projection, kernels
from torchngvi.adapters.gpytorch.sparse_gp import SparseGP, energies_of, with_hessian
from torchngvi.errors import InputError
from torchngvi.interfaces import Frame, Sites
from torchngvi.numerics.gaussian_integrals import Moments
from torchngvi.numerics.linalg import cholesky, gram, triangular_inverse
from torchngvi.structures import Dense

_STEPS = 50  # of that search
_SHORTEST = 1e-3  # step by which the sites still move


class Point(NamedTuple):
    """The q that some sites make, and the negative ELBO there."""

    t: Tensor  # (*batch, B)
    c: Tensor  # (*batch, B)
    mean: Tensor  # m, (*batch, M)
    inverse: Tensor  # T⁻¹ with S⁻¹ = T Tᵀ, (*batch, M, M)
    H: Tensor  # Σ c_n a_n a_nᵀ, (*batch, M, M)
    e: Tensor  # (*batch, B)
    v: Tensor  # (*batch, B)
    d: Tensor  # (*batch, B), the variances given the inducing values
    alpha: Tensor  # (*batch, B), weighted
    beta: Tensor  # (*batch, B), weighted
    W: Tensor | None  # of a softmax, (B, C, C), weighted
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
        assert isinstance(target.batches, list)
        self.x, self.y = target.batches[0]
        self.batch_shape = target.posterior.batch_shape
        if not self.batch_shape and (self.x.ndim > 2 or self.y.ndim != 1):
            raise InputError(
                "learning hyper-parameters without an optimizer takes inputs (rows, features) and targets (rows,); "
                f"got {tuple(self.x.shape)} and {tuple(self.y.shape)}."
            )
        if missing := int(self.y.isnan().sum()):
            instead = "Leave these rows out: a row without a target tells nothing here."
            if target.latents.coupled:
                mask = 'gpytorch.settings.observation_nan_policy("mask")'
                instead = f"For rows that lack some of their targets use train_svgp_in_batches within {mask}."
            raise InputError(f"{missing} of {self.y.numel()} targets are NaN. {instead}")
        check_labels(likelihood, self.y)
        self.num_data = num_data or count(self.x)
        self.weight = self.num_data / count(self.x)
        self.conjugate, self.tolerance = conjugate(likelihood), tolerance
        self.share = 0.0  # of the last fall of the value, by which the search for q may end before
        self.tight = self.conjugate and target.latents.separable
        self.joint = not target.latents.separable and convex(likelihood)
        self.sites: tuple[Tensor, Tensor] | None = None  # t_n and c_n of the lowest value so far
        self._lowest, self.fall = math.inf, 0.0  # and by how much it was lower than the one before, per datum
        self._last: Point  # of the last evaluation or search

    def __call__(self) -> Tensor:
        """Evaluate the bound per datum at the present hyper-parameters."""
        prior = kernels(self.target.strategy, self.x)
        with torch.no_grad():
            projection = self._whole(prior.projection(torch.float64))
            self._last = point = self._optimum(projection)
            gradients = self._pulled(prior, projection, point)
        # a trial far off may leave sites from which a search, elsewhere, does not come back
        if point.value <= self._lowest:
            self.fall = (self._lowest - point.value) / self.num_data if self._lowest < math.inf else 0.0
            self._lowest, self.sites = point.value, (point.t, point.c)
        loss = point.v.new_tensor(point.value).requires_grad_()
        if self.tight or any(p.requires_grad for p in self.target._energy_parameters()):
            given_v = point.d if self.tight else None
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
        return self._last.alpha

    @property
    def ratios(self) -> Tensor:
        """δ_n of each row at the last evaluation: for Gaussian noise its variance given v over that of the noise."""
        return self._last.d / self.noise

    @property
    def noise(self) -> Tensor:
        """The variance of the noise of each row at the last evaluation, where that is Gaussian."""
        return self.weight / self._last.beta

    @torch.no_grad()
    def integrated(self) -> float:
        """What the loss of a softmax gains by an integral in the place of nodes, per datum; 0 of other likelihoods."""
        likelihood, latents = self.target.likelihood, self.target.latents
        if not softmax(likelihood) or [*likelihood.parameters(), *latents.parameters()]:
            return 0.0
        values = latents.values(self._last.e, self._last.v)
        by_nodes = energy(likelihood, self.y, values) + values.mean.gather(-1, self.y.long()[:, None])[:, 0]
        return float((expected_logsumexp(values.mean, values.variance) - by_nodes).mean())

    @torch.no_grad()
    def search(self) -> None:
        """Find the optimal q alone, for `assign`."""
        self._last = self._optimum(self._whole(kernels(self.target.strategy, self.x).projection(torch.float64)))

    @torch.no_grad()
    def assign(self) -> None:
        """Give the model the q that was found last."""
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
            point = self._stepped(projection, point) if point is not None and self.joint else point
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
            if gain < max(self.tolerance, self.share * self.fall) * self.num_data:
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
        t, c = self._sites_after(projection, point), point.beta
        rho = 1.0
        while rho > _SHORTEST:
            trial = self._at(projection, point.t + rho * (t - point.t), point.c + rho * (c - point.c))
            if trial is not None and trial.value <= point.value:
                return trial
            rho *= 0.5
        return None

    def _sites_after(self, projection: Projection, point: Point) -> Tensor:
        """t of a full step, whose c is β: of the means of all functions at once where their energy is convex."""
        t, rows = point.beta * point.e - point.alpha, projection.rows
        if not self.joint:
            return t
        W = self._curvature(point)

        def curved(shift: Tensor) -> Tensor:  # (C, B)
            return (W @ shift.mT[..., None])[..., 0].mT

        def product(change: Tensor) -> Tensor:  # of m, (C, M)
            return change + _summed(curved(_projected(rows, change)), rows)

        def precondition(change: Tensor) -> Tensor:  # by the S of each function
            return _summed(_projected(point.inverse, change), point.inverse)

        slope = point.mean + _summed(point.alpha, rows)
        shift = _projected(rows, conjugate_gradients(product, precondition, -slope, 1e-10 if self.conjugate else 0.1))
        return t + point.beta * shift - curved(shift)

    def _curvature(self, point: Point) -> Tensor:
        """W_n, the Hessian of F_n in the means of the functions of a datum, (B, C, C), weighted."""
        if point.W is not None:
            return point.W
        with torch.enable_grad():
            e = point.e.detach().requires_grad_()
            energies = energies_of(self.target, self.y.to(e.dtype), e, point.v, self.weight, None)
            slope = torch.autograd.grad(energies.sum(), e, create_graph=True)[0]
            columns = [torch.autograd.grad(part.sum(), e, retain_graph=True)[0] for part in slope]
        return torch.stack(columns).permute(2, 0, 1)

    def _at(self, projection: Projection, t: Tensor, c: Tensor) -> Point | None:
        """The q that the sites make; None where they make none, or the ELBO is not finite."""
        rows = projection.rows
        H = gram(rows, c)
        S = H.clone()
        S.diagonal(dim1=-2, dim2=-1).add_(1.0)
        T, ok = cholesky(S)
        if not bool(ok.all()):
            return None
        mean = torch.cholesky_solve(_summed(t - c * projection.mean, rows)[..., None], T)[..., 0]
        inverse = triangular_inverse(T)
        trace = inverse.square().sum((-2, -1))  # of V = S⁻¹
        e = projection.mean + _projected(rows, mean)
        if self.conjugate and bool((c == c[..., :1]).all()):
            # every F_n has the same slope in v_n: their sum is that of the mean variance, and Σ a_nᵀV a_n = tr(VH)/c
            total = projection.variance.sum(-1) + (mean.shape[-1] - trace) / c[..., 0]
            v = (total / e.shape[-1])[..., None].expand_as(e)
        else:
            v = projection.variance + (rows @ inverse.mT).square().sum(-1)
        log_determinant = T.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        divergence = float((0.5 * (trace + mean.square().sum(-1) - mean.shape[-1]) + log_determinant).sum())
        (energies, alpha, beta), W = with_hessian(self.target, self.y.to(e.dtype), e, v, self.weight)
        value = float(energies.sum()) + divergence
        if not abs(value) < torch.inf:
            return None
        return Point(t, c, mean, inverse, H, e, v, projection.variance, alpha, beta, W, divergence, value)

    def _whole(self, projection: Projection) -> Projection:
        """Without a graph, with moments of each function where they share a kernel."""
        rows, *moments = (part.detach() for part in projection)
        return Projection(rows, *(part.expand(*self.batch_shape, -1) for part in moments))

    def _moments(self, e: Tensor, v: Tensor) -> Moments:
        """F_n, α_n and β_n, weighted."""
        return self.target._moments(self.y.to(e.dtype), e, v, self.weight)

    def _pulled(self, prior: Kernels, projection: Projection, point: Point) -> Kernels:
        """The gradient of the negative ELBO at fixed q in what the kernels give."""
        frame = Frame(point.mean, point.inverse, Dense(point.mean.shape[-1]), upper=True)
        sites = Sites(projection.rows, None, point.alpha, point.beta, None, point.mean)
        H = point.H if self.conjugate else gram(projection.rows, point.beta)
        slack = tightened(point.beta, point.d, self.weight)[1] if self.tight else None
        return prior.pulled(sites, H, frame, slack)


def _projected(rows: Tensor, v: Tensor) -> Tensor:
    return _summed(v, rows.mT)


def _summed(weights: Tensor, rows: Tensor) -> Tensor:
    return (weights[..., None, :] @ rows)[..., 0, :]


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], precondition: Callable[[Tensor], Tensor], r: Tensor, accuracy: float
) -> Tensor:
    """Solve J x = r for a positive definite J, to a part of the norm of r that the preconditioner gives."""
    x, p = torch.zeros_like(r), precondition(r)
    first = rz = (r * p).sum()
    for _ in range(4 * r.numel()):
        if not rz > accuracy**2 * first:
            break
        Jp = product(p)
        step = rz / (p * Jp).sum()
        x, r = x + step * p, r - step * Jp
        z = precondition(r)
        rz, before = (r * z).sum(), rz
        p = z + rz / before * p
    return x
