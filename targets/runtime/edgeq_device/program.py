"""Use the model of a bundle in a Python program: `edgeq_run.open_bundle("dist").run(x)`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import numpy as np

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.decode import decode
from edgeq_device.answers.head import Head, parse_head
from edgeq_device.answers.recording import run_recording, runs_over_recordings
from edgeq_device.answers.sizes import fill
from edgeq_device.bundle import package
from edgeq_device.bundle.opening import open_best
from edgeq_device.bundle.signature import check_signature
from edgeq_device.engines.device import read_device
from edgeq_device.engines.runtime import infer
from edgeq_device.errors import BundleError, DataError, UsageError
from edgeq_device.model.tensors import DTYPES
from edgeq_device.prepare.arrays import to_array
from edgeq_device.prepare.frame import Frame
from edgeq_device.prepare.inputs import check_feeds
from edgeq_device.prepare.steps import Prepare
from edgeq_device.trust.keys import find_trust

LABELS = "labels.txt"
# labels.txt is untrusted; no data set has as many classes.
_MOST_LABELS, _LONGEST = 1_000_000, 1 << 24


class Predictor:
    """Run a session on images and tensors, and say what its outputs mean.

    Attributes:
        session: session that runs the model, with the interface of an `onnxruntime.InferenceSession`.
        inputs, outputs: names of inputs and outputs, in the model's order.
        labels: names of the classes; may be empty.
        head: how the outputs become answers; None if their meaning is unknown.
    """

    def __init__(
        self, session: Any, head: Optional[Head] = None, labels: Tuple[str, ...] = (), preprocessing: Any = None
    ) -> None:
        self.session, self.head, self.labels, self._record = session, head, labels, preprocessing
        self._specs = {spec.name: spec for spec in session.get_inputs()}
        self.inputs = tuple(self._specs)
        self.outputs = tuple(spec.name for spec in session.get_outputs())

    def run(self, x: Any) -> Dict[str, Any]:
        """Run the model and return its outputs as arrays by name.

        Args:
            x: data for one run. An image file, a Pillow image or a raw array is preprocessed with the bundle's steps.
                An array of the input's own dtype and rank, or a mapping of all inputs by name, is used as it is.

        Raises:
            DataError: `x` does not fit the model, or cannot be read.
            BundleError: `x` needs preprocessing, but the bundle has no preprocessing that runs here.
        """
        feeds = dict(x) if isinstance(x, Mapping) else self._build_feeds(x)[0]
        check_feeds(self.session, feeds)
        return infer(self.session, feeds)

    def answer(
        self, x: Any, threshold: Optional[float] = None, thresholds: Optional[Mapping[str, float]] = None
    ) -> Answer:
        """Run the model and return its answer: boxes, masks, keypoints, text or classes; see `Answer`.

        Args:
            x: data for one run, as for `run`. Positions are in pixels of the image, if `x` is an image. If the model
                takes a fixed number of images, the image is repeated. A model that runs over recordings also takes a
                .wav file, or samples [n] at its rate.
            threshold: lowest score of an object or a class, from 0 to 1, instead of the head's.
            thresholds: threshold → number, instead of the head's other ones, such as {"iou": 0.5, "limit": 100}.

        Raises:
            DataError: `x` does not fit the model, or the outputs do not fit the head.
            BundleError: the meaning of the outputs is unknown, or this runner does not know the head's family.
            UsageError: `threshold` is not from 0 to 1.
        """
        if self.head is None:
            raise BundleError("nothing says what the model's outputs mean", "Use --raw, or package with --head")
        if threshold is not None and not 0 <= threshold <= 1:
            raise UsageError(f"--threshold {threshold:g} is not a score", "Give a number from 0 to 1")
        changed = {**(thresholds or {}), **({} if threshold is None else {"confidence": threshold})}
        head = replace(self.head, thresholds={**self.head.thresholds, **changed})
        if runs_over_recordings(head) and not isinstance(x, Mapping):
            return decode(run_recording(self.session, partial(infer, self.session), head, x), head)
        feeds, frame = (dict(x), None) if isinstance(x, Mapping) else self._build_feeds(x)
        batch = self._fixed_batch() if frame is not None else 1
        if batch > 1:
            feeds = {
                name: np.repeat(array, batch, axis=0) if len(array) == 1 else array for name, array in feeds.items()
            }
        check_feeds(self.session, feeds)
        outputs = infer(self.session, feeds)
        return decode({name: _to_plain(array, batch) for name, array in outputs.items()}, head, frame)

    def _fixed_batch(self) -> int:
        """Return the number of images that the model takes, or 1 if it is open."""
        size = next(iter(self._specs[self.inputs[0]].shape), 1)
        return size if isinstance(size, int) else 1

    def prepare(self, x: Any) -> Dict[str, Any]:
        """Return the inputs that `run` would pass to the model for an image or raw array."""
        return self._prepare(x)[0]

    def _prepare(self, x: Any) -> Tuple[Dict[str, Any], Optional[Frame]]:
        if not isinstance(self._record, Mapping):
            raise BundleError("the bundle does not record how its inputs are prepared", "Give tensors by input name")
        source = self._record.get("source")
        named = source.get("input") if isinstance(source, Mapping) else None
        sizes = self.head.parameters.get("inputs") if self.head is not None else None
        sizes = sizes if isinstance(sizes, Mapping) else {}
        images = [key for key in self.inputs if key not in sizes] or self.inputs
        name = str(named) if named in self._specs else images[0]
        if any(other != name and other not in sizes for other in self.inputs):
            raise DataError(
                f"the model has several inputs: {', '.join(self.inputs)}", "Give a mapping of all inputs by name"
            )
        array, frame = Prepare(self._record, self._specs[name].shape).prepare(x)
        feeds = {name: array}
        for other in self.inputs:
            if other == name:
                continue
            if frame is None:
                raise DataError(f"input {other} is the size of an image, but this is none", "Give all inputs by name")
            try:
                feeds[other] = fill(str(sizes[other]), frame)
            except ValueError as error:
                raise BundleError(f"input {other}: {error}", "Use a newer edgeq-run") from error
        dtypes = {key: DTYPES.get(self._specs[key].type) for key in feeds}
        return {k: a if dtypes[k] is None else a.astype(dtypes[k], copy=False) for k, a in feeds.items()}, frame

    def top(self, outputs: Mapping[str, Any], count: int = 5) -> List[Tuple[str, float]]:
        """Return the classes with the highest scores of one sample, best first. Each entry contains the class's label
        (or its number if there are no labels) and its score.

        Raises:
            DataError: no output is one row of scores.
        """
        scores = next((row for array in outputs.values() if (row := _to_row(array)) is not None), None)
        if scores is None:
            raise DataError("no output is one row of class scores", "Read the outputs themselves")
        # Stable, so that equal scores keep the order of the classes.
        best = np.argsort(-scores, kind="stable")[: max(1, count)]
        return [(self._find_label(int(i), len(scores)), float(scores[i])) for i in best]

    def _find_label(self, index: int, count: int) -> str:
        # Labels of another number belong to another output.
        return self.labels[index] if len(self.labels) == count else str(index)

    def _build_feeds(self, x: Any) -> Tuple[Dict[str, Any], Optional[Frame]]:
        spec = self._specs[self.inputs[0]]
        # What already looks like the input must not be prepared a second time.
        as_it_is = (
            isinstance(x, np.ndarray)
            and len(self.inputs) == 1
            and x.ndim == len(spec.shape)
            and x.dtype == np.dtype(DTYPES.get(spec.type) or x.dtype)
        )
        return ({self.inputs[0]: x}, None) if as_it_is else self._prepare(x)


class Model(Predictor):
    """Hold the best variant of a bundle for this device, ready to run. Close the model, or use `with`.

    Attributes:
        bundle: the opened bundle, whose hashes have been checked.
        variant, why: name of the variant that runs, and the reason for the choice.
        passed_over: the reason against each better variant.
    """

    def __init__(self, bundle: package.Bundle, variant: Optional[str] = None, threads: int = 0) -> None:
        self.bundle = bundle
        best = open_best(bundle, read_device(), name=variant, threads=threads)
        self.variant, self.why, self.passed_over = best.choice.variant.name, best.choice.why, best.passed_over
        info, labels = best.choice.variant.info, read_labels(bundle)
        head = parse_head(info["head"], labels) if info.get("head") is not None else None
        super().__init__(best.session, head, labels, info.get("preprocessing"))

    def close(self) -> None:
        """End the session and remove the bundle's temporary files."""
        del self.session
        self.bundle.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_model(
    path: Union[str, Path], variant: Optional[str] = None, threads: int = 0, trust: Optional[Path] = None
) -> Model:
    """Check the hashes of the bundle at `path`, and its signature if keys are trusted. Then open the bundle.

    Args:
        variant: name of the variant to run; None uses the best one for this device.
        threads: threads inside an operator; 0 uses the number that suits the model.
        trust: path of trusted keys, one of which must have signed the bundle; see `--trust`.

    Raises:
        BundleError: the bundle is damaged, or has no variant for this device.
        RuntimeUnavailableError: onnxruntime is missing or refuses the model.
    """
    bundle = package.open_bundle(path)
    try:
        check_signature(bundle, find_trust(trust, required=False))
        return Model(bundle, variant, threads)
    # On Ctrl-C, too: the copy of the bundle would stay.
    except BaseException:
        bundle.close()
        raise


