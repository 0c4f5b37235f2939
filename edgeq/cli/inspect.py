"""`edgeq inspect`: what a model is, and what of it runs in int8 where."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgeq.cli._common import Lines, Printer, common, table
from edgeq.cli._next import choose_next, fill_next
from edgeq.cli._options import PATH, target_option

if TYPE_CHECKING:
    from edgeq.model.inspect import ModelReport, TargetPrediction


@click.command("inspect")
@click.argument("model", type=PATH)
@target_option(
    "targets",
    multiple=True,
    help="Predict what runs in int8 on this target or profile; may be given several times. Default: this machine.",
)
@click.option("--shape", "shapes", multiple=True, metavar="NAME=SIZES", help="Of an open input: x=1,3,224,224.")
@common
def command(model: Path, targets: tuple[str, ...], shapes: tuple[str, ...], printer: Printer) -> None:
    """Show a model's operators, shapes, MACs and what runs in int8 where."""
    from edgeq_device.arrays import parse_shapes

    from edgeq.measure.coverage import inspect
    from edgeq.util.resources import device_errors

    with device_errors():
        given = parse_shapes(shapes)
    report = inspect(model, targets or ("auto",), shapes=given, progress=printer.progress())
    printer.lines(report, _show(report, verbose=printer.verbose))
    if report.quantized:
        choose_next(lambda: "compare FLOAT.onnx {model} --data SAMPLES")
    elif not any(node.verdict == "int8" for target in report.targets for node in target.nodes):
        fill_next(model=None)  # there is nothing to quantize


def _show(report: ModelReport, *, verbose: bool) -> Lines:
    opsets = ", ".join(f"{domain} {version}" for domain, version in report.opsets.items())
    yield f"{report.path}  {_size(report.file_bytes)}, {opsets}, IR {report.ir_version}, {report.producer}"
    yield (f"{_number(report.parameters)} parameters ({_size(report.parameter_bytes)}), {_number(report.macs)} MACs")
    for title, specs in (("input", report.signature.inputs), ("output", report.signature.outputs)):
        for spec in specs:
            yield f"{title}  {spec}"
    yield from (f"note: {note}" for note in report.notes)
    rows = []
    for operator in report.operators:
        share = f"{operator.macs / report.macs:.1%}" if operator.macs else ""
        rows.append((operator.op_type, str(operator.count), _number(operator.macs) if operator.macs else "", share))
    yield ""
    yield table(("operator", "count", "MACs", "share"), rows, numbers_from=1, box=None, pad_edge=False)
    if report.preparation:
        yield ""
        yield f"quantizing prepares it: {'; '.join(report.preparation)}"
    for prediction in report.targets:
        yield from _show_prediction(prediction, verbose=verbose)


def _show_prediction(prediction: TargetPrediction, *, verbose: bool) -> Lines:
    from edgeq.model.int8_prediction import rules_title

    counted = [n for n in prediction.nodes if n.verdict != "other"]
    int8 = [n for n in counted if n.verdict == "int8"]
    yield ""
    yield (
        f"{prediction.target} ({prediction.backend}): about {prediction.int8_macs_share:.1%} of the MACs and "
        f"{len(int8)} of {len(counted)} nodes in int8, a forecast by "
        f"{rules_title(prediction.backend)}; `edgeq quantize` measures it"
    )
    if verbose:
        for node in prediction.nodes:
            yield f"  {node.verdict:5}  {node.op_type:20} {node.name}: {node.reason}"
        return
    reasons: dict[tuple[str, str], list[str]] = {}
    for node in counted:
        if node.verdict == "float":
            reasons.setdefault((node.op_type, node.reason), []).append(node.name)
    for (op_type, reason), names in reasons.items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        yield f"  float  {op_type} ({shown}): {reason}"


def _number(value: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return str(value)


def _size(value: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"
