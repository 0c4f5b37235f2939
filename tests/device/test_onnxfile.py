"""Test the walker of ONNX files against onnx's own parser, and on bytes that no writer produces."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from edgeq_device.bundle import onnxfile
from edgeq_device.bundle.onnxfile import read_onnx, walk_onnx
from edgeq_device.errors import BundleError
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests.device.wire import field, number, tensor, whole

Found = list[tuple[str, int, tuple[int, ...], dict[str, str]]]


def external(name: str, location: str = "w.bin", **entries: str) -> TensorProto:
    made = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[2, 3], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        made.external_data.add(key=key, value=value)
    return made


def inline(name: str) -> TensorProto:
    return numpy_helper.from_array(np.arange(6, dtype=np.float32), name)


def sparse(name: str) -> onnx.SparseTensorProto:
    return onnx.SparseTensorProto(values=external(f"{name}.values"), indices=external(f"{name}.indices"), dims=[9])


def graph(name: str, tensors: tuple[TensorProto, ...] = (), nodes: tuple[onnx.NodeProto, ...] = ()) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), name, [], [], list(tensors))


def everywhere() -> onnx.ModelProto:
    """Return a model with an external tensor everywhere that ONNX allows tensors."""
    node = onnx.NodeProto(op_type="Any")
    node.attribute.add(name="t", type=4, t=external("t"))
    node.attribute.add(name="ts", type=9, tensors=[external("ts0"), inline("no"), external("ts1")])
    node.attribute.add(name="s", type=11, sparse_tensor=sparse("s"))
    node.attribute.add(name="ss", type=12, sparse_tensors=[sparse("ss0")])
    node.attribute.add(name="g", type=5, g=graph("inner", (external("g"),)))
    node.attribute.add(name="gs", type=10, graphs=[graph("a", (external("gs0"),)), graph("b", (external("gs1"),))])
    node.attribute.add(name="f", type=6, floats=[1.5] * 9)
    node.attribute.add(name="i", type=7, ints=[-1, 0, 1 << 40] * 9)
    main = graph("main", (external("init"), inline("x")), (node,))
    main.sparse_initializer.append(sparse("initial"))
    model = helper.make_model(main)
    function = model.functions.add(name="F", domain="d", node=[node])
    function.attribute_proto.add(name="default", type=4, t=external("default"))
    training = model.training_info.add()
    training.initialization.CopyFrom(graph("i", (external("training.i"),)))
    training.algorithm.CopyFrom(graph("a", (external("training.a"),)))
    return model


def by_onnx(message: object) -> Iterator[TensorProto]:
    """Yield every external tensor, found through the descriptors of onnx's own messages."""
    if isinstance(message, TensorProto):
        if message.data_location == TensorProto.EXTERNAL or message.external_data:
            yield message
        return
    for descriptor, value in message.ListFields():  # type: ignore[attr-defined]
        if descriptor.type == descriptor.TYPE_MESSAGE:
            repeated = not hasattr(value, "ListFields")
            for inner in value if repeated else [value]:
                yield from by_onnx(inner)


def shown(name: str | bytes) -> str:
    """Shorten a name as the walker does. protobuf returns a name that is not UTF-8 as bytes."""
    return (name.encode() if isinstance(name, str) else name)[:60].decode("utf-8", "replace")


def expected(model: onnx.ModelProto) -> Found:
    return sorted(
        (
            (shown(t.name), t.data_type, tuple(t.dims), {e.key: e.value for e in t.external_data})
            for t in by_onnx(model)
        ),
        key=repr,
    )


def walked(data: bytes) -> Found:
    found = walk_onnx(data, "m").external
    return sorted(((t.name, t.data_type, t.dims, dict(t.entries)) for t in found), key=repr)


def test_tensors_are_found_wherever_onnx_has_them() -> None:
    found = walked(everywhere().SerializeToString())
    assert found == expected(everywhere())
    assert len(found) == 10 * 2 + 6


def test_packed_and_single_dims_are_the_same() -> None:
    packed = whole(tensor(field(1, number(2) + number(3)), field(13, field(1, b"location"))))
    single = whole(tensor(number(1 << 3) + number(2) + number(1 << 3) + number(3), field(13, field(1, b"location"))))
    assert walked(packed) == walked(single)
    assert walked(packed)[0][2] == (2, 3)


def test_entries_without_the_location_flag_are_found() -> None:
    loose = external("loose")
    loose.ClearField("data_location")
    assert [name for name, *_ in walked(helper.make_model(graph("g", (loose,))).SerializeToString())] == ["loose"]


ENTRY = field(13, field(1, b"location") + field(2, b"w.bin"))
EXTERNAL = number(14 << 3) + number(1)
NESTED = 60


