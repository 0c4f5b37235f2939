"""Settle what a task leaves open by what the float model makes of a few samples: a class offset, a detector's head."""

from __future__ import annotations

from collections.abc import Iterator

from edgeq.data.classes import score_count
from edgeq.data.samples import Sample, Samples, SourceSamples, spread_over
from edgeq.measure.agreement import Outputs, Session, infer
from edgeq.measure.comparison import rows
from edgeq.measure.task import Task
from edgeq.util.display import SILENT, Progress

_FEW = 64


def settle(task: Task, session: Session, samples: Samples, *, progress: Progress = SILENT) -> Task:
    """Return the task with everything that it left open chosen, by some samples; a note says what was found.

    Args:
        task: with `settled(pairs)`, which returns the task and what it found, or "", of samples with the outputs for
            each; any other is returned as it is.
        session: the float model.
        samples: labelled; those that are looked at are spread over all.
    """
    if not hasattr(task, "settled"):
        return task

    def pairs() -> Iterator[tuple[Sample, Outputs]]:
        """Yield rows with the model's outputs, after the first the last ones: data are often sorted by class."""
        few = list(spread_over(samples, _FEW))
        for sample in (few[0], *reversed(few[1:])):
            for row, made in rows(sample, {"": infer(session, sample)}):
                yield row, made[""]

    if isinstance(samples, SourceSamples):
        for note in unfit_folders(samples):
            progress.note(note)
    chosen, found = task.settled(pairs())
    if found:
        progress.note(f"found: {found}")
    done: Task = chosen
    return done


def unfit_folders(samples: SourceSamples) -> tuple[str, ...]:
    """Return a warning where class folders are numbered by nothing but their order, and are not as many as the model's
    classes."""
    scores, folders = score_count(samples.signature), samples.opened.sorted_classes
    if scores is None or not folders or samples.labels is not None or scores in (folders, folders + 1):
        return ()
    return (
        f"{samples.source}: {folders} class folders are numbered in sorted order, and the model has {scores} scores: "
        "`--classes FILE` says which is which (one name per line in the order of the scores, or JSON)",
    )
