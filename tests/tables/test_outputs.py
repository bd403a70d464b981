"""What the command line writes: earlier results kept, no link followed, cells and names that do no harm."""

import csv
import io
import json
import os
import re
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

import torchngvi
from torchngvi.app import datasets, figures, fonts
from torchngvi.app.outputs import OutputFolder, read_frame, write_frame
from torchngvi.cli import main
from torchngvi.errors import InputError


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def table(path, columns="x", rows=40):
    """A csv file with these columns, and classes y that alternate."""
    count = columns.count(",") + 1
    lines = (",".join(str(i * (3 + j) % 7) for j in range(count)) + f",{i % 2}" for i in range(rows))
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text("\n".join([f"{columns},y", *lines]) + "\n", encoding="utf-8")


def fit(data, *flags):
    return main(["fit", "--no-progress", "--data", data, "--target", "y", *flags])


def contents(folder):
    """But for the digests."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != "manifest.json"}


def title(text):
    """Of the frame around the results."""
    return re.search(r"╭─ (.*?) ─", text)[1]


IN_A_CLONE = pytest.mark.skipif(
    not (Path(torchngvi.__file__).parents[1] / "examples" / "papers").is_dir(),
    reason="needs the package of a clone, with examples/papers next to it",
)
EXPERIMENT = """title = "t"
[[cases]]
name = "c"
data = "synthetic"
rows = 40
features = 2
iterations = 3
methods = [{ method = "vn", lr = 0.3 }]
"""


class TestFolders:
    @pytest.mark.parametrize("command", ["fit", "compare", pytest.param("reproduce", marks=IN_A_CLONE)])
    def test_earlier_results_are_kept(self, command, capsys):
        table("a.csv")
        Path("t.toml").write_text(EXPERIMENT)
        few = ["--data", "a.csv", "--target", "y"]
        flags = {
            "fit": ["fit", *few, "--no-progress"],
            "compare": ["compare", *few, "--methods", "vn", "--iterations", "2", "--starts", "1"],
            "reproduce": ["reproduce", "t.toml"],
        }[command]
        assert main(flags) == 0
        folder = {"fit": "runs/a", "compare": "runs/compare", "reproduce": "runs/t"}[command]
        Path(folder, "notes.txt").write_text("mine")
        before = contents(folder)
        capsys.readouterr()
        assert main(flags) == 2
        captured = capsys.readouterr()
        assert captured.err == (
            "torchngvi: error: out must be a new or an empty folder, so that no earlier results are lost; "
            f"'{folder}' holds files. Say --overwrite to replace them, or choose another folder (--out).\n"
        )
        assert captured.out == ""
        assert contents(folder) == before
        assert main([*flags, "--out", "elsewhere"]) == 0
        assert main([*flags, "--overwrite"]) == 0
        assert contents(folder).keys() == before.keys()
        assert Path(folder, "notes.txt").read_text() == "mine"

    @pytest.mark.parametrize("batches", [(), ("--batch-rows", "5")], ids=["at once", "in batches"])
    def test_wrong_data_come_before_a_folder_that_is_taken(self, batches, capsys):
        table("a.csv")
        Path("runs/a").mkdir(parents=True)
        Path("runs/a/notes.txt").write_text("mine")
        for flags, message in [
            (("--data", "a.csv"), "target is missing: name the column to predict (--target)."),
            (("--data", "a.csv", "--target", "z"), "target column 'z' is not in the data."),
            (("--data", "a.csv", "--target", "y"), "'runs/a' holds files. Say --overwrite"),
        ]:
            assert main(["fit", *flags, *batches]) == 2
            assert message in capsys.readouterr().err
        Path("a.csv").unlink()
        assert main(["fit", "--data", "a.csv", "--target", "y", *batches]) == 2
        assert "there " in (said := capsys.readouterr().err)
        assert "'a.csv'" in said

    def test_files_of_one_name_in_two_folders(self, capsys):
        for path in ("a.csv", "d1/a.csv"):
            table(path)
        assert fit("a.csv") == 0
        assert fit("d1/a.csv") == 2
        assert "'runs/a' holds files. Say --overwrite" in capsys.readouterr().err
        assert json.loads(Path("runs/a/summary.json").read_text())["settings"]["data"] == "a.csv"

    def test_an_empty_folder_is_free(self):
        table("a.csv")
        Path("out").mkdir()
        assert fit("a.csv", "--out", "out") == 0

    def test_a_folder_that_fills_during_the_run(self):
        """The results of both runs are kept."""
        folder = OutputFolder("out")
        Path("out").mkdir()
        Path("out/log.csv").write_text("of another run")
        for name in ("log.csv", "figure.png"):
            with folder.writing() as place:
                (place / name).write_text("ours")
        assert folder.path == Path("out-2")
        assert contents("out") == {"log.csv": b"of another run"}
        assert contents("out-2") == {"log.csv": b"ours", "figure.png": b"ours"}

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

    def test_permissions_are_those_of_any_new_file(self):
        Path("plain").write_text("")
        with OutputFolder("out").writing() as place:
            (place / "a").write_text("")
        assert Path("out/a").stat().st_mode == Path("plain").stat().st_mode


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

    def test_a_link_in_the_place_of_a_download(self, monkeypatch):
        """Nor is a name used that another process could know."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").absolute()))
        monkeypatch.delenv("TORCHNGVI_DATA", raising=False)
        monkeypatch.setattr(datasets, "SITE", Path("site").absolute().as_uri() + "/")
        source = datasets.Source("small", 2, 1, datasets.content(np.array([[1.0], [2.0]]), np.array([0.0, 1.0])))
        monkeypatch.setattr(datasets, "SOURCES", {"small": source})
        Path("site").mkdir()
        Path("site/small").write_text("0 1:1\n1 1:2\n")
        datasets.cache().mkdir(parents=True)
        Path("precious").write_text("precious")
        (datasets.cache() / "small.part").symlink_to(Path("precious").absolute())
        datasets.load("small")
        assert Path("precious").read_text() == "precious"


