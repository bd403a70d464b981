"""The last evaluation, for as long as neither q nor the target has changed."""

from typing import NamedTuple

from torchngvi.interfaces import Posterior, Target
from torchngvi.numerics.versions import Versions
from torchngvi.optim.records import Evaluation, Heading


class Cached(NamedTuple):
    """The last evaluation with the path from there, and everything that both were computed from."""

    target: Target
    settings: tuple[object, ...]  # of the target, with its temperature
    versions: Versions  # of the tensors of the target and the coordinates of q
    evaluation: Evaluation
    heading: Heading

    def holds(self, target: Target, q: Posterior, wait: bool, contents: bool = True) -> bool:
        """Whether the kept evaluation is still that of this target at this q."""
        same = self.target == target and self.settings == settings(target)
        return same and self.versions.hold((*target.tensors(), *q.coordinates), wait, contents)


def cached(target: Target, q: Posterior, evaluation: Evaluation, heading: Heading, before: Cached | None) -> Cached:
    """The record of an evaluation at q as it is now, to be asked by the next step."""
    versions = Versions((*target.tensors(), *q.coordinates), None if before is None else before.versions)
    return Cached(target, settings(target), versions, evaluation, heading)


def settings(target: Target) -> tuple[object, ...]:
    """The values beside its tensors on which a target depends: its temperature and its settings."""
    return target.temperature, *target.settings()
