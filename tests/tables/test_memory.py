"""The memory budget of the command line, and its last resort where none was foreseen."""

import gzip
import io
import math
import re
import resource
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from torchngvi.app import design, memory, readers, runs, tables
from torchngvi.cli import main
from torchngvi.errors import InputError

SMALL = np.array([0.0, 1.0])


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _six_gigabytes(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 6e9)


def fit(data, *flags):
    return main(["fit", "--no-progress", "--data", str(data), *flags])


def array(shape, values=b"", kind="<f8"):
    """An array of an archive: what its header claims, and the bytes it has."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue() + values


def archive(**members):
    with zipfile.ZipFile("a.npz", "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return "a.npz"


def header(text):
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


Y = array((2,), SMALL.tobytes())
HUGE = {
    "svmlight": ("1 999999999:1\n0 3:1\n", (), "2 rows of 999999999 columns, takes about 3.2e+11 GB"),
    "svmlight, diagonal": ("1 999999999:1\n0 3:1\n", ("--posterior", "diagonal"), "takes about 3.26e+04 GB of memory"),
    "n_features": ("1 1:1\n0 2:1\n", ("--n-features", str(10**15)), "2 rows of 1000000000000000 columns"),
    "svmlight index": ("1 99999999999999999999:1\n", (), "'a.svm' cannot be read as a svmlight file"),
    "claim": ({"X": array((10**12, 10)), "y": Y}, (), "reading the arrays of 'a.npz' takes about 8e+04 GB of memory"),
    "giant claim": ({"X": array((10**30, 10)), "y": Y}, (), "reading the arrays of 'a.npz' takes about 8e+22 GB"),
    "no rows": ({"X": array((0, 10**15)), "y": array((0,))}, (), "0 rows of 1000000000000000 columns, takes"),
    "giant texts": (
        {"X": array((2, 3)), "y": array((2,), kind="<U500000000")},
        (),
        "reading the arrays of 'a.npz' takes about 4 GB of memory, and 3 GB are free. Use a smaller file.",
    ),
    "negative": ({"X": array((-3, 2)), "y": Y}, (), "'a.npz' cannot be read as an npz archive of numbers (neg"),
    "signs": ({"X": header(b"-" * 9000 + b"1"), "y": Y}, (), "'a.npz' cannot be read as an npz archive of numbers ("),
    "brackets": ({"X": header(b"[" * 9000), "y": Y}, (), "'a.npz' cannot be read as an npz archive of numbers ("),
    "cut": ({"X": b"\x93NUM", "y": Y}, (), "'a.npz' cannot be read as an npz archive of numbers ("),
}


@pytest.mark.parametrize("case", HUGE, ids=str)
def test_what_is_too_large_is_refused_before_it_is_read(case, capsys, monkeypatch):
    content, flags, sentence = HUGE[case]
    monkeypatch.setattr(memory, "available", lambda: 3e9)
    if isinstance(content, str):
        Path(name := "a.svm").write_text(content)
    else:
        name = archive(**content)
        if "takes" in sentence:
            monkeypatch.delattr(np, "load")
    assert fit(name, *flags) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert re.fullmatch(r"torchngvi: error: [^\n]*\.\n", captured.err)
    assert "()" not in captured.err  # the reason is named
    assert captured.out == ""
    assert not Path("runs").exists()


@pytest.mark.usefixtures("_six_gigabytes")
class TestColumns:
    @pytest.fixture(autouse=True)
    def _twenty_thousand(self):
        np.savez("a.npz", X=np.random.default_rng(0).standard_normal((20, 20_000)), y=np.arange(20) % 2)

    def test_a_full_covariance_is_refused(self, capsys):
        assert fit("a.npz") == 2
        assert capsys.readouterr().err == (
            "torchngvi: error: a fit of posterior cholesky to 'a.npz', 20 rows of 20000 columns, takes about 129 GB of "
            "memory, and 6 GB are free. Use posterior diagonal, or fewer columns.\n"
        )

    def test_a_constant_step_takes_less(self, capsys):
        assert fit("a.npz", "--lr", "0.1") == 2
        assert "takes about 20.1 GB of memory" in capsys.readouterr().err

    @pytest.mark.accuracy
    def test_a_mean_field_is_fitted(self, monkeypatch):
        monkeypatch.setattr(memory, "draws", lambda rows, columns: 200)
        assert fit("a.npz", "--posterior", "diagonal", "--max-evaluations", "3") == 1
        assert Path("runs/a/coefficients.csv").read_text().count("\n") == 20_002

    def test_a_comparison_is_refused(self, capsys):
        assert main(["compare", "--data", "a.npz", "--methods", "vn", "--starts", "3"]) == 2
        error = capsys.readouterr().err
        assert "20 rows of 20000 columns from 3 starts side by side, takes about 385 GB of memory" in error


@pytest.mark.usefixtures("_six_gigabytes")
def test_columns_of_a_csv_file(capsys):
    """As many columns as texts have levels, not as the file has."""
    names, rows = [f"c{i}" for i in range(400)], range(50)
    lines = (",".join([f"t{i}"] * 400) + f",{i % 2}" for i in rows)
    Path("a.csv").write_text("\n".join([",".join(names) + ",y", *lines]))
    assert fit("a.csv", "--target", "y") == 2
    assert "50 rows of 19600 columns, takes about 124 GB of memory, and 6 GB are free." in capsys.readouterr().err


@pytest.mark.usefixtures("_six_gigabytes")
def test_synthetic_data(capsys):
    Path("t.toml").write_text(
        'title = "t"\n[[cases]]\nname = "c"\ndata = "synthetic"\nrows = 1000000000000\nfeatures = 2\n'
        'methods = [{ method = "vn" }]\n'
    )
    assert main(["compare", "t.toml"]) == 2
    assert "a fit of posterior cholesky to case 'c', 1000000000000 rows of 2 columns, takes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "line", "reader"),
    [("a.csv.gz", b"a,y\n", (pd, "read_csv")), ("a.svm.gz", b"1 1:1\n", (readers.datasets, "load_svmlight_file"))],
)
def test_a_few_bytes_that_unpack_to_many(name, line, reader, capsys, monkeypatch):
    """Read piece by piece until memory would not suffice, and never whole."""
    with gzip.open(name, "wb", compresslevel=1) as file:
        file.write(line * 4_000_000)
    monkeypatch.setattr(memory, "available", lambda: 1e8)
    monkeypatch.delattr(*reader)
    assert fit(name, *(("--target", "y") if "csv" in name else ())) == 2
    error = capsys.readouterr().err
    found = re.search(rf"reading '{name}', (\d+) bytes of text or more, takes about 0.1\d+ GB of memory", error)
    assert int(found[1]) < len(line) * 4_000_000


def test_an_archive_that_unpacks_to_more_than_there_is(capsys, monkeypatch):
    name = archive(X=array((2000, 2000), bytes(32_000_000)), y=array((2000,), bytes(16_000)), other=array((10**15,)))
    assert Path(name).stat().st_size < 100_000
    monkeypatch.setattr(memory, "available", lambda: 2e7)
    monkeypatch.delattr(np, "load")
    assert fit(name) == 2
    assert (
        "reading the arrays of 'a.npz' takes about 0.032 GB of memory, and 0.02 GB are free" in capsys.readouterr().err
    )


def test_arrays_that_are_not_asked_for_are_not_read():
    name = archive(X=array((2, 1), SMALL.tobytes()), y=Y, other=array((10**15,)))
    assert tables.read_table(name).X.tolist() == [[0], [1]]


class TestAvailable:
    def test_the_limit_of_the_process(self):
        """What ``ulimit -v`` sets, less what is taken."""
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + 2_000_000_000, hard))
        try:
            assert memory.available() <= 2_000_000_000 + 1e6
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    def test_the_least_counts(self, monkeypatch):
        for name in ("_of_process", "_of_container", "_of_machine"):
            monkeypatch.setattr(memory, name, lambda: math.inf)
        assert memory.available() == math.inf
        for name in ("_of_process", "_of_container", "_of_machine"):
            with monkeypatch.context() as patch:
                patch.setattr(memory, name, lambda: 5.0)
                assert memory.available() == 5.0

    @pytest.mark.parametrize(
        ("texts", "free"),
        [
            ({"memory.max": "1000\n", "memory.current": "400\n"}, 600),
            ({"memory.max": "max\n", "memory.current": "400\n"}, math.inf),
            ({"memory.limit_in_bytes": "900\n", "memory.usage_in_bytes": "400\n"}, 500),
            ({}, math.inf),
        ],
    )
    def test_containers(self, texts, free, monkeypatch):
        monkeypatch.setattr(memory, "_words", lambda path: texts.get(path.name, "").split())
        assert memory._of_container() == free

    def test_the_machine(self, monkeypatch):
        monkeypatch.setattr(memory, "_words", lambda path: ["MemTotal:", "9", "kB", "MemAvailable:", "5", "kB"])
        assert memory._of_machine() == 5 * 1024


def test_the_rule():
    with pytest.raises(InputError, match=r"^it takes about 1e\+09 GB of memory, and .* GB are free\. Use less\.$"):
        memory.require(1e18, "it", "Use less.")
    memory.require(1, "it", "Use less.")


class TestLastResort:
    ERRORS = (
        (MemoryError(), "there is too little memory (MemoryError). Use fewer rows or columns, or posterior diagonal."),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator:\ncan't allocate memory: you tried to allocate 3 bytes."),
            "there is too little memory ([enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
        ),
        (RuntimeError("can't start new thread"), "there is too little memory (can't start new thread)."),
        (RecursionError("maximum recursion depth exceeded"), "the input is nested too deeply (maximum recursion depth"),
        (
            OSError(24, "Too many open files", "a"),
            "a file cannot be read or written ([Errno 24] Too many open files: 'a'). Check its name, its permissions",
        ),
    )

    @pytest.mark.parametrize(("error", "sentence"), ERRORS, ids=lambda value: type(value).__name__)
    @pytest.mark.parametrize("command", ["fit", "compare"])
    def test_one_sentence(self, error, sentence, command, capsys, monkeypatch):
        def fails(*args, **kwargs):
            raise error

        monkeypatch.delenv("TORCHNGVI_DEBUG", raising=False)
        monkeypatch.setattr(design, "prepare", fails)
        assert main([command, "--data", "iris", "--success", "setosa"]) == 2
        captured = capsys.readouterr()
        assert sentence in captured.err
        assert re.fullmatch(r"torchngvi: error: [^\n]* Set TORCHNGVI_DEBUG=1 to see where\.\n", captured.err)
        monkeypatch.setenv("TORCHNGVI_DEBUG", "1")
        with pytest.raises(type(error)):
            main([command, "--data", "iris", "--success", "setosa"])

    def test_faults_of_the_library_are_not_hidden(self, monkeypatch):
        def fails(*args, **kwargs):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

        monkeypatch.setattr(runs, "run", fails)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            fit("iris", "--success", "setosa")

    @pytest.mark.parametrize("error", [IndexError("single positional\nindexer"), RuntimeError("bad state")], ids=repr)
    @pytest.mark.parametrize("command", ["fit", "compare"])
    def test_any_error_of_reading_is_one_sentence(self, error, command, capsys, monkeypatch):
        def fails(*args, **kwargs):
            raise error

        monkeypatch.delenv("TORCHNGVI_DEBUG", raising=False)
        monkeypatch.setattr(readers.pd, "read_csv", fails)
        Path("a.csv").write_text("x,y\n1,0\n2,1\n")
        flags = [command, "--data", "a.csv", "--target", "y"]
        assert main(flags) == 2
        said = " ".join(str(error).split())
        assert capsys.readouterr().err == (
            f"torchngvi: error: the input cannot be read ({type(error).__name__}: {said}). Check the data and the "
            "settings. Set TORCHNGVI_DEBUG=1 to see where.\n"
        )
        monkeypatch.setenv("TORCHNGVI_DEBUG", "1")
        with pytest.raises(type(error)):
            main(flags)

    def test_help_names_the_variable(self, capsys):
        with pytest.raises(SystemExit):
            main(["--help"])
        assert "TORCHNGVI_DEBUG" in capsys.readouterr().out

    def test_a_limit_that_is_met(self, capsys, monkeypatch):
        """The real thing: an allocation that fails, after the budget has been told that there is room."""
        np.savez("a.npz", X=np.zeros((3, 30_000)), y=SMALL[[0, 1, 0]])
        monkeypatch.setattr(memory, "available", lambda: math.inf)
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + 1_500_000_000, hard))
        try:
            assert fit("a.npz", "--test-fraction", "0") == 2
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        error = capsys.readouterr().err
        assert error.startswith("torchngvi: error: there is too little memory (")
        assert error.count("\n") == 1
