"""Wheels for another machine, through pip as the user has set it up."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from edgeq.emulate.commands import run
from edgeq.errors import RuntimeUnavailableError
from edgeq.ownership import sha256

_FIX = "Check the network and pip's configuration (pip config list)"


def download_wheels(
    projects: Mapping[str, str], python: str, platforms: Sequence[str], pins: Mapping[str, str], folder: Path
) -> list[Path]:
    """Fetch the wheel of each project for another machine; those that lie in `folder` already are not fetched again.

    Args:
        projects: name → version, "" for the newest that `pins` knows for this Python, else the newest there is.
        python: "3.11".
        platforms: wheel platform tags, each acceptable.
        pins: file name → SHA-256. A wheel that is pinned must be what it was.

    Raises:
        RuntimeUnavailableError: pip is missing, there is no such wheel, or one is not what was pinned.
    """
    pip = _pip()
    folder.mkdir(parents=True, exist_ok=True)
    tag = f"cp{python.replace('.', '')}"
    lines = []
    for name, version in projects.items():
        known = {file: digest for file, digest in pins.items() if f"-{tag}-" in file and file.startswith(f"{name}-")}
        fitting = {file: d for file, d in known.items() if version in ("", file.split("-")[1])}
        chosen = version or (max(fitting).split("-")[1] if fitting else "")
        hashes = "".join(f" --hash=sha256:{digest}" for digest in fitting.values())
        lines.append(f"{name}=={chosen}{hashes}" if chosen else name)
    for line in lines:
        _download(pip, line, tag, python, platforms, folder)
    wheels = sorted(folder.glob("*.whl"))
    for wheel in wheels:
        if pins.get(wheel.name, sha256(wheel)) != sha256(wheel):
            raise RuntimeUnavailableError(f"{wheel.name} is not the one that edgeq was tested with", f"Remove {wheel}")
    return wheels


def _pip() -> Path:
    """The folder of the pip that this Python has."""
    spec = importlib.util.find_spec("pip")
    if spec is None or spec.origin is None:
        raise RuntimeUnavailableError(
            f"{sys.executable} has no pip", "Install it: python -m ensurepip, or name a root file system with --sysroot"
        )
    return Path(spec.origin).resolve().parent


def _download(pip: Path, line: str, tag: str, python: str, platforms: Sequence[str], folder: Path) -> None:
    """One project a call: pip wants hashes of all projects or of none."""
    requirements = folder / "requirements.txt"
    requirements.write_text(line + "\n", encoding="utf-8")
    # By its folder and isolated, not with -m, which would look for it in the working directory first.
    command = [sys.executable, "-I", str(pip), "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--abi", tag]
    command += [part for platform in platforms for part in ("--platform", platform)]
    run([*command, "--dest", str(folder), "--requirement", str(requirements)], _FIX)
    requirements.unlink()
