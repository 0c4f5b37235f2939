from __future__ import annotations

import json
from pathlib import Path

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


def test_an_engines_kernels_on_a_target(tmp_path: Path) -> None:
    model = bench(tmp_path, residual()).build().model

    def audited(*options: str) -> dict[str, object]:
        ran = CliRunner().invoke(group, ["audit", str(model), *options, "--json"])
        assert ran.exit_code == 0, ran.output
        found: dict[str, object] = json.loads(ran.stdout)
        return {key: found[key] for key in ("engine", "target", "safe")}

    assert audited() == {"engine": "onnxruntime", "target": "", "safe": False}
    engine = ("--engine", "openvino")
    assert audited(*engine) == {"engine": "openvino", "target": "", "safe": False}
    assert audited(*engine, "-t", "haswell") == {"engine": "openvino", "target": "haswell", "safe": False}
    assert audited(*engine, "-t", "cascade-lake")["safe"]
    assert audited("-t", "cascade-lake")["safe"]
    # This option makes onnxruntime's own kernels exact. It has no effect on a plug-in's kernels.
    precise = ("--session-option", "session.x64quantprecision=1")
    assert audited(*precise)["safe"]
    assert not audited(*precise, *engine)["safe"]
    shown = CliRunner().invoke(group, ["audit", str(model), *engine, "-t", "haswell"]).stdout
    assert "in openvino on haswell: 3 of 3 layers can saturate" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--float", "x.onnx"], "Give --data"),
        (["--session-option", "precise"], "Write KEY=VALUE"),
        (["--engine", "webgpu"], "it is unknown how webgpu's kernels saturate"),
    ],
)
def test_refuses_contradictory_options(tmp_path: Path, options: list[str], message: str) -> None:
    (tmp_path / "m.onnx").write_bytes(residual().SerializeToString())
    result = CliRunner().invoke(group, ["audit", str(tmp_path / "m.onnx"), *options])
    assert result.exit_code != 0
    assert message in result.stderr
