"""quantize_qat of ONNX Runtime's documentation, 2020 to 2021: a model from quantization-aware training to QOperator."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from edgeq.compat.enums import quant_type
from edgeq.compat.source import LOG, ModelInput, Written, as_file, listed
from edgeq.retarget.run import retarget

_NAMES = {"QInt8": "int8", "QUInt8": "uint8"}


def quantize_qat(
    model_input: ModelInput,
    model_output: str | Path,
    op_types_to_quantize: Sequence[str] | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    activation_type: Any = "QUInt8",
    weight_type: Any = None,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    use_external_data_format: bool = False,
) -> Written:
    """Make integer operators of what stands between QuantizeLinear and DequantizeLinear nodes.

    ONNX Runtime runs such models as they are too, and as fast; `edgeq retarget` changes their types alone.

    Args:
        activation_type: QuantType or its name; int8 activations become uint8 exactly, by shifting zero points.
        weight_type: None leaves weights in the type that training gave them.
        per_channel, reduce_range: were decided in training; accepted.
        op_types_to_quantize, nodes_to_quantize, nodes_to_exclude: which operators to rewrite; None or empty: all.
        use_external_data_format: accepted: large models always keep their weights beside the file.

    Raises:
        ModelError: the model has no Q and DQ nodes with constant scales, or is damaged.
        CheckFailedError: the rewritten model answers otherwise.
    """
    del use_external_data_format
    if per_channel or reduce_range:
        LOG.warning("per_channel and reduce_range were decided in training; they change nothing here")

    types, included, excluded = map(listed, (op_types_to_quantize, nodes_to_quantize, nodes_to_exclude))

    def wanted(node: ir.Node) -> bool:
        """Whether the arguments let this node be quantized."""
        return (
            (not types or node.op_type in types)
            and (not included or node.name in included)
            and node.name not in excluded
        )

    with tempfile.TemporaryDirectory(prefix="edgeq-qat-") as folder:
        result = retarget(
            as_file(model_input, Path(folder)),
            model_output,
            format="QOperator",
            activation_type=_integer(activation_type),
            weight_type=_integer(weight_type),
            wanted=wanted,
            force=True,
        )
    for line in result.kept:
        LOG.warning("%s", line)
    return Written(result.output, {}, (*result.changes, *result.kept))


def _integer(value: Any) -> str | None:
    if value is None:
        return None
    name = str(quant_type(value).name)
    return _NAMES.get(name, name)
