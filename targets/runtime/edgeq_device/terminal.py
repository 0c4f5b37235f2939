"""What reaches a terminal. Names and texts of files are untrusted: a line stays one line, and moves no cursor."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import unicodedata
from typing import Any

# USER:PASSWORD@HOST, or TOKEN@HOST after http(s); a path has one slash there. "@sha256:" begins a digest.
_PASSWORD = re.compile(r"(https?:/{1,2}|:)[^\s/\\'\"]{1,256}@(?!sha256:)", re.IGNORECASE)


def printable(text: str) -> str:
    r"""`text` with an escape (`\n`, `\x1b`, `\u202e`) for each line break, control character, mark of direction, lone
    surrogate and whatever else is not seen."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else _escaped(c) for c in text)


def printable_lines(text: str) -> str:
    """Return `text` with its line breaks, tabs and carriage returns as they are and the rest through `printable`."""
    if text.isprintable():
        return text
    return "".join(part if part in "\n\t\r" else printable(part) for part in re.split(r"([\n\t\r])", text))


def without_passwords(text: str) -> str:
    """`text` with "…" for each password of an address in it: "tcp://user:…@host", "https://…@host"."""
    return _PASSWORD.sub(r"\1…@", text)


def json_text(plain: Any) -> str:
    """JSON for standard output, ASCII alone."""
    return json.dumps(plain, indent=2, allow_nan=False).replace("\x7f", "\\u007f")


def prepare_output() -> None:
    """What the caller has closed is nowhere: no file that is opened later may take its number. What the encoding of
    standard output does not have is written as escapes, as it is on stderr (a file name need not be text)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115  # they live as long as the program
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
