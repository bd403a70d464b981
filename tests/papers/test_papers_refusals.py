"""What the methods, theory and studies of the papers refuse, each with words that say what to do."""

import importlib
import math
import tempfile

import pytest
import torch
from helpers import check_refusal
from ifvb_parts import AIFVB, PreconditionedVI

from examples.papers import kumar2025_steps as theory
from torchngvi import (
    BBVI,
    NGVI,
    SRVN,
    CholeskyGaussian,
    DiagonalGaussian,
    GeneralizedLinear,
    KLRadius,
    LogJoint,
    NaturalGaussian,
    NaturalGradientVI,
    Stein,
    ifvb,
)
from torchngvi.adapters.flows import natural_gradient_flow
from torchngvi.averaging import ExpectationAverage
from torchngvi.errors import PairError
from torchngvi.expectations import BonnetPrice, StatisticRegression
from torchngvi.fitting import SlopeStop
from torchngvi.ifvb import (
    NAGVAC,
    AffineCoupling,
    BatchFisher,
    Beta,
    Blocks,
    ClosedForm,
    ControlVariate,
    Exact,
    FlatCholesky,
    GroupLassoNetwork,
    LowRankGaussian,
    MatrixFree,
    MeanFieldGaussian,
    NormalInverseGamma,
    OrthogonalFlow,
    Pathwise,
    PublishedNAGVAC,
    RankOneGaussian,
    Recursive,
    ScoreFunction,
    VecGaussian,
    VechGaussian,
    Window,
    asymptotic_covariance,
    marginal_sample,
    run,
)
from torchngvi.interfaces import Cost, Expectation, Raw
from torchngvi.methods import ProximalBBVI, RootGD
from torchngvi.models import MixedLogJoint
from torchngvi.posteriors.flat import Dirichlet, Gamma
from torchngvi.rules import (
    Adam,
    Geodesic,
    NaturalGradient,
    NormalizedMomentum,
    ProjectedRootGradient,
    ProjectedSquareRoot,
    QuasiNewton,
    RootGradient,
)
from torchngvi.stepsizes import Constant, PowerSchedule
from torchngvi.theory.exponential_family import ExpectationParameters, Natural
from torchngvi.theory.godichon2023 import check_exponents
from torchngvi.theory.kim2024 import (
    AdaptiveVariance,
    QuadraticVariance,
    SquareRoot,
    Triangular,
    Unrestricted,
    closed_entropy_bound,
    fisher_hyvarinen,
    landing_bound,
)
from torchngvi.theory.wu2024 import (
    SubSampling,
    covariance_factor,
    gradient_variance,
    limiting_variance,
    rate_bound,
    sharp_rate_bound,
)

F64 = torch.float64
TWO, EYE = torch.zeros(2), torch.eye(2)
THREE, ONE, EYE_4 = torch.zeros(3), torch.ones(3, 2), torch.eye(4, dtype=F64)
Q, NATURAL, DIAGONAL = (kind(2, dtype=F64) for kind in (CholeskyGaussian, NaturalGaussian, DiagonalGaussian))
BOTH = torch.stack([EYE, -EYE])  # covariances of two posteriors, of which one is none
VARIANCE, ADAPTIVE = QuadraticVariance(1.0, 1.0), AdaptiveVariance(1.0, 1.0, 1.0)


def log_joint(theta):
    return -theta.square().sum(-1)


def flat(*batch):
    return MeanFieldGaussian(torch.full((*batch, 4), 0.3, dtype=F64))


def beta_of(number=1.0):
    return Beta(torch.full((2,), number))


def regression(family="gaussian"):
    return GeneralizedLinear(torch.eye(2, dtype=F64), [0.0, 1.0], family)


def flow(*times, q=None, model=None, **options):
    return natural_gradient_flow(q or CholeskyGaussian(2, dtype=F64), model or regression(), list(times), **options)


