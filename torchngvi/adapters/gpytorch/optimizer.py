"""An optimizer of this library for the usual loop of GPyTorch, whatever the strategy and the objective."""

import inspect
import warnings
from typing import Any

import torch
from gpytorch.mlls import PredictiveLogLikelihood
from gpytorch.mlls._approximate_mll import _ApproximateMarginalLogLikelihood
from torch import Tensor

from torchngvi.adapters.gpytorch.distribution import (
    NaturalGradientVariationalDistribution,
    distributions_of,
    variational_posteriors,
)
from torchngvi.adapters.gpytorch.energies import log_concave, one_function
from torchngvi.adapters.gpytorch.model import check_num_data, forget
from torchngvi.arguments import read_tensor
from torchngvi.errors import InputError, ScaleWarning
from torchngvi.methods import IBLR, VN
from torchngvi.optim import NaturalGradientVI
from torchngvi.stepsizes import Constant, KLRadius


def natural_optimizer(
    mll: _ApproximateMarginalLogLikelihood,
    lr: float | Tensor = 0.1,
    method: type[NaturalGradientVI] | None = None,
    *,
    hyper_optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> NaturalGradientVI:
    """The optimizer of q for ``loss = -mll(model(x), y); loss.backward(); natural.step()``.

    Use it in a training loop of your own, with any strategy and objective of GPyTorch; `train_svgp` needs no loop
    and no learning rate, with the whitened strategy.  GPyTorch's objectives are divided by the number of data and weigh
    the KL divergence by β.  The optimizer takes both back: lr = 1 is the full step, whatever β.  The first step checks
    it, by the weight that the KL divergence really has in the loss.  Every step uses q's gradients up, so that nothing
    need clear them, and clears GPyTorch's memory of q.

    Args:
        mll: `VariationalELBO`, `PredictiveLogLikelihood`, `GammaRobustVariationalELBO`, or a
            `DeepApproximateMLL` over one of them.
        lr: the step size; a torch scheduler may change it.
        method: `VN`, `SRVN`, `IBLR`, `NGVI`, ...; or `BBVI`, whose steps are Euclidean in the coordinates of q. By
            default `VN`, and for a `PredictiveLogLikelihood`, whose curvature may be negative, `IBLR` with
            ``step_size=KLRadius(0.5)``, of which no step leaves the positive definite cone.
            Steps of `VN` at rates up to 1 have no bound where the likelihood is log-concave, for they cannot overshoot;
            all others, and those of deep GPs, are bounded as in `NaturalGradientVI`.
        hyper_optimizer: the optimizer of the hyper-parameters in a loop that is to stay as it is: after each of its
            steps q takes one too, so that nothing else need call ``natural.step()``.  A later `natural_optimizer` for
            the same model takes the place of this one.
        options: further arguments of the method, such as ``step_size=KLRadius(0.1)``, or the ``smoothness`` of `BBVI`,
            the largest curvature of num_data/β times the loss in the mean of q.

    Returns:
        The optimizer, over the posteriors of the whole model.

    Raises:
        InputError: a method that does not step Gaussians by gradients of the loss, or that does not have these options;
            a model without posteriors, or with one of another shape than its inducing points; ``num_data`` or ``beta``
            not positive; a hyper_optimizer that is none, or evaluates more than once a step; at the first step, a loss
            that is not -mll(...), or its sum over a batch of models.
        PairError: a posterior that the method cannot move.

    >>> import gpytorch
    >>> from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution
    >>> from torchngvi.adapters.gpytorch.conditioning import example
    >>> model, likelihood, x, y = example(NaturalGradientVariationalDistribution)
    >>> mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=100)
    >>> natural = natural_optimizer(mll, lr=1.0)
    >>> losses = []
    >>> for _ in range(3):
    ...     loss = -mll(model(x), y)
    ...     loss.backward()
    ...     natural.step()
    ...     losses.append(loss.item())
    >>> losses[-1] < losses[0]
    True
    """
    if not isinstance(mll, _ApproximateMarginalLogLikelihood):
        raise InputError(
            f"natural_optimizer reads the model and the number of data from the objective; got {type(mll).__name__}. "
            "Give a VariationalELBO, or build VN(variational_posteriors(model), lr=..., loss_scale=num_data)."
        )
    if not (mll.num_data > 0 and mll.beta > 0):
        raise InputError(
            f"the objective has num_data = {mll.num_data} and beta = {mll.beta}: the number of data and the weight of "
            "the KL divergence must be larger than 0."
        )
    if method is None:
        predictive = isinstance(getattr(mll, "base_mll", mll), PredictiveLogLikelihood)
        method = IBLR if predictive else VN
        options = {"step_size": KLRadius(0.5), **options} if predictive else options
    _check_method(method, options)
    if (same := one_function(mll.model, mll.likelihood)) is not None:
        warnings.warn(same, ScaleWarning, stacklevel=2)
    if hyper_optimizer is not None:
        check_hyper_optimizer(hyper_optimizer)
    posteriors, scale = variational_posteriors(mll.model), mll.num_data / mll.beta
    groups = [{"posterior": q, "loss_scale": float(scale)} for q in posteriors]
    combines = bool((read_tensor("lr", lr) <= 1).all()) and not hasattr(mll, "base_mll") and log_concave(mll.likelihood)
    if method is VN and combines:  # natural parameters go to a convex combination, which needs no bound
        options = {"step_size": Constant()} | options
    optimizer = method(groups, lr=lr, **options)
    optimizer.zero_grad()  # of passes before it
    _check_once(optimizer, mll)
    optimizer.register_step_post_hook(lambda *_: forget(mll.model))
    _step_with(hyper_optimizer, optimizer, distributions_of(mll.model))
    return optimizer


def check_hyper_optimizer(optimizer: object) -> None:
    """Check that something is a torch optimizer whose step follows one backward pass."""
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, NaturalGradientVI):
        raise InputError(
            f"hyper_optimizer is a torch optimizer of the hyper-parameters; got {type(optimizer).__name__}. "
            "Give torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.01)."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            "LBFGS evaluates the loss several times a step, and q would step on the sum of those gradients. Give Adam "
            "or SGD, or call train_svgp(model, likelihood, (x, y)), which steps by L-BFGS itself."
        )


