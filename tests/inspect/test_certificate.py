"""`torchngvi.certificate`: a bound of the distance from the best Gaussian that is never violated."""

import copy
import math
import pickle
import re

import pytest
import torch
from helpers import randn

from torchngvi import (
    VN,
    CholeskyGaussian,
    DiagonalGaussian,
    GeneralizedLinear,
    LogJoint,
    NaturalGaussian,
    PrecisionCholeskyGaussian,
    Sharded,
    certificate,
    fit,
)
from torchngvi.diagnostics import Certificate
from torchngvi.diagnostics.certificate import Curvature, _Here, local_bound, row_constants
from torchngvi.models import MeanPenalty, NegativeBinomial, Regularized, SoftmaxRegression, StudentT
from torchngvi.models.likelihoods import BernoulliLogit, PoissonLog
from torchngvi.structures import block_diagonal

DTYPE, N, D = torch.float64, 60, 4


X = randn(N, D)
ETA = X @ torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=DTYPE)
CLASSES = (ETA + randn(N, seed=1) > 0).to(DTYPE)
COUNTS = torch.poisson((0.5 * ETA).exp(), generator=torch.Generator().manual_seed(2))
A = randn(D, D, seed=3)
FULL = 0.2 * torch.eye(D, dtype=DTYPE) + 0.05 * A @ A.mT
MODELS = {
    "logistic": lambda: GeneralizedLinear(X, CLASSES, prior_precision=0.3),
    "logistic, full prior": lambda: GeneralizedLinear(X, CLASSES, prior_precision=FULL),
    "logistic, hot": lambda: GeneralizedLinear(X, CLASSES, temperature=2.0),
    "logistic, cold": lambda: GeneralizedLinear(X, CLASSES, temperature=0.3),
    "logistic, weights": lambda: GeneralizedLinear(X, CLASSES, weights=torch.arange(N) % 3, prior_precision=0.3),
    "probit": lambda: GeneralizedLinear(X, CLASSES, "probit"),
    "Poisson": lambda: GeneralizedLinear(X, COUNTS, "poisson", prior_precision=0.3),
    "negative binomial": lambda: GeneralizedLinear(X, COUNTS, NegativeBinomial(1.5), prior_precision=0.3),
    "normal": lambda: GeneralizedLinear(X, ETA, "gaussian"),
    "softmax": lambda: SoftmaxRegression(X, torch.arange(N) % 3),
}
SHARP = [name for name in MODELS if name not in ("probit", "softmax")]
POSTERIORS = {
    "dense": lambda dim: CholeskyGaussian(dim, dtype=DTYPE),
    "natural": lambda dim: NaturalGaussian(dim, dtype=DTYPE),
    "precision": lambda dim: PrecisionCholeskyGaussian(dim, dtype=DTYPE),
    "diagonal": lambda dim: DiagonalGaussian(dim, dtype=DTYPE),
    "blocks": lambda dim: CholeskyGaussian(dim, structure=block_diagonal([1, dim - 1]), dtype=DTYPE),
}


def loss(q, model):
    return model.negative_elbo(q).item()


def least(model, make=POSTERIORS["dense"]):
    q = make(model.dim)
    assert fit(q, model, tolerance=1e-9, progress=False).converged
    return q, loss(q, model)


@pytest.mark.accuracy
@pytest.mark.parametrize("name", MODELS)
def test_it_is_never_violated(name):
    """At 20 random q, near and far, narrow and wide."""
    model = MODELS[name]()
    star, lowest = least(model)
    for seed in range(20):
        shift, spread = 10.0 ** (seed % 5 - 3), 10.0 ** (seed % 4 - 2)
        C = spread * torch.eye(model.dim, dtype=DTYPE) + 0.3 * spread * randn(model.dim, model.dim, seed=seed).tril()
        C.diagonal().abs_()
        q = CholeskyGaussian(model.dim, mean=star.mean + shift * randn(model.dim, seed=50 + seed), scale=C, dtype=DTYPE)
        found = certificate(q, model)
        assert found.bound >= (loss(q, model) - lowest) * (1 - 1e-9)


def moved(star, make, size, seed):
    """A q of the family at about ½ size² nats from its optimum."""
    q, dim = make(star.dim), star.dim
    mean = star.mean + size / math.sqrt(dim) * star.stddev * randn(dim, seed=seed)
    q.initialize_(mean, torch.linalg.cholesky(star.covariance) if q.structure.widest > 1 else star.stddev)
    return q


