"""The engine of `train_svgp`: rounds of L-BFGS for all hyper-parameters, on growing parts of the data.

An advance is a round: up to 25 iterations of L-BFGS (strong Wolfe line search; Liu and Nocedal 1989) on `ProfiledELBO`
of n rows that weigh N/n, in which q is optimal at every evaluation.  n is 2,048 in the first round (500 of several
functions; or 4M, if that is more) and doubles from one to the next, up to all rows, or to as many as 2²⁴ entries a_n
allow.  On the last n rounds go on until one of them gains less than 0.001 nats a datum.

L-BFGS keeps its memory of the curvature from one round to the next: the bounds of a part of the rows and of twice as
many are curved alike, and the line search is on the new one.  Where a round with that memory ends before its 25
iterations and gains nothing, the next one begins without.

Then there may be a round from a second start, see `starts`; where it ends below the last one, the rounds go on from
there, and there may be another.

Kernels, means, noises and inducing points move together, in GPyTorch's raw parameters, so that constraints hold; priors
and added losses weigh as in GPyTorch's objectives.  What does not require a gradient stays.
"""

import math
from typing import Any, NamedTuple

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.models import ApproximateGP
from torch import Tensor

from torchngvi.adapters.gpytorch.batches import count, row_dimension
from torchngvi.adapters.gpytorch.epochs import of_model, penalty
from torchngvi.adapters.gpytorch.profile import ProfiledELBO
from torchngvi.adapters.gpytorch.starts import (
    StartSettings,
    begin_periods,
    check_repeats,
    choose_inducing_points,
    left_open,
    lengthen,
    shorten,
    telling,
)
from torchngvi.errors import InputError
from torchngvi.fitting.checkpoints import copied, describe_data
from torchngvi.fitting.loop import Ending, Engine
from torchngvi.fitting.records import Record
from torchngvi.fitting.stopping import Standing, Stop
from torchngvi.numerics.arrays import ENTRIES_AT_ONCE

_FIRST = 2048  # rows of the first round, or 4M if that is more
_ITERATIONS = 25  # of L-BFGS a round
_MEMORY = 20  # pairs that it keeps
_TOLERANCE = 1e-6  # nats a datum by which the search for q ends; 1e-9 takes 2.5 times as many steps to the same end
_GAIN = 1e-3  # nats a datum that a round on the last rows has to bring


class SeveralSettings(NamedTuple):
    """How rounds of several functions differ, by the softmax in `benchmarks/svgp_functions.py`: bike, elevators."""

    first: int = 500  # rows of the first round, or 4M if that is more
    share: float = 0.1  # of what the loss fell last, by which the search for q ends before it has reached 1e-6


