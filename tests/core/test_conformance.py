"""Every part that the library exports passes the check that it ships; parts that break a promise do not."""

import functools
import inspect
import re

import broken_parts as broken
import pytest
import torch
from arrow import ScalarArrow
from torch.distributions import Gamma as GammaLaw
from torch.distributions import Normal

from torchngvi import VN, expectations, ifvb, metrics, models, momentum, posteriors, rules, stepsizes, structures
from torchngvi.expectations import Fixed, Independent, flat
from torchngvi.fitting import Evaluations
from torchngvi.fitting.fit import ENGINES, Request
from torchngvi.fitting.steps import ChunkedSteps
from torchngvi.interfaces import Acceleration, Estimator, Metric, Momentum, Posterior, Rule, StepSize
from torchngvi.models import Likelihood
from torchngvi.models.log_joint import as_target
from torchngvi.posteriors import (
    CholeskyGaussian,
    DiagonalGaussian,
    Mixture,
    NaturalGaussian,
    PrecisionCholeskyGaussian,
    Product,
)
from torchngvi.posteriors.flat import (
    AffineCoupling,
    Beta,
    Categorical,
    Dirichlet,
    FlatCholesky,
    Gamma,
    InverseGamma,
    LowRankGaussian,
    MeanFieldGaussian,
    ModuleFlow,
    NormalInverseGamma,
    OrthogonalFlow,
    Poisson,
    RankOneGaussian,
    VecGaussian,
    VechGaussian,
    Wishart,
)
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.rules import QuasiNewton
from torchngvi.structures import Dense, Diagonal, EqualBlocks, Forest, FullAlgebra, Pattern, UnequalBlocks, arrow
from torchngvi.testing import (
    check_acceleration,
    check_engine,
    check_estimator,
    check_flat_posterior,
    check_likelihood,
    check_metric,
    check_momentum,
    check_posterior,
    check_rule,
    check_step_size,
    check_structure,
)


def exported(module, kind):
    """The classes of that kind which a package exports, without those that are abstract."""
    classes = (getattr(module, name) for name in module.__all__)
    return {x for x in classes if inspect.isclass(x) and issubclass(x, kind) and not inspect.isabstract(x)}


RULES = {rule: [rule] for rule in exported(rules, Rule)} | {
    rules.ProjectedRootGradient: [lambda: rules.ProjectedRootGradient(0.01)],
    rules.ProjectedSquareRoot: [lambda: rules.ProjectedSquareRoot(0.01)],
}
DRAWS = [Independent(4), Fixed(6)]  # two kinds of estimate: of noise, and of a function
ESTIMATORS = {estimator: [estimator] for estimator in exported(expectations, Estimator)}
ESTIMATORS |= {
    estimator: [functools.partial(estimator, draws) for draws in DRAWS]
    for estimator in ESTIMATORS
    if "draws" in inspect.signature(estimator).parameters
}
ESTIMATORS |= {
    expectations.GaussNewton: [lambda: expectations.GaussNewton(2)],  # one posterior at a time: slow
    expectations.LeastSquaresStein: [
        functools.partial(expectations.LeastSquaresStein, draws) for draws in (6, Fixed(6))
    ],
    expectations.PerFactor: [lambda draws=draws: expectations.PerFactor(expectations.Stein(draws)) for draws in DRAWS],
    expectations.SampleAverage: [lambda: expectations.SampleAverage(Fixed(6))],
    expectations.PiecewiseBound: [expectations.PiecewiseBound, lambda: expectations.PiecewiseBound(clip=True)],
    expectations.ScoreFunction: [functools.partial(expectations.ScoreFunction, draws) for draws in (4, Independent(4))],
    expectations.StatisticRegression: [expectations.StatisticRegression, lambda: expectations.StatisticRegression(6)],
}
FLAT_ESTIMATORS = {
    flat.ClosedForm: [flat.ClosedForm],
    flat.ControlVariate: [lambda: flat.ControlVariate(6)],
    flat.Pathwise: [lambda: flat.Pathwise(3)],
    flat.ScoreFunction: [lambda: flat.ScoreFunction(6, torch.Generator())],
}
STEP_SIZES = {control: [control] for control in exported(stepsizes, StepSize)} | {
    stepsizes.Clip: [lambda: stepsizes.Clip(0.5)],
    stepsizes.Shortest: [lambda: stepsizes.Shortest(stepsizes.Clip(0.5), stepsizes.KLRadius(0.1))],
}
MOMENTA = {part: [part] for part in exported(momentum, Momentum)} | {
    rules.NormalizedMomentum: [
        lambda: rules.NormalizedMomentum(),
        lambda: rules.NormalizedMomentum("riemannian", bias_correction=False),
    ]
}
ACCELERATIONS = {part: [part] for part in exported(metrics, Acceleration)} | {
    QuasiNewton: [lambda model: QuasiNewton(), lambda model: QuasiNewton(memory=1)]
}
METRICS = {part: [part] for part in exported(metrics, Metric) - exported(metrics, Acceleration)} | {
    metrics.BatchFisher: [lambda: metrics.BatchFisher(20)],
    metrics.Blocks: [lambda: metrics.Blocks(metrics.Recursive(5, warmup=20), [2, 2])],
    metrics.MatrixFree: [lambda: metrics.MatrixFree(5, warmup=20)],
    metrics.Recursive: [
        lambda: metrics.Recursive(5, warmup=20),
        lambda: metrics.Recursive(1, eps=0.5, c_beta=0.0, warmup=30, generator=torch.Generator()),
    ],
    metrics.Window: [lambda: metrics.Window(30, 5, warmup=10)],
}
# the first of each over six coordinates, for the posteriors
STRUCTURES = {structure: [structure] for structure in exported(structures, Pattern)} | {
    Dense: [Dense, Dense(1)],
    Diagonal: [Diagonal, Diagonal(1)],
    EqualBlocks: [EqualBlocks(3, 2), EqualBlocks(2, 3)],
    Forest: [Forest((2, 2, 3, -1), (1, 2, 1, 2)), arrow(groups=3, local=2, globals=2)],
    UnequalBlocks: [UnequalBlocks((1, 2, 1, 2)), UnequalBlocks((2, 1, 3))],
}


