"""Layers that integers make slower, by the runtime's profile of the float and of the quantized model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeq.backends import Artifact
from edgeq.measure.kernels import KernelTime, kernel_times
from edgeq.model.macs import node_macs
from edgeq.model.prepare import PreparedModel
from edgeq.session import SessionSettings, open_session

_LEAST_GAIN = 0.002
"""Share of float32's time that a layer must lose in integers to be looked at: less is noise of the profiler."""


def slow_layers(
    prepared: PreparedModel,
    artifact: Artifact,
    feed: Mapping[str, Any],
    *,
    float_threads: int,
    threads: int,
    opener: Callable[[Path, SessionSettings], Any] = open_session,
) -> tuple[str, ...]:
    """Names of layers of `artifact` that take longer than in `prepared`, which it was made from, worst first.

    Args:
        feed: one query's inputs.
        float_threads, threads: that the float model and the artifact run with.
        opener: see `edgeq.measure.profile.profile`.
    """
    settings, quantized = SessionSettings(intra_op_threads=float_threads), artifact.settings(threads=threads)
    in_float = _by_layer(kernel_times(prepared.path, settings, feed, prepared.model, opener=opener))
    in_int8 = _by_layer(kernel_times(artifact.model, quantized, feed, prepared.model, opener=opener))
    macs = node_macs(prepared.model)
    layers = [node.name for node in prepared.model.graph if node.name and macs.get(node.name)]
    return slower_in_integers(layers, in_float, in_int8)


def slower_in_integers(
    names: Sequence[str], float_us: Mapping[str, float], int8_us: Mapping[str, float]
) -> tuple[str, ...]:
    """Those of `names` that take longer in integers, by what they lose, most first.

    Args:
        float_us, int8_us: microseconds by layer in each model; layers that are not in both are left out.
    """
    least = _LEAST_GAIN * sum(float_us.values())
    lost = {n: int8_us[n] - float_us[n] for n in names if n in float_us and n in int8_us}
    return tuple(sorted((n for n, us in lost.items() if us > least), key=lambda n: (-lost[n], n)))


def _by_layer(kernels: Sequence[KernelTime]) -> dict[str, float]:
    """Microseconds by source node: a layer may run as several kernels."""
    found: dict[str, float] = {}
    for kernel in kernels:
        found[kernel.name] = found.get(kernel.name, 0.0) + kernel.us
    return found
