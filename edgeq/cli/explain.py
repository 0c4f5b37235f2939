"""Implement `edgeq inspect`, `debug`, `report` and `audit`, which show the content of models and the layers that lose
accuracy.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeq.cli._checked_text import ENGINE_NAME, SOURCE
from edgeq.cli._common import Lines, Printer, command, styled, table
from edgeq.cli._next import choose_next, fill_next, propose_check
from edgeq.cli._options import (
    OWN_PREPROCESS,
    PATH,
    PREPROCESS,
    SESSION_OPTIONS,
    START,
    STRIDE,
    THREADS,
    VARIANT,
    OutputPath,
    engines_of,
    target_option,
)
from edgeq.cli.build import closeness
from edgeq.reporting.figures import shorten

if TYPE_CHECKING:
    from edgeq.measure.debug import Diagnosis
    from edgeq.model.inspect import ModelReport, TargetPrediction
    from edgeq.prove.saturation import Audited
    from edgeq.reporting.bundle import WrittenReport

# The bar that shows a layer's own error is empty at this SQNR or better, and full at 0 dB.
_CLEAN_DB = 50.0
_BAR = 10
_WEIGHTS_SHOWN = 5
_FIGURES, _LEAST_NAME, _WEIGHT_NAME = 90, 16, 40
_LEAST_SHARE = 0.0001


def draw_diagnosis(diagnosis: Diagnosis, *, verbose: bool) -> Lines:
    """Yield lines on the outputs, then on the error sources, then on the layers in execution order."""
    variant = f", variant {diagnosis.variant}" if diagnosis.variant else ""
    yield f"{diagnosis.quantized}{variant} against {diagnosis.float_model}, {diagnosis.comparison.samples} samples"
    yield from (f"note: {note}" for note in diagnosis.notes)
    yield f"outputs: {closeness(diagnosis.optimised)} in the optimised session,"
    yield f"         {closeness(diagnosis.written)} on the graph as written"
    style = {"healthy": "green", "noisy": "yellow", "poor": "red"}[diagnosis.verdict]
    yield styled(f"verdict: {diagnosis.verdict_text}", style)
    yield from _draw_error_sources(diagnosis)
    yield from _draw_exclusions(diagnosis)
    yield from _draw_layers(diagnosis, verbose=verbose)
    yield from _draw_weights(diagnosis, verbose=verbose)
    yield from _draw_engine(diagnosis, verbose=verbose)
    yield from (styled(f"warning: {warning}", "yellow") for warning in diagnosis.warnings)


def _draw_error_sources(diagnosis: Diagnosis) -> Lines:
    if not diagnosis.error_sources:
        yield ""
        yield "no layer stands out: many layers add a similar amount of noise"
        return
    healthy = diagnosis.verdict == "healthy"
    heading = "layers with the largest parts in the error" if healthy else "layers that cause the error"
    yield ""
    yield f"{heading}, each with the outputs' SQNR with its error alone"
    for rank, error_source in enumerate(diagnosis.error_sources, 1):
        who = f"{error_source.node} ({error_source.op_type})" if error_source.node else f"input {error_source.name}"
        yield (f"{rank:3}. {who}: {_db(error_source.output_sqnr_db)} dB; {error_source.cause}: {error_source.reason}")
        yield f"     {_flags(error_source.exclude)}"
    if len(diagnosis.error_sources) > 1:
        yield f"all of them: {_flags(diagnosis.exclude)}"


def _draw_exclusions(diagnosis: Diagnosis) -> Lines:
    """Yield lines on the set of nodes that helps most if it stays in float, and on the single node that helps most."""
    from edgeq.measure.agreement import HEALTHY_DB

    if diagnosis.verdict == "healthy":
        return
    yield ""
    if not diagnosis.exclusions:
        yield f"none of them helps in float; `edgeq quantize --min-sqnr {HEALTHY_DB:g}` tries other sets of nodes"
        return
    yield "outputs with some layers in float, the rest as it is"
    single = next((exclusion for exclusion in diagnosis.exclusions if len(exclusion.nodes) == 1), None)
    for exclusion in dict.fromkeys(filter(None, (diagnosis.exclusions[0], single))):
        if exclusion.lost is not None and exclusion.plain_lost is not None:
            figures = f"{exclusion.plain_lost:.1%} → {exclusion.lost:.1%} of float32's answers lost"
        else:
            figures = f"{_db(exclusion.plain_db)} → {_db(exclusion.sqnr_db)} dB"
        yield f"  {figures}: {_flags(exclusion.nodes)}"


def _draw_layers(diagnosis: Diagnosis, *, verbose: bool) -> Lines:
    from rich.console import Console
    from rich.table import Column, Table

    from edgeq.measure.agreement import worst_db

    ranks = {error_source.name: rank for rank, error_source in enumerate(diagnosis.error_sources, 1)}
    # The width that the other columns leave for the name. rich would cut off the end of a name, which is the part that
    # differs.
    width = max(_LEAST_NAME, (Console().width - _FIGURES) // 2)
    activations = diagnosis.comparison.activations
    worst_ids = {id(a) for a in sorted(activations, key=lambda a: -a.noise.added)[: diagnosis.worst]}
    title = "layers in execution order (SQNR in dB)" if verbose else "worst layers in execution order (SQNR in dB)"
    tensor, layer = (Column(head, overflow="fold") for head in ("tensor", "layer"))
    layers = Table("", tensor, layer, "all so far", "alone", "", "rounding", "outside", "outputs", title=title)
    for activation in activations:
        if not verbose and id(activation) not in worst_ids and activation.name not in ranks:
            continue
        operator = activation.op_type + (f"+{activation.folded}" if activation.folded else "")
        layers.add_row(
            str(ranks.get(activation.name, "")),
            shorten(activation.name, width),
            f"{shorten(activation.node, width)} {operator}".strip(),
            _db(activation.accumulated.sqnr_db),
            _db(activation.layer.sqnr_db),
            _bar(activation.layer.sqnr_db),
            _db(activation.rounding.sqnr_db) if activation.rounding else activation.kind,
            _share(activation.saturated_low + activation.saturated_high),
            _db(worst_db(activation.effect)) if activation.effect is not None else "",
        )
    yield layers
    if not verbose and len(worst_ids) < len(activations):
        yield f"{len(activations)} tensors were compared (-v shows all)"


def _draw_weights(diagnosis: Diagnosis, *, verbose: bool) -> Lines:
    weights = [w for w in diagnosis.comparison.weights if verbose or len(w.shape) > 1]
    chosen = weights if verbose else sorted(weights, key=lambda w: w.sqnr_db)[:_WEIGHTS_SHOWN]
    rows = []
    for weight in chosen:
        names = (shorten(text, _WEIGHT_NAME) for text in (weight.name, weight.node))
        channels = ", ".join(f"{channel}: {_db(db)}" for channel, db in weight.worst_channels)
        bits = f"{weight.bits} {'per channel' if weight.per_channel else 'per tensor'}"
        rows.append((*names, _db(weight.sqnr_db), channels, bits))
    if rows:
        heads = ("weight", "layer", "SQNR dB", "worst channels", "bits")
        yield table(heads, rows, title="weights" if verbose else "worst weights")


def _draw_engine(diagnosis: Diagnosis, *, verbose: bool) -> Lines:
    """Yield the layers whose results in an engine differ from those of the CPU kernels."""
    if not diagnosis.engine_name:
        return
    worst = {id(layer) for layer in sorted(diagnosis.engine, key=lambda layer: -layer.lost_db)[: diagnosis.worst]}
    title = f"{diagnosis.engine_name} against onnxruntime's CPU kernels (SQNR in dB), the same file"
    rows = []
    for layer in diagnosis.engine:
        if verbose or id(layer) in worst:
            alone = "" if layer.alone_db is None else _db(layer.alone_db)
            name, node = (shorten(text, _WEIGHT_NAME) for text in (layer.name, layer.node))
            figures = (_db(layer.sqnr_db), _db(layer.inputs_db), alone, f"{layer.steps:.1f}")
            rows.append((name, f"{node} {layer.op_type}".strip(), *figures))
    yield table(("tensor", "layer", "all so far", "what it reads", "alone", "steps"), rows, title=title)


def _flags(nodes: tuple[str, ...]) -> str:
    return " ".join(f"--exclude {shlex.quote(node)}" for node in nodes) or "(no node to exclude)"


def _db(value: float) -> str:
    if math.isinf(value):
        return "exact" if value > 0 else "-inf"
    return f"{value:.1f}"


def _bar(sqnr: float) -> str:
    filled = round(_BAR * min(1.0, max(0.0, 1 - sqnr / _CLEAN_DB))) if sqnr < math.inf else 0
    return "█" * filled + "·" * (_BAR - filled)


def _share(value: float) -> str:
    return f"{value:.2%}" if value >= _LEAST_SHARE else "< 0.01%" if value else ""


@command("inspect")
@click.argument("model", type=PATH)
@target_option(
    "targets",
    multiple=True,
    help="Predict which operators run in int8 on this target or profile. Repeatable. [default: this machine]",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="NAME=SIZES",
    help="Set the shape of an input with free sizes: x=1,3,224,224. Repeatable.",
)
def inspect_command(model: Path, targets: tuple[str, ...], shapes: tuple[str, ...], printer: Printer) -> None:
    """Show a model's operators, shapes and MACs, and the operators that run in int8 on a target."""
    from edgeq_device.prepare.feeds import parse_shapes

    from edgeq.jobs.inspect import inspect
    from edgeq.util.device_errors import device_errors

    with device_errors():
        sizes = parse_shapes(shapes)
    report = inspect(model, targets or ("auto",), shapes=sizes, progress=printer.progress())
    printer.lines(report, _show(report, verbose=printer.verbose))
    if report.quantized:
        choose_next(lambda: "compare FLOAT.onnx {model} --data SAMPLES")
    elif not any(node.verdict == "int8" for target in report.targets for node in target.nodes):
        fill_next(model=None)  # nothing can be quantized, so print no next line


