"""Exact expectations, of targets that know their own."""

from typing import final

from torchngvi.interfaces import Cost, Estimator, Expectation, Posterior, Target, TractableTarget


@final
class Quadrature(Estimator):
    """E_q[ℓ] as the target computes it; the derivative is that of the computed value.

    For generalised linear models a sum of scalar expectations, and the packet is `Sites`: per row
    α = ∂F/∂e and β = 2 ∂F/∂v, from which each posterior builds what it needs, a D x D curvature or
    less.
    """

    comparable = True
    needs = TractableTarget

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate at q."""
        assert isinstance(target, TractableTarget)
        value, derivative = target.expected_energy(q.frame())
        return Expectation(value, derivative, target.temperature, target.comparable, Cost(1, 1))
