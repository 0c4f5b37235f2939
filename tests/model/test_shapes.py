from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from edgeq.model import shapes
from edgeq.model import shapes as symbolic
from edgeq.model.convert import from_proto, to_proto
from edgeq.model.edit import set_constant
from edgeq.model.shapes import describe, element_types, infer_shapes, unknown_shapes, write_shapes
from edgeq.model.skeleton import reattach, skeleton
from edgeq.model.tensors import weight_bytes
from edgeq.run.session import open_session
from tests.graphs import model, proto
from tests.model.build import windows

CONV = """
net (float[N,3,8,8] x) => (float[N,4,8,8] y)
<float[4,3,1,1] w = {%s}, int64[2] small = {0, 1}>
{
    a = Conv (x, w)
    y = Relu (a)
}
""".replace("%s", ", ".join(map(str, range(12))))


def test_shapes_are_inferred_and_written() -> None:
    made = model(CONV)
    assert unknown_shapes(made) == ("a",)
    found, problem = infer_shapes(made)
    assert problem == ""
    assert list(found["a"].shape or ()) == ["N", 4, 8, 8]
    assert unknown_shapes(made) == ("a",), "infer_shapes leaves the model alone"
    write_shapes(made)
    assert unknown_shapes(made) == ()


def test_element_types_are_those_of_the_model_or_inferred() -> None:
    made = model(CONV)
    floats = dict.fromkeys(("x", "w", "a", "y"), ir.DataType.FLOAT)
    assert element_types(made) == floats | {"small": ir.DataType.INT64}


def test_a_skeleton_has_inputs_for_its_large_weights_and_takes_them_back() -> None:
    made = model(CONV)
    set_constant(made.graph.initializers["w"], np.ones((400, 3, 1, 1)))
    before = to_proto(made)
    bare = skeleton(made)
    assert [value.name for value in bare.graph.input] == ["x", "w"]
    assert [tensor.name for tensor in bare.graph.initializer] == ["small"]
    assert to_proto(made) == before
    whole = reattach(bare, made)
    assert whole.graph.initializers["w"].const_value is made.graph.initializers["w"].const_value
    assert [value.name for value in whole.graph.inputs] == ["x"]


def test_a_skeleton_needs_no_copy_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model(CONV)
    set_constant(made.graph.initializers["w"], np.ones((400, 3, 1, 1)))
    monkeypatch.setattr(ir.Model, "clone", lambda model: pytest.fail("copied"))
    assert [value.name for value in skeleton(made).graph.input] == ["x", "w"]


def test_weight_bytes_count_bodies_and_attributes() -> None:
    assert weight_bytes(model(CONV)) == 4 * 3 * 4 + 2 * 8
    held = model("net (float x) => (float[2] y) { c = Constant <value = float[2] {1, 2}> () y = Add (x, c) }")
    assert weight_bytes(held) == 8


@pytest.mark.parametrize(
    ("nodes", "called"),
    [("a = Relu (x) y = MatMul (a, w)", False), ("a = Reshape (x, s) y = Flatten (a)", True)],
)
def test_infers_symbolically_only_if_onnx_does_not_suffice(
    monkeypatch: pytest.MonkeyPatch, nodes: str, called: bool
) -> None:
    made = model(f"g (float[N,3] x, float[3,4] w, int64[2] s) => (float[N,4] y) {{ {nodes} }}")
    calls, inference = [], shapes.symbolic_shapes
    monkeypatch.setattr(shapes, "symbolic_shapes", lambda *given: (calls.append(1), inference(*given))[1])
    found, problem = infer_shapes(made)
    assert (bool(calls), problem) == (called, "")
    alone, _ = infer_shapes(made, None)
    if not called:
        assert found["a"].shape == alone["a"].shape


