from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from edgeq.errors import HardwareError
from edgeq.model.int8_rules import (
    CONDITIONS,
    DEFAULT,
    NodeContext,
    backends,
    explain_float,
    int8_rules,
    quantizable_operators,
    slow_fusions,
)

from .build import node

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
        (('source = "s"\n', ""), "'source' is missing"),
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
        conv = node("Conv", ["x", "w"], ["y"], name="c")
        assert explain_float(conv, rules, context) == ""
        assert explain_float(conv, rules, context, excluded={"c"}) == "excluded by request"
        assert "not constant" in explain_float(conv, rules)
        dilated = node("Conv", ["x", "w"], ["y"], dilations=[2, 2])
        assert explain_float(dilated, rules, context) == "it has dilations [2, 2]"
        assert explain_float(node("Tanh", ["x"], ["y"]), rules) == "a table would be needed"
        assert explain_float(node("Sin", ["x"], ["y"]), rules) == "no kernel"
        foreign = node("Conv", ["x", "w"], ["y"], domain="acme")
        assert "acme.Conv" in explain_float(foreign, rules, context)


CASES = [
    ("constant-weights", node("Conv", ["x", "w"], ["y"]), NodeContext(constants={"w"}), True),
    ("constant-weights", node("Conv", ["x", "w"], ["y"]), NodeContext(), False),
    ("after-quantized", node("Relu", ["x"], ["y"]), NodeContext(), True),
    ("after-quantized", node("Relu", ["x"], ["y"]), NodeContext(quantized={"x"}), True),
    ("after-quantized", node("Relu", ["x"], ["y"]), NodeContext(quantized=set()), False),
    ("after-conv-or-add", node("Relu", ["x"], ["y"]), NodeContext(makers={"x": "Conv"}), True),
    ("after-conv-or-add", node("Relu", ["x"], ["y"]), NodeContext(makers={"x": "MatMul"}), False),
    ("unit-alpha-beta", node("Gemm", ["x", "w", "b"], ["y"]), NodeContext(), True),
    ("unit-alpha-beta", node("Gemm", ["x", "w", "b"], ["y"], beta=0.5), NodeContext(), False),
    ("unit-alpha-beta", node("Gemm", ["x", "w"], ["y"], beta=0.5), NodeContext(), True),
    ("unit-alpha-beta", node("Gemm", ["x", "w"], ["y"], alpha=0.5), NodeContext(), False),
    ("not-transposed-a", node("Gemm", ["x", "w"], ["y"], transA=1), NodeContext(), False),
    ("not-transposed-a", node("Gemm", ["x", "w"], ["y"]), NodeContext(), True),
    ("nearest", node("Resize", ["x"], ["y"]), NodeContext(), True),
    ("nearest", node("Resize", ["x"], ["y"], mode="linear"), NodeContext(), False),
    ("no-dilation", node("MaxPool", ["x"], ["y"], dilations=[1, 1]), NodeContext(), True),
    ("no-dilation", node("MaxPool", ["x"], ["y"], dilations=[1, 2]), NodeContext(), False),
    ("no-ceil-mode", node("MaxPool", ["x"], ["y"], ceil_mode=1), NodeContext(), False),
    ("no-ceil-mode", node("MaxPool", ["x"], ["y"]), NodeContext(), True),
    ("explicit-padding", node("MaxPool", ["x"], ["y"], auto_pad="SAME_UPPER"), NodeContext(), False),
    ("explicit-padding", node("MaxPool", ["x"], ["y"], auto_pad="VALID"), NodeContext(), True),
    ("not-vector", node("MatMul", ["x", "w"], ["y"]), NodeContext(shapes={"x": (8, 4), "w": (4, 1)}), False),
    ("not-vector", node("MatMul", ["x", "w"], ["y"]), NodeContext(shapes={"x": (1, 4), "w": (4, 9)}), True),
    ("not-vector", node("MatMul", ["x", "w"], ["y"]), NodeContext(shapes={"x": (2, 1, 4), "w": (4, 9)}), False),
    ("not-vector", node("Gemm", ["x", "w"], ["y"], transB=1), NodeContext(shapes={"w": (1, 4)}), False),
    ("equal-shapes", node("Add", ["x", "w"], ["y"]), NodeContext(shapes={"x": (1, 4), "w": (1, 4)}), True),
    ("equal-shapes", node("Add", ["x", "w"], ["y"]), NodeContext(shapes={"x": (1, 4), "w": (1, 1)}), False),
    ("equal-shapes", node("Add", ["x", "w"], ["y"]), NodeContext(constants={"w"}), False),
]


@pytest.mark.parametrize(("name", "op", "context", "holds"), CASES)
def test_conditions(name: str, op: onnx.NodeProto, context: NodeContext, holds: bool) -> None:
    assert (CONDITIONS[name](op, context) == "") is holds


def test_every_condition_is_tested_both_ways() -> None:
    assert {(name, holds) for name, _, _, holds in CASES} == {(n, h) for n in CONDITIONS for h in (True, False)}


SLOW = """
[[slow_fusion]]
optimizer = "PairFusion"
where = [["Add", "Tanh"], ["Elu"]]
reason = "its kernel is slow"
source = "measured"
"""


def fused(*op_types: str) -> onnx.ModelProto:
    graph = onnx.helper.make_graph([onnx.helper.make_node(t, ["x"], [t]) for t in op_types], "g", [], [])
    return onnx.helper.make_model(graph)


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
    with pytest.raises(HardwareError, match="'reason' is missing"):
        slow_fusions("x", fused("Add"), tmp_path)


@pytest.mark.parametrize(
    ("weight", "group", "speaks_against"),
    [((8, 3, 3, 3), 1, True), ((64, 3, 7, 7), 1, False), ((8, 64, 1, 1), 1, False), ((8, 1, 3, 3), 8, False)],
)
def test_narrow_convolutions_by_a_bound_from_the_file(
    weight: tuple[int, ...], group: int, speaks_against: bool
) -> None:
    conv = node("Conv", ["x", "w"], ["y"], name="c", group=group)
    context = NodeContext(constants={"w"}, shapes={"w": weight})
    reason = explain_float(conv, int8_rules("tensorrt"), context)
    assert bool(reason) == speaks_against


def test_a_bound_must_be_a_number(tmp_path: Path) -> None:
    (tmp_path / "abacus.toml").write_text(GOOD.replace("no-dilation", "least-channels:many"))
    with pytest.raises(HardwareError, match=r"unknown condition 'least-channels:many'"):
        int8_rules("abacus", tmp_path)
