"""Make a folder of small models and data, and run `edgeq` in it with a check of the files that it leaves."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from click.testing import CliRunner
from PIL import Image

from edgeq.cli import group
from tests.graphs import proto

SAMPLES = 4


@dataclass(frozen=True)
class Ran:
    """Hold the result of a command, and the files before and after it (relative path → digest)."""

    code: int
    out: str
    err: str
    before: dict[str, str]
    after: dict[str, str]

    @property
    def line(self) -> str:
        """Return the last line of stderr, which contains the error."""
        return self.err.rstrip("\n").rpartition("\n")[2]

    def json(self) -> Any:
        return json.loads(self.out)


class Workspace:
    """Run commands in a folder that `fill` has filled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def contents(self) -> dict[str, str]:
        return contents(self.path)

    def run(self, *arguments: str | Path) -> Ran:
        before = self.contents()
        result = CliRunner().invoke(group, [str(a) for a in arguments], prog_name="edgeq", catch_exceptions=False)
        return Ran(result.exit_code, result.stdout, result.stderr, before, self.contents())

    def refused(self, code: int, *arguments: str | Path, says: str) -> Ran:
        """Run a command that must fail with this exit code and one line that contains `says`, and change nothing."""
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
    """Return every file and folder below `folder`, with the digest of its bytes ("" for a folder)."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else ""
        for p in sorted(folder.rglob("*"))
    }


def fill(workspace: Path) -> None:
    """Write models (*.onnx) and data, good and bad ones, under the names that the tests use."""
    for name, model in models().items():
        (workspace / f"{name}.onnx").write_bytes(model.SerializeToString())
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
    image, product = "float[1, 3, 8, 8]", "[matmul] y = MatMul(x, w)"
    weight = {"w": random(8, 4)}
    concat = "[concat] x = Concat<axis = 1>(a, b)"
    tokens = "g (int64[1, 4] x) => (float[1, 4, 3] y) { [gather] e = Gather(table, x) [matmul] y = MatMul(e, w) }"
    return {
        "net": network(),
        "dynamic": network(shape="N, 3, H, W"),
        "opset8": network(opset=8),
        "opset5": network(opset=5),
        "matmul": proto(f"g (float[1, 8] x) => (float[1, 4] y) {{ {product} }}", weight),
        "batches": proto(f"g (float[N, 8] x) => (float[N, 4] y) {{ {product} }}", weight),
        "relu": proto(f"g ({image} x) => ({image} y) {{ [relu] y = Relu(x) }}"),
        "unsupported": proto(f"g ({image} x) => ({image} y) {{ [erf] e = Erf(x) [sin] y = Sin(e) }}"),
        "pair": proto(f"g (float[1, 3] a, float[1, 5] b) => (float[1, 4] y) {{ {concat} {product} }}", weight),
        "integers": proto("g (int64[1, 4] x) => (int64[1, 4] y) { [add] y = Add(x, x) }"),
        "tokens": proto(tokens, {"table": random(10, 6), "w": random(6, 3)}),
        "inputless": proto("g () => (float[1, 4] y) { [r] y = RandomNormal<shape = [1, 4]>() }"),
        "branch": branch(),
        "loop": loop(),
    }


def network(shape: str = "1, 3, 8, 8", opset: int = 17) -> onnx.ModelProto:
    """Return a network of Conv, Relu, GlobalAveragePool, Flatten and Gemm: float32 [1, 3, 8, 8] to [1, 5]."""
    body = f"""g (float[{shape}] x) => (float[{shape.partition(",")[0]}, 5] y) {{
        [conv] c = Conv<pads = [1, 1, 1, 1]>(x, w, b)
        [relu] r = Relu(c)
        [pool] p = GlobalAveragePool(r)
        [flatten] f = Flatten(p)
        [fc] y = Gemm<transB = 1>(f, g, h)
    }}"""
    weights = {"w": random(8, 3, 3, 3), "b": random(8), "g": random(5, 8), "h": random(5)}
    return proto(body, weights, opset=opset)


def branch() -> onnx.ModelProto:
    """Return a MatMul, then an If with two branches, one of which contains a second MatMul."""
    body = """g (float[1, 8] x) => (float[1, 4] y) {
        [outer] m = MatMul(x, w)
        [sum] s = ReduceSum<keepdims = 0>(x)
        [greater] positive = Greater(s, zero)
        [if] b = If(positive)<
            then_branch = then () => (float[1, 4] t) { [inner] t = MatMul(x, w) },
            else_branch = else () => (float[1, 4] e) { [neg] e = Neg(bias) }
        >
        [mul] y = Mul(b, m)
    }"""
    return proto(body, {"w": random(8, 4), "bias": random(1, 4), "zero": np.float32(0)})


def loop() -> onnx.ModelProto:
    """Return a Loop that runs a MatMul three times, then another MatMul."""
    body = """g (float[1, 8] x) => (float[1, 8] y) {
        [loop] l = Loop(times, "", x)<
            body = body (int64 i, bool go, float[1, 8] state) => (bool still, float[1, 8] next) {
                [inner] next = MatMul(state, w)
                [identity] still = Identity(go)
            }
        >
        [outer] y = MatMul(l, w)
    }"""
    return proto(body, {"w": random(8, 8), "times": np.int64(3)})


def random(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)
