"""edgeq emit-c: an integer program as C."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeq.cli._common import Printer, common
from edgeq.cli._options import FORCE, OUTPUT, PATH, PREPROCESS

if TYPE_CHECKING:
    from edgeq.backends.systolic.emit_c.folder import Emitted


@click.command("emit-c")
@click.argument("program", type=PATH, metavar="PROGRAM.npz|INT8.onnx")
@click.option("--data", required=True, help="Samples; the first become the bundle's images.")
@PREPROCESS
@click.option("-o", "--output", type=OUTPUT, required=True, metavar="DIR", help="The C bundle.")
@click.option("--images", type=click.IntRange(min=1), default=2, show_default=True, help="Samples in one run of the C.")
@click.option(
    "--generation",
    type=click.Choice(["2023", "2021"]),
    default="2023",
    show_default=True,
    help="Calls of gemmini.h: with rows and columns apart, or square images only.",
)
@click.option("--params-header", type=PATH, help="The chip's gemmini_params.h; else one for the target's array.")
@FORCE
@common
def command(printer: Printer, program: Path, output: Path, **options: Any) -> None:
    """Write C for an array from the program that `quantize` or `package` for such a target left.

    \b
    edgeq quantize model.onnx -t gemmini --data calib/ -o int8.onnx
    edgeq emit-c int8.onnx --data calib/ -o c/
    make -C c check
    """
    from edgeq.backends.systolic.emit_c.folder import emit_c
    from edgeq.data.open_source import Data

    data = Data(options.pop("data"), options.pop("preprocess"))
    result = emit_c(program, data, output, progress=printer.progress(), **options)
    printer.lines(result, _lines(result))


def _lines(result: Emitted) -> list[str]:
    return [
        f"{result.output}: {len(result.bundle.layers)} layers, DIM {result.program.array.dim}",
        *(f"note: {note}" for note in result.bundle.notes),
        f"check it: make -C {result.output} check",
    ]
