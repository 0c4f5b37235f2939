from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from edgeq.cli import group
from tests.backends.build import bench, residual


def test_audit_tells_what_saturates(tmp_path: Path) -> None:
    net = bench(tmp_path, residual())
    full, fitted = net.build("full.onnx"), net.build("fitted.onnx", fit_pairs=True)
    data = ["--data", str(tmp_path / "x.npz"), "--float", str(net.prepared.path)]
    result = CliRunner().invoke(group, ["audit", str(full.model), *data, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    documented = (Path(__file__).parents[2] / "docs" / "cross-target.md").read_text("utf-8")
    assert [key for key in (*found, *found["layers"][0]) if f"`{key}`" not in documented] == []
    assert not found["safe"]
    assert found["float_db"]["exact"] > found["float_db"]["saturating"]
    safe = json.loads(CliRunner().invoke(group, ["audit", str(fitted.model), "--json"]).stdout)
    assert (safe["safe"], safe["samples"]) == (True, 0)
    precise = ["--session-option", "session.x64quantprecision=1"]
    assert json.loads(CliRunner().invoke(group, ["audit", str(full.model), *precise, "--json"]).stdout)["safe"]


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--float", "x.onnx"], "Give --data"), (["--session-option", "precise"], "Write KEY=VALUE")],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, options: list[str], message: str) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((1, 8, 8, 8), np.float32))
    result = CliRunner().invoke(group, ["audit", str(tmp_path / "m.onnx"), *options])
    assert result.exit_code != 0
    assert message in result.stderr
