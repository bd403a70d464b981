"""Posteriors over the weights of any network, moved by any optimizer of torch."""

from torchngvi.networks.attached import Attachment, attach
from torchngvi.networks.calibration import Calibrated, calibrate
from torchngvi.networks.curvatures import Curvature, ExampleGradients, GradientNoise, Reparametrized, SampledLabels
from torchngvi.networks.laplace import LaplaceResult
from torchngvi.networks.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    OutputLikelihood,
)
from torchngvi.networks.posterior import NetworkGaussian, network
from torchngvi.networks.predictions import Predictive, log_prob, outputs, predictive
from torchngvi.networks.units import StepLength
from torchngvi.networks.von import IVON, VOGN, VON
from torchngvi.renamed import ChosenRadius as ChosenRadius
from torchngvi.renamed import choose_radius as choose_radius

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
    "log_prob",
    "network",
    "outputs",
    "predictive",
]
