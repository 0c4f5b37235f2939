"""Implement `edgeq gate`: make a CI job fail if a model or bundle is worse than a baseline by more than the limits
allow.

The baseline is a model or a bundle, never a file of figures. edgeq measures both now, interleaved, on one machine. So
it never compares latencies from different machines or different days.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from edgeq_device.system.relay import escape

from edgeq.arguments import as_options
from edgeq.bundle.write import BUNDLE, check_archive
from edgeq.errors import InconclusiveError, UsageError, WorseError
from edgeq.measure.answer_meter import HEALTHY
from edgeq.measure.answer_task import FloatAnswers
from edgeq.measure.loaded_model import is_bundle
from edgeq.model.files import model_files
from edgeq.model.load import read_model, save_model
from edgeq.reporting.compare import (
    HELD,
    MISSED,
    UNSETTLED,
    ComparePlace,
    CompareRequest,
    Comparison,
    LimitCheck,
    LossLimits,
    check_limits,
    run_comparison,
)
from edgeq.util.display import SILENT, Displayed, Progress
from edgeq.util.outputs import check_apart, check_free, check_outside, output_directory, output_file
from edgeq.util.record_files import read_toml
from edgeq.util.records import computed

# One repeat, of twice the length. A CI job that is still unsettled then ends as inconclusive instead of taking longer.
_ATTEMPTS = 2
# With twelve pairs, the 95 % interval leaves out two pairs at each end, so one unusual session does not widen the
# interval.
_SESSIONS = 12
_MARKS = {HELD: "✅", MISSED: "❌", UNSETTLED: "❔"}
_TITLES = {HELD: "passed", MISSED: "failed", UNSETTLED: "inconclusive"}


@dataclass(frozen=True)
class GateLimits:
    """Define `gate.toml`: how much worse than the baseline a model may be.

    Attributes:
        max_slowdown: the share by which the median latency may increase; 0.05 is 5 %.
        max_drop: the accuracy that may be lost, in the unit of the task's primary metric (0.01 is one point). None
            means 0.01 if a task is given.
        max_growth: the share by which the model's size in bytes may increase.
        max_memory_growth: the share by which the model's peak memory may increase.
        inconclusive: "fail" or "pass". This is the result if the machine was too busy to settle the limit on latency.
    """

    max_slowdown: float = 0.05
    max_drop: float | None = None
    max_growth: float = 0.05
    max_memory_growth: float = 0.1
    inconclusive: Literal["fail", "pass"] = "fail"

    def __post_init__(self) -> None:
        for name in ("max_slowdown", "max_drop", "max_growth", "max_memory_growth"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 100:
                raise UsageError(f"{name} is {value:g}", "Give a share of 0 or more, such as 0.05 for 5 %")

    def limits(self, *, task: bool) -> LossLimits:
        """Return the limits as `Limits` for a comparison. Accuracy has a limit only if a task measures it.

        Raises:
            UsageError: `max_drop` is set but there is no task.
        """
        if self.max_drop is not None and not task:
            raise UsageError("max_drop needs a task", "Give ⟨task⟩, and labelled samples as ⟨data⟩")
        # A gate with labels has a limit on accuracy even if nobody set one.
        drop = (0.01 if self.max_drop is None else self.max_drop) if task else None
        return LossLimits(drop, 1 / (1 + self.max_slowdown), self.max_growth, self.max_memory_growth)


def read_limits(path: Path) -> GateLimits:
    """Read limits from a TOML file.

    Raises:
        UsageError: the file is not TOML, or it has an unknown key or a wrong value.
    """
    return read_toml(path, GateLimits, UsageError, "See docs/gate.md")


@dataclass(frozen=True)
class Gated(Displayed):
    """Report the result of a gate.

    Attributes:
        model, baseline: the paths as given.
        comparison: the comparison between the model (B) and the baseline (A); None if there was no baseline yet.
        checks: the outcome of each limit.
        updated: True if the model was written as the new baseline.
        on: the board on which both ran, or None for this machine.
    """

    model: Path
    baseline: Path
    limits: GateLimits
    comparison: Comparison | None
    checks: tuple[LimitCheck, ...]
    updated: bool = False
    on: str | None = None

    @computed
    def outcome(self) -> str:
        """Return "passed", "failed" or "inconclusive"."""
        outcomes = {check.outcome for check in self.checks}
        return _TITLES[next((outcome for outcome in (MISSED, UNSETTLED) if outcome in outcomes), HELD)]

    def check(self) -> None:
        """Raise WorseError if a limit is missed. Raise InconclusiveError if a limit is not settled and
        `limits.inconclusive` is "fail". If the baseline was updated, neither is raised.
        """
        # With a new baseline, the user has accepted the result.
        if self.updated:
            return
        sentences = {kind: [c.sentence for c in self.checks if c.outcome == kind] for kind in (MISSED, UNSETTLED)}
        if sentences[MISSED]:
            raise WorseError("; ".join(sentences[MISSED]), "Accept it with ⟨update=True⟩, or correct the model")
        if sentences[UNSETTLED] and self.limits.inconclusive == "fail":
            raise InconclusiveError("; ".join(sentences[UNSETTLED]), "Run it on a quiet machine, or see docs/gate.md")

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of a table with the columns: figure, baseline, model, model against baseline."""
        return [tuple(row) for row in self.comparison.rows()] if self.comparison is not None else []


