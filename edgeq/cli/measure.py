"""Implement `edgeq verify`, `bench` and `eval`, which check and measure models."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from edgeq_device.system.relay import escape

from edgeq.cli._checked_text import DROP, ENGINE_NAME, PREPROCESS_NAME, SOURCE, TASK
from edgeq.cli._common import Lines, Printer, command, styled, table
from edgeq.cli._next import choose_next
from edgeq.cli._options import (
    COMPLETE_TASK,
    ENGINE,
    ENGINE_HELP,
    OWN_PREPROCESS,
    PATH,
    REQUIRE_SIGNATURE,
    SESSION_OPTIONS,
    START,
    STRIDE,
    TASK_NAMES,
    THREADS,
    TRUST,
    VARIANT,
    WORKERS,
    Renamed,
    board_of,
    complete_board,
    complete_target,
    engines_of,
    on_board,
    task_options,
)
from edgeq.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from edgeq.measure.evaluation import EvalResult
    from edgeq.measure.latency import Measurement
    from edgeq.measure.preprocess_trial import PreprocessRanking
    from edgeq.remote.devices import Board
    from edgeq.reporting.timing import FleetRecord


@command("verify")
@click.argument("bundle", type=PATH)
@click.option("--variant", metavar="NAME", help="Check only this variant.")
@TRUST
@REQUIRE_SIGNATURE
@click.option("--expect", metavar="SHA256", help="Refuse the bundle if its manifest does not have this hash.")
@click.option(
    "--on",
    multiple=True,
    metavar="TARGET|BOARD|all",
    shell_complete=complete_target,
    help="Run the variant for this target on the target's kernels. `all` runs each variant on its own target. For a "
    "board, give its ssh:// address or its name in devices.toml. Repeatable.",
)
@click.option(
    "--data",
    type=SOURCE,
    help="Samples for comparing the target with this machine (with --on): a folder, .npz, .npy, .pb or another source "
    "(docs/data.md).",
)
@click.option(
    "--count",
    cls=Renamed,
    before=["--samples"],
    type=click.IntRange(min=1),
    help="Use at most this many samples of --data.",
)
@click.option(
    "--log",
    type=PATH,
    metavar="FILE",
    help="Check what a chip without edgeq's runner printed to FILE while it ran the variant's self-test.",
)
@click.option("--preprocess", type=PREPROCESS_NAME, help="Preprocessing of the samples. [default: the bundle's]")
@click.option(
    "--task", type=TASK, shell_complete=COMPLETE_TASK, help=f"Also measure accuracy with this task: {TASK_NAMES}."
)
@task_options()
@click.option(
    "--max-drop",
    type=DROP,
    metavar="DROP",
    help="Fail if accuracy on the target falls by more than this: 0.005, 0.5% or 0.5pt.",
)
def verify_command(printer: Printer, bundle: Path, variant: str | None, **options: Any) -> None:
    """Check the hashes and signature of BUNDLE (a folder or an .edgeq file), load it, and run its self-test.

    edgeq loads and tests the variants that can run on this machine.

    \b
    edgeq verify dist/ --trust build.pub
    edgeq verify dist/ --on all
    edgeq verify dist/ --on raspberry-pi-5 --data val/ --count 100 --task classification
    edgeq verify dist/ --on ssh://pi@10.0.0.5
    edgeq verify dist/ --log serial.txt
    """
    from edgeq_device.bundle.verify import report_lines

    from edgeq.bundle.verify import check_report, check_trusted, verify_bundle

    trust, expect, required = (options.pop(name) for name in ("trust", "expect", "require_signature"))
    if (log := options.pop("log")) is not None:
        from edgeq.prove.serial_check import check_log
        from edgeq.prove.verify_options import refuse_with_log

        refuse_with_log(options)
        expect = check_trusted(bundle, trust=trust, required=required, expect=expect)
        checked = check_log(bundle, log, variant=variant, expect=expect)
        printer.lines(checked, checked.lines())
        checked.check()
        return
    if options["on"]:
        from edgeq.remote.verify import verify_everywhere

        expect = check_trusted(bundle, trust=trust, required=required, expect=expect)
        verified = verify_everywhere(bundle, variant, {**options, "expect": expect}, progress=printer.progress())
        printer.lines(verified, verified.lines())
        verified.check()
        return

    from edgeq.prove.verify_options import refuse_without_target

    refuse_without_target(options)
    given = {"variant": variant, "trust": trust, "require_signature": required, "expect": expect}
    report = verify_bundle(bundle, progress=printer.progress(), **given)
    printer.lines(report, report_lines(report))
    check_report(report)


@command("bench")
@click.argument("model", type=PATH, metavar="MODEL|BUNDLE")
@click.option("--against", type=PATH, help="Compare with this model. edgeq times it in turns with MODEL.")
@VARIANT
@click.option(
    "--engine",
    "engines",
    type=ENGINE_NAME,
    multiple=True,
    metavar="ENGINE",
    help=f"{ENGINE_HELP} Repeatable, to compare engines.",
)
@click.option(
    "--scenario",
    type=click.Choice(["single-stream", "multi-stream", "server", "offline", "all"]),
    default="single-stream",
    show_default=True,
    help="MLPerf scenario. It sets the size of the queries and when they arrive.",
)
@THREADS
@SESSION_OPTIONS
@click.option("--pin", metavar="CORES", help="Run only on these cores, such as 0,2-3.")
@click.option("--duration", type=float, metavar="S", help="Minimum time for each model, in seconds. [default: 2]")
@click.option("--official", is_flag=True, help="Use MLPerf's official duration of 600 seconds.")
@click.option(
    "--queries",
    "min_queries",
    type=int,
    default=100,
    show_default=True,
    help="Minimum number of queries for each model.",
)
@click.option(
    "--data",
    "source",
    type=SOURCE,
    help="Samples to run: a folder, .npz, .npy, .pb or another source (docs/data.md). [default: generated inputs]",
)
@OWN_PREPROCESS
@click.option("--count", type=click.IntRange(min=1), help="Use at most this many samples of --data. [default: 32]")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="NAME=SIZES",
    help="Set the shape of a generated input: x=1,3,224,224. Repeatable.",
)
@click.option("--batch", type=int, default=1, show_default=True, help="Samples per run (offline, multi-stream).")
@click.option(
    "--qps",
    "target_qps",
    type=float,
    help="Server: queries per second. [default: the highest rate within the latency bound]",
)
@click.option(
    "--latency-bound",
    "latency_bound_ms",
    type=float,
    metavar="MS",
    help="Server: limit of the p99 latency, in milliseconds. [default: 10 x p50]",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    help="Seed for the order of the samples and models, and for the arrival of queries. [default: 0]",
)
@click.option(
    "--on",
    multiple=True,
    metavar="BOARD|FLEET.toml",
    shell_complete=complete_board,
    help="Measure on this board: ssh://user@host[:port], a name from devices.toml, or a file of boards. Repeatable.",
)
def bench_command(
    printer: Printer,
    model: Path,
    on: tuple[str, ...],
    engines: tuple[str, ...],
    shapes: tuple[str, ...],
    **options: Any,
) -> None:
    """Measure the latency and throughput of a model or a bundle on this machine.

    For a bundle, edgeq times the quantized model and its float32 model in turns. With -v, it also draws the
    distributions.

    \b
    edgeq bench int8.onnx --against float.onnx --data val/ --preprocess imagenet
    edgeq bench bundle/ --scenario all --pin 0-3
    edgeq bench int8.onnx --engine onnxruntime --engine openvino
    edgeq bench bundle/ --on ssh://pi@10.0.0.5
    edgeq bench bundle/ --on fleet.toml
    """
    from edgeq_device.measure.bench_settings import parse_settings
    from edgeq_device.measure.bench_text import format_bench
    from edgeq_device.prepare.feeds import parse_shapes

    from edgeq.measure.bench import BenchData, bench
    from edgeq.run.session import parse_session_options
    from edgeq.util.device_errors import device_errors

    of_model = {name: options.pop(name) for name in ("against", "variant", "session_options")}
    of_data = {name: options.pop(name) for name in ("source", "preprocess", "count")}
    with device_errors():
        settings = parse_settings(**options)
        data = BenchData(**of_data, shapes=parse_shapes(shapes))
    of_model["session_options"] = parse_session_options(of_model["session_options"])
    run = functools.partial(bench, model, engines=engines_of(engines), data=data, settings=settings, **of_model)
    if on:
        from edgeq.remote.bench import run_bench
        from edgeq.remote.devices import find_fleet

        boards = find_fleet(on)
        if len(boards) > 1:
            fleet = _on_fleet(printer, boards, run)
            printer.lines(fleet, [*(table(*part) for part in fleet.tables()), *fleet.lines()])
            fleet.check()
            return
        measurement = run_bench(boards[0], run, progress=printer.progress())
    else:
        measurement = run(progress=printer.progress())
    lines = format_bench(measurement.report, verbose=printer.verbose)
    printer.result(measurement, lambda: click.echo("\n".join(map(escape, lines))))


def _on_fleet(printer: Printer, boards: Sequence[Board], run: Callable[..., Measurement]) -> FleetRecord:
    """Measure on all the boards. On a terminal, a table shows the current step of each board."""
    from edgeq.remote.fleet import measure_fleet

    if printer.quiet or not sys.stderr.isatty():
        return measure_fleet(boards, run, lambda name, status: None)
    from rich.live import Live

    from edgeq.util.progress import watched_console

    doing = {board.name: "waiting" for board in boards}

    def drawn() -> Table:
        """Return a table of the boards and their current steps."""
        return table(("board", "status"), ([styled(text, "") for text in row] for row in list(doing.items())))

    with Live(console=watched_console(), get_renderable=drawn, transient=True):
        return measure_fleet(boards, run, doing.__setitem__)


@command("eval")
@click.argument("model", type=PATH, metavar="MODEL|BUNDLE")
@click.option(
    "--data", type=SOURCE, required=True, help="Samples: a folder, .npz, .npy, .pb or another source (docs/data.md)."
)
@click.option("--task", type=TASK, shell_complete=COMPLETE_TASK, help=f"Task for measuring accuracy: {TASK_NAMES}.")
@click.option("--reference", type=PATH, help="Model or bundle to compare with, on the same samples.")
@OWN_PREPROCESS
@click.option(
    "--try-preprocess", is_flag=True, help="Measure with every known preprocessing, to find the one that fits."
)
@task_options("--output")
@click.option("--count", type=click.IntRange(min=1), help="Use at most this many samples.")
@START
@STRIDE
@VARIANT
@THREADS
@ENGINE
@click.option(
    "--optimization",
    type=click.Choice(["none", "basic", "extended", "all"]),
    default="all",
    help="Graph optimisation level for a model file. Bundles keep their own level. [default: all]",
)
@SESSION_OPTIONS
@WORKERS
@on_board
def eval_command(printer: Printer, on: str | None, **options: Any) -> None:
    """Measure the accuracy of a model or a bundle on labelled data, or its agreement with a reference model.

    \b
    edgeq eval m.onnx --data val/ --task classification --preprocess imagenet
    edgeq eval int8.onnx --data val/ --reference float.onnx
    edgeq eval float.onnx --data val/ --reference float.onnx --engine openvino:bf16
    edgeq eval m.onnx --data val/ --task classification --count 100 --try-preprocess
    edgeq eval bundle/ --data val/ --task classification --on ssh://pi@10.0.0.5
    """
    from edgeq.distributed.workers import open_workers

    trial, workers = options.pop("try_preprocess"), options.pop("workers")
    if workers is not None and (trial or on is not None):
        raise UsageError("--workers does not go with --try-preprocess or --on", "Leave one of them out")
    if trial and on is not None:
        raise UsageError("--try-preprocess runs only on this machine", "Leave --on out")
    # the workers start up while this process imports these modules
    with open_workers(workers, ["edgeq.measure.evaluation"]) as pool:
        from edgeq.measure.evaluation import request_from_options, run_evaluation

        request = request_from_options(options)
        if on is not None:
            from edgeq.remote.evaluate import evaluate_board

            board_result = evaluate_board(request, board_of(on), progress=printer.progress())
            printer.lines(board_result, _eval_lines(board_result.result))
        elif trial:
            from edgeq.measure.preprocess_trial import try_preprocess

            tried = try_preprocess(request, progress=printer.progress())
            printer.lines(tried, _draw_trial(tried))
        else:
            evaluation = run_evaluation(request, workers=pool, progress=printer.progress())
            printer.lines(evaluation, _eval_lines(evaluation))
            choose_next(lambda: _propose_after(evaluation))


def _propose_after(evaluation: EvalResult) -> str | None:
    """Return the next line of an evaluation: quantize a float model, and compare any other with its float model."""
    from edgeq.model.load import is_quantized, read_model

    model = evaluation.request.model
    if evaluation.request.reference is None and model.suffix == ".onnx" and not is_quantized(read_model(model)):
        return "quantize {model} --data SAMPLES --val {data} -o int8.onnx ..."
    return "compare {reference|FLOAT.onnx} {model} ..."


def _draw_trial(trial: PreprocessRanking) -> Lines:
    from rich.text import Text

    from edgeq.util.numbers import metric

    yield f"{trial.request.model}, {trial.samples} samples, {trial.task}"
    rows = []
    for attempt in trial.tries:
        value = "" if attempt.accuracy is None else metric(attempt.accuracy.primary, attempt.accuracy.value)
        lines = filter(None, (attempt.preprocess, attempt.reason or attempt.title))
        rows.append((value, Text("\n  ".join(map(escape, lines)), overflow="fold")))
    yield table((trial.primary, "preprocessing"), rows, title="the best first")
    if len(trial.tied) > 1:
        yield f"{trial.samples} samples cannot distinguish these:"
        yield from (f"  {name}" for name in trial.tied)


def _eval_lines(evaluation: EvalResult) -> Lines:
    from edgeq.util.numbers import difference, metric, metric_name, share

    accuracy, reference, agreement = evaluation.accuracy, evaluation.reference_accuracy, evaluation.agreement
    variant = f", variant {evaluation.variant}" if evaluation.variant else ""
    yield f"{evaluation.request.model}{variant}, {evaluation.samples} samples"
    if accuracy is not None:
        rows = []
        for name, value in accuracy.metrics.items():
            reference_value = reference.metrics[name] if reference else None
            cells = (
                [metric(name, reference_value), difference(name, value - reference_value)]
                if reference_value is not None
                else []
            )
            rows.append((metric_name(name), metric(name, value), *cells))
        heads = ("metric", "value", *(("reference", "difference") if reference else ()))
        yield table(heads, rows, title=accuracy.task)
    for result in (accuracy, reference):
        yield from (styled(f"warning: {doubt}", "yellow") for doubt in (result.doubts if result is not None else ()))
    if evaluation.coverage is not None:
        yield f"int8 coverage {evaluation.coverage.summary()}"
    if agreement is not None:
        outputs = []
        for output in agreement.outputs:
            top1 = "" if output.top1 is None else share(output.top1, 2)
            sqnr = "equal" if output.equal else f"{output.sqnr_db:.1f}" if output.compared else "not compared"
            if output.same not in (None, 1):
                sqnr = f"{share(output.same, 2)} same"
            outputs.append((output.name, sqnr, f"{output.cosine:.6f}", f"{output.max_abs_error:.4g}", top1))
            for part in output.slices:
                figures = (f"{part.sqnr_db:.1f}", f"{part.cosine:.6f}", f"{part.max_abs_error:.4g}", "")
                outputs.append((f"  {part.location}", *figures))
        heads = ("output", "SQNR dB", "cosine", "max error", "same top answer")
        yield table(heads, outputs, title="agreement with the reference")
        yield from (output.basis_note for output in agreement.outputs if output.basis_note)
        yield from (styled(f"warning: {warning}", "yellow") for warning in agreement.mismatch_notes("the reference"))
