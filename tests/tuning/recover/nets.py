"""Build small networks with random weights, prepared and with statistics, and a target for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from edgeq.calibration.collect import collect
from edgeq.data.sample import Sample
from edgeq.hardware.target import Target, resolve
from edgeq.model.convert import from_proto, to_bytes
from edgeq.model.digests import model_digest
from edgeq.model.graph import GraphIndex
from edgeq.model.load import model_signature, read_model
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.prove.job import Job
from edgeq.scheme import Scheme

SCHEME = Scheme()


@dataclass
class Net:
    """Collect nodes and weights."""

    seed: int = 0
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def constant(self, name: str, value: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
        return name

    def node(self, op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=f"{output}_{op_type}", **attributes))
        return output

    def conv(
        self,
        source: str,
        name: str,
        inputs: int,
        outputs: int,
        kernel: int = 3,
        *,
        groups: int = 1,
        bias: bool = True,
        channels: Any = 1.0,
        **attributes: Any,
    ) -> str:
        """Add a Conv called `name` and return its output `{name}_out`. `channels` scales the output channels."""
        fan_in = inputs // groups * kernel * kernel
        scale = np.broadcast_to(np.asarray(channels, np.float64), (outputs,))
        w = self.random.normal(0, np.sqrt(2 / fan_in), (outputs, inputs // groups, kernel, kernel))
        names = [source, self.constant(f"{name}_w", w * scale[:, None, None, None])]
        if bias:
            names.append(self.constant(f"{name}_b", self.random.normal(0, 0.1, outputs) * scale))
        attributes.setdefault("pads", [kernel // 2] * 4)
        self.nodes.append(
            helper.make_node(
                "Conv", names, [f"{name}_out"], name=name, group=groups, kernel_shape=[kernel, kernel], **attributes
            )
        )
        return f"{name}_out"

    def silu(self, source: str, name: str) -> str:
        gate = self.node("Sigmoid", [source], f"{name}_gate")
        return self.node("Mul", [source, gate], name)

    def model(self, inputs: Mapping[str, Sequence[int]], outputs: Sequence[str]) -> ir.Model:
        graph = helper.make_graph(
            self.nodes,
            "net",
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, list(s)) for n, s in inputs.items()],
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
            self.weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return from_proto(onnx.shape_inference.infer_shapes(model))


@dataclass(frozen=True)
class FewSamples:
    """Hold samples in memory."""

    samples: tuple[Sample, ...]
    source: str = "memory"

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def digest(self) -> str:
        return "few"


def few(count: int, shape: Sequence[int], *, name: str = "x", seed: int = 1, mean: float = 0.0) -> FewSamples:
    """Return random samples with one input."""
    random = np.random.default_rng(seed)
    return FewSamples(
        tuple(Sample(f"s{i}", {name: random.normal(mean, 1, shape).astype(np.float32)}) for i in range(count))
    )


def prepared_of(model: ir.Model, folder: Path) -> PreparedModel:
    """Return a model as a prepared one, without any preparation."""
    path = folder / "source.onnx"
    path.write_bytes(to_bytes(model))
    return PreparedModel(GraphIndex(read_model(path), path), path, path, model_digest(path), model_signature(path), ())


def job_of(model: ir.Model, folder: Path, samples: FewSamples, *, prepare: bool = False) -> Job:
    """Return a job for a model. The model is prepared only if `prepare` is True."""
    prepared = prepared_of(model, folder)
    path = prepared.path
    if prepare:
        prepared = prepare_model(path, folder / "prepared")
    statistics = collect(prepared.model, samples, model_digest=prepared.digest)
    return Job(path, prepared, samples, samples, False, statistics)


def target() -> Target:
    return resolve("cpu-any")


def run(model: ir.Model | Path, feed: Mapping[str, Any], **settings: Any) -> list[Any]:
    from edgeq.run.session import SessionSettings, open_session

    source = model if isinstance(model, Path) else to_bytes(model)
    settings.setdefault("intra_op_threads", 1)
    return list(open_session(source, SessionSettings(**settings)).run(None, dict(feed)))


def noise_db(model: ir.Model | Path, other: Path, samples: FewSamples) -> float:
    """Return the SQNR of the first output over all samples in dB."""
    pairs = [(run(model, sample.inputs)[0], run(other, sample.inputs)[0]) for sample in samples]
    return sqnr_db(np.stack([a for a, _ in pairs]), np.stack([b for _, b in pairs]))


def sqnr_db(reference: Any, other: Any) -> float:
    noise = float(np.square(np.asarray(reference, np.float64) - other).sum())
    return float(10 * np.log10(np.square(np.asarray(reference, np.float64)).sum() / noise))


def two_gates(channels: Callable[[int], Any] = lambda n: 1.0) -> ir.Model:
    """Return Conv, SiLU, Conv, SiLU, depthwise Conv, SiLU, Conv: [1, 3, 12, 12] → [1, 4, 12, 12]."""
    net = Net()
    x = net.silu(net.conv("x", "first", 3, 8, channels=channels(8)), "first_act")
    x = net.silu(net.conv(x, "second", 8, 8, 1, channels=channels(8)), "second_act")
    x = net.conv(x, "depthwise", 8, 8, groups=8)
    net.conv(net.silu(x, "depthwise_act"), "last", 8, 4, 1)
    return net.model({"x": [1, 3, 12, 12]}, ["last_out"])


def uneven(count: int) -> Any:
    """Return channel scales from 1/16 to 16."""
    return 2.0 ** np.linspace(-4, 4, count)
