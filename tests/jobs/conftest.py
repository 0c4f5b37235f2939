from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.build import write_network


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with the files of `write_network`."""
    write_network(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
