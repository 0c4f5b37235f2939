"""Draw an answer as an SVG, which contains the image file as it is. Nothing beyond Python and numpy is needed."""

from __future__ import annotations

import base64
import html
import struct
import unicodedata
import zlib
from typing import Any, Callable, Iterator

import numpy as np

from edgeq_device.answers.contours import label_regions, trace_region
from edgeq_device.answers.draw import CAPTION, Colour, Shape, Sketch, is_dark

# The formats that browsers show, by their first bytes.
_TYPES = {b"\xff\xd8\xff": "jpeg", b"\x89PNG": "png", b"GIF8": "gif", b"BM": "bmp", b"RIFF": "webp"}
# A mask's region with fewer pixels cannot be seen, and noise has thousands.
_REGION, _REGIONS = 4, 64
_FARTHEST = 1 << 15


def draw_svg(sketch: Sketch, content: bytes, read_pixels: Callable[[], Any]) -> bytes:
    """Return an SVG of the drawing.

    Args:
        content: the image file; empty if the image is not a file.
        read_pixels: returns the stored image, uint8 [H, W, 3]. It is called if browsers do not show the file's format.
    """
    return "\n".join(_list_elements(sketch, content, read_pixels)).encode("utf-8")


def _list_elements(sketch: Sketch, content: bytes, read_pixels: Callable[[], Any]) -> Iterator[str]:
    (width, height), captions = sketch.size, len(sketch.captions)
    total = height + captions * sketch.row + (sketch.font // 2 if captions else 0)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{total}" viewBox="0 0 {width} {total}" '
        f'font-family="sans-serif" font-size="{sketch.font}">'
    )
    kind = next((name for first, name in _TYPES.items() if content.startswith(first)), "")
    if not kind or sketch.image is not None:
        kind, content = "png", encode_png(read_pixels() if sketch.image is None else sketch.image)
    yield _embed(kind, content, width, height)
    if sketch.overlay is not None:
        yield _embed("png", encode_png(sketch.overlay), width, height)
    yield from (_draw_shape(shape, sketch) for shape in sketch.shapes)
    if captions:
        yield f'<rect y="{height}" width="{width}" height="{total - height}" fill="{_hex(CAPTION)}"/>'
    for place, (colour, text) in enumerate(sketch.captions):
        y, left = height + place * sketch.row + sketch.font // 4, sketch.font // 2
        if colour is not None:
            yield f'<rect x="{left}" y="{y + 2}" width="{sketch.font}" height="{sketch.font}" fill="{_hex(colour)}"/>'
            left += sketch.font * 3 // 2
        yield f'<text x="{left}" y="{y + sketch.font}" fill="#fff">{_escape(text)}</text>'
    yield "</svg>\n"


def _draw_shape(shape: Shape, sketch: Sketch) -> str:
    points, colour = np.clip(shape.points, -_FARTHEST, _FARTHEST), _hex(shape.colour)
    if shape.kind == "mask":
        return _draw_mask(shape.content, colour)
    if shape.kind == "dot":
        ((x, y),) = points
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{sketch.line * 1.5}" fill="{colour}" stroke="#000"/>'
    if shape.kind == "label":
        return _draw_label(shape, sketch)
    return "".join(
        f'{_outline(shape, points)} fill="none" stroke="{stroke}" stroke-width="{width}"/>'
        # A dark edge shows the line on parts of the photo that have its colour.
        for stroke, width in (("#000", sketch.line + 2), (colour, sketch.line))
    )


def _outline(shape: Shape, points: Any) -> str:
    upright = len(points) == 4 and (points[:2, 1] == points[0, 1]).all() and (points[[0, 3], 0] == points[0, 0]).all()
    if shape.kind == "area" and upright and (points[2] == [points[1, 0], points[3, 1]]).all():
        (x, y), (right, bottom) = points[0], points[2]
        return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(right - x, 0):.1f}" height="{max(bottom - y, 0):.1f}"'
    name = "polygon" if shape.kind == "area" else "polyline"
    return f'<{name} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"'


def _draw_mask(mask: Any, colour: str) -> str:
    """Return the outlines of a mask's regions, and of the holes in them."""
    rows, columns = np.nonzero(mask.any(axis=1))[0], np.nonzero(mask.any(axis=0))[0]
    if not len(rows):
        return ""
    # A border of background joins everything outside the mask to one region.
    inside = np.pad(mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1], 1)
    corner = np.array([columns[0], rows[0]]) - 0.5
    holes = label_regions(~inside)[0]
    outlines = [*_trace_regions(inside), *_trace_regions(holes > 1)]
    path = "".join(f"M{' '.join(f'{x:.1f},{y:.1f}' for x, y in points + corner)}Z" for points in outlines)
    return f'<path d="{path}" fill="{colour}" fill-opacity="0.45" fill-rule="evenodd"/>'


def _trace_regions(mask: Any) -> Iterator[Any]:
    regions, count = label_regions(mask)
    sizes = np.bincount(regions.ravel(), minlength=count + 1)
    sizes[0] = 0
    for number in np.argsort(-sizes, kind="stable")[:_REGIONS]:
        if sizes[number] >= _REGION:
            yield trace_region(regions == number)


def _draw_label(shape: Shape, sketch: Sketch) -> str:
    width, height = _measure(shape.content) * sketch.font + 6, sketch.row
    ((x, y),) = np.clip(shape.points, 0, _FARTHEST)
    x = min(x, max(sketch.size[0] - width, 0))
    y = min(y - height if y >= height else y, max(sketch.size[1] - height, 0))
    letters = "#fff" if is_dark(shape.colour) else "#000"
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{_hex(shape.colour)}"/>'
        f'<text x="{x + 3:.1f}" y="{y + sketch.font * 1.1:.1f}" fill="{letters}">{_escape(shape.content)}</text>'
    )


def _measure(text: str) -> float:
    """Return a generous width of a text in heights of its letters. The viewer chooses the font."""
    return sum(1.0 if unicodedata.east_asian_width(letter) in "WF" else 0.6 for letter in text)


def _embed(kind: str, content: bytes, width: int, height: int) -> str:
    data = base64.b64encode(content).decode("ascii")
    # The model does not see a camera's rotation, and its positions are those of the pixels as stored.
    return (
        f'<image width="{width}" height="{height}" preserveAspectRatio="none" style="image-orientation:none" '
        f'href="data:image/{kind};base64,{data}"/>'
    )


def encode_png(pixels: Any) -> bytes:
    """Return uint8 pixels [H, W, 3] or [H, W, 4] as a PNG (ISO/IEC 15948), without filters of rows."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, {3: 2, 4: 6}[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def _hex(colour: Colour) -> str:
    return "#%02x%02x%02x" % colour


def _escape(text: str) -> str:
    # XML has no place for control characters and lone surrogates, not even escaped.
    return html.escape("".join(letter if letter.isprintable() else "\ufffd" for letter in text))
