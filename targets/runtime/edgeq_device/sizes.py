"""Names of free sizes in shapes."""

from __future__ import annotations

import re

# What exporters write for a size that is free: no name, so that two of them need not be equal.
_PLACEHOLDER = re.compile(r"\s*([?*]|-?\d+|none|null|any|unknown|dynamic|unk__.*)?\s*", re.IGNORECASE)


def is_name(text: str) -> bool:
    """Whether sizes of this name are equal, and not only free."""
    return _PLACEHOLDER.fullmatch(text) is None
