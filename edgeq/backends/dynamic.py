"""Dynamic quantization: weights as integers, activation ranges measured at run time, per operator type as the scheme
has it, since the same weight type is fast in one kernel and slower than float in another."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path

import onnx_ir as ir

from edgeq.backends.block_tables import table_of, write_tables
from edgeq.backends.quantizer import check_clashes, quant_type, quantizer_files
from edgeq.backends.recurrent import IntegerWeights, expand_grus
from edgeq.errors import UsageError
from edgeq.graph.query import MAIN_DOMAINS
from edgeq.model.int8_prediction import stacked_products
from edgeq.model.load import save_model
from edgeq.model.prepare import PreparedModel
from edgeq.scheme import IntegerType, Scheme

# Types that onnxruntime's quantizer rewrites; it first makes every plain Gemm a MatMul of this name and an Add.
_QUANTIZER = frozenset({"Attention", "Conv", "EmbedLayerNormalization", "Gather", "Gemm", "LSTM", "MatMul"})
_GEMM_IS = {"Gemm": "MatMul"}
_GEMM_SUFFIX = "_MatMul"
_OURS = frozenset({"GRU"})
OPERATORS = tuple(sorted(_QUANTIZER | _OURS))
# Largest weight of 7 and of 8 bits.
_LIMITS = {True: 63, False: 127}


def check_dynamic(scheme: Scheme) -> None:
    """Refuse a dynamic scheme that no model could be built with.

    Raises:
        UsageError: it has no weight types, lacks one for an operator type that it names, or has one too many.
    """
    if not scheme.dynamic_weight_types:
        raise UsageError("dynamic quantization needs a weight type per operator type", "Choose a profile that has them")
    untyped = next((t for t in scheme.op_types or () if t in OPERATORS and t not in scheme.dynamic_weight_types), None)
    if untyped is not None:
        raise UsageError(
            f"the profile has no weight type for dynamic {untyped}", "Name one with --weight-type, or leave it in float"
        )


def write_dynamic(prepared: PreparedModel, scheme: Scheme, destination: Path) -> None:
    """Write what onnxruntime's quantizer makes of the model; `finish_dynamic` does the rest.

    Raises:
        ModelError: the quantizer refuses the model.
    """
    by_type: dict[IntegerType, list[str]] = {}
    for op_type in sorted(_QUANTIZER.intersection(scheme.quantized_types or ())):
        by_type.setdefault(scheme.dynamic_weight_types[op_type], []).append(op_type)
    # The runtime's quantizer takes one weight type a call: one pass a type, each over what the last one left in float.
    source = prepared.path
    with tempfile.TemporaryDirectory(prefix="edgeq-dynamic-") as folder:
        for step, (weight_type, op_types) in enumerate(sorted(by_type.items())):
            target = destination if step == len(by_type) - 1 else Path(folder) / f"pass{step}.onnx"
            quantize_types(prepared, source, target, op_types, weight_type, scheme)
            source = target
    if not by_type:
        save_model(prepared.model, destination)


def finish_dynamic(model: ir.Model, scheme: Scheme) -> tuple[str, ...]:
    """Quantize, in place, what the scheme takes and onnxruntime's quantizer has no or no good form for: tables of
    Gather (`edgeq.backends.block_tables`) and GRU layers (`edgeq.backends.recurrent`); returns notes."""
    notes = []
    if _own_tables(scheme) and (tables := write_tables(model, {}, scheme.exclude)[0]):
        notes.append(f"the tables of {tables} Gather are in 8 bits with a scale for each row")
    if _OURS.intersection(scheme.quantized_types or ()):
        how = IntegerWeights(scheme.per_channel, _LIMITS[scheme.reduce_range])
        if names := expand_grus(model, how, exclude=scheme.exclude):
            which = f"the recurrence of {', '.join(names)}"
            notes.append(f"{which} is written out with integer products, which GRU has no kernel for")
    return tuple(notes)


def _own_tables(scheme: Scheme) -> bool:
    """Whether tables get a scale for each row, which are signed integers."""
    return "Gather" in (scheme.quantized_types or ()) and scheme.dynamic_weight_types["Gather"] == "int8"


def standard_attentions(model: ir.Model) -> set[str]:
    """Names of the nodes Attention of opset 23, without weights, which onnxruntime's quantizer takes for its own."""
    return {str(node.name) for node in model.graph if node.op_type == "Attention" and node.domain in MAIN_DOMAINS}


def quantize_types(
    prepared: PreparedModel,
    source: Path,
    target: Path,
    op_types: Collection[str],
    weight_type: IntegerType,
    scheme: Scheme,
) -> None:
    """onnxruntime's dynamic quantizer over operators of some types, `source` → `target`.

    Raises:
        ModelError: it refuses the model.
    """
    from onnxruntime.quantization import quantize_dynamic

    nodes = prepared.model.graph
    kept = {str(node.name) for node in nodes if node.op_type not in op_types or node.name in scheme.exclude}
    kept |= standard_attentions(prepared.model)
    if scheme.per_channel:
        kept |= stacked_products(prepared.model)
    if _own_tables(scheme):
        kept |= {str(node.name) for node in nodes if table_of(node) is not None}
    fix = "Keep the node in float with --exclude, or choose another scheme"
    with quantizer_files(source, target, prepared.source, fix) as files:
        quantize_dynamic(
            **files,
            op_types_to_quantize=sorted({_GEMM_IS.get(op_type, op_type) for op_type in op_types}),
            per_channel=scheme.per_channel,
            reduce_range=scheme.reduce_range,
            weight_type=quant_type(weight_type),
            nodes_to_exclude=kept | {f"{name}{_GEMM_SUFFIX}" for name in kept},
            # Shape inference does not know the outputs of the runtime's own operators.
            extra_options={"DefaultTensorType": int(ir.DataType.FLOAT)},
        )
    check_clashes(prepared, source, target)