def nested(depth: int) -> bytes:
    data = field(5, field(8, b"w"))
    for _ in range(depth):
        data = field(1, field(5, field(6, data)))
    return field(7, data)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "graph twice": (field(7, b"") * 2, "field 7 of ModelProto occurs twice"),
    "tensor of an attribute twice": (
        field(7, field(1, field(5, field(5, ENTRY) + field(5, EXTERNAL)))),
        "field 5 of AttributeProto occurs twice",
    ),
    "values twice": (field(7, field(15, field(1, b"") * 2)), "field 1 of SparseTensorProto occurs twice"),
    "location twice": (whole(tensor(ENTRY, ENTRY)), "gives the 'location' of its external data twice"),
    "value twice": (whole(tensor(field(13, field(2, b"a") * 2))), "field 2 of StringStringEntryProto occurs twice"),
    "data location twice": (whole(tensor(EXTERNAL, EXTERNAL)), "field 14 of TensorProto occurs twice"),
    "data location beyond 32 bits": (
        whole(tensor(number(14 << 3) + number((1 << 32) + 1))),
        "has the data location 4294967297",
    ),
    "a graph as a number": (number(7 << 3) + number(0), "field 7 of ModelProto has wire type 0"),
    "external data as a number": (whole(tensor(number(13 << 3) + number(0))), "field 13 of TensorProto has wire"),
    "dims as floats": (whole(tensor(number(1 << 3 | 5) + b"1234")), "field 1 of TensorProto has wire type 5"),
    "a group": (number(7 << 3 | 3) + number(7 << 3 | 4), "wire type 3"),
    "wire type 7": (b"\x0f", "wire type 7"),
    "field 0": (b"\x00\x00", "without a number"),
    "a tag beyond 32 bits": (number(((1 << 32) | 7) << 3 | 2) + number(0), "without a number"),
    "longer than the file": (number(7 << 3 | 2) + number(1000), "longer than the message around it"),
    "longer than its message": (field(7, number(5 << 3 | 2) + number(9)) + b"\x08\x01" * 9, "longer than the message"),
    "length without end": (number(7 << 3 | 2) + b"\xff" * 20, "cut off or too long"),
    "number of 70 bits": (b"\x08" + b"\xff" * 9 + b"\x7f", "cut off or too long"),
    "cut in a number": (b"\x08\xff", "cut off or too long"),
    "cut in a float": (b"\x3d\x00", "longer than the message around it"),
    "negative dimension": (whole(tensor(ENTRY, number(1 << 3) + number((1 << 64) - 1))), "or a negative one"),
    "too many dimensions": (whole(tensor(ENTRY, field(1, number(1) * 65))), "more than 64 dimensions"),
    "a long text": (whole(tensor(field(13, field(1, b"x" * 5000)))), "a text of 5000 bytes"),
    "not UTF-8": (whole(tensor(field(13, field(2, b"\xff\xfe")))), "not UTF-8"),
    "nested": (nested(NESTED), "nest deeper than 100"),
    "ONNX Runtime's own format": (b"\x20\x00\x00\x00ORTM" + bytes(64), "ONNX Runtime's own format"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_refuses_files_that_no_writer_produces(name: str) -> None:
    data, says = HOSTILE[name]
    with pytest.raises(BundleError) as refusal:
        walk_onnx(data, "m.onnx")
    assert says in str(refusal.value)
    assert str(refusal.value).startswith("m.onnx is ")
    assert "\n" not in str(refusal.value)


def test_nesting_as_deep_as_protobuf_reads_it_is_walked() -> None:
    assert walk_onnx(nested(30), "m").external == ()


def test_compiled_code_is_seen_in_inner_graphs() -> None:
    context = onnx.NodeProto(op_type="EPContext", domain="com.microsoft")
    branch = onnx.NodeProto(op_type="If")
    branch.attribute.add(name="then_branch", type=5, g=graph("inner", (), (context,)))
    assert walk_onnx(helper.make_model(graph("g", (), (branch,))).SerializeToString(), "m").has_context
    assert not walk_onnx(everywhere().SerializeToString(), "m").has_context


@pytest.mark.parametrize(
    ("attributes", "outside"),
    [({"embed_mode": 1}, False), ({"embed_mode": 0}, True), ({}, True), ({"embed_mode": 1, "also": 0}, True)],
)
def test_compiled_code_is_inside_only_where_the_node_says_so_once(attributes: dict[str, int], outside: bool) -> None:
    node = helper.make_node("EPContext", [], ["z"], domain="com.microsoft", ep_cache_context=b"code", **attributes)
    for attribute in node.attribute:
        if attribute.name == "also":
            attribute.name = "embed_mode"
    found = walk_onnx(helper.make_model(graph("g", (), (node,))).SerializeToString(), "m")
    assert found.has_context
    assert found.context_outside == outside


def test_the_number_of_fields_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxfile, "MAX_FIELDS", 50)
    for data in (b"\x08\x01" * 51, whole(tensor(ENTRY, field(1, number(1) * 51)))):
        with pytest.raises(BundleError, match="more than 50 fields"):
            walk_onnx(data, "m")


