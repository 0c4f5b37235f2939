"""Test that a package can add one extension of each kind, with the files of docs/extending.md as they are printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from PIL import Image

from edgeq.backends.base import backend_named
from edgeq.calibration.methods import REGISTRY as METHODS
from edgeq.calibration.ranges import derive_ranges
from edgeq.cli import group
from edgeq.data.preprocess import parse_text
from edgeq.errors import HardwareError, UsageError
from edgeq.hardware.target import resolve
from edgeq.measure.decoders import load_decoder
from edgeq.model.int8_rules import int8_rules
from edgeq.tuning.recover.methods import recoveries, recovery_groups
from edgeq.util.records import plain
from edgeq.util.registry import DECODERS, GROUPS, RECOVERIES, TASKS, ExtensionGroup, find_data_folders
from tests.docs.blocks import blocks
from tests.docs.plugin import install
from tests.graphs import proto

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "extending.md"
NET = """net (float[1,3,8,8] x) => (float[1,4,8,8] y) <float[4,3,3,3] w, float[4] b> {
    [conv] c = Conv<pads = [1, 1, 1, 1]>(x, w, b)
    [relu] y = Relu(c)
}"""
DETECTOR = """detector (float[1,3,8,8] x) => (float[1,1,6] boxes) <float[1,1,6] fixed = {1, 2, 5, 6, 0.9, 0}> {
    mean = ReduceMean<keepdims = 0>(x)
    nothing = Sub(mean, mean)
    boxes = Add(fixed, nothing)
}"""


def files_of_the_page() -> dict[str, str]:
    """Return the blocks of the page that show a file, by the file's name."""
    return {block.file: block.text for block in blocks(PAGE) if block.file}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = files_of_the_page()
    project = tomllib.loads(files.pop("pyproject.toml"))["project"]
    files["edgeq_example/__init__.py"] = ""
    return install(tmp_path_factory.mktemp("site"), project["name"], files, project["entry-points"])


@pytest.fixture
def plugin(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(site)
    return site


def edgeq(site: Path, *arguments: str | Path) -> Any:
    """Run a command in a process of its own with the package installed, and return its JSON output."""
    path = os.pathsep.join(map(str, (site, REPOSITORY, REPOSITORY / "targets" / "runtime")))
    command = [sys.executable, "-m", "edgeq", *map(str, arguments), "--json"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def net(tmp_path: Path) -> Path:
    model = proto(NET)
    values = np.random.default_rng(0)
    for name, shape in (("w", (4, 3, 3, 3)), ("b", (4,))):
        tensor = onnx.numpy_helper.from_array(values.normal(size=shape).astype(np.float32), name)
        model.graph.initializer.append(tensor)
    onnx.save(model, tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=values.integers(0, 256, (4, 8, 8, 3), np.uint8))
    return tmp_path / "net.onnx"


def test_the_page_has_one_file_for_each() -> None:
    names = {path.rpartition("/")[2] for path in files_of_the_page()}
    python = {"scaled.py", "loudness.py", "corners.py", "clip.py", "wider.py", "backend.py"}
    assert names == {"pyproject.toml", "example.toml", "example-board.toml", *python}


def test_quantize_with_all_of_them(site: Path, net: Path, tmp_path: Path) -> None:
    shared = ("--data", tmp_path / "data.npz", "--preprocess", "key=x,divide=255,clip=0.1:0.9,layout=NCHW")
    method = ("--method", "scaled", "--method-option", "share=0.95")
    target = ("--profile", "example-board", "--no-timing")
    out = tmp_path / "int8.onnx"
    found = edgeq(site, "quantize", net, *shared, *method, *target, "--recover", "wider-ranges", "-o", out)
    assert out.is_file()
    report = json.dumps(found)
    assert '"scaled"' in report
    assert "built by the example backend" in report
    assert "wider-ranges: " in report


def test_eval_with_its_decoder(site: Path, tmp_path: Path) -> None:
    pytest.importorskip("faster_coco_eval")
    onnx.save(proto(DETECTOR), tmp_path / "detector.onnx")
    (tmp_path / "val").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "val" / "one.png")
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 4, 4], "area": 16, "iscrowd": 0}
    image = {"id": 1, "file_name": "one.png", "width": 8, "height": 8}
    annotations = {"images": [image], "annotations": [box], "categories": [{"id": 1, "name": "thing"}]}
    (tmp_path / "instances.json").write_text(json.dumps(annotations))
    options = ("--task", "detection", "--decoder", "corners", "--annotations", tmp_path / "instances.json")
    found = edgeq(
        site, "eval", tmp_path / "detector.onnx", "--data", tmp_path / "val", *options, "--preprocess", "layout=NCHW"
    )
    assert found["metrics"]["mAP50-95"] == pytest.approx(1.0)


def test_eval_with_its_task(site: Path, net: Path, tmp_path: Path) -> None:
    options = ("--task", "loudness", "--preprocess", "key=x,divide=255,layout=NCHW")
    found = edgeq(site, "eval", net, "--data", tmp_path / "data.npz", *options)
    assert found["primary"] == "mean"
    assert found["metrics"]["mean"] > 0


FAILING = """from edgeq.measure.task import TaskKind

TASK = TaskKind("fails", "nothing", lambda options: options["size"], takes=frozenset())
"""


