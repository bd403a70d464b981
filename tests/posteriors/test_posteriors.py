"""What every posterior offers its user: one class over all posteriors and batch shapes."""

import copy
import functools
import math
import pickle

import pytest
import reference
import torch
from helpers import (
    BASE,
    BLACK_BOX,
    DIFFERENCE,
    DIM,
    DTYPE,
    EXACT,
    IDENTITY,
    POSTERIORS,
    RULES,
    Watch,
    batches,
    close,
    difference,
    for_each,
    kept,
    posteriors,
    randn,
    random_posterior,
    random_root,
    same_as,
    unbiased,
)

from torchngvi import VN, GeneralizedLinear, LogJoint, fit
from torchngvi.averaging import ExpectationAverage
from torchngvi.diagnostics import Extremes
from torchngvi.errors import InputError
from torchngvi.expectations import (
    Autograd,
    BonnetPrice,
    Fixed,
    Hessian,
    HessianVector,
    MonteCarlo,
    Quadrature,
    Reparametrized,
    ScoreFunction,
)
from torchngvi.interfaces import (
    Affine,
    Congruence,
    Coordinates,
    FullPrior,
    LogTangent,
    Prior,
    Root,
    RootTangent,
    Tangent,
)
from torchngvi.numerics import linalg, sparse
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian, NaturalGaussian, PrecisionCholeskyGaussian
from torchngvi.structures import Diagonal, arrow, block_diagonal

samples = pytest.mark.parametrize("sample", [(), (3,), (4, 2)], ids=str)


def mvn(q):
    """The same Gaussian in torch.distributions."""
    return torch.distributions.MultivariateNormal(q.mean.detach(), q.covariance.detach())


def along(name, q, x, R):
    """h -> the actual member of the family at m + h C x and C(I + hR)."""
    structure = q.structure
    root = q.frame().dense()
    mean, direction = q.mean.detach(), structure.to_dense(R)

    def at(h):
        moved = root + h * root @ direction
        return same_as(name, q, mean + h * (root @ x[..., None])[..., 0], moved @ moved.mT)

    return at


def direction_of(q, batch, seed):
    """A direction for both probes; R neither symmetric nor triangular, in q's pattern."""
    return randn(*batch, DIM, seed=seed), q.structure.from_dense(0.7 * randn(*batch, DIM, DIM, seed=seed + 1))


def directional(q, value, x, R):
    """The derivative that autograd gives along (x, R), one a member."""
    probes = q.mean_probe, q.root_probe
    a, W = torch.autograd.grad(value.sum(), probes, allow_unused=True, materialize_grads=True)
    matrix = (W * R).flatten(len(q.batch_shape)).sum(-1)
    return (a * x).sum(-1) + matrix


