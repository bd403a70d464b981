"""Packets from ``loss.backward()``: the probes of a posterior hold the gradient of any loss in its frame."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Cost, Expectation, Framed, Posterior
from torchngvi.optim.records import Evaluation


def check_filled(posteriors: Sequence[Posterior]) -> None:
    """Check that a backward pass has reached every posterior."""
    if any(_empty(q) for q in posteriors):
        raise InputError(
            "the posterior has no gradient, and each step uses up those it read: compute a loss from q.rsample(), "
            "q.log_prob(), q.entropy() or model.negative_elbo(q), call loss.backward(), then step()."
        )


def evaluated(
    closure: Callable[[], Tensor], posteriors: Sequence[Posterior], scales: Sequence[float]
) -> list[Evaluation]:
    """Evaluate a closure, and read the gradient of each posterior from its probes."""
    for q in posteriors:
        q.drop_gradients()
    with torch.enable_grad():
        loss = closure()
        if not isinstance(loss, Tensor):
            raise InputError(f"the closure must return the loss, a tensor; got {type(loss).__name__}.")
        if loss.ndim and loss.shape not in {q.batch_shape for q in posteriors}:
            raise InputError(
                f"the closure must return one loss, or one of each posterior of a batch; got shape "
                f"{tuple(loss.shape)}. Average over the draws: loss.mean(0)."
            )
        if all(map(_empty, posteriors)):
            if not loss.requires_grad:
                raise InputError("the closure's loss does not depend on the posterior: it has no gradient.")
            loss.sum().backward()
    packets = [packet(q, loss.detach(), scale) for q, scale in zip(posteriors, scales, strict=True)]
    return [Evaluation(e.value, e) for e in packets]


def packet(q: Posterior, loss: Tensor, scale: float) -> Expectation:
    """The derivative of a whole loss, entropy included, from the gradients in the probes of q, which are used up."""
    a, R = (torch.zeros_like(p) if p.grad is None else p.grad * scale for p in (q.mean_probe, q.root_probe))
    q.drop_gradients()
    W = q.structure.one_sided(R) + q.structure.eye(a)
    return Expectation(loss * scale, Framed(a, W), 1.0, True, Cost(1, 0))


def check_one_loss_each(loss: Tensor, q: Posterior) -> None:
    """Check that a closure returns one loss for each batch member, as a step found by trial needs it."""
    if loss.shape != q.batch_shape:
        raise InputError(
            f"to judge each of the {tuple(q.batch_shape)} posteriors the closure must return one loss each; "
            f"got shape {tuple(loss.shape)}. Return the losses unsummed, or pass lr=."
        )


def _empty(q: Posterior) -> bool:
    return q.mean_probe.grad is None and q.root_probe.grad is None
