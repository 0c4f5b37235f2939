"""Edit a graph in memory: add nodes and constants, replace values, rewrite nodes of a type."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.graph import MAIN_DOMAINS, is_op, maker, node_input
from edgeq.model.quant_params import QuantParams


class Editor:
    """Add constants and nodes to a graph.

    Attributes:
        model: the model to edit.
        graph: the graph of the model to edit, by default its main graph.
    """

    def __init__(self, model: ir.Model, graph: ir.Graph | None = None) -> None:
        self.model = model
        self.graph = graph if graph is not None else model.graph
        self._made: dict[tuple[str, bytes, str], ir.Value] = {}

    # Names must be unique in every scope, because a body sees the names of the graphs around it. The names are
    # collected only when the first new name is needed, because many passes find nothing to do.
    @functools.cached_property
    def _values(self) -> _Names:
        names = _Names()
        for scope in self.model.graphs():
            names.taken |= {value.name for value in scope.inputs} | set(scope.initializers)
            for node in scope:
                names.taken |= {v.name for v in (*node.inputs, *node.outputs) if v is not None}
        return names

    @functools.cached_property
    def _nodes(self) -> _Names:
        names = _Names()
        names.taken |= {node.name for scope in self.model.graphs() for node in scope}
        return names

    def constant(self, name: str, values: NDArray[Any] | ir.TensorProtocol) -> ir.Value:
        """Return a new initializer called `name`. If the name is taken, a number is appended. A second call with the
        same name and values returns the same initializer.
        """
        tensor = values if isinstance(values, ir.TensorProtocol) else ir.tensor(np.array(values, order="C"))
        texts = tensor.string_data() if isinstance(tensor, ir.StringTensor) else None
        # Texts have no bytes that could be hashed.
        content = tensor.tobytes() if texts is None else repr(texts).encode()
        key = (name, hashlib.sha256(content).digest(), f"{tensor.dtype}{list(tensor.shape)}")
        if key not in self._made:
            free = self.free_value_name(name)
            value = ir.Value(name=free, shape=_shape(tensor), type=ir.TensorType(tensor.dtype), const_value=tensor)
            self.graph.register_initializer(value)
            self._made[key] = value
        return self._made[key]

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        *,
        before: ir.Node | None = None,
        after: ir.Node | None = None,
        like: ir.Value | None = None,
        dtype: ir.DataType | None = None,
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
        output: str = "",
    ) -> ir.Value:
        """Insert a node with one output and return that output. If `name` is taken, a number is appended to the names
        of the node and the output.

        Args:
            output: name of the output, if it differs from the node's name.
            before, after: the node to insert before or after. Without either, the new node goes to the end.
            like: a value whose shape the output gets. The output also gets the value's type if `dtype` is not given.
            attributes: plain values, or `ir.Attr` objects, which are not changed.
        """
        (tensor,) = self.nodes(
            op_type, inputs, name, [output or name], before=before, after=after, attributes=attributes, domain=domain
        )
        if like is not None:
            tensor.shape, tensor.type = like.shape, like.type
        if dtype is not None:
            tensor.type = ir.TensorType(dtype)
        return tensor

    def nodes(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        outputs: Sequence[str],
        *,
        before: ir.Node | None = None,
        after: ir.Node | None = None,
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
    ) -> Sequence[ir.Value]:
        """Insert a node with several outputs and return them. Their types and shapes are not set. For the other
        arguments, see `node`.
        """
        # A model must import every domain that its nodes use.
        if domain not in MAIN_DOMAINS:
            self.model.opset_imports.setdefault(domain, 1)
        node = ir.Node(
            domain,
            op_type,
            list(inputs),
            attributes=[
                value if isinstance(value, ir.Attr) else ir.convenience.convert_attribute(key, value)
                for key, value in (attributes or {}).items()
            ],
            outputs=[ir.Value(name=self.free_value_name(output)) for output in outputs],
            name=self.free_node_name(name),
        )
        if before is not None:
            self.graph.insert_before(before, node)
        elif after is not None:
            self.graph.insert_after(after, node)
        else:
            self.graph.append(node)
        return node.outputs

    def quantize(self, source: ir.Value, params: QuantParams, name: str, *, before: ir.Node | None = None) -> ir.Value:
        """Insert a QuantizeLinear."""
        return self._converted("QuantizeLinear", source, params, name, params.dtype, before)

    def dequantize(
        self, source: ir.Value, params: QuantParams, name: str, *, before: ir.Node | None = None
    ) -> ir.Value:
        """Insert a DequantizeLinear to float32."""
        return self._converted("DequantizeLinear", source, params, name, ir.DataType.FLOAT, before)

    def _converted(
        self,
        op_type: str,
        source: ir.Value,
        params: QuantParams,
        name: str,
        dtype: ir.DataType,
        successor: ir.Node | None,
    ) -> ir.Value:
        inputs = [source, *self.parameters(params, name)]
        attributes = {"axis": params.axis} if params.per_channel or params.block else {}
        if params.block:
            attributes["block_size"] = params.block
        return self.node(op_type, inputs, name, before=successor, like=source, dtype=dtype, attributes=attributes)

    def parameters(self, params: QuantParams, name: str) -> tuple[ir.Value, ir.Value]:
        """Return the scale (float32) and the zero point as initializers. Both are scalars unless `params` is
        per-channel, because some operators require scalars.
        """
        scale = params.scale.astype(np.float32)
        zero = np.broadcast_to(params.zero_point.astype(params.dtype.numpy()), scale.shape)
        if not params.per_channel:
            scale, zero = scale.reshape(()), zero.reshape(())
        zeros = ir.tensor(np.array(zero, order="C"), dtype=params.dtype)
        return self.constant(f"{name}/scale", scale), self.constant(f"{name}/zero_point", zeros)

    def set_input(self, node: ir.Node, place: int, values: NDArray[Any], name: str) -> None:
        """Make `values` a constant input of a node. If that input is an initializer that no other node reads, its
        values are replaced and its element type stays. Otherwise the input becomes a new initializer called `name`. If
        the name is taken, a number is appended.
        """
        old = node_input(node, place)
        # A tensor that others read must keep its values for them.
        if old is not None and old.is_initializer() and len(old.uses()) == 1 and not old.is_graph_output():
            set_constant(old, values)
            return
        if place >= len(node.inputs):
            node.resize_inputs(place + 1)
        node.replace_input_with(place, self.constant(name, values))

    def free_value_name(self, name: str) -> str:
        """Return `name`, with a number appended if a tensor already has this name, and reserve the result."""
        return self._values.free(name)

    def free_node_name(self, name: str) -> str:
        """Return `name`, with a number appended if a node already has this name, and reserve the result."""
        return self._nodes.free(name)


def replace_value(old: ir.Value, new: ir.Value, *, keep_name: bool = False) -> None:
    """Replace `old` by `new` everywhere. If `old` is a graph output or `keep_name` is True, `new` takes over the name
    of `old`, and also its type and shape if they are known.
    """
    # Names of outputs are part of the model's interface.
    if keep_name or old.is_graph_output():
        name = old.name
        old.name, new.name = f"{name}/replaced", name
        new.shape = old.shape if old.shape is not None else new.shape
        new.type = old.type if old.type is not None else new.type
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def replace_node(node: ir.Node, result: ir.Value) -> None:
    """Replace the first output of a node by `result` everywhere, and remove the node. `result` takes over the output's
    name.
    """
    assert node.graph is not None, node.name
    replace_value(node.outputs[0], result, keep_name=True)
    node.graph.remove(node, safe=True)


def rewrite_nodes(model: ir.Model, rewrite: Callable[[ir.Node, Editor], bool], *op_types: str) -> int:
    """Rewrite the nodes of the given types in every graph of a model, in place. The order is that of the graph: when
    `rewrite` gets a node, the nodes before it have already been rewritten.

    Returns:
        The number of nodes for which `rewrite` returned True.
    """
    count = 0
    for graph in model.graphs():
        editor = Editor(model, graph)
        count += sum(rewrite(node, editor) for node in list(graph) if is_op(node, *op_types))
    return count


def insert_behind(value: ir.Value, head: ir.Value, tail: ir.Value, name: str) -> None:
    """Replace `value` everywhere by `tail`, which is computed from `value`. `tail` takes over the name, type and shape.

    Args:
        head: output of the node that reads `value` and leads to `tail`. This node still reads `value` afterwards.
        name: new name of `value`.
    """
    replace_value(value, tail, keep_name=True)
    reader = maker(head)
    reader.replace_input_with(reader.inputs.index(tail), value)
    value.name, value.type, value.shape = name, None, None


def drop_unused_initializers(graph: ir.Graph) -> None:
    """Remove the initializers that no node reads, unless they are inputs or outputs of the graph."""
    # A copy of the items, because the loop deletes from the dict.
    for name, value in tuple(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
            del graph.initializers[name]


def set_constant(value: ir.Value, values: NDArray[Any]) -> None:
    """Give an initializer new values and the shape of these values. Its element type stays."""
    assert value.dtype is not None
    tensor = ir.tensor(np.array(values.astype(value.dtype.numpy()), order="C"), dtype=value.dtype, name=value.name)
    value.const_value = tensor
    value.shape = _shape(tensor)


def _shape(tensor: ir.TensorProtocol) -> ir.Shape:
    # A tensor's sizes are numbers, although the interface also allows symbols.
    return ir.Shape(list(tensor.shape))  # type: ignore[arg-type]


class _Names:
    """Remember which names are taken. A count for each name avoids quadratic time if thousands of nodes want the same
    name.
    """

    def __init__(self) -> None:
        self.taken: set[str | None] = set()
        self._counts: dict[str, int] = {}

    def free(self, name: str) -> str:
        """Return `name`, with the next free number appended if it is taken, and reserve the result."""
        count = self._counts.get(name, 0)
        free = f"{name}_{count}" if count else name
        while free in self.taken:
            count += 1
            free = f"{name}_{count}"
        self._counts[name] = count
        self.taken.add(free)
        return free
