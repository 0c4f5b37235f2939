"""Find the oldest onnxruntime release that can run a model, from its opset, its IR version, and the types of its
operators. The releases in the table were tested (targets/onnxruntime/versions.toml, filled by
scripts/probe_runtime.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import onnx_ir as ir
from edgeq_device.engines.catalog import parse_version

from edgeq.errors import HardwareError, ModelError
from edgeq.model.graph import every_node, node_input, operator_of, opset_of
from edgeq.model.integer_products import integer_products
from edgeq.util.folders import shipped
from edgeq.util.record_files import read_toml, toml_table

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
        requirement = self.requirements[0]
        if self.runs_on(version):
            return f"onnxruntime {version} is new enough: {requirement.what} needs {requirement.since} or newer"
        return f"onnxruntime {version} is too old: {requirement.what} needs {requirement.since} or newer"

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
    # An architecture that was not probed borrows the figures of the first one, and `probed` says so.
    like = architecture if architecture in versions.probed else next(iter(versions.probed))
    opset = opset_of(model) or 1
    requirements = [
        Requirement(f"opset {opset}", _find_oldest(versions.opset[like], opset, "opset")),
        Requirement(f"IR version {model.ir_version}", _find_oldest(versions.ir[like], model.ir_version, "IR version")),
    ]
    for kernel in dict.fromkeys(_kernels(model)):
        since = versions.kernels[like].get(kernel)
        # The empty text stands for a kernel that no probed release has.
        if since == "":
            raise ModelError(f"no probed onnxruntime has a kernel for {kernel}", "Choose other integer types")
        if since:
            requirements.append(Requirement(kernel, since))
    requirements.sort(key=lambda r: parse_version(r.since), reverse=True)
    return Compatibility(tuple(requirements), architecture == like, integer_products(model))


def _kernels(model: ir.Model) -> Iterator[str]:
    """Yield the kernels of a model's operators, in the form of the table: the operator and its integer types."""
    for node in every_node(model):
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
            yield f"{node.op_type} {node.attributes.get_int('bits', 4)}"
        elif groups := _type_groups(node):
            kinds = [_short_type(group) for group in groups]
            contrib = " contrib" if node.op_type == "DequantizeLinear" and node.domain else ""
            if all(kinds):
                yield f"{node.op_type} {''.join(kinds)}{contrib}"


def _type_groups(node: ir.Node) -> list[tuple[ir.Value | None, ...]]:
    """Return groups of values that determine the kernel of an integer operator; [] for other operators. Each group
    determines one type in the kernel's name, in this order.

    The type is that of the first constant in the group: the integers, or their zero point, which has the same type.
    Without a constant the type is unsigned, because DynamicQuantizeLinear returns unsigned integers. If the operator
    has no weights, only its first integer input matters.
    """
    row = operator_of(node)
    # QuantizeLinear and similar operators only write integers, so their output decides.
    if not row.integers:
        return [(node_input(node, row.integer_output[1]),)] if row.integer_output else []
    inputs = row.integers if row.weights else row.integers[:1]
    return [(node_input(node, places.value), node_input(node, places.zero_point)) for places in inputs]


def _short_type(values: tuple[ir.Value | None, ...]) -> str:
    """Return the short name of the type of the first constant among `values`, or "u8" if none is constant. Return ""
    for a type that does not occur in names of kernels, such as the int32 of a bias.
    """
    types = [value.dtype for value in values if value is not None and value.is_initializer()]
    return _SHORT.get(types[0], "") if types else "u8"


def _find_oldest(highest_by_release: Mapping[str, int], number: int, noun: str) -> str:
    # From the oldest release on, because the oldest sufficient one is asked for.
    for version, highest in sorted(highest_by_release.items(), key=lambda item: parse_version(item[0])):
        if highest >= number:
            return version
    raise ModelError(f"no probed onnxruntime reads {noun} {number}", "Convert the model to an older one")


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
