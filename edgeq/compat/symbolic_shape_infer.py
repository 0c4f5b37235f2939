"""Run ONNX Runtime's `tools.symbolic_shape_infer` with its options: python -m edgeq.compat.symbolic_shape_infer.

The command runs ONNX Runtime's inference, but never merges two sizes that may differ. If this inference fails, the
command prints a note and writes the result of onnx's own inference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from edgeq_device.system.places import scratch_folder

from edgeq.compat._command import OneLineCommand, run_program
from edgeq.compat._options import SETTINGS
from edgeq.compat._printing import PrintedProgress, says
from edgeq.compat.preprocess import preprocessed, symbolic_options, write
from edgeq.model.shapes import SymbolicOptions, unknown_shapes


@click.command("symbolic_shape_infer", cls=OneLineCommand, context_settings=SETTINGS)
@click.option("--input", "source", type=click.Path(path_type=Path), required=True, help="Model.")
@click.option("--output", type=click.Path(path_type=Path), help="Result. If omitted, only unknown shapes are printed.")
@symbolic_options
@says
def command(
    *,
    source: Path,
    output: Path | None,
    auto_merge: bool,
    int_max: int,
    guess_output_rank: bool,
    verbose: int,
    **saved: Any,
) -> list[str]:
    """Infer the shapes of a model whose inputs have symbolic sizes."""
    with scratch_folder("edgeq-shapes-") as folder:
        model = preprocessed(
            source,
            Path(folder),
            symbolic=SymbolicOptions(int_max, guess_output_rank, verbose),
            optimize=False,
            onnx_shapes=False,
            progress=PrintedProgress(),
        )
        # Without an output, the command only tells which shapes are missing.
        if output is not None:
            write(model, output, source=source, **saved)
        unknown = unknown_shapes(model)
    listed = f": {', '.join(unknown)}" if unknown else ""
    return [f"{output or source}: {len(unknown)} tensors of unknown shape{listed}"]


if __name__ == "__main__":
    run_program(command)