@posteriors
@batches
class TestConformance:
    """Every posterior, every batch shape."""

    def test_moments(self, name, batch):
        """All moments are those of the start, in every form."""
        mean, root = randn(*batch, DIM, seed=0), kept(name, random_root(batch, 1))
        q = POSTERIORS[name](DIM, batch, mean=mean, scale=root)
        V = root @ root.mT
        assert (q.dim, q.batch_shape, q.dtype, q.device.type) == (DIM, torch.Size(batch), DTYPE, "cpu")
        close(q.mean, mean, IDENTITY)
        close(q.covariance, V, IDENTITY)
        close(q.precision, torch.linalg.inv(V), IDENTITY)
        close(q.scale_tril, root, IDENTITY)
        close(q.scale_tril.tril(), q.scale_tril, 0.0)
        close(q.variance, V.diagonal(dim1=-2, dim2=-1), IDENTITY)
        close(q.stddev, V.diagonal(dim1=-2, dim2=-1).sqrt(), IDENTITY)
        frame = q.frame()
        dense = frame.dense()
        close(dense @ dense.mT, V, IDENTITY)
        close(frame.variance, V.diagonal(dim1=-2, dim2=-1), IDENTITY)
        close(dense.triu() if frame.upper else dense.tril(), dense, 0.0)  # the triangle that it says it is
        assert q.probed().upper is frame.upper
        close(q.log_det_root(), 0.5 * torch.logdet(V), IDENTITY)

    @pytest.mark.parametrize("own", [False, True])
    def test_marginal_variance(self, name, batch, own):
        """Var[xᵀθ] = xᵀVx, for one design or one a member."""
        q = random_posterior(name, batch)
        X = randn(*(batch if own else ()), 5, DIM, seed=3)
        close(q.marginal_variance(X), (X @ q.covariance @ X.mT).diagonal(dim1=-2, dim2=-1), IDENTITY)

    def test_starts(self, name, batch):
        """A scalar, standard deviations or a lower factor; tensors and numbers mix."""
        eye, full = torch.eye(DIM, dtype=DTYPE), torch.ones(*batch, DIM, dtype=DTYPE)
        q = POSTERIORS[name](DIM, batch, dtype=DTYPE)
        close(q.mean, 0 * full, 0.0)
        close(q.covariance, torch.diag_embed(full), EXACT)
        assert q.initialize_(2.0, 0.5) is q
        close(q.mean, 2 * full, EXACT)
        close(q.covariance, 0.25 * torch.diag_embed(full), EXACT)
        sd, row = randn(*batch, DIM, seed=4).abs() + 0.2, randn(DIM, seed=5)
        q.initialize_(row, sd)
        close(q.mean, row * full, IDENTITY)
        close(q.covariance, torch.diag_embed(sd**2), IDENTITY)
        q.initialize_(scale=row.abs())
        close(q.mean, 0 * full, EXACT)
        close(q.covariance, torch.diag_embed(full * row**2), IDENTITY)
        root = random_root(batch, 6)
        q.initialize_(0.1, root)
        close(q.covariance, kept(name, root) @ kept(name, root).mT, IDENTITY)
        assert not torch.equal(q.covariance, eye.expand_as(q.covariance))

    def test_a_start_is_copied(self, name, batch):
        mean, root = randn(*batch, DIM, seed=0), random_root(batch, 1)
        q = POSTERIORS[name](DIM, batch, mean=mean, scale=root)
        before = q.covariance.clone(), q.mean.clone()
        mean.zero_()
        root.zero_()
        assert torch.equal(q.covariance, before[0])
        assert torch.equal(q.mean, before[1])

    def test_sample_moments(self, name, batch):
        """Mean and covariance of draws, by z-tests over all entries."""
        q, count = random_posterior(name, batch), 4000
        theta = q.sample((count,), torch.Generator().manual_seed(7))
        assert theta.shape == (count, *batch, DIM)
        assert not theta.requires_grad
        centred = theta - q.mean
        unbiased(theta, q.mean)
        unbiased(centred[..., :, None] * centred[..., None, :], q.covariance)

    @samples
    def test_samples_are_reproducible(self, name, batch, sample):
        q = random_posterior(name, batch)
        draw = [q.rsample(sample, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
        assert draw[0].shape == (*sample, *batch, DIM)
        assert torch.equal(draw[0], draw[1])
        assert not torch.equal(draw[0], draw[2])
        assert torch.equal(draw[0], q.sample(sample, torch.Generator().manual_seed(1)))

    def test_push_noise_is_differentiable_in_the_noise(self, name, batch):
        q, z = random_posterior(name, batch), randn(4, *batch, DIM, seed=8).requires_grad_()
        w = randn(4, *batch, DIM, seed=9)
        (gradient,) = torch.autograd.grad((w * q.push_noise(z)).sum(), z)
        close(gradient, (q.frame().dense().mT @ w[..., None])[..., 0], EXACT)

    @samples
    def test_log_prob(self, name, batch, sample):
        """Value and ∂/∂θ against torch.distributions; θ without batch dimensions is the same point for every member."""
        q, theta = random_posterior(name, batch), randn(*sample, *batch, DIM, seed=10).requires_grad_()
        actual, expected = q.log_prob(theta), mvn(q).log_prob(theta)
        close(actual, expected, IDENTITY)
        weights = randn(*sample, *batch, seed=11)
        slopes = [torch.autograd.grad((weights * x).sum(), theta)[0] for x in (actual, expected)]
        close(slopes[0], slopes[1], IDENTITY)
        with torch.no_grad():
            close(q.log_prob(theta), expected, IDENTITY)
            close(q.log_prob(shared := randn(DIM, seed=10)), mvn(q).log_prob(shared), IDENTITY)

    @pytest.mark.sparse(4)
    def test_forward_kl_gradient(self, name, batch):
        """The gradient of log q(θ) at fixed θ, as maximum likelihood or a forward KL needs it."""
        q, theta = random_posterior(name, batch), randn(6, *batch, DIM, seed=13)
        x, R = direction_of(q, batch, 12)
        at = along(name, q, x, R)
        expected = difference(lambda h: mvn(at(h)).log_prob(theta).mean(0))
        close(directional(q, q.log_prob(theta).mean(0), x, R), expected, DIFFERENCE)

    def test_log_prob_of_own_samples(self, name, batch):
        """The whole derivative of log q(θ) along θ = m + C z is that of -log|C|: 0 for p, -tr R for R."""
        q, z = random_posterior(name, batch), randn(5, *batch, DIM, seed=14)
        value = q.log_prob(q.push_noise(z)).sum()
        a, W = torch.autograd.grad(value, (q.mean_probe, q.root_probe))
        close(a, torch.zeros_like(a), EXACT)
        close(q.structure.diagonal(W), torch.full_like(a, -5.0), IDENTITY)

    @pytest.mark.sparse(5)
    @pytest.mark.parametrize("other", POSTERIORS)
    def test_kl_gradient(self, name, batch, other):
        q, p = random_posterior(name, batch), random_posterior(other, batch, seed=21)
        x, R = direction_of(q, batch, 12)
        at = along(name, q, x, R)

        def kl(h):
            there = at(h)
            moments = there.mean, there.covariance, p.mean, p.covariance
            return for_each(reference.gaussian_kl, batch, *moments).detach()

        close(directional(q, q.kl(p), x, R), difference(kl), DIFFERENCE)

    def test_marginal_variance_gradient(self, name, batch):
        q, X = random_posterior(name, batch), randn(5, DIM, seed=15)
        x, R = direction_of(q, batch, 12)
        at = along(name, q, x, R)
        value = q.marginal_variance(X).sum(-1)
        expected = difference(lambda h: at(h).marginal_variance(X).sum(-1).detach())
        close(directional(q, value, x, R), expected, DIFFERENCE)

    def test_a_pickle(self, name, batch):
        q = random_posterior(name, batch)
        back = pickle.loads(pickle.dumps(q))
        assert torch.equal(back.mean, q.mean)
        assert torch.equal(back.covariance, q.covariance)

    def test_state_by_assignment(self, name, batch):
        """load_state_dict(assign=True) replaces the buffers: nothing remembered may survive."""
        q, other = random_posterior(name, batch), random_posterior(name, batch, seed=30)
        _ = other.mean, other.covariance
        other.load_state_dict(q.state_dict(), assign=True)
        close(other.mean, q.mean, EXACT)
        close(other.covariance, q.covariance, EXACT)

    def test_conversion_keeps_the_tensors(self, name, batch):
        """After .float() and .double() an optimizer still holds the probes."""
        q = random_posterior(name, batch)
        before = [id(x) for x in (*q.coordinates, q.mean_probe, q.root_probe)]
        mean = q.mean.clone()
        q.float()
        assert q.dtype is torch.float32
        assert q.mean.dtype is torch.float32
        assert q.rsample((2,)).dtype is torch.float32
        torch.nn.Sequential(q).double()
        assert [id(x) for x in (*q.coordinates, q.mean_probe, q.root_probe)] == before
        close(q.mean, mean, 1e-4)
        q.rsample((2,)).sum().backward()
        assert q.mean_probe.grad.dtype is DTYPE

    def test_writes_are_seen(self, name, batch):
        """What is remembered is forgotten when the buffers change, also from outside."""
        q = random_posterior(name, batch)
        V = q.covariance.clone()
        matrix = q.coordinates.matrix
        matrix.mul_(4.0)
        factor = {"natural": 1 / 4, "precision": 1 / 16}.get(BASE.get(name, name), 16)
        close(q.covariance, factor * V, IDENTITY)


class TestFromMoments:
    @batches
    def test_round_trip(self, batch):
        root, mean = random_root(batch, 1), randn(*batch, DIM, seed=2)
        q = CholeskyGaussian.from_moments(mean, root @ root.mT)
        assert q.batch_shape == torch.Size(batch)
        close(q.mean, mean, EXACT)
        close(q.scale_tril, root, EXACT)


class TestEigenvalues:
    """`linalg.eigh` never raises: it says where a decomposition failed."""

    def test_members_apart(self, monkeypatch):
        """Where torch gives up, it gives up on a whole batch: the members are then taken one by one."""
        matrix = torch.diag_embed(torch.tensor([[2.0, 1.0], [4.0, 3.0], [math.inf, 1.0]], dtype=DTYPE))
        own = torch.linalg.eigh

        def gives_up(A):
            if A.ndim > 2 or float(A[0, 0]) == 4:
                raise torch.linalg.LinAlgError("the algorithm failed to converge")
            return own(A)

        values, vectors, ok = linalg.eigh(matrix)
        assert ok.tolist() == [True, True, False]
        monkeypatch.setattr(torch.linalg, "eigh", gives_up)
        values, vectors, ok = linalg.eigh(matrix)
        assert ok.tolist() == [True, False, False]
        assert values.tolist() == [[1.0, 2.0], [1.0, 1.0], [1.0, 1.0]]
        assert torch.equal(vectors[1:], torch.eye(2, dtype=DTYPE).expand(2, 2, 2))


class TestErrors:
    @posteriors
    def test_a_number_of_draws(self, name):
        q, seeds = POSTERIORS[name](2), [torch.Generator().manual_seed(0) for _ in range(2)]
        assert torch.equal(q.sample(10, seeds[0]), q.sample((10,), seeds[1]))

    @posteriors
    def test_a_refused_start_changes_nothing(self, name):
        q = random_posterior(name)
        before = [x.clone() for x in q.coordinates]
        for arguments in ((torch.full((DIM,), torch.nan), 1.0), (0.0, -1.0), (0.0, torch.ones(DIM, DIM))):
            with pytest.raises(InputError):
                q.initialize_(*arguments)
            assert all(torch.equal(x, old) for x, old in zip(q.coordinates, before, strict=True))

    def test_a_stale_graph_is_an_error(self):
        """A backward pass after an in-place step must not use the new root."""
        q = random_posterior("cholesky")
        loss = q.rsample((2,)).square().sum()
        q.initialize_(0.0, 1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_which_moves_each_takes():
    straight = {Tangent, RootTangent, LogTangent}
    assert CholeskyGaussian.takes == DiagonalGaussian.takes == {Congruence, *straight, Affine, Root}
    assert PrecisionCholeskyGaussian.takes == {Congruence, *straight}
    assert NaturalGaussian.takes == {Congruence, Tangent}


def test_an_impossible_move_does_not_pass():
    with pytest.raises(NotImplementedError):
        NaturalGaussian(2).moved(Affine(torch.eye(2), torch.zeros(2)))


def test_repr():
    assert repr(CholeskyGaussian(2, (3,))) == "CholeskyGaussian(2, batch_shape=(3,), dtype=torch.float32)"
    assert repr(NaturalGaussian(2, dtype=DTYPE)) == "NaturalGaussian(2, dtype=torch.float64)"
    assert repr(DiagonalGaussian(2)) == "DiagonalGaussian(2, dtype=torch.float32)"
    blocks = CholeskyGaussian(3, structure=block_diagonal([1, 2]))
    assert repr(blocks) == "CholeskyGaussian(3, dtype=torch.float32, structure=UnequalBlocks(sizes=(1, 2)))"
    tree = PrecisionCholeskyGaussian(4, structure=arrow(groups=3, local=1, globals=1))
    assert repr(tree) == "PrecisionCholeskyGaussian(4, dtype=torch.float32, structure=Forest(3 of 1 below 1, 1 of 1))"


@pytest.mark.parametrize("name", POSTERIORS)
def test_a_move_that_makes_a_variance_infinite_or_zero_is_refused(name):
    """Of finite coordinates, member by member."""
    wide, narrow = 1e150, 1e-100
    scale = torch.tensor([wide, 1.0, narrow], dtype=DTYPE)[:, None].expand(3, 2)
    q = POSTERIORS[name](2, (3,), scale=scale, dtype=DTYPE)
    factor = torch.tensor([1e-9, 4.0, 1e130 if BASE.get(name, name) == "natural" else 1e200], dtype=DTYPE)
    N = factor[:, None, None] * torch.eye(2, dtype=DTYPE)
    new, ok = q.moved(Congruence(q.structure.from_dense(N), torch.zeros(3, 2, dtype=DTYPE)))
    assert (
        all(bool(part.isfinite().all()) for part in new) or BASE.get(name, name) == "natural"
    )  # 1/V' is infinite there
    assert ok.tolist() == [False, True, False]
    q.assign(new, ok)
    assert q.stddev[:, 0].tolist() == pytest.approx([wide, 0.5, narrow])


@pytest.mark.parametrize("name", POSTERIORS)
def test_what_the_test_of_the_cone_has_computed_is_that_of_the_new_coordinates(name):
    """After a move of some members, and after they are restored."""
    q = POSTERIORS[name](2, (2,), mean=0.5, scale=2.0, dtype=DTYPE)
    old, first = q.snapshot(), copy.deepcopy(q).frame()
    N = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=DTYPE).expand(2, 2, 2)
    new, ok = q.moved(Congruence(q.structure.from_dense(N), torch.ones(2, 2, dtype=DTYPE)))
    for where in (torch.tensor([True, False]), ok):
        q.assign(new, where)
        fresh = copy.deepcopy(q).frame()
        assert torch.equal(q.frame().mean, fresh.mean)
        assert torch.equal(q.frame().root, fresh.root)
    assert not torch.equal(q.frame().root, first.root)
    q.assign(old, ok)
    assert torch.equal(q.frame().mean, first.mean)
    assert torch.equal(q.frame().root, first.root)


WIDE = 3000


CLASSES = [0.0, 1.0, 0.0, 1.0, 1.0]


def linear_model():
    return GeneralizedLinear(torch.eye(5, WIDE, dtype=DTYPE), CLASSES)


def wide(**start):
    return DiagonalGaussian(WIDE, dtype=DTYPE, **start)


class TestDiagonalIsLinear:
    """Time and memory of mean field are those of D numbers, in every call but those that return a D x D matrix."""

    MATRICES = {"covariance", "precision", "scale_tril"}  # these

    def test_the_watch_sees_a_matrix(self):
        with Watch(WIDE), pytest.raises(AssertionError, match="makes 9000000 numbers, D = 3000"):
            wide().covariance  # noqa: B018

    CALLS = {
        "rsample": lambda q: q.rsample((4,)).square().sum().backward(),
        "sample": lambda q: q.sample((4,)),
        "push_noise": lambda q: q.push_noise(torch.zeros(2, WIDE, dtype=DTYPE)),
        "log_prob": lambda q: q.log_prob(q.mean).backward(),
        "entropy": lambda q: q.entropy().backward(),
        "kl": lambda q: q.kl(wide(mean=1.0, scale=2.0)).backward(),
        "marginal_variance": lambda q: q.marginal_variance(torch.ones(2, WIDE, dtype=DTYPE)).sum().backward(),
        "whiten": lambda q: q.whiten(q.mean),
        "log_det_root": lambda q: q.log_det_root(),
        "variance": lambda q: q.variance,
        "stddev": lambda q: q.stddev,
        "dtype": lambda q: q.dtype,
        "device": lambda q: q.device,
        "coordinates": lambda q: q.coordinates,
        "initialize_": lambda q: q.initialize_(1.0, torch.full((WIDE,), 2.0)),
        "from_posterior": lambda q: DiagonalGaussian.from_posterior(q),
        "from_prior": lambda q: DiagonalGaussian.from_prior(Prior(q.mean, torch.ones(WIDE, dtype=DTYPE))),
        "frame": lambda q: q.frame(),
        "probed": lambda q: q.probed(),
        "snapshot": lambda q: q.assign(q.snapshot(), torch.tensor(True)),
        "assign": lambda q: q.assign(q.snapshot(), torch.tensor(True)),
        "restore": lambda q: q.restore(q.snapshot()),
        "drop_gradients": lambda q: q.drop_gradients(),
        "settled": lambda q: q.settled().__enter__(),
        "sym_outer": lambda q: q.sym_outer(torch.ones(4, WIDE, dtype=DTYPE), torch.ones(4, WIDE, dtype=DTYPE)),
        "one_triangle": lambda q: q.one_triangle(torch.ones(4, WIDE, dtype=DTYPE), torch.ones(4, WIDE, dtype=DTYPE)),
        "whitener": lambda q: q.whitener(),
        "loss": lambda q: q.loss(Quadrature()(q, linear_model())),
        "carried": lambda q: q.carried(q.mean),
        "from_marginals": lambda q: DiagonalGaussian.from_marginals(q.mean, q.variance, q.structure),
        "unframe": lambda q: q.unframe(q.mean, q.scale),
        "local": lambda q: q.local(packet(q)),
        "norm2": lambda q: q.norm2(q.local(packet(q))),
        "tangent": lambda q: q.tangent(packet(q)),
        "euclidean": lambda q: q.euclidean(packet(q)),
        "moved": lambda q: q.moved(Congruence(q.scale, q.mean)),
        "warped": lambda q: q.warped().log_prob(q.warped().sample()),
        "extra_repr": lambda q: repr(q),
    }
    # of moments, whose covariance is D x D
    GIVEN_A_MATRIX = {"from_moments", "kept_covariance", "kept_precision"}

    def test_every_public_name_is_here(self):
        own = {name for name in dir(DiagonalGaussian) if not name.startswith("_") and name not in dir(torch.nn.Module)}
        data = {
            "coding",
            "engine",
            "framed",
            "domain",
            "upper",
            "coordinate_names",
            "takes",
            "structure",
            "batch_shape",
            "dim",
            "mean_probe",
            "root_probe",
        }
        assert own - data == set(self.CALLS) - {"extra_repr"} | self.MATRICES | self.GIVEN_A_MATRIX

    @pytest.mark.parametrize("name", CALLS)
    def test_methods(self, name):
        q = wide(scale=0.5)
        with Watch(WIDE):
            self.CALLS[name](q)

    @pytest.mark.parametrize("rule", RULES)
    def test_rules(self, rule):
        q = wide(scale=0.5)
        with Watch(WIDE):
            NaturalGradientVI(q, RULES[rule](), lr=1e-3).step(lambda: q.kl(wide()))
            NaturalGradientVI(q, RULES[rule]()).step(lambda: q.kl(wide()))

    @pytest.mark.parametrize("name", ["stein", "closed_entropy", "score_function", "path_derivative", "reparametrized"])
    def test_estimators(self, name):
        estimators = BLACK_BOX | {"score_function": ScoreFunction, "reparametrized": Reparametrized}
        q = wide(scale=0.5)
        with Watch(WIDE):
            VN(q, lr=1e-3, estimator=estimators[name](8)).step(lambda theta: -theta.square().sum(-1))

    @pytest.mark.accuracy
    def test_curvature_by_columns(self):
        s = torch.linspace(0.5, 1.5, WIDE, dtype=DTYPE)
        q = wide(scale=s)
        with Watch(WIDE):
            packet = HessianVector(2, chunk=256)(q, LogJoint(lambda theta: -theta.sum(-1).square())).derivative
            VN(q, lr=0.1, estimator=HessianVector(2)).step(lambda theta: -theta.square().sum(-1))
        torch.testing.assert_close(packet.W, 2 * s.square())

    @pytest.mark.parametrize(
        "make",
        [DiagonalGaussian, functools.partial(PrecisionCholeskyGaussian, structure=Diagonal)],
        ids=["diagonal", "diagonal precision"],
    )
    @pytest.mark.parametrize("chunk", [1, 8, 100])
    def test_curvature_by_columns_is_that_of_the_matrix(self, make, chunk):
        q = make(3, (2,), mean=torch.tensor([0.5, -1.0, 2.0]), scale=torch.tensor([0.5, 2.0, 1.0]), dtype=DTYPE)
        target = LogJoint(lambda theta: -theta.pow(4).sum(-1) - theta.prod(-1))
        draws = Fixed(4)
        framed = Hessian(draws)(q, target).derivative.framed(q.frame())
        close(HessianVector(draws, chunk=chunk)(q, target).derivative.W, framed.W, EXACT)

    @pytest.mark.parametrize("estimator", [Quadrature, MonteCarlo, BonnetPrice, Autograd])
    def test_linear_models(self, estimator):
        model = linear_model()
        q = DiagonalGaussian.from_prior(model.prior)
        with Watch(WIDE):
            VN(q, lr=0.1, estimator=estimator()).step(model)

    @pytest.mark.parametrize("estimator", [Quadrature, MonteCarlo, BonnetPrice])
    def test_sparse_models(self, estimator):
        X = sparse.compressed(torch.arange(6), torch.arange(5), torch.ones(5, dtype=DTYPE), (5, WIDE))
        model, q = GeneralizedLinear(X, CLASSES), wide()
        with Watch(WIDE):
            VN(q, lr=0.1, estimator=estimator()).step(model)

    def test_fits(self):
        model, q = linear_model(), wide()
        seen = Extremes(q)
        with Watch(WIDE):
            assert fit(q, model, callbacks=[seen], progress=False).converged
            fit(wide(), lambda theta: -0.5 * theta.square().sum(-1), progress=False, max_evaluations=3)
            average = ExpectationAverage(q)
            average.update(q)
            torch.testing.assert_close(average.posterior().variance, q.variance)
        torch.testing.assert_close(torch.tensor(seen.lambda_max), q.variance.max().new_tensor(1.0), check_dtype=False)


def packet(q):
    return Quadrature()(q, linear_model())


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@pytest.mark.parametrize("name", POSTERIORS)
def test_starts_agree_with_moments(name, batch):
    """from_posterior keeps the marginal variances in mean field, from_prior takes them from Λ."""
    other = random_posterior("cholesky", batch, seed=3)
    q = DiagonalGaussian.from_posterior(other)
    close(q.variance, other.covariance.diagonal(dim1=-2, dim2=-1), EXACT)
    precision = torch.tensor([1.0, 4.0, 0.25], dtype=DTYPE)
    q = POSTERIORS[name].from_prior(Prior(torch.zeros(3, dtype=DTYPE), precision), batch)
    close(q.variance, (1 / precision).expand(*batch, 3), EXACT)
    assert q.batch_shape == batch
    root = torch.tensor([[1.0, 0.5, 0.0], [0.0, 2.0, 0.3], [0.0, 0.0, 1.0]], dtype=DTYPE)
    full = FullPrior(torch.zeros(3, dtype=DTYPE), root.mT @ root, root)
    q = POSTERIORS[name].from_prior(full, batch)
    close(q.variance, torch.linalg.inv(root.mT @ root).diagonal().expand(*batch, 3), IDENTITY)


@pytest.mark.parametrize(
    ("name", "scale"), [("natural", 1e-30), ("natural", 1e30), ("precision", 1e-42), ("cholesky", 1e-50)]
)
def test_a_scale_without_coordinates(name, scale):
    """In float32 1e-30 squared is 0 and 1e30 squared infinite: refused, and q keeps its place."""
    text = (
        r"^(mean and scale must have coordinates in torch\.float32; those of \w+ overflow or vanish, with a smallest "
    )
    text += r"scale of \S+\. Use float64 or other units of theta\.|scale must have a positive diagonal.*)$"
    with pytest.raises(InputError, match=text):
        POSTERIORS[name](2, scale=scale, dtype=torch.float32)
    q = POSTERIORS[name](2, mean=1.0, dtype=torch.float32)
    with pytest.raises(InputError, match=text):
        q.initialize_(0.0, scale)
    assert q.mean.tolist() == [1.0, 1.0]
    assert q.stddev.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dim", [2, 70])  # the variances of a large q are bounded by determinant and trace
@pytest.mark.parametrize("others", [1.0, 1e75])
def test_a_variance_that_overflows_is_no_step(dim, others):
    """A positive precision so small that its inverse is not finite: q stays; one that is larger is taken."""
    sd = torch.full((dim,), others, dtype=torch.float64)
    sd[0] = 1e150
    q = NaturalGaussian(dim, scale=sd, dtype=torch.float64)
    for left, inside in ((1e-310, False), (1e-305, True)):
        change = torch.zeros(dim, dim, dtype=torch.float64)
        change[0, 0] = left - 1e-300
        assert bool(q.moved(Tangent(Coordinates(torch.zeros(dim, dtype=torch.float64), change)))[1]) is inside
