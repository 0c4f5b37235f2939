"""Find the calibration samples and the validation samples of a data set by the names of sub-folders and files. Also
find the files that are in both.

The samples that give the ranges must not also prove the result, and training samples prove nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from edgeq.data.records import update_with_file

Role = Literal["calibration", "validation"]
"""Purpose for which samples are used."""

_NAMES: dict[Role, tuple[str, ...]] = {
    "calibration": ("calibration", "calib", "training", "train"),
    "validation": ("validation", "valid", "val", "testing", "test", "eval"),
}
# No letter may follow, so that "training_set" and "train2017" match, but "trains" does not.
_NAME = re.compile(rf"({'|'.join(name for names in _NAMES.values() for name in names)})(?![a-z])")
# Larger files are compared by their paths alone: hashing them would take longer than the check is worth.
_SMALL = 16 << 20


def choose_part(root: Path, files: Sequence[Path], role: Role | None) -> tuple[Path, tuple[Path, ...], str]:
    """Return the part of a folder's files that is for `role`, the folder of that part, and a note on the files left
    out.

    A folder has parts if the names of all its sub-folders and files begin with the name of a part, and if there is at
    least one calibration part and one validation part. If there are several validation parts (val and test), one of
    them is used.

    Args:
        role: purpose of the samples, or None to return all files.
    """
    kinds: dict[str, list[Path]] = defaultdict(list)
    if role is None:
        return root, tuple(files), ""
    for path in files:
        match = _NAME.match(path.relative_to(root).parts[0].lower())
        # One name that is no part means that the folder is not divided, so all its files are used.
        if match is None:
            return root, tuple(files), ""
        kinds[match[1]].append(path)
    # Two parts for the same purpose, such as val and test, say nothing about calibration.
    if not all(kinds.keys() & set(names) for names in _NAMES.values()):
        return root, tuple(files), ""
    # The order of `_NAMES` decides: a data set with val and test keeps test for the user's own last check.
    kind_names = [name for name in _NAMES[role] if name in kinds]
    part_files = tuple(path for path in files if path in set(kinds[kind_names[0]]))
    tops = sorted({path.relative_to(root).parts[0] for path in part_files})
    excluded = sorted({path.relative_to(root).parts[0] for path in files} - set(tops))
    # If the part is one folder, that folder is the root, so that class folders inside it are found.
    within = root / tops[0] if len(tops) == 1 and (root / tops[0]).is_dir() else root
    return within, part_files, f"{root}: {', '.join(tops)} for {role}, {', '.join(excluded)} left out"


def find_shared_files(candidates: Iterable[Path], references: Iterable[Path]) -> set[Path]:
    """Return the files of `candidates` that are also in `references`. Files are the same if they have the same path, or
    if they are small and have the same content.
    """
    reference_paths = {path.resolve() for path in references}
    sizes: dict[int, set[str]] = defaultdict(set)
    small = {path: path.stat().st_size for path in reference_paths}
    mine = {path: path.resolve() for path in set(candidates)}
    # Files of different sizes differ, so only files of equal size are hashed.
    candidate_sizes = {path.stat().st_size for path in mine.values()}
    for path, size in small.items():
        # All empty files are equal, but that says nothing about the samples.
        if 0 < size <= _SMALL and size in candidate_sizes:
            sizes[size].add(_hash_file(path))
    return {
        path
        for path, resolved in mine.items()
        if resolved in reference_paths
        or ((digests := sizes.get(resolved.stat().st_size)) and _hash_file(resolved) in digests)
    }


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    update_with_file(digest, path, "")
    return digest.hexdigest()
