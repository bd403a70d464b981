"""What a fit leaves behind and what a stranger may send: formulas, runs, files of a cache, arrays."""

import itertools
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from kills import Points, in_a_child, killed, needs_forks

import torchngvi
from torchngvi.cli import main
from torchngvi.errors import InputError
from torchngvi.fitting.checkpoints import remove_left, write_whole
from torchngvi.messages import install
from torchngvi.numerics import kernels
from torchngvi.numerics.kernels import CompilerError
from torchngvi.tables import Formula, mixed
from torchngvi.tables.design import FormulaColumns

PAYLOADS = (
    "np.savetxt('MARK', x)",
    "np.f2py.os.system('touch MARK')",
    "np.save('MARK', x)",
    "np.memmap('MARK', shape=1)",
    "np.fromfile('MARK')",
    "np.lib.npyio.savez('MARK', x)",
    "np.exp.__class__(x)",
    "np.exp.at(x, 0)",
    "np.add.reduce(x)",
    "np.exp(x, x)",
    "np.exp(x, out=x)",
    "np.add(x, 1, x)",
    "np.frompyfunc(x, 1, 1)",
    "np.vectorize(np)",
    "np.where(x)",
    "np.ctypeslib.ctypes.CDLL('libc.so.6')",
    "np(x)",
    "open('MARK', 'w')",
    "eval('open(chr(77)+chr(65)+chr(82)+chr(75), chr(119))')",
    "exec('x')",
    "getattr(np, 'savetxt')('MARK', x)",
    "I(x)(x)",
    "`np.savetxt`('MARK', x)",
    "x.to_csv('MARK')",
    "x.values.tofile('MARK')",
    "install('cli')",
    "columns_of(x)",
    "formulae.matrices.design_matrices('y ~ x', x)",
    "__import__('os').system('touch MARK')",
    "(lambda z: np.savetxt('MARK', z))(x)",
    "[np.savetxt('MARK', x) for _ in x]",
    "f'{open(chr(77), chr(119))}'",
    "(z := x)",
    "x[np.savetxt('MARK', x)]",
    "{np.savetxt('MARK', x)}",
    "C(x, levels=open('MARK', 'w'))",
    "scale(*x)",
    "I(x) if x else x",
    "x; import os",
    "print(x)",
)
PLACES = (
    "y ~ x + {} + (1 | g)",
    "{} ~ x + (1 | g)",
    "y ~ x + ({} | g)",
    "y ~ x + (1 | {})",
    "y ~ x + (1 | g/{})",
    "y ~ scale({}) + (1 | g)",
    "y ~ x + offset(log({})) + (1 | g)",
    "y ~ x:{} + (1 | g)",
    "y ~ C(x, levels={}) + (1 | g)",
)


@pytest.fixture
def table():
    draw = np.random.default_rng(0)
    x = draw.normal(size=24)
    columns = {"y": x + draw.normal(size=24), "x": x, "w": np.exp(x), "kind": list("abc") * 8, "g": list("uvwz") * 6}
    return pd.DataFrame(columns)


