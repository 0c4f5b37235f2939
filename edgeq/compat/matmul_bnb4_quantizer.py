"""Replace `onnxruntime.quantization.matmul_bnb4_quantizer`, which converts the weights of MatMul to 4-bit floats (FP4
or NF4).

The module is also a command: `python -m edgeq.compat.matmul_bnb4_quantizer`. onnxruntime's own code computes the 4-bit
values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from edgeq.compat._command import run_printed, run_program
from edgeq.compat._names import find, quantization_tools
from edgeq.compat._options import ArgumentParser
from edgeq.compat.source import ModelInput, listed, siblings
from edgeq.errors import ModelError, UsageError
from edgeq.model.convert import from_proto
from edgeq.model.load import load_model, save_model
from edgeq.quantization.quantizer import refusals
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.outputs import output_file
from edgeq.util.paths import path_of

_OPERATOR = "MatMulBnb4"


def __getattr__(name: str) -> Any:
    return find(name, "matmul_bnb4_quantizer")


class MatMulBnb4Quantizer:
    """Provide the quantizer that ONNX Runtime's documentation describes, with the same arguments. Call `process()`,
    then `model.save_model_to_file(path)`.

    Attributes:
        model: onnxruntime's ONNXModel, quantized after `process`.
    """

    FP4 = 0
    NF4 = 1

    def __init__(
        self, model: ModelInput, quant_type: int, block_size: int, nodes_to_exclude: Sequence[str] | None = None
    ) -> None:
        if quant_type not in (self.FP4, self.NF4):
            raise UsageError(f"quant_type is {quant_type!r}", "Give 0 for FP4, or 1 for NF4")
        # A wrong size is refused here, with the valid sizes in the message.
        if not isinstance(block_size, int) or block_size < 16 or block_size & (block_size - 1):
            raise UsageError(f"block_size is {block_size!r}", "Give a power of two, 16 or more")
        if not isinstance(model, onnx.ModelProto):
            model = load_model(path_of(model), external_data="all")
        theirs = quantization_tools("matmul_bnb4_quantizer").MatMulBnb4Quantizer
        self._quantizer = theirs(model, quant_type, block_size, listed(nodes_to_exclude))
        self.model = self._quantizer.model

    def process(self) -> None:
        """Quantize the model.

        Raises:
            ModelError: the quantizer does not accept the model, or the model has no MatMul with a constant matrix.
        """
        with refusals("the model", "Keep the node in float with nodes_to_exclude"):
            self._quantizer.process()
        # A model without such a matrix comes back unchanged.
        if not any(node.op_type == _OPERATOR for node in self.model.nodes()):
            raise ModelError(
                "the model has no MatMul with a constant matrix", "Exclude fewer nodes, or quantize it statically"
            )


def parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    options = ArgumentParser("edgeq.compat.matmul_bnb4_quantizer", description="Put weights into 4-bit floats.")
    options.add_argument("--input_model", type=Path, required=True, help="Float model.")
    options.add_argument("--output_model", type=Path, required=True, help="Quantized model; must not exist.")
    options.add_argument("--quant_type", type=int, choices=[0, 1], default=1, help="0 for FP4, 1 for NF4.")
    options.add_argument("--block_size", type=int, default=64, help="Number of weights that share a scale.")
    options.add_argument("-v", "--verbose", action="store_true", help="Accepted.")
    options.add_argument("--nodes_to_exclude", nargs="+", default=[], help="Nodes to keep in float.")
    return options


def run(arguments: Sequence[str]) -> str:
    """Run the command with the given arguments and return the line to print."""
    options = parser().parse_args(arguments)
    if options.output_model.exists():
        raise UsageError(f"{options.output_model} exists", "Choose another --output_model, or remove it")
    quantizer = MatMulBnb4Quantizer(
        options.input_model, options.quant_type, options.block_size, options.nodes_to_exclude
    )
    quantizer.process()
    data_files = siblings(options.input_model, options.output_model)
    with output_file(options.output_model, force=True, beside=data_files) as draft:
        save_model(from_proto(quantizer.model.model), draft)
        # A file that onnxruntime cannot open is not written.
        open_session(draft, SessionSettings())
    return f"{options.output_model}: {('FP4', 'NF4')[options.quant_type]}, blocks of {options.block_size}"


main = partial(run_printed, run)

if __name__ == "__main__":
    run_program(main)
