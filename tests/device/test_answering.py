"""Test `infer` of a bundle with a head: its lines, JSON and drawings, for one image, many images, and bad ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeq_device.cli import main
from edgeq_device.errors import BundleError, UsageError
from edgeq_device.program import open_model
from PIL import Image

from tests.device.detector import bundle

LINE = "person 0.90  40 60 120 100"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle(tmp_path_factory.mktemp("detector"))


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.new("RGB", (160, 160), (90, 90, 90)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a folder with two images, a damaged one between them, a text and a folder."""
    folder = tmp_path / "photos"
    (folder / "more.png").mkdir(parents=True)
    for name in ("a.png", "c.jpg"):
        Image.new("RGB", (160, 160), (90, 90, 90)).save(folder / name)
    (folder / "b.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    (folder / "notes.txt").write_text("no image")
    return folder


def infer(capsys: pytest.CaptureFixture[str], dist: Path, *arguments: object) -> tuple[int, str, str]:
    code = main(["infer", "--bundle", str(dist), *map(str, arguments)])
    return (code, *capsys.readouterr())


def test_one_line_an_object(capsys: pytest.CaptureFixture[str], dist: Path, photo: Path) -> None:
    weak = "cat 0.30  20 20 60 60"
    assert infer(capsys, dist, photo) == (0, f"{LINE}\n{weak}\n", "")
    assert infer(capsys, dist, photo, "--threshold", 0.5)[1] == f"{LINE}\n"
    assert infer(capsys, dist, photo, "--threshold", 0.95)[1] == "no objects\n"
    assert [path.name for path in photo.parent.iterdir()] == ["photo.png"]


def test_json_has_the_names_that_others_use(capsys: pytest.CaptureFixture[str], dist: Path, photo: Path) -> None:
    record = json.loads(infer(capsys, dist, photo, "--json", "--threshold", 0.5)[1])
    assert set(record) == {"variant", "why", "passed_over", "inputs"}
    (entry,) = record["inputs"]
    assert entry["input"] == str(photo)
    assert entry["image"] == {"width": 160, "height": 160}
    (found,) = entry["objects"]
    assert (found["name"], found["class"]) == ("person", 1)
    assert found["box"] == {"x1": 40.0, "y1": 60.0, "x2": 120.0, "y2": 100.0}


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_drawing(capsys: pytest.CaptureFixture[str], dist: Path, photo: Path, suffix: str) -> None:
    drawing = photo.with_name(f"drawn.{suffix}")
    assert infer(capsys, dist, photo, "--draw", drawing)[0] == 0
    content = drawing.read_bytes()
    if suffix == "svg":
        assert b"person 0.90" in content
    else:
        with Image.open(drawing) as image:
            assert image.size == (160, 160)
    code, out, err = infer(capsys, dist, photo, "--draw", drawing)
    assert (code, out) == (6, "")
    assert "exists already" in err
    drawing.write_bytes(b"")
    assert infer(capsys, dist, photo, "--draw", drawing, "--force")[0] == 0
    assert drawing.read_bytes() == content


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--draw", "x.pdf"], 2, "Write .png or .svg"),
        (["--draw", "photo.png", "--force"], 6, "is an input"),
        (["--threshold", "2"], 2, "not a score"),
        (["--threshold", "nan"], 2, "not a score"),
        (["--threshold", "0.5", "--raw"], 2, "need answers"),
        (["other.png", "--draw", "x.png"], 2, "2 inputs"),
        (["x.npy"], 2, "mixed"),
    ],
)
def test_options_that_make_no_sense(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    dist: Path,
    photo: Path,
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(photo.parent)
    content = photo.read_bytes()
    status, out, err = infer(capsys, dist, "photo.png", *arguments)
    assert (status, out) == (code, "")
    assert says in err
    assert len(err.splitlines()) == 1
    assert photo.read_bytes() == content


def test_a_drawing_never_joins_the_bundle(capsys: pytest.CaptureFixture[str], dist: Path, photo: Path) -> None:
    code, _, err = infer(capsys, dist, photo, "--draw", dist / "labels.txt" / "x.png")
    assert code == 6
    assert len(err.splitlines()) == 1


def test_a_folder_is_answered_in_the_order_of_its_names(
    capsys: pytest.CaptureFixture[str], dist: Path, photos: Path, tmp_path: Path
) -> None:
    code, out, err = infer(capsys, dist, photos, "--threshold", 0.5, "--draw", tmp_path / "drawn")
    assert code == 4
    lines = out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        str(photos / name) for name in ("a.png", "b.png", "c.jpg")
    ]
    assert lines[1] == lines[-1] == f"  {LINE}"
    assert lines[3].startswith("  error: ")
    assert "1 of 3 inputs have no answer" in err
    assert str(photos / "b.png") in err
    assert len(err.splitlines()) == 1
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == ["a.png", "c.png"]
    record = json.loads(infer(capsys, dist, photos, "--json")[1])
    assert ["error" in entry for entry in record["inputs"]] == [False, True, False]


