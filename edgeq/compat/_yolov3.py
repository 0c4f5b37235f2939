"""The evaluator of ONNX Runtime's object detection example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeq.compat._evaluator import DetectionEvaluator, chooses, printed
from edgeq.data.records import read_text
from edgeq.errors import DataError, UsageError
from edgeq.measure.boxes import Detections, load_annotations, load_package, score_guesses
from edgeq.measure.latency import Outputs
from edgeq.measure.task import TaskOptions
from edgeq.measure.tasks import Detection

if TYPE_CHECKING:
    from edgeq.compat.readers import YoloDataReader


class YoloV3Evaluator:
    """A detector's boxes in COCO's form, collected part by part, as the example has it.

    for start in range(0, 5000, 1000):
        evaluator = YoloV3Evaluator("yolov3.onnx", YoloV3DataReader("val2017", start_index=start, size_limit=1000))
        evaluator.predict()
        results += evaluator.get_result()
    evaluator.evaluate(results, "annotations/instances_val2017.json")

    Args:
        width, height, ground_truth_object_class_file: accepted; the reader has the size, the annotations the classes.
        onnx_object_class_file: names of the model's classes, one a line; without it, class i is the i-th category.
        annotations: COCO instances file; the reader's if not given.
        decoder: of the model's head; "yolov3-nms" for a model that suppresses boxes itself, else "yolov3".
        confidence, iou: as `edgeq eval` has them.
    """

    def __init__(
        self,
        model_path: str | Path,
        data_reader: YoloDataReader | None = None,
        width: int = 416,
        height: int = 416,
        providers: Sequence[Any] = ("CPUExecutionProvider",),
        ground_truth_object_class_file: str | Path | None = None,
        onnx_object_class_file: str | Path | None = None,
        *,
        annotations: str | Path | None = None,
        decoder: str | None = None,
        confidence: float | None = None,
        iou: float | None = None,
    ) -> None:
        del width, height, ground_truth_object_class_file
        self.model_path = Path(model_path)
        self.data_reader = data_reader
        self.providers = list(providers)
        self.prediction_result_list: list[dict[str, Any]] = []
        self._class_file = Path(onnx_object_class_file) if onnx_object_class_file is not None else None
        self._annotations = annotations
        self._decoder = decoder or ("yolov3-nms" if chooses(self.model_path) else "yolov3")
        self._thresholds = (confidence, iou)

    def set_data_reader(self, data_reader: YoloDataReader) -> None:
        """What `predict` reads next. What was predicted before counts too."""
        self.data_reader = data_reader

    def predict(self) -> None:
        """Run the model over all of the reader's images.

        Raises:
            UsageError: no reader, or outputs that the decoder cannot read.
            DataError: annotations that cannot be read, or that lack an image or a class.
        """
        if self.data_reader is None:
            raise UsageError("there is no data reader", "Give one, or set it with set_data_reader")
        annotations = self._annotations or self.data_reader.annotations
        kind = partial(_Named, self._class_file) if self._class_file is not None else DetectionEvaluator
        confidence, iou = self._thresholds
        part = kind(
            self.model_path,
            self.data_reader,
            providers=self.providers,
            annotations=annotations,
            decoder=self._decoder,
            confidence=confidence,
            iou=iou,
        )
        part.predict()
        self.prediction_result_list += part.boxes()

    def get_result(self) -> list[dict[str, Any]]:
        """{image_id, category_id, bbox (left, top, width, height), score} of each box."""
        return self.prediction_result_list

    def evaluate(self, prediction_result: Sequence[Mapping[str, Any]], annotations: str | Path) -> Mapping[str, float]:
        """COCO's metrics of boxes, over all images that are annotated: printed, and as metric → value."""
        truth = load_annotations(Path(annotations))
        return printed(score_guesses(truth, list(truth.images.values()), prediction_result, load_package()))


class YoloV3VariantEvaluator(YoloV3Evaluator):
    """Of the variants, whose heads are raw."""


class _Named(DetectionEvaluator):
    """A detector whose classes have the names of a file."""

    def __init__(self, class_file: Path, *given: Any, **options: Any) -> None:
        self._class_file = class_file
        super().__init__(*given, **options)

    def _task(self, options: TaskOptions) -> Detection:
        task = super()._task(options)
        names = {name: category for category, name in task.annotations.names.items()}
        order = [_SYNONYMS.get(line.strip(), line.strip()) for line in read_text(self._class_file).split("\n") if line]
        missing = next((name for name in order if name not in names), None)
        if missing is not None:
            raise DataError(f"{task.annotations.source} has no category {missing!r}", f"Correct {self._class_file}")
        places = np.array([task.annotations.categories.index(names[name]) for name in order], np.int64)

        def decode(outputs: Outputs, size: tuple[int, int]) -> Detections:
            found = task.decoder(outputs, size)
            if len(found) and found.classes.max() >= len(places):
                raise DataError(f"{self._class_file} names {len(places)} classes", "List every class of the model")
            return replace(found, classes=places[found.classes])

        return replace(task, decoder=decode)


_SYNONYMS = {
    "aeroplane": "airplane",
    "diningtable": "dining table",
    "motorbike": "motorcycle",
    "pottedplant": "potted plant",
    "sofa": "couch",
    "tvmonitor": "tv",
}
"""Darknet's names for COCO's."""
