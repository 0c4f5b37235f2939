"""The float model that a quantized one was made from: as given, or as edgeq prepares models before it quantizes them.

Preparation folds BatchNormalization into weights and fuses MatMul with Add, so that a model as it was exported may hold
neither the weights nor the nodes that were quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgeq.errors import ModelError, UsageError
from edgeq.graph.index import GraphIndex
from edgeq.measure.match_activations import match_activations
from edgeq.measure.match_weights import NODE_SUFFIX, compare_weights, count_quantized_weights, match_weights
from edgeq.model.load import is_quantized, read_model
from edgeq.model.prepare import prepare_model
from edgeq.progress import SILENT, Progress

ORDER = "Give the float model first, then its int8 form"


@dataclass(frozen=True)
class Reference:
    """A float model to compare with.

    Attributes:
        graph: the model.
        path: its file: the given one, or the prepared one in a work directory.
        prepared: whether it was prepared.
        notes: what the user should know about the choice.
    """

    graph: GraphIndex
    path: Path
    prepared: bool
    notes: tuple[str, ...] = ()


def find_reference(
    path: Path, quantized: GraphIndex, name: str, workdir: Path, progress: Progress = SILENT
) -> Reference:
    """The float model at `path` as it is or, where that explains more of the quantized one, prepared in `workdir`.

    Args:
        name: of the quantized model, for messages.

    Raises:
        UsageError: the model at `path` is quantized, or no float model of this quantized one.
        ModelError: it is no model.
    """
    given = GraphIndex(read_model(path))
    if is_quantized(given.model):
        raise UsageError(f"{path} is quantized", ORDER)
    missing = sorted(set(quantized.inputs) - set(given.inputs))
    if missing:
        raise UsageError(
            f"{path} has no input {missing[0]!r}, which {name} takes",
            "Give the float model that it was made from",
        )
    fit = _fit(given, quantized)
    names = [node.name for node in given.graph]
    whole = fit.weights == count_quantized_weights(quantized)
    if whole and all(names) and len(set(names)) == len(names) and fit.nodes <= _node_names(quantized):
        return Reference(given, path, prepared=False)
    try:
        made = prepare_model(path, workdir, loaded=given.model, progress=progress)
    except ModelError as error:
        return Reference(given, path, prepared=False, notes=(f"the float model is taken as it is: {error.problem}",))
    prepared = GraphIndex(made.model)
    better = _fit(prepared, quantized)
    if (better.weights, better.activations) < (fit.weights, fit.activations):
        return Reference(given, path, prepared=False)
    if not better.activations:
        raise UsageError(
            f"{name} has no activation of {path}, prepared or not",
            "Give the float model that it was made from",
        )
    note = f"{path} was compared as `edgeq quantize` prepares it"
    if better.weights > fit.weights:
        note += f": {better.weights} quantized weights match then, {fit.weights} as it is"
    return Reference(prepared, made.path, prepared=True, notes=(note,))


@dataclass(frozen=True)
class _Fit:
    """Quantized weights that are rounded weights of a float model, activations that both have, and the names of the
    float model's nodes that read those weights or make those activations."""

    weights: int
    activations: int
    nodes: frozenset[str]


def _fit(graph: GraphIndex, quantized: GraphIndex) -> _Fit:
    weights = [w for w in compare_weights(graph, quantized, match_weights(graph, quantized)) if not w.changed]
    activations = [a for a in match_activations(graph, quantized) if not a.is_input]
    nodes = frozenset(w.node for w in weights) | frozenset(a.node for a in activations)
    return _Fit(len(weights), len(activations), nodes)


def _node_names(quantized: GraphIndex) -> frozenset[str]:
    """The names of nodes, as the float model has them. Where that of a layer is not among them, another node was
    quantized, such as the Gemm that a MatMul and an Add became, and `--exclude` would refuse the layer's name."""
    return frozenset(NODE_SUFFIX.sub("", name) for name in quantized.nodes)
