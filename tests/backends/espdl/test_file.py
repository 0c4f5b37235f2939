"""Test that a file holds a graph exactly, in both layouts of weights, and that readers refuse broken files."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.backends.espdl.layout import describe_layout, restore, store
from edgeq.backends.espdl.network import DEPTHWISE, FILTER, EspGraph, EspTensor
from edgeq.backends.espdl.reader import read
from edgeq.backends.espdl.selftest import checked_values
from edgeq.backends.espdl.writer import write
from edgeq.errors import ModelError
from tests.backends.espdl.build import built
from tests.backends.espdl.models import MODELS

PLACE = Path("model.espdl")


def filters(layout: str, type_: str, channels: int) -> EspTensor:
    shape = (3, 2, channels, 1) if layout == DEPTHWISE else (3, 2, 5, channels)
    values = np.arange(np.prod(shape), dtype=np.int64).astype(type_).reshape(shape)
    return EspTensor("w", shape, type_, values=values, layout=layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("type_", ["int8", "int16"])
@pytest.mark.parametrize("layout", [FILTER, DEPTHWISE])
@given(channels=st.integers(1, 50), blocked=st.booleans())
def test_weights_survive_every_layout(layout: str, type_: str, channels: int, blocked: bool) -> None:
    weights = filters(layout, type_, channels)
    stored = store(weights, blocked=blocked)
    assert weights.values is not None
    assert stored.size == weights.values.size
    text = describe_layout(weights, blocked=blocked)
    assert np.array_equal(restore(stored, weights.shape, text, depthwise=layout == DEPTHWISE), weights.values)


def test_a_block_has_sixteen_channels_one_after_the_other_and_the_others_follow() -> None:
    weights = filters(FILTER, "int8", 18)
    assert weights.values is not None
    stored = store(weights, blocked=True)
    assert np.array_equal(stored[:16], weights.values[0, 0, 0, :16])
    # The first channel without a block follows after 16 channels of 3 × 2 × 5 taps, as HWC.
    assert np.array_equal(stored[16 * 30 : 17 * 30], weights.values[..., 16].ravel())


def same(a: EspGraph, b: EspGraph) -> bool:
    """Return whether two graphs have equal nodes and tensors."""

    def facts(graph: EspGraph) -> list[object]:
        tensors = [(t.name, t.shape, t.type, t.exponents, t.layout) for t in graph.tensors()]
        nodes = [
            (n.kind, n.name, [t.name if t else "" for t in n.inputs], dict(n.attributes), n.table and n.table.name)
            for n in graph.nodes
        ]
        ports = [(p.name, p.tensor.name, p.order) for p in (*graph.inputs, *graph.outputs)]
        return [tensors, nodes, ports]

    values = zip(a.tensors(), b.tensors(), strict=True)
    return facts(a) == facts(b) and all(np.array_equal(x.values, y.values) for x, y in values if x.values is not None)


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_file_reads_back_as_the_graph_that_was_written(name: str, blocked: bool, tmp_path: Path) -> None:
    result = built(tmp_path, MODELS[name], x=_samples(name))
    graph = result.graph()
    tests = checked_values(graph, result.family(), result.sample())
    content = write(graph, blocked=blocked, tests=tests)
    assert content == write(graph, blocked=blocked, tests=tests)
    file = read(content, PLACE)
    nodes = {node.name for node in file.graph.nodes}
    assert same(file.graph, graph)
    assert {tensor.name for tensor in tests} == set(file.tests)
    assert all(np.array_equal(file.tests[tensor.name], value) for tensor, value in tests.items())
    # The chip names the first tensor that differs, so more than the output is tested.
    inner = file.tests.keys() - {port.tensor.name for port in (*graph.inputs, *graph.outputs)}
    assert len(inner) >= min(3, len(nodes) - 1)


def _samples(name: str) -> np.ndarray | None:
    shape = [d.dim_value for d in MODELS[name].graph.input[0].type.tensor_type.shape.dim]
    return np.random.default_rng(0).normal(size=(4, *shape[1:])).astype(np.float32)


def test_constants_start_at_multiples_of_sixteen(tmp_path: Path) -> None:
    graph = built(tmp_path, MODELS["residual"]).graph()
    content = write(graph, blocked=True)
    weights = next(t for t in graph.tensors() if t.layout)
    place = content.index(store(weights, blocked=True).tobytes())
    assert place % 16 == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda b: b[:10], "does not begin"),
        (lambda b: b"EDL1" + b[4:], "does not begin"),
        (lambda b: b[:4] + struct.pack("<I", 1) + b[8:], "encrypted"),
        (lambda b: b[:-16], "cut off"),
        (lambda b: b[:16] + b"\xff\xff\xff\x7f" + b[20:], "leads out of the file"),
    ],
)
def test_a_broken_file_is_refused_with_its_problem(change: object, problem: str, tmp_path: Path) -> None:
    content = write(built(tmp_path, MODELS["residual"]).graph(), blocked=False)
    with pytest.raises(ModelError, match=problem):
        read(change(content), PLACE)  # type: ignore[operator]


@given(place=st.integers(0, 2000), value=st.integers(0, 255))
def test_a_changed_byte_gives_a_graph_or_an_error_of_the_model(place: int, value: int) -> None:
    content = bytearray(_content())
    content[16 + place % (len(content) - 16)] = value
    # Any other exception would be a fault of the reader.
    with suppress(ModelError):
        read(bytes(content), PLACE)


_CACHE: list[bytes] = []


def _content() -> bytes:
    if not _CACHE:
        values = np.zeros((1, 1, 4, 3), np.int8)
        weights = EspTensor("w", values.shape, "int8", (-5,), values, FILTER)
        source, result = EspTensor("x", (1, 4), "int8", (-3,)), EspTensor("y", (1, 3), "int8", (-2,))
        from edgeq.backends.espdl.network import EspNode, EspPort

        node = EspNode("Gemm", "y", (source, weights), (result,), {"activation": "Linear", "transA": 0, "transB": 0})
        graph = EspGraph((EspPort("x", source, (0, 1)),), (EspPort("y", result, (0, 1)),), (node,))
        _CACHE.append(write(graph, blocked=False))
    return _CACHE[0]


def test_files_of_the_makers_exporter_are_read(shared_data: Path) -> None:
    folder = shared_data.parent / "witness" / "espdl" / "files"
    if not folder.is_dir():
        pytest.skip("shared/witness is not next to this checkout")
    files = sorted(folder.glob("*.espdl"))
    assert files
    for file in files:
        content = read(file.read_bytes(), file)
        assert content.graph.nodes
        assert set(content.tests) >= {port.tensor.name for port in (*content.graph.inputs, *content.graph.outputs)}
