"""Accuracy by labels, and agreement with the float model."""

from __future__ import annotations

from collections.abc import Sequence

from edgeq.report.data import Metric, OutputAgreement, Variant
from edgeq.report.markup import Markup, isolated
from edgeq.report.numbers import decibels, difference, metric, metric_name, share, significant
from edgeq.report.sections.blocks import section, table


def accuracy_section(variant: Variant, anchor: str = "accuracy") -> Markup:
    """Metrics by labels, then each output against float32's."""
    if variant.samples:
        which = {True: "held-out ", False: "calibration ", None: ""}[variant.held_out]
        lead = f"On {variant.samples} {which}samples."
    else:
        lead = None
    return section(
        anchor,
        "Accuracy",
        table(
            ("metric", "float32", "int8", "difference"), (_metric(m) for m in variant.metrics), caption="Against labels"
        ),
        _outputs(variant.outputs[:24]),
        lead=lead,
    )


def _outputs(outputs: Sequence[OutputAgreement]) -> Markup:
    heads = ("output", "SQNR", "cosine", "largest error", "same top answer")
    rows = [_output(output) for output in outputs]
    known = [any(row[i] != "–" for row in rows) for i in range(len(heads))]
    return table(
        [head for head, k in zip(heads, known, strict=True) if k],
        ([cell for cell, k in zip(row, known, strict=True) if k] for row in rows),
        caption="Each output against float32's",
    )


def _metric(m: Metric) -> list[str | None]:
    return [
        isolated(metric_name(m.name), limit=60),
        metric(m.name, m.float32) if m.float32 is not None else "–",
        metric(m.name, m.int8) if m.int8 is not None else "–",
        difference(m.name, m.gain) if m.gain is not None else "–",
    ]


def _output(output: OutputAgreement) -> list[str | None]:
    if output.equal:
        return [
            isolated(output.name, limit=80),
            "equal",
            "1",
            "0",
            share(output.top1) if output.top1 is not None else "–",
        ]
    return [
        isolated(output.name, limit=80),
        decibels(output.sqnr_db) if output.sqnr_db is not None else "–",
        f"{output.cosine:.6f}" if output.cosine is not None else "–",
        significant(output.max_abs_error) if output.max_abs_error is not None else "–",
        share(output.top1) if output.top1 is not None else "–",
    ]
