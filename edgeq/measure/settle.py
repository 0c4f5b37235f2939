"""Make the open choices of a task (class offset, detector head), based on the float model's outputs for a few
samples.
"""

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
    """Return the task with all its open choices made, based on some samples. A note on `progress` names the choices.

    Args:
        task: a task. If it has a method `settled(pairs)`, the method is called with samples and their outputs. It
            returns the settled task and a text about the choice ("" for none). A task without the method is returned
            unchanged.
        session: session of the float model.
        samples: labelled samples; those that are used are spread over all of them.
    """
    if not hasattr(task, "settled"):
        return task

    def pairs() -> Iterator[tuple[Sample, Outputs]]:
        """Yield rows with the model's outputs. After the first sample, the order is reversed, because data are often
        sorted by class.
        """
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
    """Return a warning if class numbers are only the positions of the class folders, and the number of folders differs
    from the model's number of classes.
    """
    scores, folders = score_count(samples.signature), samples.opened.sorted_classes
    if scores is None or not folders or samples.labels is not None or scores in (folders, folders + 1):
        return ()
    return (
        f"{samples.source}: {folders} class folders are numbered in sorted order, but the model has {scores} scores: "
        "`--classes FILE` names the scores (one name per line in the order of the scores, or JSON)",
    )
