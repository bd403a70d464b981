"""A list of guides in `NaturalSVI`: a Gaussian for one block of the latents, other guides of Pyro for the rest.

The loss is that of Trace_ELBO,

    mean_s [Σ_guides log q(x_s) - log p(data, x_s)],

of draws x from all guides in one run each, over which the log joint is evaluated as for one guide.
"""

from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGaussian as PyrosAutoGaussian
from pyro.infer.autoguide import AutoGuideList
from torch import Tensor

from torchngvi.adapters.pyro.density import ModelLogJoint
from torchngvi.adapters.pyro.fitting import check_guide
from torchngvi.adapters.pyro.guide import AutoGaussian
from torchngvi.adapters.pyro.sites import random_sites
from torchngvi.adapters.pyro.starting import listed
from torchngvi.errors import InputError

_PLATE = "_torchngvi_particles"


def gaussian_of(guide: AutoGuideList) -> AutoGaussian:
    """The one guide of a list that follows natural gradients."""
    found = [part for part in guide.modules() if isinstance(part, AutoGaussian)]
    for part in guide.modules():
        if not found and isinstance(part, PyrosAutoGaussian):
            check_guide(part, steps=True)
    if len(found) != 1:
        raise InputError(
            f"NaturalSVI moves one AutoGaussian of a list of guides, and this list has {len(found)}. Put the sites of "
            "all of them into one, or step an optimizer of torchngvi on each after Trace_ELBO()(model, guide)."
        )
    return found[0]


class ListedGuides:
    """The loss of a list of guides, evaluated for a number of draws at once."""

    def __init__(
        self, model: Callable[..., Any], guide: AutoGuideList, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.guide, self.density = guide, ModelLogJoint(model, args, kwargs)
        with torch.no_grad():
            trace = self._trace(2)
        missing = [name for name in self.density.layout.shapes if name not in trace.nodes]
        if missing:
            raise InputError(
                f"the guides of the list leave out the latent sites {listed(missing)}. Append a guide for them, "
                "AutoNormal(poutine.block(model, expose=[...])) for one."
            )

    def _trace(self, count: int) -> poutine.Trace:
        with pyro.validation_enabled(False):
            plate = pyro.plate(_PLATE, count, dim=-1 - self.density.nesting)
            return poutine.trace(plate(self.guide)).get_trace(*self.density.args, **self.density.kwargs)

    def loss(self, count: int) -> Tensor:
        """The loss at a number of draws, 0-d, differentiable in the probes of q and in all parameters."""
        trace, layout = self._trace(count), self.density.layout
        with pyro.validation_enabled(False):
            trace.compute_log_prob()
        log_q = torch.stack(
            [
                site["log_prob"].expand(count, *site["log_prob"].shape[1:]).reshape(count, -1).sum(-1)
                for site in random_sites(trace)
            ]
        ).sum(0)
        nodes: Any = trace.nodes
        values = {name: nodes[name]["value"].reshape(count, *shape) for name, shape in layout.shapes.items()}
        theta = layout.unconstrained(values)
        log_p = self.density.log_joint(theta) - layout.constrained(theta)[1]  # of the constrained values
        return (log_q - log_p).mean()
