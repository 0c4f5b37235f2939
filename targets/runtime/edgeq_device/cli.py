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
            command.add_argument("--seconds", type=_positive, default=2.0, help="measured seconds a variant, at least")
            command.add_argument("--runs", type=_count, default=100, help="measured runs a variant, at least")
            command.add_argument("--seed", type=int, default=0, help="order of the interleaved runs")
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


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be more than 0")
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
    from edgeq_device.bench import bench, bench_lines
    from edgeq_device.sessions import read_device

    result = bench(
        bundle,
        read_device(),
        name=arguments.variant,
        threads=arguments.threads,
        min_duration_s=arguments.seconds,
        min_runs=arguments.runs,
        seed=arguments.seed,
    )
    _show(arguments, result, bench_lines(result))
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
