"""Provide `{schema} NAMES...`, a table of the keys that a TOML table may contain, from the record types that read it.

The first name is the type. If its docstring does not describe a key, the docstrings of the other names are searched in
their order.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docutils import nodes
from msgspec import Meta
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "anything"}


def named(path: str) -> Any:
    """Return the object that a dotted name refers to."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def kind(hint: Any) -> str:
    """Return an annotation in words."""
    if hasattr(hint, "__metadata__"):
        said = [meta.description for meta in hint.__metadata__ if isinstance(meta, Meta) and meta.description]
        return said[0] if said else kind(hint.__origin__)
    origin, arguments = get_origin(hint), [a for a in get_args(hint) if a not in (type(None), ...)]
    if origin is Literal:
        return ", ".join(f"`{a}`" for a in arguments)
    if origin in (Union, types.UnionType):
        # An int where a float may stand is a number.
        return " or ".join(dict.fromkeys(kind(a) for a in arguments if not (a is int and float in arguments)))
    if origin in (tuple, list, frozenset):
        return f"list of {kind(arguments[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"table of {kind(arguments[1])}"
    return "table, below" if dataclasses.is_dataclass(hint) else NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def meanings(record: type) -> dict[str, str]:
    """Return key → its description in the "Attributes" of the docstring."""
    text = (record.__doc__ or "").partition("Attributes:")[2]
    rows = re.findall(r"^ {8}(\w[\w, ]*): (.*(?:\n {12}.*)*)", text, re.MULTILINE)
    return {key.strip(): " ".join(said.split()) for keys, said in rows for key in keys.split(",")}


def default(field: dataclasses.Field[Any]) -> str:
    """Return the default of a key, or "" if it has none."""
    value = field.default if field.default is not dataclasses.MISSING else None
    return f"`{value}`" if isinstance(value, str | int | float) and value != "" else ""


def table(record: type, others: list[type]) -> str:
    """Return a Markdown table: key, type, default, meaning."""
    hints = get_type_hints(record, include_extras=True)
    said: dict[str, str] = {}
    for source in (*reversed(others), record):
        said |= meanings(source)
    rows = [(f.name, kind(hints[f.name]), default(f), said.get(f.name, "")) for f in dataclasses.fields(record)]
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, *cells in rows:
        lines.append("| `" + name + "` | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


class Schema(SphinxDirective):
    """Insert the table of one record type."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the nodes; Sphinx calls this."""
        record, *others = [named(path) for path in self.arguments[0].split()]
        return self.parse_text_to_nodes(table(record, others))


class Steps(SphinxDirective):
    """Insert the fields of every registered preprocessing step."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes; Sphinx calls this."""
        from edgeq.data.steps import find_step
        from edgeq.util.registry import STEPS

        lines = ["| `op` | keys (default) | does |", "|---|---|---|"]
        for name in STEPS.names():
            step = find_step(name)
            keys = [f"`{f.name}`" + (f" ({d})" if (d := default(f)) else "") for f in dataclasses.fields(step)]
            summary = " ".join((step.__doc__ or "").partition("\n\n")[0].split())
            lines.append(f"| `{name}` | {', '.join(keys)} | {summary} |".replace("\\|", "|"))
        return self.parse_text_to_nodes("\n".join(lines))


class MeasuredBoards(SphinxDirective):
    """Insert the table of the reports in targets/measured."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes; Sphinx calls this."""
        from edgeq.hardware.measured import draw_table, load_reports
        from edgeq.util.folders import shipped

        return self.parse_text_to_nodes("\n".join(draw_table(load_reports((shipped("targets"),)))))


class PublicInterface(SphinxDirective):
    """Insert every public name with its docstring, within `{eval-rst}`."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes; Sphinx calls this."""
        import edgeq

        lines = []
        for name in edgeq.__all__:
            value = getattr(edgeq, name)
            if isinstance(value, type):
                lines += [f".. autoclass:: edgeq.{name}", "   :members:", ""]
            elif callable(value):
                lines += [f".. autofunction:: edgeq.{name}", ""]
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the directives to Sphinx."""
    app.add_directive("schema", Schema)
    app.add_directive("preprocessing-steps", Steps)
    app.add_directive("measured-boards", MeasuredBoards)
    app.add_directive("public-interface", PublicInterface)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
