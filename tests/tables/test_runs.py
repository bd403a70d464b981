"""Folders of runs: whole or not at all, whatever kills the process; damage, strangers, links, cells and names."""

import copy
import csv
import errno
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from kills import Points, in_a_child, killed, needs_forks

import torchngvi
from torchngvi.app import saved as runs
from torchngvi.app.saved import OutputFolder, read_frame, write_frame
from torchngvi.cli import main
from torchngvi.errors import InputError
from torchngvi.tables.model import regression

pytest.importorskip("formulae")


def patients(rows=48):
    draw = np.random.default_rng(3)
    x, kind = draw.normal(size=rows), np.resize(["a", "b", "c"], rows)
    died = np.where(draw.random(rows) < 1 / (1 + np.exp(-x)), "yes", "no")
    return pd.DataFrame({"died": died, "x": x, "kind": kind, "ward": np.resize(list("uvwz"), rows)})


FLAGS = {
    "regression": ("--target", "died", "--drop", "ward", "--test-fraction", "0", "--draws", "400"),
    "formula": ("--formula", "died[yes] ~ x + kind + (1 | ward)", "--likelihood", "bernoulli"),
}
SEEDS = {"old": ("--seed", "1"), "new": ("--seed", "2")}


def fit_run(kind, which, *more):
    return main(["fit", "--data", "t.csv", "--no-progress", "--out", "run", *FLAGS[kind], *SEEDS[which], *more])


