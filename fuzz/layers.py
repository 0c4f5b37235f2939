"""Define the layers to fuzz. Each layer makes its own small files and reads a mutated file the way edgeq does."""

from __future__ import annotations

import hashlib
import io
import json
import os
import select
import subprocess
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import click
import numpy as np
import onnx

from fuzz.fields import of_fields
from fuzz.mutate import Mutation, of_bytes, of_json, of_message, of_names, of_text, of_zip
from tests.graphs import proto

Read = Callable[[Path], object]


@dataclass(frozen=True)
class Layer:
    """Describe a reader of untrusted files.

    Attributes:
        seeds: function that writes the layer's files into an empty folder.
        read: function that reads the file at a path. The file is alone in its folder. If the function refuses the file,
            it raises an EdgeqError or a DeviceError.
        mutate: function that changes a file.
        cases: default number of cases. Layers with slow cases have fewer.
        native: whether libraries run untrusted graphs in the layer. `edgeq` runs them in a process with limits. So if
            that process crashes or runs out of memory or time, this is counted but is not a finding.
    """

    name: str
    seeds: Callable[[Path], None]
    read: Read
    mutate: Mutation = of_bytes
    cases: int = 2000
    native: bool = False


def _run(command: click.Command, *arguments: str) -> None:
    """Run a command the way the program does. If it prints an error, raise that error."""
    error = None
    try:
        command.main(arguments, f"edgeq {command.name}", standalone_mode=False)
    except SystemExit as ended:
        error = ended.__context__
    if error is not None:
        raise error


LAYERS: dict[str, Layer] = {}


def layer(name: str, seeds: Callable[[Path], None], **settings: Any) -> Callable[[Read], Read]:
    """Register the decorated function as the reader of a layer."""

    def register(read: Read) -> Read:
        LAYERS[name] = Layer(name, seeds, read, **settings)
        return read

    return register


# Files of chips


def _chip_files(folder: Path) -> None:
    from edgeq.backends.espdl.network import DEPTHWISE, FILTER, EspGraph, EspNode, EspPort, EspTensor
    from edgeq.backends.espdl.writer import write

    image, pooled = EspTensor("x", (1, 4, 4, 17), "int8", (-4,)), EspTensor("c", (1, 4, 4, 17), "int8", (-3,))
    rows, result = EspTensor("r", (1, 272), "int8", (-3,)), EspTensor("y", (1, 3), "int8", (-2,))
    values = np.zeros((1, 1, 17, 1), np.int8), np.zeros((1, 1, 272, 3), np.int8)
    filters = EspTensor("w", values[0].shape, "int8", (-6,), values[0], DEPTHWISE)
    matrix = EspTensor("m", values[1].shape, "int8", (-6,), values[1], FILTER)
    shape = EspTensor("s", (2,), "int64", values=np.array([1, 272]))
    window = {"pads": (0,) * 4, "strides": (1, 1), "dilations": (1, 1), "kernel_shape": (1, 1), "group": 17}
    nodes = (
        EspNode("Conv", "c", (image, filters), (pooled,), {**window, "activation": "Relu"}),
        EspNode("Reshape", "r", (pooled, shape), (rows,), {"allowzero": 0}),
        EspNode("Gemm", "y", (rows, matrix), (result,), {"activation": "Linear", "transA": 0, "transB": 0}),
    )
    graph = EspGraph((EspPort("x", image, (0, 2, 3, 1)),), (EspPort("y", result, (0, 1)),), nodes)
    tests = {image: np.zeros(image.shape, np.int8), result: np.zeros(result.shape, np.int8)}
    for name, blocked in (("plain", False), ("blocked", True)):
        (folder / f"{name}.espdl").write_bytes(write(graph, blocked=blocked, tests=tests))


@layer("espdl", _chip_files, cases=5000)
def _espdl(path: Path) -> None:
    from edgeq.backends.espdl.reader import read

    read(path.read_bytes(), path)


def _chip_outputs(folder: Path) -> None:
    lines = (
        f"EDGEQ start file={'0' * 64} chip=esp32-s3",
        "\x1b[0;32mI (512) dl::Model: Testing output y.\x1b[0m",
        "\x1b[0;31mE (516) dl::Model: Test output y does not match\x1b[0m",
        "EDGEQ end passed=0 microseconds=9120",
    )
    (folder / "serial.txt").write_text("\n".join(lines), encoding="utf-8")


@layer("serial-logs", _chip_outputs, mutate=of_text)
def _serial_log(path: Path) -> None:
    from edgeq.backends.espdl.serial import read_serial_log

    read_serial_log(path.read_bytes().decode("utf-8", "replace"))


# Models and samples


