"""Compare edgeq's calibration with its limits and with ONNX Runtime's calibrators in one run.

    scripts/benchmark calibration             # everything, a few minutes
    scripts/benchmark calibration --quick    # fewer samples and rounds

Each time is the shortest of several interleaved rounds, so that other work on the machine affects all rows equally.
Samples are in memory. "Whole calibration" begins with the model file and ends with the ranges of every method.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from models import IMAGE, mobilenetv2_shaped, resnet50_shaped

from edgeq.calibration.collect import MAX_CONCURRENT, PassLimits, collect
from edgeq.calibration.instrumented import InstrumentedModel
from edgeq.calibration.plan import plan_statistics, quantizable_tensors
from edgeq.calibration.ranges import derive_ranges
from edgeq.calibration.statistics import Statistics, TensorStatistics, histogram_of
from edgeq.data.sample import Sample
from edgeq.hardware.detect import count_threads
from edgeq.model.load import read_model
from edgeq.util.registry import METHODS as REGISTERED

METHODS = REGISTERED.names()


@dataclass(frozen=True)
class Images:
    """Iterate over `count` samples that repeat a few random images, so that memory does not depend on the number of
    samples.
    """

    count: int
    arrays: tuple[np.ndarray, ...]
    source: str = "random images"

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Sample]:
        for i in range(self.count):
            yield Sample(f"image-{i}", {"input": self.arrays[i % len(self.arrays)]})

    def digest(self) -> str:
        return f"images-{self.count}"


def random_images(count: int) -> Images:
    """Return `count` samples of random images, float32 [1, 3, IMAGE, IMAGE]."""
    random = np.random.default_rng(0)
    shape = (1, 3, IMAGE, IMAGE)
    return Images(count, tuple(random.normal(size=shape).astype(np.float32) for _ in range(min(count, 16))))


def calibrate(model: Path, samples: Images, *, every_element: bool = False) -> Statistics:
    """Collect statistics of a model file over samples, derive the ranges of every method, and return the statistics."""
    statistics = collect(read_model(model), samples, limits=PassLimits(every_element=every_element))
    for method in METHODS:
        derive_ranges(statistics, method)
    return statistics


def plain(session: Any, samples: Images) -> None:
    """Run a session over all samples."""
    for sample in samples:
        session.run(None, sample.inputs)


def interleaved(rounds: int, **runs: Callable[[], object]) -> dict[str, float]:
    """Run the functions in turns for `rounds` rounds, and return the shortest time of each function in seconds."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            gc.collect()
            begin = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def bench_time(title: str, model: Path, samples: Images, rounds: int, bar: float | None) -> None:
    """Print the time of a calibration as a ratio to the time of float32. The calibration also hashes and loads the
    model, opens sessions and derives ranges. These steps take the same time for any number of samples.
    """
    session = onnxruntime.InferenceSession(model)
    plain(session, samples)
    seconds = interleaved(
        rounds,
        float32=lambda: plain(session, samples),
        calibration=lambda: calibrate(model, samples),
        exhaustive=lambda: calibrate(model, samples, every_element=True),
        **(breakdown(model, samples) if bar is not None else {}),
    )
    float32 = seconds["float32"]
    for name, note in (("calibration", bar), ("exhaustive", None)):
        row(f"{title}: {name} ÷ float32, {len(samples)} samples", seconds[name] / float32, note, "at most")
    if bar is not None:
        names = ("side_by_side", "opening", "handing", "collect")
        side, opened, run, collected = (seconds[name] / float32 for name in names)
        print(
            f"    inference {side:.2f} + handing out {run - side:.2f} + counting {collected - opened - run:.2f}"
            f" + opening {opened:.2f} + ranges {seconds['calibration'] / float32 - collected:.2f}"
        )
    print(f"    float32 {1e3 * float32 / len(samples):.2f} ms a sample")


