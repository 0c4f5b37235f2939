"""`python edgeq_run.py info|verify|bench|infer`: a bundle on its device, with numpy and onnxruntime alone."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from edgeq_device.errors import BundleError, DeviceError
from edgeq_device.package import Bundle, open_bundle

INTERRUPTED = 130
# Named here so that --help need not import numpy.
_SCENARIOS = ("single-stream", "multi-stream", "server", "offline", "all")


def main(argv: Optional[Sequence[str]] = None, root: Optional[Path] = None) -> int:
    """Run one command on the bundle at `root` (or --bundle) and return the exit code."""
    arguments = _parser(root).parse_args(argv)
    try:
        with open_bundle(arguments.bundle) as bundle:
            return int(arguments.run(bundle, arguments))
    except DeviceError as error:
        print(f"edgeq_run: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("edgeq_run: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser(root: Optional[Path]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="edgeq_run.py", description="Check, time and run this bundle on this device.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, summary in (
        ("info", _info, "Show the variants, which one this device takes, and why."),
        ("verify", _verify, "Check the hashes and run the self-test of every variant that runs here."),
        ("bench", _bench, "Measure latency and throughput."),
        ("infer", _infer, "Run the model on tensors from .npy or .npz files."),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print JSON and nothing else on stdout")
        command.add_argument("--variant", metavar="NAME", help="use this variant instead of the best one")
        command.add_argument(
            "--bundle", type=Path, default=root, required=root is None, help="a bundle directory or .edgeq file"
        )
        if name in ("bench", "infer"):
            command.add_argument("--threads", type=_count, default=0, help="threads inside an operator (0: all cores)")
        if name == "bench":
            command.add_argument(
                "--scenario", choices=_SCENARIOS, default=_SCENARIOS[0], help="which queries, and when"
            )
            command.add_argument(
                "--duration", type=float, default=2.0, metavar="S", help="seconds for each model, at least"
            )
            command.add_argument(
                "--queries", type=_count, default=100, metavar="N", help="queries for each model, at least"
            )
            command.add_argument(
                "--seed", type=_count, default=0, help="order of the samples and of the interleaved runs"
            )
            command.add_argument("--pin", metavar="CORES", help="run on these cores only, for example 0,2-3")
        if name == "infer":
            command.add_argument("inputs", nargs="+", metavar="INPUT", help="X.npz, X.npy, or INPUT_NAME=X.npy")
            command.add_argument("-o", "--output", type=Path, required=True, help="the outputs, as .npz")
            command.add_argument("--force", action="store_true", help="replace an existing output")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def _info(bundle: Bundle, arguments: argparse.Namespace) -> int:
    from edgeq_device.select import select
    from edgeq_device.sessions import read_device
    from edgeq_device.text import describe, info_lines

    device = read_device()
    try:
        choice = select(bundle, device, name=arguments.variant)
    except BundleError:
        if arguments.variant is not None:
            raise
        # A bundle for other devices is still worth showing: each variant is listed with why it does not run here.
        choice = None
    _show(arguments, describe(bundle, device, choice), info_lines(bundle, device, choice))
    return 0


def _verify(bundle: Bundle, arguments: argparse.Namespace) -> int:
    from edgeq_device.sessions import read_device
    from edgeq_device.text import report_lines
    from edgeq_device.verify import verify

    report = verify(bundle, read_device(), arguments.variant)
    _show(arguments, report.to_dict(), report_lines(report))
    report.check()
    return 0


def _bench(bundle: Bundle, arguments: argparse.Namespace) -> int:
    from edgeq_device.bench import BenchSettings
    from edgeq_device.bench_bundle import bundle_feeds, bundle_subjects, bundle_variants
    from edgeq_device.bench_text import format_bench
    from edgeq_device.environment import parse_cores
    from edgeq_device.scenarios import SCENARIOS
    from edgeq_device.sessions import read_device
    from edgeq_device.subjects import bench_subjects

    settings = BenchSettings(
        scenarios=tuple(SCENARIOS) if arguments.scenario == "all" else (arguments.scenario,),
        min_duration_s=arguments.duration,
        min_queries=arguments.queries,
        seed=arguments.seed,
        threads=arguments.threads,
        pin=parse_cores(arguments.pin) if arguments.pin else (),
    )
    variants = bundle_variants(bundle, read_device(), arguments.variant)
    report = bench_subjects(bundle_subjects(variants), settings, feeds=bundle_feeds(variants))
    _show(arguments, report, [format_bench(report)])
    return 0


def _infer(bundle: Bundle, arguments: argparse.Namespace) -> int:
    from edgeq_device.infer import infer, read_feeds, save_outputs
    from edgeq_device.select import select
    from edgeq_device.sessions import open_session, read_device

    choice = select(bundle, read_device(), name=arguments.variant)
    session = open_session(choice.variant, arguments.threads)
    outputs = infer(session, read_feeds(session, arguments.inputs))
    save_outputs(arguments.output, outputs, force=arguments.force)
    shapes: Dict[str, Any] = {
        name: {"dtype": str(array.dtype), "shape": list(array.shape)} for name, array in outputs.items()
    }
    plain = {"variant": choice.variant.name, "why": choice.why, "output": str(arguments.output), "outputs": shapes}
    lines = [f"variant {choice.variant.name}: {choice.why}"]
    lines += [f"  {name}: {entry['dtype']}{entry['shape']}" for name, entry in shapes.items()]
    _show(arguments, plain, [*lines, f"written to {arguments.output}"])
    return 0


def _show(arguments: argparse.Namespace, plain: Dict[str, Any], lines: List[str]) -> None:
    print(json.dumps(plain, indent=2, allow_nan=False) if arguments.json else "\n".join(lines))