def _show(report: ModelReport, *, verbose: bool) -> Lines:
    from edgeq.util.numbers import size

    opsets = ", ".join(f"{domain} {version}" for domain, version in report.opsets.items())
    yield f"{report.path}  {size(report.bytes)}, {opsets}, IR {report.ir_version}, {report.producer}"
    yield (f"{_number(report.parameters)} parameters ({size(report.parameter_bytes)}), {_number(report.macs)} MACs")
    for title, specs in (("input", report.signature.inputs), ("output", report.signature.outputs)):
        for spec in specs:
            yield f"{title}  {spec}"
    for name, fact in report.facts.items():
        yield f"{name.replace('_', ' ')}  {fact['value']}, by {fact['source']}"
    if report.head is not None:
        yield f"head  {report.head['family']} ({report.head['task']}), by {report.head['source']}"
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
    from edgeq.model.int8_rules import rules_title

    nodes = [n for n in prediction.nodes if n.verdict != "other"]
    int8 = [n for n in nodes if n.verdict == "int8"]
    yield ""
    yield from _show_refused(prediction)
    if any(prediction.refused):
        return
    yield (
        f"{prediction.target} ({prediction.backend}): about {prediction.int8_mac_share:.1%} of the MACs and "
        f"{len(int8)} of {len(nodes)} nodes in int8, a forecast by "
        f"{rules_title(prediction.backend)}; `edgeq quantize` measures it"
    )
    if verbose:
        for node in prediction.nodes:
            yield f"  {node.verdict:5}  {node.op_type:20} {node.name}: {node.reason}"
        return
    reasons: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        if node.verdict == "float":
            reasons.setdefault((node.op_type, node.reason), []).append(node.name)
    for (op_type, reason), names in reasons.items():
        examples = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        yield f"  float  {op_type} ({examples}): {reason}"