def breakdown(model: Path, samples: Images) -> dict[str, Callable[[], object]]:
    """Return the parts of a calibration as separate runs: the model without additional outputs, the model with them,
    and everything except the ranges.
    """
    threads = count_threads()
    at_once = min(MAX_CONCURRENT, threads)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = max(1, threads // at_once)
    session = onnxruntime.InferenceSession(model, options)
    read = read_model(model)
    steps = plan_statistics(read, quantizable_tensors(read))

    def opened() -> InstrumentedModel:
        return InstrumentedModel(read, steps.fetched, threads=max(1, threads // at_once))

    reduced = opened()
    inputs = [(place, sample.inputs) for place, sample in enumerate(samples)]
    with ThreadPoolExecutor(at_once) as pool:  # opens the second session, which is used only after some samples
        list(pool.map(lambda item: reduced.observe(item[1], "", item[0] + len(inputs)), inputs[:2]))

    def side_by_side(run: Callable[[tuple[int, Mapping[str, np.ndarray]]], object]) -> None:
        with ThreadPoolExecutor(at_once) as pool:
            for done in [pool.submit(run, item) for item in inputs]:
                done.result()

    return {
        "side_by_side": lambda: side_by_side(lambda item: len(session.run(None, item[1]))),
        "handing": lambda: side_by_side(lambda item: len(reduced.observe(item[1], "", item[0]))),
        "opening": lambda: (read_model(model), opened()),
        "collect": lambda: collect(read_model(model), samples),
    }


def bench_peers(model: Path, samples: Images, rounds: int) -> None:
    """Print the times of ONNX Runtime's calibrators as ratios to edgeq's."""
    session = onnxruntime.InferenceSession(model)
    runs = {name: lambda name=name: onnxruntime_calibrator(name, model, samples) for name in ("MinMax", "Percentile")}
    seconds = interleaved(
        rounds, float32=lambda: plain(session, samples), edgeq=lambda: calibrate(model, samples), **runs
    )
    for name in runs:
        row(
            f"MobileNetV2-shaped: ONNX Runtime {name} ÷ edgeq, {len(samples)} samples",
            seconds[name] / seconds["edgeq"],
            8.0 if name == "Percentile" else None,
            "at least",
        )
        print(f"    ONNX Runtime {name} ÷ float32: {seconds[name] / seconds['float32']:.1f}")


def onnxruntime_calibrator(method: str, model: Path, samples: Images) -> None:
    """Run ONNX Runtime's calibrator with `method` over samples."""
    from onnxruntime.quantization.calibrate import CalibrationDataReader, CalibrationMethod, create_calibrator

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.items = iter(samples)

        def get_next(self) -> Mapping[str, np.ndarray] | None:
            sample = next(self.items, None)
            return None if sample is None else sample.inputs

    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        calibrator = create_calibrator(
            model,
            [],
            augmented_model_path=str(Path(folder) / "augmented.onnx"),
            calibrate_method=CalibrationMethod[method],
        )
        calibrator.collect_data(Reader())
        calibrator.compute_data()


def bench_memory(model: Path) -> None:
    """Print the peak resident memory with many samples as a ratio to that with few samples. Each run has its own
    process, and the memory is that of the whole process.
    """
    peaks = {}
    for count in (16, 256):
        run = [sys.executable, __file__, "--memory-of", str(model), str(count)]
        peaks[count] = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)["peak_kb"]
    row("peak memory, 256 samples ÷ 16 samples", peaks[256] / peaks[16], 1.05, "at most")
    print(f"    {peaks[16] / 1024:.0f} MB at 16 samples, {peaks[256] / 1024:.0f} MB at 256")


def bench_entropy() -> None:
    """Print the time that the method entropy takes to derive the ranges of 100 tensors."""
    random = np.random.default_rng(0)
    tensors = {}
    for i in range(100):
        values = (random.standard_t(3, 200_000) * 10.0 ** random.uniform(-3, 3)).astype(np.float32)
        tensors[f"t{i:03}"] = TensorStatistics(
            samples=1,
            nonempty=1,
            count=values.size,
            minimum=float(values.min()),
            maximum=float(values.max()),
            histogram=histogram_of(values),
        )
    statistics = Statistics("", "", 1, tensors)
    seconds = interleaved(3, **{method: lambda m=method: derive_ranges(statistics, m) for method in METHODS})
    row("entropy ranges of 100 tensors, over 2048 bins, seconds", seconds["entropy"], 2.0, "at most")
    print("    " + ", ".join(f"{name} {1e3 * value:.0f} ms" for name, value in seconds.items()))


def bench_real(rounds: int) -> None:
    """Print the time of a calibration on real images from shared/data."""
    from tasks import shared_data

    from edgeq.data.samples import open_samples
    from edgeq.model.load import model_signature

    data = shared_data()
    if data is None:
        print("mobilenet_v1_0.25_224: skipped, shared/data is not next to this checkout")
        return
    model = data / "mobilenet_v1_0.25_224" / "model.onnx"
    opened = open_samples(data / "imagenet-sample" / "calib", model_signature(model), preprocess="tf")
    arrays = tuple(dict(sample.inputs)["input"] for sample in opened)
    bench_time("mobilenet_v1_0.25_224, real images", model, Images(len(arrays), arrays), rounds, None)


def row(what: str, value: float, bar: float | None, kind: str) -> None:
    """Print a figure with its limit, and whether the limit is met."""
    verdict = ""
    if bar is not None:
        held = value <= bar if kind == "at most" else value >= bar
        verdict = f"  bar {kind} {bar:g}: {'held' if held else 'MISSED'}"
    print(f"{what:<72}{value:8.2f}{verdict}", flush=True)


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=["mobilenetv2", "resnet50", "real", "peers", "memory", "entropy"])
    parser.add_argument("--memory-of", nargs=2, metavar=("MODEL", "SAMPLES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        calibrate(Path(arguments.memory_of[0]), random_images(int(arguments.memory_of[1])))
        # getrusage is not usable here, because a child process begins with the peak of its parent.
        status = Path("/proc/self/status").read_text()
        print(json.dumps({"peak_kb": int(status.split("VmHWM:")[1].split()[0])}))
        return
    samples, rounds = (64, 2) if arguments.quick else (256, 5)
    wanted = [arguments.only] if arguments.only else ["mobilenetv2", "resnet50", "real", "peers", "memory", "entropy"]
    with tempfile.TemporaryDirectory() as folder:
        mobilenet = mobilenetv2_shaped(Path(folder) / "mobilenetv2.onnx")
        few, many = random_images(samples // 4), random_images(samples)
        if "mobilenetv2" in wanted:
            bench_time("MobileNetV2-shaped", mobilenet, few, rounds, None)
            bench_time("MobileNetV2-shaped", mobilenet, many, max(2, rounds // 2), 2.0)
        if "resnet50" in wanted:
            resnet = resnet50_shaped(Path(folder) / "resnet50.onnx")
            bench_time("ResNet-50-shaped", resnet, few, rounds, None)
            bench_time("ResNet-50-shaped", resnet, many, max(2, rounds // 2), 1.2)
        if "real" in wanted:
            bench_real(rounds)
        if "peers" in wanted:
            bench_peers(mobilenet, random_images(32 if arguments.quick else 64), 2)
        if "memory" in wanted:
            bench_memory(mobilenet)
        if "entropy" in wanted:
            bench_entropy()


if __name__ == "__main__":
    main()
