"""A posterior moved by any optimizer of torch: hooks before and after its step.

before   the parameters take the mean, the gradients the prior's part δm
step     the optimizer moves the mean as it moves any parameter
after    the move is shortened to a radius, q takes it, and the parameters take the next draw
"""

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchngvi.errors import InputError, RejectedStepWarning
from torchngvi.networks.curvatures import Curvature, SampledLabels
from torchngvi.networks.posterior import NetworkGaussian

_SHARE = 0.1  # the default radius is this over the square root of the number of steps, in nats a datum


def attach(
    optimizer: Optimizer | Sequence[Optimizer],
    q: NetworkGaussian,
    *,
    steps: int | None = None,
    radius: float | None = None,
    curvature: Curvature | None = None,
) -> "Attachment":
    """Let an optimizer of torch train the posterior of a network; the training loop stays as it is.

    The optimizer moves the mean with the gradient of the mean loss at a draw plus δm; q shortens the move to

        κ = ½ dmᵀ(H + δ) dm ≤ r f²   nats a datum, f = lr/its largest value,

    so that a learning rate that is large enough (1, say) has no other part than its schedule, and no step is too long.
    The default r = 0.1/√steps was the best of 34 rules tried.  The precision of q moves by natural-gradient
    steps towards the observed curvature.

    Args:
        optimizer: any optimizer of torch over the network's parameters, or several that share them; its weight decay
            is 0, as the prior of q takes its place.
        q: the posterior, from :func:`torchngvi.network`.
        steps: the number of optimizer steps that the training will take, for the default radius.
        radius: the longest move of a step in nats a datum, instead; ``math.inf`` sets none.
        curvature: how the curvature is observed; `SampledLabels()` by default.

    Returns:
        The attachment, whose `remove()` lets the optimizer go.

    Raises:
        InputError: if neither or both of steps and radius are given, if an optimizer has weight decay, or if a
            parameter of q is in none of the optimizers.

    >>> import torchngvi
    >>> model = torch.nn.Linear(2, 3)
    >>> q = torchngvi.network(model, num_data=100)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
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
    length = radius_of(steps, radius)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    _check(optimizers, q)
    return Attachment(optimizers, q, length, SampledLabels() if curvature is None else curvature)


def radius_of(steps: int | None, radius: float | None) -> float:
    """Return the radius of a step: the one that was given, or 0.1/√steps.

    Args:
        steps, radius: as in :func:`attach`.

    Returns:
        Nats a datum.

    Raises:
        InputError: unless exactly one of them is given, and larger than 0.

    >>> radius_of(steps=100, radius=None)
    0.01
    """
    if (steps is None) == (radius is None):
        raise InputError(
            "Say either steps=, the number of optimizer steps that the training will take, which chooses the radius, "
            f"or radius=, in nats a datum; got steps={steps} and radius={radius}."
        )
    if steps is not None:
        if steps < 1:
            raise InputError(f"steps is the number of optimizer steps of the training, 1 or more; got {steps}.")
        return _SHARE / math.sqrt(steps)
    assert radius is not None
    if not radius > 0:
        raise InputError(f"radius is a length in nats a datum, larger than 0; got {radius}.")
    return float(radius)


class Attachment:
    """What :func:`attach` returns: the hooks of q on its optimizers.

    Args:
        optimizers: that move the mean.
        q: the posterior.
        radius: the longest move, in nats a datum.
        curvature: how the curvature is observed.
        prior_in_gradient: whether δm is added to the gradients; an optimizer that adds it itself says no.

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
    ) -> None:
        self.q, self.radius, self.curvature = q, float(radius), curvature
        self.prior_in_gradient = prior_in_gradient
        self.optimizers = list(optimizers)
        self.peaks = {opt: [_first_lr(group) for group in opt.param_groups] for opt in self.optimizers}
        self.stepped: list[Optimizer] = []
        self.open, self._scaled = False, False
        device = q.parameters_of_network[0].device
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._unusable = torch.zeros((), dtype=torch.bool, device=device)
        self.handles: list[Any] = []
        for opt in self.optimizers:
            self.handles += [opt.register_step_pre_hook(self.before), opt.register_step_post_hook(self.after)]
        self.handles.append(q.model.register_forward_hook(self.after_forward))
        self.handles.append(q.model.register_forward_pre_hook(self.before_forward, prepend=True))
        curvature.begin(q)
        self.seen = q.observed
        q.sampling = True
        q.settle(q.model.training)

    def before_forward(self, module: Any, arguments: Any) -> None:
        """End a step that one of several optimizers left out.

        Args:
            module, arguments: as torch gives them.
        """
        if self.open:
            torch.compiler.disable(self.finish)()

    @torch.compiler.disable
    def after_forward(self, module: Any, arguments: Any, output: Any) -> None:
        """Let the curvature look at the outputs in training.

        Args:
            module, arguments, output: as torch gives them.
        """
        if module.training and not self.q.pinned:
            self.curvature.after_forward(self.q, output)

    @torch.no_grad()
    def before(self, optimizer: Optimizer, arguments: tuple, keywords: dict) -> None:
        """Prepare a step: the mean in the parameters, gradients that are usable, the prior's part in them.

        Args:
            optimizer, arguments, keywords: as torch gives them.

        Raises:
            InputError: if the step has a closure, which would evaluate the loss at the mean.
        """
        if any(given is not None for given in arguments[1:]) or keywords.get("closure") is not None:
            raise InputError(
                "A posterior over a network takes steps without a closure, which would evaluate the loss at the mean "
                "and not at the draw; call backward() first, then step()."
            )
        if optimizer in self.stepped:
            self.finish()
        q = self.q
        own = {p for group in optimizer.param_groups for p in group["params"]}
        used = {
            name: p.grad
            for name, p in zip(q.names, q.parameters_of_network, strict=True)
            if p in own and p.grad is not None
        }
        _unscale(optimizer, list(used.values()))
        self._unusable |= _zero_if_unusable_(list(used.values()))
        self._scaled = self._scaled or hasattr(optimizer, "found_inf")
        self.curvature.before_step(self.q, used)
        self.q.mean_()
        if self.q.observed != self.seen:  # only now: until here the draw could have been needed again
            self.q.refresh_()
            self.seen = self.q.observed
        self.open = True
        if self.prior_in_gradient:
            means, prior = q.mean, q.prior
            for delta in set(prior.values()):
                names = [name for name in used if prior[name] == delta]
                if names:
                    part = [means[name].to(used[name].dtype) for name in names]
                    torch._foreach_add_([used[name] for name in names], part, alpha=delta)

    @torch.no_grad()
    def after(self, optimizer: Optimizer, arguments: tuple, keywords: dict) -> None:
        """End the step when every optimizer has stepped.

        Args:
            optimizer, arguments, keywords: as torch gives them.
        """
        self.stepped.append(optimizer)
        if len(self.stepped) == len(self.optimizers):
            self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Take the move, no longer than the radius, and go on to the next draw."""
        q, length = self.q, self.radius * self._share() ** 2
        moves = [family.move_() for family in q.each()]
        kl = q.divergence(moves)
        usable = kl.isfinite() & ~self._unusable
        shrink = torch.where(usable, (length / kl.clamp_min(torch.finfo(kl.dtype).tiny)).sqrt().clamp(max=1.0), 0.0)
        for family, move in zip(q.each(), moves, strict=True):
            _zero_where_(move, ~kl.isfinite())
            _add_(family.mean, move, shrink)
        self._report(usable)
        self.open, self._scaled, self.stepped = False, False, []
        q.next_draw_()

    def _report(self, usable: Tensor) -> None:
        """Count a step that was not taken; say so where that needs no wait for a device."""
        self.skipped += ~usable
        if usable.device.type == "cpu" and not usable and not self._scaled:  # a GradScaler tries its scale
            warnings.warn(
                "A step of the network's posterior was not taken: its gradients or the optimizer's move are not "
                "finite. The posterior is as it was; look at the batch, the learning rate, or clip the gradients.",
                RejectedStepWarning,
                stacklevel=5,
            )
        self._unusable.zero_()

    def _share(self) -> float:
        """f = lr/its largest value, the largest one of all groups."""
        share = 0.0
        for opt, peaks in self.peaks.items():
            for k, group in enumerate(opt.param_groups):
                if k == len(peaks):
                    peaks.append(_first_lr(group))
                lr = float(group["lr"])
                peaks[k] = max(peaks[k], lr)
                share = max(share, lr / peaks[k] if peaks[k] > 0 else 0.0)
        return share

    def __deepcopy__(self, memo: dict) -> "Attachment":
        """A copy of the network is moved by no optimizer: its posterior is as it was, and is not trained."""
        copied = copy.copy(self)
        memo[id(self)] = copied
        copied.q = copy.deepcopy(self.q, memo)
        copied.optimizers, copied.handles, copied.stepped = [], [], []
        copied.open, copied.curvature = False, Curvature()
        return copied

    def remove(self) -> None:
        """Let the optimizers go: the network trains as without q from then on, from its mean."""
        if self.open:
            self.finish()
        for handle in self.handles:
            handle.remove()
        self.q.sampling = False
        self.q.settle(self.q.model.training)


def _first_lr(group: Mapping[str, Any]) -> float:
    """The largest learning rate that a group's schedule starts from or says it will reach."""
    return float(max(group["lr"], group.get("initial_lr", 0.0), group.get("max_lr", 0.0)))


