"""The figures that each shared model's meta.json gives, through the same door as `edgeq eval`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from edgeq.measure.evaluation import Question, answer
from edgeq.measure.task import TaskOptions
from edgeq.session import SessionSettings

CIFAR = "source.layout=HWC,dtype=float64,divide=255,subtract=[.485,.456,.406],divide=[.229,.224,.225],layout=model"
YOLOX = "letterbox=416:top-left:114:bilinear,channels=BGR,layout=model"


@dataclass(frozen=True)
class Bar:
    """One figure: what to run in shared/data, and which keys of meta.json's "float32" hold the metrics."""

    name: str
    model: str
    data: str
    preprocess: str
    figures: dict[str, str]
    samples: int
    task: str = "classification"
    labels: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


BARS = [
    Bar(
        "mobilenet",
        "mobilenet_v1_0.25_224",
        "imagenet-sample/val",
        "crop=224,multiply=0.00784313725490196,subtract=1,layout=model",
        {"top1": "top1", "top5": "top5"},
        900,
        labels="name:{label}_*",
        options={"class_offset": 1},
    ),
    Bar(
        "resnet20-lossless",
        "resnet20_cifar10",
        "cifar10/test_lossless_249.npz",
        f"key=X,label=Y,{CIFAR}",
        {"top1": "top1_lossless"},
        249,
    ),
    Bar(
        "resnet20-jpeg",
        "resnet20_cifar10",
        "cifar10/test_jpeg_3000.npz",
        f"encoded=jpg,offsets=off,label=Y,{CIFAR}",
        {"top1": "top1_jpeg"},
        3000,
    ),
    Bar(
        "vww",
        "mlperf_tiny_vww",
        "mlperf_tiny_vww/data/val_*.npz",
        "key=X,label=Y,source.layout=HWC,divide=255,layout=model",
        {"top1": "top1"},
        600,
    ),
    Bar(
        "kws",
        "mlperf_tiny_kws",
        "mlperf_tiny_kws/data/val_900.npz",
        "key=X,label=Y,source.layout=HW,subtract=83,multiply=0.5847029089927673,layout=NCHW",
        {"top1": "top1"},
        900,
    ),
    Bar(
        "lenet",
        "lenet_mnist",
        "lenet_mnist/t10k-images-idx3-ubyte.gz",
        "source.layout=HW,divide=255,layout=NCHW",
        {"top1": "top1"},
        10_000,
        labels="t10k-labels-idx1-ubyte.gz",
    ),
    Bar(
        "yolox",
        "yolox_nano",
        "coco256/val",
        YOLOX,
        {"mAP50-95": "mAP50-95", "mAP50": "mAP50"},
        128,
        task="detection",
        options={"annotations": "coco256/instances_val.json", "decoder": "yolox"},
    ),
    Bar(
        "anomaly",
        "mlperf_tiny_ad",
        "mlperf_tiny_ad/data/val_*.npz",
        "key=X,label=Y,source.layout=TF,dtype=float32,window=5",
        {"auc": "auc"},
        120,
        task="anomaly",
    ),
]


def question(shared: Path, bar: Bar, **changes: Any) -> Question:
    options = {k: shared / v if k == "annotations" else v for k, v in bar.options.items()}
    return Question(
        model=shared / bar.model / "model.onnx",
        data=str(shared / bar.data),
        task=bar.task,
        options=TaskOptions(**options),
        preprocess=bar.preprocess,
        labels=bar.labels,
        settings=SessionSettings(intra_op_threads=2),
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
    found = answer(question(shared_data, bar))
    assert found.count == bar.samples
    assert found.accuracy is not None
    for metric, key in bar.figures.items():
        digits = max(decimals(expected[key]), 4)
        assert f"{found.accuracy.metrics[metric]:.{digits}f}" == f"{expected[key]:.{digits}f}"


# Name → count, stride, and what that part of the data gives, so that a quick run sees a change.
PARTS = {
    "mobilenet": (20, 1, 0),
    "resnet20-lossless": (20, 1, 0),
    "resnet20-jpeg": (20, 1, 0),
    "vww": (20, 30, 0),
    "kws": (20, 1, 0),
    "lenet": (50, 1, 0),
    "yolox": (10, 1, 0),
    "anomaly": (10, 12, 0),
}


@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.name)
def test_a_part_of_the_data(shared_data: Path, bar: Bar) -> None:
    needs(bar)
    count, stride, expected = PARTS[bar.name]
    found = answer(question(shared_data, bar, count=count, stride=stride))
    assert found.count == count
    assert found.accuracy is not None
    assert found.accuracy.value == pytest.approx(expected, abs=1e-3)
