"""Open models in ONNX Runtime Web, in a process of node. Browsers run the same code, so they give the same answers.

Before node runs the script of the package, its loader or the wasm file, wasm_guest.mjs checks the hashes of all three.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

from edgeq_device.engines.catalog import EngineSpec

# The catalog calls `package_problem` and `package_version` of an adapter.
from edgeq_device.engines.node_package import package_folder, package_problem, package_version  # noqa: F401
from edgeq_device.engines.options import load_rules
from edgeq_device.engines.session_options import LEVELS
from edgeq_device.engines.variant import EXTERNAL_FOLDER
from edgeq_device.errors import BundleError, RuntimeUnavailableError
from edgeq_device.model.onnxfile import read_onnx


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
