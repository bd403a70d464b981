"""Expectations whose value torch can differentiate: a and W from one backward pass."""

from typing import final

import torch

from torchngvi.interfaces import Cost, Estimator, Expectation, Framed, Posterior, Target, TractableTarget


@final
class Autograd(Estimator):
    """E_q[ℓ] as the target computes it, differentiated with respect to the probes.

    ∂/∂p = Cᵀg = a and ∂/∂R = CᵀHC (Price's theorem in the frame), read one-sided: the lower part of
    CᵀG is right also where G has reached the root through somebody's triangular operator.
    """

    comparable = True
    needs = TractableTarget

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate at q."""
        assert isinstance(target, TractableTarget)
        with torch.enable_grad():
            value = target.expected_energy(q.probed())[0]
            a, M = torch.autograd.grad(value.sum(), (q.mean_probe, q.root_probe))
        packet = Framed(a, q.structure.one_sided(M))
        return Expectation(value.detach(), packet, target.temperature, target.comparable, Cost(1, 0))
