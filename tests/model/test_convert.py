"""Test the conversion between the in-memory model and its protobuf."""

from __future__ import annotations

import onnx

from edgeq.model.convert import from_proto, to_proto
from tests import graphs

_NET = """
net (float[N, 3] x, bool c) => (float[N, 3] y)
<float[3] w = {1, 2, 3}> {
    [add] s = Add (x, w)
    [if] y = If (c) <
        then_branch = then () => (float[N, 3] t) <float[3] v = {1, 2, 3}> { [mul] t = Mul (s, v) },
        else_branch = else () => (float[N, 3] e) { [same] e = Identity (s) }
    >
}
"""


def test_protobuf_describes_what_nodes_make_and_not_the_initializers() -> None:
    proto = onnx.shape_inference.infer_shapes(graphs.proto(_NET))
    written = to_proto(from_proto(proto))
    assert [value.name for value in written.graph.value_info] == ["s"]
    body = next(a.g for n in written.graph.node for a in n.attribute if a.name == "then_branch")
    assert [tensor.name for tensor in body.initializer] == ["v"]
    assert not body.value_info
    assert [t.name for t in written.graph.initializer] == ["w"]
