"""Tensors that must share one scale because an operator only moves or selects values."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from edgeq.calibrate.ranges import Range
from edgeq.graph.index import GraphIndex
from edgeq.graph.operators import DATA_MOVEMENT
from edgeq.graph.query import MAIN_DOMAINS, name_of

SHARING = DATA_MOVEMENT | {"Concat"}
"""Operators whose integer kernels copy values and cannot rescale them."""
_ALL_INPUTS = frozenset({"Concat", "Max", "Min"})


def scale_groups(model: ir.Model, op_types: Collection[str] = SHARING) -> tuple[tuple[str, ...], ...]:
    """Sets of tensors, two or more each, that share a scale when all operators of `op_types` keep it.

    Data inputs and outputs count; shapes, axes and constants do not. Names and sets are sorted.
    """
    constants = GraphIndex(model).computed_constants
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        """The representative of a tensor's group; paths to it are shortened on the way."""
        parent.setdefault(name, name)
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for node in model.graph:
        if node.op_type not in op_types or node.domain not in MAIN_DOMAINS:
            continue
        data = node.inputs if node.op_type in _ALL_INPUTS else node.inputs[:1]
        # The second output of MaxPool is indices.
        results = node.outputs if node.op_type == "Split" else node.outputs[:1]
        members = [name for value in (*data, *results) if (name := name_of(value)) and name not in constants]
        for name in members[1:]:
            parent[root(name)] = root(members[0])
    groups: dict[str, list[str]] = {}
    for name in parent:
        groups.setdefault(root(name), []).append(name)
    return tuple(sorted(tuple(sorted(group)) for group in groups.values() if len(group) > 1))


def share_ranges(model: ir.Model, ranges: Mapping[str, Range], op_types: Collection[str] = SHARING) -> dict[str, Range]:
    """`ranges` where every group has one range: the least that holds all of its members'. Others stay as they are."""
    shared = dict(ranges)
    for group in scale_groups(model, op_types):
        members = [name for name in group if name in ranges]
        if members:
            whole = Range(min(ranges[n].low for n in members), max(ranges[n].high for n in members))
            shared.update(dict.fromkeys(members, whole))
    return shared
