"""GPyTorch: natural-gradient steps for the inducing values of an `ApproximateGP`.

Two ways.  A variational distribution that any strategy and objective take, for the usual loop
(`NaturalGradientVariationalDistribution`, `natural_optimizer`); and, for the whitened strategy, alone or of
several tasks or latent functions, steps from the derivatives of each datum, without autograd through a
factor of the covariance (`SparseGP`, `train_svgp`, `train_svgp_in_batches`, `refine_svgp`).
"""

from torchngvi.messages import needing

with needing("torchngvi.adapters.gpytorch", "gpytorch"):
    from torchngvi.adapters.gpytorch.conditioning import (
        FantasizingModel,
        condition,
        fantasize,
        forget,
        predict_with_neighbours,
    )
    from torchngvi.adapters.gpytorch.distribution import NaturalGradientVariationalDistribution, variational_posteriors
    from torchngvi.adapters.gpytorch.optimizer import natural_optimizer
    from torchngvi.adapters.gpytorch.sparse_gp import SparseGP
    from torchngvi.adapters.gpytorch.training import (
        TrainingResult,
        refine_svgp,
        train_mll,
        train_svgp,
        train_svgp_in_batches,
    )

__all__ = [
    "FantasizingModel",
    "NaturalGradientVariationalDistribution",
    "SparseGP",
    "TrainingResult",
    "condition",
    "fantasize",
    "forget",
    "natural_optimizer",
    "predict_with_neighbours",
    "refine_svgp",
    "train_mll",
    "train_svgp",
    "train_svgp_in_batches",
    "variational_posteriors",
]
