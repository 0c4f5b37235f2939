"""Replace `onnxruntime.quantization.matmul_4bits_quantizer` of 2023 to 2025. Its name is now
`matmul_nbits_quantizer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgeq.compat import matmul_nbits_quantizer
from edgeq.compat._command import run_program
from edgeq.compat.matmul_nbits_quantizer import MatMulNBitsQuantizer, main
from edgeq.compat.source import ModelInput


# The configurations kept their names when the module was renamed.
def __getattr__(name: str) -> Any:
    return getattr(matmul_nbits_quantizer, name)


class MatMul4BitsQuantizer(MatMulNBitsQuantizer):
    """Quantize like `MatMulNBitsQuantizer` with 4 bits. The arguments have their earlier order."""

    def __init__(
        self,
        model: ModelInput,
        block_size: int = 128,
        is_symmetric: bool = False,
        accuracy_level: int | None = None,
        nodes_to_exclude: Sequence[str] | None = None,
        nodes_to_include: Sequence[str] | None = None,
        quant_format: Any = "QOperator",
        op_types_to_quantize: Sequence[str] | None = None,
        quant_axes: Sequence[tuple[str, int]] | None = None,
        algo_config: Any = None,
    ) -> None:
        # The second argument was the block size in these releases, so scripts that pass it by position still work.
        super().__init__(
            model,
            4,
            block_size,
            is_symmetric,
            accuracy_level,
            nodes_to_exclude,
            nodes_to_include,
            quant_format,
            op_types_to_quantize,
            quant_axes,
            algo_config=algo_config,
        )


if __name__ == "__main__":
    run_program(main)