def _models(folder: Path) -> None:
    from onnx.external_data_helper import convert_model_to_external_data

    conv = proto(
        """g (float[N,1,5,5] x) => (float[N,3] y) {
            [conv] c = Conv<kernel_shape=[3,3]>(x, w, b)  [relu] r = Relu(c)
            [flatten] f = Flatten(r)  [matmul] y = MatMul(f, m) }"""
    )
    random = np.random.default_rng(0)
    for name, shape in (("w", (4, 1, 3, 3)), ("b", (4,)), ("m", (36, 3))):
        values = random.standard_normal(shape).astype(np.float32)
        conv.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    branches = proto(
        """g (bool c, float[2] x) => (float[2] y) {
            y = If(c) <then_branch = t () => (float[2] a) { a = Relu(x) },
                       else_branch = e () => (float[2] b) { b = Neg(x) }> }"""
    )
    loop = proto(
        """g (float[2] x) => (float[2] y) <int64 n = {3}, bool go = {1}> {
            y = Loop(n, go, x) <body = l (int64 i, bool g, float[2] a) => (bool h, float[2] d)
                { h = Identity(g)  d = Add(a, a) }> }"""
    )
    filled = proto(
        """g (float[2] x) => (float[2] y) <int64[1] s = {2}> {
            c = ConstantOfShape<value = float[1] {1.0}>(s)  y = Add(x, c) }"""
    )
    quantized = proto(
        """g (float[1,4] x) => (float[1,4] y) <float s = {0.1}, int8 z = {0}> {
            q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }"""
    )
    function = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "f": 1]> g (float[2] x) => (float[2] y) { y = f.twice(x) }
        <domain: "f", opset_import: ["": 17]> twice (a) => (b) { b = Add(a, a) }"""
    )
    made = {"conv": conv, "if": branches, "loop": loop, "filled": filled, "qdq": quantized, "function": function}
    for name, model in made.items():
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
    convert_model_to_external_data(conv, location="../weights.bin", size_threshold=0)
    (folder / "external.onnx").write_bytes(conv.SerializeToString())


_ONNX = of_message(onnx.ModelProto)


@layer("model", _models, mutate=_ONNX, cases=500, native=True)
def _model(path: Path) -> None:
    from edgeq.model.prepare import prepare_model

    prepare_model(path, path.parent / "work")


@layer("model-load", _models, mutate=_ONNX, cases=2000)
def _model_load(path: Path) -> None:
    from edgeq.model.digests import model_digest
    from edgeq.model.load import model_signature

    model_signature(path)
    model_digest(path)


@layer("model-wire", _models, mutate=_ONNX, cases=5000)
def _model_wire(path: Path) -> None:
    from edgeq_device.engines.options import read_model_options
    from edgeq_device.model.onnxfile import read_onnx

    read_model_options(path, "model")
    read_onnx(path, "model")


@layer("inspect", _models, mutate=_ONNX, cases=300, native=True)
def _inspect(path: Path) -> None:
    from edgeq.cli.explain import inspect_command

    _run(inspect_command, str(path), "--target", "generic-x86-64")


def _rich_models(folder: Path) -> None:
    """Write models with everything that a ModelProto can contain."""
    control = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "f": 1]>
        g (float[2] x, float[3,2] rows) => (float[2] y, float[3,2] z)
        <float[2] w = {1, 2}, int64 n = {3}, bool go = {1}> {
            [call] a = f.outer <k = 2.0> (x)
            [if] b = If (go) <then_branch = t () => (float[2] c) { c = f.inner (a) },
                              else_branch = e () => (float[2] d) { d = Neg (w) }>
            [loop] l = Loop (n, go, b) <body = body (int64 i, bool g, float[2] s) => (bool h, float[2] r)
                { h = Identity (g)  r = Add (s, w) }>
            [scan] o, z = Scan <num_scan_inputs = 1, body = step (float[2] s, float[2] row) => (float[2] q, float[2] p)
                { q = Add (s, row)  p = Mul (q, w) }> (l, rows)
            [last] y = Mul (o, w) }
        <domain: "f", opset_import: ["": 17]> inner (a) => (b) { b = Add (a, a) }
        <domain: "f", opset_import: ["": 17, "f": 1]> outer <k> (a) => (b) {
            c = f.inner (a)  r = Constant <value_float: float = @k> ()  b = Mul (c, r) }"""
    )
    onnx.helper.set_model_props(control, {"author": "a"})
    types = proto(
        """g (float[2] x) => (float[2] y) <int64 k = {1}> {
            s = SequenceConstruct (x, x)
            m = SequenceMap (s) <body = b (float[2] e) => (float[2] f) { f = Neg (e) }>
            o = Optional (m)  u = OptionalGetElement (o)  y = SequenceAt (u, k) }"""
    )
    layers = proto(
        """g (float[N,4] x) => (float[N,2] y) {
            [m] h = MatMul (x, w)  [a] a = Add (h, b)  [r] r = Relu (a)  [s] y = Slice (r, starts, ends) }"""
    )
    weights = {"w": np.ones((4, 3), np.float32), "b": np.ones(3, np.float32)}
    places = {"starts": np.array([0, 0]), "ends": np.array([9, 2])}
    for name, values in {**weights, **places}.items():
        layers.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    layers.graph.value_info.append(onnx.helper.make_tensor_value_info("h", onnx.TensorProto.FLOAT, ["N", 3]))
    layers.graph.quantization_annotation.add(tensor_name="h").quant_parameter_tensor_names.add(
        key="SCALE_TENSOR", value="b"
    )
    training = layers.training_info.add()
    training.algorithm.CopyFrom(types.graph)
    training.initialization_binding.add(key="w", value="y")
    sparse = proto("g (float[2,4] x) => (float[2,3] y) { y = MatMul (x, w) }")
    held = sparse.graph.sparse_initializer.add(dims=[4, 3])
    held.values.CopyFrom(onnx.numpy_helper.from_array(np.ones(2, np.float32), "w"))
    held.indices.CopyFrom(onnx.numpy_helper.from_array(np.array([1, 5]), "w_places"))
    for name, model in {"control": control, "types": types, "layers": layers, "sparse": sparse}.items():
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())


def _amplifying(folder: Path) -> None:
    """Write models in which a few bytes set the size of a result. The sizes are small here, but mutations
    enlarge them.
    """
    from tests.model.test_declared_sizes import ATTACKS, MANY, write

    for number, (weights, nodes) in enumerate(ATTACKS.values()):
        for size in (4, MANY):
            text = [part.replace(str(MANY), str(size)) for part in (weights, nodes)]
            write(folder / f"{number}-{size}.onnx", *text)


