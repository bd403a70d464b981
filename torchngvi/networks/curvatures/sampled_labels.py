"""The curvature from labels that the network itself predicts: ĥ = B ĝ² with E[ĥ] the mean Gauss-Newton diagonal."""

import warnings
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from torchngvi.distributed import rank
from torchngvi.errors import InputError
from torchngvi.networks.curvatures.base import Curvature
from torchngvi.networks.gradients import of_labels
from torchngvi.networks.noise import generator
from torchngvi.networks.posterior import NetworkGaussian
from torchngvi.networks.predictions import check_function, tensor_by, tensor_in

_HALF_SCALE = 1024.0  # keeps gradients of half precision from vanishing
_WINDOW = 100  # observations that the running mean looks back on


class SampledLabels(Curvature):
    """The Gauss-Newton curvature by one more backward pass, every few steps, on labels drawn from the predictions.

    With B labels drawn from p(y | output) and ĝ the gradient of their mean loss, E[B ĝĝᵀ] is the mean generalised
    Gauss-Newton matrix of the batch, the Fisher information of the network, since the scores of different labels are
    uncorrelated.  It needs no gradient of single data and does not depend on the labels of the user, nor on clipping
    or scaling of the user's gradients.  One wants it by default: at the same cost its error is a tenth of that of the
    reparametrised estimator of IVON.

    Args:
        every: forward passes in training from one observation to the next, 1 or more.
        output: where the logits or means are in what the network returns; by default the output itself, or its entry
            ``logits``.

    Raises:
        InputError: if `every` is no integer, or less than 1, or `output` is no function.

    >>> SampledLabels(every=5).every
    5
    """

    def __init__(self, every: int = 10, output: Callable[[Any], Tensor] | None = None) -> None:
        if isinstance(every, bool) or not isinstance(every, int | Integral) or every < 1:
            raise InputError(
                f"every is the number of steps from one observation to the next, 1 or more; got {every!r}."
            )
        self.every = int(every)
        self.output = None if output is None else check_function(output, "output")
        self._warned: bool = False

    def after_forward(self, q: NetworkGaussian, output: Any) -> None:
        """Draw labels and observe the square of their gradient, on steps that want it; see the base class."""
        if q.draw % self.every or not torch.is_grad_enabled():
            return
        outputs = _outputs(output) if self.output is None else tensor_by(self.output, output, "output")
        if not outputs.requires_grad:
            return
        if torch._C._functorch.is_functorch_wrapped_tensor(outputs):
            raise InputError(
                "The network is called under a transform of torch.func (grad, vmap or another one) in training, within "
                "which SampledLabels cannot pass back through its outputs. Call loss.backward() outside of it; or take "
                "curvature=GradientNoise(batch_size), which needs the gradients alone; or call the network within "
                "`with q.at_mean():` or after model.eval(), where it holds the mean."
            )
        labels = generator(outputs.device, q.seed, q.draw, f"labels of rank {rank()}")
        with torch.autocast(outputs.device.type, enabled=False):
            losses = q.likelihood.sampled_losses(outputs, labels)
        self.labels = losses.numel()
        self._warn_of_many(self.labels, q.num_data)
        scale = _HALF_SCALE if outputs.dtype == torch.float16 else 1.0
        gradients: dict[Tensor, Tensor] = {}
        for single in (False, True):
            of_kind = [p for f in q.each() if f.single == single for p in f.parameters_of_network if p.requires_grad]
            if of_kind:
                gradients |= zip(of_kind, of_labels(losses, of_kind, single, scale), strict=True)
        each = [gradients.get(p) for p in q.parameters_of_network]
        q.observe_(each, losses.numel() / scale**2, 1 / _WINDOW)

    def _warn_of_many(self, count: int, num_data: int) -> None:
        """Say once that a batch has more labels than all data are said to have."""
        if count <= num_data or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"A batch has {count:,} labels, more than num_data={num_data:,}, so that the prior counts too much and the "
            "posterior is too wide. num_data is the number of labels in the training data, not of batches: every token "
            "counts, and every pixel of an image of labels.",
            UserWarning,
            stacklevel=2,
        )

    def before_step(self, q: NetworkGaussian, gradients: Mapping[str, Tensor]) -> None:
        """Notice that the outputs were never seen; see the base class.

        Raises:
            InputError: if they were not.
        """
        if gradients and not q.observed and q.draw % self.every == 0:
            raise InputError(
                "SampledLabels has not seen the outputs of the network in training, which its forward hook looks at: "
                "call the network that q was made of, model(x), in training mode, and not model.forward(x) or a part "
                "of it; or make q of the module that is called. A function output= must keep the graph, "
                "which detach() and argmax() cut."
            )


def _outputs(output: Any) -> Tensor:
    """The tensor of outputs in what a network returned."""
    return tensor_in(output, "SampledLabels(output=lambda returned: returned[0])")