class TestFormulas:
    @pytest.mark.parametrize("place", PLACES)
    def test_hostile_formulas_run_nothing(self, place, table, tmp_path, monkeypatch):
        """360 of them: each is refused in a sentence, at every door, and nothing has been written or changed."""
        monkeypatch.chdir(tmp_path)
        before = table.copy()
        for payload in PAYLOADS:
            text = place.format(payload)
            for door in (lambda f: mixed(f, table), FormulaColumns.of):
                with pytest.raises(InputError, match=r"^The formula|^A formula"):
                    door(text)
            assert not list(tmp_path.iterdir()), text
        pd.testing.assert_frame_equal(table, before)

    def test_a_refusal_names_the_call_and_lists_what_is_allowed(self, table):
        with pytest.raises(InputError, match=r"calls np\.savetxt, which no formula may.* scale, .* C, .* np\.log\(x\)"):
            mixed("y ~ x + np.savetxt('MARK', x) + (1 | g)", table)

    @pytest.mark.parametrize(
        "term",
        [
            "log(w)",
            "np.log1p(w)",
            "np.arctan2(x, w)",
            "maximum(x, 0)",
            "scale(x)",
            "standardize(x)",
            "center(x)",
            "bs(x, df=4)",
            "poly(x, 2)",
            "poly(x, degree=2, raw=True)",
            "C(kind)",
            "S(kind)",
            "T(kind, 'b')",
            "C(kind, Sum())",
            "C(kind, Treatment('b'))",
            "offset(log(w))",
            "{x ** 2}",
            "I(x > 0)",
            "x*kind",
            "(x + kind)**2",
        ],
    )
    def test_formulas_that_compute_numbers_are_read(self, term, table):
        made = Formula(f"y ~ x + {term} + (1 | g)", table)
        again = made.of(table)
        np.testing.assert_allclose(again.X, made.design.X, atol=1e-12)

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("I((x + 1) * 2)", lambda x: (x + 1) * 2),
            ("{(x - 3) ** 2}", lambda x: (x - 3) ** 2),
            ("exp((x + 1) / 2)", lambda x: np.exp((x + 1) / 2)),
            ("I(2 ** (1 - (x - 1)))", lambda x: 2 ** (2 - x)),
        ],
    )
    def test_parentheses_inside_a_call_are_kept(self, text, value, table):
        """They were dropped where the formula was written again for its parts: I((x + 1) * 2) gave x + 2."""
        made = Formula(f"y ~ 0 + {text} + (0 + {text} | g)", table)
        np.testing.assert_allclose(made.design.X[:, 0], value(table.x))
        np.testing.assert_allclose(made.design.factors[0].Z[:, 0], value(table.x))
        new = table.assign(x=table.x + 1)
        np.testing.assert_allclose(made.of(new).X[:, 0], value(new.x))
        assert made.design.names == (text.replace("{", "I(").replace("}", ")"),)

    def test_names_in_backticks(self, table):
        table = table.rename(columns={"x": "my column", "g": "the group"})
        made = Formula("y ~ `my column` + (1 | `the group`)", table)
        np.testing.assert_array_equal(made.design.X[:, 1], table["my column"])
        np.testing.assert_array_equal(made.of(table).factors[0].groups, made.design.factors[0].groups)
        scaled = Formula("y ~ center(`my column`) + (1 | `the group`)", table)
        np.testing.assert_allclose(scaled.design.X[:, 1], table["my column"] - table["my column"].mean())

    def test_what_is_not_read_is_refused(self, table):
        """It was left out in silence."""
        for rest in ("x", "e10", "'text'", "1e10"):
            with pytest.raises(InputError, match="cannot be read beyond"):
                Formula(f"y ~ x + (1 | g) {rest}", table)

    @pytest.mark.parametrize(
        "term", ["{10 ** 10 ** 10}", "I(x ** (9 ** 9 ** 9))", "(x + w) ** 999999999", "I(x * 1e400)"]
    )
    def test_powers_without_end(self, term, table):
        with pytest.raises(InputError, match="The formula"):
            Formula(f"y ~ {term} + (1 | g)", table)

    def test_variables_of_python_are_not_looked_at(self, table):
        secret = table.x  # noqa: F841
        with pytest.raises(InputError, match="names secret; the table has"):
            mixed("y ~ secret + (1 | g)", table)


def test_as_many_hostile_formulas_as_are_promised():
    assert len(list(itertools.product(PLACES, PAYLOADS))) >= 300


