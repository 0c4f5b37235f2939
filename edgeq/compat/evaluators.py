"""Measure a model's accuracy with a task of edgeq, one reader at a time, and return detectors' boxes in COCO's format.

The evaluators have the methods of ONNX Runtime's quantization examples: predict over one or several readers, then
evaluate.

evaluator = DetectionEvaluator("yolox.onnx", None, annotations="instances_val.json", decoder="yolox")
for start in range(0, 5000, 1000):
    evaluator.set_data_reader(YoloDataReader("val/", 416, 416, start, start + 1000, model_path="yolox.onnx"))
    evaluator.predict()
evaluator.evaluate()["mAP50-95"]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.compat.readers import DataReader, YoloDataReader
from edgeq.data.limits import read_text
from edgeq.data.sample import Sample
from edgeq.errors import DataError, UsageError
from edgeq.measure.boxes import Detections
from edgeq.measure.coco import load_annotations, load_package, score_results
from edgeq.measure.inference import Outputs, infer
from edgeq.measure.rows import split_rows
from edgeq.measure.task import Task, TaskOptions
from edgeq.measure.tasks.classification import Classification
from edgeq.measure.tasks.detection import Detection, DetectionMeter, make_detection
from edgeq.model.load import model_signature
from edgeq.run.session import SessionSettings, open_session


class Evaluator:
    """Measure a model's accuracy with a task of edgeq, one reader at a time.

    Args:
        data_reader: the first reader, or None. `set_data_reader` sets the reader later and for each additional part of
            the data.
        providers: execution providers, in order of preference.
    """

    def __init__(
        self,
        model_path: str | Path,
        data_reader: DataReader | None,
        task: Task,
        providers: Sequence[str] = ("CPUExecutionProvider",),
    ) -> None:
        self.model_path = Path(model_path)
        self.data_reader = data_reader
        self._session = open_session(self.model_path, SessionSettings(providers=tuple(providers)))
        self._meter = task.start()
        # Without samples, a metric would be 0 or NaN and look like a result.
        self._sample_count = 0

    def set_data_reader(self, data_reader: DataReader) -> None:
        """Choose the reader for the next `predict`. Earlier predictions still count."""
        self.data_reader = data_reader

    def predict(self) -> None:
        """Run the model over all of the reader's samples.

        Raises:
            DataError: a sample lacks the label that the task needs, or the model does not accept the sample.
        """
        if self.data_reader is None:
            raise UsageError("there is no data reader", "Give one, or set it with set_data_reader")
        for run in self._runs(self.data_reader):
            outputs = {"": infer(self._session, self.data_reader.complete(run), model=str(self.model_path))}
            # Each row of a batch is judged by its own label.
            for sample, row_outputs in split_rows(run, outputs):
                self._meter.update(row_outputs[""], sample)
                self._sample_count += 1

    def _runs(self, reader: DataReader) -> Iterable[Sample]:
        return reader.runs()

    def get_result(self) -> Mapping[str, float]:
        """Return metric → value over all predictions."""
        if not self._sample_count:
            raise UsageError("nothing was predicted", "Call predict first")
        return self._meter.result()

    def evaluate(self, result: Mapping[str, float] | None = None) -> Mapping[str, float]:
        """Print `result` in the form of the examples and return it. If `result` is None, use the result of
        `get_result`.
        """
        return print_metrics(result if result is not None else self.get_result())


def print_metrics(metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Print each metric of `metrics` on its own line, and return `metrics`."""
    for name, value in metrics.items():
        print(f"{name}: {value:.4f}")
    return metrics


