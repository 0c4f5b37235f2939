"""Test the object detection example from end to end: readers in parts and batches, tables for TensorRT, average
precision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationMethod, create_calibrator
from PIL import Image

from edgeq.calibration.ranges import derive_ranges
from edgeq.calibration.table import read_tables
from edgeq.compat.detector import collect_readers, command
from edgeq.compat.evaluators import DetectionEvaluator
from edgeq.compat.readers import YoloDataReader
from edgeq.errors import UsageError
from tests.graphs import proto

SIZE, IMAGES = 16, 5
# A letterbox of 16x16 shrinks an image of 32x24 to 16x12 and puts it two rows down.
OBJECT, SEEN = [8, 4, 16, 12], [8, 7, 8, 6]


@pytest.fixture
def detector(tmp_path: Path) -> Path:
    """Write a YOLOv8 head with a free batch size that always detects the same object, after a convolution."""
    boxes = np.zeros((1, 6, 8), np.float32)
    boxes[0, :4], boxes[0, 4, 0] = np.array(SEEN)[:, None], 0.9
    weights = {
        "w": np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32),
        "nothing": np.zeros(1, np.float32),
        "boxes": boxes,
        "axes": np.array([1, 2], np.int64),
    }
    body = f"""g (float[n, 3, {SIZE}, {SIZE}] images) => (float[n, 6, 8] output0) {{
        [conv] c = Conv<pads = [1, 1, 1, 1]>(images, w)
        [mean] mean = ReduceMean<axes = [1, 2, 3], keepdims = 0>(c)
        [mul] zero = Mul(mean, nothing)
        [unsqueeze] column = Unsqueeze(zero, axes)
        [add] output0 = Add(column, boxes)
    }}"""
    path = tmp_path / "yolo.onnx"
    onnx.save(proto(body, weights, opset=13), path)
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "val2017"
    folder.mkdir()
    for index in range(IMAGES):
        pixels = np.random.default_rng(index).integers(0, 256, (24, 32, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder


@pytest.fixture
def annotations(tmp_path: Path) -> Path:
    truth = [
        {"id": i + 1, "image_id": i, "category_id": 1, "bbox": OBJECT, "area": 192, "iscrowd": 0} for i in range(IMAGES)
    ]
    plain = {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 32, "height": 24} for i in range(IMAGES)],
        "annotations": truth,
        "categories": [{"id": 1, "name": "thing"}, {"id": 2, "name": "other"}],
    }
    path = tmp_path / "instances_val2017.json"
    path.write_text(json.dumps(plain))
    return path


def reader(pictures: Path, model: Path, start: int = 0, end: int = 0, batch: int = 1) -> YoloDataReader:
    return YoloDataReader(
        pictures,
        width=SIZE,
        height=SIZE,
        start_index=start,
        end_index=end,
        stride=2,
        batch_size=batch,
        model_path=model,
    )


@pytest.mark.parametrize(("batch", "runs"), [(1, [1] * 5), (2, [2, 2, 1]), (8, [5])])
def test_serial_and_batch_readers(detector: Path, pictures: Path, batch: int, runs: list[int]) -> None:
    made = reader(pictures, detector, batch=batch)
    feeds = list(made)
    assert [len(feed["images"]) for feed in feeds] == runs
    assert len(made) == len(runs)
    assert (made.get_dataset_size(), made.get_input_name()) == (IMAGES, "images")
    assert made.get_next() is None
    made.rewind()
    serial = np.concatenate([feed["images"] for feed in reader(pictures, detector)])
    np.testing.assert_array_equal(np.concatenate([feed["images"] for feed in made]), serial)
    assert serial.max() <= 1
    assert np.allclose(serial[0, :, :2], 128 / 255)


def test_a_part_of_the_data(detector: Path, pictures: Path) -> None:
    whole = [feed["images"] for feed in reader(pictures, detector)]
    part = reader(pictures, detector, 1, 3)
    np.testing.assert_array_equal(np.concatenate([f["images"] for f in part]), np.concatenate(whole[1:3]))
    part.set_range(3, 100)
    assert part.get_dataset_size() == 2
    with pytest.raises(UsageError):
        part.set_range(3, 3)
    with pytest.raises(UsageError):
        reader(pictures, detector, batch=0)


@pytest.mark.parametrize("batch", [1, 2])
def test_ranges_are_those_of_the_older_calibrator(detector: Path, pictures: Path, tmp_path: Path, batch: int) -> None:
    """Ranges from readers in parts, one by one or in batches, equal the older calibrator's, as in the example."""
    statistics = collect_readers(detector, [reader(pictures, detector, s, s + 2, batch) for s in range(0, IMAGES, 2)])
    ranges = derive_ranges(statistics)
    calibrator = create_calibrator(
        detector, None, str(tmp_path / "augmented.onnx"), calibrate_method=CalibrationMethod.MinMax
    )
    for start in range(0, IMAGES, 2):
        calibrator.collect_data(reader(pictures, detector, start, start + 2))
    wanted = {name: data.range_value for name, data in calibrator.compute_data().data.items()}
    for name in ("images", "c", "output0"):
        low, high = (float(np.asarray(value).reshape(-1)[0]) for value in wanted[name])
        assert (ranges[name].low, ranges[name].high) == pytest.approx((min(low, 0), max(high, 0)), rel=1e-6)


