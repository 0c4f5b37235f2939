"""Measure images that a model makes (super-resolution, denoising, low light) against target images: PSNR and SSIM.

Both are computed in RGB, with the data range 255, and without a cut border for PSNR. SSIM uses places where its window
of 11 pixels fits. "psnr_y" and "ssim_y" use the luma of ITU-R BT.601 (16 to 235), the convention of papers about
super-resolution. All figures are means over images. Equal images have a PSNR of 100 dB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.answers.answer import Answer
from numpy.typing import NDArray

from edgeq.data.label_maps import read_target
from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.measure.answer_metric import AnswerMetric, add_up, describe_shape, read_label
from edgeq.measure.answer_sums import Sums
from edgeq.measure.picture_quality import compute_ssim, to_decibels
from edgeq.measure.task import TaskKind

_WHITE = 255.0


def read(answer: Answer, sample: Sample) -> Sums:
    """Return the figures of one image. The label is an image uint8 [H, W, 3], or the path of one."""
    label = read_label(sample)
    target = read_target(label) if isinstance(label, Path) else np.asarray(label)
    if answer.map is None or np.shape(answer.map) != target.shape or target.ndim != 3:
        raise DataError(
            f"{sample.name}: the target is {list(target.shape)}, the answer {describe_shape(answer.map)}",
            "Give target images in the size of the model's images",
        )
    picture, target = np.asarray(answer.map, np.float64), target.astype(np.float64)
    luma, target_luma = to_luma(picture), to_luma(target)
    return {
        "images": 1.0,
        "psnr": to_decibels(float(((picture - target) ** 2).mean()) / _WHITE**2),
        "ssim": compute_ssim(picture, target, _WHITE),
        "psnr_y": to_decibels(float(((luma - target_luma) ** 2).mean()) / _WHITE**2),
        "ssim_y": compute_ssim(luma, target_luma, _WHITE),
    }


def to_luma(picture: NDArray[Any]) -> NDArray[np.float64]:
    """Return the luma [H, W], 16 to 235, of an RGB image [H, W, 3], 0 to 255 (ITU-R BT.601)."""
    luma: NDArray[np.float64] = 16 + picture @ np.array([65.481, 128.553, 24.966]) / _WHITE
    return luma


def summarize(values: Sequence[Sums]) -> Mapping[str, float]:
    """Return the mean of each figure over images."""
    sums = add_up(values)
    return {name: sums[name] / sums["images"] for name in ("psnr", "ssim", "psnr_y", "ssim_y")}


TASK = TaskKind(
    "image-quality",
    "PSNR and SSIM against target images",
    lambda options: AnswerMetric("image-quality", "psnr", read, summarize, frozenset({"image"})),
    frozenset(),
)