@pytest.mark.sparse(4)
@pytest.mark.parametrize("kind", POSTERIORS)
@pytest.mark.parametrize("name", SHARP)
def test_it_is_sharp_near_the_optimum(name, kind):
    """At gaps of about 1e-4, 1e-6 and 1e-8 nats the bound is at most 1.1, 1.01 and 1.001 times the gap."""
    model = MODELS[name]()
    make = POSTERIORS[kind]
    star, lowest = least(model, make)
    for size, ratio in ((1e-2, 1.1), (1e-3, 1.01), (1e-4, 1.001)):
        q = moved(star, make, size, seed=4)
        gap, found = loss(q, model) - lowest, certificate(q, model)
        assert found.kind == "local"
        assert gap * (1 - 1e-3) <= found.bound <= ratio * gap
        assert found.about == pytest.approx(gap, rel=0.05)


@pytest.mark.accuracy
def test_sums_over_sobol_points_have_another_optimum():
    """So that a bound of the distance from it would be none from the best Gaussian: 4e-4 nats on six classes."""
    design = randn(60, 3)
    classes = (design @ randn(3, 6, seed=1) + 2 * randn(60, 6, seed=2)).argmax(1)
    few, many = (SoftmaxRegression(design, classes, prior_precision=0.1, num_nodes=n) for n in (512, 2**14))
    q, best = (CholeskyGaussian(15, dtype=DTYPE) for _ in range(2))
    fit(q, few, tolerance=1e-8, progress=False)
    fit(best, few, tolerance=1e-4, progress=False)
    fit(best, many, tolerance=1e-3, progress=False)
    assert loss(q, many) - loss(best, many) > 3e-4
    assert certificate(q, few).kind == "none"


