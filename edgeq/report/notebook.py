"""A result in a notebook: the report's sections without its page, styled on their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeq.report.page import fragment
from edgeq.report.read import read_report


def draw(record: Mapping[str, Any]) -> str:
    """HTML for a cell: what a report would show of `record`, and its "tables" (caption, heads, rows of text).

    Names in it come from models; they are escaped and shortened as on the page.
    """
    return fragment(read_report(record), record.get("tables", ()))
