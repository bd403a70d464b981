"""A torch optimizer whose parameters are posteriors: its groups, its parts, and the state of each posterior."""

from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import is_number, read_number, read_tensor, shown
from torchngvi.errors import InputError
from torchngvi.interfaces import Estimator, Metric, Momentum, Posterior, Rule, StepSize
from torchngvi.messages import listed
from torchngvi.numerics.host import Fetched
from torchngvi.optim import pairs
from torchngvi.optim.records import Report
from torchngvi.optim.state import State, complete, converted
from torchngvi.optim.watching import Seen, Watch, counted, read_later, speak
from torchngvi.renamed import warn_renamed


class PosteriorOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose parameters are posteriors: param groups, the state of each posterior, copies and pickles.

    It is the base of `NaturalGradientVI`, which adds the steps; use that class, or a method of `torchngvi.methods`.
    A param group holds one posterior, and its state is a dict with one entry for each part (step size, estimator,
    metric, momentum), made by the ``init`` of the part before the first step.
    """

    rule: Rule
    step_size: StepSize
    estimator: Estimator | None
    metric: Metric | None
    momentum: Momentum | None
    posteriors: list[Posterior]
    last: Report | None = None
    _cache: Any = None  # what is known of q as it is now
    _warned = False  # of a step that was not taken
    _diverges = False  # and that was said
    watch: Watch = Watch()
    _pending: dict[int, Fetched | None]  # counts on their way from an accelerator
    _asked_ranks = False
    _repeats = False  # the closure was seen to give the same loss twice

    _kept = (  # by a copy or a pickle, beside what torch keeps
        *("rule", "step_size", "estimator", "metric", "momentum", "posteriors"),
        *("evaluations", "gradients", "values", "_found", "_warned", "_asked_ranks", "_repeats", "_diverges", "watch"),
    )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a posterior, as a group such as ``{"posterior": q, "lr": 0.1}``.

        Args:
            param_group: the posterior with options of its own, ``lr`` and ``loss_scale``; those left out are the
                defaults.

        Raises:
            InputError: something that is no posterior, or an option that is not positive.
            PairError: a posterior that the parts of this optimizer cannot move.
        """
        group = dict(param_group)
        q = group.pop("posterior", None)
        if "posterior" not in param_group:
            raise InputError(
                f'a param group of {type(self).__name__} is such as {{"posterior": q, "lr": 0.1}}; got the keys '
                f"{listed(sorted(map(str, param_group)))}. Give other parameters to a torch optimizer."
            )
        if not isinstance(q, Posterior):
            raise InputError(
                f"{type(self).__name__} updates posteriors such as CholeskyGaussian(dim); got {type(q).__name__}. "
                "Give other parameters to a torch optimizer."
            )
        pairs.refuse(pairs.WITH_POSTERIOR, self._parts(q=q))
        if self.estimator is not None:
            self.estimator.check(q)
        group["lr"] = _checked_rate(group.get("lr", self.defaults["lr"]), q)
        scale = group.get("loss_scale", self.defaults["loss_scale"])
        group["loss_scale"] = read_number("loss_scale", scale, "is the factor on the gradients", above=0)
        group["params"] = [q.mean_probe, q.root_probe]
        super().add_param_group(group)
        self.posteriors.append(q)

    def _parts(self, **more: Any) -> pairs.Parts:
        """What is to work together, for the table of what cannot."""
        own = {"estimator": self.estimator, "metric": self.metric, "momentum": self.momentum}
        return pairs.Parts(self.rule, self.step_size, **(own | more))

    def _only_posterior(self, what: str) -> Posterior:
        if len(self.posteriors) != 1:
            pairs.refuse(pairs.ONE_POSTERIOR, self._parts(number=len(self.posteriors)), what=what)
        return self.posteriors[0]

    @property
    def acceleration(self) -> Metric | None:
        """The metric under its old name ``acceleration``, with a warning."""
        warn_renamed(type(self).__name__, "acceleration", "metric")
        return self.metric

    @property
    def rejections(self) -> int:
        """The number of steps that were not taken so far, over all posteriors and batch members."""
        return sum(int(s["rejections"].sum()) for s in self.state.values() if "rejections" in s)

    def _look(self, index: int, seen: Seen) -> None:
        """Count what goes wrong in a row, and say so where it is much."""
        q, state = self.posteriors[index], self._state(index)["watch"]
        counts = counted(self.watch, q, seen, state)
        if counts is None:
            return
        known, self._pending[index] = read_later(counts, self._pending.get(index))
        if known is not None:
            self._diverges = speak(self.watch, type(self).__name__, q, seen, known, self._diverges)

    # -------------------------------------------------------------------------------- state

    def _state(self, index: int) -> State:
        """Everything of this posterior that changes from step to step, on first use made: a dict for each part."""
        probe = self.posteriors[index].mean_probe
        state = self.state[probe]
        like = state.get("rejections")
        if like is None:
            complete(state, self._fresh(self.posteriors[index]))
        elif like.dtype != probe.dtype or like.device != probe.device:
            state.update(converted(state, probe))  # q was converted or moved, as torch lets no Parameter be
        return state

    def _fresh(self, q: Posterior) -> State:
        """The state of a posterior before its first step."""
        like = q.mean_probe.detach()[..., 0]
        fresh: State = {
            "rejections": torch.zeros_like(like),
            "loss": torch.full_like(like, torch.inf),  # that the last trial left
            "went": torch.zeros_like(like),  # ρ of the last step, 0 where it was not taken or q is another
            "step_size": self.step_size.init(like),
            "estimator": {},
        }
        if not self.step_size.needs_trial:  # what is far above the start, and how often in a row it was so
            counts = torch.stack([torch.zeros_like(like)] * 2)
            fresh["watch"] = {"far": torch.full_like(like, torch.nan), "counts": counts}
        if self.metric is not None:
            fresh["metric"] = self.metric.init(q)
        if self.momentum is not None:
            fresh["momentum"] = self.momentum.init(q)
        return fresh

    def _generators(self) -> dict[str, torch.Generator]:
        """The sources of the draws, by the part that draws."""
        parts = {"estimator": self.estimator, "metric": self.metric}
        found = {name: getattr(part, "generator", None) for name, part in parts.items()}
        return {name: generator for name, generator in found.items() if generator is not None}

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer as `torch.optim.Optimizer` gives it, with that of the generators of its parts.

        Returns:
            The state dict; an optimizer that loads it goes on bit for bit, from the same posterior.
        """
        if generators := self._generators():
            states = {name: generator.get_state() for name, generator in generators.items()}
            self.state[self.posteriors[0].mean_probe]["generators"] = states
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` gave; the next step evaluates the target anew.

        Args:
            state_dict: the state of an optimizer with the same parts and posteriors of the same shapes.

        Raises:
            InputError: a state of version 0.1, in which the parts have no dicts of their own.
        """
        if any("rejections" in saved and "step_size" not in saved for saved in state_dict["state"].values()):
            raise InputError(
                "this state dict is of torchngvi 0.1, where the state of all parts was one dict; here each part has "
                "one of its own. Load the posterior alone, and go on with the optimizer as it is."
            )
        super().load_state_dict(state_dict)
        self._cache = None
        for q in self.posteriors:
            if q.mean_probe in self.state:
                complete(self.state[q.mean_probe], self._fresh(q))
        saved = self.state[self.posteriors[0].mean_probe].get("generators", {})
        for name, generator in self._generators().items():
            if name in saved:
                generator.set_state(saved[name].to(device="cpu", dtype=torch.uint8))

    def __repr__(self) -> str:
        """The param groups as torch prints them, followed by the names of the parts."""
        parts = (self.rule, self.step_size, self.estimator, self.metric, self.momentum)
        names = ", ".join(
            repr(part) if part is self.step_size and type(part).__repr__ is not object.__repr__ else type(part).__name__
            for part in parts
            if part is not None
        )
        return f"{super().__repr__()[:-1].rstrip()}\n    parts: {names}\n)"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._cache, self.last, self._pending = None, None, {}
        super().__setstate__(state)


def _checked_rate(lr: Any, q: Posterior) -> float | Tensor:
    """A learning rate: a number, or a tensor with one entry a member, which stays the same object for schedules."""
    what = "is a number, or a tensor with one entry a member"
    if not isinstance(lr, Tensor):
        if not is_number(lr, at_least=0, infinite=True):
            real = is_number(lr, infinite=True)
            raise InputError(f"lr {what}{', 0 or larger' if real else ''}; got {shown(lr)}.")
        return lr
    values = read_tensor("lr", lr, finite=False)
    if values.shape not in ((), q.batch_shape):
        raise InputError(f"lr {what}, {tuple(q.batch_shape)}; got shape {tuple(values.shape)}.")
    if not bool((values >= 0).all()):
        raise InputError(f"lr must not be negative; got {float(values.min()):g}.")
    return lr
