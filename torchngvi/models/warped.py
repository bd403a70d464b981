"""A warp is a change of the target: what the Gaussian inside a warped posterior approximates."""

from typing import Any, final

from torch import Tensor

from torchngvi.arguments import read_instance
from torchngvi.interfaces import Target
from torchngvi.posteriors.warped import Warped


@final
class WarpedTarget(Target):
    """The log joint as a density of x, where θ = m + s w((x - m)/s; φ): that of θ plus γ Σ_i log w'(ξ_i; φ_i).

    What an examination of the base against it finds, k-hat and the ELBO among it, is true of the warped posterior.

    Args:
        target: the log joint of θ.
        q: the warped posterior, which is read at each call.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> target = WarpedTarget(LogJoint(lambda theta: -theta.square().sum(-1)), CholeskyGaussian(1).warped())
    >>> target.log_joint(torch.ones(1, 1)).tolist()  # the identity
    [-1.0]
    """

    def __init__(self, target: Target, q: Warped) -> None:
        read_instance("target", target, Target, "is a model or a LogJoint", other=q)
        read_instance("q", q, Warped, "is a warped posterior, such as CholeskyGaussian(2).warped()", other=target)
        self.target, self.q = target, q
        self.temperature, self.comparable, self.coupled = target.temperature, target.comparable, target.coupled
        self.draws_at_once, self.in_passes, self.batches = target.draws_at_once, target.in_passes, target.batches
        self.processes = target.processes

    def log_joint(self, theta: Tensor) -> Tensor:
        """Compute the log joint at the bent points, plus the log volume."""
        bent, log_volume = self.q.bent(theta)
        return self.target.log_joint(bent) + self.temperature * log_volume

    def outward(self, theta: Tensor) -> Tensor:
        """Map points x to the θ that they stand for."""
        return self.q.bent(theta)[0]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the log joint, if they are known, with those of the warp."""
        inner = self.target.tensors()
        return (*inner, *self.q.state_dict().values()) if inner else ()


def unwarped(q: Any, target: Target) -> tuple[Any, Target]:
    """Take a warped posterior and its target to the Gaussian inside and what that approximates; others stay.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = unwarped(CholeskyGaussian(1).warped(), LogJoint(lambda theta: -theta.square().sum(-1)))
    >>> type(q).__name__, type(target).__name__
    ('CholeskyGaussian', 'WarpedTarget')
    """
    return (q.base, WarpedTarget(target, q)) if isinstance(q, Warped) else (q, target)
