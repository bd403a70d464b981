"""What a fit leaves behind and what a stranger may send: formulas, runs, files of a cache, arrays."""

import copy
import errno
import hashlib
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import torchngvi
from torchngvi.adapters.formula import Formula, mixed
from torchngvi.adapters.terms import FormulaColumns, FormulaTerms
from torchngvi.app import datasets, outputs
from torchngvi.cli import main
from torchngvi.errors import InputError
from torchngvi.extras import install
from torchngvi.fitting.checkpoints import remove_left, write_whole
from torchngvi.numerics import compiling
from torchngvi.numerics.compiling import CompilerError

# ------------------------------------------------------------------------------------ formulas


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
            for door in (lambda f: mixed(f, table), FormulaColumns.of, FormulaTerms.of):
                with pytest.raises(InputError, match=r"^The formula|^A formula"):
                    door(text)
            assert not list(tmp_path.iterdir()), text
        pd.testing.assert_frame_equal(table, before)

    def test_a_refusal_names_the_call_and_lists_what_is_allowed(self, table):
        with pytest.raises(InputError, match=r"calls np\.savetxt, which no formula may.* scale, .* C, .* np\.log\(x\)"):
            mixed("y ~ x + np.savetxt('MARK', x) + (1 | g)", table)

    @pytest.mark.parametrize(
        "formula", ["y ~ x + np.f2py.os.system('touch MARK')", "y ~ np.savetxt('MARK', x) + (1|g)"]
    )
    def test_on_the_command_line(self, formula, table, tmp_path, monkeypatch, capsys):
        """With a grouping factor and without."""
        monkeypatch.chdir(tmp_path)
        table.to_csv("t.csv", index=False)
        assert main(["fit", "--data", "t.csv", "--formula", formula]) == 2
        assert ", which no formula may, as it could run any code" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]

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
        np.testing.assert_allclose(again.X, made.rows.X, atol=1e-12)

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
        np.testing.assert_allclose(made.rows.X[:, 0], value(table.x))
        np.testing.assert_allclose(made.rows.Z[:, 0], value(table.x))
        new = table.assign(x=table.x + 1)
        np.testing.assert_allclose(made.of(new).X[:, 0], value(new.x))
        assert made.fixed == [text.replace("{", "I(").replace("}", ")")]

    def test_names_in_backticks(self, table):
        table = table.rename(columns={"x": "my column", "g": "the group"})
        made = Formula("y ~ `my column` + (1 | `the group`)", table)
        np.testing.assert_array_equal(made.rows.X[:, 1], table["my column"])
        np.testing.assert_array_equal(made.of(table).groups, made.rows.groups)
        scaled = Formula("y ~ center(`my column`) + (1 | `the group`)", table)
        np.testing.assert_allclose(scaled.rows.X[:, 1], table["my column"] - table["my column"].mean())

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


# ------------------------------------------------------------------------------------ folders of runs


def patients(rows=48):
    draw = np.random.default_rng(3)
    x, kind = draw.normal(size=rows), np.resize(["a", "b", "c"], rows)
    died = np.where(draw.random(rows) < 1 / (1 + np.exp(-x)), "yes", "no")
    return pd.DataFrame({"died": died, "x": x, "kind": kind, "ward": np.resize(list("uvwz"), rows)})


FLAGS = {
    "regression": ("--target", "died", "--drop", "ward", "--test-fraction", "0"),
    "formula": ("--formula", "died[yes] ~ x + kind + (1 | ward)", "--likelihood", "bernoulli"),
    "streamed": ("--target", "died", "--drop", "ward", "--test-fraction", "0", "--batch-rows", "20"),
}
SEEDS = {"old": ("--seed", "1"), "new": ("--seed", "2")}


def fit_run(kind, which, *more):
    return main(["fit", "--data", "t.csv", "--no-progress", "--out", "run", *FLAGS[kind], *SEEDS[which], *more])


def seed_of(folder="run"):
    """Which run a folder holds, by what `load` has read: its settings say the seed."""
    path = Path(folder)
    posterior = outputs.file_of(path, "posterior.pt")
    return torch.load(posterior, weights_only=True)["settings"]["seed"]


