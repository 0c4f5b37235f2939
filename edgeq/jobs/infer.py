"""Answer images with a model or a bundle on this machine, as a bundle answers on its device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeq_device.bundle.answering import ItemAnswer, answer_each, group_inputs, is_image, list_inputs, plan_drawings
from edgeq_device.bundle.outputs import check_replaceable, save_outputs
from edgeq_device.errors import DataError as UnreadableError
from edgeq_device.prepare.frame import Frame
from edgeq_device.prepare.inputs import read_feeds
from edgeq_device.prepare.steps import read_image
from edgeq_device.program import Predictor
from edgeq_device.program import open_model as open_bundle_model

from edgeq.data.classes import load_classes
from edgeq.data.images import find_frame
from edgeq.data.open_source import Data
from edgeq.data.preprocess import Preprocess, load_preprocess
from edgeq.data.sample import Sample
from edgeq.data.samples import SourceSamples, open_samples
from edgeq.describe.facts import Fact, ModelFacts
from edgeq.describe.read import list_exported, read_facts
from edgeq.errors import DataError, UsageError
from edgeq.measure.find_head import HeadChoice, find_head
from edgeq.measure.loaded_model import LoadedModel, is_bundle, open_model
from edgeq.measure.preprocess_search import open_or_search
from edgeq.run.engines import choose_engine
from edgeq.run.session import SessionSettings
from edgeq.util.device_errors import device_errors
from edgeq.util.display import SILENT, Progress
from edgeq.util.outputs import check_apart


@dataclass(frozen=True)
class InferenceRequest:
    """Hold what the user wants to know about some inputs.

    Attributes:
        model: a model file or a bundle.
        inputs: images, folders of images, .npz or .npy files, or NAME=X.npy. Several tensors are one input.
        preprocess, head, classes: for a model file: how images are prepared, what the outputs mean, and the names of
            the classes. None finds them.
        threshold: lowest score of an object or class; None uses the head's.
        draw: drawing to write: .png, .svg, or a folder for several images.
        raw: .npz for the outputs themselves; None for answers.
    """

    model: Path
    inputs: Sequence[str]
    preprocess: str | None = None
    head: str | None = None
    classes: Path | None = None
    threshold: float | None = None
    draw: Path | None = None
    raw: Path | None = None
    force: bool = False
    variant: str | None = None
    engine: str | None = None
    threads: int = 0


class Inference:
    """Answer the inputs of a request, one after the other.

    Attributes:
        predictor: the opened model.
        items: name of the input → what the predictor takes.
    """

    def __init__(
        self, request: InferenceRequest, predictor: Predictor, inputs: Sequence[str], drawings: Mapping[str, Path]
    ) -> None:
        self.request, self.predictor, self._drawings = request, predictor, drawings
        with device_errors():
            self.items = group_inputs(predictor.session, inputs)

    def answer(self) -> Iterator[ItemAnswer]:
        """Yield what the model says about each input, and write its drawing.

        Raises:
            DataError: the only input is unreadable, or the outputs do not fit the head.
            BundleError: nothing says what the outputs mean.
            OutputError: a drawing cannot be written.
        """
        request = self.request
        with device_errors():
            yield from answer_each(self.predictor, self.items, request.threshold, self._drawings, request.force)

    def write_outputs(self) -> dict[str, Any]:
        """Write the outputs of the only input to `raw`, and return their dtypes and shapes.

        Raises:
            UsageError: there are several inputs.
            OutputError: the file exists, or cannot be written.
        """
        request = self.request
        assert request.raw is not None
        if len(self.items) > 1:
            raise UsageError(f"there are {len(self.items)} inputs, but one file for the outputs", "Give one input")
        with device_errors():
            (item,) = self.items.values()
            outputs = self.predictor.run(item)
            save_outputs(request.raw, outputs, force=request.force)
        return {name: {"dtype": str(array.dtype), "shape": list(array.shape)} for name, array in outputs.items()}


@contextmanager
def open_inference(request: InferenceRequest, progress: Progress = SILENT) -> Iterator[Inference]:
    """Open the model of a request, and find how its images are prepared and what its outputs mean.

    Raises:
        UsageError: options contradict each other or the model, or inputs are images and tensors.
        ModelError, BundleError, RuntimeUnavailableError: the model does not open.
        DataError: an input is missing, or the preprocessing of images is unknown.
        OutputError: an output would replace an input.
    """
    if request.raw is not None and (request.draw is not None or request.threshold is not None):
        raise UsageError("⟨draw⟩ and ⟨threshold⟩ need answers, but ⟨raw⟩ writes tensors", "Leave ⟨raw⟩ out")
    for output in filter(None, (request.raw, request.draw)):
        check_apart(output, [request.model])
    # Outputs are checked before the model is opened and searched.
    with device_errors():
        inputs = list_inputs(request.inputs)
        folders = any(Path(text).is_dir() for text in request.inputs)
        drawings = plan_drawings(inputs, request.draw, lambda path: path, request.force, folders)
        if request.raw is not None:
            check_replaceable(request.raw, force=request.force)
    if is_bundle(request.model):
        own = {"⟨preprocess⟩": request.preprocess, "⟨head⟩": request.head, "⟨classes⟩": request.classes}
        ignored = next((name for name, value in {**own, "⟨engine⟩": request.engine}.items() if value is not None), None)
        if ignored is not None:
            raise UsageError(f"{request.model} is a bundle, whose variants bring their own", f"Leave {ignored} out")
        with device_errors():
            predictor = open_bundle_model(request.model, request.variant, request.threads)
        with predictor:
            yield Inference(request, predictor, inputs, drawings)
        return
    settings = SessionSettings(intra_op_threads=request.threads)
    if request.engine is not None:
        engine = choose_engine(request.engine)
        settings = replace(settings, engine=engine.engine, precision=engine.precision)
    with open_model(request.model, settings, variant=request.variant) as loaded:
        yield Inference(request, _find_predictor(loaded, inputs, request, progress), inputs, drawings)


class ModelPredictor(Predictor):
    """Run a model file, whose images edgeq prepares."""

    def __init__(self, loaded: LoadedModel, preprocess: Preprocess | None, **known: Any) -> None:
        super().__init__(loaded.session, **known)
        self._loaded, self._preprocess = loaded, preprocess

    def _prepare(self, x: Any) -> tuple[dict[str, Any], Frame | None]:
        source = Path(x) if isinstance(x, str | Path) else [x]
        data = Data(source, self._preprocess)
        try:
            sample = next(iter(open_samples(data, self._loaded.signature, model=self._loaded.path)))
        except DataError as error:
            # `answer_each` goes on with the next image after an error of the runner's kind.
            raise UnreadableError(error.problem, error.fix) from error
        contexts = sample.context.get("rows") or (sample.context,)
        return dict(sample.inputs), find_frame(contexts[0])


def _find_predictor(
    loaded: LoadedModel, inputs: Sequence[str], request: InferenceRequest, progress: Progress
) -> ModelPredictor:
    """Return a predictor for a model file, by what its files state and by its outputs for the first input."""
    facts = read_facts(list_exported(loaded.graph.metadata_props, loaded.signature, request.model))
    for note in facts.notes:
        progress.note(note)
    if request.classes is not None:
        facts = replace(facts, labels=Fact(load_classes(request.classes).names, str(request.classes)))
    choice = HeadChoice.parse(request.head) if request.head is not None else None
    preprocess, sample = _read_example(loaded, inputs, request, facts, progress)
    head = None
    if request.raw is None:
        head = find_head(loaded.session, loaded.signature, sample, facts, choice, progress)
        if head is None:
            raise UsageError(
                f"nothing says what the outputs of {request.model} mean",
                "Name the ⟨head⟩, or write the outputs themselves with ⟨raw⟩",
            )
    labels = facts.labels.value if facts.labels is not None else ()
    return ModelPredictor(loaded, preprocess, head=head, labels=labels)


def _read_example(
    loaded: LoadedModel, inputs: Sequence[str], request: InferenceRequest, facts: ModelFacts, progress: Progress
) -> tuple[Preprocess | None, Sample]:
    """Return the preprocessing of images, and the first input as a sample of the model."""
    images = list(filter(is_image, inputs))
    if not images:
        with device_errors():
            return None, Sample(", ".join(inputs), read_feeds(loaded.session, inputs))
    # An unreadable image gets its own error later, so the search for the head starts with a readable one.
    image = next(filter(_is_readable, images), images[0])
    stated = load_preprocess(facts.preprocess.value) if facts.preprocess is not None else None
    samples = open_or_search(
        Data(Path(image), request.preprocess),
        loaded.signature,
        session=lambda: loaded.session,
        fallback=stated,
        model=request.model,
        progress=progress,
    )
    sample = next(iter(samples))
    return samples.preprocess if isinstance(samples, SourceSamples) else None, sample


def _is_readable(image: str) -> bool:
    try:
        read_image(image)
    except UnreadableError:
        return False
    return True
