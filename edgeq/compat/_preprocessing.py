"""Choose the preprocessing of a data set that an older command names without one."""

from __future__ import annotations

from pathlib import Path

from edgeq.data.open_source import find_files, find_sidecar


def images_or_arrays(dataset: str, for_images: str) -> str | None:
    """Return the preprocessing `for_images` if a data set consists of images and has no preprocessing file. Otherwise
    return None: then the file applies, or arrays stay as they are.
    """
    if find_sidecar([Path(dataset)]) is not None:  # the preprocessing file may choose among several kinds of files
        return None
    # The kind of the files decides, because arrays of the older tools were already prepared.
    file_set = find_files(dataset)
    return for_images if file_set.kind == "images" and find_sidecar([file_set.root]) is None else None
