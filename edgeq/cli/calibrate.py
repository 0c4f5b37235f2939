"""Implement `edgeq calibrate`, which collects, merges and shows statistics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeq.cli._checked_text import SOURCE
from edgeq.cli._common import Lines, Printer, command
from edgeq.cli._options import FIX, FORCE, OUTPUT, PATH, PREPROCESS, THREADS, WORKERS, OutputPath

if TYPE_CHECKING:
    from edgeq.calibration.show import RangeComparison
    from edgeq.calibration.statistics import Statistics


class _CollectByDefault(click.Group):
    """Define a group whose subcommand `collect` may be left out: `calibrate MODEL` means `calibrate collect MODEL`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `collect` before the arguments, unless they begin with a subcommand or a request for help."""
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["collect", *args]
        return super().parse_args(ctx, args)


@click.group("calibrate", cls=_CollectByDefault)
def calibrate_command() -> None:
    """Run the float model once over samples and save the statistics.

    \b
    edgeq calibrate model.onnx --data calib/ -o CAL/
    edgeq calibrate model.onnx --data calib/ -o CAL/ --resume
    edgeq calibrate merge CAL-0/ CAL-1/ -o CAL/
    edgeq calibrate show CAL/ --svg ranges.svg

    `edgeq calibrate collect --help` lists the options of `edgeq calibrate MODEL`.
    """


@command("collect", within=calibrate_command)
@click.argument("model", type=PATH)
@click.option(
    "--data",
    type=SOURCE,
    required=True,
    help="Calibration samples: a folder of images or of test_data_set_N folders, or an .npz, .npy or .pb file.",
)
@click.option(
    "-o",
    "--output",
    type=OutputPath(replaced=lambda given: given["resume"]),
    required=True,
    metavar="CAL/",
    help="Folder for the statistics.",
)
@PREPROCESS
@click.option("--count", type=click.IntRange(min=1), help="Use at most this many samples.")
@click.option(
    "--start",
    type=click.IntRange(min=0),
    default=0,
    help="Index of the first sample, to collect one shard. [default: 0]",
)
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    default=1,
    help="Step between the samples, to collect one shard. [default: 1]",
)
@click.option("--memory", metavar="SIZE", help="Memory limit for activations, such as 500MB or 2GB.")
@click.option("--skip", multiple=True, metavar="TENSOR", help="Do not record this tensor. Repeatable.")
@FIX
@THREADS
@WORKERS
@click.option(
    "--every-element",
    is_flag=True,
    help="Count every element of very large tensors, not just a sample (slower).",
)
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@FORCE
def collect(
    printer: Printer,
    model: Path,
    data: str,
    output: Path,
    memory: str | None,
    fixed: tuple[str, ...],
    workers: str | None,
    **options: Any,
) -> None:
    """Run MODEL once over samples and write the statistics. This is what `edgeq calibrate MODEL` does."""
    from edgeq.distributed.workers import open_workers

    # the workers start up while this process imports these modules
    with open_workers(workers, ["edgeq.calibration.collect"]) as pool:
        from edgeq.cli._arguments import parse_bytes, parse_sizes
        from edgeq.jobs.calibrate import run_calibrate
        from edgeq.prove.request import Request

        arguments = {"fix": parse_sizes(fixed), "force": options.pop("force"), "progress": printer.progress()}
        request = Request.of(model, data, workers=pool, **arguments)
        memory_bytes = parse_bytes(memory) if memory is not None else None
        statistics = run_calibrate(request, output, memory=memory_bytes, **options)
    _print_written(printer, statistics, output)


@command("merge", within=calibrate_command)
@click.argument("parts", nargs=-1, required=True, type=PATH)
@click.option("-o", "--output", type=OUTPUT, required=True, metavar="CAL/", help="Folder for the merged statistics.")
@FORCE
def merge(printer: Printer, parts: tuple[Path, ...], output: Path, force: bool) -> None:
    """Merge statistics that were collected on different samples of the same model. The order of the folders does not
    matter.
    """
    from edgeq.jobs.calibrate import merge_to

    statistics = merge_to(parts, output, force=force)
    _print_written(printer, statistics, output)


@command("show", within=calibrate_command)
@click.argument("path", type=PATH)
@click.option("--tensor", "tensors", multiple=True, metavar="NAME", help="Plot this tensor. Repeatable.")
@click.option("--svg", type=OUTPUT, metavar="OUT.svg", help="Write histograms and thresholds as SVG.")
@click.option(
    "--activation-type",
    type=click.Choice(["int8", "uint8"]),
    default="uint8",
    show_default=True,
    help="Integer type for which the methods entropy and mse choose thresholds.",
)
@click.option("--symmetric", is_flag=True, help="Center the ranges on zero.")
@click.option("--force", is_flag=True, help="Replace the SVG if it exists.")
def show(printer: Printer, path: Path, svg: Path | None, force: bool, **options: Any) -> None:
    """List or plot statistics and the thresholds that every method derives from them, or list a calibration table.

    PATH can be a folder that `edgeq calibrate` wrote, a folder with ONNX Runtime's three tables, one of those tables, a
    native TensorRT cache, or a bundle's calibration.zip.
    """
    from edgeq.calibration.show import open_calibration, write_svg
    from edgeq.util.outputs import check_apart, check_outside

    if svg is not None:
        check_apart(svg, [path])
        check_outside(svg, [path])
    content = open_calibration(path, options["tensors"], options["activation_type"], symmetric=options["symmetric"])
    if svg is not None:
        write_svg(content, svg, force=force)
    printer.lines(content, _calibrate_lines(content, plotted=bool(options["tensors"])))


def _print_written(printer: Printer, statistics: Statistics, output: Path) -> None:
    record = {
        "output": str(output),
        "model": statistics.model_digest,
        "data": statistics.data_digest,
        "samples": statistics.samples,
        "tensors": len(statistics.tensors),
    }
    printer.lines(record, [f"{output}: {len(statistics.tensors)} tensors, {statistics.samples} samples"])


def _calibrate_lines(content: RangeComparison | dict[str, Any], *, plotted: bool) -> Lines:
    from edgeq.calibration.show import RangeComparison, sparkline, text_plot

    if not isinstance(content, RangeComparison):
        for entry in content["tensors"]:
            yield f"{entry['magnitude']:>14.6g}  {entry['name']}"
        return
    statistics = content.statistics
    for name in statistics.tensors if plotted else ():
        yield from text_plot(content, name)
    if plotted:
        return
    state = "" if statistics.complete else f" of {statistics.total}, unfinished"
    yield f"{len(statistics.tensors)} tensors, {statistics.samples} samples{state}"
    yield f"{'':24}  {'  '.join(f'{m:>21}' for m in content.ranges)}"
    for name in statistics.tensors:
        spans = [ranges[name] for ranges in content.ranges.values()]
        numbers = "  ".join(f"{s.low:>10.4g} {s.high:>10.4g}" for s in spans)
        yield f"{sparkline(content, name)}  {numbers}  {name}"
