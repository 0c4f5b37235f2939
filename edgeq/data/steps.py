"""All the steps, and how one is built from a plain table with every field checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from edgeq.data.steps_image import FILTERS, ORDERS, POSITIONS, ROUNDINGS, RULES, Channels, Crop, Letterbox, Resize
from edgeq.data.steps_value import FLOATS, Arithmetic, Center, Dtype, Expand, Layout, Reshape, Window
from edgeq.errors import DataError

Step = Resize | Crop | Letterbox | Channels | Dtype | Arithmetic | Center | Window | Layout | Reshape | Expand

ARITHMETIC = {
    "multiply": "multiply",
    "scale": "multiply",
    "divide": "divide",
    "std": "divide",
    "add": "add",
    "offset": "add",
    "subtract": "subtract",
    "mean": "subtract",
}
OPERATIONS = ("resize", "crop", "letterbox", "channels", "dtype", *ARITHMETIC, "center", "window", "layout", "reshape")
OPERATIONS = (*OPERATIONS, "expand")

_FIX = "See `edgeq preprocess list` for the steps and their options"


def build_step(value: Any) -> Step:
    """One step from its table: {op = NAME, …}.

    Raises:
        DataError: an unknown step or field, or a value out of its set.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("op"), str):
        raise DataError(f"a step is {value!r}", "Write it as {op = 'resize', size = 256}")
    given = dict(value)
    op = given.pop("op")
    if op not in OPERATIONS:
        raise DataError(f"unknown step {op!r}", f"The steps are {', '.join(OPERATIONS)}")
    take = _Taker(op, given)
    step: Step
    if op == "resize":
        step = Resize(
            take.size(), take.one_of("rule", RULES), take.one_of("filter", tuple(FILTERS), "bilinear"), take.rounding()
        )
        if step.rule != "exact" and step.rule != "fit" and isinstance(step.size, str):
            raise DataError(f"resize by the {step.rule} side needs a number of pixels", "Give size = 256 or the like")
    elif op == "crop":
        step = Crop(take.size(), take.rounding())
    elif op == "letterbox":
        step = Letterbox(
            take.size(),
            take.one_of("position", POSITIONS),
            take.pixels("value", (114,)),
            take.one_of("filter", tuple(FILTERS), "bilinear"),
            take.rounding(),
        )
    elif op == "channels":
        step = Channels(take.one_of("order", ORDERS, None))
    elif op == "dtype":
        step = Dtype(take.one_of("dtype", FLOATS, None))
    elif op in ARITHMETIC:
        step = Arithmetic(ARITHMETIC[op], take.constant())
        if step.operator == "divide" and 0.0 in (step.value if isinstance(step.value, tuple) else (step.value,)):
            raise DataError(f"{op} divides by 0", "Correct the constant")
    elif op == "center":
        step = Center()
    elif op == "window":
        step = Window(take.whole("frames", None, 1), take.whole("step", 1, 1))
    elif op == "layout":
        step = Layout(take.axes())
    elif op == "reshape":
        step = Reshape(take.shape())
    else:
        step = Expand(take.whole("axis", None, -32))
    take.finish()
    return step


class _Taker:
    """Takes the fields of one step out of its table, checked, and refuses what is left."""

    def __init__(self, op: str, given: dict[str, Any]) -> None:
        self.op, self.given = op, given

    def bad(self, name: str, value: Any, fix: str) -> DataError:
        return DataError(f"{self.op}: {name} is {'missing' if value is None else repr(value)}", fix)

    def finish(self) -> None:
        if self.given:
            raise DataError(f"{self.op}: unknown field {min(self.given)!r}", _FIX)

    def one_of(self, name: str, choices: tuple[str, ...], default: str | None = "") -> str:
        value = self.given.pop(name, choices[0] if default == "" else default)
        if value not in choices:
            raise self.bad(name, value, f"Use one of {', '.join(choices)}")
        return str(value)

    def rounding(self) -> str:
        return self.one_of("rounding", ROUNDINGS)

    def whole(self, name: str, default: int | None, least: int) -> int:
        value = self.given.pop(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.bad(name, value, f"Give a whole number of at least {least}")
        return value

    def size(self) -> tuple[int, int] | str:
        value = self.given.pop("size", None)
        if value == "model":
            return "model"
        pair = (value, value) if isinstance(value, int) else value
        if (
            not isinstance(pair, list | tuple)
            or len(pair) != 2
            or not all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= 65536 for n in pair)
        ):
            raise self.bad("size", value, "Give pixels, as 256, [width, height], or 'model'")
        return int(pair[0]), int(pair[1])

    def pixels(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        value = self.given.pop(name, default)
        values = (value,) if isinstance(value, int) else value
        if not isinstance(values, list | tuple) or not all(isinstance(v, int) and 0 <= v <= 255 for v in values):
            raise self.bad(name, value, "Give 0..255, or one a channel")
        return tuple(values)

    def constant(self) -> float | tuple[float, ...]:
        value = self.given.pop("value", None)
        if isinstance(value, list | tuple) and value:
            return tuple(self.number(item) for item in value)
        return self.number(value)

    def number(self, value: Any) -> float:
        parts = value.split("/") if isinstance(value, str) else [value]
        try:
            if isinstance(value, bool) or len(parts) > 2:
                raise ValueError
            number = float(parts[0]) / float(parts[1]) if len(parts) == 2 else float(parts[0])
        except (TypeError, ValueError, ZeroDivisionError):
            raise self.bad("value", value, "Give a number such as 0.5 or '1/255', or a list of them") from None
        if not abs(number) < float("inf"):
            raise self.bad("value", value, "Give a finite number")
        return number

    def axes(self) -> str:
        value = self.given.pop("axes", None)
        if not isinstance(value, str) or not value.isalpha() or (value != "model" and len(set(value)) != len(value)):
            raise self.bad("axes", value, "Give one letter an axis, such as NCHW, or 'model'")
        return value

    def shape(self) -> tuple[int, ...]:
        value = self.given.pop("shape", None)
        if not isinstance(value, list | tuple) or not all(isinstance(n, int) and (n > 0 or n == -1) for n in value):
            raise self.bad("shape", value, "Give sizes, such as [1, 49, 10]")
        return tuple(value)


def step_to_dict(step: Step) -> dict[str, Any]:
    plain = {f.name: getattr(step, f.name) for f in fields(step)}
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in plain.items()}
    op = plain.pop("operator", None) or step.op
    return {"op": op, **plain}
