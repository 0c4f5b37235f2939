"""From a record, which may come from an untrusted bundle, to what the report draws. Keys: docs/report.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edgeq.measure.accuracy import Accuracy
from edgeq.records import readable
from edgeq.report.data import Metric, ReportData, ReportRecord, Variant, VariantRecord
from edgeq.report.facts import Pairs, pairs, string
from edgeq.report.layer_rows import layer_rows
from edgeq.report.numbers import size
from edgeq.report.timing import FLOAT, INT8, bench_timing, finalists_timing, speed_timing
from edgeq.report.tuning import tuning_of
from edgeq.report.tuning_record import ModelRecord, TuningRecord

_MOST_VARIANTS = 40
_MOST_HISTOGRAMS = 24
_MACHINE = ("cpu_name", "cpu", "board", "architecture", "cores", "threads", "memory_bytes", "os", "system", "governors")


def read_report(plain: Mapping[str, Any]) -> ReportData:
    """Whatever of a record makes sense. Nothing in it is an error: what cannot be used is left out."""
    record = readable(plain, ReportRecord) or ReportRecord()
    tuning = record.tuning or TuningRecord()
    timing = (bench_timing(record.bench) if record.bench else None) or finalists_timing(tuning)
    model = record.model or tuning.model or ModelRecord()
    identity = {**record.identity, "float32 model, sha256": model.sha256 or ""}
    variants = list(record.variants.items())[:_MOST_VARIANTS]
    return ReportData(
        name=record.name or model.name or "model",
        variants=tuple(_variant(name, body) for name, body in variants),
        float_bytes=model.bytes,
        tuning=tuning_of(tuning),
        timing=timing,
        fleet=record.fleet,
        machine=_machine(record.machine or tuning.machine) or (timing.machine if timing else ()),
        versions=pairs(record.versions or tuning.versions, 20) or (timing.versions if timing else ()),
        identity=pairs(identity, 20),
        commands=record.commands[:20],
        notes=record.notes[:40],
    )


def _variant(name: str, record: VariantRecord) -> Variant:
    layers, conversion = layer_rows(record.layers, record.kernels)
    outputs = record.agreement.outputs[:50] if record.agreement else ()
    sqnr = [output.least_db for output in outputs if math.isfinite(output.least_db) and output.same is None]
    top1 = [output.top1 for output in outputs if output.top1 is not None]
    facts = {
        "target": record.target,
        "profile": record.profile,
        "provider": record.provider,
        "engine": record.engine,
        "min_onnxruntime": record.min_onnxruntime,
        "checked": record.checked,
        "16-bit sums": record.saturation.why if record.saturation else "",
    }
    excluded = record.scheme.get("exclude")
    return Variant(
        name=name,
        title=record.title,
        bytes=record.bytes,
        native=record.native,
        facts=pairs(facts, 10),
        scheme=_scheme(record.scheme),
        session_options=pairs(record.session_options, 30),
        excluded=tuple(string(node) for node in excluded[:500]) if isinstance(excluded, list | tuple) else (),
        coverage=record.coverage,
        metrics=_metrics(record.accuracy),
        outputs=outputs,
        sqnr_db=min(sqnr) if sqnr else record.sqnr_db,
        top1=min(top1) if top1 else record.top1_agreement,
        samples=record.samples,
        held_out=record.held_out,
        timing=speed_timing(record.speed) if record.speed else None,
        layers=layers,
        conversion_us=conversion,
        histograms=record.histograms[:_MOST_HISTOGRAMS],
        warnings=record.warnings[:20],
    )


def _scheme(scheme: Mapping[str, Any]) -> Pairs:
    unused = "dynamic_weight_types" if scheme.get("mode") == "static" else "method"
    return tuple((k.replace("_", " "), v) for k, v in pairs(scheme, 30) if k not in ("exclude", unused))


def _metrics(accuracy: Mapping[str, Accuracy]) -> tuple[Metric, ...]:
    before, after = accuracy.get(FLOAT), accuracy.get(INT8)
    known = after or before
    if known is None:
        return ()
    values = [found.metrics if found else {} for found in (before, after)]
    names = list(dict.fromkeys([*values[1], *values[0]]))[:20]
    primary = known.primary if known.primary in names else names[0] if names else ""
    return tuple(
        Metric(
            name[:100],
            values[0].get(name),
            values[1].get(name),
            name == primary,
            known.higher_is_better or name != primary,
        )
        for name in names
    )


def _machine(plain: Mapping[str, Any]) -> Pairs:
    known = {key: plain.get(key) for key in _MACHINE}
    memory = known["memory_bytes"]
    known["memory_bytes"] = size(memory) if isinstance(memory, int) and 0 < memory < 1 << 64 else None
    found = [(key.replace("_bytes", "").replace("_", " "), value) for key, value in pairs(known, 20)]
    gpus = plain.get("gpus")
    for gpu in gpus[:8] if isinstance(gpus, list | tuple) else ():
        found.append(("gpu", string(gpu.get("name")) if isinstance(gpu, Mapping) else ""))
    return tuple((key, value) for key, value in found if value and value != "0")
