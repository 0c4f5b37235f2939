"""Evaluators with the methods of ONNX Runtime's quantization examples: predict over one or several readers, then judge.

evaluator = DetectionEvaluator("yolox.onnx", None, annotations="instances_val.json", decoder="yolox")
for start in range(0, 5000, 1000):
    evaluator.set_data_reader(YoloDataReader("val/", 416, 416, start, start + 1000, model_path="yolox.onnx"))
    evaluator.predict()
evaluator.evaluate()["mAP50-95"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeq.compat._evaluator import DetectionEvaluator, Evaluator, printed
from edgeq.compat._yolov3 import YoloV3Evaluator, YoloV3VariantEvaluator
from edgeq.errors import DataError, UsageError
from edgeq.run.session import SessionSettings, open_session

if TYPE_CHECKING:
    from edgeq.compat.readers import DataReader

__all__ = [
    "ClassificationEvaluator",
    "DetectionEvaluator",
    "Evaluator",
    "ImageClassificationEvaluator",
    "YoloV3Evaluator",
    "YoloV3VariantEvaluator",
]


class ClassificationEvaluator(Evaluator):
    """ImageNet accuracy: top-1 and top-5. Labels are the reader's.

    Args:
        class_offset: scores in front of class 0 that are no class.
    """

    def __init__(
        self,
        model_path: str | Path,
        data_reader: DataReader | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        *,
        class_offset: int = 0,
    ) -> None:
        from edgeq.measure.tasks import Classification

        super().__init__(model_path, data_reader, Classification(class_offset=class_offset), providers)


class ImageClassificationEvaluator:
    """ImageNet accuracy, of the image classification example for TensorRT.

    Args:
        synset_id: labels, one-hot, [samples, classes]; see `ImageNetDataReader.get_synset_id`.
        data_reader: anything with `get_next`.
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
        """The outputs of each run."""
        return self.prediction_result_list

    def evaluate(self, prediction_results: Sequence[Sequence[NDArray[Any]]]) -> Mapping[str, float]:
        """Top-1 and top-5 of the first output: printed, and as metric → value.

        Raises:
            DataError: there are not as many labels as results.
        """
        scores = np.concatenate([outputs[0] for outputs in prediction_results])
        truth = np.asarray(self.synset_id).argmax(axis=1)
        if len(truth) != len(scores):
            raise DataError(f"{len(scores)} results for {len(truth)} labels", "Give the labels of the reader's range")
        ranked = np.argsort(-scores, axis=1, kind="stable")
        hits = ranked[:, :5] == truth[:, None]
        return printed({"top 1": float(hits[:, 0].mean()), "top 5": float(hits.any(axis=1).mean())})


def __getattr__(name: str) -> Any:
    if name in ("YoloV3Variant2Evaluator", "YoloV3Variant3Evaluator", "YoloV3VisionEvaluator"):
        raise UsageError(
            f"{name} read its author's models alone", "Use YoloV3Evaluator(..., decoder='path.py:function')"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
