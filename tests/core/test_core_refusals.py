"""What all doors refuse, and the words of each refusal: what was got, and what to do."""

import math
from functools import partial

import pytest
import scale_hosts
import torch
from arrow import ScalarArrow
from helpers import DTYPE, FORESTS, check_refusal, posterior_in

import torchngvi
from torchngvi import (
    VN,
    CholeskyGaussian,
    DataLogJoint,
    DiagonalGaussian,
    GeneralizedLinear,
    LogJoint,
    MixedModel,
    NaturalGaussian,
    NaturalGradientVI,
    PrecisionCholeskyGaussian,
    Stein,
    certificate,
    examine,
    fit,
    forget,
    laplace,
    prior_by_evidence,
    registry,
    rules,
)
from torchngvi.averaging import ExpectationAverage
from torchngvi.errors import PairError
from torchngvi.expectations import Quasi
from torchngvi.interfaces import Rule
from torchngvi.models import HalfNormal, MixedLogJoint, MixedPrior, Wishart
from torchngvi.numerics.arrays import writable
from torchngvi.optim.captured import CapturedStep
from torchngvi.structures import Dense, Diagonal, arrow, block_diagonal, forest, nested

NAN, INF = math.nan, math.inf
X, Y = torch.eye(3, dtype=DTYPE), torch.tensor([0.0, 1.0, 2.0], dtype=DTYPE)


def regression(X=X, y=Y, family="gaussian", **options):
    return GeneralizedLinear(X, y, family, **options)


def gaussian():
    return CholeskyGaussian(3, dtype=DTYPE)


def log_joint(theta):
    return -0.5 * theta.square().sum(-1)


def group_of_torch():
    VN(gaussian(), 0.1).add_param_group({"params": [torch.zeros(2)]})


def arrowed(rule):
    return NaturalGradientVI(PrecisionCholeskyGaussian(3, structure=ScalarArrow(3)), rule, lr=0.1)


def rested(mask):
    """A step of three members, with a mask of those that rest, which else would be broadcast."""
    model = GeneralizedLinear(torch.ones(3, 4, 2), torch.tensor([0.0, 1.0, 0.0, 1.0]).expand(3, 4))
    VN(CholeskyGaussian(2, (3,))).step(model, resting=mask)


def table(**columns):
    """Twelve rows of pandas."""
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"age": torch.arange(12.0), "week": pandas.array([*range(12)], "Int64")}).assign(**columns)


def days():
    return pytest.importorskip("pandas").Timestamp("2026-01-01")


def categories():
    return pytest.importorskip("pandas").Categorical(["f"] * 12)


def gaps():
    frame = table()
    return frame.assign(week=frame["week"].mask(frame["week"] < 2))


def of_table(frame, y=None):
    return GeneralizedLinear(frame, torch.arange(12) % 2 if y is None else y)


def captured(tolerance=1e-3):
    return CapturedStep(VN(CholeskyGaussian(2)), GeneralizedLinear(torch.eye(2), [0.0, 1.0]), tolerance=tolerance)


def attached(curvature):
    net = torch.nn.Linear(2, 2)
    posterior = torchngvi.network(net, num_data=10)
    torchngvi.attach(torch.optim.SGD(net.parameters(), lr=0.1), posterior, steps=10, curvature=curvature)


def spread_parameters_of_pyro():
    pyro = pytest.importorskip("pyro")
    from torchngvi.adapters.pyro import AutoGaussian, NaturalSVI

    guide = AutoGaussian(scale_hosts.pyro_model)
    NaturalSVI(scale_hosts.pyro_model, guide, pyro.optim.Adam({"lr": 0.1}), group=object())


ONES, GROUPS, COUNTS = torch.ones(12, 1, dtype=DTYPE), torch.arange(12) // 4, torch.arange(12) % 5
FACTORS = {"one factor": (ONES, GROUPS), "two": {"a": (ONES, GROUPS), "b": (ONES, torch.arange(12) % 3)}}
IN_THE_PATTERN = "VariationalNewton(), NaturalGradient() or LocalExponential()", "a structure of blocks"

