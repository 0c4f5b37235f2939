"""Read the labelled tasks of `shared/data` as arrays without edgeq, so that edgeq and the other tools get the same
samples.

The samples are preprocessed as each set's meta.json specifies. The recorded top-1 of a validation set is float32's
top-1 from meta.json.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgeq import demo

REPOSITORY = Path(__file__).resolve().parent.parent
Floats = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Task:
    """Hold a model, its calibration samples [N, ...], and its validation sets by name. A validation set is (samples [N,
    ...], labels [N], recorded top-1).

    The predicted class is argmax(output[class_offset:]).
    """

    name: str
    model: Path
    input: str
    calibration: Floats
    validation: dict[str, tuple[Floats, Labels, float]]
    class_offset: int = 0

    def top1(self, session: Any, part: str) -> float:
        """Return the share of correct answers. The samples run one at a time, as on a device."""
        x, y, _ = self.validation[part]
        right = 0
        for i in range(len(x)):
            scores = session.run(None, {self.input: x[i : i + 1]})[0].reshape(-1)[self.class_offset :]
            right += int(scores.argmax() == y[i])
        return right / len(x)


def shared_data() -> Path | None:
    """Return the folder that EDGEQ_SHARED_DATA names or, if it is not set, `shared/data` next to the checkout. Return
    None if that folder does not exist.
    """
    named = os.environ.get("EDGEQ_SHARED_DATA")
    candidates = [Path(named)] if named else [parent / "shared" / "data" for parent in REPOSITORY.parents]
    return next((c for c in candidates if c.is_dir()), None)


def required_data() -> Path:
    """Return `shared_data`. If there is none, end the benchmark with a message."""
    root = shared_data()
    if root is None:
        print("skipped: shared/data is not next to this checkout (or set EDGEQ_SHARED_DATA)")
        raise SystemExit(0)
    return root


def tasks(root: Path) -> Iterator[Task]:
    """Yield one task at a time, because the ImageNet task alone takes 600 MB."""
    yield _mobilenet(root)
    yield resnet20(root)
    yield _keywords(root)
    yield _wake_words(root)


def demo_task() -> Task:
    """Return the task of the built-in demo."""
    with np.load(demo.CALIBRATION) as calibration, np.load(demo.VALIDATION) as validation:
        recorded = demo.provenance()["float32"]["validation"]
        parts = {"validation": (validation["image"], validation["label"].astype(np.int64), recorded)}
        return Task("demo", demo.MODEL, "image", calibration["image"], parts)


def _mobilenet(root: Path) -> Task:
    def images(folder: str) -> tuple[Floats, Labels]:
        files = sorted((root / "imagenet-sample" / folder).glob("*.jpg"))
        return np.stack([_centre_224(f) for f in files]), np.array([int(f.name[:4]) for f in files])

    home = root / "mobilenet_v1_0.25_224"
    parts = {"val 900": (*images("val"), 0.5678)}
    return Task(home.name, home / "model.onnx", "input", images("calib")[0], parts, class_offset=1)


def _centre_224(file: Path) -> Floats:
    with Image.open(file) as image:
        pixels = np.asarray(image.convert("RGB").crop((16, 16, 240, 240)), np.float32)
    return (pixels * np.float32(1 / 127.5) - 1).transpose(2, 0, 1)


def resnet20(root: Path) -> Task:
    """Return the CIFAR-10 task of ResNet-20."""

    def normalised(pixels: NDArray[np.uint8]) -> Floats:
        x = (pixels / 255.0 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2), np.float32)

    home, data = root / "resnet20_cifar10", root / "cifar10"
    with np.load(data / "calib_lossless_300.npz") as file:
        calibration = normalised(file["X"])
    with np.load(data / "test_lossless_249.npz") as file:
        lossless = normalised(file["X"]), file["Y"].astype(np.int64)
    with np.load(data / "test_jpeg_3000.npz") as file:
        jpeg, edges, labels = file["jpg"], file["off"], file["Y"].astype(np.int64)
    pictures = np.stack([_decode(jpeg[a:b].tobytes()) for a, b in itertools.pairwise(edges)])
    parts = {"lossless 249": (*lossless, 0.9036), "jpeg 3000": (normalised(pictures), labels, 0.8163)}
    return Task(home.name, home / "model.onnx", "input", calibration, parts)


def _decode(jpeg: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(jpeg)) as image:
        return np.asarray(image.convert("RGB"))


def _keywords(root: Path) -> Task:
    def samples(file: Path) -> tuple[Floats, Labels]:
        with np.load(file) as archive:
            x = (archive["X"].astype(np.float32) - 83) * np.float32(0.5847029089927673)
            return x[:, None], archive["Y"].astype(np.int64)

    home = root / "mlperf_tiny_kws"
    parts = {"val 900": (*samples(home / "data" / "val_900.npz"), 0.9144)}
    return Task(home.name, home / "model.onnx", "input", samples(home / "data" / "calib_100.npz")[0], parts)


def _wake_words(root: Path) -> Task:
    def samples(pattern: str) -> tuple[Floats, Labels]:
        x, y = [], []
        for file in sorted((root / "mlperf_tiny_vww" / "data").glob(pattern)):
            with np.load(file) as archive:
                x.append(archive["X"].transpose(0, 3, 1, 2) / np.float32(255))
                y.append(archive["Y"].astype(np.int64))
        return np.ascontiguousarray(np.concatenate(x), np.float32), np.concatenate(y)

    home = root / "mlperf_tiny_vww"
    parts = {"val 600": (*samples("val_*.npz"), 0.86)}
    return Task(home.name, home / "model.onnx", "input", samples("calib_*.npz")[0], parts)
