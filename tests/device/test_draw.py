"""Test the lines and the drawings of answers: what they show, and that names of others stay text."""

from __future__ import annotations

import base64
import io
import json
import math
from xml.etree import ElementTree

import numpy as np
import pytest
from edgeq_device.answers.answer import Answer
from edgeq_device.answers.draw import colour_of, is_dark, sketch
from edgeq_device.answers.draw_pillow import draw_png
from edgeq_device.answers.draw_svg import draw_svg, encode_png
from edgeq_device.answers.lines import describe
from edgeq_device.errors import UsageError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image, ImageDraw

GREY = np.full((120, 200, 3), 128, np.uint8)
SVG = "{http://www.w3.org/2000/svg}"
MASK = np.zeros((120, 200), bool)
MASK[40:80, 60:120] = True


def answer_of(**fields: object) -> Answer:
    values: dict[str, object] = {
        "boxes": np.array([[60.0, 40, 120, 80]]),
        "scores": np.array([0.93]),
        "classes": np.array([1]),
        "labels": ("cat", "person"),
        "image_size": (200, 120),
        **fields,
    }
    return Answer("detect", **values)  # type: ignore[arg-type]


def png(answer: Answer) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(draw_png(sketch(answer), GREY))))


def svg(answer: Answer, content: bytes = b"\xff\xd8\xff") -> ElementTree.Element:
    return ElementTree.fromstring(draw_svg(sketch(answer), content, lambda: GREY))


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "person 0.93  60 40 120 80"),
        ({"masks": MASK[None]}, "person 0.93  60 40 120 80  2400 pixels"),
        ({"keypoints": np.zeros((1, 17, 3))}, "person 0.93  60 40 120 80  17 keypoints"),
        ({"angles": np.array([math.pi / 2])}, "person 0.93  60 40 120 80  90°"),
        ({"labels": ()}, "1 0.93  60 40 120 80"),
        ({"boxes": np.array([[-np.inf, 0, 1, 2]])}, "person 0.93  -inf 0 1 2"),
    ],
)
def test_a_line_for_each_object(fields: dict[str, object], line: str) -> None:
    assert describe(answer_of(**fields)) == [line]


@pytest.mark.parametrize(
    ("answer", "lines"),
    [
        (Answer("text", text="hello"), ["hello"]),
        (Answer("text", text=""), ["text ''"]),
        (Answer("classify", top={1: 0.87, 0: 0.1}, labels=("a", "tabby")), ["tabby 0.87", "a 0.10"]),
        (Answer("semantic", map=np.array([[0, 1], [1, 1]]), labels=("road", "sky")), ["sky 75.0%", "road 25.0%"]),
        (Answer("depth", map=np.array([[1.0, 3.0]])), ["depth 2x1: min 1, mean 2, max 3"]),
        (Answer("image", map=np.zeros((2, 3, 3), np.uint8)), ["image 3x2"]),
        (Answer("embedding", vector=np.array([3.0, 4, 0, 0, 0])), ["vector of 5 values, norm 5"]),
        (Answer("regression", vector=np.array([1.25, 2.0])), ["values 1.25 2"]),
        (Answer("detect"), ["no objects"]),
    ],
)
def test_a_summary_of_other_answers(answer: Answer, lines: list[str]) -> None:
    assert describe(answer) == lines


def test_a_box_is_drawn_at_its_border_and_nowhere_else() -> None:
    pixels = png(answer_of())
    assert pixels.shape == GREY.shape
    for x, y in ((60, 60), (120, 60), (90, 40), (90, 80)):
        assert tuple(pixels[y, x]) == colour_of(1)
    assert (pixels[45:75, 66:114] == 128).all()
    assert (pixels[90:] == 128).all()


def test_a_mask_is_translucent_and_keeps_its_form() -> None:
    pixels = png(answer_of(masks=MASK[None]))
    assert tuple(pixels[60, 90]) not in (colour_of(1), (128, 128, 128))
    assert (pixels[60, 10] == 128).all()


def test_keypoints_have_a_skeleton_and_hidden_ones_are_left_out() -> None:
    keypoints = np.zeros((1, 17, 3))
    keypoints[0, 5], keypoints[0, 6], keypoints[0, 7] = (70, 60, 0.9), (110, 60, 0.9), (90, 110, 0.1)
    pixels = png(answer_of(keypoints=keypoints))
    assert tuple(pixels[60, 90]) == colour_of(1)
    assert (pixels[105:115, 85:95] == 128).all()
    root = svg(answer_of(keypoints=keypoints))
    assert len(list(root.iter(f"{SVG}circle"))) == 2
    assert [line.get("points") for line in root.iter(f"{SVG}polyline")] == ["70.0,60.0 110.0,60.0"] * 2


def test_a_rotated_box_and_a_polygon_are_outlines() -> None:
    turned = svg(answer_of(angles=np.array([math.pi / 2])))
    corners = next(turned.iter(f"{SVG}polygon")).get("points", "").split()
    assert sorted(corners) == sorted(["110.0,30.0", "110.0,90.0", "70.0,90.0", "70.0,30.0"])
    region = svg(answer_of(polygons=np.array([[[1.0, 2], [9, 3], [8, 7]]])))
    assert next(region.iter(f"{SVG}polygon")).get("points") == "1.0,2.0 9.0,3.0 8.0,7.0"


