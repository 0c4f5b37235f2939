"""The declarative preprocessing: steps and source options, read from TOML tables, dicts or one line of text.

Text:   "resize=short:256:bilinear,crop=224,divide=255,mean=[0.485,0.456,0.406],layout=NCHW"
TOML:   steps = [{op = "resize", size = 256, rule = "short"}, {op = "crop", size = 224}, ...]   (or the text)
        [source] key = "X", label = "Y", layout = "HWC"
Both become the same values; `edgeq.records.plain` writes them out in full, defaults included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from edgeq.data.source_options import SourceOptions, parse_source
from edgeq.data.step import SEE_LIST, Step
from edgeq.data.steps import build_step, parse_step
from edgeq.errors import DataError
from edgeq.records import plain

LONGEST_TEXT = 4096
"""Characters of steps in one line."""


@dataclass(frozen=True)
class Spec:
    """A declarative preprocessing: a title, the steps in the order they are applied, the source options."""

    steps: tuple[Step, ...]
    title: str = ""
    source: SourceOptions = field(default_factory=SourceOptions)

    def __record__(self) -> dict[str, Any]:
        """Plain data that `parse_spec` reads back to an equal value."""
        found: dict[str, Any] = {"steps": self.steps}
        if self.title:
            found["title"] = self.title
        if options := plain(self.source):
            found["source"] = options
        return found


def parse_spec(value: Mapping[str, Any], where: str) -> Spec:
    """Read a spec from plain data.

    Raises:
        DataError: naming `where`, the step and the field.
    """
    try:
        unknown = sorted(set(value) - {"title", "steps", "source"})
        if unknown:
            raise DataError(f"unknown field {unknown[0]!r}", "The fields are title, steps and [source]")
        title, steps, source = value.get("title", ""), value.get("steps", []), value.get("source", {})
        if not isinstance(title, str) or not isinstance(source, Mapping):
            raise DataError("title must be a string and source a table", SEE_LIST)
        options = parse_source(source)
        if isinstance(steps, str):
            text = parse_text(steps, where)
            if plain(text.source):
                raise DataError("source options are among the steps", "Put them in the [source] table")
            return Spec(text.steps, title, options)
        if not isinstance(steps, list | tuple):
            raise DataError("steps is neither a list nor text", SEE_LIST)
        return Spec(tuple(build_step(step) for step in steps), title, options)
    except DataError as error:
        raise DataError(f"{where}: {error.problem}", error.fix) from error


def parse_text(text: str, where: str = "--preprocess") -> Spec:
    """Read "step=value,step=value"; values are parts joined by ":"; source options stand among the steps."""
    if len(text) > LONGEST_TEXT:
        raise DataError(f"{where[:60]}… has {len(text)} characters, more than {LONGEST_TEXT}", "Give a .toml file")
    steps: list[Step] = []
    source: dict[str, Any] = {}
    names = {f.name for f in fields(SourceOptions)} - {"layout", "channels"}
    try:
        for part in re.split(r",(?![^\[]*\])", text):
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name.startswith("source."):
                source[name.removeprefix("source.")] = _boolean(value)
            elif name in names:
                source[name] = _boolean(value)
            else:
                steps.append(parse_step(name, value))
        return Spec(tuple(steps), "", parse_source(source))
    except DataError as error:
        raise DataError(f"{where}: {error.problem}", error.fix) from error


def _boolean(value: str) -> str | bool:
    return {"true": True, "false": False}.get(value, value)
