"""Fitting a guide step by step, beside the parameters of the model.

A step draws θ = m + C z in antithetic pairs and takes the gradient of

    mean_s [log q(θ_s) - log p(data, θ_s)],        the coordinates of q constant in log q,

in the probes of q and in the parameters of the model by one backward pass; the first is the packet of `Stein`, which a
rule turns into a natural-gradient step, the second goes to any optimizer.
"""

import math
import operator
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from pyro.infer.autoguide import AutoGuideList
from pyro.infer.util import zero_grads
from pyro.optim import PyroOptim
from pyro.poutine.messenger import Messenger

from torchngvi.adapters.pyro.density import ModelLogJoint
from torchngvi.adapters.pyro.distribution import LatentGaussian
from torchngvi.adapters.pyro.fitting import check_guide, density_of, spread
from torchngvi.adapters.pyro.guide import AutoGaussian
from torchngvi.adapters.pyro.lists import ListedGuides, gaussian_of
from torchngvi.adapters.pyro.owned import safe_rule
from torchngvi.adapters.pyro.steps import FEWEST, AveragedSteps
from torchngvi.arguments import read_callable
from torchngvi.distributed import processes_of
from torchngvi.errors import InputError, RejectedStepWarning
from torchngvi.expectations import Antithetic
from torchngvi.fitting.loop import Loop, checked_callbacks
from torchngvi.fitting.records import FitResult, Record
from torchngvi.fitting.stopping import Criterion, Evaluations, joined
from torchngvi.interfaces import Local, Target
from torchngvi.methods import IBLR
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.stepsizes import KLRadius
from torchngvi.structures import FullAlgebra

_EVERY = 100  # steps from one checkpoint to the next


