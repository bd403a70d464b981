"""Families: one log density each, log p(y | η, φ), with a link, a check of outcomes, priors of φ, and how y is drawn."""

from abc import ABC
from typing import ClassVar

from torch import Tensor


class Family(ABC):
    """The abstract base of families (see BRIEF46)."""

    name: ClassVar[str]
    link: ClassVar[str]