class Rounds(Engine):
    """The engine whose advance is a round of L-BFGS for the hyper-parameters."""

    name, unit = "SVGP", "round"
    unit_of_a_record = "round"
    rejections = 0  # of natural steps, of which there are none
    processes = None

    def __init__(self, model: ApproximateGP, likelihood: Likelihood, x: Tensor, y: Tensor, most: int) -> None:
        target = ProfiledELBO(model, likelihood, (x, y)).target  # refused before anything is moved
        self.latents, self.several = target.latents, bool(target.posterior.batch_shape)
        check_repeats(model, x)
        super().__init__(target.posterior)
        self.model, self.likelihood, self.strategy, self.gaussian = model, likelihood, target.strategy, target.posterior
        self.x, self.y, self.most_rounds = x, y, most
        self.num_data = count(x)
        order = torch.randperm(self.num_data, generator=torch.Generator().manual_seed(0)).to(x.device)
        # a noise for each row is for all rows in their order
        self.order = None if isinstance(likelihood, FixedNoiseGaussianLikelihood) else order
        parameters = {id(p): p for p in (*model.parameters(), *likelihood.parameters()) if p.requires_grad}
        self.learnt = list(parameters.values())
        self.optimizer = torch.optim.LBFGS(
            self.learnt,
            max_iter=_ITERATIONS,
            max_eval=2 * _ITERATIONS,
            history_size=_MEMORY,
            line_search_fn="strong_wolfe",
        )
        self.losses: list[float] = []
        self.evaluated = 0
        self.gain = math.inf  # of the last round, per datum; or where one has to follow that forgets
        self.first: list[Tensor] = []  # the hyper-parameters as they were given, until a second start led nowhere
        self._saved: Tensor | None = None  # the loss that a file holds, where the run goes on from one

    def rows(self, number: int, first: int | None = None) -> int:
        """The number of rows of a round, where the first has so many, or 4M if that is more."""
        N, M = self.num_data, self.strategy.inducing_points.shape[-2]
        if self.order is None:
            return N
        if first is None:
            first = _SEVERAL.first if self.several else _FIRST
        entries = ENTRIES_AT_ONCE // self.gaussian.batch_shape.numel()
        most, size = min(N, max(entries // M, 4 * M)), max(first, 4 * M) * 2**number
        return most if 1.5 * size >= most else size

    @property
    def settled(self) -> bool:
        """Whether the last round was on as many rows as there will be, and brought little."""
        last = len(self.losses) - 1
        return last >= 0 and self.rows(last) == self.rows(last + 1) and self.gain < _GAIN

    def begin(self) -> None:
        """Begin at the periods of the targets; lengthen length scales that relate no rows; choose points left open."""
        begin_periods(self.model, self.x, self.y, lambda: self._value(self._part(0)))
        before = self.first = [p.detach().clone() for p in self.learnt]
        longer = lengthen(self.model, self.x)
        if left_open(self.strategy):
            choose_inducing_points(self.strategy, self.x)
        elif longer:  # which a model that was trained before may not need
            after, value = [p.detach().clone() for p in self.learnt], self._value(self._part(0))
            self._put(before)
            if value < self._value(self._part(0)):
                self._put(after)

    def advance(self) -> Standing | None:
        """Learn for a round; where the run goes on from a file, give the standing of its last round first."""
        if self._saved is not None:
            self._saved = None
            self.mark()
            return self._standing(told=True)
        if not self.settled:
            self._round(self._part(len(self.losses)))
        elif not self._again():
            return None
        self.mark()
        return self._standing(told=False)

    def one_round(self) -> None:
        """Learn for a round on as many rows as one function begins with, the same for few inducing points and more."""
        self._round(self._part(0, _FIRST))

    def allows(self, size: int) -> bool:
        """Whether a round with so many inducing points has four rows for each of them."""
        return 4 * size**2 <= ENTRIES_AT_ONCE

    def _standing(self, told: bool) -> Standing:
        """The standing after the last round."""
        rounds, last = len(self.losses), self.losses[-1]
        record = Record(self.evaluated, last, math.nan, 1.0, 0, rounds, 0.0)
        where = f"a negative bound per datum of {last:.6g} after {rounds} rounds"
        loss = torch.tensor(last)
        spent = self.evaluated, rounds
        return Standing(record, torch.tensor(False), loss, spent, told=told, where=where, remedy="Raise rounds.")

    def _part(self, number: int, first: int | None = None) -> ProfiledELBO:
        """The bound on the rows of a round."""
        rows = self.x, self.y
        if self.order is not None:
            part = self.order[: self.rows(number, first)]
            rows = self.x.index_select(-2, part), self.y.index_select(row_dimension(self.y, self.latents), part)
        return ProfiledELBO(self.model, self.likelihood, rows, self.num_data, _TOLERANCE)

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
        bound.share = _SEVERAL.share if self.several else 0.0
        start = float(self.optimizer.step(evaluate))
        bound.share = 0.0
        stuck, after = 0 < done > self._iterations() - _ITERATIONS, self._value(bound)
        if not after <= start:
            self._put(before)
            self.optimizer.state.clear()
            after = self._value(bound)
        bound.assign()
        self.losses.append(after)
        self.gain = start - after
        if stuck and self.gain < _GAIN:  # the memory leads nowhere, or this is the end: another round, without it
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
        if self.losses[-1] < losses[-1] - _GAIN:
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
        most = StartSettings().exact
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
        bound, settings = self._part(len(self.losses)), StartSettings()
        if not (bound.tight or bound.joint) or not self._value(bound) < math.inf:
            return ""
        if more := bound.integrated():
            return f"by an integral in the place of nodes the negative ELBO per datum is {self.losses[-1] + more:.6g}."
        share = float((bound.ratios > settings.unexplained).double().mean()) if bound.tight else 0.0
        if share < settings.noticed:
            return ""
        return (
            f"{self.strategy.inducing_points.shape[-2]} inducing points leave {share:.0%} of the rows unexplained, "
            f"whose variance given them is more than {settings.unexplained:g} times the noise: raise their number."
        )

    def ending(self, stop: Stop | None, last: Standing) -> Ending:
        """The outcome: where no criterion has ended the run, that the bound has settled."""
        if stop is None:
            part = "" if self.rows(len(self.losses)) == self.num_data else f"{self.rows(len(self.losses))} "
            stop = Stop(
                f"because a round on {part or 'all '}rows has raised the bound by less than {_GAIN:g} nats a datum "
                f"({last.place()})."
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
        """The state after a round: losses, model, likelihood, and the memory of L-BFGS."""
        return {
            "losses": list(self.losses),
            "evaluated": self.evaluated,
            "gain": self.gain,
            "first": [value.clone() for value in self.first],
            "model": self.model.state_dict(),
            "likelihood": self.likelihood.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put everything where the saved round ended; the next `advance` gives its standing again."""
        self.model.load_state_dict(state["model"])
        self.likelihood.load_state_dict(state["likelihood"])
        self.optimizer.load_state_dict(copied(state["optimizer"]))
        self.losses, self.evaluated, self.gain = list(state["losses"]), state["evaluated"], state["gain"]
        self.first = [value.to(p) for p, value in zip(self.learnt, state.get("first", []), strict=False)]
        self._saved = state.get("loss")


_SEVERAL = SeveralSettings()


def _telling_any(scores: Tensor, x: Tensor) -> Tensor:
    """Which inputs tell something about the scores of one function or another, (*functions, N)."""
    return torch.stack([telling(each, x) for each in scores.reshape(-1, scores.shape[-1])]).any(0)
