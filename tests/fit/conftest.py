"""By which way a log joint is fitted: by a pool of draws, or by averages and a race."""

import pytest

from torchngvi.fitting.pool_loop import PoolLoop


@pytest.fixture
def no_pool(monkeypatch):
    """Averages and a race alone, as where no pool of draws may come first."""
    monkeypatch.setattr(PoolLoop, "served", False)


@pytest.fixture(params=[True, False], ids=["pool", "averages"])
def pooled(request, monkeypatch):
    """Whether a pool of draws comes first, or averages or a race."""
    if not request.param:
        monkeypatch.setattr(PoolLoop, "served", False)
    return request.param
