"""Sessions of a search, kept from one stage to the next: an engine may take seconds to compile a model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgeq.backends import Artifact
from edgeq.model.load import model_bytes
from edgeq.session import SessionSettings
from edgeq.workers.engine import Engines

MEMORY = 2**30
"""Bytes that sessions which nobody uses may take, about."""
_BESIDE_WEIGHTS = 2**23


class SessionPool:
    """Opens sessions, and has those that were opened before.

    Args:
        engines: opens them.
        memory: bytes, about, that sessions take which stay open when `trim` is called.
    """

    def __init__(self, engines: Engines, memory: int = MEMORY) -> None:
        self._engines = engines
        self._memory = memory
        self._open: dict[str, list[Any]] = {}  # used last at the end
        self._bytes: dict[str, int] = {}
        self._opened_in_s: dict[str, float] = {}

    def sessions(
        self, model: Path, settings: SessionSettings, count: int = 1, seconds: float = float("inf")
    ) -> list[Any]:
        """Sessions of a file, which stay open until the next `trim` at least.

        Args:
            count: how many.
            seconds: no more than can be opened in this time, but one at least.
        """
        key = f"{model} {settings!r}"
        found = self._open[key] = self._open.pop(key, [])
        start = now = time.perf_counter()
        while len(found) < count and (not found or now - start + self._opened_in_s[key] <= seconds):
            found.append(self._engines.open(model, settings))
            self._opened_in_s[key] = time.perf_counter() - now
            now = time.perf_counter()
        if key not in self._bytes:
            self._bytes[key] = model_bytes(model) + _BESIDE_WEIGHTS
        return found[:count]

    def trim(self) -> None:
        """Close what was not used for longest, until the rest fits into the memory."""
        taken = sum(self._bytes[key] * len(found) for key, found in self._open.items())
        for key in list(self._open):
            if taken <= self._memory:
                return
            taken -= self._bytes[key] * len(self._open[key])
            for session in self._open.pop(key):
                _close(session)


@contextmanager
def opened(engines: Engines, model: Path, settings: SessionSettings) -> Iterator[Any]:
    """A session for one use."""
    session = engines.open(model, settings)
    try:
        yield session
    finally:
        _close(session)


def judged(artifact: Artifact) -> tuple[Path, SessionSettings]:
    """What is run to learn what an artifact answers. A simulator of its engine would take a thousand times as long as
    the Q/DQ model as it is written, from which it differs by roundings: see `edgeq.tune.confirm`."""
    if artifact.in_simulator:
        return artifact.model, SessionSettings(optimization="none")
    return artifact.proof_model, artifact.proof_settings()


def _close(session: Any) -> None:
    """Give the memory of a session in another process back; one in this process goes with its last reference."""
    guest = getattr(session, "guest", None)
    if guest is not None and not guest.ended:
        session.close()
