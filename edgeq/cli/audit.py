"""`edgeq audit`: what 16-bit sums of products do to a quantized model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgeq.cli._common import Lines, Printer, common, table
from edgeq.cli._options import PATH, PREPROCESS, SESSION_OPTIONS, target_option

if TYPE_CHECKING:
    from edgeq.jobs.saturation import Audited


@click.command("audit")
@click.argument("model", type=PATH)
@click.option("--data", help="Samples to simulate MODEL on. Without them the weights alone show what can saturate.")
@PREPROCESS
@click.option("--count", type=click.IntRange(min=1), help="Samples to simulate. Default: 2 to 8, by the model's size.")
@click.option("--float", "reference", type=PATH, help="The float32 model, to measure what saturation costs.")
@click.option("--variant", metavar="NAME", help="The variant, where MODEL is a bundle.")
@click.option("--engine", metavar="ENGINE", help="Whose kernels. Default: the variant's, else onnxruntime's own.")
@target_option(help="Where they run: nothing saturates on a target with exact kernels. Default: any that saturates.")
@SESSION_OPTIONS
@common
def command(
    printer: Printer,
    model: Path,
    data: str | None,
    preprocess: str | None,
    count: int | None,
    reference: Path | None,
    variant: str | None,
    engine: str | None,
    target: str | None,
    session_options: tuple[str, ...],
) -> None:
    """List the layers of MODEL, a quantized model or a bundle, that saturate on x86 CPUs without VNNI.

    Their kernels add two products in 16 bits. The weights bound which output channels can overflow that; with --data,
    the model is computed as such a CPU would, and the outputs are compared.

    \b
    edgeq audit int8.onnx
    edgeq audit int8.onnx --data val/ --preprocess imagenet --float model.onnx
    edgeq audit int8.onnx --engine openvino -t haswell
    """
    from edgeq.data.open_source import Data
    from edgeq.hardware.target import resolve
    from edgeq.jobs.saturation import audit_saturation
    from edgeq.run.engines import choose_engine
    from edgeq.run.session import given_options

    result = audit_saturation(
        model,
        Data(data, preprocess, count=count) if data is not None else None,
        reference=reference,
        variant=variant,
        config=given_options(session_options),
        engine=choose_engine(engine).engine if engine is not None else None,
        target=resolve(target) if target is not None else None,
        progress=printer.progress(),
    )
    printer.lines(result, _draw(result, verbose=printer.verbose))


def _draw(result: Audited, *, verbose: bool) -> Lines:
    from edgeq.run.engines import DEFAULT

    found = result.audit
    engine = f" in {result.engine}" if result.engine != DEFAULT else ""
    target = f" on {result.target}" if result.target else ""
    yield f"{result.name}{engine}{target}: {found.summary()}"
    shown = [layer for layer in found.layers if verbose or layer.can_saturate]
    if shown:
        rows = []
        for layer in shown:
            share = f"{layer.clipped / layer.sums:.3%}" if layer.sums else ""
            known = [layer.channels, layer.suspects, layer.worst_pair]
            numbers = ["?" if value is None else str(value) for value in known]
            rows.append((layer.name, layer.op_type, *numbers, share))
        heads = ("layer", "operator", "channels", "can saturate", "worst pair", "clipped")
        yield table(heads, rows, numbers_from=2, box=None, pad_edge=False)
        yield "worst pair: the largest sum of two neighbouring weights of one sign; up to 128 cannot saturate"
    if found.float_db is not None:
        saturating, exact = found.float_db
        yield f"against float32: {exact:.1f} dB SQNR on exact kernels, {saturating:.1f} dB where it saturates"
