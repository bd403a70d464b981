"""The whitened inducing values v of a sparse GP, u = μ_Z + L v with K_ZZ = L Lᵀ, as a target; and the best q.

Given v ~ N(m, S) the latent values at the data are e_n + noise of variance v_n, one dimension a datum:

    a_n = L⁻¹ k(Z, x_n)     e_n = μ(x_n) + a_nᵀm     v_n = k(x_n, x_n) + jitter - |a_n|² + a_nᵀS a_n

so that the negative ELBO is a generalised linear model with rows a_n (Hensman et al. 2015), and its natural
gradient follows from α = ∂F/∂e and β = 2 ∂F/∂v of each datum (Bonnet, Price) without a derivative of S:

    g = Σ α_n a_n + m     H = Σ β_n a_n a_nᵀ + I     F_n = -E[log p(y_n | f_n)] num_data/rows

Several latent functions are a batch of such posteriors, with one F_n of all their e_n and v_n; see `energies`.

The optimal q is the prior times a Gaussian site t_n f_n - ½ c_n f_n² of each datum in f_n = μ_n + a_nᵀv (Adam et al.
2021).  For a Gaussian likelihood of noise s_n² they are t_n = y_n/s_n² and c_n = 1/s_n², and the ELBO there is the
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

At the optimal q the ELBO does not change with q to first order, so that its gradient in the hyper-parameters is the one
at fixed q (the envelope theorem): neither the factor of S nor the search is differentiated.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, final

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from torch import Tensor

from torchngvi.adapters.gpytorch.energies import (
    check_labels,
    conjugate,
    convex,
    energy,
    expected_logsumexp,
    latents_of,
    log_concave,
    softmax,
    softmax_derivatives,
    tightened,
)
from torchngvi.adapters.gpytorch.model import (
    Batch,
    Kernels,
    Projection,
    check_num_data,
    count,
    covariance,
    forget,
    kernels,
    pairs,
)
from torchngvi.distributed import Processes
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Frame, Posterior, Prior, Raw, Sites, TractableTarget
from torchngvi.models import streamed
from torchngvi.numerics.arrays import ENTRIES_KEPT, Versions
from torchngvi.numerics.gaussian_integrals import Moments
from torchngvi.numerics.linalg import cholesky, gram, triangular_inverse
from torchngvi.posteriors import NaturalGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures import Dense


@final
class SparseGP(TractableTarget):
    """-log p(y, v) of an `ApproximateGP` with the whitened strategy, as a target that steps the q of that model.

    It is what `train_svgp_in_batches` and `refine_svgp` step on; use it directly to choose method and step size.

    Args:
        model: an `ApproximateGP` with a `VariationalStrategy` over a `NaturalGradientVariationalDistribution`, alone or
            within an `IndependentMultitaskVariationalStrategy` or an `LMCVariationalStrategy`.
        likelihood: Gaussian, Bernoulli, Poisson, Student-t, multitask Gaussian, softmax, or one of your own: its
            ``expected_log_prob`` is asked, an expectation of each datum; where GPyTorch would draw, over nodes that
            stay the same, of Gauss and Hermite for up to three functions and 64 scrambled Sobol points for more.
        batches: pairs (x, y); they are summed, so that a list of all of them is the whole data.
        num_data: the number of rows of the whole data, where the batches are a part of it; by default they are all.
        learn: whether `backward` will be asked for the gradient of the hyper-parameters. For Gaussian noise of one
            function the value is then the tighter bound of Titsias (2025), at the same optimal q.

    Raises:
        PairError: a model with a ``__call__`` of its own, another strategy, another distribution, a
            flat q.
        InputError: batches that are no pairs of tensors, or fit neither the model nor one another.

    >>> from torchngvi import VN
    >>> from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution
    >>> from torchngvi.adapters.gpytorch.conditioning import example
    >>> from torchngvi.stepsizes import Constant
    >>> model, likelihood, x, y = example(NaturalGradientVariationalDistribution)
    >>> target = SparseGP(model, likelihood, [(x, y)])
    >>> opt = VN(target.posterior, lr=1.0, step_size=Constant())
    >>> _ = opt.step(target)  # exact for a Gaussian likelihood
    >>> bool(opt.evaluate(target).norm2 < 1e-12)
    True
    """

    temperature = 1.0
    force: Tensor  # g of the last evaluation with learn=True, (*batch, M)

    def __init__(
        self,
        model: ApproximateGP,
        likelihood: Likelihood,
        batches: Iterable[Batch],
        num_data: int | None = None,
        *,
        learn: bool = False,
    ) -> None:
        self.model, self.likelihood = model, likelihood
        self.latents = latents_of(model, likelihood)
        kept = isinstance(batches, list) or num_data is not None
        self.batches: Iterable[Batch] = list(pairs(batches, self.latents)) if kept else batches
        self.strategy, self.coupled = self.latents.strategy, self.latents.coupled
        self.num_data, self.learn = num_data, learn
        if not self.posterior.framed:
            raise PairError(
                f"SparseGP reads the mean and the root of q, and {type(self.posterior).__name__} is a vector of "
                "parameters without them. Use natural_optimizer(mll, method=IFVB), or posterior=CholeskyGaussian."
            )
        self.comparable, self._natural = num_data is None, isinstance(self.posterior, NaturalGaussian)
        self._all_rows = 0  # of all processes
        self._pulls: list[tuple[Kernels, Kernels]] = []  # the prior at each batch and its gradient
        self._energy_gradients: list[Tensor] = []
        self._kept: tuple[Versions, list[Projection]] | None = None
        self._learnt: tuple[Versions, float] | None = None  # the hyper-parameters and the jitter of the last look
        self._changes = torch.zeros((), dtype=torch.long)

    @property
    def posterior(self) -> Gaussian:
        """The q that an optimizer steps: ``VN(target.posterior, lr=0.1).step(target)``."""
        return self.strategy._variational_distribution.posterior

    @property
    def beside(self) -> Prior | None:  # type: ignore[override]
        """N(0, I) of v where the likelihood is log-concave: over nodes in pairs z and -z its sums are convex too."""
        return (
            self._prior(self.strategy.inducing_points[..., 0].detach().double())
            if log_concave(self.likelihood)
            else None
        )

    def over(self, processes: Processes, rows: int) -> "SparseGP":
        """Sum over the batches of several processes, which have so many rows together; returns itself."""
        self.processes, self._all_rows = processes, rows
        return self

    def check(self, q: Posterior) -> None:
        """Check that q is the posterior of this model; a `PairError` refuses another."""
        if q is not self.posterior:
            raise PairError("SparseGP steps the posterior of its own model; build the optimizer over target.posterior.")

    def tensors(self) -> tuple[Tensor, ...]:
        """The data in memory, after a counter that is written to whenever a hyper-parameter has changed."""
        strategy, jitter = self.strategy, self.strategy.jitter_val
        learnt = [*strategy.model.parameters(), strategy.inducing_points, *self._energy_parameters()]
        # GPyTorch sets hyper-parameters behind torch's count of writes: the contents tell, on a device too
        if self._learnt is None or self._learnt[1] != jitter or not self._learnt[0].hold(learnt, wait=True):
            self._learnt = Versions(learnt), jitter
            self._changes.add_(1)
        return (self._changes, *(part for pair in self._listed() for part in pair))

    def known_data(self) -> tuple[Tensor, ...]:
        """The data in memory; a change of the hyper-parameters is told by the loss."""
        return tuple(part for pair in self._listed() for part in pair)

    def log_joint(self, theta: Tensor) -> Tensor:
        """Σ_n E[log p(y_n | f_n) | v] + log N(v; 0, I), (*sample, *batch), at whitened v (*sample, *batch, M)."""
        value = -self._prior(theta).energy(theta)
        for _, projection, y in self._projections(theta.dtype):
            mean = projection.mean + (projection.rows @ theta[..., None])[..., 0]
            values = self.latents.values(mean, projection.variance.expand_as(mean))
            value = value - self._share() * self.latents.shared(energy(self.likelihood, y, values))
        return value

    def expected_energy(self, frame: Frame) -> tuple[Tensor, Raw | Sites]:
        """E_q[ℓ], (*batch,), to first order differentiable in the frame of q, and its derivative."""
        self._pulls, self._energy_gradients = [], []
        prior = self._prior(frame.mean)
        own = prior.expected_energy(frame)
        value, total = self._summed(frame, own, prior) if self.processes is None else self._of_all(frame, own, prior)
        if isinstance(total, Raw):
            self.force = total.g
        return value, total

    def _of_all(self, frame: Frame, own: Tensor, prior: Prior) -> tuple[Tensor, Raw]:
        """Sum over the batches of all processes, with the prior once."""

        def here() -> list[Tensor]:
            if not self.batches:
                return streamed.halved(streamed.nothing(frame, False)[:3], False)
            value, packet = self._summed(frame, torch.zeros_like(own), prior.scaled(0.0))
            return streamed.halved([value, *(packet if isinstance(packet, Raw) else packet.raw())], False)

        assert self.processes is not None
        value, g, H = streamed.whole(self.processes.summed(here, (frame.mean, frame.root)), False)
        return own + value, Raw(g, H).with_prior(prior, frame.mean)

    def _summed(self, frame: Frame, value: Tensor, prior: Prior) -> tuple[Tensor, Raw | Sites]:
        """Add the batches to a value, and to the derivative of a prior."""
        total: Raw | Sites | None = None
        for prior_at_batch, projection, y in self._projections(frame.mean.dtype):
            own = prior if total is None else prior.scaled(0.0)
            part: Raw | Sites
            if self._needs_no_variance(frame, projection):
                energies, data = _quadratic(self, y, projection, frame)
                value, part = value + energies, data.with_prior(own, frame.mean)
            else:
                mean, variance, projected = projection.moments(frame)
                tighter = self.learn and conjugate(self.likelihood) and not self.coupled
                share, given_v = self._share(), projection.variance if tighter else None
                energies, alpha, beta = self._moments(y, mean, variance, share, given_v)
                slack = None if given_v is None else tightened(beta, given_v, share)[1]
                value = value + self.latents.shared(energies)
                if torch.is_grad_enabled():
                    first = alpha * (mean - mean.detach()) + 0.5 * beta * (variance - variance.detach())
                    value = value + first.sum(-1)
                part = sites = Sites(projection.rows, projected.detach(), alpha, beta, own, frame.mean.detach())
                if prior_at_batch is not None:  # the gradient of hyper-parameters, from the same H
                    data = sites._replace(prior=None).raw()
                    self._pulls.append((prior_at_batch, prior_at_batch.pulled(sites, data.H, frame, slack)))
                    part = data.with_prior(own, sites.mean)
            total = part if total is None else _added(total, part)  # no list, which would hold the rows of all
        if total is None:
            raise InputError(
                "SparseGP got no data: the batches are empty, or an iterator that was used up. Give a list."
            )
        return value, total

    def _needs_no_variance(self, frame: Frame, projection: Projection) -> bool:
        """Whether F_n is quadratic, and the curvature H in v is what q steps by, on so many rows that it pays."""
        return (
            conjugate(self.likelihood)
            and self._natural
            and not (self.learn or self.coupled or torch.is_grad_enabled())
            and frame.mean.dtype == torch.float64  # in float32 the trace cancels
            and projection.rows.shape[-2] >= 2 * projection.rows.shape[-1]
        )

    def sites(self, q: Gaussian, rows: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Iterate over the sites at q, which may move between two pieces: a_n (rows, M), β_n a_nᵀm - α_n and β_n."""
        for _, whole, y in self._projections(q.dtype):
            for first in range(0, whole.mean.shape[-1], rows):
                projection = whole.part(slice(first, first + rows))
                mean, variance, _ = projection.moments(q.frame())
                _, alpha, beta = self._moments(y[..., first : first + rows], mean, variance, 1.0)
                yield projection.rows, beta * (mean - projection.mean) - alpha, beta

    def backward(self) -> None:
        """Add the gradient of the last value per datum, with q as it was, to the ``grad`` of the hyper-parameters."""
        per_datum = 1.0 / float(self.num_data or self._rows)
        tensors, gradients = [], []
        for prior_at_batch, pulls in self._pulls:
            for tensor, gradient in zip(prior_at_batch, pulls, strict=True):
                if tensor.requires_grad:
                    tensors.append(tensor)
                    gradients.append((per_datum * gradient).sum_to_size(tensor.shape).to(tensor.dtype))
        if tensors:
            torch.autograd.backward(tensors, gradients)
        learnt = [p for p in self._energy_parameters() if p.requires_grad]
        for parameter, gradient in zip(learnt, self._energy_gradients, strict=bool(self._energy_gradients)):
            part = (per_datum * gradient).to(parameter.dtype)
            parameter.grad = part if parameter.grad is None else parameter.grad + part
        self._pulls, self._energy_gradients = [], []

    # -------------------------------------------------------------------------------- parts

    def _prior(self, like: Tensor) -> Prior:
        return Prior(like.new_zeros(()), like.new_ones(like.shape[-1]))

    def _share(self) -> float:
        if self.num_data is None:
            return 1.0
        rows = self._all_rows or self._rows
        check_num_data(self.num_data, rows)
        return self.num_data / rows

    def _projections(self, dtype: torch.dtype) -> Iterator[tuple[Kernels | None, Projection, Tensor]]:
        """Of every batch; those without a graph are kept while nothing changes, where they fit."""
        if self.learn:
            for x, y in self._counted():
                with torch.enable_grad():
                    prior = kernels(self.strategy, x)
                yield prior, prior.projection(dtype), y.to(dtype)
            return
        now = self.tensors()
        if self._kept is None or not self._kept[0].hold(now) or any(p.rows.dtype != dtype for p in self._kept[1]):
            self._kept = (Versions(now), [])
        kept, size, factor = self._kept[1], sum(p.rows.numel() for p in self._kept[1]), None
        for index, (x, y) in enumerate(self._counted()):
            if index < len(kept):
                yield None, kept[index], y.to(dtype)
                continue
            with torch.no_grad():
                prior = kernels(self.strategy, x, factor)
                projection, factor = prior.projection(dtype), prior.factor
            size += projection.rows.numel()
            if isinstance(self.batches, list) and index == len(kept) and size <= ENTRIES_KEPT:
                kept.append(projection)
            yield None, projection, y.to(dtype)

    def _listed(self) -> list[Batch]:
        return self.batches if isinstance(self.batches, list) else []

    def _counted(self) -> Iterable[Batch]:
        """The batches; a single one is counted before it is used."""
        if isinstance(self.batches, list):
            self._rows = sum(count(x) for x, _ in self.batches)
            yield from self.batches
            return
        self._rows = 0
        for x, y in pairs(self.batches, self.latents):
            self._rows += count(x)
            yield x, y

    def _energy_parameters(self) -> list[Tensor]:
        """Those that no kernel has: of the likelihood, and of the map from latent functions to values."""
        return [*self.likelihood.parameters(), *self.latents.parameters()]

    def _moments(
        self, y: Tensor, mean: Tensor, variance: Tensor, share: float, given_v: Tensor | None = None
    ) -> Moments:
        """F_n with α_n and β_n, from one backward pass over numbers; the gradient of `_energy_parameters` beside it."""
        learnt = [p for p in self._energy_parameters() if p.requires_grad] if self.learn else []
        if softmax(self.likelihood) and not learnt:
            return with_hessian(self, y, mean, variance, share, curved=False)[0]
        with torch.enable_grad():
            mean, variance = mean.detach().requires_grad_(), variance.detach().requires_grad_()
            energies = energies_of(self, y, mean, variance, share, given_v)
            alpha, half, *rest = torch.autograd.grad(energies.sum(), (mean, variance, *learnt), materialize_grads=True)
        old = self._energy_gradients or [torch.zeros_like(gradient) for gradient in rest]
        self._energy_gradients = [a + b for a, b in zip(old, rest, strict=True)]
        return Moments(energies.detach(), alpha, 2 * half)


