"""Write small networks as files for ncnn, and run them in ncnn and in onnxruntime."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from edgeq.backends.ncnn.writer import DESCRIPTION, PARAM, WEIGHTS, members, write_ncnn
from edgeq.model.convert import to_bytes
from edgeq.run.session import SessionSettings, open_session
from tests.graphs import proto

ncnn = pytest.mark.skipif(importlib.util.find_spec("ncnn") is None, reason="the package ncnn is not installed")
UNFUSED = SessionSettings(optimization="none", intra_op_threads=1)
Arrays = Mapping[str, NDArray[Any]]


def write(folder: Path, text: str, weights: Mapping[str, Any], opset: int = 17) -> tuple[Path, Path]:
    """Write a network as an ONNX model and as a file for ncnn, and return both paths."""
    model, file = folder / "net.onnx", folder / "net.ncnn"
    onnx.save(onnx.shape_inference.infer_shapes(proto(text, weights, opset=opset)), model)
    write_ncnn(model, file)
    return model, file


def run_ncnn(file: Path, inputs: Arrays, **options: bool) -> dict[str, NDArray[np.float32]]:
    """Run a file in ncnn with its own options, except those in `options`, and return the outputs without axes."""
    import ncnn as module

    content = members(file)
    description = json.loads(content[DESCRIPTION])
    net = module.Net()
    net.opt.num_threads = 1
    for name, value in {**description["options"], **options}.items():
        assert hasattr(net.opt, name), name
        setattr(net.opt, name, value)
    for name, load in ((PARAM, net.load_param), (WEIGHTS, net.load_model)):
        (file.parent / name).write_bytes(content[name])
        assert load(str(file.parent / name)) == 0, name
    extractor = net.create_extractor()
    # A Mat does not copy the array, so the array and the copy must outlive the run.
    arrays = []
    for port in description["inputs"]:
        values = np.asarray(inputs[port["name"]], np.float32)
        blob = np.ascontiguousarray(values[0] if values.ndim > 1 and len(values) == 1 else values)
        arrays.append((blob, module.Mat(blob).clone()))
        extractor.input(port["blob"], arrays[-1][1])
    outputs = {}
    for port in description["outputs"]:
        status, blob = extractor.extract(port["blob"])
        assert status == 0, port
        outputs[port["name"]] = np.array(blob).copy().ravel()
        del blob
    # An extractor must not outlive its Net.
    del extractor
    return outputs


def run_onnx(model: Path | ir.Model, inputs: Arrays) -> dict[str, NDArray[np.float32]]:
    """Run a model in onnxruntime without optimisation, and return the outputs without axes."""
    session = open_session(model if isinstance(model, Path) else to_bytes(model), UNFUSED)
    floats = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    names = [output.name for output in session.get_outputs()]
    return {name: values.ravel() for name, values in zip(names, session.run(None, floats), strict=True)}


def sqnr_db(expected: NDArray[Any], actual: NDArray[Any]) -> float:
    """Return the ratio of the signal to the difference, in dB."""
    signal, noise = (np.square(a.astype(np.float64)).sum() for a in (expected, expected - actual))
    return float("inf") if noise == 0 else float(10 * np.log10(signal / noise))
