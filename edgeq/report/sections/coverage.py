"""What really runs in int8, by operator, and why the rest does not."""

from __future__ import annotations

from collections.abc import Sequence

from edgeq.report.data import Coverage, FloatNode, Operator, Variant
from edgeq.report.markup import Markup, isolated, join, tag
from edgeq.report.numbers import count, share
from edgeq.report.sections.blocks import SERIES, bar, folded, legend, section, table

_SHOWN = 10
_TABLE = 500


def coverage_section(variant: Variant, anchor: str = "coverage") -> Markup:
    """A bar an operator, then the reasons, then the nodes."""
    coverage = variant.coverage
    if coverage is None or not (coverage.operators or coverage.float_nodes):
        return Markup()
    return section(
        anchor,
        "Coverage",
        _operators(coverage),
        _reasons(coverage.float_nodes),
        _nodes(coverage),
        lead=f"{share(coverage.share)} of the multiply-accumulates run on integers, as ONNX Runtime's own profile of "
        "the optimised graph shows, which is not always what the file asks for.",
    )


def _operators(coverage: Coverage) -> Markup:
    total = sum(o.int8_macs + o.float_macs for o in coverage.operators) or 1.0
    shown = [o for o in coverage.operators if o.int8_macs + o.float_macs > 0] or list(coverage.operators)
    if not shown:
        return Markup()
    return join([tag("ol", *(_operator(o, total) for o in shown[:_SHOWN]), class_="layers"), legend(SERIES)])


def _operator(operator: Operator, total: float) -> Markup:
    macs = operator.int8_macs + operator.float_macs
    nodes = operator.int8_nodes + operator.float_nodes
    inside = operator.int8_macs / macs if macs else operator.int8_nodes / max(1, nodes)
    return tag(
        "li",
        tag(
            "div",
            isolated(operator.name, limit=60, class_="layer"),
            " ",
            tag("span", f"×{nodes}", class_="op"),
            class_="who",
        ),
        tag(
            "div",
            bar(
                [(operator.int8_macs / total, "other"), (operator.float_macs / total, "base")],
                f"{share(inside, 0)} int8",
            ),
            tag("span", f"{count(macs)} MACs, {share(macs / total)} of all", class_="muted small"),
            class_="what",
        ),
    )


def _reasons(nodes: Sequence[FloatNode]) -> Markup:
    """Nodes in float, grouped by why."""
    groups: dict[str, list[FloatNode]] = {}
    for node in nodes:
        groups.setdefault(node.reason or "no reason recorded", []).append(node)
    ordered = sorted(groups.items(), key=lambda item: (-sum(n.macs for n in item[1]), -len(item[1]), item[0]))
    return table(
        ("why it runs in float", "operators", "nodes", "MACs"),
        (
            [
                tag("span", isolated(reason, limit=300), class_="why"),
                ", ".join(sorted({n.op_type for n in group})[:6]),
                str(len(group)),
                count(sum(n.macs for n in group)),
            ]
            for reason, group in ordered[:20]
        ),
        text_columns=(0, 1),
        caption="Reasons for float",
    )


def _nodes(coverage: Coverage) -> Markup:
    nodes = coverage.float_nodes[:_TABLE]
    if not nodes:
        return Markup()
    more = (
        f" (the {len(nodes)} largest of {coverage.float_node_count})" if coverage.float_node_count > len(nodes) else ""
    )
    return folded(
        f"Nodes in float: {len(nodes)}{more}",
        table(
            ("node", "operator", "why", "MACs"),
            (
                [
                    isolated(n.name, limit=80),
                    n.op_type,
                    tag("span", isolated(n.reason, limit=200), class_="why"),
                    count(n.macs),
                ]
                for n in nodes
            ),
            text_columns=(0, 1, 2),
            caption="Nodes in float",
        ),
    )
