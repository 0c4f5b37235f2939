"""Open data as samples, from end to end, and test that every mistake is an error of one line."""

from __future__ import annotations

import dataclasses
import json
import pickle
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from PIL import Image

from data.helpers import IMAGE_MODEL, encoded, floats, pixels, save_image, signature, spec
from edgeq.data import held_samples
from edgeq.data.preprocess import register as register_preprocess
from edgeq.data.samples import Samples, SourceSamples, open_samples
from edgeq.errors import DataError, UsageError

SCALE = "divide=255,layout=NCHW"
AUDIO = signature(spec("x", "N", "T"))
TEXT = signature(spec("ids", "N", "S", dtype=np.int64), spec("mask", "N", "S", dtype=np.int64))


class Notes:
    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Any]:
        yield lambda steps: None

    def note(self, text: str) -> None:
        self.lines.append(text)


def fed(samples: Samples) -> list[np.ndarray]:
    return [sample.inputs["x"] for sample in samples]


def test_images_in_class_folders(tmp_path: Path) -> None:
    first = save_image(tmp_path / "cat" / "1.png", seed=1)
    save_image(tmp_path / "dog" / "2.png", seed=2)
    (tmp_path / "readme.md").write_text("x")
    notes = Notes()
    samples = open_samples(tmp_path, IMAGE_MODEL, preprocess=SCALE, progress=notes)
    got = list(samples)
    assert [s.label for s in got] == [0, 1]
    assert got[0].context == {
        "file": "1.png",
        "path": "cat/1.png",
        "class": "cat",
        "original_size": (8, 8),
        "input_size": (8, 8),
        "scale": (1.0, 1.0),
        "offset": (0.0, 0.0),
    }
    assert got[0].inputs["x"].dtype == np.float32
    assert np.array_equal(got[0].inputs["x"][0], (first / np.float32(255)).transpose(2, 0, 1))
    assert any("1 files of other kinds ignored" in line for line in notes.lines)
    assert isinstance(samples, Samples)
    assert fed(samples)[1].shape == (1, 3, 8, 8)


def test_images_need_a_preprocessing(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"holds images.*imagenet.*resize=short:256"):
        open_samples(tmp_path, IMAGE_MODEL)


def test_a_sidecar_in_the_folder_is_found_and_reported(tmp_path: Path) -> None:
    save_image(tmp_path / "7_a.png")
    (tmp_path / "preprocess.toml").write_text('steps = "divide=255,layout=NCHW"\n[source]\nlabels = "name:{label}_*"\n')
    notes = Notes()
    samples = open_samples(tmp_path, IMAGE_MODEL, progress=notes)
    assert next(iter(samples)).label == 7
    assert any(str(tmp_path / "preprocess.toml") in line for line in notes.lines)
    assert next(iter(open_samples(tmp_path / "7_a.png", IMAGE_MODEL))).label == 7


def test_a_sidecar_beside_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model" / "m.onnx"
    model.parent.mkdir()
    (model.parent / "preprocess.toml").write_text(
        'steps = "divide=255,layout=NCHW"\n[source]\nkey = "X"\nlayout = "HWC"'
    )
    save_image(tmp_path / "images" / "a.png")
    assert np.max(fed(open_samples(tmp_path / "images", IMAGE_MODEL, model=model))[0]) <= 1
    np.savez(tmp_path / "raw.npz", X=pixels(8, 8)[None])
    assert np.max(fed(open_samples(tmp_path / "raw.npz", IMAGE_MODEL, model=model))[0]) <= 1
    # Arrays with the names of the inputs are already prepared.
    np.savez(tmp_path / "ready.npz", x=np.full((1, 3, 8, 8), 7, np.float32))
    assert np.max(fed(open_samples(tmp_path / "ready.npz", IMAGE_MODEL, model=model))[0]) == 7