def of_six(first):
    try:
        return first if isinstance(first, Pattern) else first(6)
    except TypeError as error:
        raise TypeError(f"{first.__name__} has more sizes than one: it needs a line in STRUCTURES above") from error


OVER = [of_six(first) for first, *_ in (*STRUCTURES.values(), [ScalarArrow])]
POSTERIORS = {
    CholeskyGaussian: [
        functools.partial(CholeskyGaussian, structure=structure)
        for structure in OVER
        if isinstance(structure, FullAlgebra)
    ],
    DiagonalGaussian: [DiagonalGaussian],
    **{
        kind: [functools.partial(kind, structure=structure) for structure in OVER]
        for kind in (NaturalGaussian, PrecisionCholeskyGaussian)
    },
}


def numbers(*rows):
    return torch.tensor(rows if len(rows) > 1 else rows[0], dtype=torch.float64)


def flow():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return ModuleFlow(AffineCoupling(2, layers=2, hidden=3).double(), 2)


SQUARE = numbers([1.0, 0.3], [0.3, 0.5])
FLAT_POSTERIORS = {
    Beta: [lambda: Beta(numbers([2.5, 4.0]))],
    Categorical: [lambda: Categorical(numbers([0.3, -0.5]))],
    Dirichlet: [lambda: Dirichlet(numbers([0.7, 3.0, 5.0]))],
    FlatCholesky: [lambda: FlatCholesky(numbers([0.4, -0.1]), SQUARE)],
    Gamma: [lambda: Gamma(numbers([3.0, 2.0]))],
    InverseGamma: [lambda: InverseGamma(numbers([7.0, 2.0]))],
    LowRankGaussian: [
        lambda: LowRankGaussian(
            numbers([0.4, -0.1, 0.2]), numbers([0.5, 0.2], [0.1, -0.4], [0.3, 0.3]), numbers([1.1, 0.8, 1.4])
        ),
        lambda: LowRankGaussian.standard(4, rank=2, scale=2.0, dtype=torch.float64),
    ],
    MeanFieldGaussian: [lambda: MeanFieldGaussian(numbers([0.3, -0.2, -0.5, 0.4]))],
    ModuleFlow: [flow],
    NormalInverseGamma: [lambda: NormalInverseGamma(numbers([0.3, 0.8, 9.0, 4.0]))],
    OrthogonalFlow: [lambda: OrthogonalFlow(numbers([0.3, -0.5]), torch.linalg.qr(SQUARE)[0], numbers([0.1, 0.2]))],
    Poisson: [lambda: Poisson(numbers([1.3]))],
    RankOneGaussian: [
        lambda: RankOneGaussian(numbers([0.2, -0.4, 0.1]), numbers([0.6, -0.3, 0.8]), numbers([1.0, 0.5, 2.0])),
        lambda: RankOneGaussian.standard(3, mean=1.0, scale=0.5, dtype=torch.float64),
    ],
    VecGaussian: [lambda: VecGaussian(numbers([0.4, -0.1]), SQUARE)],
    VechGaussian: [lambda: VechGaussian(numbers([0.4, -0.1]), SQUARE)],
    Wishart: [lambda: Wishart(numbers([3.5, 0.8, -0.3, 1.2]))],
}
LIKELIHOODS = {  # with targets that they can produce
    models.BernoulliLogit: [(models.BernoulliLogit, [0.0, 1.0, 1.0])],
    models.BernoulliProbit: [(models.BernoulliProbit, [-1.0, 1.0, 1.0])],
    models.GaussianNoise: [(lambda: models.GaussianNoise(0.5), [0.3, -1.0])],
    models.NegativeBinomial: [(lambda: models.NegativeBinomial(3.0), [0.0, 2.0, 5.0])],
    models.PoissonLog: [(models.PoissonLog, [0.0, 1.0, 4.0])],
    models.StudentT: [(lambda: models.StudentT(0.5, dof=3.0), [0.3, -1.0, 2.0])],
}


X = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X.sum(-1) + X.roll(1, 0).sum(-1) > 0).double()
REGRESSION, REGRESSIONS = (
    models.GeneralizedLinear(X, Y),
    models.GeneralizedLinear(X, torch.stack([Y, 1 - Y, Y.flip(0)])),
)
MIXED = models.MixedLogJoint(X, Y, (X[:, :1], torch.arange(40) % 8), "bernoulli_logit")
GRAPH = models.FactorGraph(
    [
        models.SiteFactor(lambda m, t: Normal(m, t.rsqrt()).log_prob(Y), "mu", "tau", plates=(40,)),
        models.SiteFactor(lambda m, t: Normal(0.0, (0.5 * t).rsqrt()).log_prob(m), "mu", "tau"),
        models.SiteFactor(GammaLaw(numbers([1.5])[0], 0.7).log_prob, "tau"),
    ]
)


def log_joint_of_graph(values):
    mu, tau = values["mu"], values["tau"]
    return Normal(mu, tau.rsqrt()).log_prob(Y).sum(-1) + (
        Normal(0.0, (0.5 * tau).rsqrt()).log_prob(mu) + GammaLaw(numbers([1.5])[0], 0.7).log_prob(tau)
    ).squeeze(-1)


def gaussian(*batch, **options):
    return CholeskyGaussian(2, batch, dtype=torch.float64, **options)


def engine_of(word, make, target=None, optimizer=None, groups=None):
    """A factory of the engine of a row of `ENGINES`, for the log joint that it is given or a target of its own."""

    def factory(log_joint):
        q = make()
        steps = None if optimizer is None else optimizer(q)
        request = Request(q, as_target(target or log_joint), steps, None, 100, None, None, groups, False)
        return request.engine(word)[0]

    return factory


def product():
    return Product(mu=CholeskyGaussian(1, dtype=torch.float64), tau=Gamma(numbers([1.0, 1.0])))


def chunks(log_joint):
    return ChunkedSteps(q := gaussian(3), REGRESSIONS, VN(q), Evaluations(100), 2)


