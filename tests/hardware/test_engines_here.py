from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from edgeq_device.system.gpus import Gpu

from edgeq.hardware.detect import Machine
from edgeq.hardware.engines import Installed, detect_engines
from edgeq.run.engines import load_engines
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


def test_a_gpu_engine_would_help_only_with_its_gpu() -> None:
    engines = {name: load_engines()[name] for name in ("onnxruntime", "nv-tensorrt-rtx")}
    versions = ((7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1))
    found = {version: len(detect_engines(_with_gpu(version), engines, {})) for version in versions}
    assert [version for version, count in found.items() if count == 2] == [(8, 6), (8, 9), (12, 0), (12, 1)]
    assert len(detect_engines(replace(HERE, os="Linux 6"), engines, {})) == 1


def test_an_installed_engine_that_does_not_take_the_gpu_is_not_usable() -> None:
    engines = {name: load_engines()[name] for name in ("onnxruntime", "nv-tensorrt-rtx")}
    there = {"nv-tensorrt-rtx": Installed("0.5.0")}
    states = [detect_engines(machine, engines, there)[-1] for machine in (HERE, _with_gpu((9, 0)), _with_gpu((8, 9)))]
    assert [state.problem for state in states] == [
        "it runs on NVIDIA GPUs of compute capability 8.6, 8.9, 12.0 or newer; this machine has none",
        "it runs on NVIDIA GPUs of compute capability 8.6, 8.9, 12.0 or newer; this machine has a GPU: 9.0",
        "",
    ]


def test_an_engine_that_takes_one_makers_cpus_is_used_and_recommended_on_those_alone() -> None:
    engines = {name: replace(load_engines()[name], direct=None) for name in ("onnxruntime", "openvino")}
    intel, amd, unknown = (replace(HERE, vendor=v, os="Linux 6") for v in ("GenuineIntel", "AuthenticAMD", ""))
    last = engines["openvino"].cpu_vendors_until
    problem = "onnxruntime-ep-openvino {} takes only CPUs by GenuineIntel; this one is AuthenticAMD"
    for version, machine, expected in (
        (last, intel, ""),
        (last, unknown, ""),
        (last, amd, problem.format(last)),
        ("99.0", amd, ""),  # a release that edgeq does not know: the devices that onnxruntime finds decide
    ):
        state = detect_engines(machine, engines, {"openvino": Installed(version)})[-1]
        assert (state.name, state.problem) == ("openvino", expected)
    recommended = [len(detect_engines(machine, engines, {})) == 2 for machine in (intel, unknown, amd)]
    assert recommended == [True, True, False]


def test_the_package_of_the_maker_is_recommended_where_the_plugin_does_not_run() -> None:
    engines = {name: load_engines()[name] for name in ("onnxruntime", "openvino")}
    machines = [
        replace(HERE, vendor=vendor, os="Linux 6", architecture=architecture)
        for vendor, architecture in (("GenuineIntel", "x86_64"), ("AuthenticAMD", "x86_64"), ("", "arm64"))
    ]
    packages = [detect_engines(machine, engines, {})[-1].install.split()[-1].strip("'") for machine in machines]
    assert [text.partition(">=")[0] for text in packages] == ["onnxruntime-ep-openvino", "openvino", "openvino"]


def test_cuda_comes_with_a_command_that_leaves_one_onnxruntime() -> None:
    known = load_engines()
    engines = {name: replace(known[name], platforms=()) for name in ("onnxruntime", "cuda")}
    state = detect_engines(_with_gpu((8, 0)), engines)[-1]
    if not state.version:
        assert state.install.startswith("python -m pip uninstall onnxruntime && ")


def _with_gpu(version: tuple[int, int]) -> Machine:
    return Machine(architecture="x86_64", features=frozenset(), gpus=(Gpu("a GPU", version),), os="Linux 6")


@pytest.mark.parametrize(("board", "named"), [("Radxa ROCK 5B", True), ("Raspberry Pi 5 Model B Rev 1.0", False)])
def test_a_boards_name_tells_of_hardware_for_an_engine(board: str, named: bool) -> None:
    there = Machine(architecture="arm64", os="Linux", board=board)
    found = {state.name: state for state in detect_engines(there, load_engines(), {})}
    assert ("rknnlite" in found) == named
    if named:
        assert found["rknnlite"].install == "python -m pip install rknn-toolkit-lite2==2.5.0"
