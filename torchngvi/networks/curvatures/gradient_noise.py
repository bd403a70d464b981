"""The curvature from the noise of the gradients at hand: no further pass, and a bias."""

from collections.abc import Mapping

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.errors import PairError
from torchngvi.networks.curvatures.base import Curvature
from torchngvi.networks.posterior import NetworkGaussian

_WINDOW = 1000  # steps that the running mean looks back on


class GradientNoise(Curvature):
    """The empirical Fisher from the user's own gradients: ĥ = B (g - ḡ)²/(1 + (1 - β)/(1 + β)).

    ḡ is the running mean of the gradients before this step, and the divisor is its share in the variance for white
    noise.  It costs no pass, and is the empirical Fisher information instead of the Fisher information: where the data
    are fitted well it is too small, and q too wide.  Gradient clipping changes it.

    Args:
        batch_size: the number B of independent labels in the mean loss of a step.
        beta: β of the running mean, at least 0 and less than 1.

    Raises:
        InputError: for a batch size less than 1 or another beta.

    >>> GradientNoise(batch_size=32).beta
    0.9
    """

    def __init__(self, batch_size: int, beta: float = 0.9) -> None:
        what = "is the number of labels in the loss of a step"
        self.batch_size = read_number("batch_size", batch_size, what, at_least=1)
        self.beta = read_number("beta", beta, at_least=0, below=1)
        self.labels = int(self.batch_size)
        self.running: dict[str, Tensor] = {}

    def begin(self, q: NetworkGaussian) -> None:
        """Look whether the mean gradient is enough for q; see the base class."""
        if any(family.single for family in q.each()):
            raise PairError(
                "GradientNoise observes the gradient of the mean loss, and the dense family of q needs those of single "
                "labels. Use SampledLabels, or another structure."
            )

    def before_step(self, q: NetworkGaussian, gradients: Mapping[str, Tensor]) -> None:
        """Observe the squared distance from the running mean; see the base class."""
        inflated = 1 + (1 - self.beta) / (1 + self.beta)
        found: dict[str, Tensor] = {}
        for (name, m), p in zip(q.mean.items(), q.parameters_of_network, strict=True):
            if p.requires_grad:
                found[name] = gradients[name].to(m) if name in gradients else torch.zeros_like(m)
        known = {name: g for name, g in found.items() if name in self.running}
        if known:
            noise = [known[name] - self.running[name] if name in known else None for name in q.names]
            q.observe_(noise, self.batch_size / inflated, 1 / _WINDOW)
        for name, g in found.items():
            if name in known:
                self.running[name].lerp_(g, 1 - self.beta)
            else:  # the first gradient only starts the mean
                self.running[name] = g.clone()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the running means by name."""
        return dict(self.running)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take running means up again.

        Args:
            state: what `state_dict` returned.
        """
        self.running = {name: torch.as_tensor(g).clone() for name, g in state.items()}
