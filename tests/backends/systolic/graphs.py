"""Build small random float networks of all that the systolic backend recognises, and of what it leaves in float."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.build import build_network
from edgeq.backends.systolic.channels import sort_channels
from edgeq.backends.systolic.lower import lower
from edgeq.backends.systolic.program import Network, Program
from edgeq.backends.systolic.scales import activation_scales
from edgeq.calibration.ranges import Range
from edgeq.model.convert import from_proto
from edgeq.signature import Signature, TensorSpec

OPSET = 13
SMALL = ArrayConfig(dim=4)


@dataclass
class GraphBuilder:
    """Build a graph node by node and record the shape of each tensor."""

    rng: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[TensorProto] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    input_shape: tuple[int, ...] = (1, 4, 9, 9)

    def __post_init__(self) -> None:
        self.shapes["input"] = self.input_shape

    def node(self, op_type: str, inputs: list[str], shape: tuple[int, ...], **attributes: Any) -> str:
        name = f"{op_type.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [f"{name}_out"], name=name, **attributes))
        self.shapes[f"{name}_out"] = shape
        return f"{name}_out"

    def constant(self, values: Any, dtype: Any = np.float32) -> str:
        name = f"constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def weights(self, *shape: int) -> NDArray[np.float32]:
        """Return random weights whose channels differ in size, like trained weights."""
        spread = np.exp2(self.rng.uniform(-4, 0, (shape[0], *(1,) * (len(shape) - 1))))
        return (self.rng.standard_normal(shape) * spread / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    def conv(
        self,
        source: str,
        outputs: int,
        kernel: tuple[int, int] = (3, 3),
        *,
        groups: int = 1,
        strides: tuple[int, int] = (1, 1),
        dilations: tuple[int, int] = (1, 1),
        pads: tuple[int, int, int, int] = (1, 1, 1, 1),
        bias: bool = True,
    ) -> str:
        _, channels, rows, columns = self.shapes[source]
        inputs = [source, self.constant(self.weights(outputs, channels // groups, *kernel))]
        if bias:
            inputs.append(self.constant(self.rng.standard_normal(outputs) * 0.2))
        size = _size((rows, columns), kernel, strides, dilations, pads)
        a = {"strides": strides, "dilations": dilations, "pads": pads, "kernel_shape": kernel, "group": groups}
        return self.node("Conv", inputs, (1, outputs, *size), **a)

    def pool(
        self,
        op_type: str,
        source: str,
        kernel: tuple[int, int] = (2, 2),
        strides: tuple[int, int] = (2, 2),
        pads: tuple[int, int, int, int] = (0, 0, 0, 0),
        *,
        ceil: bool = False,
        **attributes: Any,
    ) -> str:
        _, channels, rows, columns = self.shapes[source]
        # If the last window would start in the padding, ONNX's shape inference and ONNX Runtime disagree.
        ceil = ceil and not any(pads)
        size = _size((rows, columns), kernel, strides, (1, 1), pads, ceil=ceil)
        if ceil:
            attributes["ceil_mode"] = 1
        a = {"kernel_shape": kernel, "strides": strides, "pads": pads, **attributes}
        return self.node(op_type, [source], (1, channels, *size), **a)

    def gemm(self, source: str, outputs: int) -> str:
        depth = self.shapes[source][1]
        inputs = [source, self.constant(self.weights(outputs, depth)), self.constant(self.rng.standard_normal(outputs))]
        return self.node("Gemm", inputs, (1, outputs), transB=1)

    def flat(self, source: str) -> str:
        return self.node("Flatten", [source], (1, int(np.prod(self.shapes[source]))), axis=1)

    def model(self, *outputs: str) -> onnx.ModelProto:
        inputs = [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", *self.input_shape[1:]])]
        output_infos = [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", *self.shapes[n][1:]]) for n in outputs
        ]
        graph = helper.make_graph(self.nodes, "random", inputs, output_infos, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
        onnx.checker.check_model(model)
        return model

    def samples(self, count: int = 3) -> NDArray[np.float32]:
        return self.rng.standard_normal((count, *self.input_shape[1:])).astype(np.float32)


def random_graph(seed: int) -> tuple[onnx.ModelProto, NDArray[np.float32]]:
    """Return a model and samples for it. The same seed gives the same result."""
    rng = np.random.default_rng(seed)
    b = GraphBuilder(
        rng, input_shape=(1, int(rng.choice([1, 3, 4])), int(rng.integers(7, 12)), int(rng.integers(7, 12)))
    )
    tensors = ["input"]
    for _ in range(int(rng.integers(3, 8))):
        tensors.append(_grow(b, tensors, rng))
    source = tensors[-1]
    outputs = [source]
    if rng.random() < 0.6:
        pooled = b.node("GlobalAveragePool", [source], (*b.shapes[source][:2], 1, 1)) if rng.random() < 0.5 else source
        hidden = b.gemm(b.flat(pooled), int(rng.integers(3, 40)))
        if rng.random() < 0.5:
            hidden = b.gemm(b.node("Relu", [hidden], b.shapes[hidden]), 7)
        outputs = [b.node("Softmax", [hidden], b.shapes[hidden], axis=1) if rng.random() < 0.3 else hidden]
    if rng.random() < 0.2 and len(tensors) > 3 and tensors[-2] not in outputs:
        outputs.append(tensors[-2])
    return b.model(*outputs), b.samples()


def _grow(b: GraphBuilder, tensors: list[str], rng: np.random.Generator) -> str:
    source = tensors[-1]
    _, channels, rows, columns = b.shapes[source]
    kind = rng.choice(
        [
            "conv",
            "conv",
            "conv",
            "depthwise",
            "grouped",
            "relu",
            "clip",
            "max",
            "average",
            "add",
            "concat",
            "move",
            "float",
        ]
    )
    small = min(rows, columns) < 4
    if kind == "conv" or channels == 1 or (small and kind in ("max", "average")):
        kernel = (1, 1) if small else tuple(int(v) for v in rng.choice([1, 2, 3], 2))
        pads = tuple(int(v) for v in rng.integers(0, 2, 4))
        strides = (1, 1) if small else tuple(int(v) for v in rng.integers(1, 3, 2))
        tensor = b.conv(
            source, int(rng.choice([5, 16, 24, 40])), kernel, strides=strides, pads=pads, bias=rng.random() < 0.8
        )
        return _activated(b, tensor, rng)
    if kind == "depthwise":
        return _activated(b, b.conv(source, channels, groups=channels), rng)
    if kind == "grouped":
        groups = 2 if channels % 2 == 0 else 1
        return _activated(b, b.conv(source, 2 * groups * int(rng.integers(1, 9)), groups=groups, dilations=(1, 1)), rng)
    if kind == "relu":
        return b.node("Relu", [source], b.shapes[source])
    if kind == "clip":
        low, high = (float(v) for v in rng.choice([[0, 6], [-1, 1], [0, 0.5], [-0.5, 2]]))
        return b.node("Clip", [source, b.constant(low), b.constant(high)], b.shapes[source])
    if kind == "max":
        size = int(rng.integers(2, 5))
        pads = (int(rng.integers(0, 2)),) * 4
        return b.pool("MaxPool", source, (size, size), (2, 2), pads, ceil=bool(rng.random() < 0.4))
    if kind == "average":
        return b.pool("AveragePool", source, (2, 3), (1, 2), (0, 1, 0, 1), count_include_pad=int(rng.random() < 0.7))
    if kind == "add":
        branch = b.conv(source, channels)
        return _activated(b, b.node("Add", [source, branch], b.shapes[source]), rng)
    if kind == "concat":
        branch = b.conv(source, 6)
        return b.node("Concat", [source, branch], (1, channels + 6, rows, columns), axis=1)
    if kind == "move":
        return _move(b, source, rng)
    return b.node("Sigmoid", [source], b.shapes[source])


def _move(b: GraphBuilder, source: str, rng: np.random.Generator) -> str:
    _, channels, rows, columns = b.shapes[source]
    kind = rng.choice(["transpose", "slice", "pad"])
    if kind == "transpose":
        return b.node("Transpose", [source], (1, channels, columns, rows), perm=[0, 1, 3, 2])
    if kind == "slice":
        ends = [b.constant(v, np.int64) for v in ([0], [rows], [2], [2])]
        return b.node("Slice", [source, *ends], (1, channels, -(-rows // 2), columns))
    pads = b.constant([0, 1, 0, 2, 0, 3, 1, 0], np.int64)
    return b.node("Pad", [source, pads, b.constant(0.0)], (1, channels + 4, rows + 1, columns + 2))


def _activated(b: GraphBuilder, source: str, rng: np.random.Generator) -> str:
    chance = rng.random()
    if chance < 0.5:
        return b.node("Relu", [source], b.shapes[source])
    if chance < 0.7:
        return b.node("Clip", [source, b.constant(0.0), b.constant(6.0 if chance < 0.6 else 0.4)], b.shapes[source])
    return source


def _size(
    size: tuple[int, int],
    kernel: tuple[int, int],
    strides: tuple[int, int],
    dilations: tuple[int, int],
    pads: tuple[int, int, int, int],
    *,
    ceil: bool = False,
) -> tuple[int, int]:
    sizes = []
    for axis in (0, 1):
        room = size[axis] + pads[axis] + pads[axis + 2] - (kernel[axis] - 1) * dilations[axis] - 1
        steps = -(-room // strides[axis]) if ceil else room // strides[axis]
        sizes.append(steps + 1)
    return sizes[0], sizes[1]


def ranges_of(model: onnx.ModelProto, samples: NDArray[np.float32]) -> dict[str, Range]:
    """Return the symmetric range of every float tensor, from its largest magnitude."""
    values = run_all(model, samples, [o for node in model.graph.node for o in node.output])
    values["input"] = samples
    bounds = {name: float(np.abs(value).max()) for name, value in values.items()}
    return {name: Range(-bound, bound) for name, bound in bounds.items()}


def network_of(model: onnx.ModelProto, **options: Any) -> Network:
    """Return the float network of a model."""
    return build_network(from_proto(model), Path("model.onnx"), **options)


def program_of(
    model: onnx.ModelProto, samples: NDArray[np.float32], array: ArrayConfig = SMALL, **options: Any
) -> Program:
    """Return the program of a model, with sorted channels."""
    network = sort_channels(network_of(model, **options), array.dim)
    scales = activation_scales(network, ranges_of(model, samples), powers_of_two=array.output_scale == "shift")
    return lower("model", network, scales, array)


def signature_of(model: onnx.ModelProto) -> Signature:
    def spec(value: onnx.ValueInfoProto) -> TensorSpec:
        kind = value.type.tensor_type
        dims = tuple(d.dim_value or d.dim_param for d in kind.shape.dim) if kind.HasField("shape") else None
        return TensorSpec(value.name, helper.tensor_dtype_to_np_dtype(kind.elem_type), dims)

    return Signature(tuple(map(spec, model.graph.input)), tuple(map(spec, model.graph.output)))


def run_all(
    model: onnx.ModelProto, samples: NDArray[np.float32], names: list[str], *, optimized: bool = True
) -> Mapping[str, NDArray[Any]]:
    """Run `model` in stock ONNX Runtime and return the tensors `names` from inside it."""
    if not names:
        return {}
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    outputs = {o.name for o in model.graph.output}
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in outputs)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: samples}
    return dict(zip(names, session.run(names, feed), strict=True))
