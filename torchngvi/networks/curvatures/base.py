"""The interface of an estimator of the curvature: where in a step it looks, and at what."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.errors import PairError
from torchngvi.networks.families import Diagonal
from torchngvi.networks.posterior import NetworkGaussian


class Curvature:
    """An estimator of the expected curvature of the loss a datum; each sees the outputs and the gradients of a step.

    One overrides `after_forward` or `before_step`, and calls what q has to observe a curvature.

    Attributes:
        every: steps from one observation to the next.
        labels: in the outputs that were observed last, or None.
    """

    every = 1
    labels: int | None = None

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


class OfSingleWeights(Curvature):
    """An estimator of the diagonal alone, whose running curvature begins at the start, as published steps have it.

    Args:
        rate: ρ of the running curvature, larger than 0 and at most 1.

    Raises:
        InputError: for another rate.
    """

    def __init__(self, rate: float) -> None:
        self.rate = read_number("rate", rate, above=0, at_most=1)

    def begin(self, q: NetworkGaussian) -> None:
        """Let the curvature begin at its start; see the base class.

        Args:
            q: the posterior.

        Raises:
            PairError: a family that has no curvature of single weights.
        """
        for family in q.each():
            if not isinstance(family, Diagonal):
                raise PairError(
                    f"{type(self).__name__} observes the curvature of single weights; q has a {type(family).__name__} "
                    "family. Use SampledLabels, or structure='diagonal'."
                )
            if not q.observed:
                family.begin_()
        q.memory = 0
        q.refresh_()
