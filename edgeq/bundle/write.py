"""Writing a bundle: a directory, or the same as a zip; whole or not at all, the same bytes every time."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

from edgeq_device.arrays import plain_entry

from edgeq.atomic import output_directory, output_file
from edgeq.bundle.owned import BUNDLE
from edgeq.bundle.plan import Content, plan_bundle
from edgeq.bundle.read import opened
from edgeq.bundle.spec import BundleSpec, SelfTestCase, VariantSpec
from edgeq.model.identify import BUNDLE as SUFFIX
from edgeq.model.identify import is_named_bundle

__all__ = ["SUFFIX", "BundleSpec", "SelfTestCase", "VariantSpec", "write_bundle"]

_LARGE = 1 << 31


def write_bundle(spec: BundleSpec, destination: Path, *, force: bool = False) -> None:
    """Write `spec` to `destination`: an ONNX Runtime model package that a device can check, run and time by itself.

    A `destination` that ends in ".edgeq" is a deterministic zip of that directory. What was written is opened by the
    device's own reader, with all its checks, before it takes its place.

    Raises:
        OutputError: `destination` exists (without `force`), holds what edgeq did not write, or cannot be written.
        ModelError, DataError, CalibrationError, BundleError: something that cannot go into a bundle.
    """
    files = plan_bundle(spec)
    if is_named_bundle(destination):
        with output_file(destination, force=force) as draft:
            write_archive(files, draft)
            with opened(draft):
                pass
    else:
        with output_directory(destination, force=force, check=BUNDLE.check) as folder:
            _write_directory(files, folder)
            with opened(folder):
                pass


def _write_directory(files: Mapping[str, Content], folder: Path) -> None:
    for name, content in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            shutil.copyfile(content, target)


def write_archive(files: Mapping[str, Content], path: Path) -> None:
    """Write `files` (path inside the bundle → content) as a zip: the same content gives the same bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            entry = plain_entry(name)
            if isinstance(content, bytes):
                archive.writestr(entry, content)
            else:
                entry.file_size = content.stat().st_size
                with (
                    content.open("rb") as source,
                    archive.open(entry, "w", force_zip64=entry.file_size >= _LARGE) as sink,
                ):
                    shutil.copyfileobj(source, sink, 1 << 20)
