"""Write a bundle as a directory or a zip: completely or not at all, and with the same bytes every time."""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from edgeq_device.bundle.manifest import MANIFEST, FileRecord, parse_manifest
from edgeq_device.bundle.package import open_bundle
from edgeq_device.errors import DeviceError
from edgeq_device.prepare.npz import make_entry
from edgeq_device.system.files import open_file, read_file
from edgeq_device.system.plainjson import MAX_BYTES, parse_json
from edgeq_device.trust.signature import (
    SIGNATURE,
    parse_signature,
)

from edgeq.bundle.plan import Content, plan_bundle
from edgeq.bundle.spec import BundleSpec
from edgeq.bundle.verify import open_checked
from edgeq.errors import EdgeqError, OutputError
from edgeq.util.bundle_names import is_named_bundle
from edgeq.util.device_errors import device_errors
from edgeq.util.marker import as_listed, is_plain
from edgeq.util.outputs import output_directory, output_file
from edgeq.util.ownership import Judge, Ownership, printable_path

if TYPE_CHECKING:
    pass

# Python writes compiled files next to the runner's modules when it imports them.
_COMPILED = re.compile(r"(?P<folder>(?:.*/)?)__pycache__/(?P<module>[^/.]+)\.[^/]+\.pyc")


def _find_judge(folder: Path) -> Judge | None:
    records = _read_records(folder / MANIFEST)
    # Without a manifest, nothing proves that edgeq wrote the folder.
    if records is None:
        return None
    digests = {name: record.sha256 for name, record in records.items()}

    def judge(name: str) -> bool:
        """Return whether the manifest lists `name` with the file's hash, or lists the Python module from which `name`
        was compiled.
        """
        compiled = _COMPILED.fullmatch(name)
        if compiled is not None:
            return f"{compiled['folder']}{compiled['module']}.py" in digests
        return (
            name == MANIFEST or as_listed(folder, digests, name) or (name == SIGNATURE and is_signature(folder / name))
        )

    return judge


def is_signature(path: Path) -> bool:
    """Return whether the file is a signature, made by `edgeq sign` or another tool. edgeq may remove a signature,
    because it can be made again.
    """
    if not is_plain(path) or path.stat().st_size > MAX_BYTES:
        return False
    try:
        parse_signature(read_file(path), str(path))
    except DeviceError:
        return False
    return True


def _read_records(manifest: Path) -> dict[str, FileRecord] | None:
    if not is_plain(manifest) or manifest.stat().st_size > MAX_BYTES:
        return None
    try:
        return dict(parse_manifest(parse_json(read_file(manifest), str(manifest)), str(manifest)).files)
    except (DeviceError, RecursionError):
        return None


def check_archive(path: Path) -> None:
    """Refuse an existing path that is not a bundle in one file.

    Raises:
        OutputError: the path is not such a bundle.
    """
    if not path.exists() and not path.is_symlink():
        return
    try:
        with open_checked(path):
            is_bundle = is_plain(path)
    except EdgeqError:
        is_bundle = False
    if not is_bundle:
        raise OutputError(
            f"{printable_path(path)} is not a bundle that edgeq wrote", "Move it, or choose another output"
        )


BUNDLE = Ownership("bundle", _find_judge)
"""Recognise a bundle by edgeq's manifest. Every file must have the hash that the manifest lists."""


# From here on, an entry needs the zip64 format.
_LARGE = 1 << 31


def write_bundle(spec: BundleSpec, destination: Path, *, force: bool = False) -> None:
    """Write `spec` to `destination` as an ONNX Runtime model package that a device can check, run and time by itself.

    If `destination` ends in ".edgeq", the package becomes a deterministic zip. Before the result replaces
    `destination`, the device's own reader opens it with all its checks.

    Raises:
        OutputError: `destination` exists (without `force`), contains files that edgeq did not write, or cannot be
            written.
        ModelError, DataError, CalibrationError, BundleError: something cannot go into a bundle.
    """
    files = plan_bundle(spec)
    if is_named_bundle(destination):
        with output_file(destination, force=force) as draft:
            write_archive(files, draft)
            # What the device's reader refuses must not get the name of a bundle.
            with device_errors(), open_bundle(draft):
                pass
    else:
        with output_directory(destination, force=force, check=BUNDLE.check) as folder:
            _write_directory(files, folder)
            with device_errors(), open_bundle(folder):
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
    """Write `files` as a zip. The same content always gives the same bytes.

    Args:
        files: contents, keyed by path inside the bundle.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            entry = make_entry(name)
            if isinstance(content, bytes):
                archive.writestr(entry, content)
            else:
                # zipfile must know the size in advance, to leave room for it in the header.
                entry.file_size = content.stat().st_size
                with (
                    open_file(content) as source,
                    archive.open(entry, "w", force_zip64=entry.file_size >= _LARGE) as sink,
                ):
                    shutil.copyfileobj(source, sink, 1 << 20)
