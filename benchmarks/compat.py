"""Compare edgeq's interfaces of older tools with ONNX Runtime's own tools in one run, and print limits and
measurements.

    python benchmarks/compat.py [--only SECTION ...] [--seconds S]

Sections:
- retarget: compare residual networks as S8S8 Q/DQ pairs, which are onnxruntime's default, with the same networks
  retargeted to U8S8. The limits are valid for x86 with VNNI.
- same: compare quantize_static of both tools with the same options.

Latencies are measured interleaved on one thread. A ratio is the ratio of two medians on this machine.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxruntime.quantization as theirs
from contenders import Built, Reader, onnxruntime_default
from edgeq_device.measure.latency import WarmUp, measure_interleaved
from models import resnet50_shaped
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from tasks import resnet20, shared_data

from edgeq.compat.files import quantize_static
from edgeq.retargeting.run import retarget

FASTER_BAR = 2.0
CALIBRATION = 32
COMPARED = 64
# Tolerance relative to a range. Calibration runs an optimised session, which sums a convolution's products in a
# different order.
FLOAT32_ROUNDING = 1e-5
Row = tuple[str, str, str]
Floats = NDArray[np.float32]


def residual(path: Path, *, blocks: int = 4, channels: int = 64, size: int = 32) -> Path:
    """Write a network with random weights. It consists of a stem and of blocks of conv, relu, conv, add, relu. By
    default, it has 9 convolutions and 4 skip branches.
    """
    random = np.random.default_rng(3)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def conv(source: str, name: str, width: int) -> str:
        deviation = np.sqrt(2 / (9 * width))
        values = {
            f"{name}_w": random.normal(0, deviation, (channels, width, 3, 3)),
            f"{name}_b": random.normal(0, 0.1, channels),
        }
        weights.extend(numpy_helper.from_array(v.astype(np.float32), n) for n, v in values.items())
        nodes.append(helper.make_node("Conv", [source, *values], [name], name, pads=[1] * 4))
        return name

    def relu(source: str) -> str:
        nodes.append(helper.make_node("Relu", [source], [f"{source}_relu"], f"{source}_relu"))
        return f"{source}_relu"

    x = relu(conv("x", "stem", 3))
    for block in range(blocks):
        inner = conv(relu(conv(x, f"a{block}", channels)), f"b{block}", channels)
        nodes.append(helper.make_node("Add", [inner, x], [f"add{block}"], f"add{block}"))
        x = relu(f"add{block}")
    nodes.append(helper.make_node("GlobalAveragePool", [x], ["y"], "pool"))
    graph = helper.make_graph(
        nodes,
        "residual",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 3, size, size])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, channels, 1, 1])],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def networks(folder: Path) -> Iterator[tuple[str, Path, Floats]]:
    """Yield the name, float model and images of each network. These are a residual network, a trained ResNet-20 if
    shared/data exists, and a network with the shape of ResNet-50.
    """
    images = np.random.default_rng(1).standard_normal((COMPARED, 3, 32, 32), dtype=np.float32)
    yield "residual", residual(folder / "residual.onnx"), images
    root = shared_data()
    if root is not None:
        task = resnet20(root)
        yield task.name, task.model, task.calibration
    images = np.random.default_rng(0).standard_normal((4, 3, 224, 224), dtype=np.float32)
    yield "resnet50-shaped", resnet50_shaped(folder / "resnet50.onnx"), images


def retargeted(seconds: float) -> Iterator[Row]:
    """Compare S8S8, onnxruntime's default, with U8S8 from `edgeq retarget`."""
    with tempfile.TemporaryDirectory() as place:
        for name, model, images in networks(Path(place)):
            folder = Path(place) / name
            folder.mkdir()
            given = onnxruntime_default(model, images[:CALIBRATION], folder)
            result = retarget(given.model, folder / "u8s8.onnx", activation_type="uint8")
            new = Built("retargeted", result.output)
            assert (result.before.pair, result.after.pair) == ("S8S8", "U8S8")
            one, other = (_outputs(b, images[:COMPARED]) for b in (given, new))
            pairs = list(zip(one, other, strict=True))
            same = sum(np.array_equal(a, b) for a, b in pairs)
            apart = max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs)
            unoptimised = "yes" if (result.comparison is not None and result.comparison.identical) else "no"
            yield f"{name}: identical without the optimiser", "yes", unoptimised
            yield (
                f"{name}: identical outputs as deployed",
                f"{len(one)} of {len(one)}",
                f"{same} of {len(one)}, else within {apart:.1%}",
            )
            p50 = _p50([given, new], images[:1], seconds)
            ratio = p50[given.name] / p50[new.name]
            yield f"{name}: times as fast", f"at least {FASTER_BAR}", f"{ratio:.2f}"


