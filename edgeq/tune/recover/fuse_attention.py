"""Attention as one node, where onnxruntime's transformer optimizer recognises it, so that it can become QAttention.

Which exports it recognises is its own business; whatever it makes is checked against the model on a sample.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgeq.backends.quantizer import quiet
from edgeq.data.samples import Samples
from edgeq.graph.convert import from_proto, to_proto
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.model.load import load_model, model_digest, read_model, save_model
from edgeq.model.names import name_nodes
from edgeq.model.prepare import PreparedModel
from edgeq.progress import Progress
from edgeq.session import open_session
from edgeq.tune.recover.base import Stage, State

FAMILIES = ("bert", "gpt2", "vit")
"""Model families of the optimizer, in the order in which they are tried."""
LEAST_SQNR_DB = 60.0
"""A fused float model computes in another order, no more."""
_CHECKED = 2
_ATTENTION, _DOMAIN = "Attention", "com.microsoft"


class FuseAttention:
    name = "fuse-attention"
    title = "attention as one node, quantized as QAttention"
    stage: Stage = "model"
    free = False

    def apply(self, state: State, samples: Samples, workdir: Path, progress: Progress) -> State:
        """See `Recovery.apply`."""
        prepared, count = fuse_attention(state.prepared, samples, workdir / "fused.onnx")
        if not count:
            return state.note("onnxruntime's optimizer recognises no attention in this model")
        return state.replace(prepared=prepared).note(f"{count} attention layers fused")


def may_have_attention(model: onnx.ModelProto) -> bool:
    """Whether there is a product of two activations behind a Softmax: cheap to see, before anything is tried."""
    constants = {tensor.name for tensor in model.graph.initializer}
    weights = {node.output[0] for node in model.graph.node if node.op_type == "Softmax"}
    return any(
        node.op_type == "MatMul" and node.input[0] in weights and node.input[1] not in constants
        for node in model.graph.node
    )


def fuse_attention(prepared: PreparedModel, samples: Samples, destination: Path) -> tuple[PreparedModel, int]:
    """Write the model with fused attention to `destination`; the prepared model it makes, and how many were fused.

    Nothing is written, and `prepared` comes back, where nothing is recognised or where the fused model computes
    something else.
    """
    with quiet():
        fused, count = _fused(prepared)
    if fused is None or not count:
        return prepared, 0
    named = from_proto(fused)
    name_nodes(named)
    fused = to_proto(named)
    if all(entry.domain != _DOMAIN for entry in fused.opset_import):
        fused.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    save_model(fused, destination)
    sessions = {"plain": open_session(prepared.path), "fused": open_session(destination)}
    agreement = evaluate_sessions(sessions, samples, reference="plain", count=_CHECKED).agreement["fused"]
    if agreement.sqnr_db < LEAST_SQNR_DB or any(output.nonfinite or output.mismatched for output in agreement.outputs):
        destination.unlink()
        return prepared, 0
    note = f"{count} attention layers fused by onnxruntime's transformer optimizer"
    notes = (*prepared.notes, note)
    return dataclasses.replace(
        prepared, model=read_model(destination), path=destination, digest=model_digest(destination), notes=notes
    ), count


def _fused(prepared: PreparedModel) -> tuple[onnx.ModelProto | None, int]:
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    best: tuple[onnx.ModelProto | None, int] = (None, 0)
    for family in FAMILIES:
        options = FusionOptions(family)
        # Only attention: all other fusions, the runtime makes itself when it loads the quantized model.
        for field in vars(options):
            if field.startswith("enable_"):
                setattr(options, field, field in ("enable_attention", "enable_layer_norm", "enable_shape_inference"))
        # The default form of a mask is its length, which is wrong for padding on the left.
        options.use_raw_attention_mask(True)
        model = load_model(prepared.path, external_data="all")
        before = _count(model)
        split_unsqueezes(model)
        optimized = optimize_model(
            model, model_type=family, num_heads=0, hidden_size=0, opt_level=0, optimization_options=options
        ).model
        count = _count(optimized) - before
        if count > best[1]:
            best = (optimized, count)
    return best


def _count(model: onnx.ModelProto) -> int:
    return sum(node.op_type == _ATTENTION and node.domain == _DOMAIN for node in model.graph.node)


def split_unsqueezes(model: onnx.ModelProto) -> int:
    """Make, in place, one node per axis of each Unsqueeze over several constant axes: the form in which the optimizer
    knows an attention mask. Returns how many were split."""
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in graph.node:
        axes: list[int] = []
        if node.op_type == "Unsqueeze" and len(node.input) > 1 and node.input[1] in constants:
            axes = numpy_helper.to_array(constants[node.input[1]]).reshape(-1).tolist()
        if len(axes) < 2 or min(axes) < 0:
            nodes.append(node)
            continue
        count += 1
        value = node.input[0]
        for position, axis in enumerate(sorted(axes)):
            last = position == len(axes) - 1
            made = node.output[0] if last else f"{node.name}/axis{axis}"
            name = f"{node.name}/axes{axis}"
            graph.initializer.append(numpy_helper.from_array(np.array([axis], np.int64), name))
            own = node.name if last else made
            nodes.append(helper.make_node("Unsqueeze", [value, name], [made], name=own))
            value = made
    del graph.node[:]
    graph.node.extend(nodes)
    return count
