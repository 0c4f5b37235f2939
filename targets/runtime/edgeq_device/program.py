"""Use the model of a bundle in a Python program: `edgeq_run.open_bundle("dist").run(x)`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import numpy as np

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.decode import decode
from edgeq_device.answers.head import parse_head
from edgeq_device.answers.recording import run_recording, runs_over_recordings
from edgeq_device.bundle import package
from edgeq_device.bundle.opening import open_best
from edgeq_device.bundle.signature import check_signature
from edgeq_device.engines.device import read_device
from edgeq_device.engines.runtime import infer
from edgeq_device.errors import BundleError, DataError
from edgeq_device.model.tensors import DTYPES
from edgeq_device.prepare.arrays import to_array
from edgeq_device.prepare.frame import Frame
from edgeq_device.prepare.inputs import check_feeds
from edgeq_device.prepare.steps import Prepare
from edgeq_device.trust.keys import find_trust

LABELS = "labels.txt"
# labels.txt is untrusted; no data set has as many classes.
_MOST_LABELS, _LONGEST = 1_000_000, 1 << 24


class Model:
    """Hold the best variant of a bundle for this device, ready to run. Close the model, or use `with`.

    Attributes:
        bundle: the opened bundle, whose hashes have been checked.
        variant, why: name of the variant that runs, and the reason for the choice.
        session: session that runs the variant, with the interface of an `onnxruntime.InferenceSession`.
        inputs, outputs: names of inputs and outputs, in the model's order.
        labels: names of the classes; empty if the bundle contains none.
        head: how the outputs become answers; None if the bundle does not know their meaning.
    """

    def __init__(self, bundle: package.Bundle, variant: Optional[str] = None, threads: int = 0) -> None:
        self.bundle = bundle
        best = open_best(bundle, read_device(), name=variant, threads=threads)
        self.variant, self.why, self.session = best.choice.variant.name, best.choice.why, best.session
        self._specs = {spec.name: spec for spec in self.session.get_inputs()}
        self.inputs = tuple(self._specs)
        self.outputs = tuple(spec.name for spec in self.session.get_outputs())
        self.labels = read_labels(bundle)
        info = best.choice.variant.info
        self._record = info.get("preprocessing")
        self.head = parse_head(info["head"], self.labels) if info.get("head") is not None else None

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

    def answer(self, x: Any, thresholds: Optional[Mapping[str, float]] = None) -> Answer:
        """Run the model and return its answer: boxes, masks, keypoints, text or classes; see `Answer`.

        Args:
            x: data for one run, as for `run`. Positions are in pixels of the image, if `x` is an image. A model that
                runs over recordings also takes a .wav file, or samples [n] at its rate.
            thresholds: threshold → number, instead of the head's; "confidence" is the lowest score of an object.

        Raises:
            DataError: `x` does not fit the model, or the outputs do not fit the head.
            BundleError: the bundle has no head, or this runner does not know its family.
        """
        if self.head is None:
            raise BundleError("the bundle does not say what its outputs mean", "Use run(x), or package with --head")
        head = replace(self.head, thresholds={**self.head.thresholds, **(thresholds or {})})
        if runs_over_recordings(head) and not isinstance(x, Mapping):
            return decode(run_recording(self.session, partial(infer, self.session), head, x), head)
        feeds, frame = (dict(x), None) if isinstance(x, Mapping) else self._build_feeds(x)
        check_feeds(self.session, feeds)
        return decode(infer(self.session, feeds), head, frame)

    def prepare(self, x: Any) -> Dict[str, Any]:
        """Return the inputs that `run` would pass to the model for an image or raw array."""
        return self._prepare(x)[0]

    def _prepare(self, x: Any) -> Tuple[Dict[str, Any], Optional[Frame]]:
        if not isinstance(self._record, Mapping):
            raise BundleError("the bundle does not record how its inputs are prepared", "Give tensors by input name")
        source = self._record.get("source")
        named = source.get("input") if isinstance(source, Mapping) else None
        name = str(named) if named in self._specs else self.inputs[0]
        if len(self.inputs) > 1:
            raise DataError(
                f"the model has several inputs: {', '.join(self.inputs)}", "Give a mapping of all inputs by name"
            )
        spec = self._specs[name]
        array, frame = Prepare(self._record, spec.shape).prepare(x)
        dtype = DTYPES.get(spec.type)
        return {name: array if dtype is None else array.astype(dtype, copy=False)}, frame

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
