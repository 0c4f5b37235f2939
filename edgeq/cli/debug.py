"""edgeq debug: which layers of a quantized model lose the accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from edgeq.cli._common import Printer, common
from edgeq.cli._options import OWN_PREPROCESS, PATH, SESSION_OPTIONS, START, STRIDE, THREADS, VARIANT


@click.command("debug")
@click.argument("float_model", type=PATH, metavar="FLOAT")
@click.argument("quantized", type=PATH, metavar="INT8|BUNDLE")
@click.option("--data", required=True, help="Samples: a folder, .npz, .npy, .pb ... Labels are not needed.")
@OWN_PREPROCESS
@click.option("--count", type=click.IntRange(min=1), default=32, show_default=True, help="At most so many samples.")
@START
@STRIDE
@click.option("--worst", type=click.IntRange(min=1), default=10, show_default=True, help="Name at most so many layers.")
@VARIANT
@THREADS
@click.option("--engine", metavar="ENGINE", help="Compare each tensor in this engine, too: qnn, openvino:bf16.")
@SESSION_OPTIONS
@click.option("--memory", metavar="SIZE", help="What tensors may take at once, such as 500MB; more passes if less.")
@common
def command(
    printer: Printer, session_options: Sequence[str], engine: str | None, memory: str | None, **options: Any
) -> None:
    """Compare a quantized model with its float model, layer by layer, and name the layers that lose the accuracy.

    \b
    edgeq debug model.onnx int8.onnx --data calib/ --preprocess imagenet
    edgeq debug model.onnx dist/ --data calib/ --json
    edgeq debug model.onnx npu.onnx --data calib/ --engine qnn
    """
    from edgeq.calibrate.run import parse_bytes
    from edgeq.cli._layers import draw_diagnosis
    from edgeq.measure.debug import debug
    from edgeq.run.session import given_options

    found = debug(
        **options,
        session_options=given_options(session_options),
        engine=engine or "",
        memory=parse_bytes(memory) if memory is not None else None,
        progress=printer.progress(),
    )
    printer.lines(found, draw_diagnosis(found, verbose=printer.verbose))
