"""The engine of `NaturalSVI.run`: steps of falling size, and the average of where they lead.

    ρ_t = 2/(2/ρ_0 + t)                          the steps 2/(2 + t) of Wu and Gardner (2024), from the rate ρ_0 on
    λ̄_t = λ̄_{t-1} + 4/(t + 3) (λ_t - λ̄_{t-1})    polynomial decay (Shamir and Zhang 2013, section 4, with η = 3)

λ are the coordinates of q.  An iterate weighs as the cube of its number, so that the start is forgotten, and t of them
count as much as 7t/16 of equal weight.  Neither needs to know how long the run will be.  With gradients of independent
noise, whose natural norm is |g|, the average of k of them ends

    E|g|²/(2k)      nats above the best

(Polyak and Juditsky 1992, in the metric of q, in which the curvature at the optimum is about 1).

Beside an optimizer that moves parameters of the model q has to follow where they lead: the rate stays at ρ_0, and the
last step is the result.
"""

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from pyro.optim import PyroOptim
from torch import Tensor

from torchngvi.adapters.pyro import store
from torchngvi.adapters.pyro.guide import AutoGaussian
from torchngvi.fitting import fingerprints
from torchngvi.fitting.checkpoints import copied
from torchngvi.fitting.loop import Ending, Engine
from torchngvi.fitting.records import Record
from torchngvi.fitting.stopping import Standing, Stop
from torchngvi.interfaces import Coordinates
from torchngvi.optim import NaturalGradientVI

FEWEST = 8  # steps of which the last can be compared with those before
_STEADY = 0.1  # nats by which the loss may still fall from one quarter of a run to the next
_ENOUGH = 0.1  # nats above the best that need no advice
_DECAY = 3  # η
_SHARE = (2 * _DECAY + 1) / (_DECAY + 1) ** 2  # of the steps, that the average is worth


class Stepping(Protocol):
    """What the engine asks of a `NaturalSVI`."""

    model: Any
    gaussian: AutoGaussian  # whose posterior takes the steps
    optim: PyroOptim | torch.optim.Optimizer | None
    num_particles: int
    norm: float

    @property
    def natural(self) -> NaturalGradientVI:
        """The optimizer of q."""

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Take a step, and return the loss before it."""

    def density(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The log joint with these arguments."""


