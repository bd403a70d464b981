"""What other libraries make of a fitted mixed model: ArviZ's table of draws, and a picture on matplotlib's axes."""

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.mixed_models.table import Marginals
from torchngvi.models import Likelihood


def inference_data(
    values: Mapping[str, Tensor],  # draws, (S, ..)
    y: Tensor,  # (N,)
    coords: Mapping[str, Sequence[str]],
    dims: Mapping[str, list[str]],
) -> Any:
    """Make what ArviZ takes of joint draws, one chain with named dimensions."""
    arviz = _optional("arviz", "to_arviz")
    groups = {
        "posterior": {name: x[None].cpu().numpy() for name, x in values.items()},
        "observed_data": {"y": y.cpu().numpy()},
    }
    named = {"coords": {name: list(labels) for name, labels in coords.items()}, "dims": dict(dims)}
    if int(arviz.__version__.partition(".")[0]) < 1:
        return arviz.from_dict(**groups, **named)
    return arviz.from_dict(groups, **named)


def observed(likelihood: Likelihood, y: Tensor) -> Tensor:
    """The targets as they are exported: two classes, which a likelihood has as -1 and +1, as 0 and 1.

    >>> import torch
    >>> from torchngvi.models import BernoulliLogit
    >>> observed(BernoulliLogit(), torch.tensor([-1.0, 1.0]))
    tensor([0., 1.])
    """
    return 0.5 * (1 + y) if likelihood.discrete else y


def effect_number(effect: int | str, names: Sequence[str]) -> int:
    """Find a random effect by its number or its name.

    >>> effect_number("time", ["Intercept", "time"])
    1
    """
    if isinstance(effect, str) and effect in names:
        return list(names).index(effect)
    if isinstance(effect, str) or not 0 <= effect < len(names):
        raise InputError(
            f"effect is the number of a random effect, 0 to {len(names) - 1}, or one of the names "
            f"{', '.join(names)}; got {effect!r}."
        )
    return effect


def caterpillar(of: Marginals, name: str, ax: Any = None) -> Any:
    """Draw the effects of all groups in rising order, with intervals, on axes or on new ones."""
    if ax is None:
        ax = _optional("matplotlib.figure", "plot_effects").Figure(layout="constrained").add_subplot()
    order = of.mean.argsort()
    mean, low, high = (x[order].cpu().numpy() for x in (of.mean, of.low, of.high))
    places = range(len(mean))
    ax.hlines(places, low, high, color="0.6", linewidth=1)
    ax.plot(mean, places, "o", color="#1f5a94", markersize=3)
    ax.axvline(0.0, color="0.3", linewidth=0.8)
    ax.set_yticks(list(places) if len(mean) <= 40 else [], [of.names[k] for k in order] if len(mean) <= 40 else [])
    ax.set_xlabel(name)
    ax.set_ylabel("group")
    return ax


def _optional(module: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ImportError(f"{where} needs the library {name}: pip install {name}.") from error
