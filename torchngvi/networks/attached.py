"""A posterior moved by any optimizer of torch, and slips of a training script, named once or refused.

The loss that a posterior is made for is the mean of -log p(y | output), whose gradient at the logits of a label is
c (p - e_y), p the probabilities, e_y the unit vector of the label and c = 1/B.  Whatever else the script computes, such
as a sum over labels, weights of classes or smoothed labels, leaves its mark there.
"""

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchngvi.arguments import read_flag, read_instance, read_number, read_size
from torchngvi.distributed import ranks
from torchngvi.errors import InputError, RejectedStepWarning
from torchngvi.networks.curvatures import Curvature, ExampleGradients, SampledLabels
from torchngvi.networks.families import look_at, zero_where_
from torchngvi.networks.laplace import logits_in
from torchngvi.networks.layout import StepLength, add_moves_, named_by, refuse_sharded
from torchngvi.networks.likelihoods import Categorical, Gaussian
from torchngvi.networks.posterior import NetworkGaussian
from torchngvi.networks.weights import frames, refuse_replaced, warn_caller
from torchngvi.numerics.arrays import Fetched

_WITHOUT_RADIUS = 1.0  # the learning rate of weights that a radius limits, which no other parameter trains with
_COMPARED = 3  # steps whose gradients have the same norm but for rounding only where they are clipped
_ROWS = 256  # labels that are looked at, evenly over the batch
_CLOSE = 1e-3  # relative distance of two numbers that are equal but for rounding in single precision

# what a script shows of itself, and what to do
_SENTENCES = {
    "pass": "A shorter batch ends each pass over the data, and a pass has {seen:,.0f} labels, where "
    "num_data={num_data:,}. num_data is the number of labels in the training data, neither that of batches nor that "
    "of data that are held out; it is right only where a pass has copies of rows, or not all.",
    "rate": "The learning rate of the optimizer is 0, so that the mean of q stays where it is.",
    "half": "Moves at the learning rate {lr:g} are lost in the rounding of the weights, which have the precision "
    "{dtype}, before their length is chosen. Take lr=1: the rate does not matter otherwise.",
    "epochs": "The training goes on after steps={steps:,}, with {seen:,.0f} labels of num_data={num_data:,} so far. "
    "steps counts steps of the optimizer, and not epochs: steps=epochs * len(loader). From now on the mean hardly "
    "moves.",
    "steps": "The training has taken {taken:,} steps, and attach was given steps={steps:,}, over which the radius and "
    "the moves fall to zero; since then they are what they were at the last of them, and the mean hardly moves. Say "
    "steps=epochs * len(loader) of the whole training; a posterior that was trained before begins a new schedule if "
    "it is loaded before attach.",
    "short": "The radius has shortened no step of the training: the learning rate, {lr:g}, was the length of all of "
    "them, and the mean may not have come far. Take lr=1, with which the radius is the length.",
    "no steps": "The learning rate has not fallen, and attach was given a radius and no steps: the last moves were "
    "{share:.2g} of the longest, so that the mean is as far from the optimum as a move. Say steps=, over which they "
    "fall by themselves, or take a scheduler.",
    "few steps": "The training took {taken:,} of the steps={steps:,} that attach was given, so that the radius and "
    "the moves had only fallen to {share:.2g}: the mean is as far from the optimum as a move. Say the number of steps "
    "that the optimizer takes: with accumulated gradients those of the optimizer alone.",
    "gradients": "The optimizer steps, and no parameter of q has a gradient: call loss.backward() before it, and "
    "zero_grad() after it or before the loss.",
    "mode": "The network is in evaluation mode at a step of its optimizer, so that its weights hold the mean, and "
    "neither draws nor the curvature are what q is trained with. Call model.train() after each evaluation; layers "
    "that are to stay as they are, such as normalisations, may be put into evaluation mode alone.",
    "clipped": "Gradients have the same norm, {norm:.3g}, in all of {compared} steps, as clipped ones do; the prior's "
    "part, added afterwards, is {times:.2g} times as large: the prior counts too much. Leave the clipping out, as the "
    "radius limits the step, or clip less.",
    "left": "The gradients of the step before were still there when the next loss passed back, which adds to them: "
    "call optimizer.zero_grad() once in each step.",
    "changes": "The weights were changed between two steps by something else than the attached optimizer, and that is "
    "lost, as they hold a draw. attach takes several optimizers in a list; change weights by hand within `with "
    "q.at_mean():`.",
    "column": "The network has two outputs a row, and the loss takes one for the standard deviation of the other, "
    "while networks.Gaussian(scale) takes both for means. Say likelihood=networks.HeteroscedasticGaussian(), whose "
    "loss(output, y) takes the mean and the logarithm of the standard deviation.",
    "softmax": "The outputs of the network are probabilities, which sum to 1, and the likelihood takes them for "
    "logits: leave the softmax at its end away, for cross_entropy has one of its own.",
    "total": "The loss of the first step weighs its labels {total:.4g} in all, where the mean of -log p weighs them "
    "1: {cause}. The posterior would be that of {total:.4g} times as many data, and the observed curvature is not.",
    "sigmoid": "The outputs of the network are all between 0 and 1, and the likelihood takes them for logits: leave "
    "the sigmoid at its end away, and take binary_cross_entropy_with_logits.",
    "smoothed": "The loss of the first step has smoothed labels, label_smoothing={smooth:.2g}: it is not -log p of "
    "the labels that the posterior is made for, whose predictions it makes less sure. Take the loss without "
    "smoothing; the average over draws does the same for a reason.",
    "own weights": "The loss of the first step weighs its labels by other weights than those of "
    "Categorical(weights=...), up to {most:.3g} times their mean. Give both the same weights of the classes.",
    "weights": "The loss of the first step weighs its labels by other weights than the same for all, up to {most:.3g} "
    "times their mean (class weights, a focal loss, or no cross-entropy): the curvature and the predictive "
    "probabilities are those of -log p without weights. Take the mean of -log p, say "
    "likelihood=networks.Categorical(weights=...) with the weights of the classes, or an OutputLikelihood of your own "
    "that has the weights.",
    "other": "The loss of the first step is not -log p of one label each: its gradients at the outputs are those of "
    "mixed labels, or of another loss, while the curvature and the predictions are those of the likelihood that "
    "torchngvi.network was given.",
    "left out": "The loss of the first step leaves {left_out:.0%} of the labels out, such as padding, and the "
    "curvature counts them. Leave them out there, too: curvature=SampledLabels(output=lambda logits: logits[mask]).",
}
_CAUSES = {
    "sum": 'it is the sum over labels; take reduction="mean"',
    "num_data": "it is multiplied by num_data, which the posterior does by itself; take the mean",
    "passes": "{} passes were accumulated; divide each loss by their number",
    "factor": "take the mean over the labels, without a factor",
}


