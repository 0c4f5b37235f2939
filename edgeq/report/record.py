"""What a bundle keeps for its report: plain values, and the page made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edgeq.bundle.plan import tool_versions
from edgeq.records import plain, rounded
from edgeq.report.page import fragment, render
from edgeq.report.read import read_report

SCHEMA = "edgeq.report/1"
RECORD, PAGE, TUNING = "report.json", "report.html", "tuning.json"
DEVICE_COMMANDS = ("edgeq report BUNDLE --bench", "edgeq verify BUNDLE", "python edgeq_run.py bench   # on the device")
DIGITS = 5


def make_record(
    name: str,
    variants: Mapping[str, Mapping[str, Any]],
    *,
    model: Mapping[str, Any] | None = None,
    commands: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The record that report.json holds; keys as docs/report.md lists them.

    Args:
        variants: by name, what `edgeq package --json` says of each, with `title`, `histograms`, `layers` and `kernels`
            where they are known.
        model: sha256 and bytes of the float32 model.
    """
    return {
        "schema": SCHEMA,
        "name": name,
        "model": dict(model or {}),
        "variants": {name: dict(body) for name, body in variants.items()},
        "versions": tool_versions(),
        "identity": {},
        "commands": list(commands),
        "notes": list(notes),
    }


def report_files(record: Mapping[str, Any], tuning: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """The files that a bundle carries (`BundleSpec.extras`): report.json, and report.html that also draws `tuning`.

    Numbers are rounded, so that the last bit of a sum does not change the bundle. The tuning record has a file of its
    own, which is not among these.
    """
    kept = rounded(plain(record), DIGITS)
    shown = kept if tuning is None else {**kept, "tuning": rounded(plain(tuning), DIGITS)}
    return {
        RECORD: (json.dumps(kept, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode("utf-8"),
        PAGE: page_of(shown),
    }


def page_of(record: Mapping[str, Any]) -> bytes:
    """The HTML page of a record, which may come from anywhere."""
    return render(read_report(record)).encode("utf-8")


def draw(record: Mapping[str, Any]) -> str:
    """HTML for a notebook's cell: what a report would show of `record`, styled on its own, and its "tables" (caption,
    heads, rows of text).

    Names in it come from models; they are escaped and shortened as on the page.
    """
    return fragment(read_report(record), record.get("tables", ()))
