"""What a preprocessing step is, and how its fields are read from a table (TOML, JSON) or from one line of text.

A step is a frozen dataclass: its fields are its options, their defaults those of the dataclass. How a field is read
and what it takes is the field's metadata, made by `one_of`, `whole_number` or `field_kind`.

What the steps of arithmetic with a constant share.

Arithmetic runs in the array's floating dtype; integers become float32 first, unless a `dtype` step chose another.
Every constant is rounded to that dtype before it is used, and each step rounds once.

What the steps on pixels share. They take uint8 and give uint8, through Pillow.

Pillow's default filter has changed between versions, so the filter is always named.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from edgeq.data.records import Array, State, check_size, model_size
from edgeq.errors import DataError
from edgeq.signature import TensorSpec

SEE_LIST = "See `edgeq preprocess list` for the steps and their options"


class Step(ABC):
    """One step. A subclass is a frozen dataclass.

    Attributes:
        name: as `op` of a table and in text.
        help: what is written after "NAME=".
        aliases: other names.
        one_row: whether one item surely becomes one row of the batch.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    one_row: ClassVar[bool] = True

    @abstractmethod
    def apply(self, state: State, spec: TensorSpec | None) -> State:
        """The item after this step. `spec` is the model input that it feeds, where that is known.

        Raises:
            DataError: the item has not the shape, dtype or axes that the step needs.
        """

    @abstractmethod
    def describe(self) -> str:
        """The exact arithmetic, one line."""

    def __record__(self) -> dict[str, Any]:
        """The step's table: `op` and every field."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {"op": self.name, **{n: list(v) if isinstance(v, tuple) else v for n, v in plain.items()}}


def integer(text: str) -> int | str:
    """A whole number where `text` is one; other text as it is."""
    return int(text) if re.fullmatch(r"-?\d{1,9}", text) else text


class UnfitError(ValueError):
    """A value that a field does not take: the value to show, and what the field takes."""

    def __init__(self, value: Any, fix: str) -> None:
        super().__init__(value)
        self.value, self.fix = value, fix


@dataclass(frozen=True)
class FieldKind:
    """How a field is read.

    Attributes:
        read: from a plain value to the field's; UnfitError where it does not take the value (None: it is missing).
        part: from one part of the text form to a plain value; None where the part belongs to another field.
        many: whether the field takes all parts of the text form.
    """

    read: Callable[[Any], Any]
    part: Callable[[str], Any] = integer
    many: bool = False


def field_kind(
    read: Callable[[Any], Any], part: Callable[[str], Any] = integer, *, many: bool = False
) -> dict[str, FieldKind]:
    """Metadata of a dataclass field; see `FieldKind`."""
    return {"kind": FieldKind(read, part, many)}


def read_number(value: Any) -> float:
    """A finite number, or a fraction in text such as "1/255".

    Raises:
        UnfitError: it is neither.
    """
    parts = value.split("/") if isinstance(value, str) else [value]
    try:
        if isinstance(value, bool) or len(parts) > 2:
            raise ValueError
        number = float(parts[0]) / float(parts[1]) if len(parts) == 2 else float(parts[0])
    except (TypeError, ValueError, ZeroDivisionError):
        raise UnfitError(value, "Give a number such as 0.5 or '1/255'") from None
    if not abs(number) < float("inf"):
        raise UnfitError(value, "Give a finite number")
    return number


NUMBER = field_kind(read_number)
"""Metadata of a field that takes a finite number, or a fraction in text."""


def one_of(*choices: str) -> dict[str, FieldKind]:
    """Metadata of a field that takes one of `choices`."""

    def read(value: Any) -> str:
        if value not in choices:
            raise UnfitError(value, f"Use one of {', '.join(choices)}")
        return str(value)

    return field_kind(read, lambda text: text if text in choices else None)


def whole_number(least: int) -> dict[str, FieldKind]:
    """Metadata of a field that takes an integer of at least `least`."""

    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UnfitError(value, f"Give a whole number of at least {least}")
        return value

    return field_kind(read)


def from_table(step: type[Step], op: str, given: Mapping[str, Any]) -> Step:
    """The step of a table without its `op`; `op` names it in messages.

    Raises:
        DataError: an unknown or missing field, or a value that it does not take.
    """
    known = _fields(step)
    unknown = sorted(set(given) - {f.name for f in known})
    if unknown:
        raise DataError(f"{op}: unknown field {unknown[0]!r}", SEE_LIST)
    values = {}
    for f in known:
        if f.name not in given and f.default is not MISSING:
            continue
        try:
            values[f.name] = _kind(f).read(given.get(f.name))
        except UnfitError as error:
            shown = "missing" if error.value is None else repr(error.value)
            raise DataError(f"{op}: {f.name} is {shown}", error.fix) from error
    return step(**values)


def table_of_text(step: type[Step], op: str, parts: Sequence[str]) -> dict[str, Any]:
    """The table (without `op`) of the text form "op=part:part"; each part is matched with the field that takes it.

    Raises:
        DataError: a part that no field takes, or two for one field.
    """
    known = _fields(step)
    if not known and list(parts) == ["true"]:
        return {}
    if len(known) == 1 and _kind(known[0]).many:
        return {known[0].name: listed(parts)} if parts else {}
    found: dict[str, Any] = {}
    for part in parts:
        values = {f.name: _kind(f).part(part) for f in known}
        if len(known) == 1 and values[known[0].name] is None:
            values = {known[0].name: part}  # its reader raises what it takes
        fitting = [name for name, value in values.items() if value is not None]
        name = next((name for name in fitting if name not in found), None)
        if name is None:
            problem = f"a second {fitting[0]}, {part!r}" if fitting else f"{part!r} is no part of it"
            raise DataError(f"{op}: {problem}", SEE_LIST)
        found[name] = values[name]
    return found


def listed(parts: Sequence[str]) -> str | list[str]:
    """One value, or the list of "[a,b,c]" or of several parts."""
    if len(parts) == 1 and parts[0].startswith("[") and parts[0].endswith("]"):
        return [item.strip() for item in parts[0][1:-1].split(",")]
    return parts[0] if len(parts) == 1 else list(parts)


def _fields(step: type[Step]) -> tuple[Field[Any], ...]:
    return fields(step)  # type: ignore[arg-type]


def _kind(field: Field[Any]) -> FieldKind:
    found = field.metadata.get("kind", FieldKind(lambda value: value))
    assert isinstance(found, FieldKind)
    return found


Operator = Callable[[Array, Array], Array]
"""Elementwise; the array and the constant have one floating dtype, the constant broadcasts against the array."""


def _read_constant(value: Any) -> float | tuple[float, ...]:
    if isinstance(value, list | tuple) and value:
        return tuple(read_number(item) for item in value)
    return read_number(value)


@dataclass(frozen=True)
class Arithmetic(Step):
    """x (*, /, +, -) a constant, or one constant a channel."""

    sign: ClassVar[str]
    compute: ClassVar[Operator]
    value: float | tuple[float, ...] = field(metadata=field_kind(_read_constant, many=True))

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        """The result in the dtype of the array; integers become float32 first.

        Raises:
            DataError: as many constants as the channel axis does not have.
        """
        array = floating(state.array)
        with np.errstate(all="ignore"):  # what is not finite is refused with the sample's name
            constant = np.asarray(self.value, array.dtype)
            if constant.ndim:
                constant = _along_channels(constant, array, state.axes)
            return replace(state, array=np.asarray(type(self).compute(array, constant), array.dtype))

    def describe(self) -> str:
        """The operation with its constants in full precision."""
        if isinstance(self.value, tuple):
            return f"x = x {self.sign} [{', '.join(map(repr, self.value))}], one a channel"
        return f"x = x {self.sign} {self.value!r}"


def floating(array: Array) -> Array:
    """`array` itself if it is floating, else as float32.

    Raises:
        DataError: it takes more bytes than a sample may.
    """
    if array.dtype.kind == "f":
        return array
    check_size(4 * array.size, "as float32", "Give smaller items")
    return array.astype(np.float32)


def _along_channels(constant: Array, array: Array, axes: str) -> Array:
    axis = axes.index("C") if "C" in axes else array.ndim - 1
    if array.ndim == 0 or array.shape[axis] != constant.size:
        raise DataError(
            f"{constant.size} constants do not fit axis {axis} of shape {list(array.shape)}",
            "Declare the axes of the source (source.layout = 'CHW' or 'HWC'), or give one constant a channel",
        )
    shape: list[Any] = [1] * array.ndim
    shape[axis] = constant.size
    return constant.reshape(shape)


FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
FEWER = "Give fewer pixels"
ROUNDINGS = ("floor", "round", "ceil")

Size = tuple[int, int] | str
"""(width, height), or "model" for the size that the model's input fixes."""


