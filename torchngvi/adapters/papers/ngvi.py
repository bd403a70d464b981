"""Studies of one paper."""

from torchngvi.adapters.papers import Study

STUDIES: dict[str, Study] = {}
