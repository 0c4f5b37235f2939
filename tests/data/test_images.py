"""Decoding: what is read, and what is refused before it costs memory."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.helpers import encoded, pixels
from edgeq.data.files import decode, decode_bytes
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


def png(bits: int, colour: int, row: bytes) -> bytes:
    """Return a PNG of 1x1 pixels in a form that Pillow does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, bits, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def tiff(bits: int, planes: int) -> bytes:
    """Return an uncompressed TIFF of 1x1 colour pixels, with interleaved (planes 1) or separate channels (2)."""
    size = bits // 8
    values = [(256, 3, 1, 1), (257, 3, 1, 1), (258, 3, 3, 500), (259, 3, 1, 1), (262, 3, 1, 2)]
    values += [(273, 4, 1, 600) if planes == 1 else (273, 4, 3, 520), (277, 3, 1, 3), (278, 3, 1, 1)]
    values += [(279, 4, 1, 3 * size) if planes == 1 else (279, 4, 3, 540), (284, 3, 1, planes)]
    table = b"II*\0" + struct.pack("<IH", 8, len(values)) + b"".join(struct.pack("<HHII", *v) for v in values)
    arrays = struct.pack("<3H", bits, bits, bits).ljust(20, b"\0")
    arrays += struct.pack("<3I", 600, 600 + size, 600 + 2 * size).ljust(20, b"\0") + struct.pack("<3I", *[size] * 3)
    return (table.ljust(500, b"\0") + arrays).ljust(600, b"\0") + bytes(range(3 * size))


@pytest.mark.parametrize(
    ("eight", "sixteen"),
    [
        (png(8, 2, b"abc"), png(16, 2, b"abcdef")),
        (png(8, 4, b"ab"), png(16, 4, b"abcd")),
        (png(8, 6, b"abcd"), png(16, 6, b"abcdefgh")),
        (b"P6 1 1 255\nabc", b"P6 1 1 65535\nabcdef"),
        (b"P6 1 1 100\n123", b"P6 1 1 1023\n" + b"\0a" * 3),
        (b"P3 1 1 255\n1 2 3\n", b"P3 1 1 256\n1 2 3\n"),
        (tiff(8, 1), tiff(16, 1)),
        (tiff(8, 2), tiff(16, 2)),
    ],
)
def test_colours_of_sixteen_bits_are_refused(eight: bytes, sixteen: bytes) -> None:
    assert decode_bytes(eight, "x").pixels.shape == (1, 1, 3)
    with pytest.raises(DataError, match="not 8 bits"):
        decode_bytes(sixteen, "x")


def test_sixteen_bits_a_pixel_are_no_sixteen_bits_a_channel() -> None:
    header = struct.pack("<IiiHHIIiiII", 40, 1, 1, 1, 16, 3, 4, 0, 0, 0, 0) + struct.pack("<3I", 0xF800, 0x7E0, 0x1F)
    bmp = b"BM" + struct.pack("<IHHI", 70, 0, 0, 66) + header + struct.pack("<HH", 0xF800, 0)
    assert decode_bytes(bmp, "x.bmp").pixels.tolist() == [[[255, 0, 0]]]


def test_too_many_pixels_are_refused_before_decoding(tmp_path: Path) -> None:
    Image.new("1", (20000, 20000)).save(tmp_path / "bomb.png")
    with pytest.raises(DataError, match="bomb"):
        decode(tmp_path / "bomb.png", "bomb")
    Image.new("1", (9000, 9000)).save(tmp_path / "large.png")
    with pytest.raises(DataError, match="9000x9000 pixels"):
        decode(tmp_path / "large.png", "large.png")


def claiming(kind: str, width: int, height: int) -> bytes:
    """A small file of 64x64 pixels whose header claims others."""
    stream = io.BytesIO()
    Image.new("RGB", (64, 64)).save(stream, kind)
    data = bytearray(stream.getvalue())
    place, form, sizes = {
        "GIF": (6, "<HH", (width, height)),
        "BMP": (18, "<ii", (width, height)),
        "JPEG": (data.find(b"\xff\xc0") + 5, ">HH", (height, width)),
        "PNG": (16, ">II", (width, height)),
        "TIFF": (0, "", ()),
        "PPM": (0, "", ()),
    }[kind]
    struct.pack_into(form, data, place, *sizes)
    if kind == "PNG":
        struct.pack_into(">I", data, 29, zlib.crc32(data[12:29]))
    if kind == "TIFF":  # a tile of 60000x60000 in an image of 16x16
        tags = [(256, 16), (257, 16), (258, 8), (259, 5), (262, 1), (277, 1), (322, 60000), (323, 60000), (324, 300)]
        entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in [*tags, (325, 20)])
        return (b"II*\0\x08\0\0\0\x0a\0" + entries + bytes(4)).ljust(320, b"\0")
    return bytes(data).replace(b"64 64", b"%d %d" % (width, height)) if kind == "PPM" else bytes(data)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "JPEG", "PNG", "TIFF", "PPM"])
def test_compares_the_header_with_the_size_of_the_file(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image is refused if its header states far more pixels than the file can contain.

    64 million pixels would use 1 GB while they are decoded.
    """
    with pytest.raises(DataError, match=r"pixels in \d+ bytes: \d+ bytes, but a sample may take at most 268435456"):
        decode_bytes(claiming(kind, 8000, 8000), "x")
    monkeypatch.setenv("EDGEQ_BUDGET", "sample=1MiB")
    assert decode_bytes(encoded(pixels(64, 64)), "x").pixels.shape == (64, 64, 3)


def test_photographs_may_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a file count: noise of 900x900 pixels, where a small file may have 256x256."""
    monkeypatch.setenv("EDGEQ_BUDGET", "sample=1MiB")
    assert decode_bytes(encoded(pixels(900, 900), "JPEG"), "x").pixels.shape == (900, 900, 3)
    with pytest.raises(DataError, match="300x300 pixels"):
        decode_bytes(encoded(np.zeros((300, 300, 3), np.uint8)), "x")


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"


@pytest.mark.parametrize(
    "data", [b"", b"hello", encoded(pixels(40, 40))[:-200], encoded(pixels(40, 40))[:20], POSTSCRIPT]
)
def test_refuses_damaged_images_in_one_line(data: bytes) -> None:
    with pytest.raises(DataError) as caught:
        decode_bytes(data, "x.jpg")
    assert str(caught.value).startswith("x.jpg ")
    assert "\n" not in str(caught.value)


def test_truncated_jpeg() -> None:
    data = encoded(np.asarray(Image.fromarray(pixels(8, 8)).resize((200, 200))), "JPEG")
    with pytest.raises(DataError, match="truncated"):
        decode_bytes(data[: len(data) // 2], "x.jpg")
