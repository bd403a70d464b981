"""What a training script shows of itself: slips that are named once, or refused, instead of a wrong posterior.

The loss that a posterior is made for is the mean of -log p(y | output), whose gradient at the logits of a label is
c (p - e_y), p the probabilities, e_y the unit vector of the label and c = 1/B.  Whatever else the script computes, such
as a sum over labels, weights of classes or smoothed labels, leaves its mark there.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchngvi.distributed import ranks
from torchngvi.errors import InputError
from torchngvi.networks.layout import named_by, refuse_sharded
from torchngvi.networks.likelihoods import Categorical, Gaussian
from torchngvi.networks.posterior import NetworkGaussian
from torchngvi.networks.weights import frames, warn_caller
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
        self._left: Fetched | None = None  # of the gradients of the first step when the second one passes back
        self._found: list[tuple[Fetched, int]] = []  # of the loss, with the numbers of labels
        self._precision, self._looked = 0.0, False
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
                at = likelihood.as_classes(gradient, True)
                if at is None:
                    found = find_scale_column(rows, gradient)
                else:
                    found = weigh_labels(rows, take_rows(at, most), count, weights)
                self._found.append((Fetched(found), count))

        output.register_hook(look)

    @torch.no_grad()
    def _look_for_left(self, gradient: Tensor) -> None:
        """See what the parameters' gradients are when the loss of the second step begins to pass back."""
        if self.passed != 1 or self._looked:
            return
        self._looked = True
        left = [p.grad for p in self.q.parameters_of_network if p.grad is not None and p.grad.numel()]
        if left:
            self._left = Fetched(torch.stack([g.abs().max().float() for g in left]).max())

    def say_of_gradients(self, used: Mapping[str, Tensor], several: bool) -> None:
        """Say once that a step has no gradients or clipped ones, or that the network was in evaluation mode.

        Where several optimizers share the posterior, one of them may have none.
        """
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
        if self._left is not None and self._left.read():
            self._left = None
            self._say("left")
        read = [found.read() for found, _ in self._found]
        if not read or any(each is None for each in read):
            return
        labels, self._found = sum(count for _, count in self._found), []
        if isinstance(read[0], list):
            self._say_of_loss(read, labels)
        elif read[0] > explained:
            self._say("column")

    def _say_of_loss(self, found: list[list[float]], labels: int, many: float = 0.1) -> None:
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
        scaled = right and _called_by("torch.amp.grad_scaler")
        tests = {
            "softmax": probabilities == 1,
            "total": right and abs(total - 1) > max(close, 0.01) and not scaled,
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
        self._found = []  # a pass before that is no part of the step, as the first one of SAM
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


def weigh_labels(logits: Tensor, gradient: Tensor, count: int, weights: Tensor | None = None) -> Tensor:
    """Return what weights a loss gives to the labels of a batch, from its gradient at their logits.

    The weights of classes that the likelihood has are taken out of all but the first number, the weight of all labels.
    """
    classes = logits.shape[-1]
    x, r = logits.float(), gradient.float()
    p = x.softmax(-1)
    r = r - p * r.sum(-1, keepdim=True)  # of log p as outputs, too, the gradient at logits
    label = r.argmin(-1, keepdim=True)
    others = torch.ones_like(p).scatter(-1, label, 0.0)
    mass, left_out = (p * others).sum(-1), (r == 0).all(-1)
    used = ~left_out & (mass > _CLOSE)
    rows = used.sum()
    c = torch.where(used, (r * others).sum(-1) / mass, 0.0)
    total = c.sum() / rows * (count * (1 - left_out.float().mean()))
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
    numbers = [total, spread, distance(c[:, None] * p), offset * classes / slope, residual, left_out.float().mean()]
    return torch.stack([*numbers, probabilities.float()])


def find_scale_column(output: Tensor, gradient: Tensor) -> Tensor:
    """Return how well the gradient at one column of two is explained by the square of the other's.

    That of the logarithm of a standard deviation, or of another function of it, is c (1 - (y - mean)²/variance) up to a
    slope, and that of the mean c (mean - y)/variance; two labels of a row explain nothing of each other.
    """
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


def _called_by(module: str) -> bool:
    """Whether a module is among the callers."""
    return any(frame.f_globals.get("__name__") == module for frame in frames())


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
    """Return whether an optimizer remembers where it has put the parameters, so that no step may be lengthened.

    Schedule-Free optimizers, which have modes, and those that look ahead do.
    """
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
