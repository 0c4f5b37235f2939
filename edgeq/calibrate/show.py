"""The content of a statistics directory or a table as plain values, for the command line and for plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.calibrate.files import load_statistics
from edgeq.calibrate.histogram import Float64s, Histogram
from edgeq.calibrate.ranges import Range, derive_ranges
from edgeq.calibrate.statistics import Statistics
from edgeq.calibrate.table import FLATBUFFERS, read_table, read_tables
from edgeq.errors import UsageError
from edgeq.registry import METHODS
from edgeq.scheme import IntegerType


@dataclass(frozen=True)
class Shown:
    """Statistics with the ranges that every method would choose.

    Attributes:
        ranges: by method, then by tensor.
    """

    statistics: Statistics
    ranges: dict[str, dict[str, Range]]

    def __record__(self) -> dict[str, Any]:
        """Stable keys, plain values."""
        tensors = []
        for name, tensor in self.statistics.tensors.items():
            tensors.append(
                {
                    "name": name,
                    "dtype": tensor.dtype,
                    "count": tensor.count,
                    "minimum": tensor.minimum if tensor.count else None,
                    "maximum": tensor.maximum if tensor.count else None,
                    "ranges": {m: [found[name].low, found[name].high] for m, found in self.ranges.items()},
                }
            )
        return {
            "kind": "statistics",
            "model": self.statistics.model_digest,
            "data": self.statistics.data_digest,
            "samples": self.statistics.samples,
            "total": self.statistics.total,
            "tensors": tensors,
        }


def show_statistics(
    statistics: Statistics,
    names: Sequence[str] = (),
    *,
    activation_type: IntegerType = "uint8",
    symmetric: bool = False,
) -> Shown:
    """The ranges of every method, for all tensors or those of `names`."""
    chosen = statistics.select(names) if names else statistics
    return Shown(
        chosen,
        {m: derive_ranges(chosen, m, activation_type=activation_type, symmetric=symmetric) for m in METHODS.names()},
    )


def open_shown(
    path: Path, names: Sequence[str] = (), activation_type: IntegerType = "uint8", *, symmetric: bool = False
) -> Shown | dict[str, Any]:
    """A statistics directory, or a table (a file, or a directory with ONNX Runtime's three) as a plain dict."""
    if path.is_dir() and not (path / FLATBUFFERS).exists():
        return show_statistics(load_statistics(path), names, activation_type=activation_type, symmetric=symmetric)
    table = read_tables(path) if path.is_dir() else read_table(path)
    unknown = sorted(set(names) - set(table))
    if unknown:
        raise UsageError(f"{path} has no tensor {unknown[0]!r}", "Leave out --tensor to list all")
    entries = [{"name": n, "magnitude": v} for n, v in sorted(table.items()) if not names or n in names]
    return {"kind": "table", "tensors": entries}


def columns(histogram: Histogram, low: float, high: float, number: int) -> Float64s:
    """Counts in `number` even columns from low to high, each bin given to the column of its centre."""
    lower, upper = histogram.edges()
    place = ((lower + upper) / 2 - low) / ((high - low) or 1.0) * number
    places = np.clip(place.astype(np.int64), 0, number - 1)
    return np.bincount(places, histogram.counts.astype(np.float64), minlength=number).astype(np.float64)


def heights(counts: Float64s) -> Float64s:
    """Counts on a logarithmic scale, 0 to 1: tails of a few values stay visible beside millions."""
    logs = np.log1p(counts)
    most = float(logs.max(initial=0.0))
    return np.asarray(logs / most if most else logs, np.float64)
