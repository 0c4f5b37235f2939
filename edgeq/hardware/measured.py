"""Read the reports of boards that `edgeq device report` wrote: what ran on which board, and how fast.

A report contains only figures, versions and names of hardware. It says nothing about the board's owner, so it can be
published. Reports may come from anybody, so every value is limited.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

from edgeq_device.bundle.package import FLOAT
from edgeq_device.measure.claim import Claim
from msgspec import Meta

from edgeq.errors import HardwareError
from edgeq.hardware.profile import default_folders
from edgeq.util.record_files import is_longer, read_json
from edgeq.util.records import Amount, Count

FOLDER = "measured"
"""Folder of reports, next to the files of targets."""
SCHEMA: Final = "edgeq.board-report/1"
_LARGEST, _MOST = 1 << 16, 64
# A slash would let a path through, and other characters have a meaning in a table of a page.
_LABEL_LENGTH, _CHARACTERS = 120, "A-Za-z0-9_ .,:;+()@#%~=-"

Label = Annotated[
    str, Meta(max_length=_LABEL_LENGTH, pattern=rf"^[{_CHARACTERS}]*$", description="a short text without slashes")
]
Labels = Annotated[tuple[Label, ...], Meta(max_length=_MOST)]
Versions = Annotated[Mapping[Label, Label], Meta(max_length=_MOST)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$", description="a SHA-256 in hexadecimal digits")]


def as_label(text: str) -> str:
    """Return a text in the form that a report allows. Other characters are left out."""
    return " ".join(re.sub(f"[^{_CHARACTERS}]", "", text).split())[:_LABEL_LENGTH]


@dataclass(frozen=True)
class Percentiles:
    """Hold the latency of one model, in milliseconds."""

    p50_ms: Amount
    p90_ms: Amount
    p99_ms: Amount


@dataclass(frozen=True)
class CheckedVariant:
    """Report the self-test of one variant on the board.

    Attributes:
        max_abs_error, tolerance: the largest error in the outputs, and the largest allowed one; None if nothing ran.
    """

    name: Label
    status: Literal["passed", "loaded", "failed", "not run", "not used"]
    max_abs_error: Amount | None = None
    tolerance: Amount | None = None


@dataclass(frozen=True)
class MeasuredBundle:
    """Hold the figures of one bundle on a board.

    Attributes:
        name: "demo" for edgeq's embedded model, else the bundle's file name without its suffix.
        latency: the latency of each model; empty if a self-test failed.
        variant: the variant that was timed; "" if none was.
        speedup: how many times faster the variant is than float32; None if the bundle has no float32 model.
    """

    name: Label
    manifest_sha256: Digest
    passed: bool
    variants: Annotated[tuple[CheckedVariant, ...], Meta(max_length=_MOST)]
    latency: Annotated[Mapping[Label, Percentiles], Meta(max_length=_MOST)] = field(default_factory=dict)
    variant: Label = ""
    speedup: Claim | None = None

    def text(self) -> str:
        """Return the figures as one line."""
        if not self.passed:
            return f"{self.name}: the self-test does not pass"
        latencies = ", ".join(f"{model} {latency.p50_ms:.3g} ms" for model, latency in self.latency.items())
        speed = f"; {self.speedup.sentence(self.variant, FLOAT)}" if self.speedup is not None else ""
        return f"{self.name}: {latencies}{speed}"


@dataclass(frozen=True)
class Conditions:
    """Hold what affects the speed of a board; None if its system does not report it.

    Attributes:
        clock_mhz: clock of the fastest core.
        hottest_c: temperature of the hottest zone, in degrees Celsius.
        thermal_throttles: number of times that cores were throttled because of heat since the board started.
    """

    clock_mhz: Amount | None = None
    hottest_c: Annotated[float, Meta(ge=-300, le=1e4)] | None = None
    thermal_throttles: Count | None = None
    load: Amount | None = None


@dataclass(frozen=True)
class BoardReport:
    """Hold what was measured on a board.

    Attributes:
        target: target that stands for the board; the profile if there is no target.
        profile: profile that fits the board.
        board: name of the board in its device tree; "" if it has none.
        compatible: names of the board and its chip in the device tree.
        system: operating system and kernel.
        versions: versions of edgeq and of Python, numpy and runtimes on the board.
        engines: versions of the engines on the board.
        drivers: GPU → version of its driver.
        before, after: the state before and after the measurements.
    """

    schema: Literal["edgeq.board-report/1"]
    target: Label
    profile: Label
    board: Label
    compatible: Labels
    cpu: Label
    architecture: Label
    cores: Count
    system: Label
    governors: Labels
    versions: Versions
    engines: Versions
    drivers: Versions
    before: Conditions
    after: Conditions
    bundles: Annotated[tuple[MeasuredBundle, ...], Meta(max_length=_MOST)]

    @property
    def title(self) -> str:
        """Return the board's name, or its CPU's."""
        return self.board or self.cpu or self.architecture

    def lines(self) -> Iterator[str]:
        """Yield lines of text that describe the report to the user."""
        versions = self.versions
        yield f"{self.title}, {self.system}, onnxruntime {versions.get('onnxruntime', 'unknown')}"
        yield from (bundle.text() for bundle in self.bundles)


def read_report(path: Path) -> BoardReport:
    """Read a report, which may be untrusted.

    Raises:
        HardwareError: the file is not a report of a board.
    """
    fix = "Write it with `edgeq device report`"
    if path.is_file() and is_longer(path, _LARGEST):
        raise HardwareError(f"{path} is larger than {_LARGEST >> 10} KiB, so it is not a report of a board", fix)
    return read_json(path, BoardReport, HardwareError, fix)


def load_reports(folders: Iterable[Path] | None = None) -> tuple[BoardReport, ...]:
    """Return all reports in the subfolder "measured" of each folder of targets: the shipped ones, those of plug-ins,
    and the user's.

    Raises:
        HardwareError: a file is not a report of a board.
    """
    places = default_folders("targets") if folders is None else folders
    return tuple(read_report(path) for place in places for path in sorted((place / FOLDER).glob("*.json")))


def draw_table(reports: Sequence[BoardReport]) -> list[str]:
    """Return a Markdown table with a row for each bundle on each board, or a sentence if there are no reports."""
    if not reports:
        return ["No board has been measured yet."]
    lines = [
        "| board | target | system | onnxruntime | bundle | float32 | int8 | times as fast | self-test |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for report in sorted(reports, key=lambda report: (report.title, report.target)):
        for bundle in report.bundles:
            cells = (
                report.title,
                f"`{report.target}`",
                report.system,
                report.versions.get("onnxruntime", ""),
                bundle.name,
                *(_format_ms(bundle.latency.get(model)) for model in (FLOAT, bundle.variant)),
                _format_speedup(bundle.speedup),
                "passed" if bundle.passed else "failed",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _format_speedup(speedup: Claim | None) -> str:
    interval = speedup.interval if speedup is not None else None
    return f"{interval[0]:.2f} ({interval[1]:.2f} to {interval[2]:.2f})" if interval else "not settled"


def _format_ms(latency: Percentiles | None) -> str:
    return f"{latency.p50_ms:.3g} ms" if latency is not None else ""
