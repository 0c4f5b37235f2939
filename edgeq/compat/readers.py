"""Data readers with the arguments of ONNX Runtime's quantization examples: a range of a folder, serial or in batches.

An object with `get_next` is what the older calibrators take. The same reader gives labels and the geometry of each
image to an evaluator (`edgeq.compat.evaluators`), which `get_next` cannot.

The examples loaded `stride` images at a time into memory and the next ones when those were used up. Here each is read
when it is needed: `stride` is accepted and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from edgeq.errors import UsageError

if TYPE_CHECKING:
    from edgeq.data.samples import Sample, Samples

Feed = dict[str, NDArray[Any]]

RESNET50 = "preprocess_method2"
"""Of the CPU example: resized to the model, RGB, minus the mean colour."""
IMAGENET = "imagenet"


def letterbox(width: int, height: int) -> Mapping[str, Any]:
    """Of the YOLO examples: aspect kept, in the centre of grey, RGB in 0..1, channels first."""
    return {
        "title": f"letterbox {width}x{height} in the centre of 128, RGB, x / 255",
        "steps": [
            {"op": "letterbox", "size": [width, height], "position": "center", "value": 128, "filter": "bicubic"},
            {"op": "divide", "value": 255},
            {"op": "layout", "axes": "NCHW"},
        ],
    }


class DataReader:
    """Samples `start_index` to `end_index` of a data set, `batch_size` a run.

    Args:
        dataset: whatever `edgeq.data.samples.open_samples` takes: a folder of images, .npz, .pb, Python objects.
        model_path: the model, or one made of it with the same inputs.
        preprocess, labels: as `open_samples` takes them.
        end_index: the first sample that is left out; 0 goes to the end.
        stride: accepted.
        batch_size: samples stacked along the first axis, which the model must leave free; the last batch is shorter.

    Raises:
        UsageError: a batch or a range of samples that makes no sense.
        DataError, ModelError: the data set or the model cannot be read.
    """

    def __init__(
        self,
        dataset: Any,
        model_path: str | Path,
        *,
        preprocess: Any = None,
        labels: Any = None,
        start_index: int = 0,
        end_index: int = 0,
        stride: int = 1,
        batch_size: int = 1,
    ) -> None:
        from edgeq.model.load import model_signature

        del stride
        if batch_size < 1:
            raise UsageError(f"a batch of {batch_size} makes no sense", "Give 1 or more")
        self.model_path = Path(model_path)
        self.batch_size = batch_size
        self._signature = model_signature(self.model_path)
        self._dataset, self._preprocess, self._labels = dataset, preprocess, labels
        self.set_range(start_index, end_index)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Read other samples from now on."""
        from edgeq.data.samples import open_samples

        if end_index and end_index <= start_index:
            raise UsageError(f"samples {start_index} to {end_index} are none", "Give a larger end_index, or 0")
        self.samples: Samples = open_samples(
            self._dataset,
            self._signature,
            preprocess=self._preprocess,
            labels=self._labels,
            start=start_index,
            count=end_index - start_index if end_index else None,
            model=self.model_path,
        )
        self.rewind()

    def get_next(self) -> Feed | None:
        """The inputs of the next run; None when there are no more."""
        sample = next(self._runs, None)
        if sample is None:
            return None
        filled = sample.context.get("valid")
        return {n: array[:filled] if array.ndim else array for n, array in sample.inputs.items()}

    def rewind(self) -> None:
        """Start again."""
        self._runs = self.runs()

    def runs(self) -> Iterator[Sample]:
        """The runs as samples. A gathered batch is filled to its size; its context says how many rows count."""
        from edgeq.data.batches import rebatch

        return iter(self.samples) if self.batch_size == 1 else rebatch(self.samples, self.batch_size)

    def get_dataset_size(self) -> int:
        """Samples in the range."""
        return len(self.samples)

    def get_input_name(self) -> str:
        """Of the model's first input."""
        return self._signature.inputs[0].name

    def __iter__(self) -> Iterator[Feed]:
        return self

    def __next__(self) -> Feed:
        feed = self.get_next()
        if feed is None:
            raise StopIteration
        return feed

    def __len__(self) -> int:
        """Runs."""
        return -(-len(self.samples) // self.batch_size)


class ResNet50DataReader(DataReader):
    """Of the image classification example for CPUs."""

    def __init__(
        self, calibration_image_folder: Any, model_path: str | Path = "augmented_model.onnx", *, preprocess: Any = None
    ) -> None:
        super().__init__(calibration_image_folder, model_path, preprocess=preprocess or RESNET50)


class ImageNetDataReader(DataReader):
    """Of the image classification example for TensorRT: short side 256, centre 224, mean and deviation.

    Args:
        width, height, input_name: taken from the model; accepted.
    """

    def __init__(
        self,
        image_folder: Any,
        width: int = 224,
        height: int = 224,
        start_index: int = 0,
        end_index: int = 0,
        stride: int = 1,
        batch_size: int = 1,
        model_path: str | Path = "augmented_model.onnx",
        input_name: str = "data",
        *,
        preprocess: Any = None,
        labels: Any = None,
    ) -> None:
        del width, height, input_name
        super().__init__(
            image_folder,
            model_path,
            preprocess=preprocess or IMAGENET,
            labels=labels,
            start_index=start_index,
            end_index=end_index,
            stride=stride,
            batch_size=batch_size,
        )


class YoloDataReader(DataReader):
    """Of the object detection example: `YoloV3DataReader` and its variants.

    Args:
        is_evaluation, annotations: accepted; the evaluator has the annotations.
        preprocess: the letterbox that the model was trained with, if it is not `letterbox(width, height)`.
    """

    def __init__(
        self,
        calibration_image_folder: Any,
        width: int = 416,
        height: int = 416,
        start_index: int = 0,
        end_index: int = 0,
        stride: int = 1,
        batch_size: int = 1,
        model_path: str | Path = "augmented_model.onnx",
        is_evaluation: bool = False,
        annotations: str | Path | None = None,
        *,
        preprocess: Any = None,
    ) -> None:
        del is_evaluation, annotations
        super().__init__(
            calibration_image_folder,
            model_path,
            preprocess=preprocess or letterbox(width, height),
            start_index=start_index,
            end_index=end_index,
            stride=stride,
            batch_size=batch_size,
        )
