"""Models with many latents: Laplace's approximation of the integral over them, and what the data say of each.

`torchngvi.marginal` makes a log joint of the hyperparameters, which `torchngvi.fit` takes; see `marginal` here.  In
reading order: `sparsity` (which latents occur together), `chain` (factors of sparse matrices), `curvature`
(derivatives), `modes`, `laplace`, and `summary` and `error`, which follow a fit.
"""

from torchngvi.latents.laplace import MarginalLaplace, marginal
from torchngvi.latents.summary import LaplaceError, Latents

__all__ = ["LaplaceError", "Latents", "MarginalLaplace", "marginal"]
