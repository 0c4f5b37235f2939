"""Test the bill of materials of a bundle."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from edgeq.bundle.sbom import make_sbom
from edgeq.bundle.spec import BundleSpec

METADATA = {
    "source_model_sha256": "a" * 64,
    "calibration_sha256": "b" * 64,
    "license": "Apache-2.0 WITH LLVM-exception",
}


def bill(spec: BundleSpec, **metadata: str) -> dict[str, Any]:
    changed = dataclasses.replace(spec, metadata=metadata)
    return make_sbom(changed, {"models/model/plain/model.onnx": "c" * 64}, {"edgeq": "1"})


def test_it_lists_models_and_tools(good: Path) -> None:
    found = json.loads((good / "sbom.cdx.json").read_bytes())
    assert {tool["name"] for tool in found["metadata"]["tools"]["components"]} >= {"edgeq", "numpy", "onnx"}
    listed = {component["name"]: component["hashes"][0]["content"] for component in found["components"]}
    models = {p.relative_to(good).as_posix(): p for p in good.rglob("*") if p.suffix in (".onnx", ".bin")}
    assert listed == {name: hashlib.sha256(p.read_bytes()).hexdigest() for name, p in models.items()}
    assert "timestamp" not in found["metadata"]
    assert "serialNumber" not in found


def test_sources_and_licence(spec: BundleSpec) -> None:
    found = bill(spec, **METADATA)
    assert [component["name"] for component in found["components"][:2]] == ["source model", "calibration samples"]
    assert found["components"][0]["licenses"] == [{"expression": METADATA["license"]}]
    assert found["dependencies"][1]["dependsOn"] == ["source model", "calibration samples"]
    named = bill(spec, license="ask (us) first")
    assert named["metadata"]["component"]["licenses"] == [{"license": {"name": "ask (us) first"}}]


def test_it_is_valid(spec: BundleSpec, good: Path) -> None:
    validation = pytest.importorskip("cyclonedx.validation.json", reason="cyclonedx-python-lib is not installed")
    from cyclonedx.schema import SchemaVersion

    check = validation.JsonStrictValidator(SchemaVersion.V1_6)
    for text in (json.dumps(bill(spec, **METADATA)), (good / "sbom.cdx.json").read_text()):
        assert check.validate_str(text) is None