def read_labels(bundle: package.Bundle) -> Tuple[str, ...]:
    """Return the class names in a bundle's labels.txt, which has one name a line, or () if there is no such file."""
    record = bundle.files.get(LABELS)
    if record is None:
        return ()
    if record.size > _LONGEST:
        raise BundleError(f"{LABELS} has {record.size} bytes, more than {_LONGEST}")
    lines = (bundle.root / LABELS).read_bytes().decode("utf-8", errors="replace")
    # A line ends at a newline only: alphabets contain characters at which splitlines() would also split.
    names = [line[:-1] if line.endswith("\r") else line for line in lines.split("\n")]
    return tuple(names[:-1] if not names[-1] else names)[:_MOST_LABELS]


def _to_row(array: Any) -> Any:
    """Return an output as one row of scores, or None if it is not one row."""
    if isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.size > 1 and array.size == array.shape[-1]:
        return to_array(array).reshape(-1).astype(np.float64)
    return None


def _to_plain(array: Any, batch: int) -> Any:
    """Return the part of an output that belongs to the first of `batch` equal inputs. Floats that are narrower than
    float32, as some engines give them, become float32.
    """
    array = to_array(array)
    if batch > 1 and array.ndim and len(array) == batch:
        array = array[:1]
    return array.astype(np.float32) if array.dtype.kind in "fV" and array.dtype.itemsize < 4 else array
