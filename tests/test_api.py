"""Test the public interface: the list of names, and the arguments of its functions.

tests/docs runs the examples of docs/api.md.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import edgeq
from edgeq import demo
from edgeq.errors import UsageError
from edgeq.run.session import open_session

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "api.md").read_text("utf-8")
FUNCTIONS = [name for name in edgeq.__all__ if callable(getattr(edgeq, name)) and name[0].islower()]
PATHS = ("model", "output", "path", "statistics", "against", "float_model", "quantized")


def test_the_page_lists_what_is_public() -> None:
    listed = {name for row in re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert listed == set(edgeq.__all__)
    assert edgeq.__all__ == sorted(
        edgeq.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name[0] == "_", name)
    )


def test_every_name_is_there_and_no_other() -> None:
    for name in edgeq.__all__:
        assert getattr(edgeq, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        edgeq.nothing  # noqa: B018


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_path_may_be_a_string(name: str) -> None:
    for parameter in inspect.signature(getattr(edgeq, name)).parameters.values():
        if parameter.name in PATHS and "Path" in str(parameter.annotation):
            assert "str" in str(parameter.annotation), f"{name}: {parameter}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_says_what_it_takes_and_raises(name: str) -> None:
    text = inspect.getdoc(inspect.unwrap(getattr(edgeq, name))) or ""
    assert len(text.split()) > 8
    if name not in ("detect",):
        assert "Raises:" in text


EIGHT = edgeq.Data(demo.VALIDATION, count=8)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edgeq.quantize(demo.MODEL, EIGHT, tmp_path_factory.mktemp("api") / "int8.onnx", timed=False).output


def labelled() -> list[tuple[dict[str, Any], int]]:
    with np.load(demo.VALIDATION) as arrays:
        return [({"image": i[None]}, int(n)) for i, n in zip(arrays["image"][:8], arrays["label"][:8], strict=True)]


@pytest.mark.parametrize(
    "samples",
    [lambda: EIGHT, lambda: str(demo.VALIDATION), lambda: demo.VALIDATION, labelled, lambda: iter(labelled())],
    ids=["Data", "str", "Path", "list", "iterator"],
)
@pytest.mark.parametrize("model", [str(demo.MODEL), demo.MODEL.read_bytes()], ids=["path", "bytes"])
def test_accuracy_needs_nothing_but_the_public_interface(model: str | bytes, samples: Callable[[], Any]) -> None:
    found = edgeq.evaluate(model, samples(), "classification", count=8)
    assert found.samples == 8
    assert found.metrics["top1"] > 0.8


def test_an_open_session_takes_samples_that_are_open() -> None:
    with pytest.raises(UsageError, match="samples cannot be opened for an open session"):
        edgeq.evaluate(open_session(demo.MODEL), EIGHT, "classification")


def test_every_function_takes_data(quantized: Path) -> None:
    assert edgeq.calibrate(demo.MODEL, EIGHT).samples == 8
    assert edgeq.compare(demo.MODEL, quantized, EIGHT, task="classification", timed=False).samples == 8
    assert edgeq.debug(demo.MODEL, quantized, EIGHT).written.samples == 8
    settings = edgeq.BenchSettings(min_duration_s=0.01)
    for data in (EIGHT, str(demo.CALIBRATION), edgeq.BenchData(demo.CALIBRATION)):
        assert edgeq.bench(demo.MODEL, data=data, engines="onnxruntime", settings=settings).scenarios


def test_names_stand_for_objects(tmp_path: Path) -> None:
    names: dict[str, Any] = {"val": EIGHT, "task": "classification", "timed": False}
    made = edgeq.quantize(demo.MODEL, EIGHT, tmp_path / "int8.onnx", engine="onnxruntime", **names)
    assert made.proof.accuracy["int8"].task == "classification"
    packed = edgeq.package(
        demo.MODEL, EIGHT, tmp_path / "bundle", targets="this-machine", engines="onnxruntime", **names
    )
    assert len(packed.variants) == 1
    assert edgeq.inspect(demo.MODEL, "this-machine").macs == edgeq.inspect(demo.MODEL).macs


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"task": "clasification"}, "clasification"),
        ({"task": 5}, "the task, of type int, has no 'name'"),
        ({"engine": "openvin"}, "unknown engine 'openvin'"),
        ({"engine": 5}, "an engine is given as int"),
        ({"builder": "sequential-correction"}, "the builder is given as str"),
        ({"overrides": "int8"}, "the overrides are given as str"),
        ({"validation": edgeq.Data(demo.VALIDATION, count="8")}, "count is '8'"),  # type: ignore[arg-type]
    ],
)
def test_refuses_wrong_arguments_in_one_line(arguments: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(edgeq.EdgeqError, match=re.escape(problem)):
        edgeq.quantize(demo.MODEL, EIGHT, tmp_path / "int8.onnx", **arguments)
    assert not list(tmp_path.iterdir())


def test_a_misspelt_field_of_the_scheme_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape("overrides has no weight_typ. Did you mean weight_type?")):
        edgeq.quantize(demo.MODEL, EIGHT, tmp_path / "int8.onnx", overrides={"weight_typ": "int8"})
    assert not list(tmp_path.iterdir())


def test_a_model_in_memory_is_taken_as_its_file_is(tmp_path: Path) -> None:
    model = onnx.load(demo.MODEL)
    for source, name in ((model, "memory.onnx"), (demo.MODEL, "file.onnx")):
        edgeq.quantize(source, EIGHT, tmp_path / name, timed=False)
    assert (tmp_path / "memory.onnx").read_bytes() == (tmp_path / "file.onnx").read_bytes()
    assert edgeq.inspect(model).macs == edgeq.inspect(demo.MODEL).macs
    with pytest.raises(UsageError, match="a model in memory has no folder"):
        edgeq.quantize(model, EIGHT)


def test_package_takes_a_target_as_quantize_does(tmp_path: Path) -> None:
    packaged = edgeq.package(demo.MODEL, EIGHT, tmp_path / "b", target="this-machine", timed=False)
    assert len(packaged.variants) == 1


@pytest.mark.parametrize(
    ("model", "fix"),
    [
        (b"model", "Path(PATH).write_bytes(model)"),
        (5, "Give a path"),
        (None, "Give a path"),
    ],
    ids=["bytes", "int", "None"],
)
@pytest.mark.parametrize("name", ["quantize", "package", "tune", "calibrate", "compare", "debug", "retarget", "bench",
                                  "inspect", "verify", "report"])  # fmt: skip
def test_refuses_models_that_are_not_paths_in_one_line(name: str, model: Any, fix: str, tmp_path: Path) -> None:
    others = {"quantize": 2, "package": 2, "tune": 2, "calibrate": 1, "compare": 1, "debug": 2, "retarget": 1}
    with pytest.raises(UsageError) as caught:
        getattr(edgeq, name)(model, *[tmp_path / "x"] * others.get(name, 0))
    assert f"is given as {type(model).__name__}, and a path" in caught.value.problem
    assert fix in caught.value.fix
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", [5, None], ids=["int", "None"])
def test_accuracy_of_what_is_no_model_is_one_line(model: Any) -> None:
    with pytest.raises(UsageError, match=r"and a path .* is needed"):
        edgeq.evaluate(model, EIGHT, "classification")
