"""The file for onnxruntime-riscv: only what its runtime reads, and the same integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.dialect import dialect_model, write_dialect
from edgeq.backends.systolic.dialect_rules import check_dialect, to_oldest_form
from edgeq.backends.systolic.program import Conv, Program
from edgeq.backends.systolic.simulate import simulate
from edgeq.errors import ModelError
from edgeq.graph.convert import from_proto, to_proto
from edgeq.graph.edit import set_constant
from edgeq.graph.query import attributes
from tests import graphs
from tests.backends.systolic.graphs import GraphBuilder, program_of, random_graph, run_all, signature_of

KNOWN = {"QLinearConv", "QLinearRelu", "QLinearAdd", "QuantizeLinear", "DequantizeLinear"}


def standard(model: onnx.ModelProto) -> onnx.ModelProto:
    """The dialect as stock ONNX Runtime can run it: the runtime's own operators by what the array does for them."""
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    nodes = []
    new: list[onnx.TensorProto] = [numpy_helper.from_array(np.array(v, np.float32), f"test/{v}") for v in (-128, 127)]
    for node in model.graph.node:
        if node.op_type == "QLinearRelu":
            nodes.append(helper.make_node("Clip", [node.input[0], "int8/0"], list(node.output)))
        elif node.op_type == "QLinearAdd":
            scales = [np.float32(constants[node.input[place]]) for place in (1, 4, 6)]
            parts = []
            for side, (place, scale) in enumerate(((0, scales[0]), (3, scales[1]))):
                own = f"{node.name}/test{side}"
                new.append(numpy_helper.from_array(np.array(scale / scales[2], np.float32), f"{own}/factor"))
                nodes += [
                    helper.make_node("Cast", [node.input[place]], [f"{own}/float"], to=1),
                    helper.make_node("Mul", [f"{own}/float", f"{own}/factor"], [f"{own}/scaled"]),
                    helper.make_node("Round", [f"{own}/scaled"], [f"{own}/rounded"]),
                    helper.make_node("Clip", [f"{own}/rounded", "test/-128", "test/127"], [f"{own}/cut"]),
                ]
                parts.append(f"{own}/cut")
            nodes += [
                helper.make_node("Add", parts, [f"{node.name}/test"]),
                helper.make_node("Clip", [f"{node.name}/test", "test/-128", "test/127"], [f"{node.name}/sat"]),
                helper.make_node("Cast", [f"{node.name}/sat"], list(node.output), to=onnx.TensorProto.INT8),
            ]
        else:
            nodes.append(node)
    del plain.graph.node[:]
    plain.graph.node.extend(nodes)
    plain.graph.initializer.extend(new)
    del plain.opset_import[1:]
    return plain


def differing(program: Program, model: onnx.ModelProto, samples: np.ndarray) -> dict[str, int]:
    made = {name for node in model.graph.node for name in node.output}
    names = [name for name, tensor in program.tensors.items() if tensor.scale is not None and name in made]
    simulated = simulate(program, {program.inputs[0]: samples}, keep=names).tensors
    found = run_all(standard(model), samples, names, optimized=False)
    counts = {name: int((simulated[name] != found[name]).sum()) for name in names}
    return {name: count for name, count in counts.items() if count}


def check(seed: int) -> None:
    model, samples = random_graph(seed)
    program = program_of(model, samples, ArrayConfig(dim=4))
    dialect = to_proto(dialect_model(program, signature_of(model)))
    assert dialect.ir_version <= 7
    assert {o.domain: o.version for o in dialect.opset_import} == {"": 13, "com.microsoft": 1}
    # No runtime but its own knows QLinearRelu; everything else has to be valid ONNX.
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
    dialect = to_proto(dialect_model(program, signature_of(model)))
    counts = {kind: sum(n.op_type == kind for n in dialect.graph.node) for kind in (*KNOWN, "Slice", "Concat")}
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
    made = b.conv("input", 4)
    made = b.node("Relu", [made], b.shapes[made]) if relu else made
    model, samples = b.model(b.pool("MaxPool", made, kernel, (2, 2), pads)), b.samples()
    program = program_of(model, samples)
    dialect = to_proto(dialect_model(program, signature_of(model)))
    pool = next(node for node in dialect.graph.node if node.op_type == "MaxPool")
    maker = next(node.op_type for node in dialect.graph.node if pool.input[0] in node.output)
    assert (maker == "DequantizeLinear") == (kind == "float")
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
        "relu": "fuses into nothing",
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


def test_a_part_that_the_dialect_lacks_is_said(tmp_path: Path) -> None:
    b = GraphBuilder(np.random.default_rng(2))
    made = b.conv("input", 4)
    shape = b.shapes[made]
    scale = b.constant(np.ones(shape[-1]))
    model = b.model(made)
    model.graph.node.append(helper.make_node("LayerNormalization", [made, scale], ["normal"], name="normal"))
    model.graph.initializer.append(b.constants[-1])
    model.graph.output[0].name = "normal"
    model.opset_import[0].version = 17
    program = program_of(model, b.samples())
    assert "LayerNormalization 'normal' is not in opset 13" in write_dialect(
        program, signature_of(model), tmp_path / "d.onnx"
    )
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
    dialect = to_proto(dialect_model(program, signature_of(model)))
    found = run_all(standard(dialect), samples, ["y"], optimized=False)["y"]
    np.testing.assert_allclose(found, simulate(program, {"input": samples}).tensors["y"], rtol=1e-5)
