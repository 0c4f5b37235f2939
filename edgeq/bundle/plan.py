"""Plan a bundle: list all its files by path, before the first byte is written."""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.bundle.manifest import BUNDLE_SCHEMA, MANIFEST, SCHEMA_VERSION
from edgeq_device.bundle.names import check_file_names
from edgeq_device.bundle.package import FLOAT, MAIN
from edgeq_device.bundle.variants import COMPONENT
from edgeq_device.engines.catalog import find_plugin
from edgeq_device.engines.variant import EXTERNAL_FOLDER
from edgeq_device.errors import DeviceError
from edgeq_device.measure.basis import EVERYTHING
from edgeq_device.prepare.npz import make_entry, write_npz

from edgeq.bundle.sbom import SBOM, make_sbom, read_tool_versions
from edgeq.bundle.sharing import ModelFiles, StoredFile, VariantPlaces, share_files
from edgeq.bundle.spec import Arrays, BundleSpec, VariantSpec
from edgeq.errors import BundleError, CalibrationError, DataError
from edgeq.model.files import model_files
from edgeq.util.folders import shipped
from edgeq.util.marker import sha256

CALIBRATION_FILES = ("calibration.cache", "calibration.flatbuffers", "calibration.json")


Content = bytes | Path
TABLES = "calibration.zip"
"""The zip that contains the calibration tables of all variants."""
CALIBRATION = "calibration"
"""The folder for the first variant's tables in the zip `TABLES`. Variants with other ranges have subfolders of this
folder.
"""
VECTORS = "selftest.npz"
"""The file with the arrays of all self-tests, in groups. An array in group `inputs-0` is `inputs-0/NAME`."""
FILES = "files"
"""The folder for files other than models that accompany variants."""


def plan_bundle(spec: BundleSpec) -> dict[str, Content]:
    """Return the content of every file in the bundle, keyed by path. A value is either bytes or the path of a file to
    copy.

    The paths are sorted. They include the manifest, which has all hashes.

    Raises:
        ModelError: a model or its external data cannot be read.
        CalibrationError: a calibration table is missing.
        BundleError: a name or value cannot be written, such as a value that JSON does not have.
    """
    components = {MAIN: spec.variants}
    if spec.float_model is not None:
        components[FLOAT] = _build_float_variants(spec, spec.float_model)
    heads = (variant.info.get("head") for variant in spec.variants)
    files: dict[str, Content] = dict(build_runner({head["family"] for head in heads if head}))
    tables = _place_tables(spec.variants)
    if tables:
        files[TABLES] = _pack_zip(
            {name: file for place, at in tables.items() for name, file in _list_table_files(place, at)}
        )
    files.update(spec.extras)
    digests: dict[str, str] = {}
    # Place the models of all components together, because they may share weights.
    placements, assets = share_files(
        {
            f"{component}/{variant.name}": _read_model(variant.model)
            for component, variants in components.items()
            for variant in variants
        }
    )
    vectors: dict[bytes, tuple[str, Arrays]] = {}
    for path, stored in assets.items():
        files[path], digests[path] = stored.path, stored.sha256
    for component, variants in components.items():
        bodies: dict[str, Any] = {}
        for variant in variants:
            placement = placements[f"{component}/{variant.name}"]
            directory = f"models/{component}/{variant.name}"
            for name, stored in placement.files.items():
                files[f"{directory}/{name}"], digests[f"{directory}/{name}"] = stored.path, stored.sha256
            info = {**variant.info, "device": variant.device, "selftest": _build_selftest(variant, vectors)}
            if variant.calibration is not None:
                info["calibration"] = tables[variant.calibration]
            if slices := variant.selftest.slices:
                info["selftest_slices"] = {name: [asdict(part) for part in slices[name]] for name in sorted(slices)}
            if variant.selftest.basis != EVERYTHING:
                info["selftest_basis"] = basis = asdict(variant.selftest.basis)
                # Readers of earlier releases know no second axis, and hardly any output has one.
                if not basis["padding"]["keys"]:
                    del basis["padding"]["keys"]
            if not placement.files:  # an empty directory would not be written, so give the variant's directory a file
                files[f"{directory}/edgeq.json"] = _format_json(info, f"variant {variant.name}: info")
            bodies[variant.name] = _build_variant(variant, placement, info if placement.files else "edgeq.json")
            files.update({f"{FILES}/{variant.name}/{name}": path for name, path in sorted(variant.files.items())})
        files[f"models/{component}/{COMPONENT}"] = _format_json(
            {"component_name": component, "variants": bodies}, component
        )
    # Variants share vectors, so each distinct set is stored once.
    if vectors:
        groups = dict(vectors.values())
        files[VECTORS] = _pack_npz(
            {f"{group}/{name}": array for group in groups for name, array in groups[group].items()}
        )
    # After all models, because it lists their hashes.
    files[SBOM] = _format_json(make_sbom(spec, digests, read_tool_versions()), "bill of materials")
    try:
        # An exporter chose the names of external data.
        check_file_names([MANIFEST, *files], f"bundle {spec.name}")
    except DeviceError as error:
        raise BundleError(error.problem, "Rename the model's external data files") from error
    # The manifest comes last, because it has the hashes of all other files.
    files[MANIFEST] = _build_manifest(spec, list(components), files, digests)
    return dict(sorted(files.items()))


