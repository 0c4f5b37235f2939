"""Combine a float and a quantized model into a quantized model with some nodes in float.

This needs no backend, so it works for files of any quantizer. The nodes are taken from the float model, with their
weights. A tensor between two of these nodes stays float unless another node also reads it. A tensor from any other node
is read in its quantized form. So the result computes the same values, up to rounding, as a build that excludes these
nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from edgeq.measure.match_activations import ActivationMatch
from edgeq.model.edit import Editor, replace_value
from edgeq.model.graph import GraphIndex, bodies, consumers, name_of
from edgeq.model.sessions import Loadable

_FLOAT_TYPES = (None, ir.DataType.FLOAT)


def keep_nodes_float(
    float_graph: GraphIndex, quantized_graph: GraphIndex, matches: Sequence[ActivationMatch], nodes: Collection[str]
) -> Loadable | None:
    """Return a quantized model in which the float model's nodes `nodes` compute in float.

    Nodes that are fused with one of them in the quantized model also become float. Return None for nodes with bodies,
    for tensors without a counterpart, and for a model that computes in a type other than float32.
    """
    by_name = {match.name: match for match in matches}
    region = _close_region(float_graph, quantized_graph, by_name, nodes)
    if region is None:
        return None
    model = quantized_graph.model.clone()
    splicer = _Splicer(float_graph, GraphIndex(model), by_name, region)
    for node in (node for node in float_graph.graph if node.name in region):
        splicer.add(node)
    # The float nodes were appended after the nodes that read them.
    model.graph.sort()
    return Loadable.of(model).only(name_of(value) for value in model.graph.outputs)


def _close_region(
    float_graph: GraphIndex, quantized_graph: GraphIndex, matches: Mapping[str, ActivationMatch], nodes: Collection[str]
) -> frozenset[str] | None:
    """Return `nodes`, and all nodes that cannot be separated from them in the quantized model. Return None if the whole
    set cannot be separated from the rest.
    """
    # The region grows until each tensor at its border has a counterpart in the quantized model.
    region, waiting = set(nodes), list(nodes)
    while waiting:
        node = float_graph.nodes.get(waiting.pop())
        # Bodies read tensors of the graph by name, which the connections below do not cover.
        if node is None or list(bodies(node)) or set(map(name_of, node.outputs)) & float_graph.captured:
            return None
        neighbours: list[ir.Node | None] = []
        for value in filter(None, node.inputs):
            # Tensors that are not floats (a shape, an index, a mask) are the same in the quantized model.
            as_it_is = name_of(value) in quantized_graph.values and value.dtype not in _FLOAT_TYPES
            if name_of(value) not in matches and not value.is_initializer() and not as_it_is:
                neighbours.append(value.producer())
        for value in node.outputs:
            match = matches.get(name_of(value))
            if match is None:
                neighbours.extend([None] if value.is_graph_output() else [reader for reader, _ in consumers(value)])
            elif quantized_graph.values[match.computed].dtype not in _FLOAT_TYPES and not match.integer:
                return None
        for neighbour in neighbours:
            # The border has reached an input or output of the model, which no node can join.
            if neighbour is None:
                return None
            if neighbour.name not in region:
                region.add(neighbour.name or "")
                waiting.append(neighbour.name or "")
    return frozenset(region)


class _Splicer:
    def __init__(
        self,
        float_graph: GraphIndex,
        quantized: GraphIndex,
        matches: Mapping[str, ActivationMatch],
        region: frozenset[str],
    ) -> None:
        self._float_graph, self._matches, self._region = float_graph, matches, region
        self._values, self._editor = dict(quantized.values), Editor(quantized.model)
        self._outputs = frozenset(quantized.outputs)
        self._float_values: dict[str, ir.Value | None] = {}

    def add(self, node: ir.Node) -> None:
        """Add a node of the float model and connect the nodes that read its outputs. If the node reads outputs of other
        nodes of the region, those nodes must have been added before.
        """
        inputs = [None if value is None else self._find_value(value) for value in node.inputs]
        names = [name_of(output) for output in node.outputs]
        outputs = self._editor.nodes(
            node.op_type,
            inputs,
            f"{node.name}/float",
            [f"{name}/float" if name else "" for name in names],
            attributes=dict(node.attributes),
            domain=node.domain,
        )
        for name, old, new in zip(names, node.outputs, outputs, strict=True):
            new.type, new.shape = old.type, old.shape
            if name:
                self._float_values[name] = self._handed_over(name, new)

    def _find_value(self, value: ir.Value) -> ir.Value | None:
        name = name_of(value)
        if name in self._float_values:
            return self._float_values[name]
        if value.is_initializer() and not value.is_graph_input() and value.const_value is not None:
            return self._editor.constant(f"{name}/float", value.const_value)
        match = self._matches.get(name)
        if match is None:
            return self._values[name]
        computed = self._values[match.computed]
        # A build without these nodes does not quantize an input that only they read.
        alone = match.is_input and self._all_inside(name)
        return computed if alone else self._rounded(match, computed)

    def _handed_over(self, name: str, new: ir.Value) -> ir.Value:
        """Let nodes outside the region read `new` in place of the old tensor, as integers if the old tensor contains
        integers. Return the value that nodes inside the region read.
        """
        match = self._matches.get(name)
        if match is None:
            return new
        if self._all_inside(name):
            if name in self._outputs:
                replace_value(self._values[name], new)
            return new
        old = self._values[match.computed]
        if match.integer and match.params is not None:
            integers = self._editor.quantize(new, match.params, f"{name}/integers")
            replace_value(old, integers)
            return self._editor.dequantize(integers, match.params, f"{name}/rounded")
        replace_value(old, new)
        return self._rounded(match, new)

    def _rounded(self, match: ActivationMatch, value: ir.Value) -> ir.Value:
        """Return the float values that the readers of a quantized tensor get in the quantized model."""
        if match.params is None:
            return value
        if not match.integer:
            value = self._editor.quantize(value, match.params, f"{match.name}/integers")
        return self._editor.dequantize(value, match.params, f"{match.name}/rounded")

    def _all_inside(self, name: str) -> bool:
        readers = [reader.name for reader, _ in consumers(self._float_graph.values[name])]
        return all(reader in self._region for reader in readers) and name not in self._float_graph.captured
