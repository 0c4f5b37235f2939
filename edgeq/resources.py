"""Where the files that ship with edgeq lie: `profiles/` and `targets/`.

In a wheel they are inside the package; in a checkout or an editable install they stand at the top of the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import platformdirs

_PACKAGE = Path(__file__).resolve().parent


def shipped(name: str) -> Path:
    """The directory `name` ("profiles" or "targets") as shipped."""
    inside = _PACKAGE / "_shipped" / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def user_folder(kind: Literal["config", "cache", "state"]) -> Path | None:
    """Return edgeq's folder of that kind among the user's own; None where there is none.

    Containers run as users without a home: HOME, the XDG variables and the entry in the list of users are all missing.
    """
    try:
        found = Path(getattr(platformdirs, f"user_{kind}_path")("edgeq"))
    except (RuntimeError, KeyError):  # by the version of platformdirs, or of Python
        return None
    return found if found.is_absolute() else None