def _read_size(value: Any) -> Size:
    if value == "model":
        return "model"
    pair = (value, value) if isinstance(value, int) else value
    if (
        not isinstance(pair, list | tuple)
        or len(pair) != 2
        or not all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= 65536 for n in pair)
    ):
        raise UnfitError(value, "Give pixels, as 256, [width, height], or 'model'")
    return int(pair[0]), int(pair[1])


def _size_part(text: str) -> Any:
    if match := re.fullmatch(r"(\d{1,9})x(\d{1,9})", text):
        return [int(match[1]), int(match[2])]
    value = integer(text)
    return value if isinstance(value, int) or text == "model" else None


SIZE = field_kind(_read_size, _size_part)
FILTER = one_of(*FILTERS)
ROUNDING = one_of(*ROUNDINGS)


def rounded(value: float, rule: str) -> int:
    """`value` in pixels: floor, ceil, or round half to even."""
    if rule == "round":
        return round(value)
    return math.floor(value) if rule == "floor" else math.ceil(value)


def target_size(size: Size, spec: TensorSpec | None) -> tuple[int, int] | None:
    """(width, height) in pixels; None where the model's size is wanted and the model does not fix one."""
    return model_size(spec) if isinstance(size, str) else size


def describe_size(size: Size, model: str = "the model's width and height") -> str:
    """ "WIDTH x HEIGHT", or `model`."""
    return model if isinstance(size, str) else f"{size[0]} x {size[1]}"


