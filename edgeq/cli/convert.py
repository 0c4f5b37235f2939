"""Implement `edgeq retarget` and `emit-c`, which write a quantized model in another form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeq.cli._checked_text import SOURCE
from edgeq.cli._common import Printer, command
from edgeq.cli._options import FORCE, INTEGER, OUTPUT, PATH, PREPROCESS, target_option

if TYPE_CHECKING:
    from edgeq.retargeting.run import Retargeted


@command("retarget")
@click.argument("model", type=PATH)
@click.option("-o", "--output", type=OUTPUT, required=True, metavar="OUT.onnx", help="Path of the rewritten model.")
@target_option(help="Use the format and types of this machine (auto), a target, a profile or a .toml file.")
@click.option("--format", type=click.Choice(["QDQ", "QOperator"]), help="Format in which quantization is written.")
@click.option("--activation-type", type=INTEGER, help="Integer type of activations.")
@click.option("--weight-type", type=INTEGER, help="Integer type of weights.")
@FORCE
def retarget_command(printer: Printer, model: Path, output: Path, force: bool, **options: Any) -> None:
    """Rewrite a quantized MODEL for another runtime without changing the values that it represents.

    Without options, the result suits this machine.

    \b
    edgeq retarget qat.onnx -o fast.onnx
    edgeq retarget qat.onnx --activation-type uint8 -o u8s8.onnx
    edgeq retarget qat.onnx --format QOperator -o integer.onnx
    """
    from edgeq.retargeting.run import retarget

    if not any(options.values()):
        options["target"] = "auto"
    result = retarget(model, output, force=force, **options)
    printer.lines(result, _retarget_lines(model, result))


def _retarget_lines(model: Path, result: Retargeted) -> Iterator[str]:
    source_form, new_form = (f"{form.format} {form.pair}" for form in (result.before, result.after))
    yield f"{model}: {source_form} → {result.output}: {new_form}"
    yield from (f"  {line}" for line in result.changes or ("nothing had to be changed",))
    yield from (f"note: {line}" for line in result.kept)
    yield from _agreements(result)
    for key, value in result.session_options.items():
        yield f"run it with the session option {key}={value}"


def _agreements(result: Retargeted) -> Iterator[str]:
    """Yield what the comparisons on noise show, each with the kind of session in which the models ran."""
    off, on, default = result.comparison, result.by_default, "by default"
    if result.output.suffix != ".onnx":
        off, default = None, "in the target's kernels"
    if off is not None and on is not None and off.identical and on.identical:
        yield "outputs on noise: the same to the last bit, by default and without the optimiser"
        return
    for agreement, condition in ((on, default), (off, "without the optimiser")):
        if agreement is not None:
            extent = (
                "the same to the last bit" if agreement.identical else f"within {agreement.largest:.2%} of the largest"
            )
            yield f"outputs on noise, {condition}: {extent}"


@command("emit-c")
@click.argument("program", type=PATH, metavar="PROGRAM.npz|INT8.onnx")
@click.option("--data", type=SOURCE, required=True, help="Samples. The first ones become the images of the C bundle.")
@PREPROCESS
@click.option("-o", "--output", type=OUTPUT, required=True, metavar="DIR", help="Folder for the C bundle.")
@click.option(
    "--images", type=click.IntRange(min=1), default=2, show_default=True, help="Samples in one run of the C program."
)
@click.option(
    "--generation",
    type=click.Choice(["2023", "2021"]),
    default="2023",
    show_default=True,
    help="Version of gemmini.h: 2023 takes rows and columns separately, 2021 takes only square images.",
)
@click.option("--params-header", type=PATH, help="gemmini_params.h of the chip. [default: one for the target's array]")
@FORCE
def emit_c_command(printer: Printer, program: Path, output: Path, **options: Any) -> None:
    """Write C for a systolic array from a program that `quantize` or `package` wrote for that array.

    \b
    edgeq quantize model.onnx -t gemmini --data calib/ -o int8.onnx
    edgeq emit-c int8.onnx --data calib/ -o c/
    make -C c check
    """
    from edgeq.backends.systolic.emit_c.folder import emit_c
    from edgeq.data.open_source import Data

    data = Data(options.pop("data"), options.pop("preprocess"))
    result = emit_c(program, data, output, progress=printer.progress(), **options)
    layers = f"{result.output}: {len(result.bundle.layers)} layers, DIM {result.program.array.dim}"
    notes = (f"note: {note}" for note in result.bundle.notes)
    printer.lines(result, [layers, *notes, f"check it: make -C {result.output} check"])
