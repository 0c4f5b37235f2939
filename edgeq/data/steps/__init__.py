"""Find the preprocessing steps by name, and make a step from a table or from one line of text.

Each file holds the steps of one idea. `edgeq.util.registry.STEPS` lists their classes. Plug-ins add steps through an
entry point.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from edgeq.data.step import Step, from_table, table_of_text
from edgeq.errors import DataError
from edgeq.util.registry import STEPS, Registry

REGISTRY: Registry[type[Step]] = Registry(
    STEPS,
    lambda candidate: isinstance(candidate, type) and issubclass(candidate, Step) and is_dataclass(candidate),
    "dataclass that derives from edgeq.data.step.Step",
)


def is_step(op: str) -> bool:
    """Return whether a step has that name or alias."""
    return op in REGISTRY.names() or any(op in step.aliases for _, step in REGISTRY.items())


def find_step(op: str) -> type[Step]:
    """Return the class of a step by its name or an alias.

    Raises:
        DataError: no step has that name.
    """
    if op not in REGISTRY.names():
        for _, step in REGISTRY.items():
            if op in step.aliases:
                return step
    return REGISTRY.load(op)


def build_step(value: Any) -> Step:
    """Return the step that a table {op = NAME, …} describes.

    Raises:
        DataError: a step or field is unknown, or a field's value is not valid.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("op"), str):
        raise DataError(f"a step is {value!r}", "Write it as {op = 'resize', size = 256}")
    table = dict(value)
    op = table.pop("op")
    return from_table(find_step(op), op, table)


def parse_step(op: str, text: str) -> Step:
    """Return the step that the text form "op=text" describes. `text` consists of parts joined by ":".

    Raises:
        DataError: for the same reasons as in `build_step`.
    """
    step = find_step(op)
    # A colon inside [a:b] does not end a part.
    parts = [part for part in re.split(r":(?![^\[]*\])", text) if part]
    return from_table(step, op, table_of_text(step, op, parts))
