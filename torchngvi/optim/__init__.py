"""The optimizer that applies a rule and a step size to a posterior; see `torchngvi.optim.optimizer`."""

from torchngvi.optim.captured import CapturedStep
from torchngvi.optim.evaluating import Evaluation, Heading, Report, Status, Watch
from torchngvi.optim.optimizer import NaturalGradientVI

__all__ = ["CapturedStep", "Evaluation", "Heading", "NaturalGradientVI", "Report", "Status", "Watch"]
