"""What a model says of data that it was not fitted to: log densities of rows, or groups, each without itself."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LeftOut:
    """Log predictive densities, each of a part of the data under the posterior of all other parts: abstract.

    Attributes:
        density: log p(y_i | the others), (N,), in nats.
        in_sample: log p(y_i | all), (N,).
        resolved: of which parts the posterior without them was found by a fit, (N,).
        evaluations: of those fits.
    """

    density: Tensor  # (N,)
    in_sample: Tensor  # (N,)
    resolved: Tensor  # (N,)
    evaluations: int

    parts = "rows"

    @property
    def total(self) -> float:
        """The sum of the log densities, elpd, in nats."""
        return float(self.density.sum())

    @property
    def standard_error(self) -> float:
        """The standard error of the sum over parts like these, √(N var); NaN of one part."""
        if len(self.density) < 2:
            return math.nan
        return math.sqrt(len(self.density) * float(self.density.var()))

    @property
    def complexity(self) -> float:
        """The effective number of parameters, p_loo: by how much the parts are better known in sample."""
        return float((self.in_sample - self.density).sum())

    def __str__(self) -> str:
        again, what = int(self.resolved.sum()), self.parts
        text = f"elpd {self.total:.2f} ± {self.standard_error:.2f} nats over {len(self.density)} {what}"
        return f"{text}, p_loo {self.complexity:.2f}; {again} of them by a fit without the {what.removesuffix('s')}."

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"
