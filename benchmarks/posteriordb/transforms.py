"""From unconstrained numbers to constrained parameters: those of torch, and the ordered vectors, which it lacks."""

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.transforms import (
    ExpTransform,
    IndependentTransform,
    SigmoidTransform,
    StickBreakingTransform,
    Transform,
    identity_transform,
)
from torch.nn.functional import softplus

Parameter = tuple[Transform, tuple[int, ...]]  # from the real numbers, and the shape of the result


class Ordered(Transform):
    """Increasing vectors: the sums of steps e^xₖ, of which the first is x₁ itself where it may be negative."""

    domain = codomain = constraints.real_vector
    bijective = True

    def __init__(self, positive: bool = False) -> None:
        super().__init__()
        self.free = 0 if positive else 1  # leading steps of either sign

    def _call(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., : self.free], x[..., self.free :].exp()], -1).cumsum(-1)

    def _inverse(self, y: Tensor) -> Tensor:
        steps = torch.cat([y[..., :1], y.diff(dim=-1)], -1)
        return torch.cat([steps[..., : self.free], steps[..., self.free :].log()], -1)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return x[..., self.free :].sum(-1)


class Simplex(StickBreakingTransform):
    """torch's, its log Jacobian by softplus: the Hessian of logsigmoid under vmap warns in torch 2.13."""

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        x = x - torch.arange(x.shape[-1], 0, -1, dtype=x.dtype).log()
        return (y[..., :-1].log() - x - softplus(-x)).sum(-1)


def real(*shape: int) -> Parameter:
    return _each(identity_transform, shape)


def positive(*shape: int) -> Parameter:
    return _each(ExpTransform(), shape)


def unit_interval(*shape: int) -> Parameter:
    return _each(SigmoidTransform(), shape)


def simplex(size: int) -> Parameter:
    return Simplex(), (size,)


def ordered(size: int) -> Parameter:
    return Ordered(), (size,)


def positive_ordered(size: int) -> Parameter:
    return Ordered(positive=True), (size,)


def _each(transform: Transform, shape: tuple[int, ...]) -> Parameter:
    return IndependentTransform(transform, len(shape)), shape
