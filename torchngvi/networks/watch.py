"""What a training script shows of itself: slips that are named once, or refused, instead of a wrong posterior."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchngvi.distributed import ranks
from torchngvi.errors import InputError
from torchngvi.networks.layout import named_by
from torchngvi.networks.likelihoods import Gaussian
from torchngvi.networks.losses import find_scale_column, take_rows, tell_of_columns, tell_of_weights, weigh_labels
from torchngvi.networks.optimizers import check_options, largest_lr, planned_share
from torchngvi.networks.posterior import NetworkGaussian
from torchngvi.networks.predictions import called_by, warn_caller
from torchngvi.numerics.arrays import Fetched

_WITHOUT_RADIUS = 1.0  # the learning rate of weights that a radius limits, which no other parameter trains with
_AFTER = 1.5  # of the planned steps, from which on a warning says that they are over
_ENOUGH = 0.15  # the factor of the moves after ¾ of a cosine: stopping before costs more than 0.01 nats on digits
_LARGE = 0.1  # rates of AdamW from here on end within .09 nats of one another on four tasks; .01 is too short on two
_UNSEEN = 10  # changes of the weights without a step of the optimizer; one that looks ahead makes one or two
_COMPARED, _SAME = 3, 1e-4  # steps whose gradients have the same norm but for rounding only where they are clipped
_COUNTS = 0.1  # of the norm of clipped gradients, from which on the prior's part beside them matters
_DIFFERENT = 0.01  # of num_data, by which the labels of a pass may differ; samplers for several processes repeat some


class Watch:
    """Looks on while an optimizer moves a posterior, and says once what the script does that it cannot mean.

    Args:
        q: the posterior.
        optimizers: that move its mean.
        steps: that are planned, or None.
        looks: whether the loss of the first step is looked at, by its gradient at the outputs.
    """

    def __init__(self, q: NetworkGaussian, optimizers: list[Optimizer], steps: int | None, looks: bool) -> None:
        self.q, self.steps, self.looks = q, steps, looks
        self.others = Others(q, optimizers)
        self._told: set[str] = set()
        self.passed = 0  # steps that were seen
        self.shortened = False  # whether the radius has shortened one of them
        self._norms: list[Fetched] = []  # of the gradients and of the prior's part in them, in some steps
        self._rows = 0
        self._labels: float | None = None  # a row, None where that differs
        self._batches = Batches()
        self._looked = False
        self._left: Fetched | None = None  # of the gradients of the first step when the second one passes back
        self._found: list[tuple[Fetched, int]] = []  # of the loss, with the numbers of labels
        self._precision, self._scaled = 0.0, False
        self._written: tuple[int, int] | None = None
        self._changes, self._compared = 0, False

    # the numbers of labels and of steps

    def after_forward(self, output: Tensor, labels: int | None) -> None:
        """Count the labels of a forward pass in training, and look at its loss in the first step.

        Args:
            output: of the network, with its graph.
            labels: in it, where they were counted.
        """
        self._note_changes()
        rows = len(output) if output.ndim else 1
        self._rows += rows
        if labels is not None:
            each = labels / max(rows, 1)
            self._labels = each if self._labels in (None, each) else float("nan")
        whole = self._batches.add(rows)
        if whole is not None and self._labels is not None:
            self._tell_of_pass(whole * self._labels * ranks())
        if self.looks and self.passed < 2:
            self._look(output)

    def _tell_of_pass(self, labels: float) -> None:
        if abs(labels - self.q.num_data) > _DIFFERENT * self.q.num_data:  # not of NaN
            self._tell(
                "pass",
                f"A shorter batch ends each pass over the data, and a pass has {labels:,.0f} labels, where num_data="
                f"{self.q.num_data:,}. num_data is the number of labels in the training data, neither that of batches "
                "nor that of data that are held out; it is right only where a pass has copies of rows, or not all.",
            )

    def before_step(self, optimizer: Optimizer, taken: int) -> None:
        """Say what can be said before a step.

        Args:
            optimizer: about to step, with the gradients of the loss.
            taken: steps of the training so far.

        Raises:
            InputError: as `Others.refuse_joined`.
        """
        self.others.refuse_joined(optimizer)
        self._compare()
        if not self.passed and all(largest_lr(group) == 0 for group in optimizer.param_groups):
            self._tell("rate", "The learning rate of the optimizer is 0, so that the mean of q stays where it is.")
        if self._found and not self.passed:
            self._scaled = called_by("torch.amp.grad_scaler")
        self._speak()
        if self.steps is None or taken < self.steps:
            return
        if self.passed and self._labels is not None and "steps" not in self._told:
            seen = self._rows * self._labels * ranks() * (taken + 1) / (self.passed + 1)
            if seen < self.q.num_data:
                self._tell(
                    "steps",
                    f"The training goes on after steps={self.steps:,}, with {seen:,.0f} labels of num_data="
                    f"{self.q.num_data:,} so far. steps counts steps of the optimizer, and not epochs: steps=epochs * "
                    "len(loader). From now on the mean hardly moves.",
                )
        if taken >= _AFTER * self.steps:
            self._tell(
                "steps",
                f"The training has taken {taken:,} steps, and attach was given steps={self.steps:,}, over which the "
                "radius and the moves fall to zero; since then they are what they were at the last of them, and the "
                "mean hardly moves. Say steps=epochs * len(loader) of the whole training; a posterior that was trained "
                "before begins a new schedule if it is loaded before attach.",
            )

    def after_step(self) -> None:
        """Note that a step was taken."""
        self.passed += 1
        self._changes = 0
        self._written = self._state()

    def doubt(self, radius: float, taken: int, share: float, lr: float) -> str | None:
        """Return what to say where the posterior is used and its steps had not become short, or None.

        Args:
            radius: of the training.
            taken: steps of it.
            share: of the radius and the moves, by the schedule of the learning rate alone.
            lr: the largest learning rate.
        """
        if not self.passed or radius == float("inf"):
            return None
        if not self.shortened and lr < _LARGE:
            return (
                f"The radius has shortened no step of the training: the learning rate, {lr:g}, was the length of all "
                "of them, and the mean may not have come far. Take lr=1, with which the radius is the length."
            )
        if self.steps is None:
            if share > _ENOUGH:
                return (
                    f"The learning rate has not fallen, and attach was given a radius and no steps: the last moves "
                    f"were {share:.2g} of the longest, so that the mean is as far from the optimum as a move. "
                    "Say steps=, over which they fall by themselves, or take a scheduler."
                )
            return None
        share = min(share, planned_share(taken, self.steps))
        if share > _ENOUGH:
            return (
                f"The training took {taken:,} of the steps={self.steps:,} that attach was given, so that the radius "
                f"and the moves had only fallen to {share:.2g}: the mean is as far from the optimum as a move. "
                "Say the number of steps that the optimizer takes: with accumulated "
                "gradients those of the optimizer alone."
            )
        return None

    # the loss

    def _look(self, output: Tensor) -> None:
        """Let the gradient at the outputs be looked at, when the script passes back through them."""
        if self.passed:
            output.register_hook(self._look_for_left)
            return
        if (
            output.dtype == torch.float16
            or torch.get_autocast_dtype(output.device.type) == torch.float16
            and (torch.is_autocast_enabled(output.device.type))
        ):
            return  # a GradScaler multiplies the loss
        likelihood, held = self.q.likelihood, output.detach()
        classes = likelihood.as_classes(held)
        two = isinstance(likelihood, Gaussian) and held.ndim > 1 and held.shape[-1] == 2 and len(held) > 8
        if classes is None and not two:
            return
        rows = held.clone() if classes is None else take_rows(classes)
        count = 0 if classes is None else classes[..., 0].numel()
        self._precision = max(self._precision, torch.finfo(output.dtype).eps)

        def look(gradient: Tensor) -> None:
            if self.passed or torch._C._functorch.is_functorch_wrapped_tensor(gradient):
                return
            with torch.no_grad():
                at = likelihood.as_classes(gradient, True)
                found = find_scale_column(rows, gradient) if at is None else weigh_labels(rows, take_rows(at), count)
                self._found.append((Fetched(found), count))

        output.register_hook(look)

    @torch.no_grad()
    def _look_for_left(self, gradient: Tensor) -> None:
        """See what the parameters' gradients are when the loss of the second step begins to pass back."""
        if self.passed != 1 or self._looked:
            return
        self._looked = True
        left = [p.grad for p in self.q.parameters_of_network if p.grad is not None]
        if left:
            self._left = Fetched(torch.stack([g.abs().max().float() for g in left if g.numel()]).max())

    def say_of_gradients(self, used: Mapping[str, Tensor], several: bool) -> None:
        """Say once that a step has no gradients or clipped ones, or that the network was in evaluation mode.

        Args:
            used: the gradients of a step, by name.
            several: whether several optimizers share the posterior, of which one may have none.
        """
        if 0 < self.passed <= _COMPARED and used:
            self._note_norms(used)
        if not used:
            if not several:
                self._tell(
                    "gradients",
                    "The optimizer steps, and no parameter of q has a gradient: call loss.backward() before it, and "
                    "zero_grad() after it or before the loss.",
                )
        elif not self.q.model.training and not self.q.pinned:
            self._tell(
                "mode",
                "The network is in evaluation mode at a step of its optimizer, so that its weights hold the mean, and "
                "neither draws nor the curvature are what q is trained with. Call model.train() after each evaluation; "
                "layers that are to stay as they are, such as normalisations, may be put into evaluation mode alone.",
            )

    def _note_norms(self, used: Mapping[str, Tensor]) -> None:
        """Say once that gradients have one and the same norm, that of a clipping, beside which the prior counts."""
        means, first = self.q.mean, next(iter(used.values()))
        parts = [(g.norm(), means[name].norm() * self.q.prior[name]) for name, g in used.items()]
        norms = torch.stack([torch.stack(list(each)).to(first) for each in zip(*parts, strict=True)])
        self._norms.append(Fetched(norms.float().norm(dim=1)))
        read = [found.read() for found in self._norms]
        if len(read) < _COMPARED or any(each is None for each in read):
            return
        gradients, prior = zip(*read, strict=True)
        if max(gradients) < (1 + _SAME) * min(gradients) and max(prior) > _COUNTS * max(gradients) > 0:
            self._tell(
                "clipped",
                f"Gradients have the same norm, {max(gradients):.3g}, in all of {_COMPARED} steps, as clipped ones do; "
                f"the prior's part, added afterwards, is {max(prior) / max(gradients):.2g} times as large: the prior "
                "counts too much. Leave the clipping out, as the radius limits the step, or clip less.",
            )

    def _speak(self) -> None:
        """Say what was found of the loss, as soon as that needs no wait for a device."""
        left = None if self._left is None else self._left.read()
        if left:
            self._left = None
            self._tell(
                "left",
                "The gradients of the step before were still there when the next loss passed back, which adds to them: "
                "call optimizer.zero_grad() once in each step.",
            )
        if not self._found:
            return
        read = [found.read() for found, _ in self._found]
        if any(each is None for each in read):
            return
        labels, self._found = sum(count for _, count in self._found), []
        numbers = [each for each in read if each is not None]
        if isinstance(numbers[0], list):
            whole = (labels, self.q.num_data, self._precision, self._scaled)
            sentences: Iterable[str] = tell_of_weights(numbers, *whole)
        else:
            sentences = tell_of_columns(numbers[0])
        for sentence in sentences:
            self._tell(sentence, sentence)

    # changes of the weights by something else

    def _state(self) -> tuple[int, int]:
        return self.q.written.count, sum(p._version for p in self.q.parameters_of_network)

    def _note_changes(self) -> None:
        """Count changes of the weights by something else, and refuse many without a step."""
        now = self._state()
        before, self._written = self._written, now
        if before is None or before[0] != now[0] or before[1] == now[1]:
            return
        self._changes += 1
        self._found = []  # a pass before that is no part of the step, as the first one of SAM
        if self._changes >= _UNSEEN:
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
            self._tell(
                "changes",
                "The weights were changed between two steps by something else than the attached optimizer, and that is "
                "lost, as they hold a draw. attach takes several optimizers in a list; change weights by hand within "
                "`with q.at_mean():`.",
            )

    def _tell(self, what: str, sentence: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warn_caller(sentence)


class Others:
    """The parameters of the optimizers that are no part of the posterior: trained without it, frozen, or
    joining later.
    """

    def __init__(self, q: NetworkGaussian, optimizers: list[Optimizer]) -> None:
        self.q = q
        self._of_q = set(q.parameters_of_network)
        self._names = {p: name for name, p in q.model.named_parameters()}
        self._plain = {p for p in _held(optimizers) if p.requires_grad and p not in self._of_q}
        self._frozen: dict[Optimizer, tuple[int, list[nn.Parameter]]] = {}
        unlimited = [p for opt in optimizers for p in self._unlimited(opt, self._plain)]
        if unlimited:
            warn_caller(
                f"{self._called(unlimited)} at the learning rate {_WITHOUT_RADIUS:g} or more, and no radius limits "
                "what is no part of q. Give it a group of its own in the optimizer, with the rate that it would have "
                "without q."
            )

    def refuse_joined(self, optimizer: Optimizer) -> None:
        """Refuse parameters that were frozen or no part of the optimizer when it was attached and have a
        gradient now.
        """
        for group in optimizer.param_groups:
            if (group.get("maximize") or group.get("weight_decay")) and self._of_q.intersection(group["params"]):
                check_options(type(optimizer).__name__, group)
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known, frozen = self._frozen.get(optimizer, (-1, []))
        if known != count:
            frozen = [p for p in _held([optimizer]) if p not in self._of_q and p not in self._plain]
            self._frozen[optimizer] = count, frozen
        joined = [p for p in frozen if p.grad is not None]
        if not joined:
            return
        named = [p for p in joined if p in self._names and named_by(self.q.structure, self._names[p])]
        if named:
            raise InputError(
                f"{self._called(named)} now, and was frozen, or no part of the optimizer, when torchngvi.network and "
                "attach were called: q is not over it, and no radius limits its steps. Unfreeze and add layers before "
                "torchngvi.network; or release() q, make a new one of the network as it is now, and attach again."
            )
        unlimited = list(self._unlimited(optimizer, set(joined)))
        if unlimited:
            raise InputError(
                f"{self._called(unlimited)} now, at the learning rate {_WITHOUT_RADIUS:g} or more, and no radius "
                "limits what is no part of q. Say lr= in add_param_group, the rate that it would have without q."
            )
        self._plain.update(joined)
        self._frozen.pop(optimizer)

    def _unlimited(self, optimizer: Optimizer, among: set[nn.Parameter]) -> Iterator[nn.Parameter]:
        for group in optimizer.param_groups:
            if largest_lr(group) >= _WITHOUT_RADIUS:
                yield from (p for p in group["params"] if p in among)

    def _called(self, parameters: list[nn.Parameter]) -> str:
        first = self._names.get(parameters[0], f"one of shape {tuple(parameters[0].shape)}")
        return f"The optimizer moves the parameter {first}" + (
            f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        )


def outputs_in(output: Any, find: Callable[[Any], Tensor] | None) -> Any:
    """Return the tensor of outputs in what a network returned, or anything else where none is found.

    >>> outputs_in({"logits": torch.zeros(1)}, None)
    tensor([0.])
    """
    if isinstance(output, Tensor):
        return output
    if find is not None:
        return find(output)
    return output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)


class Batches:
    """The sizes of batches, from which the length of a pass over the data can be read: a shorter batch ends it.

    >>> batches = Batches()
    >>> [batches.add(size) for size in (4, 4, 2, 4, 4, 2)]
    [None, None, None, None, None, 10]
    """

    def __init__(self) -> None:
        self._full, self._run = 0, 0
        self._passes: list[tuple[int, int]] = []
        self._regular = True

    def add(self, size: int) -> int | None:
        """Add a batch."""
        if not self._regular:
            return None
        self._full = self._full or size
        self._run += size
        if size == self._full:
            return None
        found, self._run = (self._run, size), 0
        self._regular = size < self._full and found[0] > size and (len(self._passes) < 2 or self._passes[-1] == found)
        self._passes.append(found)
        alike = self._regular and len(self._passes) > 1 and self._passes[-2] == found
        return found[0] if alike else None


def _held(optimizers: Iterable[Optimizer]) -> Iterator[Any]:
    """The parameters of optimizers."""
    return (p for opt in optimizers for group in opt.param_groups for p in group["params"])
