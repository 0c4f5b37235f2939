"""Make the open choices of a task (class offset, detector head), based on the float model's outputs for a few
samples, and refuse labels that the float model predicts no better than chance.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgeq.data.array_store import ArrayStore
from edgeq.data.classes import count_scores
from edgeq.data.samples import Sample, Samples, SourceSamples, spread_places
from edgeq.errors import CheckFailedError
from edgeq.measure.inference import Outputs, Session, infer_once
from edgeq.measure.rows import split_rows
from edgeq.measure.skill import find_doubts, read_skill
from edgeq.measure.task import Task
from edgeq.util.display import SILENT, Progress

# Enough rows of several classes to recognise a class offset or a head.
_FEW = 64
_ROUNDS = (16, 64, 256, 1024)
"""Number of samples in each round of `check_skill`. Most models are certainly better than chance after the first."""


def settle(
    task: Task,
    session: Session,
    samples: Samples,
    *,
    known_outputs: ArrayStore | None = None,
    progress: Progress = SILENT,
) -> Task:
    """Return the task with all its open choices made, based on some samples. A note on `progress` names the choices.

    Args:
        task: a task. If it has a method `settled(pairs)`, the method is called with samples and their outputs. It
            returns the settled task and a text about the choice ("" for none). A task without the method is returned
            unchanged.
        session: session of the float model.
        samples: labelled samples; those that are used are spread over all of them.
        known_outputs: the session's outputs by the sample's place. What is missing is computed and added.
    """
    if not hasattr(task, "settled"):
        return task

    def pairs() -> Iterator[tuple[Sample, Outputs]]:
        """Yield rows with the model's outputs. After the first sample, the order is reversed, because data are often
        sorted by class.
        """
        subset = list(spread_places(samples, _FEW))
        for place, sample in (subset[0], *reversed(subset[1:])):
            for row, row_outputs in split_rows(sample, {"": infer_once(session, sample, known_outputs, place)}):
                yield row, row_outputs[""]

    if isinstance(samples, SourceSamples):
        for note in check_folders(samples):
            progress.note(note)
    settled_task: Task
    settled_task, choice = task.settled(pairs())
    if choice:
        progress.note(f"found: {choice}")
    return settled_task


def check_skill(
    task: Task,
    session: Session,
    samples: Samples,
    *,
    known_outputs: ArrayStore | None = None,
    progress: Progress = SILENT,
) -> None:
    """Check that the float model is better than chance. Otherwise, the loss of a quantized model means nothing.

    Samples are added until the model is certainly better. A task whose meters have no method `skill` is not checked.

    Args:
        task: a settled task.
        session: session of the float model.
        samples: labelled samples; those that are used are spread over all of them.
        known_outputs: the session's outputs by the sample's place. What is missing is computed and added.

    Raises:
        CheckFailedError: the float model is certainly no better than chance. On few samples, this is never certain.
        DataError: the labels do not fit the task.
    """
    for count in _ROUNDS:
        meter = task.start()
        if not hasattr(meter, "skill"):
            return
        with progress.stage("Checking the labels", min(count, len(samples))) as advance:
            for place, sample in spread_places(samples, count):
                for row, outputs in split_rows(sample, {"": infer_once(session, sample, known_outputs, place)}):
                    meter.update(outputs[""], row)
                advance(1)
        skill = read_skill(meter)
        if skill is None or skill.better:
            return
        # The first samples may be hard ones, so only the last round refuses.
        if skill.missing and (count >= len(samples) or count == _ROUNDS[-1]):
            problem = f"the labels cannot judge the model: in float32, {find_doubts(meter)[0]}"
            fix = (
                "`edgeq eval` measures the float model alone; for a comparison with float32 only, leave out the labels"
            )
            raise CheckFailedError(problem, fix)
        if count >= len(samples):
            return


def check_folders(samples: SourceSamples) -> tuple[str, ...]:
    """Return a warning if class numbers are only the positions of the class folders, and the number of folders differs
    from the model's number of classes.
    """
    scores, folders = count_scores(samples.signature), samples.opened_source.sorted_classes
    # One score more than folders is a class for the background.
    if scores is None or not folders or samples.labels is not None or scores in (folders, folders + 1):
        return ()
    return (
        f"{samples.source}: {folders} class folders are numbered in sorted order, but the model has {scores} scores: "
        "`⟨classes⟩ FILE` names the scores (one name per line in the order of the scores, or JSON)",
    )
