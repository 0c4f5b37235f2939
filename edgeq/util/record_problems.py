"""Explain in one line what is wrong in a record: the file, the key, its value and what it should be.

msgspec finds the wrong value. Its messages name types and not files, so this module words them again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from msgspec import inspect

from edgeq.errors import EdgeqError, suggest

# Names of msgspec's types in words for users who edit the file.
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


@lru_cache
def type_info(kind: Any) -> inspect.Type:
    """Return msgspec's description of a class. The description is cached, because evaluating the class's annotations
    takes 10 ms.
    """
    return inspect.type_info(kind)


def check_keys(data: Any, info: inspect.Type, place: Place, source: object, error: type[EdgeqError]) -> None:
    """Refuse the first key in `data`, at any depth, that is unknown to the type `info`. The error names the nearest
    known key.
    """
    info = _container(info, data)
    if isinstance(info, inspect.DataclassType) and isinstance(data, Mapping):
        fields = {field.encode_name: field.type for field in info.fields}
        for key, value in data.items():
            if key not in fields:
                table = f"in [{'.'.join(place)}]" if place else "at the top"
                raise error(f"{source}: unknown key {key!r} {table}", suggest(str(key), fields))
            check_keys(value, fields[key], (*place, str(key)), source, error)
    elif isinstance(info, inspect.DictType) and isinstance(data, Mapping):
        for key, value in data.items():
            check_keys(value, info.value_type, (*place, str(key)), source, error)
    elif isinstance(info, inspect.CollectionType) and isinstance(data, list):
        for index, value in enumerate(data):
            check_keys(value, info.item_type, (*place, str(index)), source, error)


def _container(info: inspect.Type, data: Any) -> inspect.Type:
    """Return the member of a union that fits `data`: the type for tables if `data` is a table, or else the type for
    lists.
    """
    if isinstance(info, inspect.Metadata):
        return _container(info.type, data)
    if isinstance(info, inspect.UnionType):
        expected = inspect.DataclassType | inspect.DictType if isinstance(data, Mapping) else inspect.CollectionType
        return next((_container(t, data) for t in info.types if isinstance(t, expected)), info)
    return info


def explain(message: str, data: Any, kind: type, source: object, error: type[EdgeqError]) -> EdgeqError:
    """Turn msgspec's message into an error with a problem and a fix."""
    # msgspec appends the place to the problem: Expected `int`, got `str` - at `$.scheme.bits`.
    match = re.fullmatch(r"(?P<problem>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?", message, re.DOTALL)
    assert match is not None
    problem, got = match["problem"], re.search(r", got `(\w+)`", match["problem"])
    place, value = _locate(re.findall(r"[^.\[\]]+|\.\.\.", match["path"] or ""), data, got and got[1])
    name = ".".join(place) or "the content"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return error(f"{source}: {'.'.join((*place, missing[1]))} is missing", "Add it")
    expected = re.match(r"Expected `([^`]*)`(.*?)(?:, got `\w+`)?$", problem)
    expected_type, description = _type_at(type_info(kind), place)
    # Messages that name no type state a limit or the allowed values, which is the fix.
    if expected is None:
        fix = f"It can be {', '.join(expected_type)}" if expected_type else problem
        return error(f"{source}: {name} is {_short(value)}", fix)
    words = _WORDS.get(expected[1].removesuffix(" | null"), f"`{expected[1]}`")
    # A user of TOML knows a table by its heading.
    if words == "a table" and place:
        words = f"a table: [{name}]"
    if description:
        return error(f"{source}: {name} is {_short(value)}", f"Make it {description}")
    return error(f"{source}: {name} is {_short(value)}", f"Make it {words}{expected[2]}")


def _locate(steps: list[str], data: Any, got: str | None) -> tuple[Place, Any]:
    """Return the place that msgspec's path names, and the value at that place.

    msgspec writes "..." instead of the key of a mapping. If the path has "...", return the first matching place with a
    value of the type `got`.
    """
    if not steps:
        return (), data
    step, further = steps[0], steps[1:]
    if step != "...":
        inner, value = _locate(further, data[int(step)] if isinstance(data, list) else data[step], got)
        return (step, *inner), value
    attempts = []
    for key in data if isinstance(data, Mapping) else range(len(data)):
        try:
            inner, value = _locate(further, data[key], got)
        except (KeyError, IndexError, TypeError):
            continue
        attempts.append(((str(key), *inner), value))
    names = {"str": str, "int": int, "float": float, "bool": bool, "array": list, "object": dict, "null": type(None)}
    return next((t for t in attempts if got and type(t[1]) is names.get(got)), attempts[0])


def _type_at(info: inspect.Type, place: Place) -> tuple[list[str], str]:
    """Return the values that the type at `place` allows, if it lists them, and the type's description or ""."""
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
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
