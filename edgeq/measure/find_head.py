"""Find the head of a model: by what files state about it, confirmed by the shapes and values of its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgeq_device.answers.family import Family, Fit, View, all_families, family_names, load_family
from edgeq_device.answers.head import Head
from edgeq_device.errors import BundleError

from edgeq.data.axes import model_size
from edgeq.data.images import find_frame
from edgeq.data.sample import Sample, plain_label
from edgeq.describe.facts import ModelFacts
from edgeq.errors import UsageError, suggest
from edgeq.measure.inference import Session, infer
from edgeq.signature import Signature
from edgeq.util.display import SILENT, Progress

NONE = "none"
"""The choice of no head: the outputs themselves are measured."""


@dataclass(frozen=True)
class HeadChoice:
    """Hold the user's choice of a head.

    Attributes:
        family: name of the family, or `NONE`.
        parameters: parameters of the family that the user sets.
    """

    family: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> HeadChoice:
        """Return the choice in a text such as "yolov8" or "ctc:blank=last,layout=CT".

        Raises:
            UsageError: the family is unknown, or a parameter has another form.
        """
        name, _, settings = text.partition(":")
        parameters: dict[str, Any] = {}
        for setting in filter(None, settings.split(",")):
            key, equals, value = (part.strip() for part in setting.partition("="))
            if not equals or not key:
                raise UsageError(f"⟨head⟩ {text!r} has a parameter {setting!r}", "Write NAME:KEY=VALUE,KEY=VALUE")
            parameters[key] = plain_label(value)
        if name != NONE:
            _load(name)
        return cls(name, parameters)


def find_head(
    session: Session,
    signature: Signature,
    sample: Sample,
    facts: ModelFacts,
    choice: HeadChoice | None = None,
    progress: Progress = SILENT,
) -> Head | None:
    """Return the head of a float model, or None if its outputs have no known meaning.

    The user's choice comes first, then what files state, then the outputs themselves, if exactly one family fits them.

    Args:
        sample: a real sample, because values tell heads of the same shape apart.

    Raises:
        UsageError: the outputs do not fit the user's choice, or contradict what the files state.
    """
    if choice is not None and choice.family == NONE:
        return None
    view = make_view(session, signature, sample, facts)
    if choice is not None:
        family = _load(choice.family)
        stated_hints = {**view.hints, **choice.parameters}
        fit = family.fit(replace(view, forced=True, named=True, hints=stated_hints))
        if fit is None:
            raise UsageError(
                f"the outputs {_list_shapes(view)} do not fit the head {family.name}: {family.title}",
                "Choose another ⟨head⟩, or leave it out",
            )
        return make_head(family, fit, facts, {"family": "⟨head⟩"}, choice.parameters)
    fits = fit_families(view, facts)
    if not fits:
        facts, fits = _without_assumed_labels(view, facts)
    if not fits:
        _refuse_contradiction(view, facts)
    if len(fits) != 1:
        if fits:
            progress.note(f"the outputs fit the heads {', '.join(fits)}; ⟨head⟩ chooses one, and the bundle answers")
        return None
    ((family, fit),) = fits.values()
    stated = facts.families or facts.task
    shapes = f"the outputs {_list_shapes(view)}"
    origin = shapes if stated is None else f"{stated.source}, and {shapes}"
    head = make_head(family, fit, facts, {"family": origin})
    progress.note(f"found: head {family.name} ({family.task}), by {origin}; ⟨head⟩ sets another")
    if facts.labels is not None and not facts.labels.assumed:
        names = facts.labels.value
        some = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
        progress.note(f"found: {len(names)} names ({some}), by {facts.labels.source}; ⟨classes⟩ sets others")
    return head


def fit_families(
    view: View, facts: ModelFacts, families: Iterable[Family] | None = None
) -> dict[str, tuple[Family, Fit]]:
    """Return the families that the outputs fit and that the files allow, by name: the likeliest of the stated families,
    or those of the stated task.

    Args:
        families: the families to try; None tries all.
    """
    stated, task = facts.families, facts.task
    allowed = (
        family
        for family in (all_families() if families is None else families)
        if (stated is None or family.name in stated.value)
        and (stated is not None or task is None or family.task == task.value)
    )
    # A family that a file names, or whose task it names, needs less evidence.
    view = replace(view, named=stated is not None or task is not None)
    fits = {family.name: (family, fit) for family in allowed if (fit := family.fit(view)) is not None}
    if stated is not None and len(fits) > 1:
        best = next(name for name in stated.value if name in fits)
        return {best: fits[best]}
    return fits


def _without_assumed_labels(view: View, facts: ModelFacts) -> tuple[ModelFacts, dict[str, tuple[Family, Fit]]]:
    """Return the facts without labels that no file states, such as the names of folders, and the families that fit."""
    if facts.labels is None or not facts.labels.assumed:
        return facts, {}
    facts = replace(facts, labels=None)
    return facts, fit_families(replace(view, classes=None), facts)


def _refuse_contradiction(view: View, facts: ModelFacts) -> None:
    """Refuse outputs that do not fit what files state. Outputs of no family contradict nothing if no task is stated, or
    one that no family has.

    Raises:
        UsageError: the message names what the file states, the shapes, and what would fit.
    """
    shapes, labels = f"the model's outputs {_list_shapes(view)}", facts.labels
    unlabelled = fit_families(replace(view, classes=None), facts) if labels is not None else {}
    if labels is not None and unlabelled:
        counts = _fitting_counts(view, facts)
        fitting = f", which fit {' or '.join(map(str, counts))} classes" if counts else ""
        raise UsageError(
            f"{labels.source} has {len(labels.value)} classes, which the head {' or '.join(unlabelled)} does not find "
            f"in {shapes}{fitting}",
            "Give the right names with ⟨classes⟩, or choose the ⟨head⟩",
        )
    stated = facts.families or facts.task
    if stated is None or (facts.task is not None and facts.task.value not in {f.task for f in all_families()}):
        return
    value = stated.value if isinstance(stated.value, str) else " or ".join(stated.value)
    others = fit_families(view, replace(facts, families=None, task=None))
    advice = f"⟨head⟩ {next(iter(others))} fits them" if len(others) == 1 else "Choose the ⟨head⟩ that fits"
    raise UsageError(
        f"{stated.source} ({value}) does not fit {shapes}",
        f"{advice}, and ⟨head⟩ none measures the outputs themselves",
    )


# Columns of a row besides the class scores: none, a background, boxes, boxes and objectness, coefficients of masks.
_FURTHER_COLUMNS = (0, 1, 4, 5, 6, 36, 37)


def _fitting_counts(view: View, facts: ModelFacts) -> list[int]:
    """Return the numbers of classes with which a family fits, at most three."""
    sides = {side for array in view.outputs.values() for side in array.shape}
    counts = sorted({side - further for side in sides for further in _FURTHER_COLUMNS if side > further})
    return [count for count in counts if fit_families(replace(view, classes=count), facts)][:3]


def make_view(session: Session, signature: Signature, sample: Sample, facts: ModelFacts) -> View:
    """Return what is known about a model: its outputs for one sample, its input's size, and the stated facts."""
    # A model for several images at a time is judged by its first one, as the runner answers with it.
    contexts = sample.context.get("rows") or (sample.context,)
    frame = find_frame(contexts[0])
    spec = signature.inputs[0]
    rows = spec.shape[0] if spec.shape and isinstance(spec.shape[0], int) else 1
    outputs = infer(session, sample)
    sizes = (size for spec in signature.inputs if (size := model_size(spec)) is not None)
    size = frame.size if frame is not None else next(sizes, (0, 0))
    return View(
        outputs={name: array[:1] if rows > 1 and len(array) == rows else array for name, array in outputs.items()},
        size=size,
        classes=len(facts.labels.value) if facts.labels is not None else None,
        keypoints=facts.keypoints.value if facts.keypoints is not None else None,
        hints=facts.hints.value if facts.hints is not None else {},
        labels=facts.labels.value if facts.labels is not None else (),
        inputs=sample.inputs,
    )


def make_head(
    family: Family, fit: Fit, facts: ModelFacts, source: Mapping[str, str], parameters: Mapping[str, Any] | None = None
) -> Head:
    """Return the head for a family that fits, with what files state about labels and thresholds."""
    stated = {"labels": facts.labels, "keypoint_names": facts.keypoint_names, "thresholds": facts.thresholds}
    hints = dict(facts.hints.value) if facts.hints is not None else {}
    return Head(
        family=family.name,
        outputs=dict(fit.outputs),
        parameters={**fit.parameters, **hints, **(parameters or {})},
        thresholds={**family.thresholds, **(facts.thresholds.value if facts.thresholds is not None else {})},
        labels=facts.labels.value if facts.labels is not None else (),
        keypoint_names=facts.keypoint_names.value if facts.keypoint_names is not None else (),
        source={**source, **{name: fact.source for name, fact in stated.items() if fact is not None}},
    )


def _load(name: str) -> Family:
    try:
        return load_family(name)
    except BundleError:
        raise UsageError(f"unknown head {name!r}", suggest(name, family_names())) from None


def _list_shapes(view: View) -> str:
    return ", ".join(f"{name} {list(array.shape)}" for name, array in view.outputs.items())
