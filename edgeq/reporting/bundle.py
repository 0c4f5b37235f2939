"""Read the record of a page from a bundle or a separate file, optionally add new measurements, and write the page."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq_device.bundle.bench_models import choose_variants
from edgeq_device.bundle.package import FLOAT, MAIN, Bundle
from edgeq_device.engines.catalog import find_plugin
from edgeq_device.engines.device import read_device
from edgeq_device.engines.variant import EXTERNAL_FOLDER, Variant
from edgeq_device.measure.bench_settings import BenchSettings
from edgeq_device.prepare.arrays import read_arrays
from edgeq_device.system.files import read_file
from edgeq_device.system.plainjson import MAX_BYTES, parse_json

from edgeq.bundle.verify import open_checked
from edgeq.errors import DataError, OutputError, UsageError
from edgeq.hardware.detect import detect_machine
from edgeq.measure.bench import bench
from edgeq.measure.kernel_times import kernel_times
from edgeq.measure.loaded_model import is_bundle, variant_settings
from edgeq.model.load import read_unchecked
from edgeq.reporting.figures import string
from edgeq.reporting.page import RECORD, TUNING, render
from edgeq.reporting.read import ReportData, ReportVerdict, read_report, verdict_of
from edgeq.reporting.timing import INT8, FleetRecord
from edgeq.util.display import SILENT, Displayed, Progress
from edgeq.util.marker import is_plain
from edgeq.util.outputs import check_apart, check_free, output_file
from edgeq.util.paths import path_of
from edgeq.util.record_files import json_object, read_json
from edgeq.util.records import plain


def read_record(path: Path) -> dict[str, Any]:
    """Return a record from a separate file: report.json, tuning.json or the JSON of `edgeq tune`.

    Raises:
        DataError: the file is not one of these records.
    """
    record = json_object(path, DataError, "Give a record that edgeq wrote")
    # The part behind the slash is the version of the format, which old and new records may differ in.
    kind = str(record.get("schema", "")).partition("/")[0]
    if kind == "edgeq.tuning":
        return {"tuning": record}
    if kind != "edgeq.report":
        raise DataError(
            f"{path} is not a record of a report or a tuning run", "Give a bundle, or a record that edgeq wrote"
        )
    return record


def bundle_record(bundle: Bundle) -> dict[str, Any]:
    """Return the record in a bundle, completed from the bundle's manifest. If there is no record, return only the data
    in the manifest.
    """
    record = dict(_json_in(bundle, RECORD))
    if TUNING in bundle.files:  # a bundle of edgeq 0.2 or older
        record["tuning"] = _json_in(bundle, TUNING)
    variants = record.get("variants")
    recorded = variants if isinstance(variants, dict) else {}
    # The manifest, not the record, decides which variants may run.
    record["variants"] = {v.name: {**_variant(v), **_body(recorded.get(v.name))} for v in bundle.components[MAIN]}
    record.setdefault("name", bundle.name)
    record.setdefault("versions", bundle.metadata.get("tools", {}))
    record.setdefault(
        "model",
        {"sha256": bundle.metadata.get("source_model_sha256"), "bytes": _float_bytes(bundle)},
    )
    total = sum(f.size for f in bundle.files.values())
    record["identity"] = {
        **_body(record.get("identity")),
        "calibration samples": bundle.metadata.get("calibration_samples"),
        "calibration data, sha256": bundle.metadata.get("calibration_sha256"),
        "bundle, files and bytes": f"{len(bundle.files) + 1} files, {total} bytes",
        "manifest, sha256": bundle.manifest_sha256,
    }
    # A page always names a next step.
    if not record.get("commands"):
        record["commands"] = [f"edgeq verify {bundle.source.name}", f"edgeq bench {bundle.source.name}"]
    return record


def add_measurements(
    record: Mapping[str, Any], bundle: Bundle, name: str | None, settings: BenchSettings | None, progress: Progress
) -> dict[str, Any]:
    """Return `record` with latencies and kernel times that are measured now on this machine."""
    report = bench(bundle.source, variant=name, settings=settings, progress=progress)
    variants, _ = choose_variants(bundle, read_device(), name)
    # The best variant for this machine comes last, and float32, if it is in the bundle, first.
    best = variants[-1]
    times = _kernels(variants)
    bodies = {key: dict(body) for key, body in record["variants"].items()}
    if times:
        bodies[best.name]["kernels"] = times
    # The record may also have latencies of a tuning run. The latencies that are measured now take precedence.
    return {
        **record,
        "variants": bodies,
        "bench": plain(report),
        "machine": plain(detect_machine()),
        "versions": {**_body(record.get("versions")), **report.versions},
    }


def _kernels(variants: list[Variant]) -> dict[str, Any]:
    """Return the kernel times of the chosen variant and of the float32 variant, if there is one, on an input of the
    self-test.
    """
    best = variants[-1]
    cases = [case for variant in variants for case in variant.cases]
    if not cases or best.model is None:
        return {}
    # A bundle contains no inputs other than those of its self-test.
    feed = read_arrays(cases[0].inputs)
    float_model = variants[0].model
    assert float_model is not None  # select() returns only variants that onnxruntime runs
    # External weights may be elsewhere in the bundle.
    weights = Path(variants[0].session_options.get(EXTERNAL_FOLDER, float_model.parent))
    source = read_unchecked(float_model, weights)
    kernels = {}
    for variant in variants:
        if variant.model is not None and find_plugin(variant.ep) is None:
            times = kernel_times(variant.model, variant_settings(variant), feed, source)
            kernels["float32" if variant.component == FLOAT else "int8"] = plain(times)
    return kernels


def _variant(variant: Variant) -> dict[str, Any]:
    """Return the data that the bundle contains about a variant, with the keys of the record."""
    info = variant.info
    accuracy = _body(info.get("accuracy"))
    checks = [c for c in info.get("checks", ()) if isinstance(c, dict)] if isinstance(info.get("checks"), list) else []
    return {
        "title": info.get("title"),
        "target": info.get("target"),
        "profile": info.get("profile"),
        "provider": variant.ep,
        "engine": ":".join(string(info[key]) for key in ("engine", "precision") if key in info),
        "checked": ", ".join(dict.fromkeys(f"{c.get('kind')}: {c.get('where')}" for c in checks)),
        "scheme": info.get("scheme") if isinstance(info.get("scheme"), dict) else {},
        "session_options": {k: v for k, v in variant.session_options.items() if not _is_path(k)},
        "bytes": _bytes_of(variant),
        "coverage": info.get("coverage"),
        "accuracy": _accuracy(accuracy),
        "sqnr_db": accuracy.get("sqnr_db"),
        "top1_agreement": accuracy.get("top1_agreement"),
        "samples": accuracy.get("samples"),
        "held_out": accuracy.get("held_out"),
    }


def _accuracy(short: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest's metrics by model in the form of `edgeq.measure.accuracy.Accuracy`. The first metric is the
    primary one.
    """
    bodies = {name: _body(short.get(name)) for name in (FLOAT, INT8)}
    defaults = {"task": "", "samples": short.get("samples") or 0, "higher_is_better": True}
    return {name: {"metrics": m, "primary": next(iter(m)), **defaults} for name, m in bodies.items() if m}