def _build_float_variants(spec: BundleSpec, model: Path) -> tuple[VariantSpec, ...]:
    # Make one float variant for each provider and device of the int8 variants, so that comparisons use the same
    # hardware. Variants of a plug-in are compared with onnxruntime's own kernels.
    places = list(dict.fromkeys((v.ep, v.device) for v in spec.variants if find_plugin(v.ep) is None))
    suffix = len(places) > 1
    return tuple(
        VariantSpec(f"{FLOAT}-{device}" if suffix else FLOAT, model, ep, device, info={"scheme": "float32"})
        for ep, device in places
    )


def _read_model(path: Path) -> ModelFiles:
    model, *external = model_files(path)
    base = model.parent
    return ModelFiles(
        StoredFile(model, sha256(model)),
        {file.relative_to(base).as_posix(): StoredFile(file, sha256(file)) for file in sorted(external)},
    )


def _build_variant(variant: VariantSpec, placement: VariantPlaces, info: Mapping[str, Any] | str) -> dict[str, Any]:
    session_options = dict(sorted(variant.session_options.items()))
    if placement.weights:
        session_options[EXTERNAL_FOLDER] = placement.weights
    return {
        # "device" is left out. ONNX Runtime 1.31.1 compares a device only with providers that were added through its
        # newer device interface. If a provider was added by its name, ONNX Runtime would skip variants with a device.
        "ep": variant.ep,
        "executor_info": {
            "ort": {
                "model_file": placement.model_file,
                "session_options": session_options,
                "provider_options": dict(sorted(variant.provider_options.items())),
            },
            "edgeq": info,
        },
    }


def _build_selftest(variant: VariantSpec, vectors: dict[bytes, tuple[str, Arrays]]) -> dict[str, Any]:
    """Return the self-test entry of one variant. Add its arrays to `vectors` unless they are already in it.

    Args:
        vectors: name and arrays of each group, keyed by the arrays' bytes.
    """
    cases = []
    for case in variant.selftest.cases:
        entry = {}
        for kind, arrays in (("inputs", case.inputs), ("outputs", case.outputs)):
            _check_comparable(arrays, f"variant {variant.name}: self-test {kind}")
            count = sum(group.startswith(f"{kind}-") for group, _ in vectors.values())
            # The bytes of an .npz depend only on its arrays, so they can serve as the key.
            group, _ = vectors.setdefault(_pack_npz(arrays), (f"{kind}-{count}", arrays))
            entry[kind] = f"{VECTORS}/{group}"
        cases.append(entry)
    tolerance = {name: float(value) for name, value in sorted(variant.selftest.tolerance.items())}
    return {"cases": cases, "tolerance": tolerance}


