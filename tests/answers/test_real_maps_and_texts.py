"""Decode real models by their heads, and compare the answers with the figures of their meta.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from edgeq_device.answers.answer import Answer
from edgeq_device.answers.decode import decode
from edgeq_device.answers.recording import run_recording
from edgeq_device.engines.runtime import infer
from edgeq_device.prepare.frame import Frame
from edgeq_device.prepare.steps import Prepare
from edgeq_device.prepare.wave import read_wave
from PIL import Image, ImageDraw, ImageFont

from edgeq.data.preprocess import load_preprocess
from edgeq.util.records import plain
from tests.answers.heads import of

pytestmark = pytest.mark.usefixtures("shared_data")
FONT = Path("/usr/share/fonts/truetype/liberation/LiberationSans-BoldItalic.ttf")
LINES = (
    "serial No. A7-0042",
    "Hello World",
    "edge devices",
    "Quantize 8 bits",
    "invoice 2026",
    "Total: 129.50",
    "letter boook",
    "Road to Rome",
    "ABC 123 xyz",
    "PP-OCR text",
)


class RealModel:
    """Prepare images for a model of the shared data, run it, and decode its outputs."""

    def __init__(self, folder: Path, family: str, preprocess: str, labels: Sequence[str] = ()) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(str(folder / "model.onnx"), options)
        self.family, self.labels = family, labels
        self.input = self.session.get_inputs()[0]
        sizes = [size if isinstance(size, int) and size > 0 else None for size in self.input.shape]
        self.prepare = Prepare(plain(load_preprocess(preprocess)), sizes).prepare

    def run(self, item: Any) -> tuple[Mapping[str, Any], Frame]:
        array, frame = self.prepare(item)
        assert frame is not None
        return infer(self.session, {self.input.name: array}), frame

    def answer(self, item: Any) -> Answer:
        outputs, frame = self.run(item)
        return decode(outputs, of(self.family, outputs, frame.size, self.labels), frame)


def read_meta(folder: Path) -> Any:
    return json.loads((folder / "meta.json").read_text("utf-8"))


def test_ppocr_reads_rendered_lines(shared_data: Path) -> None:
    if not FONT.exists():
        pytest.skip("Liberation Sans is not installed")
    folder = shared_data / "ppocrv4_rec"
    characters = ort.InferenceSession(str(folder / "model.onnx")).get_modelmeta().custom_metadata_map["character"]
    model = RealModel(folder, "ctc", "ppocr-rec", characters.removesuffix("\n").split("\n"))
    font = ImageFont.truetype(str(FONT), 34)
    for line in LINES:
        _, _, right, bottom = font.getbbox(line)
        image = Image.new("RGB", (int(right) + 20, int(bottom) + 16), "white")
        ImageDraw.Draw(image).text((10, 8), line, "black", font)
        answer = model.answer(image)
        assert answer.text is not None
        assert answer.text.replace(" ", "") == line.replace(" ", "")
        assert answer.confidence is not None
        assert answer.confidence > 0.9


def test_lprnet_reads_plates(shared_data: Path) -> None:
    folder = shared_data / "lprnet"
    model = RealModel(folder, "ctc", "lprnet", read_meta(folder)["characters"])
    plates = sorted((folder / "data" / "test").glob("*.jpg"))
    outputs, frame = model.run(plates[0])
    head = of("ctc", outputs, frame.size, model.labels, named=False)
    assert head.parameters == {"layout": "CT", "blank": "last"}
    right = [decode(model.run(plate)[0], head).text == plate.stem.split("_")[0] for plate in plates]
    assert (len(right), np.mean(right)) == (1000, pytest.approx(0.894))


def test_ppocr_marks_the_lines_of_a_page(shared_data: Path) -> None:
    page = shared_data / "ppocrv3_det" / "data" / "page.png"
    model = RealModel(page.parent.parent, "db-text", "ppocr-det")
    answer = model.answer(page)
    assert answer.polygons is not None
    assert len(answer) == 7
    # The same page at another size, which needs rounded sides, has its lines at the same places.
    with Image.open(page) as image:
        large = model.answer(image.resize((1300, 975)))
    order, large_order = answer.boxes[:, 1].argsort(), large.boxes[:, 1].argsort()
    assert len(large) == 7
    np.testing.assert_allclose(large.boxes[large_order] * 640 / 1300, answer.boxes[order], atol=4)


def test_twinlitenet_separates_roads_and_lanes(shared_data: Path) -> None:
    folder = shared_data / "twinlitenet"
    model = RealModel(folder, "semantic", "unit")
    shares = []
    for path in sorted((folder / "data").glob("*.jpg")):
        answer = model.answer(path)
        assert answer.map is not None
        assert answer.image_size is not None
        assert answer.map.shape == answer.maps["ll"].shape == answer.image_size[::-1]
        assert (answer.map[: len(answer.map) // 3] == 1).mean() < 5e-4
        shares.append((answer.map == 1).mean())
    # meta.json counts pixels of the model's output, and the answer those of the image.
    np.testing.assert_allclose(shares, read_meta(folder)["float32"]["drivable share per image"], atol=2e-3)


def test_espcn_enlarges_images(shared_data: Path) -> None:
    model = RealModel(shared_data / "espcn_x3", "image", "luma")
    ratios = []
    for path in sorted((shared_data / "coco256" / "val").rglob("*.jpg"))[:40]:
        with Image.open(path) as image:
            width, height = (side // 3 * 3 for side in image.size)
            original = image.convert("RGB").crop((0, 0, width, height))
        answer = model.answer(original.resize((width // 3, height // 3), Image.Resampling.BICUBIC))
        assert answer.map is not None
        difference = np.asarray(original.convert("L"), np.float64) - answer.map[..., 0]
        ratios.append(10 * np.log10(255**2 / (difference[6:-6, 6:-6] ** 2).mean()))
    assert np.mean(ratios) == pytest.approx(26.07, abs=0.01)


def test_silero_hears_speech_in_a_recording(shared_data: Path) -> None:
    model = RealModel(shared_data / "silero_vad_16k", "voice", "none")
    with np.load(shared_data / "nsnet2_gru" / "data" / "car.npz") as arrays:
        samples = read_wave(arrays["pcm"], 16000)
    inputs = {
        "input": samples[None, :576],
        "state": np.zeros((2, 1, 128), np.float32),
        "sr": np.array(16000, np.int64),
    }
    head = of("voice", infer(model.session, inputs), inputs=inputs, named=False)
    answer = decode(run_recording(model.session, partial(infer, model.session), head, samples), head)
    assert answer.vector is not None
    assert answer.segments is not None
    assert (answer.vector[:1160] > 0.5).mean() == pytest.approx(0.879, abs=5e-4)
    assert len(answer.segments) == 10
    assert (np.diff(answer.segments, axis=1) >= 0.25).all()
