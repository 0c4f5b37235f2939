"""Test `edgeq.model.space_to_depth`: it computes the same, and similar graphs are not rewritten."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edgeq.model.clean import tidy
from edgeq.model.prepare import prepare_model
from edgeq.model.space_to_depth import join_slices
from edgeq.run.session import open_session

END = 2**63 - 1


def focus(
    phases: Sequence[tuple[int, int]],
    *,
    size: int = 2,
    at_once: bool = False,
    end: int = END,
    layer: str = "Conv",
    group: int = 1,
    outputs: Sequence[str] = ("y",),
) -> onnx.ModelProto:
    """Return x [1, 2, 4 size, 2 size] → Slices → Concat "joined" → a layer → y."""
    nodes, weights = [], {}
    channels = 2 * len(phases)

    def slice_of(source: str, made: str, starts: Sequence[int], axes: Sequence[int]) -> None:
        values = {"starts": starts, "ends": [end] * len(axes), "axes": axes, "steps": [size] * len(axes)}
        names = [f"{made}_{key}" for key in values]
        weights.update({name: np.array(v, np.int64) for name, v in zip(names, values.values(), strict=True)})
        nodes.append(helper.make_node("Slice", [source, *names], [made], name=made))

    parts = [f"part_{i}" for i in range(len(phases))]
    for part, (row, column) in zip(parts, phases, strict=True):
        if at_once:
            slice_of("x", part, [row, column], [2, -1])
        else:
            slice_of("x", f"{part}_rows", [row], [2])
            slice_of(f"{part}_rows", part, [column], [3])
    nodes.append(helper.make_node("Concat", parts, ["joined"], name="join", axis=1))
    if layer == "Conv":
        weights["w"] = np.random.default_rng(0).normal(size=(4, channels // group, 3, 3)).astype(np.float32)
        nodes.append(helper.make_node("Conv", ["joined", "w"], ["y"], name="conv", pads=[1] * 4, group=group))
    else:
        nodes.append(helper.make_node(layer, ["joined"], ["y"], name="layer"))
    graph = helper.make_graph(
        nodes,
        "focus",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 4 * size, 2 * size])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, None, None, None]) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def rewritten(model: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    graph = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(model))
    joined = join_slices(graph)
    tidy(graph)
    return ir.serde.serialize_model(graph), joined


def kinds(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


def same_results(one: onnx.ModelProto, other: onnx.ModelProto) -> None:
    shape = [d.dim_value for d in one.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    for a, b in zip(*(open_session(m.SerializeToString()).run(None, {"x": x}) for m in (one, other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from([2, 3]), st.booleans(), st.sampled_from([END, 2**31 - 1, 100]))
def test_any_order_of_phases_gives_what_it_gave(data: st.DataObject, size: int, at_once: bool, end: int) -> None:
    phases = data.draw(st.permutations(list(itertools.product(range(size), repeat=2))))
    model = focus(phases, size=size, at_once=at_once, end=end)
    made, count = rewritten(model)
    assert count == 1
    assert kinds(made) == {"SpaceToDepth", "Conv"}
    same_results(model, made)


IN_ORDER = [(0, 0), (0, 1), (1, 0), (1, 1)]
YOLOX = [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_in_order_anything_may_read_it_and_the_name_stays() -> None:
    model = focus(IN_ORDER, layer="Relu", outputs=("y", "joined"))
    made, count = rewritten(model)
    assert count == 1
    assert kinds(made) == {"SpaceToDepth", "Relu"}
    same_results(model, made)


@pytest.mark.parametrize(
    "model",
    [
        focus(YOLOX, layer="Relu"),
        focus(YOLOX, outputs=("y", "joined")),
        focus(YOLOX, group=2),
        focus(YOLOX[:3]),
        focus([(0, 0), (0, 1), (1, 0), (0, 1)]),
        focus(YOLOX, end=3),
    ],
    ids=["no convolution", "an output", "groups", "a phase is missing", "a phase twice", "an end is cut off"],
)
def test_leaves_other_slices_unchanged(model: onnx.ModelProto) -> None:
    made, count = rewritten(model)
    assert count == 0
    assert "SpaceToDepth" not in kinds(made)


def test_preparing_does_it_and_says_so(tmp_path: Path) -> None:
    model = focus(YOLOX)
    onnx.save(model, tmp_path / "m.onnx")
    prepared = prepare_model(tmp_path / "m.onnx", tmp_path)
    assert "1 Concat of strided slices written as SpaceToDepth" in prepared.notes
    same_results(model, onnx.load(prepared.path))
