"""Whether a bundle's models take their weights from files of the bundle and from nowhere else.

onnxruntime 1.23 reads external data from any path that a model names, and takes some names for addresses in memory, so
every model of a bundle is judged before onnxruntime sees it.
"""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath
from typing import Mapping, Sequence, Set, Tuple

from edgeq_device.dtypes import ELEMENT_BITS
from edgeq_device.engines import plugin_of
from edgeq_device.errors import AGAIN, BundleError
from edgeq_device.manifest import FileRecord
from edgeq_device.names import check_file_name
from edgeq_device.onnxfile import ExternalTensor, read_onnx
from edgeq_device.variants import EXTERNAL_FOLDER, Variant

SUFFIX = ".onnx"
_KEYS = frozenset({"location", "offset", "length", "checksum"})
# By what the marker of onnxruntime for "this is an address" begins with.
_ADDRESS = "_ORT_MEM"


def check_models(variants: Sequence[Variant], root: Path, files: Mapping[str, FileRecord], where: str) -> None:
    """Check the model of each variant of the bundle whose files (`files`: as in its manifest) lie under `root`.

    Raises:
        BundleError: a model that is no ONNX file or holds compiled code, or external data that are not wholly inside
            one of the bundle's files, of the size that the tensor's shape and type need.
    """
    checked: Set[Tuple[str, str, bool]] = set()
    for variant in variants:
        if variant.model is None:
            continue
        model = variant.model.relative_to(root).as_posix()
        named = variant.session_options.get(EXTERNAL_FOLDER)
        folder = Path(named).relative_to(root).as_posix() if named is not None else str(PurePosixPath(model).parent)
        engine = plugin_of(variant.ep)
        compiled = engine is not None and engine.compiled
        if (model, folder, compiled) not in checked:
            _check_model(model, folder, root, files, f"{where}: {model}", compiled)
            checked.add((model, folder, compiled))


def _check_model(
    model: str, folder: str, root: Path, files: Mapping[str, FileRecord], where: str, compiled: bool
) -> None:
    if not model.endswith(SUFFIX):
        raise BundleError(f"{where} is not named as an ONNX file ({SUFFIX}), and onnxruntime goes by the name")
    beside = PurePosixPath(folder) / PurePosixPath(model).name
    if str(beside) != model and str(beside) in files:
        raise BundleError(f"{where} and {beside}, among its external data, would be one file where they meet", AGAIN)
    found = read_onnx(root / model, where)
    if found.has_context and not (compiled and not found.context_outside):
        raise BundleError(f"{where} holds code compiled for one device (EPContext); a bundle may not", AGAIN)
    for tensor in found.external:
        _check_tensor(tensor, folder, files, f"{where}: external tensor {tensor.name!r}")


def _check_tensor(tensor: ExternalTensor, folder: str, files: Mapping[str, FileRecord], where: str) -> None:
    unknown = sorted(set(tensor.entries) - _KEYS)
    if unknown:
        raise BundleError(f"{where} has {unknown[0][:60]!r} in its external data, which means nothing here", AGAIN)
    location = tensor.entries.get("location", "")
    if _ADDRESS in location.upper():
        raise BundleError(f"{where} has the location {location[:60]!r}, an address in memory", AGAIN)
    file = f"{folder}/{check_file_name(location, where)}"
    if file not in files:
        raise BundleError(f"{where} needs {location!r}, which is not in the bundle as {file!r}", AGAIN)
    if tensor.data_type not in ELEMENT_BITS:
        raise BundleError(f"{where} has the data type {tensor.data_type}, which cannot be external", AGAIN)
    needed = (math.prod(tensor.dims) * ELEMENT_BITS[tensor.data_type] + 7) // 8
    offset = _number(tensor.entries.get("offset", "0"), "offset", where)
    length = _number(tensor.entries.get("length", str(needed)), "length", where)
    if length != needed:
        raise BundleError(f"{where} has {length} bytes where its shape and type need {needed}", AGAIN)
    if offset + needed > files[file].size:
        raise BundleError(
            f"{where} needs bytes {offset} to {offset + needed} of {location!r}, which has {files[file].size}", AGAIN
        )


def _number(text: str, field: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise BundleError(f"{where} has the {field} {text[:40]!r}", AGAIN)
    return int(text)
