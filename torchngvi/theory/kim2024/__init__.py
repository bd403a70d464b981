"""Black-box VI over location-scale families: what is known of its gradients' variance and of its rate.

Kim, Ma and Gardner, *Linear Convergence of Black-Box Variational Inference: Should We Stick the Landing?* (2024),
with the corrections of `docs/bbvi.md`.  The algorithm itself is `torchngvi.methods.BBVI`.
"""

from torchngvi.theory.kim2024.moments import (
    EmpiricalVariance,
    GaussianTarget,
    empirical_variance,
    fisher_hyvarinen,
    wasserstein_to_point,
)
from torchngvi.theory.kim2024.rates import (
    AdaptiveVariance,
    QuadraticVariance,
    closed_entropy_bound,
    closed_entropy_variance,
    landing_bound,
    landing_variance,
)
from torchngvi.theory.kim2024.scales import (
    Base,
    Gaussian,
    Laplace,
    Logistic,
    MeanField,
    Scale,
    SquareRoot,
    StudentT,
    Triangular,
    Unrestricted,
)

__all__ = [
    "AdaptiveVariance",
    "Base",
    "EmpiricalVariance",
    "Gaussian",
    "GaussianTarget",
    "Laplace",
    "Logistic",
    "MeanField",
    "QuadraticVariance",
    "Scale",
    "SquareRoot",
    "StudentT",
    "Triangular",
    "Unrestricted",
    "closed_entropy_bound",
    "closed_entropy_variance",
    "empirical_variance",
    "fisher_hyvarinen",
    "landing_bound",
    "landing_variance",
    "wasserstein_to_point",
]
