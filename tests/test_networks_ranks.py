"""A posterior over a network in two processes: the ranks stay equal, and equal one process on the joined batch."""

import os
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchngvi.errors import InputError
from torchngvi.networks import GradientNoise, attach, network

STEPS = 12


def trained(wrap, rows, batch_size, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    q = network(model, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    attach(optimizer, q, steps=STEPS, curvature=GradientNoise(batch_size))
    outer, g = wrap(model), torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, y = torch.randn(8, 3, generator=g, dtype=torch.float64), torch.randint(2, (8,), generator=g)
        optimizer.zero_grad()
        F.cross_entropy(outer(x[rows]), y[rows]).backward()
        optimizer.step()
    return torch.cat([t.flatten() for t in [*q.mean.values(), *q.variance.values()]])


def one_of_two(rank, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    found = trained(nn.parallel.DistributedDataParallel, slice(4 * rank, 4 * rank + 4), 8, seed=rank)
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.skipif(sys.platform == "win32", reason="gloo over a local port is tested on Linux and macOS")
def test_two_ranks_are_one(tmp_path):
    """Also where they begin from networks of their own: the first one's is all of theirs."""
    port = 29500 + os.getpid() % 2000
    torch.multiprocessing.spawn(one_of_two, (port, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, trained(lambda model: model, slice(None), 8), rtol=1e-11, atol=1e-13)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_sharded_parameters_are_refused():
    """Where q is made of them, and where the network was sharded later."""
    mesh = pytest.importorskip("torch.distributed.device_mesh")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("torch has no fully_shard yet")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, later = nn.Linear(4, 2), nn.Linear(4, 2)
        q = network(later, 10)
        for one in (model, later):
            fsdp.fully_shard(one, mesh=mesh.init_device_mesh("cpu", (1,)))
        with pytest.raises(InputError, match="The parameter weight is a DTensor, sharded .* DistributedDataParallel"):
            network(model, 10)
        with pytest.raises(InputError, match="A parameter of SGD is a DTensor, sharded .* DistributedDataParallel"):
            attach(torch.optim.SGD(later.parameters(), lr=1.0), q, steps=STEPS)
    finally:
        torch.distributed.destroy_process_group()


def test_observations_are_averaged(monkeypatch):
    """Of sampled labels each rank observes its own; the statistic is their mean."""
    model = nn.Linear(2, 2, bias=False)
    q = network(model, 10)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.add_(3.0))  # what the other one has
    q.observe_([torch.ones(2, 2)], 1.0, 1.0)
    q.refresh_()
    torch.testing.assert_close(q.families[0].curvature[0], torch.full((2, 2), 2.0), rtol=1e-4, atol=0)
