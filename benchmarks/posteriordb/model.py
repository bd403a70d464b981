"""A model: parameters with their supports, and the log density of data and parameters."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .transforms import Parameter

Values = dict[str, Tensor]  # by name, each (..., *shape)


def as_given(values: Values) -> Values:
    return values


@dataclass(frozen=True, eq=False)
class Model:
    """log p(data, θ) over unconstrained θ (..., D), the parameters one after the other, the log Jacobian included."""

    parameters: dict[str, Parameter]
    log_density: Callable[[Values], Tensor]  # of the constrained parameters
    report: Callable[[Values], Values] = as_given  # parameters to the quantities that are published
    recover: Callable[[Values], Values] = as_given  # and back

    @property
    def dim(self) -> int:
        return sum(math.prod(shape) for shape in self._unconstrained_shapes())

    def log_joint(self, theta: Tensor) -> Tensor:
        """(..., D) -> (...)."""
        parameters, log_jacobian = self._transformed(theta)
        return self.log_density(parameters) + log_jacobian

    def constrain(self, theta: Tensor) -> Values:
        return self.report(self._transformed(theta)[0])

    def unconstrain(self, values: Values) -> Tensor:
        """The θ (..., D) of which `constrain` gives these values."""
        values, blocks = self.recover(values), []
        for name, (transform, shape) in self.parameters.items():
            x = transform.inv(values[name])
            blocks.append(x if shape else x.unsqueeze(-1))
        return torch.cat(blocks, -1)

    def _transformed(self, theta: Tensor) -> tuple[Values, Tensor]:
        """The constrained parameters, and log |det ∂ parameters / ∂ θ|."""
        shapes = self._unconstrained_shapes()
        blocks = theta.split([math.prod(shape) for shape in shapes], -1)
        parameters, log_jacobian = {}, theta.new_zeros(theta.shape[:-1])
        for (name, (transform, _)), block, shape in zip(self.parameters.items(), blocks, shapes, strict=True):
            x = block.reshape(theta.shape[:-1] + shape)
            parameters[name] = transform(x)
            log_jacobian = log_jacobian + transform.log_abs_det_jacobian(x, parameters[name])
        return parameters, log_jacobian

    def _unconstrained_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(transform.inverse_shape(shape)) for transform, shape in self.parameters.values()]
