"""How the latent functions of a model make the values that its likelihood sees.

The latent functions g_l of a strategy are independent under q, with means e_l and variances v_l at a datum:

    one function            f = g
    independent tasks       f_t = g_t
    coregionalization       f_t = Σ_l w_lt g_l,  of mean Σ_l w_lt e_l and variance Σ_l w_lt² v_l + jitter

(Álvarez, Rosasco and Lawrence 2012 for the last).  As GPyTorch's own objectives, a likelihood of several values
sees their marginals.  The energy F of a datum is a function of all e_l and v_l; since q is independent over l, its
natural gradient needs of the curvature of F the diagonal entries 2 ∂F/∂v_l only.
"""

from abc import ABC, abstractmethod
from functools import lru_cache
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
)
from gpytorch.models import ApproximateGP
from gpytorch.settings import observation_nan_policy
from gpytorch.variational import (
    IndependentMultitaskVariationalStrategy,
    LargeBatchVariationalStrategy,
    LMCVariationalStrategy,
    VariationalStrategy,
)
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from torchngvi.adapters.gpytorch.distribution import NaturalGradientVariationalDistribution, check_shapes
from torchngvi.errors import InputError, PairError

_STANDARD = (VariationalStrategy, LargeBatchVariationalStrategy)
# of GPyTorch's likelihoods, asked by their methods: a class that inherits them has the same expectations
_QUADRATIC = {kind.expected_log_prob for kind in (GaussianLikelihood, GaussianLikelihoodWithMissingObs)}
_BY_QUADRATURE = {kind.expected_log_prob for kind in (PoissonLikelihood, BernoulliLikelihood)}
_CONVEX = {kind.forward for kind in (BernoulliLikelihood, PoissonLikelihood, LaplaceLikelihood)}  # -log p(y | f) in f
_DRAWS = 64  # of the latent values of each datum, where a likelihood has no formula


class Latents(ABC):
    """The abstract base of how the latent functions of a model make the values of its likelihood; see `latents_of`."""

    coupled: bool  # the energy of a datum is no sum over the batch members of q
    count: int  # values a datum
    longest: float = 1.0  # natural step of all functions at once by which a quadratic energy never rises

    def __init__(self, strategy: VariationalStrategy) -> None:
        self.strategy = strategy  # of the latent functions

    @abstractmethod
    def values(
        self,
        mean: Tensor,  # (*batch, B)
        variance: Tensor,  # (*batch, B)
    ) -> MultivariateNormal:
        """The marginals of the values that the likelihood sees.

        Args:
            mean: e of the latent functions at the data, (*batch, B).
            variance: v of the latent functions at the data, (*batch, B).

        Returns:
            Independent Gaussians, as the likelihood takes them.
        """

    def parameters(self) -> list[Tensor]:
        """The parameters of the map from latent functions to values; none, unless the functions are mixed."""
        return []

    def shared(
        self,
        energy: Tensor,  # (*batch, B), or (B,) of several functions
    ) -> Tensor:
        """The energy of the data for each batch member of q; several functions share it in equal parts.

        Args:
            energy: F_n, (*batch, B), or (B,) of several functions.

        Returns:
            Σ_n F_n, (*batch,).
        """
        return energy.sum(-1)


@final
class _One(Latents):
    """One latent function, or a batch of models with data of their own."""

    coupled, count = False, 1

    def values(self, mean: Tensor, variance: Tensor) -> MultivariateNormal:
        return MultivariateNormal(mean, DiagLinearOperator(variance))


class _Several(Latents):
    """A batch of latent functions of one model."""

    coupled = True
    functions: int

    def __init__(self, strategy: VariationalStrategy, dim: int) -> None:
        super().__init__(strategy)
        shape = strategy._variational_distribution.batch_shape
        if len(shape) != 1 or dim != -1:
            raise PairError(
                f"steps from the derivatives of each datum take one batch dimension, that of the tasks or latent "
                f"functions; got batch shape {tuple(shape)}. Use loss.backward() with natural_optimizer(mll)."
            )
        self.functions = self.count = shape[0]

    def shared(self, energy: Tensor) -> Tensor:
        return (energy.sum(-1) / self.functions).expand(self.functions)