@pytest.mark.skipif(sys.platform == "win32", reason="who can write to a folder is not known on Windows")
class TestCache:
    @pytest.fixture
    def base(self, tmp_path, monkeypatch):
        base = tmp_path / "scratch" / "mine"
        base.mkdir(parents=True)
        monkeypatch.setenv("XDG_CACHE_HOME", str(base))
        return base

    @pytest.mark.parametrize("mode", [0o777, 0o775, 0o2770])
    @pytest.mark.parametrize("above", [0, 1])
    def test_a_folder_above_that_others_can_write_to(self, base, mode, above):
        """Where they can plant a library between the check and the load, and nothing is loaded from there."""
        place = (base, base.parent)[above]
        assert kernels.cache() == base / "torchngvi" / "kernels"
        place.chmod(mode)
        with pytest.raises(CompilerError, match=f"{place} can be written to by others, and so what is in it can be"):
            kernels.cache()

    def test_a_folder_with_a_sticky_bit(self, base):
        """As /tmp: others can add to it, and cannot replace what is there."""
        base.parent.chmod(0o1777)
        assert kernels.cache() == base / "torchngvi" / "kernels"

    @pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives folders away")
    def test_a_folder_above_that_belongs_to_somebody_else(self, base):
        kernels.cache()
        for mode in (0o755, 0o1777):  # whose owner renames what he likes, the sticky bit set or not
            os.chown(base.parent, 1234, 1234)
            base.parent.chmod(mode)
            with pytest.raises(CompilerError, match="can be written to by others"):
                kernels.cache()

    def test_a_link_leads_to_what_is_checked(self, base, tmp_path, monkeypatch):
        """A link is followed once: what is loaded is where it led then."""
        (tmp_path / "link").symlink_to(base)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
        assert kernels.cache() == base / "torchngvi" / "kernels"
        base.parent.chmod(0o777)
        with pytest.raises(CompilerError, match="can be written to by others"):
            kernels.cache()

    def test_a_link_in_the_place_of_the_cache(self, base, tmp_path):
        (tmp_path / "elsewhere").mkdir()
        (base / "torchngvi").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CompilerError, match="can be written to by others; remove it"):
            kernels.cache()

    @pytest.mark.parametrize("value", ["cache", "./cache", "../cache", ""])
    def test_a_relative_name_is_ignored(self, value, tmp_path, monkeypatch):
        """As the specification of XDG says: the current folder may be anybody's."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert kernels.user_cache() == tmp_path / "home" / ".cache"
        assert kernels.cache() == tmp_path / "home" / ".cache" / "torchngvi" / "kernels"
        assert not (tmp_path / "cache").exists()


def masked_at(array, place=3):
    array = np.ma.masked_array(np.array(array), mask=np.zeros(np.shape(array), bool))
    array.data[place] = 999.0
    array.mask[place] = True
    return array


def as_complex(array):
    return np.asarray(array) + 1j


@pytest.fixture
def data():
    draw = np.random.default_rng(1)
    X = draw.normal(size=(40, 2))
    y = (X[:, 0] + draw.logistic(size=40) > 0).astype(float)
    return {"X": X, "y": y, "w": np.ones(40), "Z": np.ones((40, 1)), "groups": np.repeat(np.arange(8), 5)}


class TestArrays:
    """A mask and an imaginary part were left out in silence: a mean of 60.4 for .984, converged."""

    @pytest.mark.parametrize("change", [masked_at, as_complex])
    @pytest.mark.parametrize("which", ["X", "y", "w", "offset", "prior_mean", "prior_precision"])
    def test_regressions(self, which, change, data):
        def made(X=data["X"], y=data["y"], w=data["w"], **options):
            return torchngvi.GeneralizedLinear(X, y, weights=w, **options)

        given = {"offset": data["w"], "prior_mean": np.zeros(2), "prior_precision": np.ones(2)}
        array = np.array({**data, **given}[which], float)
        made(**{which: array})
        with pytest.raises(InputError, match=r"must be numbers; got .*\(an array (has 1|has 2|is complex)"):
            made(**{which: masked_at(array, 1) if change is masked_at else change(array)})

    @pytest.mark.parametrize("change", [masked_at, as_complex])
    @pytest.mark.parametrize("which", ["X", "y", "w", "Z", "groups"])
    def test_mixed_models(self, which, change, data):
        parts = {**data, which: change(data[which])}
        with pytest.raises(InputError, match=r"(must be numbers|must be integers).*an array"):
            torchngvi.MixedModel(
                parts["X"], parts["y"], (parts["Z"], parts["groups"]), "bernoulli_logit", weights=parts["w"]
            )

    @pytest.mark.parametrize("change", [masked_at, as_complex])
    def test_predictions(self, change, data):
        model, q = torchngvi.GeneralizedLinear(data["X"], data["y"]), torchngvi.CholeskyGaussian(2, dtype=torch.float64)
        for ask in (
            lambda: torchngvi.diagnostics.predictive_mean(model, q, change(data["X"])),
            lambda: torchngvi.diagnostics.log_predictive_density(model, q, data["X"], change(data["y"])),
            lambda: torchngvi.diagnostics.accuracy(model, q, data["X"], change(data["y"])),
        ):
            with pytest.raises(InputError, match="an array"):
                ask()

    @pytest.mark.sparse(2)
    @pytest.mark.parametrize(
        "name", ["BayesianLogisticRegression", "BayesianLinearRegression", "BayesianMixedClassifier"]
    )
    @pytest.mark.filterwarnings("ignore:The data speak for no effect")
    def test_estimators_of_scikit_learn(self, name, data):
        estimators = pytest.importorskip("torchngvi.adapters.sklearn")
        more = {"groups": data["groups"]} if "Mixed" in name else {}

        def fitted(X=data["X"], y=data["y"], **options):
            return getattr(estimators, name)().fit(X, y, **{**more, **options})

        for options in (
            {"X": masked_at(data["X"])},
            {"y": masked_at(data["y"])},
            {"sample_weight": masked_at(data["w"])},
            *([{"groups": masked_at(data["groups"])}] if more else []),
        ):
            with pytest.raises(InputError, match="an array has [12] masked entries"):
                fitted(**options)
        with pytest.raises(ValueError, match="Complex data not supported"):  # which scikit-learn says
            fitted(X=as_complex(data["X"]))
        nothing = np.ma.masked_array(data["X"], mask=False)
        if not more:
            assert np.array_equal(fitted(X=nothing).coef_, fitted().coef_)
            with pytest.raises(InputError, match="an array has 2 masked entries"):
                fitted().predict(masked_at(data["X"]))

    def test_tables(self, data):
        frame = pd.DataFrame({"y": data["y"], "x": data["X"][:, 0], "g": data["groups"]})
        with pytest.raises(InputError, match="an array has 1 masked entries"):
            mixed("y ~ x + (1 | g)", frame, "bernoulli", weights=masked_at(data["w"]))
        with pytest.raises(InputError, match=r"column 'x' is complex\. Take its real part"):
            mixed("y ~ x + (1 | g)", frame.assign(x=as_complex(frame.x)), "bernoulli")
        gaps = frame.convert_dtypes()
        gaps.loc[3, "x"] = pd.NA
        with pytest.raises(InputError, match="misses values: 1 of x"):
            mixed("y ~ x + (1 | g)", gaps, "bernoulli")
        with pytest.raises(InputError, match="X must be finite; got 1 NaN"):
            torchngvi.GeneralizedLinear(gaps[["x"]], data["y"])

    def test_objects_and_texts(self, data):
        for kind, what in ((object, "objects of Python"), (str, "texts"), ("datetime64[s]", "dates")):
            array = data["X"].astype(int).astype(kind) if kind == "datetime64[s]" else data["X"].astype(kind)
            with pytest.raises(InputError, match=f"an array is of {what}; make it one of numbers"):
                torchngvi.GeneralizedLinear(array, data["y"])

    def test_a_mask_of_nothing_is_none(self, data):
        nothing = np.ma.masked_array(data["X"], mask=np.zeros((40, 2), bool))
        expected = torchngvi.GeneralizedLinear(data["X"], data["y"])
        assert torch.equal(torchngvi.GeneralizedLinear(nothing, data["y"]).X, expected.X)


BLOCKING = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
for place in sys.argv[2:]:
    try:
        if place.startswith("torchngvi.adapters."):
            importlib.import_module(place)
        else:
            import torchngvi
            getattr(torchngvi, place.partition(".")[2])
    except ImportError as error:
        print(f"{error.name}: {error}")
    else:
        print("imported")
"""


