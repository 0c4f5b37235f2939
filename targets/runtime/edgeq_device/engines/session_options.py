"""Build the `SessionOptions` with which edgeq opens every session of onnxruntime."""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import Any, Mapping

from edgeq_device.errors import UsageError

_FROM_MODELS = "ORT_LOAD_CONFIG_FROM_MODEL"


def ignore_options_in_models() -> None:
    """Prevent ONNX Runtime from reading options from a model's metadata. Call this before a session is opened.

    ONNX Runtime reads such options if an environment variable is set. A model could then make it write a profile into
    the current directory.
    """
    if _FROM_MODELS in os.environ:
        os.environ[_FROM_MODELS] = "0"


BRIEF_SPIN: Mapping[str, str] = MappingProxyType({"session.intra_op.spin_duration_us": "1000"})
"""How long ONNX Runtime's threads spin before they sleep: one millisecond.

By default they spin for tens of milliseconds after a run. On a machine with few cores, the next program then has one
core less. For example, a model that ran in 12 ms took 24 ms when it was measured side by side with another one. A
millisecond is enough to keep the threads awake from one operator to the next and from one run to the next. Versions of
onnxruntime that do not know the entry ignore it.
"""
LEVELS: Mapping[str, str] = MappingProxyType(
    {
        "none": "ORT_DISABLE_ALL",
        "basic": "ORT_ENABLE_BASIC",
        "extended": "ORT_ENABLE_EXTENDED",
        "all": "ORT_ENABLE_ALL",
    }
)
"""Levels of graph optimisation, and ONNX Runtime's names for them."""
MOST_THREADS = 1024
"""Maximum number of threads. ONNX Runtime sets no limit, but with tens of thousands it hangs or aborts the process."""


def session_options(
    ort: Any, *, config: Mapping[str, str], threads: int = 0, optimization: str = "all", arena: bool = True
) -> Any:
    """Return an `onnxruntime.SessionOptions` that logs only errors that end the process.

    Args:
        ort: the onnxruntime module.
        config: session configuration entries.
        threads: number of intra-op threads; 0 leaves it to ONNX Runtime.
        optimization: a key of `LEVELS`.
        arena: whether the session keeps the memory of a run for the next one.

    Raises:
        KeyError: there is no such level.
        UsageError: the number of threads is negative or above `MOST_THREADS`.
    """
    if not 0 <= threads <= MOST_THREADS:
        raise UsageError(f"{threads} threads are not possible", f"Give 0 (all cores) to {MOST_THREADS}")
    options = ort.SessionOptions()
    # ONNX Runtime also raises the errors that it logs, and edgeq reports each in one line
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.enable_cpu_mem_arena = arena
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[optimization])
    for key, value in sorted(config.items()):
        options.add_session_config_entry(key, value)
    return options
