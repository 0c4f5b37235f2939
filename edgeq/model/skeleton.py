"""Take the weights out of a model and put them back, for tools that read all of a model but need no weights."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from edgeq.model.convert import to_proto
from edgeq.model.tensors import is_external, tensor_bytes

MAX_INLINE_BYTES = 1024
"""Size of the largest tensor, in bytes, that a skeleton keeps. Such a tensor may be a shape, axes or a scale that shape
inference and conversion read."""


def skeleton(model: ir.Model) -> onnx.ModelProto:
    """Return the protobuf of `model` without the large and the external initializers of the main graph. These become
    graph inputs of the same type and shape. Initializers of bodies stay, because a body cannot get additional inputs.
    """
    graph = model.graph
    large = {name for name, value in graph.initializers.items() if _is_large(value.const_value)}
    values = graph.initializers.values()
    # A view takes a third of the time of a copy, which matters for models with many nodes.
    view = ir.GraphView(
        [*graph.inputs, *(v for v in values if v.name in large and not v.is_graph_input())],
        graph.outputs,
        nodes=graph,
        initializers=[v for v in values if v.name not in large],
        doc_string=graph.doc_string,
        opset_imports=graph.opset_imports,
        name=graph.name,
        metadata_props=graph.metadata_props,
    )
    bare = ir.Model(
        view,  # type: ignore[arg-type]
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        producer_version=model.producer_version,
        domain=model.domain,
        model_version=model.model_version,
        doc_string=model.doc_string,
        functions=tuple(model.functions.values()),
        metadata_props=model.metadata_props,
    )
    return to_proto(bare)


def _is_large(tensor: ir.TensorProtocol | None) -> bool:
    return tensor is not None and (isinstance(tensor, ir.ExternalTensor) or tensor.nbytes > MAX_INLINE_BYTES)


def proto_skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the `skeleton` of a protobuf. The protobuf need not have been checked."""
    copy = without_initializers(model)
    inputs = {i.name for i in model.graph.input}
    for tensor in model.graph.initializer:
        if is_external(tensor) or tensor_bytes(tensor) > MAX_INLINE_BYTES:
            if tensor.name not in inputs:
                copy.graph.input.append(
                    onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
                )
        else:
            copy.graph.initializer.add().CopyFrom(tensor)
    return copy


def without_initializers(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model without the initializers of its main graph."""
    copy = onnx.ModelProto()
    for field, value in model.ListFields():
        if field.name != "graph":
            _assign(copy, field.name, value)
    for field, value in model.graph.ListFields():
        if field.name != "initializer":
            _assign(copy.graph, field.name, value)
    return copy


def shaped_skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto_skeleton` with a shape on every input and output. onnx's checker requires a shape. ONNX Runtime
    does not, and many exporters leave it out.
    """
    bare = proto_skeleton(model)
    for value in [*bare.graph.input, *bare.graph.output]:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    return bare


def reattach(bare: onnx.ModelProto, model: ir.Model) -> ir.Model:
    """Return the model of `bare` with the weights of `model`. `bare` is a skeleton of `model` that may have been
    changed.
    """
    attached = ir.serde.deserialize_model(bare)
    inputs = {value.name: value for value in attached.graph.inputs}
    input_names = {value.name for value in model.graph.inputs}
    for name, old in model.graph.initializers.items():
        if name in attached.graph.initializers:
            continue
        value = inputs[name]
        value.const_value = old.const_value
        if name not in input_names:
            attached.graph.inputs.remove(value)
        attached.graph.register_initializer(value)
    return attached


def _assign(message: object, name: str, value: object) -> None:
    target = getattr(message, name)
    if hasattr(target, "CopyFrom") and not hasattr(target, "extend"):
        target.CopyFrom(value)
    elif hasattr(target, "extend"):
        target.extend(value)
    else:
        setattr(message, name, value)
