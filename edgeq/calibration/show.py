"""Plot histograms with the range of each method, as text and as SVG.

edgeq writes the SVG without a plotting library, which would add tens of megabytes to the installation for a single
figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape
from zipfile import is_zipfile

import numpy as np
from edgeq_device.system.places import scratch_folder

from edgeq.calibration.files import load_statistics
from edgeq.calibration.ranges import Range, derive_ranges
from edgeq.calibration.statistics import Float64s, Histogram, Statistics
from edgeq.calibration.table import FLATBUFFERS, read_table, read_tables, unpack_tables
from edgeq.errors import UsageError
from edgeq.scheme import IntegerType
from edgeq.util.outputs import output_file
from edgeq.util.registry import METHODS


@dataclass(frozen=True)
class RangeComparison:
    """Pair statistics with the ranges that every method would choose.

    Attributes:
        ranges: ranges by method, then by tensor.
    """

    statistics: Statistics
    ranges: dict[str, dict[str, Range]]

    def __record__(self) -> dict[str, Any]:
        """Return a dict of plain values. Its keys are stable."""
        tensors = []
        for name, tensor in self.statistics.tensors.items():
            tensors.append(
                {
                    "name": name,
                    "dtype": tensor.dtype,
                    "count": tensor.count,
                    "minimum": tensor.minimum if tensor.count else None,
                    "maximum": tensor.maximum if tensor.count else None,
                    "ranges": {m: [spans[name].low, spans[name].high] for m, spans in self.ranges.items()},
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


def compare_ranges(
    statistics: Statistics,
    names: Sequence[str] = (),
    *,
    activation_type: IntegerType = "uint8",
    symmetric: bool = False,
) -> RangeComparison:
    """Return the ranges of every method, for the tensors `names` or for all tensors."""
    selection = statistics.select(names) if names else statistics
    return RangeComparison(
        selection,
        {m: derive_ranges(selection, m, activation_type=activation_type, symmetric=symmetric) for m in METHODS.names()},
    )


def open_calibration(
    path: Path, names: Sequence[str] = (), activation_type: IntegerType = "uint8", *, symmetric: bool = False
) -> RangeComparison | dict[str, Any]:
    """Open a statistics directory or a calibration table.

    Returns:
        The statistics with the range of every method, or the table as a plain dict. A table is a file, a directory with
        ONNX Runtime's three files, or a bundle's calibration.zip.
    """
    # A directory of tables always has this file, and a directory of statistics never does.
    if path.is_dir() and not (path / FLATBUFFERS).exists():
        return compare_ranges(load_statistics(path), names, activation_type=activation_type, symmetric=symmetric)
    if path.is_file() and is_zipfile(path):
        # The readers take files, so that one check of sizes serves archives and directories.
        with scratch_folder("edgeq-tables-") as folder:
            unpack_tables(path, Path(folder))
            table = read_tables(Path(folder))
    else:
        table = read_tables(path) if path.is_dir() else read_table(path)
    unknown = sorted(set(names) - set(table))
    if unknown:
        raise UsageError(f"{path} has no tensor {unknown[0]!r}", "Leave out ⟨tensors⟩ to list all")
    entries = [{"name": n, "magnitude": v} for n, v in sorted(table.items()) if not names or n in names]
    return {"kind": "table", "tensors": entries}


def columns(histogram: Histogram, low: float, high: float, number: int) -> Float64s:
    """Return the counts in `number` columns of equal width from low to high. A bin belongs to the column that contains
    its centre.
    """
    lower, upper = histogram.edges()
    place = ((lower + upper) / 2 - low) / ((high - low) or 1.0) * number
    # The centre of an outermost bin may lie just outside of the extrema.
    places = np.clip(place.astype(np.int64), 0, number - 1)
    return np.bincount(places, histogram.counts.astype(np.float64), minlength=number).astype(np.float64)


def heights(counts: Float64s) -> Float64s:
    """Return counts on a logarithmic scale from 0 to 1. A few values in the tails stay visible next to millions."""
    logs = np.log1p(counts)
    highest = float(logs.max(initial=0.0))
    return np.asarray(logs / highest if highest else logs, np.float64)


# Eighths of a line, which nearly every terminal font has.
_BLOCKS = " ▁▂▃▄▅▆▇█"
# Colours of Okabe and Ito, which can be distinguished with any kind of colour vision.
_COLOURS = ("#000000", "#56b4e9", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#0072b2")
# Sizes in pixels of a histogram, and the height of a panel with its title and axis.
_WIDTH, _HEIGHT, _PANEL = 720, 120, 210


def sparkline(comparison: RangeComparison, name: str, width: int = 24) -> str:
    """Draw the histogram of a tensor in one line, from minimum to maximum, with counts on a logarithmic scale."""
    tensor = comparison.statistics.tensors[name]
    # A tensor without values has infinite extrema, which nothing can be drawn between.
    if not tensor.count:
        return " " * width
    tops = heights(columns(tensor.histogram, tensor.minimum, tensor.maximum, width))
    return "".join(_BLOCKS[round(float(top) * (len(_BLOCKS) - 1))] for top in tops)


def text_plot(comparison: RangeComparison, name: str, width: int = 72, height: int = 8) -> list[str]:
    """Return the lines of a plot: title, histogram, and a ruler for each method with the range that it chooses."""
    tensor = comparison.statistics.tensors[name]
    lines = [f"{name}  {tensor.count} values, {tensor.minimum:.6g} to {tensor.maximum:.6g}"]
    if not tensor.count:
        return [f"{name}  no values"]
    # The extent includes the ranges, because some methods choose ranges beyond the extrema.
    low, high = _extent(comparison, name)
    tops = heights(columns(tensor.histogram, low, high, width)) * height
    # Text is written from the top down.
    for row in range(height - 1, -1, -1):
        fills = [min(max(float(top) - row, 0.0), 1.0) for top in tops]
        lines.append("  " + "".join(_BLOCKS[round(fill * (len(_BLOCKS) - 1))] for fill in fills).rstrip())
    for method, spans in comparison.ranges.items():
        span = spans[name]
        lines.append(f"  {_ruler(span, low, high, width)}  {method} {span.low:.6g} to {span.high:.6g}")
    return lines


def svg_plot(comparison: RangeComparison) -> str:
    """Return an SVG with one panel for each tensor. The panels are stacked vertically."""
    names = list(comparison.statistics.tensors)
    total = _PANEL * len(names) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + 40} {total}" width="{_WIDTH + 40}" '
        f'height="{total}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for number, method in enumerate(comparison.ranges):
        x = 20 + 140 * number
        parts.append(f'<line x1="{x}" y1="16" x2="{x + 18}" y2="16" stroke="{_colour(number)}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 24}" y="20">{method}</text>')
    for number, name in enumerate(names):
        parts.append(f'<g transform="translate(20,{40 + _PANEL * number})">')
        parts.extend(_panel(comparison, name))
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def write_svg(comparison: RangeComparison | Mapping[str, Any], path: Path, *, force: bool = False) -> None:
    """Write `svg_plot` to a file.

    Raises:
        UsageError: `comparison` is a table, which contains no histograms.
    """
    if not isinstance(comparison, RangeComparison):
        raise UsageError("a calibration table contains no histograms to plot", "Give the statistics directory")
    with output_file(path, force=force) as draft:
        draft.write_text(svg_plot(comparison), "utf-8")


def _panel(comparison: RangeComparison, name: str) -> Iterator[str]:
    tensor = comparison.statistics.tensors[name]
    yield f'<text y="14" font-weight="bold">{escape(name)}</text>'
    if not tensor.count:
        yield '<text y="32">no values</text>'
        return
    yield (
        f'<text y="30">{tensor.count} values, {tensor.minimum:.6g} to {tensor.maximum:.6g}; counts on a logarithmic '
        "scale</text>"
    )
    low, high = _extent(comparison, name)
    tops = heights(columns(tensor.histogram, low, high, _WIDTH // 3))
    base = 40 + _HEIGHT
    path = "".join(f"V{base - float(top) * _HEIGHT:.1f}h3" for top in tops)
    yield f'<path d="M0 {base}{path}V{base}Z" fill="#bbbbbb"/>'
    for number, (method, spans) in enumerate(comparison.ranges.items()):
        for value in (spans[name].low, spans[name].high):
            x = (value - low) / (high - low) * _WIDTH
            yield (
                f'<line x1="{x:.1f}" y1="36" x2="{x:.1f}" y2="{base}" stroke="{_colour(number)}" stroke-width="1.5">'
                f"<title>{method} {value:.6g}</title></line>"
            )
    yield f'<text y="{base + 16}">{low:.6g}</text>'
    yield f'<text x="{_WIDTH}" y="{base + 16}" text-anchor="end">{high:.6g}</text>'


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _extent(comparison: RangeComparison, name: str) -> tuple[float, float]:
    """Return the interval that a plot covers: all values, zero, and all ranges."""
    tensor = comparison.statistics.tensors[name]
    spans = [ranges[name] for ranges in comparison.ranges.values()]
    low = min(tensor.minimum, *(s.low for s in spans))
    high = max(tensor.maximum, *(s.high for s in spans))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ruler(span: Range, low: float, high: float, width: int) -> str:
    begin, end = (min(int((v - low) / (high - low) * width), width - 1) for v in (span.low, span.high))
    if begin == end:
        return " " * begin + "│" + " " * (width - 1 - begin)
    return " " * begin + "├" + "─" * (end - begin - 1) + "┤" + " " * (width - 1 - end)
