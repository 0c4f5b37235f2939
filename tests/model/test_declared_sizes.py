"""Test models of 1 KiB that declare huge tensors: edgeq refuses them before it allocates anything."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from click.testing import CliRunner

from edgeq.bundle.spec import BundleSpec, VariantSpec
from edgeq.bundle.write import write_bundle
from edgeq.cli import group
from edgeq.errors import ModelError
from edgeq.model.prepare import prepare_model

MANY = 2**28
DOUBLED = " ".join(f"c{i + 1} = Concat<axis=0>(c{i}, c{i}, c{i}, c{i})" for i in range(14))
ATTACKS = {
    "ConstantOfShape": (f"<int64[1] s = {{{MANY}}}>", "c = ConstantOfShape(s)"),
    "Expand": (f"<int64[1] s = {{{MANY}}}, float[1] o = {{1}}>", "c = Expand(o, s)"),
    "Expand of an input": (f"<int64[1] s = {{{MANY}}}>", "c = Expand(x, s)"),
    "Tile": (f"<int64[1] s = {{{MANY}}}, float[1] o = {{1}}>", "c = Tile(o, s)"),
    "Range": (f"<float a = {{0}}, float b = {{{MANY}}}, float d = {{1}}>", "c = Range(a, b, d)"),
    "RandomNormal": ("", f"c = RandomNormal<shape = [{MANY}]>()"),
    "OneHot": (f"<int64[1] i = {{0}}, int64 d = {{{MANY}}}, float[2] v = {{0, 1}}>", "c = OneHot(i, d, v)"),
    "Pad": (f"<int64[2] p = {{0, {MANY}}}, float[1] o = {{1}}>", "c = Pad(o, p)"),
    "Resize": (
        f"<int64[2] s = {{1, {MANY}}}, float[1,1] o = {{1}}>",
        "c = Resize<mode = 'nearest'>(o, , , s)".replace("'", '"'),
    ),
    "Concat": (
        "<int64[1] s = {20000000}, float[1] o = {1}>",
        f"e = Expand(o, s)  c = Concat<axis = 0>({', '.join(['e'] * 14)})",
    ),
    "outer product": (
        "<int64[2] s = {20000, 1}, int64[2] t = {1, 20000}, float[1] o = {1}>",
        "a = Expand(o, s)  b = Expand(o, t)  c = MatMul(a, b)",
    ),
}
COMPUTED = ("<int64[1] s = {20000}>", "t = Mul(s, s)  c = ConstantOfShape(t)")
# Without a limit, computing these integers takes minutes and 15 GB.
VALUES = (
    "<int64[1] z = {0}, int64[1] one = {1}>",
    f"e = Mul(one, one)  s = Shape(x)  c0 = Slice(s, z, e)  {DOUBLED}  c = ConstantOfShape(c14)",
)
# These have 67 million axes.
AXES = ("<int64[1] s = {1}>", f"c0 = Identity(s)  {DOUBLED}  c = ConstantOfShape(c14)")


def write(place: Path, weights: str, nodes: str) -> Path:
    text = f"g (float[1] x) => (float[n] y) {weights} {{ {nodes}  y = Add(x, c) }}"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    data = model.SerializeToString()
    assert len(data) < 1024
    place.write_bytes(data)
    return place


@pytest.mark.parametrize("name", ATTACKS)
def test_much_of_little_is_refused_by_its_size(name: str, tmp_path: Path) -> None:
    source = write(tmp_path / "m.onnx", *ATTACKS[name])
    with pytest.raises(ModelError, match=r"tensor '\w' has the shape \[.*EDGEQ_BUDGET=sample="):
        prepare_model(source, tmp_path / "work")


def test_the_budget_allows_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "m.onnx", "<int64[1] s = {1000000}, float[1] o = {1}>", "c = Expand(o, s)")
    monkeypatch.setenv("EDGEQ_BUDGET", "sample=2MiB")
    with pytest.raises(ModelError, match="EDGEQ_BUDGET=sample=4MiB"):
        prepare_model(source, tmp_path / "work")
    monkeypatch.setenv("EDGEQ_BUDGET", "sample=4MiB")
    prepare_model(source, tmp_path / "work")


def test_honest_results_are_many_times_their_input(tmp_path: Path) -> None:
    """A result may be many times as large as the input if weights account for it: here 64 channels of an image."""
    text = "g (float[1,1,2048,2048] x, float[64,1,3,3] w) => (float[n,c,h,k] y) { y = Conv<pads = [1,1,1,1]>(x, w) }"
    (tmp_path / "m.onnx").write_bytes(
        onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}').SerializeToString()
    )
    prepare_model(tmp_path / "m.onnx", tmp_path / "work")


@pytest.mark.parametrize("attack", [ATTACKS["ConstantOfShape"], ATTACKS["Expand of an input"]], ids=["folded", "run"])
@pytest.mark.parametrize("form", ["model", "bundle"])
@pytest.mark.parametrize("command", ["bench", "eval", "compare"])
def test_measuring_commands_refuse_models_before_opening_them(
    command: str, form: str, attack: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "m.onnx", *attack)
    if form == "bundle":
        write_bundle(BundleSpec("x", (VariantSpec("v", source),)), tmp_path / "b")
        source = tmp_path / "b"
    np.savez(tmp_path / "x.npz", x=np.zeros((1, 1), np.float32))
    monkeypatch.setattr("onnxruntime.InferenceSession", lambda *a, **k: pytest.fail("a session was opened"))
    data = ["--data", str(tmp_path / "x.npz")]
    how = {"bench": [], "eval": [*data, "--reference", str(source)], "compare": [str(source), *data]}
    done = CliRunner().invoke(group, [command, str(source), *how[command]])
    assert done.exit_code == ModelError.exit_code
    assert "EDGEQ_BUDGET=sample=" in done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts all private memory on Linux alone")
@pytest.mark.parametrize(
    "attack", [ATTACKS["Expand"], COMPUTED, VALUES, AXES], ids=["Expand", "computed", "values", "axes"]
)
def test_a_command_refuses_within_300_mb(attack: tuple[str, str], tmp_path: Path) -> None:
    source = write(tmp_path / "m.onnx", *attack)
    base, ends, _ = peak_of(tmp_path, "inspect", str(tmp_path / "absent.onnx"))
    assert ends == ModelError.exit_code
    most, ends, said = peak_of(tmp_path, "inspect", str(source))
    assert ends == ModelError.exit_code
    assert most - base < 300 << 20
    assert said.startswith("edgeq: ")
    assert said.count("\n") == 1


def peak_of(folder: Path, *arguments: str) -> tuple[int, int, str]:
    """Return the peak resident memory of a command and its children in bytes, its exit code, and its output."""
    with (folder / "said").open("wb") as stream:
        child = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "edgeq", *arguments],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, stream.fileno(), 1), (os.POSIX_SPAWN_DUP2, stream.fileno(), 2)],
        )
        _, status, usage = os.wait4(child, 0)
    return usage.ru_maxrss << 10, os.waitstatus_to_exitcode(status), (folder / "said").read_text()
