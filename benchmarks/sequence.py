"""Compare edgeq with ONNX Runtime's own dynamic quantization for transformers, recurrent networks and multilayer
perceptrons.

    python benchmarks/sequence.py [--only NAME ...] [--minilm MODEL.onnx] [--tune] [--json FILE]

minilm_l6's model is not in shared/data. make_model.py in its folder makes the model, and --minilm names the file. Its
samples need the package `tokenizers`. ONNX Runtime is used as its documentation recommends:
`quantize_dynamic(per_channel=True)`, without other options. --tune adds the result of `edgeq tune` (minutes per model).
Runs are interleaved, and ratios are ratios of medians.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from contenders import edgeq_json
from edgeq_device.measure.latency import WarmUp, measure_interleaved
from onnxruntime.quantization import quantize_dynamic
from tasks import shared_data

from edgeq.data.samples import open_samples
from edgeq.measure.loaded_model import open_model
from edgeq.model.files import model_files
from edgeq.model.load import model_signature
from edgeq.run.session import SessionSettings

SPECS = Path(__file__).resolve().parent / "specs"
Feed = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Describe a model, its data, and the limits that the quantized model must meet.

    Attributes:
        options: options of `edgeq eval`, `quantize` and `tune` that follow --task.
        preprocess: value of `--preprocess`.
        shapes: name → function that turns the inputs of the first validation sample into the inputs to time.
        least: smallest allowed value of the metric.
        most_bytes, least_speed: limits relative to float32.
        drop: value of --max-drop.
    """

    name: str
    model: Path
    calibration: Path
    validation: Path
    preprocess: str
    task: str
    shapes: Mapping[str, Callable[[Feed], Feed]]
    least: float
    most_bytes: float
    least_speed: float
    drop: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contender:
    """Describe a model or a bundle to compare, with its session options."""

    name: str
    path: Path
    config: Mapping[str, str] = field(default_factory=dict)

    def bytes(self) -> int:
        """Return the number of bytes to deploy. For a bundle, this is the size of its model files."""
        if self.path.is_dir():
            return sum(f.stat().st_size for f in self.path.rglob("*") if f.suffix in (".onnx", ".data"))
        return sum(f.stat().st_size for f in model_files(self.path))


def cases(root: Path, minilm: Path | None, work: Path) -> Iterator[Case]:
    """Yield the cases that can be run. If a folder of samples also contains other files, links to the samples are made
    in `work`.
    """
    home = root / "nsnet2_gru"

    def frames(count: int) -> Callable[[Feed], Feed]:
        return lambda feed: {name: np.ascontiguousarray(value[:, :count]) for name, value in feed.items()}

    yield Case(
        "nsnet2_gru",
        home / "model.onnx",
        home / "data",
        home / "data",
        f"{SPECS / 'nsnet2_gru.py'}:features",
        f"{SPECS / 'si_sdr.py'}:task",
        {"1 frame": frames(1), "100 frames": frames(100), "37 s": lambda feed: feed},
        least=15.228 - 0.3,
        most_bytes=0.35,
        least_speed=1.0,
        drop="0.3",
        options=("--annotations", str(home / "data")),
    )
    home = root / "mlperf_tiny_ad"
    for file in sorted((home / "data").glob("val_*.npz")):
        (work / file.name).symlink_to(file)
    yield Case(
        "mlperf_tiny_ad",
        home / "model.onnx",
        home / "data" / "calib_10.npz",
        work,
        str(SPECS / "mlperf_tiny_ad.toml"),
        "anomaly",
        {"1 window": lambda feed: {n: v[:1] for n, v in feed.items()}, "196 windows": lambda feed: feed},
        least=0.9097 - 0.005,
        most_bytes=0.35,
        least_speed=1.0,
        drop="0.005",
    )
    if minilm is None:
        print("\nminilm_l6: skipped, make its model with shared/data/minilm_l6/make_model.py and name it with --minilm")
        return
    home = root / "minilm_l6" / "data"
    os.environ.setdefault("EDGEQ_TOKENIZER", str(home / "tokenizer.json"))

    def tokens(rows: int, length: int) -> Callable[[Feed], Feed]:
        return lambda feed: {name: np.resize(value, (rows, length)) for name, value in feed.items()}

    yield Case(
        "minilm_l6",
        minilm,
        home / "calib-stsb-en-dev-200.csv",
        home / "stsb-en-test.csv",
        f"{SPECS / 'minilm_l6.py'}:tokens",
        "similarity",
        {"a pair": lambda feed: feed, "1 x 128 tokens": tokens(1, 128), "8 x 32 tokens": tokens(8, 32)},
        least=0.817,
        most_bytes=0.27,
        least_speed=2.2,
        drop="0.0033",
    )


def onnxruntime_dynamic(case: Case, work: Path) -> Contender:
    """Quantize a case with ONNX Runtime's dynamic quantization."""
    output = work / "onnxruntime.onnx"
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_dynamic(case.model, output, per_channel=True)
    logging.disable(logging.NOTSET)
    return Contender("onnxruntime dynamic", output)