@final
class _Tasks(_Several):
    """Independent tasks, one latent function each."""

    def values(self, mean: Tensor, variance: Tensor) -> MultivariateNormal:
        return _marginals(mean.mT, variance.mT)


@final
class _Mixed(_Several):
    """Tasks as linear combinations of latent functions.

    Functions that explain the same data overshoot together, since each steps by its own curvature: a positive
    definite matrix of L blocks a side is at most L times its diagonal blocks, so that steps up to 1/L are safe.
    """

    def __init__(self, strategy: LMCVariationalStrategy) -> None:
        super().__init__(strategy.base_variational_strategy, strategy.latent_dim)
        self.longest = 1.0 / self.functions
        self.mixing, self.jitter, self.count = strategy.lmc_coefficients, strategy.jitter_val, strategy.num_tasks

    def values(self, mean: Tensor, variance: Tensor) -> MultivariateNormal:
        mixing = self.mixing.to(mean.dtype)
        return _marginals(mean.mT @ mixing, variance.mT @ mixing.square() + self.jitter)

    def parameters(self) -> list[Tensor]:
        return [self.mixing]


def _marginals(
    mean: Tensor,  # (B, T)
    variance: Tensor,  # (B, T)
) -> MultitaskMultivariateNormal:
    return MultitaskMultivariateNormal(mean, DiagLinearOperator(variance.flatten(-2)))


def latents_of(model: ApproximateGP, likelihood: Likelihood) -> Latents:
    """The latent functions of a model, with their q started as GPyTorch would.

    Args:
        model: an `ApproximateGP` with the whitened strategy, alone or of several tasks or latent functions.
        likelihood: the likelihood, which has to take as many values a datum.

    Returns:
        The latent functions.

    Raises:
        InputError: autocast, under which kernels have half precision.
        PairError: a model with a ``__call__`` of its own, a strategy that is not whitened, a q of another library, a
            likelihood of another number of values.
    """
    outer: Any = getattr(model, "variational_strategy", None)
    strategy: Any = getattr(outer, "base_variational_strategy", outer)
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
    if outer is None:
        raise PairError(
            f"the model must be an ApproximateGP, with a variational_strategy; got {type(model).__name__}. "
            "A DeepGP goes through loss.backward() with natural_optimizer(mll)."
        )
    if not isinstance(strategy, VariationalStrategy) or type(strategy) not in _STANDARD:
        raise PairError(
            f"steps from the derivatives of each datum are for the whitened VariationalStrategy; got "
            f"{type(strategy).__name__}. Use loss.backward() with natural_optimizer(mll)."
        )
    q = strategy._variational_distribution
    if not isinstance(q, NaturalGradientVariationalDistribution):
        raise PairError(
            f"the model's q is a {type(q).__name__}. Give its strategy a NaturalGradientVariationalDistribution."
        )
    q.check_autocast()
    check_shapes(strategy)
    latents: Latents
    if outer is strategy:
        latents = _One(strategy)
    elif isinstance(outer, LMCVariationalStrategy):
        latents = _Mixed(outer)
    elif isinstance(outer, IndependentMultitaskVariationalStrategy):
        latents = _Tasks(strategy, outer.task_dim)
    else:
        raise PairError(
            f"of several latent functions steps from the derivatives of each datum take an "
            f"IndependentMultitaskVariationalStrategy or an LMCVariationalStrategy; got {type(outer).__name__}. "
            "Use loss.backward() with natural_optimizer(mll)."
        )
    wanted = getattr(likelihood, "num_features", getattr(likelihood, "num_tasks", latents.count))
    if wanted != latents.count:
        raise PairError(
            f"{type(likelihood).__name__} takes {wanted} latent values a datum, and the model gives {latents.count}. "
            "Wrap the VariationalStrategy, of as many functions, in an IndependentMultitaskVariationalStrategy or an "
            "LMCVariationalStrategy."
        )
    if not bool(strategy.variational_params_initialized):
        q.initialize_variational_distribution(strategy.prior_distribution)
        strategy.variational_params_initialized.fill_(1)
    return latents


# ------------------------------------------------------------------------------------ likelihoods


