"""A posterior over a network in two processes: the ranks stay equal, and equal one process on the joined batch."""

import pytest
import scale_hosts
import torch
from torch import nn

from torchngvi.errors import InputError
from torchngvi.networks import attach, network


def test_two_ranks_are_one(ranks):
    """Also where they begin from networks of their own: the first one's is all of theirs."""
    first, second = (found["q"] for found in ranks.values("scale_hosts.network"))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, scale_hosts.network(None)["q"], rtol=1e-11, atol=1e-13)


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
            attach(torch.optim.SGD(later.parameters(), lr=1.0), q, steps=12)
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
