"""Find nodes that help when they stay in float: each likely set is computed so, on few samples."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from edgeq.errors import RuntimeUnavailableError
from edgeq.graph.index import GraphIndex
from edgeq.graph.query import consumers
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.measure.closeness import GOOD_DB, worst_db
from edgeq.measure.inference import infer
from edgeq.measure.instrument import instrumented_session
from edgeq.measure.match_activations import match_activations
from edgeq.measure.splice import with_nodes_in_float
from edgeq.model.macs import node_macs
from edgeq.progress import SILENT, Progress
from edgeq.records import NullIsInfinite
from edgeq.session import SessionSettings

if TYPE_CHECKING:
    from edgeq.data.samples import Samples

SAMPLES = 4
# Nodes that are tried by themselves, those of the worst sets.
_SINGLES = 8
# Nodes that are put back into integers, at most, as long as that costs nothing.
_PUT_BACK = 4
_FLOAT = "float32"
# What gains less does not help.
_WORTH_DB = 1.0


@dataclass(frozen=True)
class Exclusion:
    """Nodes in float, and what that gives.

    Attributes:
        nodes: names, in the order in which the sets were given.
        sqnr_db: of the outputs with them in float, in dB, on the graph as written.
        plain_db: of the outputs as they are, on the same samples.
    """

    nodes: tuple[str, ...]
    sqnr_db: NullIsInfinite
    plain_db: NullIsInfinite


def find_exclusions(
    float_graph: GraphIndex,
    quantized_graph: GraphIndex,
    sets: Sequence[tuple[str, ...]],
    samples: Samples,
    *,
    settings: SessionSettings,
    progress: Progress = SILENT,
) -> tuple[Exclusion, ...]:
    """Return what helps of `sets`, of nodes in them, and of the first 1, 2, 4 ... sets together, the best first.

    Sets go together in the order given, and those that help most first; these once more with the nodes around them that
    have no multiply-accumulates: beside a node in integers, a tensor is quantized. Of two that are good, the
    one with fewer nodes is the better.

    Args:
        samples: few; all of them are run for each set.
    """
    matches = match_activations(float_graph, quantized_graph)
    macs = {name: work for name, work in node_macs(float_graph.model).items() if work}
    reference = instrumented_session(float_graph.model, optimization="all", settings=settings)
    known = {_FLOAT: [infer(reference, sample, model="the float model") for sample in samples]}

    def judged(model: ir.Model) -> float:
        """Return the SQNR in dB of a model's outputs."""
        sessions = {_FLOAT: reference, "": instrumented_session(model, optimization="none", settings=settings)}
        return worst_db(evaluate_sessions(sessions, samples, reference=_FLOAT, known=known).agreement[""])

    plain = judged(quantized_graph.model)
    found: dict[frozenset[str], Exclusion] = {}

    def measure(nodes: tuple[str, ...]) -> float:
        """Return the SQNR with `nodes` in float; that of the model as it is where they cannot be parted from it."""
        key = frozenset(nodes)
        if key not in found:
            model = with_nodes_in_float(float_graph, quantized_graph, matches, nodes)
            sqnr_db = plain
            if model is not None:
                try:
                    sqnr_db = judged(model)
                except RuntimeUnavailableError as error:
                    progress.note(f"{', '.join(nodes)} in float: {error.problem}")
            found[key] = Exclusion(nodes, sqnr_db, plain)
        return found[key].sqnr_db

    singles = list(dict.fromkeys((node,) for nodes in sets for node in nodes))[:_SINGLES]
    order = [nodes for nodes in dict.fromkeys(sets) if nodes]
    with progress.stage("What helps in float", len(singles) + len(order)) as advance:
        for nodes in (*singles, *order):
            measure(nodes)
            advance(1)
        by_gain = sorted(order, key=lambda nodes: -measure(nodes))
        for count in itertools.takewhile(lambda count: count < 2 * len(order), (2**k for k in range(32))):
            measure(_together(order[:count]))
            measure(_together(by_gain[:count]))
            measure(_with_neighbours(float_graph, _together(by_gain[:count]), macs))
        best = min(found.values(), key=_rank, default=Exclusion((), plain, plain))
        kept = best.nodes
        for name in _costliest(kept, macs):
            fewer = tuple(node for node in kept if node != name)
            if fewer and min(measure(fewer), GOOD_DB) >= min(best.sqnr_db, GOOD_DB) - _WORTH_DB:
                kept = fewer
    worth = [
        one for one in found.values() if one.sqnr_db >= plain + _WORTH_DB and (not macs or macs.keys() - {*one.nodes})
    ]
    return tuple(sorted(worth, key=_rank))


def _rank(one: Exclusion) -> tuple[float, int, tuple[str, ...]]:
    """Sort by decibels, to the precision that counts, then by how many nodes it takes."""
    return -round(min(one.sqnr_db, GOOD_DB) / _WORTH_DB), len(one.nodes), one.nodes


def _costliest(nodes: tuple[str, ...], macs: Mapping[str, int]) -> tuple[str, ...]:
    """Return the nodes that cost most in float, at most `_PUT_BACK`."""
    return tuple(sorted(nodes, key=lambda node: -macs.get(node, 0))[:_PUT_BACK])


def _together(sets: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the nodes of all sets, each once."""
    return tuple(dict.fromkeys(itertools.chain.from_iterable(sets)))


def _with_neighbours(float_graph: GraphIndex, nodes: tuple[str, ...], macs: Mapping[str, int]) -> tuple[str, ...]:
    """Return `nodes` and those without multiply-accumulates that make what they read, or read what they make."""
    found = dict.fromkeys(nodes)
    for name in nodes:
        node = float_graph.nodes.get(name)
        if node is not None:
            makers = (value.producer() for value in node.inputs if value is not None)
            readers = (reader for value in node.outputs for reader, _ in consumers(value))
            near = (other.name for other in (*makers, *readers) if other is not None)
            found |= {other: None for other in near if other in float_graph.nodes and not macs.get(other)}
    return tuple(found)
