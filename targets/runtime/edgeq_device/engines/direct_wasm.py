"""Open models in ONNX Runtime Web, in a process of node. Browsers run the same code, so they give the same answers.

The package comes from npm. It must be in ~/.cache/edgeq/npm, or in the folder that EDGEQ_NODE_MODULES names, and have
the pinned version. Before node runs the script, its loader or the wasm file, edgeq checks the hashes of all three.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

from edgeq_device.bundle.onnxfile import read_onnx
from edgeq_device.bundle.options import LEVELS, load_rules
from edgeq_device.engines.catalog import EngineSpec
from edgeq_device.errors import BundleError, RuntimeUnavailableError
from edgeq_device.system.places import read_table
from edgeq_device.system.programs import find_program

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


def open_model(ort: Any, engine: EngineSpec, model: Any, options: Any, engine_settings: Mapping[str, str]) -> Any:
    """Open the model at the path `model`; see `edgeq_device.engines.catalog.open_engine`.

    Raises:
        RuntimeUnavailableError: node cannot be started, or ONNX Runtime Web refuses the model.
        BundleError: external data are outside the model's folder.
    """
    del engine_settings
    if not isinstance(model, str):
        raise RuntimeUnavailableError(f"{engine.name} opens models only from files", "Write the model to a file")
    level = options.graph_optimization_level
    request = {
        "model": str(Path(model).absolute()),
        "data": _find_external(Path(model)),
        "provider": engine.provider,
        "optimization": next(n for n, v in LEVELS.items() if getattr(ort.GraphOptimizationLevel, v) == level),
        "session_options": _read_entries(options),
        "profile": [options.profile_file_prefix] if options.enable_profiling else [],
    }
    # imported here, because it needs numpy, and boards are described without numpy
    from edgeq_device.engines.node import find_or_start_node

    return find_or_start_node(package_folder(engine)).open_session(request)


def _read_entries(options: Any) -> Dict[str, str]:
    """Return the session configuration entries that are set. The folder of external data is left out, because the files
    in it are sent along.
    """
    from edgeq_device.bundle.variants import EXTERNAL_FOLDER

    entries = {}
    for key in load_rules().keys() - {EXTERNAL_FOLDER}:
        with suppress(RuntimeError):  # the entry is not set
            entries[key] = options.get_session_config_entry(key)
    return entries


def _find_external(model: Path) -> List[Tuple[str, str]]:
    """Return, for each file with external data, its name in the model and its path."""
    folder, paths = model.resolve().parent, {}
    for tensor in read_onnx(model, str(model)).external:
        name = tensor.entries.get("location", "")
        file = (folder / name).resolve()
        if folder not in file.parents:
            raise BundleError(f"{model}: tensor {tensor.name!r} has its data outside the model's folder")
        paths[name] = str(file)
    return list(paths.items())
