"""The whitened inducing values v of a sparse GP, u = μ_Z + L v with K_ZZ = L Lᵀ, as a target of this library.

Given v ~ N(m, S) the latent values at the data are e_n + noise of variance v_n, one dimension a datum:

    a_n = L⁻¹ k(Z, x_n)     e_n = μ(x_n) + a_nᵀm     v_n = k(x_n, x_n) + jitter - |a_n|² + a_nᵀS a_n

so that the negative ELBO is a generalised linear model with rows a_n (Hensman et al. 2015), and its natural
gradient follows from α = ∂F/∂e and β = 2 ∂F/∂v of each datum (Bonnet, Price) without a derivative of S:

    g = Σ α_n a_n + m     H = Σ β_n a_n a_nᵀ + I     F_n = -E[log p(y_n | f_n)] num_data/rows

Several latent functions are a batch of such posteriors, with one F_n of all their e_n and v_n; see `latents`.
"""

from collections.abc import Iterable, Iterator
from typing import final

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from torch import Tensor

from torchngvi.adapters.gpytorch.batches import Batch, check_num_data, count, pairs
from torchngvi.adapters.gpytorch.energies import conjugate, energy, log_concave, softmax, softmax_derivatives, tightened
from torchngvi.adapters.gpytorch.kernels import Kernels, Projection, covariance, kernels
from torchngvi.adapters.gpytorch.latents import latents_of
from torchngvi.distributed import Processes
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Frame, Posterior, Prior, Raw, Sites, TractableTarget
from torchngvi.models import streamed
from torchngvi.numerics.arrays import ENTRIES_KEPT, Versions
from torchngvi.numerics.gaussian_integrals import Moments
from torchngvi.posteriors import NaturalGaussian
from torchngvi.posteriors.gaussian import Gaussian


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
        """Sum over the batches of several processes, each of which has a part of them; returns itself.

        Args:
            processes: the ranks, with the same model on each of them.
            rows: of the batches of all of them.
        """
        self.processes, self._all_rows = processes, rows
        return self

    def check(self, q: Posterior) -> None:
        """Check that q is the posterior of this model.

        Raises:
            PairError: another posterior.
        """
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
                sites = Sites(projection.rows, projected.detach(), alpha, beta, own, frame.mean.detach())
                part = self._summand(sites, prior_at_batch, frame, slack)
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

    def _summand(self, sites: Sites, prior_at_batch: Kernels | None, frame: Frame, slack: Tensor | None) -> Raw | Sites:
        """The derivative of a batch; where hyper-parameters learn, theirs is prepared from the same H."""
        if prior_at_batch is None:
            return sites
        assert sites.prior is not None
        data = sites._replace(prior=None).raw()
        self._pulls.append((prior_at_batch, prior_at_batch.pulled(sites, data.H, frame, slack)))
        return data.with_prior(sites.prior, sites.mean)

    def sites(self, q: Gaussian, rows: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The sites of the data in v at q, which may move between two pieces.

        Args:
            q: the posterior.
            rows: the number of rows in a piece.

        Returns:
            An iterator over a_n (rows, M), b_n = β_n a_nᵀm - α_n and c_n = β_n, (rows,) each.
        """
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