class DetectionEvaluator(Evaluator):
    """Measure a detector's COCO mean average precision. `width` and `height` are accepted but not used, because the
    model and the reader determine the size.

    Args:
        annotations: COCO instances file.
        decoder: the decoder of the model's head: a registered name such as "yolox", or "path.py:function".
        confidence, iou: see `edgeq eval`.
        class_file: names of the model's classes, one per line. Without this file, class i is the i-th category of the
            annotations.
    """

    def __init__(
        self,
        model_path: str | Path,
        data_reader: DataReader | None = None,
        width: int = 416,
        height: int = 416,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        *,
        annotations: str | Path,
        decoder: str,
        confidence: float | None = None,
        iou: float | None = None,
        class_file: str | Path | None = None,
    ) -> None:
        del width, height
        task = make_detection(
            TaskOptions(annotations=Path(annotations), decoder=decoder, confidence=confidence, iou=iou)
        )
        # The class file belongs to the model, so it overrides the order of the annotations.
        task = task if class_file is None else _with_classes(task, Path(class_file))
        super().__init__(model_path, data_reader, task, providers)

    def _runs(self, reader: DataReader) -> Iterable[Sample]:
        """Return the inputs of each run, batched as the reader gives them. If the model selects boxes itself, return
        one image a run, because its boxes for a batch are not sorted by image.
        """
        return iter(reader.samples) if chooses(self.model_path) else reader.runs()

    def boxes(self) -> list[dict[str, Any]]:
        """Return all predictions as a COCO list of results {image_id, category_id, bbox, score}."""
        assert isinstance(self._meter, DetectionMeter)
        return self._meter.boxes()


def chooses(model: Path) -> bool:
    """Return whether the model itself suppresses boxes. Integer outputs (indices) show this."""
    return any(spec.dtype.kind == "i" for spec in model_signature(model).outputs)


class YoloV3Evaluator:
    """Collect a detector's boxes in COCO's format, one part of the data at a time, as in the example.

    for start in range(0, 5000, 1000):
        evaluator = YoloV3Evaluator("yolov3.onnx", YoloV3DataReader("val2017", start_index=start, size_limit=1000))
        evaluator.predict()
        results += evaluator.get_result()
    evaluator.evaluate(results, "annotations/instances_val2017.json")

    Args:
        width, height, ground_truth_object_class_file: accepted but not used. The size comes from the reader and the
            classes from the annotations.
        onnx_object_class_file: names of the model's classes, one per line. Without this file, class i is the i-th
            category of the annotations.
        annotations: COCO instances file. The default is the reader's file.
        decoder: the decoder of the model's head. The default is "yolov3-nms" for a model that suppresses boxes itself,
            else "yolov3".
        confidence, iou: see `edgeq eval`.
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
        self._annotations = annotations
        # The two exports of YOLOv3 differ in whether they contain the suppression of boxes.
        decoder = decoder or ("yolov3-nms" if chooses(self.model_path) else "yolov3")
        self._options: dict[str, Any] = {"decoder": decoder, "confidence": confidence, "iou": iou}
        self._options["class_file"] = onnx_object_class_file

    def set_data_reader(self, data_reader: YoloDataReader) -> None:
        """Choose the reader for the next `predict`. Earlier predictions still count."""
        self.data_reader = data_reader

    def predict(self) -> None:
        """Run the model over all of the reader's images.

        Raises:
            UsageError: there is no reader, or the decoder cannot read the outputs.
            DataError: the annotations cannot be read, or an image or a class is missing from them.
        """
        if self.data_reader is None:
            raise UsageError("there is no data reader", "Give one, or set it with set_data_reader")
        # The annotations give the images their numbers, so a new evaluator for each part is enough.
        part = DetectionEvaluator(
            self.model_path,
            self.data_reader,
            providers=self.providers,
            annotations=self._annotations or self.data_reader.annotations,
            **self._options,
        )
        part.predict()
        self.prediction_result_list += part.boxes()

    def get_result(self) -> list[dict[str, Any]]:
        """Return {image_id, category_id, bbox (left, top, width, height), score} for each box."""
        return self.prediction_result_list

    def evaluate(self, prediction_result: Sequence[Mapping[str, Any]], annotations: str | Path) -> Mapping[str, float]:
        """Print COCO's box metrics over all annotated images, and return them as metric → value."""
        truth = load_annotations(Path(annotations))
        return print_metrics(score_results(truth, list(truth.images.values()), prediction_result, load_package()))


class YoloV3VariantEvaluator(YoloV3Evaluator):
    """Evaluate the YOLOv3 variants, which have raw heads."""