def _check(optimizers: Sequence[Optimizer], q: NetworkGaussian) -> None:
    """Refuse optimizers that would not do what q says."""
    if q.sampling:
        raise InputError("The posterior is attached already; call remove() of that attachment first.")
    held = set()
    for opt in optimizers:
        for group in opt.param_groups:
            held |= set(group["params"])
            if group.get("weight_decay", 0.0):
                raise InputError(
                    f"{type(opt).__name__} has weight_decay={group['weight_decay']}, and the prior of q takes its "
                    "place; set weight_decay=0.0 and say prior_precision= of torchngvi.network."
                )
    missing = [n for n, p in zip(q.names, q.parameters_of_network, strict=True) if p not in held]
    if missing:
        raise InputError(
            f"No optimizer given has the parameter{'s' if len(missing) > 1 else ''} {', '.join(missing[:4])}"
            f"{', ...' if len(missing) > 4 else ''} that q is over; give the optimizer all of model.parameters(), or "
            "several optimizers in a list."
        )


def _unscale(optimizer: Optimizer, gradients: list[Tensor]) -> None:
    """Take the scale of a GradScaler out of gradients that a fused optimizer would have unscaled itself."""
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        if gradients:
            torch._foreach_mul_(gradients, scale.reciprocal().to(gradients[0].dtype))
        optimizer.grad_scale = None  # type: ignore[attr-defined]


def _zero_if_unusable_(gradients: list[Tensor]) -> Tensor:
    """Whether some gradient is not finite; if so they are all zero from then on."""
    if not gradients:
        return torch.tensor(False)
    norms = torch._foreach_norm(gradients)
    bad = ~torch.stack([norm.to(norms[0]) for norm in norms]).isfinite().all()
    _zero_where_(gradients, bad)
    return bad


def _add_(tensors: list[Tensor], moves: list[Tensor], share: Tensor) -> None:
    """Add a share of moves, which may be used up, without a wait for a device."""
    if share.device.type == "cpu":
        torch._foreach_add_(tensors, moves, alpha=float(share))
    else:
        torch._foreach_mul_(moves, share.to(moves[0].dtype))
        torch._foreach_add_(tensors, moves)


def _zero_where_(tensors: list[Tensor], bad: Tensor) -> None:
    """Fill tensors with zeros where a flag is set, without a wait for a device."""
    if bad.device.type == "cpu":
        if bad:
            torch._foreach_zero_(tensors)
    else:
        for tensor in tensors:
            tensor.masked_fill_(bad, 0.0)