def gate(
    request: CompareRequest,
    limits: GateLimits,
    *,
    update: bool = False,
    place: ComparePlace | None = None,
    progress: Progress = SILENT,
) -> Gated:
    """Measure `request.b` against the baseline `request.a`.

    If the limit on latency is not settled, both models are timed once more, for twice as long.

    Args:
        request: the two models and how to compare them. The argument `limits` replaces the limits in the request.
        update: True to make the model the new baseline afterwards, whatever the result. If there is no baseline yet,
            nothing is measured.
        place: the place where both run, or None for this machine.

    Raises:
        UsageError: there is no baseline and `update` is not set, or an option has a wrong value.
        OutputError: the baseline's path contains something that is not a model or bundle.
        EdgeqError: there is an error in a model, a bundle or the data.
    """
    baseline, model = request.a, request.b
    comparison: Comparison | None = None
    checks: tuple[LimitCheck, ...] = ()
    if baseline.exists():
        comparison = run_comparison(
            replace(
                request,
                limits=limits.limits(
                    # Samples without labels have the answers of the baseline, if these are known.
                    task=request.task is not None or (limits.max_drop is not None and request.data is not None)
                ),
                attempts=_ATTEMPTS,
                sessions=_SESSIONS,
            ),
            place=place,
            progress=progress,
        )
        comparison = _limit_answers(comparison)
        checks = check_limits(comparison, "the baseline", "the model")
    # A gate without a baseline would let everything pass.
    elif not update:
        raise UsageError(f"there is no baseline at {baseline}", "Write it once with ⟨update=True⟩, and keep it")
    if update:
        write_baseline(model, baseline)
    return Gated(model, baseline, limits, comparison, checks, update, place.name if place is not None else None)


def _limit_answers(comparison: Comparison) -> Comparison:
    """Return the comparison with a limit on the lost answers, if it compares answers and nobody has set a limit."""
    accuracy, limits = comparison.a.accuracy, comparison.limits
    if accuracy is None or accuracy.task != FloatAnswers.name or limits.max_drop is not None:
        return comparison
    return replace(comparison, limits=replace(limits, max_drop=1 - HEALTHY[accuracy.primary]))


def check_junit(junit: Path, request: CompareRequest, limits: Path | None, *, force: bool) -> None:
    """Refuse a path for the JUnit XML file that already exists, is an input of the gate, or is inside such an input.

    Raises:
        OutputError: the path is refused.
        ModelError: a model cannot be read.
    """
    check_free(junit, force=force, kind="file")
    inputs = list(_read_paths(request))
    check_apart(junit, [*inputs, *([limits] if limits is not None else [])])
    check_outside(junit, inputs)


