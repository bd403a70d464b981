"""The engine of `train_svgp_in_batches`: an advance is an epoch, one evaluation a batch for q and hyper-parameters.

What is marked is where an epoch has led, with the state of the generators where it began: the first batch that they
give tells, by its loss, whether a run that goes on has the same data.

A stationary run of natural steps ρ on batches is noise about an optimum: one step undoes what the step before took from
its batch.  With g_t = x_t + ξ_t in the frame of q, x the distance to the optimum and ξ the noise of a batch,

    E⟨g_t, g_t+1⟩ = -½ρ E|g|²            at rest
    E⟨g_t, g_t+1⟩ > -½ρ E|g|²            where the optimum moves on with the hyper-parameters and q lags behind

so that the cosine c of successive gradients of the mean tells which of the two prevails, and the length follows it,

    log ρ ← log ρ + 0.1 clip(c/ρ + 0.3, -1, 1)        from  min(½, max(B/N, B/(5M))),  within  [B/(10N), ½]

(at most 1/L where L latent functions are mixed, see `latents`).

At rest c/ρ is -½ and ρ falls; at a lag it rises.  -0.3 is where the lag costs about a third of what the noise costs.
(Kesten 1958 for the sign of successive errors as a signal to the step length.)
"""

import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from torchngvi.adapters.gpytorch.batches import Batch, count, pairs
from torchngvi.adapters.gpytorch.distribution import kept_modes
from torchngvi.adapters.gpytorch.energies import check_labels, conjugate, log_concave
from torchngvi.adapters.gpytorch.optimizer import check_hyper_optimizer
from torchngvi.adapters.gpytorch.sparse_gp import SparseGP
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
from torchngvi.fitting.loop import Engine
from torchngvi.fitting.records import Record
from torchngvi.fitting.stopping import Standing
from torchngvi.methods import IBLR, VN, Method
from torchngvi.optim.evaluating import warn
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.stepsizes import Constant, KLRadius

_NOISE = 0.05  # nats per datum that the noise of a mini-batch may cost at first
_CAP = 0.5  # longest natural step on a part of the data
_RADIUS = 4.0  # nats a step may move q, where the likelihood is not log-concave
_RATE = 0.1  # largest change of log ρ a step
_LAG = 0.3  # -c/ρ at which ρ stays


class NaturalSteps:
    """Steps of q on batches, whose length follows the cosine of successive gradients of the mean."""

    def __init__(self, target: SparseGP, num_data: int) -> None:
        self.q, self.num_data, self.longest = target.posterior, num_data, target.latents.longest
        self.conjugate = conjugate(target.likelihood)
        # where curvature may be negative the form that stays positive definite, in short steps
        self.optimizer: Method = (
            VN(self.q, lr=1.0, step_size=Constant())
            if log_concave(target.likelihood)
            else IBLR(self.q, lr=1.0, step_size=KLRadius(_RADIUS))
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
            first = min(_CAP, self.longest, max(share, 4 * _NOISE * rows / self.q.dim))
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
        change = _RATE * (cosine / self.log_rho.exp() + _LAG).clamp(-1.0, 1.0)
        lowest = torch.tensor(0.1 * rows / self.num_data, dtype=torch.float64, device=change.device).log()
        rho = torch.maximum(self.log_rho + change.nan_to_num(0.0), lowest)
        self.log_rho = rho.clamp_max(math.log(min(_CAP, self.longest)))

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, with the length of the steps and the last gradient."""
        return {"optimizer": self.optimizer.state_dict(), "log_rho": self.log_rho, "force": self.force}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        self.optimizer.load_state_dict(copied(state["optimizer"]))
        self.log_rho, self.force = state["log_rho"], state["force"]


class Epochs(Engine):
    """The engine of joint training, whose advance is an epoch."""

    name, unit, scaled = "SVGP", "row", True
    unit_of_a_record = "epoch"

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
        super().__init__(target.posterior)
        self.model, self.likelihood, self.batches, self.num_data = model, likelihood, batches, num_data
        self.hyper, self.epochs, self.latents, self.gaussian = hyper_optimizer, epochs, target.latents, target.posterior
        self.natural, self.processes = NaturalSteps(target, num_data), processes
        self.generators = Generators(self.gaussian.device, batches)
        self.losses: list[float] = []
        self.evaluated = 0  # batches
        self._began: dict[str, Any] = {}  # the generators where the last epoch began
        self._first: Batch | None = None  # of the last epoch
        self._saved: Tensor | None = None  # the loss that a file holds of it, where the run goes on from one

    @property
    def rejections(self) -> int:
        """The natural steps that were not taken."""
        return self.natural.optimizer.rejections

    def advance(self) -> Standing:
        """Train for an epoch; where the run goes on from a file, give the standing of its last epoch first."""
        if self._saved is not None:
            loss, self._saved = self._loss_again(self._saved), None
            self.mark()
            return self._standing(loss, told=True)
        self._began = {} if self.capture is None else self.generators.states()
        self.losses.append(self._epoch())
        self.mark()
        if self.capture is None or (self._first is None and self.processes is None):
            return self._standing(torch.tensor(self.losses[-1]), told=False)
        return self._standing(self._loss_of(self._first), told=False)

    def _standing(self, loss: Tensor, told: bool) -> Standing:
        """The standing after the last epoch."""
        epochs, last = len(self.losses), self.losses[-1]
        rho = float(self.natural.optimizer.param_groups[0]["lr"])
        record = Record(self.evaluated, last, float("nan"), rho, self.natural.optimizer.rejections, epochs, 0.0)
        where = f"a negative ELBO per datum of {last:.6g} after {epochs} epochs"
        spent = self.evaluated, epochs
        return Standing(record, torch.tensor(False), loss, spent, told=told, where=where, remedy="Raise epochs.")

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

    def _loss_again(self, saved: Tensor) -> Tensor:
        """The loss that was saved, of the batch that comes first where the generators are put back."""
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
        """The state after an epoch: losses, model, likelihood, both optimizers, and the generators at its start."""
        return {
            "losses": list(self.losses),
            "evaluated": self.evaluated,
            "dtype": str(self.gaussian.dtype),
            "model": self.model.state_dict(),
            "likelihood": self.likelihood.state_dict(),
            "hyper": self.hyper.state_dict(),
            "natural": self.natural.state_dict(),
            "began": self._began,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put everything where the saved epoch ended; the next `advance` gives its standing again."""
        if state["dtype"] == "torch.float64":
            self.gaussian.double()
        self.hyper.load_state_dict(copied(state["hyper"]))
        self.model.load_state_dict(state["model"])
        self.likelihood.load_state_dict(state["likelihood"])
        self.natural.load_state_dict(state["natural"])
        self.losses, self.evaluated, self._began = list(state["losses"]), state["evaluated"], state["began"]
        self._saved = state.get("loss")


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
