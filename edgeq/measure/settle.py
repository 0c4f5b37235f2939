"""Make the open choices of a task (class offset, detector head), based on the float model's outputs for a few
samples, and refuse labels that the float model predicts no better than chance.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgeq.data.classes import count_scores
from edgeq.data.samples import Sample, Samples, SourceSamples, spread_over
from edgeq.errors import CheckFailedError
from edgeq.measure.agreement import Outputs, Session, infer
from edgeq.measure.comparison import rows
from edgeq.measure.task import Task, doubts, skill_of
from edgeq.util.display import SILENT, Progress

_FEW = 64
_ROUNDS = (16, 64, 256, 1024)
"""Number of samples in each round of `check_skill`. Most models are certainly better than chance after the first."""


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


def check_skill(task: Task, session: Session, samples: Samples, *, progress: Progress = SILENT) -> None:
    """Check that the float model is better than chance. Otherwise, the loss of a quantized model means nothing.

    Samples are added until the model is certainly better. A task whose meters have no method `skill` is not checked.

    Args:
        task: a settled task.
        session: session of the float model.
        samples: labelled samples; those that are used are spread over all of them.

    Raises:
        CheckFailedError: the float model is certainly no better than chance. On few samples, this is never certain.
        DataError: the labels do not fit the task.
    """
    for count in _ROUNDS:
        meter = task.start()
        if not hasattr(meter, "skill"):
            return
        with progress.stage("Checking the labels", min(count, len(samples))) as advance:
            for sample in spread_over(samples, count):
                for row, outputs in rows(sample, {"": infer(session, sample)}):
                    meter.update(outputs[""], row)
                advance(1)
        skill = skill_of(meter)
        if skill is None or skill.better:
            return
        if skill.missing and (count >= len(samples) or count == _ROUNDS[-1]):
            problem = f"the labels cannot judge the model: in float32, {doubts(meter)[0]}"
            fix = (
                "`edgeq eval` measures the float model alone; for a comparison with float32 only, leave out the labels"
            )
            raise CheckFailedError(problem, fix)
        if count >= len(samples):
            return


def unfit_folders(samples: SourceSamples) -> tuple[str, ...]:
    """Return a warning if class numbers are only the positions of the class folders, and the number of folders differs
    from the model's number of classes.
    """
    scores, folders = count_scores(samples.signature), samples.opened_source.sorted_classes
    if scores is None or not folders or samples.labels is not None or scores in (folders, folders + 1):
        return ()
    return (
        f"{samples.source}: {folders} class folders are numbered in sorted order, but the model has {scores} scores: "
        "`--classes FILE` names the scores (one name per line in the order of the scores, or JSON)",
    )
