"""Plan a bundle: list all its files by path, before the first byte is written.

The plan also chooses the place of each model file, so that files that several variants share are stored once. The
model-package format has two ways to share:

- Variants with the same model and the same weights refer to one shared asset that contains both.
- Variants with different models but the same external data files keep their own models. They refer to one shared asset
  of weights through `session.model_external_initializers_file_folder_path`.

Files that only one variant uses stay in its directory.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.bundle.manifest import (
    BUNDLE_SCHEMA,
    MANIFEST,
    SCHEMA_VERSION,
    check_file_names,
    directory_hash,
    is_plain_name,
)
from edgeq_device.bundle.options import provider_problem, session_problem
from edgeq_device.bundle.package import FLOAT, MAIN
from edgeq_device.bundle.variants import COMPONENT, EXTERNAL_FOLDER, SliceTolerance
from edgeq_device.engines.catalog import engine_of_file, installed_versions, plugin_of
from edgeq_device.errors import DeviceError
from edgeq_device.measure.basis import EVERYTHING, Basis
from edgeq_device.prepare.arrays import plain_entry, write_npz

from edgeq import __version__
from edgeq.errors import BundleError, CalibrationError, DataError, UsageError
from edgeq.model.load import model_files
from edgeq.util.marker import sha256
from edgeq.util.registry import shipped

Arrays = Mapping[str, np.ndarray[Any, Any]]

DEVICES = ("cpu", "gpu", "npu")
CALIBRATION_FILES = ("calibration.cache", "calibration.flatbuffers", "calibration.json")
_RESERVED_NAMES = frozenset(
    {
        "__main__.py",
        "calibration.zip",
        "edgeq_device",
        "edgeq_device.zip",
        "edgeq_run.py",
        "files",
        "manifest.json",
        "model.sig",
        "models",
        "sbom.cdx.json",
        "selftest.npz",
        "shared_assets",
    }
)
_RESERVED_METADATA = ("bundle_schema", "tools", "files")


@dataclass(frozen=True)
class SelfTestCase:
    """Store the inputs of one sample and the expected outputs by name, as `session.run` takes and returns them."""

    inputs: Arrays
    outputs: Arrays


@dataclass(frozen=True)
class SelfTestSpec:
    """Describe the self-test of a variant.

    Attributes:
        tolerance: allowed absolute difference of each output, for all cases.
        slices: allowed differences for parts of an output that have another unit than the rest.
        basis: what the tolerances apply to.
    """

    cases: tuple[SelfTestCase, ...] = ()
    tolerance: Mapping[str, float] = field(default_factory=dict)
    slices: Mapping[str, tuple[SliceTolerance, ...]] = field(default_factory=dict)
    basis: Basis = EVERYTHING

    def check(self, where: str) -> None:
        """Check that every output has a tolerance.

        Raises:
            UsageError: an output has no tolerance, or a tolerance names an output that no case has.
        """
        outputs = {name for case in self.cases for name in case.outputs}
        if outputs != set(self.tolerance):
            odd = sorted(outputs ^ set(self.tolerance))
            raise UsageError(f"{where}: self-test outputs and tolerances differ in {odd[0]!r}")
        if not set(self.slices) <= outputs:
            raise UsageError(f"{where}: the self-test has no output {sorted(set(self.slices) - outputs)[0]!r}")


@dataclass(frozen=True)
class VariantSpec:
    """Describe one way to run the model.

    Attributes:
        name: a name made of letters, digits and `._+-`.
        model: an ONNX file, with its external data files next to it, or a file in the format of an engine.
        ep: execution provider.
        device: "cpu", "gpu" or "npu".
        session_options: session options that the artifact needs for correct results.
        provider_options: options of `ep`. Like session options, they are limited to those in
            edgeq_device/bundle/options.json. edgeq itself adds the options that refer to files of the bundle.
        info: content of executor_info.edgeq. The runner reads `architecture` ("x86_64", "arm64", "any"),
            `required_features` (a list), `rank` (an integer; the highest rank that fits wins), `min_onnxruntime`
            ("1.17"), `optimization` ("none", "basic", "extended", "all") and `threads` (the best number, which is used
            if the caller sets none). All other keys are for people.
        files: other files that the target needs (such as a file for its own runtime), by relative path. In the bundle
            they are under files/NAME. The runner on the device ignores them.
        calibration: folder with three calibration tables that contain the variant's ranges. In the bundle, the tables
            of the first variant are in calibration/, and tables that differ from these are in calibration/NAME/. `info`
            names the folder that the variant uses.
    """

    name: str
    model: Path
    ep: str = "CPUExecutionProvider"
    device: str = "cpu"
    session_options: Mapping[str, str] = field(default_factory=dict)
    provider_options: Mapping[str, str] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    selftest: SelfTestSpec = SelfTestSpec()
    files: Mapping[str, Path] = field(default_factory=dict)
    calibration: Path | None = None

    def __post_init__(self) -> None:
        where = f"variant {self.name}"
        if not is_plain_name(self.name):
            raise UsageError(f"{self.name!r} cannot name a variant", "Use letters, digits and . _ + -")
        if self.device not in DEVICES:
            raise UsageError(f"{where}: device is {self.device!r}", f"It can be {', '.join(DEVICES)}")
        for key in ("selftest", "selftest_slices", "selftest_basis", "device", "calibration"):
            if key in self.info:
                raise UsageError(f"{where}: info has {key!r}, which the bundle writes itself")
        for options in (self.session_options, self.provider_options):
            if not all(isinstance(value, str) for value in options.values()):
                raise UsageError(f"{where}: session and provider options must be strings")
        self._check_options(where)
        self.selftest.check(where)

    def _check_options(self, where: str) -> None:
        """Refuse options that the bundle's reader would refuse."""
        if not is_plain_name(self.ep):
            raise UsageError(f"{where}: {self.ep!r} cannot name an execution provider")
        problems = {}
        for key, value in self.session_options.items():
            problems[f"session option {key!a}"] = session_problem(key, value, references=False)
        for key, value in self.provider_options.items():
            problems[f"provider option {key!a}"] = provider_problem(self.ep, key, value)
        for option, problem in problems.items():
            if problem:
                raise UsageError(f"{where}: {option} {problem}", "See docs/bundle.md for what a bundle may set")


