"""Starting Python for a module of edgeq_device so that it imports nothing from the working directory.

`python -m` and PYTHONPATH would both put folders first that hold what the user downloaded: a `numpy.py` beside the
model would run. The child is isolated (-I), searches where this process does without the working directory, and takes
edgeq_device from where this process has it, which may be a zip.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import List, Optional

# Runs before edgeq_device can be imported. Only `sys` is imported while the path is not yet this process's.
_BOOT = """
import sys
root, module, *sys.path = sys.argv[1:]
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
spec = PathFinder.find_spec("edgeq_device", [root])
package = sys.modules[spec.name] = module_from_spec(spec)
spec.loader.exec_module(package)
sys.exit(import_module(module).main())
"""


def python_command(module: str) -> List[str]:
    """The command line that runs `main()` of `module`, a module of edgeq_device, in a fresh isolated interpreter."""
    root = Path(__file__).absolute().parent.parent
    # -B: a compiled file left in a bundle is one that its manifest does not know.
    return [sys.executable, "-I", "-B", "-c", _BOOT, str(root), module, *import_path()]


def describe_exit(code: int) -> str:
    """How a child ended, in words: "exit code 3", "signal SIGSEGV"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def import_path() -> List[str]:
    """Where this process finds modules, without the working directory.

    The working directory stays where numpy or onnxruntime were loaded from it: then it is an installation.
    """
    here = _working_directory()
    kept = {_folder_of("numpy"), _folder_of("onnxruntime")}
    entries = [str(entry) for entry in sys.path]
    return [e for e in entries if Path(e).is_absolute() and (os.path.realpath(e) != here or here in kept)]


def _working_directory() -> Optional[str]:
    try:
        return os.path.realpath(Path.cwd())
    except OSError:  # it was removed, so nothing can be imported from it
        return None


def _folder_of(package: str) -> Optional[str]:
    file = getattr(sys.modules.get(package), "__file__", None)
    return os.path.realpath(str(Path(file).parent.parent)) if file else None
