"""Fitting a guide step by step, beside the parameters of the model.

A step draws θ = m + C z in antithetic pairs and takes the gradient of mean_s [log q(θ_s) - log p(data, θ_s)], the
coordinates of q constant in log q, in the probes of q, which is the packet of `Stein`, and in the parameters of the
model by one backward pass.  `NaturalSVI.run` takes steps of falling size, and averages the coordinates λ of q:

    ρ_t = 2/(2/ρ_0 + t)                          the steps 2/(2 + t) of Wu and Gardner (2024), from the rate ρ_0 on
    λ̄_t = λ̄_{t-1} + 4/(t + 3) (λ_t - λ̄_{t-1})    polynomial decay (Shamir and Zhang 2013, section 4, with η = 3)

An iterate weighs as the cube of its number, and t of them count as much as 7t/16 of equal weight.  With gradients of
independent noise, whose natural norm is |g|, the average of k of them ends E|g|²/(2k) nats above the best (Polyak and
Juditsky 1992, in the metric of q, in which the curvature at the optimum is about 1).  Beside an optimizer that moves
parameters of the model q has to follow where they lead: the rate stays at ρ_0, and the last step is the result.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGaussian as PyrosAutoGaussian
from pyro.infer.autoguide import AutoGuideList
from pyro.infer.util import zero_grads
from pyro.optim import PyroOptim
from torch import Tensor

from torchngvi.adapters.pyro.density import ModelLogJoint
from torchngvi.adapters.pyro.fitting import check_guide, parameters_of, spread, without_jacobian
from torchngvi.adapters.pyro.guide import AutoGaussian, LatentGaussian, safe_rule, stored_parameters
from torchngvi.adapters.pyro.layout import listed, random_sites
from torchngvi.arguments import is_size, read_callable
from torchngvi.distributed import processes_of
from torchngvi.errors import InputError, RejectedStepWarning
from torchngvi.expectations import Antithetic
from torchngvi.fitting.checkpoints import (
    copied,
    describe_data,
    describe_optimizer,
    describe_tensors,
    describe_torch_optimizer,
)
from torchngvi.fitting.loop import Ending, Engine, Loop, checked_callbacks
from torchngvi.fitting.records import FitResult, Record
from torchngvi.fitting.stopping import Criterion, Evaluations, Standing, Stop, joined
from torchngvi.interfaces import Coordinates, Local, Target
from torchngvi.methods import IBLR
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.stepsizes import KLRadius
from torchngvi.structures import FullAlgebra

_EVERY = 100  # steps from one checkpoint to the next
_FEWEST = 8  # steps of which the last can be compared with those before
_ENOUGH = 0.1  # nats above the best that need no advice
_DECAY = 3  # η
_SHARE = (2 * _DECAY + 1) / (_DECAY + 1) ** 2  # of the steps, that the average is worth
_PLATE = "_torchngvi_particles"


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
        """Take one step with these arguments of the model, and return an estimate of the loss -ELBO before it.

        A loss that is not finite moves nothing, with a warning the first time.
        """
        self.density(args, kwargs)
        q = self.gaussian.gaussian("NaturalSVI")
        self.natural.zero_grad()
        if isinstance(self.optim, torch.optim.Optimizer):
            self.optim.zero_grad()
        with torch.enable_grad(), poutine.trace(param_only=True) as tracer:
            loss = self._loss()
        parameters = parameters_of(tracer.trace).values()
        if bool(loss.isfinite()):
            loss.backward()
            self.norm = float(q.norm2(Local(q.mean_probe.grad, q.root_probe.grad))) ** 0.5  # type: ignore[arg-type]
            self.natural.step()
            if isinstance(self.optim, PyroOptim):
                self.optim(list(parameters))
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
        zero_grads(parameters)
        return loss.item()

    @torch.no_grad()
    def evaluate_loss(self, *args: Any, **kwargs: Any) -> float:
        """Estimate the loss -ELBO from ``num_particles`` draws, without a step."""
        self.density(args, kwargs)
        return float(self._loss())

    def _loss(self) -> Tensor:
        """The loss at new draws, with the arguments of the last call of `density`."""
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
        most weight to the latest steps, see `torchngvi.adapters.pyro.svi`.  Where ``optim`` moves parameters of the
        model the rate stays, and q and the parameters are those of the last step.  So is q where the loss is not
        steady: where its mean over the last quarter of the steps is not within 0.1 nats and two standard errors of the
        mean over the quarter before.  The verdict is never that the run converged: it says how many nats the noise of
        the gradients leaves the average above the best.  An interrupt from the keyboard ends the run in the same way.

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
        if not is_size(num_steps, at_least=_FEWEST):
            raise InputError(
                f"num_steps must be an integer of at least 8, to compare the last with those before; got {num_steps!r}."
            )
        planned = int(num_steps)
        criteria = joined(Evaluations(planned), stop)
        engine = AveragedSteps(self, args, kwargs, planned)
        loop = Loop(
            engine,
            criteria,
            callbacks=checked_callbacks(callbacks),
            progress=progress,
            checkpoint=checkpoint,
            every=_EVERY,
            processes=self.processes,
        )
        try:
            return loop.run()
        finally:
            for group, rate in zip(self.natural.param_groups, engine.rates, strict=True):
                group["lr"] = rate

    def density(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelLogJoint:
        """The log joint of the model with these arguments, with new random subsamples: one object for all calls."""
        if self._density is None:
            if isinstance(self.guide, AutoGuideList):
                self._listed = ListedGuides(self.model, self.guide, args, kwargs)
                self._density = self._listed.density
            else:
                self._density = self.gaussian.setup(*args, **kwargs).density(self.model, args, kwargs)
            return self._density
        before, now = dict(enumerate(self._density.args)) | self._density.kwargs, dict(enumerate(args)) | kwargs
        density = self._density.on(*args, **kwargs)
        if before.keys() != now.keys() or any(before[name] is not now[name] for name in now):
            density.validate("with the arguments of this step")
        return density


def _usual(q: Gaussian) -> NaturalGradientVI:
    """Small steps that stay in the cone."""
    if isinstance(q.structure, FullAlgebra):
        return IBLR(q, lr=0.1, step_size=KLRadius(0.5))
    return NaturalGradientVI(q, safe_rule(q), lr=0.1, step_size=KLRadius(0.5))


# -------------------------------------------------------------------------------- a list of guides


def gaussian_of(guide: AutoGuideList) -> AutoGaussian:
    """The one guide of a list that follows natural gradients."""
    found = [part for part in guide.modules() if isinstance(part, AutoGaussian)]
    for part in guide.modules():
        if not found and isinstance(part, PyrosAutoGaussian):
            check_guide(part, steps=True)
    if len(found) != 1:
        raise InputError(
            f"NaturalSVI moves one AutoGaussian of a list of guides, and this list has {len(found)}. Put the sites of "
            "all of them into one, or step an optimizer of torchngvi on each after Trace_ELBO()(model, guide)."
        )
    return found[0]


class ListedGuides:
    """The loss of a list of guides, evaluated for a number of draws at once."""

    def __init__(
        self, model: Callable[..., Any], guide: AutoGuideList, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.guide, self.density = guide, ModelLogJoint(model, args, kwargs)
        with torch.no_grad():
            trace = self._trace(2)
        missing = [name for name in self.density.layout.shapes if name not in trace.nodes]
        if missing:
            raise InputError(
                f"the guides of the list leave out the latent sites {listed(missing)}. Append a guide for them, "
                "AutoNormal(poutine.block(model, expose=[...])) for one."
            )

    def _trace(self, count: int) -> poutine.Trace:
        """A run of the guides for a number of draws, with log probabilities at the sites."""
        with pyro.validation_enabled(False):
            plate = pyro.plate(_PLATE, count, dim=-1 - self.density.nesting)
            trace = poutine.trace(plate(self.guide)).get_trace(*self.density.args, **self.density.kwargs)
            trace.compute_log_prob()
        return trace

    def loss(self, count: int) -> Tensor:
        """The loss at a number of draws, 0-d, differentiable in the probes of q and in all parameters."""
        trace, layout = self._trace(count), self.density.layout
        terms = [site["log_prob"] for site in random_sites(trace)]
        log_q = torch.stack([term.expand(count, *term.shape[1:]).reshape(count, -1).sum(-1) for term in terms]).sum(0)
        nodes: Any = trace.nodes
        values = {name: nodes[name]["value"].reshape(count, *shape) for name, shape in layout.shapes.items()}
        return (log_q - without_jacobian(self.density, layout.unconstrained(values))).mean()


# -------------------------------------------------------------------------------- steps of falling size


class AveragedSteps(Engine):
    """Steps of a `NaturalSVI` with the same arguments, of falling size, whose average is the result."""

    unit = "step"

    def __init__(self, svi: NaturalSVI, args: tuple[Any, ...], kwargs: dict[str, Any], planned: int) -> None:
        svi.density(args, kwargs)  # which sets the guide up, before the state of the generators is kept
        super().__init__(svi.gaussian.posterior)
        self.name, self.planned = type(svi).__name__, planned
        self.svi, self.args, self.kwargs = svi, args, kwargs
        self.given = (*args, *kwargs.values())
        self.batches: Any = SimpleNamespace(**{f"argument {k}": given for k, given in enumerate(self.given)})
        self.rates = [group["lr"] for group in svi.natural.param_groups]
        self.follows = svi.optim is not None  # parameters of the model
        self.losses: list[float] = []
        self.skipped = 0  # steps whose loss was not finite
        self.average: Coordinates | None = None
        self.norm2 = 0.0  # of the gradients, averaged as q is

    def advance(self) -> Standing:
        """Take one step; the loss of the record is that before it."""
        svi, step = self.svi, len(self.losses) + 1
        self.mark()
        if not self.follows:
            for group, rate in zip(svi.natural.param_groups, self.rates, strict=True):
                group["lr"] = 2 / (2 / rate + step - 1)
        loss = svi.step(*self.args, **self.kwargs)
        self.losses.append(loss)
        if math.isfinite(loss):
            share, now = (_DECAY + 1) / (step - self.skipped + _DECAY), self.q.snapshot()
            if self.average is not None:
                now = Coordinates(*(torch.lerp(old, new, share) for old, new in zip(self.average, now, strict=True)))
            self.average = now
            self.norm2 += share * (svi.norm**2 - self.norm2)
        else:
            self.skipped += 1
        last, draws = svi.natural.last, step * svi.num_particles
        rho = float(last.rho.min()) if last is not None else 0.0
        record = Record(step, loss, svi.norm, rho, self.skipped + svi.natural.rejections, draws, 0.0)
        where = f"a loss of {loss:.6g} at step {step}"
        return Standing(record, torch.tensor(False), torch.tensor(loss), (step, draws), where=where)

    # -------------------------------------------------------------------------------- the end

    def ending(self, stop: Stop | None, last: Standing) -> Ending:
        """Leave q at the average where the loss is steady, and say what the loss did, never that it converged."""
        assert stop is not None
        text = self._account() if len(self.losses) >= _FEWEST else ""
        if len(self.losses) < self.planned:
            text = f"{stop.reason} {text[:1].upper()}{text[1:]}".rstrip()
        elif not text.startswith("as far as"):
            text = f"because {text}"
        return self.interrupted(text, last)

    def interrupted(self, reason: str, last: Standing) -> Ending:
        """Leave q at the average where the loss is steady; the loss is the mean of the last quarter of the steps."""
        self.losses = self.losses[: last.record.evaluations]
        averaged = self.average is not None and not self.follows
        if averaged and len(self.losses) >= _FEWEST and _steady(self.losses):
            self.go_back((self.average, {}))
        quarter = self.losses[-max(len(self.losses) // 4, 1) :]
        level = sum(quarter) / len(quarter)
        return Ending(False, reason, level, self.svi.norm, last.members)

    def _account(self) -> str:
        """What is known of the end."""
        fallen, noise, last, error = _quarters(self.losses)
        if not math.isfinite(fallen):
            return "the loss was not finite in some of the last steps."
        if not _steady(self.losses):
            return f"the loss still changed by {-fallen:.3g} ± {noise:.1g} in the last quarter. Take more steps."
        text = f"as far as these steps can tell: the loss was steady at {last:.6g} ± {error:.1g}, "
        if self.follows:
            return (
                f"{text}which at a constant rate may be far above the best. Lower the rate of svi.natural and compare, "
                "or end with fit_guide on all data."
            )
        steps = len(self.losses) - self.skipped
        above = self.norm2 / (2 * _SHARE * steps)
        text += f"and the noise of the gradients leaves the average about {above:.1g} nats above the best."
        if above <= _ENOUGH:
            return text
        return (
            f"{text} For {_ENOUGH:g} nats take about {float(f'{steps * above / _ENOUGH:.1g}'):.0f} steps, or as many "
            "times larger mini-batches; with all data fit_guide is faster."
        )

    # -------------------------------------------------------------------------------- where it is

    def here(self) -> tuple[Coordinates, dict[str, Tensor]]:
        """The coordinates of q, and the parameters of the model, which move beside it."""
        return self.q.snapshot(), {name: value.detach().clone() for name, value in self._parameters().items()}

    @torch.no_grad()
    def go_back(self, coordinates: Any) -> None:
        """Put q and the parameters of the model where `here` was called."""
        self.q.restore(coordinates[0])
        mine = self._parameters()
        for name, value in coordinates[1].items():
            mine[name].detach().copy_(value)

    def _parameters(self) -> dict[str, Tensor]:
        """Everything that moves beside q: in the parameter store, in a module, in a torch optimizer."""
        svi, found = self.svi, stored_parameters()
        if isinstance(svi.model, torch.nn.Module):
            found |= {f"of the model {name}": value for name, value in svi.model.state_dict(keep_vars=True).items()}
        if isinstance(svi.optim, torch.optim.Optimizer):
            held = [value for group in svi.optim.param_groups for value in group["params"]]
            found |= {f"of the optimizer {k}": value for k, value in enumerate(held)}
        return found

    # -------------------------------------------------------------------------------- checkpoints

    def settings(self) -> dict[str, str]:
        """The optimizers, the shapes of posterior and parameters, and the tensors among the arguments."""
        svi, optim = self.svi, self.svi.optim
        natural = describe_optimizer(svi.natural)
        settings = {**natural, "method": f"{self.name} by {natural['method']}", "num_particles": str(svi.num_particles)}
        if isinstance(optim, PyroOptim):
            given = optim.pt_optim_args
            settings["optim"] = f"{type(optim).__name__} {given if isinstance(given, dict) else 'by a function'}"
        elif optim is not None:
            settings |= describe_torch_optimizer("optim", optim)
        tensors = tuple(given for given in self.given if isinstance(given, Tensor))
        return {
            **settings,
            **describe_tensors("posterior", self.q.state_dict()),
            **describe_tensors("parameter", self._parameters()),
            **describe_data(tensors),
        }

    def state_dict(self) -> dict[str, Any]:
        """The state before a step: q, parameters, both optimizers, the losses and the averages."""
        optim = self.svi.optim
        return {
            "posterior": self.q.state_dict(),
            "parameters": self._parameters(),
            "natural": self.svi.natural.state_dict(),
            "optim": optim.get_state() if isinstance(optim, PyroOptim) else optim and optim.state_dict(),
            "losses": list(self.losses),
            "skipped": self.skipped,
            "norm": self.svi.norm,
            "average": None if self.average is None else tuple(self.average),
            "norm2": self.norm2,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put everything where the saved step began, which is made again."""
        optim = self.svi.optim
        self.q.load_state_dict(state["posterior"])
        self.go_back((self.q.snapshot(), state["parameters"]))
        self.svi.natural.load_state_dict(copied(state["natural"]))
        if isinstance(optim, PyroOptim):
            optim.optim_objs.clear()  # those of parameters that were met get their state as they are met again
            optim._state_waiting_to_be_consumed.clear()
            optim.set_state(copied(state["optim"]))
        elif optim is not None:
            optim.load_state_dict(copied(state["optim"]))
        self.losses, self.skipped = list(state["losses"]), state["skipped"]
        self.svi.norm, self.norm2 = state["norm"], state["norm2"]
        self.average = None if state["average"] is None else Coordinates(*(part.clone() for part in state["average"]))


def _quarters(losses: list[float]) -> tuple[float, float, float, float]:
    """The fall of the mean to the last quarter from that before, and the mean of the last, with standard errors."""
    quarter = len(losses) // 4
    before, last = torch.tensor(losses[-2 * quarter :], dtype=torch.float64).split(quarter)
    errors = [float(part.std()) / quarter**0.5 for part in (before, last)]
    return float(before.mean() - last.mean()), math.hypot(*errors), float(last.mean()), errors[1]


def _steady(losses: list[float], little: float = 0.1) -> bool:
    """Whether the last two quarters agree, up to what is little and to their noise."""
    # little: nats by which the loss may still fall from one quarter of a run to the next
    fallen, noise, *_ = _quarters(losses)
    return abs(fallen) <= little + 2 * noise  # which a loss that is not finite is not
