"""A model's accuracy by a task of edgeq, collected reader by reader; detectors' boxes in COCO's form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeq.errors import UsageError
from edgeq.measure.task import Task, TaskOptions
from edgeq.measure.tasks import Detection, DetectionMeter, detection
from edgeq.run.session import SessionSettings, open_session

if TYPE_CHECKING:
    from edgeq.compat.readers import DataReader
    from edgeq.data.sample import Sample


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
        from edgeq.measure.comparison import rows
        from edgeq.measure.latency import infer

        if self.data_reader is None:
            raise UsageError("there is no data reader", "Give one, or set it with set_data_reader")
        for run in self._runs(self.data_reader):
            outputs = {"": infer(self._session, self.data_reader.complete(run), model=str(self.model_path))}
            for sample, made in rows(run, outputs):
                self._meter.update(made[""], sample)
                self._seen += 1

    def _runs(self, reader: DataReader) -> Iterable[Sample]:
        return reader.runs()

    def get_result(self) -> Mapping[str, float]:
        """Metric → value, over all that was predicted."""
        if not self._seen:
            raise UsageError("nothing was predicted", "Call predict first")
        return self._meter.result()

    def evaluate(self, result: Mapping[str, float] | None = None) -> Mapping[str, float]:
        """`result`, or what `get_result` gives, printed as the examples did."""
        return printed(result if result is not None else self.get_result())


def printed(found: Mapping[str, float]) -> Mapping[str, float]:
    """`found`, printed a line each."""
    for name, value in found.items():
        print(f"{name}: {value:.4f}")
    return found


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
        del width, height
        options = TaskOptions(annotations=Path(annotations), decoder=decoder, confidence=confidence, iou=iou)
        super().__init__(model_path, data_reader, self._task(options), providers)

    def _task(self, options: TaskOptions) -> Detection:
        return detection(options)

    def _runs(self, reader: DataReader) -> Iterable[Sample]:
        """Image by image where the model chooses boxes itself: what it chose of a batch does not come row by row."""
        return iter(reader.samples) if chooses(self.model_path) else reader.runs()

    def boxes(self) -> list[dict[str, Any]]:
        """COCO's list of results {image_id, category_id, bbox, score} of all that was predicted."""
        assert isinstance(self._meter, DetectionMeter)
        return self._meter.boxes()


def chooses(model: Path) -> bool:
    """Whether the model suppresses boxes itself: indices are among its outputs."""
    from edgeq.model.load import model_signature

    return any(spec.dtype.kind == "i" for spec in model_signature(model).outputs)
