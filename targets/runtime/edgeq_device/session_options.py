"""ONNX Runtime's session options from plain values: the one place where edgeq sets them, on devices and elsewhere."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Mapping

from edgeq_device.errors import UsageError

BRIEF_SPIN: Mapping[str, str] = MappingProxyType({"session.intra_op.spin_duration_us": "1000"})
"""How long ONNX Runtime's threads look for more work, at full speed, before they sleep: one millisecond.

By default that is tens of milliseconds after a run has ended: on a machine of few cores whatever runs next, such as
another model that is measured side by side, has a core less. A model that ran in 12 ms took 24 ms next to another one.
A millisecond keeps the threads awake from one operator to the next and from one run to the next. A version of
onnxruntime that does not know the entry ignores it.
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
"""ONNX Runtime starts as many as it is given: with tens of thousands it does not answer, or aborts the process."""


def session_options(ort: Any, *, config: Mapping[str, str], threads: int = 0, optimization: str = "all") -> Any:
    """An `onnxruntime.SessionOptions` that logs nothing but what ends the process.

    Args:
        ort: the onnxruntime module.
        config: session configuration entries.
        threads: intra-op threads; 0 leaves their number to ONNX Runtime.
        optimization: a key of `LEVELS`.

    Raises:
        KeyError: there is no such level.
        UsageError: a negative number of threads, or more than `MOST_THREADS`.
    """
    if not 0 <= threads <= MOST_THREADS:
        raise UsageError(f"{threads} threads cannot be", f"Give 0 (all cores) to {MOST_THREADS}")
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what it logs as an error it also raises, and that becomes one line
    options.intra_op_num_threads = threads
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[optimization])
    for key, value in sorted(config.items()):
        options.add_session_config_entry(key, value)
    return options
