"""By which way a log joint is fitted: by a pool of draws, or by averages."""

import pytest

from torchngvi.fitting.pool import PoolLoop


@pytest.fixture
def no_pool(monkeypatch):
    """Averages alone, as where no pool of draws serves."""
    monkeypatch.setattr(PoolLoop, "begin", lambda loop, *, rough: None)


@pytest.fixture(params=[True, False], ids=["pool", "averages"])
def pooled(request, monkeypatch):
    """Whether a pool of draws fits, or averages."""
    if not request.param:
        monkeypatch.setattr(PoolLoop, "begin", lambda loop, *, rough: None)
    return request.param
