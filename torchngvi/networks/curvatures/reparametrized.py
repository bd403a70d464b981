"""The curvature by reparametrisation, ĥ = g ε/σ: Price's theorem with one draw, the estimator of IVON."""

from collections.abc import Mapping

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.networks.curvatures.base import OfSingleWeights
from torchngvi.networks.families import Diagonal
from torchngvi.networks.posterior import NetworkGaussian


class Reparametrized(OfSingleWeights):
    """The diagonal of the expected Hessian from the gradient at the draw alone, ĥ = g ε/σ (Price's theorem).

    It is unbiased and costs nothing, and its noise in one batch is about √(N/B) times the curvature, so that only an
    average over very many steps says anything.  One wants it to compare with IVON (Shen et al. 2024), whose update of
    the precision it takes: h' = (1 - ρ)h + ρĥ + ½ρ²(h - ĥ)²/(h + δ).

    Args:
        rate: ρ, larger than 0 and at most 1; IVON's is 1 - β₂.

    Raises:
        InputError: for another rate.

    >>> Reparametrized(1e-5).rate
    1e-05
    """

    def __init__(self, rate: float = 1e-5) -> None:
        super().__init__(rate)

    def begin(self, q: NetworkGaussian) -> None:
        """Let the curvature begin at its start; see the base class.

        Args:
            q: the posterior.

        Raises:
            InputError: at the temperature 0, where there is no noise to look at.
        """
        if q.temperature == 0:
            raise InputError("Reparametrized sees the curvature by the noise of draws; the temperature 0 has none.")
        super().begin(q)

    def before_step(self, q: NetworkGaussian, gradients: Mapping[str, Tensor]) -> None:
        """Move every curvature by the retraction; see the base class."""
        for family in q.each():
            assert isinstance(family, Diagonal)
            noise = list(torch._foreach_div(family.noise(q.seed, q.draw), family.stddev))
            torch._foreach_mul_(noise, q.temperature**-0.5)  # σ is the one at the temperature 1
            observed: list[Tensor | None] = []
            for name, p, e in zip(family.names, family.parameters_of_network, noise, strict=True):
                observed.append(e.mul_(gradients.get(name, 0.0)) if p.requires_grad else None)
            family.retract_(observed, self.rate)
        q.observed += 1
