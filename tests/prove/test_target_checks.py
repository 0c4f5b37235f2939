"""Test the checks of a model against what edgeq knows of a target's onnxruntime."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgeq.errors import CheckFailedError
from edgeq.hardware.engines import list_wrong_kernels
from edgeq.hardware.target import resolve
from edgeq.model.convert import to_bytes
from edgeq.model.graph import GraphIndex
from edgeq.prove.builds import runtime_requirements
from tests.graphs import model

JOB: Any = SimpleNamespace(
    prepared=SimpleNamespace(graph=GraphIndex(model("g (float[1] x) => (float[1] y) { y = Neg (x) }")))
)


def artifact(folder: Path, kind: str, value: int) -> Any:
    net = f"net ({kind}[1,1,2,2] x) => (int32[1,1,2,2] y) <int8[1,1,1,1] w = {{{value}}}> {{ y = ConvInteger (x, w) }}"
    path = folder / "m.onnx"
    path.write_bytes(to_bytes(model(net)))
    return SimpleNamespace(model=path, provider="CPUExecutionProvider")


def test_no_least_weight_is_written_for_a_target_that_is_wrong_on_it(tmp_path: Path) -> None:
    for target in ("raspberry-pi-4", "arm64-neon"):
        with pytest.raises(CheckFailedError, match=r"computes Conv s8s8 with -128 wrongly .* within -127 and 127"):
            runtime_requirements(JOB, resolve(target), artifact(tmp_path, "int8", -128))
        runtime_requirements(JOB, resolve(target), artifact(tmp_path, "int8", -127))
    runtime_requirements(JOB, resolve("raspberry-pi-5"), artifact(tmp_path, "int8", -128))


def test_a_target_s_release_is_looked_up(tmp_path: Path) -> None:
    target = replace(resolve("x86-64-amx-int8"), runtime={"onnxruntime": "1.24.4"})
    with pytest.raises(CheckFailedError, match=r"1\.24\.4 computes Conv u8s8 wrongly .*Upgrade to onnxruntime 1\.26"):
        runtime_requirements(JOB, target, artifact(tmp_path, "uint8", 1))
    runtime_requirements(JOB, replace(target, runtime={"onnxruntime": "1.26.0"}), artifact(tmp_path, "uint8", 1))


def test_the_machine_s_own_release_is_looked_up() -> None:
    machine: Any = SimpleNamespace(onnxruntime="1.24.4", architecture="x86_64", features={"amx_int8"})
    assert [row.source for row in list_wrong_kernels(machine)] == [
        "https://github.com/microsoft/onnxruntime/issues/26324"
    ]
    assert list_wrong_kernels(SimpleNamespace(**{**vars(machine), "onnxruntime": None})) == ()  # type: ignore[arg-type]
