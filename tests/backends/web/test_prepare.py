"""Every step and recipe of the preprocessing in JavaScript gives the same bytes as in Python. Other steps are left to
the caller.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.backends.web.preprocessing import web_recipe
from edgeq.data.preprocess import load_preprocess
from edgeq.signature import TensorSpec
from edgeq.util.folders import shipped

from .runtime import in_node

IMAGE = TensorSpec("x", np.dtype(np.float32), ("N", 3, None, None))
SCRIPT = """
    const { prepare } = await import(process.argv[1]);
    const cases = JSON.parse(process.argv[2]);
    const found = cases.map(({ recipe, shape, data }) => {
      const item = { type: "uint8", shape, data: Uint8Array.from(data) };
      const { x } = prepare({ manifest: { preprocessing: recipe } }, item);
      return { shape: x.shape, type: x.type, bytes: Buffer.from(x.data.buffer).toString("hex") };
    });
    console.log(JSON.stringify(found));
"""
RECIPES = [
    "divide=255,mean=[0.485,0.456,0.406],std=[0.229,0.224,0.225],layout=NCHW",
    "dtype=float64,divide=255,mean=[0.485,0.456,0.406],std=[0.229,0.224,0.225],layout=NCHW",
    "crop=5:floor,scale=0.00784313725490196,subtract=1,layout=NCHW",
    "crop=4:round,channels=BGR,add=0.1,layout=NHWC",
    "crop=4:ceil,channels=BGR,channels=RGB,layout=model",
    "divide=3,layout=CHW,reshape=[1,-1]",
    "layout=CHW,expand=0,multiply=1/255",
    "window=3:2,dtype=float32",
]


def the_same(texts: list[str], items: list[Any]) -> None:
    module = (shipped("targets") / "runtime" / "edgeq_device" / "engines" / "edgeq.mjs").as_uri()
    preprocessings = [load_preprocess(text) for text in texts]
    cases = [
        {"recipe": web_recipe(preprocessing, IMAGE), "shape": item.shape, "data": item.ravel().tolist()}
        for preprocessing, item in zip(preprocessings, items, strict=True)
    ]
    answers = in_node(SCRIPT, module, json.dumps(cases))
    for preprocessing, item, answer in zip(preprocessings, items, answers, strict=True):
        right = preprocessing(item, IMAGE).array.astype(np.float32)
        shape = [size for size in right.shape if size != 1]
        assert [size for size in answer["shape"] if size != 1] == shape
        assert bytes.fromhex(answer["bytes"]) == right.tobytes()


@pytest.fixture(autouse=True)
def node() -> None:
    if shutil.which("node") is None:
        pytest.skip("no node here")


def test_shipped_steps_give_the_same_bytes() -> None:
    random = np.random.default_rng(0)
    the_same(RECIPES, [random.integers(0, 256, (7, 8, 3), np.uint8) for _ in RECIPES])


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_arithmetic_rounds_as_in_python(data: st.DataObject) -> None:
    constant = st.floats(1e-3, 1e3)
    steps = st.tuples(st.sampled_from(["add", "subtract", "multiply", "divide"]), constant)
    texts = [
        ",".join([f"dtype={data.draw(st.sampled_from(['float32', 'float64']))}"] * data.draw(st.booleans()) + parts)
        for parts in data.draw(st.lists(st.lists(steps.map(lambda s: f"{s[0]}={s[1]!r}"), min_size=1), min_size=5))
    ]
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    the_same(texts, [random.integers(0, 256, (2, 3, 3), np.uint8) for _ in texts])


def test_steps_before_the_last_resize_are_the_callers() -> None:
    recipe = web_recipe(load_preprocess("imagenet"), IMAGE)
    assert recipe is not None
    assert len(recipe["caller"]) == 1
    assert [step["op"] for step in recipe["steps"]] == ["crop", "divide", "subtract", "divide", "layout"]
    assert recipe["steps"][-1]["axes"] == "NCHW"


def test_padding_and_what_comes_before_it_are_the_callers() -> None:
    recipe = web_recipe(load_preprocess("ppocr-rec"), IMAGE)
    assert recipe is not None
    assert [step["op"] for step in recipe["steps"]] == ["layout"]


def test_a_function_of_python_is_left_to_the_caller(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def twice(raw):\n    return raw * 2\n", "utf-8")
    recipe = web_recipe(load_preprocess(f"{file}:twice"), IMAGE)
    assert recipe is not None
    assert not recipe["steps"]
    assert recipe["caller"][0].startswith("all of it")
