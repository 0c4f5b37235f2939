"""Write arrays into an .npz whose bytes depend on nothing but names and values."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import IO, Any, Mapping, Optional, Union

import numpy as np

from edgeq_device.errors import DataError


def write_npz(
    target: Union[Path, IO[bytes]], arrays: Mapping[str, "np.ndarray[Any, Any]"], level: Optional[int] = None
) -> None:
    """Write a compressed .npz whose bytes depend only on names and values: members are sorted and have a fixed date.

    Args:
        level: compression level, 0 to 9; None selects zlib's default.

    Raises:
        DataError: an array contains Python objects, which would need pickle.
    """
    with zipfile.ZipFile(target, "w") as archive:
        for name in sorted(arrays):
            buffer = io.BytesIO()
            try:
                # In C order, because Fortran order gives other bytes for equal values.
                np.lib.format.write_array(buffer, np.asarray(arrays[name], order="C"), allow_pickle=False)
            except ValueError as error:
                raise DataError(
                    f"{name!r} contains Python objects, which an .npz without pickle cannot store"
                ) from error
            archive.writestr(make_entry(f"{name}.npy"), buffer.getvalue(), compresslevel=level)


def make_entry(name: str) -> zipfile.ZipInfo:
    """Return a zip entry that is compressed and depends only on its name. Its date is the earliest that a zip can
    store, because a real date would make two equal archives differ.
    """
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    # Unix, on every system: zipfile would write the system that it runs on.
    entry.create_system = 3
    entry.external_attr = 0o100644 << 16
    return entry
