"""quantize_dynamic of ONNX Runtime's documentation, 2020 to 2026."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeq.compat.enums import member, quant_type
from edgeq.compat.extra_options import CALIBRATION, check_options, writer_options
from edgeq.compat.source import LOG, ModelInput, Written, as_given, checked, listed, siblings, warn_unknown_nodes
from edgeq.errors import UsageError
from edgeq.model.load import path_of
from edgeq.quantize.quantizer import quantizer_files
from edgeq.quantize.weight_only import standard_attentions
from edgeq.util.outputs import output_file


def quantize_dynamic(
    model_input: ModelInput,
    model_output: str | Path,
    op_types_to_quantize: Sequence[str] | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    weight_type: Any = "QInt8",
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    use_external_data_format: bool = False,
    extra_options: Mapping[str, Any] | None = None,
    *,
    activation_type: Any = "QUInt8",
    optimize_model: bool | None = None,
    quant_format: Any = "QOperator",
) -> Written:
    """Quantize weights; ranges of activations are measured at run time. Parameters as in the documentation.

    Args:
        weight_type: QuantType or its name; products take QInt8 and QUInt8, tables of Gather others too.
        activation_type: of the documentation of 2020 to 2022; the runtime has QUInt8 only.
        optimize_model: of the documentation of 2021 to 2022; accepted.
        quant_format: of the documentation of 2022. QDQ is refused: onnxruntime's function does not take it either.

    Raises:
        UsageError, ModelError: bad arguments or model.
        RuntimeUnavailableError: ONNX Runtime does not take the result.
    """
    from onnxruntime.quantization import quantize_dynamic as write

    del optimize_model
    if member("QuantFormat", quant_format).name != "QOperator":
        raise UsageError(
            "dynamic quantization is written as operators (MatMulInteger, DynamicQuantizeLinear), not as QDQ",
            "Leave quant_format out",
        )
    if quant_type(activation_type).name != "QUInt8":
        raise UsageError("dynamic quantization measures activations as uint8", "Make activation_type QuantType.QUInt8")
    options = check_options(extra_options)
    for name in sorted(CALIBRATION & set(options)):
        LOG.warning("extra option %r has no effect on dynamic quantization", name)
    chosen = quant_type(weight_type)
    output = path_of(model_output, "output")
    included, excluded = listed(nodes_to_quantize), listed(nodes_to_exclude)
    with (
        tempfile.TemporaryDirectory(prefix="edgeq-dynamic-") as folder,
        output_file(output, force=True, beside=siblings(model_input, output)) as draft,
    ):
        prepared = as_given(model_input, Path(folder))
        warn_unknown_nodes(prepared.model, included, excluded)
        fix = "Keep the node in float with nodes_to_exclude, or choose other options"
        with quantizer_files(prepared.path, draft, prepared.source, fix, external=use_external_data_format) as files:
            write(
                **files,
                op_types_to_quantize=listed(op_types_to_quantize),
                per_channel=per_channel,
                reduce_range=reduce_range,
                weight_type=chosen,
                nodes_to_quantize=included,
                nodes_to_exclude=[*excluded, *standard_attentions(prepared.model)],
                extra_options=writer_options(options),
            )
        return checked(draft, output, prepared.notes)
