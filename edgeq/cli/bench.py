"""edgeq bench: latency and throughput of a model or a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgeq.cli._common import Printer, common
from edgeq.cli._options import ENGINE_HELP, OWN_PREPROCESS, PATH, SESSION_OPTIONS


@click.command("bench")
@click.argument("model", type=PATH, metavar="MODEL|BUNDLE")
@click.option("--against", type=PATH, help="Compare with this model, measured interleaved.")
@click.option("--variant", help="Variant of the bundle; else the one that fits this machine.")
@click.option("--engine", "engines", multiple=True, metavar="ENGINE", help=f"{ENGINE_HELP} Repeatable: compares them.")
@click.option(
    "--scenario",
    type=click.Choice(["single-stream", "multi-stream", "server", "offline", "all"]),
    default="single-stream",
    show_default=True,
    help="MLPerf's scenarios: what a query is, and when it comes.",
)
@click.option("--threads", type=int, default=0, help="Threads inside an operator; 0: onnxruntime's choice.")
@SESSION_OPTIONS
@click.option("--pin", metavar="CORES", help="Run on these cores only, such as 0,2-3.")
@click.option("--duration", type=float, metavar="S", help="Seconds at least for each model. [2]")
@click.option("--official", is_flag=True, help="MLPerf's official duration: 600 seconds.")
@click.option(
    "--queries", "min_queries", type=int, default=100, show_default=True, help="Queries at least, each model."
)
@click.option("--data", "source", help="Samples to run: a folder, .npz, .npy, .pb ... Else inputs are made up.")
@OWN_PREPROCESS
@click.option("--count", type=click.IntRange(min=1), help="Samples of --data at most. [32]")
@click.option("--shape", "shapes", multiple=True, metavar="NAME=SIZES", help="Of a made-up input: x=1,3,224,224.")
@click.option("--batch", type=int, default=1, show_default=True, help="Samples a run (offline, multi-stream).")
@click.option("--qps", "target_qps", type=float, help="Server: arrival rate. Else the highest that holds is searched.")
@click.option("--latency-bound", "latency_bound_ms", type=float, metavar="MS", help="Server: on p99. [10 x p50]")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of sample order, interleaving and arrivals.")
@common
def command(
    printer: Printer,
    model: Path,
    against: Path | None,
    variant: str | None,
    engines: tuple[str, ...],
    source: str | None,
    preprocess: str | None,
    count: int | None,
    shapes: tuple[str, ...],
    session_options: tuple[str, ...],
    **options: Any,
) -> None:
    """Measure latency and throughput of a model or a bundle on this machine.

    A bundle's quantized model is measured interleaved with its float32 one. With -v the distributions are drawn.

    \b
    edgeq bench int8.onnx --against float.onnx --data val/ --preprocess imagenet
    edgeq bench bundle/ --scenario all --pin 0-3
    edgeq bench int8.onnx --engine onnxruntime --engine openvino
    """
    from edgeq_device.bench_settings import parse_settings
    from edgeq_device.feeds import parse_shapes

    from edgeq.device import device_errors
    from edgeq.engines import choose_engine
    from edgeq.measure.bench import BenchData, bench
    from edgeq.session import given_options

    with device_errors():
        settings = parse_settings(**options)
        data = BenchData(source, preprocess, count, parse_shapes(shapes))
    found = bench(
        model,
        against=against,
        variant=variant,
        engines=[choose_engine(text) for text in engines],
        data=data,
        settings=settings,
        session_options=given_options(session_options),
        progress=printer.progress(),
    )
    printer.result(found, lambda console: click.echo(found.text(verbose=printer.verbose)))
