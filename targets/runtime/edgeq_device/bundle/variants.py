"""Read the variants of a component. Every path in them is resolved inside the bundle, and must exist."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple

from edgeq_device.bundle.manifest import (
    FileRecord,
    check_keys,
    read_strings,
    read_texts,
    require_object,
    resolve_reference,
)
from edgeq_device.bundle.names import check_file_name, is_plain_name
from edgeq_device.engines.catalog import engine_of_file
from edgeq_device.engines.options import (
    check_table_name,
    read_model_options,
    read_provider_options,
    read_session_options,
)
from edgeq_device.engines.variant import Case, SliceTolerance, Variant
from edgeq_device.errors import BundleError
from edgeq_device.measure.basis import EVERYTHING, Axis, Basis, Padding
from edgeq_device.system.files import read_file
from edgeq_device.system.plainjson import MAX_BYTES, parse_json

COMPONENT = "component.json"
_COMPONENT_KEYS = frozenset({"component_name", "variants", "additional_metadata"})
_VARIANT_KEYS = frozenset(
    {"variant_directory", "ep", "device", "compatibility_string", "executor_info", "additional_metadata"}
)
_ORT_KEYS = frozenset({"model_file", "session_options", "provider_options"})
_DEVICES = ("cpu", "gpu", "npu")
_VERSIONS = ("min_onnxruntime", "min_compute_capability", "min_tensorrt", "below_tensorrt")
_MOST_SLICES = 256  # maximum in one output
# No model has such sizes; an untrusted entry must not cost more.
_MOST_AXES, _MOST_INDICES = 64, 1 << 31
# Few digits, because Python refuses to read thousands of them.
_VERSION = re.compile(r"(\d{1,6}(\.\d{1,6}){0,4})?", re.ASCII)


@dataclass(frozen=True)
class _Files:
    """Find the files of a bundle. Messages begin with `context`."""

    root: Path
    records: Mapping[str, FileRecord]
    context: str

    def find_file(self, name: str) -> Path:
        """Return the path of the file `name`."""
        if name not in self.records:
            raise BundleError(f"{self.context}: {name!r} is not in the bundle")
        return self.root / name

    def find_vectors(self, name: str) -> Path:
        """Return the path of arrays, which are an .npz file or a group of an .npz file."""
        file, _, group = name.rpartition("/")
        if file in self.records and file.endswith(".npz") and group:
            return self.root / name
        return self.find_file(name)

    def find_place(self, name: str, kind: str) -> Path:
        """Return the path of the file `name`, or of the folder `name` if some of the files are in it."""
        if (
            name not in self.records
            if kind == "file"
            else not any(file.startswith(name + "/") for file in self.records)
        ):
            raise BundleError(f"{self.context}: {name!r} is not in the bundle as a {kind}")
        return self.root / name

    def read_json(self, name: str) -> Dict[str, Any]:
        """Return the JSON object in a file."""
        path = self.find_file(name)
        if self.records[name].size > MAX_BYTES:
            raise BundleError(f"{self.context}: {name} is larger than {MAX_BYTES} bytes")
        return parse_json(read_file(path), self.context)


def load_variants(
    component: str, place: str, root: Path, files: Mapping[str, FileRecord], context: str
) -> Tuple[Variant, ...]:
    """Read `place`/component.json under `root`. Return its variants in the order of the file, which is their order of
    preference.

    Raises:
        BundleError: a key, a value or a path is wrong.
    """
    file = f"{place}/{COMPONENT}"
    context = f"{context}: {file}"
    values = _Files(root, files, context).read_json(file)
    check_keys(values, _COMPONENT_KEYS, context)
    variants = require_object(values.get("variants"), f"{context}: variants")
    if not variants:
        raise BundleError(f"{context}: there is no variant")
    for name in variants:
        if not is_plain_name(name):
            raise BundleError(f"{context}: variant name {name[:100]!r} is not a plain name")
    return tuple(
        _parse_variant(component, place, name, body, _Files(root, files, f"{context}: variant {name}"))
        for name, body in variants.items()
    )


def _parse_variant(component: str, place: str, name: str, values: object, files: _Files) -> Variant:
    context = files.context
    body = require_object(values, context)
    check_keys(body, _VARIANT_KEYS, context)
    folder, ep = body.get("variant_directory", name), body.get("ep")
    if not isinstance(folder, str):
        raise BundleError(f"{context}: variant_directory is not a string")
    if not isinstance(ep, str) or not is_plain_name(ep):
        raise BundleError(f"{context}: ep does not name an execution provider")
    if "device" in body and body["device"] not in _DEVICES:
        raise BundleError(f"{context}: device is not one of {', '.join(_DEVICES)}")
    executors = require_object(body.get("executor_info"), f"{context}: executor_info")
    edgeq = executors.get("edgeq")
    if not isinstance(edgeq, (dict, str)):
        raise BundleError(f"{context}: executor_info.edgeq is neither an object nor a file name")
    ort = require_object(executors.get("ort", {}), f"{context}: executor_info.ort")
    check_keys(ort, _ORT_KEYS, f"{context}: executor_info.ort")
    model_file = ort.get("model_file")
    if model_file is not None and not isinstance(model_file, str):
        raise BundleError(f"{context}: model_file is not a string")
    session_options = read_texts(ort.get("session_options", {}), f"{context}: session_options")
    provider_options = read_texts(ort.get("provider_options", {}), f"{context}: provider_options")
    directory = f"{place}/{check_file_name(folder, context)}"
    if not any(name.startswith(directory + "/") for name in files.records):
        raise BundleError(f"{context}: its directory {directory} does not exist")
    # The format permits the object itself, or the name of a file that contains it.
    info = files.read_json(resolve_reference(edgeq, directory, context)) if isinstance(edgeq, str) else dict(edgeq)
    model = files.find_file(resolve_reference(model_file, directory, context)) if model_file is not None else None

    def resolve(reference: str, kind: str) -> str:
        """Return, as text, the path of the bundle's file that an option names."""
        return str(files.find_place(resolve_reference(reference, directory, context), kind))

    rank = info.get("rank", 0)
    # In Python, True is an int.
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise BundleError(f"{context}: rank is not a whole number")
    architecture = info.get("architecture", "any")
    if not isinstance(architecture, str) or not is_plain_name(architecture):
        raise BundleError(f'{context}: architecture is not a name such as "arm64"')
    features = tuple(read_strings(info, "required_features", context))
    if not all(map(is_plain_name, features)):
        raise BundleError(f'{context}: required_features are not names such as "avx2"')
    for key in _VERSIONS:
        if not isinstance(info.get(key, ""), str) or not _VERSION.fullmatch(info.get(key, "")):
            raise BundleError(f'{context}: {key} is not a version such as "1.17"')
    cases, tolerance = _parse_selftest(info.get("selftest", {}), files)
    return Variant(
        name=name,
        component=component,
        ep=ep,
        model=model,
        session_options={
            # The bundle's own options come last, because they override the model's.
            **(read_model_options(model, context) if model is not None and engine_of_file(model.name) is None else {}),
            **read_session_options(session_options, context, resolve),
        },
        provider_options=read_provider_options(ep, provider_options, context, resolve),
        architecture=architecture,
        required_features=features,
        rank=rank,
        min_onnxruntime=info.get("min_onnxruntime", ""),
        cases=cases,
        tolerance=tolerance,
        slices=_parse_slices(info.get("selftest_slices", {}), tolerance, context),
        basis=_parse_basis(info.get("selftest_basis"), tolerance, context),
        info=info,
        table=_find_table(info, files),
    )


