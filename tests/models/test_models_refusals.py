"""What the models and their data refuse, and the words of each refusal: what was got, and what to do."""

import math
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import scipy.sparse
import torch
from helpers import DTYPE, check_refusal, randn

from torchngvi import (
    VN,
    CholeskyGaussian,
    DataLogJoint,
    GeneralizedLinear,
    LogJoint,
    Sharded,
    Stein,
    Streamed,
    fit,
    laplace,
    latents,
    marginal,
)
from torchngvi.adapters.files import Csv, Npy
from torchngvi.diagnostics import examine
from torchngvi.errors import PairError
from torchngvi.expectations import Fixed, Hessian, HessianVector, Independent, MonteCarlo, PiecewiseBound
from torchngvi.latents import MarginalLaplace
from torchngvi.models import (
    ExpectedFactor,
    ExpectedPenalty,
    GaussianNoise,
    MeanPenalty,
    NegativeBinomial,
    Regularized,
    ShardedDraws,
    SiteFactor,
    SoftmaxRegression,
    StudentT,
)
from torchngvi.models.standardize import Standardization
from torchngvi.posteriors import Product
from torchngvi.posteriors.flat import Dirichlet, Gamma
from torchngvi.posteriors.product import natural_form
from torchngvi.structures import block_diagonal

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")

X, Y = torch.ones(4, 2), torch.tensor([0.0, 1.0, 0.0, 1.0])
FOUR = torch.arange(4.0)
EYE = torch.eye(4)
TABLES = (GeneralizedLinear, SoftmaxRegression)


def logistic(rows=24, **options):
    X = randn(rows, 4, seed=1)
    return GeneralizedLinear(X, (X.sum(-1) + randn(rows, seed=2) > 0).double(), **options)


def softmax(rows=24):
    return SoftmaxRegression(randn(rows, 4, seed=1), torch.arange(float(rows)) % 3)


def gaussian(dim=4, *batch):
    return CholeskyGaussian(dim, batch, dtype=DTYPE)


def log_joint(theta):
    return -theta.square().sum(-1)


def fit_in_batches(q, model, batch_size=10, **options):
    return fit(q, model, batch_size=batch_size, progress=False, **options)


def prior_of_another_batch(**prior):
    model = GeneralizedLinear(X, Y.expand(3, 4), **prior)
    fit(CholeskyGaussian(2, batch_shape=(3,)), model, progress=False)


# latents that are integrated out

AT = torch.zeros(1, dtype=DTYPE)
NONE = torch.zeros(0, 2, dtype=torch.long)
PATH = [[0, 1], [1, 2], [2, 4]]


def flat(theta, u):
    return -0.5 * u.square().sum(-1)


def changing(theta, u):
    """An autoregression whose coupling vanishes at theta = 0."""
    e = u[..., 1:] - theta[..., :1].tanh() * u[..., :-1]
    return -0.5 * (e.square().sum(-1) + u[..., 0].square() + (u - 1).square().sum(-1) + theta[..., 0].square())


def too_wide():
    with mock.patch.object(latents.laplace, "_MOST", 100):
        marginal(flat, 12, AT, pattern=torch.arange(12)[None])


def full_disk(theta, u):
    raise RuntimeError("the disk is full")


SMALL = MarginalLaplace(lambda theta, u: flat(theta, u) * theta[..., 0].exp(), 2, AT)

# factors and products

Q4 = gaussian()
Q = Product(x=Gamma(torch.ones(3, 2, dtype=DTYPE)))
WIDE = Product(x=Dirichlet(torch.ones(60)), y=Dirichlet(torch.ones(60)))


def product(dtype=DTYPE):
    return Product(x=Gamma(torch.ones(2, dtype=dtype)))


# data in batches

ONE = torch.ones(2, 1), torch.tensor([0.0, 1.0])


def six(batches=None, num_data=6, **changes):
    """Six numbers around one theta."""
    parts = {
        "log_likelihood": lambda theta, x: -0.5 * (x - theta).square().sum(-1),
        "log_prior": lambda theta: -0.5 * theta.square().sum(-1),
        **changes,
    }
    x = torch.arange(6, dtype=DTYPE).split(3) if batches is None else batches
    return DataLogJoint(batches=x, num_data=num_data, **parts)


