"""Draw the picture of docs/how-to/program.md: a synthetic photo with the answer of a segmentation model."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "targets" / "runtime"))

from edgeq_device.answers.answer import Answer  # noqa: E402
from edgeq_device.answers.draw import sketch  # noqa: E402
from edgeq_device.answers.draw_svg import draw_svg, encode_png  # noqa: E402
from edgeq_device.answers.lines import describe  # noqa: E402

WIDTH, HEIGHT = 440, 440


def make_photo() -> tuple[np.ndarray, np.ndarray]:
    """Return a photo uint8 [H, W, 3] of a cup and a ball on a table, and the masks of both bool [2, H, W]."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    photo = np.where((y < 300)[..., None], [196, 206, 214], [150, 116, 84])
    handle = (np.hypot((x - 262) / 36, (y - 215) / 80) < 1) & (np.hypot((x - 262) / 20, (y - 215) / 58) > 1)
    cup = (abs(x - 187) < 75 - (y - 34) // 14) & (y >= 34) & (y < 410)
    ball = np.hypot(x - 57, y - 284) < 33
    masks = np.stack([cup | handle, ball])
    for mask, colour in zip(masks, ([232, 232, 226], [202, 62, 48]), strict=True):
        photo = np.where(mask[..., None], colour, photo)
    return photo.astype(np.uint8), masks


def main() -> None:
    photo, masks = make_photo()
    boxes = np.array([[112.0, 34, 298, 410], [24, 251, 91, 318]])
    answer = Answer(
        "segment",
        boxes=boxes,
        scores=np.array([0.93, 0.81]),
        classes=np.array([41, 32]),
        masks=masks,
        labels=tuple("cup" if number == 41 else "ball" for number in range(80)),
        image_size=(WIDTH, HEIGHT),
    )
    drawing = draw_svg(sketch(answer), encode_png(photo), lambda: photo)
    (REPOSITORY / "docs" / "how-to" / "infer.svg").write_bytes(drawing)
    print("\n".join(describe(answer)))


if __name__ == "__main__":
    main()