@pytest.mark.parametrize("batch", [1, 2])
def test_average_precision_in_parts(detector: Path, pictures: Path, annotations: Path, batch: int) -> None:
    evaluator = DetectionEvaluator(detector, None, SIZE, SIZE, annotations=annotations, decoder="yolov8")
    with pytest.raises(UsageError):
        evaluator.predict()
    with pytest.raises(UsageError):
        evaluator.get_result()
    for start in range(0, IMAGES, 2):
        evaluator.set_data_reader(reader(pictures, detector, start, start + 2, batch))
        evaluator.predict()
    result = evaluator.evaluate(evaluator.get_result())
    assert result["mAP50-95"] == pytest.approx(1)


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """Write a model like the model zoo's YOLOv3: it takes the image's size, returns boxes of that size, and suppresses
    overlaps itself.
    """
    left, top, width, height = SEEN[0] - SEEN[2] / 2, SEEN[1] - SEEN[3] / 2, *SEEN[2:]
    box = np.array([top, left, top + height, left + width], np.float32) / SIZE
    model = proto(
        """g (float[N, 3, 16, 16] input_1, float[1, 2] image_shape)
           => (float[1, 2, 4] boxes, float[1, 2, 2] scores, int32[1, 3] indices)
           <float[1, 2, 2] s = {0.1, 0.9, 0.2, 0.3}, int32[1, 3] kept = {0, 0, 1}, int64[2] twice = {1, 2}> {
             sizes = Tile (image_shape, twice)
             edges = Mul (b, sizes)
             [conv] c = Conv (input_1, w)
             m = ReduceMean <axes = [0, 1, 2, 3], keepdims = 0> (c)
             z = Sub (m, m)
             boxes = Add (edges, z)
             scores = Identity (s)
             indices = Identity (kept)
           }""",
        opset=13,
        ir_version=7,
    )
    weights = {"b": np.stack([np.zeros(4, np.float32), box])[None], "w": np.ones((1, 3, 3, 3), np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    path = tmp_path / "yolov3.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("batch", [1, 20])
def test_the_loop_of_the_older_documents(zoo: Path, pictures: Path, annotations: Path, batch: int) -> None:
    """The loop in the documentation of 2021 works: one evaluator for each part, with the combined results judged
    together.
    """
    from edgeq.compat import YoloV3DataReader, YoloV3Evaluator

    results: list[dict[str, Any]] = []
    for i in range(0, IMAGES, 2):
        dr = YoloV3DataReader(
            pictures, SIZE, SIZE, model_path=zoo, start_index=i, size_limit=2, batch_size=batch, is_evaluation=True
        )
        assert dr.get_batch_size() == batch
        evaluator = YoloV3Evaluator(zoo, dr, providers=["CPUExecutionProvider"], annotations=annotations)
        evaluator.predict()
        results += evaluator.get_result()
    assert len(results) == IMAGES
    assert results[0] == {"image_id": 0, "category_id": 1, "bbox": pytest.approx(OBJECT), "score": pytest.approx(0.9)}
    assert evaluator.evaluate(results, annotations)["mAP50-95"] == pytest.approx(1)
    # All annotated images count, also those without a detection.
    assert evaluator.evaluate(results[:2], annotations)["AR100"] == pytest.approx(2 / IMAGES)


def test_the_example_as_it_stands(
    zoo: Path, pictures: Path, annotations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example runs unchanged: annotations in its folder, the reader on the augmented model, a provider that is
    missing.
    """
    from edgeq.compat import create_calibrator
    from edgeq.compat.calibrators import write_calibration_table
    from edgeq.compat.evaluators import YoloV3VariantEvaluator
    from edgeq.compat.readers import YoloV3VariantDataReader

    monkeypatch.chdir(tmp_path)
    (tmp_path / "annotations").mkdir()
    annotations.rename(tmp_path / "annotations" / "instances_val2017.json")
    (tmp_path / "names.txt").write_text("other\nthing\n")
    calibrator = create_calibrator(str(zoo), None, augmented_model_path="augmented_model.onnx")
    calibrator.set_execution_providers(["CUDAExecutionProvider"])
    for i in range(0, IMAGES, 2):
        reader = YoloV3VariantDataReader(
            "val2017",
            width=SIZE,
            height=SIZE,
            start_index=i,
            end_index=i + 2,
            stride=2,
            model_path="augmented_model.onnx",
        )
        calibrator.collect_data(reader)
    write_calibration_table(calibrator.compute_range())
    assert "c" in read_tables(tmp_path)
    evaluator = YoloV3VariantEvaluator("yolov3.onnx", None, width=SIZE, height=SIZE, onnx_object_class_file="names.txt")
    with pytest.raises(UsageError, match="set_data_reader"):
        evaluator.predict()
    for i in range(0, IMAGES, 2):
        reader = YoloV3VariantDataReader(
            "val2017", width=SIZE, height=SIZE, start_index=i, end_index=i + 2, model_path="yolov3.onnx"
        )
        evaluator.set_data_reader(reader)
        evaluator.predict()
    result = evaluator.get_result()
    # By the names of the model's classes, class 0 is the second category.
    assert {found["category_id"] for found in result} == {2}
    assert evaluator.evaluate(result, "./annotations/instances_val2017.json")["mAP50-95"] == 0


def test_missing_parts_of_the_example_name_a_replacement() -> None:
    with pytest.raises(UsageError, match=r"YoloV3Evaluator\(\.\.\., decoder="):
        from edgeq.compat.evaluators import YoloV3Variant2Evaluator  # noqa: F401
    with pytest.raises(UsageError, match=r"preprocess='file\.py:function'"):
        YoloDataReader("calib", preprocess_func=print)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


@pytest.mark.parametrize("method", ["MinMax", "Entropy", "Percentile"])
def test_the_example_as_a_command(
    detector: Path, pictures: Path, annotations: Path, tmp_path: Path, method: str
) -> None:
    result = run(
        *("--model", detector, "--calibration_dataset", pictures, "--validation_dataset", pictures),
        *("--annotations", annotations, "--decoder", "yolov8", "--width", SIZE, "--height", SIZE),
        *("--stride", 2, "--batch_size", 2, "--calibrate_method", method, "--output_dir", tmp_path / "tables"),
    )
    assert result.exit_code == 0, result.output
    assert "mAP50-95: 1.0000" in result.output
    table = read_tables(tmp_path / "tables")
    session = onnxruntime.InferenceSession(detector)
    assert set(table) >= {"images", "c", session.get_outputs()[0].name}
    assert 0.5 <= table["images"] <= 1
    # A runtime reads the largest magnitude, which is above zero for every tensor with values.
    assert all(value > 0 for name, value in table.items() if name not in ("zero", "column"))


def test_mistakes_are_one_line(detector: Path, pictures: Path, annotations: Path) -> None:
    for arguments, code in (
        ((), 2),
        (("--validation_dataset", pictures), 2),
        (("--calibration_dataset", pictures / "nowhere"), 4),
        (("--validation_dataset", pictures, "--annotations", annotations, "--decoder", "nobody"), 2),
    ):
        result = run("--model", detector, *arguments)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output


@pytest.mark.slow
def test_yolox_nano(shared_data: Path, tmp_path: Path) -> None:
    """The float model's mean average precision over all 128 images, in parts of 50, is 33.45, as an independent script
    found.
    """
    folder = shared_data / "coco256"
    (tmp_path / "calib").mkdir()
    for image in sorted((folder / "calib").iterdir())[:12]:
        (tmp_path / "calib" / image.name).write_bytes(image.read_bytes())
    result = run(
        *("--model", shared_data / "yolox_nano" / "model.onnx"),
        *("--calibration_dataset", tmp_path / "calib", "--stride", 50, "--output_dir", tmp_path),
        *("--validation_dataset", folder / "val", "--annotations", folder / "instances_val.json"),
        *("--decoder", "yolox", "--preprocess", "benchmarks/specs/yolox_nano.toml", "--calibrate_method", "MinMax"),
    )
    assert result.exit_code == 0, result.output
    found = dict(line.split(": ") for line in result.output.splitlines() if line.startswith("mAP"))
    assert float(found["mAP50-95"]) == pytest.approx(0.3345, abs=0.001)
    assert len(read_tables(tmp_path)) > 300
