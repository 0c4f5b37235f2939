"""Test ImageNet accuracy as the documents show it: the evaluator of the examples, and MLPerf's main.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from edgeq.compat.evaluators import ClassificationEvaluator, ImageClassificationEvaluator
from edgeq.compat.mlperf import command
from edgeq.compat.readers import ImageNetDataReader, ResNet50DataReader
from edgeq.errors import UsageError
from tests.compat.models import SIZE, classifier

IMAGES = 6
PREPROCESS = "preprocess_method2"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return classifier(tmp_path / "resnet50.onnx")


@pytest.fixture
def imagenet(tmp_path: Path, model: Path) -> Path:
    """Write images and a val_map.txt with the model's own answers. Only the last two are wrong."""
    folder = tmp_path / "imagenet"
    folder.mkdir()
    for index in range(IMAGES):
        pixels = np.random.default_rng(index).integers(0, 256, (SIZE, SIZE, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"ILSVRC2012_val_{index:08}.png")
    session = onnxruntime.InferenceSession(model)
    answers = [int(session.run(None, feed)[0].argmax()) for feed in ResNet50DataReader(folder, model)]
    answers[-2:] = [(answer + 1) % 4 for answer in answers[-2:]]
    lines = [f"ILSVRC2012_val_{index:08}.png {answer}\n" for index, answer in enumerate(answers)]
    (folder / "val_map.txt").write_text("".join(lines))
    return folder


def test_the_reader_of_the_cpu_example(model: Path, imagenet: Path) -> None:
    """The reader computes as the example does: resize with Pillow, subtract the mean colour, put channels first."""
    feeds = list(ResNet50DataReader(imagenet, model))
    assert len(feeds) == IMAGES
    for feed, file in zip(feeds, sorted(imagenet.glob("*.png")), strict=True):
        resized = Image.open(file).resize((SIZE, SIZE))
        wanted = (np.float32(resized) - np.float32([123.68, 116.78, 103.94]))[None].transpose(0, 3, 1, 2)
        np.testing.assert_allclose(feed["x"], wanted, rtol=1e-6)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_evaluator_of_the_examples(model: Path, imagenet: Path, batch: int) -> None:
    evaluator = ClassificationEvaluator(model)
    for start in range(0, IMAGES, 4):
        reader = ImageNetDataReader(
            imagenet,
            SIZE,
            SIZE,
            start,
            start + 4,
            4,
            batch,
            model,
            preprocess=PREPROCESS,
            labels=str(imagenet / "val_map.txt"),
        )
        evaluator.set_data_reader(reader)
        evaluator.predict()
    assert evaluator.get_result() == {"top1": pytest.approx(4 / 6)}


def test_the_evaluator_of_the_tensorrt_example(
    model: Path, imagenet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The evaluator reads images in `val` and one-hot labels, collects the outputs, and judges them at the end."""
    (tmp_path / "ILSVRC2012").mkdir()
    shutil.copytree(imagenet, tmp_path / "ILSVRC2012" / "val", ignore=shutil.ignore_patterns("*.txt"))
    reader = ImageNetDataReader(
        str(tmp_path / "ILSVRC2012"),
        end_index=IMAGES,
        stride=IMAGES,
        batch_size=2,
        model_path=model,
        input_name="x",
        preprocess=PREPROCESS,
        labels=str(imagenet / "val_map.txt"),
    )
    evaluator = ImageClassificationEvaluator(model, reader.get_synset_id("ILSVRC2012", 0, IMAGES), reader)
    evaluator.predict()
    assert evaluator.evaluate(evaluator.get_result())["top 1"] == pytest.approx(4 / 6)
    assert "top 1: 0.6667" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"val_map\.txt"):
        ImageNetDataReader(imagenet, model_path=model, preprocess=PREPROCESS).get_synset_id()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


@pytest.mark.parametrize(("count", "share"), [(None, 4 / 6), (4, 1.0), (5, 0.8)])
def test_accuracy_of_the_first_items(
    model: Path, imagenet: Path, tmp_path: Path, count: int | None, share: float
) -> None:
    arguments = ["--model", model, "--dataset-path", imagenet, "--dataset", "imagenet", "--preprocess", PREPROCESS]
    counted = ["--count", count] if count else []
    result = run(*arguments, "--backend", "onnxruntime", "--accuracy", *counted, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert f"top1={100 * share:.3f}%, total={count or IMAGES}" in result.output
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["metrics"]["top1"] == pytest.approx(share)


@pytest.mark.parametrize("scenario", ["SingleStream", "MultiStream", "Server", "Offline"])
def test_speed_in_a_scenario(model: Path, imagenet: Path, scenario: str) -> None:
    arguments = ["--model", model, "--dataset-path", imagenet, "--preprocess", PREPROCESS, "--count", 2, "--time", 0.05]
    result = run(*arguments, "--profile", "resnet50-onnxruntime", "--scenario", scenario, "--max-batchsize", 2)
    assert result.exit_code == 0, result.output
    assert f"TestScenario.{scenario} count=" in result.output
    assert "p99_ms=" in result.output


def test_mistakes_are_one_line(model: Path, imagenet: Path) -> None:
    for arguments, code in (
        (["--dataset-path", imagenet, "--dataset", "coco", "--accuracy"], 2),
        (["--dataset-path", imagenet / "nowhere", "--accuracy"], 4),
        (["--dataset-path", imagenet, "--accuracy", "--dataset-list", "nowhere.txt", "--preprocess", PREPROCESS], 4),
    ):
        result = run("--model", model, *arguments)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output


@pytest.mark.slow
def test_mobilenet(shared_data: Path) -> None:
    """Top-1 of 900 images is 56.78, as an independent script found. The background class is skipped."""
    arguments = ["--model", shared_data / "mobilenet_v1_0.25_224" / "model.onnx", "--profile", "mobilenet-onnxruntime"]
    data = ["--dataset-path", shared_data / "imagenet-sample" / "val", "--accuracy", "-n", 900]
    result = run(*arguments, *data, "--preprocess", "benchmarks/specs/mobilenet_v1_0.25_224.toml")
    assert result.exit_code == 0, result.output
    assert "top1=56.778%" in result.output