class NaturalSVI:
    """Stochastic variational inference with natural gradients for q, shaped as `pyro.infer.SVI`.

    q follows a natural gradient, the parameters of the model (`pyro.param`, PyroModule) an optimizer of their own, both
    from one backward pass.  Data may be subsampled by a plate, or passed in mini-batches to `step`.  A model without
    parameters and with all its data is fitted faster, and with a verdict, by `fit_guide`.

    Args:
        model: a Pyro model, all of whose continuous latents the guide covers.
        guide: an `AutoGaussian`; or an AutoGuideList with one of them and guides of Pyro for the other latents, such as
            AutoNormal or AutoDelta, whose parameters go to ``optim``.
        optim: the optimizer of the parameters of the model, a PyroOptim or a torch optimizer; without it they stay as
            they are.
        natural: makes the optimizer of q; by default ``IBLR(q, lr=0.1, step_size=KLRadius(0.5))``, none of whose steps
            leaves the positive definite cone; `LocalExponential` in its place where q has the pattern of a forest.
        num_particles: the number of draws a step, even.
        group: a `torchngvi.Processes`, or a group of torch.distributed, over whose processes the draws of `step` are
            spread, where there is no ``optim``; all have the same model and data, and begin from the guide of rank 0.

    Raises:
        InputError: a guide or an optimizer of another kind, a group with an optimizer of parameters, an odd number of
            particles; on use, as `ModelLogJoint`.
        PairError: on use, a rule that q cannot follow, a step size that needs a trial.

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> _ = torch.manual_seed(0)
    >>> def model(y):
    ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
    >>> guide, y = AutoGaussian(model), torch.tensor([1.0, 2.0, 3.0])
    >>> svi = NaturalSVI(model, guide)
    >>> losses = [svi.step(y) for _ in range(100)]
    >>> round(guide.median()["mu"].item(), 2), round(guide.posterior.stddev.item(), 2)
    (1.5, 0.5)
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: AutoGaussian | AutoGuideList,
        optim: PyroOptim | torch.optim.Optimizer | None = None,
        *,
        natural: Callable[[Gaussian], NaturalGradientVI] | None = None,
        num_particles: int = 16,
        group: Any = None,
    ) -> None:
        if isinstance(guide, AutoGuideList):
            self.gaussian = gaussian_of(guide)
        else:
            check_guide(guide, steps=True)
            self.gaussian = guide
        self.processes = processes_of(group)
        if guide is not self.gaussian and optim is None:
            raise InputError(
                "the other guides of the list have parameters of their own: pass an optimizer for them, "
                "NaturalSVI(model, guide, pyro.optim.Adam({'lr': 0.01}))."
            )
        if optim is not None and group is not None:
            raise InputError(
                "draws that are spread over processes give q its gradient, and parameters of the model none; leave "
                "optim= or group= out."
            )
        if optim is not None and not isinstance(optim, PyroOptim | torch.optim.Optimizer):
            raise InputError(
                "optim updates the parameters of the model and must be a PyroOptim or a torch optimizer; "
                f"got {type(optim).__name__}. The optimizer of q is the argument natural."
            )
        self.model, self.guide, self.optim = model, guide, optim
        self.num_particles, self._draws = num_particles, Antithetic(num_particles)
        if natural is not None and not (isinstance(natural, type) and issubclass(natural, NaturalGradientVI)):
            read_callable(
                "natural", natural, "makes the optimizer of q, such as lambda q: VN(q, lr=0.1)", arguments="q"
            )
        self._make = _usual if natural is None else natural
        self._natural: NaturalGradientVI | None = None
        self._density: ModelLogJoint | None = None
        self._target: Target | None = None  # which sums over processes
        self._listed: ListedGuides | None = None
        self._warned = False
        self.norm = math.nan  # of the natural gradient in q, as the last step saw it

    @property
    def natural(self) -> NaturalGradientVI:
        """The optimizer of q, for schedulers and checkpoints.

        Raises:
            InputError: a guide that was not set up.
        """
        if self._natural is None:
            self._natural = self._make(self.gaussian.gaussian("NaturalSVI"))
        return self._natural

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Take one step; a loss that is not finite moves nothing, with a warning the first time.

        Args:
            args, kwargs: the arguments of the model.

        Returns:
            An estimate of the loss -ELBO before the step.
        """
        self.density(args, kwargs)
        q = self.gaussian.gaussian("NaturalSVI")
        self.natural.zero_grad()
        if isinstance(self.optim, torch.optim.Optimizer):
            self.optim.zero_grad()
        with torch.enable_grad(), _Parameters() as parameters:
            loss = self._loss()
        if bool(loss.isfinite()):
            loss.backward()
            self.norm = float(q.norm2(Local(q.mean_probe.grad, q.root_probe.grad))) ** 0.5  # type: ignore[arg-type]
            self.natural.step()
            if isinstance(self.optim, PyroOptim):
                self.optim(parameters.met)
            elif self.optim is not None:
                self.optim.step()
        elif not self._warned:
            self._warned = True
            warnings.warn(
                f"the loss of NaturalSVI is {loss.item()}: the log joint is not finite at some of the draws from q. "
                "Nothing was moved, and steps like it will be skipped without another warning. Start nearer "
                "(init_loc_fn, a smaller init_scale), or look for parameters out of range.",
                RejectedStepWarning,
                stacklevel=2,
            )
        zero_grads(parameters.met)
        return loss.item()

    @torch.no_grad()
    def evaluate_loss(self, *args: Any, **kwargs: Any) -> float:
        """Estimate the loss -ELBO from ``num_particles`` draws, without a step.

        Args:
            args, kwargs: the arguments of the model.

        Returns:
            The estimate.
        """
        self.density(args, kwargs)
        return float(self._loss())

    def _loss(self) -> torch.Tensor:
        """The loss at new draws, with the arguments that `density` was told last."""
        if self._listed is not None:
            return self._listed.loss(self.num_particles)
        assert self._density is not None
        q = self.gaussian.gaussian("NaturalSVI")
        target: Target = self._density
        if torch.is_grad_enabled():  # an evaluation is for one process, which may be alone in it
            if self._target is None:
                self._target = spread(self._density, self.gaussian, self.processes)
            target = self._target
        theta = q.push_noise(self._draws(q.mean_probe.detach()))
        return (LatentGaussian(q).log_prob(theta) - target.log_joint(theta)).mean()

    def run(
        self,
        num_steps: int,
        *args: Any,
        progress: bool = True,
        stop: Criterion | None = None,
        callbacks: Iterable[Callable[[Record], Any]] = (),
        checkpoint: str | Path | None = None,
        **kwargs: Any,
    ) -> FitResult:
        """Take steps of falling size with the same arguments, leave q at their average, and say what the loss did.

        The rate falls as 2/(2/ρ + t) from that of ``natural``, which it has again after the run, and the average gives
        most weight to the latest steps, see `torchngvi.adapters.pyro.steps`.  Where ``optim`` moves parameters of the
        model q follows them: the rate stays, and q and the parameters are those of the last step.

        The loss is said to be steady where its mean over the last quarter of the steps is within 0.1 nats and two
        standard errors of the mean over the quarter before; where it is not, q stays at the last step.  The verdict is
        never that the run converged: it says how many nats the noise of the gradients leaves the average above the
        best.

        An interrupt from the keyboard ends the run, and q is the best known then: the average, or else the last step.

        Args:
            num_steps: the number of steps, at least 8.
            args, kwargs: the arguments of the model.
            progress: show a bar.
            stop: what else ends the run, such as ``Seconds(60)`` or ``Gradients(10_000)`` of `torchngvi.fitting`, where
                a draw counts as one gradient.
            callbacks: called with the `Record` of each step; a true result ends the run.
            checkpoint: a file that holds the run, and from which it goes on to the last bit, see `torchngvi.fit`; the
                number of steps may then be another.

        Returns:
            The account of the run, with a record of each step.

        Raises:
            InputError: fewer than 8 steps, a stop that is no criterion, a checkpoint that cannot be written or read, or
                is of another run.
        """
        criteria = joined(Evaluations(_checked_steps(num_steps)), stop)
        engine = AveragedSteps(self, args, kwargs, _checked_steps(num_steps))
        callbacks = checked_callbacks(callbacks)
        loop = Loop(
            engine,
            criteria,
            callbacks=callbacks,
            progress=progress,
            checkpoint=checkpoint,
            every=_EVERY,
            processes=self.processes,
        )
        try:
            return loop.run()
        finally:
            engine.put_back_rates()

    def density(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelLogJoint:
        """The log joint of the model with these arguments, with new random subsamples.

        Args:
            args, kwargs: the arguments of the model.

        Returns:
            The target, which is one object for all calls.
        """
        if self._density is None:
            if isinstance(self.guide, AutoGuideList):
                self._listed = ListedGuides(self.model, self.guide, args, kwargs)
                self._density = self._listed.density
            else:
                self._density = density_of(self.model, self.guide, args, kwargs)
            return self._density
        before = (self._density.args, self._density.kwargs)
        density = self._density.on(*args, **kwargs)
        if not _are_same(before, (args, kwargs)):
            density.validate("with the arguments of this step")
        return density


class _Parameters(Messenger):
    """A messenger that collects the leaf tensors behind the parameters that a run meets."""

    def __init__(self) -> None:
        super().__init__()
        self.met: Any = set()

    def _pyro_post_param(self, msg: Any) -> None:
        value = msg["value"]
        self.met.add(value.unconstrained() if hasattr(value, "unconstrained") else value)


def _are_same(old: tuple[tuple[Any, ...], dict[str, Any]], new: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Whether two calls of a model have the same objects as arguments."""
    (args, kwargs), (new_args, new_kwargs) = old, new
    if len(args) != len(new_args) or kwargs.keys() != new_kwargs.keys():
        return False
    pairs = [*zip(args, new_args, strict=True), *((kwargs[name], new_kwargs[name]) for name in kwargs)]
    return all(one is other for one, other in pairs)


def _usual(q: Gaussian) -> NaturalGradientVI:
    """Small steps that stay in the cone."""
    if isinstance(q.structure, FullAlgebra):
        return IBLR(q, lr=0.1, step_size=KLRadius(0.5))
    return NaturalGradientVI(q, safe_rule(q), lr=0.1, step_size=KLRadius(0.5))


def _checked_steps(num_steps: SupportsIndex) -> int:
    """The number of steps as an int, from an integer of Python, NumPy or torch."""
    try:
        steps = operator.index(num_steps)
    except TypeError:
        steps = 0
    if steps < FEWEST:
        raise InputError(
            f"num_steps must be an integer of at least 8, to compare the last with those before; got {num_steps!r}."
        )
    return steps
