"""Remove conversions between memory layouts from an optimised graph.

- ONNX Runtime computes convolutions in a blocked channel layout if that is faster on the CPU. If an inner tensor is
  fetched, ONNX Runtime first converts it to the plain layout.
- Clip has a kernel only for the plain layout, so ONNX Runtime converts its input to the plain layout and its output
  back.
- Counting does not depend on the order of values. So edgeq saves the optimised graph once, removes the conversions that
  only serve the observation, and fetches the blocked tensor.
- If a tensor's channels do not fill the blocks, edgeq keeps its conversion, because the padding is not data.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import onnx

from edgeq.model.graph import MAIN_DOMAINS
from edgeq.model.order import names_read

# Domain of ONNX Runtime's operators on the blocked layout.
_BLOCKED = "com.microsoft.nchwc"
# Channels in a block on the CPUs with the widest vectors. Multiples of it fill the blocks of every CPU.
_WIDEST_BLOCK = 16


class Links:
    """Index the nodes of a graph by the names that they write and read. Do not change the graph while the index is in
    use.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.makers = {name: node for node in graph.node for name in node.output}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in names_read(node):
                self.readers.setdefault(name, []).append(node)
        self.outputs = {value.name for value in graph.output}


def without_conversions(
    graph: onnx.GraphProto, names: Sequence[str], keep_layout: Collection[str] = ()
) -> dict[str, str]:
    """Remove layout conversions from an optimised graph, in place. The graph's outputs become the tensors to fetch for
    `names`.

    Returns:
        Name → blocked tensor, for each of `names` whose values exist in the blocked layout, except `keep_layout`. If
        this is empty, the graph's outputs do not change.
    """
    movable = set(names) - set(keep_layout)
    # A Clip between two conversions hides that its input exists in the blocked layout too.
    _unwrap_clips(graph)
    blocked: dict[str, str] = {}
    blocked_names: set[str] = set()
    for node in graph.node:
        name = node.output[0]
        if name not in movable or not node.input:
            continue
        if _converts_back(node):
            blocked[name] = node.input[0]
        # A Clip that reads a blocked tensor now also returns a blocked tensor.
        elif is_standard(node, "Clip") and node.input[0] in blocked_names:
            blocked[name] = name
        else:
            continue
        blocked_names.add(blocked[name])
    if blocked:
        outputs = dict.fromkeys(blocked.get(name, name) for name in names)
        _drop_shapes(graph, outputs)  # The shapes in the file are those of the plain layout.
        del graph.output[:]
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        links = Links(graph)
        for node in list(graph.node):
            # A conversion that something else still reads stays.
            if _converts_back(node) and node.output[0] not in links.readers and node.output[0] not in outputs:
                graph.node.remove(node)
    return blocked


def _unwrap_clips(graph: onnx.GraphProto) -> None:
    """Turn blocked → plain → Clip → blocked into blocked → Clip if nothing else reads the Clip's output."""
    links = Links(graph)
    for node in list(graph.node):
        source = links.makers.get(node.input[0]) if is_standard(node, "Clip") else None
        clipped = node.output[0]
        readers = links.readers.get(clipped, [])
        if source is None or not _converts_back(source) or not readers or clipped in links.outputs:
            continue
        if all(_converts_to_blocked(reader) for reader in readers):
            node.input[0] = source.input[0]
            _drop_shapes(graph, [clipped])
            for reader in readers:
                for user in links.readers.get(reader.output[0], []):
                    user.input[:] = [clipped if name == reader.output[0] else name for name in user.input]
                graph.node.remove(reader)


def _drop_shapes(graph: onnx.GraphProto, names: Collection[str]) -> None:
    """Remove the stated shapes of tensors from a graph, in place."""
    infos = [value for value in graph.value_info if value.name not in names]
    del graph.value_info[:]
    graph.value_info.extend(infos)


def is_standard(node: onnx.NodeProto, *op_types: str) -> bool:
    """Return whether a node is one of ONNX's own operators of these types."""
    return node.op_type in op_types and node.domain in MAIN_DOMAINS


def attribute_values(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the values of a node's attributes by name."""
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def _converts_back(node: onnx.NodeProto) -> bool:
    """Return whether a node converts from the blocked to the plain layout and the channels fill the blocks."""
    if (node.domain, node.op_type) != (_BLOCKED, "ReorderOutput"):
        return False
    attributes = attribute_values(node)
    return attributes.get("channels", 1) % _WIDEST_BLOCK == 0 and not attributes.get("channels_last", 0)


def _converts_to_blocked(node: onnx.NodeProto) -> bool:
    return (node.domain, node.op_type) == (_BLOCKED, "ReorderInput") and not attribute_values(node).get(
        "channels_last", 0
    )
