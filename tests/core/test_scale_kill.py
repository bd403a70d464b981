"""A worker that is killed costs nothing but time: the fit that goes on ends with the same bits."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.skipif(sys.platform == "win32", reason="torchrun and SIGKILL are tested on Linux and macOS")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker(rank, request):
    if "slow" not in request.config.option.markexpr:
        pytest.skip("two runs of torchrun, half a minute: run with -m slow")
    path = Path(__file__).parents[2] / "benchmarks" / "scale_kill.py"
    spec = importlib.util.spec_from_file_location("scale_kill", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    alone, killed = module.main(["--rows", "3000", "--dim", "5", "--rank", str(rank)])
    assert [said["converged"] for said in (*alone, *killed)] == [True] * 4
    assert len({said["checksum"] for said in (*alone, *killed)}) == 1
    assert alone[0]["trace"] == killed[0]["trace"]