def _is_path(key: str) -> bool:
    """Return whether the value of a session option was resolved to a path on this machine."""
    return key.endswith("_path")


def _bytes_of(variant: Variant) -> int | None:
    """Return the size of a variant's model in bytes, or None if its weights are elsewhere in the bundle."""
    if variant.model is None or any(_is_path(key) for key in variant.session_options):
        return None
    # edgeq.json describes the variant. It is not part of the model.
    folder = variant.model.parent
    return sum(p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "edgeq.json")


def _float_bytes(bundle: Bundle) -> int | None:
    variants = bundle.components.get(FLOAT)
    return _bytes_of(variants[0]) if variants else None


def _json_in(bundle: Bundle, name: str) -> Mapping[str, Any]:
    if name not in bundle.files or bundle.files[name].size > MAX_BYTES:
        return {}
    return parse_json(read_file(bundle.root / name), f"{bundle.source}: {name}")


def _body(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


# The last line of a page is a hash of everything before it. The hash shows whether somebody changed the page.
_SEAL = b"<!-- edgeq report sha256:%s -->\n"
# Bounds what `_is_report` reads into memory. A larger file does not count as a report.
_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class WrittenReport(Displayed):
    """Report the page that was written, and the data on it."""

    bundle: Path
    page: Path
    data: ReportData
    bytes: int

    @property
    def of_record(self) -> bool:
        """Return whether `bundle` is not a bundle but a separate record of a bundle or of a tuning run."""
        return _is_record(self.bundle)

    @property
    def verdict(self) -> ReportVerdict:
        """Return the verdict, which is at the top of the page."""
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
) -> WrittenReport:
    """Write the report of `path`: a bundle, a record, or the folder of a finished `edgeq tune`.

    edgeq always draws the page from the figures in the bundle. It never opens a page that came with the bundle, because
    such a page may be untrusted.

    Args:
        output: path of the page. With None, it is NAME.report.html next to the bundle.
        measure: True to time the bundle and its layers on this machine now. If the bundle contains a float32 model, it
            is timed against the variant.
        variant: the variant to measure, or None for the best one for this machine.
        settings: settings for timing the bundle.
        fleet: the JSON of `edgeq bench` for a fleet, which is shown in its own section.
        force: True to replace any file at `output`. An earlier report that nobody changed is always replaced.

    Raises:
        UsageError: `path` is a model file, or it is a record and `measure` is set.
        DataError: `path` is a JSON file but not a record, or `fleet` is not the record of a fleet.
        BundleError: the bundle is damaged or was changed, or none of its variants runs here.
        OutputError: `output` is another file, or cannot be written.
    """
    path = path_of(path, "bundle")
    if variant is not None and not measure:
        raise UsageError("⟨variant⟩ needs ⟨bench⟩", "Add ⟨bench⟩, or leave out ⟨variant⟩")
    place = Path(output) if output is not None else _page_path(path)
    _check_outside(place, path)
    # Refuse the output before the measurement, which takes minutes.
    check_free(place, force=force or _is_report(place), kind="file")
    check_apart(place, [path, *([fleet] if fleet is not None else [])])
    if _is_record(path):
        if measure:
            raise UsageError(f"{path} is a record, which cannot be timed", "Give a bundle, or leave out ⟨bench⟩")
        record = read_record(path / TUNING if path.is_dir() else path)
    elif _of_a_run(path):
        raise DataError(
            f"{path} belongs to a run that has not ended", "Repeat the command that started it, with ⟨resume=True⟩"
        )
    elif path.is_file() and not is_bundle(path):
        raise UsageError(f"{path} is not a bundle", "Give a bundle; `edgeq compare` takes model files")
    else:
        with open_checked(path) as bundle:
            record = bundle_record(bundle)
            if measure:
                record = add_measurements(record, bundle, variant, settings, progress)
    if fleet is not None:
        fleet_record = read_json(
            fleet, FleetRecord, DataError, "Give the output of `edgeq bench ⟨on⟩ FLEET.toml ⟨json⟩`"
        )
        record = {**record, "fleet": plain(fleet_record)}
    data = read_report(record)
    page = _seal(render(data).encode("utf-8"))
    # The file may have changed during the measurement, so look at it again.
    with output_file(place, force=force or _is_report(place)) as draft:
        draft.write_bytes(page)
    return WrittenReport(path, place, data, len(page))


