"""Exact expectations of models whose likelihood sees θ through one-dimensional predictors."""

from typing import final

from torchngvi.interfaces import Cost, Estimator, Expectation, LinearTarget, Posterior, Target


@final
class Quadrature(Estimator):
    """E_q[ℓ] as a sum of scalar expectations; the derivative is that of the computed value.

    The packet is `Sites`: per row α = ∂F/∂e and β = 2 ∂F/∂v, from which each posterior builds what
    it needs, a D x D curvature or less.
    """

    comparable = True
    needs = LinearTarget

    def __call__(self, q: Posterior, target: Target, state: dict) -> Expectation:
        """Evaluate at q."""
        assert isinstance(target, LinearTarget)
        value, sites = target.expected_energy(q.frame())
        return Expectation(value, sites, target.temperature, True, Cost(1, 1))
