"""Densities whose means and standard deviations are known: what a verdict on a fit is measured by.

    from benchmarks.truths import targets
    for target in targets("held"):
        ...

    python -m benchmarks.truths [--half held] [--only NAMES]       # how well a Gaussian fits each of them

About half of them are well fitted by the best Gaussian.  "tune" and "held" are made of different families: thresholds
may be chosen on "tune", which has the families that were looked at while the checks were made; "held" is for the count
of what they miss.  Of each pair of like families below the first is tune and the second is held, and a family is never
moved from one to the other.

"fresh" was written after both had been looked at, of other families again, and before the rule was run on it once.  Its
two parts were divided then: "fresh 1" may be tuned on after that count, "fresh 2" may not.
"""

import functools
from collections.abc import Callable

from . import curves, hierarchical, latents, margins, products, regressions, shapes
from .target import Target

__all__ = ["FAMILIES", "Target", "targets"]

Family = Callable[[], list[Target]]

FAMILIES: dict[str, tuple[Family, ...]] = {
    "tune": (
        products.log_gamma,
        products.student,
        products.logistic,
        products.skew_normal,
        shapes.gaussians,
        shapes.multivariate_t,
        shapes.funnels,
        shapes.bananas,
        shapes.two_normals,
        hierarchical.eight_schools,
        hierarchical.binomial_intercepts,
        hierarchical.beta_binomials,
        regressions.normal_sample,
        regressions.logistic_regression,
        regressions.gamma_sample,
        regressions.growth,
        regressions.outliers,
        regressions.negative_binomial,
    ),
    "held": (
        products.logit_beta,
        products.sinh_arcsinhs,
        products.hyperbolic,
        products.gumbel_and_normal,
        products.two_bumps,
        shapes.structured_gaussians,
        shapes.elliptical,
        shapes.bounded_funnels,
        shapes.shears,
        shapes.mixtures,
        shapes.curved,
        hierarchical.other_schools,
        hierarchical.poisson_intercepts,
        hierarchical.gamma_poissons,
        hierarchical.linear_regressions,
        regressions.poisson_regression,
        regressions.probit_regression,
        regressions.weibull_survival,
        regressions.dose_response,
        regressions.mixture_means,
        regressions.two_variances,
    ),
    "fresh 1": (
        margins.skew_t,
        margins.log_inverse_gaussian,
        margins.contaminated,
        margins.compositions,
        curves.changepoints,
        curves.cauchy_regression,
        curves.logistic_growth,
        curves.zero_inflated,
        curves.autoregressive,
        curves.ordered_means,
        curves.wide_regressions,
        latents.local_levels,
        latents.horseshoe_means,
    ),
    "fresh 2": (
        margins.johnson,
        margins.soft_truncation,
        margins.copulas,
        margins.unlike_normals,
        curves.two_decays,
        curves.gp_hyperparameters,
        curves.ordered_logit,
        curves.correlations,
        curves.cured,
        curves.ratios,
        latents.process_latents,
        latents.one_way,
        latents.item_responses,
    ),
}


@functools.cache
def _half(half: str) -> tuple[Target, ...]:
    return tuple(target.with_half(half) for family in FAMILIES[half] for target in family())


def targets(half: str | None = None) -> list[Target]:
    """The targets of "tune", "held" or "fresh", of one part of the last, or all; made when asked for, in seconds."""
    return [target for name in FAMILIES if half in (None, name, name.split()[0]) for target in _half(name)]
