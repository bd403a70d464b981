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
from typing import Any, final

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import Likelihood, SoftmaxLikelihood
from gpytorch.models import ApproximateGP
from gpytorch.models.gplvm.bayesian_gplvm import BayesianGPLVM
from gpytorch.variational import (
    IndependentMultitaskVariationalStrategy,
    LargeBatchVariationalStrategy,
    LMCVariationalStrategy,
    VariationalStrategy,
)
from linear_operator.operators import BlockDiagLinearOperator, DiagLinearOperator
from torch import Tensor

from torchngvi.adapters.gpytorch.distribution import NaturalGradientVariationalDistribution, base_strategy, check_shapes
from torchngvi.adapters.gpytorch.energies import conjugate, correlated
from torchngvi.errors import PairError

_STANDARD = (VariationalStrategy, LargeBatchVariationalStrategy)


class Latents(ABC):
    """The abstract base of how the latent functions of a model make the values of its likelihood; see `latents_of`."""

    coupled: bool  # the energy of a datum is no sum over the batch members of q
    count: int  # values a datum
    longest: float = 1.0  # natural step of all functions at once by which a quadratic energy never rises
    separable: bool = True  # the energy of a datum is a sum over the functions, for the likelihood at hand
    mixing: Tensor | None = None  # w, (L, T), where values are mixtures of the functions

    def __init__(self, strategy: VariationalStrategy) -> None:
        self.strategy = strategy  # of the latent functions

    @abstractmethod
    def values(
        self,
        mean: Tensor,  # (*batch, B)
        variance: Tensor,  # (*batch, B)
    ) -> MultivariateNormal:
        """The marginals of the values that the likelihood sees, from e and v of the latent functions at the data."""

    def parameters(self) -> list[Tensor]:
        """The parameters of the map from latent functions to values; none, unless the functions are mixed."""
        return [] if self.mixing is None else [self.mixing]

    def shared(
        self,
        energy: Tensor,  # (*batch, B), or (B,) of several functions
    ) -> Tensor:
        """The energy of the data for each batch member of q; several functions share it in equal parts."""
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
        return MultitaskMultivariateNormal(mean.mT, DiagLinearOperator(variance.mT.flatten(-2)))


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
        assert self.mixing is not None
        mixing = self.mixing.to(mean.dtype)
        within = torch.einsum("lt,lb,lu->btu", mixing, variance, mixing) + self.jitter * torch.eye(self.count).to(mean)
        return MultitaskMultivariateNormal(mean.mT @ mixing, BlockDiagLinearOperator(within))


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
            "The layers of a DeepGP see random inputs, so that no layer has sites of rows: use loss.backward() with "
            "natural_optimizer(mll)."
        )
    if isinstance(model, BayesianGPLVM):
        raise PairError(
            f"{type(model).__name__} learns its inputs too, which are random and no rows of data: use loss.backward() "
            "with natural_optimizer(mll), and Adam for the inputs."
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
    q = strategy._variational_distribution
    if not isinstance(q, NaturalGradientVariationalDistribution):
        raise PairError(
            f"the model's q is a {type(q).__name__}. Give its strategy a NaturalGradientVariationalDistribution."
        )
    q.check_autocast()
    check_shapes(strategy)
    if (same := one_function(model, likelihood)) is not None:
        raise PairError(f"{same[0].upper()}{same[1:]}")
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
    alone = wanted == latents.count and isinstance(likelihood, SoftmaxLikelihood) and not latents.coupled
    apart = " in a dimension of their own" if alone else ""
    if wanted != latents.count or alone:
        raise PairError(
            f"{type(likelihood).__name__} takes {wanted} latent values a datum{apart}, and the model gives "
            f"{latents.count}. Wrap the VariationalStrategy, of as many functions, in an "
            "IndependentMultitaskVariationalStrategy or an LMCVariationalStrategy."
        )
    latents.separable = not latents.coupled or (isinstance(latents, _Tasks) and conjugate(likelihood))
    if correlated(likelihood) and latents.separable:
        latents.separable, latents.longest = False, 1.0 / latents.count
    if not bool(strategy.variational_params_initialized):
        q.initialize_variational_distribution(strategy.prior_distribution)
        strategy.variational_params_initialized.fill_(1)
    return latents
