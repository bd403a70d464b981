"""Pyro: our posteriors as guides, the log joints of its models as targets.

    fit_guide(model, guide, *args)      a converged guide, nothing to tune
    AutoLocalGaussian(model, "plate")   the guide for local latents in a subsampled plate
    AutoProduct(model)                  the guide for rates, shares, classes: each site in a family of its own
    NaturalSVI(model, guide, optim)     step by step, for mini-batches and for models with parameters
    Trace_ELBO()(model, guide)          with one of our optimizers on guide.posterior
    centred(model, *args)               the model in the coordinates that a Gaussian fits best
    log_joint(model, *args)             the density alone, for any of our optimizers

>>> import pyro
>>> import pyro.distributions as dist
>>> import torch
>>> def model(y):
...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
...     with pyro.plate("data", len(y)):
...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
>>> y = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
>>> guide = AutoGaussian(model)
>>> fit_guide(model, guide, y, options={"progress": False}).converged
True
>>> round(guide.median()["mu"].item(), 2)  # 6 / (3 + 1)
1.5
"""

from torchngvi.messages import needing

with needing("torchngvi.adapters.pyro", "pyro"):
    from torchngvi.adapters.pyro.density import ModelLogJoint, log_joint
    from torchngvi.adapters.pyro.fitting import Centred, centred, fit_guide
    from torchngvi.adapters.pyro.guide import AutoGaussian, LatentGaussian
    from torchngvi.adapters.pyro.local_guide import AutoLocalGaussian
    from torchngvi.adapters.pyro.marginal import AutoMarginal
    from torchngvi.adapters.pyro.product import AutoProduct
    from torchngvi.adapters.pyro.svi import NaturalSVI

__all__ = [
    "AutoGaussian",
    "AutoLocalGaussian",
    "AutoMarginal",
    "AutoProduct",
    "Centred",
    "LatentGaussian",
    "ModelLogJoint",
    "NaturalSVI",
    "centred",
    "fit_guide",
    "log_joint",
]