def test_an_svg_contains_the_file_and_the_box() -> None:
    content = b"\xff\xd8\xff\xe0 an image"
    root = svg(answer_of(), content)
    image = next(root.iter(f"{SVG}image"))
    assert base64.b64decode((image.get("href") or "").removeprefix("data:image/jpeg;base64,")) == content
    assert image.get("style") == "image-orientation:none"
    box = next(root.iter(f"{SVG}rect"))
    assert [box.get(key) for key in ("x", "y", "width", "height")] == ["60.0", "40.0", "60.0", "40.0"]
    assert texts(root) == ["person 0.93"]


def test_a_format_that_browsers_do_not_show_becomes_png() -> None:
    href = next(svg(answer_of(), b"II*\0").iter(f"{SVG}image")).get("href") or ""
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(href.removeprefix("data:image/png;base64,")))))
    np.testing.assert_array_equal(pixels, GREY)


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '"/><x', "a&b", "\0\x1b[31m", "\ud800", "猫"])
def test_names_of_others_stay_text(name: str) -> None:
    answer = answer_of(labels=("", name))
    clean = "".join(letter if letter.isprintable() else "\ufffd" for letter in name)
    assert texts(svg(answer)) == [f"{clean} 0.93"]
    png(answer)
    classes = Answer("classify", top={0: 0.9}, labels=(name,), image_size=(200, 120))
    assert texts(svg(classes)) == [f"{clean} 0.90"]
    png(classes)


def test_captions_are_below_the_image() -> None:
    answer = Answer("text", text="hello", image_size=(200, 120))
    pixels = png(answer)
    assert pixels.shape[0] > 120
    assert (pixels[:120] == 128).all()
    assert (pixels[120:] > 200).any()


def test_a_map_covers_the_image_and_has_a_legend() -> None:
    values = np.zeros((12, 20), np.int64)
    values[:, 10:] = 1
    answer = Answer("semantic", map=values, labels=("road", "sky"), image_size=(200, 120))
    pixels = png(answer)
    assert tuple(pixels[60, 20]) != tuple(pixels[60, 150])
    root = svg(answer)
    assert texts(root) == ["road 50.0%", "sky 50.0%"]
    fills = {rect.get("fill") for rect in root.iter(f"{SVG}rect")}
    assert {"#{:02x}{:02x}{:02x}".format(*colour_of(number)) for number in (0, 1)} <= fills


def test_a_map_of_values_goes_from_dark_to_light_and_skips_nan() -> None:
    values = np.tile(np.linspace(0, 9, 200), (120, 1))
    values[0] = np.nan
    pixels = png(Answer("depth", map=values, image_size=(200, 120))).astype(int)
    assert pixels[60, 199].sum() > pixels[60, 0].sum()
    assert (pixels[0] == 128).all()


def test_an_image_takes_the_place_of_the_input() -> None:
    larger = np.full((240, 400, 3), 77, np.uint8)
    answer = Answer("image", map=larger, image_size=(200, 120))
    assert (png(answer) == 77).all()
    root = svg(answer)
    assert (root.get("width"), root.get("height")) == ("400", "240")


def test_boxes_far_outside_the_image_are_drawn_in_time() -> None:
    boxes = np.array([[-1e12, 10, 1e12, 20], [np.nan, 0, 1, 1], [60, 40, 120, 80]])
    answer = answer_of(boxes=boxes, scores=np.array([0.9, 0.8, 0.7]), classes=np.array([0, 0, 1]))
    assert tuple(png(answer)[60, 60]) == colour_of(1)
    assert len(texts(svg(answer))) == 2


def test_an_input_that_is_no_image_cannot_be_drawn() -> None:
    with pytest.raises(UsageError, match="not an image"):
        sketch(answer_of(image_size=None))


@given(arrays(bool, (9, 11)))
def test_the_outlines_of_a_mask_enclose_it(mask: np.ndarray) -> None:
    """A viewer that paints outlines by the rule of odd crossings paints the mask, without its smallest regions."""
    answer = answer_of(masks=np.pad(mask, ((20, 91), (30, 159)))[None])
    paths = [path.get("d") or "" for path in svg(answer).iter(f"{SVG}path")]
    assert bool(paths) == bool(mask.any())
    for outline in filter(None, "".join(paths).split("M")):
        for x, y in (map(float, point.split(",")) for point in outline.rstrip("Z").split()):
            assert 29.5 <= x <= 41.5
            assert 19.5 <= y <= 29.5


def test_holes_of_a_mask_stay_open() -> None:
    ring = MASK.copy()
    ring[50:70, 75:105] = False
    path = next(svg(answer_of(masks=ring[None])).iter(f"{SVG}path"))
    canvas = Image.new("L", (200, 120))
    for outline in filter(None, (path.get("d") or "").split("M")):
        points = [tuple(map(float, point.split(","))) for point in outline.rstrip("Z").split()]
        layer = Image.new("L", canvas.size)
        ImageDraw.Draw(layer).polygon(points, fill=255)
        canvas = Image.fromarray(np.asarray(canvas) ^ np.asarray(layer))
    painted = np.asarray(canvas) > 0
    assert (painted & ring).sum() / (painted | ring).sum() > 0.9


@given(arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([3, 4]))))
def test_png_without_pillow(pixels: np.ndarray) -> None:
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(encode_png(pixels)))), pixels)


def test_letters_stand_out_from_their_background() -> None:
    assert is_dark((0, 0, 120))
    assert not is_dark((255, 255, 0))
    assert len({colour_of(number) for number in range(80)}) == 80


def test_json_of_an_answer_is_plain() -> None:
    record = json.loads(json.dumps(answer_of(masks=MASK[None]).to_json()))
    assert record["objects"][0]["box"] == {"x1": 60.0, "y1": 40.0, "x2": 120.0, "y2": 80.0}
