"""Models of BoTorch: trained by `train_svgp` with their transforms, and with fantasies by `fantasize`."""

import copy
import math
from collections.abc import Callable
from typing import Any, Self

from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.mlls._approximate_mll import _ApproximateMarginalLogLikelihood
from gpytorch.models import ApproximateGP
from torch import Size, Tensor

from torchngvi.adapters.gpytorch.conditioning import fantasize
from torchngvi.adapters.gpytorch.training import train_svgp
from torchngvi.errors import PairError


class FantasizingModel:
    """A mixin that gives a model of BoTorch fantasies: ``class Model(FantasizingModel, SingleTaskVariationalGP): ...``.

    Acquisition functions that look a step ahead, as ``qKnowledgeGradient``, ask for them; for Gaussian noise they are
    differentiable in the inputs.  Transforms of inputs and outcomes count.
    """

    model: ApproximateGP
    likelihood: Likelihood
    num_outputs: int
    _input_batch_shape: Size
    posterior: Callable[..., Any]
    transform_inputs: Callable[[Tensor], Tensor]

    def fantasize(self, X: Tensor, sampler: Callable[[Any], Tensor], **options: Any) -> Self:
        """Condition a copy on draws of noisy outcomes at X.

        Args:
            X: inputs (*batch, rows, features).
            sampler: makes draws (*draws, *batch, rows, 1) of a posterior of BoTorch.
            options: for `condition_on_observations`.

        Returns:
            The copy, of the batch shape (*draws, *batch).
        """
        return self.condition_on_observations(X, sampler(self.posterior(X, observation_noise=True)), **options)

    def condition_on_observations(self, X: Tensor, Y: Tensor, **options: Any) -> Self:
        """Condition a copy on outcomes Y (*batch, rows, 1) at X, at fixed hyper-parameters.

        Raises:
            PairError: several outcomes.
        """
        if self.num_outputs != 1:
            raise PairError(f"fantasies are of one outcome; the model has {self.num_outputs}.")
        fantasy = copy.deepcopy(self, {id(self.model): self.model})
        if hasattr(fantasy, "outcome_transform"):
            Y = fantasy.outcome_transform.eval()(Y)[0]
        fantasy.model = fantasize(self.model, self.likelihood, self.transform_inputs(X), Y[..., 0])
        fantasy._input_batch_shape = fantasy.model.variational_strategy._variational_distribution.batch_shape
        return fantasy


def train_mll(mll: _ApproximateMarginalLogLikelihood, closure: Any = None, **options: Any) -> Any:
    """Train a model of BoTorch by `train_svgp`: ``fit_gpytorch_mll(mll, optimizer=train_mll)``.

    Args:
        mll: a `VariationalELBO` of the ``model.likelihood`` and the ``model.model`` of a ``SingleTaskVariationalGP``.
        closure: none, as BoTorch gives it.
        options: those of `train_svgp`, from ``optimizer_kwargs`` of ``fit_gpytorch_mll``.

    Returns:
        BoTorch's ``OptimizationResult``.

    Raises:
        PairError: another objective, a closure.
    """
    from botorch.optim.core import OptimizationResult, OptimizationStatus

    if type(mll) is not VariationalELBO or mll.beta != 1 or closure is not None:
        raise PairError(
            f"train_mll maximises the ELBO of the rows that the model holds, without a closure; got "
            f"{type(mll).__name__}. Give VariationalELBO(model.likelihood, model.model, num_data=len(train_X))."
        )
    data = mll.model.train_inputs[0], mll.model.train_targets
    result = train_svgp(mll.model, mll.likelihood, data, **{"progress": False, **options})
    loss = result.losses[-1] if result.losses else math.nan
    return OptimizationResult(len(result.losses), loss, OptimizationStatus.SUCCESS, message=result.reason)
