"""A folder of small models and data, and a way to run `edgeq` in it that looks at what is left behind."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from edgeq.cli import group

SAMPLES = 4


@dataclass(frozen=True)
class Ran:
    """A finished command, and what it left: relative path → digest, before and after."""

    code: int
    out: str
    err: str
    before: dict[str, str]
    after: dict[str, str]

    @property
    def line(self) -> str:
        """The last line on stderr: where an error is."""
        return self.err.rstrip("\n").rpartition("\n")[2]

    def json(self) -> Any:
        return json.loads(self.out)


class Workspace:
    """`tmp_path` filled by `fill`; commands run with it as the working directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def contents(self) -> dict[str, str]:
        return contents(self.path)

    def run(self, *arguments: str | Path) -> Ran:
        before = self.contents()
        result = CliRunner().invoke(group, [str(a) for a in arguments], prog_name="edgeq", catch_exceptions=False)
        return Ran(result.exit_code, result.stdout, result.stderr, before, self.contents())

    def refused(self, code: int, *arguments: str | Path, says: str) -> Ran:
        """Run what must end in one line with `says` in it, that exit code, and nothing changed."""
        ran = self.run(*arguments)
        assert ran.code == code, ran.err
        assert ran.out == ""
        assert "Traceback" not in ran.err
        assert ran.line.startswith("edgeq: ")
        assert says in ran.line
        assert [line for line in ran.err.splitlines() if line.startswith("edgeq: ")] == [ran.line]
        assert ran.after == ran.before
        return ran


def contents(folder: Path) -> dict[str, str]:
    """Every file and folder below `folder`, with the digest of its bytes ("" for a folder)."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else ""
        for p in sorted(folder.rglob("*"))
    }


def fill(workspace: Path) -> None:
    """Models (*.onnx) and data, good and bad, as the tests name them."""
    for name, proto in models().items():
        (workspace / f"{name}.onnx").write_bytes(proto.SerializeToString())
    whole = (workspace / "net.onnx").read_bytes()
    (workspace / "truncated.onnx").write_bytes(whole[: len(whole) // 2])
    (workspace / "text.onnx").write_text("not a model\n")
    (workspace / "empty.onnx").write_bytes(b"")
    (workspace / "notes.txt").write_text("mine\n")
    x = random(SAMPLES, 3, 8, 8)
    broken = x.copy()
    broken[2, 0, 0, 0] = np.nan
    arrays: dict[str, dict[str, Any]] = {
        "x": {"x": x},
        "labelled": {"x": x, "y": np.arange(SAMPLES)},
        "wrong_name": {"z": x},
        "wrong_shape": {"x": x[:, :2]},
        "nan": {"x": broken},
        "integers": {"x": x.astype(np.int64)},
        "words": {"x": np.array(["a", "b"])},
        "none": {"x": x[:0]},
        "rows": {"x": random(SAMPLES, 8)},
        "tokens": {"x": np.arange(SAMPLES * 4).reshape(SAMPLES, 4) % 10},
        "tokens_out_of_range": {"x": np.full((SAMPLES, 4), 99)},
        "pair": {"a": random(SAMPLES, 3), "b": random(SAMPLES, 5)},
        "half_a_pair": {"a": random(SAMPLES, 3)},
    }
    for name, held in arrays.items():
        np.savez(workspace / f"{name}.npz", **held)
    np.savez(workspace / "pickled.npz", x=np.array([{}], dtype=object), allow_pickle=True)
    (workspace / "truncated.npz").write_bytes((workspace / "x.npz").read_bytes()[:300])
    (workspace / "empty").mkdir()
    for folder in ("images", "bad_images"):
        (workspace / folder).mkdir()
        for index in range(2):
            Image.new("RGB", (8, 8), (40 * index, 5, 90)).save(workspace / folder / f"{index}.png")
    (workspace / "bad_images" / "2.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")


def models() -> dict[str, onnx.ModelProto]:
    row, image = {"x": [1, 8]}, {"x": [1, 3, 8, 8]}
    matmul = helper.make_node("MatMul", ["x", "w"], ["y"], name="matmul")
    weight = {"w": random(8, 4)}
    return {
        "net": network(),
        "dynamic": network(shape=["N", 3, "H", "W"]),
        "opset8": network(opset=8),
        "opset5": network(opset=5),
        "matmul": model([matmul], row, {"y": [1, 4]}, weight),
        "batches": model([matmul], {"x": ["N", 8]}, {"y": ["N", 4]}, weight),
        "relu": model([helper.make_node("Relu", ["x"], ["y"], name="relu")], image, {"y": [1, 3, 8, 8]}),
        "unsupported": model(
            [helper.make_node("Erf", ["x"], ["e"], name="erf"), helper.make_node("Sin", ["e"], ["y"], name="sin")],
            image,
            {"y": [1, 3, 8, 8]},
        ),
        "pair": model(
            [helper.make_node("Concat", ["a", "b"], ["x"], name="concat", axis=1), matmul],
            {"a": [1, 3], "b": [1, 5]},
            {"y": [1, 4]},
            weight,
        ),
        "integers": model(
            [helper.make_node("Add", ["x", "x"], ["y"], name="add")],
            {"x": [1, 4]},
            {"y": [1, 4]},
            dtypes=(TensorProto.INT64, TensorProto.INT64),
        ),
        "tokens": model(
            [
                helper.make_node("Gather", ["table", "x"], ["e"], name="gather"),
                helper.make_node("MatMul", ["e", "w"], ["y"], name="matmul"),
            ],
            {"x": [1, 4]},
            {"y": [1, 4, 3]},
            {"table": random(10, 6), "w": random(6, 3)},
            dtypes=(TensorProto.INT64, TensorProto.FLOAT),
        ),
        "inputless": model([helper.make_node("RandomNormal", [], ["y"], name="r", shape=[1, 4])], {}, {"y": [1, 4]}),
        "branch": branch(),
        "loop": loop(),
    }


def network(shape: list[Any] | None = None, opset: int = 17) -> onnx.ModelProto:
    """Conv, Relu, GlobalAveragePool, Flatten, Gemm: float32 [1, 3, 8, 8] to [1, 5]."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "g", "h"], ["y"], name="fc", transB=1),
    ]
    weights = {"w": random(8, 3, 3, 3), "b": random(8), "g": random(5, 8), "h": random(5)}
    shape = shape or [1, 3, 8, 8]
    return model(nodes, {"x": shape}, {"y": [shape[0], 5]}, weights, opset=opset)