def _with_classes(task: Detection, class_file: Path) -> Detection:
    """Return the task with its classes taken from the names in a file, not from the order of the annotations."""
    names = {name: category for category, name in task.annotations.names.items()}
    order = [_SYNONYMS.get(line.strip(), line.strip()) for line in read_text(class_file).split("\n") if line]
    # A class that is missing from the annotations would count as a wrong answer for every box.
    missing = next((name for name in order if name not in names), None)
    if missing is not None:
        raise DataError(f"{task.annotations.source} has no category {missing!r}", f"Correct {class_file}")
    # The model's class numbers become positions in the list of the annotations.
    places = np.array([task.annotations.categories.index(names[name]) for name in order], np.int64)

    decoder = task.decoder
    if decoder is None:
        raise UsageError("detection needs a decoder", "Choose one with --decoder")

    def decode(outputs: Outputs, size: tuple[int, int]) -> Detections:
        detections = decoder(outputs, size)
        # An index beyond the file would wrap around or fail without naming the file.
        if len(detections) and detections.classes.max() >= len(places):
            raise DataError(f"{class_file} names {len(places)} classes", "List every class of the model")
        return replace(detections, classes=places[detections.classes])

    return replace(task, decoder=decode)


_SYNONYMS = {
    "aeroplane": "airplane",
    "diningtable": "dining table",
    "motorbike": "motorcycle",
    "pottedplant": "potted plant",
    "sofa": "couch",
    "tvmonitor": "tv",
}
"""Darknet's name for a class → COCO's name for it."""


__all__ = [
    "ClassificationEvaluator",
    "DetectionEvaluator",
    "Evaluator",
    "ImageClassificationEvaluator",
    "YoloV3Evaluator",
    "YoloV3VariantEvaluator",
]


class ClassificationEvaluator(Evaluator):
    """Measure ImageNet top-1 and top-5 accuracy against the reader's labels.

    Args:
        class_offset: the number of scores before class 0 that are not classes.
    """

    def __init__(
        self,
        model_path: str | Path,
        data_reader: DataReader | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        *,
        class_offset: int = 0,
    ) -> None:

        super().__init__(model_path, data_reader, Classification(class_offset=class_offset), providers)


class ImageClassificationEvaluator:
    """Measure ImageNet accuracy as in the image classification example for TensorRT.

    Args:
        synset_id: one-hot labels of shape [samples, classes]; see `ImageNetDataReader.get_synset_id`.
        data_reader: any object with `get_next`.
    """

    def __init__(
        self,
        model_path: str | Path,
        synset_id: NDArray[Any],
        data_reader: Any,
        providers: Sequence[Any] = ("CPUExecutionProvider",),
    ) -> None:
        self.model_path, self.synset_id, self.data_reader = Path(model_path), synset_id, data_reader
        self._session = open_session(self.model_path, SessionSettings(providers=tuple(providers)))
        self.prediction_result_list: list[list[NDArray[Any]]] = []

    def predict(self) -> None:
        """Run the model over all of the reader's data."""
        while (feed := self.data_reader.get_next()) is not None:
            self.prediction_result_list.append(self._session.run(None, feed))

    def get_result(self) -> list[list[NDArray[Any]]]:
        """Return the outputs of each run."""
        return self.prediction_result_list

    def evaluate(self, prediction_results: Sequence[Sequence[NDArray[Any]]]) -> Mapping[str, float]:
        """Print the top-1 and top-5 accuracy of the first output, and return them as metric → value.

        Raises:
            DataError: the numbers of labels and results differ.
        """
        scores = np.concatenate([outputs[0] for outputs in prediction_results])
        truth = np.asarray(self.synset_id).argmax(axis=1)
        # A range of the reader that differs from that of the labels would shift all of them.
        if len(truth) != len(scores):
            raise DataError(f"{len(scores)} results for {len(truth)} labels", "Give the labels of the reader's range")
        # A stable sort gives equal scores the same order on every machine.
        ranked = np.argsort(-scores, axis=1, kind="stable")
        hits = ranked[:, :5] == truth[:, None]
        return print_metrics({"top 1": float(hits[:, 0].mean()), "top 5": float(hits.any(axis=1).mean())})


# These classes of the examples decode models that were never published.
def __getattr__(name: str) -> Any:
    if name in ("YoloV3Variant2Evaluator", "YoloV3Variant3Evaluator", "YoloV3VisionEvaluator"):
        raise UsageError(
            f"{name} read only its author's models", "Use YoloV3Evaluator(..., decoder='path.py:function')"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
