"""Decode images from files and from memory, within memory limits."""

from __future__ import annotations

import io
import logging
import math
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from edgeq_device.system.files import check_file
from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import TiffImageFile

from edgeq.data.images import Picture
from edgeq.data.limits import MAX_PIXELS, check_size
from edgeq.data.records import FileList, Rows
from edgeq.errors import DataError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
# Only plain raster formats are allowed, because Pillow would start Ghostscript for an EPS file, whatever its suffix is.
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM")
# Pillow logs details of damaged files. Without a handler, Python would print these details in addition to the error
# line.
logging.getLogger("PIL").addHandler(logging.NullHandler())
_EIGHT_BIT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "La", "RGBa", "LAB", "HSV")
_BITS_PER_SAMPLE, _TILE_WIDTH, _TILE_LENGTH = 258, 322, 323  # TIFF tags
_BYTES_A_PIXEL = 16
"""Bytes per pixel during decoding: Pillow's stored form, its RGB form (4 bytes), a copy of that form, and the result (3
bytes).
"""
_OF_A_BYTE = 64
"""Largest number of decoded bytes per byte of the file. Photographs have 2 to 20 bits per pixel."""
# Exceptions that Pillow raises for damaged files.
_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, MemoryError, struct.error)


def decode(stream: IO[bytes] | Path, location: str) -> Picture:
    """Decode an image (the first frame) to RGB. Transparency is dropped, and EXIF rotation is not applied.

    Raises:
        DataError: the file is not an image, is damaged, truncated or too large, or has more than 8 bits per channel.
    """
    try:
        if isinstance(stream, Path):
            check_file(stream)
            file_size = stream.stat().st_size
        else:
            file_size = stream.seek(0, io.SEEK_END)
            stream.seek(0)
        with warnings.catch_warnings():
            # Pillow warns of large images and odd metadata. This code checks the size itself and does not use the
            # metadata.
            warnings.simplefilter("ignore")
            with Image.open(stream, formats=_FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise DataError(
                        f"{location} is an image of {image.width}x{image.height} pixels, more than {MAX_PIXELS}",
                        "Give fewer pixels",
                    )
                check_size(
                    _BYTES_A_PIXEL * _count_pixels(image),
                    f"{location} is an image of {image.width}x{image.height} pixels in {file_size} bytes",
                    "Give fewer pixels",
                    allowance=_OF_A_BYTE * file_size,
                )
                if image.mode not in _EIGHT_BIT or _is_deep(image):
                    raise DataError(
                        f"{location} is an image whose values are not 8 bits per channel (Pillow's mode {image.mode})",
                        "Convert it, or store it as an array",
                    )
                return Picture(np.asarray(image.convert("RGB")))
    except Image.DecompressionBombError as error:
        raise DataError(f"{location} is an image of more than {MAX_PIXELS} pixels", "Give fewer pixels") from error
    except UnidentifiedImageError as error:
        raise DataError(f"{location} is not an image that can be read", "Replace or remove the file") from error
    except _DAMAGED as error:
        text = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{location} cannot be decoded: {text}", "Replace or remove the file") from error


def _count_pixels(image: Image.Image) -> int:
    """Return the number of pixels that the decoder must hold, according to the header. A TIFF tile may be larger than
    its image.
    """
    tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
    tile = math.prod(tags.get(tag) or 1 for tag in (_TILE_WIDTH, _TILE_LENGTH))
    return max(image.width * image.height, int(tile))


def _is_deep(image: Image.Image) -> bool:
    """Return whether a file has more than 8 bits per channel although its Pillow mode does not show this. Pillow would
    reduce such a file's colours to 8 bits.
    """
    if isinstance(image, TiffImageFile):
        bits = image.tag_v2.get(_BITS_PER_SAMPLE, (1,))
        return any(size > 8 for size in (bits if isinstance(bits, tuple) else (bits,)))
    for tile in image.tile if isinstance(image, PngImageFile | PpmImageFile) else ():
        # For PNG data, an argument of the decoder is the layout, such as "RGB;16B". For a PPM file, it is the largest
        # value.
        for argument in tile.args if isinstance(tile.args, tuple) else (tile.args,):
            if (isinstance(argument, str) and ";16" in argument) or (isinstance(argument, int) and argument > 255):
                return True
    return False


def decode_bytes(data: bytes, location: str) -> Picture:
    """Decode an image and return it as uint8 [H, W, 3], red first. `location` names the image in messages. See
    `decode`.
    """
    return decode(io.BytesIO(data), location)


@dataclass(frozen=True)
class ImageFiles(FileList):
    """Read a list of image files."""

    rows: Rows = "one"

    def item(self, path: Path) -> Picture:
        """Return the decoded image."""
        return decode(path, str(path))
