"""What the network does by itself, so that no line of a training loop has to: hooks on its modules.

before a forward pass   a draw in training, the mean in evaluation
state_dict()            the mean
load_state_dict()       what was loaded becomes the mean
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Held(Protocol):
    """What the hooks need of a posterior over a network."""

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


class _AfterStateDict:
    """An object in the place of a method, on which torch can leave its mark."""

    def __init__(self, hooks: "Hooks") -> None:
        self.hooks = hooks

    def __call__(self, module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
        self.hooks.after_state_dict(module, state, prefix)


class Hooks:
    """The hooks of one posterior on one network.

    They sit on the network itself and on every module that owns one of the parameters, since a user may call or save a
    part alone.  The mode of the whole network decides, so that a normalisation in evaluation mode within a network in
    training sees the same draw as the rest.

    Args:
        q: the posterior.
    """

    def __init__(self, q: Held) -> None:
        self.q = q
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
        """Let the parameters hold what the mode of the network asks for.

        Args:
            module, arguments: as torch gives them.
        """
        self.q.settle(self.q.model.training)

    def after_state_dict(self, module: nn.Module, state: dict, prefix: str) -> None:
        """Put the means in the place of draws.

        Args:
            module, state, prefix: as torch gives them.
        """
        means = self.q.mean
        for local, name in self.owned[module].items():
            own = module.get_parameter(local)
            state[prefix + local] = means[name].detach().to(own.dtype)

    def before_loading(self, *given: Any) -> None:
        """Hold the mean, so that what is not loaded is not taken for a draw.

        Args:
            given: as torch gives them.
        """
        with torch.no_grad():
            self.q.mean_()

    def after_loading(self, module: nn.Module, keys: Any) -> None:
        """Take what was loaded for the mean.

        Args:
            module, keys: as torch gives them.
        """
        means = self.q.mean
        with torch.no_grad():
            for local, name in self.owned[module].items():
                means[name].copy_(module.get_parameter(local))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self.handles:
            handle.remove()


def posterior_of(model: nn.Module) -> Held | None:
    """Find the posterior whose hooks a network has.

    Args:
        model: the network.

    Returns:
        The posterior, or None.
    """
    for hook in model._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Hooks):
            return owner.q
    return None