def _find_table(info: Mapping[str, Any], files: _Files) -> Optional[Path]:
    """Return the path of this variant's calibration table in the bundle, or None if it has none."""
    named = info.get("table_file")
    if named is None:
        return None
    table = info.get("table")
    if not isinstance(named, str) or not isinstance(table, str) or not is_plain_name(table):
        raise BundleError(f"{files.context}: table and table_file must name a file each")
    check_table_name(table, files.context)
    return files.find_file(named)


def _parse_selftest(values: object, files: _Files) -> Tuple[Tuple[Case, ...], Dict[str, float]]:
    context = f"{files.context}: selftest"
    files = replace(files, context=context)
    if not isinstance(values, dict) or not set(values) <= {"cases", "tolerance"}:
        raise BundleError(f"{context} is not an object with cases and tolerance")
    cases, tolerance = values.get("cases", []), values.get("tolerance", {})
    if not isinstance(cases, list) or not isinstance(tolerance, dict):
        raise BundleError(f"{context} is not an object with cases and tolerance")
    parsed = []
    for case in cases:
        # Sorted, the inputs come before the outputs, as in `Case`.
        named = [case[key] for key in sorted(case)] if isinstance(case, dict) else []
        if not named or set(case) != {"inputs", "outputs"} or not all(isinstance(file, str) for file in named):
            raise BundleError(f"{context}: a case names its inputs and its outputs, each a file or a group of one")
        parsed.append(Case(*map(files.find_vectors, named)))
    of = f"{context}: the tolerance of"
    return tuple(parsed), {name: _parse_tolerance(value, f"{of} {name!r}") for name, value in tolerance.items()}