def second_derivatives(model, q):
    return torch.autograd.grad(model.negative_elbo(q), q.mean_probe, create_graph=True)


def second_derivatives_of_batches():
    theta = torch.ones(2, 1, dtype=DTYPE, requires_grad=True)
    return torch.autograd.grad(six().log_joint(theta).sum(), theta, create_graph=True)


def step_on(model, dim=1, **options):
    return VN(gaussian(dim), **options).step(model)


def prior_of_its_rows(X, y):
    return GeneralizedLinear(X.double(), y, classes=(0, 1), prior_precision=float(len(X)))


def npy(X, y, **options):
    """The reader of two arrays from files."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "X.npy", Path(folder) / "y.npy"
        for file, array in zip(files, (X, y), strict=True):
            np.save(file, array)
        return Npy(*files, **options)


REFUSED = {
    "noise of no square": (lambda: GaussianNoise(1e-320), ("noise is", "got 1e-320", "square is 0")),
    # likelihoods
    "counts": (
        lambda: GeneralizedLinear(torch.ones(3, 1), [0.5, 2.0, -1.0], NegativeBinomial(1.0)),
        ("negative binomial", "counts 0, 1, 2", "got 2 other values, the first 0.5", "Use family='gaussian'"),
    ),
    "bound of Student's t": (
        lambda: PiecewiseBound()(
            CholeskyGaussian(1), GeneralizedLinear(torch.ones(2, 1), [0.0, 1.0], StudentT(1.0, 3.0))
        ),
        ("PiecewiseBound", "StudentT", "Use Quadrature()", "bernoulli_logit"),
        PairError,
    ),
    "odd draws": (lambda: MonteCarlo(3), ("num_samples", "even", "antithetic", "got 3")),
    "no draws": (lambda: MonteCarlo(Independent(0)), ("num_samples", "at least 1", "got 0")),
    # priors
    "prior_precision of a softmax": (
        lambda: SoftmaxRegression(X, FOUR, prior_precision=torch.ones(2)),
        ("prior_precision", "a scalar, (6,) or (6, 6)", "got shape (2,)"),
    ),
    "draws of a mean": (
        lambda: step_on(Regularized(logistic(), MeanPenalty()), 4, lr=0.1, estimator=Stein(2)),
        ("MeanPenalty", "no part of a log joint", "Use Quadrature() or Autograd()", "ExpectedPenalty"),
        PairError,
    ),
    "wrapped": (lambda: Regularized(LogJoint(log_joint), MeanPenalty()), ("got LogJoint", "Add the")),
    "penalty": (lambda: Regularized(logistic(), 0.5), ("MeanPenalty(strength) or", "got float")),
    # softmax regression and classes
    "X of a softmax": (
        lambda: SoftmaxRegression(torch.ones(2, 4, 2), torch.ones(4)),
        ("softmax", "one dense matrix X", "got shape (2, 4, 2), torch.strided", "X.to_dense()", "one by one"),
    ),
    "1 class": (lambda: SoftmaxRegression(X, torch.ones(4)), ("two classes", "(4,) with 1", "split")),
    "batch of labels": (
        lambda: SoftmaxRegression(X, torch.arange(8.0).reshape(2, 4)),
        ("(4,) labels", "at least two classes", "got shape (2, 4) with 8", "target column", "split"),
    ),
    "odd nodes": (lambda: SoftmaxRegression(X, FOUR, num_nodes=33), ("num_nodes", "even", "got 33")),
    "6 nodes": (lambda: SoftmaxRegression(X, FOUR, num_nodes=6), ("num_nodes", "classes, 4", "got 6")),
    "weights": (lambda: SoftmaxRegression(X, FOUR, weights=-FOUR), ("weights", "negative", "got -3.")),
    "3 classes": (lambda: GeneralizedLinear(X, Y, classes=(0, 1, 2)), ("two classes", "[0.0, 1.0, 2.0]")),
    "classes of counts": (
        lambda: GeneralizedLinear(X, Y, "poisson_log", classes=(0, 1)),
        ("classes=", "Bernoulli", "got PoissonLog", "Leave it out"),
    ),
    # sparse rows
    "batch of sparse rows": (
        lambda: VN(CholeskyGaussian(4, (2,))).step(GeneralizedLinear(EYE.to_sparse_csr(), Y)),
        ("sparse X serves one posterior", "got a batch of shape (2,)", "X.to_dense()", "one by one"),
        PairError,
    ),
    "batch of targets": (
        lambda: GeneralizedLinear(EYE.to_sparse_csr(), Y.expand(2, 4)),
        ("sparse X serves one posterior", "y must be (4,)", "got shape (2, 4)", "X.to_dense()", "one by one"),
    ),
    "batch of sparse designs": (
        lambda: GeneralizedLinear(EYE.repeat(2, 1, 1).to_sparse_csr(), Y),
        ("sparse X serves one posterior", "a matrix", "got shape (2, 4, 4)", "X.to_dense()", "one by one"),
    ),
    "CSR": (lambda: SoftmaxRegression(EYE.to_sparse_csr(), Y), ("one dense matrix X", "sparse_csr")),
    "sparse NaN": (
        lambda: GeneralizedLinear(torch.tensor([1.0, math.nan, 1.0, 1.0]).diag().to_sparse_csr(), Y),
        ("X must be finite", "got 1 NaN or infinite of 4", "Drop or impute those rows"),
    ),
    # columns to standardise
    "vector of columns": (
        lambda: Standardization.of(torch.ones(3), None),
        ("X must be (N, D)", "standardised", "got shape (3,)"),
    ),
    "weights of zero": (
        lambda: Standardization.of(torch.ones(3, 1), torch.zeros(3)),
        ("no row has a positive weight", "at least one"),
    ),
    # factors and products
    "blocks": (
        lambda: natural_form(CholeskyGaussian(4, structure=block_diagonal([2, 2]))),
        ("all correlations or none", "got CholeskyGaussian"),
        PairError,
    ),
    "no sites": (lambda: Product(), ("Product", "at least one site")),
    "number for a site": (lambda: Product(x=3), ("torchngvi.posteriors.flat", "got int for 'x'")),
    "dot": (lambda: Product({"a.b": Q["x"]}), ("a text without a dot", "got 'a.b'")),
    "dtypes": (lambda: Product(x=Q["x"], y=Gamma(X[0])), ("one dtype", "'torch.float32', 'torch.float64'")),
    "value of y": (lambda: product().log_prob({"y": AT}), ("each of ['x']", "got ['y']")),
    "kl of a product": (lambda: product().kl(Q["x"]), ("the same sites", "got ['x'] and Gamma"), PairError),
    "factor of no sites": (lambda: SiteFactor(torch.log), ("at least one site", "once", "got")),
    "scale": (lambda: SiteFactor(torch.log, "x", scale=0), ("scale", "weight", "positive", "got 0.")),
    "function of a factor": (lambda: SiteFactor(3, "x"), ("function", "values of its sites", "got 3.")),
    "expectations": (lambda: ExpectedFactor(3, "x"), ("function", "expectation parameters", "got 3.")),
    "factor": (lambda: SiteFactor(torch.log, "y").prepare(Q), ("reads the sites ['y']", "lacks ['y']")),
    "expected": (lambda: ExpectedFactor(torch.log, "y").prepare(Q), ("the sites ['y']", "lacks ['y']")),
    "plates": (
        lambda: SiteFactor(torch.log, "x", plates=(4,)).prepare(Q),
        ("aligned on the right", "got the plates (4,) with x (3,)"),
    ),
    "value of a factor": (
        lambda: SiteFactor(lambda x: x.log().sum(-1), "x").prepare(Q),
        ("one value a draw and member", "(64, 3)", "got (64,)", "Give the shape"),
    ),
    "factor that is not finite": (
        lambda: SiteFactor(lambda x: (x - 1).log(), "x").prepare(Q),
        ("factor over x is not finite", "draws of q"),
    ),
    "wide": (lambda: SiteFactor(lambda x, y: x[..., 0], "x", "y").prepare(WIDE), ("3721", "2000 can be")),
    # latents that are integrated out
    "no function": (lambda: marginal(3, 2, AT), ("marginal", "theta and the latents", "got int")),
    "no latents": (lambda: marginal(flat, 0, AT), ("latents", "number", "vector", "at least 1", "got 0.")),
    "a table of latents": (lambda: marginal(flat, X, AT), ("latents is one vector", "got shape (4, 2)")),
    "no at": (lambda: marginal(flat, 2, torch.zeros(())), ("at is one vector", "got shape ()")),
    "shape": (
        lambda: marginal(lambda theta, u: -u.square(), 2, AT),
        ("theta (2, 1)", "latents (2, 2)", "one value each", "got shape (2, 2)", "sum over the last dimension"),
    ),
    "float": (lambda: marginal(lambda theta, u: 0.0, 2, AT, pattern=NONE), ("a real tensor", "got float.")),
    "complex": (
        lambda: marginal(lambda theta, u: flat(theta, u) * 1j, 2, AT, pattern=NONE),
        ("theta and the latents", "a real tensor", "got torch.complex128"),
    ),
    "independent": (
        lambda: marginal(lambda theta, u: log_joint(theta), 2, AT, pattern=NONE),
        ("does not depend on the latents", "second argument", "without detach()"),
    ),
    "not finite": (
        lambda: marginal(lambda theta, u: flat(theta, u) - math.inf, 2, AT, pattern=NONE),
        ("finite at theta = at", "got -inf", "another at=", "latents= as a vector"),
    ),
    "no maximum": (
        lambda: marginal(lambda theta, u: -flat(theta, u), torch.ones(2, dtype=DTYPE), AT, pattern=NONE),
        ("no mode of the latents", "after 100 steps", "a proper prior", "another at=", "latents= as a vector"),
    ),
    "an entry is missing": (
        lambda: marginal(lambda theta, u: flat(theta, u) - u[..., 0] * u[..., 2] * 0.1, 4, AT, pattern=[[0, 1]]),
        ("misses the pair of latents 0 and 2", "Add every pair", "leave pattern= out"),
    ),
    "another entry is missing, of a colour that a neighbour sees": (
        lambda: marginal(
            lambda theta, u: flat(theta, u) + 0.1 * (u[..., 0] + u[..., 3]) * u[..., 1], 5, AT, pattern=PATH
        ),
        ("misses the pair of latents 1 and 3", "Add every pair", "leave pattern= out"),
    ),
    "a coupling of another theta is missing": (
        lambda: marginal(changing, 6, AT, pattern=[]),
        ("misses the pair of latents 2 and 3", "Add every pair"),
    ),
    "a pattern that cannot be found": (
        lambda: marginal(lambda theta, u: (u.sqrt() - u).sum(-1), torch.ones(3, dtype=DTYPE), AT),
        ("Hessian", "not finite", "pattern cannot be found", "Declare it, by pattern="),
    ),
    "second derivatives": (
        lambda: laplace(gaussian(1), SMALL),
        ("marginal log joint", "differentiable once", "second derivatives", "Use fit(q, target)", "Stein"),
    ),
    "too many": (lambda: marginal(flat, 2049, AT), ("by pattern=", "got 2049 latents and no pattern")),
    "latent 2": (lambda: marginal(flat, 2, AT, pattern=[[0, 2]]), ("names latent 2", "from 0 to 1")),
    "a matrix of another size": (
        lambda: marginal(flat, 3, AT, pattern=scipy.sparse.eye(2)),
        ("sparse matrix", "3 x 3", "got shape (2, 2)"),
    ),
    "a pattern of words": (
        lambda: marginal(flat, 3, AT, pattern="lattice"),
        ("a pattern is a table of integers (n, k)", "sparse matrix", "arrow", "got str."),
    ),
    "a dense matrix": (
        lambda: marginal(flat, 3, AT, pattern=torch.eye(3)),
        ("a pattern is a table of integers (n, k)", "sparse matrix", "arrow", "got torch.float32 of shape (3, 3)"),
    ),
    "theta": (lambda: SMALL.log_joint(torch.zeros(2, dtype=DTYPE)), ("1 hyperparameters", "got shape (2,)")),
    "q": (
        lambda: SMALL.check(CholeskyGaussian(2)),
        ("q must be over the 1", "torch.float64 on cpu", "got 2 coordinates, torch.float32 on cpu"),
    ),
    "a source": (lambda: SMALL.latents(torch.zeros(2, 3)), ("(S, 1)", "a posterior", "got shape (2, 3)")),
    "quantile": (lambda: SMALL.latents(AT).quantile(1.0), ("probability", "0 and 1", "got 1.0")),
    "several probabilities": (
        lambda: SMALL.latents(AT).quantile([0.1, 0.9]),
        ("a quantile needs one probability", "got [0.1, 0.9]", "in turn"),
    ),
    "float of latents": (lambda: marginal(flat, 12.0, AT), ("latents", "number", "at least 1", "got 12.0")),
    "one latent too many": (
        lambda: marginal(lambda theta, u: -(u - torch.ones(300)).square().sum(-1), 301, AT, pattern=[]),
        ("theta (1, 1)", "latents (1, 301)", "tensor b (300)", "latents= says, 301", "at= has, 1"),
    ),
    "pairs in columns": (
        lambda: marginal(flat, 12, AT, pattern=torch.arange(12)[:10].reshape(2, 5)),
        ("pattern of shape (2, 5)", "pairs in its columns", "pass pattern.T", "two terms, a list"),
    ),
    "a log joint in float32": (
        lambda: marginal(lambda theta, u: flat(theta, u).float(), 12, AT, pattern=[]),
        ("in torch.float64 returns torch.float32", "too few", "compute in torch.float64", "at= in torch.float32"),
    ),
    "no pairs of draws": (lambda: SMALL.laplace_error(AT, pairs=0), ("pairs", "at least 2", "got 0")),
    "too wide": (too_wide, ("blocks of 12", "1.4e+02 numbers", "1.0e+02", "to theta", "fewer")),
    "its own error": (lambda: marginal(full_disk, 3, AT, pattern=[]), ("the disk is full",), RuntimeError),
    # models in batches
    "second derivatives of a share": (
        lambda: second_derivatives(Sharded(logistic(), 24), gaussian()),
        ("gradient of an expectation", "summed over batches or processes"),
    ),
    "no sum of data": (lambda: Sharded(LogJoint(log_joint), 4), ("data add up", "got LogJoint")),
    "no rows anywhere": (lambda: Sharded(None, 4), ("no rank has any rows",)),
    "rows of all": (lambda: Sharded(logistic(), 25), ("24 rows together (24), where num_data is 25",)),
    "spread twice": (lambda: Sharded(Sharded(logistic(), 24), 24), ("Wrap it once",)),
    "nothing of theta": (
        lambda: ShardedDraws(lambda theta: log_joint(theta.detach())).log_joint(torch.ones(2, 1, requires_grad=True)),
        ("does not depend on theta on any rank", "without detach()"),
    ),
    "iterator": (lambda: Streamed.linear(iter([ONE]), 2), ("batches must be iterable", "got list")),
    "no rows": (lambda: Streamed.linear([ONE], 0), ("num_data", "rows of a pass", "at least 1", "got 0.")),
    "no batches": (lambda: Streamed.linear([], 2), ("no batches", "Check the files")),
    "model of batches": (
        lambda: Streamed([ONE], 2, lambda X, y: X),
        ("Streamed", "expectations", "GeneralizedLinear", "got Tensor"),
    ),
    "no model of batches": (
        lambda: Streamed([ONE], 2, 3),
        ("model is a function of a batch", "GeneralizedLinear", "got 3"),
    ),
    "parts of a batch": (
        lambda: Streamed([ONE], 2, lambda X: X),
        ("a batch is what model= is called with", "(X, y)", "too many positional arguments"),
    ),
    "priors of batches": (
        lambda: step_on(Streamed([ONE, (ONE[0][:1], ONE[1][:1])], 3, prior_of_its_rows)),
        ("another prior than that of the first one", "counts once"),
    ),
    "a posterior for a target": (
        lambda: examine(Q4, Q4),
        ("a model or a log joint of theta is needed", "CholeskyGaussian", "A posterior comes first"),
    ),
    "measurements for labels": (
        lambda: SoftmaxRegression(X, [0.0, 0.5, 1.0, 2.0]),
        ("y must be labels, whole numbers", "got 0.5", "family='gaussian'"),
    ),
    "a mask in numbers": (
        lambda: logistic().minibatch(torch.arange(24) % 2),
        ("row numbers were expected", "24 numbers that are all 0 or 1", "mask.nonzero()[:, 0]"),
    ),
    "count": (lambda: step_on(Streamed.linear([ONE], 3)), ("2 rows where num_data is 3", "the number")),
    "classes of a batch": (
        lambda: step_on(Streamed.linear([ONE, (ONE[0], ONE[1] + 1)], 4)),
        ("a batch has the classes (1.0, 2.0)", "the first one (0.0, 1.0)", "coded by the labels"),
    ),
    "no files": (lambda: Csv("no_such_*.csv", "y"), ("there are no files",)),
    "no separator": (
        lambda: Csv(__file__, "y", separator=""),
        ("separator is the character between two cells", "got an empty text"),
    ),
    "one file of a list": (lambda: Csv([__file__, "no_such.csv"], "y"), ("there is no file 'no_such.csv'",)),
    "no file": (lambda: Npy("no_such_X.npy", "no_such_y.npy"), ("cannot be read as an npy file",)),
    "file of y": (lambda: npy(np.ones((3, 2)), np.ones(4)), ("each of 3 rows", "got shape (4,)")),
    "file of X": (lambda: npy(np.ones(4), np.ones(4)), ("must hold a matrix", "got shape (4,)")),
    "file by columns": (
        lambda: npy(np.asfortranarray(np.ones((3, 2))), np.ones(3)),
        ("numbers, stored by rows", "got float64 for X"),
    ),
    "rows of a batch": (
        lambda: npy(np.ones((3, 2)), np.ones(3), rows=0),
        ("rows counts the rows of a batch", "at least 1", "got 0"),
    ),
    # log joints of data in batches
    "log_likelihood": (lambda: six(log_likelihood=3), ("log_likelihood", "a function", "got 3.")),
    "log_prior": (lambda: six(log_prior=None), ("log_prior", "a function", "got None.")),
    "list_iterator": (lambda: six(iter([FOUR])), ("batches", "a DataLoader", "got list_iterator.")),
    "generator": (lambda: six(x for x in [FOUR]), ("batches", "a DataLoader or a list", "got generator.")),
    "number of batches": (lambda: six(6), ("batches", "a DataLoader or a list", "got int.")),
    "num_data": (lambda: six(num_data=0), ("num_data", "rows of a pass", "at least 1", "got 0.")),
    "temperature": (lambda: six(temperature=-1.0), ("temperature", "entropy", "0 or larger", "got -1.0.")),
    "Hessian": (second_derivatives_of_batches, ("in batches", "not differentiated again", "Stein()")),
    "curved": (lambda: step_on(six(), lr=0.1, estimator=Hessian(4)), ("in batches", "again", "Stein()")),
    "products": (lambda: step_on(six(), lr=0.1, estimator=HessianVector(4)), ("in batches", "again", "Stein")),
    "trials of noise": (
        lambda: step_on(six().minibatch(FOUR.double())),
        ("SufficientDecrease", "Stein gives noisy values", "a learning rate", "KLRadius(0.1)"),
        PairError,
    ),
    "trials of batches": (
        lambda: step_on(six().minibatch(FOUR.double()), estimator=Stein(Fixed(16))),
        ("SufficientDecrease", "a mini-batch gives another objective", "a learning rate"),
        PairError,
    ),
    "not one value a draw": (
        lambda: six(log_likelihood=lambda theta, x: -(x - theta).square()).log_joint(torch.ones(2, 1, dtype=DTYPE)),
        ("theta of shape (1, 1)", "one value a draw, shape (1,)", "got shape (1, 3)", "Sum over data"),
    ),
    "batch_size of a softmax": (
        lambda: fit_in_batches(gaussian(8), softmax()),
        ("batch_size", "GeneralizedLinear", "DataLogJoint"),
    ),
    "batch_size of a log joint": (
        lambda: fit_in_batches(Q4, LogJoint(log_joint), optimizer=VN(Q4, lr=0.1)),
        ("batch_size", "GeneralizedLinear", "DataLogJoint"),
    ),
    "batch_size of a batch": (
        lambda: fit_in_batches(gaussian(4, 2), logistic()),
        ("batch_size", "GeneralizedLinear", "DataLogJoint"),
    ),
    "dim of q": (lambda: fit_in_batches(gaussian(3), logistic()), ("4 coefficients and q has 3", "dim=4")),
}
for bad in (0.0, -1.0, math.nan, math.inf):
    words = ("positive and finite", f"got {bad}.")
    REFUSED[f"scale {bad}"] = (partial(StudentT, bad, 4.0), ("scale", "noise", *words))
    REFUSED[f"dof {bad}"] = (partial(StudentT, 1.0, bad), ("dof", "degrees of freedom", *words))
    REFUSED[f"dispersion {bad}"] = (partial(NegativeBinomial, bad), ("dispersion", "r", *words))
    for kind in (MeanPenalty, ExpectedPenalty):
        REFUSED[f"{kind.__name__}, {bad}"] = (partial(kind, bad), ("strength", "regulariser", *words))
for pieces in (0, 1, 3, 21, 102):
    words = ("pieces", "even", "from 2 to 100", f"got {pieces}.")
    REFUSED[f"{pieces} pieces"] = (partial(PiecewiseBound, pieces), words)
for index, words in (
    (None, ("a list of row numbers", "got NoneType (")),
    (3, ("at least one row number", "got torch.int64 of shape ()")),
    ([], ("at least one row number", "got torch.float32 of shape (0,)")),
    ([0.5], ("at least one row number", "got torch.float32 of shape (1,)")),
    (torch.ones(24, dtype=torch.bool), ("at least one row number", "got torch.bool of shape (24,)", "mask.nonzero()")),
    ([0, 24], ("row numbers", "from 0 to 23", "got 24.")),
    ([0, -1], ("row numbers", "from 0 to 23", "got -1.")),
):
    for model in (logistic(), softmax()):
        REFUSED[f"rows {words[-1]} of {type(model).__name__}"] = (partial(model.minibatch, index), words)
for name in ("prior_mean", "prior_precision"):
    for shape in ((3, 3, 2), (2, 3, 2), (4, 2)):
        REFUSED[f"{name} {shape}"] = (
            partial(prior_of_another_batch, **{name: torch.ones(shape)}),
            (
                f"a {name.removeprefix('prior_')} of shape {shape}",
                "q is a batch (3,)",
                "2 coefficients",
                "one prior for all",
                "one a member, (3, 2)",
            ),
        )
for matrix, words in (
    ([[1.0, 0.5], [0.25, 1.0]], ("shape (D, D)", "symmetric", "up to 0.25", "(A + A.mT) / 2", "(*batch, 1, D)")),
    ([[1.0, 2.0], [2.0, 1.0]], ("positive definite", "got a smallest eigenvalue of -1.", "Add a multiple")),
    (torch.ones(2, 3), ("a scalar, (2,) or (2, 2)", "got shape (2, 3).")),
):
    for kind in TABLES:
        call = partial(kind, X, Y, prior_precision=matrix)
        REFUSED[f"{words} of {kind.__name__}"] = (call, ("prior_precision", *words))
for kind in TABLES:
    REFUSED[f"labels of {kind.__name__}"] = (
        partial(kind, torch.ones(5, 2), [0.0, 1.0, 2.0, 3.0, 2.0], classes=(0, 1)),
        ("labels", "classes [0.0, 1.0]", "got 2, 3 in 3 rows", "every class", "classes="),
    )
    for classes, shown in (([1], "[1.0]"), ([0, 1, 0], "[0.0, 1.0, 0.0]"), (3, "3.0")):
        call = partial(kind, X, Y, classes=classes)
        words = ("classes", "two different labels", "in their order", f"got {shown}.")
        REFUSED[f"classes {shown} of {kind.__name__}"] = (call, words)
for layout in (torch.sparse_coo, torch.sparse_csc):
    words = ("sparse X", "stored by rows", f"got {layout}", "X.to_sparse_csr()")
    REFUSED[f"{layout}"] = (lambda layout=layout: GeneralizedLinear(EYE.to_sparse(layout=layout), Y), words)
for read, given in {"frame": (), "probed": (), "unframe": (0, 0), "tangent": (0,), "moved": (None,)}.items():
    REFUSED[f"{read} of a product"] = (
        partial(getattr(Q, read), *given),
        ("no mean vector and no root", "its sites", "one by one"),
        PairError,
    )
REFUSED["coordinates of a product"] = (lambda: Q.coordinates, ("no mean vector and no root", "one by one"), PairError)
LATENTS = marginal(changing, 6, AT).latents(torch.zeros(2, 1, dtype=DTYPE))
for n in (0, -1, 2.5):
    call = partial(LATENTS.sample, n)
    REFUSED[f"{n} draws of latents"] = (call, ("n is", "number of draws", "at least 1", f"got {n}."))
for change, start, whole, halves in (
    (lambda theta, x: -0.5 * (x - theta).square().mean(-1), 0.0, "-0.833333", "-1.25"),
    (lambda theta, x: -0.5 * (x - theta).square().sum(-1) - 0.5 * theta.square().sum(-1), 2.0, "-4.5", "-6.5"),
    (lambda theta, x: -0.5 * (x - theta).square().sum(-1) - 1.0, 0.0, "-3.5", "-4.5"),
):
    words = ("log_likelihood", "sum over the rows", f"a batch gives {whole}", halves, "do not average", "log_prior")
    call = partial(fit, gaussian(1), six(log_likelihood=change), progress=False)
    REFUSED[f"{whole} by a fit"] = (call, (*words[:2], "a batch gives", *words[-2:]))
    x, theta = torch.arange(6, dtype=DTYPE), torch.full((2, 1), start, dtype=DTYPE)
    for name, parts in (("halves", x.split(3)), ("a first batch of one row", [x[:1], x[:3], x[4:]])):
        target = six(parts, log_likelihood=change)
        for what, each in (("all", target), ("a mini-batch", target.minibatch(x[:3]))):
            REFUSED[f"{whole} in {name}, {what}"] = (partial(each.log_joint, theta), words)
for batch, got in (
    (np.ones(3), "ndarray"),
    (3, "int"),
    (torch.ones(()), "()"),
    (torch.ones(0), "(0,)"),
    ((), "nothing"),
    ({}, "nothing"),
    ((torch.ones(3), torch.ones(2, 1)), "(3,), (2, 1)"),
    ((torch.ones(3), (torch.ones(3), torch.ones(3))), "(3,), tuple"),
    ({"x": torch.ones(3), "names": ["a", "b", "c"]}, "(3,), list"),
):
    target, words = six([batch], num_data=3), ("a batch", "rows first", "tuple, list or dict of tensors", f"got {got}.")
    for call in (partial(target.log_joint, torch.ones(1, 1)), partial(target.minibatch, batch)):
        REFUSED[f"{type(batch).__name__} of {got}, {call.func.__name__}"] = (call, words)
for size in (0, -3):
    call = partial(fit_in_batches, gaussian(), logistic(), size)
    REFUSED[f"batch_size {size}"] = (call, ("batch_size", "rows", "at least 1", f"got {size}."))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    check_refusal(*REFUSED[name])