_HOSTILE_FIELDS = of_names(onnx.ModelProto, of_fields(onnx.ModelProto))
layer("model-sizes", _amplifying, mutate=_HOSTILE_FIELDS, cases=2000, native=True)(_inspect)
layer("model-fields", _rich_models, mutate=of_fields(onnx.ModelProto), cases=2000, native=True)(_model)
layer("model-fields-wire", _rich_models, mutate=of_fields(onnx.ModelProto), cases=2000)(_model_wire)


# Arrays and other samples


def _npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def _arrays(folder: Path) -> None:
    image = np.arange(75, dtype=np.float32).reshape(3, 1, 5, 5)
    (folder / "a.npy").write_bytes(_npy(image))
    (folder / "b.npy").write_bytes(_npy(np.asfortranarray(image)))
    (folder / "c.npy").write_bytes(_npy(np.array(["a", "bc"])))


def _archives(folder: Path) -> None:
    image = np.arange(75, dtype=np.float32).reshape(3, 1, 5, 5)
    np.savez(folder / "a.npz", x=image, label=np.arange(3))
    np.savez_compressed(folder / "b.npz", x=image.astype(np.uint8), y=np.arange(3))
    files = _image_bytes()
    offsets = np.cumsum([0, *map(len, files.values())])
    np.savez(folder / "c.npz", images=np.frombuffer(b"".join(files.values()), np.uint8), offsets=offsets)


def _read_samples(path: Path, preprocess: Any, *, shape: Sequence[Any] = ("N", 1, 5, 5), **options: Any) -> None:
    from edgeq.data.samples import open_samples
    from edgeq.signature import Signature, TensorSpec

    signature = Signature((TensorSpec("x", np.dtype(np.float32), tuple(shape)),), ())
    samples = open_samples(path, signature, preprocess=preprocess, count=4, **options)
    for sample in samples:
        assert sample.inputs
    samples.digest()


_RAW = {"source": {"key": "x", "label": "label", "layout": "CHW"}, "steps": [{"op": "divide", "value": 255}]}
_ENCODED = {"source": {"encoded": "images", "offsets": "offsets"}, "steps": [{"op": "resize", "size": 5}]}


@layer("npy", _arrays, cases=5000)
def _workstation_npy(path: Path) -> None:
    _read_samples(path, None)


@layer("npz", _archives, mutate=of_zip(of_bytes), cases=5000)
def _workstation_npz(path: Path) -> None:
    last: Exception | None = None
    for preprocess in (None, _RAW, _ENCODED):
        try:
            _read_samples(path, preprocess)
        except Exception as error:
            if not expected(error):
                raise
            last = error
    if last is not None:
        raise last


@layer("runner-npy", _arrays, cases=5000)
def _runner_npy(path: Path) -> None:
    from edgeq_device.prepare.arrays import read_arrays

    read_arrays(path)


@layer("runner-npz", _archives, mutate=of_zip(of_bytes), cases=5000)
def _runner_npz(path: Path) -> None:
    from edgeq_device.prepare.arrays import read_arrays

    read_arrays(path)


def _idx(folder: Path) -> None:
    import gzip

    head = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (3, 5, 5))
    (folder / "a-images-idx3-ubyte").write_bytes(head + bytes(range(75)))
    (folder / "b-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + bytes(75), mtime=0))
    (folder / "c-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x03\1\2\3")


@layer("idx", _idx, cases=5000)
def _read_idx(path: Path) -> None:
    _read_samples(path, {"source": {"layout": "HW"}, "steps": [{"op": "divide", "value": 255}]}, shape=("N", 5, 5))


def _tensors(folder: Path) -> None:
    from onnx import helper, numpy_helper

    image = np.arange(75, dtype=np.float32).reshape(3, 1, 5, 5)
    (folder / "a.pb").write_bytes(numpy_helper.from_array(image, "x").SerializeToString())
    floats = helper.make_tensor("x", onnx.TensorProto.FLOAT, [1, 1, 5, 5], [0.5] * 25)
    (folder / "b.pb").write_bytes(floats.SerializeToString())
    texts = helper.make_tensor("x", onnx.TensorProto.STRING, [2], [b"a", b"b"])
    (folder / "c.pb").write_bytes(texts.SerializeToString())
    packed = helper.make_tensor("x", onnx.TensorProto.INT4, [3], [1, 2, 3])
    (folder / "d.pb").write_bytes(packed.SerializeToString())


@layer("pb", _tensors, mutate=of_message(onnx.TensorProto), cases=5000)
def _read_pb(path: Path) -> None:
    _read_samples(path, None)


def _image_bytes() -> dict[str, bytes]:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    files = {}
    for suffix, kind in (("png", "PNG"), ("jpg", "JPEG"), ("gif", "GIF"), ("bmp", "BMP"), ("webp", "WEBP")):
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, kind)
        files[suffix] = stream.getvalue()
    for suffix, compression in (("tif", "tiff_lzw"), ("tiff", "raw")):
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "TIFF", compression=compression)
        files[suffix] = stream.getvalue()
    return {**files, "ppm": b"P6 7 9 255\n" + pixels.tobytes()}


def _images(folder: Path) -> None:
    for suffix, content in _image_bytes().items():
        (folder / f"a.{suffix}").write_bytes(content)


@layer("images", _images, cases=5000)
def _read_images(path: Path) -> None:
    _read_samples(path, "resize=fit:32,letterbox=32,divide=255,layout=NCHW", shape=("N", 3, 32, 32))


# Words and tables


