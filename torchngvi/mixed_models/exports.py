"""What other libraries make of a fitted mixed model: ArviZ's table of draws, and a picture on matplotlib's axes."""

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from torchngvi.mixed_models.table import Marginals


def inference_data(
    values: Mapping[str, Tensor],  # draws, (S, ..)
    y: Tensor,  # (N,)
    fixed: Sequence[str],
    random: Sequence[str],
    groups: Sequence[str],
) -> Any:
    """Make an ``arviz.InferenceData`` of joint draws, one chain with named dimensions.

    Raises:
        ImportError: without ArviZ.
    """
    arviz = _optional("arviz", "to_arviz")
    return arviz.from_dict(
        posterior={name: x[None].cpu().numpy() for name, x in values.items()},
        observed_data={"y": y.cpu().numpy()},
        coords={
            "fixed": list(fixed),
            "random": list(random),
            "random_bis": list(random),
            "group": list(groups),
        },
        dims={
            "beta": ["fixed"],
            "sd": ["random"],
            "correlation": ["random", "random_bis"],
            "b": ["group", "random"],
            "y": ["row"],
        },
    )


def caterpillar(of: Marginals, name: str, ax: Any = None) -> Any:
    """Draw the effects of all groups in rising order, with intervals, on axes or on new ones.

    Raises:
        ImportError: without matplotlib.
    """
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
