"""Move the large tensors that several models have in common into files, so that a bundle contains each only once.

Models built for different targets from one source differ in their graphs and small tensors, but many of their weights
have the same bytes. Each tensor that several models have becomes an external data file, whose name is its shortened
sha256. Equal tensors get the same name, and the plan of the bundle (`edgeq.bundle.plan`) puts all of them into one
shared asset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import TensorProto, numpy_helper

from edgeq.model.files import model_files
from edgeq.model.load import load_model

# A separate file costs a line in the manifest and a header in a zip. For smaller tensors, this cost exceeds the
# savings.
_SMALLEST = 1024
_NAME_DIGITS = 32


def share_weights(models: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """Rewrite `models` so that a bundle can store their common large tensors once. Models without such tensors stay
    unchanged.

    Args:
        models: models by variant; several variants may name the same file.
        folder: a private folder for the rewritten models.

    Returns:
        The model to deploy for each variant.
    """
    files = sorted(set(models.values()))
    if len(files) < 2 or any(len(model_files(file)) > 1 for file in files):
        return dict(models)
    loaded = {file: load_model(file, external_data="all") for file in files}
    users: dict[str, int] = {}
    for model in loaded.values():
        for digest in {_hash_tensor(tensor) for tensor in _find_large(model)}:
            users[digest] = users.get(digest, 0) + 1
    placed: dict[Path, Path] = {}
    for number, (file, model) in enumerate(loaded.items()):
        common = {digest: tensor for tensor in _find_large(model) if users[digest := _hash_tensor(tensor)] > 1}
        placed[file] = file
        if common:
            placed[file] = folder / str(number) / "model.onnx"
            placed[file].parent.mkdir(parents=True)
            _write(model, common, placed[file])
    return {name: placed[file] for name, file in models.items()}


def _find_large(model: onnx.ModelProto) -> list[TensorProto]:
    return [t for t in model.graph.initializer if t.data_type != TensorProto.STRING and len(_read_raw(t)) >= _SMALLEST]


def _read_raw(tensor: TensorProto) -> bytes:
    """Return the tensor's bytes as external data stores them, in little-endian order."""
    return bytes(tensor.raw_data) if tensor.HasField("raw_data") else numpy_helper.to_array(tensor).tobytes()


def _hash_tensor(tensor: TensorProto) -> str:
    return hashlib.sha256(_read_raw(tensor)).hexdigest()


def _write(model: onnx.ModelProto, common: Mapping[str, TensorProto], path: Path) -> None:
    for digest, tensor in common.items():
        (path.parent / f"{digest[:_NAME_DIGITS]}.bin").write_bytes(_read_raw(tensor))
    for tensor in _find_large(model):
        digest = _hash_tensor(tensor)
        if digest in common:
            length = len(_read_raw(tensor))
            del tensor.external_data[:]
            for field in ("raw_data", "int32_data", "int64_data", "float_data", "double_data", "uint64_data"):
                tensor.ClearField(field)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", f"{digest[:_NAME_DIGITS]}.bin"), ("offset", "0"), ("length", str(length))):
                tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString(deterministic=True))
