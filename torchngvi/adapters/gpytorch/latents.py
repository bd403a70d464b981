"""How the latent functions of a model make the values that its likelihood sees.

The latent functions g_l of a strategy are independent under q, with means e_l and variances v_l at a datum:

    one function            f = g
    independent tasks       f_t = g_t
    coregionalization       f_t = Σ_l w_lt g_l,  of mean Σ_l w_lt e_l and variance Σ_l w_lt² v_l + jitter

(Álvarez, Rosasco and Lawrence 2012 for the last).  As GPyTorch's own objectives, a likelihood of several values
sees their marginals.  The energy F of a datum is a function of all e_l and v_l; since q is independent over l, its
natural gradient needs of the curvature of F the diagonal entries 2 ∂F/∂v_l only.
"""

from typing import Any, final

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import Likelihood, SoftmaxLikelihood
from gpytorch.models import ApproximateGP
from gpytorch.models.deep_gps import DeepGP
from gpytorch.models.gplvm.bayesian_gplvm import BayesianGPLVM
from gpytorch.variational import (
    IndependentMultitaskVariationalStrategy,
    LargeBatchVariationalStrategy,
    LMCVariationalStrategy,
    OrthogonallyDecoupledVariationalStrategy,
    VariationalStrategy,
)
from linear_operator.operators import BlockDiagLinearOperator, DiagLinearOperator
from torch import Tensor

from torchngvi.adapters.gpytorch.distribution import NaturalGradientVariationalDistribution, base_strategy, check_shapes
from torchngvi.adapters.gpytorch.energies import conjugate, correlated, of_one_value
from torchngvi.arguments import read_instance
from torchngvi.errors import PairError

_STANDARD = (VariationalStrategy, LargeBatchVariationalStrategy)


@final
class Latents:
    """How the latent functions of a model make the values of its likelihood; see `latents_of`."""

    mixing: Tensor | None = None  # w, (L, T), where values are mixtures of the functions
    longest = 1.0  # natural step of all functions at once by which a quadratic energy never rises
    separable = True  # the energy of a datum is a sum over the functions, for the likelihood at hand
    each = False  # that likelihood takes a target for each of several values of a datum
    one_noise = False  # its Gaussian noise is that of one value a datum, where there are several
    labels = False  # that likelihood takes one label a datum, of several values
    correlated = False  # the noise of that likelihood is, so that covariances of the values of a datum count

    def __init__(self, strategy: VariationalStrategy, outer: Any) -> None:
        self.strategy, self.count = strategy, 1  # values a datum
        self.coupled = outer is not strategy  # the energy of a datum is no sum over the batch members of q
        if not self.coupled:
            return
        shape = strategy._variational_distribution.batch_shape
        mixed = isinstance(outer, LMCVariationalStrategy)
        if len(shape) != 1 or (outer.latent_dim if mixed else outer.task_dim) != -1:
            raise PairError(
                f"steps from the derivatives of each datum take one batch dimension, that of the tasks or latent "
                f"functions; got batch shape {tuple(shape)}. Use loss.backward() with natural_optimizer(mll)."
            )
        self.count = shape[0]
        if mixed:
            # functions that explain the same data overshoot together, since each steps by its own curvature: a
            # positive definite matrix of L blocks a side is at most L times its diagonal blocks
            self.longest = 1.0 / shape[0]
            self.mixing, self.jitter, self.count = outer.lmc_coefficients, outer.jitter_val, outer.num_tasks

    @property
    def by_value(self) -> bool:
        """Whether targets tell the best constant functions: those of one function, a target for each, or labels."""
        return self.each or self.labels or not (self.coupled or self.strategy._variational_distribution.batch_shape)

    def values(
        self,
        mean: Tensor,  # (*batch, B)
        variance: Tensor,  # (*batch, B)
    ) -> MultivariateNormal:
        """The marginals of the values that the likelihood sees, from e and v of the latent functions at the data."""
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

    def shared(
        self,
        energy: Tensor,  # (*batch, B), or (B,) of several functions
    ) -> Tensor:
        """The energy of the data for each batch member of q; several functions share it in equal parts."""
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
            f"the model must be an ApproximateGP, with a variational_strategy; got {type(model).__name__}. "
            "Use loss.backward() with natural_optimizer(mll)."
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
    latents = Latents(strategy, outer)
    wanted = getattr(likelihood, "num_features", getattr(likelihood, "num_tasks", latents.count))
    alone = wanted == latents.count and isinstance(likelihood, SoftmaxLikelihood) and not latents.coupled
    apart = " in a dimension of their own" if alone else ""
    if wanted != latents.count or alone:
        raise PairError(
            f"{type(likelihood).__name__} takes {wanted} latent values a datum{apart}, and the model gives "
            f"{latents.count}. Wrap the VariationalStrategy, of as many functions, in an "
            "IndependentMultitaskVariationalStrategy or an LMCVariationalStrategy."
        )
    latents.one_noise = latents.coupled and conjugate(likelihood) and not hasattr(likelihood, "num_tasks")
    latents.separable = not latents.coupled or (latents.mixing is None and conjugate(likelihood))
    latents.each = latents.coupled and of_one_value(likelihood)
    latents.labels = isinstance(likelihood, SoftmaxLikelihood)
    latents.correlated = correlated(likelihood)
    if latents.correlated and latents.separable:
        latents.separable, latents.longest = False, 1.0 / latents.count
    if not bool(strategy.variational_params_initialized):
        q.initialize_variational_distribution(strategy.prior_distribution)
        strategy.variational_params_initialized.fill_(1)
    return latents
