"""What reaches a terminal. Names and texts of files are untrusted: a line stays one line, and moves no cursor."""

from __future__ import annotations

import json
import unicodedata
from typing import Any


def printable(text: str) -> str:
    r"""`text` with an escape (`\n`, `\x1b`, `\u202e`) for each line break, control character, mark of direction, lone
    surrogate and whatever else is not seen."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else _escaped(c) for c in text)


def json_text(plain: Any) -> str:
    """JSON for standard output, ASCII alone."""
    return json.dumps(plain, indent=2, allow_nan=False).replace("\x7f", "\\u007f")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