ENGINE_PARTS = {  # a factory for each row of `ENGINES`, with the arguments of the check
    "averages": [(engine_of("averages", gaussian), {})],
    "chunks": [
        (engine_of("chunks", lambda: gaussian(3), REGRESSIONS), {"log_joint": REGRESSIONS.log_joint}),
        (chunks, {"log_joint": REGRESSIONS.log_joint}),
    ],
    "flat": [
        (engine_of("flat", FLAT_POSTERIORS[MeanFieldGaussian][0]), {}),
        (engine_of("flat", FLAT_POSTERIORS[Gamma][0]), {"log_joint": lambda x: (x.sin() - x)[..., 0]}),
    ],
    "groups": [
        (
            engine_of("groups", MIXED.posterior, MIXED, groups=3),
            {"log_joint": MIXED.log_joint, "posterior": lambda engine: engine.whole},
        )
    ],
    "mixture": [(engine_of("mixture", lambda: Mixture(gaussian(2, mean=numbers([0.0, 0.0], [1.0, 1.0])))), {})],
    "product": [
        (
            engine_of(
                "product",
                lambda: Product(mu=CholeskyGaussian(1, dtype=torch.float64), tau=Gamma(numbers([1.0, 1.0]))),
                GRAPH,
            ),
            {"log_joint": log_joint_of_graph},
        )
    ],
    "steps": [
        (engine_of("steps", gaussian, optimizer=lambda q: VN(q, lr=0.1, estimator=expectations.Stein(8))), {}),
        (engine_of("steps", gaussian, REGRESSION), {"log_joint": REGRESSION.log_joint}),
    ],
    "warped": [(engine_of("warped", lambda: gaussian().warped()), {})],
}


@pytest.mark.parametrize("word", ENGINE_PARTS)
def test_every_engine_passes_its_check(word):
    for factory, options in ENGINE_PARTS[word]:
        check_engine(factory, **options)


def test_every_engine_is_checked():
    missing = ", ".join(set(ENGINES) - set(ENGINE_PARTS))
    assert not missing, f"{missing}: name it in ENGINE_PARTS above, with a factory; see CONTRIBUTING.md"
    assert set(ENGINE_PARTS) == set(ENGINES)


def check_posterior_of_six(factory):
    check_posterior(factory, dim=6)


def check_likelihood_of(case):
    check_likelihood(case[0], torch.tensor(case[1]))


PRODUCT = [
    (check_rule, RULES, exported(rules, Rule)),
    (check_estimator, ESTIMATORS, exported(expectations, Estimator)),
    (check_estimator, FLAT_ESTIMATORS, exported(ifvb, Estimator)),
    (check_step_size, STEP_SIZES, exported(stepsizes, StepSize)),
    (check_momentum, MOMENTA, exported(momentum, Momentum)),
    (check_acceleration, ACCELERATIONS, exported(metrics, Acceleration)),
    (check_metric, METRICS, exported(metrics, Metric) - exported(metrics, Acceleration)),
    (check_structure, STRUCTURES, exported(structures, Pattern)),
    (check_posterior_of_six, POSTERIORS, exported(posteriors, Gaussian)),
    (check_flat_posterior, FLAT_POSTERIORS, exported(posteriors.flat, Posterior)),
    (check_likelihood_of, LIKELIHOODS, exported(models, Likelihood)),
]


@pytest.mark.parametrize(
    ("check", "factories"),
    [
        pytest.param(check, factories, id=part.__name__)
        for check, parts, _ in PRODUCT
        for part, factories in sorted(parts.items(), key=lambda item: item[0].__name__)
    ],
)
def test_every_part_passes_its_check(check, factories):
    for factory in factories:
        check(factory)


@pytest.mark.parametrize("index", range(len(PRODUCT)))
def test_every_exported_part_is_in_the_product(index):
    check, parts, found = PRODUCT[index]
    missing = ", ".join(sorted(part.__name__ for part in found - set(parts)))
    assert not missing, (
        f"{missing}: name it in the table above for {check.__name__}, with a factory; see CONTRIBUTING.md"
    )
    assert set(parts) == found
    assert found


def test_the_exported_rules_are_all_parts():
    """Nothing else hides in `rules`: a rule, an acceleration or a momentum."""
    assert {getattr(rules, name) for name in rules.__all__} == set(RULES) | set(MOMENTA) | set(ACCELERATIONS)


@pytest.mark.parametrize("structure", [ScalarArrow, ScalarArrow(1), ScalarArrow(2)])
def test_a_third_partys_structure(structure):
    check_structure(structure)


def test_a_structure_of_several_sizes_is_given_as_a_pattern():
    sentence = (
        "EqualBlocks: a call with one number (has it several sizes? check a pattern, as X(3, 2)) raised TypeError"
    )
    with pytest.raises(AssertionError, match=re.escape(sentence)):
        check_structure(EqualBlocks)
    with pytest.raises(TypeError, match="EqualBlocks has more sizes than one: it needs a line in STRUCTURES"):
        of_six(EqualBlocks)


def test_a_third_partys_momentum():
    """With names of its own for its state."""
    check_momentum(broken.Average)


