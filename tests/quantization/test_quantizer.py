from __future__ import annotations

import logging
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgeq.errors import RuntimeUnavailableError
from edgeq.quantization import quantizer


def test_threads_that_overlap_leave_logging_as_it_was() -> None:
    inside, leave = threading.Event(), threading.Event()

    def silent() -> None:
        with quantizer.quiet():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=silent)
    old_level = logging.root.manager.disable
    with quantizer.quiet():
        thread.start()
        assert inside.wait(10)
    assert logging.root.manager.disable == logging.ERROR, "the other thread is not done"
    leave.set()
    thread.join()
    assert logging.root.manager.disable == old_level


PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize(("version", "refused"), [("1.26.9", True), ("1.27.0", False), ("1.100.0", False)])
def test_an_onnxruntime_that_is_too_old_is_one_line(
    version: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizer, "onnxruntime", lambda: SimpleNamespace(__version__=version))
    if not refused:
        quantizer._check_version()
        return
    with pytest.raises(
        RuntimeUnavailableError, match=r"needs onnxruntime 1\.27 or newer, but 1\.26\.9 is installed\. Upgrade it"
    ):
        quantizer._check_version()


def test_the_package_asks_for_the_same() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert f"onnxruntime>={quantizer.OLDEST}" in extras["cpu"]
    assert f"onnxruntime-gpu[cuda,cudnn]>={quantizer.OLDEST}" in extras["gpu"]
