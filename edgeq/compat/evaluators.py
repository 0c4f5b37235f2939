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
from typing import TYPE_CHECKING

from edgeq.errors import UsageError

if TYPE_CHECKING:
    from edgeq.compat.readers import DataReader
    from edgeq.measure.task import Task


class Evaluator:
    """A model's accuracy by a task of edgeq, collected reader by reader.

    Args:
        data_reader: may be set later, and again for the next part of the data.
        providers: execution providers, in order of preference.
    """

    def __init__(
        self,
        model_path: str | Path,
        data_reader: DataReader | None,
        task: Task,
        providers: Sequence[str] = ("CPUExecutionProvider",),
    ) -> None:
        from edgeq.session import SessionSettings, open_session

        self.model_path = Path(model_path)
        self.data_reader = data_reader
        self._session = open_session(self.model_path, SessionSettings(providers=tuple(providers)))
        self._meter = task.start()
        self._seen = 0

    def set_data_reader(self, data_reader: DataReader) -> None:
        """What `predict` reads next. What was predicted before counts too."""
        self.data_reader = data_reader

    def predict(self) -> None:
        """Run the model over all of the reader's samples.

        Raises:
            DataError: a sample lacks the label that the task needs, or the model refuses it.
        """
        from edgeq.measure.inference import infer
        from edgeq.measure.rows import rows

        if self.data_reader is None:
            raise UsageError("there is no data reader", "Give one, or set it with set_data_reader")
        for run in self.data_reader.runs():
            outputs = {"": infer(self._session, run, model=str(self.model_path))}
            for sample, made in rows(run, outputs):
                self._meter.update(made[""], sample)
                self._seen += 1

    def get_result(self) -> Mapping[str, float]:
        """Metric → value, over all that was predicted."""
        if not self._seen:
            raise UsageError("nothing was predicted", "Call predict first")
        return self._meter.result()

    def evaluate(self, result: Mapping[str, float] | None = None) -> Mapping[str, float]:
        """`result`, or what `get_result` gives, printed as the examples did."""
        found = result if result is not None else self.get_result()
        for name, value in found.items():
            print(f"{name}: {value:.4f}")
        return found


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
        from edgeq.measure.tasks.classification import Classification

        super().__init__(model_path, data_reader, Classification(class_offset=class_offset), providers)


class DetectionEvaluator(Evaluator):
    """COCO mean average precision of a detector. `width` and `height` are the model's and the reader's; accepted.

    Args:
        annotations: COCO instances file.
        decoder: of the model's head: a registered name such as "yolox", or "path.py:function".
        confidence, iou: as `edgeq eval` has them.
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
    ) -> None:
        from edgeq.measure.task import TaskOptions
        from edgeq.measure.tasks.detection import detection

        del width, height
        options = TaskOptions(annotations=Path(annotations), decoder=decoder, confidence=confidence, iou=iou)
        super().__init__(model_path, data_reader, detection(options), providers)
