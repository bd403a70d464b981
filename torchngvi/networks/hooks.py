"""What the network does by itself, so that no line of a training loop has to: hooks on its modules.

before a forward pass   a draw in training, the mean in evaluation
state_dict()            the mean
load_state_dict()       what was loaded becomes the mean
"""

import copy
import sys
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from torchngvi.errors import InputError
from torchngvi.networks.predictions import warn_caller


class Held(Protocol):
    """What the hooks need of a posterior over a network."""

    sampling: bool
    pinned: bool
    written: "Written"
    parameters_of_network: list[nn.Parameter]

    @property
    def model(self) -> nn.Module:
        """The network."""

    @property
    def mean(self) -> dict[str, Tensor]:
        """The means by name."""

    def settle(self, training: bool) -> None:
        """Hold a draw in training and the mean in evaluation."""

    def mean_(self) -> None:
        """Hold the mean."""

    def finish_step(self) -> None:
        """End a step that is under way."""


class Written:
    """The writes of draws and means into the parameters of a network, between which others may read and change them.

    Attributes:
        count: of the writes, by which a change by something else can be noticed.
    """

    def __init__(self) -> None:
        self.count = 0
        self._averages: list[tuple[weakref.ref[AveragedModel], int]] = []  # with their numbers of updates

    def add(self, average: AveragedModel) -> None:
        """Look from now on at an average of the weights, which takes what the parameters hold."""
        self._averages.append((weakref.ref(average), 0))

    def note(self, drawn: bool) -> None:
        """Note that the parameters are about to be written, and say once that an average has taken in a draw."""
        self.count += 1
        for k, (reference, count) in enumerate(self._averages):
            average = reference()
            if average is None:
                continue
            known = average.n_averaged
            now = int(known) if known.device.type == "cpu" else known._version
            self._averages[k] = reference, now
            if drawn and now == count + 1:
                self._averages = []
                warn_caller(
                    "AveragedModel has averaged what the parameters hold, which is a draw of the weights in training. "
                    "Call update_parameters within `with q.at_mean():`, so that it averages their means."
                )
                return

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has written nothing, and is averaged by nothing."""
        return type(self), ()


def _exporting() -> bool:
    """Whether torch.export is at work."""
    return torch.compiler.is_exporting()


def _averaging() -> AveragedModel | None:
    """The AveragedModel that is copying a network for itself, if one is."""
    frame = sys._getframe().f_back
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(owner, AveragedModel):
            return owner
        frame = frame.f_back
    return None


class _AfterStateDict:
    """An object in the place of a method, on which torch can leave its mark."""

    def __init__(self, hooks: "Hooks") -> None:
        self.hooks = hooks

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        self.hooks.after_state_dict(module, state, prefix)


class Hooks:
    """The hooks of one posterior on one network."""

    def __init__(self, q: Held) -> None:
        self.q: Held | None = q
        self.owned: dict[nn.Module, dict[str, str]] = {}  # module -> its own name of a parameter -> q's name of it
        names = {p: name for name, p in q.model.named_parameters() if name in q.mean}
        for module in q.model.modules():
            own = {local: names[p] for local, p in module.named_parameters(recurse=False) if p in names}
            if own:
                self.owned[module] = own
        places = dict.fromkeys([q.model, *self.owned])
        self.handles = [module.register_forward_pre_hook(self.before_forward) for module in places]
        for module in self.owned:
            self.handles += [
                module.register_state_dict_post_hook(_AfterStateDict(self)),
                module.register_load_state_dict_pre_hook(self.before_loading),
                module.register_load_state_dict_post_hook(self.after_loading),
            ]

    def before_forward(self, module: nn.Module, arguments: Any) -> None:
        """Let the parameters hold what the mode of the network asks for."""
        if self.q is None:
            return
        state = torch._C._get_tracing_state()
        if self.q.sampling and self.q.model.training and not self.q.pinned and (state is not None or _exporting()):
            raise InputError(
                "The network is traced or exported in training, where it holds a draw of its weights, another one for "
                "each step. Call model.eval() first, after which it holds their mean, or q.release(), after which it "
                "is any other network."
            )
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]  # what is written into the weights is no part of the network
        try:
            self.q.settle(self.q.model.training)
        finally:
            torch._C._set_tracing_state(state)  # type: ignore[attr-defined]

    def after_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Put the means in the place of draws."""
        if self.q is None or not self.q.sampling:
            return
        self.q.finish_step()
        means = self.q.mean
        for local, name in self.owned[module].items():
            own = module.get_parameter(local)
            state[prefix + local] = means[name].detach().to(own.dtype)

    def before_loading(self, *given: Any) -> None:
        """Hold the mean, so that what is not loaded is not taken for a draw."""
        if self.q is not None:
            self.q.finish_step()
            self.q.mean_()

    def after_loading(self, module: nn.Module, keys: Any) -> None:
        """Take what was loaded for the mean, where it is not the mean in the dtype of the parameter."""
        if self.q is None:
            return
        known, means = set(self.q.parameters_of_network), self.q.mean
        with torch.no_grad():
            for local, name in self.owned[module].items():
                p, m = module.get_parameter(local), means[name]
                if p not in known:
                    raise InputError(
                        f"Loading with assign=True has replaced the parameter {name}, so that neither the posterior "
                        "nor the optimizer moves it any more; load with assign=False, or make the posterior afterwards."
                    )
                m.copy_(torch.where(p == m.to(p.dtype), m, p.to(m.dtype)))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hooks":
        """Copy the hooks with their posterior; a network that is copied alone is any network, at the mean."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.q, copied.owned, copied.handles = None, {}, []
        if self.q is None:
            return copied
        average = _averaging()
        if average is not None:
            self.q.written.add(average)
        if id(self.q) in memo:
            copied.q, copied.owned = memo[id(self.q)], copy.deepcopy(self.owned, memo)
            return copied
        self.q.finish_step()
        with torch.no_grad():
            for p, m in zip(self.q.parameters_of_network, self.q.mean.values(), strict=True):
                alone = copy.deepcopy(p, memo)
                if self.q.sampling:
                    alone.copy_(m)
        return copied

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self.handles:
            handle.remove()
        self.q = None


def posterior_of(model: nn.Module) -> Held | None:
    """Find the posterior whose hooks a network has."""
    for hook in model._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Hooks) and owner.q is not None:
            return owner.q
    return None


def refuse_replaced(model: nn.Module, names: list[str], parameters: list[nn.Parameter]) -> None:
    """Refuse a network some of whose parameters are no longer those that its posterior is over."""
    own = set(map(id, model.parameters()))
    for name, p in zip(names, parameters, strict=True):
        if id(p) not in own:
            raise InputError(
                f"The parameter {name} that q is over is no part of the network any more: its layer was replaced or "
                "reparametrised. Change the network before torchngvi.network, or release() q and make a new one."
            )
