"""The engines of `train_svgp`, whose advance is a round, and of `train_svgp_in_batches`, whose advance is an epoch.

A round is up to 25 iterations of L-BFGS for all hyper-parameters (strong Wolfe line search; Liu and Nocedal 1989) on
`ProfiledELBO` of n rows that weigh N/n, in which q is optimal at every evaluation.  n is 2,048 in the first round (500
of several functions; or 4M, if that is more) and doubles from one to the next, up to all rows, or to as many as 2²⁴
entries a_n allow.  On the last n rounds go on until one of them gains less than 0.001 nats a datum.  L-BFGS keeps its
memory of the curvature from one round to the next, since the bounds of a part of the rows and of twice as many are
curved alike.  Where a round with that memory ends before its 25 iterations and gains nothing, the next one begins
without.  Then there may be a round from a second start, see `starts`; where it ends below the last one, the rounds go
on from there, and there may be another.

An epoch is one evaluation a batch for q and hyper-parameters.  What is marked is where it has led, with the state of
the generators where it began: the first batch that they give tells, by its loss, whether a run that goes on has the
same data.  A stationary run of natural steps ρ on batches is noise about an optimum: one step undoes what the step
before took from its batch.  With g_t the gradient of a batch in the frame of q,

    E⟨g_t, g_t+1⟩ = -½ρ E|g|²            at rest
    E⟨g_t, g_t+1⟩ > -½ρ E|g|²            where the optimum moves on with the hyper-parameters and q lags behind

so that the cosine c of successive gradients of the mean tells which of the two prevails, and the length follows it,

    log ρ ← log ρ + 0.1 clip(c/ρ + 0.3, -1, 1)        from  min(½, max(B/N, B/(5M))),  within  [B/(10N), ½]

(at most 1/L where L latent functions are mixed, see `Latents`).  At rest c/ρ is -½ and ρ falls; at a lag it rises.
(Kesten 1958 for the sign of successive errors as a signal to the step length.)
"""

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.models import ApproximateGP
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from torchngvi.adapters.gpytorch.energies import check_labels, conjugate, log_concave
from torchngvi.adapters.gpytorch.model import Batch, count, kept_modes, pairs, row_dimension
from torchngvi.adapters.gpytorch.optimizer import check_hyper_optimizer
from torchngvi.adapters.gpytorch.sparse_gp import ProfiledELBO, SparseGP
from torchngvi.adapters.gpytorch.starts import (
    STARTS,
    begin_periods,
    check_repeats,
    choose_inducing_points,
    left_open,
    lengthen,
    shorten,
    telling,
)
from torchngvi.distributed import Processes
from torchngvi.errors import InputError, RejectedStepWarning
from torchngvi.fitting.checkpoints import (
    Generators,
    copied,
    describe,
    describe_data,
    describe_tensors,
    describe_torch_optimizer,
)
from torchngvi.fitting.loop import Ending, Engine
from torchngvi.fitting.records import Record
from torchngvi.fitting.stopping import Standing, Stop
from torchngvi.methods import IBLR, VN, Method
from torchngvi.numerics.arrays import ENTRIES_AT_ONCE
from torchngvi.optim.evaluating import warn
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.stepsizes import Constant, KLRadius


@dataclass(frozen=True)
class StepSettings:
    """The length of natural steps on batches; a field without a benchmark is that of the first version, untuned."""

    noise: float = 0.05  # nats per datum that the noise of a mini-batch may cost at first
    longest: float = 0.5  # ρ on a part of the data
    radius: float = 4.0  # nats a step may move q, where the likelihood is not log-concave
    rate: float = 0.1  # largest change of log ρ a step, by `benchmarks/svgp_joint.py` on bike, elevators and protein
    lag: float = 0.3  # -c/ρ at which ρ stays, by the same: the lag costs about a third of what the noise costs


@dataclass(frozen=True)
class RoundSettings:
    """How rounds go, by `benchmarks/svgp_hyperparameters.py`, and of several functions by `svgp_functions.py`."""

    first: int = 2048  # rows of the first round, or 4M if that is more
    first_of_several: int = 500  # the same for several functions, by the softmax on bike and elevators
    iterations: int = 25  # of L-BFGS a round
    memory: int = 20  # pairs that it keeps
    tolerance: float = 1e-6  # nats a datum by which the search for q ends; 1e-9 takes 2.5 times as many steps
    share_of_several: float = 0.1  # of what the loss fell last, by which the search for several functions ends before
    gain: float = 1e-3  # nats a datum that a round on the last rows has to bring
    narrow: float = 0.03  # standard deviation of an input below which inducing points move in units of it