def flow_of_counts(**start):
    model = GeneralizedLinear(torch.ones(1, 1, dtype=F64), [1.0], "poisson_log")
    return flow(1.0, q=CholeskyGaussian(1, dtype=F64, **start), model=model)


def network(hidden=(4, 3), X=EYE, y=TWO, **settings):
    return GroupLassoNetwork(X, y, hidden, **settings)


def moved(rule, *lr, q=Q, step_size=None, **options):
    return NaturalGradientVI(q, rule, *lr, step_size=step_size, **options)


def without_data(study, *names, **options):
    """A study of the papers loads its data where there are none."""

    def refused():
        load = importlib.import_module(f"examples.papers.{study}")
        for name in names:
            load = getattr(load, name) if hasattr(load, name) else load[name].run
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            patch.setenv("TORCHNGVI_DATA", folder)
            patch.chdir(folder)
            load(**options)

    return refused


def held_flow():
    from examples.papers.open_questions.held_flow import HeldFlow

    q = DiagonalGaussian(2, dtype=F64)
    raw = Raw(q.mean, torch.eye(2, dtype=F64))
    return HeldFlow()(q, Expectation(torch.zeros((), dtype=F64), raw, 1.0, True, Cost(1, 0)))


def centred(kind):
    from examples.papers.tan2025 import centring

    rows = torch.ones(4, 1, dtype=F64)
    return getattr(centring, kind)(MixedLogJoint(rows, [0.0, 1.0, 0.0, 1.0], (rows, torch.arange(4) // 2), "probit"))


POSITIVE = {
    "mu": [
        lambda: VARIANCE.fixed_step(0.0, 1.0),
        lambda: VARIANCE.two_stage_step(0.0, 1),
        lambda: ADAPTIVE.fixed_step(0.0, 1.0),
    ],
    "eps": [
        lambda: ADAPTIVE.fixed_slack(0.0),
        lambda: VARIANCE.fixed_iterations(1.0, 0.0, 1.0),
        lambda: ADAPTIVE.fixed_step(1.0, 0.0),
    ],
    "delta2": [
        lambda: ADAPTIVE.two_stage_slack(1.0, 0.0),
        lambda: VARIANCE.two_stage_bound(1.0, 1, 0.0),
        lambda: VARIANCE.fixed_iterations(1.0, 1.0, 0.0),
        lambda: ADAPTIVE.fixed_iterations(1.0, 1.0, 0.0),
        lambda: VARIANCE.two_stage_iterations(1.0, 1.0, 0.0),
    ],
    "slack": [lambda: ADAPTIVE.at(0.0)],
    "L": [lambda bound=bound: bound(0.0, 1.0, 2, 1.0, 1.0) for bound in (landing_bound, closed_entropy_bound)],
    "S": [lambda bound=bound: bound(1.0, 0.0, 2, 1.0, 1.0) for bound in (landing_bound, closed_entropy_bound)],
    "delta": [lambda bound=bound: bound(1.0, 1.0, 2, 1.0, 0.0) for bound in (landing_bound, closed_entropy_bound)],
}
COUNT, FINITE = "whole number, at least 1", "positive and finite"
REFUSED = {
    # srvn
    "M": (lambda: theory.theorem_2_step(0.0, 1, 1, 1, 1), ("M must be", FINITE, "got 0.0")),
    "xi_l": (lambda: theory.theorem_2_descent(1, 1, 1, -1.0, 1), ("xi_l must be", FINITE, "got -1.0")),
    "lambda_min": (lambda: theory.descent_step(1, math.nan, 1), ("lambda_min must be", FINITE, "got nan")),
    "temperature": (lambda: theory.descent_step(1, 1, 1, -2.0), ("temperature", "not negative", "-2.0")),
    "rate": (lambda: theory.iterations_to(1, 1, 1.0), ("rate", "(0, 1)", "got 1.0")),
    "gap": (lambda: theory.iterations_to(0.0, 1, 0.5), ("gap must be", FINITE, "got 0.0")),
    # bbvi
    **{
        f"{name} of bounds, {number}": (call, (f"{name} must be positive and finite", "got 0"))
        for name, calls in POSITIVE.items()
        for number, call in enumerate(calls)
    },
    "floor of a domain": (lambda: Triangular().projected(EYE, 0.0), ("floor is the smallest scale", "got 0")),
    "no domain": (lambda: Unrestricted().projected(EYE, 1.0), ("no convex domain", "Use Triangular")),
    "second moment": (lambda: SquareRoot().second_moment_weights(2, 3.0), ("second moment", "symmetrised")),
    "order": (lambda: fisher_hyvarinen(Q, LogJoint(log_joint), 0), ("order", "at least 1", "got 0")),
    "floor of entries": (lambda: ProjectedRootGradient(0.0), ("floor", "diagonal entry", "positive")),
    "floor of eigenvalues": (lambda: ProjectedSquareRoot(0.0), ("floor", "eigenvalue", "positive")),
    "smoothness": (lambda: BBVI(Q, 0.1, -1.0, step_size=Constant()), ("smoothness is L", "curvature")),
    "BBVI": (lambda: BBVI(NATURAL, 0.1, 1.0, step_size=Constant()), ("ProjectedRootG", "Gaussian cannot"), PairError),
    "ProximalBBVI": (lambda: ProximalBBVI(NATURAL, 0.1, step_size=Constant()), ("ProximalRoot", "cannot"), PairError),
    "square root": (
        lambda: moved(ProjectedSquareRoot(1.0), 0.1, q=DIAGONAL).step(log_joint),
        ("ProjectedSquareRoot", "got DiagonalGaussian"),
        PairError,
    ),
    # flows
    "flow, coordinates": (lambda: flow(1.0, coordinates="C"), ("covariance, root, precision", "got 'C'")),
    **{
        f"flow, times {times}": (lambda times=times: flow(*times), ("times", "increasing", f"got {times}"))
        for times in ([], [-1.0, 2.0], [1.0, 1.0], [math.nan])
    },
    "flow, noise": (lambda: flow(1.0, estimator=Stein()), ("Stein gives noisy", "Use Quadrature()"), PairError),
    "flow, pattern": (lambda: flow(1.0, q=DIAGONAL), ("flows are", "got DiagonalGaussian"), PairError),
    **{
        f"flow, {name} {value}": (
            lambda options={name: value}: flow(1.0, **options),
            (f"{name} is", FINITE, f"got {value}"),
        )
        for name in ("rtol", "atol")
        for value in (0.0, math.nan)
    },
    "flow, start": (lambda: flow_of_counts(scale=100.0), ("not finite at t = 0", "smaller scale")),
    "flow, steep": (lambda: flow_of_counts(mean=400.0, scale=10.0), ("Required step", "relax rtol")),
    # ifvb
    "w": (lambda: AIFVB(flat(), w=-1.0), ("w is the power of the logarithm", "got -1.0")),
    "burn_in": (lambda: AIFVB(flat(), burn_in=-1), ("burn_in counts steps", "at least 0", "got -1")),
    "alpha": (lambda: PreconditionedVI(flat(), Exact(), alpha=1.5), ("alpha", "at most 1", "got 1.5")),
    "IFVB of a tensor": (lambda: ifvb.IFVB(TWO), ("flat posterior", "got Tensor")),
    "IFVB of a Gaussian": (lambda: ifvb.IFVB(Q), ("flat posterior", "got CholeskyGaussian")),
    "no path": (lambda: ifvb.IFVB(beta_of(), estimator=Pathwise(3)), ("Pathwise", "ControlVariate"), PairError),
    "AIFVB of a manifold": (lambda: ifvb.AIFVB(OrthogonalFlow(TWO, EYE, TWO)), ("manifold", "Use IFVB"), PairError),
    "ScoreFunction": (lambda: ScoreFunction(0), ("draws is the number B", COUNT, "got 0")),
    "ControlVariate": (lambda: ControlVariate(1), ("draws is the number B", "at least 2", "got 1")),
    "Pathwise": (lambda: Pathwise(0), ("draws is the number B", COUNT, "got 0")),
    "no gradient": (lambda: ifvb.IFVB(flat()).step(), ("no gradient", "uses up")),
    "ClosedForm": (lambda: ifvb.IFVB(flat(), estimator=ClosedForm()).step(3.0), ("of lambda", "got float")),
    "no inverse": (lambda: PreconditionedVI(flat(), Exact()).inverse_fisher(), ("or MatrixFree",), PairError),
    "two posteriors": (lambda: ifvb.IFVB([flat(), flat()]).step(log_joint), ("one posterior", "has 2"), PairError),
    "Exact of vec": (lambda: PreconditionedVI(VecGaussian(TWO, EYE), Exact()), ("VecGaussian is singular",), PairError),
    "run of two": (lambda: run(ifvb.IFVB(flat(2)), log_joint), ("one lambda", "holds (2,)", "Call step")),
    **{
        name: (
            lambda name=name: run(ifvb.IFVB(flat()), log_joint, **{name: 0}),
            (f"{name} counts steps", COUNT, "got 0"),
        )
        for name in ("max_steps", "window", "patience")
    },
    "repeats": (lambda: asymptotic_covariance(ifvb.AIFVB(flat()), log_joint, 1), ("repeats", "got 1")),
    "no step": (lambda: asymptotic_covariance(ifvb.AIFVB(flat()), log_joint), ("no step was taken",)),
    "marginal, batch": (lambda: marginal_sample(flat(2), EYE_4, 3), ("one lambda", "(2, 4)")),
    "marginal, sign": (lambda: marginal_sample(flat(), -EYE_4, 3), ("positive definite", "more repeats")),
    "domain": (lambda: marginal_sample(beta_of(), EYE, 9, None, TWO - 9), ("stay outside the domain",)),
    # ifvb, families
    "Beta, sign": (lambda: Beta(torch.tensor([1.0, -1.0])), ("Beta", "domain", "a and b are positive")),
    "Beta, NaN": (lambda: beta_of(math.nan), ("Beta starts at a vector of finite",)),
    "Beta, integers": (lambda: Beta(torch.tensor([1, 2])), ("Beta starts at", "torch.int64 of shape (2,)")),
    "MeanFieldGaussian": (lambda: MeanFieldGaussian(3), ("MeanFieldGaussian starts at", "(vector)")),
    "VecGaussian": (lambda: VecGaussian(THREE, 1.0), ("(mean, covariance)", "got covariance = 1.0")),
    "VechGaussian": (lambda: VechGaussian(3, torch.eye(3)), ("VechGaussian", "got mean = 3")),
    "FlatCholesky": (lambda: FlatCholesky(3, 1.0), ("FlatCholesky starts at", "(mean, covariance)")),
    "LowRankGaussian": (lambda: LowRankGaussian(4, 2, 1.0), ("LowRankGaussian", "(mean, factors, scale)")),
    "RankOneGaussian": (lambda: RankOneGaussian(4, 2, 1.0), ("RankOneGaussian", "(mean, factor, scale)")),
    "NormalInverseGamma": (lambda: NormalInverseGamma("x"), ("NormalInverseGamma starts at", "(vector)")),
    "OrthogonalFlow": (lambda: OrthogonalFlow(3, 3, 3), ("OrthogonalFlow starts at", "(b1, W2, b2)")),
    "v": (lambda: NormalInverseGamma(torch.tensor([0.0, 1.0, 0.0, 1.0])), ("v, a and b are positive",)),
    "mean field, length": (lambda: MeanFieldGaussian(THREE), ("an even length", "got 3")),
    "vec, sign": (lambda: VecGaussian(TWO, -EYE), ("VecGaussian", "Sigma is positive definite")),
    "vech, sign": (lambda: VechGaussian(TWO, -EYE), ("VechGaussian", "Sigma is positive definite")),
    "vech, triangle": (lambda: VechGaussian(TWO, ONE[:2].triu()), ("must be symmetric, of shape",)),
    "Cholesky, sign": (lambda: FlatCholesky(TWO, -EYE), ("symmetric and positive definite", "got [[-1.0")),
    "rank one, shapes": (lambda: RankOneGaussian(THREE, TWO + 1, THREE + 1), ("have one shape",)),
    "rank one, c": (lambda: RankOneGaussian(THREE, torch.ones(3), THREE), ("RankOne", "entry of c")),
    "rank one, b": (lambda: RankOneGaussian(THREE, THREE, torch.ones(3)), ("b is not zero",)),
    "low rank, shapes": (lambda: LowRankGaussian(THREE, EYE, THREE + 1), ("must fit", "got")),
    "low rank, c": (lambda: LowRankGaussian(THREE, ONE, THREE), ("LowRank", "no entry of c is zero")),
    "W2": (lambda: OrthogonalFlow(TWO, 2 * EYE, TWO), ("W2 must be orthogonal",)),
    "W1": (lambda: OrthogonalFlow(TWO, EYE, TWO, 2 * EYE), ("W1 must be orthogonal",)),
    "AffineCoupling": (lambda: AffineCoupling(1), ("dim ", "coordinates", "at least 2", "got 1")),
    **{
        f"one of two {kind.__name__}": (lambda kind=kind: kind(torch.zeros(2, 2), BOTH), ("positive definite", "[["))
        for kind in (VecGaussian, VechGaussian, FlatCholesky)
    },
    "draws of a Beta": (lambda: beta_of().rsample(3), ("Beta has no map", "the estimator ControlVariate"), PairError),
    "low rank": (
        lambda: LowRankGaussian(THREE, ONE, THREE + 1).exact_fisher_solve(torch.zeros(9)),
        ("LowRankGaussian", "IFVB"),
        PairError,
    ),
    # ifvb, networks
    "network, X": (lambda: network(X=THREE, y=THREE), ("X is (n, p) and y (n,)", "got (3,)")),
    "network, y": (lambda: network(y=THREE), ("X is (n, p) and y (n,)", "got (2, 2) and (3,)")),
    **{
        f"network, {hidden}": (lambda hidden=hidden: network(hidden), ("hidden lists the widths", f"got {hidden}"))
        for hidden in ((), (0,), (3, 0))
    },
    **{
        f"network, prior {prior}": (
            lambda prior=prior: network(prior=prior),
            ("prior has two positive", f"got {list(prior)}"),
        )
        for prior in ((1.0, 0.0), (0.0, 1.0))
    },
    "network, gamma": (lambda: network(y=EYE[0], gamma=0.0), ("gamma must be", FINITE, "got 0.0")),
    # ifvb, metrics
    "eps of 0": (lambda: Recursive(eps=0.0), ("eps is that of H_0", "positive", "got 0.0")),
    "eps below 0": (lambda: Recursive(eps=-1.0), ("eps is that of H_0", "positive", "got -1.0")),
    "c_beta": (lambda: Recursive(c_beta=-1.0), ("c_beta must be 0 or larger", "got -1.0")),
    "beta of 1/2": (lambda: Recursive(beta=0.5), ("beta lies in (0, alpha - 1/2)", "got 0.5")),
    "beta of 0": (lambda: Recursive(beta=0.0), ("beta lies in (0, alpha - 1/2)", "got 0.0")),
    "samples": (lambda: Recursive(0), ("samples counts draws", COUNT, "got 0")),
    "eps of MatrixFree": (lambda: MatrixFree(eps=0.0), ("eps is that of H_0", "got 0.0")),
    "keep": (lambda: MatrixFree(5, keep=9), ("keep counts the vectors", "at least 10", "got 9")),
    "samples of BatchFisher": (lambda: BatchFisher(0), ("samples counts draws", COUNT, "got 0")),
    "rho of BatchFisher": (lambda: BatchFisher(5, -0.1), ("rho is the damping", "0 or larger", "got -0.1")),
    "keep of Window": (lambda: Window(0), ("keep counts draws", COUNT, "got 0")),
    "samples of Window": (lambda: Window(5, 6), ("samples are new scores", "the 5 kept", "got 6")),
    "rho of Window": (lambda: Window(5, 5, 0.0), ("rho is the damping", "must be positive")),
    "no blocks": (lambda: Blocks(Recursive(), []), ("sizes lists the length", "got none")),
    "a block of 0": (lambda: Blocks(Recursive(), [0]), ("a block size", COUNT, "got 0")),
    "Blocks of Exact": (lambda: Blocks(Exact(), [1]), ("learns from scores", "got Exact")),
    "blocks of lambda": (lambda: Blocks(Recursive(), [3]).fresh(flat()), ("blocks have 3", "lambda has 4")),
    "betas of ifvb.Adam": (lambda: ifvb.Adam((1.0, 0.9)), ("betas are two weights", "got (1.0, 0.9)")),
    "NAGVAC": (lambda: NAGVAC().fresh(beta_of()), ("RankOneGaussian", "got Beta", "Use Exact, or IFVB"), PairError),
    "PublishedNAGVAC": (lambda: PublishedNAGVAC().fresh(beta_of()), ("RankOneGaussian", "got Beta"), PairError),
    **{
        f"alpha of {alpha}": (
            lambda alpha=alpha: check_exponents(PowerSchedule(alpha), None),
            ("alpha must lie in (1/2, 1)", f"got {alpha}", "Use PowerSchedule(0.75)"),
        )
        for alpha in (0.5, 0.3, 1.0)
    },
    # ngvi
    "covariance": (lambda: Natural.of(ONE, -torch.eye(1)), ("covariance must be positive definite",)),
    "moments": (lambda: Natural(ONE, torch.eye(1)).moments(), ("-Λ must be positive definite",)),
    "no moments": (lambda: ExpectationParameters(ONE[0], torch.eye(1)).conjugate(), ("Ξ - ξξᵀ must be",)),
    "Bonnet": (lambda: NGVI(Q, estimator=BonnetPrice(2)).step(log_joint), ("LinearTarget", "got LogJoint"), PairError),
    "gamma": (lambda: gradient_variance(NATURAL, NATURAL, 2.0), ("gamma is the step", "most 1", "got 2")),
    **{
        f"V of {bound.__name__}": (lambda bound=bound: bound(-1.0, 0), ("V is a variance", "0 or larger", "got -1.0"))
        for bound in (rate_bound, sharp_rate_bound)
    },
    **{
        f"T of {bound.__name__}": (lambda bound=bound, V=V: bound(*V, -1), ("T counts steps", "at least 0", "got -1"))
        for bound, V in ((rate_bound, [1.0]), (sharp_rate_bound, [1.0]), (covariance_factor, []))
    },
    "rows": (lambda: limiting_variance(regression(), NATURAL, 0), ("batch is the number", COUNT, "got 0")),
    "SubSampling": (lambda: SubSampling.of(regression("bernoulli")), ("linear regression", "got Bernoull"), PairError),
    "an empty average": (lambda: ExpectationAverage(Q).posterior(), ("average is empty", "update(q)")),
    "an average of a tensor": (lambda: ExpectationAverage(TWO), ("Gaussian posterior", "got Tensor"), PairError),
    "another q": (lambda: ExpectationAverage(Q).update(NATURAL), ("follows a CholeskyG", "got a NaturalG"), PairError),
    "a flat q": (lambda: ExpectationAverage(FlatCholesky.standard(1)), ("statistics", "got FlatCholesky"), PairError),
    "draws": (lambda: StatisticRegression(2), ("draws", "at least 3", "got 2")),
    "few draws": (
        lambda: NGVI(Dirichlet(1 + TWO), estimator=StatisticRegression(3)),
        ("2 statistics", "to 3 draws"),
        PairError,
    ),
    "statistics": (lambda: NGVI(Q, estimator=StatisticRegression()), ("sufficient", "got CholeskyGaussian"), PairError),
    "lr above 1": (lambda: NGVI(Gamma(1 + TWO), lr=1.5).step(lambda x: -x[..., 0]), ("convex", "got 1.5")),
    # tan
    "RootGD": (lambda: RootGD(NATURAL, lr=0.1, step_size=Constant()), ("RootTangent", "Use a Cholesky"), PairError),
    "norm": (lambda: NormalizedMomentum(norm="max"), ("euclidean, riemannian", "got 'max'")),
    "beta of 1": (lambda: NormalizedMomentum(beta=1.0), ("beta is the weight", "below 1", "got 1.0")),
    "beta below 0": (lambda: NormalizedMomentum(beta=-0.1), ("beta is the weight", "at least 0", "-0.1")),
    "betas": (lambda: Adam(betas=(0.9, 1.0)), ("betas are two weights", "below 1", "got (0.9, 1.0)")),
    "betas below 0": (lambda: Adam(betas=(-0.1, 0.9)), ("betas are two", "at least 0", "got (-0.1, 0.9)")),
    "eps of Adam": (lambda: Adam(eps=0.0), ("eps must be", FINITE, "got 0.0")),
    "Adam, curve": (lambda: moved(Geodesic(), 0.1, momentum=Adam()), ("Congruence", "or RootGradient()"), PairError),
    "SNGM": (lambda: moved(RootGradient(), momentum=NormalizedMomentum()), ("Gradient are", "Use Adam()"), PairError),
    "Adam on trial": (lambda: moved(NaturalGradient(), momentum=Adam()), ("SufficientDecrease", "lr=0.001"), PairError),
    "momentum in a radius": (
        lambda: moved(NaturalGradient(), momentum=NormalizedMomentum(), step_size=KLRadius(0.1)),
        ("NormalizedMomentum", "KLRadius needs", "lr=0.001"),
        PairError,
    ),
    "QuasiNewton": (lambda: SRVN(Q, lr=0.1, momentum=Adam(), metric=QuasiNewton()), ("QuasiNewton bends",), PairError),
    "block": (lambda: SlopeStop(block=0), ("block counts iterations", COUNT, "got 0")),
    "most steps": (lambda: SlopeStop(max_steps=0), ("max_steps counts iterations", COUNT, "got 0")),
    "averages in a line": (lambda: SlopeStop(blocks=1), ("blocks counts", "at least 2", "got 1")),
    # studies
    "DataCentred": (lambda: centred("DataCentred"), ("poisson_log", "weight 1", "got BernoulliProbit")),
    "ModeCentred": (lambda: centred("ModeCentred"), ("poisson_log", "weight 1", "got BernoulliProbit")),
    "HeldFlow": (held_flow, ("HeldFlow", "full covariance", "got DiagonalGaussian"), PairError),
    "hers": (without_data("tan2025.mixed", "hers"), ("Table 6", "Set TORCHNGVI_DATA", "glmm/hers.csv.gz")),
    "icu": (without_data("tan2025.logistic", "icu"), ("Table 5", "Set TORCHNGVI_DATA", "uci/icu.tsv.gz")),
    "bike": (without_data("wu2024.figure_1", "bike"), ("UCI Bike", "Set TORCHNGVI_DATA", "gp_uci")),
    "digits": (without_data("wu2024.figure_2", "digits"), ("MNIST", "Set TORCHNGVI_DATA", "mnist")),
    **{
        name: (
            without_data("godichon2023", "STUDIES", name, iterations=1, seeds=1),
            ("is not here", "Set TORCHNGVI_DATA", file),
        )
        for name, file in (("fig5", "wine_red.npz"), ("fig6", "vblab_germancredit.csv.gz"))
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    check_refusal(*REFUSED[name])