def test_symbolic_inference_ends_in_time_and_says_why_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[N,3] x, int64[1] s) => (float[M] y) { a = Relu (x) y = Reshape (a, s) }"""
    monkeypatch.setattr(symbolic, "SYMBOLIC_LIMIT_S", -1.0)
    found, problem = shapes.infer_shapes(from_proto(onnx.parser.parse_model(text)))
    assert problem.startswith("it takes more than ")
    assert found["a"].shape is not None, "onnx's own inference takes over"

    def assertion(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(shapes, "symbolic_shapes", assertion)
    _, problem = shapes.infer_shapes(from_proto(onnx.parser.parse_model(text)))
    assert problem == "it does not know how to treat these shapes"


def test_types_are_those_of_onnx_where_sizes_are_found_symbolically() -> None:
    """Types come from onnx, even if only symbolic inference finds the sizes.

    ONNX Runtime's symbolic inference assumes uint8 for every QuantizeLinear without a zero point.
    """
    built = model(
        """net (float[N,4] x) => (float[M,4] y) <float s = {0.1}> {
            q = QuantizeLinear<output_dtype = 3>(x, s)
            d = DequantizeLinear(q, s)
            y = Concat<axis = 0>(d, d)
        }""",
        opset=21,
        ir_version=10,
    )
    write_shapes(built)
    assert next(node.outputs[0].dtype for node in built.graph) is ir.DataType.INT8


EQUAL = """g (float[n,h] x, float[1] c) => (float[] y) <int64[1] zero = {0}, int64[1] one = {1}, int64[1] three = {3},
    int64[1] four = {4}> {
    s = Shape (x) a = Gather (s, zero) b = Gather (s, one) same = Equal (a, b) k = Where (same, three, four)
    y = Expand (c, k)
}"""
BODY = """g (float[n,4] x) => (float[] y) <int64[1] zero = {0}, int64[1] two = {2}> {
    s = Shape (x) a = Gather (s, zero) less = Less (a, two) c = Squeeze (less)
    b = If (c) <then_branch = g1 () => (float[n,4] p) { p = Relu (x) },
                else_branch = g2 () => (float[2,4] q) { q = Slice (x, zero, two) }>
    y = Neg (b)
}"""
SLICE = """g (float[n,h] x, float[n,w] z) => (float[] y) <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}> {
    s = Shape (z) e = Slice (s, one, two) a = Slice (x, zero, e, one) y = Add (a, z)
}"""


@pytest.mark.parametrize(
    ("made", "sizes"),
    [
        (windows(), [{"x": (1, 3, 8, 8)}, {"x": (2, 3, 9, 13)}]),
        (proto("g (float[n,3] x, float[m,3] z) => (float[] y) { a = Add (x, z) y = Concat <axis = 1> (a, a) }"),
         [{"x": (4, 3), "z": (4, 3)}, {"x": (1, 3), "z": (2, 3)}, {"x": (2, 3), "z": (1, 3)}]),
        (proto(EQUAL), [{"x": (2, 2), "c": (1,)}, {"x": (2, 3), "c": (1,)}]),
        (proto(BODY), [{"x": (1, 4)}, {"x": (5, 4)}]),
        (proto(SLICE), [{"x": (2, 5), "z": (2, 5)}, {"x": (2, 1), "z": (2, 7)}]),
    ],
    ids=["windows", "broadcast", "equal", "body", "slice"],
)  # fmt: skip
def test_written_shapes_hold_at_every_size(made: onnx.ModelProto, sizes: list[dict[str, tuple[int, ...]]]) -> None:
    described = from_proto(made)
    write_shapes(described)
    shapes = {v.name: v.shape for node in described.graph for v in node.outputs if v.shape is not None}
    assert unknown_shapes(described) == ()
    declared = {v.name: v.shape for v in described.graph.inputs}
    del made.graph.output[:]
    made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in shapes)
    session = open_session(made.SerializeToString())
    for given in sizes:
        symbols = {str(d): n for name, own in given.items() for d, n in zip(declared[name] or (), own, strict=True)}
        found = session.run(list(shapes), {name: np.zeros(shape, np.float32) for name, shape in given.items()})
        for name, array in zip(shapes, found, strict=True):
            claimed = [symbols.get(str(size), size) for size in shapes[name]]
            pairs = zip(claimed, array.shape, strict=True)
            assert all(size == actual for size, actual in pairs if isinstance(size, int)), (name, given)
            assert all(isinstance(size, int) or size.value is None for size in claimed), "an invented symbol"


def test_declared_free_sizes_count_only_for_their_ranks() -> None:
    """If an input has free sizes, only the ranks that the file states for inner tensors are used.

    This model's batch was made free by hand, and its inner tensors still have the old one.
    """
    text = (
        "g (float[n,4] x) => (float[n,4] y) <float[1,4] a, float[1,4,1] b> { a = Relu (x) b = Strange (a) y = Neg (a) }"
    )
    made = from_proto(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]>\n{text}'))
    describe(made, Path("model.onnx"))
    first, second, _ = (node.outputs[0].shape for node in made.graph)
    assert list(first or ()) == ["n", 4]
    assert [size.value for size in second or ()] == [None, None, None]


@pytest.mark.parametrize("kind", ["sequence_type", "optional_type", "map_type"])
def test_ignores_declarations_without_a_type(kind: str) -> None:
    claimed = proto("g (float[1] x) => (float[1] y) { h = Relu (x) y = Neg (h) }")
    getattr(claimed.graph.value_info.add(name="h").type, kind).SetInParent()
    claimed.graph.value_info.add(name="y").type.tensor_type.elem_type = 75
    known, _ = infer_shapes(skeletal(claimed), bare=claimed)
    assert known["h"].shape == ir.Shape([1])


def skeletal(claimed: onnx.ModelProto) -> ir.Model:
    """Return the model without the file's descriptions of inner tensors."""
    plain = onnx.ModelProto()
    plain.CopyFrom(claimed)
    del plain.graph.value_info[:]
    return from_proto(plain)


def test_a_type_that_cannot_be_represented_says_nothing() -> None:
    body = "g (float[2] x) => (float[2] y) { y = Relu (x) }"
    made = proto(body)
    described = made.graph.value_info.add(name="opaque")
    described.type.sequence_type.elem_type.opaque_type.SetInParent()
    known, _ = infer_shapes(model(body), bare=made)
    assert "opaque" not in known
    assert known["y"].shape == [2]
