"""Dynamic quantization: weights as integers, activation ranges measured at run time, per operator type as the scheme
has it, since the same weight type is fast in one kernel and slower than float in another."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path

from onnx import TensorProto

from edgeq.backends.quantizer import needs_external_data, one_line, quant_type, quiet
from edgeq.backends.recurrent import IntegerWeights, expand_grus
from edgeq.errors import ModelError, UsageError
from edgeq.model.load import load_model, save_model
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


def write_dynamic(prepared: PreparedModel, scheme: Scheme, destination: Path) -> tuple[str, ...]:
    """Write the dynamically quantized model; returns notes.

    Raises:
        ModelError: onnxruntime's quantizer refuses the model.
    """
    wanted = {op_type: scheme.dynamic_weight_types[op_type] for op_type in sorted(scheme.quantized_types or ())}
    _quantize_types(prepared, scheme, {t: w for t, w in wanted.items() if t in _QUANTIZER}, destination)
    return _expand(scheme, destination) if "GRU" in wanted else ()


def _quantize_types(prepared: PreparedModel, scheme: Scheme, wanted: dict[str, IntegerType], destination: Path) -> None:
    by_type: dict[IntegerType, list[str]] = {}
    for op_type, weight_type in sorted(wanted.items()):
        by_type.setdefault(weight_type, []).append(op_type)
    # The runtime's quantizer takes one weight type a call: one pass a type, each over what the last one left in float.
    source = prepared.path
    with tempfile.TemporaryDirectory(prefix="edgeq-dynamic-") as folder:
        for step, (weight_type, op_types) in enumerate(sorted(by_type.items())):
            target = destination if step == len(by_type) - 1 else Path(folder) / f"pass{step}.onnx"
            quantize_types(prepared, source, target, op_types, weight_type, scheme)
            source = target
    if not by_type:
        save_model(load_model(prepared.path, external_data="all"), destination)


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

    nodes = load_model(prepared.path, external_data="none").graph.node
    kept = {node.name for node in nodes if node.op_type not in op_types or node.name in scheme.exclude}
    try:
        with quiet():
            quantize_dynamic(
                source,
                target,
                op_types_to_quantize=sorted({_GEMM_IS.get(op_type, op_type) for op_type in op_types}),
                per_channel=scheme.per_channel,
                reduce_range=scheme.reduce_range,
                weight_type=quant_type(weight_type),
                nodes_to_exclude=sorted(kept | {f"{name}{_GEMM_SUFFIX}" for name in kept}),
                use_external_data_format=needs_external_data(source),
                # Shape inference knows nothing of what the runtime's own operators give.
                extra_options={"DefaultTensorType": TensorProto.FLOAT},
            )
    except (ValueError, RuntimeError) as error:
        raise ModelError(
            f"{prepared.source}: onnxruntime's quantizer refuses it: {one_line(error)}",
            "Keep the node in float with --exclude, or choose another scheme",
        ) from error


def _expand(scheme: Scheme, destination: Path) -> tuple[str, ...]:
    model = load_model(destination, external_data="all")
    how = IntegerWeights(scheme.per_channel, _LIMITS[scheme.reduce_range])
    names = expand_grus(model, how, exclude=scheme.exclude)
    if not names:
        return ()
    save_model(model, destination)
    return (f"the recurrence of {', '.join(names)} is written out with integer products, which GRU has no kernel for",)
