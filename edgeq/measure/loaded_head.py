"""Judge models by the answers of a model or bundle that is open."""

from __future__ import annotations

from pathlib import Path

from edgeq_device.answers.head import Head

from edgeq.data.samples import Samples
from edgeq.describe.read import list_exported, read_facts
from edgeq.errors import UsageError
from edgeq.measure.answer_task import FloatAnswers, answer_labels
from edgeq.measure.find_head import find_head
from edgeq.measure.inference import Session
from edgeq.measure.loaded_model import LoadedModel
from edgeq.util.display import SILENT, Progress


def judge_by_answers(
    loaded: LoadedModel,
    samples: Samples,
    *,
    reference: Session | None = None,
    path: Path | None = None,
    progress: Progress = SILENT,
) -> tuple[FloatAnswers | None, Samples]:
    """Return the task of giving a model's answers, and the samples with these answers as their labels. If the model's
    answers are not known or do not decide, return None and the samples.

    Args:
        loaded: the model, or another form of it with the same metadata and outputs.
        reference: session of the model that gives the answers; None uses `loaded`.
        path: file of that model; None uses the file of `loaded`. Files next to it may describe the model.
    """
    session = reference or loaded.session
    head = find_loaded_head(loaded, samples, reference=session, path=path, progress=progress)
    return answer_labels(samples, session, head, progress)


def find_loaded_head(
    loaded: LoadedModel,
    samples: Samples,
    *,
    reference: Session | None = None,
    path: Path | None = None,
    progress: Progress = SILENT,
) -> Head | None:
    """Return the head that a bundle records, or that a model's metadata, the files next to it and its outputs show. For
    the arguments, see `judge_by_answers`.
    """
    if loaded.variant is not None:
        return loaded.head
    try:
        facts = read_facts(list_exported(loaded.graph.metadata_props, loaded.signature, path or loaded.path))
        session = reference or loaded.session
        return find_head(session, loaded.signature, next(iter(samples)), facts, progress=progress)
    except UsageError as error:
        # A comparison of the outputs needs no head, so a contradiction does not end it.
        progress.note(f"the outputs are compared as tensors: {error.text}")
        return None
