"""The compiled kernel: built once, trusted only if it is right and private, and done without where it cannot be."""

import logging
import os
import shutil
import stat
import subprocess
import sys

import pytest
import torch
from helpers import DTYPE, close

import torchngvi
from torchngvi.numerics import gaussian_integrals as logistic
from torchngvi.numerics import kernels

needs_compiler = pytest.mark.skipif(
    shutil.which("gcc") is None or sys.platform != "linux", reason="needs gcc on Linux, which builds the kernel"
)


def rows(count=3000):
    generator = torch.Generator().manual_seed(0)
    e = 8 * torch.randn(count, dtype=DTYPE, generator=generator)
    return e, torch.empty(count, dtype=DTYPE).uniform_(-5, 9, generator=generator).exp().square()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A cache in which the kernel is compiled once for this file."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def fresh(monkeypatch, folder):
    """A process that has not needed the kernel yet."""
    monkeypatch.setattr(kernels, "_state", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("TORCHNGVI_KERNELS", "1")
    monkeypatch.delenv("CC", raising=False)


def library():
    kernel = kernels.logistic(10_000, logistic.COEFFICIENTS, logistic._formula)
    assert kernel is not None, kernels._state.text
    return kernel


def library_key():
    source = kernels._SOURCE.read_text(encoding="utf-8")
    return kernels.key(kernels.compiler(), kernels._FLAGS, kernels._LIBRARIES, source)


def refused(caplog):
    """Nothing but one quiet record, and the same moments; the record."""
    e, v = rows(100)
    with caplog.at_level(logging.INFO, logger="torchngvi"):
        found = logistic.softplus(e, v)
        logistic.softplus(e, v)
    for part, expected in zip(found, logistic._formula(e, v, 0, 3), strict=True):
        assert torch.equal(part, expected)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert kernels._state.kernel is None
    return record.getMessage()


@pytest.mark.accuracy
@needs_compiler
def test_it_agrees_with_pytorch(fresh):
    e, v = rows()
    for part, expected in zip(library()(e, v, 3), logistic._formula(e, v, 0, 3), strict=True):
        assert float(((part - expected) / expected).abs().max()) <= 1e-11


@pytest.mark.accuracy
@needs_compiler
def test_threads_share_the_rows(fresh, monkeypatch):
    e, v = rows(40_000)
    alone = library()(e, v, 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for part, expected in zip(library()(e, v, 3), alone, strict=True):
        assert torch.equal(part, expected)


@needs_compiler
def test_what_becomes_of_a_row_does_not_depend_on_those_beside_it(fresh):
    """Also where eight of them go together: all rows, one by one, and in another order."""
    e, v = rows(300)
    kernel, order = library(), torch.arange(300).mul(7).remainder(300)
    together = torch.stack(kernel(e, v, 5))
    assert torch.equal(torch.cat([torch.stack(kernel(e[k : k + 1], v[k : k + 1], 5)) for k in range(300)], 1), together)
    assert torch.equal(torch.stack(kernel(e[order], v[order], 5)), together[:, order])


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_that_are_not_finite(fresh, monkeypatch, threads):
    """NaN, infinities and negative variances give what the operators give, and leave all other rows as they were."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    e, v = rows(25_000)
    before, kernel = torch.stack(library()(e, v, 5)), library()
    for place in (0, 12_345, 24_999):
        for x, value in ((e, torch.nan), (e, -torch.inf), (v, torch.inf), (v, torch.nan), (v, -1e-300), (v, -1.0)):
            kept, x[place] = x[place].clone(), value
            found, expected = torch.stack(kernel(e, v, 5)), logistic._formula(e[[place]], v[[place]], 0, 5)
            x[place] = kept
            close(found[:, place].nan_to_num(9e9, 8e9, 7e9), torch.cat(expected).nan_to_num(9e9, 8e9, 7e9), 1e-12)
            others = torch.arange(25_000) != place
            assert torch.equal(found[:, others], before[:, others])


@needs_compiler
def test_at_every_depth(fresh):
    """e^m of the kernel is that of the library down to where it is no normal number any more."""
    m = -torch.linspace(0, 800, 4001, dtype=DTYPE)
    for s in (0.0, 0.3, 0.6):
        v = torch.full_like(m, s * s)
        for part, expected in zip(library()(m, v, 3), logistic._formula(m, v, 0, 3), strict=True):
            normal = expected > 1e-300
            assert float(((part - expected) / expected)[normal].abs().max()) <= 1e-12
            assert float((part - expected)[~normal].abs().max()) <= 1e-300


@needs_compiler
def test_rows_that_are_not_contiguous(fresh):
    e, v = (x[::3] for x in rows())
    for part, expected in zip(library()(e, v, 3), library()(e.clone(), v.clone(), 3), strict=True):
        assert torch.equal(part, expected)


@needs_compiler
def test_a_moment_can_be_changed_in_place(fresh):
    """As those of PyTorch: the moments are no views of one tensor, which autograd would take for one."""
    e, v = rows(100)
    value, slope, curvature = logistic.softplus(e, v)
    value.add_(torch.ones(100, dtype=DTYPE, requires_grad=True))
    assert value.requires_grad
    assert not slope.requires_grad
    assert not curvature.requires_grad


@pytest.mark.accuracy
@needs_compiler
def test_tensors_without_an_address(tmp_path):
    """Reading them would end the process: zeros that are not stored are zeros, another device is an error."""
    code = (
        "import torch; from torchngvi.numerics import gaussian_integrals as logistic, kernels; D = torch.float64\n"
        "x, zero = torch.linspace(0, 3, 100, dtype=D), torch._efficientzerotensor((100,), dtype=D)\n"
        "for e, v in ((x, zero), (zero, x)):\n"
        "    found = logistic.softplus(e, v); expected = logistic.softplus(e + 0 * x, v + 0 * x)\n"
        "    assert all(bool(((a - b).abs() <= 1e-14).all()) for a, b in zip(found, expected))\n"
        "assert kernels._state.kernel, kernels._state.text\n"
        "try: logistic.softplus(x, x.to('meta'))\n"
        "except (RuntimeError, NotImplementedError) as error: assert 'meta' in str(error), error\n"
        "else: raise AssertionError('no error')"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TORCHNGVI_KERNELS": "1", "CC": "gcc"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


@needs_compiler
def test_threads_keep_what_they_write_to(fresh, monkeypatch):
    """An interrupt ends the call, and not the threads: their memory must not be given back before."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    held = []

    class Never(kernels.threading.Thread):
        def start(self):
            held.extend(self._target.__defaults__[0])
            raise KeyboardInterrupt

    kernel, (e, v) = library(), rows(20_000)
    monkeypatch.setattr(kernels.threading, "Thread", Never)
    with pytest.raises(KeyboardInterrupt):
        kernel(e, v, 3)
    assert [len(x) for x in held] == [20_000] * 5
    assert held[0].data_ptr() == e.data_ptr()


@pytest.mark.accuracy
@needs_compiler
def test_flush_to_zero_is_left_alone(tmp_path):
    """A library linked with -Ofast would set it for the whole process, also where CC names that flag."""
    code = (
        "import torch; from torchngvi.numerics import gaussian_integrals as logistic, kernels;"
        "e = torch.zeros(100, dtype=torch.float64);"
        "logistic.softplus(e, e + 1); assert kernels._state.kernel, kernels._state.text;"
        "assert 5e-310 * 1.0 != 0; assert float(torch.tensor(5e-310, dtype=torch.float64) * 1.0) != 0"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TORCHNGVI_KERNELS": "1", "CC": "gcc -Ofast"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


@needs_compiler
def test_it_is_compiled_once(fresh, folder, monkeypatch):
    library()
    (path,) = (folder / "torchngvi" / "kernels").iterdir()
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0
    monkeypatch.setattr(kernels, "_state", None)
    before = path.stat().st_mtime_ns
    library()
    assert path.stat().st_mtime_ns == before


@needs_compiler
def test_other_flags_make_another_library(fresh, monkeypatch):
    first = library_key()
    monkeypatch.setattr(kernels, "_FLAGS", ("-O2", *kernels._FLAGS[1:]))
    assert library_key() != first
    monkeypatch.setenv("CC", "gcc -g")
    assert len({first, library_key()}) == 2


@pytest.mark.parametrize(
    ("wanted", "count", "asked"),
    [("0", 10_000, False), ("Off", 10_000, False), ("no", 64, False), ("false", 64, False), ("", 63, False),
     ("", 64, True), (" ", 63, False), ("1", 0, True), ("ON", 0, True), ("yes", 0, True), ("true", 0, True)],
)  # fmt: skip
def test_when_it_is_taken(wanted, count, asked, monkeypatch):
    monkeypatch.setenv("TORCHNGVI_KERNELS", wanted)
    here = kernels._State(logistic._formula, "a kernel")
    monkeypatch.setattr(kernels, "_state", here)
    assert (kernels.logistic(count, logistic.COEFFICIENTS, logistic._formula) is not None) == asked


def test_without_a_compiler(fresh, monkeypatch, caplog, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "platform", "linux")
    message = refused(caplog)
    assert "no C compiler was found in PATH; install gcc, or set CC" in message
    torchngvi.numerics.show_config()
    assert "logistic kernel: PyTorch (no C compiler" in capsys.readouterr().out


@needs_compiler
@pytest.mark.parametrize(
    ("named", "text"),
    [
        ("no-compiler", "the C compiler 'no-compiler', which CC names, was not found; unset CC, or correct it"),
        ("no-compiler -O2", "the C compiler 'no-compiler -O2', which CC names, was not found"),
        ("gcc '", 'CC is "gcc \'", which cannot be read: No closing quotation'),
        ("true", "true made no library"),
    ],
)
def test_another_compiler_does_not_take_the_place_of_the_named_one(named, text, fresh, caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", named)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert text in refused(caplog)


@pytest.mark.accuracy
@needs_compiler
def test_a_compiler_without_native_code(fresh, monkeypatch, tmp_path):
    """One that does not know the processor compiles for any."""
    other = tmp_path / "other"
    other.write_text('#!/bin/sh\ncase "$*" in *-march*) exit 1;; esac\nexec gcc "$@"\n')
    other.chmod(0o755)
    monkeypatch.setenv("CC", str(other))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library()


def test_an_unknown_word(monkeypatch):
    """One warning, and as if it were not set."""
    monkeypatch.setattr(kernels, "_state", kernels._State(logistic._formula, "a kernel"))
    monkeypatch.setenv("TORCHNGVI_KERNELS", "maybe")
    kernels._wanted.cache_clear()
    text = "TORCHNGVI_KERNELS is 'maybe', which is taken as unset; set it to one of 0, off, no, false, 1, on, yes, true"
    with pytest.warns(UserWarning, match=text) as warned:
        taken = [kernels.logistic(count, logistic.COEFFICIENTS, logistic._formula) is not None for count in (63, 64)]
    assert taken == [False, True]
    assert len(warned) == 1


def test_on_another_system(fresh, monkeypatch, caplog):
    monkeypatch.setattr(sys, "platform", "win32")
    assert "it is built on Linux only, and this is win32" in refused(caplog)


@needs_compiler
def test_a_compiler_that_fails(fresh, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "_FLAGS", ("-no-such-flag",))
    assert "gcc failed with the status 1: gcc: error: unrecognized command-line option" in refused(caplog)
    assert not list((tmp_path / "torchngvi" / "kernels").iterdir())


@pytest.mark.accuracy
@needs_compiler
def test_a_library_that_is_damaged(fresh, tmp_path, monkeypatch):
    """Loading one that is cut off would end the process: it is built anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library()
    (place,) = kernels.cache().iterdir()
    whole = place.read_bytes()
    place.unlink()  # this process has it open
    place.write_bytes(whole[: len(whole) // 2])
    place.chmod(0o700)
    monkeypatch.setattr(kernels, "_state", None)
    library()
    assert kernels.digest(next(kernels.cache().iterdir())) in kernels._state.text


@needs_compiler
@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_that_others_can_write_to(fresh, caplog, tmp_path, monkeypatch, mode):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = kernels.cache()
    (folder if mode == 0o777 else folder.parent).chmod(mode)
    message = refused(caplog)
    assert "can be written to by others; remove it, or set XDG_CACHE_HOME to a private folder" in message


@needs_compiler
def test_a_library_that_is_a_link(fresh, caplog, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = kernels.cache() / f"logistic-{library_key()}-0.so"
    place.symlink_to(tmp_path / "elsewhere.so")
    (tmp_path / "elsewhere.so").write_bytes(b"")
    assert "can be written to by others" in refused(caplog)


@needs_compiler
def test_a_kernel_that_is_wrong(fresh, caplog, monkeypatch):
    """Wrong in one moment of one row, by 2e-11."""
    right = kernels._call

    def wrong(*args):
        parts = right(*args)
        parts[2][7] *= 1 + 2e-11
        return parts

    monkeypatch.setattr(kernels, "_call", wrong)
    assert "its self-test failed: a relative difference of 2.0e-11 to PyTorch" in refused(caplog)


def test_the_self_test_knows_nan(fresh, caplog, monkeypatch):
    monkeypatch.setattr(kernels, "_library", lambda: None)
    monkeypatch.setattr(kernels, "_loaded", lambda *args: lambda e, v, count: (e * torch.nan,) * count)
    assert "its self-test failed: a relative difference of nan to PyTorch" in refused(caplog)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ("0", "PyTorch (TORCHNGVI_KERNELS=0)"),
        ("off", "PyTorch (TORCHNGVI_KERNELS=off)"),
        ("1", "not needed yet; compiled at the first call\n"),
        ("", "not needed yet; compiled at the first call of 64 rows or more"),
    ],
)
def test_the_configuration_is_shown(wanted, text, fresh, monkeypatch, capsys):
    monkeypatch.setenv("TORCHNGVI_KERNELS", wanted)
    torchngvi.numerics.show_config()
    shown = capsys.readouterr().out
    assert f"logistic kernel: {text}" in shown
    assert f"torch {torch.__version__}" in shown
    assert "threads: 1" in shown
    assert "devices: cpu" in shown


@needs_compiler
def test_the_configuration_names_the_library(fresh, folder, capsys):
    library()
    torchngvi.numerics.show_config()
    assert f"logistic kernel: compiled, {folder}" in capsys.readouterr().out


def test_single_precision_is_converted(fresh):
    e, v = (x.float() for x in rows(100))
    value = logistic.softplus(e, v).value
    assert value.dtype is torch.float32
    close(value, logistic.softplus(e.double(), v.double()).value.float(), 1e-7)


def test_what_no_one_thought_of_is_no_error_of_a_fit(fresh, monkeypatch, caplog):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(kernels, "cache", homeless)
    monkeypatch.setattr(sys, "platform", "linux")
    assert "Could not determine home directory" in refused(caplog)


def test_a_child_has_a_lock_of_its_own():
    """It may be forked while another thread holds that of the parent."""
    before = kernels._lock
    try:
        kernels._forked()
        assert kernels._lock is not before
    finally:
        kernels._lock = before
