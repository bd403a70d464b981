"""Expectations of parts of the data in a form that adds up: over the batches of a file, and over processes.

A list of tensors: the value (*batch,), the derivative, and where the frame is differentiated the gradient of the value
in it.  The derivative is (g, H) for a dense q; for any other pattern it is (a, W) in the frame of q, so that nothing is
larger than q.
"""

from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import AdditiveTractable, Frame, Framed, Raw
from torchngvi.structures import Dense


def in_frame(model: AdditiveTractable, frame: Frame) -> bool:
    """Say whether the derivatives of a model's data are summed in the frame of q."""
    return model.prior_alone and not isinstance(frame.structure, Dense)


def differentiated(frame: Frame) -> bool:
    """Say whether a value at this frame is to be differentiable in it."""
    return torch.is_grad_enabled() and (frame.mean.requires_grad or frame.root.requires_grad)


def summands(model: AdditiveTractable, frame: Frame, framed: bool) -> list[Tensor]:
    """Evaluate the expectation of a model's data as tensors that add up."""
    if not differentiated(frame):
        value, derivative = model.data_energy(frame)
        return [value, *(derivative.framed(frame) if framed else derivative.raw())]
    mean, root = (part.detach().requires_grad_() for part in (frame.mean, frame.root))
    inner = Frame(mean, root, frame.structure, frame.upper)
    value, derivative = model.data_energy(inner)
    slopes = torch.autograd.grad(value.sum(), (mean, root), retain_graph=True, materialize_grads=True)
    packet = derivative.framed(inner) if framed else derivative.raw()
    return [part.detach() for part in (value, *packet, *slopes)]


def nothing(frame: Frame, framed: bool) -> list[Tensor]:
    """Make the summands of no rows: zeros."""
    mean, dim = frame.mean.detach(), frame.mean.shape[-1]
    matrix = torch.zeros_like(frame.root) if framed else mean.new_zeros(*mean.shape, dim)
    zeros = [mean.new_zeros(mean.shape[:-1]), torch.zeros_like(mean), matrix.detach()]
    return [*zeros, torch.zeros_like(mean), torch.zeros_like(frame.root)] if differentiated(frame) else zeros


def halved(parts: list[Tensor], framed: bool) -> list[Tensor]:
    """Leave out the upper half of the Hessian, which is symmetric."""
    if framed:
        return parts
    H = parts[2]
    low = torch.tril_indices(H.shape[-1], H.shape[-1], device=H.device)
    return [*parts[:2], H[..., low[0], low[1]], *parts[3:]]


def whole(parts: list[Tensor], framed: bool) -> list[Tensor]:
    """Undo `halved`: symmetric to the last bit."""
    if framed:
        return parts
    dim, half = parts[1].shape[-1], parts[2]
    low = torch.tril_indices(dim, dim, device=half.device)
    H = half.new_empty(*half.shape[:-1], dim, dim)
    H[..., low[0], low[1]] = half
    H[..., low[1], low[0]] = half
    return [*parts[:2], H, *parts[3:]]


def assembled(frame: Frame, parts: list[Tensor], framed: bool) -> tuple[Tensor, Raw | Framed]:
    """Make the value and its derivative of what was summed."""
    value, first, second, *slopes = parts
    if slopes:
        value = _Known.apply(value, slopes[0], slopes[1], frame.mean, frame.root)
    return value, Framed(first, second) if framed else Raw(first, second)


def with_prior(model: AdditiveTractable, frame: Frame, value: Tensor, derivative: Framed) -> tuple[Tensor, Framed]:
    """Add a Gaussian prior to an expectation of data that is summed in the frame of q."""
    prior = model.prior.scaled(model.temperature)
    a, W = derivative.a + frame.pull(prior.force(frame.mean)), derivative.W + prior.framed(frame)
    return value + model.temperature * model.prior.expected_energy(frame), Framed(a, W)


class _Known(torch.autograd.Function):
    """A value whose gradient in mean and root is known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slope: Tensor, turn: Tensor, mean: Tensor, root: Tensor) -> Tensor:
        ctx.save_for_backward(slope, turn)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[None, None, None, Tensor, Tensor]:
        refuse_second_derivatives()
        slope, turn = ctx.saved_tensors
        return None, None, None, *(weight[(...,) + (None,) * (x.ndim - weight.ndim)] * x for x in (slope, turn))


def refuse_second_derivatives() -> None:
    """Raise where a gradient that was summed is to be differentiated again, which would take it for a constant."""
    if torch.is_grad_enabled():
        raise InputError(
            "the gradient of an expectation that is summed over batches or processes is not differentiated again. Use "
            "Quadrature(), whose curvature is summed too."
        )