def test_numbers_in_runs_are_skipped_as_one_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxfile, "MAX_FIELDS", 200)
    data = helper.make_tensor("f", TensorProto.FLOAT, [4000], np.ones(4000, np.float32))
    node = helper.make_node("Any", [], [], ints=list(range(-2000, 2000)), floats=[0.5] * 4000)
    assert walked(helper.make_model(graph("g", (data, external("w")), (node,))).SerializeToString())[0][0] == "w"


def test_weights_inside_the_file_are_not_read(tmp_path: Path) -> None:
    big = numpy_helper.from_array(np.zeros(100_000_000, np.uint8), "w")
    file = tmp_path / "big.onnx"
    file.write_bytes(helper.make_model(graph("g", (big, external("e")))).SerializeToString())
    before = time.process_time()
    assert [found.name for found in read_onnx(file, "m").external] == ["e"]
    assert time.process_time() - before < 0.5


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(BundleError, match="is empty"):
        read_onnx(tmp_path / "empty.onnx", "m")
    with pytest.raises(BundleError, match="cannot be read"):
        read_onnx(tmp_path / "absent.onnx", "m")
    (tmp_path / "large.onnx").write_bytes(bytes(11))
    monkeypatch.setattr(onnxfile, "MAX_BYTES", 10)
    with pytest.raises(BundleError, match="has 11 bytes"):
        read_onnx(tmp_path / "large.onnx", "m")


texts = st.text(max_size=8)
tensors = st.builds(
    lambda name, kind, dims, entries, flag, raw: TensorProto(
        name=name,
        data_type=kind,
        dims=dims,
        external_data=[onnx.StringStringEntryProto(key=key, value=value) for key, value in entries.items()],
        data_location=flag,
        raw_data=raw,
        float_data=[0.5] * len(raw),
        int64_data=dims,
    ),
    texts,
    st.integers(0, 30),
    st.lists(st.integers(0, 1 << 62), max_size=4),
    st.dictionaries(texts, texts, max_size=3),
    st.sampled_from([None, 0, 1]),
    st.binary(max_size=9),
)
sparses = st.builds(lambda v, i: onnx.SparseTensorProto(values=v, indices=i, dims=[1, 2]), tensors, tensors)


def attributes(graphs: st.SearchStrategy[onnx.GraphProto]) -> st.SearchStrategy[onnx.AttributeProto]:
    return st.builds(
        lambda t, g, s, ts, gs, ss, ints, words: onnx.AttributeProto(
            name="a", t=t, g=g, sparse_tensor=s, tensors=ts, graphs=gs, sparse_tensors=ss, ints=ints, strings=words,
            floats=map(float, ints),
        ),
        st.none() | tensors, st.none() | graphs, st.none() | sparses,
        st.lists(tensors, max_size=2), st.lists(graphs, max_size=1), st.lists(sparses, max_size=1),
        st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=4), st.lists(st.binary(max_size=5), max_size=2),
    )  # fmt: skip


def graphs_of(inner: st.SearchStrategy[onnx.GraphProto]) -> st.SearchStrategy[onnx.GraphProto]:
    nodes = st.builds(
        lambda op, found: onnx.NodeProto(op_type=op, attribute=found), texts, st.lists(attributes(inner), max_size=2)
    )
    return st.builds(
        lambda held, own, ss: onnx.GraphProto(name="g", node=held, initializer=own, sparse_initializer=ss),
        st.lists(nodes, max_size=2),
        st.lists(tensors, max_size=2),
        st.lists(sparses, max_size=1),
    )


random_graphs = st.recursive(st.just(onnx.GraphProto()), graphs_of, max_leaves=3)


@settings(max_examples=150, deadline=None)
@given(main=random_graphs, extra=random_graphs, prefix=st.sampled_from([0, 1, 2]))
def test_random_models_are_read_as_onnx_reads_them(main: onnx.GraphProto, extra: onnx.GraphProto, prefix: int) -> None:
    model = onnx.ModelProto(ir_version=10, producer_name="p" * prefix, graph=main)
    if prefix:
        model.functions.add(name="f", node=extra.node)
        model.training_info.add(initialization=extra)
    assert walked(model.SerializeToString()) == expected(model)


BASE = everywhere().SerializeToString()
Change = Callable[[bytearray], None]


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_changed_bytes_raise_nothing_else_and_hide_nothing(data: st.DataObject) -> None:
    changed = bytearray(BASE)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        kind = data.draw(st.sampled_from(["set", "insert", "delete", "cut"]))
        if kind == "set":
            changed[at] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            changed[at:at] = data.draw(st.binary(min_size=1, max_size=6))
        elif kind == "delete":
            del changed[at : at + data.draw(st.integers(1, 6))]
        else:
            del changed[max(at, 1) :]
        if not changed:
            changed = bytearray(b"\x08")
    try:
        found = walked(bytes(changed))
    except BundleError:
        return
    try:
        model = onnx.ModelProto.FromString(bytes(changed))
    except Exception:  # each implementation of protobuf has its own DecodeError class
        return
    # For a type beyond 32 bits, protobuf and the walker have different numbers. Neither number is a type.
    assert [(n, d, e) for n, _, d, e in expected(model)] == [(n, d, e) for n, _, d, e in found]
