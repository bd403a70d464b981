"""Models whose rows come in batches: equal to one model of all rows, in any batches; and the readers."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch

from torchngvi import VN, CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, NaturalGaussian, Sharded, Streamed, fit
from torchngvi.adapters.files import Csv, Npy, Parquet
from torchngvi.errors import InputError
from torchngvi.models import ExpectedPenalty, PerDatum, Regularized, ShardedDraws, SoftmaxRegression
from torchngvi.numerics import sparse

N, D = 60, 4


def rows(seed=0):
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(N, D, generator=g, dtype=torch.float64)
    y = (X.sum(-1) + torch.randn(N, generator=g, dtype=torch.float64) > 0).double()
    weights, offset = torch.rand(N, generator=g, dtype=torch.float64), torch.randn(N, generator=g, dtype=torch.float64)
    return X, y, weights, offset


def batches(parts, size):
    return list(zip(*(part.split(size) for part in parts), strict=True))


def posterior(kind=CholeskyGaussian):
    return kind(D, mean=torch.linspace(-1, 1, D, dtype=torch.float64), scale=0.7)


def packet(model, q):
    value, derivative = model.expected_energy(q.frame())
    local = derivative.framed(q.frame())
    return torch.cat([value.flatten(), local.a.flatten(), local.W.flatten()])


@pytest.mark.sparse(5)
@pytest.mark.parametrize("kind", [CholeskyGaussian, NaturalGaussian, DiagonalGaussian])
@pytest.mark.parametrize("size", [1, 7, N])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_batches_add_up_to_all_rows(kind, size, parts):
    X, y, *others = rows()
    options = dict(zip(("weights", "offset"), others[: parts - 2], strict=False))
    whole = GeneralizedLinear(X, y, classes=(0, 1), **options)
    model, q = Streamed.linear(batches((X, y, *others)[:parts], size), N, classes=(0, 1)), posterior(kind)
    torch.testing.assert_close(packet(model, q), packet(whole, q), rtol=1e-13, atol=1e-13)
    theta = torch.randn(3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    left, right = model.log_joint(theta), whole.log_joint(theta)
    torch.testing.assert_close(left, right)
    slopes = [torch.autograd.grad(value.sum(), theta)[0] for value in (left, right)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("kind", [CholeskyGaussian, DiagonalGaussian])
def test_the_loss_is_differentiable_in_the_probes(kind):
    X, y, *_ = rows()
    found = []
    for model in (GeneralizedLinear(X, y), Streamed.linear(batches((X, y), 7), N, classes=(0, 1))):
        q = posterior(kind)
        model.negative_elbo(q).backward()
        found.append([q.mean_probe.grad, q.root_probe.grad])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", [CholeskyGaussian, DiagonalGaussian])
def test_penalties_and_classes_are_counted_once(kind):
    X, y, *_ = rows()
    q = posterior(kind)

    def penalised(X, y):
        return Regularized(GeneralizedLinear(X, y, classes=(0, 1)), ExpectedPenalty(0.5))

    for target in (Streamed(batches((X, y), 7), N, penalised), Sharded(penalised(X, y), N)):
        torch.testing.assert_close(packet(target, q), packet(penalised(X, y), q), rtol=1e-13, atol=1e-13)
    labels = (torch.arange(N) % 3).double()
    wide = kind(2 * D, scale=0.5, dtype=torch.float64)
    model = Streamed(batches((X, labels), 7), N, lambda X, y: SoftmaxRegression(X, y, classes=(0, 1, 2)))
    torch.testing.assert_close(packet(model, wide), packet(SoftmaxRegression(X, labels), wide))


def test_sums_over_one_process_are_those_of_the_part():
    """Values with two derivatives of a log joint by rows and by draws, and the second order of a regression."""
    X, y, *_ = rows()
    local = GeneralizedLinear(X, y)
    joint = PerDatum(lambda theta: -(theta @ X.mT).cosh(), lambda theta: -theta.cosh().sum(-1), 1.0)
    theta = torch.linspace(-1, 1, 3 * D, dtype=torch.float64).reshape(3, D).requires_grad_()
    for target in (Sharded(joint, N), ShardedDraws(joint)):
        for order in range(3):
            found = []
            for each in (target, joint):
                value = each.log_joint(theta).sum()
                for _ in range(order):
                    (slope,) = torch.autograd.grad(value, theta, create_graph=True)
                    value = (slope * theta.detach().cos()).sum()
                found.append(value.detach())
            torch.testing.assert_close(*found)
    (value, mine), (expected, whole) = (model.second_order(theta[0].detach()) for model in (Sharded(local, N), local))
    torch.testing.assert_close((value, *mine.raw()[:2]), (expected, *whole.raw()[:2]))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_dict_and_sparse_rows():
    X, y, *_ = rows()
    named = [{"y": b, "X": a.to_sparse_csr()} for a, b in batches((X, y), 20)]
    model, q = Streamed(named, N, lambda X, y: GeneralizedLinear(X, y, classes=(0, 1))), posterior()
    assert sparse.is_sparse(model.first.X)
    torch.testing.assert_close(packet(model, q), packet(GeneralizedLinear(X, y), q))


@pytest.mark.parametrize("kind", [CholeskyGaussian, DiagonalGaussian, NaturalGaussian])
def test_a_fit_in_passes_is_that_of_all_rows(kind):
    """It begins on rows from all over the batches, which here are sorted by class, and counts its passes."""
    X, y, *_ = rows()
    order = y.argsort()
    parts, passes = batches((X[order], y[order]), 4), []

    class Counted(list):
        def __iter__(self):
            passes.append(None)
            return super().__iter__()

    model = Streamed.linear(Counted(parts), N, classes=(0, 1))
    q, exact = kind(D, dtype=torch.float64), kind(D, dtype=torch.float64)
    passes.clear()
    result = fit(q, model, progress=False)
    assert result.converged
    assert len(passes) == result.evaluations
    fit(exact, GeneralizedLinear(X, y), progress=False, tolerance=1e-9)
    torch.testing.assert_close(q.mean, exact.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(q.covariance, exact.covariance, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [4, 20])
def test_a_start_is_of_rows_from_all_over_or_of_the_first(size):
    """Of many batches some of eight, of few the first until there are enough."""
    X, y, *_ = rows()
    start = Streamed.linear(batches((X, y), size), N, classes=(0, 1)).beginning(24)
    found = torch.cat([batch[0] for batch in start.batches])
    assert start.num_data == len(found) == 24
    assert torch.equal(found, X[:24]) == (size == 20)


def test_an_optimizer_begins_where_q_is():
    X, y, *_ = rows()
    model, q, seen = Streamed.linear(batches((X, y), 7), N, classes=(0, 1)), posterior(), []
    fit(q, model, VN(q), callbacks=[lambda record: seen.append(record.loss)], max_evaluations=1, progress=False)
    assert seen == [pytest.approx(model.negative_elbo(posterior()).item())]


def test_single_precision():
    X, y, *_ = rows()
    parts = batches((X.float(), y.float()), 7)
    model, q = Streamed.linear(parts, N, classes=(0, 1), dtype=torch.float32), CholeskyGaussian(D)
    assert fit(q, model, progress=False).converged
    exact = CholeskyGaussian(D, dtype=torch.float64)
    fit(exact, Sharded(Streamed.linear(parts, N, classes=(0, 1)), N), progress=False)
    torch.testing.assert_close(q.mean.double(), exact.mean, rtol=0, atol=5e-3)


def test_nothing_as_large_as_the_data_is_made():
    """The largest tensor of an evaluation has the size of a batch."""
    X, y, *_ = rows()
    model, q, largest = Streamed.linear(batches((X, y), 5), N, classes=(0, 1)), posterior(), []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            largest.extend(t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if hasattr(t, "numel"))
            return out

    with Watch():
        model.expected_energy(q.frame())
    assert max(largest) <= 5 * 64 * 2 < N * D * 4  # the nodes of the quadrature
    assert max(largest) < 5 * N


@pytest.fixture
def files(tmp_path):
    X, y, weights, offset = (part.numpy() for part in rows())
    for name, part in (("X", X), ("y", y), ("weights", weights), ("offset", offset)):
        np.save(tmp_path / f"{name}.npy", part)
    frame = pd.DataFrame(X, columns=list("abcd")).assign(y=y.astype(int), w=weights, o=offset)
    frame[:25].to_csv(tmp_path / "day_1.csv", index=False)
    frame[25:].to_csv(tmp_path / "day_2.csv", index=False)
    return tmp_path, frame


def together(reader):
    return [torch.cat(parts) for parts in zip(*reader, strict=True)]


def test_npy(files):
    folder, frame = files
    names = {name: folder / f"{name}.npy" for name in ("X", "y", "weights", "offset")}
    reader = Npy(**names, rows=7)
    assert (len(reader), reader.num_data) == (9, N)
    for found, expected in zip(together(reader), rows(), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(reader[8][0], rows()[0][56:])
    assert [len(batch[1]) for batch in reader[1:3]] == [7, 7]
    ahead = torch.utils.data.DataLoader(Npy(folder / "X.npy", folder / "y.npy", rows=7), batch_size=None)
    assert torch.equal(together(ahead)[0], rows()[0])
    assert len(pickle.dumps(reader)) < 4000  # what a worker of a loader is sent
    parts = [reader.share(rank, 4) for rank in range(4)]
    assert sum(part.num_data for part in parts) == N
    assert torch.equal(torch.cat([together(part)[0] for part in parts]), rows()[0])
    with pytest.raises(InputError, match=r"^there are 9 batches for 10 processes; read fewer rows at once"):
        reader.share(0, 10)
    assert len(Npy(folder / "X.npy", folder / "y.npy")[0]) == 2


def test_parquet(files):
    pytest.importorskip("pyarrow")
    folder, frame = files
    frame[:33].to_parquet(folder / "day_1.parquet", row_group_size=20)
    frame[33:].to_parquet(folder / "day_2.parquet", row_group_size=20)
    reader = Parquet(folder / "day_*.parquet", "y", rows=7, weights="w", offset="o")
    assert reader.num_data == N
    for found, expected in zip(together(reader), rows(), strict=True):
        assert torch.equal(found.double(), expected)
    for number, batch in enumerate(reader):
        assert torch.equal(reader[number][0], batch[0])
    parts = [reader.share(rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat([together(part)[0] for part in parts]), rows()[0])
    model = Streamed.linear(reader, N, classes=(0, 1))
    X, y, weights, offset = rows()
    whole = GeneralizedLinear(X, y, weights=weights, offset=offset)
    torch.testing.assert_close(packet(model, posterior()), packet(whole, posterior()))
    offsets = next(iter(Parquet(folder / "day_1.parquet", "y", ["a"], offset="o")))
    assert offsets[2] is None
    frame.rename(columns={"a": "A"}).to_parquet(folder / "day_3.parquet")
    with pytest.raises(InputError, match="has other columns than"):
        Parquet(folder / "day_*.parquet", "y")
    with pytest.raises(InputError, match="has no column 'z'; it has a, b, c, d, y, w, o"):
        Parquet(folder / "day_1.parquet", "z")
    frame[:3].to_parquet(folder / "day_1.parquet")
    with pytest.raises(InputError, match=r"day_1.parquet' has changed since it was opened. Make another reader"):
        reader[1]


def test_csv(files):
    folder, frame = files
    reader = Csv(folder / "day_*.csv", "y", list("abcd"), rows=7)
    assert reader.num_data == N
    named = Csv([folder / "day_2.csv", folder / "day_1.csv"], "y", list("abcd"), rows=7)
    assert torch.equal(together(named)[0][: N - 25], together(reader)[0][25:])
    X, y = together(reader)
    torch.testing.assert_close(X, rows()[0])
    torch.testing.assert_close(y.double(), rows()[1])
    with pytest.raises(InputError, match="has no column 'z'; it has a, b, c, d, y, w, o"):
        list(Csv(folder / "day_1.csv", "z"))
    (folder / "texts.csv").write_text("a,y\nred,0\nblue,1\n")
    with pytest.raises(InputError, match=r"^column 'a' must hold numbers; got .*, such as 'red'. Leave it out.$"):
        list(Csv(folder / "texts.csv", "y"))
