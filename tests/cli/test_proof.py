from __future__ import annotations

import math

from edgeq.cli.build import closeness, draw_float_nodes
from edgeq.measure.agreement import Agreement, OutputAgreement
from edgeq.measure.coverage import FloatNode


def agreement(sqnr_db: float, same: float | None = None) -> Agreement:
    return Agreement((OutputAgreement("y", 10, sqnr_db, 1.0, 0.0, None, 0, 0, same),), 1)


def test_equal_outputs_are_called_so() -> None:
    assert closeness(agreement(math.inf)) == "the same"
    assert closeness(agreement(30.0)) == "SQNR 30.0 dB, cosine 1.00000"
    assert closeness(agreement(math.inf, same=1.0)) == "100.0% of the values the same"


def test_draws_no_figure_without_compared_outputs() -> None:
    nothing = OutputAgreement("boxes", 0, -math.inf, 0.0, 0.0, None, 0, 3)
    assert closeness(nothing) == closeness(Agreement((nothing,), 3)) == "nothing could be compared"


def test_float_nodes_with_one_reason_share_a_line() -> None:
    nodes = [FloatNode(f"gate{i}", "HardSigmoid", 10, "no int8 kernel") for i in range(3)]
    nodes.append(FloatNode("head", "Conv", 500, "kept in float by --exclude"))
    assert list(draw_float_nodes(nodes, verbose=False)) == [
        "  float: head (Conv, 500 MACs): kept in float by --exclude",
        "  float: 3 HardSigmoid (gate0 …, 30 MACs): no int8 kernel",
    ]
    assert len(list(draw_float_nodes(nodes, verbose=True))) == 4
