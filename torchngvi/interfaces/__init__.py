"""READ FIRST: the four axes, and everything that passes between them.

q = N(m, V) with V = C Cᵀ, ℓ = -log joint, L(q) = E_q[ℓ] - γ entropy(q); with g = E_q[∇ℓ] and
H = E_q[∇²ℓ], all methods speak of the gradient in the *frame* of q,

    a = Cᵀ g        W = Π(Cᵀ H C)        P = W - γ I        (Π keeps the pattern of q)

in which a and P vanish at the optimum and give the natural norm, |∇L|²_F⁻¹ = |a|² + ½‖P‖²_F.

| axis        | question                                 | folder         |
|-------------|------------------------------------------|----------------|
| posterior   | which distribution, in which coordinates | `posteriors`   |
| expectation | how E_q[ℓ] and its derivatives come      | `expectations` |
| rule        | along which curve                        | `rules`        |
| step size   | how far                                  | `stepsizes`    |

A step takes the axes in order: the estimator of the expectation makes an `Expectation`, the rule makes of it a `Path`,
the step size chooses ρ, and q makes the move `path.at(ρ)` by `Posterior.moved`.  `optim` owns that loop, and the
trial, in which q moves, is evaluated there, and is kept or restored.  The parts never call one another; they exchange
the packets and moves that are defined here.

In reading order: `packets` (what of q may be read, the Gaussian priors, and what an expectation hands on), `posterior`
(which moves a rule may ask of q, and its contract), `targets`, and `parts`, the contracts of the axes.

A part of your own has its check in `torchngvi.testing`, and a worked example in CONTRIBUTING.md.

Three known methods as combinations:

    VN        = CovarianceRoot   x VariationalNewton x Constant(ρ)       V' = C (I + ρP)⁻¹ Cᵀ
    VN (NGVI) = NaturalGaussian  x NaturalGradient   x Constant(ρ)       S' = (1 - γρ) S + ρH
    SR-VN     = CovarianceRoot   x NaturalGradient   x Constant(ρ)       C' = C - ρ C tril½[P]

A posterior over a flat vector λ has no frame: ∇L in λ takes the place of a, there is no matrix, and a `Metric` turns
the gradient into what the rule follows, so that

    IFVB      = FlatPosterior    x RootGradient      x KLRadius(0.1)     λ' = λ - ρ t P ∇L, P learnt by `Recursive`
"""

from torchngvi.interfaces.packets import (
    Change,
    Cost,
    Curved,
    Derivative,
    Expectation,
    Frame,
    Framed,
    FullPrior,
    Local,
    Prior,
    Raw,
    Sites,
    clique_frames,
    known_everywhere,
    may_be_asked,
    where_members,
)
from torchngvi.interfaces.parts import (
    Acceleration,
    Bent,
    Estimator,
    Metric,
    Momentum,
    Rule,
    StepSize,
    Trial,
    TrialStepSize,
)
from torchngvi.interfaces.posterior import (
    Affine,
    Congruence,
    Coordinates,
    LogTangent,
    Move,
    Path,
    Posterior,
    Root,
    RootTangent,
    Tangent,
    once,
)
from torchngvi.interfaces.targets import (
    Additive,
    AdditiveTractable,
    LinearTarget,
    Marginals,
    ScalarLikelihood,
    SeparableTarget,
    Target,
    TractableTarget,
)

__all__ = [
    "Change",
    "Acceleration",
    "Additive",
    "AdditiveTractable",
    "Affine",
    "Bent",
    "Congruence",
    "Coordinates",
    "Cost",
    "Curved",
    "Derivative",
    "Estimator",
    "Expectation",
    "Frame",
    "Framed",
    "FullPrior",
    "LinearTarget",
    "Local",
    "LogTangent",
    "Marginals",
    "Metric",
    "Momentum",
    "Move",
    "Path",
    "Posterior",
    "Prior",
    "Raw",
    "Root",
    "RootTangent",
    "Rule",
    "ScalarLikelihood",
    "SeparableTarget",
    "Sites",
    "StepSize",
    "Tangent",
    "Target",
    "TractableTarget",
    "Trial",
    "TrialStepSize",
    "known_everywhere",
    "may_be_asked",
    "once",
    "where_members",
    "clique_frames",
]
