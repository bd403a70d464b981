"""A user's script with GPyTorch and Pyro, checked as it stands by ``mypy --strict``."""

import gpytorch
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from torchngvi.adapters.gpytorch import refine_svgp, train_svgp
from torchngvi.adapters.pyro import AutoGaussian, fit_guide


def of_a_process(model: gpytorch.models.ApproximateGP, x: Tensor, y: Tensor) -> bool:
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    result = train_svgp(model, likelihood, (x, y), progress=False)
    refined = refine_svgp(model, likelihood, [(x, y)], progress=False)
    return result.converged and refined.converged


def bioassay(dose: Tensor, died: Tensor | None = None) -> None:
    a = pyro.sample("a", dist.Normal(torch.zeros(()), 5))
    b = pyro.sample("b", dist.Normal(torch.zeros(()), 5))
    with pyro.plate("animals", len(dose)):
        pyro.sample("died", dist.Bernoulli(logits=a + b * dose), obs=died)


def of_a_guide(dose: Tensor, died: Tensor) -> tuple[bool, Tensor]:
    guide = AutoGaussian(bioassay)
    result = fit_guide(bioassay, guide, dose, died, options={"progress": False})
    return result.converged, guide.posterior.mean
