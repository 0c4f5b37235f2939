"""Make the families of heads whose graph has selected the objects: they differ in where boxes, scores and classes are.

Nothing is left to suppress. Boxes are corners in pixels, or shares of the input's size.
"""

from __future__ import annotations

from typing import Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import state_unit, to_pixels
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects
from edgeq_device.answers.rows import are_selected, drop_batch, find_numbers, find_size_inputs, list_objects


def make_row_family(
    name: str, title: str, columns: str, rank: int, confidence: float = 0.25, preprocess: str = ""
) -> Family:
    """Return the family of an output whose rows are objects.

    Args:
        columns: the columns by one letter each: "xyxy" corners, "s" score, "c" class, "b" batch. Without "c", the
            classes are integers [1, N] in an output of their own.
        rank: number of axes of the output: [N, columns] or [1, N, columns]. A count of the rows may stand beside it.
    """
    box, score, label = columns.index("x"), columns.index("s"), columns.find("c")

    def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
        rows = drop_batch(outputs[head.outputs["rows"]], 2)
        boxes = to_pixels(rows[:, box : box + 4], head.parameters.get("unit", "pixel"), size)
        classes = rows[:, label] if label >= 0 else drop_batch(outputs[head.outputs["labels"]], 1)
        return list_objects(boxes, rows[:, score], classes, head.parameters)

    def fit(view: View) -> Optional[Fit]:
        tables = [n for n, a in view.outputs.items() if a.ndim == rank and a.dtype.kind == "f"]
        tables = [n for n in tables if rank == 2 or len(view.outputs[n]) == 1]
        others = [a for n, a in view.outputs.items() if n not in tables]
        if len(tables) != 1 or any(a.ndim == rank or (rank == 2 and a.size != 1) for a in others):
            return None
        rows = view.outputs[tables[0]] if rank == 2 else view.outputs[tables[0]][0]
        if rows.shape[1] != len(columns):
            return None
        roles = {"rows": tables[0]}
        if label < 0:
            labels = [n for n, a in view.outputs.items() if a.dtype.kind in "iu" and a.shape == (1, len(rows))]
            if len(labels) != 1:
                return None
            roles["labels"] = labels[0]
        classes = rows[:, label] if label >= 0 else view.outputs[roles["labels"]][0]
        if view.classes is not None and classes.max(initial=0) >= view.classes:
            return None
        boxes = rows[:, box : box + 4]
        batch = "b" in columns and rows[:, columns.index("b")].any()
        if not view.forced and (batch or not are_selected(boxes, rows[:, score], classes)):
            return None
        return Fit(roles, {**state_unit(boxes), **find_size_inputs(view.inputs)})

    thresholds = {"confidence": confidence, "limit": 300}
    return Family(name, "detect", title, fit, candidates=candidates, thresholds=thresholds, preprocess=preprocess)


def make_list_family(name: str, title: str, batch: bool, offset: int) -> Family:
    """Return the family of three outputs: boxes, integer labels and scores.

    Args:
        batch: whether the outputs have a batch axis of 1.
        offset: the number of the first class.
    """
    axes = 1 if batch else 0

    def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
        boxes, scores, labels = (
            drop_batch(outputs[head.outputs[role]], rank) for role, rank in (("boxes", 2), ("scores", 1), ("labels", 1))
        )
        boxes = to_pixels(boxes, head.parameters.get("unit", "pixel"), size)
        return list_objects(boxes, scores, labels, head.parameters)

    def fit(view: View) -> Optional[Fit]:
        arrays = {n: a for n, a in view.outputs.items() if 0 < a.ndim < 3 + axes and (not axes or len(a) == 1)}
        roles = {}
        for role, rank, kinds in (("boxes", 2, "f"), ("labels", 1, "iu"), ("scores", 1, "f")):
            names = [n for n, a in arrays.items() if a.ndim == rank + axes and a.dtype.kind in kinds]
            if len(names) != 1:
                return None
            roles[role] = names[0]
        box, label, score = (arrays[n][0] if batch else arrays[n] for n in roles.values())
        if len(arrays) != 3 or box.shape[1] != 4 or not len(box) == len(label) == len(score):
            return None
        # No object is a legal answer, and shapes without a batch axis are those of no other family.
        if (axes or len(box)) and not (view.forced or are_selected(box, score, label)):
            return None
        numbers = find_numbers(int(np.max(label, initial=0)), view.classes, offset)
        return Fit(roles, {**state_unit(box), **numbers, **find_size_inputs(view.inputs)})

    thresholds = {"confidence": 0.5, "limit": 300}
    return Family(name, "detect", title, fit, candidates=candidates, thresholds=thresholds)
