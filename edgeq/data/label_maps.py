"""Read label files that are maps: masks of classes, depth, and target images."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgeq.data.files import decode
from edgeq.data.limits import MAX_PIXELS
from edgeq.errors import DataError
from edgeq.util.record_files import is_longer

# Modes of Pillow that hold one number a pixel: black and white, grey, palette, and 16 or 32 bits.
_SINGLE = ("1", "L", "P", "I;16", "I;16B", "I;16L", "I", "F")
_FIX = "Give a grey or palette PNG with one number a pixel, or .npy [H, W]"


def read_target(path: Path) -> NDArray[np.uint8]:
    """Return a target image, uint8 [H, W, 3], red first.

    Raises:
        DataError: the file is not an image, or is too large.
    """
    return decode(path, str(path)).pixels


def read_numbers_map(path: Path) -> NDArray[Any]:
    """Return a map [H, W]: the values of a grey image, the indices (not the colours) of a palette image, or the array
    of a .npy file. A colour image whose three channels are equal is grey.

    Raises:
        DataError: the file is another kind of image, is damaged or too large.
    """
    try:
        if is_longer(path, 8 * MAX_PIXELS + 4096):
            raise DataError(f"{path} is larger than {MAX_PIXELS} pixels", "Give a smaller map")
        if path.suffix.lower() == ".npy":
            array = np.load(path, allow_pickle=False)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # The size is checked below.
                with Image.open(path, formats=("PNG", "BMP", "GIF", "TIFF")) as image:
                    if image.width * image.height > MAX_PIXELS:
                        raise DataError(f"{path} has more than {MAX_PIXELS} pixels", "Give a smaller map")
                    array = np.asarray(image if image.mode in _SINGLE else image.convert("RGB"))
    except (OSError, ValueError, EOFError, SyntaxError, MemoryError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as a map: {' '.join(str(error).split())}", _FIX) from error
    if array.ndim == 3 and array.shape[2] == 3 and (array == array[..., :1]).all():
        array = array[..., 0]
    if array.ndim != 2 or array.dtype.kind not in "biuf":
        raise DataError(f"{path} has the shape {list(array.shape)}, not one number a pixel", _FIX)
    return np.asarray(array)
