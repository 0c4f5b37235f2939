"""Run the command that precedes calibrate.py in ONNX Runtime's RISC-V fork: python -m edgeq.compat.optimize.

The command turns constants into initializers and folds BatchNormalization. `edgeq.compat.preprocess` has more options.
"""

from __future__ import annotations

from pathlib import Path

import click

from edgeq.compat._command import OneLineCommand, run_program
from edgeq.compat._options import SETTINGS, switch
from edgeq.compat._printing import PrintedProgress, say
from edgeq.compat.preprocess import quant_pre_process


@click.command("optimize", cls=OneLineCommand, context_settings=SETTINGS)
@click.option("--input", "source", type=click.Path(path_type=Path), required=True, help="Float model.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Result; replaced if it exists.")
@switch("--replace_gemm", help="Accepted: a Gemm is quantized as it is.")
def command(source: Path, output: Path, replace_gemm: bool) -> None:
    """Fold constants and BatchNormalization to prepare a model for calibrate."""
    # edgeq quantizes a Gemm without splitting it into MatMul and Add.
    del replace_gemm
    quant_pre_process(source, output, skip_symbolic_shape=True, progress=PrintedProgress())
    say(f"{output}: next, python -m edgeq.compat.calibrate --model_path {output} --dataset_path FOLDER")


if __name__ == "__main__":
    run_program(command)
