"""The last evaluation, for as long as neither q nor the target has changed."""

from typing import NamedTuple

from torchngvi.interfaces import Posterior, Target
from torchngvi.numerics.versions import Versions
from torchngvi.optim.records import Evaluation, Heading


class Cached(NamedTuple):
    """An evaluation with the way from there, and what both were computed from."""

    target: Target
    settings: tuple[object, ...]  # of the target, with its temperature
    versions: Versions  # of the tensors of the target and the coordinates of q
    evaluation: Evaluation
    heading: Heading

    def holds(self, target: Target, q: Posterior, wait: bool) -> bool:
        """Whether it is still that of this target at this q.

        Args:
            target: what is evaluated.
            q: the posterior as it is now.
            wait: for an accelerator, to compare the contents of tensors there too.
        """
        same = self.target == target and self.settings == settings(target)
        return same and self.versions.hold((*target.tensors(), *q.coordinates), wait)


def cached(target: Target, q: Posterior, evaluation: Evaluation, heading: Heading, before: Cached | None) -> Cached:
    """What is known at q as it is now; what the one before knows of unchanged tensors is taken over."""
    versions = Versions((*target.tensors(), *q.coordinates), None if before is None else before.versions)
    return Cached(target, settings(target), versions, evaluation, heading)


def settings(target: Target) -> tuple[object, ...]:
    """What of a target is no tensor and changes its value."""
    return target.temperature, *target.settings()
