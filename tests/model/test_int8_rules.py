from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from edgeq.errors import HardwareError
from edgeq.model.conditions import CONDITIONS, NodeContext
from edgeq.model.int8_prediction import explain_float, find_convolved, find_normalized
from edgeq.model.int8_rules import DEFAULT, backends, int8_rules, quantizable_operators, slow_fusions
from edgeq.scheme import ON_REQUEST
from tests import graphs

GOOD = """
[default]
reason = "no kernel"
source = "s"
[[rule]]
operators = ["Conv"]
int8 = "only-if"
only_if = ["constant-weights", "no-dilation"]
reason = "r"
source = "s"
[[rule]]
operators = ["Tanh"]
int8 = "no"
reason = "a table would be needed"
source = "s"
"""


@pytest.mark.parametrize("backend", backends())
def test_shipped_rules_name_operators_that_exist(backend: str) -> None:
    rules = int8_rules(backend)
    known = {schema.name for schema in onnx.defs.get_all_schemas()}
    assert set(rules) - {DEFAULT} <= known
    assert all(rule.reason and rule.source for rule in rules.values())
    assert {"Conv", "MatMul", "Gemm"} <= set(quantizable_operators(rules))


def test_each_backend_that_a_profile_names_has_rules() -> None:
    from edgeq.hardware.profile import load_profiles

    assert {p.backend for p in load_profiles().values()} <= set(backends())


def test_unknown_backend() -> None:
    with pytest.raises(HardwareError, match=r"'abacus'.*cpu"):
        int8_rules("abacus")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("[default]", "[default"), "toy.toml"),
        (('source = "s"\n', ""), "default.source is missing"),
        (('"only-if"', '"maybe"'), "'maybe'"),
        (('"no-dilation"', '"full-moon"'), "'full-moon'"),
        (('"Tanh"', '"Conv"'), "two rules"),
        (('int8 = "no"', 'int8 = "only-if"'), "only_if goes with"),
    ],
)
def test_malformed_rules(tmp_path: Path, change: tuple[str, str], expected: str) -> None:
    (tmp_path / "toy.toml").write_text(GOOD.replace(*change))
    with pytest.raises(HardwareError, match=expected):
        int8_rules("toy", tmp_path)


class TestExplainFloat:
    @pytest.fixture
    def rules(self, tmp_path: Path) -> object:
        (tmp_path / "toy.toml").write_text(GOOD)
        return int8_rules("toy", tmp_path)

    def test_reasons(self, rules: dict[str, object]) -> None:
        context = NodeContext(constants={"w"})
        conv = only_node("[c] y = Conv(x, w)")
        assert explain_float(conv, rules, context) == ""
        assert explain_float(conv, rules, context, excluded={"c": ON_REQUEST}) == ON_REQUEST
        assert "not constant" in explain_float(conv, rules)
        dilated = only_node("y = Conv<dilations = [2, 2]>(x, w)")
        assert explain_float(dilated, rules, context) == "it has dilations [2, 2]"
        assert explain_float(only_node("y = Tanh(x)"), rules) == "a table would be needed"
        assert explain_float(only_node("y = Sin(x)"), rules) == "no kernel"
        foreign = only_node("y = acme.Conv(x, w)", imports=', "acme": 1')
        assert "acme.Conv" in explain_float(foreign, rules, context)


def only_node(nodes: str, x: str = "", w: str = "", *, imports: str = "") -> ir.Node:
    """Return the last of the nodes, which read x, w and b. Sizes of x and w are texts such as "8, 4"."""
    sizes = [f"float[{size}] {name}" if size else f"float {name}" for name, size in (("x", x), ("w", w))]
    made = graphs.model(f"g ({', '.join(sizes)}, float b) => (float y) {{ {nodes} }}", imports=imports)
    return list(made.graph)[-1]


