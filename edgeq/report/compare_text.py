"""A comparison for people: the table and the verdict, from its plain values (docs/report.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeq_device.claim import Claim

from edgeq.report.numbers import decibels, difference, metric, metric_name, milliseconds, share, signed, size, times

Row = tuple[str, str, str, str]


def comparison_rows(found: Mapping[str, Any]) -> list[Row]:
    """What, A, B, and B against A; only what is known."""
    return [
        *_size(found),
        *_coverage(found),
        *_accuracy(found),
        *_agreement(found),
        *_latency(found),
        *_memory(found),
    ]


def sentences(found: Mapping[str, Any]) -> tuple[str, ...]:
    """The verdict, from A's point of view: what taking B instead would bring and cost."""
    if found["same"]:
        return ("A and B are the same model.",)
    lines = []
    ratio = (found["latency"] or {}).get("ratio")
    if ratio:
        lines.append(f"{Claim.read(ratio).sentence('B', 'A')}.")
    decisive = primary(found)
    if decisive is not None:
        name, before, after, higher = decisive
        gain = after - before
        change = difference(name, gain)
        if gain == 0:
            lines.append(f"Both have a {metric_name(name)} of {metric(name, after)}.")
        else:
            verb = "better" if (gain > 0) == higher else "worse"
            lines.append(f"B's {metric_name(name)} is {change.lstrip('+−')} {verb}: {metric(name, after)}.")
    elif found["agreement"]:
        lines += _agreement_text(found["agreement"])
    a, b = found["a"]["bytes"], found["b"]["bytes"]
    if a and b and a != b:
        lines.append(f"B takes {share(b / a, 0)} of A's space." if b < a else f"B is {times(b / a)} A's size.")
    if found["signature_differences"]:
        lines.append("Their inputs or outputs differ.")
    return tuple(lines) or ("Nothing that could be measured tells A and B apart.",)


def _agreement_text(agreement: Mapping[str, Any]) -> list[str]:
    outputs = agreement["outputs"]
    if not outputs:
        return ["They have no output in common."]
    if all(output["equal"] for output in outputs):
        return ["Their answers are equal."]
    parts = [part for o in outputs for part in (o, *o.get("slices", ())) if o["elements"]]
    worst = min((part["sqnr_db"] for part in parts if part["sqnr_db"] is not None), default=None)
    top1 = [o["top1"] for o in outputs if o["top1"] is not None]
    same = f", with the same top answer in {share(min(top1))} of {agreement['count']} samples" if top1 else ""
    same = same or f", with a cosine of {min((part['cosine'] for part in parts), default=0.0):.5f}"
    followed = [f"B's outputs follow A's at {decibels(worst)} SQNR{same}."] if worst is not None else []
    left = [
        f"Of output {o['name']}, {o['mismatched']} of {agreement['count']} samples have another size, and are left out."
        for o in outputs
        if o["mismatched"]
    ]
    return followed + left


def _size(found: Mapping[str, Any]) -> list[Row]:
    a, b = found["a"]["bytes"], found["b"]["bytes"]
    return [("size", size(a), size(b), times(b / a))] if a and b else []


def memory(found: Mapping[str, Any], name: str) -> int | None:
    """Peak memory in bytes of the session of "A" or "B", above the process without it; None where it is not known."""
    measured = ((found.get("bench") or {}).get("models") or {}).get(name) or {}
    peak: int | None = (measured.get("memory") or {}).get("session_peak_bytes")
    return peak


def _memory(found: Mapping[str, Any]) -> list[Row]:
    a, b = memory(found, "A"), memory(found, "B")
    return [("peak memory", size(a), size(b), times(b / a))] if a and b else []


def _coverage(found: Mapping[str, Any]) -> list[Row]:
    before, after = ((found[side]["coverage"] or {}).get("int8_mac_share") for side in ("a", "b"))
    if before is None or after is None:
        return []
    return [("MACs in int8, here", share(before), share(after), f"{signed(100 * (after - before), 1)} pt")]


def _accuracy(found: Mapping[str, Any]) -> list[Row]:
    a, b = found["a"]["accuracy"], found["b"]["accuracy"]
    if not a or not b:
        return []
    return [
        (metric_name(name), metric(name, value), metric(name, other), difference(name, other - value))
        for name, value in a["metrics"].items()
        for other in (b["metrics"][name],)
    ]


def primary(found: Mapping[str, Any]) -> tuple[str, float, float, bool] | None:
    """Name of the primary metric, its value of both, and whether more is better; None without labels."""
    a, b = found["a"]["accuracy"], found["b"]["accuracy"]
    if not a or not b:
        return None
    name = a["primary"]
    return name, a["metrics"][name], b["metrics"][name], a["higher_is_better"]


def _agreement(found: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for output in (found["agreement"] or {}).get("outputs", ()):
        known = output["sqnr_db"] is not None and output["elements"]
        lines = "equal" if output["equal"] else decibels(output["sqnr_db"]) if known else "–"
        cosine = f", cosine {output['cosine']:.5f}"
        top1 = f", same top answer {share(output['top1'])}" if output["top1"] is not None else cosine
        rows.append((f"output {output['name']}", "", "", f"{lines}{top1}"))
        for part in output.get("slices", ()):
            shown = decibels(part["sqnr_db"]) if part["sqnr_db"] is not None else "–"
            place = f"{part['first']}..{part['last']} on axis {part['axis']}"
            rows.append((f"  {place}", "", "", f"{shown}, cosine {part['cosine']:.5f}"))
    return rows


def _latency(found: Mapping[str, Any]) -> list[Row]:
    latency = found["latency"]
    if not latency:
        return []
    rows = []
    for name in ("p50", "p90", "p99"):
        a, b = latency["A"][f"{name}_ms"], latency["B"][f"{name}_ms"]
        rows.append((f"latency {name}", milliseconds(a), milliseconds(b), ""))
    return rows
