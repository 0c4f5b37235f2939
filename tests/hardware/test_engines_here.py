from __future__ import annotations

import sys
from pathlib import Path

import pytest
from edgeq_device.engines import this_platform

from edgeq.engines import load_engines
from edgeq.hardware.engines import detect_engines
from edgeq.hardware.machine import Gpu, Machine
from tests import fake_engine

HERE = Machine(architecture="x86_64", features=frozenset({"amx_bf16"}))


def test_an_installed_engine_and_what_it_can_do_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_engine.install(tmp_path, monkeypatch)
    own, state = detect_engines(HERE, {"fake": fake, "onnxruntime": load_engines()["onnxruntime"]})
    assert (own.name, own.usable, own.precisions) == ("onnxruntime", True, ("f32",))
    assert (state.version, state.problem, state.precisions, state.install) == ("1.2.3", "", ("f32", "bf16"), "")
    assert "edgeq_fake_engine" not in sys.modules


def test_one_that_is_too_old_is_not_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_engine.install(tmp_path, monkeypatch, version="1.0")
    _, state = detect_engines(HERE, {"fake": fake, "onnxruntime": load_engines()["onnxruntime"]})
    assert not state.usable
    assert "1.0 is older than 1.2" in state.problem


def test_one_that_would_help_comes_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_engine.install(tmp_path, monkeypatch, version="")
    _, state = detect_engines(HERE, {"fake": fake, "onnxruntime": load_engines()["onnxruntime"]})
    assert state.install == "python -m pip install --upgrade 'edgeq-fake-engine>=1.2'"


@pytest.mark.skipif(this_platform() not in load_engines()["nv-tensorrt-rtx"].platforms, reason="it has no package here")
def test_a_gpu_engine_would_help_only_with_its_gpu() -> None:
    engines = {name: load_engines()[name] for name in ("onnxruntime", "nv-tensorrt-rtx")}
    old, new = (
        Machine(architecture="x86_64", features=frozenset(), gpus=(Gpu("a GPU", (major, 0)),)) for major in (7, 9)
    )
    assert [len(detect_engines(machine, engines)) for machine in (HERE, old, new)] == [1, 1, 2]
