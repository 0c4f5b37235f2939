"""Find the head of a model or bundle that is open."""

from __future__ import annotations

from edgeq_device.answers.head import Head

from edgeq.data.samples import Samples
from edgeq.describe.read import read_facts
from edgeq.measure.answer_task import FloatAnswers, judges_answers, label_with_answers
from edgeq.measure.find_head import HeadChoice, find_head
from edgeq.measure.loaded_model import LoadedModel
from edgeq.measure.task import Task
from edgeq.util.display import SILENT, Progress


def find_loaded_head(
    loaded: LoadedModel, samples: Samples, choice: HeadChoice | None = None, progress: Progress = SILENT
) -> Head | None:
    """Return the head that a bundle records, or that a model's metadata, the files next to it and its outputs show.

    Raises:
        UsageError: the outputs contradict what the files state.
    """
    if loaded.variant is not None:
        return loaded.head
    facts = read_facts(loaded.graph.metadata_props, loaded.path)
    return find_head(loaded.session, loaded.signature, next(iter(samples)), facts, choice, progress)


def judge_by_answers(
    loaded: LoadedModel, samples: Samples, choice: HeadChoice | None = None, progress: Progress = SILENT
) -> tuple[Task | None, Samples]:
    """Return the task of giving the answers of `loaded`, and the samples with these answers as their labels. If the
    model's answers are not known or do not decide, return None and the samples.
    """
    head = find_loaded_head(loaded, samples, choice, progress)
    if head is None or not judges_answers(head):
        return None, samples
    return FloatAnswers(head), label_with_answers(samples, loaded.session, head, progress)