def _is_record(path: Path) -> bool:
    return (path / TUNING).is_file() if _of_a_run(path) else path.suffix == ".json" and path.is_file()


def _of_a_run(path: Path) -> bool:
    """Return whether `path` is the folder that a tuning run keeps next to its output."""
    return path.suffix == ".tuning" and path.is_dir()


def _page_path(path: Path) -> Path:
    absolute = path.absolute()
    return absolute.with_name(f"{absolute.name.removesuffix('.edgeq').removesuffix('.json')}.report.html")


def _check_outside(place: Path, bundle: Path) -> None:
    if bundle.is_dir() and not _of_a_run(bundle) and place.absolute().is_relative_to(bundle.absolute()):
        raise OutputError(f"{place} is inside the bundle, which would no longer verify", "Write the report next to it")


def _is_report(place: Path) -> bool:
    """Return whether the file at `place` is an unchanged report of edgeq, which a newer report may replace."""
    if not is_plain(place) or place.stat().st_size > _MOST_BYTES:
        return False
    page = read_file(place)
    # The seal has a fixed length, so it can be cut off and computed again.
    return page == _seal(page[: -len(_seal(b""))])


def _seal(page: bytes) -> bytes:
    return page + _SEAL % hashlib.sha256(page).hexdigest().encode()
