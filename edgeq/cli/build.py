"""Implement `edgeq quantize`, `tune` and `package`, which build models and bundles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeq.cli._checked_text import DROP, ENGINE_NAME, RECOVERY
from edgeq.cli._common import Lines, Printer, command, styled, table
from edgeq.cli._next import propose_check
from edgeq.cli._options import (
    COMPLETE_RECOVERY,
    ENGINE,
    FORCE,
    PATH,
    WITH_FLOAT,
    build_options,
    complete_board,
    data_options,
    engines_of,
    output_beside,
    target_option,
)
from edgeq.util.registry import RECOVERIES

if TYPE_CHECKING:
    from edgeq.jobs.candidates import CandidateList
    from edgeq.jobs.package import Packaged
    from edgeq.jobs.quantize import Quantized
    from edgeq.jobs.tune import Tuned
    from edgeq.measure.agreement import Agreement, OutputAgreement
    from edgeq.measure.coverage import FloatNode
    from edgeq.prove.proof import Proof, Repair
    from edgeq.prove.saturation import Decision
    from edgeq.tuning.clock import RemoteClock
    from edgeq.util.display import Progress

# So many rows of the largest nodes and worst outputs keep the result on one screen; -v shows all.
_FLOAT_NODES_SHOWN = 8
_OUTPUTS_SHOWN = 4


def draw_proof(proof: Proof, *, verbose: bool) -> Lines:
    """Yield the lines for coverage, agreement, accuracy, speed and warnings."""
    from edgeq_device.measure.claim import SLOWER

    from edgeq.run.engines import DEFAULT
    from edgeq.util.numbers import metric, metric_name

    coverage, agreement = proof.coverage, proof.agreement
    yield f"int8 coverage {coverage.summary()}"
    if coverage.reason:
        yield f"  not measured: {coverage.reason}"
    yield from draw_float_nodes(coverage.float_nodes, verbose=verbose)
    in_engine = "" if proof.engine == DEFAULT else f"in {proof.engine}, "
    yield f"{in_engine}against float32: {closeness(agreement)} ({proof.samples} samples)"
    if len(agreement.outputs) > 1:
        outputs = sorted(agreement.outputs, key=lambda output: output.least_db)
        for output in outputs if verbose else outputs[:_OUTPUTS_SHOWN]:
            yield f"  output {output.name}: {closeness(output)}"
    for output in agreement.outputs:
        if output.basis_note:
            yield f"  {output.basis_note}"
        parts = sorted(output.slices, key=lambda part: part.least_db)
        for part in parts if verbose else parts[:_OUTPUTS_SHOWN]:
            identical, figures = part.sqnr_db == math.inf, f"SQNR {part.sqnr_db:.1f} dB, cosine {part.cosine:.5f}"
            if part.offset:
                figures = f"{figures}, around the mean {part.centred_db:.1f} dB"
            yield f"  output {output.name}, {part.location}: {'the same' if identical else figures}"
    if proof.caveat:
        yield proof.caveat
    if proof.answers_sentence:
        yield proof.answers_sentence
    elif proof.accuracy:
        rows = (
            (name, *(metric(key, value) for key, value in accuracy.metrics.items()))
            for name, accuracy in proof.accuracy.items()
        )
        yield table(("", *map(metric_name, next(iter(proof.accuracy.values())).metrics)), rows)
        yield proof.drop_sentence
    if proof.operating is not None and proof.operating.sentence:
        yield proof.operating.sentence
    if proof.speed is not None and proof.speed.ratio.verdict != SLOWER:  # if the result is slower, a warning reports it
        yield proof.speed.ratio.sentence("int8", "float32")
    if proof.repair is not None and proof.repair.met:
        yield proof.repair.sentence
    if proof.repair is not None and verbose:
        yield from draw_repair(proof.repair)
    yield from (styled(f"warning: {warning}", "yellow") for warning in proof.warnings())


def draw_float_nodes(nodes: Sequence[FloatNode], *, verbose: bool) -> Iterator[str]:
    """Yield lines on the nodes in float, the largest first. Unless `verbose`, nodes of one operator and one reason
    share a line.
    """
    alike: dict[tuple[str, ...], list[FloatNode]] = {}
    for node in sorted(nodes, key=lambda node: -node.macs):
        key = (node.precision or "float", node.op_type, node.reason, *([node.name] if verbose else []))
        alike.setdefault(key, []).append(node)
    groups = list(alike.values())
    for group in groups if verbose else groups[:_FLOAT_NODES_SHOWN]:
        node, macs = group[0], sum(node.macs for node in group)
        named = f"{node.name} ({node.op_type}" if len(group) == 1 else f"{len(group)} {node.op_type} ({node.name} …"
        yield f"  {node.precision or 'float'}: {named}, {macs:,} MACs): {node.reason}"
    if not verbose and (more := sum(map(len, groups[_FLOAT_NODES_SHOWN:]))):
        yield f"  and {more} more (-v shows them)"


def draw_repair(repair: Repair) -> Lines:
    """Yield a table of all the builds that edgeq tried in order to repair a result."""
    rows = (
        (
            step.name,
            repair.written(step.loss) if step.loss is not None else "",
            f"{step.int8_mac_share:.0%}",
            step.reason,
        )
        for step in repair.steps
    )
    yield table(("tried", "loss", "int8", ""), rows)


def closeness(agreement: Agreement | OutputAgreement) -> str:
    """Describe how closely outputs match the reference. For indices, the text gives the share of identical values. For
    class scores, it gives the share of identical top-1 classes. For other outputs, it gives the cosine.
    """
    if not agreement.compared:
        return "nothing could be compared"
    if agreement.same is not None:
        return f"{agreement.same:.1%} of the values the same"
    if agreement.sqnr_db == math.inf:
        return "the same"
    second = f"cosine {agreement.cosine:.5f}" if agreement.top1 is None else f"same top-1 in {agreement.top1:.1%}"
    outputs: Any = getattr(agreement, "outputs", (agreement,))
    centred = [output.centred_db for output in outputs if output.offset and output.centred_db is not None]
    if centred:
        second = f"{second}, around the mean {min(centred):.1f} dB"
    return f"SQNR {agreement.sqnr_db:.1f} dB, {second}"


def draw_decision(decision: Decision, *, verbose: bool) -> Lines:
    """Yield lines on the decision about saturating kernels. If `verbose`, also yield the quality and the cost of each
    mitigation.
    """
    yield f"16-bit sums: {decision.why}"
    if not verbose:
        return
    metric = "" if decision.exact_metric is None else f", {decision.exact_metric:.4f}"
    yield f"  exact kernels: {decision.exact_db:.1f} dB{metric}"
    for mitigation in decision.mitigations:
        if mitigation.failed:
            yield f"  {mitigation.name}: cannot be built: {mitigation.failed}"
            continue
        metric = "" if mitigation.metric is None else f", {mitigation.metric:.4f}"
        safe = "" if mitigation.safe else ", can saturate"
        yield f"  {mitigation.name}: {mitigation.sqnr_db:.1f} dB{metric}, time x{mitigation.cost:g}{safe}"


def _suffix_for(target: str) -> str:
    """Return the suffix of the output file for a target. Not all targets take ONNX files."""
    from edgeq.backends.base import file_suffix
    from edgeq.hardware.target import resolve

    return file_suffix(resolve(target))


@command("quantize")
@click.argument("model", type=PATH)
@output_beside(".int8.onnx", "OUT.onnx", "Path of the quantized model.", suffix=_suffix_for)
@target_option(
    default="auto",
    help="Machine that will run the model: auto (this one), a target (`edgeq targets`), a profile (`edgeq "
    "profiles`), or a .toml file.",
    show_default=True,
)
@click.option(
    "--recover",
    type=RECOVERY,
    shell_complete=COMPLETE_RECOVERY,
    multiple=True,
    metavar="METHOD",
    help=f"Apply an accuracy recovery (docs/recover.md): {', '.join(RECOVERIES.names())}. Repeatable.",
)
@click.option(
    "--min-sqnr", type=float, metavar="DB", help="Keep layers in float until the outputs reach this SQNR, in dB."
)
@ENGINE
@build_options
def quantize_command(
    printer: Printer, recover: tuple[str, ...], min_sqnr: float | None, engine: str | None, **options: Any
) -> None:
    """Quantize MODEL for a machine or a target and prove the result.

    \b
    edgeq quantize model.onnx --data calib/ --preprocess imagenet -o int8.onnx
    edgeq quantize bert.onnx --data calib.npz --dynamic -o int8.onnx
    edgeq quantize model.onnx --data calib/ --recover sequential-correction --min-sqnr 20 -o int8.onnx
    """
    from edgeq.cli._arguments import build_arguments
    from edgeq.jobs.quantize import run_quantize
    from edgeq.prove.request import Request
    from edgeq.tuning.recover.float_search import recovering

    arguments = {**build_arguments(options), "targets": options["target"], "progress": printer.progress()}
    result = run_quantize(
        Request.of(options["model"], **arguments),
        options["output"],
        engine=engines_of([engine])[0] if engine else None,
        builder=recovering(*recover, min_sqnr_db=min_sqnr) if recover or min_sqnr is not None else None,
    )
    printer.lines(result, _quantize_lines(result, verbose=printer.verbose))


def _quantize_lines(result: Quantized, *, verbose: bool) -> Lines:
    from edgeq.util.numbers import size

    scheme, speed = result.scheme, result.proof.speed
    # What is better than the result comes first, or nobody reads it.
    if speed is not None and speed.alternative is not None:
        yield styled(f"faster: {speed.alternative.sentence}", "yellow")
    yield f"{result.output}: {scheme.title} for {result.target.title}"
    yield f"size {size(result.bytes_int8)}, {result.bytes_int8 / result.bytes_float:.2f} of float32"
    yield from draw_proof(result.proof, verbose=verbose)
    if result.decision is not None:
        yield from draw_decision(result.decision, verbose=verbose)
    for kind in result.block_compute.kinds if result.block_compute is not None else ():
        yield f"products in blocks: {kind.summary()}"
    for key, value in result.session_options.items():
        yield f"run it with the session option {key}={value}"
    yield from (f"note: {note}" for note in (*result.notes, *([speed.advice] if speed and speed.advice else [])))
    if verbose:  # print the time of each step
        seconds = {**result.seconds, "all": sum(result.seconds.values())}
        rows = ((title, f"{duration:.2f}") for title, duration in seconds.items())
        yield table(("stage", "seconds"), rows, numbers_from=1, box=None)


@command("package")
@click.argument("model", type=PATH)
@target_option(
    "targets",
    multiple=True,
    default=("this-machine",),
    show_default=True,
    help="Machine that will run the model: a target (`edgeq targets`), a profile (`edgeq profiles`), or a .toml "
    "file. Repeatable.",
)
@output_beside(".edgeq", "DIR|FILE.edgeq", "Path of the bundle.")
@WITH_FLOAT
@click.option(
    "--selftest",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Number of samples to include as test vectors.",
)
@click.option(
    "--split", is_flag=True, help="Write one bundle for each target (OUTPUT/NAME.edgeq) instead of one for all."
)
@click.option(
    "--engine",
    "engines",
    type=ENGINE_NAME,
    multiple=True,
    metavar="ENGINE",
    help="Add a variant for this plug-in engine: NAME or NAME:PRECISION. Repeatable, in order of preference.",
)
@build_options
def package_command(printer: Printer, engines: tuple[str, ...], **options: Any) -> None:
    """Quantize MODEL and write a bundle that a device can verify, run and time without edgeq.

    \b
    edgeq package model.onnx --data calib/ --preprocess imagenet -o dist/
    edgeq package model.onnx --data calib/ -t raspberry-pi-5 -t haswell -t cascade-lake -o dist/
    edgeq package model.onnx --data calib/ --engine openvino -o dist/
    python dist/edgeq_run.py verify
    """
    from edgeq.cli._arguments import build_arguments
    from edgeq.jobs.bundles import BundleContents
    from edgeq.jobs.package import run_package
    from edgeq.prove.request import Request

    arguments = {**build_arguments(options), "targets": options["targets"], "progress": printer.progress()}
    result = run_package(
        Request.of(options["model"], **arguments),
        options["output"],
        contents=BundleContents(options["selftest"], options["with_float"]),
        split=options["split"],
        engines=engines_of(engines),
    )
    printer.lines(result, _package_lines(result, verbose=printer.verbose))
    propose_check(next(iter(result.bundles.values())), options["targets"])


def _package_lines(result: Packaged, *, verbose: bool) -> Lines:
    from edgeq.measure.checks import summarise
    from edgeq.util.numbers import size

    drawn: dict[tuple[Path, str], str] = {}
    for name, variant in result.variants.items():
        artifact = variant.built.artifact
        engine = f" in {artifact.plugin.name}" if artifact.plugin is not None else ""
        needs = f"onnxruntime {variant.min_onnxruntime} or newer"
        yield styled(f"{name}: {artifact.scheme.title}{engine}, {size(variant.bytes)}, {needs}", "bold")
        if (artifact.model, engine) in drawn:
            yield f"  the same model as {drawn[artifact.model, engine]}"
        else:
            drawn[artifact.model, engine] = name
            yield from draw_proof(variant.proof, verbose=verbose)
        if variant.decision is not None:
            yield from draw_decision(variant.decision, verbose=verbose)
        if verbose:
            yield from (f"  {check.name}: {check.kind} ({check.where}) {check.detail}" for check in variant.checks)
        else:
            yield f"checked {summarise(variant.checks)}"
    yield from (f"note: {note}" for note in result.notes)
    yield from (f"bundle: {bundle}" for bundle in dict.fromkeys(result.bundles.values()))


@command("tune")
@click.argument("model", type=PATH)
@data_options
@click.option(
    "--max-drop",
    type=DROP,
    metavar="DROP",
    help="Largest loss of accuracy to accept: 1%, 0.5pt or 0.005.",
    show_default="1%",
)
@click.option(
    "--objective",
    type=click.Choice(["latency", "throughput", "size", "memory"]),
    default="latency",
    show_default=True,
    help="Property to optimize. Candidates that lose too much accuracy or are slower than float32 are left out.",
)
@click.option("--budget", metavar="TIME", help="Limit on wall-clock time: 90s, 10m, 1h30m.")
@target_option(
    default="auto",
    show_default=True,
    help="Machine that will run the model: auto (this one), or a target or profile that this machine can run or "
    "simulate.",
)
@click.option(
    "--engine",
    "engines",
    type=ENGINE_NAME,
    multiple=True,
    metavar="ENGINE",
    help="Time only this engine: NAME or NAME:PRECISION. Repeatable. [default: all installed engines that "
    "compute correctly]",
)
@click.option(
    "--on",
    multiple=True,
    metavar="BOARD",
    shell_complete=complete_board,
    help="Time and check every candidate on this board. Repeatable: boards of the same kind take turns.",
)
@output_beside(".edgeq", "DIR|FILE.edgeq", "Path of the bundle.")
@WITH_FLOAT
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@click.option("--no-memory", is_flag=True, help="Ignore the results of earlier searches, and store none.")
@click.option(
    "--strict",
    is_flag=True,
    help="Write a bundle only if the measurements prove that the goal is met. Otherwise exit with code 11.",
)
@click.option(
    "--thorough",
    is_flag=True,
    help="Do not dismiss any candidate early. This takes longer and serves to check the normal search.",
)
@click.option("--dry-run", is_flag=True, help="List the candidates and the plan, and do nothing else.")
@FORCE
def tune_command(
    printer: Printer, model: Path, engines: tuple[str, ...], on: tuple[str, ...], dry_run: bool, **options: Any
) -> None:
    """Build int8 versions of MODEL, measure them on this machine, and write the best one as a bundle.

    \b
    edgeq tune model.onnx --data calib/ --preprocess imagenet -o tuned/
    edgeq tune model.onnx --data calib/ --val val/ --task classification -t nvidia-t4 -o for-t4/
    edgeq tune model.onnx --data calib/ --on ssh://pi@10.0.0.5 -o for-the-board/
    edgeq tune model.onnx --data calib/ --engine onnxruntime --engine openvino:bf16 -o tuned/
    edgeq tune model.onnx --data calib/ --val val/ --task classification --max-drop 0.5pt --budget 10m -o tuned/
    """
    from edgeq.cli._arguments import data_arguments
    from edgeq.errors import GoalNotMetError, UsageError
    from edgeq.jobs.bundles import BundleContents
    from edgeq.jobs.candidates import plan
    from edgeq.jobs.tune import run_tune
    from edgeq.prove.request import Request
    from edgeq.tuning.goal import Goal, as_goal
    from edgeq.util.numbers import parse_drop

    progress, choices = printer.progress(), engines_of(engines)
    arguments = {**data_arguments(options), "targets": options["target"], "force": options["force"]}
    goal = as_goal(
        Goal(options["objective"], thorough=options["thorough"], strict=options["strict"]),
        max_drop=parse_drop(options["max_drop"]),
        budget=options["budget"],
    )
    request = Request.of(model, **arguments, progress=progress)
    if dry_run:
        if on:
            raise UsageError("--dry-run connects to no board", "Leave --on out, or name the board's target with -t")
        steps = plan(request, goal=goal, engines=choices)
        printer.lines(steps, _plan_lines(steps))
        return
    try:
        with _clock(on, progress) as clock:
            result = run_tune(
                request,
                options["output"],
                goal=goal,
                engines=choices,
                clock=clock,
                contents=BundleContents(with_float=options["with_float"]),
                resume=options["resume"],
                memory=not options["no_memory"],
            )
    except GoalNotMetError as error:
        printer.lines(error.record, _search_lines(error.record, verbose=printer.verbose))
        raise
    printer.lines(result, _tune_lines(result, verbose=printer.verbose))


@contextmanager
def _clock(on: tuple[str, ...], progress: Progress) -> Iterator[RemoteClock | None]:
    if not on:
        yield None
        return
    from edgeq.remote.devices import find_fleet
    from edgeq.tuning.clock import REGISTRY

    with REGISTRY.load("boards")(find_fleet(on), progress=progress) as clock:
        yield clock


def _tune_lines(result: Tuned, *, verbose: bool) -> Lines:
    if not result.record.get("simulated"):
        yield from _search_lines(result.record, verbose=verbose)
        return
    yield styled(f"{result.target.title}, in simulation", "bold")
    yield from _search_lines(result.record, verbose=verbose)
    yield from draw_proof(result.proof, verbose=verbose)
    yield f"bundle: {result.bundle}"


def _plan_lines(steps: CandidateList) -> Lines:
    yield f"for {steps.target.title}, profile {steps.target.profile.name}"
    steps_of = "built, timed against float32 and screened" if steps.threads else "built and screened"
    yield f"kernel choices, {steps_of}:"
    yield from (f"  {candidate.name}" for candidate in steps.candidates)
    if steps.engines.plugins:
        yield f"timed against onnxruntime's own kernels: {', '.join(c.name for c in steps.engines.plugins)}"
    yield "calibration methods, for the choices that are worth it:"
    yield from (f"  {name}" for name in steps.methods)
    if steps.threads:
        yield f"threads: {', '.join(str(n) if n else 'all' for n in steps.threads)}"
    fallback = "tensors in 16 bits" if "wide" in steps.target.profile.search else "layers in float"
    yield f"if accuracy falls short: {', '.join((*steps.recoveries, fallback))}"


def _search_lines(record: Mapping[str, Any], *, verbose: bool) -> Lines:
    if not record.get("simulated"):
        yield from _draw_timed(record, verbose=verbose)
        return
    from edgeq.tuning.simulated_record import summarize

    yield from (f"{title}: {text}" for title, text in summarize(record).items())
    for form in record["trials"] if verbose else ():
        in_float = ", ".join(form["kept_in_float"]) or "nothing"
        lost = "not measured" if form["loss"] is None else f"{form['loss']:.4f}"
        yield f"{form['method']}, {in_float} in float: loss {lost}"
    yield f"{len(record['trials'])} forms in {record['elapsed_s']:.0f} s"


def _draw_verdict(record: Mapping[str, Any], *, verbose: bool) -> Lines:
    """Yield the result in one sentence, then doubts and needs. With `verbose`, yield every sentence."""
    verdict = list(record["verdict"])
    # The error that ends the command says that the goal is missed.
    if not record["goal_met"]:
        verdict.pop(0)
    if record["chosen"]:
        speed, loss, *verdict = verdict
        yield styled(f"{speed}; {loss}", "bold")
    yield from verdict if verbose else (*record["doubts"], *record["needed"])


def _draw_timed(record: Mapping[str, Any], *, verbose: bool) -> Lines:
    from edgeq_device.measure.claim import Claim

    from edgeq.util.numbers import size

    yield from _draw_verdict(record, verbose=verbose)
    # The ratio and the milliseconds of a row come from the same runs. Two rows may come from different series of runs.
    heads = ("", "times float32", "interval, milliseconds", "points lost", "at most", "size", "")
    rows = []
    float32 = record["float32"]
    if timing := float32["timing"]:
        latency = f"{timing['latency']['p50_ms']:.3g} ms"
        rows.append(("float32", "1.00", latency, "0.00", "", size(float32["bytes"]), ""))
    roles = {name: f"runner-up in {engine}" for engine, name in record["runners_up"].items()}
    names = {record["chosen"], *roles}
    shown = [c for c in record["candidates"] if c["name"] in names or (verbose and c["pareto"])]
    for candidate in sorted(shown, key=lambda c: float(c["timing"]["latency"]["p50_ms"]) if c["timing"] else 0.0):
        claim = Claim.from_record(candidate["timing"]["speedup"]) if candidate["timing"] else Claim()
        about = claim.estimated
        times = f"{claim.interval[0]:.2f}" if claim.interval else f"about {about[0]:.2f}" if about else "not known"
        accuracy = candidate["accuracy"]
        losses = (f"{100 * accuracy[name]:.2f}" if accuracy else "" for name in ("drop", "bound"))
        role = roles.get(candidate["name"], candidate["status"])
        rows.append((candidate["name"], times, claim.figures(), *losses, size(candidate["screening"]["bytes"]), role))
    yield table(heads, rows)
    lost = [c for c in record["candidates"] if c["status"] != "chosen"]
    if verbose:
        yield from (f"{candidate['name']}: {candidate['reason']}" for candidate in lost)
    more = "" if verbose else " (-v shows why each of the others was not chosen)"
    yield f"{len(record['candidates'])} candidates in {record['elapsed_s']:.0f} s{more}"
