"""Find and fix the free sizes of a model's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx_ir as ir

from edgeq.errors import ModelError, UsageError, suggest


def free_sizes(model: ir.Model) -> tuple[str, ...]:
    """Return the free sizes of the inputs, each once. A size is named by its symbol, or by "INPUT:AXIS" if it has
    none.
    """
    return tuple(dict.fromkeys(name for value in _inputs(model) for name in _free(value)))


def fix_sizes(model: ir.Model, sizes: Mapping[str, int], source: Path) -> None:
    """Replace free sizes of the inputs by numbers, in place. Shapes of other tensors change too if they use the same
    symbols.

    Args:
        sizes: number for each name from `free_sizes`.
        source: the model's file, for messages.

    Raises:
        UsageError: a name does not belong to any free size; the message suggests the nearest name.
    """
    free = free_sizes(model)
    unknown = next((name for name in sizes if name not in free), None)
    if unknown is not None:
        fix = suggest(unknown, free) if free else "Leave ⟨fix⟩ out: every size is fixed already"
        raise UsageError(f"{source}: no input has a free size {unknown!r}", fix)
    for value in _inputs(model):
        assert value.shape is not None
        named = [f"{value.name}:{axis}" for axis in range(len(value.shape))]
        value.shape = ir.Shape([sizes.get(name, size) for name, size in zip(named, value.shape, strict=True)])
    for graph in model.graphs():
        for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
            if value.shape is not None:
                value.shape = ir.Shape([sizes.get(_symbol(size), size) for size in value.shape])


def require_fixed_sizes(model: ir.Model, source: Path, consumer: str) -> None:
    """Refuse a model whose inputs have free sizes.

    Args:
        consumer: name of the target or tool that needs fixed sizes, for the message.

    Raises:
        ModelError: some sizes are free; the message names each size and the options that fix it.
    """
    free = free_sizes(model)
    if free:
        listed = ", ".join(free)
        batch = {
            next(_free(value), "") for value in _inputs(model) if value.shape and not isinstance(value.shape[0], int)
        }
        options = " ".join(f"⟨fix⟩ {name}={1 if name in batch else 'SIZE'}" for name in free)
        sized = "" if batch.issuperset(free) else ", with the SIZE of your samples"
        raise ModelError(
            f"{source}: {consumer} needs fixed sizes, but its inputs leave {listed} free", f"Give {options}{sized}"
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
