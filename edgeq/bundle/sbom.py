"""Describe a bundle's bill of materials: the sources of its files and the tools that built it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgeq_device.engines.catalog import engine_of_file, read_installed_versions

from edgeq import __version__
from edgeq.bundle.spec import BundleSpec

SBOM = "sbom.cdx.json"
_SPDX = re.compile(r"[A-Za-z0-9.+-]+( (AND|OR|WITH) [A-Za-z0-9.+-]+)*")


def make_sbom(spec: BundleSpec, models: Mapping[str, str], tools: Mapping[str, str]) -> dict[str, Any]:
    """Return the bill of materials: the sources of the bundle and the tools that built it.

    Args:
        models: sha256 in hex of each model and external data file, by path inside the bundle.
        tools: version of each package.
    """
    sources = [
        _describe_component(kind, name, spec.metadata[key])
        for kind, name, key in (
            ("machine-learning-model", "source model", "source_model_sha256"),
            ("data", "calibration samples", "calibration_sha256"),
        )
        if spec.metadata.get(key)
    ]
    built = [
        _describe_component("machine-learning-model" if _is_model(path) else "data", path, digest)
        for path, digest in sorted(models.items())
    ]
    licence = spec.metadata.get("license")
    bundle: dict[str, Any] = {"type": "machine-learning-model", "bom-ref": "bundle", "name": spec.name}
    if licence:
        # The licence is that of the source model, so the samples do not get it.
        for component in (bundle, *sources[:1]):
            component["licenses"] = [
                # A text that is no SPDX expression would make the document invalid there.
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
            "component": bundle,
        },
        "components": [*sources, *built],
        "dependencies": [
            {"ref": "bundle", "dependsOn": [component["bom-ref"] for component in built]},
            *({"ref": component["bom-ref"], "dependsOn": made_of} for component in built),
        ],
    }


def _is_model(path: str) -> bool:
    return path.endswith(".onnx") or engine_of_file(path) is not None


def _describe_component(kind: str, name: str, digest: str) -> dict[str, Any]:
    return {"type": kind, "bom-ref": name, "name": name, "hashes": [{"alg": "SHA-256", "content": digest}]}


def read_tool_versions() -> dict[str, str]:
    """Return the versions of edgeq and the packages that it builds with."""
    return {"edgeq": __version__, **read_installed_versions(("numpy", "onnx", "onnxruntime", "onnxruntime-gpu"))}
