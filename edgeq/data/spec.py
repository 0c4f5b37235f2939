"""The declarative preprocessing: steps and source options, read from TOML tables, dicts or one line of text.

Text:   "resize=short:256:bilinear,crop=224,divide=255,mean=[0.485,0.456,0.406],layout=NCHW"
TOML:   steps = [{op = "resize", size = 256, rule = "short"}, {op = "crop", size = 224}, ...]   (or the text)
        [source] key = "X", label = "Y", layout = "HWC"
Both become the same values; `Spec.to_dict` writes them out in full, defaults included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from edgeq.data.source_options import SourceOptions, parse_source
from edgeq.data.steps import ARITHMETIC, Step, build_step, step_to_dict
from edgeq.data.steps_image import FILTERS, POSITIONS, ROUNDINGS, RULES
from edgeq.errors import DataError

_FIX = "See `edgeq preprocess list` for the steps and their options"


@dataclass(frozen=True)
class Spec:
    """A declarative preprocessing: a title, the steps in the order they are applied, the source options."""

    steps: tuple[Step, ...]
    title: str = ""
    source: SourceOptions = field(default_factory=SourceOptions)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `parse_spec` reads back to an equal value."""
        plain: dict[str, Any] = {"steps": [step_to_dict(step) for step in self.steps]}
        if self.title:
            plain["title"] = self.title
        if options := self.source.to_dict():
            plain["source"] = options
        return plain


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
            raise DataError("title must be a string and source a table", _FIX)
        options = parse_source(source)
        if isinstance(steps, str):
            text = parse_text(steps, where)
            if text.source.to_dict():
                raise DataError("source options stand inside steps", "Put them in the [source] table")
            return Spec(text.steps, title, options)
        if not isinstance(steps, list | tuple):
            raise DataError("steps is neither a list nor text", _FIX)
        return Spec(tuple(build_step(step) for step in steps), title, options)
    except DataError as error:
        raise DataError(f"{where}: {error.problem}", error.fix) from error


def parse_text(text: str, where: str = "--preprocess") -> Spec:
    """Read "step=value,step=value"; values are parts joined by ":"; source options stand among the steps."""
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
                steps.append(build_step(_text_to_dict(name, value)))
        return Spec(tuple(steps), "", parse_source(source))
    except DataError as error:
        raise DataError(f"{where}: {error.problem}", error.fix) from error


def _text_to_dict(op: str, value: str) -> dict[str, Any]:
    tokens = [t for t in re.split(r":(?![^\[]*\])", value) if t]
    if op in ("resize", "crop", "letterbox"):
        return {"op": op, **_geometry(op, tokens)}
    if op in ARITHMETIC:
        return {"op": op, "value": _list(tokens)}
    if op == "window":
        return {"op": op, **dict(zip(("frames", "step"), map(_integer, tokens), strict=False))}
    if op == "reshape":
        numbers = _list(tokens)
        return {"op": op, "shape": [_integer(n) for n in (numbers if isinstance(numbers, list) else [numbers])]}
    if op == "expand":
        return {"op": op, "axis": _integer(value)}
    if op == "center":
        return {"op": op} if value in ("", "true") else {"op": op, "value": value}
    return {"op": op, {"channels": "order", "dtype": "dtype", "layout": "axes"}.get(op, "value"): value}


def _geometry(op: str, tokens: list[str]) -> dict[str, Any]:
    """Sort the parts of "short:256:bicubic:round" into fields; each part says by itself what it is."""
    found: dict[str, Any] = {}
    name: str
    value: Any
    for token in tokens:
        if token in RULES:
            name, value = "rule", token
        elif token in FILTERS:
            name, value = "filter", token
        elif token in ROUNDINGS:
            name, value = "rounding", token
        elif token in POSITIONS:
            name, value = "position", token
        elif "size" not in found:
            name, value = "size", token if token == "model" else _size(token)
        elif op == "letterbox" and re.fullmatch(r"\d+|\[.*\]", token):
            values = _list([token])
            name, value = "value", [_integer(v) for v in values] if isinstance(values, list) else _integer(values)
        else:
            raise DataError(f"{op}: {token!r} is no part of it", _FIX)
        if name in found:
            raise DataError(f"{op}: a second {name}, {token!r}", _FIX)
        found[name] = value
    return found


def _size(token: str) -> Any:
    if match := re.fullmatch(r"(\d{1,9})x(\d{1,9})", token):
        return [int(match[1]), int(match[2])]
    return _integer(token)


def _list(tokens: list[str]) -> str | list[str]:
    if len(tokens) == 1 and tokens[0].startswith("[") and tokens[0].endswith("]"):
        return [item.strip() for item in tokens[0][1:-1].split(",")]
    return tokens[0] if len(tokens) == 1 else tokens


def _integer(token: Any) -> Any:
    return int(token) if isinstance(token, str) and re.fullmatch(r"-?\d{1,9}", token) else token


def _boolean(value: str) -> str | bool:
    return {"true": True, "false": False}.get(value, value)
