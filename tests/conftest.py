"""Small problems are fastest on one thread, and steadiest."""

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from workers import Ranks

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the cases of a test with the mark `sparse(step)` each step-th stays, and the others get that of accuracy."""
    seen = Counter()
    for item in items:
        if (mark := item.get_closest_marker("sparse")) is not None:
            name = item.nodeid.partition("[")[0]
            if seen[name] % mark.args[0]:
                item.add_marker("accuracy")
            seen[name] += 1


@pytest.fixture
def libsvm_folder():
    """The folder with the LIBSVM sets, or a skip."""
    folder = Path(os.environ.get("TORCHNGVI_DATA", "")) / "libsvm"
    if "TORCHNGVI_DATA" not in os.environ or not folder.is_dir():
        pytest.skip("needs the LIBSVM sets: set TORCHNGVI_DATA to a folder with libsvm/*.svm.gz")
    return folder


@pytest.fixture(autouse=True)
def defaults():
    """What a test makes the default dtype of torch, or the setting of validation, the next test does not meet."""
    validated = torch.distributions.Distribution._validate_args
    yield
    torch.set_default_dtype(torch.float32)
    if torch.distributions.Distribution._validate_args != validated:
        torch.distributions.Distribution.set_default_validate_args(validated)
        if "pyro" in sys.modules:
            sys.modules["pyro"].enable_validation(validated)


@pytest.fixture
def pyro_in_float64():
    """Pyro models are written in the default dtype, which is float64 here; the parameter store is empty."""
    pyro = pytest.importorskip("pyro")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    pyro.clear_param_store()
    yield
    torch.set_default_dtype(before)
    pyro.clear_param_store()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Two processes, started once for all tests that need them."""
    if not torch.distributed.is_available() or sys.platform == "win32":
        pytest.skip("gloo over a file is tested on Linux and macOS, where torch has torch.distributed")
    started = Ranks("scale_cases", tmp_path_factory.mktemp("ranks"))
    yield started
    started.stop()


@pytest.fixture
def exact_probit(monkeypatch):
    """GPyTorch's log Φ jumps by 0.0019 at -1; ours does not, and cannot be compared with that."""
    monkeypatch.setattr("gpytorch.likelihoods.bernoulli_likelihood.log_normal_cdf", torch.special.log_ndtr)
