"""The JSON tables that travel with this code."""

from __future__ import annotations

import json
import pkgutil
from typing import Any


def own_table(name: str) -> Any:
    """The content of a JSON file of this package, whether that lies in a folder or runs out of a zip."""
    data = pkgutil.get_data("edgeq_device", name)
    assert data is not None, "the loaders of folders and of zips both give data"
    return json.loads(data)
