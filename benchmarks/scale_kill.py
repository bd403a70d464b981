"""A worker is killed in the middle of a fit: torchrun starts all again, and the end has the same bits.

    python benchmarks/scale_kill.py [--rows 60000] [--dim 20] [--at 4] [--rank 1]

Runs the same fit of two ranks twice under ``torchrun --max-restarts 3``, once left alone, and once with a SIGKILL to
one rank before its evaluation number ``--at`` has met the others; prints evaluations, losses and checksums of q.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from torchngvi import CholeskyGaussian, GeneralizedLinear, Sharded, fit


def work(folder, rows, dim, at, rank_to_kill):
    """What each rank does."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    y = (X.sum(-1) + 3 * torch.randn(rows, generator=generator, dtype=torch.float64) > 0).double()
    mine = slice(0, rows // 3) if rank == 0 else slice(rows // 3, None)
    model, calls, killed = GeneralizedLinear(X[mine], y[mine], classes=(0, 1)), [], Path(folder, "killed")
    if rank == rank_to_kill and not killed.exists():
        energy = model.data_energy

        def data_energy(frame):
            calls.append(None)
            if len(calls) == at:
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return energy(frame)

        model.data_energy = data_energy
    q = CholeskyGaussian(dim, dtype=torch.float64)
    result = fit(
        q, Sharded(model, rows), checkpoint=Path(folder, "run.pt"), checkpoint_every=1, progress=False, tolerance=1e-9
    )
    bits = b"".join(bytes(t.detach().contiguous().view(torch.uint8).flatten().tolist()) for t in q.coordinates)
    said = {
        "evaluations": result.evaluations,
        "loss": result.loss,
        "converged": result.converged,
        "checksum": hashlib.sha256(bits).hexdigest()[:16],
        "trace": [record.evaluations for record in result.trace],
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(said))
    torch.distributed.destroy_process_group()


def launch(folder, options, rank_to_kill):
    """One run under torchrun; what both ranks have said, and the seconds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", __file__, "--work", str(folder), "--rows", str(options.rows)]
    command += ["--dim", str(options.dim), "--at", str(options.at), "--rank", str(rank_to_kill)]
    # a store of its own for every restart: in a shared one the ranks find the addresses of those that are dead
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]
    return said, time.perf_counter() - began


def compare(options):
    """Both runs, and whether their ends are the same."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, name) for name in ("alone", "killed")]
        for place in folders:
            place.mkdir()
        (alone, first), (killed, second) = (
            launch(place, options, rank) for place, rank in zip(folders, (-1, options.rank), strict=True)
        )
        assert (folders[1] / "killed").exists()
    return alone, killed, (first, second)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--dim", type=int, default=20)
    parser.add_argument("--at", type=int, default=4)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        work(options.work, options.rows, options.dim, options.at, options.rank)
        return None
    alone, killed, seconds = compare(options)
    for name, said, took in (("left alone", alone, seconds[0]), ("killed", killed, seconds[1])):
        for rank, of in enumerate(said):
            print(
                f"{name}, rank {rank}: {of['evaluations']} evaluations, loss {of['loss']!r}, converged "
                f"{of['converged']}, checksum {of['checksum']}, {took:.1f} s"
            )
    return alone, killed


if __name__ == "__main__":
    main()
