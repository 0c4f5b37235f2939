from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from edgeq_device.errors import DataError, UsageError
from edgeq_device.prepare.arrays import input_specs, parse_shapes, random_feeds


def session(*inputs: tuple[str, str, list[Any]]) -> Any:
    described = [SimpleNamespace(name=n, type=t, shape=s) for n, t, s in inputs]
    return SimpleNamespace(get_inputs=lambda: described)


IMAGE = ("image", "tensor(float)", ["batch", 3, 8, 8])


def test_open_sizes_become_one_and_values_are_seeded() -> None:
    feeds = random_feeds(session(IMAGE), count=3, seed=5)
    assert [f["image"].shape for f in feeds] == [(1, 3, 8, 8)] * 3
    assert feeds[0]["image"].dtype == np.float32
    assert 0 <= feeds[0]["image"].min() < feeds[0]["image"].max() < 1
    assert np.array_equal(feeds[1]["image"], random_feeds(session(IMAGE), count=3, seed=5)[1]["image"])
    assert not np.array_equal(feeds[0]["image"], feeds[1]["image"])


def test_every_element_type_can_be_made_up() -> None:
    types = ["float16", "double", "int8", "uint8", "int64", "bool", "string"]
    feed = random_feeds(session(*((t, f"tensor({t})", [2, None]) for t in types)))[0]
    assert {n: v.dtype.kind for n, v in feed.items()} == {
        "float16": "f",
        "double": "f",
        "int8": "i",
        "uint8": "u",
        "int64": "i",
        "bool": "b",
        "string": "O",
    }
    assert set(np.unique(feed["int64"])) <= {0, 1}
    assert feed["string"].tolist() == [[""], [""]]


def test_a_scalar_input() -> None:
    value = random_feeds(session(("rate", "tensor(float)", [])))[0]["rate"]
    assert isinstance(value, np.ndarray)
    assert value.shape == ()


def test_given_shapes_fill_open_sizes() -> None:
    specs = input_specs(session(IMAGE), {"image": (4, 3, 8, 8)})
    assert specs == {"image": (np.dtype(np.float32), (4, 3, 8, 8))}


@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (1, 3, 8), ()])
def test_shapes_that_contradict_the_model_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"'image' has the shape \[\?, 3, 8, 8\]"):
        input_specs(session(IMAGE), {"image": shape})


def test_a_shape_for_an_unknown_input_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no input 'img'.*image"):
        input_specs(session(IMAGE), {"img": (1,)})


@pytest.mark.parametrize("kind", ["seq(tensor(float))", "tensor(bfloat16)", "tensor(float8e4m3fn)"])
def test_types_unknown_to_numpy_need_data(kind: str) -> None:
    with pytest.raises(DataError, match="cannot be made up"):
        random_feeds(session(("x", kind, [1])))


def test_sizes_are_bounded_before_anything_is_made() -> None:
    with pytest.raises(UsageError, match="MiB"):
        random_feeds(session(("x", "tensor(float)", [None, None])), {"x": (10**9, 10**9)})


def test_shapes_from_text() -> None:
    assert parse_shapes(["image=1,3,224,224", "a=b=2x3", "s="]) == {"image": (1, 3, 224, 224), "a=b": (2, 3), "s": ()}


@pytest.mark.parametrize("text", ["image", "=1,2", "x=0", "x=-1", "x=1,", "x=a", "x=1;2", "x=99999999999999"])
def test_refuses_malformed_shapes(text: str) -> None:
    with pytest.raises(UsageError, match="is not a shape"):
        parse_shapes([text])


def test_two_shapes_for_one_input_are_refused() -> None:
    with pytest.raises(UsageError, match="two shapes"):
        parse_shapes(["x=1", "x=2"])
