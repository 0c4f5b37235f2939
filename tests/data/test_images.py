"""Decoding: what is read, and what is refused before it costs memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.helpers import encoded, pixels, save_image
from edgeq.data.images import class_folders, decode, decode_bytes
from edgeq.errors import DataError


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".ppm", ".tif", ".webp"])
def test_lossless_formats(tmp_path: Path, suffix: str) -> None:
    array = pixels(5, 7)
    Image.fromarray(array).save(tmp_path / f"x{suffix}", **({"lossless": True} if suffix == ".webp" else {}))
    assert np.array_equal(decode(tmp_path / f"x{suffix}", "x").pixels, array)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    suffix = "tif" if mode == "CMYK" else "png"
    image = Image.fromarray(pixels(5, 7)).convert(mode)
    image.save(tmp_path / f"x.{suffix}")
    assert np.array_equal(decode(tmp_path / f"x.{suffix}", "x").pixels, np.asarray(image.convert("RGB")))


def test_rotation_marks_are_not_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels(5, 7)).save(tmp_path / "x.png", exif=exif)
    assert decode(tmp_path / "x.png", "x").pixels.shape == (5, 7, 3)


def test_sixteen_bits_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(tmp_path / "x.png")
    with pytest.raises(DataError, match="not 8 bits"):
        decode(tmp_path / "x.png", "x.png")


def test_too_many_pixels_are_refused_before_decoding(tmp_path: Path) -> None:
    Image.new("1", (20000, 20000)).save(tmp_path / "bomb.png")
    with pytest.raises(DataError, match="bomb"):
        decode(tmp_path / "bomb.png", "bomb")
    Image.new("1", (9000, 9000)).save(tmp_path / "large.png")
    with pytest.raises(DataError, match="9000x9000 pixels"):
        decode(tmp_path / "large.png", "large.png")


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"


@pytest.mark.parametrize(
    "data", [b"", b"hello", encoded(pixels(40, 40))[:-200], encoded(pixels(40, 40))[:20], POSTSCRIPT]
)
def test_what_is_no_image(data: bytes) -> None:
    with pytest.raises(DataError) as caught:
        decode_bytes(data, "x.jpg")
    assert str(caught.value).startswith("x.jpg ")
    assert "\n" not in str(caught.value)


def test_truncated_jpeg() -> None:
    data = encoded(np.asarray(Image.fromarray(pixels(8, 8)).resize((200, 200))), "JPEG")
    with pytest.raises(DataError, match="truncated"):
        decode_bytes(data[: len(data) // 2], "x.jpg")


def files(root: Path, *names: str) -> tuple[Path, ...]:
    for name in names:
        save_image(root / name)
    return tuple(root / name for name in names)


def test_class_folders(tmp_path: Path) -> None:
    assert class_folders(tmp_path, files(tmp_path, "cat/a.png", "dog/b.png", "dog/c/d.png")) == {"cat": 0, "dog": 1}
    assert class_folders(tmp_path, files(tmp_path, "03/a.png", "10/b.png")) == {"03": 3, "10": 10}
    assert class_folders(tmp_path, files(tmp_path, "3/a.png", "03/b.png")) == {"03": 0, "3": 1}
    assert class_folders(tmp_path, files(tmp_path, "images/a.png")) == {}
    assert class_folders(tmp_path, files(tmp_path, "top.png", "a/b.png", "c/d.png")) == {}
    assert class_folders(tmp_path, ()) == {}
