"""Find the folders of files that ship with edgeq, and the user's own.

In a wheel, the shipped folders (`profiles/`, `targets/`) are inside the package. In a checkout or an editable install,
they are at the top of the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import platformdirs

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped(name: str) -> Path:
    """Return the path of the shipped folder `name` ("profiles" or "targets")."""
    # An installed wheel has this folder. A checkout has none, because its folders are at the top.
    inside = _PACKAGE / "_shipped" / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def user_folder(kind: Literal["config", "cache", "state"]) -> Path | None:
    """Return edgeq's folder for the user's files of this kind, or None if the user has no home folder.

    That happens in containers, where HOME, the XDG variables and the user's entry in the list of users may all be
    missing.
    """
    try:
        folder = Path(getattr(platformdirs, f"user_{kind}_path")("edgeq"))
    except (RuntimeError, KeyError):  # the error's type depends on the version of platformdirs or of Python
        return None
    # A relative folder would make edgeq read and write in the working directory.
    return folder if folder.is_absolute() else None
