"""ONNX Runtime's basic graph optimisation, for what every target wants: folded constants and merged nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgeq.errors import ModelError, RuntimeUnavailableError
from edgeq.session import SessionSettings, onnxruntime, open_session

if TYPE_CHECKING:
    import onnx_ir as ir

# ConstantSharing renames weights; the next two choose quantized or layout-specific forms, a backend's business; the
# last (from 1.32) puts the channels in order by a Gather, where edgeq.model.space_to_depth does it in the weights.
_DISABLED = ("ConstantSharing", "WeightBiasQuantization", "NchwcTransformer", "SliceConcatToSpaceToDepthFusion")


def optimize_basic(model: Path, optimized: Path, *, source: Path, external: bool) -> None:
    """Write ONNX Runtime's basic-level optimisation of `model` to `optimized`.

    Basic level only rewrites to standard operators; fused and hardware-specific ones come with the levels above.

    Args:
        source: the file that the user gave, for messages.
        external: write weights to external data beside `optimized`, as models near 2 GB need.

    Raises:
        ModelError: onnxruntime refuses the model.
        RuntimeUnavailableError: onnxruntime is not installed.
        OSError: there is no space for `optimized`.
    """
    version = onnxruntime().__version__
    config = {"optimization.disable_specified_optimizers": ";".join(_DISABLED)}
    if external:
        config["session.optimized_model_external_initializers_file_name"] = f"{optimized.name}.data"
        config["session.optimized_model_external_initializers_min_size_in_bytes"] = "1024"
    try:
        open_session(model, SessionSettings(config=config, optimization="basic", save_optimized_to=optimized))
    except RuntimeUnavailableError as error:
        text = " ".join(str(error.__cause__ or error).split()).replace(str(model), source.name)
        raise ModelError(
            f"{source}: onnxruntime {version} refuses it: {text[:300]}",
            "Run it in onnxruntime where it was exported; if an operator is unknown, use a newer onnxruntime",
        ) from error


def settle(model: ir.Model, before: ir.Model) -> None:
    """Put what ONNX Runtime wrote in order, in place: the producer and metadata of the model `before`, only operator
    sets in use, and weights in the order in which nodes use them, where it writes that of a hash table."""
    _identify_as(model, before)
    _order_initializers(model)


def _identify_as(model: ir.Model, before: ir.Model) -> None:
    model.producer_name, model.producer_version = before.producer_name, before.producer_version
    model.domain, model.model_version, model.doc_string = before.domain, before.model_version, before.doc_string
    model.metadata_props.clear()
    model.metadata_props.update(before.metadata_props)
    used = {node.domain for graph in model.graphs() for node in graph} | {""}
    for domain in [d for d in model.opset_imports if d not in used]:
        del model.opset_imports[domain]


def _order_initializers(model: ir.Model) -> None:
    for graph in model.graphs():
        used = [v.name for node in graph.all_nodes() for v in node.inputs if v is not None and v.is_initializer()]
        rank = {name: position for position, name in reversed(list(enumerate(used)))}
        values = sorted(graph.initializers.values(), key=lambda v: (rank.get(v.name, len(used)), v.name or ""))
        graph.initializers.clear()
        for value in values:
            graph.register_initializer(value)
