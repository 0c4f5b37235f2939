"""Free sizes of a model's inputs, and the model with numbers in their place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import onnx_ir as ir

from edgeq.errors import ModelError, UsageError, suggest

_SIZE = re.compile("0*[1-9][0-9]{0,17}")


def free_sizes(model: ir.Model) -> tuple[str, ...]:
    """What is not fixed in the shapes of the inputs, once each: the name of a size, "INPUT:AXIS" where it has none."""
    return tuple(dict.fromkeys(name for value in _inputs(model) for name in _free(value)))


def parse_sizes(texts: Iterable[str]) -> dict[str, int]:
    """Numbers by name from texts such as "N=1".

    Raises:
        UsageError: a text of another form.
    """
    found = {}
    for text in texts:
        name, _, size = text.rpartition("=")
        if not name or not _SIZE.fullmatch(size):
            raise UsageError(f"--fix {text!r} is not NAME=SIZE", "Write it as N=1")
        found[name.strip()] = int(size)
    return found


def fix_sizes(model: ir.Model, sizes: Mapping[str, int], source: Path) -> None:
    """Put numbers in the place of free sizes, in place; shapes of other tensors follow where they name the same sizes.

    Args:
        sizes: number by name, as `free_sizes` has it.
        source: the model's file, for messages.

    Raises:
        UsageError: a name that no free size has; with the nearest.
    """
    known = free_sizes(model)
    unknown = next((name for name in sizes if name not in known), None)
    if unknown is not None:
        fix = suggest(unknown, known) if known else "Leave --fix out: every size is fixed already"
        raise UsageError(f"{source}: no input has a free size {unknown!r}", fix)
    for value in _inputs(model):
        assert value.shape is not None
        named = [f"{value.name}:{axis}" for axis in range(len(value.shape))]
        value.shape = ir.Shape([sizes.get(name, size) for name, size in zip(named, value.shape, strict=True)])
    for graph in model.graphs():
        for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
            if value.shape is not None:
                value.shape = ir.Shape([sizes.get(_symbol(size), size) for size in value.shape])


def require_fixed_sizes(model: ir.Model, source: Path, where: str) -> None:
    """Refuse a model whose inputs have free sizes.

    Args:
        where: what needs fixed ones, for the message.

    Raises:
        ModelError: names each, and the options that fix them.
    """
    free = free_sizes(model)
    if free:
        listed = ", ".join(free)
        batch = {
            next(_free(value), "") for value in _inputs(model) if value.shape and not isinstance(value.shape[0], int)
        }
        options = " ".join(f"--fix {name}={1 if name in batch else 'SIZE'}" for name in free)
        sized = "" if batch.issuperset(free) else ", the SIZE that your samples have"
        raise ModelError(
            f"{source}: {where} needs fixed sizes, and its inputs leave {listed} free", f"Give {options}{sized}"
        )


def _inputs(model: ir.Model) -> Iterator[ir.Value]:
    return (value for value in model.graph.inputs if not value.is_initializer() and value.shape is not None)


def _free(value: ir.Value) -> Iterator[str]:
    assert value.shape is not None
    for axis, size in enumerate(value.shape):
        if not isinstance(size, int):
            yield _symbol(size) or f"{value.name}:{axis}"


def _symbol(size: int | ir.SymbolicDim) -> str:
    return "" if isinstance(size, int) else str(size.value or "")
