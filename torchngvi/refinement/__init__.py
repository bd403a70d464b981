"""Posteriors that a Gaussian does not fit: fans and warps, mixtures of modes, weighted draws.

`torchngvi.refine` tries them and says how good they are.  Read `fan` for what is laid on a Gaussian, and how it is
chosen.
"""

from torchngvi.refinement.fan import Density, FanLayer, LayeredGaussian, WarpLayer, WeightedDraws
from torchngvi.refinement.refinement import Mixture, Refinement, RefinementWarning, refine

__all__ = [
    "Density",
    "FanLayer",
    "LayeredGaussian",
    "Mixture",
    "Refinement",
    "RefinementWarning",
    "WarpLayer",
    "WeightedDraws",
    "refine",
]
