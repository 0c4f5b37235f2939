"""What is wrong with data that is no record: the key or value, where it stands, and what it should be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from msgspec import inspect

from edgeq.errors import EdgeqError, suggest

_WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "int | float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}

Place = tuple[str, ...]


def check_keys(data: Any, kind: Any, where: object, error: type[EdgeqError]) -> None:
    """Refuse the first key in `data`, at any depth, that the type `kind` has no field for.

    Raises:
        EdgeqError: of the type `error`, with the nearest known key.
    """
    _check(data, _type_info(kind), (), where, error)


@lru_cache
def _type_info(kind: Any) -> inspect.Type:
    """Evaluating a class's annotations takes 10 ms, each time."""
    return inspect.type_info(kind)


def _check(data: Any, info: inspect.Type, place: Place, where: object, error: type[EdgeqError]) -> None:
    info = _container(info, data)
    if isinstance(info, inspect.DataclassType) and isinstance(data, Mapping):
        fields = {field.encode_name: field.type for field in info.fields}
        for key, value in data.items():
            if key not in fields:
                table = f"in [{'.'.join(place)}]" if place else "at the top"
                raise error(f"{where}: unknown key {key!r} {table}", suggest(str(key), fields))
            _check(value, fields[key], (*place, str(key)), where, error)
    elif isinstance(info, inspect.DictType) and isinstance(data, Mapping):
        for key, value in data.items():
            _check(value, info.value_type, (*place, str(key)), where, error)
    elif isinstance(info, inspect.CollectionType) and isinstance(data, list):
        for index, value in enumerate(data):
            _check(value, info.item_type, (*place, str(index)), where, error)


def _container(info: inspect.Type, data: Any) -> inspect.Type:
    """Of a union the member that holds tables or lists, as `data` is one of them."""
    if isinstance(info, inspect.Metadata):
        return _container(info.type, data)
    if isinstance(info, inspect.UnionType):
        wanted = inspect.DataclassType | inspect.DictType if isinstance(data, Mapping) else inspect.CollectionType
        return next((_container(t, data) for t in info.types if isinstance(t, wanted)), info)
    return info


def explained(message: str, data: Any, kind: type, where: object, error: type[EdgeqError]) -> EdgeqError:
    """msgspec's message as a problem and what to do about it."""
    found = re.fullmatch(r"(?P<problem>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?", message, re.DOTALL)
    assert found is not None
    problem, got = found["problem"], re.search(r", got `(\w+)`", found["problem"])
    place, value = _found(re.findall(r"[^.\[\]]+|\.\.\.", found["path"] or ""), data, got and got[1])
    name = ".".join(place) or "the content"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return error(f"{where}: {'.'.join((*place, missing[1]))} is missing", "Add it")
    expected = re.match(r"Expected `([^`]*)`(.*?)(?:, got `\w+`)?$", problem)
    known, description = _type_at(_type_info(kind), place)
    if expected is None:
        fix = f"It can be {', '.join(known)}" if known else problem
        return error(f"{where}: {name} is {_short(value)}", fix)
    words = _WORDS.get(expected[1].removesuffix(" | null"), f"`{expected[1]}`")
    if words == "a table" and place:
        words = f"a table: [{name}]"
    if description:
        return error(f"{where}: {name} is {_short(value)}", f"Make it {description}")
    return error(f"{where}: {name} is {_short(value)}", f"Make it {words}{expected[2]}")


def _found(steps: list[str], data: Any, got: str | None) -> tuple[Place, Any]:
    """The place that msgspec's path names, and the value there. For a key of a mapping the path has "...": the first
    that holds a value of the type `got`."""
    if not steps:
        return (), data
    first, rest = steps[0], steps[1:]
    if first != "...":
        inner, value = _found(rest, data[int(first)] if isinstance(data, list) else data[first], got)
        return (first, *inner), value
    tried = []
    for key in data if isinstance(data, Mapping) else range(len(data)):
        try:
            inner, value = _found(rest, data[key], got)
        except (KeyError, IndexError, TypeError):
            continue
        tried.append(((str(key), *inner), value))
    names = {"str": str, "int": int, "float": float, "bool": bool, "array": list, "object": dict, "null": type(None)}
    return next((t for t in tried if got and type(t[1]) is names.get(got)), tried[0])


def _type_at(info: inspect.Type, place: Place) -> tuple[list[str], str]:
    """Of the type at `place`: the values that it can have where they are listed, and its description; "" for none."""
    description = ""
    for step in (*place, None):
        description = ""
        while isinstance(info, inspect.Metadata | inspect.UnionType):
            if isinstance(info, inspect.Metadata):
                description = (info.extra_json_schema or {}).get("description", "")
                info = info.type
            else:
                info = next((t for t in info.types if not isinstance(t, inspect.NoneType)), info.types[0])
        if isinstance(info, inspect.DataclassType) and step is not None:
            info = next(field.type for field in info.fields if field.encode_name == step)
        elif isinstance(info, inspect.DictType) and step is not None:
            info = info.value_type
        elif isinstance(info, inspect.TupleType) and step is not None:
            info = info.item_types[int(step)]
        elif isinstance(info, inspect.CollectionType) and step is not None:
            info = info.item_type
    return [str(value) for value in info.values] if isinstance(info, inspect.LiteralType) else [], description


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
