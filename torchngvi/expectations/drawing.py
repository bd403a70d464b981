"""What every estimator that draws has in common: how many draws, in which pairs, and from where."""

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Estimator


class Drawing(Estimator):
    """An estimator from standard normal draws: abstract, see `Stein` and `MonteCarlo`.

    Args:
        num_samples: S, even when antithetic.
        antithetic: draw z and -z.
        generator: of the draws; its state is saved with the optimizer.

    Raises:
        InputError: a number of samples that is not positive, or odd when antithetic.
    """

    comparable = False

    def __init__(
        self, num_samples: int = 16, *, antithetic: bool = True, generator: torch.Generator | None = None
    ) -> None:
        if num_samples < 1 or (antithetic and num_samples % 2):
            rule = "even, since the draws come in antithetic pairs" if antithetic else "at least 1"
            raise InputError(f"num_samples must be {rule}; got {num_samples}.")
        self.num_samples, self.antithetic, self.generator = num_samples, antithetic, generator

    def draw(self, like: Tensor) -> Tensor:
        """z, (S, *like.shape)."""
        count = self.num_samples // 2 if self.antithetic else self.num_samples
        z = torch.randn((count, *like.shape), dtype=like.dtype, device=like.device, generator=self.generator)
        return torch.cat([z, -z]) if self.antithetic else z
