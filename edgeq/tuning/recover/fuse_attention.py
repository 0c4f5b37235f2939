"""Fuse attention into one node if onnxruntime's transformer optimizer recognises it. The node can then become
QAttention.

The optimizer recognises only the forms that some exporters write. edgeq compares the outputs of its result with the
model's on a sample.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgeq.data.samples import Samples
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.model.convert import from_proto, to_proto
from edgeq.model.edit import Editor
from edgeq.model.graph import MICROSOFT, constant, is_constant, is_op, node_input
from edgeq.model.names import name_nodes
from edgeq.model.prepare import PreparedModel, save_rewritten
from edgeq.quantization.quantizer import quiet
from edgeq.run.session import open_session

FAMILIES = ("bert", "gpt2", "vit")
"""Model families of the optimizer, in the order in which they are tried."""
LEAST_SQNR_DB = 60.0
"""Minimum SQNR of a fused float model. Fusing changes only the order of computation, so only rounding may differ."""
_CHECKED = 2


def may_have_attention(model: ir.Model) -> bool:
    """Return whether any product of two activations has the result of a Softmax as its first factor. This quick check
    comes before any attempt to fuse.
    """
    return any(
        is_op(node, "MatMul")
        and node.inputs[0] is not None
        and is_op(node.inputs[0].producer(), "Softmax")
        and not is_constant(node.inputs[1])
        for node in model.graph
    )


def fuse_attention(prepared: PreparedModel, samples: Samples, destination: Path) -> tuple[PreparedModel, int]:
    """Write the model with fused attention to `destination`.

    Returns:
        (the prepared model with fused attention, the number of fused layers). If nothing is recognised, or if the fused
            model computes something else, nothing is written and the result is (`prepared`, 0).
    """
    with quiet():
        fused, count = _fused(prepared.model)
    if fused is None:
        return prepared, 0
    note = f"{count} attention layers fused by onnxruntime's transformer optimizer"
    fused_model = save_rewritten(prepared, fused, destination, note)
    sessions = {"plain": open_session(prepared.path), "fused": open_session(destination)}
    agreement = evaluate_sessions(sessions, samples, reference="plain", count=_CHECKED).agreement["fused"]
    # The optimizer recognises patterns by their form alone, so its result may compute something else.
    if agreement.sqnr_db < LEAST_SQNR_DB or any(output.nonfinite or output.mismatched for output in agreement.outputs):
        destination.unlink()
        return prepared, 0
    return fused_model, count


def _fused(model: ir.Model) -> tuple[ir.Model | None, int]:
    """Return the form of the model with the most fused attention layers, and their number. Return (None, 0) if nothing
    was fused.
    """
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    best: tuple[ir.Model | None, int] = (None, 0)
    for family in FAMILIES:
        options = FusionOptions(family)
        # Fuse only attention, because the runtime makes all other fusions when it loads the quantized model.
        for field in vars(options):
            if field.startswith("enable_"):
                setattr(options, field, field in ("enable_attention", "enable_layer_norm", "enable_shape_inference"))
        # By default, only the length of a mask is used, which is wrong if the padding is on the left.
        options.use_raw_attention_mask(True)
        draft = ir.external_data.load_to_model(model.clone())
        split_unsqueezes(draft)
        optimized = optimize_model(
            to_proto(draft), model_type=family, num_heads=0, hidden_size=0, opt_level=0, optimization_options=options
        ).model
        fused = from_proto(optimized)
        name_nodes(fused)
        count = _count(fused) - _count(model)
        # Families recognise different exporters' forms, so the one that fuses most fits this model.
        if count > best[1]:
            fused.opset_imports.setdefault(MICROSOFT, 1)
            best = (fused, count)
    return best


def _count(model: ir.Model) -> int:
    return sum(node.op_type == "Attention" and node.domain == MICROSOFT for node in model.graph)


def split_unsqueezes(model: ir.Model) -> int:
    """Split each Unsqueeze over several constant axes into one node for each axis, in place. Return how many were
    split. With single axes, the optimizer recognises an attention mask.
    """
    editor = Editor(model)
    count = 0
    for node in model.graph:
        axes = constant(node_input(node, 1)) if is_op(node, "Unsqueeze") else None
        if axes is None or axes.size < 2 or axes.min() < 0:
            continue
        count += 1
        value = node.inputs[0]
        *inner, outer = sorted(axes.reshape(-1).tolist())
        for axis in inner:
            inputs = [value, editor.constant(f"{node.name}/axes{axis}", np.array([axis], np.int64))]
            value = editor.node("Unsqueeze", inputs, f"{node.name}/axis{axis}", before=node)
        node.replace_input_with(0, value)
        node.replace_input_with(1, editor.constant(f"{node.name}/axes{outer}", np.array([outer], np.int64)))
    return count