BROKEN = [
    (check_rule, broken.Uphill, "slope() must be -dL/dρ at ρ = 0, by finite differences; it is off by 2.0e+00"),
    (check_rule, broken.SaysNatural, "`natural` is said, so the path must start along the natural gradient -(a, P)"),
    (check_rule, broken.NoSpeed, "length2() must be the squared Fisher length of dq/dρ: say `speed2`; it is off by"),
    (check_rule, broken.OneStepForAll, "batch members must not depend on one another; it is off by 4.4e-01"),
    (check_rule, broken.NeedsMore, "a call (does it need `full_algebra`?) raised AttributeError"),
    (check_structure, broken.WrongMetric, "the dot product of flat(A) and flat(B) must be ½⟨A, B⟩; it is off by"),
    (check_structure, broken.Transposed, "mv(B, x) must be B x of any squares; it is off by 1.4e+00"),
    (
        check_structure,
        broken.HoldsWithOne,
        "a failed cholesky must be told member by member, of a definite, a negative,",
    ),
    (check_structure, broken.RegularByItsFirst, "positive_root must tell which members are regular and finite"),
    (check_structure, broken.DoubleRoot, "cholesky of float32 must be that of float64; its dtype must be"),
    (check_structure, broken.DoubleExponential, "exp of float32 must be that of float64; its dtype must be"),
    (check_structure, broken.Banded, "products L M of two roots must have no entry outside its positions"),
    (check_estimator, broken.Biased, "its a must be unbiased; the mean of 1500 estimates is off by"),
    (check_estimator, broken.SaysComparable, "`comparable` is said, so two evaluations at the same q must agree"),
    (check_estimator, broken.ForFree, "its cost must count what it evaluates, 1 times; it says (0, 1, 0)"),
    (check_estimator, broken.HidesItsNoise, "`comparable` is said, so a and W must be the derivative of its value, by"),
    (check_estimator, broken.SaysPrecise, "its noise2 must not be below the squared error of a and W at the optimum"),
    (check_estimator, broken.BiasedPart, "its a must be unbiased; the mean of 1500 estimates is off by"),
    (check_estimator, broken.OfTheSameBatch, "its derivative must be unbiased for ∇L; the mean of 1500 estimates is"),
    (check_estimator, broken.GoesUp, "its derivative must be unbiased for ∇L; the mean of 1500 estimates is off by"),
    (check_posterior, broken.TakesAnything, "moved() must refuse a Congruence by a negative matrix"),
    (check_posterior, broken.TakesNaN, "moved() must refuse a Congruence with an entry nan in its tensor 1"),
    (check_posterior, broken.Inverted, "entropy() must be that of N(m, V); it is off by 4.1e-01"),
    (check_posterior, broken.HalfTangent, "tangent() must be F⁻¹∇L, F the Fisher matrix: the covariance"),
    (check_flat_posterior, broken.OtherDraws, "the scores of its draws must have mean zero; the mean of 4000"),
    (check_flat_posterior, broken.OtherScore, "score must be ∇_λ log q, along the manifold; it is off by"),
    (check_flat_posterior, broken.OtherFisher, "exact_fisher_solve must invert E[φφᵀ] of its draws; the mean of 4000"),
    (
        check_flat_posterior,
        broken.Unnormalised,
        "log_prob must be the logarithm of a density that integrates to 1; the",
    ),
    (check_flat_posterior, broken.GoesAnywhere, "moved() must refuse a step to NaN, member by member"),
    (check_step_size, broken.Together, "what it proposes for a member must not depend on the others"),
    (check_step_size, broken.Waits, "init or propose raised RuntimeError (aten._local_scalar_dense.default reads"),
    (check_step_size, broken.JudgesInVain, "one that has `judge`, and no other, must be a torchngvi.interfaces.Trial"),
    (check_step_size, broken.SaysTrial, "`needs_trial` must be left to its kind, which says it"),
    (check_step_size, broken.ReadsTheMetric, "init or propose raised KeyError ('kept')"),
    (check_momentum, broken.CountsRejections, "init or a call raised KeyError ('rejections')"),
    (check_acceleration, broken.ReadsTheStepSize, "init, forget or a call raised KeyError ('reach')"),
    (check_step_size, broken.AcceptsNaN, "judge must reject a NaN"),
    (check_momentum, broken.ForgetsTheBatch, "batch members must not depend on one another; it is off by"),
    (check_acceleration, broken.Euclidean, "slope must be ⟨∇L, B∇L⟩ in the metric of q, a·a' + ½⟨P, P'⟩"),
    (check_metric, broken.WritesToItsState, "it must hand back new state, not write to 'P': the step may not be taken"),
    (check_metric, broken.OneMatrixForAll, "batch members must not depend on one another"),
    (check_metric, broken.UnitLength, "`natural` is said, so it must be linear in the gradient; it is off by"),
    (check_metric, broken.OneSided, "`natural` is said, so it must be symmetric, ⟨y, Bx⟩ = ⟨x, By⟩; it is off by"),
    (check_metric, broken.HalfOfIt, "`exact` is said, so it must invert the Fisher matrix, here by autograd; it is"),
    (check_metric, broken.ExactInSilence, "it inverts the Fisher matrix, so `exact` must be True"),
    (check_metric, broken.PlainButNatural, "`natural` is said, so it must make the Fisher matrix rounder; its"),
    (check_metric, broken.KeepsNaN, "a score that is not finite must be left out"),
    (check_metric, broken.RemembersNaN, "a gradient that is not finite must leave no trace in the state"),
    (check_metric, broken.CountsOnItself, "a step that is tried again must find the same direction"),
    (check_metric, broken.AlwaysDouble, "its direction must have the shape (4,) and the dtype of λ; got (4,), t"),
    (check_metric, broken.AsksTheDevice, "init or a call raised RuntimeError (aten._local_scalar_dense.default reads"),
    (check_metric, broken.TakesAnyShape, "a gradient of another shape must be refused by an InputError"),
    (check_metric, broken.WrongSlope, "slope must be ⟨∇L, B∇L⟩; it is off by"),
    (check_metric, broken.LeavesTheManifold, "its direction must lie on the manifold of q; it is off by"),
    (check_engine, broken.OppositeEntropy, "the loss must be minus the ELBO at q; it is off by"),
    (check_engine, broken.NothingSpent, "`spent` must be the evaluations and gradients so far; it is (0, 0)"),
    (check_engine, broken.HalfOfTheGradients, "it must count 8 gradients and values, not 4"),
    (check_engine, broken.ForgetsItsOptimizer, "a run must go on from its state_dict, bit for bit"),
    (check_engine, broken.ForgetsAThing, "a run must go on from its state_dict, to the same state_dict"),
    (check_engine, broken.PutsNothing, "load_state_dict must put q where the run was marked"),
    (check_engine, broken.SetsNoMark, "advance must call self.mark() before it evaluates"),
    (check_engine, broken.NeverGoesBack, "go_back must put q where `here` was called"),
    (check_likelihood, broken.SaysConvex, "`convex` is said, so β = E[f''] must not be negative"),
    (check_likelihood, broken.StiffCurvature, "`convex` is said, so β must be differentiable in e; it is off by"),
    (check_likelihood, broken.WrongCurvature, "the curvature of expected must be 2 ∂F/∂v of its value; it is off by"),
    (check_likelihood, broken.NarrowExpectation, "the value of expected must be E[energy] under N(e, v); it is off by"),
    (check_likelihood, broken.ZeroAndOne, "checked must return two classes, the smaller as -1, the larger as +1"),
    (check_likelihood, broken.MoreThanOne, "the probabilities exp(-energy) of two classes must sum to 1; it is off by"),
    (check_likelihood, broken.WithoutItsConstant, "the density exp(-energy) must integrate to 1 over y; it is off by"),
    (check_likelihood, broken.SaysSelfConcordant, "`self_concordant` is said, so |f'''| must be at most f''"),
    (check_acceleration, broken.NeverForgets, "forget must leave what init makes; it is off by"),
]


@pytest.mark.parametrize(("check", "part", "sentence"), BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_a_broken_part_fails_with_a_sentence(check, part, sentence):
    """The part, the promise that it breaks, by how much, and for which input; to the last full stop."""
    factory = (lambda model: part()) if check is check_acceleration else part
    check = functools.partial(check, y=torch.tensor([0.0, 2.0])) if check is check_likelihood else check
    with pytest.raises(AssertionError, match=f"^{part.__name__}: {re.escape(sentence)}.*, for (one|a|the) .*\\.$"):
        check(factory)