class Points:
    """The moments at which a process writes, syncs, renames or removes something below a folder.

    At one of them, counted from 1, something happens: a kill, or an error of the disk.
    """

    GROWING = ("os.rename", "os.mkdir", "os.link")  # for which a disk needs room
    EVENTS = (*GROWING, "os.rmdir", "os.remove", "shutil.rmtree")

    def __init__(self, folder, at, action, events=EVENTS):
        self.folder, self.at, self.action, self.events, self.count = str(folder), at, action, events, 0

    def passed(self):
        self.count += 1
        if self.count == self.at:
            self.action()

    def hook(self, event, args):
        if event == "ctypes.dlsym" and args[1] in ("renameat2", "renamex_np"):
            self.passed()
        writing = event == "open" and isinstance(args[1], str) and bool(set(args[1]) & set("wxa+"))
        if (writing or event in self.events) and any(self.is_ours(arg) for arg in args):
            self.passed()

    def is_ours(self, path):
        return isinstance(path, str | os.PathLike) and os.path.abspath(os.fspath(path)).startswith(self.folder)

    def watch(self):
        sys.addaudithook(self.hook)
        sync, write = os.fsync, Path.write_bytes

        def synced(descriptor):
            self.passed()
            sync(descriptor)

        def written(path, content):
            if self.count + 1 == self.at:  # half of it is there
                write(path, content[: len(content) // 2])
            self.passed()
            return write(path, content)

        os.fsync, Path.write_bytes = synced, written


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_child(work):
    """Run something in a fork; how that has ended."""
    child = os.fork()
    if not child:
        code = 70
        try:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
            code = work() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    patients().to_csv("t.csv", index=False)
    return tmp_path


needs_forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="the runs are forks")


def left(folder):
    return [path.name for path in folder.rglob("*") if ".writing-" in path.name or path.name == ".replacing"]


def check_whole(folder="run"):
    """Every file of the run is the one of its manifest."""
    digests = json.loads(outputs.file_of(Path(folder), "manifest.json").read_text())["sha256"]
    for name, digest in digests.items():
        assert hashlib.sha256(outputs.file_of(Path(folder), name).read_bytes()).hexdigest() == digest


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two runs of each kind, as the command line writes them."""
    top = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(top)
        patients().to_csv("t.csv", index=False)
        for kind, which in itertools.product(FLAGS, SEEDS):
            assert fit_run(kind, which) == 0
            Path("run").rename(f"{kind}-{which}")
    return top


def without_exchange(monkeypatch):
    """As on a disk that cannot exchange two folders."""

    def cannot(*_):
        raise OSError(errno.EINVAL, "cannot")

    monkeypatch.setattr(outputs, "_exchange", cannot)


def check_state(here, *, old, mine=True):
    """The old run or the new one is there, whole, and what is not of a run has stayed."""
    if not old and not Path("run/posterior.pt").exists():
        assert not Path("run").exists() or not [p for p in Path("run").iterdir() if ".writing" not in p.name]
        return None
    torchngvi.load("run").predict(patients(6))  # where warnings are errors
    check_whole()
    if old and mine:
        assert Path("run/notes.txt").read_text() == "mine"
        assert Path("run/more/deep.txt").read_text() == "mine too"
    return seed_of()


def place_old(kept):
    shutil.copytree(kept, "run")
    Path("run/notes.txt").write_text("mine")
    Path("run/more").mkdir()
    Path("run/more/deep.txt").write_text("mine too")


@needs_forks
class TestKills:
    @pytest.mark.accuracy
    @pytest.mark.parametrize("way", ["new", "replaced", "replaced inside"])
    @pytest.mark.parametrize("kind", FLAGS)
    def test_a_kill_at_any_point_leaves_the_old_run_or_the_new_one(self, kind, way, made, here, monkeypatch):
        """At every point at which the process writes, syncs, renames or removes; leftovers refuse nothing."""
        if way == "replaced inside":
            without_exchange(monkeypatch)
        old, seen, leftovers = way != "new", set(), 0

        def work(points):
            points.watch()
            with outputs.OutputFolder("run", overwrite=old).writing() as place:
                for file in (made / f"{kind}-new").iterdir():
                    if file.name != "manifest.json":
                        (place / file.name).write_bytes(file.read_bytes())

        if old:
            place_old(made / f"{kind}-old")
        for at in itertools.count(1, 1 if kind == "regression" else 9):  # the writing is that of all kinds
            points = Points(here, at, killed)
            code = in_a_child(lambda points=points: work(points))
            assert code in (0, -signal.SIGKILL)
            seen.add(found := check_state(here, old=old))
            if code == 0:
                break
            leftovers += len(left(here))
            if found == 2:  # the next kill meets an old run again
                shutil.rmtree("run")
                if old:
                    place_old(made / f"{kind}-old")
        assert at > 20
        assert leftovers > 0
        assert seen == {1 if old else None, 2}
        assert found == 2
        assert not left(here)  # the last run has not been killed, and has removed them all

    @pytest.mark.accuracy
    @pytest.mark.parametrize("kind", FLAGS)
    def test_the_command_line_killed(self, kind, made, here, capfd):
        """The whole command, at its last points; then it is run again, and predicts."""
        place_old(made / f"{kind}-old")
        points = Points(here, 10**9, killed)

        def work(points):
            points.watch()
            fit_run(kind, "new", "--overwrite")
            return points.count if points.count < 250 else 250

        total = in_a_child(lambda: work(points))
        assert 20 < total < 250
        assert check_state(here, old=True) == 2
        shutil.rmtree("run")
        place_old(made / f"{kind}-old")
        for at in (total // 2, total - 10):
            code = in_a_child(lambda at=at: work(Points(here, at, killed)))
            assert code == -signal.SIGKILL
            assert check_state(here, old=True) in (1, 2)
        assert left(here)
        assert fit_run(kind, "new", "--overwrite") == 0
        assert not left(here)
        assert check_state(here, old=True) == 2
        assert main(["predict", "run", "t.csv", *(() if kind == "formula" else ("--drop", "ward"))]) == 0

    @pytest.mark.accuracy
    @pytest.mark.parametrize("way", ["new", "replaced", "replaced inside"])
    def test_a_full_disk_at_any_point_loses_nothing(self, way, made, here, monkeypatch):
        """Each is a sentence; the old run is there, and nothing is left of the new one."""
        if way == "replaced inside":
            without_exchange(monkeypatch)
        old = way != "new"
        if old:
            place_old(made / "regression-old")

        def full():
            raise OSError(errno.ENOSPC, "No space left on device")

        def work(points):
            folder = outputs.OutputFolder("run", overwrite=old)
            points.watch()
            try:
                with folder.writing() as place:
                    for file in (made / "regression-new").iterdir():
                        if file.name != "manifest.json":
                            (place / file.name).write_bytes(file.read_bytes())
            except InputError as error:
                said = str(error)
                assert said.startswith(
                    ("the results cannot be written into 'run' (", "out must be a folder where files")
                )
                assert "No space left on device" in said
                assert said.endswith("Choose another folder (--out).")
                assert not left(here)
                return 3
            return 4 if points.count >= points.at else 0

        refused = 0
        for at in itertools.count(1, 2):
            code = in_a_child(lambda at=at: work(Points(here, at, full, Points.GROWING)))
            assert code in (0, 3, 4)  # 4: where the new run is there already
            found = check_state(here, old=old)
            assert found == (1 if old else None) or code != 3
            refused += code == 3
            if code == 0:
                break
            if found == 2:
                shutil.rmtree("run")
                if old:
                    place_old(made / "regression-old")
        assert refused > 5
        assert found == 2


class TestFolders:
    @pytest.mark.parametrize("out", [".", "run"])
    def test_the_current_folder_and_its_files_stay(self, out, made, here, monkeypatch):
        """A shell that stands in the folder of a run still does; a run over it is one step too."""
        place_old(made / "regression-old")
        number = Path("run").stat().st_ino
        if out == ".":
            monkeypatch.chdir("run")
        assert main(["fit", "--data", str(here / "t.csv"), "--no-progress", "--out", out, "--overwrite",
                     *FLAGS["regression"], *SEEDS["new"]]) == 0  # fmt: skip
        monkeypatch.chdir(here)
        assert (Path("run").stat().st_ino == number) == (out == ".")
        assert check_state(here, old=True) == 2
        assert not left(here)

    def test_a_kill_inside_a_folder_without_a_run(self, made, here, monkeypatch):
        """As in the current folder: after the rename the new run is read, wherever its files are."""
        monkeypatch.setattr(outputs, "_stays", lambda _: True)
        monkeypatch.setattr(outputs, "_settle", lambda _: None)  # killed before it
        Path("run").mkdir(mode=0o700)
        with outputs.OutputFolder("run").writing() as place:
            assert place.stat().st_mode & 0o777 == 0o700  # as private as the folder
            for file in (made / "regression-new").iterdir():
                if file.name != "manifest.json":
                    shutil.copy(file, place)
        assert [path.name for path in Path("run").iterdir()] == [".replacing"]
        assert check_state(here, old=True, mine=False) == 2

    def test_a_folder_keeps_its_permissions(self, made, here):
        Path("run").mkdir(mode=0o700)
        for more in ((), ("--overwrite",)):
            assert fit_run("regression", "new", *more) == 0
            assert Path("run").stat().st_mode & 0o777 == 0o700

    def test_no_file_of_another_kind_of_run_stays(self, made, here):
        """Nor does one of version 0.2.0, which has no manifest."""
        shutil.copytree(made / "regression-old", "run")
        Path("run/manifest.json").unlink()
        assert fit_run("formula", "new", "--overwrite") == 0
        names = {path.name for path in Path("run").iterdir()}
        assert names == {path.name for path in (made / "formula-new").iterdir()}

    def test_leftovers_of_0_2_0_refuse_nothing(self, here):
        Path("run/.writing-abc_12xy").mkdir(parents=True)
        Path("run/.writing-abc_12xy/posterior.pt").write_text("half")
        assert fit_run("regression", "new") == 0
        assert not left(here)

    def test_folders_of_the_user_are_not_taken_for_leftovers(self, here):
        for name in (".writing-plans", ".run.writing-plans", ".writing-abc_12xy"):
            Path(name).mkdir()
        Path("run/.writing-plans").mkdir(parents=True)
        assert fit_run("regression", "new") == 2
        assert fit_run("regression", "new", "--overwrite") == 0
        assert Path("run/.writing-plans").is_dir()
        assert len([path for path in here.iterdir() if ".writing" in path.name]) == 3

    def test_a_place_that_is_in_use_is_not_removed(self, here):
        with outputs.OutputFolder("run").writing() as first:
            with outputs.OutputFolder("run").writing() as second:
                (second / "b").write_text("b")
            (first / "a").write_text("a")
        assert {path.name for path in Path("run").iterdir()} == {"b", "manifest.json"}
        assert {path.name for path in Path("run-2").iterdir()} == {"a", "manifest.json"}


# ------------------------------------------------------------------------------------ damage


def table_for(kind):
    return patients(6) if kind == "formula" else patients(6).drop(columns="ward")


class TestDamage:
    @pytest.mark.parametrize("kind", ["regression", "formula"])
    def test_flips_of_single_bits(self, kind, made, here):
        """All of 150: of 0.2.0 32 loaded and predicted other numbers."""
        shutil.copytree(made / f"{kind}-old", "run")
        file, draw = Path("run/posterior.pt"), np.random.default_rng(0)
        whole = file.read_bytes()
        for place in draw.integers(0, 8 * len(whole), 150):
            flipped = bytearray(whole)
            flipped[place // 8] ^= 1 << place % 8
            file.write_bytes(flipped)
            with pytest.raises(InputError, match=r"damaged: it is not as its run has written it.*manifest\.json"):
                torchngvi.load("run")
        assert main(["predict", "run", "t.csv", "--drop", "ward"]) == 2
        file.write_bytes(whole)
        torchngvi.load("run")

    @pytest.mark.parametrize("text", ["", "{}", '{"sha256": 3}', '{"sha256": {"posterior.pt": 3}}', "\0"])
    def test_a_damaged_manifest(self, text, made, here):
        shutil.copytree(made / "regression-old", "run")
        Path("run/manifest.json").write_text(text)
        with pytest.raises(InputError, match="damaged"):
            torchngvi.load("run")

    def test_other_files_that_have_changed_are_told(self, made, here, capsys):
        shutil.copytree(made / "regression-old", "run")
        Path("run/summary.json").write_text("{}")
        with pytest.warns(UserWarning, match=r"summary\.json in 'run' changed after the run"):
            torchngvi.load("run")
        assert main(["predict", "run", "t.csv", "--drop", "ward"]) == 0
        assert "note: summary.json in 'run' changed" in " ".join(capsys.readouterr().out.split())

    @pytest.mark.parametrize("kind", FLAGS)
    def test_runs_of_0_2_0(self, kind, made, here, capsys):
        """They have no digests, which is said; each value is checked."""
        shutil.copytree(made / f"{kind}-old", "run")
        expected = torchngvi.load("run").predict(table_for(kind))
        Path("run/manifest.json").unlink()
        with pytest.warns(UserWarning, match=r"has no manifest\.json, as runs of version 0\.2\.0 have none"):
            pd.testing.assert_frame_equal(torchngvi.load("run").predict(table_for(kind)), expected)
        table_for(kind).to_csv("new.csv", index=False)
        assert main(["predict", "run", "new.csv"]) == 0
        assert capsys.readouterr().out.count("has no manifest.json") == 1

    @pytest.mark.accuracy
    @pytest.mark.parametrize("kind", ["regression", "formula"])
    @pytest.mark.filterwarnings("ignore:.* has no manifest.json")
    def test_values_of_another_type(self, kind, made, here):
        """Each value in a file without digests by each of a dozen others: refused, or the predictions are the same."""
        saved = torch.load(made / f"{kind}-old" / "posterior.pt", weights_only=True)
        file, table = Path("posterior.pt"), table_for(kind)
        torch.save(saved, file)
        expected, tried, refused = torchngvi.load(file).predict(table), 0, 0
        other = []  # that were accepted, and predict other numbers
        for path in paths(saved):
            for value in OTHERS:
                old = at(saved, path)
                if isinstance(old, str) and isinstance(value, str):
                    continue  # another name
                if type(old) is type(value) and not isinstance(old, torch.Tensor) and old == value:
                    continue
                damaged = replaced(saved, path, value)
                torch.save(damaged, file)
                tried += 1
                try:
                    found = torchngvi.load(file).predict(table)
                except InputError:
                    refused += 1
                    continue
                if not found.equals(expected):
                    other.append((path, value))
        assert not other
        assert tried > 300
        assert refused > 0.8 * tried, (refused, tried)

    @pytest.mark.filterwarnings("ignore:.* has no manifest.json")
    @pytest.mark.parametrize("flags", [("--likelihood", "gaussian"), ("--likelihood", "negbin"), ("--likelihood", "t")])
    def test_wrong_values_of_the_likelihood(self, flags, here):
        patients().assign(died=np.arange(48) % 5).to_csv("t.csv", index=False)
        assert fit_run("regression", "old", *flags) == 0
        saved = torch.load("run/posterior.pt", weights_only=True)
        for name in saved["likelihood"]:
            for value in (0.0, -1.0, float("nan"), float("inf"), "1", True, None, [1.0], {}, torch.ones(1)):
                torch.save({**saved, "likelihood": {**saved["likelihood"], name: value}}, "posterior.pt")
                with pytest.raises(InputError, match="likelihood must be positive numbers by name"):
                    torchngvi.load("posterior.pt")
        for value in ({}, {"other": 1.0}, None, 1.0, {**saved["likelihood"], "other": 1.0}):
            torch.save({**saved, "likelihood": value}, "posterior.pt")
            with pytest.raises(InputError, match="likelihood must be"):
                torchngvi.load("posterior.pt")

    @pytest.mark.filterwarnings("ignore:.* has no manifest.json")
    @pytest.mark.parametrize(
        "formula",
        [
            "died[yes] ~ x + kind + np.savetxt('MARK', x) + (1 | ward)",
            "died[yes] ~ x + np.f2py.os.system('touch MARK')",
        ],
    )
    def test_a_run_that_somebody_sends_runs_no_code(self, formula, made, here):
        saved = torch.load(made / "formula-old" / "posterior.pt", weights_only=True)
        torch.save({**saved, "formula": formula, "settings": {**saved["settings"], "formula": formula}}, "posterior.pt")
        with pytest.raises(InputError, match="which no formula may, as it could run any code"):
            torchngvi.load("posterior.pt")
        assert main(["predict", "posterior.pt", "t.csv"]) == 2
        assert not Path("MARK").exists()


OTHERS = (
    None, 0, -1, 3, True, 1.5, float("nan"), "text", b"bytes", [], {}, [1, 2], {"a": 1}, torch.ones(3),
    torch.ones(2, dtype=torch.complex64), torch.tensor(float("nan")),
)  # fmt: skip


def paths(value, path=()):
    """The place of each value in a content, containers too."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(min(len(value), 3)):
            yield from paths(value[key], (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def replaced(saved, path, value):
    damaged = copy.deepcopy(saved)
    at(damaged, path[:-1])[path[-1]] = value
    return damaged


# ------------------------------------------------------------------------------------ the cache of the kernels


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
        assert compiling.cache() == base / "torchngvi" / "kernels"
        place.chmod(mode)
        with pytest.raises(CompilerError, match=f"{place} can be written to by others, and so what is in it can be"):
            compiling.cache()

    def test_a_folder_with_a_sticky_bit(self, base):
        """As /tmp: others can add to it, and cannot replace what is there."""
        base.parent.chmod(0o1777)
        assert compiling.cache() == base / "torchngvi" / "kernels"

    @pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives folders away")
    def test_a_folder_above_that_belongs_to_somebody_else(self, base):
        compiling.cache()
        for mode in (0o755, 0o1777):  # whose owner renames what he likes, the sticky bit set or not
            os.chown(base.parent, 1234, 1234)
            base.parent.chmod(mode)
            with pytest.raises(CompilerError, match="can be written to by others"):
                compiling.cache()

    def test_a_link_leads_to_what_is_checked(self, base, tmp_path, monkeypatch):
        """A link is followed once: what is loaded is where it led then."""
        (tmp_path / "link").symlink_to(base)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
        assert compiling.cache() == base / "torchngvi" / "kernels"
        base.parent.chmod(0o777)
        with pytest.raises(CompilerError, match="can be written to by others"):
            compiling.cache()

    def test_a_link_in_the_place_of_the_cache(self, base, tmp_path):
        (tmp_path / "elsewhere").mkdir()
        (base / "torchngvi").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CompilerError, match="can be written to by others; remove it"):
            compiling.cache()

    @pytest.mark.parametrize("value", ["cache", "./cache", "../cache", ""])
    def test_a_relative_name_is_ignored(self, value, tmp_path, monkeypatch):
        """As the specification of XDG says: the current folder may be anybody's."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert compiling.user_cache() == tmp_path / "home" / ".cache"
        assert datasets.cache() == tmp_path / "home" / ".cache" / "torchngvi"
        assert compiling.cache() == tmp_path / "home" / ".cache" / "torchngvi" / "kernels"
        assert not (tmp_path / "cache").exists()


# ------------------------------------------------------------------------------------ arrays


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


# ------------------------------------------------------------------------------------ extras

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
    def test_modules_say_which_they_need(self):
        """With torch alone, as of an installation without extras; it was "No module named 'numpy'"."""
        extras = {
            "torchngvi.mixed": ("numpy", "formula"),
            "torchngvi.load": ("numpy", "cli"),
            "torchngvi.adapters.formula": ("numpy", "formula"),
            "torchngvi.adapters.flows": ("numpy", "flows"),
            "torchngvi.adapters.files": ("numpy", "parquet"),
            "torchngvi.adapters.sklearn": ("numpy", "sklearn"),
            "torchngvi.adapters.gpytorch": ("gpytorch", "gpytorch"),
            "torchngvi.adapters.pyro": ("pyro", "pyro"),
        }
        every = ("numpy", "pandas", "scipy", "sklearn", "matplotlib", "formulae", "gpytorch", "linear_operator", "pyro")
        for said, (place, (package, extra)) in zip(with_packages_blocked(every, *extras), extras.items(), strict=True):
            what = "torchngvi.mixed" if place.endswith("formula") else place
            assert said == f"{package}: {what} needs {package}: {install(extra)}."

    @pytest.mark.accuracy
    def test_nothing_is_said_where_they_are_there(self):
        assert with_packages_blocked(("nothing",), "torchngvi.mixed", "torchngvi.load") == ["imported"] * 2


# ------------------------------------------------------------------------------------ pickles, and kills of a fit


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
