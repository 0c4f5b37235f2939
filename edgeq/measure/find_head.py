"""Find the head of a model: by what files state about it, confirmed by the shapes and values of its outputs."""

from __future__ import annotations

from collections.abc import Mapping
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
        fit = family.fit(replace(view, named=True, hints={**view.hints, **choice.parameters}))
        if fit is None:
            raise UsageError(
                f"the outputs {_list_shapes(view)} do not fit the head {family.name}: {family.title}",
                "Choose another ⟨head⟩, or leave it out",
            )
        return make_head(family, fit, facts, {"family": "⟨head⟩"}, choice.parameters)
    stated_names = facts.families.value if facts.families is not None else ()
    task = facts.task.value if facts.task is not None else None
    fits = {}
    for family in all_families():
        fit = family.fit(replace(view, named=family.name in stated_names or family.task == task))
        if fit is not None:
            fits[family.name] = (family, fit)
    if facts.families is not None:
        stated = [name for name in stated_names if name in fits]
        if not stated and facts.families.value:
            raise _contradiction(view, f"{facts.families.source} ({' or '.join(facts.families.value)})")
        fits = {name: fits[name] for name in stated[:1]}
        origin = facts.families.source
    elif facts.task is not None:
        fits = {name: pair for name, pair in fits.items() if pair[0].task == facts.task.value}
        if not fits:
            raise _contradiction(view, facts.task.source)
        origin = f"{facts.task.source}, and the outputs {_list_shapes(view)}"
    else:
        origin = f"the outputs {_list_shapes(view)}"
    if len(fits) != 1:
        if fits:
            progress.note(f"the outputs fit the heads {', '.join(fits)}; ⟨head⟩ chooses one, and the bundle answers")
        return None
    ((family, fit),) = fits.values()
    head = make_head(family, fit, facts, {"family": origin})
    progress.note(f"found: head {family.name}, by {origin}; ⟨head⟩ sets another")
    return head


def make_view(session: Session, signature: Signature, sample: Sample, facts: ModelFacts) -> View:
    """Return what is known about a model: its outputs for one sample, its input's size, and the stated facts."""
    frame = find_frame(sample.context)
    spec = signature.inputs[0]
    size = frame.size if frame is not None else model_size(spec) or (0, 0)
    return View(
        outputs=infer(session, sample),
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


def _contradiction(view: View, source: str) -> UsageError:
    return UsageError(
        f"{source} does not fit the model's outputs {_list_shapes(view)}",
        "Choose the ⟨head⟩ that fits, or ⟨head⟩ none to measure the outputs themselves",
    )
