"""Recognise models of anomalib 2: only their outputs' names show the writer. Preparation, normalization and thresholds
are inside the graph. Versions 0 and 1 write metadata.json next to the model.
"""

from __future__ import annotations

from edgeq.describe.beside import find_json, is_number
from edgeq.describe.facts import Exported, Fact, ModelFacts, Reader
from edgeq.describe.recipes import write_recipe

_OUTPUTS = frozenset({"pred_score", "pred_label", "anomaly_map", "pred_mask"})
_TITLE = "anomalib: 0..1, RGB, resized to the model"


def read(exported: Exported) -> ModelFacts:
    """Return the task, the preprocessing of anomalib 2, and the thresholds of earlier versions."""
    path = exported.path.parent / "metadata.json"
    old = find_json(path, '"image_threshold"', '"pixel_threshold"')
    if old is not None:
        thresholds = {
            name: float(old[key])
            for key, name in (("image_threshold", "image"), ("pixel_threshold", "pixel"))
            if is_number(old.get(key))
        }
        bounds = {key: float(old[key]) for key in ("min", "max") if is_number(old.get(key))}
        return ModelFacts(
            task=Fact("anomaly", str(path)),
            thresholds=Fact(thresholds, str(path)) if thresholds else None,
            hints=Fact(bounds, str(path)) if bounds else None,
        )
    if not set(exported.outputs) or not set(exported.outputs) <= _OUTPUTS:
        return ModelFacts()
    source = f"the outputs' names {', '.join(exported.outputs)}, which anomalib gives"
    recipe = write_recipe(_TITLE, [{"op": "resize", "size": "model"}], scale=1 / 255)
    return ModelFacts(task=Fact("anomaly", source), preprocess=Fact(recipe, source, assumed=True))


READER = Reader("anomalib", "the names of anomalib's outputs, and metadata.json of its earlier versions", read)