_STEPS, _ROUNDS = StepSettings(), RoundSettings()


class NaturalSteps:
    """Steps of q on batches, whose length follows the cosine of successive gradients of the mean."""

    def __init__(self, target: SparseGP, num_data: int) -> None:
        self.q, self.num_data, self.longest = target.posterior, num_data, target.latents.longest
        self.conjugate = conjugate(target.likelihood)
        # where curvature may be negative the form that stays positive definite, in short steps
        self.optimizer: Method = (
            VN(self.q, lr=1.0, step_size=Constant())
            if log_concave(target.likelihood)
            else IBLR(self.q, lr=1.0, step_size=KLRadius(_STEPS.radius))
        )
        self.log_rho: Tensor | None = None
        self.force: Tensor | None = None  # of the batch before

    def step(self, target: SparseGP, rows: int) -> Tensor:
        """Take a step of q on a batch.  Where float32 is not enough for the step, q is in float64 from here on."""
        self.set_length(rows)
        refused = self.optimizer.rejections if self.q.dtype != torch.float64 else 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RejectedStepWarning)  # there is no learning rate to lower
            loss = self.optimizer.step(target)
        if self.q.dtype != torch.float64 and self.optimizer.rejections > refused:
            warn(
                f"a natural step could not be taken in {str(self.q.dtype).removeprefix('torch.')}: q is kept in "
                "float64 for the rest of the training.",
                RejectedStepWarning,
            )
            self.q.double()
        assert loss is not None
        return loss

    def set_length(self, rows: int) -> None:
        """Set ρ of the next step; on all of the data of a Gaussian likelihood it is 1, where that is exact."""
        if self.log_rho is None:
            share = rows / self.num_data
            first = min(_STEPS.longest, self.longest, max(share, 4 * _STEPS.noise * rows / self.q.dim))
            self.log_rho = torch.tensor(first, dtype=torch.float64, device=self.q.device).log()
        whole = self.conjugate and rows == self.num_data
        self.optimizer.param_groups[0]["lr"] = self.longest if whole else self.log_rho.exp().to(self.q.dtype)

    def follow(
        self,
        force: Tensor,  # gradient of the mean on the batch of the last step, (*batch, M)
        rows: int,
    ) -> None:
        """Let the length follow the cosine of this gradient and the one before, in the frame of q."""
        assert self.log_rho is not None
        before, self.force = self.force, force.detach().to(self.q.dtype)
        if before is None:
            return
        a, b = (self.q.frame().pull(g.to(self.q.dtype)).flatten() for g in (before, self.force))
        cosine = ((a @ b) / (a.norm() * b.norm()).clamp_min(1e-300)).double()
        change = _STEPS.rate * (cosine / self.log_rho.exp() + _STEPS.lag).clamp(-1.0, 1.0)
        lowest = torch.tensor(0.1 * rows / self.num_data, dtype=torch.float64, device=change.device).log()
        rho = torch.maximum(self.log_rho + change.nan_to_num(0.0), lowest)
        self.log_rho = rho.clamp_max(math.log(min(_STEPS.longest, self.longest)))

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, with the length of the steps and the last gradient."""
        return {"optimizer": self.optimizer.state_dict(), "log_rho": self.log_rho, "force": self.force}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        self.optimizer.load_state_dict(copied(state["optimizer"]))
        self.log_rho, self.force = state["log_rho"], state["force"]


class Training(Engine):
    """What the two engines share: the losses, and the state of model and likelihood, from which a run goes on."""

    name = "SVGP"
    q: Gaussian
    unit_of_a_record: str
    bound: str  # which is the loss, in a word
    processes: Processes | None = None

    def __init__(self, target: SparseGP, num_data: int) -> None:
        super().__init__(target.posterior)
        self.model, self.likelihood, self.latents = target.model, target.likelihood, target.latents
        self.num_data = num_data
        self.losses: list[float] = []
        self.evaluated = 0  # bounds, each on one batch or on the rows of a round
        self._saved: Tensor | None = None  # the loss that a file holds, where the run goes on from one

    @abstractmethod
    def _train(self) -> bool:
        """Train for one record more; whether there was anything left to do."""

    def natural_steps(self) -> tuple[float, int]:
        """The length of the last natural step, and how many were not taken."""
        return 1.0, 0

    def _to_save(self, saved: Tensor | None) -> Tensor:
        """The loss that a file holds; of one that was saved the same again, by which other data are told."""
        return torch.tensor(self.losses[-1])

    def advance(self) -> Standing | None:
        """Train for one record more; where the run goes on from a file, give the standing of its last one first."""
        saved, told = self._saved, self._saved is not None
        if not (told or self._train()):
            return None
        self.mark()
        loss, self._saved = self._to_save(saved), None
        number, last = len(self.losses), self.losses[-1]
        record = Record(self.evaluated, last, math.nan, *self.natural_steps(), number, 0.0)
        units = f"{self.unit_of_a_record}s"
        where = f"a negative {self.bound} per datum of {last:.6g} after {number} {units}"
        spent, remedy = (self.evaluated, number), f"Raise {units}."
        return Standing(record, torch.tensor(False), loss, spent, told=told, where=where, remedy=remedy)

    def state_dict(self) -> dict[str, Any]:
        """The state after a record: losses, model and likelihood."""
        return {
            "losses": list(self.losses),
            "evaluated": self.evaluated,
            "model": self.model.state_dict(),
            "likelihood": self.likelihood.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put everything where the saved record ended; the next `advance` gives its standing again."""
        self.model.load_state_dict(state["model"])
        self.likelihood.load_state_dict(state["likelihood"])
        self.losses, self.evaluated = list(state["losses"]), state["evaluated"]
        self._saved = state.get("loss")


