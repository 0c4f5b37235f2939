"""The device side runs on Python 3.9 with only numpy and onnxruntime."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parents[2] / "targets" / "runtime"
SOURCES = [*sorted(RUNTIME.glob("edgeq_device/**/*.py")), RUNTIME / "edgeq_run.py"]
ALLOWED = set(sys.stdlib_module_names) | {"numpy", "onnxruntime", "edgeq_device"}
IMAGES = {"prepare.py": {"PIL"}}  # imported only when an image is read
# A standard module and arguments that are newer than Python 3.9.
TOO_NEW = {"tomllib"}
NEW_ARGUMENTS = {"slots", "kw_only", "match_args", "strict"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_source(source: Path) -> None:
    tree = ast.parse(source.read_text(encoding="utf-8"), feature_version=(3, 9))
    future = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            roots = {name.split(".")[0] for name in names} if getattr(node, "level", 0) == 0 else set()
            allowed = ALLOWED | IMAGES.get(source.name, set())
            assert roots <= allowed, f"line {node.lineno}: imports {roots - allowed}"
            assert not roots & TOO_NEW, f"line {node.lineno}: {roots & TOO_NEW} is newer than Python 3.9"
        elif isinstance(node, ast.Call):
            new = {keyword.arg for keyword in node.keywords} & NEW_ARGUMENTS
            assert not new, f"line {node.lineno}: argument {new} is newer than Python 3.9"
        elif isinstance(node, (ast.AnnAssign, ast.arg)):
            assert future or getattr(node, "annotation", None) is None, f"line {node.lineno}: evaluated annotation"