def _read_paths(request: CompareRequest) -> Iterator[Path]:
    """Yield the files and folders that the gate reads. Text that is not a path (a preprocessing, a pattern) is left
    out.
    """
    for model in (request.a, request.b):
        if model.exists():
            yield from (model,) if is_bundle(model) else model_files(model)
    for value in (request.data, request.labels, request.preprocess, request.options.annotations):
        if isinstance(value, (str, Path)) and os.access(value, os.F_OK):
            yield Path(value)


def write_baseline(model: Path, baseline: Path) -> None:
    """Copy a model with its external data, or a bundle, to `baseline`, and replace an earlier baseline. If external
    data are in subfolders, they are moved into the model's file or, if they are large, next to it.

    Raises:
        OutputError: the path contains something that is not a model or bundle.
    """
    check_apart(baseline, [model])
    if model.is_dir():
        with output_directory(baseline, force=True, check=BUNDLE.check) as draft:
            # Python leaves caches in a bundle whose runner was used. They do not belong to it.
            shutil.copytree(model, draft, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        return
    if is_bundle(model):
        check_archive(baseline)
    files = (model,) if is_bundle(model) else model_files(model)
    with output_file(baseline, force=True) as draft:
        if any(file.parent != model.parent for file in files):  # an output consists of a file and the files next to it
            save_model(read_model(model), draft)
            return
        for file in files:
            shutil.copyfile(file, draft if file == model else draft.with_name(file.name))


def markdown(gated: Gated) -> str:
    """Return the result as Markdown for the summary of a CI job. It consists of a table of measurements, a table of
    limits, and a sentence for each limit that does not hold.
    """
    place = f", on {gated.on}" if gated.on else ""
    lines = [f"### edgeq gate: {gated.outcome}", "", f"`{gated.model}` against `{gated.baseline}`{place}"]
    if gated.comparison is None:
        return "\n".join([*lines[:2], f"`{gated.model}` is the new baseline, `{gated.baseline}`.", ""])
    lines += ["", *_table(("", "baseline", "model", "model against baseline"), gated.rows()), ""]
    limits = [(check.what, check.text, f"{_MARKS[check.outcome]} {_TITLES[check.outcome]}") for check in gated.checks]
    lines += [*_table(("", "limit", ""), limits), ""]
    notes = (*(check.sentence for check in gated.checks if check.sentence), *gated.comparison.notes)
    lines += [f"- {_cell(as_options(note))}" for note in notes]
    if gated.updated:
        lines += ["", "The model is the new baseline."]
    return "\n".join(lines) + "\n"


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(map(_cell, row))} |" for row in (heads, ("---",) * len(heads), *rows)]


def _cell(text: str) -> str:
    # A name from a model must neither end the cell nor start markup.
    return escape(text.replace("\n", " ")).replace("|", "\\|").replace("<", "&lt;")


def junit(gated: Gated) -> bytes:
    """Return the result as JUnit XML, with a test case for each limit. A limit that could not be settled counts as
    skipped.
    """
    cases = {outcome: [c for c in gated.checks if c.outcome == outcome] for outcome in (HELD, MISSED, UNSETTLED)}
    failed, skipped = len(cases[MISSED]), len(cases[UNSETTLED])
    totals: Mapping[str, int] = {"tests": len(gated.checks), "failures": failed, "skipped": skipped, "errors": 0}
    name = f"edgeq gate{f' on {gated.on}' if gated.on else ''}"
    suite = ElementTree.Element("testsuite", {"name": escape(name), **{key: str(n) for key, n in totals.items()}})
    for check in gated.checks:
        # XML has no form for control characters, so they are written as escapes.
        sentence, class_name = escape(as_options(check.sentence)), {"classname": escape(f"edgeq.gate.{gated.model}")}
        case = ElementTree.SubElement(suite, "testcase", {**class_name, "name": escape(check.what)})
        if check.outcome == MISSED:
            ElementTree.SubElement(case, "failure", {"type": _TITLES[check.outcome], "message": sentence})
        elif check.outcome == UNSETTLED:
            ElementTree.SubElement(case, "skipped", {"message": sentence})
    xml: bytes = ElementTree.tostring(suite, "utf-8", xml_declaration=True)
    return xml
