"""Install a user's package as an installer does."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path


def install(site: Path, name: str, files: Mapping[str, str], points: Mapping[str, Mapping[str, str]]) -> Path:
    """Write files and a distribution's metadata below `site`, and return `site`."""
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text, "utf-8")
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    sections = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in found.items()) for group, found in points.items()]
    (info / "entry_points.txt").write_text("\n".join(sections))
    return site


def install_as_a_package(site: Path, pyproject: Path) -> None:
    """Install a project whose modules are next to its pyproject.toml, as `pip install -e .` does."""
    project = tomllib.loads(pyproject.read_text("utf-8"))["project"]
    package = project["name"].replace("-", "_")
    install(site, project["name"], {f"{package}/__init__.py": ""}, project["entry-points"])
