"""How the curvature of the loss is observed, one file each."""

from torchngvi.networks.curvatures.base import Curvature
from torchngvi.networks.curvatures.example_gradients import ExampleGradients
from torchngvi.networks.curvatures.gradient_noise import GradientNoise
from torchngvi.networks.curvatures.reparametrized import Reparametrized
from torchngvi.networks.curvatures.sampled_labels import SampledLabels

__all__ = ["Curvature", "ExampleGradients", "GradientNoise", "Reparametrized", "SampledLabels"]
