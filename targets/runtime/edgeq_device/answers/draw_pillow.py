"""Draw an answer as a PNG with Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from edgeq_device.answers.draw import CAPTION, Shape, Sketch, fade, is_dark

_BLACK, _WHITE = (0, 0, 0), (255, 255, 255)
# Coordinates far outside the image would make Pillow paint for ever.
_FARTHEST = 1 << 15


def draw_png(sketch: Sketch, pixels: Any) -> bytes:
    """Return a PNG of the drawing.

    Args:
        pixels: the stored image, uint8 [H, W, 3].
    """
    from PIL import Image, ImageDraw

    image = Image.fromarray(pixels if sketch.image is None else sketch.image)
    if sketch.overlay is not None:
        layer = Image.fromarray(sketch.overlay).resize(image.size, Image.Resampling.NEAREST)
        image.paste(layer, (0, 0), layer)
    for shape in sketch.shapes:
        if shape.kind == "mask" and shape.content.shape == (image.height, image.width):
            layer = Image.fromarray(fade(shape.content, shape.colour))
            image.paste(layer, (0, 0), layer)
    width, height = image.size
    if sketch.captions:
        taller = Image.new("RGB", (width, height + sketch.row * len(sketch.captions) + sketch.font // 2), CAPTION)
        taller.paste(image, (0, 0))
        image = taller
    pen, font = ImageDraw.Draw(image), _load_font(sketch.font)
    for shape in sketch.shapes:
        _draw_shape(pen, shape, sketch, font)
    for place, (colour, text) in enumerate(sketch.captions):
        top, left = height + place * sketch.row + sketch.font // 4, sketch.font // 2
        if colour is not None:
            pen.rectangle((left, top + 2, left + sketch.font, top + 2 + sketch.font), fill=colour)
            left += sketch.font * 3 // 2
        pen.text((left, top), _clean(text, font), fill=_WHITE, font=font)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def _draw_shape(pen: Any, shape: Shape, sketch: Sketch, font: Any) -> None:
    points = [tuple(point) for point in np.clip(shape.points, -_FARTHEST, _FARTHEST).tolist()]
    if shape.kind in ("area", "line"):
        path = points + points[:2] if shape.kind == "area" else points
        # A dark edge shows the line on parts of the photo that have its colour.
        pen.line(path, fill=_BLACK, width=sketch.line + 2, joint="curve")
        pen.line(path, fill=shape.colour, width=sketch.line, joint="curve")
    elif shape.kind == "dot":
        ((x, y),), radius = points, sketch.line * 1.5
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=shape.colour, outline=_BLACK)
    elif shape.kind == "label":
        text = _clean(shape.content, font)
        _, top, right, bottom = pen.textbbox((0, 0), text, font=font)
        width, height = right + 6, sketch.row
        x = min(max(points[0][0], 0), max(sketch.size[0] - width, 0))
        # Above the object, or inside it at the top of the image.
        y = points[0][1] - height if points[0][1] >= height else max(points[0][1], 0)
        y = min(y, max(sketch.size[1] - height, 0))
        pen.rectangle((x, y, x + width, y + height), fill=shape.colour)
        pen.text(
            (x + 3, y + (height - bottom - top) / 2), text, fill=_WHITE if is_dark(shape.colour) else _BLACK, font=font
        )


def _load_font(size: int) -> Any:
    from PIL import ImageFont

    try:
        return ImageFont.load_default(size)
    # Pillow before 10.1, or without FreeType, has only a bitmap font of one size.
    except (TypeError, ImportError):
        return ImageFont.load_default()


def _clean(text: str, font: Any) -> str:
    from PIL import ImageFont

    printable = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    # The bitmap font has no letters beyond Latin-1.
    scalable = isinstance(font, ImageFont.FreeTypeFont)
    return printable if scalable else printable.encode("latin-1", "replace").decode("latin-1")