def _show_refused(prediction: TargetPrediction) -> Lines:
    """Yield the nodes that the target's files cannot express, and the reason that concerns the whole model. A forecast
    follows only if there is no such node.
    """
    if not prediction.refused:
        return
    kinds = {node.name: node.op_type for node in prediction.nodes}
    count = len(prediction.refused)
    yield (
        f"{prediction.target} ({prediction.backend}): `edgeq quantize` will refuse the model, for "
        f"{'this reason' if count == 1 else f'these {count} reasons'}"
    )
    for name, reason in prediction.refused.items():
        node = f"{kinds[name]} ({name}): " if name in kinds else ""
        yield f"  refused  {node}{reason}"


def _number(value: int) -> str:
    units = (("G", 9), ("M", 6), ("k", 3))
    return next((f"{value / 10**n:.2f} {unit}" for unit, n in units if value >= 10**n), str(value))


@command("debug")
@click.argument("float_model", type=PATH, metavar="FLOAT")
@click.argument("quantized", type=PATH, metavar="INT8|BUNDLE")
@click.option(
    "--data",
    type=SOURCE,
    required=True,
    help="Samples, without labels: a folder, .npz, .npy, .pb or another source (docs/data.md).",
)
@OWN_PREPROCESS
@click.option(
    "--count", type=click.IntRange(min=1), default=32, show_default=True, help="Use at most this many samples."
)
@START
@STRIDE
@click.option(
    "--worst", type=click.IntRange(min=1), default=10, show_default=True, help="Name at most this many layers."
)
@VARIANT
@THREADS
@click.option(
    "--engine",
    type=ENGINE_NAME,
    metavar="ENGINE",
    help="Also compare each tensor in this engine, such as qnn or openvino:bf16.",
)
@SESSION_OPTIONS
@click.option(
    "--memory", metavar="SIZE", help="Memory limit for tensors, such as 500MB. A lower limit needs more passes."
)
def debug_command(
    printer: Printer, session_options: Sequence[str], engine: str | None, memory: str | None, **options: Any
) -> None:
    """Compare a quantized model with its float model, layer by layer, and name the layers that lose accuracy.

    \b
    edgeq debug model.onnx int8.onnx --data calib/ --preprocess imagenet
    edgeq debug model.onnx dist/ --data calib/ --json
    edgeq debug model.onnx npu.onnx --data calib/ --engine qnn
    """
    from edgeq.cli._arguments import parse_bytes
    from edgeq.measure.debug import debug
    from edgeq.run.session import parse_session_options

    options["memory"] = parse_bytes(memory) if memory is not None else None
    options["session_options"] = parse_session_options(session_options)
    diagnosis = debug(**options, engine=engine or "", progress=printer.progress())
    printer.lines(diagnosis, draw_diagnosis(diagnosis, verbose=printer.verbose))


