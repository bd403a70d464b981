"""Expectations whose value torch can differentiate: a and W from one backward pass."""

from typing import final

import torch

from torchngvi.interfaces import Cost, Estimator, Expectation, Framed, Posterior, Target, TractableTarget


@final
class Autograd(Estimator):
    """E_q[ℓ] as the target computes it, differentiated by one backward pass with respect to the probes of q.

    By Price's theorem in the frame, ∂/∂p = Cᵀg = a and ∂/∂R = CᵀHC, of which the lower part is read: that of CᵀG is
    right also where G has reached the root through a triangular operator of the target.  One wants it where the
    derivative should come from autograd, for instance to check the one that a target gives itself, which `Quadrature`
    takes.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> from torchngvi.expectations import Quadrature
    >>> q, model = CholeskyGaussian(2), GeneralizedLinear(torch.eye(2), [0.0, 1.0])
    >>> packet = Autograd()(q, model).derivative
    >>> torch.allclose(packet.a, Quadrature()(q, model).derivative.framed(q.frame()).a, atol=1e-6)
    True
    """

    comparable = True
    needs = TractableTarget

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate E_q[ℓ] at q and differentiate it."""
        assert isinstance(target, TractableTarget)
        with torch.enable_grad():
            value = target.expected_energy(q.probed())[0]
            a, M = torch.autograd.grad(value.sum(), (q.mean_probe, q.root_probe))
        packet = Framed(a, q.structure.one_sided(M))
        return Expectation(value.detach(), packet, target.temperature, target.comparable, Cost(1, 0))
