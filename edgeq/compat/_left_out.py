"""The modules of onnxruntime.quantization that have no counterpart in edgeq.compat, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ONNXRUNTIME = "1.32"
"""The release whose public names were gone through."""


@dataclass(frozen=True)
class LeftOut:
    """Why a module is left out, and what to do instead, a sentence each."""

    reason: str
    instead: str


LEFT_OUT: Mapping[str, LeftOut] = {
    "execution_providers.qnn.fusion_lpnorm": LeftOut(
        "It is a pass of qnn_preprocess_model.", "Call edgeq.compat.execution_providers.qnn.qnn_preprocess_model"
    ),
    "execution_providers.qnn.fusion_spacetodepth": LeftOut(
        "It is a pass of qnn_preprocess_model.", "Call edgeq.compat.execution_providers.qnn.qnn_preprocess_model"
    ),
    "fusions": LeftOut(
        "Its classes are passes of onnxruntime's pre-processing.", "Call edgeq.compat.quant_pre_process"
    ),
    "neural_compressor": LeftOut(
        "It is a copy of another tool's code, which MatMulNBitsQuantizer calls.",
        "Give a configuration of edgeq.compat.matmul_nbits_quantizer to its MatMulNBitsQuantizer",
    ),
    "operators": LeftOut(
        "Its classes say how onnxruntime's quantizer writes one operator, and edgeq does not ask them.",
        "Import them from onnxruntime.quantization.operators",
    ),
}
"""By the module's name below onnxruntime.quantization; what lies in it is left out with it."""


def left_out(module: str) -> ImportError:
    """Make the error for an import of a module that is left out."""
    return ImportError(why(module), name=f"edgeq.compat.{module}")


def why(module: str) -> str:
    """Say in one line why a module is left out and what to do instead."""
    entry = LEFT_OUT[module]
    return f"edgeq.compat has no {module}. {entry.reason} {entry.instead}"