def _specs(folder: Path) -> None:
    (folder / "a.toml").write_text(
        'title = "t"\nsteps = [{op = "resize", size = [7, 9], rule = "fit", filter = "box"},\n'
        ' {op = "letterbox", size = 16, value = [1, 2, 3]},\n {op = "crop", size = 8},\n {op = "add", value = 255},\n'
        ' {op = "subtract", value = [0.1, 0.2, 0.3]},\n {op = "layout", axes = "NCHW"}]\n'
        '[source]\nkey = "x"\nlabel = "y"\nlayout = "HWC"\nchannels = "RGB"\n'
    )
    (folder / "b.toml").write_text('steps = "resize=short:256,crop=224,divide=255,mean=[0.4,0.5,0.6],layout=NCHW"\n')
    (folder / "c.toml").write_text(
        'steps = [{op = "window", frames = 2, step = 1}, {op = "reshape", shape = [1, 49, 10]},\n'
        ' {op = "expand", axis = 0}, {op = "dtype", dtype = "float64"}, {op = "center"}]\n'
    )
    (folder / "d.toml").write_text('steps = [{op = "channels", order = "L"},\n {op = "add", value = 0.5}]\n')


@layer("specs", _specs, mutate=of_text, cases=5000)
def _read_spec(path: Path) -> None:
    from edgeq.data.images import Picture
    from edgeq.data.preprocess import load_preprocess
    from edgeq.signature import TensorSpec

    preprocess = load_preprocess(path)
    preprocess.arithmetic()
    preprocess(Picture(np.zeros((20, 30, 3), np.uint8)), TensorSpec("x", np.dtype(np.float32), ("N", 3, 8, 8)))


def _labels(folder: Path) -> None:
    (folder / "a.csv").write_text("name,label\na.png,1\nb.png,2\nc/d.png,cat\n")
    (folder / "b.txt").write_text("a.png 1\nb.png 2\n")
    (folder / "c.json").write_text('{"a.png": 1, "b": "x", "c/d.png": 2.5}')
    (folder / "d.json").write_text('[{"name": "a.png", "label": 1}, {"file": "b.png", "label": 3}]')
    (folder / "e.csv").write_text("1\n2\n3\n")
    (folder / "f.pattern").write_text("name:*_{label}_*")
    (folder / "g.npy").write_bytes(_npy(np.arange(3)))


@layer("labels", _labels, mutate=of_text, cases=5000)
def _read_labels(path: Path) -> None:
    from edgeq.data.labels import load_labels_from
    from edgeq.data.records import Record

    labels: Any = path
    if path.suffix == ".pattern":
        labels = path.read_bytes().decode("utf-8", "replace")
    label_of = load_labels_from(labels, path.parent, 3, inside=labels is not path)
    names = ("a.png", "b.png", "x_7_" + "ab_" * 60)
    for index, name in enumerate(names if label_of is not None else ()):
        assert label_of is not None
        label_of(index, Record(name, {}, None, {"file": name, "path": name}))


def _annotations(folder: Path) -> None:
    (folder / "a.json").write_text(
        '{"images": [{"id": 1, "file_name": "a.png", "width": 8, "height": 9}], "categories": [{"id": 3, "name": "c"}],'
        ' "annotations": [{"id": 1, "image_id": 1, "category_id": 3, "bbox": [1, 2, 3, 4], "area": 12, "iscrowd": 0}]}'
    )


@layer("annotations", _annotations, mutate=of_json, cases=3000)
def _read_annotations(path: Path) -> None:
    from edgeq.measure.coco import load_annotations

    load_annotations(path)


def _literals(folder: Path) -> None:
    (folder / "a.txt").write_text("{0: 'person', 1: \"it's\", 2: ['a', (1, -2.5e3, None)]}")
    (folder / "b.txt").write_text("[640, 640]")


@layer("literals", _literals, mutate=of_text, cases=5000)
def _read_literal(path: Path) -> None:
    from edgeq.describe.literals import parse_literal

    parse_literal(path.read_bytes().decode("utf-8", "replace"), "it")


