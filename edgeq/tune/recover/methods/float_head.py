"""Detection heads that put boxes and scores into one tensor, kept in float from there on.

A head often ends in a Concat of coordinates, which may go to hundreds, and scores between 0 and 1, followed by nodes
that only move data. In integers all of it shares one scale, made for the coordinates, and scores are left with a few
steps. These nodes compute nothing, so float costs next to nothing there.

Recognised by what it is: upwards from a graph output through nodes that only move data, a Concat whose parts have
ranges that differ several times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from edgeq.calibrate.ranges import Range
from edgeq.data.samples import Samples
from edgeq.graph.operators import DATA_MOVEMENT
from edgeq.model.load import load_model
from edgeq.progress import Progress
from edgeq.tune.recover.base import Recovery, Stage, State
from edgeq.tune.recover.elementwise import Followers
from edgeq.tune.recover.uses import readers

HETEROGENEOUS = 4.0
"""How many times wider than the narrowest part of a Concat the widest must be: two bits lost."""

# What computes nothing, or next to nothing.
_MOVES = DATA_MOVEMENT - {"MaxPool", "Resize"} | {"Cast", "Concat"}


@dataclass(frozen=True)
class FloatHead(Recovery):
    """The recovery: such tails, and the activation functions right before them, are left out of quantization."""

    name: str = "float-head"
    title: str = "tails that join boxes and scores in one tensor kept in float"
    stage: Stage = "ranges"
    free: bool = False
    order = 50

    def apply(self, state: State, samples: Samples, workdir: Path, progress: Progress) -> State:
        del samples, workdir, progress
        found = find_heads(load_model(state.prepared.path, external_data="none"), state.ranges)
        new = sorted(set(found) - set(state.scheme.exclude))
        if not new:
            return state.note(f"{self.name}: no tail joins ranges that differ {HETEROGENEOUS:g} times")
        scheme = state.scheme.replace(exclude=(*state.scheme.exclude, *new))
        return state.replace(scheme=scheme).note(f"{self.name}: kept in float: {', '.join(new)}")


def find_heads(model: onnx.ModelProto, ranges: Mapping[str, Range]) -> tuple[str, ...]:
    """Names of the nodes of heterogeneous tails, in the order of the graph; empty where there are none."""
    makers = {name: node for node in model.graph.node for name in node.output if name}
    tail: dict[str, onnx.NodeProto] = {}
    for output in model.graph.output:
        moved = _moved_from(output.name, makers)
        if any(node.op_type == "Concat" and heterogeneous(node, ranges) for node in moved):
            tail.update((node.name, node) for node in moved)
    if not tail:
        return ()
    inside = set(tail)
    readers_of, followers = readers(model), Followers(model)
    for tensor in makers:
        # An activation that only the tail reads: a score would be rounded in front of it and behind it.
        follower = followers.of(tensor)
        own = tail.keys() | {node.name for node in follower.nodes}
        reading = {node.name for end in follower.ends for node in readers_of.get(end, ())}
        if follower.nodes and reading <= own and reading & tail.keys():
            inside |= own
    return tuple(node.name for node in model.graph.node if node.name in inside)


def heterogeneous(node: onnx.NodeProto, ranges: Mapping[str, Range]) -> bool:
    """Whether the widest part of a Concat is `HETEROGENEOUS` times as wide as the narrowest."""
    widths = [r.high - r.low for name in node.input if (r := ranges.get(name)) is not None and r.high > r.low]
    return len(widths) > 1 and max(widths) >= HETEROGENEOUS * min(widths)


def _moved_from(tensor: str, makers: Mapping[str, onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Nodes that only move data, upwards from a tensor to the first that do not."""
    found: dict[str, onnx.NodeProto] = {}
    waiting = [tensor]
    while waiting:
        node = makers.get(waiting.pop())
        if node is not None and node.op_type in _MOVES and node.name not in found:
            found[node.name] = node
            waiting.extend(_data(node))
    return list(found.values())


def _data(node: onnx.NodeProto) -> list[str]:
    """What a node that moves data moves: its first input, but all of a Concat's. The others are shapes and indices."""
    return list(node.input) if node.op_type == "Concat" else list(node.input[:1])


RECOVERY = FloatHead()
