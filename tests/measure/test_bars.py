"""Compare the figures in each shared model's meta.json with those of `edgeq eval`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from edgeq.measure.evaluation import EvalRequest, run_evaluation
from edgeq.measure.task import TaskOptions
from edgeq.run.session import SessionSettings

SPECS = Path(__file__).resolve().parents[2] / "benchmarks" / "specs"


@dataclass(frozen=True)
class Bar:
    """Describe one figure: the model and data in shared/data, and the keys of its metrics in meta.json's "float32"."""

    name: str
    model: str
    data: str
    figures: Mapping[str, str]
    samples: int
    task: str = "classification"
    options: Mapping[str, Any] = field(default_factory=dict)


TOP1 = {"top1": "top1"}
IMAGENET = {"top1": "top1", "top5": "top5"}
COCO = {"mAP50-95": "mAP50-95", "mAP50": "mAP50"}
YOLOX = {"annotations": "coco256/instances_val.json", "decoder": "yolox"}
CIFAR = "resnet20_cifar10"
BARS = [
    Bar("mobilenet", "mobilenet_v1_0.25_224", "imagenet-sample/val", IMAGENET, 900, options={"class_offset": 1}),
    Bar("lossless", CIFAR, "cifar10/test_lossless_249.npz", {"top1": "top1_lossless"}, 249),
    Bar("jpeg", CIFAR, "cifar10/test_jpeg_3000.npz", {"top1": "top1_jpeg"}, 3000),
    Bar("vww", "mlperf_tiny_vww", "mlperf_tiny_vww/data/val_*.npz", TOP1, 600),
    Bar("kws", "mlperf_tiny_kws", "mlperf_tiny_kws/data/val_900.npz", TOP1, 900),
    Bar("lenet", "lenet_mnist", "lenet_mnist/t10k-images-idx3-ubyte.gz", TOP1, 10_000),
    Bar("yolox", "yolox_nano", "coco256/val", COCO, 128, "detection", YOLOX),
    Bar("anomaly", "mlperf_tiny_ad", "mlperf_tiny_ad/data/val_*.npz", {"auc": "auc"}, 120, "anomaly"),
]


def request(folder: Path, bar: Bar, **changes: Any) -> EvalRequest:
    options = {k: folder / v if k == "annotations" else v for k, v in bar.options.items()}
    return EvalRequest(
        model=folder / bar.model / "model.onnx",
        data=str(folder / bar.data),
        task=bar.task,
        options=TaskOptions(**options),
        preprocess=SPECS / f"{bar.model}.toml",
        settings=SessionSettings(intra_op_threads=1),
        **changes,
    )


def needs(bar: Bar) -> None:
    if bar.task == "detection":
        pytest.importorskip("faster_coco_eval", reason="the coco extra is not installed")


def decimals(figure: float) -> int:
    return len(repr(figure).partition(".")[2])


@pytest.mark.slow
@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.name)
def test_the_figure_in_meta_json(shared_data: Path, bar: Bar) -> None:
    needs(bar)
    expected = json.loads((shared_data / bar.model / "meta.json").read_text())["float32"]
    result = run_evaluation(request(shared_data, bar))
    assert result.samples == bar.samples
    assert result.accuracy is not None
    for metric, key in bar.figures.items():
        digits = max(decimals(expected[key]), 4)
        assert f"{result.accuracy.metrics[metric]:.{digits}f}" == f"{expected[key]:.{digits}f}"


# Name → count, stride, and the figure on that part of the data, so that a quick run shows a change.
PARTS = {
    "mobilenet": (20, 1, 0.6),
    "lossless": (20, 1, 0.95),
    "jpeg": (40, 75, 0.75),
    "vww": (20, 30, 0.7),
    "kws": (20, 1, 0.85),
    "lenet": (200, 25, 0.99),
    "yolox": (10, 1, 0.3212),
    "anomaly": (24, 5, 0.9583),
}


@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.name)
def test_a_part_of_the_data(shared_data: Path, bar: Bar) -> None:
    needs(bar)
    count, stride, expected = PARTS[bar.name]
    result = run_evaluation(request(shared_data, bar, count=count, stride=stride))
    assert result.samples == count
    assert result.accuracy is not None
    assert result.accuracy.value == pytest.approx(expected, abs=1e-3)