def same(seconds: float) -> Iterator[Row]:
    """Compare every combination of format, activation type, per channel and reduced range. All use the calibration
    method MinMax.
    """
    del seconds
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        name, model, images = next(networks(folder))  # one network is enough, because only the options matter
        samples = images[:CALIBRATION]
        prepared = folder / "prepared.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs.quant_pre_process(model, prepared)
        feed = onnxruntime.InferenceSession(prepared).get_inputs()[0].name
        kinds = (theirs.QuantType.QInt8, theirs.QuantType.QUInt8)
        combinations = list(itertools.product(theirs.QuantFormat, kinds, (False, True), (False, True)))
        weights, scale = 0, 0.0
        for format_, kind, per_channel, reduced in combinations:
            options: dict[str, Any] = {
                "quant_format": format_,
                "activation_type": kind,
                "per_channel": per_channel,
                "reduce_range": reduced,
            }
            theirs.quantize_static(prepared, folder / "theirs.onnx", Reader(feed, samples), **options)
            quantize_static(prepared, folder / "ours.onnx", Reader(feed, samples), **options)
            one, other = _constants(folder / "ours.onnx"), _constants(folder / "theirs.onnx")
            assert one.keys() == other.keys()
            weights += all(np.array_equal(v, other[n]) for n, v in one.items() if v.dtype in (np.int8, np.uint8))
            scale = max(scale, *(_relative(v, other[n]) for n, v in one.items() if v.dtype == np.float32))
        total = f"{len(combinations)} of {len(combinations)}"
        yield f"{name}: options with the same integers", total, f"{weights} of {len(combinations)}"
        yield f"{name}: largest difference of a scale", f"under {FLOAT32_ROUNDING:g}", f"{scale:.2g}"


SECTIONS: dict[str, Callable[[float], Iterator[Row]]] = {"retarget": retargeted, "same": same}


def _outputs(built: Built, images: Floats) -> list[Floats]:
    session = built.open()
    name = session.get_inputs()[0].name
    return [session.run(None, {name: image[None]})[0] for image in images]


def _p50(built: Sequence[Built], sample: Floats, seconds: float) -> dict[str, float]:
    def runner(one: Built) -> Callable[[], object]:
        session = one.open(1)
        feed = {session.get_inputs()[0].name: sample}
        return lambda: session.run(None, feed)

    runners = {b.name: runner(b) for b in built}
    measured = measure_interleaved(runners, min_duration_s=seconds, min_runs=30, warmup=WarmUp(max_s=seconds))
    return {name: float(distribution.p50) for name, distribution in measured.items()}


def _constants(path: Path) -> dict[str, NDArray[Any]]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def _relative(one: NDArray[Any], other: NDArray[Any]) -> float:
    return float(np.max(np.abs(one - other) / np.maximum(np.abs(other), np.finfo(np.float32).tiny), initial=0.0))


def main() -> None:
    """Run the chosen sections and print their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="sections to run")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="recorded seconds per model in a timing (default: 3)"
    )
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = [("bar", "wanted", "measured")]
    for name in options.only:
        rows += SECTIONS[name](options.seconds)
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