ODD = {  # what nobody has in mind
    "scales": lambda: GeneralizedLinear(X * torch.tensor([1e4, 1.0, 1e-4, 1e2], dtype=DTYPE), CLASSES),
    "a column twice": lambda: GeneralizedLinear(torch.cat([X, X[:, :1]], 1), CLASSES, prior_precision=1e-8),
    "few weights": lambda: GeneralizedLinear(X, CLASSES, weights=torch.arange(N) % 10 == 0),
    "wide weights": lambda: GeneralizedLinear(X, CLASSES, weights=10 ** (3 * randn(N, seed=9))),
    "separated": lambda: GeneralizedLinear(X, (X[:, 0] > 0).to(DTYPE), prior_precision=1e-6),
    "offsets": lambda: GeneralizedLinear(X, CLASSES, offset=30 * randn(N, seed=5).sign()),
    "rare counts": lambda: GeneralizedLinear(X, COUNTS, "poisson", offset=torch.full((N,), -30.0)),
    "dispersed": lambda: GeneralizedLinear(X, COUNTS, NegativeBinomial(1e-3)),
    "cold": lambda: GeneralizedLinear(X, COUNTS, "poisson", temperature=1e-3),
    "a far prior": lambda: GeneralizedLinear(X, CLASSES, prior_precision=1e-4 * FULL, prior_mean=100.0),
    "one row": lambda: GeneralizedLinear(X[:1, :1], [1.0], classes=(0, 1), prior_precision=1e-4),
    "few rows": lambda: GeneralizedLinear(randn(5, 12), CLASSES[:5], prior_precision=0.1),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_models(name):
    """From far and near, under a dense and a diagonal q."""
    model = ODD[name]()
    for make in (POSTERIORS["dense"], POSTERIORS["diagonal"]):
        star, lowest = least(model, make)
        for size in (30.0, 1.0, 0.1, 1e-3, 1e-5):
            q = moved(star, make, size, seed=3)
            gap, rounding = loss(q, model) - lowest, 1e-14 * (abs(lowest) + abs(loss(q, model)) + N)
            assert certificate(q, model).bound >= gap * (1 - 1e-6) - rounding


@pytest.mark.accuracy
def test_along_a_run_of_wide_predictors():
    """Separated classes and a wide prior: predictors have standard deviations of up to ten, and more at the start."""
    model = GeneralizedLinear(X, (X[:, 0] > 0).to(DTYPE), prior_precision=0.01)
    star, lowest = least(model)
    q, kinds = CholeskyGaussian(D, scale=20.0, dtype=DTYPE), set()
    opt = VN(q)
    for _ in range(40):
        gap, found = loss(q, model) - lowest, certificate(q, model)
        kinds.add(found.kind)
        if found.kind == "rounding":
            break
        assert found.bound >= gap * (1 - 1e-6) - 1e-12
        opt.step(model)
    assert kinds == {"prior", "local", "rounding"}


class TestIdentities:
    def test_columns_have_trailing_squares(self):
        """½|tril(U⁻¹G)|² is the sum over the columns j of ½ G_jᵀ (Λ_{j..,j..})⁻¹ G_j."""
        structure = CholeskyGaussian(D, dtype=DTYPE).structure
        g, G = randn(D, seed=5), randn(D, D, seed=6).tril()
        mean, root = Curvature.of(FULL, structure).squares(g, G)
        assert mean == pytest.approx((g @ torch.linalg.solve(FULL, g)).item(), rel=1e-12)
        columns = sum(G[j:, j] @ torch.linalg.solve(FULL[j:, j:], G[j:, j]) for j in range(D))
        assert root == pytest.approx(columns.item(), rel=1e-12)

    def test_the_prior_alone_is_exact_for_itself(self):
        """Without data and with C optimal: L - L* = ½λ|m|², and the bound is it."""
        model = GeneralizedLinear(X, CLASSES, weights=torch.zeros(N), prior_precision=0.3)
        q = CholeskyGaussian(D, mean=randn(D, seed=7), scale=0.3**-0.5, dtype=DTYPE)
        here = _Here.of(q, model)
        found = here.by_prior(Curvature.of(here.prior, here.structure))
        assert found == pytest.approx(0.15 * q.mean.square().sum().item(), rel=1e-10)

    @pytest.mark.sparse(3)
    @pytest.mark.parametrize("likelihood", [BernoulliLogit(), PoissonLog()])
    @pytest.mark.parametrize(("mean", "sd"), [(0.0, 0.1), (1.0, 1.0), (-3.0, 2.5), (0.5, 6.0)])
    def test_constants_bound_forms(self, likelihood, mean, sd):
        """Of 2,000 forms h in (1, z, w), by a fine rule: κ, κ̄, q and q̄ hold, and random forms come near to each."""
        if isinstance(likelihood, PoissonLog) and sd > 3:
            pytest.skip("the constants of e^η at such spreads are beyond the rule of this test")
        y = torch.ones(1, dtype=DTYPE)
        one = torch.tensor([1.0], dtype=DTYPE)
        constants = row_constants(likelihood, mean * one, sd * one, y, one)
        z = torch.linspace(-14, 14, 3001, dtype=DTYPE)
        eta = (mean + sd * z).requires_grad_()
        (first,) = torch.autograd.grad(likelihood.energy(eta, y).sum(), eta, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), eta)
        weight = second * torch.exp(-0.5 * z.square()) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
        a, b, c = randn(3, 2000, seed=8).unbind()
        part = a[:, None] + b[:, None] * z  # of h, beside c w
        h2 = (part.square() + c[:, None].square()) @ weight
        h4 = (part**4 + 6 * part.square() * c[:, None].square() + 3 * c[:, None] ** 4) @ weight
        size = a.square() + b.square() + c.square()
        for ratio, bound in ((size / h2, 1 / constants.least), (h2 / size, constants.most),
                             (h4 / size.square(), constants.quartic), (h4 / h2.square(), constants.white)):  # fmt: skip
            assert float(ratio.max()) <= float(bound) * (1 + 1e-9)
            assert float(ratio.max()) >= 0.4 * float(bound)

    def test_curvature_stays_along_a_line(self):
        """Jensen's step: E f''(η + th)h² ≥ e^(-tρ) E f''h²."""
        z = torch.linspace(-12, 12, 4001, dtype=DTYPE)
        weight = torch.exp(-0.5 * z.square())
        for seed in range(20):
            e, s, a, b = randn(4, seed=seed).tolist()
            h = a + b * z
            f2 = lambda eta: torch.sigmoid(eta) * torch.sigmoid(-eta)  # noqa: E731
            start = f2(e + s * z) * weight
            rho = ((start * h.abs() ** 3).sum() / (start * h.square()).sum()).item()
            for t in (0.1, 1.0, 3.0):
                later = (f2(e + s * z + t * h) * weight * h.square()).sum()
                assert later >= math.exp(-t * rho) * (start * h.square()).sum() * (1 - 1e-9)

    def test_the_function_of_the_decrement(self):
        assert local_bound(2.0, 0.5) == math.inf
        assert local_bound(2.0, 1e-6) == pytest.approx(0.5e-12, rel=1e-5)
        t = 0.999e-3  # the series meets the formula
        assert local_bound(1.0, t) == pytest.approx(t + (1 - t) * math.log1p(-t), rel=1e-8)


