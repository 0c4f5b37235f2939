"""Compare a text with the recorded one, or record it."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "recorded"
RECORD = "EDGEQ_RECORD_GOLDEN"
"""The environment variable that makes `check` write what it would compare."""


def check(name: str, text: str) -> None:
    """Assert that `text` is the text of `recorded/name`. If `RECORD` is set, write it there instead."""
    file = FOLDER / name
    text = text.rstrip("\n") + "\n"
    if os.environ.get(RECORD):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
        return
    before = file.read_text("utf-8") if file.exists() else ""
    lines = difflib.unified_diff(before.splitlines(), text.splitlines(), f"recorded/{name}", "now", lineterm="")
    changed = "\n".join(lines)
    assert not changed, f"{changed}\nIf that is meant, record it: python -m tests.golden"
