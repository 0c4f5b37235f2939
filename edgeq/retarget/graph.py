"""The main graph of a quantized model, with what every rewrite asks of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

MICROSOFT = "com.microsoft"
LIMITS = {"uint8": (0, 255), "int8": (-128, 127)}
INTEGERS = {"uint8": ir.DataType.UINT8, "int8": ir.DataType.INT8}
MAIN = ("", "ai.onnx")


@dataclass(frozen=True, eq=False)
class Params:
    """Scale and zero point of a QuantizeLinear or DequantizeLinear.

    Attributes:
        scale: float32, scalar or one per channel.
        zero_point: of the integer type, shaped as the scale.
        axis: the channel axis.
    """

    scale: NDArray[np.float32]
    zero_point: NDArray[Any]
    axis: int

    @property
    def dtype(self) -> str:
        return str(self.zero_point.dtype)

    @property
    def scalar(self) -> bool:
        return self.scale.size == 1

    def same(self, other: Params) -> bool:
        """Whether two tensors' integers mean the same numbers."""
        return (
            self.dtype == other.dtype
            and np.array_equal(self.scale.reshape(-1), other.scale.reshape(-1))
            and np.array_equal(self.zero_point.reshape(-1), other.zero_point.reshape(-1))
        )

    def quantize(self, values: NDArray[Any]) -> NDArray[Any]:
        """q = saturate(round_half_even(x / scale) + zero_point), as QuantizeLinear has it."""
        low, high = np.iinfo(self.zero_point.dtype).min, np.iinfo(self.zero_point.dtype).max
        scale, zero = self.spread(values.ndim)
        with np.errstate(over="ignore"):  # an infinity saturates as well
            levels = np.rint(values.astype(np.float32) / scale) + zero.astype(np.float32)
        integers: NDArray[Any] = np.clip(levels, low, high).astype(self.zero_point.dtype)
        return integers

    def spread(self, rank: int) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """Scale and zero point shaped to broadcast against a tensor of this rank."""
        if self.scalar:
            return self.scale.reshape(()), self.zero_point.reshape(-1)[:1].reshape(())
        shape = [1] * rank
        shape[self.axis % rank] = -1
        return self.scale.reshape(shape), np.broadcast_to(self.zero_point, self.scale.shape).reshape(shape)


def constant_of(value: ir.Value | None) -> NDArray[Any] | None:
    """A weight's values; None for anything else."""
    if value is None or not value.is_initializer() or value.is_graph_input():
        return None
    if value.const_value is None:
        return None
    values: NDArray[Any] = value.const_value.numpy()
    return values


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Whether a node is one of these operators of ONNX itself, or for Q/DQ of ONNX Runtime's copy of them."""
    if node is None or node.op_type not in op_types:
        return False
    return node.domain in MAIN or node.op_type in ("QuantizeLinear", "DequantizeLinear")


def params_of(node: ir.Node) -> Params | None:
    """Parameters of a Q or DQ node, or None where they are not constant or not of 8 bits (32 for a bias)."""
    return read_params(node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None, axis_of(node))


def axis_of(node: ir.Node) -> int:
    return int(node.attributes.get_int("axis", 1))


def read_params(scale: ir.Value | None, zero_point: ir.Value | None, axis: int) -> Params | None:
    numbers, zeros = constant_of(scale), constant_of(zero_point)
    if numbers is None or zeros is None or str(zeros.dtype) not in (*LIMITS, "int32"):
        return None
    return Params(numbers.astype(np.float32), zeros, axis)


class Builder:
    """Adds constants and nodes to a graph under names that are free."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.graph = model.graph
        self._taken = {
            v.name for node in self.graph.all_nodes() for v in (*node.inputs, *node.outputs) if v is not None
        }
        self._taken |= {v.name for v in self.graph.inputs} | set(self.graph.initializers)
        self._names = {node.name for node in self.graph.all_nodes()}
        self._made: dict[tuple[str, bytes, str], ir.Value] = {}

    def constant(self, name: str, values: NDArray[Any]) -> ir.Value:
        """A weight; the same one again for the same name and values."""
        array = np.array(values, order="C")
        key = (name, array.tobytes(), f"{array.dtype}{array.shape}")
        if key not in self._made:
            free = self._free(name, self._taken)
            tensor = ir.tensor(array, name=free)
            value = ir.Value(
                name=free, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
            )
            self.graph.register_initializer(value)
            self._made[key] = value
        return self._made[key]

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        *,
        before: ir.Node,
        like: ir.Value | None = None,
        dtype: ir.DataType | None = None,
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
    ) -> ir.Value:
        """Insert a node with one output, shaped like `like`; gives that output."""
        if domain == MICROSOFT:
            self.model.opset_imports.setdefault(MICROSOFT, 1)
        output = ir.Value(name=self._free(name, self._taken), shape=like.shape if like is not None else None)
        if dtype is not None:
            output.type = ir.TensorType(dtype)
        made = ir.Node(
            domain,
            op_type,
            list(inputs),
            attributes=[
                value if isinstance(value, ir.Attr) else ir.convenience.convert_attribute(key, value)
                for key, value in (attributes or {}).items()
            ],
            outputs=[output],
            name=self._free(name, self._names),
        )
        self.graph.insert_before(before, made)
        return output

    def quantize(self, source: ir.Value, params: Params, name: str, *, before: ir.Node) -> ir.Value:
        scale, zero = self.parameters(params, name)
        kind = INTEGERS[params.dtype]
        return self.node("QuantizeLinear", [source, scale, zero], name, before=before, like=source, dtype=kind)

    def dequantize(self, source: ir.Value, params: Params, name: str, *, before: ir.Node) -> ir.Value:
        scale, zero = self.parameters(params, name)
        attributes = {} if params.scalar else {"axis": params.axis}
        return self.node(
            "DequantizeLinear",
            [source, scale, zero],
            name,
            before=before,
            like=source,
            dtype=ir.DataType.FLOAT,
            attributes=attributes,
        )

    def parameters(self, params: Params, name: str) -> tuple[ir.Value, ir.Value]:
        """Scale and zero point as constants; scalars where there is one of each, which some operators insist on."""
        scale, zero = params.scale, params.zero_point
        if params.scalar:
            scale, zero = scale.reshape(()), zero.reshape(-1)[0]
        return self.constant(f"{name}/scale", scale), self.constant(f"{name}/zero_point", zero)

    def _free(self, name: str, taken: set[str | None]) -> str:
        free, count = name, 0
        while free in taken:
            count += 1
            free = f"{name}_{count}"
        taken.add(free)
        return free


def replace(old: ir.Value, new: ir.Value) -> None:
    """Let `new` stand wherever `old` stood; as a graph output it takes over the name."""
    if old.is_graph_output():
        name = old.name
        old.name = f"{name}/replaced"
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        new.name = name
        new.shape = old.shape if old.shape is not None else new.shape
        new.type = old.type if old.type is not None else new.type
    else:
        old.replace_all_uses_with(new)


def only_user(value: ir.Value) -> ir.Node | None:
    """The one node that reads a value, once, in the main graph; None where there is another or none."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    return uses[0].node