@dataclass(frozen=True)
class BundleSpec:
    """Describe a whole bundle.

    Attributes:
        name: the model's name for display.
        variants: variants in order of preference. ONNX Runtime takes the first one whose execution provider fits, so
            the first variant of each architecture must be correct on every machine of that architecture. edgeq's runner
            chooses by features and rank.
        metadata: content of additional_metadata.edgeq, such as the sha256 of the source model and of the calibration
            set.
        float_model: model of the component "float32", so that one call of `bench` can run the quantized and the float
            model.
        extras: further files by plain name, such as the report and its data. They are next to the manifest, which also
            lists their hashes.
    """

    name: str
    variants: tuple[VariantSpec, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    float_model: Path | None = None
    extras: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.variants:
            raise UsageError(f"bundle {self.name} has no variant", "Name at least one target")
        folded = [variant.name.casefold() for variant in self.variants]
        for name in folded:
            if folded.count(name) > 1:
                raise UsageError(f"bundle {self.name}: two variants are named {name!r}")
        reserved = sorted(set(_RESERVED_METADATA).intersection(self.metadata))
        if reserved:
            raise UsageError(f"bundle {self.name}: metadata has {reserved[0]!r}, which the bundle writes itself")
        for name in self.extras:
            if not is_plain_name(name) or name.casefold() in _RESERVED_NAMES:
                raise UsageError(f"bundle {self.name}: {name!r} cannot name an extra file", "Choose a plain, free name")


SBOM = "sbom.cdx.json"
_SPDX = re.compile(r"[A-Za-z0-9.+-]+( (AND|OR|WITH) [A-Za-z0-9.+-]+)*")


def make_sbom(spec: BundleSpec, models: Mapping[str, str], tools: Mapping[str, str]) -> dict[str, Any]:
    """Return the bill of materials: the sources of the bundle and the tools that built it.

    Args:
        models: sha256 in hex of each model and external data file, by path inside the bundle.
        tools: version of each package.
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
        _component("machine-learning-model" if _is_model(path) else "data", path, digest)
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


def _is_model(path: str) -> bool:
    return path.endswith(".onnx") or engine_of_file(path) is not None


def _component(kind: str, name: str, digest: str) -> dict[str, Any]:
    return {"type": kind, "bom-ref": name, "name": name, "hashes": [{"alg": "SHA-256", "content": digest}]}


MODEL_FILE = "model.onnx"


@dataclass(frozen=True)
class StoredFile:
    """Describe a file and the sha256 of its bytes."""

    path: Path
    sha256: str


@dataclass(frozen=True)
class ModelFiles:
    """List a model file and its external data files. The data files are keyed by their paths relative to the model."""

    model: StoredFile
    external: Mapping[str, StoredFile]

    @property
    def name(self) -> str:
        """Return the model's file name in a bundle."""
        own = engine_of_file(self.model.path.name)
        return MODEL_FILE if own is None else f"model{own.suffix}"

    @property
    def together(self) -> dict[str, StoredFile]:
        """Return the model and its external data, keyed by their paths in the model's folder of a bundle."""
        return {self.name: self.model, **self.external}


@dataclass(frozen=True)
class VariantPlaces:
    """Describe where the files of one variant are.

    Attributes:
        model_file: the value of `executor_info.ort.model_file`.
        weights: reference to the asset with the external data; "" if the data are next to the model.
        own: files in the variant's directory, by name.
    """

    model_file: str
    weights: str
    own: Mapping[str, StoredFile]


def share(variants: Mapping[str, ModelFiles]) -> tuple[dict[str, VariantPlaces], dict[str, StoredFile]]:
    """Decide where to place the files of `variants`.

    Returns:
        The placement of each variant, and the files of the shared assets, keyed by their paths inside the package.
    """
    placements: dict[str, VariantPlaces] = {}
    assets: dict[str, StoredFile] = {}
    for names, weights in _groups(variants):
        models: dict[str, list[str]] = {}
        file = variants[names[0]].name
        for name in names:
            models.setdefault(variants[name].model.sha256, []).append(name)
        if len(names) == 1:
            placements[names[0]] = VariantPlaces(file, "", variants[names[0]].together)
        elif len(models) == 1:
            reference = _add_asset(variants[names[0]].together, assets)
            placements.update({name: VariantPlaces(f"{reference}/{file}", "", {}) for name in names})
        else:
            folder = _add_asset(weights, assets)
            for same in models.values():
                model = {MODEL_FILE: variants[same[0]].model}
                if len(same) == 1:
                    placements[same[0]] = VariantPlaces(MODEL_FILE, folder, model)
                else:
                    reference = _add_asset(model, assets)
                    placements.update({name: VariantPlaces(f"{reference}/{MODEL_FILE}", folder, {}) for name in same})
    return {name: placements[name] for name in variants}, assets


def _groups(variants: Mapping[str, ModelFiles]) -> Sequence[tuple[list[str], dict[str, StoredFile]]]:
    # A model reads all its external data from one folder, so the asset of a group contains the external data of all its
    # members. A variant joins the first group that has a file in common with it, unless the two also have different
    # files of the same name. A variant without external data joins a group that has the same model.
    groups: list[tuple[list[str], dict[str, StoredFile]]] = []
    for name, files in variants.items():
        for names, union in groups:
            both = files.external.keys() & union.keys()
            same_model = not files.external and not union and files.model.sha256 == variants[names[0]].model.sha256
            if same_model or (both and all(files.external[key].sha256 == union[key].sha256 for key in both)):
                names.append(name)
                union.update(files.external)
                break
        else:
            groups.append(([name], dict(files.external)))
    return groups


def _add_asset(files: Mapping[str, StoredFile], assets: dict[str, StoredFile]) -> str:
    digest = directory_hash({name: file.sha256 for name, file in files.items()})
    assets.update({f"shared_assets/sha256-{digest}/{name}": file for name, file in files.items()})
    return f"sha256:{digest}"


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
        components[FLOAT] = _float_variants(spec, spec.float_model)
    files: dict[str, Content] = dict(_runner_files())
    tables = _table_places(spec.variants)
    if tables:
        files[TABLES] = _zip({name: file for place, at in tables.items() for name, file in _table_files(place, at)})
    files.update(spec.extras)
    digests: dict[str, str] = {}
    placements, assets = share(
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
            for name, stored in placement.own.items():
                files[f"{directory}/{name}"], digests[f"{directory}/{name}"] = stored.path, stored.sha256
            info = {**variant.info, "device": variant.device, "selftest": _selftest(variant, vectors)}
            if variant.calibration is not None:
                info["calibration"] = tables[variant.calibration]
            if slices := variant.selftest.slices:
                info["selftest_slices"] = {name: [asdict(part) for part in slices[name]] for name in sorted(slices)}
            if variant.selftest.basis != EVERYTHING:
                info["selftest_basis"] = asdict(variant.selftest.basis)
            if not placement.own:  # an empty directory would not be written, so give the variant's directory a file
                files[f"{directory}/edgeq.json"] = _json(info, f"variant {variant.name}: info")
            bodies[variant.name] = _variant_body(variant, placement, info if placement.own else "edgeq.json")
            files.update({f"{FILES}/{variant.name}/{name}": path for name, path in sorted(variant.files.items())})
        files[f"models/{component}/{COMPONENT}"] = _json({"component_name": component, "variants": bodies}, component)
    if vectors:
        groups = dict(vectors.values())
        files[VECTORS] = _npz({f"{group}/{name}": array for group in groups for name, array in groups[group].items()})
    files[SBOM] = _json(make_sbom(spec, digests, tool_versions()), "bill of materials")
    try:
        check_file_names([MANIFEST, *files], f"bundle {spec.name}")
    except DeviceError as error:
        raise BundleError(error.problem, "Rename the model's external data files") from error
    files[MANIFEST] = _manifest(spec, list(components), files, digests)
    return dict(sorted(files.items()))


def _float_variants(spec: BundleSpec, model: Path) -> tuple[VariantSpec, ...]:
    # Make one float variant for each provider and device of the int8 variants, so that comparisons use the same
    # hardware. Variants of a plug-in are compared with onnxruntime's own kernels.
    places = list(dict.fromkeys((v.ep, v.device) for v in spec.variants if plugin_of(v.ep) is None))
    suffix = len(places) > 1
    return tuple(
        VariantSpec(f"{FLOAT}-{device}" if suffix else FLOAT, model, ep, device, info={"scheme": "float32"})
        for ep, device in places
    )


def _read_model(path: Path) -> ModelFiles:
    first, *external = model_files(path)
    base = first.parent
    return ModelFiles(
        StoredFile(first, sha256(first)),
        {file.relative_to(base).as_posix(): StoredFile(file, sha256(file)) for file in sorted(external)},
    )


def _variant_body(variant: VariantSpec, placement: VariantPlaces, info: Mapping[str, Any] | str) -> dict[str, Any]:
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


def _selftest(variant: VariantSpec, vectors: dict[bytes, tuple[str, Arrays]]) -> dict[str, Any]:
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
            group, _ = vectors.setdefault(_npz(arrays), (f"{kind}-{count}", arrays))
            entry[kind] = f"{VECTORS}/{group}"
        cases.append(entry)
    tolerance = {name: float(value) for name, value in sorted(variant.selftest.tolerance.items())}
    return {"cases": cases, "tolerance": tolerance}


def _check_comparable(arrays: Arrays, where: str) -> None:
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise DataError(f"{where}: {name!r} is not finite", "Choose other samples for the self-test")
        if array.dtype.kind not in "biufU":
            raise DataError(f"{where}: {name!r} is {array.dtype}, which cannot be compared")


def _npz(arrays: Arrays) -> bytes:
    buffer = io.BytesIO()
    write_npz(buffer, arrays)
    return buffer.getvalue()


def _table_places(variants: tuple[VariantSpec, ...]) -> dict[Path, str]:
    """Return the directory in the bundle to which each folder of calibration tables goes."""
    places: dict[Path, str] = {}
    for variant in variants:
        if variant.calibration is not None:
            places.setdefault(variant.calibration, f"{CALIBRATION}/{variant.name}" if places else CALIBRATION)
    return places


def _table_files(folder: Path, directory: str) -> Iterator[tuple[str, Path]]:
    missing = [name for name in CALIBRATION_FILES if not (folder / name).is_file()]
    if missing:
        raise CalibrationError(f"{folder} has no {missing[0]}", "Write the calibration tables first")
    return ((f"{directory}/{name}", folder / name) for name in CALIBRATION_FILES)


def _runner_files() -> dict[str, Content]:
    """Return the runner's files: its code as one zip, and a program that checks the zip's hash before it imports the
    code.
    """
    runtime = shipped("targets") / "runtime"
    modules = sorted(p for p in (runtime / "edgeq_device").rglob("*") if p.suffix in (".py", ".json", ".mjs"))
    code = _zip({module.relative_to(runtime).as_posix(): module for module in modules})
    text = (runtime / "edgeq_run.py").read_bytes()
    program = text.replace(b'SHA256 = ""', b'SHA256 = "%s"' % hashlib.sha256(code).hexdigest().encode(), 1)
    # __main__.py is a copy of the program, so that Python can also run the folder or zip itself.
    return {"edgeq_run.py": program, "__main__.py": program, "edgeq_device.zip": code}


def _zip(files: Mapping[str, Path]) -> bytes:
    """Return a zip of small files. The same content always gives the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, path in files.items():
            archive.writestr(plain_entry(name), path.read_bytes())
    return buffer.getvalue()


def _manifest(
    spec: BundleSpec, components: list[str], files: Mapping[str, Content], digests: Mapping[str, str]
) -> bytes:
    records = {}
    for path, content in sorted(files.items()):
        if isinstance(content, bytes):
            records[path] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        else:
            records[path] = {"sha256": digests.get(path) or sha256(content), "size": content.stat().st_size}
    edgeq = {"bundle_schema": BUNDLE_SCHEMA, "tools": tool_versions(), **spec.metadata, "files": records}
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "package_name": spec.name,
        "layout": "portable",
        "components": {name: f"models/{name}" for name in components},
        "additional_metadata": {"edgeq": edgeq},
    }
    return _json(manifest, "metadata")


def tool_versions() -> dict[str, str]:
    """Return the versions of edgeq and the packages that it builds with."""
    return {"edgeq": __version__, **installed_versions(("numpy", "onnx", "onnxruntime", "onnxruntime-gpu"))}


def _json(value: Mapping[str, Any], where: str) -> bytes:
    try:
        return (json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode("utf-8")
    except (TypeError, ValueError) as error:
        raise BundleError(f"{where} cannot be written as JSON ({error})") from error
