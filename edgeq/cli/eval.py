"""edgeq eval: accuracy on labelled data, and agreement with another model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from edgeq.cli._common import Lines, Printer, common, styled, table
from edgeq.cli._options import (
    ENGINE,
    OWN_PREPROCESS,
    PATH,
    SESSION_OPTIONS,
    START,
    STRIDE,
    TASK_NAMES,
    THREADS,
    VARIANT,
    WORKERS,
    on_board,
    task_options,
)

if TYPE_CHECKING:
    from edgeq.measure.evaluation import EvalResult, Trial


@click.command("eval")
@click.argument("model", type=PATH, metavar="MODEL|BUNDLE")
@click.option("--data", required=True, help="Samples: a folder, .npz, .npy, .pb ...")
@click.option("--task", help=f"What to measure: {TASK_NAMES}.")
@click.option("--reference", type=PATH, help="Another model or bundle to run on the same samples and compare with.")
@OWN_PREPROCESS
@click.option("--try-preprocess", is_flag=True, help="Measure under every known preprocessing: which one fits?")
@task_options("--output")
@click.option("--count", type=click.IntRange(min=1), help="At most so many samples.")
@START
@STRIDE
@VARIANT
@THREADS
@ENGINE
@click.option(
    "--optimization",
    type=click.Choice(["none", "basic", "extended", "all"]),
    default="all",
    help="Graph optimisation of a model file; a bundle brings its own.",
)
@SESSION_OPTIONS
@WORKERS
@on_board
@common
def command(printer: Printer, on: str | None, **options: Any) -> None:
    """Measure accuracy of a model or a bundle on labelled data, or its agreement with another.

    \b
    edgeq eval m.onnx --data val/ --task classification --preprocess imagenet
    edgeq eval int8.onnx --data val/ --reference float.onnx
    edgeq eval float.onnx --data val/ --reference float.onnx --engine openvino:bf16
    edgeq eval m.onnx --data val/ --task classification --count 100 --try-preprocess
    edgeq eval bundle/ --data val/ --task classification --on ssh://pi@10.0.0.5
    """
    from edgeq.distributed.workers import open_workers
    from edgeq.errors import UsageError

    trial, workers = options.pop("try_preprocess"), options.pop("workers")
    if workers is not None and (trial or on is not None):
        raise UsageError("--workers does not go with --try-preprocess or --on", "Leave one of them out")
    if trial and on is not None:
        raise UsageError("--try-preprocess compares preprocessings here", "Leave --on out")
    with open_workers(workers, ["edgeq.measure.evaluation"]) as opened:  # they start beside what is imported here
        from edgeq.measure.evaluation import request_from_options, run_evaluation

        request = request_from_options(options)
        if on is not None:
            from edgeq.remote.bench import evaluate_on
            from edgeq.remote.devices import one_board

            there = evaluate_on(request, one_board(on), progress=printer.progress())
            printer.lines(there, _draw(there.result))
        elif trial:
            from edgeq.measure.evaluation import try_preprocess

            tried = try_preprocess(request, progress=printer.progress())
            printer.lines(tried, _draw_trial(tried))
        else:
            found = run_evaluation(request, workers=opened, progress=printer.progress())
            printer.lines(found, _draw(found))


def _draw_trial(trial: Trial) -> Lines:
    from edgeq_device.relay import printable
    from rich.text import Text

    yield f"{trial.request.model}, {trial.count} samples, {trial.task}"
    rows = []
    for one in trial.tries:
        value = "" if one.accuracy is None else f"{one.accuracy.value:.4f}"
        lines = filter(None, (one.preprocess, one.reason or one.title))
        rows.append((value, Text("\n  ".join(map(printable, lines)), overflow="fold")))
    yield table((trial.primary, "preprocessing"), rows, title="the best first")
    if len(trial.tied) > 1:
        yield f"{trial.count} samples cannot distinguish these:"
        yield from (f"  {name}" for name in trial.tied)


def _draw(found: EvalResult) -> Lines:
    accuracy, reference, agreement = found.accuracy, found.reference_accuracy, found.agreement
    variant = f", variant {found.variant}" if found.variant else ""
    yield f"{found.request.model}{variant}, {found.count} samples"
    if accuracy is not None:
        rows = []
        for name, value in accuracy.metrics.items():
            other = [reference.metrics[name], value - reference.metrics[name]] if reference else []
            rows.append((name, f"{value:.4f}", *(f"{number:.4f}" for number in other)))
        heads = ("metric", "value", *(("reference", "difference") if reference else ()))
        yield table(heads, rows, title=accuracy.task)
    if found.coverage is not None:
        yield f"int8 coverage {found.coverage.summary()}"
    if agreement is not None:
        outputs = []
        for output in agreement.outputs:
            top1 = "" if output.top1 is None else f"{output.top1:.4f}"
            sqnr = "equal" if output.equal else f"{output.sqnr_db:.1f}" if output.compared else "not compared"
            if output.same not in (None, 1):
                sqnr = f"{output.same:.2%} same"
            outputs.append((output.name, sqnr, f"{output.cosine:.6f}", f"{output.max_abs_error:.4g}", top1))
            for part in output.slices:
                figures = (f"{part.sqnr_db:.1f}", f"{part.cosine:.6f}", f"{part.max_abs_error:.4g}", "")
                outputs.append((f"  {part.where}", *figures))
        heads = ("output", "SQNR dB", "cosine", "max error", "top-1")
        yield table(heads, outputs, title="agreement with the reference")
        yield from (styled(f"warning: {warning}", "yellow") for warning in agreement.left_out("the reference"))
