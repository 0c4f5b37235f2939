"""The object detection example, end to end: readers in parts and batches, tables for TensorRT, average precision."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationMethod, create_calibrator
from PIL import Image

from edgeq.calibrate.ranges import derive_ranges
from edgeq.calibrate.table import read_tables
from edgeq.compat.detector import collect_readers, command
from edgeq.compat.evaluators import DetectionEvaluator
from edgeq.compat.readers import YoloDataReader
from edgeq.errors import UsageError

SIZE, IMAGES = 16, 5
# In a letterbox of 16x16, an image of 32x24 is 16x12, two rows down.
OBJECT, SEEN = [8, 4, 16, 12], [8, 7, 8, 6]


@pytest.fixture
def detector(tmp_path: Path) -> Path:
    """A YOLOv8 head with a free batch that always sees the same object, after a convolution to calibrate."""
    boxes = np.zeros((1, 6, 8), np.float32)
    boxes[0, :4], boxes[0, 4, 0] = np.array(SEEN)[:, None], 0.9
    weights = {
        "w": np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32),
        "nothing": np.zeros(1, np.float32),
        "boxes": boxes,
        "axes": np.array([1, 2], np.int64),
    }
    nodes = [
        helper.make_node("Conv", ["images", "w"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("ReduceMean", ["c"], ["mean"], "mean", axes=[1, 2, 3], keepdims=0),
        helper.make_node("Mul", ["mean", "nothing"], ["zero"], "mul"),
        helper.make_node("Unsqueeze", ["zero", "axes"], ["column"], "unsqueeze"),
        helper.make_node("Add", ["column", "boxes"], ["output0"], "add"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 3, SIZE, SIZE])],
        [helper.make_tensor_value_info("output0", TensorProto.FLOAT, ["n", 6, 8])],
        [numpy_helper.from_array(v, n) for n, v in weights.items()],
    )
    path = tmp_path / "yolo.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
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
    """In parts, serial or in batches, as the example has it."""
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
    # A runtime reads the largest magnitude: never zero or less for a tensor that holds something.
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
    """Float mean average precision over all 128 images, in parts of 50: 33.45, by an independent script."""
    folder = shared_data / "coco256"
    result = run(
        *("--model", shared_data / "yolox_nano" / "model.onnx"),
        *("--calibration_dataset", folder / "calib", "--stride", 50, "--output_dir", tmp_path),
        *("--validation_dataset", folder / "val", "--annotations", folder / "instances_val.json"),
        *("--decoder", "yolox", "--preprocess", "benchmarks/specs/yolox_nano.toml", "--calibrate_method", "MinMax"),
    )
    assert result.exit_code == 0, result.output
    found = dict(line.split(": ") for line in result.output.splitlines() if line.startswith("mAP"))
    assert float(found["mAP50-95"]) == pytest.approx(0.3345, abs=0.001)
    assert len(read_tables(tmp_path)) > 300
