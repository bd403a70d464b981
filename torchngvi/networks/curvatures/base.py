"""The interface of an estimator of the curvature: where in a step it looks, and at what."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchngvi.networks.posterior import NetworkGaussian


class Curvature:
    """An estimator of the expected curvature of the loss a datum; each sees the outputs and the gradients of a step.

    One overrides `after_forward` or `before_step`, and calls what q has to observe a curvature.
    """

    def begin(self, q: NetworkGaussian) -> None:
        """Prepare q for this estimator, once, when the optimizer is attached.

        Args:
            q: the posterior.
        """

    def after_forward(self, q: NetworkGaussian, output: Any) -> None:
        """Look at the output of the network in training, with its graph.

        Args:
            q: the posterior, whose parameters hold the draw of this step.
            output: what the network returned.
        """

    def before_step(self, q: NetworkGaussian, gradients: Mapping[str, Tensor]) -> None:
        """Look at the gradients of the loss at the draw, before the optimizer steps.

        Args:
            q: the posterior.
            gradients: by name, without the prior's part, unscaled and finite.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what the estimator remembers from step to step, beside q: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up again what was remembered.

        Args:
            state: what `state_dict` returned.
        """