class Epochs(Training):
    """The engine of joint training, whose advance is an epoch."""

    unit, scaled = "row", True
    unit_of_a_record, bound = "epoch", "ELBO"

    def __init__(
        self,
        model: ApproximateGP,
        likelihood: Likelihood,
        batches: Iterable[Batch],
        num_data: int,
        hyper_optimizer: torch.optim.Optimizer,
        epochs: int,
        processes: Processes | None = None,
    ) -> None:
        target = SparseGP(model, likelihood, [])
        super().__init__(target, num_data)
        self.batches, self.hyper, self.epochs, self.processes = batches, hyper_optimizer, epochs, processes
        self.natural = NaturalSteps(target, num_data)
        self.generators = Generators(self.q.device, batches)
        self._began: dict[str, Any] = {}  # the generators where the last epoch began
        self._first: Batch | None = None  # of the last epoch

    def natural_steps(self) -> tuple[float, int]:
        """The length ρ of the last natural step, and how many were not taken."""
        optimizer = self.natural.optimizer
        return float(optimizer.param_groups[0]["lr"]), optimizer.rejections

    def _train(self) -> bool:
        self._began = {} if self.capture is None else self.generators.states()
        self.losses.append(self._epoch())
        return True

    def _epoch(self) -> float:
        """One pass; the mean loss per datum."""
        total, rows = torch.zeros((), dtype=torch.float64), 0
        for batch, here in self._rounds():
            self._first = self._first if rows else batch
            loss = self._stepped(batch, here)
            self.evaluated += 1
            total, rows = total + loss.detach().to(total) * (here / self.num_data), rows + here
            if self.tell is not None:
                self.tell(len(self.losses) * self.num_data + rows, {"loss": f"{float(total) / rows:.4f}"})
        if not rows:
            raise InputError(
                "the batches of an epoch are empty: an iterator is used up after one. Give a list or a DataLoader."
            )
        if rows != self.num_data:
            raise InputError(
                f"an epoch has {rows} rows where num_data is {self.num_data}: the expected log likelihood would have "
                "the wrong weight beside the KL divergence. "
                "Give the number of rows, and a DataLoader without drop_last."
            )
        return float(total) / self.num_data

    def _rounds(self) -> Iterator[tuple[Batch | None, int]]:
        """The batches with their rows: of several processes one of each that has one left, and the rows of all."""
        own = pairs(self.batches, self.latents)
        if self.processes is None:
            yield from ((batch, count(batch[0])) for batch in own)
            return
        drawn: list[Batch | None] = []

        def following() -> list[Tensor]:
            drawn.append(next(own, None))
            return [_rows_of(drawn[-1])]

        while rows := int(self.processes.summed(following, self._learnt())[0]):
            yield drawn.pop(), rows

    def _learnt(self) -> list[torch.nn.Parameter]:
        """What the hyper-optimizer holds, the same in all processes."""
        return [p for group in self.hyper.param_groups for p in group["params"]]

    def _target(self, batch: Batch | None, rows: int, learn: bool = False) -> SparseGP:
        """The target of a batch, or of those of all processes with so many rows."""
        batches = [] if batch is None else [batch]
        target = SparseGP(self.model, self.likelihood, batches, self.num_data, learn=learn)
        return target if self.processes is None else target.over(self.processes, rows)

    def _stepped(self, batch: Batch | None, rows: int) -> Tensor:
        """A step of q and one of the hyper-parameters; the loss before them."""
        target = self._target(batch, rows, learn=True)
        self.hyper.zero_grad()
        loss = self.natural.step(target, rows)
        if loss.device.type == "cpu" and not bool(loss.isfinite()):  # elsewhere it would wait for the device
            raise InputError(self._not_finite(float(loss), batch))
        if self.processes is None:
            target.backward()
        else:
            self._backward_on_all(target)
        if (extra := penalty(self.model, self.likelihood, self.num_data)) is not None:
            extra.backward()
        self.hyper.step()
        self.natural.follow(target.force, rows)
        return loss

    def _backward_on_all(self, target: SparseGP) -> None:
        """The gradients of the batches of all processes, in one sum; without one anywhere there is none."""
        assert self.processes is not None
        learnt = self._learnt()

        def here() -> list[Tensor]:
            target.backward()
            there = torch.tensor([p.grad is not None for p in learnt])
            return [there, *(torch.zeros_like(p) if p.grad is None else p.grad for p in learnt)]

        there, *gradients = self.processes.summed(here)
        for parameter, gradient, some in zip(learnt, gradients, there.tolist(), strict=True):
            parameter.grad = gradient if some else None

    def _not_finite(self, loss: float, batch: Batch | None) -> str:
        if self.processes is None and batch is not None:
            check_labels(self.likelihood, batch[1])
        y = torch.zeros(0) if batch is None else batch[1]
        counts = torch.tensor([float(y.isnan().sum()), float(y.numel())])
        missing, all_ = (int(x) for x in (counts if self.processes is None else self.processes.total([counts])[0]))
        what = (
            f"{missing} of {all_} targets of this batch are NaN" if missing else "check the data and hyper-parameters"
        )
        return (
            f"the negative ELBO of a batch is {loss}: {what}. Everything is as the last step left it. For missing "
            'targets say gpytorch.settings.observation_nan_policy("mask").'
        )

    @torch.no_grad()
    def _loss_of(self, batch: Batch | None) -> Tensor:
        """The negative ELBO at q by this batch, in eval mode, where nothing that is learnt moves."""
        with kept_modes(self.model, self.likelihood), self.generators.kept():
            self.model.eval()
            self.likelihood.eval()
            rows = 0 if self.processes is None else int(self.processes.total([_rows_of(batch)])[0])
            return self._target(batch, rows).negative_elbo(self.q)

    def _to_save(self, saved: Tensor | None) -> Tensor:
        """That of the first batch of the epoch, which the generators give again where a loss was saved."""
        if saved is None:
            by_batch = self.capture is not None and not (self._first is None and self.processes is None)
            return self._loss_of(self._first) if by_batch else super()._to_save(saved)
        if isinstance(self.batches, Iterator):  # which would have a batch less for the epoch
            return saved
        with self.generators.kept():
            self.generators.set(self._began)
            first = next(pairs(self.batches, self.latents), None)
        if first is None and self.processes is None:  # an epoch without batches is refused
            return saved
        return self._loss_of(first)

    # -------------------------------------------------------------------------------- what the loop asks

    def total(self, evaluations: float) -> float:
        """The bar counts rows, up to those of all epochs."""
        return self.epochs * self.num_data

    def shown(self, record: Record) -> tuple[int, dict[str, str]]:
        """The bar stands at the rows so far, and shows the loss of the epoch."""
        return record.gradients * self.num_data, {"loss": f"{record.loss:.4f}"}

    def here(self) -> None:
        """Mark no coordinates, since the hyper-parameters move too and an interrupt goes back nowhere."""

    def go_back(self, coordinates: Any) -> None:
        """Leave everything as the last step left it."""

    def settings(self) -> dict[str, str]:
        """The settings of the run: model, kernels, likelihood, hyper-optimizer and data in memory."""
        batches = self.batches if self.processes is None else ()  # which are others in each process
        return of_run(self.model, self.likelihood, batches, self.num_data, self.hyper)

    def state_dict(self) -> dict[str, Any]:
        """With both optimizers, and the generators at the start of the epoch."""
        optimizers = {"hyper": self.hyper.state_dict(), "natural": self.natural.state_dict()}
        return super().state_dict() | optimizers | {"dtype": str(self.q.dtype), "began": self._began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """With both optimizers, and a q that has become float64."""
        if state["dtype"] == "torch.float64":
            self.q.double()
        self.hyper.load_state_dict(copied(state["hyper"]))
        super().load_state_dict(state)
        self.natural.load_state_dict(state["natural"])
        self._began = state["began"]


def _rows_of(batch: Batch | None) -> Tensor:
    return torch.tensor(0 if batch is None else count(batch[0]))


def penalty(model: ApproximateGP, likelihood: Likelihood, num_data: int) -> Tensor | None:
    """Priors on hyper-parameters and added losses, in nats per datum, as GPyTorch's objectives have them."""
    terms = [
        -prior.log_prob(closure(module)).sum() / num_data
        for owner in (model, likelihood)
        for _, module, prior, closure, _ in owner.named_priors()
    ]
    terms += [term.loss().sum() for term in model.added_loss_terms()]
    needed = [term for term in terms if term.requires_grad]
    return torch.stack(needed).sum() if needed else None


def check_optimizer(optimizer: torch.optim.Optimizer, q: Gaussian, parameters: list[torch.nn.Parameter]) -> None:
    """Check that an optimizer takes one evaluation a step, of hyper-parameters of this model."""
    check_hyper_optimizer(optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held & {id(part) for part in q.buffers()}:
        raise InputError(
            "hyper_optimizer holds the posterior, which moves by natural gradients; give it model.parameters() and "
            "likelihood.parameters(), which leave q out."
        )
    if not held & {id(p) for p in parameters}:
        raise InputError(
            "hyper_optimizer holds no parameter of this model or likelihood; was it built over an earlier model? "
            "Build it over [*model.parameters(), *likelihood.parameters()]."
        )


def of_run(
    model: ApproximateGP,
    likelihood: Likelihood,
    batches: Iterable[Batch],
    num_data: int,
    hyper: torch.optim.Optimizer,
) -> dict[str, str]:
    """The settings of a run in batches, in words: model, kernels, likelihood, hyper-optimizer, data in memory."""
    settings = {"method": "train_svgp", "num_data": str(num_data), **of_model(model, likelihood)}
    if isinstance(batches, DataLoader):
        size = getattr(batches.batch_sampler, "batch_size", None)
        settings["batch size"] = describe(size)
    return settings | describe_torch_optimizer("hyper_optimizer", hyper) | describe_data(_data(batches))


def of_model(model: ApproximateGP, likelihood: Likelihood) -> dict[str, str]:
    """The settings of a model in words: its modules and theirs, its kernels, the shapes of its tensors."""
    settings: dict[str, str] = {}
    for name, module in (("model", model), ("likelihood", likelihood)):
        settings |= {f"{name} {path}".strip(): type(part).__name__ for path, part in module.named_modules()}
        settings |= describe_tensors(name, module.state_dict())
    for path, kernel in model.named_modules():
        if isinstance(kernel, Kernel):  # what is no parameter, such as the smoothness ν of a Matérn kernel
            settings |= {
                f"model {path} {name}": describe(value)
                for name, value in sorted(vars(kernel).items())
                if not name.startswith("_") and name != "training" and isinstance(value, bool | int | float | str)
            }
    return settings


def _data(batches: Iterable[Batch]) -> tuple[Tensor, ...]:
    """The data where they are in memory and have an order."""
    if isinstance(batches, DataLoader) and isinstance(batches.dataset, TensorDataset):
        return batches.dataset.tensors
    pairs = batches if isinstance(batches, list | tuple) else ()
    return tuple(part for pair in pairs if isinstance(pair, tuple | list) for part in pair if isinstance(part, Tensor))


class _LBFGS(torch.optim.LBFGS):
    """L-BFGS in a unit of its own for each number."""

    units: Tensor

    def _gather_flat_grad(self) -> Tensor:
        return super()._gather_flat_grad() * self.units

    def _add_grad(self, step_size: float, direction: Tensor) -> None:
        super()._add_grad(step_size, direction * self.units)


class Rounds(Training):
    """The engine whose advance is a round of L-BFGS for the hyper-parameters."""

    unit = unit_of_a_record = "round"
    bound = "bound"

    def __init__(self, model: ApproximateGP, likelihood: Likelihood, x: Tensor, y: Tensor, most: int) -> None:
        target = ProfiledELBO(model, likelihood, (x, y)).target  # refused before anything is moved
        check_repeats(model, x)
        super().__init__(target, count(x))
        self.strategy, self.several = target.strategy, bool(target.posterior.batch_shape)
        self.x = x if x.is_floating_point() else x.to(self.strategy.inducing_points)
        self.y, self.most_rounds = y, most
        order = torch.randperm(self.num_data, generator=torch.Generator().manual_seed(0)).to(x.device)
        # a noise for each row is for all rows in their order
        self.order = None if isinstance(likelihood, FixedNoiseGaussianLikelihood) else order
        parameters = {id(p): p for p in (*model.parameters(), *likelihood.parameters()) if p.requires_grad}
        self.learnt = list(parameters.values())
        self.optimizer = _LBFGS(
            self.learnt,
            max_iter=_ROUNDS.iterations,
            max_eval=2 * _ROUNDS.iterations,
            history_size=_ROUNDS.memory,
            line_search_fn="strong_wolfe",
        )
        self.optimizer.units = self._units()
        self.gain = math.inf  # of the last round, per datum; or where one has to follow that forgets
        self.first: list[Tensor] = []  # the hyper-parameters as they were given, until a second start led nowhere

    def _units(self) -> Tensor:
        """The unit in which each learnt number moves: 1, or that of a narrow input for inducing points."""
        Z, widths = self.strategy.inducing_points, self.x.reshape(-1, self.x.shape[-1]).std(0, correction=0)
        self.narrow = (widths > 0) & (widths < _ROUNDS.narrow)
        widths = torch.where(self.narrow, widths, 1.0).to(Z)
        return torch.cat([(widths.expand_as(p) if p is Z else torch.ones_like(p)).flatten() for p in self.learnt])

    def rows(self, number: int, first: int | None = None) -> int:
        """The number of rows of a round, where the first has so many, or 4M if that is more."""
        N, M = self.num_data, self.strategy.inducing_points.shape[-2]
        if self.order is None:
            return N
        if first is None:
            first = _ROUNDS.first_of_several if self.several else _ROUNDS.first
        entries = ENTRIES_AT_ONCE // self.q.batch_shape.numel()
        most, size = min(N, max(entries // M, 4 * M)), max(first, 4 * M) * 2**number
        return most if 1.5 * size >= most else size

    @property
    def settled(self) -> bool:
        """Whether the last round was on as many rows as there will be, and brought little."""
        last = len(self.losses) - 1
        return last >= 0 and self.rows(last) == self.rows(last + 1) and self.gain < _ROUNDS.gain

    def begin(self) -> None:
        """Begin at the periods of the targets; lengthen length scales that relate no rows; choose points left open."""
        begin_periods(self.model, self.x, self.y, lambda: self._value(self._part(0)))
        before = self.first = [p.detach().clone() for p in self.learnt]
        some = self.x.ndim == 2 and bool(self.narrow.any())
        shorter = some and shorten(self.model, self.x, self.narrow, ~self.narrow)
        longer = lengthen(self.model, self.x)
        if left_open(self.strategy):
            choose_inducing_points(self.strategy, self.x)
        elif shorter or longer:  # which a model that was trained before may not need
            after, value = [p.detach().clone() for p in self.learnt], self._value(self._part(0))
            self._put(before)
            if value < self._value(self._part(0)):
                self._put(after)

    def _train(self) -> bool:
        if self.settled:
            return self._again()
        self._round(self._part(len(self.losses)))
        return True

    def one_round(self) -> None:
        """Learn for a round on as many rows as one function begins with, the same for few inducing points and more."""
        self._round(self._part(0, _ROUNDS.first))

    def allows(self, size: int) -> bool:
        """Whether a round with so many inducing points has four rows for each of them."""
        return 4 * size**2 <= ENTRIES_AT_ONCE

    def _part(self, number: int, first: int | None = None) -> ProfiledELBO:
        """The bound on the rows of a round."""
        rows = self.x, self.y
        if self.order is not None:
            part = self.order[: self.rows(number, first)]
            rows = self.x.index_select(-2, part), self.y.index_select(row_dimension(self.y, self.latents), part)
        return ProfiledELBO(self.model, self.likelihood, rows, self.num_data, _ROUNDS.tolerance)

    def _round(self, bound: ProfiledELBO) -> None:
        """Some iterations of L-BFGS; q is the optimal one of these rows afterwards."""
        before = [p.detach().clone() for p in self.learnt]
        last: tuple[Tensor, list[Tensor]] | None = None  # the last loss that could be evaluated, with its gradient

        def evaluate() -> Tensor:
            nonlocal last
            try:
                last = self._evaluated(bound)
            except InputError:
                if last is None:  # where the round begins, not a trial of the line search
                    raise
                # as high as there and as steep the other way: the line search turns back halfway
                for p, gradient in zip(self.learnt, last[1], strict=True):
                    p.grad = -gradient
            return last[0]

        done = self._iterations()
        bound.share = _ROUNDS.share_of_several if self.several else 0.0
        start = float(self.optimizer.step(evaluate))
        bound.share = 0.0
        stuck, after = 0 < done > self._iterations() - _ROUNDS.iterations, self._value(bound)
        if not after <= start:
            self._put(before)
            self.optimizer.state.clear()
            after = self._value(bound)
        bound.assign()
        self.losses.append(after)
        self.gain = start - after
        if stuck and self.gain < _ROUNDS.gain:  # the memory leads nowhere, or this is the end: a round without it
            self.optimizer.state.clear()
            self.gain = math.inf

    def _again(self) -> bool:
        """A round from a second start, where inputs still tell something; whether it has led further."""
        first, self.first = self.first, []
        bound, before = self._part(len(self.losses)), (self.here(), self.losses[:], self.gain)
        if not first or not self._value(bound) < math.inf:
            return False
        told = _telling_any(bound.scores, bound.x)
        if not bool(told.any()):
            return False
        self._put(first)
        self.optimizer.state.clear()
        try:
            targets = bound.y.movedim(row_dimension(bound.y, self.latents), -1)
            if shorten(self.model, self.x, told, _telling_any(targets, bound.x)):
                if left_open(self.strategy):
                    choose_inducing_points(self.strategy, self.x)
                self._round(self._part(len(self.losses)))
        except InputError:  # the first end stays
            pass
        here, losses, gain = before
        if self.losses[-1] < losses[-1] - _ROUNDS.gain:
            self.gain, self.first = math.inf, first  # from there the residuals may tell more
            return True
        self.losses, self.gain = losses, gain
        self.go_back(here)
        self.optimizer.state.clear()
        return False

    def _iterations(self) -> int:
        """The iterations that L-BFGS remembers to have made."""
        return self.optimizer.state[self.learnt[0]].get("n_iter", 0) if self.optimizer.state else 0

    def _loss(self, bound: ProfiledELBO) -> Tensor:
        """What a round minimises, per datum."""
        self.evaluated += 1
        loss, extra = -bound(), penalty(self.model, self.likelihood, self.num_data)
        return loss if extra is None else loss + extra

    def _value(self, bound: ProfiledELBO) -> float:
        """The same as a number; infinite where it cannot be evaluated."""
        try:
            return float(self._loss(bound).detach())
        except InputError:
            return math.inf

    def _evaluated(self, bound: ProfiledELBO) -> tuple[Tensor, list[Tensor]]:
        """The loss and its gradient, which is left in the parameters."""
        for p in self.learnt:
            p.grad = None
        loss = self._loss(bound)
        if bool(loss.isfinite()):
            loss.backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.learnt]
        if not all(bool(each.isfinite().all()) for each in (loss, *gradients)):
            raise InputError(
                f"the negative bound per datum is {float(loss.detach()):.6g} at these hyper-parameters, or its "
                "gradient is not finite: check the data and the hyper-parameters."
            )
        return loss.detach(), gradients

    # -------------------------------------------------------------------------------- what the loop asks

    @torch.no_grad()
    def gap(self) -> float:
        """The exact log evidence of some rows less the bound on them, in nats a row, for Gaussian noise; else NaN."""
        most = STARTS.exact
        part = slice(None) if self.order is None else self.order[:most]
        x, y = self.x[part], self.y[part].double()
        bound = ProfiledELBO(self.model, self.likelihood, (x, self.y[part]))
        if not bound.tight or self.several or len(y) > most:
            return math.nan
        value, prior = float(bound()), self.model.forward(x)
        K = prior.covariance_matrix.double() + (bound.noise + self.strategy.jitter_val).diag_embed()
        return float(torch.distributions.MultivariateNormal(prior.mean.double(), K).log_prob(y)) / len(y) - value

    def remark(self) -> str:
        """Say of which share of the rows the inducing points say little at the end; of a softmax its loss; or ""."""
        bound = self._part(len(self.losses))
        if not (bound.tight or bound.joint) or not self._value(bound) < math.inf:
            return ""
        if more := bound.integrated():
            return f"by an integral in the place of nodes the negative ELBO per datum is {self.losses[-1] + more:.6g}."
        share = float((bound.ratios > STARTS.unexplained).double().mean()) if bound.tight else 0.0
        if share < STARTS.noticed:
            return ""
        return (
            f"{self.strategy.inducing_points.shape[-2]} inducing points leave {share:.0%} of the rows unexplained, "
            f"whose variance given them is more than {STARTS.unexplained:g} times the noise: raise their number."
        )

    def ending(self, stop: Stop | None, last: Standing) -> Ending:
        """The outcome: where no criterion has ended the run, that the bound has settled."""
        if stop is None:
            part = "" if self.rows(len(self.losses)) == self.num_data else f"{self.rows(len(self.losses))} "
            stop = Stop(
                f"because a round on {part or 'all '}rows has raised the bound by less than {_ROUNDS.gain:g} nats a "
                f"datum ({last.place()})."
            )
        return super().ending(stop, last)

    def total(self, evaluations: float) -> float:
        """The bar counts rounds."""
        return self.most_rounds

    def shown(self, record: Record) -> tuple[int, dict[str, str]]:
        """The bar stands at the rounds so far, and shows the loss of the last."""
        return record.gradients, {"loss": f"{record.loss:.4f}", "rows": str(self.rows(len(self.losses) - 1))}

    def here(self) -> Any:
        """The hyper-parameters, and q."""
        return [p.detach().clone() for p in self.learnt], super().here()

    def go_back(self, coordinates: Any) -> None:
        """Put the hyper-parameters and q where `here` was called."""
        values, q = coordinates
        self._put(values)
        super().go_back(q)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        """Set the hyper-parameters."""
        for p, value in zip(self.learnt, values, strict=True):
            p.copy_(value)

    def settings(self) -> dict[str, str]:
        """The settings of the run: model, kernels, likelihood and data."""
        method = {"method": "train_svgp, hyper-parameters by L-BFGS"}
        noise = () if self.order is not None else (self.likelihood.noise,)  # no part of the state of a likelihood
        return method | of_model(self.model, self.likelihood) | describe_data((self.x, self.y, *noise))

    def state_dict(self) -> dict[str, Any]:
        """With the memory of L-BFGS, and where a second start may begin."""
        first = [value.clone() for value in self.first]
        return super().state_dict() | {"gain": self.gain, "first": first, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """With the memory of L-BFGS, and where a second start may begin."""
        super().load_state_dict(state)
        self.optimizer.load_state_dict(copied(state["optimizer"]))
        self.gain = state["gain"]
        self.first = [value.to(p) for p, value in zip(self.learnt, state.get("first", []), strict=False)]


def _telling_any(scores: Tensor, x: Tensor) -> Tensor:
    """Which inputs tell something about the scores of one function or another, (*functions, N)."""
    return torch.stack([telling(each, x) for each in scores.reshape(-1, scores.shape[-1])]).any(0)