@command("report")
@click.argument("bundle", type=OutputPath(lambda given: given["output"] is None), metavar="BUNDLE|RECORD.json")
@click.option(
    "-o",
    "--output",
    # The report itself decides whether the page is an earlier report that nobody changed.
    type=OutputPath(replaced=lambda given: True),
    metavar="FILE.html",
    help="Path of the page. [default: NAME.report.html, next to the bundle]",
)
@click.option(
    "--bench",
    "measure",
    is_flag=True,
    help="Time the bundle now on this machine against its float32 model, layer by layer.",
)
@click.option("--variant", metavar="NAME", help="Variant to time with --bench. [default: the best for this machine]")
@click.option(
    "--fleet",
    type=PATH,
    metavar="FILE.json",
    help="Add a section on boards, made from the output of `bench --on FLEET.toml --json`.",
)
@click.option("--open", "opened", is_flag=True, help="Open the page in the browser.")
@click.option(
    "--force", is_flag=True, help="Replace an existing output. An earlier report is replaced without --force."
)
def report_command(printer: Printer, bundle: Path, output: Path | None, opened: bool, **options: Any) -> None:
    """Write the report of BUNDLE (a directory or an .edgeq file) as one HTML file that opens offline.

    edgeq makes the report from the figures in the bundle and does not change the bundle. For a tuning run that wrote no
    bundle, give the record that `edgeq tune --json` printed.

    \b
    edgeq report dist/ --open
    edgeq report dist/ --bench -o report.html
    edgeq report tuning.json --open
    """
    from edgeq.reporting.bundle import report_bundle

    result = report_bundle(bundle, output, progress=printer.progress(), **options)
    printer.lines(result, _report_lines(result))
    # A tuning record contains nothing to verify.
    choose_next(lambda: None) if result.of_record else propose_check(bundle)
    if opened:
        _open(result.page.absolute(), printer)


def _open(page: Path, printer: Printer) -> None:
    """Open the page with the system's program for web pages. The working directory is not searched for this program or
    for the programs that it starts.
    """
    from edgeq_device.system.programs import build_child_environment, find_program

    if os.name == "nt":
        click.launch(str(page))  # Windows chooses the program by file type, not through PATH
        return
    program = find_program({"darwin": "open"}.get(sys.platform, "xdg-open"))
    if program is None:
        printer.progress().note(f"no program that opens pages was found: open {page} yourself")
        return
    silent = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    os.posix_spawn(program, [program, str(page)], build_child_environment(), file_actions=silent)


