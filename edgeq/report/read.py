"""From plain values, which may come from a stranger's bundle, to what the report draws. Keys: docs/report.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from edgeq.report.data import FLOAT, INT8, Metric, OutputAgreement, Pairs, ReportData, Variant
from edgeq.report.plain import listed, mapping, number, pairs, positive, rows, string, strings, whole
from edgeq.report.read_layers import read_coverage, read_histograms, read_layers
from edgeq.report.read_timing import read_bench, read_finalists, read_speed
from edgeq.report.read_tuning import read_tuning

_MOST_VARIANTS = 40
_MACHINE = ("cpu_name", "cpu", "board", "architecture", "cores", "threads", "memory_bytes", "os", "system", "governors")


def read_report(record: Mapping[str, Any]) -> ReportData:
    """Whatever of `record` makes sense. Nothing in it is an error: what cannot be used is left out."""
    tuning = mapping(record.get("tuning"))
    chosen = string(tuning.get("chosen"))
    variants = tuple(
        read_variant(string(name), mapping(body))
        for name, body in list(mapping(record.get("variants")).items())[:_MOST_VARIANTS]
    )
    timing = read_bench(record.get("bench")) or read_finalists(tuning, chosen)
    model = mapping(record.get("model")) or mapping(tuning.get("model"))
    identity = {**mapping(record.get("identity")), "float32 model, sha256": model.get("sha256")}
    return ReportData(
        name=string(record.get("name")) or string(model.get("name")) or "model",
        variants=variants,
        float_bytes=positive(model.get("bytes")),
        tuning=read_tuning(tuning),
        timing=timing,
        machine=_machine(mapping(record.get("machine")) or mapping(tuning.get("machine")))
        or (timing.machine if timing else ()),
        versions=pairs(mapping(record.get("versions")) or tuning.get("versions"), 20)
        or (timing.versions if timing else ()),
        identity=tuple((k, v) for k, v in pairs(identity, 20) if v),
        commands=strings(record.get("commands"), 20),
        notes=strings(record.get("notes"), 40),
    )


def read_variant(name: str, plain: Mapping[str, Any]) -> Variant:
    """One entry of `variants`: what `edgeq package --json` says of a variant, and `layers`, `kernels`, `histograms`."""
    scheme = mapping(plain.get("scheme"))
    agreement = mapping(plain.get("agreement"))
    outputs = tuple(_output(row) for row in rows(agreement.get("outputs"), 50))
    layers, conversion = read_layers(plain.get("layers"), plain.get("kernels"))
    sqnr = [o.sqnr_db for o in outputs if o.sqnr_db is not None]
    top1 = [o.top1 for o in outputs if o.top1 is not None]
    facts = {
        key: plain.get(key) for key in ("target", "profile", "provider", "min_onnxruntime", "checked", "16-bit sums")
    }
    native = plain.get("native")
    return Variant(
        name=name,
        title=string(plain.get("title")),
        bytes=positive(plain.get("bytes")),
        native=native if isinstance(native, bool) else None,
        facts=pairs(facts, 10),
        scheme=_scheme(scheme),
        session_options=pairs(plain.get("session_options"), 30),
        excluded=strings(scheme.get("exclude"), 500),
        coverage=read_coverage(plain.get("coverage")),
        metrics=_metrics(mapping(plain.get("accuracy"))),
        outputs=outputs,
        sqnr_db=min(sqnr) if sqnr else number(plain.get("sqnr_db")),
        top1=min(top1) if top1 else number(plain.get("top1_agreement")),
        samples=whole(plain.get("samples")),
        held_out=plain.get("held_out") if isinstance(plain.get("held_out"), bool) else None,
        timing=read_speed(plain.get("speed")),
        layers=layers,
        conversion_us=conversion,
        histograms=read_histograms(plain.get("histograms")),
        warnings=strings(plain.get("warnings"), 20),
    )


def _scheme(scheme: Mapping[str, Any]) -> Pairs:
    unused = "dynamic_weight_types" if scheme.get("mode") == "static" else "method"
    return tuple((k.replace("_", " "), v) for k, v in pairs(scheme, 30) if k not in ("exclude", unused))


def _metrics(accuracy: Mapping[str, Any]) -> tuple[Metric, ...]:
    """`accuracy` by model: `edgeq eval`'s form, or plain metrics as a bundle's own record has them."""
    bodies = {name: mapping(accuracy.get(name)) for name in (FLOAT, INT8)}
    values = {name: mapping(body.get("metrics")) or body for name, body in bodies.items()}
    primary = string(bodies[INT8].get("primary")) or string(bodies[FLOAT].get("primary"))
    higher = bodies[INT8].get("higher_is_better") is not False
    names = dict.fromkeys([*values[INT8], *values[FLOAT]])
    found = [
        Metric(string(n)[:100], number(values[FLOAT].get(n)), number(values[INT8].get(n))) for n in list(names)[:20]
    ]
    known = [m for m in found if (m.float32, m.int8) != (None, None)]
    if primary not in {m.name for m in known} and known:
        primary = known[0].name
    return tuple(
        dataclasses.replace(m, primary=m.name == primary, higher_is_better=higher or m.name != primary) for m in known
    )


def _output(row: Mapping[str, Any]) -> OutputAgreement:
    return OutputAgreement(
        name=string(row.get("name")),
        sqnr_db=number(row.get("sqnr_db")),
        cosine=number(row.get("cosine")),
        max_abs_error=number(row.get("max_abs_error")),
        top1=number(row.get("top1")),
        equal=row.get("equal") is True,
    )


def _machine(plain: Mapping[str, Any]) -> Pairs:
    from edgeq.report.numbers import size

    known = {key: plain.get(key) for key in _MACHINE}
    memory = positive(known["memory_bytes"])
    known["memory_bytes"] = size(memory) if memory else None
    found = [(key.replace("_bytes", "").replace("_", " "), value) for key, value in pairs(known, 20)]
    for gpu in listed(plain.get("gpus"))[:8]:
        found.append(("gpu", string(mapping(gpu).get("name"))))
    return tuple((key, value) for key, value in found if value and value != "0")