class TestResults:
    def test_of_a_fit(self):
        model = MODELS["logistic"]()
        result = fit(CholeskyGaussian(D, dtype=DTYPE), model, progress=False)
        found = result.certificate
        assert found.bound < 1e-9
        assert found.kind in ("local", "rounding")
        again = pickle.loads(pickle.dumps(result))  # noqa: S301
        assert again.certificate.reason == "this result has no target: it is a copy, or was read from a file"
        assert copy.copy(result).certificate.kind == "none"

    def test_single_precision(self):
        """The certificate is of the q in float32, evaluated in float64."""
        model = GeneralizedLinear(X.float(), CLASSES.float(), prior_precision=0.3)
        result = fit(CholeskyGaussian(D), model, progress=False)
        _, lowest = least(MODELS["logistic"]())
        q = CholeskyGaussian(D, dtype=DTYPE)
        q.initialize_(result.posterior.mean.double(), result.posterior.scale_tril.double())
        gap, found = loss(q, model.to(DTYPE)) - lowest, result.certificate
        assert gap - 1e-9 <= found.bound < 1e-4

    def test_sentences(self):
        assert str(Certificate(0.5, math.nan, "prior", "")) == (
            "At most 0.5 nats above the best Gaussian of its family, by the curvature of the prior alone, which may be "
            "thousands of times too large."
        )
        assert str(Certificate(1e-12, 1e-15, "rounding", "")) == (
            "The best Gaussian of its family, up to the rounding of the objective, 1e-12 nats."
        )

    @pytest.mark.parametrize(
        ("q", "target", "why"),
        [
            (
                lambda: CholeskyGaussian(2),
                lambda: LogJoint(lambda x: -x.square().sum(-1)),
                "LogJoint is not known to be",
            ),
            (
                lambda: CholeskyGaussian(D, dtype=DTYPE),
                lambda: GeneralizedLinear(X, ETA, StudentT(1.0, dof=4)),
                "StudentT is not known to be log-concave",
            ),
            (lambda: CholeskyGaussian(D, (2,), dtype=DTYPE), MODELS["logistic"], "q is a batch .2,.; ask for one"),
            (
                lambda: CholeskyGaussian(D, dtype=DTYPE),
                lambda: GeneralizedLinear(X, CLASSES, temperature=0.0),
                "at the temperature 0 there is no best Gaussian",
            ),
            (
                lambda: CholeskyGaussian(D, dtype=DTYPE),
                lambda: GeneralizedLinear(X.to_sparse_csr(), CLASSES),
                "the design is sparse; pass X.to_dense",
            ),
            (
                lambda: CholeskyGaussian(3 * D, dtype=DTYPE),
                lambda: SoftmaxRegression(X, torch.arange(N) % 4),
                "expectations of SoftmaxRegression are right to few digits.*best Gaussian is another one",
            ),
            (
                lambda: CholeskyGaussian(D, dtype=DTYPE),
                lambda: MODELS["logistic"]().minibatch([0, 1, 2]),
                "the objective of a mini-batch is another one than that of all rows",
            ),
            (
                lambda: CholeskyGaussian(D, dtype=DTYPE),
                lambda: Regularized(MODELS["logistic"](), MeanPenalty(0.1)),
                "BernoulliLogit is not known to be log-concave|may not be convex",
            ),
            (
                lambda: CholeskyGaussian(D, dtype=DTYPE),
                lambda: Sharded(MODELS["logistic"](), N),
                "its rows are spread over processes; ask for that of a model of all rows",
            ),
            (
                lambda: CholeskyGaussian(D, mean=torch.full((D,), 1e300, dtype=DTYPE), dtype=DTYPE),
                MODELS["Poisson"],
                "is not finite at q",
            ),
        ],
    )
    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
    def test_where_nothing_is_proved(self, q, target, why):
        with torch.no_grad():
            found = certificate(q(), target())
        assert (found.kind, found.bound) == ("none", math.inf)
        assert str(found).startswith("No certificate: ")
        assert re.search(why, found.reason)

    def test_inference_mode(self):
        q, model = CholeskyGaussian(D, dtype=DTYPE), MODELS["logistic"]()
        with torch.inference_mode():
            inside = certificate(q, model)
        assert inside == certificate(q, model)

    def test_another_precision(self):
        """Of a q or of data in float32, which float64 has exactly."""
        q, model = CholeskyGaussian(D, dtype=DTYPE), MODELS["logistic"]()
        assert certificate(CholeskyGaussian(D), model) == certificate(q, model)
        single = model.to(torch.float32)
        assert certificate(q, single) == certificate(q, single.to(DTYPE)) == certificate(CholeskyGaussian(D), single)