def test_one_that_fails_is_no_bug_in_edgeq(tmp_path: Path, net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"edgeq.tasks": {"fails": "failing_example:TASK"}}
    monkeypatch.syspath_prepend(install(tmp_path / "site", "failing-example", {"failing_example.py": FAILING}, points))
    command = ["eval", str(net), "--data", str(tmp_path / "data.npz"), "--preprocess", "key=x", "--task", "fails"]
    result = CliRunner().invoke(group, command)
    assert result.exit_code == UsageError.exit_code
    assert result.stderr.startswith("edgeq: TypeError: ")
    assert result.stderr.endswith("to the authors of failing-example 1.0 (run it with -v for the traceback)\n")


def test_the_command_line_lists_them_with_their_package(site: Path) -> None:
    listed = edgeq(site, "extensions")
    mine = {kind: [row["name"] for row in rows if row["from"] == "edgeq-example 1.0"] for kind, rows in listed.items()}
    assert mine == {
        "calibration_methods": ["scaled"],
        "tasks": ["loudness"],
        "decoders": ["corners"],
        "preprocess_steps": ["clip"],
        "recoveries": ["wider-ranges"],
        "backends": ["example"],
    }
    (row,) = [row for row in listed["calibration_methods"] if row["name"] == "scaled"]
    assert row["options"] == [{"name": "share", "default": 0.9, "help": "share of the extrema that is kept"}]
    assert "LOW:HIGH; values outside are set to the bounds" in json.dumps(edgeq(site, "preprocess", "list"))


def test_the_library_finds_them(plugin: Path) -> None:
    assert plain(parse_text("clip=0.1:1/2").steps[0]) == {"op": "clip", "low": 0.1, "high": 0.5}
    assert "wider-ranges" in recoveries()
    assert "wider-ranges" in recovery_groups()[0]
    assert list(recoveries())[-1] == "weight-rounding", "the stage decides before the order"
    assert METHODS.load("scaled").settings({}) == {"share": 0.9}
    assert callable(load_decoder("corners"))
    assert backend_named("example").name == "example"
    assert resolve("example-board").backend == "example"
    assert int8_rules("example")["Conv"].int8


def test_without_the_package_nothing_is_known_of_it() -> None:
    for kind in GROUPS:
        assert kind.plugins() == ()
    with pytest.raises(HardwareError, match="unknown backend 'example'"):
        backend_named("example")


@pytest.mark.parametrize(
    ("text", "point", "says"),
    [
        ("import a_module_that_is_not_there", "broken_example:METHOD", "fails: ModuleNotFoundError"),
        ("raise ValueError('no\\nlicence')", "broken_example:METHOD", "fails: ValueError: no licence"),
        ("METHOD = 3", "broken_example:METHOD", "is not an edgeq.calibration.range_method.RangeMethod"),
        ("", "broken_example:METHOD", "fails: AttributeError"),
        (
            "from edgeq.calibration.methods.mse import METHOD",
            "broken_example:METHOD",
            "calls itself 'mse'",
        ),
    ],
)
def test_a_broken_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, point: str, says: str
) -> None:
    points = {"edgeq.calibration_methods": {"mine": point}}
    monkeypatch.syspath_prepend(install(tmp_path, "broken-example", {"broken_example.py": text}, points))
    monkeypatch.delitem(sys.modules, "broken_example", raising=False)
    with pytest.raises(UsageError) as caught:
        METHODS.load("mine")
    monkeypatch.delitem(sys.modules, "broken_example", raising=False)
    assert "the calibration method 'mine' of broken-example 1.0 (broken_example:METHOD)" in caught.value.problem
    assert says in caught.value.problem
    assert "\n" not in str(caught.value)
    assert METHODS.load("minmax").name == "minmax", "the others go on working"


def test_names_that_clash_are_an_error_that_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"edgeq.calibration_methods": {"mse": "one:METHOD"}, "edgeq.data": {"one": "one"}}
    monkeypatch.syspath_prepend(install(tmp_path, "one", {}, points))
    with pytest.raises(UsageError, match=r"'mse' is registered by edgeq and by one 1\.0"):
        METHODS.load("mse")
    with pytest.raises(UsageError, match=r"data folder 'one' of one 1\.0"):
        find_data_folders("targets")
    with pytest.raises(UsageError, match="Did you mean entropy"):
        derive_ranges(None, "entrpy")  # type: ignore[arg-type]


def test_names_are_known_without_importing_anything_heavy() -> None:
    heavy = "{'numpy', 'onnx', 'onnxruntime', 'onnx_ir', 'PIL', 'rich'}"
    code = "from edgeq.util.registry import GROUPS; import sys\nassert all(g.names() for g in GROUPS)\n"
    code += f"assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    path = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "targets" / "runtime")))
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True, timeout=60)


@pytest.mark.parametrize(
    ("page", "group"),
    [("calibrate.md", METHODS.group), ("eval.md", TASKS), ("reference/eval.md", DECODERS), ("recover.md", RECOVERIES)],
)
def test_the_pages_document_every_registered_name(page: str, group: ExtensionGroup) -> None:
    text = (REPOSITORY / "docs" / page).read_text("utf-8")
    rows = {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([\w-]+)`", row)}
    assert set(group.names()) <= rows
