"""Check that a bundle's directory that was not copied is still the one that was hashed when a session is open."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Tuple

from edgeq_device.errors import AGAIN, BundleError

Identity = Tuple[int, ...]
# How many numbers of an identity stay when files come to lie in the folder.
_PLACE = 2


@dataclass(frozen=True)
class Hashed:
    """The files and folders of a bundle's directory as they were when the files were hashed.

    Attributes:
        root: the bundle's directory.
        found: the identity of each, by its path relative to `root`; "." is `root` itself.
    """

    root: Path
    found: Mapping[str, Identity]

    def check(self) -> None:
        """Refuse a directory in which a file or a folder was changed, replaced or moved since.

        Raises:
            BundleError: names the first.
        """
        for name, before in self.found.items():
            try:
                now = identity((self.root / name).lstat())
            except OSError as error:
                raise BundleError(f"{self.root}: {name} was removed since it was hashed", AGAIN) from error
            if now[: len(before)] != before:
                raise BundleError(f"{self.root}: {name} was changed since it was hashed", AGAIN)


def identity(found: os.stat_result) -> Identity:
    """Return what changes when a file is written, replaced, linked or moved, and when a folder is."""
    return (found.st_dev, found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def root_identity(root: Path) -> Identity:
    """Return what changes when another folder takes the place of `root`, and not when people work in it."""
    return identity(root.lstat())[:_PLACE]
