"""Test specs from text, tables and dicts: every step is written and read back, and every mistake is named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.data.preprocess import parse_spec, parse_text
from edgeq.data.steps import build_step
from edgeq.data.steps.image import FILTERS, POSITIONS, ROUNDINGS, RULES
from edgeq.errors import DataError
from edgeq.util.records import plain

finite = st.floats(-1e6, 1e6).filter(lambda v: v != 0)
size = st.one_of(st.integers(1, 4096), st.tuples(st.integers(1, 4096), st.integers(1, 4096)).map(list))
tables: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries(
        {
            "op": st.just("resize"),
            "size": size,
            "rule": st.sampled_from(RULES),
            "filter": st.sampled_from(sorted(FILTERS)),
            "rounding": st.sampled_from(ROUNDINGS),
        }
    ),
    st.fixed_dictionaries({"op": st.just("crop"), "size": size, "rounding": st.sampled_from(ROUNDINGS)}),
    st.fixed_dictionaries(
        {"op": st.just("letterbox"), "size": size, "position": st.sampled_from(POSITIONS), "value": st.integers(0, 255)}
    ),
    st.fixed_dictionaries(
        {
            "op": st.sampled_from(["multiply", "divide", "add", "subtract"]),
            "value": st.one_of(finite, st.lists(finite, min_size=1)),
        }
    ),
    st.fixed_dictionaries({"op": st.just("window"), "frames": st.integers(1, 9), "step": st.integers(1, 9)}),
    st.sampled_from(
        [
            {"op": "center"},
            {"op": "dtype", "dtype": "float64"},
            {"op": "channels", "order": "BGR"},
            {"op": "layout", "axes": "NCHW"},
            {"op": "reshape", "shape": [1, -1]},
            {"op": "expand", "axis": -1},
        ]
    ),
)


@given(st.lists(tables, max_size=6))
def test_written_out_and_read_back(steps: list[dict[str, Any]]) -> None:
    spec = parse_spec({"title": "t", "steps": steps, "source": {"layout": "HWC", "key": "X"}}, "here")
    assert parse_spec(plain(spec), "there") == spec
    for step in spec.steps:
        assert build_step(plain(step)) == step
        assert step.describe()


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("resize=256", {"op": "resize", "size": 256}),
        (
            "resize=short:256:bicubic:round",
            {"op": "resize", "size": 256, "rule": "short", "filter": "bicubic", "rounding": "round"},
        ),
        ("resize=320x240", {"op": "resize", "size": [320, 240]}),
        ("resize=model", {"op": "resize", "size": "model"}),
        ("crop=224:round", {"op": "crop", "size": 224, "rounding": "round"}),
        ("letterbox=416:top-left:114", {"op": "letterbox", "size": 416, "position": "top-left", "value": 114}),
        ("letterbox=416:center:[1,2,3]", {"op": "letterbox", "size": 416, "position": "center", "value": [1, 2, 3]}),
        ("scale=1/127.5", {"op": "multiply", "value": 1 / 127.5}),
        ("mean=[0.485,0.456,0.406]", {"op": "subtract", "value": [0.485, 0.456, 0.406]}),
        ("std=0.229:0.224:0.225", {"op": "divide", "value": [0.229, 0.224, 0.225]}),
        ("offset=-1", {"op": "add", "value": -1}),
        ("channels=BGR", {"op": "channels", "order": "BGR"}),
        ("dtype=float64", {"op": "dtype", "dtype": "float64"}),
        ("layout=NHWC", {"op": "layout", "axes": "NHWC"}),
        ("window=5:2", {"op": "window", "frames": 5, "step": 2}),
        ("window=5", {"op": "window", "frames": 5}),
        ("reshape=[1,49,10]", {"op": "reshape", "shape": [1, 49, 10]}),
        ("expand=0", {"op": "expand", "axis": 0}),
        ("center", {"op": "center"}),
        ("center=true", {"op": "center"}),
    ],
)
def test_text_and_table_are_the_same(text: str, table: dict[str, Any]) -> None:
    assert parse_text(text).steps == (build_step(table),)
    assert parse_spec({"steps": text}, "x") == parse_spec({"steps": [table]}, "x")


def test_text_keeps_the_order_and_takes_source_options() -> None:
    spec = parse_text("key=X,label=Y,mean=127,std=128,source.layout=HWC,stack=true,layout=NCHW")
    assert [s.name for s in spec.steps] == ["subtract", "divide", "layout"]
    assert (spec.source.key, spec.source.label, spec.source.layout, spec.source.stack) == ("X", "Y", "HWC", True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rezise=256", "unknown preprocessing step 'rezise'"),
        ("resize=", "size is missing"),
        ("resize=256:bilinaer", "does not accept 'bilinaer'"),
        ("resize=0", "size is 0"),
        ("resize=short:model", "number of pixels"),
        ("resize=256:bilinear:bicubic", "a second filter"),
        ("crop=224:short", "does not accept 'short'"),
        ("mean=abc", "value is 'abc'"),
        ("mean=[1,]", "value is ''"),
        ("scale=1/0", "value is '1/0'"),
        ("scale=nan", "finite"),
        ("std=0", "divides by 0"),
        ("channels=GBR", "order is 'GBR'"),
        ("dtype=int8", "dtype is 'int8'"),
        ("layout=NN", "axes is 'NN'"),
        ("window=0", "frames is 0"),
        ("reshape=[a]", "shape is"),
        ("letterbox=4:300", "value is 300"),
        ("center=2", "does not accept '2'"),
        ("source.colour=RGB", "unknown field source.colour"),
        ("encoded=jpg", "go together"),
        ("source.layout=NHWC", "without the batch axis"),
        ("", "unknown preprocessing step ''"),
    ],
)
def test_mistakes_are_named(text: str, says: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_text(text, "here")
    assert caught.value.problem.startswith("here: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        ({"stepz": []}, "unknown field 'stepz'"),
        ({"steps": 3}, "neither a list nor text"),
        ({"steps": [3]}, "a step is 3"),
        ({"steps": [], "source": {"key": 3}}, "source.key is 3"),
        ({"steps": [], "source": {"channels": "XYZ"}}, "source.channels"),
        ({"steps": "key=X"}, "\\[source\\]"),
        ({"steps": [{"op": "crop", "size": True}]}, "size is True"),
        ({"title": 3}, "title"),
    ],
)
def test_mistakes_in_tables_are_named(plain: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        parse_spec(plain, "file.toml")
