"""Make random integer operators as models with one node.

As a program, `python cases.py MODELS OUT` runs all models of a folder in one process. It needs only onnxruntime and
numpy, so that it can run under emulation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class Case:
    """Hold one node. `inputs` are in the node's order. Those in `fed` are graph inputs, the others are constants."""

    name: str
    node: onnx.NodeProto
    inputs: Mapping[str, Any]
    fed: tuple[str, ...]

    @property
    def arrays(self) -> list[np.ndarray[Any, Any]]:
        return [np.asarray(self.inputs[name]) for name in self.node.input]

    def save(self, folder: Path) -> None:
        """Write the model and its inputs."""
        from onnx import ValueInfoProto, helper, numpy_helper

        def info(name: str) -> ValueInfoProto:
            array = np.asarray(self.inputs[name])
            return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)

        constants = [numpy_helper.from_array(np.asarray(v), n) for n, v in self.inputs.items() if n not in self.fed]
        graph = helper.make_graph(
            [self.node], self.name, [info(name) for name in self.fed], [ValueInfoProto(name="y")], constants
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        (folder / f"{self.name}.onnx").write_bytes(model.SerializeToString())
        np.savez(folder / f"{self.name}.npz", **{name: self.inputs[name] for name in self.fed})


def matmul_integer(count: int, seed: int = 0) -> Iterator[Case]:
    """Yield U8S8 cases with and without zero points, constant and computed second operands, odd and even K."""
    random = np.random.default_rng(seed)
    for i in range(count):
        m, k, n = (int(v) for v in random.integers(1, (20, 300, 40)))
        inputs: dict[str, Any] = {"a": _bytes(random, (m, k), "uint8"), "b": _bytes(random, (k, n), "int8", i % 2)}
        if i % 3:
            inputs["az"] = np.uint8(random.integers(256))
        if i % 3 == 2:
            inputs["bz"] = _bytes(random, (n,), "int8") if i % 2 else np.int8(random.integers(-128, 128))
        yield _case(f"matmul_integer_{i}", "MatMulInteger", inputs, ("a",) if i % 4 else ("a", "b"))


def qlinear_matmul(count: int, seed: int = 1) -> Iterator[Case]:
    """Yield U8S8 cases per tensor and per column, and stacks of matrices."""
    random = np.random.default_rng(seed)
    for i in range(count):
        m, k, n = (int(v) for v in random.integers(1, (20, 300, 40)))
        a = _bytes(random, (2, m, k) if i % 5 == 0 else (m, k), "uint8")
        inputs = {"a": a, **_quantized(random, _bytes(random, (k, n), "int8", i % 2), n, i)}
        yield _case(f"qlinear_matmul_{i}", "QLinearMatMul", inputs, ("a",) if i % 4 else ("a", "b"))


def qlinear_conv(count: int, seed: int = 2) -> Iterator[Case]:
    """Yield U8S8 cases: dense, 1x1, grouped, depthwise, with a channel multiplier, 1-D; padded, strided, dilated."""
    random = np.random.default_rng(seed)
    kinds = ("dense", "pointwise", "grouped", "depthwise", "multiplier", "one_dimension")
    for i in range(count):
        kind = kinds[i % len(kinds)]
        axes = 1 if kind == "one_dimension" else 2
        kernel = [1] * axes if kind == "pointwise" else [int(v) for v in random.integers(1, 5, axes)]
        group = {"grouped": 3, "depthwise": 7, "multiplier": 5}.get(kind, 1)
        inputs_each = 1 if kind in ("depthwise", "multiplier") else int(random.integers(1, 12))
        outputs_each = 1 if kind == "depthwise" else int(random.integers(2, 12))
        image = [int(v) for v in random.integers(9, 15, axes)]
        x = _bytes(random, (int(random.integers(1, 3)), group * inputs_each, *image), "uint8")
        w = _bytes(random, (group * outputs_each, inputs_each, *kernel), "int8", i % 2)
        inputs = {"a": x, **_quantized(random, w, len(w), i)}
        if i % 2:
            inputs["bias"] = random.integers(-20000, 20000, len(w)).astype(np.int32)
        yield _case(
            f"qlinear_conv_{kind}_{i}", "QLinearConv", inputs, ("a",), group=group, kernel_shape=kernel,
            strides=[int(v) for v in random.integers(1, 3, axes)], dilations=[1 + (i % 4 == 0)] * axes,
            pads=[int(v) for v in random.integers(0, 2, 2 * axes)],
        )  # fmt: skip


def others(seed: int = 3) -> Iterator[Case]:
    """Yield contrib operators, and pairs of types that are exact or take another path."""
    random = np.random.default_rng(seed)
    for i in range(8):
        m, k, n = (int(v) for v in random.integers(1, (20, 300, 40)))
        turned = i % 2
        a, b = _bytes(random, (m, k), "uint8"), _bytes(random, (n, k) if turned else (k, n), "int8", 1)
        q = _quantized(random, b, n, i)
        bias = random.integers(-20000, 20000, n).astype(np.int32)
        gemm = {"a": a, **{key: q[key] for key in ("as", "az", "b", "bs", "bz")}, "c": bias}
        gemm |= {key: q[key] for key in ("ys", "yz") if i % 4 < 2}
        yield _case(f"qgemm_{i}", "QGemm", gemm, ("a",), domain="com.microsoft", transB=turned, alpha=1.0 - i % 2 / 2)
        b = _bytes(random, (k, n), "int8", 1)
        q = _quantized(random, b, n, i)
        added = {"c": random.normal(size=n).astype(np.float32)} if i % 3 else {}
        scaled = {"a": a, "b": b, **{key: q[key] for key in ("as", "bs", "az", "bz")}, **added}
        yield _case(f"matmul_to_float_{i}", "MatMulIntegerToFloat", scaled, ("a",), domain="com.microsoft")
        x = random.normal(size=(m, k)).astype(np.float32)
        dynamic = {"a": x, "b": b, "bs": q["bs"], "bz": q["bz"], **added}
        yield _case(f"dynamic_matmul_{i}", "DynamicQuantizeMatMul", dynamic, ("a",), domain="com.microsoft")
        left, right = (("uint8", "int8"), ("int8", "uint8"), ("uint8", "uint8"), ("int8", "int8"))[i % 4]
        group = 1 + i % 3
        conv = {
            "a": _bytes(random, (1, group * 5, 9, 8), left),
            "b": _bytes(random, (group * 4, 5, 3, 2), right),
            "az": np.array(3, left),
        }
        name = f"conv_integer_{left}_{right}_{i}"
        yield _case(name, "ConvInteger", conv, ("a",), group=group, kernel_shape=[3, 2], pads=[1, 0, 1, 1])
        if left + right != "uint8int8":
            product = {"a": _bytes(random, (9, 77), left), "b": _bytes(random, (77, 17), right)}
            yield _case(f"matmul_integer_{left}_{right}_{i}", "MatMulInteger", product, ("a",))


def run_all(models: Path, out: Path) -> None:
    """Run every model of a folder on the inputs next to it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    found = {}
    for path in sorted(models.glob("*.onnx")):
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        with np.load(path.with_suffix(".npz")) as feed:
            given = {name: feed[name] for name in feed.files}
        for output, value in zip(session.get_outputs(), session.run(None, given), strict=True):
            found[f"{path.stem}:{output.name}"] = value
    np.savez(out, **found)


def _bytes(random: np.random.Generator, shape: tuple[int, ...], kind: str, small: int = 0) -> Any:
    if kind == "uint8":
        return random.integers(0, 256, shape).astype(kind)
    wide = random.integers(-128, 128, shape)
    return (np.clip(np.rint(random.normal(0, 40, shape)), -128, 127) if small else wide).astype(kind)


def _quantized(random: np.random.Generator, weight: Any, columns: int, i: int) -> dict[str, Any]:
    """Return scales and zero points around a weight, in the order of QLinearConv and QLinearMatMul."""
    scales = (random.random(columns) * 0.01 + 0.001).astype(np.float32)
    return {
        "as": np.float32(0.02),
        "az": np.uint8(random.integers(256)),
        "b": weight,
        "bs": scales if i % 3 else np.float32(0.005),
        "bz": np.zeros(columns, np.int8) if i % 3 else np.int8(0),
        "ys": np.float32(random.random() * 2 + 0.2),
        "yz": np.uint8(random.integers(256)),
    }


def _case(name: str, op: str, inputs: dict[str, Any], fed: tuple[str, ...], **attributes: Any) -> Case:
    from onnx import helper

    return Case(name, helper.make_node(op, list(inputs), ["y"], **attributes), inputs, fed)


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), Path(sys.argv[2]))