def branch() -> onnx.ModelProto:
    """A MatMul, then one of two branches, one of which multiplies again."""
    then = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["t"], name="inner")], "then", [], [_info("t", [1, 4])]
    )
    other = helper.make_graph([helper.make_node("Neg", ["bias"], ["e"], name="neg")], "else", [], [_info("e", [1, 4])])
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="outer"),
        helper.make_node("ReduceSum", ["x"], ["s"], name="sum", keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["positive"], name="greater"),
        helper.make_node("If", ["positive"], ["b"], name="if", then_branch=then, else_branch=other),
        helper.make_node("Mul", ["b", "m"], ["y"], name="mul"),
    ]
    return model(nodes, {"x": [1, 8]}, {"y": [1, 4]}, {"w": random(8, 4), "bias": random(1, 4), "zero": np.float32(0)})


def loop() -> onnx.ModelProto:
    """A MatMul three times in a Loop, and one behind it."""
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["state", "w"], ["next"], name="inner"),
            helper.make_node("Identity", ["go"], ["still"], name="identity"),
        ],
        "body",
        [_info("i", [], TensorProto.INT64), _info("go", [], TensorProto.BOOL), _info("state", [1, 8])],
        [_info("still", [], TensorProto.BOOL), _info("next", [1, 8])],
    )
    nodes = [
        helper.make_node("Loop", ["times", "", "x"], ["l"], name="loop", body=body),
        helper.make_node("MatMul", ["l", "w"], ["y"], name="outer"),
    ]
    return model(nodes, {"x": [1, 8]}, {"y": [1, 8]}, {"w": random(8, 8), "times": np.int64(3)})


def model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[Any]],
    outputs: dict[str, list[Any]],
    weights: dict[str, Any] | None = None,
    *,
    opset: int = 17,
    dtypes: tuple[int, int] = (TensorProto.FLOAT, TensorProto.FLOAT),
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "test",
        [_info(name, shape, dtypes[0]) for name, shape in inputs.items()],
        [_info(name, shape, dtypes[1]) for name, shape in outputs.items()],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def random(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _info(name: str, shape: list[Any], dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)
