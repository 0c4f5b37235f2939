"""`edgeq report`: the page of a bundle, rebuilt from what the bundle says, and from a measurement made now."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq_device.bench_settings import BenchSettings

from edgeq.atomic import check_apart, check_free, output_file
from edgeq.bundle.read import opened
from edgeq.display import Displayed
from edgeq.errors import DataError, OutputError, UsageError
from edgeq.measure.loaded_model import is_bundle
from edgeq.model.path import path_of
from edgeq.ownership import is_plain
from edgeq.progress import SILENT, Progress
from edgeq.records import plain, read_json
from edgeq.report.bundle_record import bundle_record, measured, read_record
from edgeq.report.data import ReportData
from edgeq.report.fleet import FleetRecord
from edgeq.report.page import render
from edgeq.report.read import read_report
from edgeq.report.verdict import Verdict, verdict_of

# The last line of a page: the hash of all before it distinguishes a page that someone changed from one that is as
# edgeq left it.
_SEAL = b"<!-- edgeq report sha256:%s -->\n"
_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class Reported(Displayed):
    """The page that was written, and what stands first on it."""

    bundle: Path
    page: Path
    data: ReportData
    bytes: int

    @property
    def of_record(self) -> bool:
        """Whether `bundle` is the record of a bundle or of a tuning run alone, in a file of its own."""
        return _is_record(self.bundle)

    @property
    def verdict(self) -> Verdict:
        """What stands first on the page."""
        return verdict_of(self.data, self.data.main)

    def __brief__(self) -> dict[str, Any]:
        verdict = self.verdict
        return {"page": self.page, "verdict": verdict.sentence, "warnings": verdict.warnings}

    def __record__(self) -> dict[str, Any]:
        verdict = self.verdict
        return {
            "bundle": str(self.bundle),
            "report": str(self.page),
            "bytes": self.bytes,
            "verdict": verdict.sentence,
            "figures": [{"name": f.label, "value": f.value, "note": f.note} for f in verdict.figures],
            "warnings": list(verdict.warnings),
            "status": verdict.status,
            "commands": list(verdict.commands),
        }


def report_bundle(
    path: str | Path,
    output: str | Path | None = None,
    *,
    measure: bool = False,
    variant: str | None = None,
    settings: BenchSettings | None = None,
    fleet: Path | None = None,
    force: bool = False,
    progress: Progress = SILENT,
) -> Reported:
    """Write the report of the bundle, or of the record, at `path`.

    The page is always made anew from the bundle's figures: a page that came with an untrusted bundle is not opened.

    Args:
        output: the page; None puts it beside the bundle, as NAME.report.html.
        measure: time the bundle on this machine now, against its float32 model if it has one, and its layers.
        variant: which one to measure; None takes the best for this machine.
        settings: how to time it.
        fleet: what `edgeq bench --on FLEET.toml --json` printed, for a section of its own.
        force: replace `output` whatever it is; an earlier report that nobody changed is replaced anyway.

    Raises:
        UsageError: `path` is a model file, or a record that is to be measured.
        DataError: `path` is a JSON file, but no record; or `fleet` is none of a fleet.
        BundleError: the bundle is damaged, was changed, or nothing in it runs here.
        OutputError: `output` is something else, or cannot be written.
    """
    path = path_of(path, "bundle")
    if variant is not None and not measure:
        raise UsageError("--variant goes with --bench", "Leave it out, or add --bench")
    place = Path(output) if output is not None else _beside(path)
    _check_outside(place, path)
    check_free(place, force=force or _is_report(place), kind="file")
    check_apart(place, [path, *([fleet] if fleet is not None else [])])
    if _is_record(path):
        if measure:
            raise UsageError(f"{path} is a record, which cannot be timed", "Name a bundle, or leave --bench out")
        record = read_record(path)
    elif path.is_file() and not is_bundle(path):
        raise UsageError(f"{path} is not a bundle", "Name a bundle; `edgeq compare` takes model files")
    else:
        with opened(path) as bundle:
            record = bundle_record(bundle)
            if measure:
                record = measured(record, bundle, variant, settings, progress)
    if fleet is not None:
        found = read_json(fleet, FleetRecord, DataError, "Give what `edgeq bench --on FLEET.toml --json` printed")
        record = {**record, "fleet": plain(found)}
    data = read_report(record)
    page = _sealed(render(data).encode("utf-8"))
    with output_file(place, force=force or _is_report(place)) as draft:
        draft.write_bytes(page)
    return Reported(path, place, data, len(page))


def _is_record(path: Path) -> bool:
    return path.suffix == ".json" and path.is_file()


def _beside(path: Path) -> Path:
    whole = path.absolute()
    return whole.with_name(f"{whole.name.removesuffix('.edgeq').removesuffix('.json')}.report.html")


def _check_outside(place: Path, bundle: Path) -> None:
    if bundle.is_dir() and place.absolute().is_relative_to(bundle.absolute()):
        raise OutputError(f"{place} lies in the bundle, which would no longer verify", "Write the report beside it")


def _is_report(place: Path) -> bool:
    """Whether `place` is a report as edgeq left it, which a newer one may replace."""
    if not is_plain(place) or place.stat().st_size > _MOST_BYTES:
        return False
    page = place.read_bytes()
    return page == _sealed(page[: -len(_sealed(b""))])


def _sealed(page: bytes) -> bytes:
    return page + _SEAL % hashlib.sha256(page).hexdigest().encode()
