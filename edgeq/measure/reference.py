"""Find the float model from which a quantized model was made: the user's file, or its prepared form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgeq.errors import ModelError, UsageError
from edgeq.measure.match_activations import match_activations
from edgeq.measure.match_weights import NODE_SUFFIX, compare_weights, count_quantized_weights, match_weights
from edgeq.model.graph import GraphIndex
from edgeq.model.load import is_quantized, read_model
from edgeq.model.prepare import prepare_model
from edgeq.util.display import SILENT, Progress

ORDER = "Give the float model first, then its int8 form"
_ORIGIN = "Give the float model that it was made from"


@dataclass(frozen=True)
class ReferenceModel:
    """Hold a float model to compare with.

    Attributes:
        graph: the model.
        path: file of the model: the one that the caller gave, or the prepared one in a work directory.
        prepared: whether the model was prepared.
        notes: facts about the choice that the user should know.
    """

    graph: GraphIndex
    path: Path
    prepared: bool = False
    notes: tuple[str, ...] = ()


def find_reference(
    path: Path, quantized: GraphIndex, name: str, workdir: Path, progress: Progress = SILENT
) -> ReferenceModel:
    """Return the float model from which a quantized model was made.

    It is the model at `path`, or the prepared form of this model (`edgeq.model.prepare`) if that matches more of the
    quantized model. Preparation folds BatchNormalization into weights and fuses MatMul with Add. So an exported model
    may contain neither the weights nor the nodes that were quantized.

    Args:
        name: name of the quantized model, for messages.
        workdir: folder for the prepared model.

    Raises:
        UsageError: the model at `path` is quantized, or the quantized model was not made from it.
        ModelError: the file is not a model.
    """
    original = GraphIndex(read_model(path))
    if is_quantized(original.model):
        raise UsageError(f"{path} is quantized", ORDER)
    missing = sorted(set(quantized.inputs) - set(original.inputs))
    if missing:
        raise UsageError(f"{path} has no input {missing[0]!r}, which {name} takes", _ORIGIN)
    # The number of matches shows whether the quantizer has prepared the model first.
    weights, activations = _find_matches(original, quantized)
    named = all(node.name for node in original.graph) and len(original.nodes) == len(original.graph)
    # If the name of a layer is missing in the quantized model, another node was quantized, such as a Gemm that was made
    # from a MatMul and an Add. `exclude` would then refuse the layer's name.
    has_layer_names = {*weights, *activations} <= {NODE_SUFFIX.sub("", node) for node in quantized.nodes}
    if named and has_layer_names and len(weights) == count_quantized_weights(quantized):
        return ReferenceModel(original, path)
    try:
        preparation = prepare_model(path, workdir, loaded=original.model, progress=progress)
    except ModelError as error:
        return ReferenceModel(original, path, notes=(f"the float model is used unprepared: {error.problem}",))
    prepared = GraphIndex(preparation.model)
    its_weights, its_activations = _find_matches(prepared, quantized)
    if (len(its_weights), len(its_activations)) < (len(weights), len(activations)):
        return ReferenceModel(original, path)
    if not its_activations:
        raise UsageError(f"{name} has no activation of {path}, prepared or not", _ORIGIN)
    note = f"{path} was compared as `edgeq quantize` prepares it"
    if len(its_weights) > len(weights):
        note += f": {len(its_weights)} quantized weights match then, {len(weights)} without preparation"
    return ReferenceModel(prepared, preparation.path, prepared=True, notes=(note,))


def _find_matches(graph: GraphIndex, quantized: GraphIndex) -> tuple[list[str], list[str]]:
    """Return two lists of nodes of the float model: those whose weight is in the quantized model in rounded form, and
    those whose activation both models have.
    """
    weights = compare_weights(graph, quantized, match_weights(graph, quantized))
    activations = match_activations(graph, quantized)
    return [w.node for w in weights if not w.changed], [a.node for a in activations if not a.is_input]