def energy(
    likelihood: Likelihood,
    y: Tensor,
    values: MultivariateNormal,
) -> Tensor:
    """F_n = -E[log p(y_n | f_n)] of each datum, by the likelihood's own formula or over draws that stay the same.

    The likelihood's ``expected_log_prob`` is asked where it is a formula or a quadrature; one that draws would leave
    noise in values that are compared, and fixed draws take its place.  For a Bernoulli likelihood log Φ is computed
    to rounding: GPyTorch's own jumps by 0.0019 at -1, where no gradient tells.

    Args:
        likelihood: the likelihood.
        y: the targets, (*batch, B), or (B, tasks).
        values: the marginals of the latent values.

    Returns:
        F_n, (*batch, B), or (B,) of several values a datum.

    Raises:
        InputError: targets of another shape than the values, expectations that are summed over the data, a noise of
            its own for each row of other data.
    """
    if isinstance(likelihood, FixedNoiseGaussianLikelihood) and likelihood.noise.shape[-1] != values.mean.shape[-1]:
        raise InputError(
            f"FixedNoiseGaussianLikelihood holds a noise for each of {likelihood.noise.shape[-1]} rows and cannot tell "
            f"which a batch of {values.mean.shape[-1]} are. Give all rows as one batch in their order, or use "
            "natural_optimizer with mll(model(x), y, noise=noise_of_the_batch)."
        )
    if _function(likelihood.expected_log_prob) is BernoulliLikelihood.expected_log_prob:
        sign = torch.where(y > 0, 1.0, torch.where(y.isnan(), torch.nan, -1.0)).to(values.mean)
        result = -likelihood.quadrature(lambda f: torch.special.log_ndtr(f * sign), values)
    else:
        module = _Expected(likelihood)
        # q may be in float64 beside a float32 likelihood
        dtype = values.mean.dtype
        state = {name: p.to(dtype) for name, p in module.named_parameters() if p.dtype != dtype}
        # to mask is to fill, in a way that keeps the shape
        policy = observation_nan_policy.value()
        with observation_nan_policy("fill" if policy == "mask" else policy):
            result = -(torch.func.functional_call(module, state, (y, values)) if state else module(y, values))
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
    """The expectations of a likelihood as a module, whose parameters may be replaced; over draws where it has none."""

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        self.likelihood = likelihood

    def forward(self, y: Tensor, values: MultivariateNormal) -> Tensor:
        if _function(self.likelihood.expected_log_prob) is not Likelihood.expected_log_prob:
            return self.likelihood.expected_log_prob(y, values)
        z = _draws(_DRAWS, values.mean.shape, values.mean.dtype, values.mean.device)
        return self.likelihood(values.mean + values.variance.sqrt() * z).log_prob(y).mean(0)


@lru_cache(maxsize=4)
def _draws(count: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """z (count, *shape), in pairs z and -z and of variance 1 for each value."""
    z = torch.randn(count // 2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = z / z.square().mean(0).sqrt()
    return torch.cat([z, -z]).to(dtype=dtype, device=device)


def conjugate(likelihood: Likelihood) -> bool:
    """Whether every F_n is quadratic in the latent values, so that a full natural step is exact.

    Args:
        likelihood: the likelihood.

    Returns:
        True for the Gaussian likelihoods of GPyTorch and those that inherit their expectations.
    """
    return _function(likelihood.expected_log_prob) in _QUADRATIC


def log_concave(likelihood: Likelihood) -> bool:
    """Whether every 2 ∂F/∂v is known not to be negative, so that full steps stay in the cone.

    A likelihood says so itself by an attribute ``log_concave``: True where -log p(y | f) is convex in f for every y and
    every parameter.  Without one it is known of GPyTorch's own densities, and of no other.

    Args:
        likelihood: the likelihood.

    Returns:
        True if it is known.
    """
    declared = getattr(likelihood, "log_concave", None)
    if declared is not None:
        return bool(declared)
    by_quadrature = _function(likelihood.expected_log_prob) in _BY_QUADRATURE
    return conjugate(likelihood) or (by_quadrature and _function(likelihood.forward) in _CONVEX)


def _function(method: Any) -> Any:
    """What a method calls; of one that was set on the object, itself."""
    return getattr(method, "__func__", method)
