"""Read ONNX Runtime's model package by the rules of the format alone, without any knowledge of edgeq.

This reader shares no code with what it checks. `read_package` returns what a consumer would find. FormatError names the
rule.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

TOP = {
    "schema_version",
    "package_name",
    "package_version",
    "description",
    "layout",
    "components",
    "shared_assets",
    "additional_metadata",
}
BODY = {"variant_directory", "ep", "device", "compatibility_string", "executor_info", "additional_metadata"}
OUTPUT_OPTIONS = {
    "session.enable_profiling",
    "session.optimized_model_filepath",
    "session.debug_layout_transformation",
    "session.collect_node_memory_stats_to_file",
}
PATH_OPTIONS = {"session.model_external_initializers_file_folder_path", "ep.context_file_path"}


class FormatError(Exception):
    pass


@dataclass(frozen=True)
class Found:
    ep: str
    model: Path
    session_options: dict[str, str]
    executors: dict[str, Any]


def rule(holds: object, text: str) -> None:
    if not holds:
        raise FormatError(text)


def read_package(root: Path) -> dict[str, dict[str, Found]]:
    """Return what a session needs, by component and variant, in the order of their declaration."""
    rule(root.is_dir(), "a package is a directory")
    manifest = load(root / "manifest.json")
    rule(set(manifest) <= TOP, f"unknown top-level keys {set(manifest) - TOP}")
    rule(isinstance(manifest.get("schema_version"), str), "schema_version is required, a string")
    rule(re.fullmatch(r"1\.\d+", manifest["schema_version"]), "schema_version is of major version 1")
    for key in ("package_name", "package_version", "description"):
        rule(isinstance(manifest.get(key, ""), str), f"{key} is a string")
    rule(manifest.get("layout", "portable") == "portable", "the layout that is shipped is portable")
    components = manifest.get("components")
    rule(isinstance(components, dict) and components, "components is required, with one entry at least")
    assets = check_assets(root)
    return {name: read_component(root, value, assets) for name, value in components.items()}


def load(path: Path) -> dict[str, Any]:
    rule(path.is_file(), f"{path.name} must exist")
    value = json.loads(path.read_bytes())
    rule(isinstance(value, dict), f"{path.name} is an object")
    return dict(value)


def read_component(root: Path, value: object, assets: set[str]) -> dict[str, Found]:
    if isinstance(value, str):
        place = confined(root, root, value)
        file = place / "component.json" if place.is_dir() else place
        body, folder = load(file), file.parent
    else:
        rule(isinstance(value, dict), "a component is a path or an object")
        body, folder = dict(value), root  # type: ignore[call-overload]
    rule(set(body) <= {"component_name", "variants", "additional_metadata"}, "unknown component keys")
    rule(isinstance(body.get("variants"), dict), "variants is required")
    return {name: read_variant(root, folder, name, variant, assets) for name, variant in body["variants"].items()}


def read_variant(root: Path, folder: Path, name: str, body: dict[str, Any], assets: set[str]) -> Found:
    rule(set(body) <= BODY, f"unknown variant keys {set(body) - BODY}")
    directory = confined(root, folder, body.get("variant_directory", name))
    rule(directory.is_dir(), f"the directory of variant {name} must exist")
    rule(body.get("device", "cpu") in {"cpu", "gpu", "npu"}, "device is cpu, gpu or npu")
    executors = {}
    for key, value in body.get("executor_info", {}).items():
        rule(isinstance(value, (str, dict)), "an executor's entry is a path or an object")
        executors[key] = load(confined(root, directory, value)) if isinstance(value, str) else value
    ort = executors["ort"]
    options: dict[str, str] = ort.get("session_options", {})
    for entries in (options, ort.get("provider_options", {})):
        rule(all(isinstance(text, str) for text in entries.values()), "options are strings")
    rule(not OUTPUT_OPTIONS & set(options), "a package sets no option that writes a file")
    for key in PATH_OPTIONS & set(options):
        place = resolve(root, directory, options[key], assets)
        rule(place.exists(), f"{key} must exist")
        options = {**options, key: str(place)}
    model = resolve(root, directory, ort["model_file"], assets)
    rule(model.is_file(), f"the model of variant {name} must exist")
    return Found(body["ep"], model, options, executors)


def resolve(root: Path, base: Path, reference: str, assets: set[str]) -> Path:
    match = re.fullmatch(r"sha256:([0-9a-f]{64})(?:/(.+))?", reference)
    if match is None:
        return confined(root, base, reference)
    rule(match[1] in assets, f"asset {match[1]} must be in the package")
    asset = root / "shared_assets" / f"sha256-{match[1]}"
    return confined(asset, asset, match[2]) if match[2] else asset


def confined(limit: Path, base: Path, text: str) -> Path:
    path = PurePosixPath(text)
    rule(not path.is_absolute() and ".." not in path.parts and "\\" not in text, f"{text} is a portable path")
    found = base / path
    rule(found.resolve().is_relative_to(limit.resolve()), f"{text} stays inside")
    return found


def check_assets(root: Path) -> set[str]:
    found = set()
    for folder in (root / "shared_assets").iterdir() if (root / "shared_assets").exists() else ():
        files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if not p.is_dir()}
        rule(not any(p.is_symlink() for p in files.values()), "an asset holds no links")
        lines = [f"{hashlib.sha256(files[name].read_bytes()).hexdigest()}  {name}\n" for name in sorted(files)]
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()
        rule(folder.name == f"sha256-{digest}", f"{folder.name} has the hash of its contents, {digest}")
        found.add(digest)
    return found
