"""Count how often a job converts a model between protobuf and memory and indexes it: once is enough."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

import edgeq
from edgeq import demo
from edgeq.model.graph import GraphIndex


@pytest.mark.parametrize(("job", "conversions", "indexes"), [("quantize", 4, 2), ("package", 8, 3)])
def test_a_model_is_converted_once_in_and_once_out(
    job: str, conversions: int, indexes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, saturates_here: bool
) -> None:
    if saturates_here:
        pytest.skip("this CPU adds two products in 16 bits, and the audits of saturation make models of their own")
    calls: Counter[str] = Counter()

    def count(where: Any, name: str) -> None:
        original = getattr(where, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(where, name, counted)

    count(ir.serde, "deserialize_model")
    count(ir.serde, "serialize_model")
    count(GraphIndex, "__init__")
    output = tmp_path / ("int8.onnx" if job == "quantize" else "bundle")
    getattr(edgeq, job)(demo.MODEL, demo.CALIBRATION, output, timed=False)
    assert calls["deserialize_model"] + calls["serialize_model"] <= conversions
    assert calls["__init__"] <= indexes
