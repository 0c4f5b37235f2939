from __future__ import annotations

import sys
from pathlib import Path

import pytest
from edgeq_device.engines.catalog import EngineSpec
from edgeq_device.engines.direct_openvino import _import_package

PACKAGE = """
try:
    import openvino_telemetry
    sent = True
except ImportError:
    sent = False
"""


def test_the_package_is_imported_without_its_telemetry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fakevino.py").write_text(PACKAGE)
    (tmp_path / "openvino_telemetry.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "openvino_telemetry", raising=False)
    assert not _import_package(EngineSpec("fake", "Fake", module="fakevino")).sent
    monkeypatch.delitem(sys.modules, "fakevino")
