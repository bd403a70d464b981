"""Models with many latents: Laplace's approximation of the integral over them, and what the data say of each.

`torchngvi.marginal` makes a log joint of the hyperparameters, which `torchngvi.fit` takes; see `marginal` here.  In
reading order: `modes` (factors of sparse matrices, derivatives, the modes), `laplace` (which latents occur together,
and the integral over them), `quadrature` (where no two of them do), and `summary`, which follows a fit.
"""

from torchngvi.latents.laplace import MarginalLaplace, marginal
from torchngvi.latents.summary import LaplaceError, Latents

__all__ = ["LaplaceError", "Latents", "MarginalLaplace", "marginal"]