CASES = [
    ("constant-weights", only_node("y = Conv(x, w)"), NodeContext(constants={"w"}), True),
    ("constant-weights", only_node("y = Conv(x, w)"), NodeContext(), False),
    ("constant-operand", only_node("y = MatMul(x, w)"), NodeContext(constants={"x"}), True),
    ("constant-operand", only_node("y = MatMul(x, w)"), NodeContext(), False),
    ("apart-from-products", only_node("y = Add(x, w)"), NodeContext(), True),
    ("apart-from-products", only_node("y = Add(x, w)"), NodeContext(convolved={"x"}), True),
    ("apart-from-products", only_node("y = Add(x, w)"), NodeContext(convolved=()), False),
    ("apart-from-products", only_node("y = Add(x, w)"), NodeContext({}, {"x"}, (), before_layers=()), True),
    ("apart-from-products", only_node("y = Add(x, w)"), NodeContext({}, (), (), before_layers=()), False),
    ("not-normalized", only_node("y = Add(x, w)"), NodeContext(), True),
    ("not-normalized", only_node("y = Add(x, w)"), NodeContext(normalized={"y"}), False),
    ("after-quantized", only_node("y = Relu(x)"), NodeContext(), True),
    ("after-quantized", only_node("y = Relu(x)"), NodeContext(quantized={"x"}), True),
    ("after-quantized", only_node("y = Relu(x)"), NodeContext(quantized=set()), False),
    ("range-takes-its-place", only_node("y = Relu(x)"), NodeContext(), True),
    ("range-takes-its-place", only_node("l = Constant<value_float = -1.0>() y = Clip(x, l)"), NodeContext(), True),
    ("range-takes-its-place", only_node("l = Constant<value_float = 0.5>() y = Clip(x, l)"), NodeContext(), False),
    ("range-takes-its-place", only_node("h = Constant<value_float = -2.0>() y = Clip(x, , h)"), NodeContext(), False),
    ("range-takes-its-place", only_node("y = Clip(x, w)"), NodeContext(), False),
    ("after-conv-or-add", only_node("a = Conv(x, w) y = Relu(a)"), NodeContext(), True),
    ("after-conv-or-add", only_node("a = MatMul(x, w) y = Relu(a)"), NodeContext(), False),
    ("unit-alpha-beta", only_node("y = Gemm(x, w, b)"), NodeContext(), True),
    ("unit-alpha-beta", only_node("y = Gemm<beta = 0.5>(x, w, b)"), NodeContext(), False),
    ("unit-alpha-beta", only_node("y = Gemm<beta = 0.5>(x, w)"), NodeContext(), True),
    ("unit-alpha-beta", only_node("y = Gemm<alpha = 0.5>(x, w)"), NodeContext(), False),
    ("not-transposed-a", only_node("y = Gemm<transA = 1>(x, w)"), NodeContext(), False),
    ("not-transposed-a", only_node("y = Gemm(x, w)"), NodeContext(), True),
    ("nearest", only_node("y = Resize(x)"), NodeContext(), True),
    ("nearest", only_node('y = Resize<mode = "linear">(x)'), NodeContext(), False),
    ("no-dilation", only_node("y = MaxPool<dilations = [1, 1]>(x)"), NodeContext(), True),
    ("no-dilation", only_node("y = MaxPool<dilations = [1, 2]>(x)"), NodeContext(), False),
    ("no-ceil-mode", only_node("y = MaxPool<ceil_mode = 1>(x)"), NodeContext(), False),
    ("no-ceil-mode", only_node("y = MaxPool(x)"), NodeContext(), True),
    ("explicit-padding", only_node('y = MaxPool<auto_pad = "SAME_UPPER">(x)'), NodeContext(), False),
    ("explicit-padding", only_node('y = MaxPool<auto_pad = "VALID">(x)'), NodeContext(), True),
    ("one-group", only_node("y = Conv(x, w)"), NodeContext(), True),
    ("one-group", only_node("y = Conv<group = 4>(x, w)"), NodeContext(), False),
    ("not-vector", only_node("y = MatMul(x, w)", "8, 4", "4, 1"), NodeContext(), False),
    ("not-vector", only_node("y = MatMul(x, w)", "1, 4", "4, 9"), NodeContext(), True),
    ("not-vector", only_node("y = MatMul(x, w)", "N, 4", "4, 9"), NodeContext(), True),
    ("not-vector", only_node("y = MatMul(x, w)", "2, 1, 4", "4, 9"), NodeContext(), False),
    ("not-vector", only_node("y = Gemm<transB = 1>(x, w)", "", "1, 4"), NodeContext(), False),
    ("equal-shapes", only_node("y = Add(x, w)", "1, 4", "1, 4"), NodeContext(), True),
    ("equal-shapes", only_node("y = Add(x, w)", "1, 4", "1, 1"), NodeContext(), False),
    ("equal-shapes", only_node("y = Add(x, w)", "N, 4", "2, 4"), NodeContext(), True),
    ("equal-shapes", only_node("y = Add(x, w)", "N, 4", "4"), NodeContext(), False),
    ("equal-shapes", only_node("y = Add(x, w)"), NodeContext(constants={"w"}), False),
]


