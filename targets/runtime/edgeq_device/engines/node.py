"""Start a process of node with ONNX Runtime Web. It communicates in the frames of a guest (see `guest.Guest`)."""

from __future__ import annotations

import atexit
import json
import pkgutil
from functools import lru_cache
from pathlib import Path

from edgeq_device.engines.guest import Guest
from edgeq_device.engines.node_package import load_pins
from edgeq_device.errors import RuntimeUnavailableError
from edgeq_device.system.places import make_temporary_folder
from edgeq_device.system.programs import build_child_environment, find_program

# The last script is the program; it imports the first.
_SCRIPTS = ("edgeq.mjs", "wasm_guest.mjs")
_RUNTIME = "wasm"
# Seconds after which a request counts as hung.
_ANSWER_S = 600.0


class Node(Guest):
    """Run a process of node with ONNX Runtime Web. One process opens any number of models."""

    @property
    def ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None


def find_or_start_node(package: Path) -> Node:
    """Return the process for the package in the folder `package`. Start a new one if the last one has ended."""
    if _start_node(package).ended:
        _start_node.cache_clear()
    return _start_node(package)


@lru_cache(maxsize=1)
def _start_node(package: Path) -> Node:
    program = find_program("node")
    if program is None:
        raise RuntimeUnavailableError("node is not on PATH", "Install node 20 or newer")
    folder, _ = make_temporary_folder("edgeq-node-", "node cannot be started")
    for name in _SCRIPTS:
        (folder / name).write_bytes(pkgutil.get_data(__package__, name) or b"")
    files = json.dumps(load_pins()["runtimes"][_RUNTIME])
    # Files that node writes are removed with this folder, however node ends.
    environment = {**build_child_environment(), **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))}
    guest = Node([program, str(folder / _SCRIPTS[-1]), str(package), files], environment, "node", request_s=_ANSWER_S)
    atexit.register(guest.end)
    return guest
