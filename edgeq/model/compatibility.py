"""Find the oldest onnxruntime release that can run a model, from its opset, its IR version, and the types of its
operators. The releases in the table were tested (targets/onnxruntime/versions.toml, filled by
scripts/probe_runtime.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import onnx_ir as ir
from edgeq_device.engines.catalog import parse_version

from edgeq.errors import HardwareError, ModelError, UsageError, suggest
from edgeq.model.graph import every_node, node_input, operator_of, opset_of
from edgeq.model.products import integer_products
from edgeq.util.records import read_toml, toml_table
from edgeq.util.registry import shipped

_SHORT: dict[ir.DataType | None, str] = {
    ir.DataType.UINT8: "u8",
    ir.DataType.INT8: "s8",
    ir.DataType.UINT16: "u16",
    ir.DataType.INT16: "s16",
    ir.DataType.UINT4: "u4",
    ir.DataType.INT4: "s4",
}


@dataclass(frozen=True)
class Requirement:
    """Describe one feature of a model, and the oldest probed release that supports it."""

    what: str
    since: str


@dataclass(frozen=True)
class Compatibility:
    """Describe what a model requires of onnxruntime.

    Attributes:
        requirements: the model's requirements, the most demanding first.
        probed: whether releases were probed on the architecture. If not, the figures are those of another architecture.
        products: kinds of integer products in the model. They identify the releases whose kernels compute wrong results
            for this model.
    """

    requirements: tuple[Requirement, ...]
    probed: bool
    products: tuple[str, ...] = ()

    @property
    def minimum(self) -> str:
        """Return the oldest probed release that supports everything in the model."""
        return self.requirements[0].since

    def runs_on(self, version: str) -> bool:
        """Return whether a release such as "1.24.1" is `minimum` or newer. The patch number does not matter."""
        return parse_version(version) >= parse_version(self.minimum)

    def explain(self, version: str) -> str:
        """Return one line that states whether the model runs on `version`, and why."""
        needed = self.requirements[0]
        if self.runs_on(version):
            return f"onnxruntime {version} is new enough: {needed.what} needs {needed.since} or newer"
        return f"onnxruntime {version} is too old: {needed.what} needs {needed.since} or newer"

    def __record__(self) -> dict[str, Any]:
        return {
            "min_onnxruntime": self.minimum,
            "probed": self.probed,
            "requirements": self.requirements,
        }


@dataclass(frozen=True)
class _Versions:
    """Hold the content of versions.toml. For each architecture it lists the probed releases, the highest opset and IR
    version that each release supports, and the first release that has each kernel ("" if none has it).
    """

    probed: Mapping[str, tuple[str, ...]]
    opset: Mapping[str, Mapping[str, int]]
    ir: Mapping[str, Mapping[str, int]]
    kernels: Mapping[str, Mapping[str, str]]


def compatibility(model: ir.Model, architecture: str = "") -> Compatibility:
    """Return what `model` requires of onnxruntime on `architecture`. Of the external data, only int8 weights are read.

    Raises:
        ModelError: no probed release supports something in the model.
    """
    versions = _versions()
    like = architecture if architecture in versions.probed else next(iter(versions.probed))
    opset = opset_of(model) or 1
    found = [
        Requirement(f"opset {opset}", _since(versions.opset[like], opset, "opset")),
        Requirement(f"IR version {model.ir_version}", _since(versions.ir[like], model.ir_version, "IR version")),
    ]
    for kernel in dict.fromkeys(_kernels(model)):
        since = versions.kernels[like].get(kernel)
        if since == "":
            raise ModelError(f"no probed onnxruntime has a kernel for {kernel}", "Choose other integer types")
        if since:
            found.append(Requirement(kernel, since))
    found.sort(key=lambda r: parse_version(r.since), reverse=True)
    return Compatibility(tuple(found), architecture == like, integer_products(model))


def _kernels(model: ir.Model) -> Iterator[str]:
    """Yield the kernels of a model's operators, in the form of the table: the operator and its integer types."""
    for node in every_node(model):
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
            yield f"{node.op_type} {node.attributes.get_int('bits', 4)}"
        elif groups := _typed_by(node):
            kinds = [_short_type(group) for group in groups]
            contrib = " contrib" if node.op_type == "DequantizeLinear" and node.domain else ""
            if all(kinds):
                yield f"{node.op_type} {''.join(kinds)}{contrib}"


def _typed_by(node: ir.Node) -> list[tuple[ir.Value | None, ...]]:
    """Return groups of values that determine the kernel of an integer operator; [] for other operators. Each group
    determines one type in the kernel's name, in this order.

    The type is that of the first constant in the group: the integers, or their zero point, which has the same type.
    Without a constant the type is unsigned, because DynamicQuantizeLinear returns unsigned integers. If the operator
    has no weights, only its first integer input matters.
    """
    row = operator_of(node)
    if not row.integers:
        return [(node_input(node, row.integer_output[1]),)] if row.integer_output else []
    read = row.integers if row.weights else row.integers[:1]
    return [(node_input(node, places.value), node_input(node, places.zero_point)) for places in read]


def _short_type(values: tuple[ir.Value | None, ...]) -> str:
    """Return the short name of the type of the first constant among `values`, or "u8" if none is constant. Return ""
    for a type that does not occur in names of kernels, such as the int32 of a bias.
    """
    known = [value.dtype for value in values if value is not None and value.is_initializer()]
    return _SHORT.get(known[0], "") if known else "u8"


def _since(known: Mapping[str, int], wanted: int, what: str) -> str:
    for version, highest in sorted(known.items(), key=lambda item: parse_version(item[0])):
        if highest >= wanted:
            return version
    raise ModelError(f"no probed onnxruntime reads {what} {wanted}", "Convert the model to an older one")


def wrong_table() -> str:
    """Return the content of `edgeq_device/engines/known_wrong.json`. On devices, this file lists the releases with
    wrong kernels.
    """
    content = toml_table(shipped("targets") / "onnxruntime" / "known_wrong.toml", HardwareError, "Correct the file")
    return json.dumps(content["wrong"], indent=1) + "\n"


@cache
def _versions() -> _Versions:
    file = shipped("targets") / "onnxruntime" / "versions.toml"
    return read_toml(file, _Versions, HardwareError, "Correct the file")


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
        where: name of the target or tool that needs fixed sizes, for the message.

    Raises:
        ModelError: some sizes are free; the message names each size and the options that fix it.
    """
    free = free_sizes(model)
    if free:
        listed = ", ".join(free)
        batch = {
            next(_free(value), "") for value in _inputs(model) if value.shape and not isinstance(value.shape[0], int)
        }
        options = " ".join(f"--fix {name}={1 if name in batch else 'SIZE'}" for name in free)
        sized = "" if batch.issuperset(free) else ", with the SIZE of your samples"
        raise ModelError(
            f"{source}: {where} needs fixed sizes, but its inputs leave {listed} free", f"Give {options}{sized}"
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
