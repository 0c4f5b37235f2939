"""Provide data readers with the arguments of ONNX Runtime's quantization examples. A reader reads a range of the
samples in a folder, one at a time or in batches.

The older calibrators accept an object with `get_next`. A reader here also gives an evaluator
(`edgeq.compat.evaluators`) each image's label and geometry, which `get_next` cannot return.

The examples loaded `stride` images into memory at a time. Here, each image is read when it is needed, so `stride` is
accepted but changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.data.sample import Sample
from edgeq.data.samples import Samples, open_samples, rebatch, take_first
from edgeq.errors import UsageError
from edgeq.measure.task_inputs import read_integer_labels
from edgeq.model.load import model_signature
from edgeq.signature import Signature

Feed = dict[str, NDArray[Any]]

RESNET50 = "preprocess_method2"
"""The preprocessing of the CPU example: resize to the size of the model's input, use RGB, and subtract the mean
colour.
"""
# The preprocessing of the TensorRT example: resize the short side, crop the centre, normalize.
IMAGENET = "imagenet"
CLASSES = 1000


def letterbox(width: int, height: int) -> str:
    """Return the preprocessing steps of the YOLO examples: fit the image into the centre of a grey canvas without
    changing its aspect ratio, scale RGB to 0..1, and put channels first.
    """
    return f"letterbox={width}x{height}:center:128:bicubic,divide=255,layout=NCHW"


class DataReader:
    """Read the samples from `start_index` to `end_index` of a data set, `batch_size` samples per run.

    Args:
        dataset: anything that `edgeq.data.samples.open_samples` accepts: a folder of images, .npz, .pb, Python objects.
        model_path: the model, or a model made from it with the same inputs.
        preprocess, labels: see `open_samples`.
        end_index: index after the last sample to read; 0 means the end of the data set.
        stride: accepted but not used.
        batch_size: number of samples stacked along the first axis, which must be free in the model. The last batch may
            be shorter.

    Raises:
        UsageError: the batch size is below 1, or the range contains no samples.
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

        del stride
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}", "Give 1 or more")
        self.model_path = Path(model_path)
        self.batch_size = batch_size
        signature = model_signature(self.model_path)
        # Inputs that never change are no part of the samples, so they are removed from the signature.
        self.constants = self._constants(signature)
        inputs = tuple(spec for spec in signature.inputs if spec.name not in self.constants)
        self._signature = replace(signature, inputs=inputs)
        self._dataset, self._preprocess, self._labels = dataset, preprocess, labels
        self.set_range(start_index, end_index)

    def _constants(self, signature: Signature) -> Feed:
        """Return the inputs that are the same in every run."""
        del signature
        return {}

    def set_range(self, start_index: int, end_index: int) -> None:
        """Set the range of samples to read from now on, and start at its first sample."""
        if end_index and end_index <= start_index:
            raise UsageError(
                f"the range of samples from {start_index} to {end_index} is empty", "Give a larger end_index, or 0"
            )
        # Opening reads only names and headers, so a range can be changed at any time.
        samples = open_samples(
            self._dataset,
            self._signature,
            preprocess=self._preprocess,
            labels=self._labels,
            start=start_index,
            model=self.model_path,
        )
        self.samples: Samples = take_first(samples, end_index - start_index) if end_index else samples
        self.rewind()

    def get_next(self) -> Feed | None:
        """Return the inputs of the next run, or None after the last run."""
        sample = next(self._runs, None)
        if sample is None:
            return None
        # An older calibrator counts every row, so rows that only fill up a batch would count twice.
        return dict(self.unfilled(sample).inputs)

    def rewind(self) -> None:
        """Start again at the first sample."""
        self._runs = self.runs()

    def runs(self) -> Iterator[Sample]:
        """Return the runs as samples. An incomplete batch is filled up to the batch size. The context of the batch
        states how many rows are real samples.
        """
        return iter(self.samples) if self.batch_size == 1 else rebatch(self.samples, self.batch_size)

    def complete(self, run: Sample) -> Sample:
        """Add the inputs that are the same in every run to a run, and return the complete run."""
        return replace(run, inputs={**run.inputs, **self.constants})

    def unfilled(self, run: Sample) -> Sample:
        """Return a complete run without the rows that fill up the last batch."""
        filled = run.context.get("valid")
        inputs = {name: array[:filled] if array.ndim else array for name, array in run.inputs.items()}
        return self.complete(replace(run, inputs=inputs))

    def get_batch_size(self) -> int:
        """Return the number of samples in each run."""
        return self.batch_size

    def get_dataset_size(self) -> int:
        """Return the number of samples in the range."""
        return len(self.samples)

    def get_input_name(self) -> str:
        """Return the name of the model's first input."""
        return self._signature.inputs[0].name

    def __iter__(self) -> Iterator[Feed]:
        return self

    def __next__(self) -> Feed:
        feed = self.get_next()
        # The older readers were iterators too, so a finished reader must be rewound before it is used again.
        if feed is None:
            raise StopIteration
        return feed

    def __len__(self) -> int:
        """Return the number of runs."""
        return -(-len(self.samples) // self.batch_size)


class ResNet50DataReader(DataReader):
    """Read data as in the image classification example for CPUs."""

    def __init__(
        self, calibration_image_folder: Any, model_path: str | Path = "augmented_model.onnx", *, preprocess: Any = None
    ) -> None:
        super().__init__(calibration_image_folder, model_path, preprocess=preprocess or RESNET50)


class ImageNetDataReader(DataReader):
    """Read data as in the image classification example for TensorRT. The short side is resized to 256, 224 pixels are
    cropped from the centre, and the values are normalized by mean and standard deviation.

    Args:
        image_folder: the folder of images, or the folder whose subfolder `val` contains them.
        width, height, input_name: accepted but not used, because the model determines them.
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
        # The example's data set had its images in val/, but scripts pass either folder.
        below = Path(image_folder) / "val" if isinstance(image_folder, str | Path) else None
        super().__init__(
            below if below is not None and below.is_dir() else image_folder,
            model_path,
            preprocess=preprocess or IMAGENET,
            labels=labels,
            start_index=start_index,
            end_index=end_index,
            stride=stride,
            batch_size=batch_size,
        )

    def get_synset_id(self, image_folder: Any = None, offset: int = 0, dataset_size: int = 0) -> NDArray[np.float32]:
        """Return the one-hot labels of the reader's range, of shape [samples, 1000]. The arguments are accepted but
        change nothing.

        Raises:
            UsageError: the reader has no labels.
        """
        del image_folder, offset, dataset_size
        # Without labels, every row would be wrong without an error.
        if self._labels is None:
            raise UsageError("the reader has no labels", "Give it labels='val_map.txt', lines of file name and class")
        classes = np.concatenate([read_integer_labels(sample) for sample in self.samples])
        one_hot: NDArray[np.float32] = np.eye(CLASSES, dtype=np.float32)[classes]
        return one_hot


class YoloDataReader(DataReader):
    """Read data as in the object detection example.

    The YOLOv3 model from the ONNX Model Zoo has a second input, `image_shape`. The reader feeds this input with the
    height and width of the model's image input.

    Args:
        is_evaluation: accepted but not used.
        annotations: COCO instances file, for an evaluator without annotations of its own.
        preprocess: the letterbox that the model was trained with, if it is not `letterbox(width, height)`.
        size_limit, augmented_model_path: parameters of 2021: the number of images to read from `start_index` on (0:
            all), and the model.
        preprocess_func: refused; use `preprocess`.
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
        annotations: str | Path = "./annotations/instances_val2017.json",
        preprocess_func: Any = None,
        *,
        preprocess: Any = None,
        size_limit: int = 0,
        augmented_model_path: str | Path | None = None,
    ) -> None:
        del is_evaluation
        # The example's function read a whole folder at once, which no longer fits a reader of single images.
        if preprocess_func is not None:
            raise UsageError(
                "a preprocess_func for a whole folder is not supported", "Give preprocess='file.py:function'"
            )
        self.annotations = Path(annotations)
        self._size = (height, width)
        super().__init__(
            calibration_image_folder,
            augmented_model_path or model_path,
            preprocess=preprocess or letterbox(width, height),
            start_index=start_index,
            end_index=start_index + size_limit if size_limit else end_index,
            stride=stride,
            batch_size=batch_size,
        )

    def _constants(self, signature: Signature) -> Feed:
        named = [spec for spec in signature.inputs if spec.name == "image_shape"]
        # With the size of the input as the image's size, the boxes stay in pixels of the input.
        return {spec.name: np.array([self._size], spec.dtype) for spec in named}


# The name of this reader in the example.
YoloV3DataReader = YoloDataReader


class YoloV3VariantDataReader(YoloDataReader):
    """Read data for the variants of YOLOv3, which have a larger input."""

    def __init__(self, calibration_image_folder: Any, width: int = 608, height: int = 384, *others: Any, **named: Any):
        super().__init__(calibration_image_folder, width, height, *others, **named)


YoloV3VisionDataReader = YoloV3VariantDataReader