def with_hessian(
    target: SparseGP, y: Tensor, mean: Tensor, variance: Tensor, share: float, *, curved: bool = True
) -> tuple[Moments, Tensor | None]:
    """F_n with α_n and β_n; of a softmax W_n, its Hessian in the means of the functions, (B, C, C), too."""
    if not softmax(target.likelihood):
        return target._moments(y, mean, variance, share), None
    values, mixing = target.latents.values(mean.detach(), variance.detach()), target.latents.mixing
    F, slope, curvature, W = softmax_derivatives(target.likelihood, y, values, curved=curved)
    if mixing is not None:
        mixing = mixing.detach().to(F.dtype)
        slope, curvature = mixing @ slope, mixing.square() @ curvature
        W = mixing @ W @ mixing.mT if curved else W
    return Moments(share * F, share * slope, share * curvature), share * W if curved else None


def energies_of(
    target: SparseGP, y: Tensor, mean: Tensor, variance: Tensor, share: float, given_v: Tensor | None
) -> Tensor:
    """F_n at latent moments; with the variances given v, less what the tighter bound of Gaussian noise adds."""
    energies = share * energy(target.likelihood, y, target.latents.values(mean, variance))
    if given_v is None:
        return energies
    half = torch.autograd.grad(energies.sum(), variance, create_graph=True)[0]
    gain = tightened(2 * half, given_v, share)[0]
    return energies - (gain.sum(0) if target.coupled else gain)


