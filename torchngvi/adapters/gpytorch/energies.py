"""What a likelihood says of a datum: the energy F = -E[log p(y | f)], and the latent functions that make the values f.

The functions g_l of a strategy are independent under q, with means e_l and variances v_l at a datum:

    one function            f = g
    independent tasks       f_t = g_t
    coregionalization       f_t = Σ_l w_lt g_l,  of mean Σ_l w_lt e_l and variance Σ_l w_lt² v_l + jitter

(Álvarez, Rosasco and Lawrence 2012 for the last).  As GPyTorch's own objectives, a likelihood of several values sees
their marginals.  Where it has no formula F is a sum over nodes that are the same for all rows: of Gauss and Hermite in
up to three values, scrambled Sobol points beyond, and for a softmax.  Since q is independent over l, its natural
gradient needs of the curvature of F the diagonal entries 2 ∂F/∂v_l only.
"""

import math
from typing import Any, final

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    GaussianLikelihoodWithMissingObs,
    LaplaceLikelihood,
    Likelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
)
from gpytorch.models import ApproximateGP
from gpytorch.models.deep_gps import DeepGP
from gpytorch.models.gplvm.bayesian_gplvm import BayesianGPLVM
from gpytorch.settings import observation_nan_policy
from gpytorch.variational import (
    IndependentMultitaskVariationalStrategy,
    LargeBatchVariationalStrategy,
    LMCVariationalStrategy,
    OrthogonallyDecoupledVariationalStrategy,
    VariationalStrategy,
)
from linear_operator.operators import BlockDiagLinearOperator, DiagLinearOperator
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor
from torch.quasirandom import SobolEngine

from torchngvi.adapters.gpytorch.distribution import NaturalGradientVariationalDistribution, base_strategy, check_shapes
from torchngvi.arguments import read_instance
from torchngvi.errors import InputError, PairError
from torchngvi.numerics.arrays import remembered
from torchngvi.numerics.linalg import cholesky

# of GPyTorch's likelihoods, asked by their methods: a class that inherits them has the same expectations
_QUADRATIC = {kind.expected_log_prob for kind in (GaussianLikelihood, GaussianLikelihoodWithMissingObs)}
_BY_QUADRATURE = {kind.expected_log_prob for kind in (PoissonLikelihood, BernoulliLikelihood)}
_CONVEX = {kind.forward for kind in (BernoulliLikelihood, PoissonLikelihood, LaplaceLikelihood)}  # -log p(y | f) in f


def energy(likelihood: Likelihood, y: Tensor, values: MultivariateNormal) -> Tensor:
    """F_n = -E[log p(y_n | f_n)] of each datum, by the likelihood's own formula or over nodes that stay the same."""
    if isinstance(likelihood, FixedNoiseGaussianLikelihood) and likelihood.noise.shape[-1] != values.mean.shape[-1]:
        raise InputError(
            f"FixedNoiseGaussianLikelihood holds a noise for each of {likelihood.noise.shape[-1]} rows and cannot tell "
            f"which a batch of {values.mean.shape[-1]} are. Give all rows as one batch in their order, or use "
            "natural_optimizer with mll(model(x), y, noise=noise_of_the_batch)."
        )
    if _function(likelihood.expected_log_prob) is BernoulliLikelihood.expected_log_prob:
        sign = torch.where(y == 1, 1.0, torch.where((y == 0) | (y == -1), -1.0, torch.nan)).to(values.mean)
        result = -likelihood.quadrature(lambda f: torch.special.log_ndtr(f * sign), values)
    elif softmax(likelihood):
        result = _softmax_energy(likelihood, y, values)
    elif correlated(likelihood):
        result = _correlated_energy(likelihood, y, values)
    else:
        module = _Expected(likelihood)
        # q may be in float64 beside a float32 likelihood
        dtype = values.mean.dtype
        state = {name: p.to(dtype) for name, p in module.named_parameters() if p.dtype != dtype}
        # to mask is to fill, in a way that keeps the shape
        policy = observation_nan_policy.value()
        with observation_nan_policy("fill" if policy == "mask" else policy):
            try:
                result = -(torch.func.functional_call(module, state, (y, values)) if state else module(y, values))
            except ValueError as raised:  # of torch's distributions, where targets are outside of their support
                raise InputError(
                    f"{type(likelihood).__name__} cannot take these targets, of which the least is "
                    f"{float(y.min()):.4g} and the greatest {float(y.max()):.4g}, at these hyper-parameters: "
                    f"{str(raised).splitlines()[0]}"
                ) from raised
    several = isinstance(values, MultitaskMultivariateNormal)
    wanted = values.mean.shape[:-1] if several else values.mean.shape
    if result.shape == wanted[:-1]:
        raise InputError(
            f"{type(likelihood).__name__}.expected_log_prob sums over the data: it gives {tuple(result.shape)} where "
            f"steps from the derivatives of each datum need {tuple(wanted)}, an expectation of each. Leave the sum to "
            "the objective, or use loss.backward() with natural_optimizer(mll)."
        )
    if result.shape != wanted:
        raise InputError(
            f"the likelihood gives {tuple(result.shape)} expectations for {tuple(wanted)} latent values: "
            f"check the shape of the targets, {tuple(y.shape)}."
        )
    return result


