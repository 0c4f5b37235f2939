"""Test weights next to a model. Their file is named after the destination, whichever folder they are written from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeq.model.load import model_files
from edgeq.quantization.quantizer import quantizer_output
from tests.graphs import proto


def write(path: Path, weight: np.ndarray) -> onnx.ModelProto:
    """Write a model with its weight as an initializer and as an attribute, both in `<name>.data`."""
    model = proto("g (float[N] x) => (float[N] y) { y = Add(x, w) }")
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    constant = onnx.helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(weight, "c"))
    model.graph.node.insert(0, constant)
    names = {"location": f"{path.name}.data", "convert_attribute": True}
    onnx.save_model(model, path, save_as_external_data=True, **names)
    return model


@pytest.mark.parametrize("elements", [512, 2], ids=["large", "small"])
def test_the_model_and_its_data_have_the_destinations_name(tmp_path: Path, elements: int) -> None:
    weight = np.arange(elements, dtype=np.float32)
    place = tmp_path / "out" / "model.onnx"
    place.parent.mkdir()
    with quantizer_output(place, external=True) as written:
        assert written.parent == place.parent
        write(written, weight)
    files = ["model.onnx", "model.onnx.data"] if elements == 512 else ["model.onnx"]
    assert sorted(file.name for file in place.parent.iterdir()) == files
    assert [file.name for file in model_files(place)] == files
    read = onnx.load(place)
    assert (numpy_helper.to_array(read.graph.initializer[0]) == weight).all()
    assert (numpy_helper.to_array(read.graph.node[0].attribute[0].t) == weight).all()


def test_single_files_are_written_in_place(tmp_path: Path) -> None:
    with quantizer_output(tmp_path / "model.onnx", external=False) as written:
        assert written == tmp_path / "model.onnx"
