"""Find the folder of emulated machines in the user's cache, and refuse a place that others could have changed."""

from __future__ import annotations

from pathlib import Path

from edgeq_device.system.cache import describe_exposure

from edgeq.errors import OutputError, RuntimeUnavailableError
from edgeq.util.folders import user_folder


def home() -> Path:
    """Return the folder of emulated machines, in the user's cache (XDG_CACHE_HOME).

    Raises:
        RuntimeUnavailableError: the user has no cache folder.
    """
    # Root file systems and masked runtimes can be made again at any time, so they are cache, not data.
    folder = user_folder("cache")
    if folder is None:
        raise RuntimeUnavailableError("there is no home folder for emulated machines", "Set XDG_CACHE_HOME")
    return folder / "emulate"


def check_place(place: Path, setup: str) -> Path:
    """Return `place` in the cache, which contains programs or code. It may not exist.

    Args:
        setup: the command that makes it again, for the error.

    Raises:
        RuntimeUnavailableError: others could have changed it.
    """
    # Programs in this folder run with the user's rights, so nobody else may be able to change them.
    if problem := describe_exposure(place):
        raise RuntimeUnavailableError(
            problem, f"Remove {place}, set XDG_CACHE_HOME to a folder that only you can write, and run: {setup}"
        )
    return place


def check_writable() -> None:
    """Create the cache folder, so that a problem with the folder shows before any long task starts.

    Raises:
        OutputError: the folder cannot be created.
    """
    try:
        # Other users of the machine get no access, because `check_place` would refuse a folder that they can write.
        home().mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{home()} cannot be created ({error.strerror})", "Set XDG_CACHE_HOME to another folder"
        ) from error
