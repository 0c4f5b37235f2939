"""Keep the sessions of a search from one stage to the next, because an engine may take seconds to compile a model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgeq.backends.base import Artifact
from edgeq.model.files import model_bytes
from edgeq.run.session import Engines, SessionSettings

MEMORY = 2**27
"""Approximate limit, in bytes, for the sessions that stay open while unused."""
STORED = 2**25
"""Bytes of samples and of float32's outputs that stay in memory. Files on the same machine are read in a fraction of
the time of an inference.
"""
_BYTES_WITHOUT_WEIGHTS = 2**23


class SessionPool:
    """Open sessions, and reuse sessions that are already open. Each session of a file is in a process of its own.

    Args:
        engines: opens the sessions.
        memory: approximate number of bytes of the sessions that `trim` leaves open.
    """

    def __init__(self, engines: Engines, memory: int = MEMORY) -> None:
        self._engines = engines
        self._memory = memory
        self._open: dict[str, list[Any]] = {}  # the most recently used session is last
        self._bytes: dict[str, int] = {}
        self._opened_in_s: dict[str, float] = {}

    def sessions(
        self, model: Path, settings: SessionSettings, count: int = 1, seconds: float = float("inf")
    ) -> list[Any]:
        """Return sessions of a file. The sessions stay open at least until the next `trim`.

        Args:
            count: number of sessions.
            seconds: time for opening. If it is too short, fewer sessions are returned, but at least one.
        """
        key = f"{model} {settings!r}"
        sessions = self._open[key] = self._open.pop(key, [])
        start = now = time.perf_counter()
        # One more session is opened only if it likely fits, judged by the time that the last one took.
        while len(sessions) < count and (not sessions or now - start + self._opened_in_s[key] <= seconds):
            sessions.append(self._engines.open(model, settings, len(sessions)))
            self._opened_in_s[key] = time.perf_counter() - now
            now = time.perf_counter()
        if key not in self._bytes:
            self._bytes[key] = model_bytes(model) + _BYTES_WITHOUT_WEIGHTS
        return sessions[:count]

    def trim(self) -> None:
        """Close sessions until the rest fits into the memory. Sessions that have not been used for longest are closed
        first.
        """
        used_bytes = sum(self._bytes[key] * len(sessions) for key, sessions in self._open.items())
        # Each use puts a file at the end of the dictionary, so the files at its beginning are the oldest.
        for key in list(self._open):
            if used_bytes <= self._memory:
                return
            used_bytes -= self._bytes[key] * len(self._open[key])
            for session in self._open.pop(key):
                _close(session)


@contextmanager
def open_once(engines: Engines, model: Path, settings: SessionSettings) -> Iterator[Any]:
    """Open a session for one use, and close it afterwards."""
    session = engines.open(model, settings)
    try:
        yield session
    finally:
        _close(session)


def model_to_judge(artifact: Artifact) -> tuple[Path, SessionSettings]:
    """Return the model and the settings that represent an artifact when its outputs are judged.

    If the artifact's engine is a simulator, return the Q/DQ model as written, to run without the engine. The simulator
    would take a thousand times as long, and its results differ only by roundings: see `edgeq.tuning.judge`.
    """
    if artifact.in_simulator:
        return artifact.model, SessionSettings(optimization="none")
    return artifact.proof_model, artifact.proof_settings()


def _close(session: Any) -> None:
    """Free the memory of a session in another process. A session in this process is freed with its last reference."""
    guest = getattr(session, "guest", None)
    if guest is not None and not guest.ended:
        session.close()
