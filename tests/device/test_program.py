"""Test a bundle's model inside a program: the workstation's preprocessing and labels, and the same outputs from every
interface.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeq_device.errors import BundleError, DataError
from edgeq_device.prepare.steps import Prepare
from edgeq_device.program import open_model
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import edgeq
from edgeq import demo
from edgeq.data.files import Picture
from edgeq.data.preprocess import load_preprocess, shipped
from edgeq.signature import TensorSpec
from edgeq.util.records import plain

CLASSES = [f"class {i}" for i in range(10)]
STEPS = [
    *shipped(),
    "resize=40x20:exact:bicubic:ceil,crop=16x12:round,dtype=float64,divide=255,subtract=[0.1,0.2,0.3],layout=NHWC",
    "letterbox=32x24:center:[1,2,3]:lanczos,channels=BGR,multiply=1/255,layout=NCHW",
    "channels=L,resize=24:long,center,layout=CHW",
    "resize=model,dtype=float16,add=1,layout=model",
    "resize=12:height:ceil,divide=255,pad=30x14:0.5,layout=NCHW",
    "pad=30x14:7,resize=50:limit:round,layout=NCHW",
]


@settings(deadline=None, max_examples=6)
@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from([(1, 3, 24, 32), ("N", 32, 24, 3)]), st.integers(0, 99))
@pytest.mark.parametrize("steps", STEPS)
def test_images_are_prepared_as_on_the_workstation(
    steps: str, height: int, width: int, shape: tuple[Any, ...], seed: int
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    here = load_preprocess(steps)
    there = Prepare(json.loads(json.dumps(plain(here))), shape)
    try:
        expected = np.asarray(here(Picture(pixels), TensorSpec("x", np.dtype("float32"), shape)).array)
    except edgeq.EdgeqError:
        with pytest.raises((DataError, BundleError)):
            there(Image.fromarray(pixels))
        return
    found = there(Image.fromarray(pixels))
    expected = expected[None] if expected.ndim == 3 else expected
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"function": {"function": "f"}}, "a bundle does not contain"),
        ({"steps": [{"op": "explode"}]}, "does not know the preprocessing step 'explode'"),
        ({"steps": [{"op": "resize", "size": [70000, 70000]}]}, "70000x70000"),
        ({"steps": [{"op": "layout"}]}, "step layout does not fit"),
        ({"steps": [{"op": "divide", "value": [1, 2]}]}, "step divide does not fit"),
    ],
)
def test_preprocessing_that_does_not_run_here_is_one_line(record: dict[str, Any], problem: str) -> None:
    with pytest.raises((BundleError, DataError), match=problem):
        Prepare(record, (1, 3, 8, 8))(np.zeros((8, 8, 3), np.uint8))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    with np.load(demo.CALIBRATION) as arrays:
        for i, image in enumerate(arrays["image"][:20]):
            place = folder / "images" / CLASSES[i % 10]
            place.mkdir(parents=True, exist_ok=True)
            scaled = (255 * (image[0] - image.min()) / max(float(np.ptp(image)), 1e-9)).astype(np.uint8)
            Image.fromarray(scaled).save(place / f"{i}.png")
    data = edgeq.Data(folder / "images", "channels=L,resize=16,divide=255,layout=NCHW")
    edgeq.package(demo.MODEL, data, folder / "dist", targets="this-machine", timed=False, effort=None)
    return folder / "dist"


def test_an_image_an_array_and_tensors_give_the_same_answer(bundle: Path) -> None:
    image = next((bundle.parent / "images").rglob("*.png"))
    with open_model(bundle) as model:
        outputs = model.run(image)
        for x in (str(image), Image.open(image), np.asarray(Image.open(image).convert("RGB")), model.prepare(image)):
            np.testing.assert_array_equal(model.run(x)["logits"], outputs["logits"])
        assert model.labels == tuple(CLASSES)
        (label, score), *_ = model.top(outputs, 3)
        assert label == CLASSES[int(outputs["logits"].argmax())]
        assert score == outputs["logits"].max()
        with pytest.raises(DataError, match="cannot be read as an image"):
            model.run(__file__)
        with pytest.raises(DataError, match="model takes"):
            model.run({"image": np.zeros((1, 1, 4, 4), np.float32)})


def test_it_is_imported_from_the_bundle(bundle: Path) -> None:
    image = next((bundle.parent / "images").rglob("*.png"))
    program = (
        "from edgeq_run import open_bundle\n"
        f"model = open_bundle()\nprint(model.top(model.run({str(image)!r}), 1)[0][0])\n"
        "import edgeq_device; print(edgeq_device.__file__)\nmodel.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=bundle, env={"PYTHONPATH": str(bundle)}, capture_output=True, text=True
    )
    label, file = done.stdout.splitlines()
    assert label in CLASSES
    assert Path(file).is_relative_to(bundle)
    run = [sys.executable, str(bundle / "edgeq_run.py")]
    shown = subprocess.run([*run, "infer", str(image), "--top", "2"], capture_output=True, text=True, check=True)
    assert label in shown.stdout.splitlines()[2]
    subprocess.run([*run, "verify"], check=True, capture_output=True)  # passes only if nothing was left in the bundle
