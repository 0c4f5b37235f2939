from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from edgeq_device.engines.guest import build_python_command
from edgeq_device.engines.memory import measure_memory
from edgeq_device.engines.serve import build_open_request
from edgeq_device.errors import RuntimeUnavailableError
from edgeq_device.measure.environment import read_memory

from . import fakes

pytestmark = pytest.mark.skipif(read_memory()[0] is None, reason="this system does not report a process's memory")


def order(model: Path, **changes: Any) -> dict[str, Any]:
    return {**build_open_request(fakes.variant(model=model), 1), **changes}


def test_a_models_memory_is_measured_in_its_own_process(models: dict[str, Path]) -> None:
    use = measure_memory(order(models["wide"], optimization="basic"), {"x": (1, 64)})
    assert 0 <= use.load_bytes <= use.session_peak_bytes < use.process_peak_bytes
    assert use.session_peak_bytes > 64 * 2048 * 4  # at least its weights


def test_larger_inputs_take_more(models: dict[str, Path]) -> None:
    small, large = (measure_memory(order(models["wide"]), {"x": (n, 64)}) for n in (1, 8192))
    assert large.session_peak_bytes - small.session_peak_bytes > 8192 * 2048 * 4 * 0.8


def test_a_model_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"nonsense")
    with pytest.raises(RuntimeUnavailableError, match=r"bad\.onnx could not be measured: ") as caught:
        measure_memory(order(tmp_path / "bad.onnx"), {})
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_child_that_takes_too_long_is_given_up(models: dict[str, Path]) -> None:
    with pytest.raises(RuntimeUnavailableError, match="timed out"):
        measure_memory(order(models["narrow"]), {}, timeout_s=0.01)


def test_the_child_speaks_json(models: dict[str, Path]) -> None:
    child = subprocess.run(
        build_python_command("edgeq_device.engines.memory"),
        input=json.dumps(order(models["narrow"], shapes={})),
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(json.loads(child.stdout)) == {"load_bytes", "session_peak_bytes", "process_peak_bytes"}