REFUSED = {
    # arguments of the wrong kind
    "device": (lambda: CholeskyGaussian(2, device="gpu"), ("device", "got 'gpu'", 'Did you mean "cuda"?')),
    "meta": (lambda: CholeskyGaussian(2, device="meta"), ("device must hold numbers", '"meta" holds none')),
    "mean": (lambda: CholeskyGaussian(2, mean="x"), ("mean must be numbers", "got str")),
    "dtype": (lambda: DiagonalGaussian(2, dtype=torch.int32), ("dtype must be a floating-point", "int32")),
    "temperature": (lambda: regression(temperature=None), ("temperature is", "KL(q‖prior)", "got None.")),
    "temperature 2": (lambda: LogJoint(log_joint, None), ("temperature is", "the entropy", "got None.")),
    "laplace swapped": (lambda: laplace(regression(), gaussian()), ("laplace takes", "are swapped")),
    "fit swapped": (lambda: fit(regression(), gaussian()), ("fit", "GeneralizedLinear first", "swapped")),
    "certificate swapped": (lambda: certificate(regression(), gaussian()), ("certificate", "are swapped")),
    "examine swapped": (lambda: examine(regression(), gaussian()), ("examine takes", "are swapped")),
    "evidence": (lambda: prior_by_evidence(regression(), gaussian()), ("prior_by_evidence", "swapped")),
    "a class": (lambda: certificate(CholeskyGaussian, regression()), ("a posterior", "got the class")),
    "forget": (lambda: forget(gaussian(), [0]), ("forget takes", "got CholeskyGaussian first")),
    "add": (lambda: torchngvi.add(gaussian(), X, Y), ("add takes the result of a fit first",)),
    "around": (lambda: examine(gaussian(), log_joint, around=NAN), ("around must be finite",)),
    "samples": (lambda: Stein(2**63), ("draws", "a number of antithetic draws", f"got {2**63}")),
    "draws": (lambda: gaussian().sample(2**63), ("number of draws or of a shape", f"got {2**63}")),
    "seed": (lambda: Quasi(8, seed=2**64), ("seed is a seed", "such as 0 of less than 63 bits")),
    "generator": (lambda: gaussian().sample(3, generator=0), ("generator is a torch.Generator", "got 0")),
    "rate": (lambda: VN(gaussian(), torch.ones(2)), ("lr is", "one entry a member, ()", "got shape (2,).")),
    "complex rate": (lambda: VN(gaussian(), torch.ones(2) * 1j), ("lr must be real",)),
    "terms": (lambda: DataLogJoint(lambda theta: theta, log_joint, [X], 3), ("log_likelihood is called",)),
    "progress": (lambda: fit(gaussian(), regression(), progress="no"), ("True or False", "got 'no'.")),
    "a param group of torch": (
        group_of_torch,
        ("param group of VN", '{"posterior": q, "lr": 0.1}', "got the keys params", "to a torch optimizer"),
    ),
    "curvature": (lambda: attached(3), ("curvature", "SampledLabels(), or None", "got 3.")),
    "tolerance of a captured step": (lambda: captured("a"), ("tolerance", "norm", "a number", "got 'a'.")),
    "every 0": (lambda: captured().run(3, every=0), ("every counts the steps", "whole number", "got 0.")),
    "every 1.5": (lambda: captured().run(3, every=1.5), ("every counts the steps", "number", "got 1.5.")),
    "most": (lambda: captured().run("a"), ("most counts steps", "at least 1", "got 'a'.")),
    "Pyro": (spread_parameters_of_pyro, ("give q its gradient", "the model none", "leave optim=")),
    # tables of pandas
    "column of text": (
        lambda: of_table(table(sex="f")),
        ("X must be numbers", "got DataFrame", "the column 'sex' is of text", "code them by numbers"),
    ),
    "days": (lambda: of_table(table(sex="f", day=days())), ("X must", "'sex', 'day' are of text")),
    "categories of X": (lambda: of_table(table(sex=categories())), ("X must", "'sex' is of text")),
    "text": (lambda: writable(table(sex="f")), ("column 'sex' is of text", "code them by numbers")),
    "texts": (lambda: writable(table(sex="f", day=days())), ("'sex', 'day' are of text", "code them")),
    "categories": (lambda: writable(table(sex=categories())), ("column 'sex' is of text",)),
    "y of text": (lambda: of_table(table(), table()["week"].astype(str)), ("y must", "it is of text")),
    "gaps": (lambda: of_table(gaps()), ("X must be finite", "got 2 NaN or infinite of 24")),
    # members that rest
    "mask of two": (lambda: rested(torch.ones(2) > 0), ("of shape (3,)", "got torch.bool of shape (2,)")),
    "mask": (lambda: rested(torch.ones(3)), ("of shape (3,)", "got torch.float32 of shape (3,)")),
    "list of a mask": (lambda: rested([True] * 3), ("one entry a member, of shape (3,)", "got list")),
    # names of posteriors, methods and structures
    "dense": (lambda: registry.posterior("dense", 2), ("one of cholesky, precision", "got 'dense'")),
    "a method": (lambda: registry.check("adam", "cholesky"), ("one of vn, srvn", "got 'adam'")),
    "bwgd": (lambda: registry.check("bwgd", "cholesky"), ("method bwgd needs a learning rate", "scale")),
    "bbvi": (lambda: registry.check("proximal_bbvi", "diagonal"), ("bbvi needs a learning rate",)),
    "natural": (lambda: registry.check("bwgd", "natural"), ("BuresWasserstein", "Affine", "NaturalG"), PairError),
    "2,3": (lambda: registry.check("vn", "diagonal", "2,3"), ("diagonal has the structure diagonal",), PairError),
    "ifvb of cholesky": (
        lambda: registry.check("ifvb", "cholesky"),
        ("ifvb does not move posterior cholesky", "one of flat_cholesky, mean_field, vec, vech"),
        PairError,
    ),
    "vn of mean_field": (
        lambda: registry.check("vn", "mean_field"),
        ("vn does not move posterior mean_field", "one of cholesky, precision, natural, diagonal"),
        PairError,
    ),
    "structure of mean_field": (
        lambda: registry.check("ifvb", "mean_field", "full"),
        ("posterior mean_field", "takes no structure", "got 'full'", "Leave it out"),
        PairError,
    ),
    "0,2": (lambda: registry.posterior("natural", 2, structure="0,2"), ("one of full, diag", "got '0,2'")),
    "name of an arrow": (
        lambda: registry.pattern("arrow:8:1:2", 10),
        ("got 'arrow:8:1:2'", "has no name here", "--formula", "arrow(groups=8, local=1, globals=2)"),
    ),
    "3 in 4": (lambda: registry.pattern("1,2", 4), ("blocks of structure 1,2 hold 3 coordinates",)),
    # structures
    "memory 0": (lambda: rules.QuasiNewton(0), ("memory", "pairs kept", "at least 1", "got 0.")),
    "memory -1": (lambda: rules.QuasiNewton(-1), ("memory", "pairs kept", "at least 1", "got -1.")),
    "3 in 2": (lambda: arrow(groups=2, local=[1, 2, 3], globals=1), ("local", "of the 2 groups", "got 3.")),
    "groups unsaid": (lambda: arrow(local=1, globals=1), ("how many groups", "groups=n", "local=")),
    "no groups": (lambda: arrow(groups=0, local=1, globals=1), ("groups", "at least 1", "got 0.")),
    "no locals": (lambda: arrow(local=[], globals=1), ("local", "positive integers", "got [].")),
    "globals": (lambda: arrow(groups=2, local=1, globals=True), ("globals", "at least 1", "got True.")),
    "no parents": (
        lambda: nested(local=[1]),
        ("parents of each level", "one number of parameters a level", "got 0 lists of parents and 1 numbers"),
    ),
    "parents of a level": (
        lambda: nested([0, 2], [0, 0], local=[1, 1, 1]),
        ("parents of level 1", "from 0 to 1", "got 0 to 2."),
    ),
    "nested globals": (lambda: nested([0], local=[1, 1], globals=-1), ("globals", "at least 0", "got -1.")),
    "no sizes": (lambda: forest(parents=[-1], sizes=[]), ("one size a node", "got 1 parents and 0 sizes")),
    "a parent before its child": (
        lambda: forest(parents=[1, 0], sizes=[1, 1]),
        ("children stand before their parents", "roots have the parent -1", "node 1 of 2", "got 0."),
    ),
    "another dim": (lambda: CholeskyGaussian(3, structure=Dense(4)), ("D = 3", "got Dense(dim=4).")),
    "root of an arrow": (
        lambda: CholeskyGaussian(3, structure=ScalarArrow(3)),
        ("CholeskyGaussian", "ScalarArrow does not have", "PrecisionCholeskyGaussian or a NaturalGaussian"),
        PairError,
    ),
    "root of a forest": (
        lambda: CholeskyGaussian(7, structure=arrow(groups=2, local=2, globals=3)),
        ("CholeskyGaussian", "Forest does not have", "PrecisionCholeskyGaussian or a NaturalGaussian"),
        PairError,
    ),
    "root from a forest": (
        lambda: CholeskyGaussian.from_posterior(posterior_in(NaturalGaussian, FORESTS["arrow"])),
        ("CholeskyGaussian", "Forest does not have", "PrecisionCholeskyGaussian or a NaturalGaussian"),
        PairError,
    ),
    "average of an arrow": (
        lambda: ExpectationAverage(NaturalGaussian(3, structure=ScalarArrow(3))),
        ("ExpectationAverage", "ScalarArrow(dim=3) keeps those of the precision", "dense or block-diagonal"),
        PairError,
    ),
}
for tolerance in (INF, NAN, -1, 0, "x", None):
    call = partial(prior_by_evidence, gaussian(), regression(), tolerance=tolerance)
    REFUSED[f"tolerance {tolerance}"] = (call, ("tolerance", "log τ", "must be", f"got {tolerance!r}."))