def _parse_slices(
    values: object, tolerance: Mapping[str, float], context: str
) -> Dict[str, Tuple[SliceTolerance, ...]]:
    """Read the tolerances of slices. They are stored outside `selftest`, because earlier readers refuse unknown keys
    there.
    """
    context = f"{context}: selftest_slices"
    if not isinstance(values, dict) or not set(values) <= set(tolerance):
        raise BundleError(f"{context} is not an object of the self-test's outputs")
    slices_by_output = {}
    for name, slices in values.items():
        if not isinstance(slices, list) or len(slices) > _MOST_SLICES:
            raise BundleError(f"{context}: {name!r} is not a list of at most {_MOST_SLICES} slices")
        slices_by_output[name] = tuple(_parse_slice(entry, f"{context}: {name!r}") for entry in slices)
    return slices_by_output


def _parse_slice(value: object, context: str) -> SliceTolerance:
    if not isinstance(value, dict) or set(value) != {"axis", "first", "last", "tolerance"}:
        raise BundleError(f"{context}: a slice has an axis, a first and a last index and a tolerance")
    axis, first_index, last_index = (value[key] for key in ("axis", "first", "last"))
    integral = all(isinstance(index, int) and not isinstance(index, bool) for index in (axis, first_index, last_index))
    if not integral or not 0 <= axis < _MOST_AXES or not 0 <= first_index <= last_index < _MOST_INDICES:
        raise BundleError(f"{context}: a slice is not from a first to a last index of an axis")
    return SliceTolerance(
        axis, first_index, last_index, _parse_tolerance(value["tolerance"], f"{context}: the tolerance of a slice")
    )


def _parse_basis(values: object, tolerance: Mapping[str, float], context: str) -> Basis:
    """Read what the tolerances apply to. Without an entry, they apply to every element, in place."""
    if values is None:
        return EVERYTHING
    context = f"{context}: selftest_basis"
    body = require_object(values, context)
    check_keys(body, frozenset({"limits", "ranked", "padding"}), context)
    limits, padding = require_object(body.get("limits", {}), context), require_object(body.get("padding", {}), context)
    check_keys(padding, frozenset({"masks", "axes", "keys"}), context)
    masks = require_object(padding.get("masks", {}), context)
    ranked, axes, keys = (
        _parse_axes(part, context)
        for part in (body.get("ranked", {}), padding.get("axes", {}), padding.get("keys", {}))
    )
    if not {*limits, *ranked, *axes, *keys} <= set(tolerance):
        raise BundleError(f"{context} names an output that the self-test does not have")
    if not all(isinstance(hidden, bool) for hidden in masks.values()):
        raise BundleError(f"{context}: masks are not true or false")
    if not {axis.origin for axis in (*axes.values(), *keys.values())} <= set(masks):
        raise BundleError(f"{context}: positions have no mask")
    return Basis(
        {name: _parse_tolerance(v, f"{context}: the limit of {name!r}") for name, v in limits.items()},
        ranked,
        Padding(masks, axes, keys),
    )


def _parse_axes(values: object, context: str) -> Dict[str, Axis]:
    axes = {}
    for name, value in require_object(values, context).items():
        if not isinstance(value, dict) or set(value) != {"place", "origin"}:
            raise BundleError(f"{context}: the axis of {name!r} has a place and an origin")
        place, origin = value["place"], value["origin"]
        if not isinstance(place, int) or isinstance(place, bool) or not 0 <= place < _MOST_AXES:
            raise BundleError(f"{context}: the place of {name!r} is not an axis")
        if not isinstance(origin, str):
            raise BundleError(f"{context}: the origin of {name!r} is not a string")
        axes[name] = Axis(place, origin)
    return axes


def _parse_tolerance(value: object, context: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise BundleError(f"{context} is not a number of 0 or more")
    return float(value)
