"""Make small models and data under the names that the pages use. Each maker writes its files into a folder."""

from __future__ import annotations

import functools
import io
import json
import shutil
import tempfile
import wave
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from PIL import Image

import edgeq
from edgeq.jobs.demo import write_files
from tests.graphs import proto

COLOURS = np.array([[200, 40, 40], [40, 180, 60], [50, 60, 210], [128, 128, 128]], np.uint8)
CLASSIFIER = """classifier (float[N,3,224,224] image) => (float[N,4] logits)
    <float[8,3,8,8] w, float[8] wb, float[16,8,3,3] v, float[16] vb, float[16,4] g, float[4] gb> {
    [conv1] a = Conv<strides = [8, 8]>(image, w, wb)
    [relu1] b = Relu(a)
    [conv2] c = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(b, v, vb)
    [relu2] d = Relu(c)
    [pool] e = GlobalAveragePool(d)
    [flatten] f = Flatten(e)
    [fc] logits = Gemm(f, g, gb)
}"""
# Has as many cells as YOLOX at 416 pixels, with strides of 8, 16 and 32, and two classes.
DETECTOR = """detector (float[N,3,416,416] images) => (float[N,3549,7] output)
    <float[7,3,8,8] w, float[7,7,2,2] v, float[7,7,2,2] u, int64[3] shape = {0, 7, -1}> {
    [stride8] a = Conv<strides = [8, 8]>(images, w)
    [stride16] b = Conv<strides = [2, 2]>(a, v)
    [stride32] c = Conv<strides = [2, 2]>(b, u)
    [flat8] d = Reshape(a, shape)
    [flat16] e = Reshape(b, shape)
    [flat32] f = Reshape(c, shape)
    [joined] g = Concat<axis = 2>(d, e, f)
    [squashed] h = Sigmoid(g)
    [rows] output = Transpose<perm = [0, 2, 1]>(h)
}"""
# Has the three heads of YOLOv3 and two classes.
HEADS = """heads (float[N,3,416,416] images) => (float[N,21,52,52] a, float[N,21,26,26] b, float[N,21,13,13] c)
    <float[21,3,8,8] w, float[21,21,2,2] v, float[21,21,2,2] u> {
    [stride8] a = Conv<strides = [8, 8]>(images, w)
    [stride16] b = Conv<strides = [2, 2]>(a, v)
    [stride32] c = Conv<strides = [2, 2]>(b, u)
}"""
SENTENCES = """sentences (int64[N,T] input_ids, int64[N,T] attention_mask) => (float[N,T,16] hidden)
    <float[100,32] table, float[32,64] w, float[64] b, float[64,16] v, int64[1] last = {-1}> {
    [embed] a = Gather(table, input_ids)
    [mask] m = Cast<to = 1>(attention_mask)
    [column] n = Unsqueeze(m, last)
    [masked] c = Mul(a, n)
    [up] d = MatMul(c, w)
    [bias] e = Add(d, b)
    [relu] f = Relu(e)
    [down] hidden = MatMul(f, v)
}"""
BOXES = """boxes (float[1,3,416,416] images) => (float[1,1,6] rows) <float[1,1,6] one = {10, 20, 90, 90, 0.9, 0}> {
    mean = ReduceMean<keepdims = 0>(images)
    nothing = Sub(mean, mean)
    rows = Add(one, nothing)
}"""
DECODER = """decoder (float[N,4,8,8] codes) => (float[N,4,24,24] pictures)
    <float[4,4,1,1] w, float[4] scales = {1, 1, 3, 3}> {
    [mix] h = Conv(codes, w)
    [grow] pictures = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric",
        nearest_mode = "floor">(h, , scales)
}"""
SPEECH = """speech (float[N,T,257] spectrum) => (float[N,T,8] scores) <float[257,64] w, float[64,8] v> {
    [up] a = MatMul(spectrum, w)
    [relu] b = Relu(a)
    [down] scores = MatMul(b, v)
}"""


def filled(text: str) -> onnx.ModelProto:
    """Return the graph of `text`, with random weights for all that it declares without values."""
    model = proto(text)
    random = np.random.default_rng(0)
    given = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.value_info:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        if value.name not in given:
            weights = random.normal(size=shape) / np.sqrt(max(np.prod(shape[1:]), 1))
            model.graph.initializer.append(onnx.numpy_helper.from_array(weights.astype(np.float32), value.name))
    del model.graph.value_info[:]
    return model


def pictures(count: int = 12, seed: int = 0) -> NDArray[np.uint8]:
    """Return images [count, 224, 224, 3] whose colour is their class: the index modulo 4."""
    random = np.random.default_rng(seed)
    noise = random.integers(-30, 30, (count, 224, 224, 3))
    return np.clip(COLOURS[np.arange(count) % 4][:, None, None, :] + noise, 0, 255).astype(np.uint8)


