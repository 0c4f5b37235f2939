"""Where the files that ship with edgeq lie: `profiles/` and `targets/`.

In a wheel they are inside the package; in a checkout or an editable install they stand at the top of the repository.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def shipped(name: str) -> Path:
    """The directory `name` ("profiles" or "targets") as shipped."""
    inside = _PACKAGE / "_shipped" / name
    return inside if inside.is_dir() else _PACKAGE.parent / name
