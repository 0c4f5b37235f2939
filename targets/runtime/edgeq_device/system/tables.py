"""Read the JSON tables that lie next to the modules of edgeq_device, in a folder or in a zip."""

from __future__ import annotations

import json
import pkgutil
from typing import Any


def read_table(name: str) -> Any:
    """Return the content of a JSON file of edgeq_device, such as "engines/options.json". The package may be a folder or
    a zip.
    """
    # In the zip of a bundle there is no path to open.
    data = pkgutil.get_data("edgeq_device", name)
    assert data is not None, "the loaders of folders and of zips both give data"
    return json.loads(data)