for tolerance in (NAN, -1.0, INF):
    words = ("tolerance", "natural-gradient norm", "0 or larger, and finite", f"got {tolerance}.")
    REFUSED[f"captured tolerance {tolerance}"] = (partial(captured, tolerance), words)
for name, factors in FACTORS.items():
    for seed in ("a", None, 1.5, True, 2**70):
        call = partial(MixedModel(ONES, COUNTS, factors, "poisson_log").fit, seed=seed, progress=False)
        REFUSED[f"seed {seed!r}, {name}"] = (call, ("seed", f"{seed!r}"))
for prior, words in (
    (3, ("prior is a torchngvi.models.MixedPrior", "fixed_scale=2.5", "None", "got 3.")),
    (MixedPrior("a"), ("fixed_scale", "fixed effect", "positive and finite", "got 'a'")),
    (MixedPrior(-1), ("fixed_scale", "fixed effect", "positive and finite", "got -1")),
    (MixedPrior(sd=HalfNormal("a")), ("sd must have positive and finite numbers", "got HalfNormal(scale='a').")),
    (MixedPrior(sd=HalfNormal(), concentration="a"), ("concentration", "LKJ density", "positive", "got 'a'")),
    (MixedPrior(precision=3), ("precision of a prior", "Wishart(dof, scale), 'kass-natarajan' or None", "got 3.")),
    (MixedPrior(precision=Wishart("a", 1.0)), ("degrees of freedom of the Wishart prior", "r - 1 = 0", "got 'a'")),
):
    call = partial(MixedLogJoint, ONES, COUNTS, FACTORS["one factor"], "poisson_log", prior=prior)
    REFUSED[f"{words[0]} {words[-1]}"] = (call, words)