def _step_with(
    hyper_optimizer: torch.optim.Optimizer | None,
    natural: NaturalGradientVI,
    distributions: list[NaturalGradientVariationalDistribution],
) -> None:
    """Let q step after each step of the hyper-optimizer whose loss has reached it, and after no earlier one's."""

    def step(*_: Any) -> None:
        if any(p.grad is not None for q in natural.posteriors for p in (q.mean_probe, q.root_probe)):
            natural.step()

    handle = None if hyper_optimizer is None else hyper_optimizer.register_step_post_hook(step)
    for distribution in distributions:
        if distribution.stepped_with is not None:
            distribution.stepped_with.remove()
        distribution.stepped_with = handle


def _check_method(method: Any, options: dict[str, Any]) -> None:
    """A method that steps q by the gradients in its probes, with options that it has."""
    if not (isinstance(method, type) and issubclass(method, NaturalGradientVI)):
        raise InputError(
            f"method is a class that steps Gaussian posteriors by gradients of the loss; got "
            f"{getattr(method, '__name__', repr(method))}. Give VN, SRVN, IBLR, NGVI or BBVI; IFVB for a FlatCholesky."
        )
    try:
        inspect.signature(method).bind(None, lr=None, **options)
    except TypeError as error:
        known = [name for name in inspect.signature(method).parameters if name not in ("posterior", "lr", "loss_scale")]
        raise InputError(
            f"{method.__name__} cannot be built with the options given: {error}. Beside mll, lr and method give "
            f"natural_optimizer options of {method.__name__}, which are {', '.join(known)}."
        ) from error


def _check_once(optimizer: NaturalGradientVI, mll: _ApproximateMarginalLogLikelihood, same: float = 1e-3) -> None:
    """At the first pass, ask whether the batch is too large; at the first step, for the weight of the KL divergence."""
    # same: relative error at which two weights differ
    inner, distribution = getattr(mll, "base_mll", mll), distributions_of(mll.model)[0]
    q, wanted = distribution.posterior, mll.beta / mll.num_data
    modules = list(mll.model.modules())
    strategy = next(m for m in modules if getattr(m, "_variational_distribution", None) is distribution)
    # that of several functions does not ask the one within it, and sums over them
    outer = next((m for m in modules if getattr(m, "base_variational_strategy", None) is strategy), None)
    strategy = strategy if outer is None else outer
    members = distribution.batch_shape.numel()
    weights: list[tuple[bool, Tensor]] = []  # of each pass, and whether q had no gradient before it

    def term(approximate_dist_f: Any, target: Any, **options: Any) -> Tensor:
        inner.__dict__.pop("_log_likelihood_term", None)
        check_num_data(mll.num_data, approximate_dist_f.event_shape[0])
        return inner._log_likelihood_term(approximate_dist_f, target, **options)

    def divergence() -> Tensor:
        value = type(strategy).kl_divergence(strategy)
        if value.requires_grad:
            value.register_hook(weigh)
        return value

    def weigh(gradient: Tensor) -> None:
        before = q.root_probe.grad if q.framed else q.mean_probe.grad
        weights.append(
            (before is None or not bool(before.any()), gradient.sum() / members if outer is None else gradient.mean())
        )

    def check(*_: Any) -> None:
        handle.remove()
        strategy.__dict__.pop("kl_divergence", None)
        starts = [start for start, (empty, _) in enumerate(weights) if empty] or [0]
        sums = [float(sum(weight for _, weight in weights[start:])) for start in starts]
        if weights and not any(abs(weight - wanted) <= same * wanted for weight in sums):
            raise InputError(
                f"the KL divergence has the weight {sums[-1]:.4g} in the loss where the objective has "
                f"{wanted:.4g} = beta / num_data (num_data = {mll.num_data}): natural steps would have a wrong "
                "size. Use loss = -mll(model(x), y), summed over a batch of models, not averaged, of one batch a "
                "step; natural.zero_grad() drops gradients of passes before it."
            )

    inner._log_likelihood_term, strategy.kl_divergence = term, divergence
    handle = optimizer.register_step_pre_hook(check)
