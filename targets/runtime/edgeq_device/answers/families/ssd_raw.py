"""SSD before its boxes are decoded: offsets from priors, and class scores with a background.

    loc [1, N, 4]: offsets of centre and size; conf [1, N, 1 + C]: logits, or shares after softmax

    centre = prior + 0.1 * loc_xy * prior_wh    size = prior_wh * exp(0.2 * loc_wh)

The parameter "priors" is a name in `PRIORS`, or a record with the same keys. Sources: amdegroot/ssd.pytorch,
layers/functions/prior_box.py; qfgaohao/pytorch-ssd, vision/utils/box_utils.py.
"""

from __future__ import annotations

from typing import Any, Mapping, Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores
from edgeq_device.answers.families.ssd import have_background
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.grids import exp, softmax
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, pick_best_class, to_corners
from edgeq_device.answers.rows import are_corners, drop_batch, find_pair

_TWO, _THREE = (2,), (2, 3)
PRIORS: Mapping[str, Mapping[str, Any]] = {
    "ssd300": {
        "size": 300,
        "maps": (38, 19, 10, 5, 3, 1),
        "steps": (8, 16, 32, 64, 100, 300),
        "bounds": (30, 60, 111, 162, 213, 264, 315),
        "ratios": (_TWO, _THREE, _THREE, _THREE, _TWO, _TWO),
    },
    "ssd512": {
        "size": 512,
        "maps": (64, 32, 16, 8, 4, 2, 1),
        "steps": (8, 16, 32, 64, 128, 256, 512),
        "bounds": (35.84, 76.8, 153.6, 230.4, 307.2, 384, 460.8, 537.6),
        "ratios": (_TWO, _THREE, _THREE, _THREE, _THREE, _TWO, _TWO),
    },
    "ssd300-mobilenet": {
        "size": 300,
        "maps": (19, 10, 5, 3, 2, 1),
        "steps": (16, 32, 64, 100, 150, 300),
        "bounds": (60, 105, 150, 195, 240, 285, 330),
        "ratios": (_THREE,) * 6,
    },
}
"""Name → side of the model's input, sides of the maps, their strides, the sizes of the priors in pixels (one for each
map and one more), and the ratios of width to height besides 1.
"""
_MOST_PRIORS = 10**6


def generate(record: Mapping[str, Any]) -> Any:
    """Return the priors of a record, float64 [N, 4]: centre and size in shares of the input's size."""
    priors, size, bounds = [], float(record["size"]), record["bounds"]
    if sum(int(side) ** 2 for side in record["maps"]) > _MOST_PRIORS:
        raise ValueError("the priors are too many")
    for place, (side, step, ratios) in enumerate(zip(record["maps"], record["steps"], record["ratios"])):
        low, high = float(bounds[place]), float(bounds[place + 1])
        shapes = [(low, low), ((low * high) ** 0.5,) * 2]
        for ratio in ratios:
            long, short = low * ratio**0.5, low / ratio**0.5
            shapes += [(long, short), (short, long)]
        rows, columns = np.mgrid[: int(side), : int(side)]
        centres = (np.stack([columns, rows], axis=-1).reshape(-1, 1, 2) + 0.5) * step
        extents = np.broadcast_to(np.array(shapes), (len(centres), len(shapes), 2))
        priors.append(np.concatenate([np.broadcast_to(centres, extents.shape), extents], axis=2).reshape(-1, 4))
    return np.concatenate(priors) / size


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best class of each prior other than the background."""
    offsets, scores = (drop_batch(outputs[head.outputs[role]], 2) for role in ("boxes", "scores"))
    value = head.parameters["priors"]
    priors = generate(PRIORS[value] if isinstance(value, str) else value)
    if len(priors) != len(offsets):
        raise ValueError(f"there are {len(priors)} priors for {len(offsets)} boxes")
    centres = priors[:, :2] + 0.1 * offsets[:, :2] * priors[:, 2:]
    boxes = np.concatenate([centres, priors[:, 2:] * exp(0.2 * offsets[:, 2:])], axis=1) * np.tile(size, 2)
    if head.parameters.get("scores") == "logits":
        scores = softmax(scores)
    return pick_best_class(to_corners(boxes), scores[:, 1:])


def fit(view: View) -> Optional[Fit]:
    """Accept as many offsets as a set of priors has, which are not corners."""
    pair = find_pair(view.outputs)
    if pair is None or len(view.outputs) != 2:
        return None
    offsets, scores = (view.outputs[name][0] for name in pair)
    value = view.hints.get("priors")
    names = [value] if value is not None else list(PRIORS)
    sets = [n for n in names if len(generate(PRIORS[n] if isinstance(n, str) else n)) == len(offsets)]
    if not sets or scores.shape[1] < 2 or view.classes not in (None, scores.shape[1] - 1):
        return None
    probabilities = have_background(scores)
    if not view.forced and (are_corners(offsets) or (are_scores(scores) and not probabilities)):
        return None
    parameters = {"priors": sets[0], "scores": "probabilities" if probabilities else "logits"}
    return Fit({"boxes": pair[0], "scores": pair[1]}, parameters)


FAMILY = Family(
    "ssd-raw",
    "detect",
    "offsets [1, priors, 4] and scores [1, priors, 1 + classes]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.5, "iou": 0.45, "limit": 200},
)