def seed_of(folder="run"):
    """Which run a folder holds."""
    return json.loads(runs.file_of(Path(folder), "summary.json").read_text())["settings"]["seed"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    patients().to_csv("t.csv", index=False)
    return tmp_path


def left(folder):
    return [path.name for path in folder.rglob("*") if ".writing-" in path.name or path.name == ".replacing"]


def check_whole(folder="run"):
    """Every file of the run is the one of its manifest."""
    digests = json.loads(runs.file_of(Path(folder), "manifest.json").read_text())["sha256"]
    for name, digest in digests.items():
        assert hashlib.sha256(runs.file_of(Path(folder), name).read_bytes()).hexdigest() == digest


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
    @pytest.mark.parametrize("way", ["new", "replaced"])
    @pytest.mark.parametrize("kind", FLAGS)
    def test_a_kill_at_any_point_leaves_the_old_run_or_the_new_one(self, kind, way, made, here):
        """At every point at which the process writes, syncs, renames or removes; leftovers refuse nothing."""
        old, seen, leftovers = way != "new", set(), 0

        def work(points):
            points.watch()
            with runs.OutputFolder("run", overwrite=old).writing() as place:
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
    @pytest.mark.parametrize("way", ["new", "replaced"])
    def test_a_full_disk_at_any_point_loses_nothing(self, way, made, here):
        """Each is a sentence; the old run is there, and nothing is left of the new one."""
        old = way != "new"
        if old:
            place_old(made / "regression-old")

        def full():
            raise OSError(errno.ENOSPC, "No space left on device")

        def work(points):
            folder = runs.OutputFolder("run", overwrite=old)
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
    @pytest.mark.accuracy
    @pytest.mark.parametrize("out", [".", "run"])
    def test_the_current_folder_and_its_files_stay(self, out, made, here, monkeypatch):
        """A shell that stands in the folder of a run still does."""
        place_old(made / "regression-old")
        number = Path("run").stat().st_ino
        if out == ".":
            monkeypatch.chdir("run")
        assert main(["fit", "--data", str(here / "t.csv"), "--no-progress", "--out", out, "--overwrite",
                     *FLAGS["regression"], *SEEDS["new"]]) == 0  # fmt: skip
        monkeypatch.chdir(here)
        assert Path("run").stat().st_ino == number
        assert check_state(here, old=True) == 2
        assert not left(here)

    def test_a_kill_inside_a_folder_without_a_run(self, made, here, monkeypatch):
        """As in the current folder: after the rename the new run is read, wherever its files are."""
        monkeypatch.setattr(runs, "_stays", lambda _: True)
        monkeypatch.setattr(runs, "_settle", lambda _: None)  # killed before it
        Path("run").mkdir(mode=0o700)
        with runs.OutputFolder("run").writing() as place:
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
        with runs.OutputFolder("run").writing() as first:
            with runs.OutputFolder("run").writing() as second:
                (second / "b").write_text("b")
            (first / "a").write_text("a")
        assert {path.name for path in Path("run").iterdir()} == {"b", "manifest.json"}
        assert {path.name for path in Path("run-2").iterdir()} == {"a", "manifest.json"}


def predicted(run, table):
    """The predictions of a run, or of a result alone, which a file without its columns is, as a frame."""
    found = torchngvi.load(run).predict(table)
    if isinstance(found, pd.DataFrame):
        return found
    expected = found.mean.numpy()
    return pd.DataFrame({"probability": expected})


def table_for(kind):
    return patients(6) if kind == "formula" else patients(6).drop(columns="ward")


class TestDamage:
    @pytest.mark.parametrize("kind", FLAGS)
    def test_flips_of_single_bits(self, kind, made):
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
    def test_a_damaged_manifest(self, text, made):
        shutil.copytree(made / "regression-old", "run")
        Path("run/manifest.json").write_text(text)
        with pytest.raises(InputError, match="damaged"):
            torchngvi.load("run")

    def test_other_files_that_have_changed_are_told(self, made, capsys):
        shutil.copytree(made / "regression-old", "run")
        Path("run/summary.json").write_text("{}")
        with pytest.warns(UserWarning, match=r"summary\.json in 'run' changed after the run"):
            torchngvi.load("run")
        assert main(["predict", "run", "t.csv"]) == 0
        assert "note: summary.json in 'run' changed" in " ".join(capsys.readouterr().out.split())

    @pytest.mark.parametrize("kind", FLAGS)
    def test_the_result_comes_back(self, kind, made):
        """From the folder, from the file alone, and without its digests: the same predictions."""
        shutil.copytree(made / f"{kind}-old", "run")
        expected = torchngvi.load("run").predict(table_for(kind))
        shutil.copy("run/posterior.pt", "posterior.pt")
        pd.testing.assert_frame_equal(torchngvi.load("posterior.pt").predict(table_for(kind)), expected)
        table = torchngvi.load("run").result.summary().fixed
        printed = pd.read_csv("run/coefficients.csv").set_index("name")["mean"]
        np.testing.assert_allclose(printed[: len(table.names)], table.mean.numpy(), rtol=1e-12)

    def test_a_result_that_python_has_saved(self, capsys):
        result = regression("x ~ kind", patients()).fit(progress=False)
        result.save("posterior.pt")
        again = torchngvi.load("posterior.pt")
        assert torch.equal(again.predict(patients(6)).mean, result.predict(patients(6)).mean)
        assert main(["predict", "posterior.pt", "t.csv"]) == 2
        assert "'posterior.pt' is no run of torchngvi fit" in capsys.readouterr().err

    @pytest.mark.accuracy
    @pytest.mark.parametrize("kind", FLAGS)
    def test_values_of_another_type(self, kind, made):
        """Each value in a file without digests by each of a dozen others: refused, or the predictions are the same."""
        saved = torch.load(made / f"{kind}-old" / "posterior.pt", weights_only=True)
        file, table = Path("posterior.pt"), table_for(kind)
        torch.save(saved, file)
        expected, tried, refused = predicted(file, table), 0, 0
        other = []  # that were accepted, and predict other numbers
        for path in paths(saved):
            for value in OTHERS:
                old = at(saved, path)
                if isinstance(old, str) and isinstance(value, str):
                    continue  # another name
                if type(old) is type(value) and not isinstance(old, torch.Tensor | list | dict) and old == value:
                    continue
                if type(old) in (int, float) and type(value) in (int, float, bool) or path[-2:-1] == ("values",):
                    continue  # another cell of the table
                torch.save(replaced(saved, path, value), file)
                tried += 1
                try:
                    found = predicted(file, table)
                except InputError:
                    refused += 1
                    continue
                if not found.equals(expected[list(found)]):
                    other.append((path, value))
        assert not other
        assert tried > 200
        assert refused > 0.7 * tried, (refused, tried)

    @pytest.mark.parametrize(
        "formula",
        [
            "died[yes] ~ x + kind + np.savetxt('MARK', x) + (1 | ward)",
            "died[yes] ~ x + np.f2py.os.system('touch MARK')",
        ],
    )
    def test_a_run_that_somebody_sends_runs_no_code(self, formula, made):
        saved = torch.load(made / "formula-old" / "posterior.pt", weights_only=True)
        saved["made"]["formula"] = formula
        torch.save(saved, "posterior.pt")
        with pytest.raises(InputError, match="which no formula may, as it could run any code"):
            torchngvi.load("posterior.pt")
        assert main(["predict", "posterior.pt", "t.csv"]) == 2
        assert not Path("MARK").exists()

    @pytest.mark.parametrize("change", [{"needed": "x"}, {"fill": {"x": None}}, {"levels": {"x": "a"}}, {"more": []}])
    def test_columns_that_no_run_has_written(self, change, made):
        saved = torch.load(made / "formula-old" / "posterior.pt", weights_only=True)
        torch.save({**saved, "run": {**saved["run"], **change}}, "posterior.pt")
        with pytest.raises(InputError, match="its columns are not as a run writes them"):
            torchngvi.load("posterior.pt")

    @pytest.mark.parametrize("run", ["nowhere", ".", "t.csv", "state/posterior.pt", 3])
    def test_what_is_no_run(self, run):
        Path("state").mkdir()
        torch.save({"weight": torch.ones(2)}, "state/posterior.pt")
        with pytest.raises(InputError, match=r"no folder of a run|takes the folder of a run|no run of torchngvi fit"):
            torchngvi.load(run)


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


def table(path, columns="x", rows=40):
    """A csv file with these columns, and classes y that alternate."""
    count = columns.count(",") + 1
    lines = (",".join(str(i * (3 + j) % 7) for j in range(count)) + f",{i % 2}" for i in range(rows))
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text("\n".join([f"{columns},y", *lines]) + "\n", encoding="utf-8")


def fit(data, *flags):
    return main(["fit", "--no-progress", "--draws", "400", "--data", data, "--target", "y", *flags])


def contents(folder):
    """But for the digests."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != "manifest.json"}


class TestEarlierResults:
    def test_they_are_kept(self, capsys):
        table("a.csv")
        assert fit("a.csv") == 0
        Path("runs/a/notes.txt").write_text("mine")
        before = contents("runs/a")
        capsys.readouterr()
        assert fit("a.csv") == 2
        captured = capsys.readouterr()
        assert captured.err == (
            "torchngvi: error: out must be a new or an empty folder, so that no earlier results are lost; "
            "'runs/a' holds files. Say --overwrite to replace them, or choose another folder (--out).\n"
        )
        assert captured.out == ""
        assert contents("runs/a") == before
        assert fit("a.csv", "--out", "elsewhere") == 0
        assert fit("a.csv", "--overwrite") == 0
        assert contents("runs/a").keys() == before.keys()
        assert Path("runs/a/notes.txt").read_text() == "mine"

    def test_wrong_data_come_before_a_folder_that_is_taken(self, capsys):
        table("a.csv")
        Path("runs/a").mkdir(parents=True)
        Path("runs/a/notes.txt").write_text("mine")
        for flags, message in [
            (("--data", "a.csv"), "target is missing: name the column to predict (--target)."),
            (("--data", "a.csv", "--target", "z"), "target column 'z' is not in the data."),
            (("--data", "a.csv", "--target", "y"), "'runs/a' holds files. Say --overwrite"),
        ]:
            assert main(["fit", *flags]) == 2
            assert message in capsys.readouterr().err

    @pytest.mark.parametrize("inside", [False, True])
    def test_a_folder_that_fills_during_the_run(self, inside, monkeypatch):
        """The results of both runs are kept, also where they are written inside of the folder."""
        folder = OutputFolder("out")
        monkeypatch.setattr(runs, "_stays", lambda path: inside and path.name == "out")
        if inside:
            with folder.writing() as place:
                assert place.parent == Path("out")
                Path("out/log.csv").write_text("of another run")
                (place / "log.csv").write_text("ours")
            assert contents("out-2").keys() == {"log.csv"}
            return
        Path("out").mkdir()
        Path("out/log.csv").write_text("of another run")
        for name in ("log.csv", "figure.png"):
            with folder.writing() as place:
                (place / name).write_text("ours")
        assert folder.path == Path("out-2")
        assert contents("out") == {"log.csv": b"of another run"}
        assert contents("out-2") == {"log.csv": b"ours", "figure.png": b"ours"}

    @pytest.mark.parametrize(
        ("take", "sentence"),
        [
            (lambda out: (out.mkdir(), (out / "b").write_text("b")), "another run has written into out"),
            (lambda out: out.write_text("b"), "Not a directory"),
        ],
    )
    def test_a_place_that_is_taken_during_the_run(self, take, sentence):
        folder = OutputFolder("out", overwrite=True)
        with pytest.raises(InputError, match=f"{sentence}.* nothing that was there has"), folder.writing():
            take(Path("out"))
        assert Path("out").exists()
        assert not left(Path())

    def test_a_run_that_was_killed_before_its_last_step(self):
        """All of its files have come to their places, and their place is left."""
        Path("out/.replacing").mkdir(parents=True)
        with OutputFolder("out", overwrite=True).writing() as place:
            (place / "a").write_text("ours")
        assert contents("out") == {"a": b"ours"}

    def test_nothing_is_half_written(self):
        """Files that an error interrupts leave the earlier ones as they were."""
        Path("out").mkdir()
        Path("out/log.csv").write_text("earlier")

        def write():
            with OutputFolder("out", overwrite=True).writing() as place:
                (place / "log.csv").write_text("half")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write()
        assert contents("out") == {"log.csv": b"earlier"}

    def test_an_error_of_the_disk_is_a_sentence(self):
        sentence = "the results cannot be written into 'out' .* Choose another folder"
        with pytest.raises(InputError, match=sentence), OutputFolder("out").writing():
            os.mkdir("no/such/place")


class TestLinks:
    @pytest.mark.parametrize("flags", [(), ("--overwrite",)])
    @pytest.mark.parametrize("exists", [True, False])
    def test_a_folder_that_is_a_link(self, flags, exists, capsys):
        table("a.csv")
        Path("runs").mkdir()
        if exists:
            Path("other").mkdir()
        Path("runs/a").symlink_to("../other")
        assert fit("a.csv", *flags) == 2
        assert (
            "out must be a folder itself, as links are not followed; 'runs/a' is a link to '../other'. "
            "Name that folder (--out)." in capsys.readouterr().err
        )
        assert Path("other").exists() == exists
        assert not exists or contents("other") == {}

    @pytest.mark.parametrize("out", ["runs2/x", "runs2/new/x", "runs/../runs2/x", "absolute"])
    def test_a_link_above_the_folder(self, out):
        Path("other").mkdir()
        Path("runs").mkdir()
        Path("runs2").symlink_to("other")
        out = Path.cwd() / "runs2/x" if out == "absolute" else out
        with pytest.raises(
            InputError, match=r"^out must be a folder itself, as links .*; '\S*runs2' is a link to 'other'"
        ):
            OutputFolder(out)
        assert contents("other") == {}

    def test_links_of_the_system_are_followed(self, monkeypatch):
        """Those that lead to the current folder, and those of an absolute path elsewhere."""
        Path("disk/here").mkdir(parents=True)
        Path("disk/scratch").mkdir()
        Path("system").symlink_to("disk")
        top = Path.cwd()
        monkeypatch.chdir("system/here")
        for out in ("x", "../y", top / "system/scratch/x"):
            with OutputFolder(out).writing() as place:
                (place / "a").write_text("")
        assert sorted(str(path.relative_to(top / "disk")) for path in top.glob("disk/**/a")) == [
            "here/x/a",
            "scratch/x/a",
            "y/a",
        ]
        (top / "disk/link").symlink_to("scratch")
        with pytest.raises(InputError, match="links are not followed"):
            OutputFolder(top / "system/link")

    def test_a_link_in_the_place_of_a_file(self):
        table("a.csv")
        Path("runs/a").mkdir(parents=True)
        Path("precious").write_text("precious")
        for name in ("summary.json", "coefficients.csv", "posterior.pt", "fit.png"):
            Path("runs/a", name).symlink_to(Path("precious").absolute())
        assert fit("a.csv", "--overwrite") == 0
        assert Path("precious").read_text() == "precious"
        assert not Path("runs/a/summary.json").is_symlink()
        assert json.loads(Path("runs/a/summary.json").read_text())["converged"] is True


class TestCells:
    def test_names_and_levels_that_a_spreadsheet_would_evaluate(self):
        table("a.csv", "=cmd,+1+1,-2,@sum,constant,plain")
        frame = pd.read_csv("a.csv").assign(note=["=1+1", "@x", "-a", "b"] * 10, y=["=1+1", "=2+2"] * 20)
        frame.to_csv("a.csv", index=False)
        assert fit("a.csv") == 0
        assert main(["predict", "runs/a", "a.csv"]) == 0
        with Path("runs/a/coefficients.csv").open() as file:
            rows = list(csv.DictReader(file))
        names = ["'=cmd", "'+1+1", "'-2", "'@sum", "plain"]
        assert [row["name"] for row in rows][1:6] == names
        assert min(float(row["mean"]) for row in rows) < 0  # numbers stay numbers, negative ones too
        assert pd.read_csv("runs/a/predictions-a.csv")["class"].str.startswith("'=").all()

    def test_round_trip(self):
        texts = ["=1+1", "+a", "-b", "@c", "\td", "\re", "'f", "''g", "h", "-1"]
        frame = pd.DataFrame({"text": texts, "number": np.linspace(-1, 1, len(texts)), "whole": range(-5, 5)})
        frame["flag"] = frame["whole"] > 0
        write_frame(Path("a.csv"), frame)
        with Path("a.csv").open(newline="") as file:
            assert all(row["text"][0] == "'" or row["text"] == "h" for row in csv.DictReader(file))
        pd.testing.assert_frame_equal(read_frame(Path("a.csv")), frame)


class TestNames:
    def test_of_other_scripts_and_with_dollars(self, capsys):
        table("名前 $a$.csv", r"身長,$x_1$,a$\foo$,$,log(x),a~b,1st,x[1],True")
        assert fit("名前 $a$.csv") == 0
        with Path("runs/名前 $a$/coefficients.csv").open(encoding="utf-8") as file:
            found = [row["name"] for row in csv.DictReader(file)]
        assert found == ["Intercept", "身長", "$x_1$", r"a$\foo$", "$", "a~b", "1st", "x[1]", "True"]
        note = "the same in all training rows, so that nothing can tell an effect of it, and left out: log(x) = 0.0"
        assert note in " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert main(["predict", "runs/名前 $a$", "名前 $a$.csv"]) == 0

    def test_a_terminal_without_the_letters(self, monkeypatch):
        table("名前.csv", "身長")
        output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
        monkeypatch.setattr(sys, "stdout", output)
        assert fit("名前.csv") == 0
        assert rb"\u8eab\u9577" in output.buffer.getvalue()

    @pytest.mark.parametrize(("rows", "few"), [(2, True), (9, True), (10, False)])
    def test_few_rows_are_not_believed(self, rows, few, capsys, monkeypatch):
        table("a.csv", rows=rows)
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        assert fit("a.csv", "--test-fraction", "0") == 0
        out = capsys.readouterr().out
        assert ("\x1b[32m" in out) != few  # green
        assert ("\x1b[33m" in out) == few  # yellow
        plain = re.sub(r"\x1b\[[\d;]*m", "", out)
        assert re.search(r"╭─ (.*?) ─", plain)[1] == ("converged, with a warning" if few else "converged")
        assert (f"{rows} training rows are too few to believe the result" in " ".join(plain.split())) == few