for family, words in (
    ("negbin", ("got 'negbin'. Did you mean", "torchngvi.models.NegativeBinomial(dispersion)?")),
    ("student_t", ("got 'student_t'. Did you mean", "torchngvi.models.StudentT(scale, dof)?")),
    ("student", ("got 'student'. Did you mean", "torchngvi.models.StudentT(scale, dof)?")),
    ("binomial", ("got 'binomial'. For two classes say bernoulli", "for counts", "poisson, or negative_binomial.")),
    ("poison", ("got 'poison'. Did you mean 'poisson'?",)),
    ("gamma ray", ("family", "got 'gamma ray'.")),
    (["gamma ray"], ("family", "got ['gamma ray'].")),
):
    REFUSED[f"family {family}"] = (partial(regression, family=family), words)
for sizes in ([], [0, 2], [True, 2], [1.0, 2]):
    words = ("sizes of blocks", "positive integers", f"got {sizes}.")
    REFUSED[f"blocks {sizes}"] = (partial(block_diagonal, sizes), words)
for given in ("diagonal", (1, 2), 3):
    words = ("structure", "torchngvi.structures", "block_diagonal([1, 4])", f"got {given!r}.")
    for kind in (CholeskyGaussian, NaturalGaussian):
        REFUSED[f"structure {given!r}, {kind.__name__}"] = (partial(kind, 3, structure=given), words)
for structure in (Dense(3), Diagonal(2)):
    words = ("DiagonalGaussian", "Diagonal(3)", f"got {structure}.")
    call = partial(DiagonalGaussian.from_moments, torch.zeros(3), torch.eye(3), structure=structure)
    REFUSED[f"{structure} of a mean field"] = (call, words, PairError)
for rule in [rule for rule in vars(rules).values() if isinstance(rule, type) and issubclass(rule, Rule)]:
    if rule.full_algebra:
        words = (rule.__name__, f"moves q by {rule.emits.__name__}", "PrecisionCholeskyGaussian")
        if rule.emits in PrecisionCholeskyGaussian.takes:
            words = (rule.__name__, "leave the pattern of ScalarArrow(dim=3)", *IN_THE_PATTERN)
        made = rule(0.1) if rule is rules.ProjectedSquareRoot else rule()
        REFUSED[f"{rule.__name__} of an arrow"] = (partial(arrowed, made), words, PairError)
for rule in (rules.Retraction, rules.Geodesic):
    q = posterior_in(PrecisionCholeskyGaussian, FORESTS["arrow"])
    words = (rule.__name__, "leave the pattern of Forest(3 of 2 below 2, 1 of 2)", *IN_THE_PATTERN)
    REFUSED[f"{rule.__name__} of a forest"] = (partial(NaturalGradientVI, q, rule(), lr=0.1), words, PairError)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    check_refusal(*REFUSED[name])
