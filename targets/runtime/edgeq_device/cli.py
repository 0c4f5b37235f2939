"""Run `python edgeq_run.py info|verify|bench|infer|pull` for a bundle on its device. It needs only numpy and
onnxruntime.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any, Dict, List, NoReturn, Optional, Sequence

from edgeq_device.bundle.package import Bundle, open_bundle
from edgeq_device.bundle.signature import check_signature
from edgeq_device.engines.variant import Variant
from edgeq_device.errors import BudgetError, BundleError, DeviceError, OutputError, UsageError
from edgeq_device.system.budget import Endings, confine, lift_seconds
from edgeq_device.system.programs import build_child_environment
from edgeq_device.system.relay import escape, format_json, hide_passwords, prepare_output
from edgeq_device.trust.keys import PLACE, Trust, find_trust

# Exit codes as shells report them: 128 + SIGINT, 128 + SIGPIPE.
INTERRUPTED = 130
READER_GONE = 141

_endings = Endings()


def run_program(root: Path) -> int:
    """Run `main` in a process under the limits of the budget. The program that travels in a bundle calls this."""
    try:
        confine("edgeq_run")
    except DeviceError as error:
        return _report_failure(error)
    # After the fork: the parent only forwards signals, and the child unwinds.
    _endings.unwind()
    os.environ.update(build_child_environment())  # for programs that libraries start
    try:
        return main(root=root)
    except KeyboardInterrupt:
        return _report_interrupt()
    finally:
        _endings.close()


def main(argv: Optional[Sequence[str]] = None, root: Optional[Path] = None) -> int:
    """Run one command on the bundle at `root` (or --bundle) and return the exit code."""
    prepare_output()
    arguments = _build_parser(root).parse_args(argv)
    try:
        trust = find_trust(arguments.trust, required=arguments.require_signature)
        if arguments.run is None:
            return _pull(arguments, trust)
        with open_bundle(arguments.bundle, expect=getattr(arguments, "expect", None)) as bundle:
            arguments.signer = check_signature(bundle, trust)
            return int(arguments.run(bundle, arguments))
    except DeviceError as error:
        return _report_failure(error)
    except MemoryError:
        return _report_failure(BudgetError("memory ran out", "EDGEQ_BUDGET sets the limit; give smaller inputs"))
    except BrokenPipeError:
        return READER_GONE


def _report_interrupt() -> int:
    print("edgeq_run: interrupted", file=sys.stderr)
    return INTERRUPTED


def _report_failure(error: DeviceError) -> int:
    # A library may turn the signal's exception into an error of its own.
    if _endings.number:
        return _report_interrupt() if _endings.number == signal.SIGINT else 128 + _endings.number
    print(escape(hide_passwords(f"edgeq_run: {error}")), file=sys.stderr)
    return error.exit_code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse repeats the argument, which may contain a password or control characters.
        super().error(escape(hide_passwords(message)))


def _build_parser(root: Optional[Path]) -> argparse.ArgumentParser:
    parser = _Parser(prog="edgeq_run.py", description="Check, time and run this bundle on this device.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, summary in (
        ("info", _info, "Show the variants, which one this device takes, and why."),
        ("verify", _verify, "Check the hashes and run the self-test of every variant that runs here."),
        ("bench", _bench, "Measure latency and throughput."),
        ("infer", _infer, "Run the model on images or tensors, and say what it found."),
        ("pull", None, "Get a bundle from an OCI registry, by its digest."),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print JSON and nothing else on stdout")
        if name == "pull":
            command.add_argument("reference", metavar="REF", help="HOST/REPOSITORY@sha256:... (answer timeout: 60 s)")
            command.add_argument(
                "-o", "--output", type=Path, required=True, help="directory for the bundle; must not exist"
            )
        else:
            command.add_argument("--variant", metavar="NAME", help="use this variant instead of the best one")
            command.add_argument(
                "--bundle", type=Path, default=root, required=root is None, help="a bundle directory or .edgeq file"
            )
        command.add_argument("--trust", type=Path, metavar="PATH", help=f"file or folder of trusted keys ({PLACE})")
        command.add_argument("--require-signature", action="store_true", help="refuse if no trusted key is set")
        if name == "verify":
            command.add_argument("--expect", metavar="SHA256", help="refuse a bundle whose manifest has another hash")
        if name in ("bench", "infer"):
            command.add_argument(
                "--threads", type=_parse_count, default=0, help="threads inside an operator (0: all cores)"
            )
        if name == "bench":
            _add_bench_options(command)
        if name == "infer":
            command.add_argument(
                "inputs", nargs="+", metavar="INPUT", help="IMAGE.jpg, a folder, X.npz, X.npy, or INPUT_NAME=X.npy"
            )
            _add_infer_options(command)
    return parser


def _parse_count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def _add_bench_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--scenario", default="single-stream", help="single-stream, multi-stream, server, offline or all")
    add("--duration", type=float, metavar="S", help="minimum seconds for each model (2)")
    add("--official", action="store_true", help="MLPerf's official duration: 600 seconds")
    add("--queries", dest="min_queries", type=int, default=100, help="minimum queries for each model (100)")
    add("--pin", metavar="CORES", help="run on these cores only, such as 0,2-3")
    add("--batch", type=int, default=1, help="offline, multi-stream: samples in each run (1)")
    add("--qps", dest="target_qps", type=float, help="server: arrival rate (default: search for the highest)")
    add("--latency-bound", dest="latency_bound_ms", type=float, metavar="MS", help="server: bound on p99 (10 x p50)")
    add(
        "--shape",
        dest="shapes",
        action="append",
        default=[],
        metavar="NAME=SIZES",
        help="make up inputs of this shape",
    )
    add("--seed", type=_parse_count, default=0, help="seed of sample order, interleaving and arrivals (0)")
    add("-v", "--verbose", action="store_true", help="show the distributions and the machine")


def _add_infer_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--threshold", type=float, metavar="T", help="lowest score of an object or class (default: the bundle's)")
    add("--draw", type=Path, metavar="PATH", help="write a drawing: .png, .svg, or a folder for several images")
    add("--top", type=_parse_count, metavar="N", help="print the N highest scores of each input, without a head")
    add("--raw", action="store_true", help="write the outputs themselves, as without a head")
    add("-o", "--output", type=Path, help=".npz for the outputs themselves (default: next to the bundle)")
    add("--force", action="store_true", help="replace an existing output")


def _info(bundle: Bundle, arguments: argparse.Namespace) -> int:
    # Commands import what they need: `--help` stays fast, and numpy waits until the bundle is checked.
    from edgeq_device.bundle.select import select
    from edgeq_device.bundle.verify import describe, info_lines
    from edgeq_device.engines.device import read_device

    device = read_device()
    try:
        choice = select(bundle, device, name=arguments.variant)
    except BundleError:
        if arguments.variant is not None:
            raise
        # A bundle for other devices is still listed: each variant is shown with the reason why it does not run here.
        choice = None
    _print_record(arguments, describe(bundle, device, choice), info_lines(bundle, device, choice))
    return 0


def _verify(bundle: Bundle, arguments: argparse.Namespace) -> int:
    from edgeq_device.bundle.verify import report_lines, verify
    from edgeq_device.engines.device import read_device

    report = verify(bundle, read_device(), arguments.variant, arguments.signer)
    _print_record(arguments, report.to_dict(), report_lines(report))
    report.check()
    return 0


def _bench(bundle: Bundle, arguments: argparse.Namespace) -> int:
    from edgeq_device.bundle.bench_models import bench_models, build_bench_models, choose_variants, find_feeds
    from edgeq_device.engines.device import read_device
    from edgeq_device.measure.bench_settings import parse_settings
    from edgeq_device.measure.bench_text import format_bench
    from edgeq_device.prepare.feeds import parse_shapes

    lift_seconds()  # the options of bench set how long it runs
    settings = ("scenario", "duration", "official", "min_queries", "pin", "batch", "target_qps", "latency_bound_ms")
    bench_settings = parse_settings(**{name: getattr(arguments, name) for name in (*settings, "seed", "threads")})
    shapes = parse_shapes(arguments.shapes)
    variants, passed_over = choose_variants(bundle, read_device(), arguments.variant)
    feeds = None if shapes else find_feeds(variants)
    report = bench_models(build_bench_models(variants), bench_settings, feeds=feeds, shapes=shapes, notes=passed_over)
    _print_record(arguments, report, format_bench(report, verbose=arguments.verbose))
    return 0


def _infer(bundle: Bundle, arguments: argparse.Namespace) -> int:
    from edgeq_device.bundle.answering import is_image, list_inputs
    from edgeq_device.bundle.opening import open_best, open_variant
    from edgeq_device.bundle.outputs import choose_output_path, save_outputs
    from edgeq_device.bundle.package import MAIN

    folders = any(Path(text).is_dir() for text in arguments.inputs)
    arguments.inputs = list_inputs(arguments.inputs)
    wants_answer = arguments.draw is not None or arguments.threshold is not None
    wants_outputs = arguments.raw or arguments.output is not None or bool(arguments.top)
    if wants_answer and wants_outputs:
        raise UsageError("--draw and --threshold need answers", "Leave --raw, --output and --top out")
    has_head = any(variant.info.get("head") is not None for variant in bundle.components[MAIN])
    if wants_answer or (has_head and not wants_outputs):
        return _infer_answers(bundle, arguments, folders)
    if arguments.top or any(map(is_image, arguments.inputs)):
        return _infer_items(bundle, arguments)
    from edgeq_device.engines.device import read_device
    from edgeq_device.engines.runtime import infer
    from edgeq_device.prepare.inputs import read_feeds

    # Refuse a wrong path before the model runs.
    output = choose_output_path(bundle, arguments.output)

    def run(variant: Variant, threads: int) -> Dict[str, Any]:
        session = open_variant(variant, threads)
        return infer(session, read_feeds(session, arguments.inputs))

    best = open_best(bundle, read_device(), name=arguments.variant, threads=arguments.threads, open_it=run)
    choice, outputs = best.choice, best.session
    save_outputs(output, outputs, force=arguments.force)
    shapes: Dict[str, Any] = {
        name: {"dtype": str(array.dtype), "shape": list(array.shape)} for name, array in outputs.items()
    }
    record: Dict[str, Any] = {
        "variant": choice.variant.name,
        "why": choice.why,
        "output": str(arguments.output or output),
        "outputs": shapes,
        "passed_over": list(best.passed_over),
    }
    lines = [f"variant {choice.variant.name}: {choice.why}"]
    lines += [f"  {reason}" for reason in best.passed_over]
    lines += [f"  {name}: {entry['dtype']}{entry['shape']}" for name, entry in shapes.items()]
    _print_record(arguments, record, [*lines, f"written to {arguments.output or output}"])
    return 0


def _infer_answers(bundle: Bundle, arguments: argparse.Namespace, folders: bool) -> int:
    """Answer each image, or the tensors of all files, and print what was found as soon as it is known."""
    from edgeq_device.bundle.answering import answer_each, check_complete, group_inputs, plan_drawings
    from edgeq_device.bundle.outputs import choose_output_path
    from edgeq_device.program import Model

    drawings = plan_drawings(
        arguments.inputs, arguments.draw, lambda path: choose_output_path(bundle, path), arguments.force, folders
    )
    with Model(bundle, arguments.variant, arguments.threads) as model:
        items = group_inputs(model.session, arguments.inputs)
        record: Dict[str, Any] = {"variant": model.variant, "why": model.why, "passed_over": list(model.passed_over)}
        entries: List[Any] = []
        problems: List[str] = []
        for item in answer_each(model, items, arguments.threshold, drawings, arguments.force):
            problems += [item.problem] if item.problem else []
            if arguments.json:
                entries.append(item.record)
            else:
                _print_record(arguments, {}, item.list_lines(heading=len(items) > 1))
    if arguments.json:
        _print_record(arguments, {**record, "inputs": entries}, [])
    check_complete(problems, len(items))
    return 0


def _infer_items(bundle: Bundle, arguments: argparse.Namespace) -> int:
    """Run the model on each image, or on the tensors of all files, and print the best classes or write the outputs."""
    from edgeq_device.bundle.answering import group_inputs
    from edgeq_device.bundle.outputs import choose_output_path, save_outputs
    from edgeq_device.program import Model

    output = None if arguments.top and arguments.output is None else choose_output_path(bundle, arguments.output)
    with Model(bundle, arguments.variant, arguments.threads) as model:
        items = group_inputs(model.session, arguments.inputs)
        if len(items) > 1 and not arguments.top:
            raise UsageError("there are several images, but one file for the outputs", "Give one image, or --top N")
        results = [model.run(item) for item in items.values()]
        best = [model.top(outputs, arguments.top) for outputs in results] if arguments.top else []
    record: Dict[str, Any] = {"variant": model.variant, "why": model.why}
    lines = [f"variant {model.variant}: {model.why}"]
    if best:
        record["inputs"] = [
            {"input": name, "top": [{"label": label, "score": score} for label, score in classes]}
            for name, classes in zip(items, best)
        ]
        for name, classes in zip(items, best):
            lines += [name, *(f"  {score:10.4g}  {label}" for label, score in classes)]
    if output is not None:
        if len(results) > 1:
            raise UsageError("--output stores the outputs for one input only", "Leave it out, or give one input")
        save_outputs(output, results[0], force=arguments.force)
        record["output"] = str(arguments.output or output)
        lines.append(f"written to {record['output']}")
    _print_record(arguments, record, lines)
    return 0


def _pull(arguments: argparse.Namespace, trust: Optional[Trust]) -> int:
    from edgeq_device.bundle.pull import pull
    from edgeq_device.trust.registry import parse_reference

    digest = pull(parse_reference(arguments.reference), arguments.output, trust)
    record = {"reference": arguments.reference, "output": str(arguments.output), "manifest_sha256": digest}
    _print_record(arguments, record, [f"{arguments.output}: pulled, all hashes right", f"manifest sha256 {digest}"])
    return 0


def _print_record(arguments: argparse.Namespace, record: Dict[str, Any], lines: List[str]) -> None:
    try:
        print(format_json(record) if arguments.json else "\n".join(map(escape, lines)), flush=True)
    except OSError as error:
        # Python must not write the rest of its buffer again at exit: the reader is gone or the disk is full.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            raise
        raise OutputError(f"standard output cannot be written ({error.strerror})", "Send it elsewhere") from error
