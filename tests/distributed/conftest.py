"""Two workers that the tests of a module share. Idle, they take a tenth of a core: they end with the module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgeq.distributed.workers import Workers, open_workers


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    pytest.importorskip("distributed", reason="the extra `distributed` is not installed")
    with open_workers(2) as opened:
        assert opened is not None
        yield opened


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a scheduler with two workers and without TLS, as people start their own."""
    distributed = pytest.importorskip("distributed", reason="the extra `distributed` is not installed")
    with distributed.LocalCluster(2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        yield cluster.scheduler_address
