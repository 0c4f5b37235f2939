from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from edgeq.bundle.spec import BundleSpec, VariantSpec
from edgeq.bundle.write import write_bundle
from edgeq.cli import group
from edgeq.data.samples import open_samples
from edgeq.errors import BundleError, DataError, EdgeqError, ModelError, UsageError
from edgeq.measure.accuracy import evaluate
from edgeq.measure.evaluation import EvalRequest, run_evaluation
from edgeq.measure.loaded_model import open_model
from edgeq.measure.task import TaskOptions
from edgeq.run.session import SessionSettings
from edgeq.util.records import plain
from tests.measure.fakes import linear_model

X = np.array([[0, 1, 2], [5, 1, 2], [0, 3, 2], [0, 1, 2]], np.float32)
Y = np.array([2, 0, 1, 0])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, scale in (("up", 1.0), ("down", -1.0), ("other", 1.0)):
        model = linear_model(scale)
        if name == "other":
            model = onnx.compose.add_prefix(model, "p_", rename_inputs=True)
        onnx.save(model, tmp_path / f"{name}.onnx")
    np.savez(tmp_path / "data.npz", x=X)
    np.save(tmp_path / "labels.npy", Y)
    return tmp_path


def ask(folder: Path, model: str = "up.onnx", **changes: Any) -> EvalRequest:
    fields: dict[str, Any] = {
        "model": folder / model,
        "data": folder / "data.npz",
        "labels": folder / "labels.npy",
        "task": "classification",
    }
    return EvalRequest(**(fields | changes))


def bundle(folder: Path, name: str, preprocess: Any = None, **info: Any) -> Path:
    info["preprocessing"] = preprocess
    variant = VariantSpec(
        "portable", folder / "up.onnx", info=info, session_options={"session.use_env_allocators": "1"}
    )
    write_bundle(BundleSpec("demo", (variant,)), folder / name)
    return folder / name


def test_a_model_on_labelled_data(folder: Path) -> None:
    record = plain(run_evaluation(ask(folder)))
    assert record["metrics"] == {"top1": 0.75}
    assert record["samples"] == 4
    assert record["reference"] is None
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_a_reference_is_run_on_the_same_samples(folder: Path) -> None:
    result = run_evaluation(ask(folder, "down.onnx", reference=folder / "up.onnx"))
    assert result.loss == 0.5
    record = plain(result)["reference"]
    assert record["metrics"] == {"top1": 0.75}
    assert record["agreement"]["outputs"][0]["cosine"] == pytest.approx(-1)


def test_agreement_alone_needs_no_labels(folder: Path) -> None:
    record = plain(run_evaluation(ask(folder, task=None, labels=None, reference=folder / "up.onnx")))
    assert record["task"] is None
    assert record["metrics"] == {}
    assert record["reference"]["agreement"]["outputs"][0]["equal"] is True


@pytest.mark.parametrize(("changes", "count"), [({"count": 2}, 2), ({"start": 1, "stride": 2}, 2), ({"start": 3}, 1)])
def test_a_part_of_the_data(folder: Path, changes: dict[str, int], count: int) -> None:
    assert run_evaluation(ask(folder, **changes)).samples == count


@pytest.mark.parametrize("name", ["b", "b.edgeq"])
def test_a_bundle_runs_with_its_own_options(folder: Path, name: str) -> None:
    place = bundle(folder, name, optimization="basic")
    result = run_evaluation(
        ask(folder, name, settings=SessionSettings(intra_op_threads=1), reference=folder / "up.onnx")
    )
    assert result.variant == "portable"
    assert result.accuracy is not None
    assert result.accuracy.value == 0.75
    assert result.settings.optimization == "basic"
    assert result.settings.config == {"session.use_env_allocators": "1"}
    assert result.settings.intra_op_threads == 1
    assert result.loss == 0
    with pytest.raises(BundleError, match="no variant 'fast'"):
        run_evaluation(ask(folder, name, variant="fast"))
    assert place.exists()


def test_the_function_takes_a_bundle_too(folder: Path) -> None:
    samples = [(x[None], int(y)) for x, y in zip(X, Y, strict=True)]
    with open_model(folder / "up.onnx") as loaded:
        open_data = open_samples(samples, loaded.signature)
    accuracy = evaluate(bundle(folder, "b", optimization="none"), open_data, "classification")
    assert accuracy.value == 0.75
    assert accuracy.settings.optimization == "none"


