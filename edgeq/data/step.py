"""Define preprocessing steps, and read a step's fields from a table (TOML, JSON) or from one line of text.

A step is a frozen dataclass. Its fields are its options, with the dataclass's defaults. A field's metadata defines how
the field is read and which values it accepts. `one_of`, `whole_number` and `field_kind` return such metadata.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar

from edgeq.data.axes import ItemState
from edgeq.errors import DataError
from edgeq.signature import TensorSpec

SEE_LIST = "See `edgeq preprocess list` for the steps and their options"


class Step(ABC):
    """Define one step. A subclass is a frozen dataclass.

    Attributes:
        name: the step's name, which is used as `op` in a table and in text.
        help: the text that help shows after "NAME=".
        aliases: other names of the step.
        one_row: whether one item always becomes one row of the batch.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    one_row: ClassVar[bool] = True

    @abstractmethod
    def apply(self, state: ItemState, spec: TensorSpec | None) -> ItemState:
        """Return the item after this step. `spec` is the model input that the item feeds, or None if the input is not
        known.

        Raises:
            DataError: the item does not have the shape, dtype or axes that the step needs.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return the exact arithmetic in one line."""

    def __record__(self) -> dict[str, Any]:
        """Return the step's table: `op` and every field."""
        # mypy does not know that every subclass is a dataclass.
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {"op": self.name, **{n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}}


def parse_integer(text: str) -> int | str:
    """Return the whole number in `text`, or `text` itself if it does not contain one."""
    return int(text) if re.fullmatch(r"-?\d{1,9}", text) else text


class UnfitError(ValueError):
    """Report a value that a field does not accept. The arguments are the value to show and a description of valid
    values.
    """

    def __init__(self, value: Any, fix: str) -> None:
        super().__init__(value)
        self.value, self.fix = value, fix


@dataclass(frozen=True)
class FieldKind:
    """Define how a field is read.

    Attributes:
        convert: function that converts a plain value to the field's value, or raises UnfitError. The plain value is
            None if the table lacks the field.
        part: function that converts one part of the text form to a plain value, or returns None if the part belongs to
            another field.
        takes_all: whether all the parts of the text form belong to the field.
    """

    convert: Callable[[Any], Any]
    part: Callable[[str], Any] = parse_integer
    takes_all: bool = False


def field_kind(
    convert: Callable[[Any], Any], part: Callable[[str], Any] = parse_integer, *, takes_all: bool = False
) -> dict[str, FieldKind]:
    """Return the metadata of a dataclass field. `FieldKind` describes the arguments."""
    return {"kind": FieldKind(convert, part, takes_all)}


def read_number(value: Any) -> float:
    """Return `value` as a finite number. `value` may be a fraction in text, such as "1/255".

    Raises:
        UnfitError: `value` is neither a finite number nor a fraction.
    """
    parts = value.split("/") if isinstance(value, str) else [value]
    try:
        # bool is an int in Python, but "true" is no number in a TOML table.
        if isinstance(value, bool) or len(parts) > 2:
            raise ValueError
        number = float(parts[0]) / float(parts[1]) if len(parts) == 2 else float(parts[0])
    except (TypeError, ValueError, ZeroDivisionError):
        raise UnfitError(value, "Give a number such as 0.5 or '1/255'") from None
    # This form also refuses NaN, for which every comparison is false.
    if not abs(number) < float("inf"):
        raise UnfitError(value, "Give a finite number")
    return number


NUMBER = field_kind(read_number)
"""Metadata of a field that takes a finite number, or a fraction in text."""


def one_of(*choices: str) -> dict[str, FieldKind]:
    """Return the metadata of a field that takes one of `choices`."""

    def convert(value: Any) -> str:
        if value not in choices:
            raise UnfitError(value, f"Use one of {', '.join(choices)}")
        return str(value)

    return field_kind(convert, lambda text: text if text in choices else None)


def whole_number(minimum: int) -> dict[str, FieldKind]:
    """Return the metadata of a field that takes an integer of at least `minimum`."""

    def convert(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise UnfitError(value, f"Give a whole number of at least {minimum}")
        return value

    return field_kind(convert)


def from_table(step: type[Step], op: str, table: Mapping[str, Any]) -> Step:
    """Return the step that a table describes. `table` is the table without its `op`. `op` names the step in messages.

    Raises:
        DataError: a field is unknown or missing, or its value is not valid.
    """
    step_fields = _list_fields(step)
    unknown = sorted(set(table) - {f.name for f in step_fields})
    if unknown:
        raise DataError(f"{op}: unknown field {unknown[0]!r}", SEE_LIST)
    values = {}
    for f in step_fields:
        # A missing field with a default needs no reading; a missing one without a default is read as None and refused
        # with its own advice.
        if f.name not in table and f.default is not MISSING:
            continue
        try:
            values[f.name] = _find_kind(f).convert(table.get(f.name))
        except UnfitError as error:
            problem = "missing" if error.value is None else repr(error.value)
            raise DataError(f"{op}: {f.name} is {problem}", error.fix) from error
    return step(**values)


def table_of_text(step: type[Step], op: str, parts: Sequence[str]) -> dict[str, Any]:
    """Return the table (without `op`) that the text form "op=part:part" describes. Each part goes to the field that
    accepts it.

    Raises:
        DataError: no field accepts a part, or one field gets two parts.
    """
    step_fields = _list_fields(step)
    if not step_fields and list(parts) == ["true"]:
        return {}
    # A step with one field that takes all parts, such as a list of constants, needs no assignment of parts to fields.
    if len(step_fields) == 1 and _find_kind(step_fields[0]).takes_all:
        return {step_fields[0].name: parse_list(parts)} if parts else {}
    table: dict[str, Any] = {}
    for part in parts:
        values = {f.name: _find_kind(f).part(part) for f in step_fields}
        if len(step_fields) == 1 and values[step_fields[0].name] is None:
            values = {step_fields[0].name: part}  # the field's reader then raises an error that names the valid values
        fitting = [name for name, value in values.items() if value is not None]
        # Parts may come in any order. Two fields may accept the same part, and the first one without a part gets it.
        name = next((name for name in fitting if name not in table), None)
        if name is None:
            problem = f"a second {fitting[0]}, {part!r}" if fitting else f"it does not accept {part!r}"
            raise DataError(f"{op}: {problem}", SEE_LIST)
        table[name] = values[name]
    return table


def parse_list(parts: Sequence[str]) -> str | list[str]:
    """Return one value. If there are several parts or the text is "[a,b,c]", return the list of values."""
    if len(parts) == 1 and parts[0].startswith("[") and parts[0].endswith("]"):
        return [item.strip() for item in parts[0][1:-1].split(",")]
    return parts[0] if len(parts) == 1 else list(parts)


def _list_fields(step: type[Step]) -> tuple[Field[Any], ...]:
    return fields(step)  # type: ignore[arg-type]


def _find_kind(field: Field[Any]) -> FieldKind:
    kind = field.metadata.get("kind", FieldKind(lambda value: value))
    assert isinstance(kind, FieldKind)
    return kind
