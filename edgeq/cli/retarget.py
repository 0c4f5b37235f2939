"""`edgeq retarget MODEL -o OUT.onnx`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgeq.cli._common import Printer, common
from edgeq.cli._options import FORCE, INTEGER, OUTPUT, PATH, target_option

if TYPE_CHECKING:
    from edgeq.retarget.run import Retargeted


@click.command("retarget")
@click.argument("model", type=PATH)
@click.option("-o", "--output", type=OUTPUT, required=True, metavar="OUT.onnx", help="The rewritten model.")
@target_option(help="Take format and types of auto, a target, a profile or a .toml file.")
@click.option("--format", "format_", type=click.Choice(["QDQ", "QOperator"]), help="How quantization is written.")
@click.option("--activation-type", type=INTEGER, help="Integers of activations.")
@click.option("--weight-type", type=INTEGER, help="Integers of weights.")
@FORCE
@common
def command(
    printer: Printer,
    model: Path,
    output: Path,
    target: str | None,
    format_: str | None,
    activation_type: str | None,
    weight_type: str | None,
    force: bool,
) -> None:
    """Rewrite a quantized MODEL for another runtime; the numbers it stands for stay.

    Without options it is made to suit this machine.

    \b
    edgeq retarget qat.onnx -o fast.onnx
    edgeq retarget qat.onnx --activation-type uint8 -o u8s8.onnx
    edgeq retarget qat.onnx --format QOperator -o integer.onnx
    """
    from edgeq.retarget.run import retarget

    named = target or format_ or activation_type or weight_type
    result = retarget(
        model,
        output,
        target=target if named else "auto",
        format=format_,
        activation_type=activation_type,
        weight_type=weight_type,
        force=force,
    )
    printer.lines(result, _lines(model, result))


def _lines(model: Path, result: Retargeted) -> Iterator[str]:
    before, after = (f"{form.format} {form.pair}" for form in (result.before, result.after))
    yield f"{model}: {before} → {result.output}: {after}"
    yield from (f"  {line}" for line in result.changes or ("nothing had to be changed",))
    yield from (f"note: {line}" for line in result.kept)
    if result.comparison is not None:
        off = f"within {result.comparison.largest:.2%} of the largest"
        yield f"outputs on noise: {'the same to the last bit' if result.comparison.identical else off}"
    for key, value in result.session_options.items():
        yield f"run it with the session option {key}={value}"
