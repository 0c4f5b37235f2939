"""Test that a backend in a package of its own can do all that edgeq's backends can, without a change in edgeq."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgeq import demo
from edgeq.backends.base import SIMULATORS, Backend, as_backend, backend_for, backend_named
from edgeq.errors import UsageError
from edgeq.hardware.target import resolve
from edgeq.scheme import Scheme
from tests.docs.plugin import install

REPOSITORY = Path(__file__).resolve().parent.parent

BACKEND = """
import dataclasses
from contextlib import contextmanager

from edgeq.backends.base import Backend, DoctorCheck, require_fields
from edgeq.backends.cpu import CpuBackend
from edgeq.measure.coverage import forecast_coverage
from edgeq.model.int8_prediction import predict_int8
from edgeq.model.int8_rules import int8_rules
from edgeq.model.macs import node_macs
from edgeq.run.session import open_session


@contextmanager
def simulated(target):
    yield lambda model, settings: open_session(model, dataclasses.replace(settings, config={}))


class SketchBackend(Backend):
    name = "sketch"
    title = "a chip on paper"
    targeted = True
    simulated = True
    runs_engines = False

    def __init__(self, target=None):
        self.target = target

    def configured(self, target, observed, cut):
        return SketchBackend(target)

    def check(self, scheme):
        require_fields(scheme, {"mode": "static", "format": "QDQ"}, self.name, "Leave the scheme to the target")

    def build(self, prepared, ranges, scheme, destination, *, samples=None):
        self.check(scheme)
        artifact = CpuBackend().build(prepared, ranges, scheme, destination, samples=samples)
        predicted = predict_int8(prepared.model, int8_rules(self.name), scheme)
        coverage = forecast_coverage(predicted, node_macs(prepared.model), "the sketch", "it is on paper")
        compiled = destination.with_suffix(".sketch")
        compiled.write_text(f"{self.target.name}: {destination.name}")
        return dataclasses.replace(
            artifact,
            device="npu",
            simulation=destination,
            coverage=coverage,
            files={compiled.name: compiled},
            notes=(*artifact.notes, "drawn"),
        )

    def with_companions(self, artifact, samples, folder, *, count):
        folder.mkdir()
        (folder / "README").write_text(f"{count} samples")
        return dataclasses.replace(artifact, files={**artifact.files, "README": folder / "README"})

    def owns(self, place):
        return place.suffix == ".sketch"

    def simulator(self):
        return simulated

    def doctor(self, machine):
        yield DoctorCheck("sketch compiler", "ok", "a pencil")
"""

RULES = """
[default]
reason = "the chip has no form of it"
source = "its manual"

[[rule]]
operators = ["Conv", "MatMul", "Gemm", "Relu", "Add"]
int8 = "yes"
reason = "it has an int8 form"
source = "its manual"
"""

PROFILE = """
title = "a chip on paper"
architecture = "any"
requires = ["sketch-unit"]
rank = 61
backend = "sketch"
min_onnxruntime = "1.20"

[scheme]
mode = "static"
format = "QDQ"
activation_type = "uint8"
weight_type = "int8"

[why]
mode = "scales are drawn beforehand"
format = "pairs are what it reads"
activation_type = "so it was drawn"
weight_type = "so it was drawn"
min_onnxruntime = "the oldest that was tried"

[source]
mode = "its manual"
format = "its manual"
activation_type = "its manual"
weight_type = "its manual"
min_onnxruntime = "its manual"

[search]
method = ["minmax", "entropy"]

