"""Test that sympy, half of onnx_ir's import time, is not imported until a command needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx

from tests.graphs import proto

REPOSITORY = Path(__file__).parents[1]
PATHS = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "targets" / "runtime")))


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": PATHS}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True)


def test_commands_load_nothing_of_it(tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    onnx.save(proto("net (float[N,3] x) => (float[N,3] y) { y = Relu(x) }"), model)
    loaded = python("-X", "importtime", "-m", "edgeq", "inspect", str(model)).stderr
    assert "onnx_ir._core" in loaded
    assert "sympy.core" not in loaded


def test_sizes_with_names_can_be_computed_with() -> None:
    code = "from edgeq.util.deferred import defer_imports; defer_imports(); import sys, onnx_ir as ir\n"
    code += "assert 'sympy.core' not in sys.modules\n"
    code += "print(ir.SymbolicDim('N') + 1, ir.Shape(['N', 2])); import sympy.printing; print(sympy.Integer(2) + 3)"
    assert python("-c", code).stdout.splitlines() == ["N + 1 [N,2]", "5"]
