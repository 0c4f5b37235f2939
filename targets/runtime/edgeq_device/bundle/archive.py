"""List and unpack a bundle that is a zip, and refuse a zip that would leave the folder or fill the disk."""

from __future__ import annotations

import errno
import shutil
import stat
import zipfile
import zlib
from pathlib import Path
from typing import Dict, Mapping

from edgeq_device.bundle.content import DISK_FULL, check_content, open_sink
from edgeq_device.bundle.manifest import FileRecord
from edgeq_device.bundle.names import check_file_names
from edgeq_device.errors import AGAIN, BundleError, OutputError
from edgeq_device.system.places import SET_TMPDIR

MAX_TOTAL = 1 << 40
# Deflate reaches 1032:1, but real bundles stay under 10:1. Small archives are not checked: zeros in a tiny model
# compress well.
MAX_RATIO = 200
SMALL = 64 * 1024 * 1024
_UNWRITABLE = (*DISK_FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)


def list_archive(archive: zipfile.ZipFile, context: str) -> Dict[str, zipfile.ZipInfo]:
    """Return the entry of every file in the zip, by name.

    Raises:
        BundleError: a name is absolute, leads out of the archive or occurs twice; an entry is a directory, is a link or
            is encrypted; or the archive would grow out of proportion.
    """
    entries: Dict[str, zipfile.ZipInfo] = {}
    # zipfile cuts a name at a null byte; the original name still contains it.
    check_file_names([info.orig_filename for info in archive.infolist()], context)
    for info in archive.infolist():
        mode = info.external_attr >> 16
        # Zips from Windows record no mode, and their entries are plain files.
        if mode and not stat.S_ISREG(mode) and stat.S_IFMT(mode):
            kind = "a link" if stat.S_ISLNK(mode) else "not a regular file"
            raise BundleError(f"{context}: {info.filename!r} is {kind}; a bundle contains only files", AGAIN)
        if info.flag_bits & 0x1:
            raise BundleError(f"{context}: {info.filename!r} is encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BundleError(f"{context}: {info.filename!r} is compressed by a method that a bundle does not use")
        entries[info.filename] = info
    # The sizes in the headers are only claims; compare them with the file that makes them.
    total = sum(info.file_size for info in entries.values())
    packed = Path(context).stat().st_size
    if total > MAX_TOTAL or (total > SMALL and total > MAX_RATIO * packed):
        raise BundleError(f"{context} would grow from {packed} to {total} bytes, out of all proportion", AGAIN)
    return entries


def extract_files(
    archive: zipfile.ZipFile, entries: Mapping[str, zipfile.ZipInfo], records: Mapping[str, FileRecord], to: Path
) -> None:
    """Write the declared files of `archive` to `to`, and hash them at the same time. Stop at the first file of a wrong
    size.

    Raises:
        BundleError: the archive is damaged, or does not match the manifest.
        OutputError: the disk of `to` is full, or `to` cannot be written.
    """
    context = str(archive.filename)
    total = sum(record.size for record in records.values())
    # Fail before the first file, because a full disk disturbs everything else on a board.
    if total > shutil.disk_usage(to).free:
        raise OutputError(f"{context}: unpacking takes {total} bytes, more than is free in {to.parent}", SET_TMPDIR)
    for name, record in sorted(records.items()):
        try:
            with archive.open(entries[name]) as stream, open_sink(to, name) as sink:
                check_content(stream, record, f"{context}: {name}", sink)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
            raise BundleError(f"{context}: {name} cannot be unpacked ({error})", AGAIN) from error
        except OSError as error:
            problem = f"{context}: {name} cannot be unpacked into {to} ({error.strerror})"
            if error.errno in _UNWRITABLE:
                raise OutputError(problem, SET_TMPDIR) from error
            raise BundleError(problem) from error
