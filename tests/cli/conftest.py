from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.workspace import Workspace, fill


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a filled workspace once. Tests that write get a copy."""
    place = tmp_path_factory.mktemp("workspace")
    fill(place)
    return place


@pytest.fixture
def workspace(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    import shutil

    place = tmp_path / "workspace"
    shutil.copytree(filled, place)
    monkeypatch.chdir(place)
    return Workspace(place)
