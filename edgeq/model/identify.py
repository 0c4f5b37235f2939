"""What a file that is not an ONNX model most likely is, for an error message with a fix."""

from __future__ import annotations

import zipfile
from pathlib import Path

from edgeq_device.manifest import MANIFEST

from edgeq.errors import OutputError

_ZIP = b"PK\x03\x04"
# (offset, first bytes, what it is, what to do)
_SIGNATURES = (
    (0, b"version https://git-lfs", "a Git LFS pointer, not the model itself", "Fetch the model with `git lfs pull`"),
    (0, _ZIP, "a zip archive, such as a PyTorch checkpoint or a cut bundle", "Export the model with torch.onnx.export"),
    (0, b"\x80\x02", "a Python pickle, such as an old PyTorch checkpoint", "Export the model with torch.onnx.export"),
    (0, b"\x80\x03", "a Python pickle", "Export the model to ONNX where it was trained"),
    (0, b"\x80\x04", "a Python pickle", "Export the model to ONNX where it was trained"),
    (0, b"\x80\x05", "a Python pickle", "Export the model to ONNX where it was trained"),
    (0, b"\x89HDF", "an HDF5 file, such as a Keras model", "Convert it with tf2onnx"),
    (4, b"TFL3", "a TensorFlow Lite model", "Convert it with tf2onnx --tflite"),
    (4, b"ORTM", "a model in ONNX Runtime's own .ort format", "Give the .onnx file that it was made from"),
    (0, b"\x1f\x8b", "a gzip archive", "Unpack it first"),
    (0, b"\x93NUMPY", "a NumPy array", "Pass arrays as data (--data), and give the ONNX model here"),
    (0, b"\x89PNG", "a PNG image", "Pass images as data (--data), and give the ONNX model here"),
    (0, b"\xff\xd8\xff", "a JPEG image", "Pass images as data (--data), and give the ONNX model here"),
)
_SNIFFED = 4096
BUNDLE = ".edgeq"
BUNDLES_GO = "`edgeq verify`, `eval`, `bench` and `compare` take bundles"


def check_model_name(output: Path) -> None:
    """Refuse a place for a model that is named as a bundle: what reads it would take it for one.

    Raises:
        OutputError: says so.
    """
    if is_named_bundle(output):
        fix = "Name it .onnx; `edgeq package` writes bundles"
        raise OutputError(f"{output} is named as a bundle, but a model goes there", fix)


def check_bundle_name(output: Path) -> None:
    """Refuse a place for a bundle that is named as a model.

    Raises:
        OutputError: says so.
    """
    if output.suffix.lower() == ".onnx":
        fix = f"Name a directory, or a file that ends in {BUNDLE}; `edgeq quantize` writes a model alone"
        raise OutputError(f"{output} is named as a model, but a bundle goes there", fix)


def is_named_bundle(path: Path) -> bool:
    """Whether `path` has the suffix of a bundle in one file, in either case."""
    return path.suffix.lower() == BUNDLE


def is_archived_bundle(path: Path) -> bool:
    """Whether the file at `path` is a bundle in one file, whatever its name is.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        if stream.read(len(_ZIP)) != _ZIP:
            return False
        try:
            with zipfile.ZipFile(stream) as archive:
                return MANIFEST in archive.namelist()
        except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError):
            return False


def likely_cause(content: bytes, path: Path) -> tuple[str, str]:
    """(what is wrong, what to do) for bytes that do not parse as an ONNX model."""
    head = content[:_SNIFFED]
    if is_named_bundle(path):
        return "it is named as a bundle", f"Give the .onnx file that it was made from; {BUNDLES_GO}"
    for offset, signature, what, fix in _SIGNATURES:
        if head[offset : offset + len(signature)] == signature:
            return f"it is {what}", fix
    if _is_text(head):
        return "it is a text file", "Give the .onnx file; if this was downloaded, it may be an error page"
    if path.suffix == ".onnx":
        return "it is damaged or truncated", "Export or download it again, and compare its size or checksum"
    return "it is not an ONNX protobuf", "Export the model to ONNX first"


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        # The sniffed part may end in the middle of a character.
        if error.start < len(head) - 3 or len(head) < _SNIFFED:
            return False
        text = head[: error.start].decode("utf-8")
    return all(c.isprintable() or c in "\r\n\t\f" for c in text)
