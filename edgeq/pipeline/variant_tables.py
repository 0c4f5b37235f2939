"""The ranges that the integers of a built variant stand for, and calibration tables of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from edgeq.calibrate.ranges import Range, scheme_ranges
from edgeq.calibrate.table import write_tables
from edgeq.calibrate.tensors import quantizable_tensors
from edgeq.graph.index import GraphIndex
from edgeq.graph.quant_params import QuantParams
from edgeq.measure.match_activations import match_activations
from edgeq.model.load import read_model
from edgeq.pipeline.job import Built, Job


def used_ranges(job: Job, built: Built) -> dict[str, Range]:
    """Return the range of each tensor in an artifact: what its file's scales and zero points represent, and the range
    that it was built from where the file has none (a table for TensorRT, a tensor in float)."""
    file = GraphIndex(read_model(built.artifact.proof_model))
    found = dict(built.ranges)
    for match in match_activations(GraphIndex(job.prepared.model), file):
        params, before = match.params, found.get(match.name)
        if params is not None and not (before is not None and _is_scale_of(params, before)):
            found[match.name] = _represented(params)
    return found


def variant_ranges(job: Job, built: Mapping[str, Built]) -> dict[str, dict[str, Range]]:
    """Return `used_ranges` of each variant that has ranges, by the variant's name; one file is read once."""
    static = {name: one for name, one in built.items() if one.ranges}
    files = {one.artifact.proof_model: one for one in static.values()}
    found = {file: used_ranges(job, one) for file, one in files.items()}
    return {name: found[one.artifact.proof_model] for name, one in static.items()}


def write_variant_tables(
    job: Job, built: Mapping[str, Built], used: Mapping[str, Mapping[str, Range]], folder: Path
) -> dict[str, Path]:
    """Write the calibration tables of each variant that has ranges, those of equal ranges once.

    Args:
        built: by the variant's name; `used`: what `variant_ranges` gave.
        folder: made here.

    Returns:
        The folder of each variant's tables, by the variant's name.
    """
    if job.statistics is None:
        return {}
    folder.mkdir()
    tensors = quantizable_tensors(job.prepared.model)
    written: list[tuple[dict[str, Range], Path]] = []
    places = {}
    for name, ranges in used.items():
        # A recovery that rewrites the model leaves tensors of the source without a range of their own.
        known = {**scheme_ranges(job.statistics, built[name].artifact.scheme), **ranges}
        kept = {tensor: known[tensor] for tensor in job.statistics.tensors}
        place = next((place for other, place in written if other == kept), None)
        if place is None:
            place = folder / str(len(written))
            write_tables(place, kept, tensors=tensors)
            written.append((kept, place))
        places[name] = place
    return places


def _is_scale_of(params: QuantParams, span: Range) -> bool:
    """Tell whether a scale is the one of a range, so that the range says the same without the zero point's rounding."""
    steps = params.high - params.low
    widths = float(params.scale.max()) * np.array([steps, steps - 1])  # a symmetric type leaves its least integer out
    return bool(np.isclose(widths, span.high - span.low, rtol=1e-5, atol=0.0).any())


def _represented(params: QuantParams) -> Range:
    """Return what the integers represent; signed ones around zero as the symmetric range that they are scaled for."""
    symmetric = params.low < 0 and not params.zero_point.any()
    low, high = (replace(params, narrow=True) if symmetric else params).range
    return Range(min(low, 0.0), max(high, 0.0))