class _Expected(torch.nn.Module):
    """The expectations of a likelihood as a module, whose parameters may be replaced; over nodes where it has none."""

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        self.likelihood = likelihood

    def forward(self, y: Tensor, values: MultivariateNormal) -> Tensor:
        if _function(self.likelihood.expected_log_prob) is not Likelihood.expected_log_prob:
            return self.likelihood.expected_log_prob(y, values)
        f, weights = _at_nodes(values)
        return (weights * self.likelihood(f).log_prob(y)).sum(0)


def _at_nodes(values: MultivariateNormal, **rule: Any) -> tuple[Tensor, Tensor]:
    """Latent values at the nodes of each datum, (nodes, *batch, B) or (nodes, B, T), and weights that broadcast."""
    mean, last = values.mean, isinstance(values, MultitaskMultivariateNormal)
    z, weights = nodes(mean.shape[-1] if last else 1, mean.dtype, mean.device, **rule)
    ones = (1,) * (mean.ndim - last)
    return mean + values.variance.sqrt() * z.reshape(-1, *ones, *mean.shape[-1:] * last), weights.reshape(-1, *ones)


@remembered
def nodes(
    count: int,
    dtype: torch.dtype,
    device: torch.device,
    sizes: tuple[int, ...] = (20, 12, 8),  # of a rule in one value, of products in two and three
    points: int = 64,
) -> tuple[Tensor, Tensor]:
    """Nodes z (nodes, count) and weights of an expectation under N(0, I), exact for quadratics."""
    if count <= len(sizes):
        z, weights = (torch.tensor(part, device="cpu") for part in hermegauss(sizes[count - 1]))
        z = torch.cartesian_prod(*[z] * count).reshape(-1, count)
        weights = torch.cartesian_prod(*[weights / weights.sum()] * count).reshape(-1, count).prod(-1)
    else:  # in pairs z and -z, of variance 1
        z = torch.special.ndtri(SobolEngine(count, seed=0, scramble=True).draw(points // 2, dtype=torch.float64))
        z = z / z.square().mean(0).sqrt()
        z, weights = torch.cat([z, -z]), z.new_full((points,), 1.0 / points)
    return z.to(dtype=dtype, device=device), weights.to(dtype=dtype, device=device)


def softmax(likelihood: Likelihood) -> bool:
    """Whether a likelihood is GPyTorch's softmax."""
    own = _function(likelihood.expected_log_prob) is Likelihood.expected_log_prob
    return own and _function(likelihood.forward) is SoftmaxLikelihood.forward


def _logits(likelihood: Any, f: Tensor) -> Tensor:
    return f if likelihood.mixing_weights is None else f @ likelihood.mixing_weights.to(f.dtype).mT


def _softmax_energy(likelihood: Any, y: Tensor, values: MultivariateNormal) -> Tensor:
    """E log Σ exp f by Sobol points, less the logit of the class; NaN where there is no such class."""
    chosen = y[..., None] == torch.arange(likelihood.num_classes, device=y.device)
    own = (chosen * _logits(likelihood, values.mean)).sum(-1)
    own = torch.where(chosen.any(-1), own, torch.nan)
    return _logits(likelihood, _at_nodes(values, sizes=())[0]).logsumexp(-1).mean(0) - own


def expected_logsumexp(mean: Tensor, variance: Tensor, count: int = 64) -> Tensor:
    """E log Σ exp f of independent values (B, T), by log S = ∫ exp(-e^u) - exp(-S e^u) du, within it a product."""
    z, weights = nodes(1, mean.dtype, mean.device)
    largest, width = mean.amax(-1), 6 * variance.amax(-1).sqrt()
    f = (mean - largest[:, None])[..., None] + variance.sqrt()[..., None] * z[:, 0]
    first, last = -16 - math.log(mean.shape[-1]) - width, 3.7 + width
    total = torch.zeros_like(largest)
    for share in torch.linspace(0, 1, count).tolist():  # where the ends are zero
        u = torch.lerp(first, last, share)
        total += (-u.exp()).exp() - ((-(u[:, None, None] + f).exp()).exp() @ weights).prod(-1)
    return largest + total * (last - first) / (count - 1)


def _correlated_energy(likelihood: Any, y: Tensor, values: MultitaskMultivariateNormal) -> Tensor:
    """F_n of Gaussian noise with the covariance Σ of a datum, of which GPyTorch's expectation takes the diagonal."""
    size, inner = values.mean.shape[-1], getattr(values.lazy_covariance_matrix, "base_linear_op", None)
    noise = likelihood.task_noise_covar.to(values.mean)
    if likelihood.has_global_noise:
        noise = noise + likelihood.noise.to(noise) * torch.eye(size).to(noise)
    root, ok = cholesky(noise)
    root = torch.where(ok, root, torch.nan)
    residual = torch.linalg.solve_triangular(root, (y - values.mean).mT, upper=False)
    inverse = torch.cholesky_inverse(root)
    trace = values.variance @ inverse.diagonal() if inner is None else (inner.to_dense() * inverse).sum((-2, -1))
    constant = size * math.log(2 * math.pi) + 2 * root.diagonal().log().sum()
    return 0.5 * (residual.square().sum(0) + trace + constant)


@torch.no_grad()
def softmax_derivatives(
    likelihood: Any, y: Tensor, values: MultivariateNormal, rows: int = 256, *, curved: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """F_n of a softmax over its nodes, its slopes in the means (T, B), twice those in the variances, and W (B, T, T).

    The large W is left out, (B, 0, T), unless it is ``curved``; the nodes of so many rows at a time stay in the cache.
    """
    z, _ = nodes(values.mean.shape[-1], values.mean.dtype, values.mean.device, sizes=())
    A = None if likelihood.mixing_weights is None else likelihood.mixing_weights.to(z.dtype)
    chosen = (y[:, None] == torch.arange(likelihood.num_classes, device=y.device)).to(z.dtype)
    chosen = torch.where(chosen.any(-1, keepdim=True), chosen, torch.nan)
    slope, parts = -(chosen if A is None else chosen @ A).mT, []
    for mean, sd in zip(values.mean.mT.split(rows, 1), values.variance.sqrt().mT.split(rows, 1), strict=True):
        f = torch.addcmul(mean[..., None], sd[..., None], z.mT[:, None])  # (T, rows, nodes)
        f = f if A is None else torch.tensordot(A, f, 1)
        top = f.amax(0)
        p = f.sub_(top).exp_()
        total = p.sum(0)
        q = p.div_(total) if A is None else torch.tensordot(A.mT, p.div_(total), 1)
        W = -q.movedim(0, 1)[:, : len(q) * curved] @ q.permute(1, 2, 0) / len(z)
        if curved and A is None:
            W.diagonal(dim1=-2, dim2=-1).add_(q.mean(-1).mT)
        elif curved:
            W += torch.einsum("ct,cb,cu->btu", A, p.mean(-1), A)
        parts.append(((top + total.log()).mean(-1), q.mean(-1), torch.einsum("tbn,nt->tb", q, z) / len(z) / sd, W))
    columns = zip(zip(*parts, strict=True), (0, 1, 1, 0), strict=True)
    F, means, curvature, W = (torch.cat(part, axis) for part, axis in columns)
    own = (slope.mT * values.mean).sum(-1)
    return F + own, means + slope, curvature, W


def check_labels(likelihood: Likelihood, y: Tensor) -> None:
    """Check that a Bernoulli or a softmax likelihood gets labels; what is missing may be NaN."""
    if isinstance(likelihood, SoftmaxLikelihood):
        classes = likelihood.num_classes
        if bool(((y != y.round()) | (y < 0) | (y >= classes)).logical_and(~y.isnan()).any()):
            raise InputError(
                f"{type(likelihood).__name__} takes the labels 0 to {classes - 1}; got targets from "
                f"{float(y.min()):.4g} to {float(y.max()):.4g}."
            )
    if not isinstance(likelihood, BernoulliLikelihood) or y.dtype is torch.bool:
        return
    if not bool(((y == 1) | (y == 0) | (y == -1) | y.isnan()).all()):
        raise InputError(
            f"{type(likelihood).__name__} takes the labels 0 and 1, or -1 and 1; got targets from {float(y.min()):.4g} "
            f"to {float(y.max()):.4g}. Make labels of them, as (y > threshold).to(y), or take another likelihood."
        )


def tightened(beta: Tensor, d: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """What each datum of Gaussian noise adds to a bound where q(f | v) is optimal too, and κ, twice its slope in d.

    With the variance d given v and β = c share it is ½ share (δ - log(1 + δ)), δ = c d (Titsias 2025).
    """
    delta = beta / share * d.clamp_min(0.0)
    return 0.5 * share * (delta - delta.log1p()), beta * delta / (1.0 + delta)


def conjugate(likelihood: Likelihood) -> bool:
    """Whether every F_n is quadratic in the latent values, so that a full natural step is exact."""
    return _function(likelihood.expected_log_prob) in _QUADRATIC


def of_one_value(likelihood: Likelihood) -> bool:
    """Whether every latent value has a target of its own, by the expectations of GPyTorch."""
    return _function(likelihood.expected_log_prob) in _QUADRATIC | _BY_QUADRATURE


def correlated(likelihood: Any) -> bool:
    """Whether the noise is Gaussian and correlated between the values of a datum."""
    return conjugate(likelihood) and getattr(likelihood, "rank", 0) > 0 and likelihood.has_task_noise


def convex(likelihood: Likelihood) -> bool:
    """Whether -log p(y | f) is known to be convex in all values of a datum at once."""
    return softmax(likelihood) or log_concave(likelihood)


def log_concave(likelihood: Likelihood) -> bool:
    """Whether every 2 ∂F/∂v is known not to be negative, so that full steps stay in the cone."""
    declared = getattr(likelihood, "log_concave", None)
    if declared is not None:
        return bool(declared)
    by_quadrature = _function(likelihood.expected_log_prob) in _BY_QUADRATURE
    return conjugate(likelihood) or (by_quadrature and _function(likelihood.forward) in _CONVEX)


def _function(method: Any) -> Any:
    """What a method calls; of one that was set on the object, itself."""
    return getattr(method, "__func__", method)


_STANDARD = (VariationalStrategy, LargeBatchVariationalStrategy)


@final
class Latents:
    """How the latent functions of a model make the values of its likelihood; see `latents_of`."""

    def __init__(self, strategy: VariationalStrategy, outer: Any, likelihood: Likelihood) -> None:
        shape = strategy._variational_distribution.batch_shape
        mixed = isinstance(outer, LMCVariationalStrategy)
        self.strategy = strategy
        self.coupled = outer is not strategy  # the energy of a datum is no sum over the batch members of q
        if self.coupled and (len(shape) != 1 or (outer.latent_dim if mixed else outer.task_dim) != -1):
            raise PairError(
                f"steps from the derivatives of each datum take one batch dimension, that of the tasks or latent "
                f"functions; got batch shape {tuple(shape)}. Use loss.backward() with natural_optimizer(mll)."
            )
        self.count = shape[0] if self.coupled else 1  # values a datum
        self.mixing: Tensor | None = None  # w, (L, T), where values are mixtures of the functions
        # natural step of all functions at once by which a quadratic energy never rises: functions that explain the same
        # data overshoot together, since each steps by its own curvature, and a positive definite matrix of L blocks a
        # side is at most L times its diagonal blocks
        self.longest = 1.0
        if mixed:
            self.longest = 1.0 / shape[0]
            self.mixing, self.jitter, self.count = outer.lmc_coefficients, outer.jitter_val, outer.num_tasks
        # the energy of a datum is a sum over the functions
        self.separable = not self.coupled or (self.mixing is None and conjugate(likelihood))
        # there is a target for each of several values of a datum
        self.each = self.coupled and of_one_value(likelihood)
        # the Gaussian noise is that of one value a datum, where there are several
        self.one_noise = self.coupled and conjugate(likelihood) and not hasattr(likelihood, "num_tasks")
        self.labels = isinstance(likelihood, SoftmaxLikelihood)  # there is one label a datum, of several values
        self.correlated = correlated(likelihood)  # covariances of the values of a datum count
        if self.correlated and self.separable:
            self.separable, self.longest = False, 1.0 / self.count

    @property
    def by_value(self) -> bool:
        """Whether targets tell the best constant functions: those of one function, a target for each, or labels."""
        return self.each or self.labels or not (self.coupled or self.strategy._variational_distribution.batch_shape)

    def values(self, mean: Tensor, variance: Tensor) -> MultivariateNormal:
        """The marginals of the values that the likelihood sees, from e and v (*batch, B) of the latent functions."""
        if not self.coupled:
            return MultivariateNormal(mean, DiagLinearOperator(variance))
        if self.mixing is None:
            return MultitaskMultivariateNormal(mean.mT, DiagLinearOperator(variance.mT.flatten(-2)))
        mixing = self.mixing.to(mean.dtype)
        if not self.correlated:
            variance = variance.mT @ mixing.square() + self.jitter
            return MultitaskMultivariateNormal(mean.mT @ mixing, DiagLinearOperator(variance.flatten(-2)))
        within = torch.einsum("lt,lb,lu->btu", mixing, variance, mixing) + self.jitter * torch.eye(self.count).to(mean)
        return MultitaskMultivariateNormal(mean.mT @ mixing, BlockDiagLinearOperator(within))

    def parameters(self) -> list[Tensor]:
        """The parameters of the map from latent functions to values; none, unless the functions are mixed."""
        return [] if self.mixing is None else [self.mixing]

    def shared(self, energy: Tensor) -> Tensor:
        """The energy of the data for each batch member of q; several functions share that of (B,) in equal parts."""
        if not self.coupled:
            return energy.sum(-1)
        (functions,) = self.strategy._variational_distribution.batch_shape
        return (energy.sum(-1) / functions).expand(functions)


def one_function(model: Any, likelihood: Any) -> str | None:
    """Say where a softmax sees one function in the place of one for each class."""
    outer: Any = getattr(model, "variational_strategy", None)
    tasks = isinstance(outer, IndependentMultitaskVariationalStrategy) and isinstance(likelihood, SoftmaxLikelihood)
    if not tasks or base_strategy(model)._variational_distribution.batch_shape != ():
        return None
    shape = f"torch.Size([{outer.num_tasks}])"
    return (
        f"all {outer.num_tasks} latent values of a datum are one function, since the strategy within the "
        f"{type(outer).__name__} has no batch of functions: a softmax over equal values cannot separate classes. Give "
        f"the variational distribution, the mean and the kernel batch_shape={shape}."
    )


def _check_model(model: Any, outer: Any, strategy: Any) -> None:
    """Check that rows of a model have sites, by its class and its strategy."""
    if isinstance(model, BayesianGPLVM | DeepGP):
        raise PairError(
            f"{type(model).__name__} has random inputs, its own or those of its layers, so that a row has no site that "
            "stays where the functions move: use loss.backward() with natural_optimizer(mll), and Adam for the rest."
        )
    if hasattr(model, "_orig_mod"):
        raise PairError(
            "the model was compiled by torch.compile, and steps from the derivatives of each datum call its own "
            "forward. Give the model that was compiled: both hold the same parameters, so that the compiled one "
            "predicts with what was learnt."
        )
    if outer is not None and type(model).__call__ is not ApproximateGP.__call__:
        raise PairError(
            f"{type(model).__name__} overrides __call__, and steps from the derivatives of each datum call forward: "
            "what __call__ does to the inputs would neither be seen nor trained. Do it in forward, where it applies to "
            "the inducing points too, or use loss.backward() with natural_optimizer(mll)."
        )
    if outer is None and isinstance(getattr(model, "model", None), ApproximateGP):
        raise PairError(
            f"{type(model).__name__} holds the sparse GP as its model, behind its transforms. Give model.model, and "
            "rows as model.transform_inputs and model.outcome_transform make them."
        )
    if outer is None:
        raise PairError(
            f"the model must be an ApproximateGP, with a variational_strategy; got {type(model).__name__}. An ExactGP "
            "has no q to train: maximise its ExactMarginalLogLikelihood, or give an ApproximateGP its rows as inducing "
            "points, for another likelihood or for more rows."
        )
    if not isinstance(strategy, VariationalStrategy) or type(strategy) not in _STANDARD:
        raise PairError(
            f"steps from the derivatives of each datum are for the whitened VariationalStrategy; got "
            f"{type(strategy).__name__}. Use loss.backward() with natural_optimizer(mll)."
        )


def latents_of(model: ApproximateGP, likelihood: Likelihood) -> Latents:
    """The latent functions of a model, with their q started as GPyTorch would."""
    outer, strategy = getattr(model, "variational_strategy", None), base_strategy(model)
    _check_model(model, outer, strategy)
    read_instance("likelihood", likelihood, Likelihood, "is a likelihood of GPyTorch, such as a GaussianLikelihood")
    q = strategy._variational_distribution
    if not isinstance(q, NaturalGradientVariationalDistribution):
        raise PairError(
            f"the model's q is a {type(q).__name__}. Give its strategy a NaturalGradientVariationalDistribution."
        )
    q.check_autocast()
    check_shapes(strategy)
    if (same := one_function(model, likelihood)) is not None:
        raise PairError(f"{same[0].upper()}{same[1:]}")
    several = isinstance(outer, LMCVariationalStrategy | IndependentMultitaskVariationalStrategy)
    if outer is not strategy and not several:
        own = isinstance(outer, OrthogonallyDecoupledVariationalStrategy)
        raise PairError(
            f"of several latent functions steps from the derivatives of each datum take an "
            f"IndependentMultitaskVariationalStrategy or an LMCVariationalStrategy; got {type(outer).__name__}"
            f"{', whose mean has inducing points of its own, without a covariance' if own else ''}. "
            "Use loss.backward() with natural_optimizer(mll)."
        )
    latents = Latents(strategy, outer, likelihood)
    wanted = getattr(likelihood, "num_features", getattr(likelihood, "num_tasks", latents.count))
    alone = wanted == latents.count and isinstance(likelihood, SoftmaxLikelihood) and not latents.coupled
    apart = " in a dimension of their own" if alone else ""
    if wanted != latents.count or alone:
        raise PairError(
            f"{type(likelihood).__name__} takes {wanted} latent values a datum{apart}, and the model gives "
            f"{latents.count}. Wrap the VariationalStrategy, of as many functions, in an "
            "IndependentMultitaskVariationalStrategy or an LMCVariationalStrategy."
        )
    if not bool(strategy.variational_params_initialized):
        q.initialize_variational_distribution(strategy.prior_distribution)
        strategy.variational_params_initialized.fill_(1)
    return latents
