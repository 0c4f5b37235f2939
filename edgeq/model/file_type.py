"""Recognise files that users mistake for ONNX models, to say what they are and what to do."""

from __future__ import annotations

from pathlib import Path

from edgeq.util.bundle_names import BUNDLES_GO, ZIP, is_named_bundle

# (offset, first bytes, file type, what to do)
_SIGNATURES = (
    (0, b"version https://git-lfs", "a Git LFS pointer, not the model itself", "Fetch the model with `git lfs pull`"),
    (0, ZIP, "a zip archive, such as a PyTorch checkpoint or a cut bundle", "Export the model with torch.onnx.export"),
    (0, b"\x80\x02", "a Python pickle, such as an old PyTorch checkpoint", "Export the model with torch.onnx.export"),
    (0, (b"\x80\x03", b"\x80\x04", b"\x80\x05"), "a Python pickle", "Export the model to ONNX where it was trained"),
    (0, b"\x89HDF", "an HDF5 file, such as a Keras model", "Convert it with tf2onnx"),
    (4, b"TFL3", "a TensorFlow Lite model", "Convert it with tf2onnx --tflite"),
    (4, b"ORTM", "a model in ONNX Runtime's own .ort format", "Give the .onnx file that it was made from"),
    (0, b"\x1f\x8b", "a gzip archive", "Unpack it first"),
    (0, b"\x93NUMPY", "a NumPy array", "Pass arrays as data (⟨data⟩), and give the ONNX model here"),
    (0, b"\x89PNG", "a PNG image", "Pass images as data (⟨data⟩), and give the ONNX model here"),
    (0, b"\xff\xd8\xff", "a JPEG image", "Pass images as data (⟨data⟩), and give the ONNX model here"),
)
_SNIFFED = 4096


def likely_cause(content: bytes, path: Path) -> tuple[str, str]:
    """Return (the problem, the solution) for bytes that do not parse as an ONNX model."""
    head = content[:_SNIFFED]
    if is_named_bundle(path):
        return "it has the suffix of a bundle", f"Give the .onnx file that it was made from; {BUNDLES_GO}"
    for offset, signature, file_type, fix in _SIGNATURES:
        if head.startswith(signature, offset):
            return f"it is {file_type}", fix
    if _is_text(head):
        return "it is a text file", "Give the .onnx file; if this was downloaded, it may be an error page"
    if path.suffix == ".onnx":
        return "it is damaged or truncated", "Export or download it again, and compare its size or checksum"
    return "it is not an ONNX protobuf", "Export the model to ONNX first"


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        # The bytes that were read may end in the middle of a character.
        if error.start < len(head) - 3 or len(head) < _SNIFFED:
            return False
        text = head[: error.start].decode("utf-8")
    return all(c.isprintable() or c in "\r\n\t\f" for c in text)