def with_packages_blocked(blocked, *places):
    command = [sys.executable, "-W", "ignore", "-c", BLOCKING, ",".join(blocked), *places]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    return done.stdout.splitlines()


class TestExtras:
    @pytest.mark.accuracy
    def test_modules_say_which_they_need(self):
        """With torch alone, as of an installation without extras; it was "No module named 'numpy'"."""
        extras = {
            "torchngvi.load": ("numpy", "cli"),
            "torchngvi.adapters.flows": ("numpy", "flows"),
            "torchngvi.adapters.files": ("numpy", "parquet"),
            "torchngvi.adapters.sklearn": ("numpy", "sklearn"),
            "torchngvi.adapters.gpytorch": ("gpytorch", "gpytorch"),
            "torchngvi.adapters.pyro": ("pyro", "pyro"),
        }
        every = ("numpy", "pandas", "scipy", "sklearn", "matplotlib", "formulae", "gpytorch", "linear_operator", "pyro")
        for said, (place, (package, extra)) in zip(with_packages_blocked(every, *extras), extras.items(), strict=True):
            assert said == f"{package}: {place} needs {package}: {install(extra)}."

    @pytest.mark.accuracy
    def test_nothing_is_said_where_they_are_there(self):
        assert with_packages_blocked(("nothing",), "torchngvi.mixed", "torchngvi.load") == ["imported"] * 2


