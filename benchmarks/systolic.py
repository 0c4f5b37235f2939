"""Check the limits for the systolic backend on the default array: exactness, accuracy, placement and speed.

    python benchmarks/systolic.py [--only MODEL ...] [--images N]

Each row is a limit and a measurement. For every layer, the integers of the simulator are compared with those of the
host twin in stock ONNX Runtime. Accuracy is measured with the twin, because the twin gives the same integers.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from tasks import Task, demo_task, shared_data, tasks

from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.compile import compile_program
from edgeq.backends.systolic.estimate import estimate, place
from edgeq.backends.systolic.program import Program
from edgeq.backends.systolic.simulate import Simulator
from edgeq.backends.systolic.to_onnx import host_reference_model
from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import derive_ranges
from edgeq.data.samples import open_samples
from edgeq.hardware.target import resolve
from edgeq.model.convert import to_proto
from edgeq.model.prepare import prepare_model
from edgeq.signature import Signature

POINTS = {"mobilenet_v1_0.25_224": 5.0}
POINTS_ELSEWHERE = 1.0
ON_ARRAY = {"mobilenet_v1_0.25_224": 0.89}
ON_ARRAY_ELSEWHERE = 0.99
IMAGES_PER_SECOND = {"resnet20_cifar10": 20.0}
COMPARED = 16
REPEATS = 8
CALIBRATION = 300


def measure(task: Task, limit: int | None) -> None:
    """Print the rows of one model. `limit` is the largest number of images to use from a validation set."""
    target = resolve("gemmini")
    scheme = target.profile.scheme
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_model(task.model, Path(folder))
        samples = open_samples([{task.input: x[None]} for x in task.calibration[:CALIBRATION]], prepared.signature)
        statistics = collect(prepared.model, samples, model_digest=prepared.digest)
        ranges = derive_ranges(statistics, scheme.method, activation_type="int8", symmetric=True)
        program = compile_program(prepared, ranges, scheme, ArrayConfig(), samples)
        floats = _session(onnx.load(prepared.path))
        twin = to_proto(host_reference_model(program, prepared.signature))
        differing, rate, wrapped = exactness(program, twin, task, prepared.signature)
        _row(task.name, "simulator against host twin, differing integers", differing, differing == 0, "0")
        bar = POINTS.get(task.name, POINTS_ELSEWHERE)
        integers = _session(twin)
        for part in task.validation:
            before, after = (top1(session, task, part, limit) for session in (floats, integers))
            lost = 100 * (before - after)
            text = f"{lost:.2f} ({100 * before:.2f} → {100 * after:.2f})"
            _row(task.name, f"{part}: points lost", text, lost <= bar, f"at most {bar}")
        placed = place(program)
        share = ON_ARRAY.get(task.name, ON_ARRAY_ELSEWHERE)
        _row(
            task.name,
            placed.sentence(),
            f"{placed.array_share:.1%}",
            placed.array_share >= share,
            f"at least {share:.0%}",
        )
        least = IMAGES_PER_SECOND.get(task.name)
        verdict = "" if least is None else f"at least {least:g}"
        _row(task.name, "simulator, images a second", f"{rate:.0f}", least is None or rate >= least, verdict or "none")
        guess = estimate(program)
        print(
            f"       {task.name}: estimated {guess.cycles:,} cycles, {guess.traffic:,} bytes of DRAM traffic, "
            f"{guess.utilisation:.1%} of the multipliers busy; {wrapped} accumulators wrapped"
        )


def exactness(program: Program, twin: onnx.ModelProto, task: Task, signature: Signature) -> tuple[int, float, int]:
    """Return the number of integers that differ over all layers, the number of images simulated per second, and the
    number of accumulators that overflowed.
    """
    x = next(iter(task.validation.values()))[0][:COMPARED]
    simulator = Simulator(program)
    names = [name for name, tensor in program.tensors.items() if tensor.scale is not None]
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        plain = simulator.run({task.input: x})
        seconds.append(time.perf_counter() - start)
    rate = len(x) / min(seconds)  # use the least disturbed run
    found = simulator.run({task.input: x}, keep=names).tensors
    watched = onnx.ModelProto()
    watched.CopyFrom(twin)
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    expected = dict(zip(names, _session(watched).run(names, {task.input: x}), strict=True))
    differing = sum(int((found[name] != expected[name]).sum()) for name in names)
    return differing, rate, sum(run.overflows for run in plain.layers)


def top1(session: Any, task: Task, part: str, limit: int | None) -> float:
    """Return the share of correct answers on a validation set."""
    x, labels, _ = task.validation[part]
    x, labels = x[:limit], labels[:limit]
    scores = [session.run(None, {task.input: x[i : i + 50]})[0] for i in range(0, len(x), 50)]
    found = np.concatenate(scores).reshape(len(x), -1)[:, task.class_offset :].argmax(1)
    return float((found == labels).mean())


def all_tasks() -> Iterator[Task]:
    """Yield the demo task and, if shared/data exists, its image tasks."""
    yield demo_task()
    root = shared_data()
    if root is None:
        print("shared/data is not next to this checkout (or set EDGEQ_SHARED_DATA): only the demo model is measured")
        return
    yield _lenet(root / "lenet_mnist")
    for task in tasks(root):
        if task.name != "mlperf_tiny_kws":
            yield task


def _lenet(home: Path) -> Task:
    def unpacked(name: str, offset: int) -> NDArray[np.uint8]:
        return np.frombuffer(gzip.decompress((home / name).read_bytes()), np.uint8, offset=offset)

    x = (unpacked("t10k-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28) / np.float32(255)).astype(np.float32)
    y = unpacked("t10k-labels-idx1-ubyte.gz", 8).astype(np.int64)
    return Task(home.name, home / "model.onnx", "input", x[:300], {"test but the first 300": (x[300:], y[300:], 0.0)})


def _session(model: onnx.ModelProto) -> Any:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def _row(model: str, what: str, measured: object, met: bool, bar: str) -> None:
    print(f"{'met   ' if met else 'MISSED'} {model}: {what}: {measured} (bar: {bar})", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows of the chosen models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of models (default: all)")
    parser.add_argument("--images", type=int, help="largest number of images per validation set (default: all)")
    options = parser.parse_args(arguments)
    for task in all_tasks():
        if options.only is None or task.name in options.only:
            measure(task, options.images)


if __name__ == "__main__":
    main()
