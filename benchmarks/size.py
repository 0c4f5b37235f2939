"""Run `edgeq quantize` on large inputs: 2.3 GB of weights in external data, 10,000 nodes, and 100,000 samples.

    scripts/benchmark size                  # about a quarter of an hour, 10 GB of disk
    scripts/benchmark size --only nodes     # weights, nodes or samples

The benchmark prints the time, and the peak memory of any process of the command (resident, including mapped files). It
also prints this memory minus 1.3 times the size of the weights. The difference is the constant in docs/security.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LAYERS, WIDTH = 24, 4900


def save(path: Path, nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], width: int) -> Path:
    """Write a model of `nodes` from x [N, width] to y [N, width], and return its path."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", width]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )
    return path


def chain(count: int) -> list[str]:
    """Return the names of the tensors along a chain of `count` nodes, from "x" to "y"."""
    return ["x", *(f"t{i}" for i in range(1, count)), "y"]


def weights_case(folder: Path) -> tuple[Path, Path]:
    """Write a model of `LAYERS` products with square matrices of size `WIDTH`. The matrices are in one file next to the
    model. Return the model and its data.
    """
    random = np.random.default_rng(0)
    names = chain(LAYERS)
    nodes, tensors = [], []
    size = 4 * WIDTH * WIDTH
    with (folder / "weights.bin").open("wb") as stream:
        for layer in range(LAYERS):
            values = random.standard_normal((WIDTH, WIDTH), dtype=np.float32) / np.float32(WIDTH**0.5)
            stream.write(values.tobytes())
            tensor = TensorProto(name=f"w{layer}", data_type=TensorProto.FLOAT, dims=[WIDTH, WIDTH])
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", "weights.bin"), ("offset", layer * size), ("length", size)):
                tensor.external_data.add(key=key, value=str(value))
            tensors.append(tensor)
            nodes.append(helper.make_node("MatMul", [names[layer], f"w{layer}"], [names[layer + 1]], f"m{layer}"))
    np.save(folder / "x.npy", random.standard_normal((4, WIDTH), dtype=np.float32))
    return save(folder / "m.onnx", nodes, tensors, WIDTH), folder / "x.npy"


def nodes_case(folder: Path, count: int = 10_000) -> tuple[Path, Path]:
    """Write a chain of products and activations, and return the model and its data."""
    weight = numpy_helper.from_array(np.eye(8, dtype=np.float32) * 1.01, "w")
    names = chain(count)
    nodes = [
        helper.make_node("MatMul", [names[i], "w"], [names[i + 1]], f"m{i}")
        if i % 2 == 0
        else helper.make_node("Tanh", [names[i]], [names[i + 1]], f"t{i}")
        for i in range(count)
    ]
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32))
    return save(folder / "m.onnx", nodes, [weight], 8), folder / "x.npy"


def samples_case(folder: Path, count: int = 100_000) -> tuple[Path, Path]:
    """Write a small network and many rows of data, and return both."""
    random = np.random.default_rng(0)
    tensors = [
        numpy_helper.from_array(random.standard_normal((64, 64)).astype(np.float32) / 8, f"w{i}") for i in (0, 1)
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["h"], "m0"),
        helper.make_node("Relu", ["h"], ["r"], "r"),
        helper.make_node("MatMul", ["r", "w1"], ["y"], "m1"),
    ]
    np.save(folder / "x.npy", random.standard_normal((count, 64), dtype=np.float32))
    return save(folder / "m.onnx", nodes, tensors, 64), folder / "x.npy"


CASES = {"weights": weights_case, "nodes": nodes_case, "samples": samples_case}


def main() -> None:
    """Run the chosen cases and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=CASES)
    given = parser.parse_args()
    print("| case | weights, MB | s | exit code | memory at most, MB | less 1.3 times the weights, MB |")
    print("|---|---|---|---|---|---|")
    for name in [given.only] if given.only else CASES:
        with tempfile.TemporaryDirectory(prefix="edgeq-size-") as place:
            folder = Path(place)
            model, data = CASES[name](folder)
            held = sum(file.stat().st_size for file in folder.iterdir() if file != data)
            line = [sys.executable, "-P", "-m", "edgeq", "quantize", model, "--data", data, "--no-timing", "-q"]
            began = time.monotonic()
            process = subprocess.Popen([*map(str, line), "-o", str(folder / "q.onnx")], stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            peak = usage.ru_maxrss * 1024
            figures = (held / 1e6, time.monotonic() - began, os.waitstatus_to_exitcode(status), peak / 1e6)
            print(f"| {name} | {figures[0]:.0f} | {figures[1]:.0f} | {figures[2]} | {figures[3]:.0f} | ", end="")
            print(f"{(peak - 1.3 * held) / 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()
