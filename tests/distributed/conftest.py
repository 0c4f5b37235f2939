"""Start two workers for the tests of a module.

They end with the module, because even idle workers use a tenth of a core.
"""

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
    """Yield the address of a scheduler with two workers and without TLS, as users start their own."""
    distributed = pytest.importorskip("distributed", reason="the extra `distributed` is not installed")
    with distributed.LocalCluster(2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        yield cluster.scheduler_address
