"""Implement `edgeq compare` and `gate`, which compare two models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeq.cli._checked_text import DROP
from edgeq.cli._common import Lines, Printer, command, styled, table
from edgeq.cli._next import fill_next
from edgeq.cli._options import (
    FORCE,
    OUTPUT,
    PATH,
    OutputPath,
    board_of,
    comparison_arguments,
    comparison_options,
    on_board,
)
from edgeq.errors import UsageError

if TYPE_CHECKING:
    from edgeq.reporting.compare import CompareRequest, Comparison
    from edgeq.reporting.gate import Gated


@command("compare")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@comparison_options
@click.option(
    "--duration",
    "duration_s",
    type=float,
    default=2.0,
    show_default=True,
    help="Time each model for this many seconds.",
)
@click.option("--no-timing", is_flag=True, help="Do not time the models.")
@click.option(
    "--max-drop",
    type=DROP,
    metavar="DROP",
    help="Fail if B loses more accuracy than this: 0.01, 1% or 1pt. Needs --task.",
)
@click.option(
    "--min-speedup",
    type=click.FloatRange(min=0, min_open=True),
    metavar="TIMES",
    help="Fail unless the timings show that B is at least this many times as fast as A, such as 1.5.",
)
@click.option(
    "--limits",
    type=PATH,
    metavar="gate.toml",
    help="Check B against A with the limits in this file (docs/gate.md), as `edgeq gate B --baseline A` does.",
)
def compare_command(printer: Printer, a: Path, b: Path, limits: Path | None, **options: Any) -> None:
    """Compare the inputs and outputs, size, coverage, agreement and latency of A and B.

    A and B can be models or bundles.

    \b
    edgeq compare float.onnx int8.onnx --data val/ --preprocess imagenet
    edgeq compare old.edgeq new.edgeq --data val/ --task classification
    edgeq compare float.onnx int8.onnx --data val/ --task classification --max-drop 1pt --min-speedup 1.5
    edgeq compare old.edgeq new.edgeq --limits gate.toml
    """
    from edgeq.reporting.compare import CompareRequest, LossLimits, run_comparison
    from edgeq.util.numbers import parse_drop

    loss_limits = LossLimits(parse_drop(options.pop("max_drop")), options.pop("min_speedup"))
    timed = not options.pop("no_timing")
    request = CompareRequest(a, b, timed=timed, limits=loss_limits, **comparison_arguments(options))
    if limits is not None:
        if loss_limits != LossLimits():
            raise UsageError("--limits does not go with --max-drop or --min-speedup", "Write them into the file")
        _gate(printer, request, limits)
        return
    comparison = run_comparison(request, progress=printer.progress())
    printer.lines(comparison, _compare_lines(comparison))
    pair = comparison.debuggable
    fill_next(a=pair[0].path, b=pair[1].path) if pair is not None else fill_next(a=None)
    comparison.check()


def _compare_lines(comparison: Comparison) -> Lines:
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        variant = f", variant {side.variant}" if side.variant else ""
        yield f"{name}  {side.path}{variant}"
    yield from (styled(f"differs: {difference}", "yellow") for difference in comparison.signature_differences)
    if rows := comparison.rows():
        yield table(("", "A", "B", "B against A"), rows)
    yield from (styled(sentence, "bold") for sentence in comparison.verdict())
    yield from (f"note: {note}" for note in comparison.notes)


@command("gate")
@click.argument("model", type=PATH, metavar="MODEL|BUNDLE")
@click.option(
    "--baseline",
    type=OutputPath(lambda given: given["update"], replaced=lambda given: True),
    required=True,
    metavar="FILE",
    help="Model or bundle to compare with.",
)
@click.option(
    "--limits",
    type=PATH,
    metavar="gate.toml",
    help="File with the limits (docs/gate.md). [default: at most 5 % slower or larger]",
)
@comparison_options
@click.option(
    "--duration",
    "duration_s",
    type=float,
    default=5.0,
    show_default=True,
    help="Time each model for this many seconds. If the result is not clear, edgeq times both again for twice as long.",
)
@click.option("--update", is_flag=True, help="Make MODEL the new baseline, whatever the result.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown, for the summary of a CI job.")
@click.option("--junit", type=OUTPUT, metavar="OUT.xml", help="Write the checks to this file as JUnit XML.")
@on_board
@FORCE
def gate_command(printer: Printer, model: Path, baseline: Path, **options: Any) -> None:
    """Fail if MODEL is slower, less accurate or larger than a baseline by more than the limits allow.

    edgeq measures MODEL and the baseline in turns, on this machine or on a board. The exit code is 13 if MODEL is
    worse, and 14 if the machine was too busy for a clear result.

    \b
    edgeq gate new.edgeq --baseline baseline.edgeq --update
    edgeq gate new.edgeq --baseline baseline.edgeq --limits gate.toml
    edgeq gate new.edgeq --baseline baseline.edgeq --data val/ --task classification --junit gate.xml
    edgeq gate new.edgeq --baseline baseline.edgeq --on ssh://pi@10.0.0.5
    """
    from edgeq.reporting.compare import CompareRequest

    gate_options = {name: options.pop(name) for name in ("limits", "on", "junit", "update", "as_markdown", "force")}
    _gate(printer, CompareRequest(baseline, model, **comparison_arguments(options)), **gate_options)


def _gate(
    printer: Printer,
    request: CompareRequest,
    limits: Path | None,
    *,
    on: str | None = None,
    junit: Path | None = None,
    update: bool = False,
    as_markdown: bool = False,
    force: bool = False,
) -> None:
    from edgeq.reporting import gate
    from edgeq.util.outputs import output_file

    if junit is not None:
        gate.check_junit(junit, request, limits, force=force)
    gate_limits = gate.read_limits(limits) if limits is not None else gate.GateLimits()
    if on is not None:
        from edgeq.remote.evaluate import run_gate

        result = run_gate(board_of(on), request, gate_limits, update=update, progress=printer.progress())
    else:
        result = gate.gate(request, gate_limits, update=update, progress=printer.progress())
    if junit is not None:
        with output_file(junit, force=force) as draft:
            draft.write_bytes(gate.junit(result))
    if as_markdown and not printer.as_json:
        click.echo(gate.markdown(result))
    else:
        printer.lines(result, _gate_lines(result))
    result.check()


def _gate_lines(result: Gated) -> Lines:
    if result.comparison is not None:
        yield table(("", "baseline", "model", "model against baseline"), result.rows())
        yield from (f"{check.what}: {check.outcome}, limit: {check.text}" for check in result.checks)
        yield from (f"note: {note}" for note in result.comparison.notes)
        yield styled(result.outcome, "bold")
    if result.updated:
        yield f"{result.baseline} is the new baseline"
