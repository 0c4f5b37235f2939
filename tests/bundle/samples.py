"""Make small models and bundles of them."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgeq.bundle.spec import BundleSpec, SelfTestCase, SelfTestSpec, VariantSpec
from tests.graphs import proto

HERE = {"AMD64": "x86_64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
ELSEWHERE = "arm64" if HERE != "arm64" else "x86_64"
SIZE = 48
WEIGHTS = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32)
INPUT = np.random.default_rng(1).standard_normal((2, SIZE)).astype(np.float32)

Array = np.ndarray[Any, Any]


def linear(path: Path, bias: float, *, external: str = "", weights: Array = WEIGHTS) -> Path:
    """Write y = x · weights + bias. `external` names a file for the weights."""
    body = f"""linear (float[n, {SIZE}] x) => (float[n, {SIZE}] y) {{
        [mm] m = MatMul(x, w)
        [add] y = Add(m, b)
    }}"""
    model = proto(body, {"w": weights, "b": np.float32(bias)})
    path.parent.mkdir(parents=True, exist_ok=True)
    if external:
        onnx.save_model(model, str(path), save_as_external_data=True, location=external, size_threshold=1024)
    else:
        onnx.save_model(model, str(path))
    return path


def answer(bias: float) -> Array:
    return (INPUT @ WEIGHTS + np.float32(bias)).astype(np.float32)


def variant(name: str, model: Path, bias: float, **changes: Any) -> VariantSpec:
    """Return a variant for this architecture with one self-test case and a tolerance for rounding."""
    settings: dict[str, Any] = {
        "info": {"architecture": HERE},
        "selftest": SelfTestSpec((SelfTestCase({"x": INPUT}, {"y": answer(bias)}),), {"y": 1e-4}),
    }
    return VariantSpec(name, model, **{**settings, **changes})


def calibration_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("calibration.cache", "calibration.flatbuffers", "calibration.json"):
        (folder / name).write_bytes(f"table {name}\n".encode())
    return folder


def small_spec(folder: Path) -> BundleSpec:
    """Return three variants and float32: a plain one, a better one that needs a feature no CPU has, and one for
    elsewhere.
    """
    plain = linear(folder / "plain" / "m.onnx", 0.0)
    better = linear(folder / "better" / "m.onnx", 1.0, external="weights.bin")
    return BundleSpec(
        "linear",
        (
            variant(
                "plain",
                plain,
                0.0,
                session_options={"session.x64quantprecision": "1"},
                calibration=calibration_folder(folder / "tables"),
            ),
            variant(
                "better",
                better,
                1.0,
                info={"architecture": HERE, "rank": 9, "required_features": ["telepathy"], "min_onnxruntime": "1.17"},
            ),
            variant("elsewhere", better, 1.0, info={"architecture": ELSEWHERE}),
        ),
        metadata={"source": {"sha256": "0" * 64}},
        float_model=linear(folder / "float" / "m.onnx", 0.25),
    )


def tree(root: Path) -> dict[str, bytes]:
    """Return the bytes of every file under `root`, by path."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
