"""Tell bundles from models, by the names of files and by their content."""

from __future__ import annotations

import zipfile
from pathlib import Path

from edgeq_device.bundle.manifest import MANIFEST
from edgeq_device.system.files import open_file

from edgeq.errors import OutputError

ZIP = b"PK\x03\x04"
"""First bytes of a zip archive that has at least one entry."""
BUNDLE = ".edgeq"
"""Suffix of a bundle in one file."""
BUNDLES_GO = "`edgeq verify`, `eval`, `bench` and `compare` take bundles"


def check_model_name(output: Path) -> None:
    """Refuse to write a model to a path with the suffix of a bundle. Programs would open the model as a bundle.

    Raises:
        OutputError: `output` has the suffix of a bundle.
    """
    if is_named_bundle(output):
        fix = "Name it .onnx; `edgeq package` writes bundles"
        raise OutputError(f"{output} has the suffix of a bundle, but this command writes a model", fix)


def check_bundle_name(output: Path) -> None:
    """Refuse to write a bundle to a path with the suffix of a model.

    Raises:
        OutputError: `output` has the suffix .onnx.
    """
    if output.suffix.lower() == ".onnx":
        fix = f"Name a directory, or a file that ends in {BUNDLE}; `edgeq quantize` writes a model alone"
        raise OutputError(f"{output} has the suffix of a model, but this command writes a bundle", fix)


def is_named_bundle(path: Path) -> bool:
    """Return whether `path` has the suffix of a single-file bundle, in upper or lower case."""
    return path.suffix.lower() == BUNDLE


def is_archived_bundle(path: Path) -> bool:
    """Return whether the file at `path` is a single-file bundle, whatever its name is.

    Raises:
        OSError: the file cannot be read.
    """
    with open_file(path) as stream:
        if stream.read(len(ZIP)) != ZIP:
            return False
        try:
            with zipfile.ZipFile(stream) as archive:
                return MANIFEST in archive.namelist()
        except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError):
            return False