def test_drawings_of_one_stem_keep_the_suffix(
    capsys: pytest.CaptureFixture[str], dist: Path, photo: Path, tmp_path: Path
) -> None:
    Image.open(photo).save(photo.with_suffix(".jpg"))
    assert infer(capsys, dist, photo, photo.with_suffix(".jpg"), "--draw", tmp_path / "drawn")[0] == 0
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == ["photo.jpg.png", "photo.png.png"]


def test_a_folder_without_images(capsys: pytest.CaptureFixture[str], dist: Path, tmp_path: Path) -> None:
    code, out, err = infer(capsys, dist, tmp_path)
    assert (code, out) == (4, "")
    assert "contains no image" in err


def test_tensors_are_answered_in_pixels_of_the_input(
    capsys: pytest.CaptureFixture[str], dist: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1, 3, 8, 8), np.float32))
    assert infer(capsys, dist, tmp_path / "x.npy", "--threshold", 0.5)[1] == "person 0.90  2 3 6 5\n"


def test_raw_outputs_are_written(capsys: pytest.CaptureFixture[str], dist: Path, photo: Path, tmp_path: Path) -> None:
    code, out, _ = infer(capsys, dist, photo, "-o", tmp_path / "y.npz", "--json")
    assert code == 0
    assert json.loads(out)["output"] == str(tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as outputs:
        assert outputs["y"].shape == (1, 6, 10)


def test_a_bundle_without_a_head_writes_outputs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, photo: Path
) -> None:
    plain = bundle(tmp_path, head=None)
    assert infer(capsys, plain, photo)[0] == 0
    assert plain.with_name("dist.outputs.npz").is_file()
    code, _, err = infer(capsys, plain, photo, "--draw", tmp_path / "x.png")
    assert code == 7
    assert "nothing says what the model's outputs mean" in err


@pytest.mark.parametrize("batch", [1, 3])
def test_a_program_gets_an_answer(tmp_path: Path, photo: Path, batch: int) -> None:
    with open_model(bundle(tmp_path, batch=batch)) as model:
        for x in (photo, str(photo), Image.open(photo), np.asarray(Image.open(photo))):
            answer = model.answer(x, threshold=0.5)
            assert answer.names == ("person",)
            np.testing.assert_allclose(answer.boxes, [[40, 60, 120, 100]])
        assert len(model.answer(photo, thresholds={"limit": 1})) == 1
        with pytest.raises(UsageError):
            model.answer(photo, threshold=-1)


def test_a_program_is_told_if_the_bundle_has_no_head(tmp_path: Path, photo: Path) -> None:
    with open_model(bundle(tmp_path, head=None)) as model, pytest.raises(BundleError):
        model.answer(photo)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_engines_may_give_other_floats(dist: Path, photo: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    with open_model(dist) as model:
        expected = model.answer(photo)
        real = model.session

        class Other:
            """Give the outputs of the session in another type of floats."""

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def run(self, *arguments: Any) -> list[Any]:
                return [array.astype(dtype) for array in real.run(*arguments)]

        monkeypatch.setattr(model, "session", Other())
        np.testing.assert_allclose(model.answer(photo).boxes, expected.boxes, atol=0.5)


def test_the_archive_imports_only_the_family_of_its_head(dist: Path, photo: Path) -> None:
    program = (
        "import sys; from edgeq_run import open_bundle\n"
        f"with open_bundle() as model: print(*model.answer({str(photo)!r}).names)\n"
        "from edgeq_run import Answer; import edgeq_device; print(edgeq_device.__file__)\n"
        "print(*sorted(n.rpartition('.')[2] for n in sys.modules if '.families.' in n))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=dist, env={"PYTHONPATH": str(dist)}, capture_output=True, text=True
    )
    names, file, families = ended.stdout.splitlines()
    assert names == "person cat"
    assert Path(file).is_relative_to(dist)
    assert families == "yolov8"