class AveragedSteps(Engine):
    """Steps of a `NaturalSVI` with the same arguments, of falling size, whose average is the result."""

    unit = "step"

    def __init__(self, svi: Stepping, args: tuple[Any, ...], kwargs: dict[str, Any], planned: int) -> None:
        svi.density(args, kwargs)  # which sets the guide up
        super().__init__(svi.gaussian.posterior)
        self.name, self.planned = type(svi).__name__, planned
        self.svi, self.args, self.kwargs = svi, args, kwargs
        self.batches: Any = SimpleNamespace(**{f"argument {k}": given for k, given in enumerate(self._given())})
        self.rates = [group["lr"] for group in svi.natural.param_groups]
        self.follows = svi.optim is not None  # parameters of the model
        self.losses: list[float] = []
        self.skipped = 0  # steps whose loss was not finite
        self.average: Coordinates | None = None
        self.norm2 = 0.0  # of the gradients, averaged as q is

    def check(self) -> None:
        """Build the log joint, which runs the model, before the state of the generators is kept."""
        self.svi.density(self.args, self.kwargs)

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
            self._include((_DECAY + 1) / (step - self.skipped + _DECAY))
        else:
            self.skipped += 1
        last, draws = svi.natural.last, step * svi.num_particles
        rho = float(last.rho.min()) if last is not None else 0.0
        record = Record(step, loss, svi.norm, rho, self.skipped + svi.natural.rejections, draws, 0.0)
        where = f"a loss of {loss:.6g} at step {step}"
        return Standing(record, torch.tensor(False), torch.tensor(loss), (step, draws), where=where)

    @torch.no_grad()
    def _include(self, share: float) -> None:
        """Take the coordinates of q, and the squared norm of the gradient, into the averages."""
        now = self.q.snapshot()
        if self.average is not None:
            now = Coordinates(*(torch.lerp(old, new, share) for old, new in zip(self.average, now, strict=True)))
        self.average = now
        self.norm2 += share * (self.svi.norm**2 - self.norm2)

    def put_back_rates(self) -> None:
        """Give the optimizer of q the rates with which the run began."""
        for group, rate in zip(self.svi.natural.param_groups, self.rates, strict=True):
            group["lr"] = rate

    # -------------------------------------------------------------------------------- the end

    def ending(self, stop: Stop | None, last: Standing) -> Ending:
        """Leave q at the average where the loss is steady, and say what the loss did, never that it converged."""
        assert stop is not None
        text = self._account() if len(self.losses) >= FEWEST else ""
        if len(self.losses) < self.planned:
            text = f"{stop.reason} {text[:1].upper()}{text[1:]}".rstrip()
        elif not text.startswith("as far as"):
            text = f"because {text}"
        return self.interrupted(text, last)

    def interrupted(self, reason: str, last: Standing) -> Ending:
        """Leave q at the average where the loss is steady; the loss is the mean of the last quarter of the steps."""
        self.losses = self.losses[: last.record.evaluations]
        averaged = self.average is not None and not self.follows
        if averaged and len(self.losses) >= FEWEST and _steady(self.losses):
            self.go_back((self.average, {}))
        quarter = self.losses[-max(len(self.losses) // 4, 1) :]
        level = sum(quarter) / len(quarter)
        return Ending(False, reason, level, self.svi.norm, last.members)

    def _account(self) -> str:
        """What is known of the end."""
        fallen, (last, error) = _fallen(self.losses)[0], _mean(self.losses[-(len(self.losses) // 4) :])
        if not math.isfinite(fallen):
            return "the loss was not finite in some of the last steps."
        if not _steady(self.losses):
            noise = _fallen(self.losses)[1]
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

    def _given(self) -> Iterable[Any]:
        return (*self.args, *self.kwargs.values())

    def _parameters(self) -> dict[str, Tensor]:
        """Everything that moves beside q: in the parameter store, in a module, in a torch optimizer."""
        svi, found = self.svi, store.parameters()
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
        natural = fingerprints.of_optimizer(svi.natural)
        settings = {**natural, "method": f"{self.name} by {natural['method']}", "num_particles": str(svi.num_particles)}
        if isinstance(optim, PyroOptim):
            given = optim.pt_optim_args
            settings["optim"] = f"{type(optim).__name__} {given if isinstance(given, dict) else 'by a function'}"
        elif optim is not None:
            settings |= fingerprints.of_torch_optimizer("optim", optim)
        tensors = tuple(given for given in self._given() if isinstance(given, Tensor))
        return {
            **settings,
            **fingerprints.of_tensors("posterior", self.q.state_dict()),
            **fingerprints.of_tensors("parameter", self._parameters()),
            **fingerprints.of_data(tensors),
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


def _mean(losses: list[float]) -> tuple[float, float]:
    """With its standard error."""
    values = torch.tensor(losses, dtype=torch.float64)
    return float(values.mean()), float(values.std() / len(values) ** 0.5)


def _fallen(losses: list[float]) -> tuple[float, float]:
    """By how much the mean of the last quarter is below that of the quarter before, with its standard error."""
    quarter = len(losses) // 4
    (before, error_before), (last, error) = _mean(losses[-2 * quarter : -quarter]), _mean(losses[-quarter:])
    return before - last, math.hypot(error_before, error)


def _steady(losses: list[float]) -> bool:
    """Whether the last two quarters agree, up to what is little and to their noise."""
    fallen, noise = _fallen(losses)
    return abs(fallen) <= _STEADY + 2 * noise  # which a loss that is not finite is not