@pytest.mark.parametrize(("name", "op", "context", "holds"), CASES)
def test_conditions(name: str, op: ir.Node, context: NodeContext, holds: bool) -> None:
    assert (CONDITIONS[name](op, context) == "") is holds


def test_every_condition_is_tested_both_ways() -> None:
    assert {(name, holds) for name, _, _, holds in CASES} == {(n, h) for n in CONDITIONS for h in (True, False)}


def test_rules_know_the_neighbours_of_convolutions_and_norms() -> None:
    """Tensors from convolutions and tensors that norms read are found, even after a product or a sum.

    A norm may be one operator or several nodes.
    """
    made = graphs.model(
        """g (float[1, 4, 4, 4] x) => (float[1, 4, 4, 4] y) {
            c = Conv(x, w) r = Relu(c) p = MatMul(r, m) e = Erf(p) a = Add(e, k) s = Add(r, p)
            t = Transpose<perm = [0, 2, 3, 1]>(s) n = LayerNormalization(t, k) z = Add(n, a)
            mean = ReduceMean<axes = [-1]>(z) d = Sub(z, mean) q = Mul(d, d) v = ReduceMean<axes = [-1]>(q)
            y = Div(d, v)
        }""",
        {"w": np.ones((4, 4, 1, 1), np.float32), "m": np.ones((4, 4), np.float32), "k": np.ones(4, np.float32)},
    )
    assert find_convolved(made) == {"x", "c", "r", "s", "t"}
    assert find_normalized(made) == {"p", "e", "r", "s", "t", "n", "a", "z", "d"}


SLOW = """
[[slow_fusion]]
optimizer = "PairFusion"
where = [["Add", "Tanh"], ["Elu"]]
reason = "its kernel is slow"
source = "measured"
"""


def fused(*op_types: str) -> ir.Model:
    nodes = " ".join(f"{op_type}_out = {op_type}(x)" for op_type in op_types)
    return graphs.model(f"g (float[4] x) => (float[4] {op_types[0]}_out) {{ {nodes} }}")


@pytest.mark.parametrize(
    ("op_types", "found"), [(("Add",), 0), (("Add", "Tanh", "Relu"), 1), (("Elu",), 1), (("Elu", "Add", "Tanh"), 1)]
)
def test_slow_fusions_matter_where_a_whole_group_is(tmp_path: Path, op_types: tuple[str, ...], found: int) -> None:
    (tmp_path / "x.toml").write_text(GOOD + SLOW)
    assert [f.optimizer for f in slow_fusions("x", fused(*op_types), tmp_path)] == ["PairFusion"] * found


def test_a_file_without_slow_fusions_has_none(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(GOOD)
    assert slow_fusions("x", fused("Add"), tmp_path) == ()


def test_a_slow_fusion_that_lacks_a_field_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(GOOD + SLOW.replace('reason = "its kernel is slow"', ""))
    with pytest.raises(HardwareError, match=r"slow_fusion.*reason is missing"):
        slow_fusions("x", fused("Add"), tmp_path)


@pytest.mark.parametrize(
    ("weight", "group", "speaks_against"),
    [("8, 3, 3, 3", 1, True), ("64, 3, 7, 7", 1, False), ("8, 64, 1, 1", 1, False), ("8, 1, 3, 3", 8, False)],
)
def test_narrow_convolutions_by_a_bound_from_the_file(weight: str, group: int, speaks_against: bool) -> None:
    conv = only_node(f"[c] y = Conv<group = {group}>(x, w)", w=weight)
    reason = explain_float(conv, int8_rules("tensorrt"), NodeContext(constants={"w"}))
    assert bool(reason) == speaks_against


def test_a_bound_must_be_a_number(tmp_path: Path) -> None:
    (tmp_path / "abacus.toml").write_text(GOOD.replace("no-dilation", "least-channels:many"))
    with pytest.raises(HardwareError, match=r"unknown condition 'least-channels:many'"):
        int8_rules("abacus", tmp_path)