def _report_lines(result: WrittenReport) -> Lines:
    verdict = result.verdict
    yield verdict.sentence
    for figure in verdict.figures:
        yield f"  {figure.label}: {figure.value}  {figure.note}".rstrip()
    yield from (styled(f"warning: {warning}", "yellow") for warning in verdict.warnings)
    for line in verdict.commands:
        # A tuning record does not name a bundle, and the run may have written none.
        named = line if result.of_record else line.replace("BUNDLE", shlex.quote(str(result.bundle)))
        yield f"look closer: {named}"
    yield f"report: {result.page}"


@command("audit")
@click.argument("model", type=PATH)
@click.option(
    "--data", type=SOURCE, help="Samples to simulate MODEL on. Without samples, edgeq judges by the weights alone."
)
@PREPROCESS
@click.option(
    "--count",
    type=click.IntRange(min=1),
    help="Number of samples to simulate. [default: 2 to 8, depending on the model's size]",
)
@click.option("--float", "reference", type=PATH, help="Float32 model, to measure the loss caused by saturation.")
@click.option("--variant", metavar="NAME", help="Variant to audit, if MODEL is a bundle.")
@click.option(
    "--engine",
    type=ENGINE_NAME,
    metavar="ENGINE",
    help="Engine whose kernels to audit. [default: the variant's, else onnxruntime's own]",
)
@target_option(
    help="Target that runs the kernels. If its kernels are exact, nothing saturates. "
    "[default: any target that saturates]"
)
@SESSION_OPTIONS
def audit_command(printer: Printer, model: Path, data: str | None, **options: Any) -> None:
    """List the layers that saturate on x86 CPUs without VNNI. MODEL is a quantized model or a bundle.

    The kernels of these CPUs add two products in 16 bits. The weights show in which output channels the sum can
    overflow. With --data, edgeq also simulates these kernels and compares the outputs.

    \b
    edgeq audit int8.onnx
    edgeq audit int8.onnx --data val/ --preprocess imagenet --float model.onnx
    edgeq audit int8.onnx --engine openvino -t haswell
    """
    from edgeq.data.open_source import Data
    from edgeq.hardware.target import resolve
    from edgeq.prove.saturation import audit_saturation
    from edgeq.run.session import parse_session_options

    engine, target = options["engine"], options["target"]
    samples = Data(data, options["preprocess"], count=options["count"]) if data is not None else None
    result = audit_saturation(
        model,
        samples,
        reference=options["reference"],
        variant=options["variant"],
        config=parse_session_options(options["session_options"]),
        engine=engines_of([engine])[0].engine if engine is not None else None,
        target=resolve(target) if target is not None else None,
        progress=printer.progress(),
    )
    printer.lines(result, _audit_lines(result, verbose=printer.verbose))


def _audit_lines(result: Audited, *, verbose: bool) -> Lines:
    from edgeq.run.engines import DEFAULT

    audit = result.audit
    engine = f" in {result.engine}" if result.engine != DEFAULT else ""
    target = f" on {result.target}" if result.target else ""
    yield f"{result.name}{engine}{target}: {audit.summary()}"
    layers = [layer for layer in audit.layers if verbose or layer.can_saturate]
    if layers:
        rows = []
        for layer in layers:
            share = f"{layer.clipped / layer.sums:.3%}" if layer.sums else ""
            details = [layer.channels, layer.suspects, layer.worst_pair]
            numbers = ["?" if value is None else str(value) for value in details]
            rows.append((layer.name, layer.op_type, *numbers, share))
        heads = ("layer", "operator", "channels", "can saturate", "worst pair", "clipped")
        yield table(heads, rows, numbers_from=2, box=None, pad_edge=False)
        yield "worst pair: the largest sum of two neighbouring weights of one sign; a pair up to 128 cannot saturate"
    if audit.float_db is not None:
        saturating, exact = audit.float_db
        yield f"against float32: {exact:.1f} dB SQNR on exact kernels, {saturating:.1f} dB on saturating ones"
