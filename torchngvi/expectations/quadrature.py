"""Exact expectations, for targets that know their own."""

from typing import final

from torchngvi.interfaces import Cost, Estimator, Expectation, Posterior, Target, TractableTarget


@final
class Quadrature(Estimator):
    """E_q[ℓ] and its derivative as the target computes them, without draws: the default where the target knows them.

    For generalised linear models E_q[ℓ] is a sum of scalar expectations, and the packet is `Sites`: for each row α =
    ∂F/∂e and β = 2 ∂F/∂v, from which each posterior builds what it needs, a D x D curvature or less.  The derivative is
    that of the computed value, so that steps can be found by trial.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> q = CholeskyGaussian(1)
    >>> model = GeneralizedLinear(torch.ones(1, 1), [2.0], "gaussian")  # y = 2 with noise 1, prior N(0, 1)
    >>> e = Quadrature()(q, model)
    >>> e.derivative.raw().g.item(), e.derivative.raw().H.item()  # -2, and 1 of the data with 1 of the prior
    (-2.0, 2.0)
    """

    comparable = True
    needs = TractableTarget

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate E_q[ℓ] and its derivative at q, as the target gives them."""
        assert isinstance(target, TractableTarget)
        value, derivative = target.expected_energy(q.frame())
        return Expectation(value, derivative, target.temperature, target.comparable, Cost(1, 1))