def _sidecars(folder: Path) -> None:
    """Write the files that exporters leave next to a model. A seed's name contains the name that its writer gives."""
    size = {"height": 8, "width": 8}
    processor = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": size, "resample": 2}
    normal = {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_center_crop": False}
    config = {"architectures": ["ViTForImageClassification"], "id2label": {"0": "a", "1": "b"}}
    basis = {"input_size": [3, 8, 8], "interpolation": "bicubic", "crop_pct": 0.9, "mean": [0.5] * 3, "std": [0.5] * 3}
    resize = {"type": "Resize", "size": [8, 8], "keep_ratio": True}
    steps = [resize, {"type": "Pad", "size": [8, 8]}, {"type": "Normalize", "mean": [1, 2, 3], "std": [1, 2, 3]}]
    tables = {
        "preprocessor_config.json": {**processor, **normal},
        "config.json": config,
        "timm~config.json": {"num_classes": 2, "label_names": ["a", "b"], "pretrained_cfg": basis},
        "metadata.json": {"image_threshold": 0.5, "pixel_threshold": 1, "min": 0, "max": 2},
        "deploy.json": {"task": "Detector", "backend": "ort", "customs": []},
        "pipeline.json": {"pipeline": {"tasks": [{"module": "Transform", "transforms": steps}]}},
        "model.onnx.json": {"audio": {"sample_rate": 22050}, "phoneme_id_map": {"a": [14]}},
    }
    for name, table in tables.items():
        (folder / name).write_text(json.dumps(table))
    texts = {
        "metadata.yaml": "stride: 32\ntask: pose\nimgsz: [8, 8]\nnames: {0: a}\nkpt_shape: [2, 3]\nargs: {nms: true}\n",
        "inference.yml": "PreProcess:\n  transform_ops:\n  - ResizeImage: {resize_short: 9}\n  - NormalizeImage: "
        "{scale: 1./255., mean: [0, 0, 0], std: [1, 1, 1]}\nPostProcess:\n  Topk: {label_list: [a, b]}\n",
        "infer_cfg.yml": "arch: YOLO\ndraw_threshold: 0.5\nPreprocess:\n- {type: Resize, target_size: [8, 8]}\n"
        "label_list: [a]\n",
        "data.yaml": "nc: 2\nnames:\n  0: a\n  1: b\n",
        "tokens.txt": "<blk> 0\na 1\n  2\n",
        "labels.txt": "a\nb\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)


def _mutate_sidecar(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return (of_json if data[:1] == b"{" else of_text)(random, data, others)


@layer("sidecars", _sidecars, mutate=_mutate_sidecar, cases=3000)
def _read_sidecar(path: Path) -> None:
    from edgeq.data.preprocess import load_preprocess
    from edgeq.describe.facts import Exported
    from edgeq.describe.read import read_facts

    folder = path.parent / "beside"
    folder.mkdir()
    (folder / path.name.rpartition("~")[2]).write_bytes(path.read_bytes())
    facts = read_facts(Exported(path=folder / "model.onnx", size=(8, 8)))
    for fact in facts.stated.values():
        assert fact.value is not None
    if facts.preprocess is not None:
        load_preprocess(facts.preprocess.value).arithmetic()


_METADATA = {
    "stride": "32",
    "task": "pose",
    "names": "{0: 'a', 1: 'b'}",
    "imgsz": "[8, 8]",
    "kpt_shape": "[2, 3]",
    "kpt_names": "{0: ['a', 'b']}",
    "character": "a\nb\n \n",
    "model_info model_type": "ssd",
    "model_info labels": "a b",
    "model_info mean_values": "1 2 3",
    "model_info resize_type": "standard",
    "model_type": "wenet_ctc",
    "vocab_size": "4",
    "sample_rate": "16000",
}


@layer("metadata", lambda folder: (folder / "a.json").write_text(json.dumps(_METADATA)), mutate=of_json, cases=3000)
def _read_metadata(path: Path) -> None:
    from edgeq.describe.facts import Exported
    from edgeq.describe.read import REGISTRY
    from edgeq.errors import DataError

    try:
        table = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError("this is no seed") from error
    # Metadata in an ONNX file is text in any case.
    metadata = {str(key): str(value) for key, value in table.items()} if isinstance(table, dict) else {}
    for _, reader in REGISTRY.items():
        reader.read(Exported(metadata, path.parent / "beside" / "model.onnx"))


def _tables(folder: Path) -> None:
    from edgeq.calibration.ranges import Range
    from edgeq.calibration.table import write_native, write_tables

    ranges = {"conv/out": Range(-1.5, 2.0), "relu": Range(0.0, 3.5), "x": Range(0.0, 0.0)}
    write_tables(folder, ranges)
    write_native(folder / "native.cache", ranges)


@layer("tables", _tables, cases=5000)
def _read_table(path: Path) -> None:
    from edgeq.calibration.table import read_table

    read_table(path)


def _statistics(folder: Path) -> None:
    from edgeq.calibration.files import save_statistics
    from edgeq.calibration.observer import Observer
    from edgeq.calibration.statistics import Statistics, TensorStatistics

    random = np.random.default_rng(0)
    tensors = {}
    for name, axis, shape in (("b", 1, (2, 3)), ("a", None, (50,)), ("empty", None, (0, 4))):
        running = Observer(TensorStatistics(), axis)
        running.observe(np.asarray(random.normal(size=shape) * 1e3, np.float32))
        tensors[name] = running.freeze()
    save_statistics(Statistics("model", "data", 1, tensors), folder / "saved")
    for file in sorted((folder / "saved").iterdir()):
        file.rename(folder / file.name)
    (folder / "saved").rmdir()


@layer("statistics", _statistics, mutate=lambda r, d, o: (of_zip(of_bytes) if d[:2] == b"PK" else of_json)(r, d, o))
def _read_statistics(path: Path) -> None:
    from edgeq.calibration.files import load_statistics
    from edgeq.calibration.ranges import derive_ranges

    place = path.parent / "statistics"
    place.mkdir()
    for file in sorted(seed_folder("statistics").iterdir()):
        content = path.read_bytes() if file.suffix == path.suffix else file.read_bytes()
        (place / file.name).write_bytes(content)
    found = load_statistics(place)
    derive_ranges(found, "entropy")


# Records


def _reports(folder: Path) -> None:
    from tests.reporting import samples

    (folder / "a.json").write_text(json.dumps(samples.record()))


def _read_report_file(path: Path) -> None:
    from edgeq.reporting.bundle import read_record
    from edgeq.reporting.page import render
    from edgeq.reporting.read import read_report

    render(read_report(read_record(path)))


layer("reports", _reports, mutate=of_json, cases=500)(_read_report_file)


def _board_reports(folder: Path) -> None:
    from tests.hardware.test_measured import REPORT

    (folder / "a.json").write_text(json.dumps(REPORT))


@layer("board-reports", _board_reports, mutate=of_json, cases=3000)
def _read_board_report(path: Path) -> None:
    from edgeq.hardware.measured import draw_table, read_report

    report = read_report(path)
    draw_table([report])
    list(report.lines())


def _journals(folder: Path) -> None:
    lines = [
        {"format": "edgeq-tuning-journal/2", "settings": {"model": "a", "goal": "speed"}},
        {"key": "screen 1", "value": {"found": {"bytes": 3, "notes": ["n"]}}},
        {"key": "assess 3 1", "value": {"accuracy": 0.5}},
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@layer("journals", _journals, mutate=of_text, cases=5000)
def _read_journal(path: Path) -> None:
    from edgeq.tuning.journal import Journal, is_journal

    is_journal(path)
    Journal(path, {"model": "a", "goal": "speed"}, resume=True)


def _profiles(folder: Path) -> None:
    from edgeq.util.folders import shipped

    for number, file in enumerate([*sorted(shipped("profiles").glob("*.toml"))[:6], shipped("targets") / "zen4.toml"]):
        (folder / f"{number}.toml").write_bytes(file.read_bytes())


@layer("profiles", _profiles, mutate=of_text, cases=1000)
def _read_profile(path: Path) -> None:
    from edgeq.hardware.target import resolve

    resolve(path)


def _recipes(folder: Path) -> None:
    (folder / "a.toml").write_text(
        'data = "calib"\n[quantize]\nmodel = "m.onnx"\noutput = "o.onnx"\ncount = 8\nexclude = ["a", "b"]\n'
        '[calibrate.show]\npath = "CAL"\n[verify]\nbundle = "b"\n'
    )


@layer("recipes", _recipes, mutate=of_text, cases=3000)
def _read_recipe(path: Path) -> None:
    from edgeq.cli import group
    from edgeq.cli._recipe import read_recipe

    read_recipe(path, group)


def _programs(folder: Path) -> None:
    from edgeq.backends.systolic.save import save_program
    from tests.backends.systolic.graphs import program_of, random_graph

    for seed in range(4):
        save_program(program_of(*random_graph(seed)), folder / f"{seed}.npz")


@layer("programs", _programs, mutate=of_zip(lambda r, d, o: (of_json if d[-1:] == b"}" else of_bytes)(r, d, o)))
def _read_program(path: Path) -> None:
    from edgeq.backends.systolic.save import load_program

    load_program(path)


# Bundles. A case contains the name of a file, a line, a flag for making the manifest agree with the file, and the
# file's content.

_JSON_FILES = ("manifest.json", "models/model/component.json", "models/model/elsewhere/edgeq.json")
_SEAL = (b"sealed\n", b"as it is\n")


def _make_bundle(place: Path) -> None:
    from edgeq.bundle.write import write_bundle
    from tests.bundle.samples import small_spec

    write_bundle(small_spec(place.parent / "models"), place)


def _bundle_cases(*names: str, sealed: Sequence[bytes] = _SEAL) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        place = folder / "made" / "bundle"
        _make_bundle(place)
        kept = [n for n in names if (place / n).is_file()]
        cases = [f"{name}\n".encode() + seal + (place / name).read_bytes() for name in kept for seal in sealed]
        _remove(folder / "made")
        for number, case in enumerate(cases):
            (folder / f"{number}.case").write_bytes(case)

    return make


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)


def _of_case(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    name, seal, content = data.split(b"\n", 2)
    contents = [other.split(b"\n", 2)[2] for other in others]
    change: Mutation = of_bytes
    if name.endswith(b".json"):
        change = of_json
    elif name.endswith(b".onnx"):
        change = of_names(onnx.ModelProto, _ONNX)
    elif name.endswith(b".npz"):
        change = of_zip(of_bytes)
    return name + b"\n" + seal + b"\n" + change(random, content, contents)


def _put(path: Path) -> Path:
    """Put the case's file into this layer's valid bundle, and return the bundle's path."""
    import shutil

    parts = path.read_bytes().split(b"\n", 2)
    place = path.parent / "bundle"
    if not place.exists():
        _make_bundle(place)
        shutil.copytree(place, path.parent / "good")
    name, seal, content = (*parts, b"", b"")[:3]
    target = os.path.normpath(place / name.decode("utf-8", "replace").replace("\0", ""))
    if Path(target).is_relative_to(place) and Path(target).is_file():
        Path(target).write_bytes(content)
    if seal == b"sealed":
        _seal(place)
    return place


def _seal(root: Path) -> None:
    try:
        manifest = json.loads((root / "manifest.json").read_bytes())
        files = manifest["additional_metadata"]["edgeq"]["files"]
        for name in {file.relative_to(root).as_posix() for file in root.rglob("*")} & set(files):
            data = (root / name).read_bytes()
            files[name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    except (KeyError, TypeError, OSError, ValueError, RecursionError):
        return
    (root / "manifest.json").write_text(json.dumps(manifest))


def _restore(path: Path) -> None:
    place, good = path.parent / "bundle", path.parent / "good"
    for file in (path.read_bytes().split(b"\n", 1)[0].decode("utf-8", "replace").replace("\0", ""), "manifest.json"):
        if (good / file).is_file():
            (place / file).write_bytes((good / file).read_bytes())


@layer("manifest", lambda folder: _json_seeds(folder), mutate=of_json, cases=10_000)
def _read_manifest(path: Path) -> None:
    from edgeq_device.bundle.manifest import parse_manifest
    from edgeq_device.system.plainjson import parse_json

    parse_manifest(parse_json(path.read_bytes(), "manifest.json"), "manifest.json")


def _json_seeds(folder: Path) -> None:
    _make_bundle(folder / "made" / "bundle")
    made = {Path(name).name: (folder / "made" / "bundle" / name).read_bytes() for name in _JSON_FILES[:1]}
    _remove(folder / "made")
    for name, content in made.items():
        (folder / name).write_bytes(content)


@layer("bundle", _bundle_cases(*_JSON_FILES, "models/model/plain/model.onnx"), mutate=_of_case, cases=1000)
def _read_bundle(path: Path) -> None:
    from edgeq.bundle.write import open_checked

    place = _put(path)
    try:
        with open_checked(place):
            pass
    finally:
        _restore(path)


_RUN = ("models/model/plain/model.onnx", "selftest.npz", *_JSON_FILES[1:2])


def _sealed(folder: Path) -> None:
    """Add a model whose names appear in onnxruntime's log, because onnxruntime drops one of its weights and another
    weight has a wrong shape.
    """
    _bundle_cases(*_RUN, sealed=_SEAL[:1])(folder)
    head, data = (folder / "0.case").read_bytes().split(_SEAL[0], 1)
    model = onnx.load_from_string(data)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(3, np.float32), "unused"))
    name = model.graph.node[0].output[0]
    model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [9, 9, 9]))
    (folder / "logged.case").write_bytes(head + _SEAL[0] + model.SerializeToString())


@layer("sealed", _sealed, mutate=_of_case, cases=300, native=True)
def _run_sealed(path: Path) -> None:
    from edgeq.cli.measure import verify_command

    place = _put(path)
    try:
        _run(verify_command, str(place))
    finally:
        _restore(path)
        assert _names(place) == _names(path.parent / "good"), "a file was left in the bundle"


def _names(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def _zips(folder: Path) -> None:
    from edgeq.bundle.write import write_bundle
    from tests.bundle.samples import small_spec

    write_bundle(small_spec(folder / "models"), folder / "whole.edgeq")
    _remove(folder / "models")
    # Leave out the runner, because most of its bytes have no effect on a reader.
    with zipfile.ZipFile(folder / "whole.edgeq") as archive:
        kept = {name: archive.read(name) for name in archive.namelist() if not name.endswith((".py", "ines.json"))}
    manifest: dict[str, Any] = json.loads(kept["manifest.json"])
    files: Mapping[str, Any] = manifest["additional_metadata"]["edgeq"]["files"]
    manifest["additional_metadata"]["edgeq"]["files"] = {n: r for n, r in files.items() if n in kept}
    kept["manifest.json"] = json.dumps(manifest).encode()
    (folder / "whole.edgeq").unlink()
    for name, method in (("a", zipfile.ZIP_STORED), ("b", zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(folder / f"{name}.edgeq", "w", method) as archive:
            for file, content in kept.items():
                archive.writestr(zipfile.ZipInfo(file), content, method)


@layer("zip", _zips, mutate=of_zip(lambda r, d, o: (of_json if d[:1] == b"{" else of_bytes)(r, d, o)), cases=1000)
def _read_zip(path: Path) -> None:
    from edgeq.bundle.write import open_checked

    with open_checked(path):
        pass


def _signatures(folder: Path) -> None:
    from tests.device import test_signature as made

    for name, value in (("key", made.BUNDLE), ("certificates", made.CHAIN), ("statement", made.STATEMENT)):
        (folder / f"{name}.json").write_text(json.dumps(value))


@layer("signature", _signatures, mutate=of_json)
def _read_signature(path: Path) -> None:
    from edgeq_device.trust.signature import PublicKey, load_curves, parse_signature, read_signed_files

    data = path.read_bytes()
    if b"predicate" in data:
        read_signed_files(data, path.name)
        return
    signature = parse_signature(data, path.name)
    for curve in load_curves():
        signature.is_by(PublicKey(curve, curve.x, curve.y))
        PublicKey(curve, curve.x, curve.y).verifies(data[-140:], data)


def _trusted(folder: Path) -> None:
    from tests.device.test_trust import KEY, pem

    (folder / "key.pub").write_text(f"# a laptop\n\nnot-after: 2099-01-01\n{pem(KEY)}# another\n{pem(KEY)}")
    (folder / "key.der").write_bytes(KEY.der)
    (folder / "revoked.txt").write_text(f"# lost\n{KEY.id}  # a laptop\n")


@layer("trust", _trusted, mutate=lambda r, d, o: (of_bytes if d[:1] == b"0" else of_text)(r, d, o))
def _read_trusted(path: Path) -> None:
    from edgeq_device.trust.keys import read_trust

    read_trust(path.parent if path.name == "revoked.txt" else path)


def _registries(folder: Path) -> None:
    from edgeq_device.bundle.pull import ARTIFACT_TYPE, FILE_PATH

    layers = [
        {
            "mediaType": "application/vnd.cncf.model.weight.v1.raw",
            "digest": f"sha256:{digit * 64}",
            "size": 7,
            "annotations": {FILE_PATH: f"a/{digit}"},
        }
        for digit in "0a"
    ]
    (folder / "manifest.json").write_text(json.dumps({"artifactType": ARTIFACT_TYPE, "layers": layers}))


@layer("registry", _registries, mutate=of_json)
def _read_registry(path: Path) -> None:
    from edgeq_device.bundle.pull import read_layers
    from edgeq_device.system.plainjson import parse_json
    from edgeq_device.trust.registry import parse_reference

    read_layers(parse_json(path.read_bytes(), path.name), path.name)
    parse_reference(f"localhost:5000/{path.name}")


def _tflites(folder: Path) -> None:
    from tests.device.test_direct_litert import STATED, tflite

    (folder / "stated.tflite").write_bytes(tflite(STATED))
    (folder / "whole.tflite").write_bytes(tflite({**STATED, "inputs": STATED["inputs"] * 2}))


def _of_tflite(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change the description in a file's metadata, or the bytes of the file."""
    from tests.device.test_direct_litert import STATED, tflite

    if random.random() < 0.5:
        return of_bytes(random, data, others)
    stated = json.dumps(STATED).encode()
    return tflite(of_json(random, stated, [stated]))


@layer("tflite", _tflites, mutate=_of_tflite)
def _read_tflite(path: Path) -> None:
    from edgeq.model.digests import model_digest
    from edgeq.model.load import model_signature

    model_signature(path)
    model_digest(path)


def _ncnn_files(folder: Path) -> None:
    from tests.backends.ncnn.archives import convolution_file

    weights, bias = np.ones((2, 3, 3, 3)), np.zeros(2)
    (folder / "float.ncnn").write_bytes(convolution_file(weights, bias, 5, batch="N"))
    (folder / "int8.ncnn").write_bytes(convolution_file(weights, bias, 5, input_scale=2.0))


def _of_ncnn(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change the description or the layers in a file, or the bytes of the file."""
    if random.random() < 0.3:
        return of_bytes(random, data, others)
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(changed, "w") as output:
        place = random.choice(("model.param", "edgeq.json"))
        for name in archive.namelist():
            content = archive.read(name)
            mutate = of_json if name.endswith(".json") else of_text
            output.writestr(name, mutate(random, content, [content]) if name == place else content)
    return changed.getvalue()


@layer("ncnn", _ncnn_files, mutate=_of_ncnn)
def _read_ncnn(path: Path) -> None:
    from edgeq_device.engines.direct_ncnn import describe_file
    from edgeq_device.engines.ncnn_file import read_ncnn

    from edgeq.model.load import model_signature

    describe_file(read_ncnn(path.read_bytes(), path.name), path.name)
    model_signature(path)


_WEB_FILES = {"model.onnx": b"a model", "selftest.bin": bytes(64)}
_WEB = """
import readline from "node:readline";
import { pathToFileURL } from "node:url";

const { load, prepare, sessionOptions } = await import(pathToFileURL(process.argv[2]));
const item = () => ({ type: "uint8", shape: [4, 4, 3], data: new Uint8Array(48) });
const steps = {
  load: (folder) => load(pathToFileURL(`${folder}/`)),
  prepare: (folder, manifest) => prepare({ manifest }, item()),
  session: (folder, manifest) => sessionOptions({ ...manifest.session }),
};
const before = Object.getOwnPropertyNames(Object.prototype).length;
for await (const line of readline.createInterface({ input: process.stdin })) {
  const [folder, text] = JSON.parse(line);
  const answer = { problems: [], changed: false };
  for (const step of Object.values(steps)) {
    try {
      await step(folder, JSON.parse(text));
    } catch (error) {
      answer.problems.push(error instanceof Error ? error.message : null);
    }
  }
  answer.changed = Object.getOwnPropertyNames(Object.prototype).length !== before;
  console.log(JSON.stringify(answer));
}
"""
_ANSWERS_WITHIN = 10


def _web_folders(folder: Path) -> None:
    from edgeq.backends.web.folder import MANIFEST, write_module

    def record(name: str) -> dict[str, Any]:
        content = _WEB_FILES[name]
        return {"path": name, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}

    tensor = {"type": "float32", "shape": [1, 3], "offset": 0}
    preprocessing = {
        "input": "x",
        "type": "float32",
        "axes": "HWC",
        "steps": [
            {"op": "crop", "size": [2, 2], "rounding": "floor"},
            {"op": "divide", "value": [255, 254, 253]},
            {"op": "layout", "axes": "NCHW"},
        ],
    }
    manifest = {
        "title": "a",
        "model": [record("model.onnx")],
        "session": {"config": {"session.a.b": "1", "optimization.c": "2"}},
        "selftest": {**record("selftest.bin"), "cases": [{"inputs": {"x": tensor}, "outputs": {"y": tensor}}]},
        "preprocessing": preprocessing,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))
    (folder / "code").mkdir()
    write_module(folder / "code")
    (folder / "code" / "read.mjs").write_text(_WEB)


@cache
def _web_reader(code: Path) -> subprocess.Popen[str]:
    """Start node, which reads one folder after another."""
    command = ["node", str(code / "read.mjs"), str(code / "edgeq.mjs")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@layer("web", _web_folders, mutate=of_json)
def _read_web(path: Path) -> None:
    from edgeq.errors import EngineError

    for name, content in _WEB_FILES.items():
        (path.parent / name).write_bytes(content)
    running = _web_reader(seed_folder("web") / "code")
    assert running.stdin is not None
    assert running.stdout is not None
    running.stdin.write(json.dumps([str(path.parent), path.read_text("utf-8", "replace")]) + "\n")
    running.stdin.flush()
    ready, _, _ = select.select([running.stdout], [], [], _ANSWERS_WITHIN)
    if not ready:
        running.kill()
        raise TimeoutError("node does not answer")
    answer = json.loads(running.stdout.readline())
    if answer["changed"] or None in answer["problems"]:
        raise AssertionError(f"node: {answer}")
    # The package of the runtime is missing, so a good folder is refused only for that.
    if problems := [problem for problem in answer["problems"] if "node_modules" not in problem]:
        raise EngineError(problems[0])


def expected(error: BaseException) -> bool:
    """Return whether an error ends a command with one line, even if its text contains line breaks."""
    from edgeq_device.errors import DeviceError

    from edgeq.errors import EdgeqError

    return isinstance(error, EdgeqError | DeviceError)


_SEEDS: dict[str, Path] = {}


def seed_folder(name: str) -> Path:
    """Return the folder with the files of a layer. At the first call in a process, `make_seeds` makes these files."""
    return _SEEDS[name]


def make_seeds(chosen: Layer, folder: Path) -> list[Path]:
    """Return the layer's files, and write them into `folder` if they are missing."""
    if not folder.exists():
        folder.mkdir(parents=True)
        chosen.seeds(folder)
    _SEEDS[chosen.name] = folder
    return sorted(file for file in folder.iterdir() if file.is_file())
