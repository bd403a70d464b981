"""A posterior moved by any optimizer of torch: hooks before and after its step.

before   the parameters take the mean, the gradients the prior's part δm
step     the optimizer moves the mean as it moves any parameter, which says in what direction
after    the move takes the length of a radius, each unit stays within a limit, and the parameters take the next draw
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchngvi.arguments import read_flag, read_instance, read_number, read_size
from torchngvi.errors import InputError, RejectedStepWarning
from torchngvi.networks.curvatures import Curvature, ExampleGradients, SampledLabels
from torchngvi.networks.finite import look_at, zero_where_
from torchngvi.networks.posterior import NetworkGaussian
from torchngvi.networks.predictions import logits_in
from torchngvi.networks.units import StepLength, add_moves_
from torchngvi.networks.watch import (
    BEGUN,
    Watch,
    check,
    forget_start,
    is_within_its_own_step,
    keeps_iterate,
    note_start,
    refuse_wrapped,
    share_of_lr,
    unscale_,
)
from torchngvi.networks.weights import refuse_replaced


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
    length = read_instance("length", length or StepLength(), StepLength, "is a torchngvi.networks.StepLength, or None")
    longest = radius_of(steps, radius, length)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    refuse_wrapped(optimizer)
    if not isinstance(q, NetworkGaussian) or not _are_optimizers(optimizers):
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
            "fused=True has no effect any more: the compiled loops were within 5 % of what torch does by itself. Leave "
            "it out; release 0.4 will not take it.",
            DeprecationWarning,
            stacklevel=2,
        )
    return Attachment(optimizers, q, longest, curvature, steps=steps, length=length)


def _are_optimizers(given: Any) -> bool:
    """Whether this is a sequence of optimizers, one at least."""
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(one, Optimizer) for one in given)


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
        """Prepare a step: the mean in the parameters, gradients that are usable, the prior's part in them.

        A closure is replaced by one that evaluates the loss at the draw, wherever the optimizer has put the mean; for
        an optimizer that calls it once, before it does anything else, that is done here.
        """
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