class TestPickles:
    def test_a_streamed_model(self, data, tmp_path):
        """Of batches in memory and of a reader; the copy fits the same posterior."""
        files = pytest.importorskip("torchngvi.adapters.files")
        np.save(tmp_path / "X.npy", data["X"])
        np.save(tmp_path / "y.npy", data["y"])
        reader = files.Npy(tmp_path / "X.npy", tmp_path / "y.npy", rows=15)
        X, y = torch.tensor(data["X"]), torch.tensor(data["y"])
        for batches in (reader, [(X[:20], y[:20]), (X[20:], y[20:])]):
            model = torchngvi.Streamed.linear(batches, 40, classes=(0, 1), prior_precision=2.0)
            posteriors = []
            for one in (model, pickle.loads(pickle.dumps(model))):
                q = torchngvi.CholeskyGaussian(2, dtype=torch.float64)
                torchngvi.fit(q, one, progress=False)
                posteriors.append(q)
            assert torch.equal(posteriors[0].mean, posteriors[1].mean)
            assert torch.equal(posteriors[0].covariance, posteriors[1].covariance)

    def test_processes(self, data):
        for made in (torchngvi.Processes(), torchngvi.Processes.alone()):
            again = pickle.loads(pickle.dumps(made))
            assert (again.rank, again.world, again.leads, again.clock()) == (0, 1, True, 0.0)
        target = torchngvi.Sharded(torchngvi.GeneralizedLinear(data["X"], data["y"]), 40)
        q = torchngvi.CholeskyGaussian(2, dtype=torch.float64)
        assert torch.equal(pickle.loads(pickle.dumps(target)).negative_elbo(q), target.negative_elbo(q))

    def test_processes_of_a_group_are_refused(self):
        several = torchngvi.Processes.alone()
        several.world, several.group = 2, object()
        with pytest.raises(InputError, match=r"a group of torch\.distributed cannot be pickled.*Build the"):
            pickle.dumps(several)
        several.group = None
        with pytest.raises(InputError, match="made by 2 processes, each with its part, and is read by 1"):
            pickle.loads(pickle.dumps(several))


@pytest.mark.accuracy
@needs_forks
def test_a_fit_of_a_mixture_killed_and_resumed(tmp_path):
    """By signals at several calls of the log joint: the same bits, trace and words as a run that was left alone."""

    def log_p(theta):
        bent = theta[..., 1] - 0.5 * theta[..., 0].square()
        return -0.25 * theta[..., 0].square() - bent.square()

    def run(checkpoint=None, call=None):
        torch.manual_seed(0)
        mean = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
        q = torchngvi.posteriors.Mixture(torchngvi.PrecisionCholeskyGaussian(2, (2,), mean=mean))
        calls = []

        def counting(theta):
            calls.append(1)
            if len(calls) == call:
                killed()
            return log_p(theta)

        options = {"checkpoint": checkpoint, "checkpoint_every": 2, "progress": False}
        return q, torchngvi.fit(q, counting, max_evaluations=40, **options), len(calls)

    whole, told, count = run()
    for call in (count // 3, count // 2, count - 2):
        file = tmp_path / f"{call}.pt"
        assert in_a_child(lambda call=call, file=file: run(file, call) and 0) == -signal.SIGKILL
        assert file.exists()
        (tmp_path / f"{file.name}.{'0' * 16}.tmp").write_bytes(b"left by a kill within the writing of a checkpoint")
        again, result, _ = run(file)
        assert str(result) == str(told)
        assert [record[:-1] for record in result.trace] == [record[:-1] for record in told.trace]
        for name, value in whole.state_dict().items():
            assert torch.equal(again.state_dict()[name], value)
        assert not list(tmp_path.glob("*.tmp"))


@needs_forks
@pytest.mark.parametrize("at", range(1, 6))
def test_a_checkpoint_killed_at_any_point_of_its_writing(at, tmp_path):
    file = tmp_path / "run.pt"
    write_whole(file, b"old")

    def work():
        Points(tmp_path, at, killed).watch()
        write_whole(file, b"new")

    assert in_a_child(work) in (0, -signal.SIGKILL)
    assert file.read_bytes() in (b"old", b"new")
    remove_left(file)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


class TestClassesOfABinaryMixedModel:
    """The classes of a saved run are those of the table, and not the signs that the likelihood computes with."""

    @pytest.mark.accuracy
    def test_they_are_those_of_the_table(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        generator = np.random.default_rng(0)
        table = pd.DataFrame({"x": generator.normal(size=60), "g": np.arange(60) % 6})
        table["y"] = (table["x"] + generator.normal(size=60) > 0).astype(int)
        table.to_csv("t.csv", index=False)
        told = ["--formula", "y ~ x + (1 | g)", "--family", "bernoulli", "--out", "run"]
        assert main(["fit", "--data", "t.csv", *told, "--no-progress"]) == 0
        assert main(["predict", "run", "t.csv", "--out", "p.csv"]) == 0
        found = pd.read_csv("p.csv")
        assert set(found["class"]) == {0, 1}
        assert ((found["probability"] > 0.5) == (found["class"] == 1)).all()