@functools.cache
def classifier_bytes() -> bytes:
    """Return the classifier, fitted to the pictures under ImageNet's preprocessing."""
    model = filled(CLASSIFIER)
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    images = ((pictures() / 255 - mean) / deviation).transpose(0, 3, 1, 2).astype(np.float32)
    model.graph.output.append(onnx.helper.make_tensor_value_info("f", onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    features = session.run(["f"], {"image": images})[0]
    del model.graph.output[1:]
    wanted = 4.0 * np.eye(4)[np.arange(len(images)) % 4]
    solved = np.linalg.lstsq(np.c_[features, np.ones(len(features))], wanted, rcond=None)[0].astype(np.float32)
    for tensor in model.graph.initializer:
        if tensor.name in ("g", "gb"):
            tensor.CopyFrom(
                onnx.numpy_helper.from_array(solved[:-1] if tensor.name == "g" else solved[-1], tensor.name)
            )
    return model.SerializeToString()


Maker = Callable[[Path], None]


def classifier(name: str) -> Maker:
    """Return a maker of the classifier as a file with that name."""
    return lambda folder: (folder / name).write_bytes(classifier_bytes()) and None


def graph(text: str, name: str) -> Maker:
    """Return a maker of a graph as a file with that name."""
    return lambda folder: onnx.save(filled(text), folder / name)


def images(name: str) -> Maker:
    """Return a maker of a folder of images in sub-folders by class."""

    def make(folder: Path) -> None:
        for index, picture in enumerate(pictures()):
            place = folder / name / str(index % 4)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(place / f"picture_{index}.png")
        # The preprocessing of command lines that name none; see docs/data.md.
        (folder / name / "preprocess.toml").write_text(
            'steps = "resize=224x224,divide=255,mean=[0.485,0.456,0.406],std=[0.229,0.224,0.225],layout=NCHW"\n'
        )

    return make


def imagenet(name: str) -> Maker:
    """Return a maker of a folder of images with a list of their classes."""

    def make(folder: Path) -> None:
        (folder / name).mkdir(parents=True)
        for index, picture in enumerate(pictures()):
            Image.fromarray(picture).save(folder / name / f"picture_{index}.png")
        lines = [f"picture_{index}.png {index % 4}\n" for index in range(12)]
        (folder / name / "val_map.txt").write_text("".join(lines))

    return make


def annotations(name: str) -> Maker:
    """Return a maker of COCO annotations for the pictures."""

    def make(folder: Path) -> None:
        found = [{"id": i + 1, "file_name": f"picture_{i}.png", "width": 224, "height": 224} for i in range(12)]
        box = {"category_id": 1, "bbox": [20, 20, 90, 90], "area": 8100, "iscrowd": 0}
        boxes = [{"id": i + 1, "image_id": i + 1, **box} for i in range(12)]
        kinds = [{"id": 1, "name": "one"}, {"id": 2, "name": "two"}]
        record = {"images": found, "annotations": boxes, "categories": kinds}
        (folder / name).write_text(json.dumps(record))

    return make


def arrays(name: str) -> Maker:
    """Return a maker of prepared inputs for the classifier."""
    values = (pictures(8) / 255).transpose(0, 3, 1, 2).astype(np.float32)
    return lambda folder: np.savez(folder / name, image=values, label=np.arange(8) % 4)


def raw_arrays(folder: Path) -> None:
    """Write stored images and labels in two files."""
    for index in range(2):
        np.savez(folder / f"val_{index}.npz", X=pictures(4, index), Y=np.arange(4))


def tokens(name: str) -> Maker:
    """Return a maker of rows of token numbers."""
    rows = np.random.default_rng(0).integers(1, 100, (8, 12))
    return lambda folder: np.savez(folder / name, input_ids=rows, attention_mask=np.ones_like(rows))


def clips(folder: Path) -> None:
    """Write recordings of noise, half a second each, at 16 kHz."""
    (folder / "clips").mkdir()
    for index in range(4):
        with wave.open(str(folder / "clips" / f"{index}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes(np.random.default_rng(index).integers(-9000, 9000, 8000).astype(np.int16).tobytes())


def recordings(folder: Path) -> None:
    """Write noise as 16-bit samples, one row for each recording."""
    np.savez(folder / "pcm.npz", pcm=np.random.default_rng(0).integers(-9000, 9000, (4, 8000)).astype(np.int16))


def one_input(folder: Path) -> None:
    """Write one input of the classifier."""
    np.save(folder / "x.npy", np.zeros((1, 3, 224, 224), np.float32))


def zoo(folder: Path) -> None:
    """Write a folder of models that is named like MLPerf's."""
    (folder / "models").mkdir()
    classifier("models/resnet50_v1.onnx")(folder)


def tuning_record(folder: Path) -> None:
    """Write the record of a search that found nothing."""
    (folder / "tuning.json").write_text('{"schema": "edgeq.tuning/1", "model": {"name": "model"}, "candidates": []}')


def digits(folder: Path) -> None:
    """Write the demo model, its samples, and the model in int8."""
    samples, model, _ = write_files(folder / "digits")
    edgeq.quantize(model, edgeq.Data(samples), folder / "digits" / "int8.onnx", timed=False)


def digits_bundle(folder: Path) -> None:
    """Write the demo model as a bundle for this machine."""
    digits(folder)
    samples = edgeq.Data(folder / "digits" / "calibration.npz")
    archive = folder / "digits.edgeq"
    edgeq.package(
        folder / "digits" / "model.onnx", samples, archive, targets=["this-machine"], with_float=True, timed=False
    )


def sources(folder: Path) -> tuple[Path, Path]:
    """Write the classifier and its samples, and return their paths."""
    classifier("model.onnx")(folder)
    images("calib")(folder)
    return folder / "model.onnx", folder / "calib"


@functools.cache
def quantized_bytes() -> bytes:
    """Return the classifier in int8."""
    with tempfile.TemporaryDirectory() as place:
        model, data = sources(Path(place))
        edgeq.quantize(model, edgeq.Data(data, "imagenet", count=8), Path(place, "int8.onnx"), timed=False)
        return Path(place, "int8.onnx").read_bytes()


def quantized(name: str) -> Maker:
    """Return a maker of the classifier in int8 as a file with that name."""
    return lambda folder: (folder / name).write_bytes(quantized_bytes()) and None


@functools.cache
def bundle_bytes() -> bytes:
    """Return the classifier as a bundle for this machine, as an archive."""
    with tempfile.TemporaryDirectory() as place:
        model, data = sources(Path(place))
        chosen, archive = edgeq.Data(data, "imagenet", count=8), Path(place, "model.edgeq")
        edgeq.package(model, chosen, archive, targets=["this-machine"], with_float=True, timed=False)
        return archive.read_bytes()


def bundle(name: str) -> Maker:
    """Return a maker of that bundle under this name: an archive if the name ends with ".edgeq", else a directory."""

    def make(folder: Path) -> None:
        if name.endswith(".edgeq"):
            (folder / name).write_bytes(bundle_bytes())
        else:
            with zipfile.ZipFile(io.BytesIO(bundle_bytes())) as archive:
                archive.extractall(folder / name)

    return make


def shipped(name: str) -> Maker:
    """Return a maker of a preprocessing from the how-to page."""
    text = """steps = [
  {op = "letterbox", size = 416, position = "top-left", value = 114},
  {op = "channels", order = "BGR"},
  {op = "layout", axes = "NCHW"},
]
"""
    return lambda folder: (folder / name).write_text(text) and None


def copied(name: str, maker: Maker, source: str) -> Maker:
    """Return a maker that runs `maker` and renames its result from `source` to `name`."""

    def make(folder: Path) -> None:
        maker(folder)
        shutil.move(folder / source, folder / name)

    return make


STAND_INS: Mapping[str, Maker] = {
    **{f"{name}.onnx": classifier(f"{name}.onnx") for name in ("model", "float", "m", "infer", "a", "resnet50")},
    "mobilenetv2-7.onnx": classifier("mobilenetv2-7.onnx"),
    **{f"{name}.onnx": quantized(f"{name}.onnx") for name in ("int8", "tensor", "quant", "b")},
    "qat.onnx": quantized("qat.onnx"),
    "detector.onnx": graph(DETECTOR, "detector.onnx"),
    "yolov3-416.onnx": graph(HEADS, "yolov3-416.onnx"),
    "bert.onnx": graph(SENTENCES, "bert.onnx"),
    "speech.onnx": graph(SPEECH, "speech.onnx"),
    **{name: images(name) for name in ("images", "photos", "calib", "val", "labelled", "d")},
    **{name: imagenet(name) for name in ("test_images", "imagenet", "val2017", "train2017/calib")},
    **{f"{name}.json": annotations(f"{name}.json") for name in ("instances", "instances_val", "instances_val2017")},
    **{f"{name}.npz": arrays(f"{name}.npz") for name in ("calib", "calibration", "validation", "x")},
    **{f"{name}.npz": tokens(f"{name}.npz") for name in ("tokens", "samples")},
    "val_*.npz": raw_arrays,
    "clips": clips,
    "yolox.toml": shipped("yolox.toml"),
    **{name: bundle(name) for name in ("dist", "tuned", "model.edgeq")},
    "zoo/resnet50": images("zoo/resnet50"),
    "models": zoo,
    "decoder.onnx": graph(DECODER, "decoder.onnx"),
    "boxes.onnx": graph(BOXES, "boxes.onnx"),
    "pcm.npz": recordings,
    "x.npy": one_input,
    "tuning.json": tuning_record,
    "bundle": bundle("bundle"),
    "digits": digits,
    "digits.edgeq": digits_bundle,
    "old.edgeq": bundle("old.edgeq"),
    "new.edgeq": bundle("new.edgeq"),
    "gate.toml": lambda folder: (folder / "gate.toml").write_text("max_slowdown = 0.05\n") and None,
}
