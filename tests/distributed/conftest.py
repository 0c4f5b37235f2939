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
def address(pool: Workers) -> str:
    """Where the same workers are found by a command."""
    return pool.address
