"""Posteriors over the weights of any network, moved by any optimizer of torch."""

from typing import Any

from torchngvi.networks.attached import Attachment, attach
from torchngvi.networks.curvatures import Curvature, ExampleGradients, GradientNoise, Reparametrized, SampledLabels
from torchngvi.networks.laplace import LaplaceResult, Predictive
from torchngvi.networks.layout import StepLength
from torchngvi.networks.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, OutputLikelihood
from torchngvi.networks.posterior import Calibrated, NetworkGaussian, calibrate, network
from torchngvi.networks.von import IVON, VOGN, VON
from torchngvi.renamed import ChosenRadius as ChosenRadius
from torchngvi.renamed import choose_radius as choose_radius
from torchngvi.renamed import find_method

__all__ = [
    "IVON",
    "VOGN",
    "VON",
    "Attachment",
    "Bernoulli",
    "Calibrated",
    "Categorical",
    "Curvature",
    "ExampleGradients",
    "Gaussian",
    "GradientNoise",
    "HeteroscedasticGaussian",
    "LaplaceResult",
    "NetworkGaussian",
    "OutputLikelihood",
    "Predictive",
    "Reparametrized",
    "SampledLabels",
    "StepLength",
    "attach",
    "calibrate",
    "network",
]


def __getattr__(name: str) -> Any:
    """Find the functions that are methods of `NetworkGaussian` now."""
    return find_method(__name__, name)
