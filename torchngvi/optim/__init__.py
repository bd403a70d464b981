"""The optimizer that applies a rule and a step size to a posterior; see `torchngvi.optim.optimizer`."""

from torchngvi.optim.captured import CapturedStep
from torchngvi.optim.optimizer import NaturalGradientVI
from torchngvi.optim.records import Evaluation, Heading, Report, Status
from torchngvi.optim.watching import Watch

__all__ = ["CapturedStep", "Evaluation", "Heading", "NaturalGradientVI", "Report", "Status", "Watch"]
