"""Compare the specs of `benchmarks/specs` with the loaders of the data sets' own evaluate.py, bit for bit."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from data.helpers import signature, spec
from edgeq.data.preprocess import load_preprocess
from edgeq.data.samples import open_samples
from edgeq.util.records import plain

SPECS = Path(__file__).resolve().parents[2] / "benchmarks" / "specs"


def evaluate(folder: Path, needs: str = "") -> ModuleType:
    """Import the data set's evaluate.py as a module."""
    pytest.importorskip("onnxruntime")
    if needs:
        pytest.importorskip(needs)
    found = importlib.util.spec_from_file_location(f"evaluate_{folder.name.replace('.', '_')}", folder / "evaluate.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def inputs(source: Any, name: str, *shape: int | str, **options: Any) -> list[Any]:
    model = signature(spec("input", *shape))
    path = next(p for p in sorted(SPECS.glob(f"{name}.*")))
    named = str(path) if path.suffix == ".toml" else f"{path}:features"
    return list(open_samples(source, model, preprocess=named, **options))


def test_every_spec_loads() -> None:
    for path in sorted(SPECS.glob("*.toml")):
        loaded = load_preprocess(path)
        assert load_preprocess(plain(loaded)).spec == loaded.spec
        assert loaded.title


def test_mobilenet(shared_data: Path) -> None:
    module = evaluate(shared_data / "mobilenet_v1_0.25_224")
    meta = {
        "preprocess": {"size": 224, "scale": 0.00784313725490196, "mean": [1, 1, 1], "std": [1, 1, 1]},
        "layout": "NCHW",
    }
    folder = shared_data / "imagenet-sample" / "val"
    samples = inputs(folder, "mobilenet_v1_0.25_224", "N", 3, 224, 224, count=40, stride=20)
    for sample in samples:
        assert np.array_equal(sample.inputs["input"], module.load(folder / sample.context["file"], meta))
        assert sample.label == int(sample.context["file"][:4])


def test_yolox(shared_data: Path) -> None:
    module = evaluate(shared_data / "yolox_nano", "pycocotools")
    folder = shared_data / "coco256" / "val"
    for sample in inputs(folder, "yolox_nano", 1, 3, 416, 416, count=12, stride=10):
        expected, scale = module.load(folder / sample.context["file"])
        assert np.array_equal(sample.inputs["input"], expected)
        assert sample.context["scale"] == (scale, scale)
        assert sample.context["offset"] == (0.0, 0.0)


def test_cifar10(shared_data: Path) -> None:
    module = evaluate(shared_data / "resnet20_cifar10")
    folder = shared_data / "cifar10"
    with np.load(folder / "test_lossless_249.npz") as stored:
        lossless = stored["X"], stored["Y"]
    for (images, labels), name in (
        (lossless, "test_lossless_249.npz"),
        (module.jpeg(folder / "test_jpeg_3000.npz"), "test_jpeg_3000.npz"),
    ):
        samples = inputs(folder / name, "resnet20_cifar10", "N", 3, 32, 32, stride=7)
        assert [s.label for s in samples] == labels[::7].tolist()
        got = np.concatenate([s.inputs["input"] for s in samples])
        assert np.array_equal(got, module.prep(images[::7]))
    calibration = inputs(folder / "calib_jpeg_300.npz", "resnet20_cifar10", "N", 3, 32, 32)
    assert len(calibration) == len(inputs(folder / "calib_lossless_300.npz", "resnet20_cifar10", "N", 3, 32, 32)) == 300


def test_vww(shared_data: Path) -> None:
    folder = shared_data / "mlperf_tiny_vww" / "data"
    samples = inputs(f"{folder}/val_*.npz", "mlperf_tiny_vww", "N", 3, 96, 96)
    stored = [np.load(path) for path in sorted(folder.glob("val_*.npz"))]
    images = np.concatenate([file["X"] for file in stored])
    assert [s.label for s in samples] == np.concatenate([file["Y"] for file in stored]).tolist()
    for sample, x in zip(samples[::17], images[::17], strict=True):
        assert np.array_equal(
            sample.inputs["input"], np.asarray(x.transpose(2, 0, 1)[None] / np.float32(255), np.float32)
        )


def test_kws(shared_data: Path) -> None:
    path = shared_data / "mlperf_tiny_kws" / "data" / "val_900.npz"
    samples = inputs(path, "mlperf_tiny_kws", "N", 1, 49, 10)
    with np.load(path) as stored:
        expected = ((stored["X"].astype(np.float32) - 83) * np.float32(0.5847029089927673))[:, None]
        assert [s.label for s in samples] == stored["Y"].tolist()
    assert np.array_equal(np.concatenate([s.inputs["input"] for s in samples]), expected)


def test_anomaly_windows(shared_data: Path) -> None:
    folder = shared_data / "mlperf_tiny_ad" / "data"
    samples = inputs(f"{folder}/val_*.npz", "mlperf_tiny_ad", "N", 640, stride=29)
    stored = [np.load(path) for path in sorted(folder.glob("val_*.npz"))]
    clips = np.concatenate([file["X"] for file in stored]).astype(np.float32)[::29]
    for sample, clip in zip(samples, clips, strict=True):
        assert np.array_equal(sample.inputs["input"], np.stack([clip[i : i + 5].ravel() for i in range(196)]))
    assert [s.label for s in samples] == np.concatenate([file["Y"] for file in stored])[::29].tolist()


def test_mnist(shared_data: Path) -> None:
    folder = shared_data / "lenet_mnist"
    samples = inputs(folder / "t10k-images-idx3-ubyte.gz", "lenet_mnist", "N", 1, 28, 28, count=500, stride=20)
    images = np.frombuffer(gzip.decompress((folder / "t10k-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    labels = np.frombuffer(gzip.decompress((folder / "t10k-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    expected = images.reshape(-1, 1, 28, 28)[::20] / np.float32(255)
    assert np.array_equal(np.concatenate([s.inputs["input"] for s in samples]), expected)
    assert [s.label for s in samples] == labels[::20].tolist()


def test_ultraface(shared_data: Path) -> None:
    module = evaluate(shared_data / "ultraface_rfb320")
    folder = shared_data / "ultraface_rfb320" / "img"
    for sample in inputs(folder, "ultraface_rfb320", 1, 3, 240, 320, stride=5):
        assert np.array_equal(sample.inputs["input"], module.load(folder / sample.context["file"]))


def test_nsnet2(shared_data: Path) -> None:
    module = evaluate(shared_data / "nsnet2_gru")
    samples = inputs(shared_data / "nsnet2_gru" / "data", "nsnet2_gru", 1, "T", 161, count=2)
    clips = module.clips()
    for sample, name in zip(samples, ("babble", "car"), strict=True):
        assert np.array_equal(sample.inputs["input"], module.feat(module.stft(clips[name])))


def test_minilm(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    folder = shared_data / "minilm_l6" / "data"
    monkeypatch.setenv("EDGEQ_TOKENIZER", str(folder / "tokenizer.json"))
    names = ("input_ids", "attention_mask", "token_type_ids")
    model = signature(*(spec(name, "N", "S", dtype=np.int64) for name in names))
    hook = f"{SPECS / 'minilm_l6.py'}:tokens"
    samples = list(open_samples(folder / "calib-stsb-en-dev-200.csv", model, preprocess=hook, count=5))
    assert [s.label for s in samples[:2]] == [5.0, 3.6]
    assert all(s.inputs["input_ids"].shape[0] == 2 for s in samples)
    assert all(s.inputs["input_ids"][0, 0] == 101 for s in samples)