[emulate]
simulator = "sketch"
"""

FILES = {
    "edgeq_sketch/__init__.py": "",
    "edgeq_sketch/backend.py": BACKEND,
    "edgeq_sketch/targets/backends/sketch.toml": RULES,
    "edgeq_sketch/profiles/sketch-chip.toml": PROFILE,
    "edgeq_sketch/targets/sketch-board.toml": 'title = "a board with the chip"\nextends = "sketch-chip"\n',
}
POINTS = {
    "edgeq.backends": {"sketch": "edgeq_sketch.backend:SketchBackend"},
    "edgeq.data": {"sketch": "edgeq_sketch"},
}
BOARD = ("--data", demo.CALIBRATION, "-t", "sketch-board")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"), "edgeq-sketch", FILES, POINTS)


def edgeq(site: Path, *arguments: str | Path) -> Any:
    """Run a command in a process of its own with the package installed, and return its JSON output."""
    path = os.pathsep.join(map(str, (site, REPOSITORY, REPOSITORY / "targets" / "runtime")))
    command = [sys.executable, "-m", "edgeq", *map(str, arguments), "--json"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_built_and_proven(site: Path, tmp_path: Path) -> None:
    found = edgeq(site, "quantize", demo.MODEL, *BOARD, "-o", tmp_path / "q.onnx")
    assert "drawn" in found["notes"]
    assert found["coverage"]["basis"] == "forecast"
    assert found["agreement"]["sqnr_db"] > 15
    assert any("in simulation on a CPU, not on sketch-board" in note for note in found["notes"])


def test_it_is_packaged_with_its_files_and_checked_in_its_simulator(site: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "b"
    found = edgeq(site, "package", demo.MODEL, *BOARD, "-o", bundle)
    (variant,) = found["variants"].values()
    checks = {check["name"]: (check["kind"], check["where"]) for check in variant["checks"]}
    assert checks["self-test"] == ("modelled", "the sketch simulator")
    assert (bundle / "files" / "sketch-board" / "README").read_text() == "2 samples"
    (sketch,) = (bundle / "files" / "sketch-board").glob("*.sketch")
    assert sketch.read_text().startswith("sketch-board: ")
    report = edgeq(site, "verify", bundle, "--on", "sketch-board")
    assert "passed" in json.dumps(report)


def test_it_is_tuned_without_the_hardware(site: Path, tmp_path: Path) -> None:
    found = edgeq(site, "tune", demo.MODEL, *BOARD, "-o", tmp_path / "t")
    assert (tmp_path / "t" / "manifest.json").is_file()
    assert "entropy" in json.dumps(found)


def test_doctor_looks_at_it(site: Path) -> None:
    checks = edgeq(site, "doctor")["checks"]
    assert {"name": "sketch compiler", "status": "ok", "detail": "a pencil"} in checks


def test_the_library_asks_it(site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(site)
    assert backend_named("sketch").owns(tmp_path / "a.sketch")
    assert set(SIMULATORS) == {"espdl", "litert", "qnn", "rknn", "sketch", "systolic"}
    assert "cpu" not in SIMULATORS
    assert "nothing" not in SIMULATORS
    assert vars(backend_for(resolve("sketch-board")))["target"].name == "sketch-board"


class Plain:
    """Define a backend as packages did before there was a base class."""

    name = "plain"
    title = "documented members alone"
    adopts_quantized = False

    def check(self, scheme: Scheme) -> None:
        if scheme.wide:
            raise UsageError("not wide")

    def build(self, *arguments: Any, **options: Any) -> Any:
        return arguments, options


class PlainTargeted(Plain):
    simulated = True

    def configured(self, *about: Any) -> Plain:
        return Plain()


def test_a_plain_object_gets_the_defaults() -> None:
    for found in (as_backend(Plain), as_backend(Plain())):
        assert isinstance(found, Backend)
        assert (found.name, found.targeted, found.recoverable, found.simulated) == ("plain", False, True, False)
        assert found.build(1, samples=None) == ((1,), {"samples": None})  # type: ignore[call-arg, arg-type]
        with pytest.raises(UsageError, match="not wide"):
            found.check(Scheme(wide=("a",)))
        with pytest.raises(UsageError, match="fit_seen"):
            found.fitting({})


def test_a_plain_object_that_is_configured_for_a_target() -> None:
    found = as_backend(PlainTargeted)
    assert (found.targeted, found.recoverable, found.simulated) == (True, False, True)
