"""Newton's method on the bound, as a method by name."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torchngvi.interfaces import Posterior, Rule
from torchngvi.methods.gaussian import Method
from torchngvi.rules import RootNewton
from torchngvi.stepsizes import Backtracking


class NewtonCG(Method):
    """Newton's method in the mean and the root, (m, C), by conjugate gradients, with backtracking.

    In these coordinates the bound of a log-concave model is convex, and its Hessian products need no expectation beside
    those of an evaluation.  It is the default of `torchngvi.fit` for generalised linear models of moderate size; one
    wants it wherever expectations are exact, and evaluations, not products of matrices, are dear.  The arguments are
    those of `Method`; without lr and step_size, steps are found by `Backtracking`.

    Raises:
        PairError: a posterior over a structure without all products, such as an arrow.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> from torchngvi.models import GeneralizedLinear
    >>> q = CholeskyGaussian(1, dtype=torch.float64)
    >>> model = GeneralizedLinear(torch.ones(3, 1, dtype=torch.float64), [0.0, 1.0, 1.0])
    >>> opt = NewtonCG(q)
    >>> losses = [opt.step(model).item() for _ in range(4)]
    >>> bool(opt.evaluate(model).norm2 < 1e-10)
    True
    """

    def __init__(self, posterior: Posterior | Iterable[Any], lr: float | Tensor | None = None, **parts: Any) -> None:
        if lr is None and parts.get("step_size") is None:
            parts["step_size"] = Backtracking()
        super().__init__(posterior, lr, **parts)

    @staticmethod
    def rule_for(posterior: Posterior | Iterable[Any]) -> Rule:
        """The rule is `RootNewton`."""
        return RootNewton()
