"""The curvature from the squared gradients of single examples: the estimator of VOGN."""

from collections.abc import Mapping

import torch
from torch import Tensor

from torchngvi.distributed import average_over_ranks_
from torchngvi.errors import InputError
from torchngvi.networks.curvatures.base import OfSingleWeights
from torchngvi.networks.finite import all_finite, zero_where_
from torchngvi.networks.posterior import NetworkGaussian


class ExampleGradients(OfSingleWeights):
    """The empirical Fisher information by the gradients of single examples, ĥ = Σᵢ gᵢ²/B, with a rate of its own.

    One wants it to compare with VOGN (Khan et al. 2018; Osawa et al. 2019).  It needs B gradients of the size of the
    network at once, and networks whose examples do not meet, hence no batch normalisation.  `backward` takes the
    losses of the examples in the place of ``loss.backward()``.

    Args:
        rate: β of h ← (1 - β)h + βĥ, larger than 0 and at most 1.

    Raises:
        InputError: for another rate.

    >>> ExampleGradients(0.01).rate
    0.01
    """

    def __init__(self, rate: float = 1e-3) -> None:
        super().__init__(rate)
        self.squares: dict[str, Tensor] = {}

    def backward(self, q: NetworkGaussian, losses: Tensor) -> None:
        """Add the gradient of the mean loss to the parameters' gradients, and keep the mean of the squares.

        Args:
            q: the posterior.
            losses: one a row, with their graph, (B,).

        Raises:
            InputError: if the losses are no vector, or have no graph.
        """
        if not isinstance(losses, Tensor) or not losses.requires_grad:
            raise InputError(
                "losses are those of the single examples, with the graph of the outputs; got a "
                f'{type(losses).__name__} without a graph. Compute them with reduction="none", where gradients are '
                "recorded."
            )
        if losses.ndim != 1:
            raise InputError(
                f"losses are those of the single examples, (B,); got the shape {tuple(losses.shape)}. Compute them "
                'with reduction="none".'
            )
        trained = [p for p in q.parameters_of_network if p.requires_grad]
        each = torch.autograd.grad(
            losses,
            trained,
            torch.eye(len(losses), device="cpu").to(losses),
            is_grads_batched=True,
            materialize_grads=True,
        )
        gradients, squares = [g.mean(0) for g in each], [g.square().mean(0) for g in each]
        average_over_ranks_(gradients + squares)
        for p, g in zip(trained, gradients, strict=True):
            p.grad = g if p.grad is None else p.grad + g
        names = [name for name, p in zip(q.names, q.parameters_of_network, strict=True) if p.requires_grad]
        self.squares = dict(zip(names, squares, strict=True))

    def before_step(self, q: NetworkGaussian, gradients: Mapping[str, Tensor]) -> None:
        """Move every curvature towards the squares; see the base class.

        Raises:
            InputError: if `backward` was not called.
        """
        if not self.squares:
            raise InputError(
                "ExampleGradients needs the losses of single examples; call optimizer.backward(losses) in the place of "
                "loss.backward()."
            )
        squares = list(self.squares.values())
        good = all_finite(squares)
        rate = good.to(squares[0]) * self.rate
        zero_where_(squares, ~good)
        for family in q.each():
            each = [(self.squares.get(name), m) for name, m in zip(family.names, family.mean, strict=True)]
            family.absorb_([None if h is None else h.to(m) for h, m in each], rate)
        self.squares = {}
        q.observed += 1
