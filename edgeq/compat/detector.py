"""Run the object detection example of ONNX Runtime's quantization tools, end to end: python -m edgeq.compat.detector.

The command calibrates a detector on a folder of images, one part at a time, and writes the tables for the TensorRT
provider. Then it measures the model's mean average precision on annotated images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import derive_ranges
from edgeq.calibration.statistics import Statistics
from edgeq.calibration.table import write_tables
from edgeq.compat._command import OneLineCommand, run_program
from edgeq.compat._members import METHODS
from edgeq.compat._options import SETTINGS
from edgeq.compat._printing import says
from edgeq.compat.evaluators import DetectionEvaluator
from edgeq.compat.readers import DataReader, YoloDataReader
from edgeq.data.sample import Sample
from edgeq.errors import UsageError
from edgeq.model.digests import model_digest
from edgeq.model.load import read_model
from edgeq.util.registry import DECODERS

TABLES = "calibration.flatbuffers, calibration.json and calibration.cache"


@dataclass(frozen=True)
class _Runs:
    """Provide the runs of a reader for calibration, without the rows that fill up the last batch."""

    reader: DataReader

    @property
    def source(self) -> str:
        """Return a readable description of the source of the samples."""
        return self.reader.samples.source

    def __len__(self) -> int:
        return len(self.reader)

    def __iter__(self) -> Iterator[Sample]:
        for run in self.reader.runs():
            yield self.reader.unfilled(run)

    def digest(self) -> str:
        """Return the digest of the reader's samples. Stacking the samples into batches does not change it."""
        return self.reader.samples.digest()


def collect_readers(model_path: str | Path, readers: Iterable[DataReader]) -> Statistics:
    """Return the statistics of a model's tensors over all readers. The readers may be parts of one data set, because
    merging statistics is exact.

    The unchanged model is observed, so the tensors keep the names that a runtime looks up.

    Raises:
        UsageError: there are no readers.
        DataError, CalibrationError: for the same reasons as in `edgeq.calibration.collect`.
    """
    path = Path(model_path)
    # The model is read once for all readers, however many parts the data set has.
    digest, model = model_digest(path), read_model(path)
    total: Statistics | None = None
    for reader in readers:
        part = collect(model, _Runs(reader), model_digest=digest)
        total = part if total is None else total.merge(part)
    if total is None:
        raise UsageError("there are no readers to calibrate with", "Give at least one")
    return total


@click.command("detector", cls=OneLineCommand, context_settings=SETTINGS)
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Float model.")
@click.option("--calibration_dataset", help="Calibration images. If omitted, the calibration is skipped.")
@click.option("--validation_dataset", help="Annotated images. If omitted, the evaluation is skipped.")
@click.option("--annotations", type=click.Path(path_type=Path), help="COCO instances file of the annotated images.")
@click.option("--decoder", help=f"Decoder of the model's head: {', '.join(DECODERS.names())}, or path.py:function.")
@click.option("--calibrate_method", type=click.Choice(list(METHODS)), default="Entropy", help="How ranges are derived.")
@click.option("--width", type=click.IntRange(min=1), default=416, help="Width of the model's input.")
@click.option("--height", type=click.IntRange(min=1), default=416, help="Height of the model's input.")
@click.option("--preprocess", help="Preprocessing. [letterbox in the centre, RGB in 0..1]")
@click.option("--start_index", type=click.IntRange(min=0), default=0, help="First image.")
@click.option("--end_index", type=click.IntRange(min=0), default=0, help="Index after the last image; 0 means the end.")
@click.option("--stride", type=click.IntRange(min=1), default=1000, help="Images per part.")
@click.option("--batch_size", type=click.IntRange(min=1), default=1, help="Images per run.")
@click.option("--output_dir", type=click.Path(path_type=Path), default=Path(), help="Folder for the tables.")
@click.option("--provider", default="CPUExecutionProvider", help="Execution provider for the evaluation.")
@says
def command(
    *,
    model: Path,
    calibration_dataset: str | None,
    validation_dataset: str | None,
    annotations: Path | None,
    decoder: str | None,
    calibrate_method: str,
    width: int,
    height: int,
    preprocess: str | None,
    start_index: int,
    end_index: int,
    stride: int,
    batch_size: int,
    output_dir: Path,
    provider: str,
) -> Iterator[str]:
    """Calibrate a detector for TensorRT and evaluate it on COCO."""
    if calibration_dataset is None and validation_dataset is None:
        raise UsageError("there is nothing to do", "Give --calibration_dataset, --validation_dataset, or both")

    def readers(dataset: str) -> Iterator[DataReader]:
        """Yield a reader of the data set for each part of `stride` images."""
        reader = YoloDataReader(
            dataset, width, height, start_index, end_index, 1, batch_size, model, preprocess=preprocess
        )
        # The reader was opened over the whole range, so its size tells where the last part ends.
        stop = start_index + reader.get_dataset_size()
        for start in range(start_index, stop, stride):
            reader.set_range(start, min(start + stride, stop))
            yield reader

    evaluator = None
    if validation_dataset is not None:
        if annotations is None or decoder is None:
            raise UsageError("an evaluation needs annotations and a decoder", "Give --annotations and --decoder")
        # Open the evaluator first, so that a wrong option fails before the calibration, which takes minutes.
        evaluator = DetectionEvaluator(model, None, providers=[provider], annotations=annotations, decoder=decoder)
    if calibration_dataset is not None:
        statistics = collect_readers(model, readers(calibration_dataset))
        # TensorRT's int8 is symmetric.
        method = METHODS[calibrate_method]
        ranges = derive_ranges(statistics, method, activation_type="int8", symmetric=True)
        write_tables(output_dir, ranges)
        yield f"{output_dir}: {TABLES} of {len(ranges)} tensors, {calibrate_method} over {statistics.samples} runs"
    if validation_dataset is not None and evaluator is not None:
        for reader in readers(validation_dataset):
            evaluator.set_data_reader(reader)
            evaluator.predict()
        yield from (f"{name}: {value:.4f}" for name, value in evaluator.get_result().items())


if __name__ == "__main__":
    run_program(command)
