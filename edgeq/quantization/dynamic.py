"""Quantize the weights now and the activations at run time, with onnxruntime's dynamic quantizer."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import onnx_ir as ir
from edgeq_device.system.places import scratch_folder

from edgeq.errors import UsageError
from edgeq.model.graph import MAIN_DOMAINS
from edgeq.model.int8_prediction import stacked_products
from edgeq.model.load import save_model
from edgeq.model.prepare import PreparedModel
from edgeq.quantization.quantizer import check_clashes, quant_type, quantizer_files
from edgeq.quantization.recurrent import IntegerWeights, expand_grus
from edgeq.quantization.tables import table_of, tables_note, write_tables
from edgeq.scheme import IntegerType, Scheme

# Operator types that onnxruntime's quantizer rewrites. The quantizer first replaces every plain Gemm by an Add and a
# MatMul whose name ends with `_GEMM_SUFFIX`.
_QUANTIZER_TYPES = frozenset({"Attention", "Conv", "EmbedLayerNormalization", "Gather", "Gemm", "LSTM", "MatMul"})
_GEMM_IS = {"Gemm": "MatMul"}
_GEMM_SUFFIX = "_MatMul"
_EDGEQ_TYPES = frozenset({"GRU"})
OPERATORS = tuple(sorted(_QUANTIZER_TYPES | _EDGEQ_TYPES))
# Largest integer weight with 7 bits and with 8 bits.
_LIMITS = {True: 63, False: 127}


def check_dynamic(scheme: Scheme) -> None:
    """Refuse a dynamic scheme that cannot be applied to any model.

    Raises:
        UsageError: the scheme has no weight types, or lists an operator type for which it has no weight type.
    """
    if not scheme.dynamic_weight_types:
        raise UsageError("dynamic quantization needs a weight type per operator type", "Choose a profile that has them")
    untyped = next((t for t in scheme.op_types or () if t in OPERATORS and t not in scheme.dynamic_weight_types), None)
    if untyped is not None:
        raise UsageError(
            f"the profile has no weight type for dynamic {untyped}", "Name one with ⟨weight_type⟩, or leave it in float"
        )


def write_dynamic(prepared: PreparedModel, scheme: Scheme, destination: Path) -> None:
    """Run onnxruntime's dynamic quantizer on the model and write its output. `finish_dynamic` does the rest.

    Raises:
        ModelError: the quantizer refuses the model.
    """
    by_type: dict[IntegerType, list[str]] = {}
    for op_type in sorted(_QUANTIZER_TYPES.intersection(scheme.quantized_types or ())):
        by_type.setdefault(scheme.dynamic_weight_types[op_type], []).append(op_type)
    # The quantizer accepts one weight type per call. So there is one pass for each type, over the nodes that the
    # previous pass left in float.
    source = prepared.path
    with scratch_folder("edgeq-dynamic-") as folder:
        for step, (weight_type, op_types) in enumerate(sorted(by_type.items())):
            target = destination if step == len(by_type) - 1 else Path(folder) / f"pass{step}.onnx"
            quantize_types(prepared, source, target, op_types, weight_type, scheme)
            source = target
    if not by_type:
        save_model(prepared.model, destination)


def finish_dynamic(model: ir.Model, scheme: Scheme) -> tuple[str, ...]:
    """Quantize the parts that onnxruntime's quantizer does not support or quantizes badly, in place, and return notes.

    These are the tables of Gather nodes, and GRU layers (`edgeq.quantization.recurrent`).
    """
    notes = []
    if _writes_tables(scheme) and (tables := write_tables(model, {}, scheme.exclude)[0]):
        notes.append(tables_note(tables))
    if _EDGEQ_TYPES.intersection(scheme.quantized_types or ()):
        quantizer = IntegerWeights(scheme.per_channel, _LIMITS[scheme.reduce_range])
        if names := expand_grus(model, quantizer, exclude=scheme.exclude):
            subject = f"the recurrence of {', '.join(names)}"
            notes.append(f"{subject} is written out with integer products, because GRU has no integer kernel")
    return tuple(notes)


def _writes_tables(scheme: Scheme) -> bool:
    """Return whether edgeq quantizes the tables itself, to signed integers with a scale for each row."""
    return "Gather" in (scheme.quantized_types or ()) and scheme.dynamic_weight_types["Gather"] == "int8"


def standard_attentions(model: ir.Model) -> set[str]:
    """Return the names of the nodes with ONNX's own Attention operator (opset 23).

    These nodes have no weights, but onnxruntime's quantizer mistakes them for onnxruntime's operator of the same name.
    """
    return {str(node.name) for node in model.graph if node.op_type == "Attention" and node.domain in MAIN_DOMAINS}


def quantize_types(
    prepared: PreparedModel,
    source: Path,
    target: Path,
    op_types: Collection[str],
    weight_type: IntegerType,
    scheme: Scheme,
) -> None:
    """Run onnxruntime's dynamic quantizer over the operators of some types, from the file `source` to the file
    `target`.

    Raises:
        ModelError: the quantizer refuses the model.
    """
    from onnxruntime.quantization import quantize_dynamic

    nodes = prepared.model.graph
    float_nodes = {str(node.name) for node in nodes if node.op_type not in op_types or node.name in scheme.exclude}
    float_nodes |= standard_attentions(prepared.model)
    if scheme.per_channel:
        float_nodes |= stacked_products(prepared.model)
    if _writes_tables(scheme):
        float_nodes |= {str(node.name) for node in nodes if table_of(node) is not None}
    fix = "Keep the node in float with ⟨exclude⟩, or choose another scheme"
    with quantizer_files(source, target, prepared.source, fix) as files:
        quantize_dynamic(
            **files,
            op_types_to_quantize=sorted({_GEMM_IS.get(op_type, op_type) for op_type in op_types}),
            per_channel=scheme.per_channel,
            reduce_range=scheme.reduce_range,
            weight_type=quant_type(weight_type),
            nodes_to_exclude=float_nodes | {f"{name}{_GEMM_SUFFIX}" for name in float_nodes},
            # Shape inference does not know the outputs of ONNX Runtime's own operators.
            extra_options={"DefaultTensorType": int(ir.DataType.FLOAT)},
        )
    check_clashes(prepared, source, target)
