"""Prepare a model file for the benchmark: how it is opened, in how many sessions, and how its memory is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgeq_device.bundle.bench_models import BenchModel, Shapes
from edgeq_device.engines.memory import MemoryUse, measure_memory

from edgeq.model.files import model_bytes
from edgeq.run.session import Engines, SessionSettings, add_model_options, build_open_request, open_session

# Each session holds a copy of the weights, so larger models are timed in a single one.
_SMALL_BYTES = 2**25
SESSIONS = 6
"""Number of sessions in which a small model is timed, each in a process of its own."""


def bench_model(
    name: str,
    model: Path,
    settings: SessionSettings | None = None,
    open_it: Callable[[Path, SessionSettings], Any] = open_session,
    *,
    engines: Engines | None = None,
    sessions: int = 1,
) -> BenchModel:
    """Return a model file in the form that the benchmark measures. The session is opened with `settings`, but the
    benchmark sets the thread count.

    Args:
        open_it: function that opens the session. `edgeq.run.session.Engines.open` runs plug-in engines in separate
            processes.
        engines: opens the further sessions, each in a process of its own; None opens them with `open_it`.
        sessions: number of sessions in which the model is timed.
    """
    # Random operators draw as they do on a device, because drawing takes time.
    base = replace(add_model_options(model, settings or SessionSettings()), draws=True)

    def open_with(threads: int) -> Any:
        return open_it(model, replace(base, intra_op_threads=threads))

    def open_apart(threads: int, process: int) -> Any:
        assert engines is not None
        return engines.open(model, replace(base, intra_op_threads=threads), process)

    def memory(threads: int, shapes: Shapes) -> MemoryUse:
        return measure_session_memory(model, replace(base, intra_op_threads=threads), shapes)

    return BenchModel(name, open_with, memory, sessions, open_apart if engines is not None else None)


def measure_session_memory(model: Path, settings: SessionSettings, shapes: Mapping[str, Sequence[int]]) -> MemoryUse:
    """Measure the memory that a session needs, in a separate process.

    Args:
        shapes: sizes of inputs with open sizes.

    Raises:
        RuntimeUnavailableError: the process failed, or the system does not report the memory of a process.
    """
    with Engines() as engines:
        return measure_memory(build_open_request(str(engines.file(model, settings.engine)), settings), shapes)


def count_sessions(model: Path, folder: Path | None = None) -> int:
    """Return the number of sessions with which a model should be timed.

    The latencies of two sessions of a small model differ by up to a fifth, because their memory has different
    addresses. Two processes differ by more than two sessions of one process.

    Args:
        folder: folder of the model's external data; None means the model's folder.
    """
    return SESSIONS if model_bytes(model, folder) <= _SMALL_BYTES else 1
