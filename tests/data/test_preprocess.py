"""Test preprocessings by name, file, text and function, and compare the older names with their formulas."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from PIL import Image

from data.helpers import pixels, spec
from edgeq.data import preprocess as module
from edgeq.data.images import Picture
from edgeq.data.preprocess import load_preprocess, names, register, shipped
from edgeq.errors import DataError
from edgeq.util.records import plain

NCHW = spec("x", "N", 3, 4, 5)
f32 = np.float32

# Output channel → (input channel, formula), from the documented arithmetic.
FORMULAS = {
    "caffe": [
        (2, lambda v: (v - f32(103.94)) * f32(0.017)),
        (1, lambda v: (v - f32(116.78)) * f32(0.017)),
        (0, lambda v: (v - f32(123.68)) * f32(0.017)),
    ],
    "caffe2": [
        (2, lambda v: v - f32(103.939)),
        (1, lambda v: v - f32(116.779)),
        (0, lambda v: v - f32(123.68)),
    ],
    "mxnet": [
        (2, lambda v: (v / f32(255) - f32(0.406)) / f32(0.225)),
        (1, lambda v: (v / f32(255) - f32(0.456)) / f32(0.224)),
        (0, lambda v: (v / f32(255) - f32(0.485)) / f32(0.229)),
    ],
    "rcnn": [
        (2, lambda v: v - f32(102.9801)),
        (1, lambda v: v - f32(115.9465)),
        (0, lambda v: v - f32(122.7717)),
    ],
    "preprocess_method2": [
        (0, lambda v: v - f32(123.68)),
        (1, lambda v: v - f32(116.78)),
        (2, lambda v: v - f32(103.94)),
    ],
    "tf": [(c, lambda v: v / f32(127.5) - f32(1)) for c in range(3)],
    "none": [(c, lambda v: v) for c in range(3)],
}


@pytest.mark.parametrize("name", sorted(FORMULAS))
@given(seed=st.integers(0, 1000))
def test_named_arithmetic_on_raw_arrays(name: str, seed: int) -> None:
    chw = np.ascontiguousarray(pixels(4, 5, seed).transpose(2, 0, 1)).astype(np.float32)
    if name == "tf":
        chw = chw.astype(np.uint8)  # "tf" also resizes to the model, which needs uint8
    got = np.asarray(load_preprocess(name)(chw, NCHW).array)
    got = got.reshape(3, 4, 5)
    for c, (source, formula) in enumerate(FORMULAS[name]):
        for y in range(4):
            for x in range(5):
                assert got[c, y, x] == formula(f32(chw[source, y, x]))


@pytest.mark.parametrize("name", ["caffe", "caffe2", "mxnet", "preprocess_method2", "preprocess_method1"])
def test_images_and_raw_arrays_agree(name: str) -> None:
    hwc = pixels(4, 5)
    image = load_preprocess(name)(Picture(hwc), NCHW).array
    array = load_preprocess(name)(hwc.transpose(2, 0, 1)[None], NCHW).array
    assert np.array_equal(np.asarray(image), np.asarray(array))
    assert np.asarray(image).shape == (1, 3, 4, 5)


def test_method1_subtracts_each_images_own_mean() -> None:
    stack = np.stack([pixels(4, 5, seed).transpose(2, 0, 1) for seed in range(3)])
    got = np.asarray(load_preprocess("preprocess_method1")(stack, NCHW).array)
    for item, raw in zip(got, stack, strict=True):
        scaled = raw.astype(f32) / f32(127.5) - f32(1)
        assert np.array_equal(item, scaled - f32(scaled.mean(dtype=np.float64)))
        assert abs(float(item.mean())) < 1e-6


def test_rcnn_gives_no_batch_axis() -> None:
    done = load_preprocess("rcnn")(Picture(pixels(4, 5)), spec("x", 3, "H", "W"))
    assert np.asarray(done.array).shape == (3, 4, 5)


@given(st.integers(230, 400), st.integers(230, 400))
def test_imagenet_is_torchvisions(height: int, width: int) -> None:
    raw = np.full((height, width, 3), 7, np.uint8)
    raw[:, : width // 2] = 200
    image = Image.fromarray(raw)
    short = min(height, width)
    size = (256, int(256 * height / width)) if width == short else (int(256 * width / height), 256)
    image = image.resize(size, Image.Resampling.BILINEAR)
    left, top = round((size[0] - 224) / 2.0), round((size[1] - 224) / 2.0)
    x = np.asarray(image.crop((left, top, left + 224, top + 224)), f32) / f32(255)
    x = (x - np.array([0.485, 0.456, 0.406], f32)) / np.array([0.229, 0.224, 0.225], f32)
    got = load_preprocess("imagenet")(Picture(raw), spec("x", 1, 3, 224, 224)).array
    assert np.array_equal(np.asarray(got), x.transpose(2, 0, 1)[None])


def test_tf_fits_the_models_layout() -> None:
    nhwc = load_preprocess("tf")(Picture(pixels(9, 9)), spec("x", 1, 4, 5, 3)).array
    nchw = load_preprocess("tf")(Picture(pixels(9, 9)), spec("x", 1, 3, 4, 5)).array
    assert np.array_equal(np.asarray(nhwc).transpose(0, 3, 1, 2), np.asarray(nchw))


def test_none_leaves_arrays_in_the_models_shape_alone() -> None:
    for shape in [(3, 4, 5), (1, 3, 4, 5), (6, 3, 4, 5)]:
        array = np.random.default_rng(0).standard_normal(shape).astype(f32)
        got = np.asarray(load_preprocess("raw")(array, NCHW).array)
        assert np.array_equal(got.reshape(shape), array)


def test_every_shipped_one_survives_to_dict() -> None:
    for name in shipped():
        loaded = load_preprocess(name)
        assert load_preprocess(plain(loaded)) == loaded
        assert loaded.title
        assert loaded.arithmetic()
    assert load_preprocess("None").name == "none"


@pytest.mark.parametrize("name", ["mine.toml", "MINE.TOML"])
def test_toml(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text('steps = "crop=4,divide=255"\n[source]\nlayout = "HWC"\n')
    loaded = load_preprocess(file)
    assert loaded.name == file.stem
    assert loaded.source.layout == "HWC"
    assert load_preprocess(loaded) is loaded


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"steps = [", "is not TOML"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b'steps = "blur=3"', "unknown preprocessing step 'blur'"),
        (b"#" * (1 << 21), "larger than"),
    ],
)
def test_bad_toml_is_one_line_with_the_file(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        load_preprocess(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_and_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read"):
        load_preprocess(tmp_path / "no.toml")
    with pytest.raises(DataError, match="imagenet"):
        load_preprocess("imagenett")
    with pytest.raises(DataError, match="does not exist"):
        load_preprocess(f"{tmp_path}/no.py:f")
    with pytest.raises(DataError, match="is a function"):
        load_preprocess({"name": "x", "function": {"function": "a.py:f"}})


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REGISTERED", {})


@pytest.mark.usefixtures("clean_registry")
def test_registered_functions() -> None:
    @register("halves", title="x / 2", source={"layout": "T"})
    def halves(raw: np.ndarray) -> np.ndarray:
        return raw / 2

    loaded = load_preprocess("halves")
    assert np.array_equal(np.asarray(loaded(np.arange(4)).array), np.arange(4) / 2)
    assert names()["halves"] == "x / 2"
    assert loaded.source.layout == "T"
    assert plain(loaded)["function"]["function"].endswith("halves")
    assert not loaded.one_row


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize("name", ["caffe", "raw", "a b", ""])
def test_shipped_names_stay(name: str) -> None:
    with pytest.raises(DataError, match="cannot be registered"):
        register(name)


@pytest.mark.usefixtures("clean_registry")
def test_functions_from_files(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(
        "from edgeq.data.preprocess import register\n"
        "@register('mine', reads='text', source={'label': '1'})\n"
        "def rows(row):\n    return {'a': [len(row)]}\n"
        "def plain(x):\n    return x + 1\n"
        "def fails(x):\n    raise RuntimeError('first\\nsecond')\n"
        "number = 3\n"
    )
    mine = load_preprocess(f"{file}:rows")
    assert (mine.reads, mine.source.label) == ("text", "1")
    assert set(plain(mine)["function"]) == {"function", "sha256"}
    assert str(tmp_path) not in str(plain(mine))
    assert np.asarray(load_preprocess(f"{file}:plain")(np.arange(2)).array).tolist() == [1, 2]
    with pytest.raises(DataError, match="RuntimeError: first second"):
        load_preprocess(f"{file}:fails")(np.arange(2))
    for name in ("absent", "number"):
        with pytest.raises(DataError, match="has no function"):
            load_preprocess(f"{file}:{name}")
    file.write_text("import nothing_of_that_name\n")
    with pytest.raises(DataError, match="cannot be imported"):
        load_preprocess(f"{file}:rows")


def test_text_and_paths_need_a_function() -> None:
    with pytest.raises(DataError, match="images and arrays"):
        load_preprocess("none")("a line")


STEPS = (
    "layout=NCHW", "layout=NHWC", "layout=HWC", "layout=CHW", "layout=model", "resize=5", "resize=short:4", "crop=3",
    "resize=model", "letterbox=6:1", "letterbox=model", "channels=BGR", "channels=L", "divide=255", "mean=[1,2,3]",
    "expand=0", "reshape=-1", "window=2", "center", "dtype=float64", "dtype=uint8",
)  # fmt: skip


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from(STEPS), min_size=1, max_size=5),
    npst.arrays(st.sampled_from(["u1", "i8", "f4", "?", "U3", "c8"]), npst.array_shapes(max_dims=5, max_side=6)),
    st.sampled_from([None, ("N", 3, 4, 5), (1, 4, 5, 3), (4,)]),
)
def test_steps_in_any_order_on_anything_work_or_are_refused(
    steps: list[str], array: np.ndarray, shape: tuple[int | str, ...] | None
) -> None:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with contextlib.suppress(DataError):
            load_preprocess(",".join(steps))(array, spec("x", *shape) if shape is not None else None)


def test_items_of_one_array_must_come_out_alike() -> None:
    with pytest.raises(DataError, match="fewer axes"):
        load_preprocess("caffe")(np.zeros((4, 5), np.float32))
    with pytest.raises(DataError, match="no items"):
        load_preprocess("caffe")(np.zeros((0, 3, 4, 5), np.float32))
