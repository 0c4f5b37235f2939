"""Test that names from a file reach a terminal as plain text, whichever library prints them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from edgeq_device.system.relay import escape_lines

from edgeq.bundle.spec import BundleSpec
from edgeq.bundle.write import write_bundle
from tests.bundle.samples import INPUT, linear, variant
from tests.cli import process

HOSTILE = "m\x1b]0;owned\x07\x1b[2J\r\x9b2J\nall variants passed"
LOUD = """
import onnxruntime
onnxruntime.set_default_logger_severity(0)
made = onnxruntime.SessionOptions
class Loud(made):
    def __setattr__(self, name, value):
        super().__setattr__(name, 0 if name == "log_severity_level" else value)
onnxruntime.SessionOptions = Loud
"""
"""A sitecustomize with which onnxruntime logs all it can, as another version or a plug-in may."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write `hostile.onnx`, `fails.onnx` and bundles of both.

    The first has names with escape sequences, an unused initializer and wrong shapes: onnxruntime warns of them. The
    second fails while it runs.
    """
    folder = tmp_path_factory.mktemp("place")
    linear(folder / "hostile.onnx", 0.0)
    model = onnx.load(folder / "hostile.onnx")
    model.graph.node[0].name = model.graph.node[0].output[0] = model.graph.node[1].input[0] = HOSTILE
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(3, np.float32), f"unused {HOSTILE}"))
    shape = onnx.helper.make_tensor_value_info(HOSTILE, onnx.TensorProto.FLOAT, [9, 9, 9])
    model.graph.value_info.append(shape)
    onnx.save(model, folder / "hostile.onnx")
    model.graph.node[0].op_type = "Reshape"
    model.graph.node[0].input[1] = "sizes"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([5, 5]), "sizes"))
    del model.graph.value_info[:]
    onnx.save(model, folder / "fails.onnx")
    for name in ("hostile", "fails"):
        write_bundle(BundleSpec(name, (variant("v", folder / f"{name}.onnx", 0.0),)), folder / f"{name}.edgeq")
    write_bundle(BundleSpec("hostile", (variant("v", folder / "hostile.onnx", 0.0),)), folder / "bundle")
    np.savez(folder / "x.npz", x=INPUT)
    (folder / "loud").mkdir()
    fast = f"import runpy; runpy.run_path({str(process.FAST_CLOCK / 'sitecustomize.py')!r})"
    (folder / "loud" / "sitecustomize.py").write_text(f"{fast}\n{LOUD}")
    return folder


@pytest.mark.skipif(not hasattr(os, "fork"), reason="what libraries print is relayed where there is fork")
@pytest.mark.parametrize(
    "words",
    [
        ("verify", "fails.edgeq"),
        ("verify", "hostile.edgeq", "--json"),
        ("bench", "hostile.edgeq", "--duration", "0.1", "-v"),
        ("report", "hostile.edgeq", "--bench", "-o", "report.html", "--force"),
        ("quantize", "hostile.onnx", "--data", "x.npz", "--no-timing", "-o", "int8.onnx", "--force"),
        ("bundle/edgeq_run.py", "verify"),
        ("edgeq.compat.optimizer", "--input", "hostile.onnx", "--output", "fused.onnx"),
        ("edgeq.compat.calibrate", "--model_path", "hostile.onnx", "--dataset_path", "x.npz"),
    ],
    ids=" ".join,
)
def test_no_name_moves_the_cursor(place: Path, words: tuple[str, ...]) -> None:
    program = [sys.executable, "-P", "-m"] if words[0].startswith("edgeq.") else process.COMMAND
    command = [sys.executable, *words] if words[0].endswith(".py") else [*program, *words]
    environment = process.environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(place / "loud"), environment["PYTHONPATH"]])
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, timeout=300, check=False)
    for text in (done.stdout.decode(), done.stderr.decode()):
        assert not [line for line in text.splitlines() if line.startswith("all variants passed")], text
        assert escape_lines(text.replace("\r", "\\r")) == text
    assert b"| " in done.stderr
    if "--json" in words:
        assert json.loads(done.stdout)["passed"]


def test_no_function_of_edgeq_prints_names_in_the_process_of_its_caller(place: Path) -> None:
    """edgeq's functions print nothing in a caller's process. No filter runs there, but their sessions log nothing."""
    calls = """
import edgeq
edgeq.quantize("hostile.onnx", output="called.onnx", data="x.npz")
edgeq.verify("hostile.edgeq")
edgeq.compare("hostile.onnx", "called.onnx", data="x.npz")
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", calls],
        cwd=place,
        env=process.environment(),
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