def image_size(state: State) -> tuple[int, int]:
    """(height, width) of an image in any axis order.

    Raises:
        DataError: the axes are not known to be those of an image.
    """
    if "H" not in state.axes or "W" not in state.axes or len(state.axes) != state.array.ndim:
        raise DataError(
            f"shape {list(state.array.shape)} is not known to be an image", "Declare source.layout = 'HWC' (or 'CHW')"
        )
    return int(state.array.shape[state.axes.index("H")]), int(state.array.shape[state.axes.index("W")])


def to_hwc(array: Array, axes: str) -> Array:
    """From `axes` (H, W, perhaps C, and others of size 1, as a batch axis) to HWC.

    Raises:
        DataError: another axis has another size.
    """
    others = tuple(i for i, axis in enumerate(axes) if axis not in "HWC")
    if any(array.shape[i] != 1 for i in others):
        raise DataError(f"shape {list(array.shape)}, axes {axes}, is not one image", "Put steps on pixels first")
    kept = "".join(axis for axis in axes if axis in "HWC")
    array = array.squeeze(others)
    if "C" not in kept:
        return array.transpose([kept.index(a) for a in "HW"])[:, :, None]
    return array.transpose([kept.index(a) for a in "HWC"])


def from_hwc(array: Array, axes: str) -> Array:
    """The inverse of `to_hwc`."""
    kept = "".join(axis for axis in axes if axis in "HWC")
    if "C" not in kept:
        array = array[:, :, 0].transpose(["HW".index(a) for a in kept])
    else:
        array = (array if array.ndim == 3 else array[:, :, None]).transpose(["HWC".index(a) for a in kept])
    return np.expand_dims(array, tuple(i for i, axis in enumerate(axes) if axis not in "HWC"))


def through_pillow(state: State, what: str, work: Callable[[Image.Image], Image.Image]) -> Array:
    """The item's array after `work` on it as a Pillow image; `what` names the step in messages.

    Raises:
        DataError: the item is not uint8 of 1 or 3 channels.
    """
    array = to_hwc(state.array, state.axes)
    if array.dtype != np.uint8 or array.shape[2] not in (1, 3):
        raise DataError(
            f"{what} takes uint8 images of 1 or 3 channels, not {array.dtype} {list(array.shape)} (rows first)",
            "Put the step before any arithmetic, or prepare the data at the model's size",
        )
    image = Image.fromarray(np.ascontiguousarray(array[:, :, 0] if array.shape[2] == 1 else array))
    result = np.asarray(work(image))
    return from_hwc(result if result.ndim == 3 else result[:, :, None], state.axes)