class Watch:
    """Looks on while optimizers move a posterior, and says once what a script does that it cannot mean."""

    def __init__(self, q: NetworkGaussian, optimizers: list[Optimizer], steps: int | None, looks: bool) -> None:
        self.q, self.steps, self.looks = q, steps, looks
        self.others = Others(q, optimizers)
        self._said: set[str] = set()
        self.passed = 0  # steps that were seen
        self.shortened = False  # whether the radius has shortened one of them
        self._norms: list[Fetched] = []  # of the gradients and of the prior's part in them, in some steps
        self._rows, self._batches = 0, Batches()
        self._labels: float | None = None  # a row, NaN where that differs
        self._had: set[str] = set()  # the parameters with gradients in the first step
        self._left: list[Fetched] = []  # of these gradients where the second step passes back
        self._found: list[tuple[Fetched, int]] = []  # of the loss, with the numbers of labels
        self._precision, self._pass, self._first = 0.0, -1, 0  # their last pass, and the first of the loss itself
        self._written: tuple[int, int] | None = None
        self._changes, self._compared = 0, False

    def _say(self, what: str, **numbers: Any) -> None:
        if what not in self._said:
            self._said.add(what)
            warn_caller(_SENTENCES[what].format(steps=self.steps, num_data=self.q.num_data, **numbers))

    # the numbers of labels and of steps

    def after_forward(self, output: Tensor, labels: int | None, different: float = 0.01) -> None:
        """Count the labels of a forward pass in training, and look at its loss in the first step."""
        # different: of num_data, by which the labels of a pass may differ; samplers for several processes repeat some
        self._note_changes()
        rows = len(output) if output.ndim else 1
        self._rows += rows
        if labels is not None:
            each = labels / max(rows, 1)
            self._labels = each if self._labels in (None, each) else float("nan")
        whole, num_data = self._batches.add(rows), self.q.num_data
        if whole is not None and self._labels is not None:
            seen = whole * self._labels * ranks()
            if abs(seen - num_data) > different * num_data:  # not of NaN
                self._say("pass", seen=seen)
        if self.looks and self.passed == 0:
            self._look(output)
        elif self.looks and self.passed == 1:
            output.register_hook(self._look_for_left)

    def before_step(self, optimizer: Optimizer, taken: int, late: float = 1.5) -> None:
        """Say what can be said before a step of an optimizer, after so many steps of the training."""
        # late: of the planned steps, from which on a warning says that they are over
        self.others.refuse_joined(optimizer)
        self._compare()
        if not self.passed:
            self._look_at_rate(max(map(largest_lr, optimizer.param_groups)))
        self._speak()
        if self.steps is None or taken < self.steps:
            return
        if self.passed and self._labels is not None and "steps" not in self._said:
            seen = self._rows * self._labels * ranks() * (taken + 1) / (self.passed + 1)
            if seen < self.q.num_data:
                self._say("epochs", seen=seen)
        if taken >= late * self.steps and "epochs" not in self._said:
            self._say("steps", taken=taken)

    def _look_at_rate(self, largest: float, lost: int = 12) -> None:
        """Say that a learning rate moves nothing, or nothing that the rounding of the weights leaves."""
        # lost: roundings of a weight: a rate of 1e-4 in bfloat16 and of 1e-8 in single precision learn nothing
        dtype = max((p.dtype for p in self.q.parameters_of_network), key=lambda kind: torch.finfo(kind).eps)
        if largest == 0:
            self._say("rate")
        elif self.steps is not None and largest < lost * torch.finfo(dtype).eps:
            self._say("half", lr=largest, dtype=dtype)

    def after_step(self) -> None:
        """Note that a step was taken."""
        self.passed += 1
        self._changes, self._written = 0, self._state()

    def doubt(
        self, groups: list[dict[str, Any]], taken: int, share: float, large: float = 0.1, enough: float = 0.15
    ) -> str | None:
        """Return what to say where the posterior is used and the schedules have left a large share of its steps."""
        # large: rates of AdamW from here on end within .09 nats of one another on four tasks; .01 is too short on two
        # enough: the factor of the moves after ¾ of a cosine: stopping before costs more than 0.01 nats on digits
        if not self.passed:
            return None
        lr = max(map(largest_lr, groups))
        tests = {
            "short": not self.shortened and lr < large,
            "no steps": self.steps is None and share > enough,
            "few steps": self.steps is not None and taken < self.steps and share > enough,
        }
        what = next((what for what, holds in tests.items() if holds), None)
        return None if what is None else _SENTENCES[what].format(taken=taken, steps=self.steps, share=share, lr=lr)

    # the loss and its gradients

    def _look(self, output: Tensor) -> None:
        """Let the gradient at the outputs be looked at, when the script passes back through them."""
        kind, likelihood, held = output.device.type, self.q.likelihood, output.detach()
        half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        if half or output.dtype == torch.float16:
            return  # a GradScaler multiplies the loss
        classes = likelihood.as_classes(held)
        two = isinstance(likelihood, Gaussian) and held.ndim > 1 and held.shape[-1] == 2 and len(held) > 8
        if classes is None and not two:
            return
        weights = self._weights()
        most = _ROWS if weights is None else sys.maxsize  # only all labels weigh 1 together
        rows = held.clone() if classes is None else take_rows(classes, most)
        count = 0 if classes is None else classes[..., 0].numel()
        self._precision = max(self._precision, torch.finfo(output.dtype).eps)

        def look(gradient: Tensor) -> None:
            if self.passed or torch._C._functorch.is_functorch_wrapped_tensor(gradient):
                return
            with torch.no_grad():
                at, own = likelihood.as_classes(gradient, True), torch._C._current_graph_task_id()
                if at is None:
                    found = find_scale_column(rows, gradient)
                else:
                    kept = (torch.linalg.vector_norm(at, math.inf, -1) != 0).sum()
                    found = weigh_labels(rows, take_rows(at, most), count, kept, weights)
                if own != self._pass and all(p.grad is None for p in self.q.parameters_of_network):
                    self._first = len(self._found)  # those before are of a pass for gradients at the inputs, or by hand
                self._found.append((Fetched(found), count))
                self._pass = own

        output.register_hook(look)

    @torch.no_grad()
    def _look_for_left(self, gradient: Tensor) -> None:
        """See what the parameters' gradients are when a loss of the second step begins to pass back."""
        if self.passed == 1:
            each = zip(self.q.names, self.q.parameters_of_network, strict=True)
            had = [p.grad for name, p in each if name in self._had and p.numel()]
            left = [g.abs().max().to(gradient) for g in had if g is not None]  # of another loss already, where not all
            whole = left and len(left) == len(had)
            self._left.append(Fetched(torch.stack(left).max() if whole else gradient.new_zeros(())))

    def say_of_gradients(self, used: Mapping[str, Tensor], several: bool) -> None:
        """Say once that a step has no gradients, unless optimizers share q, clipped ones, or one in evaluation mode."""
        if not self.passed:
            self._had.update(used)
        if not used and not several:
            self._say("gradients")
        if used and 0 < self.passed <= _COMPARED:
            self._note_norms(used)
        if used and not self.q.model.training and not self.q.pinned:
            self._say("mode")

    def _note_norms(self, used: Mapping[str, Tensor], same: float = 1e-4, counts: float = 0.1) -> None:
        """Say once that gradients have one and the same norm, that of a clipping, and the prior's part is large."""
        # same: steps whose gradients have the same norm but for rounding only where they are clipped
        # counts: of the norm of clipped gradients, from which on the prior's part, added to them, matters
        first, of_prior = next(iter(used.values())), {name: torch.zeros_like(g) for name, g in used.items()}
        self.q.add_prior_(of_prior, self.q.mean)
        parts = [(g.norm(), of_prior[name].norm()) for name, g in used.items()]
        norms = torch.stack([torch.stack(list(each)).to(first) for each in zip(*parts, strict=True)])
        self._norms.append(Fetched(norms.float().norm(dim=1)))
        read = [found.read() for found in self._norms]
        if len(read) < _COMPARED or any(each is None for each in read):
            return
        gradients, pulls = zip(*read, strict=True)
        if max(gradients) < (1 + same) * min(gradients) and max(pulls) > counts * max(gradients) > 0:
            self._say("clipped", norm=max(gradients), times=max(pulls) / max(gradients), compared=_COMPARED)

    def _speak(self, explained: float = 0.99) -> None:
        """Say what was found of the loss, as soon as that needs no wait for a device."""
        # explained: of the variance of a column by the square of another one's gradient, which no label explains
        if self._left and all(found.read() for found in self._left):  # and not of one pass alone
            self._say("left")
        read = [found.read() for found, _ in self._found]
        if not read or any(each is None for each in read):
            return
        labels, last = sum(count for _, count in self._found[self._first :]), read[self._first :]
        self._found, self._first = [], 0
        if isinstance(last[0], list):
            self._say_of_loss(last, labels, sum(each[0] for each in read))
        elif last[0] > explained:
            self._say("column")

    def _say_of_loss(self, found: list[list[float]], labels: int, whole: float, many: float = 0.1) -> None:
        """Say what the numbers of `weigh_labels` say of the loss of a first step."""
        # many: share of labels without a gradient; fewer, such as the last token of a text, hardly matter
        close = max(_CLOSE, 4 * self._precision)
        total = sum(each[0] for each in found)
        spread, misfit, smooth, residual, left_out, probabilities = (
            max(each[k] for each in found) for k in range(1, 7)
        )
        causes = {len(found): "passes", self.q.num_data: "num_data", labels: "sum"}
        near = [cause for number, cause in causes.items() if number > 1 and abs(total / number - 1) < 0.05]
        right, wrong = misfit < close and spread < close, misfit >= close or spread >= close  # neither of NaN
        scaled = right and any(f.f_globals.get("__name__") == "torch.amp.grad_scaler" for f in frames())
        tests = {
            "softmax": probabilities == 1,
            "total": right and min(abs(total - 1), abs(whole - 1)) > max(close, 0.01) and not scaled,
            "sigmoid": probabilities == 2 and spread >= close,
            "smoothed": wrong and residual < close < smooth < 1,
            "own weights": wrong and misfit < close and self._weights() is not None,
            "weights": wrong and misfit < close,
            "other": wrong,
        }
        cause = _CAUSES[near[-1] if near else "factor"].format(len(found))
        for what in [what for what, holds in tests.items() if holds][:1] + ["left out"] * (left_out > many):
            self._say(what, total=total, cause=cause, smooth=smooth, most=spread + 1, left_out=left_out)

    def _weights(self) -> Tensor | None:
        """The weights of the classes that the likelihood has."""
        return self.q.likelihood.weights if isinstance(self.q.likelihood, Categorical) else None

    # changes of the weights by something else

    def _state(self) -> tuple[int, int]:
        return self.q.written.count, sum(p._version for p in self.q.parameters_of_network)

    def _note_changes(self, unseen: int = 10) -> None:
        """Count changes of the weights by something else, and refuse many without a step."""
        # unseen: changes of the weights without a step of the optimizer; one that looks ahead makes one or two
        now = self._state()
        before, self._written = self._written, now
        if before is None or before[0] != now[0] or before[1] == now[1]:
            return
        self._changes += 1
        self._found, self._first = [], 0  # a pass before that is no part of the step, as the first one of SAM
        if self._changes >= unseen:
            raise InputError(
                f"The weights were changed {self._changes} times in training without a step() of the optimizer that q "
                "is attached to, so that the mean of q stays where it is. Attach to the optimizer whose step() the "
                "loop calls; of one that steps in two parts, as first_step and second_step of SAM, to the one within, "
                "its .base_optimizer."
            )

    def _compare(self) -> None:
        """Say once that weights were changed between two steps, which the step that follows undoes."""
        self._note_changes()
        if self._compared or not self.q.holds_draw or not (self._changes or self.passed == 1):
            return
        self._compared = True
        held = [p.detach().clone() for p in self.q.parameters_of_network]
        if any(p.device.type != "cpu" or p.shape != m.shape for p, m in zip(held, self.q.mean.values(), strict=True)):
            return  # on a device it would wait; weights of another shape have been put away
        with torch.no_grad():
            for family in self.q.each():  # what the parameters were given last
                family.draw_(self.q.seed, self.q.draw, self.q.temperature**0.5)
        if any(not torch.equal(a, b) for a, b in zip(held, self.q.parameters_of_network, strict=True)):
            self._say("changes")


