"""Find the npm package of ONNX Runtime Web, and check that it is the pinned version.

The package must be in ~/.cache/edgeq/npm, or in the folder that EDGEQ_NODE_MODULES names.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, Mapping

from edgeq_device.engines.catalog import EngineSpec
from edgeq_device.system.programs import find_program
from edgeq_device.system.tables import read_table

FOLDER = "EDGEQ_NODE_MODULES"
"""Environment variable that names the package's node_modules folder. By default, it is the folder into which the
engine's install command puts the package."""


@lru_cache(maxsize=1)
def load_pins() -> Mapping[str, Any]:
    """Return web.json: the package, its version, and the files of each runtime in it with their hashes."""
    table: Mapping[str, Any] = read_table("engines/web.json")
    return table


def find_modules_folder() -> Path:
    """Return the node_modules folder that is searched for the package."""
    named = os.environ.get(FOLDER, "")
    if named:
        return Path(named).absolute()
    try:
        return Path.home() / ".cache" / "edgeq" / "npm" / "node_modules"
    except RuntimeError:  # a user without a home, as in containers
        return Path(os.devnull)


def package_folder(engine: EngineSpec) -> Path:
    """Return the folder of the engine's package. The folder may not exist."""
    return find_modules_folder() / engine.module


def package_version(engine: EngineSpec) -> str:
    """Return the version of the installed package, or "" if it is not installed."""
    try:
        with (package_folder(engine) / "package.json").open(encoding="utf-8") as file:
            # A package.json has kilobytes; whatever is larger is none.
            version = json.loads(file.read(1 << 20)).get("version", "")
    except (OSError, ValueError, AttributeError):
        return ""
    return version if isinstance(version, str) else ""


def package_problem(engine: EngineSpec) -> str:
    """Return why an installed package would not run, or "" if nothing prevents it. A missing package is not reported
    here.
    """
    version, pinned = package_version(engine), load_pins()["version"]
    if find_program("node") is None:
        return f"{engine.name} runs in node, which is not on PATH: install node 20 or newer first"
    if version and version != pinned:
        return f"{engine.packages[0]} {version} is not {pinned}, the version whose files are known"
    return ""