def edgeq_dynamic(case: Case, work: Path) -> Contender:
    """Quantize a case with `edgeq quantize --dynamic`."""
    output = work / "dynamic.onnx"
    made = edgeq_json("quantize", str(case.model), *_data(case), "--dynamic", "--no-timing", "-o", str(output))
    return Contender("edgeq quantize --dynamic", output, made["session_options"])


def edgeq_tuned(case: Case, work: Path, budget: str) -> Contender:
    """Tune a case with `edgeq tune` within a budget."""
    output = work / "tuned"
    validation = ("--val", str(case.validation), "--task", case.task, *case.options)
    made = edgeq_json(
        "tune", str(case.model), *_data(case), *validation,
        "--max-drop", case.drop, "--budget", budget, "--no-memory", "-o", str(output),
    )  # fmt: skip
    return Contender(f"edgeq tune: {made['chosen']}", output)


def accuracy(case: Case, contender: Contender) -> float:
    """Return the task's first metric, in a session with the options of the contender."""
    if contender.config:
        from edgeq.measure.accuracy import evaluate_many
        from edgeq.measure.task import TaskOptions, make_task
        from edgeq.run.session import open_session

        pairs = zip(*[iter(case.options)] * 2, strict=True)
        given: dict[str, Any] = {name.removeprefix("--"): Path(value) for name, value in pairs}
        options = TaskOptions(**given)
        task = make_task(case.task, options)
        session = open_session(contender.path, SessionSettings(config=contender.config))
        samples = open_samples(case.validation, model_signature(case.model), preprocess=case.preprocess)
        return float(evaluate_many({"it": session}, samples, task)["it"].value)
    found = edgeq_json(
        "eval", str(contender.path), "--data", str(case.validation), "--preprocess", case.preprocess,
        "--task", case.task, *case.options,
    )  # fmt: skip
    return float(found["metrics"][found["primary"]])


def latencies(case: Case, contenders: list[Contender], seconds: float, threads: int) -> dict[str, dict[str, float]]:
    """Return shape → contender → p50 in ms."""
    samples = open_samples(case.validation, model_signature(case.model), preprocess=case.preprocess, count=1)
    first = dict(next(iter(samples)).inputs)
    found: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        sessions = {
            c.name: stack.enter_context(
                open_model(c.path, SessionSettings(config=c.config, intra_op_threads=threads))
            ).session
            for c in contenders
        }
        for shape, make in case.shapes.items():
            feed = make(first)
            runners = {name: partial(session.run, None, feed) for name, session in sessions.items()}
            measured = measure_interleaved(runners, min_duration_s=seconds, min_runs=10, warmup=WarmUp())
            found[shape] = {name: float(distribution.p50) for name, distribution in measured.items()}
    return found


def one_case(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Compare all the contenders of a case, print the figures, and return them."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        contenders = [
            Contender("float32", case.model),
            onnxruntime_dynamic(case, work),
            edgeq_dynamic(case, work),
        ]
        if options.tune:
            contenders.append(edgeq_tuned(case, work, options.budget))
        p50 = latencies(case, contenders, options.seconds, options.threads)
        metric = {c.name: accuracy(case, c) for c in contenders}
        share = {c.name: c.bytes() / contenders[0].bytes() for c in contenders}
    print(f"\n{case.name}: accuracy, share of float32's bytes, times float32's speed ({', '.join(p50)})")
    for name, value in metric.items():
        speeds = [times["float32"] / times[name] for times in p50.values()]
        print(f"  {name:45} {value:9.4f} {share[name]:7.3f}   " + " ".join(f"{s:7.2f}" for s in speeds))
    for name in list(metric)[2:]:
        slowest = min(times["float32"] / times[name] for times in p50.values())
        for what, met, bar in (
            (f"accuracy {metric[name]:.4f}", metric[name] >= case.least, f"at least {case.least:.4f}"),
            (f"bytes {share[name]:.3f}", share[name] <= case.most_bytes, f"at most {case.most_bytes}"),
            (f"slowest shape {slowest:.2f}", slowest >= case.least_speed, f"at least {case.least_speed}"),
        ):
            print(f"  {'met   ' if met else 'MISSED'} {name}: {what} (bar: {bar})")
    return {"accuracy": metric, "bytes": share, "p50_ms": p50}


def _data(case: Case) -> tuple[str, ...]:
    return ("--data", str(case.calibration), "--preprocess", case.preprocess)


def main() -> None:
    """Run the chosen cases, then print and write their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="models whose names begin with these")
    parser.add_argument("--minilm", type=Path, help="the model that minilm_l6/make_model.py made")
    parser.add_argument("--tune", action="store_true", help="also run edgeq tune")
    parser.add_argument("--budget", default="5m", help="budget of edgeq tune (default: 5m)")
    parser.add_argument("--seconds", type=float, default=3.0, help="recorded seconds per model and shape (default: 3)")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads inside an operator, 0 for all cores (default: 1)"
    )
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    root = shared_data()
    if root is None:
        sys.exit("shared/data is not next to this checkout (or set EDGEQ_SHARED_DATA)")
    with tempfile.TemporaryDirectory() as work:
        begins = tuple(options.only or ("",))
        chosen = [c for c in cases(root, options.minilm, Path(work)) if c.name.startswith(begins)]
        results = {case.name: one_case(case, options) for case in chosen}
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