def _quadratic(target: SparseGP, y: Tensor, projection: Projection, frame: Frame) -> tuple[Tensor, Raw]:
    """E_q[ℓ] of a batch and its derivative without the variances a_nᵀS a_n: ½ Σ β_n a_nᵀS a_n = ½ tr(S H)."""
    mean = projection.mean + (projection.rows @ frame.mean[..., None])[..., 0]
    energies, alpha, beta = target._moments(y, mean, projection.variance.expand_as(mean), target._share())
    raw = Sites(projection.rows, projection.rows, alpha, beta, None, frame.mean).raw()
    return energies.sum(-1) + 0.5 * (covariance(frame) * raw.H).sum((-2, -1)), raw


def _added(total: Raw | Sites, part: Raw | Sites) -> Raw:
    """The sum of two derivatives; the first may be written to."""
    g, H = total if isinstance(total, Raw) else total.raw()
    more = part if isinstance(part, Raw) else part.raw()
    return Raw(g + more.g, H.add_(more.H))


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

    def _optimum(self, projection: Projection, steps: int = 50) -> Point:
        """The optimal q: at once where its sites do not depend on it, by full steps elsewhere."""
        # steps: of the search at most
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
        for _ in range(steps):
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

    def _stepped(self, projection: Projection, point: Point, shortest: float = 1e-3) -> Point | None:
        """The q after a natural step, the longest of 1, ½, ¼, ... at which the ELBO is not lower."""
        # shortest: step by which the sites still move
        t, c = self._sites_after(projection, point), point.beta
        rho = 1.0
        while rho > shortest:
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
