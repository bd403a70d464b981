"""Short name of `torchngvi.theory.wu2024`."""

from torchngvi.theory.wu2024 import *  # noqa: F403
from torchngvi.theory.wu2024 import __all__ as __all__