class TestCells:
    def test_names_of_columns_that_a_spreadsheet_would_evaluate(self):
        table("a.csv", "=cmd,+1+1,-2,@sum,'quoted,plain")
        assert fit("a.csv") == 0
        with Path("runs/a/coefficients.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [row["name"] for row in rows] == ["intercept", "'=cmd", "'+1+1", "'-2", "'@sum", "''quoted", "plain"]
        means = [float(row["mean"]) for row in rows]  # numbers stay numbers, negative ones too
        assert min(means) < 0

    @pytest.mark.accuracy
    def test_logs(self):
        table("=a.csv")
        flags = ["--methods", "vn", "--iterations", "2", "--starts", "1"]
        assert main(["compare", "--data", "=a.csv", "--target", "y", *flags]) == 0
        log = pd.read_csv("runs/compare/log.csv")
        assert set(log["case"]) == {"'=a.csv"}
        assert log["iteration"].tolist() == [0, 1, 2]

    def test_round_trip(self):
        texts = ["=1+1", "+a", "-b", "@c", "\td", "\re", "'f", "''g", "h", "-1"]
        frame = pd.DataFrame({"text": texts, "number": np.linspace(-1, 1, len(texts)), "whole": range(-5, 5)})
        frame["flag"] = frame["whole"] > 0
        write_frame(Path("a.csv"), frame)
        with Path("a.csv").open(newline="") as file:
            assert all(row["text"][0] == "'" or row["text"] == "h" for row in csv.DictReader(file))
        pd.testing.assert_frame_equal(read_frame(Path("a.csv")), frame)


class TestFewRows:
    @pytest.mark.parametrize(("rows", "few"), [(2, True), (9, True), (10, False)])
    def test_few_rows_are_not_believed(self, rows, few, capsys, monkeypatch):
        """The verdict says only that the search for q is done."""
        table("a.csv", rows=rows)
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        assert fit("a.csv", "--test-fraction", "0") == 0
        out = capsys.readouterr().out
        assert ("\x1b[32m" in out) != few  # green
        assert ("\x1b[33m" in out) == few  # yellow
        plain = re.sub(r"\x1b\[[\d;]*m", "", out)
        assert title(plain) == ("converged, with a warning" if few else "converged")
        warnings = json.loads(Path("runs/a/summary.json").read_text())["warnings"]
        sentence = (
            f"{rows} training rows are too few to believe the result: the posterior is little more than the prior, "
            "converged or not. Take at least 10."
        )
        assert warnings == ([sentence] if few else [])

    def test_rows_without_weight_do_not_count(self):
        lines = "".join(f"{i},{i % 2},{int(i < 3)}\n" for i in range(40))
        Path("a.csv").write_text("x,y,w\n" + lines)
        assert fit("a.csv", "--weights", "w", "--test-fraction", "0") == 0
        warnings = json.loads(Path("runs/a/summary.json").read_text())["warnings"]
        assert warnings[0].startswith("3 training rows of positive weight are too few")


class TestNames:
    """Warnings are errors here, those of glyphs that are missing too."""

    @pytest.fixture
    def _only_matplotlib(self, monkeypatch):
        """No font of the machine."""
        monkeypatch.setattr(fonts, "_WIDE", ())

    @pytest.mark.accuracy
    @pytest.mark.usefixtures("_only_matplotlib")
    def test_names_without_glyphs_are_spelled(self):
        table("名前.csv", "身長,体重,age")
        assert fit("名前.csv") == 0
        flags = ["--methods", "vn", "--iterations", "2", "--starts", "1"]
        assert main(["compare", "--data", "名前.csv", "--target", "y", *flags]) == 0
        assert fonts.drawable("身長=é") == r"\u8eab\u9577=é"
        with Path("runs/名前/coefficients.csv").open(encoding="utf-8") as file:
            assert [row["name"] for row in csv.DictReader(file)] == ["intercept", "身長", "体重", "age"]

    def test_fonts_that_have_the_glyphs_are_used(self, monkeypatch):
        """DejaVu Sans, which comes with matplotlib, beside a font of Latin letters only."""
        monkeypatch.setitem(matplotlib.rcParams, "font.family", ["cmr10"])
        monkeypatch.setattr(fonts, "_WIDE", ("a font that is not here",))
        assert fonts.families() == ["cmr10"]
        assert fonts.drawable("א") == r"\u05d0"
        monkeypatch.setattr(fonts, "_WIDE", ("a font that is not here", "DejaVu Sans"))
        assert fonts.families() == ["cmr10", "DejaVu Sans"]
        assert fonts.drawable("א") == "א"
        figure = Figure()
        figures.FigureCanvasAgg(figure)
        figure.suptitle(fonts.drawable("א"), fontfamily=fonts.families())
        figure.savefig(io.BytesIO())

    def test_dollars_are_no_formulas(self):
        table("$a$.csv", r"$x_1$,a$\foo$,$")
        assert fit("$a$.csv") == 0

    def test_a_terminal_without_the_letters(self, monkeypatch):
        table("名前.csv", "身長")
        output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
        monkeypatch.setattr(sys, "stdout", output)
        assert fit("名前.csv") == 0
        assert rb"\u8eab\u9577" in output.buffer.getvalue()


def test_an_error_of_the_disk_is_a_sentence():
    sentence = "the results cannot be written into 'out' .* Choose another folder"
    with pytest.raises(InputError, match=sentence), OutputFolder("out").writing():
        os.mkdir("no/such/place")


def test_results_written_are_read_again():
    """Through the temporary place: the tensors too."""
    table("a.csv")
    assert fit("a.csv") == 0
    assert torch.load("runs/a/posterior.pt", weights_only=True)["feature_names"] == ["intercept", "x"]