def _check_comparable(arrays: Arrays, context: str) -> None:
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise DataError(f"{context}: {name!r} is not finite", "Choose other samples for the self-test")
        if array.dtype.kind not in "biufU":
            raise DataError(f"{context}: {name!r} is {array.dtype}, which cannot be compared")


def _pack_npz(arrays: Arrays) -> bytes:
    buffer = io.BytesIO()
    write_npz(buffer, arrays)
    return buffer.getvalue()


def _place_tables(variants: tuple[VariantSpec, ...]) -> dict[Path, str]:
    """Return the directory in the bundle to which each folder of calibration tables goes."""
    places: dict[Path, str] = {}
    for variant in variants:
        if variant.calibration is not None:
            places.setdefault(variant.calibration, f"{CALIBRATION}/{variant.name}" if places else CALIBRATION)
    return places


def _list_table_files(folder: Path, directory: str) -> Iterator[tuple[str, Path]]:
    missing = [name for name in CALIBRATION_FILES if not (folder / name).is_file()]
    if missing:
        raise CalibrationError(f"{folder} has no {missing[0]}", "Write the calibration tables first")
    return ((f"{directory}/{name}", folder / name) for name in CALIBRATION_FILES)


def build_runner(families: Collection[str]) -> dict[str, Content]:
    """Return the runner's files: its code as one zip, and a program that checks the zip's hash before it imports the
    code.

    Args:
        families: names of the families of heads that the bundle has. The code of all others would be half of the zip.
    """
    runtime = shipped("targets") / "runtime"
    # Sorted, because the order of a folder's entries differs between file systems.
    modules = sorted(p for p in (runtime / "edgeq_device").rglob("*") if p.suffix in (".py", ".json", ".mjs"))
    folder = runtime / "edgeq_device" / "answers" / "families"
    needed = {folder / "__init__.py", *_find_modules(folder, {name.replace("-", "_") for name in families})}
    modules = [module for module in modules if module.parent != folder or module in needed]
    code = _pack_zip({module.relative_to(runtime).as_posix(): module for module in modules})
    text = (runtime / "edgeq_run.py").read_bytes()
    program = text.replace(b'SHA256 = ""', b'SHA256 = "%s"' % hashlib.sha256(code).hexdigest().encode(), 1)
    # __main__.py is a copy of the program, so that Python can also run the folder or zip itself.
    return {"edgeq_run.py": program, "__main__.py": program, "edgeq_device.zip": code}


_FAMILY_IMPORT = re.compile(r"^from edgeq_device\.answers\.families\.(\w+) import", re.MULTILINE)


def _find_modules(folder: Path, names: set[str]) -> set[Path]:
    """Return the files of families, and of the families that they import."""
    modules: set[Path] = set()
    pending = set(names)
    while pending:
        module = folder / f"{pending.pop()}.py"
        if module not in modules:
            modules.add(module)
            pending |= set(_FAMILY_IMPORT.findall(module.read_text("utf-8")))
    return modules


def _pack_zip(files: Mapping[str, Path]) -> bytes:
    """Return a zip of small files. The same content always gives the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, path in files.items():
            archive.writestr(make_entry(name), path.read_bytes())
    return buffer.getvalue()


def _build_manifest(
    spec: BundleSpec, components: list[str], files: Mapping[str, Content], digests: Mapping[str, str]
) -> bytes:
    records = {}
    for path, content in sorted(files.items()):
        if isinstance(content, bytes):
            records[path] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        else:
            records[path] = {"sha256": digests.get(path) or sha256(content), "size": content.stat().st_size}
    edgeq = {"bundle_schema": BUNDLE_SCHEMA, "tools": read_tool_versions(), **spec.metadata, "files": records}
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "package_name": spec.name,
        "layout": "portable",
        "components": {name: f"models/{name}" for name in components},
        "additional_metadata": {"edgeq": edgeq},
    }
    return _format_json(manifest, "metadata")


def _format_json(value: Mapping[str, Any], context: str) -> bytes:
    try:
        return (json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode("utf-8")
    except (TypeError, ValueError) as error:
        raise BundleError(f"{context} cannot be written as JSON ({error})") from error
