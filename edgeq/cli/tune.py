"""edgeq tune: the best int8 model for this machine that keeps its accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeq.cli._common import Lines, Printer, common, styled, table
from edgeq.cli._options import FORCE, OUTPUT, PATH, complete_board, data_options, target_option

if TYPE_CHECKING:
    from edgeq.remote.clock import BoardClock
    from edgeq.tune.run import Plan, Tuned
    from edgeq.util.display import Progress

_LOSERS_SHOWN = 10


@click.command("tune")
@click.argument("model", type=PATH)
@data_options
@click.option("--max-drop", metavar="DROP", help="Accuracy that may be lost: 1%, 0.5pt or 0.005.", show_default="1%")
@click.option(
    "--objective",
    type=click.Choice(["latency", "throughput", "size", "memory"]),
    default="latency",
    show_default=True,
    help="What to make as good as possible, among what keeps its accuracy and is not slower than float32.",
)
@click.option("--budget", metavar="TIME", help="Wall-clock time that it may take: 90s, 10m, 1h30m.")
@target_option(
    default="auto",
    show_default=True,
    help="auto, or a target or profile that runs on this machine or is simulated on it.",
)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="ENGINE",
    help="Race only this engine, as NAME or NAME:PRECISION. Repeatable. Default: all that are installed and right.",
)
@click.option(
    "--on",
    multiple=True,
    metavar="BOARD",
    shell_complete=complete_board,
    help="Time on this board and check every candidate there; several of one kind take turns. Repeatable.",
)
@click.option("-o", "--output", type=OUTPUT, required=True, metavar="DIR|FILE.edgeq", help="Where the bundle goes.")
@click.option("--with-float", is_flag=True, help="Put the float32 model in, so that the device can time both.")
@click.option("--resume", is_flag=True, help="Go on where an interrupted run stopped.")
@click.option("--no-memory", is_flag=True, help="Search as if nothing was ever tuned here, and remember nothing.")
@click.option("--thorough", is_flag=True, help="Dismiss nothing early, to check the search. Takes longer.")
@click.option("--dry-run", is_flag=True, help="List the candidates and the plan, and do nothing.")
@FORCE
@common
def command(
    printer: Printer,
    model: Path,
    output: Path,
    engines: tuple[str, ...],
    on: tuple[str, ...],
    dry_run: bool,
    **options: Any,
) -> None:
    """Find the best int8 form of MODEL for this machine, by measuring, and write it as a bundle.

    \b
    edgeq tune model.onnx --data calib/ --preprocess imagenet -o tuned/
    edgeq tune model.onnx --data calib/ --val val/ --task classification -t nvidia-t4 -o for-t4/
    edgeq tune model.onnx --data calib/ --on ssh://pi@10.0.0.5 -o for-the-board/
    edgeq tune model.onnx --data calib/ --engine onnxruntime --engine openvino:bf16 -o tuned/
    edgeq tune model.onnx --data calib/ --val val/ --task classification --max-drop 0.5pt --budget 10m -o tuned/
    """
    from edgeq.errors import GoalNotMetError, UsageError
    from edgeq.jobs.job import tune_arguments
    from edgeq.run.engines import choose_engine
    from edgeq.tune.goal import Goal, parse_budget
    from edgeq.tune.run import plan, tune

    arguments = {**tune_arguments(options), "engines": [choose_engine(text) for text in engines]}
    drop = arguments.pop("max_drop")
    goal = Goal(
        options["objective"],
        Goal.max_drop if drop is None else drop,
        parse_budget(options["budget"]),
        options["thorough"],
    )
    if dry_run:
        if on:
            raise UsageError("--dry-run reaches no board", "Leave --on out, or name the board's target with -t")
        named = {name: arguments[name] for name in ("data", "validation", "statistics", "target", "engines")}
        steps = plan(model, **named, goal=goal, progress=printer.progress())
        printer.lines(steps, _draw_plan(steps))
        return
    progress = printer.progress()
    try:
        with _clock(on, progress) as clock:
            result = tune(model, output=output, goal=goal, clock=clock, progress=progress, **arguments)
    except GoalNotMetError as error:
        found = error.record
        printer.lines(found, _draw(found, verbose=printer.verbose))
        raise
    printer.lines(result, _draw_result(result, verbose=printer.verbose))


@contextmanager
def _clock(on: tuple[str, ...], progress: Progress) -> Iterator[BoardClock | None]:
    if not on:
        yield None
        return
    from edgeq.remote.clock import BoardClock
    from edgeq.remote.devices import fleet_of

    with BoardClock(fleet_of(on), progress=progress) as clock:
        yield clock


def _draw_result(result: Tuned, *, verbose: bool) -> Lines:
    from edgeq.cli._proof import draw_proof

    if not result.record.get("simulated"):
        yield from _draw(result.record, verbose=verbose)
        return
    yield styled(f"{result.target.title}, in simulation", "bold")
    yield from _draw(result.record, verbose=verbose)
    yield from draw_proof(result.proof, verbose=verbose)
    yield f"bundle: {result.bundle}"


def _draw_simulated(record: Mapping[str, Any], *, verbose: bool) -> Lines:
    from edgeq.tune.record import summary

    yield from (f"{title}: {text}" for title, text in summary(record).items())
    for form in record["trials"] if verbose else ():
        kept = ", ".join(form["kept_in_float"]) or "nothing"
        lost = "not measured" if form["loss"] is None else f"{form['loss']:.4f}"
        yield f"{form['method']}, {kept} in float: loss {lost}"
    yield f"{len(record['trials'])} forms in {record['elapsed_s']:.0f} s"


def _draw_plan(steps: Plan) -> Lines:
    yield f"for {steps.target.title}, profile {steps.target.profile.name}"
    steps_of = "built, timed against float32 and screened" if steps.threads else "built and screened"
    yield f"kernel choices, {steps_of}:"
    yield from (f"  {candidate.name}" for candidate in steps.candidates)
    if steps.engines.plugins:
        yield f"raced beside onnxruntime's own kernels: {', '.join(c.name for c in steps.engines.plugins)}"
    yield "calibration methods, on those that are worth it:"
    yield from (f"  {name}" for name in steps.methods)
    if steps.threads:
        yield f"threads: {', '.join(str(n) if n else 'all' for n in steps.threads)}"
    last = "tensors in 16 bits" if "wide" in steps.target.profile.search else "layers in float"
    yield f"if accuracy falls short: {', '.join((*steps.recoveries, last))}"


def _draw(record: Mapping[str, Any], *, verbose: bool) -> Lines:
    return (_draw_simulated if record.get("simulated") else _draw_timed)(record, verbose=verbose)


def _draw_timed(record: Mapping[str, Any], *, verbose: bool) -> Lines:
    from edgeq_device.claim import Claim

    first, *details = record["verdict"]
    yield styled(first, "bold")
    yield from details
    # A ratio and its milliseconds are of the same runs; those of several candidates may be of several races.
    heads = ("", "times float32", "interval, milliseconds", "points lost", "at most", "MB", "")
    rows = []
    timing = record["float32"]["timing"]
    if timing:
        size = record["float32"]["bytes"] / 1e6
        rows.append(("float32", "1.00", f"{timing['latency']['p50_ms']:.3g} ms", "0.00", "", f"{size:.2f}", ""))
    front = [c for c in record["candidates"] if c["pareto"] or c["status"] == "chosen"]
    for one in sorted(front, key=lambda c: float(c["timing"]["latency"]["p50_ms"])):
        claim = Claim.read(one["timing"]["speedup"])
        rows.append(
            (
                one["name"],
                f"{claim.interval[0]:.2f}" if claim.interval else "not measurable",
                claim.figures(),
                f"{100 * one['accuracy']['drop']:.2f}",
                f"{100 * one['accuracy']['bound']:.2f}",
                f"{one['screening']['bytes'] / 1e6:.2f}",
                one["status"],
            )
        )
    yield table(heads, rows, title="Pareto front", title_justify="left")
    lost = [c for c in record["candidates"] if c["status"] != "chosen"]
    for one in lost if verbose else lost[:_LOSERS_SHOWN]:
        yield f"{one['name']}: {one['reason']}"
    if not verbose and len(lost) > _LOSERS_SHOWN:
        yield f"and {len(lost) - _LOSERS_SHOWN} more (-v shows them)"
    yield f"{len(record['candidates'])} candidates in {record['elapsed_s']:.0f} s"