class Others:
    """The parameters of the optimizers that are no part of the posterior: trained, frozen, or joining later."""

    def __init__(self, q: NetworkGaussian, optimizers: list[Optimizer]) -> None:
        self.q, self._of_q = q, set(q.parameters_of_network)
        self._names = {p: name for name, p in q.model.named_parameters()}
        self._trained = {p for p in _held(optimizers) if p.requires_grad} - self._of_q
        fast = self._fast(optimizers, self._trained)
        if fast:
            warn_caller(
                f"{self._called(fast)} at the learning rate {_WITHOUT_RADIUS:g} or more, and no radius limits what is "
                "no part of q. Give it a group of its own in the optimizer, with the rate that it would have without q."
            )

    def refuse_joined(self, optimizer: Optimizer) -> None:
        """Refuse parameters with a gradient that were frozen, or no part of the optimizer, when it was attached."""
        for group in optimizer.param_groups:
            if any(map(group.get, REFUSED)) and self._of_q.intersection(group["params"]):
                check_options(type(optimizer).__name__, group)
        others = (p for p in _held([optimizer]) if p not in self._of_q and p not in self._trained)
        joined = [p for p in others if p.grad is not None]
        named = [p for p in joined if p in self._names and named_by(self.q.structure, self._names[p])]
        if named:
            raise InputError(
                f"{self._called(named)} now, and was frozen, or no part of the optimizer, when torchngvi.network and "
                "attach were called: q is not over it, and no radius limits its steps. Unfreeze and add layers before "
                "torchngvi.network; or release() q, make a new one of the network as it is now, and attach again."
            )
        fast = self._fast([optimizer], set(joined))
        if fast:
            raise InputError(
                f"{self._called(fast)} now, at the learning rate {_WITHOUT_RADIUS:g} or more, and no radius limits "
                "what is no part of q. Say lr= in add_param_group, the rate that it would have without q."
            )
        self._trained.update(joined)

    def _fast(self, optimizers: list[Optimizer], among: set[nn.Parameter]) -> list[nn.Parameter]:
        """Those of some parameters whose learning rate is one for weights that a radius limits."""
        groups = (group for opt in optimizers for group in opt.param_groups if largest_lr(group) >= _WITHOUT_RADIUS)
        return [p for group in groups for p in group["params"] if p in among]

    def _called(self, parameters: list[nn.Parameter]) -> str:
        """The beginning of a sentence about parameters."""
        first = self._names.get(parameters[0], f"one of shape {tuple(parameters[0].shape)}")
        more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        return f"The optimizer moves the parameter {first}{more}"


