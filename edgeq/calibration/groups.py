"""Find the tensors that must share a scale, because integer kernels between them cannot rescale."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from edgeq.calibration.ranges import Range
from edgeq.model.graph import (
    DATA_MOVEMENT,
    MAIN_DOMAINS,
    computed_constants,
    name_of,
)

SHARING = DATA_MOVEMENT | {"Concat"}
"""Operators whose integer kernels copy values and cannot rescale them, and Concat."""
_ALL_INPUTS = frozenset({"Concat", "Max", "Min"})


def scale_groups(
    model: ir.Model, op_types: Collection[str] = SHARING, excluded: Collection[str] = ()
) -> tuple[tuple[str, ...], ...]:
    """Return groups of at least two tensors that must share a scale, because they are connected by operators of
    `op_types`, which preserve the scale.

    The groups contain only data inputs and outputs, without shapes, axes and constants. Names and groups are sorted.

    Args:
        excluded: names of the nodes that stay in float, and so tie no scales.
    """
    constants = computed_constants(model.graph)
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        """Return the representative of a tensor's group, and shorten the path to it."""
        parent.setdefault(name, name)
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for node in model.graph:
        if node.op_type not in op_types or node.domain not in MAIN_DOMAINS or node.name in excluded:
            continue
        data = node.inputs if node.op_type in _ALL_INPUTS else node.inputs[:1]
        # The second output of MaxPool contains indices.
        results = node.outputs if node.op_type == "Split" else node.outputs[:1]
        members = [name for value in (*data, *results) if (name := name_of(value)) and name not in constants]
        for name in members[1:]:
            parent[root(name)] = root(members[0])
    groups: dict[str, list[str]] = {}
    for name in parent:
        groups.setdefault(root(name), []).append(name)
    return tuple(sorted(tuple(sorted(group)) for group in groups.values() if len(group) > 1))


def share_ranges(
    model: ir.Model,
    ranges: Mapping[str, Range],
    op_types: Collection[str] = SHARING,
    excluded: Collection[str] = (),
) -> dict[str, Range]:
    """Return a copy of `ranges` in which all members of a group have the same range: the smallest range that covers all
    ranges of the group. Tensors outside of groups keep their range. For `excluded`, see `scale_groups`.
    """
    common_ranges = dict(ranges)
    for group in scale_groups(model, op_types, excluded):
        members = [name for name in group if name in ranges]
        if members:
            union = Range(min(ranges[n].low for n in members), max(ranges[n].high for n in members))
            common_ranges.update(dict.fromkeys(members, union))
    return common_ranges
