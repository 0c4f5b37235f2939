"""The software bill of materials of a bundle: CycloneDX 1.6, JSON. The same bundle has the same one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgeq.bundle.spec import BundleSpec

SBOM = "sbom.cdx.json"
_SPDX = re.compile(r"[A-Za-z0-9.+-]+( (AND|OR|WITH) [A-Za-z0-9.+-]+)*")


def make_sbom(spec: BundleSpec, models: Mapping[str, str], tools: Mapping[str, str]) -> dict[str, Any]:
    """What the bundle was made of and with.

    Args:
        models: path inside the bundle → sha256 in hex, of models and their external data.
        tools: package → version.
    """
    sources = [
        _component(kind, name, spec.metadata[key])
        for kind, name, key in (
            ("machine-learning-model", "source model", "source_model_sha256"),
            ("data", "calibration samples", "calibration_sha256"),
        )
        if spec.metadata.get(key)
    ]
    built = [
        _component("machine-learning-model" if path.endswith(".onnx") else "data", path, digest)
        for path, digest in sorted(models.items())
    ]
    licence = spec.metadata.get("license")
    whole: dict[str, Any] = {"type": "machine-learning-model", "bom-ref": "bundle", "name": spec.name}
    if licence:
        for component in (whole, *sources[:1]):
            component["licenses"] = [
                {"expression": licence} if _SPDX.fullmatch(licence) else {"license": {"name": licence}}
            ]
    made_of = [component["bom-ref"] for component in sources]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {
                "components": [{"type": "library", "name": n, "version": v} for n, v in sorted(tools.items())],
            },
            "component": whole,
        },
        "components": [*sources, *built],
        "dependencies": [
            {"ref": "bundle", "dependsOn": [component["bom-ref"] for component in built]},
            *({"ref": component["bom-ref"], "dependsOn": made_of} for component in built),
        ],
    }


def _component(kind: str, name: str, digest: str) -> dict[str, Any]:
    return {"type": kind, "bom-ref": name, "name": name, "hashes": [{"alg": "SHA-256", "content": digest}]}
