"""Find the nodes of a quantized model that improve its outputs when they stay in float.

edgeq tries sets of nodes, and measures the outputs with each of them (`edgeq.measure.float_nodes` builds the models).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgeq_device.measure.basis import EVERYTHING, Basis

from edgeq.data.array_store import ArrayStore
from edgeq.data.samples import Samples
from edgeq.errors import RuntimeUnavailableError
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.measure.agreement import GOOD_DB, worst_db
from edgeq.measure.answer_task import FloatAnswers
from edgeq.measure.float_nodes import keep_nodes_float
from edgeq.measure.layers import LayerPair, instrumented_session
from edgeq.measure.match_activations import match_activations
from edgeq.model.graph import GraphIndex, consumers
from edgeq.model.macs import node_macs
from edgeq.model.sessions import Loadable
from edgeq.util.records import NullIsInfinite, Share

SAMPLES = 4
ANSWERED_SAMPLES = 16
"""Number of samples if answers decide. One image has a few answers only."""
# One lost answer in a thousand is the finest difference that a few samples can show.
_LEAST_LOST = 1e-3
# Number of nodes from the worst sets that are also tried one by one.
_SINGLES = 8
# Maximum number of nodes of the best set to try in integers again. If integers cost at most `_WORTH_DB` for a node, it
# stays in integers.
_PUT_BACK = 4
_FLOAT = "float32"
# Smallest gain that counts, in dB.
_WORTH_DB = 1.0


@dataclass(frozen=True)
class Exclusion:
    """Describe nodes that stay in float, and the effect on the outputs.

    Attributes:
        nodes: names of the nodes, in the order of the sets.
        sqnr_db: SQNR of the outputs in dB with these nodes in float, on the graph as written.
        plain_db: SQNR of the outputs in dB without nodes in float, on the same samples.
        lost: share of the float model's answers that are lost with these nodes in float; None if the outputs' noise
            decides.
        plain_lost: share of the answers that are lost without nodes in float; None like `lost`.
    """

    nodes: tuple[str, ...]
    sqnr_db: NullIsInfinite
    plain_db: NullIsInfinite
    lost: Share | None = None
    plain_lost: Share | None = None

    @property
    def level_db(self) -> float:
        """Return the level in dB that decides: a tenth of the answers is as bad as noise with a tenth of the signal's
        amplitude.
        """
        return self.sqnr_db if self.lost is None else _to_level(self.lost)

    @property
    def plain_level_db(self) -> float:
        """Return the level in dB without nodes in float."""
        return self.plain_db if self.plain_lost is None else _to_level(self.plain_lost)


def _to_level(lost: float) -> float:
    return -20 * math.log10(max(lost, _LEAST_LOST))


def find_exclusions(
    pair: LayerPair,
    sets: Sequence[tuple[str, ...]],
    samples: Samples,
    basis: Basis = EVERYTHING,
    task: FloatAnswers | None = None,
) -> tuple[Exclusion, ...]:
    """Return the sets of nodes that improve the outputs when they stay in float, the best first.

    edgeq tries each of `sets`, and single nodes from them. Then it tries the first 1, 2, 4 ... sets together, once in
    the order of `sets` and once in the order of their gain. It also tries the sets with the largest gain together with
    neighbouring nodes that have no multiply-accumulates, because a tensor next to an integer node is quantized. If two
    results are about equally good, the one with fewer nodes ranks first.

    Args:
        samples: a few samples; all of them are run for each set.
        basis: what the figures of the outputs are taken over.
        task: the task of giving the answers that are the samples' labels; None compares the outputs' noise.
    """
    float_graph, quantized_graph = pair.float_graph, pair.quantized_graph
    matches = match_activations(float_graph, quantized_graph)
    macs = {name: work for name, work in node_macs(float_graph.model).items() if work}
    reference = instrumented_session(float_graph, optimization="all", settings=pair.settings)
    # The float model runs each sample once, and not once for each set of nodes.
    float_outputs = {_FLOAT: ArrayStore()}

    def measure_model(model: GraphIndex | Loadable) -> tuple[float, float | None]:
        """Return the SQNR of a model's outputs in dB, and the share of lost answers."""
        sessions = {_FLOAT: reference, "": instrumented_session(model, optimization="none", settings=pair.settings)}
        evaluation = evaluate_sessions(
            sessions, samples, task=task, reference=_FLOAT, known_outputs=float_outputs, basis=basis
        )
        lost = evaluation.accuracy[""].loss_against(evaluation.accuracy[_FLOAT]) if task is not None else None
        return worst_db(evaluation.agreement[""]), None if lost is None else max(0.0, lost)

    plain = measure_model(quantized_graph)
    exclusions: dict[frozenset[str], Exclusion] = {}

    def measure_nodes(nodes: tuple[str, ...]) -> float:
        """Return the level in dB with `nodes` in float. If these nodes cannot be separated from the model, return the
        level of the unchanged model.
        """
        key = frozenset(nodes)
        # The same nodes in another order build the same model.
        if key not in exclusions:
            model, figures = keep_nodes_float(float_graph, quantized_graph, matches, nodes), plain
            try:
                figures = plain if model is None else measure_model(model)
            except RuntimeUnavailableError as error:
                pair.progress.note(f"{', '.join(nodes)} in float: {error.problem}")
            exclusions[key] = Exclusion(nodes, figures[0], plain[0], figures[1], plain[1])
        return exclusions[key].level_db

    singles = list(dict.fromkeys((node,) for nodes in sets for node in nodes))[:_SINGLES]
    order = [nodes for nodes in dict.fromkeys(sets) if nodes]
    with pair.progress.stage("Trying nodes in float", len(singles) + len(order)) as advance:
        for nodes in (*singles, *order):
            measure_nodes(nodes)
            advance(1)
        by_gain = sorted(order, key=lambda nodes: -measure_nodes(nodes))
        for count in itertools.takewhile(lambda count: count < 2 * len(order), (2**k for k in range(32))):
            measure_nodes(_join_sets(order[:count]))
            measure_nodes(_join_sets(by_gain[:count]))
            measure_nodes(_add_neighbours(float_graph, _join_sets(by_gain[:count]), macs))
        best = min(
            exclusions.values(), key=_rank_exclusion, default=Exclusion((), plain[0], plain[0], plain[1], plain[1])
        )
        reduced = best.nodes
        for name in sorted(reduced, key=lambda node: -macs.get(node, 0))[:_PUT_BACK]:
            fewer = tuple(node for node in reduced if node != name)
            if fewer and min(measure_nodes(fewer), GOOD_DB) >= min(best.level_db, GOOD_DB) - _WORTH_DB:
                reduced = fewer
    worth = [
        exclusion
        for exclusion in exclusions.values()
        if exclusion.level_db >= exclusion.plain_level_db + _WORTH_DB and (not macs or macs.keys() - {*exclusion.nodes})
    ]
    return tuple(sorted(worth, key=_rank_exclusion))


def _rank_exclusion(exclusion: Exclusion) -> tuple[float, int, tuple[str, ...]]:
    """Return a sort key: the decibels, rounded to the precision that matters, then the number of nodes."""
    return -round(min(exclusion.level_db, GOOD_DB) / _WORTH_DB), len(exclusion.nodes), exclusion.nodes


def _join_sets(sets: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the nodes of all sets, each once."""
    return tuple(dict.fromkeys(itertools.chain.from_iterable(sets)))


def _add_neighbours(float_graph: GraphIndex, nodes: tuple[str, ...], macs: Mapping[str, int]) -> tuple[str, ...]:
    """Return `nodes` and their neighbours without multiply-accumulates. Neighbours are the nodes that compute their
    inputs and the nodes that read their outputs.
    """
    extended = dict.fromkeys(nodes)
    for name in nodes:
        node = float_graph.nodes.get(name)
        if node is not None:
            makers = (value.producer() for value in node.inputs if value is not None)
            readers = (reader for value in node.outputs for reader, _ in consumers(value))
            neighbours = (neighbour.name for neighbour in (*makers, *readers) if neighbour is not None)
            extended |= {name: None for name in neighbours if name in float_graph.nodes and not macs.get(name)}
    return tuple(extended)
