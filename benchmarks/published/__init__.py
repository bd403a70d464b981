"""Published models, written from their usual definitions, with the true moments of their posteriors.

    python -m benchmarks.published [--only NAMES] [--seeds 0 1 2]

None of them was used in making the rule by which `fit` says whether a Gaussian fits.
"""

from . import counts, hierarchies, mixtures, series
from .model import Model

__all__ = ["MODELS", "Model"]

MODELS: dict[str, Model] = {
    model.name: model for part in (counts, series, hierarchies, mixtures) for model in part.models()
}
