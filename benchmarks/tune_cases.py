"""Define the models on which `edgeq tune` is measured, and the limits for each model."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeq.data.samples import Samples, open_samples
from edgeq.measure.task import Task, TaskOptions, make_task
from edgeq.model.load import model_signature

SPECS = Path(__file__).resolve().parent / "specs"


@dataclass(frozen=True)
class Case:
    """Describe one run of `edgeq tune`.

    Attributes:
        tuned_on: labelled samples that tuning may see.
        judged_on: labelled samples on which the reported figure is measured.
        max_drop: value of --max-drop.
        bar: largest allowed loss, in the metric's own scale.
        count: number of calibration samples.
        options: options of the task, as on the command line.
        against_int8: largest allowed latency, as a multiple of the latency of ONNX Runtime's own int8 model, however
            much accuracy that model loses.
    """

    name: str
    model: Path
    data: Path
    tuned_on: Path
    judged_on: Path
    preprocess: Path | None
    options: tuple[str, ...]
    max_drop: str
    bar: float
    count: int | None = None
    against_int8: float | None = None

    @property
    def preprocessing(self) -> tuple[str, ...]:
        """Return the options of the preprocessing for the command line."""
        return ("--preprocess", str(self.preprocess)) if self.preprocess is not None else ()

    def make_task(self) -> Task:
        """Return the task of `options`."""
        given = dict(zip(self.options[::2], self.options[1::2], strict=True))
        options = TaskOptions(
            class_offset=int(given["--class-offset"]) if "--class-offset" in given else None,
            annotations=Path(given["--annotations"]) if "--annotations" in given else None,
            decoder=given.get("--decoder"),
        )
        return make_task(given["--task"], options)

    def open(self, source: Path, count: int | None = None) -> Samples:
        """Return the samples of `source`, preprocessed for the model."""
        return open_samples(
            source, model_signature(self.model), preprocess=self.preprocess, count=count, model=self.model
        )


def cases(root: Path, workdir: Path) -> Iterator[Case]:
    """Yield all cases. If a folder is split into halves, these are made in `workdir`."""
    images = root / "imagenet-sample"
    even, odd = halves(images / "val", workdir)
    for name, (seen, unseen) in {"mobilenet, first half": (even, odd), "mobilenet, second half": (odd, even)}.items():
        yield _case(
            root,
            name,
            "mobilenet_v1_0.25_224",
            images / "calib",
            seen,
            judged_on=unseen,
            options=("--task", "classification", "--class-offset", "1"),
            max_drop="0.5pt",
        )
    coco = root / "coco256"
    annotations = ("--annotations", str(coco / "instances_val.json"))
    detection = ("--task", "detection", "--decoder", "yolox", *annotations)
    yolox = _case(
        root, "yolox_nano", "yolox_nano", coco / "calib", coco / "val", options=detection, max_drop="1pt", bar=0.01
    )
    yield dataclasses.replace(yolox, against_int8=1.25)
    cifar = root / "cifar10"
    yield _case(root, "resnet20", "resnet20_cifar10", cifar / "calib_lossless_300.npz", cifar / "test_jpeg_3000.npz")
    for short in ("kws", "vww"):
        name = f"mlperf_tiny_{short}"
        folder = root / name / "data"
        validation = folder / ("val_900.npz" if short == "kws" else "val_*.npz")
        yield _case(root, short, name, folder / "calib_100.npz", validation)
    folder = root / "mlperf_tiny_ad" / "data"
    yield _case(
        root, "ad", "mlperf_tiny_ad", folder / "calib_10.npz", folder / "val_*.npz", options=("--task", "anomaly")
    )
    digits = root / "lenet_mnist" / "t10k-images-idx3-ubyte.gz"
    yield _case(root, "lenet", "lenet_mnist", digits, digits, count=300)


def chosen(root: Path, folder: Path, only: Sequence[str] = ()) -> Iterator[tuple[Case, Path]]:
    """Yield the cases whose names begin with one of the texts in `only`, or all cases if `only` is empty. Each case
    comes with its own empty folder in `folder`.
    """
    for case in cases(root, folder / "halves"):
        if not only or any(case.name.startswith(name) for name in only):
            workdir = folder / case.name
            workdir.mkdir()
            yield case, workdir


def halves(folder: Path, workdir: Path) -> tuple[Path, Path]:
    """Return two copies of parts of `folder`. One contains every second file, beginning with the first. The other
    contains the rest.
    """
    made = []
    for start, name in enumerate(("even", "odd")):
        place = workdir / f"{folder.name}-{name}"
        place.mkdir(parents=True, exist_ok=True)
        for file in sorted(folder.iterdir())[start::2]:
            shutil.copyfile(file, place / file.name)
        made.append(place)
    return made[0], made[1]


def _case(
    root: Path,
    name: str,
    folder: str,
    data: Path,
    tuned_on: Path,
    *,
    judged_on: Path | None = None,
    options: tuple[str, ...] = ("--task", "classification"),
    max_drop: str = "0.5pt",
    bar: float = 0.005,
    count: int | None = None,
) -> Case:
    model, spec = root / folder / "model.onnx", SPECS / f"{folder}.toml"
    return Case(name, model, data, tuned_on, judged_on or tuned_on, spec, options, max_drop, bar, count)