class Batches:
    """The sizes of batches, from which the length of a pass over the data can be read: a shorter batch ends it."""

    def __init__(self) -> None:
        self._full, self._run, self._regular = 0, 0, True
        self._passes: list[tuple[int, int]] = []

    def add(self, size: int) -> int | None:
        """Add a batch, and return the length of a pass where one has ended that was as long as the one before."""
        self._full = self._full or size
        self._run += size
        if not self._regular or size == self._full:
            return None
        found, self._run = (self._run, size), 0
        self._regular = size < self._full and found[0] > size and (len(self._passes) < 2 or self._passes[-1] == found)
        self._passes.append(found)
        return found[0] if self._regular and self._passes[-2:] == [found, found] else None


def take_rows(logits: Tensor, most: int = _ROWS) -> Tensor:
    """Return some rows of logits, or of a gradient at them, which the script may change in place later."""
    rows = logits.detach().reshape(-1, logits.shape[-1])
    return rows[:: -(-max(len(rows), 1) // most)].clone()


def weigh_labels(logits: Tensor, gradient: Tensor, count: int, kept: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return what a loss weighs labels by, from its gradient at the logits of some; so many of all have a gradient."""
    classes = logits.shape[-1]
    x, r = logits.float(), gradient.float()
    p = x.softmax(-1)
    r = r - p * r.sum(-1, keepdim=True)  # of log p as outputs, too, the gradient at logits
    label = r.argmin(-1, keepdim=True)
    others = torch.ones_like(p).scatter(-1, label, 0.0)
    mass = (p * others).sum(-1)
    used = (r != 0).any(-1) & (mass > _CLOSE)
    rows = used.sum()
    c = torch.where(used, (r * others).sum(-1) / mass, 0.0)
    total = c.sum() / rows * kept
    if weights is not None:
        own = weights.to(r)[label]
        c, r = c / own[:, 0], r / own
    mean = c.sum() / rows
    spread = torch.where(used, (c - mean).abs(), 0.0).max() / mean
    here = others * used[:, None]

    def distance(expected: Tensor) -> Tensor:
        return ((r - expected).abs() * here / (p + 1 / classes)).max() / mean

    share = here / here.sum()
    p_mean, r_mean = (share * p).sum(), (share * r).sum()
    slope = (share * (p - p_mean) * (r - r_mean)).sum() / (share * (p - p_mean).square()).sum()
    offset = slope * p_mean - r_mean
    inside, event = ((x >= 0) & (x <= 1)).all(), (x[:, 1] == 0).all()
    probabilities = inside * (((x.sum(-1) - 1).abs() < _CLOSE).all() + 2 * event * (x[:, 0] > 0).all())
    residual = distance(slope * p - offset)
    numbers = [total, spread, distance(c[:, None] * p), offset * classes / slope, residual, 1 - kept / count]
    return torch.stack([*numbers, probabilities.float()])


def find_scale_column(output: Tensor, gradient: Tensor) -> Tensor:
    """Return how well the gradient at one column of two is explained by the square of the other's, a mean's."""
    dtype = torch.float32 if output.device.type == "mps" else torch.float64
    f, r = (part.detach().reshape(-1, 2).to(dtype) for part in (output, gradient))
    found = []
    for mean, scale in ((0, 1), (1, 0)):
        y = r[:, scale] - r[:, scale].mean()
        square, column = (r[:, mean] / r[:, mean].abs().max()).square(), f[:, scale]
        basis = torch.linalg.qr(torch.stack([torch.ones_like(column), column, square, square * column], -1))[0]
        parts, whole = (basis.mT @ y).square(), y.square().sum()
        beyond = whole - parts[:2].sum()  # what a constant and the column itself leave
        found.append(torch.where(beyond > 0.1 * whole, parts[2:].sum() / beyond, 0.0))
    return torch.stack(found).nan_to_num().max()


def _held(optimizers: Iterable[Optimizer]) -> Iterator[Any]:
    """The parameters of optimizers."""
    return (p for opt in optimizers for group in opt.param_groups for p in group["params"])


# -------------------------------------------------------------------------------- the optimizers that move the mean


# kept in the parameter group, hence in checkpoints of the optimizer
_PEAK, _FIRST, BEGUN = "largest_lr", "first_lr", "draws_before"
REFUSED = ("maximize", "weight_decay", "lambd")  # options of a group with parameters of q; the last is of ASGD


def check(optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse optimizers that would not do what a posterior says."""
    of_q, held = set(parameters.values()), set()
    for opt in optimizers:
        kind = type(opt).__name__
        if isinstance(opt, torch.optim.LBFGS):
            raise InputError(
                "LBFGS evaluates its closure several times a step and compares gradients from step to step, and here "
                "each step has another draw and is shortened afterwards; take an optimizer that remembers no steps, "
                "such as AdamW."
            )
        for group in opt.param_groups:
            if not of_q.intersection(group["params"]):
                continue
            held |= set(group["params"])
            check_options(kind, group)
    missing = [name for name, p in parameters.items() if p not in held]
    if missing:
        for opt in optimizers:
            for group in opt.param_groups:
                for p in group["params"]:
                    refuse_sharded(f"A parameter of {type(opt).__name__}", p)
        raise InputError(
            f"No optimizer given has the parameter{'s' if len(missing) > 1 else ''} {', '.join(missing[:4])}"
            f"{', ...' if len(missing) > 4 else ''} that q is over; give the optimizer all of model.parameters(), or "
            "several optimizers in a list."
        )


def check_options(kind: str, group: Mapping[str, Any]) -> None:
    """Refuse options of a group with parameters of q that would make other steps than the posterior needs."""
    if group.get("weight_decay", 0.0):
        raise InputError(
            f"{kind} has weight_decay={group['weight_decay']} for parameters of q, and the prior takes its place; set "
            "weight_decay=0.0 for them and say prior_precision= of torchngvi.network."
        )
    if group.get("lambd", 0.0):
        raise InputError(
            f"{kind} has lambd={group['lambd']} for parameters of q, which decays them as weight_decay does, and the "
            "prior takes its place; set lambd=0.0 for them and say prior_precision= of torchngvi.network."
        )
    if group.get("maximize", False):
        raise InputError(f"{kind} has maximize=True; a posterior needs the loss, -log p, and minimises it.")


def refuse_wrapped(given: Any) -> None:
    """Refuse an optimizer that only passes its steps on to one of torch, as that of Accelerate: it runs no hooks."""
    for one in given if isinstance(given, list | tuple) else [given]:
        if hasattr(one, "_optimizer_step_pre_hooks") and isinstance(one, Optimizer):
            continue
        kind = type(one).__name__
        if isinstance(getattr(one, "optimizer", None), Optimizer):
            raise InputError(
                f"The {kind} given wraps an optimizer of torch, whose steps the hooks of q belong to: attach to that "
                "one, its .optimizer, or attach before it is wrapped."
            )
        if isinstance(one, Optimizer):
            raise InputError(
                f"The {kind} given has not called __init__ of torch.optim.Optimizer, so that its steps run no hooks; "
                "attach to the optimizer of torch that it steps."
            )


def is_within_its_own_step(optimizer: Optimizer) -> bool:
    """Return whether the step of an optimizer is within another one of its own, by ``super().step()``."""
    if sum("step" in kind.__dict__ for kind in type(optimizer).__mro__ if kind is not Optimizer) < 2:
        return False
    hooked = (f for f in frames() if f.f_globals.get("__name__") == "torch.optim.optimizer")
    return sum(f.f_code.co_name == "wrapper" and f.f_locals.get("self") is optimizer for f in hooked) > 1


def note_start(group: dict[str, Any], draw: int) -> None:
    """Let a group remember where a training begins: the learning rate, which a warm-up may then lower, and the draw."""
    group[_FIRST] = max(float(group["lr"]), group.get(_FIRST, 0.0))
    group.setdefault(BEGUN, draw)


def forget_start(group: dict[str, Any]) -> None:
    """Let a group forget what :func:`note_start` and :func:`share_of_lr` have left in it, when a training is over."""
    for name in (_PEAK, _FIRST, BEGUN):
        group.pop(name, None)


def keeps_iterate(optimizer: Optimizer) -> bool:
    """Return whether an optimizer remembers where it has put the parameters, as Schedule-Free ones and Lookahead do."""
    return all(hasattr(optimizer, mode) for mode in ("train", "eval")) or hasattr(optimizer, "la_alpha")


def share_of_lr(group: dict[str, Any]) -> float:
    """Return the learning rate of a group over its largest one."""
    group[_PEAK] = largest_lr(group)
    return float(group["lr"]) / group[_PEAK] if group[_PEAK] > 0 else 0.0


def largest_lr(group: Mapping[str, Any]) -> float:
    """Return the largest learning rate that a group has had or that its schedule says it will have."""
    first = group["initial_lr"] if "initial_lr" in group else group.get(_FIRST, 0.0)
    return max(float(group["lr"]), group.get(_PEAK, 0.0), float(first), group.get("max_lr", 0.0))


def unscale_(optimizer: Optimizer, gradients: list[Tensor]) -> None:
    """Take the scale of a GradScaler out of gradients that a fused optimizer would have unscaled itself."""
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        if gradients:
            torch._foreach_mul_(gradients, scale.reciprocal().to(gradients[0]))
        optimizer.grad_scale = None  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------ the attachment


def attach(
    optimizer: Optimizer | Sequence[Optimizer],
    q: NetworkGaussian,
    *,
    steps: int | None = None,
    radius: float | None = None,
    curvature: Curvature | None = None,
    length: StepLength | None = None,
    fused: bool = False,
) -> "Attachment":
    """Let an optimizer of torch train the posterior of a network; the training loop stays as it is.

    The optimizer moves the mean with the gradient of the mean loss at a draw plus δm, and that move is a direction u.
    Its length is that of a radius in nats a datum at the outputs, and in each unit of a layer, the weights w into it
    with their bias, no move is longer than a share of the unit's first norm ν:

        s = √(r φ²/κ),   κ = ½ uᵀ(H + δ)u,   r = 0.12/√S,      dm = s u,
        |Δ(w, b)| ≤ p φ ν,   p = k/√S,   k = max(5.6/L², 0.35),
        φ = min((t + 1)/(0.02 S), ½(1 + cos πt/S), lr/its largest value),

    after t of S steps, in a network of L layers.  So neither the learning rate nor a schedule has to be chosen: of the
    planned schedule and one of the optimizer the smaller factor holds, never the product.  The radius sees what a move
    does to the predictions, and the limit what it does inside, where a unit that is off has no curvature at all (for
    relatives see LARS, You et al. 2017, and Nero, Liu et al. 2021).  Parameters that q is not over take the optimizer's
    own steps at its own rate.  The precision of q moves by natural-gradient steps towards the observed curvature.

    Args:
        optimizer: any optimizer of torch over the network's parameters, or several that share them, but for LBFGS; the
            weight decay of the parameters of q is 0, as the prior takes its place.  Steps of an optimizer that
            remembers where it has put the parameters, such as a Schedule-Free one, are only shortened.
        q: the posterior, from :func:`torchngvi.network`.
        steps: the number S of optimizer steps that the training will take.
        radius: r in nats a datum, in place of 0.12/√S.  Without steps it is the longest move: shorter ones stay as they
            are, no unit has a limit, and nothing falls but the rate; ``math.inf`` sets none.
        curvature: how the curvature is observed; `SampledLabels()` by default.
        length: other constants of the rule than these.
        fused: has no effect any more, and goes with the next release.

    Returns:
        The attachment, whose `remove()` lets the optimizer go.

    Raises:
        InputError: for another kind of argument, if neither steps nor radius is given, if an optimizer has
            weight decay for a parameter of q, maximises, or is LBFGS, or if a parameter of q is in none of them.  A
            step raises it for a layer that joins later.

    What a script shows of other slips, such as a sum for a mean or a second optimizer, is a `UserWarning`, once.

    >>> import torchngvi
    >>> model = torch.nn.Linear(2, 3)
    >>> q = torchngvi.network(model, num_data=100)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    >>> attachment = torchngvi.attach(optimizer, q, steps=10)
    >>> x, y = torch.randn(20, 2), torch.randint(3, (20,))
    >>> for _ in range(10):
    ...     optimizer.zero_grad()
    ...     loss = torch.nn.functional.cross_entropy(model(x), y)
    ...     loss.backward()
    ...     optimizer.step()
    >>> q.draw, q.observed
    (10, 1)
    """
    what = "is a torchngvi.networks.StepLength, or None"
    length = read_instance("length", StepLength() if length is None else length, StepLength, what)
    longest = radius_of(steps, radius, length)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    refuse_wrapped(optimizer)
    known = (
        isinstance(optimizers, list | tuple) and optimizers and all(isinstance(one, Optimizer) for one in optimizers)
    )
    if not isinstance(q, NetworkGaussian) or not known:
        raise InputError(
            "attach takes an optimizer of torch, or several in a list, and then the posterior from torchngvi.network; "
            f"got a {type(optimizer).__name__} and a {type(q).__name__}."
        )
    if q.sampling:
        raise InputError("The posterior is attached already; call remove() of that attachment first.")
    check(optimizers, dict(zip(q.names, q.parameters_of_network, strict=True)))
    what = "is a way to observe it, such as torchngvi.networks.SampledLabels(), or None"
    curvature = read_instance("curvature", SampledLabels() if curvature is None else curvature, Curvature, what)
    if read_flag("fused", fused):
        warnings.warn(
            "fused=True has no effect any more, and release 0.4 will not take it: leave it out.",
            DeprecationWarning,
            stacklevel=2,
        )
    return Attachment(optimizers, q, longest, curvature, steps=steps, length=length)


def radius_of(steps: int | None, radius: float | None, length: StepLength) -> float:
    """Return the radius of a step: the one that was given, or c/√steps."""
    if steps is None and radius is None:
        raise InputError(
            "Say steps=, the number of optimizer steps that the training will take, which chooses the radius, or "
            "radius=, in nats a datum, or both; got neither."
        )
    if steps is not None:
        steps = read_size("steps", steps, "is the number of optimizer steps of the training")
    if radius is None:
        return length.nats / math.sqrt(steps or 1)
    return read_number("radius", radius, "is a length in nats a datum", above=0, infinite=True)


class Attachment:
    """What :func:`attach` returns: the hooks of q on its optimizers.

    Args:
        optimizers: that move the mean.
        q: the posterior.
        radius: of a move, in nats a datum.
        curvature: how the curvature is observed.
        prior_in_gradient: whether δm is added to the gradients; an optimizer that adds it itself says no.
        steps: of the training, over which radius and limit fall to zero by themselves; None for no such schedule.
        length: the constants of radius, limit and schedule.

    Attributes:
        skipped: the steps whose gradients or move were not finite, and which did not move the mean, a 0-d tensor.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        q: NetworkGaussian,
        radius: float,
        curvature: Curvature,
        prior_in_gradient: bool = True,
        steps: int | None = None,
        length: StepLength | None = None,
    ) -> None:
        refuse_replaced(q.model, q.names, q.parameters_of_network)
        if any(tensor.is_inference() for tensor in q.buffers()):
            raise InputError(
                "The posterior was made within torch.inference_mode(), which makes tensors that no step may change; "
                "call torchngvi.network outside of it."
            )
        self.q, self.radius, self.curvature, self.steps = q, float(radius), curvature, steps
        self.prior_in_gradient, self.length = prior_in_gradient, length or StepLength()
        self.optimizers, self._of_q = list(optimizers), frozenset(q.parameters_of_network)
        self.limit = None if steps is None else self.length.limit(q.layers, steps)
        self.lengthens = steps is not None and math.isfinite(radius) and not any(map(keeps_iterate, optimizers))
        self.watch = Watch(q, self.optimizers, steps, not isinstance(curvature, ExampleGradients))
        self.stepped: list[Optimizer] = []
        self._scaled = False
        device = q.parameters_of_network[0].device
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._bad = torch.zeros((), dtype=torch.bool, device=device)  # whether a gradient of this step is not finite
        self._some = torch.zeros_like(self._bad)  # whether one of them is not 0
        self._warned = False  # of the steps that were not taken since the last one that was
        self.handles: list[Any] = []
        for opt in self.optimizers:
            self.handles += [opt.register_step_pre_hook(self.before), opt.register_step_post_hook(self.after)]
        self.handles.append(q.model.register_forward_hook(self.after_forward))
        for group in self._groups():
            note_start(group, q.draw)
        q.agree_()
        curvature.begin(q)
        self._first = False  # whether a closure is called for the first time in a step, around the mean
        self._losses: list[Any] = []  # of a closure that was evaluated before the step
        q.sampling, q.ending, q.detach = True, self.doubt, self.remove
        q.settle(q.model.training)

    @torch.compiler.disable
    def after_forward(self, module: Any, arguments: Any, output: Any) -> None:
        """Let the curvature look at the outputs in training."""
        if not self.handles or not module.training or (self.q.pinned and not self._first):
            return
        observed = self.q.observed
        self.curvature.after_forward(self.q, output)
        if torch.is_grad_enabled() and not torch.jit.is_tracing():
            find = getattr(self.curvature, "output", None)
            outputs = logits_in(output) if find is None or isinstance(output, Tensor) else find(output)
            if isinstance(outputs, Tensor) and outputs.requires_grad:
                self.watch.after_forward(outputs, self.curvature.labels if self.q.observed > observed else None)

    @torch.compiler.disable
    @torch.no_grad()
    def before(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Prepare a step: the mean in the parameters, usable gradients with the prior's part, a closure at the draw."""
        if is_within_its_own_step(optimizer):
            return None
        if optimizer in self.stepped:
            self.finish()
        closure, q = arguments[1] if len(arguments) > 1 else keywords.get("closure"), self.q
        early = type(optimizer).__module__.startswith(("torch.optim.", "torchngvi."))
        if closure is not None:
            closure = torch.enable_grad()(closure)
            self._losses = [closure()] if early else []
        self.watch.before_step(optimizer, 0 if self.steps is None else self.taken)
        if closure is None or early:
            used = self._usable(optimizer)
            self.curvature.before_step(q, used)
            self.watch.say_of_gradients(used, len(self.optimizers) > 1)
            q.mean_()
            if self.prior_in_gradient:
                q.add_prior_(used, q.mean)
            q.refresh_()
        else:
            q.mean_()
        q.unfinished = self.finish
        self._unseen = not early
        return None if closure is None else ((optimizer, functools.partial(self.evaluate, optimizer, closure)), {})

    @torch.no_grad()
    def evaluate(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Evaluate a closure within a step, at the draw around what the parameters hold, and add the prior's part."""
        if self._losses:
            return self._losses.pop()
        q, first, self._unseen = self.q, self._unseen, False
        held = {name: p.detach().clone() for name, p in zip(q.names, q.parameters_of_network, strict=True)}
        for family in q.each():
            family.disturb_(q.seed, q.draw, q.temperature**0.5)
        torch.clear_autocast_cache()
        self._first, q.pinned, q.unfinished = first, True, None
        try:
            loss = closure()
        finally:
            self._first, q.pinned, q.unfinished = False, False, self.finish
            torch._foreach_copy_([p.detach() for p in q.parameters_of_network], list(held.values()))
            torch.clear_autocast_cache()
            q.written.count += 1
        self.watch.others.refuse_joined(optimizer)
        used = self._usable(optimizer)
        if first:
            self.curvature.before_step(q, used)
        if self.prior_in_gradient:
            q.add_prior_(used, held)
        return loss

    def _usable(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The gradients of an optimizer's parameters of q by name, unscaled, and zero where they are not finite."""
        used = {name: p.grad for name, p in self._moved_by(optimizer) if p.grad is not None}
        gradients = list(used.values())
        if any(g.is_sparse for g in gradients):
            raise InputError("A posterior over a network needs dense gradients; make embeddings with sparse=False.")
        unscale_(optimizer, gradients)
        finite, some = look_at(gradients)
        zero_where_(gradients, ~finite)
        self._bad = self._bad | ~finite.to(self._bad.device)
        self._some = self._some | some.to(self._some.device)
        self._scaled = self._scaled or hasattr(optimizer, "found_inf")
        return used

    @torch.compiler.disable
    @torch.no_grad()
    def after(self, optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """End the step when every optimizer has stepped."""
        if is_within_its_own_step(optimizer):
            return
        self.stepped.append(optimizer)
        if len(self.stepped) == len(self.optimizers):
            self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Give the move its length, take it, and go on to the next draw."""
        q, planned, own = self.q, self._planned(), self._share()
        factor = min(planned, own)
        q.refresh_()
        moves, sums, kl = q.take_moves_()
        usable = kl.isfinite() & ~self._bad.to(kl.device)
        zero_where_(moves, ~usable)
        whole = min(planned / own, 1.0) if own else 0.0  # of a move that is not lengthened
        share = (self.radius * factor**2 / kl.nan_to_num(1.0).clamp_min_(torch.finfo(kl.dtype).tiny)).sqrt()
        shortest = share.nan_to_num(1.0).clamp(max=whole)
        share = torch.where(self._some.to(kl.device), share, shortest) if self.lengthens else shortest
        if not self.watch.shortened:
            self.watch.shortened = self.lengthens or kl.device.type != "cpu" or bool(share < whole)
        limits = [math.inf if self.limit is None else self.limit * factor * scale for scale in q.scales]
        add_moves_(q.units, list(q.mean.values()), moves, torch.where(usable, share, 0.0), sums, limits)
        self._report(usable)
        q.unfinished, self._scaled, self.stepped = None, False, []
        self._bad, self._some = torch.zeros_like(self._bad), torch.zeros_like(self._some)
        q.next_draw_()
        self.watch.after_step()

    def doubt(self) -> str | None:
        """Return what to say of predictions after a training whose steps have not become short, or None."""
        if math.isinf(self.radius):
            return None
        return self.watch.doubt(self._groups(), self.taken, min(self._planned(), self._share()))

    def _moved_by(self, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of q that an optimizer has, with their names."""
        each = zip(self.q.names, self.q.parameters_of_network, strict=True)
        if len(self.optimizers) == 1:
            return each
        own = {p for group in optimizer.param_groups for p in group["params"]}
        return ((name, p) for name, p in each if p in own)

    def _report(self, usable: Tensor) -> None:
        """Count a step that was not taken; say so where that needs no wait for a device."""
        self.skipped += ~usable.to(self.skipped.device)
        if usable.device.type != "cpu":
            return
        if usable or self._warned or self._scaled:  # a GradScaler tries its scale
            self._warned = self._warned and not usable
            return
        self._warned = True
        warnings.warn(
            "A step of the network's posterior was not taken: its gradients or the optimizer's move are not "
            "finite. The posterior is as it was, and steps like it will be left out without another warning until one "
            "is taken; look at the batch, the learning rate, or clip the gradients.",
            RejectedStepWarning,
            stacklevel=5,
        )

    def _share(self) -> float:
        """g = lr/its largest value, the largest one of all groups with parameters of q."""
        return max(map(share_of_lr, self._groups()))

    @property
    def taken(self) -> int:
        """The steps that the training has taken."""
        return self.q.draw - min((group[BEGUN] for group in self._groups() if BEGUN in group), default=0)

    def _planned(self) -> float:
        """The planned factor of radius and limit."""
        return 1.0 if self.steps is None else self.length.share(self.taken, self.steps)

    def _groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizers with parameters of q."""
        groups = (group for opt in self.optimizers for group in opt.param_groups)
        return [group for group in groups if not self._of_q.isdisjoint(group["params"])]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside q and the optimizers: nothing but what the curvature remembers."""
        return {"skipped": self.skipped.clone(), "curvature": self.curvature.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up again what `state_dict` returned; an `InputError` refuses anything else."""
        if not {"skipped", "curvature"} <= set(state):
            raise InputError(
                f"This is not the state of an attachment, which its state_dict() returns; it has {sorted(state)[:4]}."
            )
        self.skipped.copy_(state["skipped"])
        self.curvature.load_state_dict(state["curvature"])

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the network is moved by no optimizer, so that its attachment is none."""
        return object.__new__, (type(self),), {"handles": []}

    def remove(self) -> None:
        """Let the optimizers go: the network trains as without q from then on, from its mean."""
        self.q.finish_step()
        said = self.doubt()
        self.q.ending = None if said is None else functools.partial(str, said)
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for group in self._groups():
            forget_start(group)
        self.q.sampling, self.q.detach = False, None
        self.q.settle(self.q.model.training)