def test_a_sidecar_never_runs_code(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png")
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')\ndef f(x): return x")
    (tmp_path / "preprocess.toml").write_text('function = "evil.py:f"')
    with pytest.raises(DataError, match="unknown field 'function'"):
        open_samples(tmp_path, IMAGE_MODEL)


def test_cases_with_an_older_preprocessing(tmp_path: Path) -> None:
    raw = pixels(8, 8).transpose(2, 0, 1)[None].astype(np.float32)
    for number in range(3):
        folder = tmp_path / f"test_data_set_{number}"
        folder.mkdir()
        (folder / "input_0.pb").write_bytes(numpy_helper.from_array(raw + number).SerializeToString())
    ready = fed(open_samples(tmp_path, IMAGE_MODEL))
    caffe2 = fed(open_samples(tmp_path, IMAGE_MODEL, preprocess="caffe2", start=1, count=1))
    assert np.array_equal(ready[1], raw + 1)
    assert len(caffe2) == 1
    assert np.array_equal(caffe2[0][0, 0], raw[0, 2] + 1 - np.float32(103.939))


def test_several_inputs_and_ragged_shapes(tmp_path: Path) -> None:
    for number, length in enumerate((5, 9)):
        ids = np.arange(length)[None]
        np.savez(tmp_path / f"{number}.npz", ids=ids, mask=np.ones_like(ids))
    got = [sample.inputs for sample in open_samples(tmp_path, TEXT)]
    assert [item["mask"].shape for item in got] == [(1, 5), (1, 9)]
    assert list(got[0]) == ["ids", "mask"]


@pytest.mark.parametrize(("start", "stride", "count"), [(0, 1, None), (1, 2, None), (2, 3, 2), (9, 1, 5), (0, 1, 99)])
def test_selection(tmp_path: Path, start: int, stride: int, count: int | None) -> None:
    stack = floats(10, 3, 8, 8)
    np.save(tmp_path / "x.npy", stack)
    samples = open_samples(tmp_path / "x.npy", IMAGE_MODEL, start=start, stride=stride, count=count)
    expected = stack[start::stride][:count]
    assert len(samples) == len(expected)
    assert np.array_equal(np.concatenate(fed(samples)), expected)
    again = open_samples(open_samples(list(stack), IMAGE_MODEL), IMAGE_MODEL, start=start, stride=stride, count=count)
    assert len(again) == len(expected)
    assert np.array_equal(np.concatenate(fed(again)), expected)


@pytest.mark.parametrize("bad", [{"start": -1}, {"stride": 0}, {"count": 0}])
def test_selections_that_make_no_sense(bad: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        open_samples([floats(3, 8, 8)], IMAGE_MODEL, **bad)  # type: ignore[arg-type]


def test_a_selection_past_the_end() -> None:
    with pytest.raises(DataError, match="holds 1 samples, none from 5"):
        open_samples([floats(3, 8, 8)], IMAGE_MODEL, start=5)
    with pytest.raises(DataError, match="holds no samples"):
        open_samples([], IMAGE_MODEL)


def test_fixed_batches_are_filled_and_reported(tmp_path: Path) -> None:
    for number in range(5):
        save_image(tmp_path / f"{number}_.png", seed=number)
    notes = Notes()
    model = signature(spec("x", 2, 3, 8, 8))
    samples = open_samples(tmp_path, model, preprocess=SCALE, labels="name:{label}_", progress=notes)
    got = list(samples)
    assert len(samples) == len(got) == 3
    assert [s.label for s in got] == [(0, 1), (2, 3), (4,)]
    assert got[2].context["valid"] == 1
    assert [c["file"] for c in got[1].context["rows"]] == ["2_.png", "3_.png"]
    assert np.array_equal(got[2].inputs["x"][0], got[2].inputs["x"][1])
    assert any("batches of 2" in line and "repeating its last" in line for line in notes.lines)


def test_windows_are_cut_for_a_batch_of_one() -> None:
    clips = [(floats(7, 4, seed=i), i) for i in range(2)]
    free = open_samples(clips, signature(spec("x", "N", 12)), preprocess="window=3,source.layout=TF")
    assert [s.inputs["x"].shape for s in free] == [(5, 12), (5, 12)]
    one = open_samples(clips, signature(spec("x", 1, 12)), preprocess="window=3,source.layout=TF")
    assert len(one) == 10
    assert [s.label for s in one] == [0] * 5 + [1] * 5
    assert np.array_equal(np.concatenate(fed(one)), np.concatenate(fed(free)))


def test_digests(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        for number in range(3):
            save_image(tmp_path / folder / f"{number}.png", seed=number)

    def digest(folder: str = "a", preprocess: Any = SCALE, **options: Any) -> str:
        return open_samples(tmp_path / folder, IMAGE_MODEL, preprocess=preprocess, **options).digest()

    (tmp_path / "same.toml").write_text(f'title = "other words"\nsteps = "{SCALE}"')
    first = digest()
    assert len(first) == 64
    assert first == digest("b") == digest(preprocess=tmp_path / "same.toml")
    others = [digest(preprocess="tf"), digest(count=2), digest(stride=2)]
    save_image(tmp_path / "b" / "1.png", seed=9)
    assert len({first, *others, digest("b")}) == 5
    stack = [floats(3, 8, 8, seed=i) for i in range(2)]
    assert open_samples(stack, IMAGE_MODEL).digest() == open_samples(iter(stack), IMAGE_MODEL).digest()
    assert open_samples(stack, IMAGE_MODEL).digest() != open_samples(stack[::-1], IMAGE_MODEL).digest()


def test_memory_stays_flat_over_a_large_file(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=np.zeros((400, 3, 64, 64), np.float32))
    samples = open_samples(tmp_path / "x.npz", signature(spec("x", "N", 3, 64, 64)))
    tracemalloc.start()
    for _ in samples:
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20  # the file has 20 MB


@pytest.mark.parametrize("memory", [0, 2**20])
@pytest.mark.parametrize(("hold", "times"), [(0, 2), (3 * 8 * 8 * 4, 2), (2 * 3 * 8 * 8 * 4, 1)])
def test_few_samples_are_decoded_once_where_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: int, times: int, memory: int
) -> None:
    monkeypatch.setattr(held_samples, "_MEMORY", memory)
    monkeypatch.setattr(held_samples, "_LIMIT", hold)
    for name in "ab":
        save_image(tmp_path / f"{name}.png", seed=ord(name))
    opened = open_samples(tmp_path, IMAGE_MODEL, preprocess=SCALE)
    assert isinstance(opened, SourceSamples)
    samples = dataclasses.replace(opened, hold=tmp_path / "held")
    read: list[str] = []
    prepare = SourceSamples._prepare

    def counted(self: SourceSamples, record: Any, context: dict[str, Any]) -> Any:
        read.append(Path(record.name).name)
        return prepare(self, record, context)

    monkeypatch.setattr(SourceSamples, "_prepare", counted)
    assert Path(next(iter(samples)).name).name == "a.png"
    first, second = fed(samples), fed(samples)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert [name for name in read if name == "b.png"] == ["b.png"] * times
    assert len(pickle.dumps(samples)) == len(pickle.dumps(opened)), "what is held is not sent to workers"


def test_user_functions(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(
        "import numpy as np\nfrom edgeq.data.preprocess import register\n"
        "@register('test-bytes', reads='path', source={'pattern': '*.bin'})\n"
        "def load(path):\n    return np.frombuffer(path.read_bytes(), np.uint8).astype(np.float32)\n"
        "@register('test-words', reads='text', source={'label': '1'})\n"
        "def words(row):\n    n = np.arange(len(row[0].split()))\n    return {'ids': n, 'mask': np.ones_like(n)}\n"
    )
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a.bin").write_bytes(b"abc")
    (tmp_path / "clips" / "b.txt").write_bytes(b"abc")
    (tmp_path / "clips" / "c.bin").write_bytes(b"de")
    assert [x.shape for x in fed(open_samples(tmp_path / "clips", AUDIO, preprocess=f"{file}:load"))] == [
        (1, 3),
        (1, 2),
    ]
    (tmp_path / "t.csv").write_text("two words,1\nthree words here,0\n")
    got = list(open_samples(tmp_path / "t.csv", TEXT, preprocess=f"{file}:words"))
    assert [(s.inputs["ids"].shape, s.label) for s in got] == [((1, 2), 1), ((1, 3), 0)]
    with pytest.raises(DataError, match="needs a preprocessing function"):
        open_samples(tmp_path / "t.csv", TEXT)


def test_one_array_for_several_inputs_says_which(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png")
    model = signature(spec("image", "N", 3, 8, 8), spec("size", "N", 2))
    with pytest.raises(DataError, match="Say which"):
        list(open_samples(tmp_path, model, preprocess=SCALE))
    with pytest.raises(DataError, match="nothing for the model input 'size'"):
        list(open_samples(tmp_path, model, preprocess=SCALE + ",input=image"))


def test_one_of_several_inputs_is_preprocessed() -> None:
    model = signature(spec("image", "N", 3, 8, 8), spec("size", "N", 2))
    item = {"image": pixels(8, 8), "size": np.array([8, 8], np.float32)}
    sample = next(iter(open_samples([item], model, preprocess=SCALE + ",input=image")))
    assert sample.inputs["image"].shape == (1, 3, 8, 8)
    assert sample.inputs["size"].tolist() == [[8, 8]]


def test_labels_are_taken_from_where_they_are(tmp_path: Path) -> None:
    for number in range(2):
        save_image(tmp_path / "data" / f"{number}.png")
    (tmp_path / "l.json").write_text(json.dumps({"0.png": 4, "1": 5}))
    for labels in (tmp_path / "l.json", [4, 5], np.array([4, 5]), {"0": 4, "1": 5}):
        samples = open_samples(tmp_path / "data", IMAGE_MODEL, preprocess=SCALE, labels=labels)
        assert [s.label for s in samples] == [4, 5]
    later = open_samples(tmp_path / "data", IMAGE_MODEL, preprocess=SCALE, labels=[4, 5], start=1)
    assert [s.label for s in later] == [5]
    with pytest.raises(DataError, match="shape"):
        open_samples(tmp_path / "data", IMAGE_MODEL, preprocess=SCALE, labels=np.zeros((2, 2)))


def nan(path: Path) -> None:
    np.save(path / "bad.npy", np.full((2, 3, 8, 8), np.nan, np.float32))


def wrong_shape(path: Path) -> None:
    np.save(path / "bad.npy", np.zeros((2, 8, 8, 3), np.float32))


def wrong_name(path: Path) -> None:
    np.savez(path / "bad.npz", y=np.zeros((2, 3, 8, 8), np.float32))


def wrong_dtype(path: Path) -> None:
    np.save(path / "bad.npy", np.zeros((2, 3, 8, 8), np.uint8))


def pickled(path: Path) -> None:
    np.save(path / "bad.npy", np.array([{}], object), allow_pickle=True)


def truncated_array(path: Path) -> None:
    np.save(path / "bad.npy", np.zeros((2, 3, 8, 8), np.float32))
    (path / "bad.npy").write_bytes((path / "bad.npy").read_bytes()[:-7])


def truncated_image(path: Path) -> None:
    (path / "bad.png").write_bytes(encoded(pixels(64, 64))[:-2000])


def not_an_image(path: Path) -> None:
    (path / "bad.png").write_text("nothing")


def bad_case(path: Path) -> None:
    (path / "input_0.pb").write_bytes(onnx.TensorProto(data_type=1, dims=[1 << 40]).SerializeToString())


def bad_two_pbs(path: Path) -> None:
    for name in ("bad.pb", "c.pb"):
        (path / name).write_bytes(b"")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "holds no samples"),
        (nan, "bad.npy.*holds NaN"),
        (wrong_shape, "bad.npy: input 'x' has shape"),
        (wrong_name, "bad.npz has no array for the model input 'x'"),
        (wrong_dtype, "bad.npy.*uint8, the model takes float32"),
        (pickled, "bad.npy holds pickled"),
        (truncated_array, "bad.npy claims"),
        (truncated_image, "bad.png cannot be decoded"),
        (not_an_image, "bad.png is not an image"),
        (bad_case, "input_0.pb claims"),
        (bad_two_pbs, "2 .pb files"),
    ],
)
def test_every_mistake_is_one_line_with_the_file_and_the_fix(tmp_path: Path, make: Any, says: str) -> None:
    make(tmp_path)
    images = any(p.suffix == ".png" for p in tmp_path.iterdir())
    with pytest.raises(DataError, match=says) as caught:
        list(open_samples(tmp_path, IMAGE_MODEL, preprocess=SCALE if images else None))
    assert caught.value.fix
    assert "\n" not in str(caught.value)


def test_wrong_sizes_after_the_preprocessing_name_the_image(tmp_path: Path) -> None:
    Image.fromarray(pixels(9, 9)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a.png: input 'x' has shape \[1, 3, 9, 9\]"):
        list(open_samples(tmp_path, IMAGE_MODEL, preprocess=SCALE))
    with pytest.raises(DataError, match=r"a.png: an image of 9x9 is smaller"):
        list(open_samples(tmp_path, IMAGE_MODEL, preprocess="crop=10"))


def test_a_pattern_of_classes_has_their_numbers(tmp_path: Path) -> None:
    for number in (0, 1, 2, 4):
        save_image(tmp_path / f"c{number}" / "1.png")
        save_image(tmp_path / f"c{number}" / "7.png")
    (tmp_path / "c3").mkdir()
    for source in (tmp_path, f"{tmp_path}/*/[1-3].png", f"{tmp_path}/c[24]/*.png"):
        notes = Notes()
        samples = open_samples(source, IMAGE_MODEL, preprocess=SCALE, progress=notes)
        assert all(f"c{sample.label}" == sample.context["class"] for sample in samples)
        assert any("class folders (" in line and "c3" in line for line in notes.lines)


def test_a_broken_link_is_one_line(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png")
    (tmp_path / "b.png").symlink_to(tmp_path / "gone.png")
    samples = open_samples(tmp_path, IMAGE_MODEL, preprocess=SCALE)
    for use in (list, lambda opened: opened.digest()):
        with pytest.raises(DataError, match=r"b.png.*No such file") as caught:
            use(samples)
        assert "\n" not in str(caught.value)


def test_a_sidecar_chooses_files(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png")
    save_image(tmp_path / "b.bmp")
    np.save(tmp_path / "labels.npy", np.zeros(2))
    (tmp_path / "preprocess.toml").write_text('steps = "divide=255,layout=NCHW"\n[source]\npattern = "*.png"\n')
    assert [sample.context["file"] for sample in open_samples(tmp_path, IMAGE_MODEL)] == ["a.png"]


def test_functions_may_change_what_they_get(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(
        "def darker(image):\n    image //= 2\n    return (image / 255).transpose(2, 0, 1).astype('float32')\n"
    )
    image = save_image(tmp_path / "images" / "a.png")
    for source in (tmp_path / "images", [image]):
        samples = open_samples(source, IMAGE_MODEL, preprocess=f"{tmp_path}/user.py:darker")
        for _ in range(2):
            assert np.allclose(fed(samples)[0][0], (image // 2 / 255).transpose(2, 0, 1))


def test_an_empty_path_is_no_folder() -> None:
    with pytest.raises(DataError, match="the path of the data is empty"):
        open_samples("", IMAGE_MODEL)


def test_a_model_in_place_of_a_signature_says_where_to_get_one() -> None:
    with pytest.raises(
        UsageError, match=r"the signature is given as str. Give the model's signature: inspect\(MODEL\)"
    ):
        open_samples([floats(3, 8, 8)], "model.onnx")  # type: ignore[arg-type]


def test_one_array_for_a_model_of_several_inputs_names_them() -> None:
    two = signature(spec("a", "N", 2), spec("b", "N", 2))
    with pytest.raises(DataError, match=r"item 0 is one array, the model takes 2. Give a dict of a, b, or a tuple"):
        list(open_samples([floats(2, 2)], two))


def test_a_preprocessing_is_registered_with_a_name() -> None:
    with pytest.raises(DataError, match="registered without a name"):
        register_preprocess(lambda x: x)  # type: ignore[arg-type]


def test_a_function_as_preprocessing_says_how_it_is_named() -> None:
    with pytest.raises(DataError, match=r"given as a function. Name it with edgeq.register_preprocess"):
        open_samples([floats(3, 8, 8)], IMAGE_MODEL, preprocess=lambda x: x)  # type: ignore[arg-type]
