"""The file for onnxruntime-riscv has only what its runtime reads, and computes the same integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.dialect import check_dialect, dialect_model, to_oldest_form, write_dialect
from edgeq.backends.systolic.program import Conv, Program
from edgeq.backends.systolic.simulate import simulate
from edgeq.errors import ModelError
from edgeq.model.convert import from_proto, to_proto
from edgeq.model.edit import Editor, set_constant
from edgeq.model.graph import GraphIndex, attributes, constant, is_op
from tests import graphs
from tests.backends.systolic.graphs import GraphBuilder, program_of, random_graph, run_all, signature_of

KNOWN = {"QLinearConv", "QLinearRelu", "QLinearAdd", "QuantizeLinear", "DequantizeLinear"}


def standard(model: ir.Model) -> onnx.ModelProto:
    """Return the dialect in a form that stock ONNX Runtime can run. The array's arithmetic replaces the runtime's own
    operators.
    """
    plain = model.clone()
    editor = Editor(plain)
    low, high = (editor.constant(f"test/{v}", np.array(v, np.float32)) for v in (-128, 127))

    def add(op_type: str, *inputs: ir.Value | None, **attributes: int) -> ir.Value:
        return editor.node(op_type, inputs, "test", before=node, attributes=attributes)

    for node in list(plain.graph):
        if node.op_type == "QLinearRelu":
            made = add("Clip", node.inputs[0], plain.graph.initializers["int8/0"])
        elif node.op_type == "QLinearAdd":
            left, right, total = (constant(node.inputs[place]) for place in (1, 4, 6))
            parts = []
            for source, scale in ((node.inputs[0], left), (node.inputs[3], right)):
                factor = editor.constant("factor", np.asarray(scale / total, np.float32))
                parts.append(add("Clip", add("Round", add("Mul", add("Cast", source, to=1), factor)), low, high))
            made = add("Cast", add("Clip", add("Add", *parts), low, high), to=int(ir.DataType.INT8))
        else:
            continue
        output = node.outputs[0]
        output.replace_all_uses_with(made, replace_graph_outputs=True)
        plain.graph.remove(node)
        made.name, output.name = output.name, None
    del plain.graph.opset_imports["com.microsoft"]
    return to_proto(plain)


def differing(program: Program, model: ir.Model, samples: np.ndarray) -> dict[str, int]:
    made = GraphIndex(model).values
    names = [name for name, tensor in program.tensors.items() if tensor.scale is not None and name in made]
    simulated = simulate(program, {program.inputs[0]: samples}, keep=names).tensors
    tensors = run_all(standard(model), samples, names, optimized=False)
    counts = {name: int((simulated[name] != tensors[name]).sum()) for name in names}
    return {name: count for name, count in counts.items() if count}


def check(seed: int) -> None:
    model, samples = random_graph(seed)
    program = program_of(model, samples, ArrayConfig(dim=4))
    dialect = dialect_model(program, signature_of(model))
    assert dialect.ir_version <= 7
    assert dialect.opset_imports == {"": 13, "com.microsoft": 1}
    # Only its own runtime knows QLinearRelu. Everything else has to be valid ONNX.
    onnx.checker.check_model(standard(dialect))
    assert differing(program, dialect, samples) == {}


@pytest.mark.parametrize("seed", range(300, 310))
def test_random_graphs_give_the_same_integers(seed: int) -> None:
    check(seed)


@pytest.mark.slow
def test_more_random_graphs_give_the_same_integers() -> None:
    for seed in range(310, 360):
        check(seed)


def test_tiles_become_convolutions_with_scalar_scales() -> None:
    b = GraphBuilder(np.random.default_rng(0))
    x = b.node("Relu", [b.conv("input", 12)], (1, 12, 9, 9))
    y = b.node("Relu", [b.conv(x, 12, groups=12)], (1, 12, 9, 9))
    model, samples = b.model(b.conv(y, 9)), b.samples()
    program = program_of(model, samples)
    convolutions = [step for step in program.steps if isinstance(step, Conv)]
    assert [len(step.tiles) for step in convolutions] == [3, 3, 3]
    dialect = dialect_model(program, signature_of(model))
    counts = {kind: sum(n.op_type == kind for n in dialect.graph) for kind in (*KNOWN, "Slice", "Concat")}
    assert counts["QLinearConv"] == 9
    assert counts["QLinearRelu"] == 6
    assert counts["Slice"] == 3
    assert counts["Concat"] == 3
    assert differing(program, dialect, samples) == {}


@pytest.mark.parametrize(
    ("kernel", "pads", "relu", "kind"),
    [
        ((2, 2), (0, 0, 0, 0), False, "int8"),
        ((3, 3), (1, 1, 1, 1), True, "int8"),
        ((3, 3), (1, 1, 1, 1), False, "float"),
        ((4, 4), (0, 0, 0, 0), True, "float"),
        ((2, 3), (0, 0, 0, 0), True, "float"),
        ((3, 3), (0, 0, 1, 1), True, "float"),
    ],
)
def test_only_pooling_that_the_array_does_rightly_is_left_to_be_fused(
    kernel: tuple[int, int], pads: tuple[int, int, int, int], relu: bool, kind: str
) -> None:
    b = GraphBuilder(np.random.default_rng(1))
    tensor = b.conv("input", 4)
    tensor = b.node("Relu", [tensor], b.shapes[tensor]) if relu else tensor
    model, samples = b.model(b.pool("MaxPool", tensor, kernel, (2, 2), pads)), b.samples()
    program = program_of(model, samples)
    dialect = dialect_model(program, signature_of(model))
    pool = next(node for node in dialect.graph if node.op_type == "MaxPool")
    assert is_op(pool.inputs[0].producer(), "DequantizeLinear") == (kind == "float")
    assert differing(program, dialect, samples) == {}


def test_rules_refuse_what_the_runtime_would() -> None:
    model, samples = random_graph(300)
    good = dialect_model(program_of(model, samples), signature_of(model))

    def broken(change: str) -> ir.Model:
        bad = from_proto(to_proto(good))
        source = bad.graph.inputs[0]
        if change == "ir":
            bad.ir_version = 9
        elif change == "opset":
            bad.graph.opset_imports[""] = 17
        elif change == "relu":
            bad.graph.append(ir.node("QLinearRelu", [source], name="odd"))
        elif change == "domain":
            bad.graph.append(ir.node("QLinearMul", [source], domain="com.microsoft"))
        elif change == "unknown":
            bad.graph.append(ir.node("LayerNormalization", [source]))
        else:
            set_constant(bad.graph.initializers["int8/0"], np.array(3))
        return bad

    check_dialect(good)
    for change, message in {
        "ir": "format version 9",
        "opset": "opset 12 or 13",
        "relu": "cannot be fused",
        "domain": "unknown to the runtime",
        "unknown": "not in opset 13",
        "zero": "zero point other than int8 0",
    }.items():
        with pytest.raises(ModelError, match=message):
            check_dialect(broken(change))


def only_node(nodes: str) -> ir.Node:
    return next(iter(graphs.model(f"g (float[1, 4, 3, 3] x, int64[1] n) => (y) {nodes}", opset=18).graph))


def test_parts_in_float_take_the_form_of_opset_13() -> None:
    node = only_node("<int64[1] axes = {2}> { y = ReduceMax <keepdims = 0> (x, axes) }")
    to_oldest_form(node)
    assert [value.name for value in node.inputs] == ["x"]
    assert attributes(node) == {"keepdims": 0, "axes": (2,)}
    node = only_node("{ y, z = Split <axis = 1, num_outputs = 2> (x) }")
    to_oldest_form(node)
    assert attributes(node) == {"axis": 1}
    resize = '{{ y = Resize <antialias = 0, keep_aspect_ratio_policy = "{}", mode = "linear"> (x, , n) }}'
    node = only_node(resize.format("stretch"))
    to_oldest_form(node)
    assert attributes(node) == {"mode": "linear"}
    with pytest.raises(ModelError, match="keep_aspect_ratio_policy of Resize"):
        to_oldest_form(only_node(resize.format("not_larger")))
    with pytest.raises(ModelError, match="computes its axes"):
        to_oldest_form(only_node("{ y = ReduceMax (x, n) }"))
    with pytest.raises(ModelError, match="not in opset 13"):
        to_oldest_form(only_node("{ y = LayerNormalization (x, x) }"))


def test_bodies_in_float_take_the_form_of_opset_13() -> None:
    body = "branch () => (float[1, 4, 1, 1] z) <int64[2] axes = {2, 3}> { z = ReduceMax (x, axes) }"
    choice = f"y = If (c) <then_branch = {body}, else_branch = {body}>"
    node = next(iter(graphs.model(f"g (float[1, 4, 3, 3] x, bool c) => (y) {{ {choice} }}", opset=18).graph))
    to_oldest_form(node)
    for branch in ("then_branch", "else_branch"):
        (inner,) = node.attributes[branch].as_graph()
        assert attributes(inner) == {"axes": (2, 3)}


def test_a_part_that_the_dialect_lacks_is_named(tmp_path: Path) -> None:
    text = """g (float[1, 4, 9, 9] input) => (float[1, 4, 9, 9] y) {
        [conv] a = Conv (input, weights)
        [normal] y = LayerNormalization (a, scale)
    }"""
    model = graphs.proto(text)
    random = np.random.default_rng(2)
    weights, scale = random.standard_normal((4, 4, 1, 1)), np.ones(9)
    for name, values in (("weights", weights), ("scale", scale)):
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    program = program_of(model, random.standard_normal((1, 4, 9, 9)).astype(np.float32))
    problem = write_dialect(program, signature_of(model), tmp_path / "d.onnx")
    assert "LayerNormalization 'normal' is not in opset 13" in problem
    assert not (tmp_path / "d.onnx").exists()


def test_constants_that_only_a_body_reads_are_in_the_file() -> None:
    text = """g (float[1, 4, 9, 9] input) => (float[1, 4, 9, 9] y) <float limit = {0.3}, float factor = {2}> {
        [conv] a = Conv (input, weights)
        [most] most = ReduceMax <keepdims = 0> (a)
        [large] large = Greater (most, limit)
        [choice] y = If (large) <
            then_branch = scaled () => (float[1, 4, 9, 9] s) { [scale] s = Mul (a, factor) },
            else_branch = smooth () => (float[1, 4, 9, 9] t) { [smooth] t = Sigmoid (a) }>
    }"""
    model = graphs.proto(text, opset=13)
    weights = np.random.default_rng(0).standard_normal((4, 4, 1, 1)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "weights"))
    samples = np.random.default_rng(1).standard_normal((1, 4, 9, 9)).astype(np.float32)
    program = program_of(model, samples)
    dialect = dialect_model(program, signature_of(model))
    tensors = run_all(standard(dialect), samples, ["y"], optimized=False)["y"]
    np.testing.assert_allclose(tensors, simulate(program, {"input": samples}).tensors["y"], rtol=1e-5)