def test_a_bundle_knows_its_preprocessing(folder: Path) -> None:
    steps = {"steps": [{"op": "multiply", "value": -1.0}], "source": {"key": "x", "layout": "F"}}
    bundle(folder, "b", preprocess=steps)
    result = run_evaluation(ask(folder, "b"))
    assert result.accuracy is not None
    assert result.accuracy.value == 0.25
    named = run_evaluation(ask(folder, "b", preprocess="key=x,source.layout=F,multiply=2"))
    assert named.accuracy is not None
    assert named.accuracy.value == 0.75


def test_a_bundle_names_no_file_of_labels(folder: Path) -> None:
    source = {"key": "x", "layout": "F", "labels": str(folder / "labels.npy")}
    bundle(folder, "b", preprocess={"steps": [], "source": source})
    with pytest.raises(DataError, match="has no label"):
        run_evaluation(ask(folder, "b", labels=None))
    bundle(folder, "c", preprocess={"steps": [], "source": source | {"labels": "name:data*{label}.npz"}})
    with open_model(folder / "c") as loaded:
        assert loaded.preprocess is not None
        assert loaded.preprocess["source"]["labels"] == "name:data*{label}.npz"


def test_a_damaged_bundle_is_refused(folder: Path) -> None:
    place = bundle(folder, "b")
    manifest = place / "manifest.json"
    manifest.write_text(manifest.read_text().replace("demo", "dem0"))
    (place / "extra.py").write_text("x")
    with pytest.raises(BundleError, match=r"extra\.py"):
        run_evaluation(ask(folder, "b"))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"task": None, "labels": None}, UsageError, "nothing to measure"),
        ({"task": None, "reference": True, "options": TaskOptions(class_offset=1)}, UsageError, "without a task"),
        ({"variant": "fast"}, UsageError, "has no variants"),
        ({"model": "missing.onnx"}, ModelError, "missing.onnx"),
        ({"model": "labels.npy"}, ModelError, "labels.npy"),
        ({"data": "missing.npz"}, DataError, "missing.npz"),
        ({"labels": None}, DataError, "has no label"),
        ({"reference": "other.onnx"}, UsageError, "inputs differ"),
    ],
)
def test_refuses_incomplete_requests(
    folder: Path, changes: dict[str, Any], kind: type[EdgeqError], message: str
) -> None:
    for key in ("model", "data", "reference"):
        if key in changes:
            changes = changes | {key: folder / ("up.onnx" if changes[key] is True else changes[key])}
    with pytest.raises(kind, match=message):
        run_evaluation(ask(folder, **changes))


def test_the_signature_of_a_model_is_read_safely(folder: Path) -> None:
    with open_model(folder / "up.onnx") as loaded:
        assert [i.name for i in loaded.signature.inputs] == ["x"]
        assert loaded.name.endswith("up.onnx")


KEYS = [
    "model",
    "variant",
    "data",
    "samples",
    "task",
    "primary",
    "higher_is_better",
    "metrics",
    "options",
    "warnings",
    "settings",
    "coverage",
    "reference",
]


def run(*arguments: object) -> Any:
    return CliRunner().invoke(group, ["eval", *map(str, arguments)])


def test_the_command_prints_json_alone(folder: Path) -> None:
    files = ("--data", folder / "data.npz", "--labels", folder / "labels.npy", "--task", "classification")
    process = run(folder / "up.onnx", *files, "--class-offset", 0, "--json")
    assert process.exit_code == 0
    record = json.loads(process.stdout)
    assert list(record) == KEYS
    assert record["options"] == {"class_offset": 0}


def test_the_command_speaks_to_people(folder: Path) -> None:
    files = ("--data", folder / "data.npz", "--labels", folder / "labels.npy", "--task", "classification")
    process = run(folder / "down.onnx", *files, "--reference", folder / "up.onnx")
    assert process.exit_code == 0
    for text in ("top-1", "25.00", "75.00", "\u221250.00", "SQNR", "-6.0"):
        assert text in process.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--task", "segmentation"], 2, "unknown task 'segmentation'"),
        (["--task", "detection", "--decoder", "yolox"], 2, "needs annotations"),
        (["--task", "classification"], 4, "has no label"),
        ([], 2, "nothing to measure"),
    ],
)
def test_the_command_ends_on_one_line(folder: Path, arguments: list[str], code: int, text: str) -> None:
    process = run(folder / "up.onnx", "--data", folder / "data.npz", *arguments, "-q")
    assert process.exit_code == code
    assert text in process.stderr
    assert process.stderr.count("\n") == 1
    assert process.stdout == ""
