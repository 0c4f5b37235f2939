"""A bundle is a model package: ONNX Runtime's own reader and a strict reader of the format's rules open it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from edgeq_device.engines.catalog import engine_options, engines, find_library, list_forms
from edgeq_device.errors import RuntimeUnavailableError

from edgeq.bundle.spec import BundleSpec
from edgeq.bundle.write import write_bundle

from .attacks.directories import edit_ort, option_that_writes, seal
from .samples import HERE, INPUT, answer, linear, variant
from .strict_reader import FormatError, read_package

CLIENT = Path(__file__).with_name("ort_client.py")


def open_in_onnxruntime(root: Path, component: str, tmp_path: Path, *plugin: str) -> dict[str, Any]:
    """Return what ONNX Runtime's model-package reader finds in `root`. It runs in its own process.

    Args:
        plugin: the provider and the library of a plug-in to register.
    """
    data = tmp_path / "input.npy"
    np.save(data, INPUT)
    done = subprocess.run(
        [sys.executable, str(CLIENT), str(root), component, str(data), *plugin],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
    result: dict[str, Any] = json.loads(done.stdout)
    if not result["reachable"]:
        pytest.skip(result["reason"])
    return result


def shared_weights(folder: Path) -> BundleSpec:
    """Return variants that share their weights. The first two are the same model, and the third has another scalar."""
    first = linear(folder / "a" / "m.onnx", 0.0, external="weights.bin")
    second = linear(folder / "b" / "m.onnx", 1.0, external="weights.bin")
    return BundleSpec("shared", (variant("one", first, 0.0), variant("same", first, 0.0), variant("two", second, 1.0)))


@pytest.mark.parametrize(("component", "first", "bias"), [("model", "plain", 0.0), ("float32", "float32", 0.25)])
def test_onnxruntime_opens_selects_and_runs(
    good: Path, tmp_path: Path, component: str, first: str, bias: float
) -> None:
    result = open_in_onnxruntime(good, component, tmp_path)
    assert "refused" not in result, result
    assert result["components"] == {"model": ["plain", "better", "elsewhere"], "float32": ["float32"]}
    assert result["selected"] == first, "ties go to the order of declaration"
    assert Path(result["folder"]) == good / "models" / component / first
    np.testing.assert_array_equal(np.array(result["output"], np.float32), outputs_in_python(good, component, first))
    np.testing.assert_allclose(result["output"], answer(bias), atol=1e-4)


def test_onnxruntime_finds_shared_models_and_weights(tmp_path: Path) -> None:
    place = tmp_path / "bundle"
    write_bundle(shared_weights(tmp_path / "models"), place)
    found = read_package(place)["model"]
    assert found["one"].model.is_relative_to(place / "shared_assets")
    assert "session.model_external_initializers_file_folder_path" in found["one"].session_options
    result = open_in_onnxruntime(place, "model", tmp_path)
    assert result.get("selected") == "one", result
    np.testing.assert_allclose(result["output"], answer(0.0), atol=1e-4)


@pytest.mark.parametrize("shared", [False, True], ids=["one model", "weights that two models share"])
def test_onnxruntime_opens_a_plugins_variant_in_the_precision_of_the_bundle(shared: bool, tmp_path: Path) -> None:
    plugin = list_forms(engines()["openvino"])[0]
    try:
        library = find_library(plugin, onnxruntime.__version__)
    except RuntimeUnavailableError as error:
        pytest.skip(str(error))
    own = linear(tmp_path / "own" / "m.onnx", 0.0, external="weights.bin")
    other = linear(tmp_path / "other" / "m.onnx", 1.0, external="weights.bin")
    options = engine_options(plugin, "f32")
    specs = (
        variant("own", own, 0.0),
        variant("better", other if shared else own, float(shared), ep=plugin.provider, provider_options=options),
    )
    write_bundle(BundleSpec("linear", specs), tmp_path / "b")
    result = open_in_onnxruntime(tmp_path / "b", "model", tmp_path, plugin.provider, str(library))
    assert result.get("selected") == "better", result
    # Without the options, the plug-in would use bfloat16 if the CPU has it, with an error of 0.01 here.
    np.testing.assert_allclose(result["output"], answer(float(shared)), atol=1e-4)


def test_onnxruntime_refuses_what_the_format_forbids(copy: Path, tmp_path: Path) -> None:
    option_that_writes(copy)
    result = open_in_onnxruntime(copy, "model", tmp_path)
    assert "session.optimized_model_filepath" in result["refused"]


def test_onnxruntime_refuses_an_unknown_key(copy: Path, tmp_path: Path) -> None:
    seal(copy, run_this="x")
    assert "run_this" in open_in_onnxruntime(copy, "model", tmp_path)["refused"]


def test_the_strict_reader_takes_the_bundle(good: Path) -> None:
    found = read_package(good)
    assert list(found) == ["model", "float32"]
    assert list(found["model"]) == ["plain", "better", "elsewhere"]
    assert found["model"]["plain"].session_options == {"session.x64quantprecision": "1"}
    assert found["model"]["better"].model == found["model"]["elsewhere"].model
    assert found["model"]["better"].executors["edgeq"]["required_features"] == ["telepathy"]
    assert found["model"]["plain"].executors["edgeq"]["architecture"] == HERE
    assert {variant.ep for variant in found["model"].values()} == {"CPUExecutionProvider"}


def test_the_strict_reader_takes_shared_weights(tmp_path: Path) -> None:
    place = tmp_path / "bundle"
    write_bundle(shared_weights(tmp_path / "models"), place)
    folders = {
        v.session_options.get("session.model_external_initializers_file_folder_path")
        for v in read_package(place)["model"].values()
    }
    assert len(folders) == 1
    assert len(list((place / "shared_assets").rglob("weights.bin"))) == 1
    assert len(list(place.rglob("weights.bin"))) == 1


def test_the_strict_reader_is_strict(copy: Path) -> None:
    edit_ort(copy, model_file="../plain/model.onnx")
    with pytest.raises(FormatError, match="portable path"):
        read_package(copy)
    seal(copy, unknown=1)
    with pytest.raises(FormatError, match="unknown top-level"):
        read_package(copy)


def outputs_in_python(root: Path, component: str, name: str) -> np.ndarray[Any, Any]:
    found = read_package(root)[component][name]
    options = onnxruntime.SessionOptions()
    for key, value in found.session_options.items():
        options.add_session_config_entry(key, value)
    session = onnxruntime.InferenceSession(str(found.model), options, providers=[found.ep])
    return np.asarray(session.run(None, {"x": INPUT})[0])
