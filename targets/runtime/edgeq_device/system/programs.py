"""Find programs to start, and the environment to start them in, so that no file of the working directory runs.

The working directory may contain untrusted files. In PATH and in the variables of the dynamic linker, empty and
relative entries lead there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Union

_LISTS = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "PYTHONPATH")
"""Variables besides PATH that list folders from which a child takes code."""


def read_search_path() -> str:
    """Return PATH without empty and relative entries, which lead into the working directory."""
    return _keep_absolute(os.environ.get("PATH", os.defpath))


def find_program(name: str, folder: Union[Path, str, None] = None) -> Optional[str]:
    """Return the absolute path of a program: a regular file that the user may execute. Return None if there is none.

    Only the absolute entries of PATH are searched, also on Windows, where the system's own search begins in the working
    directory.

    Args:
        folder: an absolute folder to search before PATH.
    """
    folders = [str(folder)] if folder is not None and Path(folder).is_absolute() else []
    folders += filter(None, read_search_path().split(os.pathsep))
    suffixes = os.environ.get("PATHEXT", ".EXE").split(os.pathsep) if os.name == "nt" else [""]
    places = (Path(folder) / f"{name}{suffix}" for folder in folders for suffix in suffixes)
    return next((str(place) for place in places if place.is_file() and os.access(place, os.X_OK)), None)


# PR_SET_PDEATHSIG stays in effect when the process becomes another program.
_UNTIL_PARENT_ENDS = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def bind_to_parent(command: Sequence[str]) -> List[str]:
    """Return a command that runs `command`, an absolute path and its arguments. On Linux, the system kills it when this
    process ends, however it ends.
    """
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-c", _UNTIL_PARENT_ENDS, str(os.getpid()), *command]


def build_child_environment(base: Optional[Mapping[str, str]] = None) -> Dict[str, str]:
    """Return the environment `base` (default: this process's) for a child process. Lists of folders in it have no empty
    and no relative entries.

    The child starts programs itself: a compiler starts its linker, and apt starts dpkg.
    """
    environment = dict(os.environ if base is None else base)
    cleaned = {name: _keep_absolute(environment[name]) for name in _LISTS if name in environment}
    # An empty PATH would mean the working directory.
    return {**environment, **cleaned, "PATH": _keep_absolute(environment.get("PATH", "")) or _keep_absolute(os.defpath)}


def _keep_absolute(folders: str) -> str:
    return os.pathsep.join(folder for folder in folders.split(os.pathsep) if Path(folder).is_absolute())
