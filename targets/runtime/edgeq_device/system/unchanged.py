"""Notice that files were changed, replaced or moved since they were hashed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Tuple

from edgeq_device.errors import AGAIN, BundleError

Identity = Tuple[int, ...]
# number of items at the start of a folder's identity that stay the same when files are added to it
_PLACE = 2


@dataclass(frozen=True)
class HashedFolder:
    """Record the state of the files and folders in a bundle's directory when the files were hashed.

    Attributes:
        root: the bundle's directory.
        identities: identity of each file and folder, by its path relative to `root`; "." is `root` itself.
    """

    root: Path
    identities: Mapping[str, Identity]

    def check(self) -> None:
        """Refuse the directory if a file or folder in it was changed, replaced or moved after the files were hashed.

        Raises:
            BundleError: a file or folder differs; the message names the first.
        """
        for name, recorded in self.identities.items():
            try:
                now = identify((self.root / name).lstat())
            except OSError as error:
                raise BundleError(f"{self.root}: {name} was removed since it was hashed", AGAIN) from error
            # The root's record is shorter, because users may add files to it.
            if now[: len(recorded)] != recorded:
                raise BundleError(f"{self.root}: {name} was changed since it was hashed", AGAIN)


def identify(state: os.stat_result) -> Identity:
    """Return numbers that identify the state of a file or folder. They change when a file is written, replaced, linked
    or moved, or when the entries of a folder change.
    """
    return (state.st_dev, state.st_ino, state.st_mode, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


def identify_root(root: Path) -> Identity:
    """Return numbers that change when another folder replaces `root`, but not when files are added to it."""
    return identify(root.lstat())[:_PLACE]
