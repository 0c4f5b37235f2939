"""Read the record that a page is drawn from: of a bundle, in a file of its own, and with figures taken now."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq_device.arrays import read_arrays
from edgeq_device.bench import BenchSettings
from edgeq_device.bench_models import bundle_variants
from edgeq_device.engines import plugin_of
from edgeq_device.package import FLOAT, MAIN, Bundle
from edgeq_device.plainjson import MAX_BYTES, parse_json
from edgeq_device.sessions import read_device
from edgeq_device.variants import EXTERNAL_FOLDER, Variant

from edgeq.bundle.verify import opened
from edgeq.errors import DataError, OutputError, UsageError
from edgeq.hardware.detect import detect_machine
from edgeq.measure.bench import bench, is_bundle, variant_settings
from edgeq.measure.coverage import kernel_times
from edgeq.model.load import path_of, read_own
from edgeq.report.figures import string
from edgeq.report.page import RECORD, TUNING, render
from edgeq.report.read import ReportData, Verdict, read_report, verdict_of
from edgeq.report.timing import INT8, FleetRecord
from edgeq.util.display import SILENT, Displayed, Progress
from edgeq.util.outputs import check_apart, check_free, is_plain, output_file
from edgeq.util.records import json_object, plain, read_json


def read_record(path: Path) -> dict[str, Any]:
    """Return a record in a file of its own: report.json, tuning.json or what `edgeq tune --json` printed.

    Raises:
        DataError: it is not such a record.
    """
    record = json_object(path, DataError, "Give a record that edgeq wrote")
    kind = str(record.get("schema", "")).partition("/")[0]
    if kind == "edgeq.tuning":
        return {"tuning": record}
    if kind != "edgeq.report":
        raise DataError(
            f"{path} is not a record of a report or a tuning run", "Give a bundle, or a record that edgeq wrote"
        )
    return record


def bundle_record(bundle: Bundle) -> dict[str, Any]:
    """Return the record that a bundle carries, with what its manifest says; of a bundle without one, the manifest
    alone.
    """
    record = dict(_json_in(bundle, RECORD))
    if TUNING in bundle.files:
        record["tuning"] = _json_in(bundle, TUNING)
    known = record.get("variants")
    kept = known if isinstance(known, dict) else {}
    # What may run is what the manifest names, whatever the record says.
    record["variants"] = {v.name: {**_variant(v), **_body(kept.get(v.name))} for v in bundle.components[MAIN]}
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
    if not record.get("commands"):
        record["commands"] = [f"edgeq verify {bundle.source.name}", f"edgeq bench {bundle.source.name}"]
    return record


def measured(
    record: Mapping[str, Any], bundle: Bundle, name: str | None, settings: BenchSettings | None, progress: Progress
) -> dict[str, Any]:
    """Return `record` with latencies and kernel times taken now, on this machine."""
    found = bench(bundle.source, variant=name, settings=settings, progress=progress)
    variants, _ = bundle_variants(bundle, read_device(), name)
    chosen = variants[-1]
    times = _kernels(variants)
    bodies = {key: dict(body) for key, body in record["variants"].items()}
    if times:
        bodies[chosen.name]["kernels"] = times
    # Latencies of a tuning run stand in the record too; those of this machine and now win.
    return {
        **record,
        "variants": bodies,
        "bench": plain(found),
        "machine": plain(detect_machine()),
        "versions": {**_body(record.get("versions")), **found.versions},
    }


def _kernels(variants: list[Variant]) -> dict[str, Any]:
    """Kernel times of the float32 variant, where there is one, and of the chosen one, on a self-test's input."""
    chosen = variants[-1]
    cases = [case for variant in variants for case in variant.cases]
    if not cases or chosen.model is None:
        return {}
    feed = read_arrays(cases[0].inputs)
    first = variants[0].model
    assert first is not None  # select() gives only what onnxruntime runs
    # External weights may lie elsewhere in the bundle.
    weights = Path(variants[0].session_options.get(EXTERNAL_FOLDER, first.parent))
    source = read_own(first, weights)
    found = {}
    for variant in variants:
        if variant.model is not None and plugin_of(variant.ep) is None:
            times = kernel_times(variant.model, variant_settings(variant), feed, source)
            found["float32" if variant.component == FLOAT else "int8"] = plain(times)
    return found


def _variant(variant: Variant) -> dict[str, Any]:
    """Return what the bundle itself says of a variant, in the record's words."""
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
    """The manifest's metrics by model in the form of `edgeq.measure.accuracy.Accuracy`; the first metric decides."""
    bodies = {name: _body(short.get(name)) for name in (FLOAT, INT8)}
    rest = {"task": "", "count": short.get("samples") or 0, "higher_is_better": True}
    return {name: {"metrics": m, "primary": next(iter(m)), **rest} for name, m in bodies.items() if m}


def _is_path(key: str) -> bool:
    """Tell whether a session option was resolved to a place on this machine."""
    return key.endswith("_path")


def _bytes_of(variant: Variant) -> int | None:
    """Return the size of a variant's model; None where its weights lie elsewhere in the bundle."""
    if variant.model is None or any(_is_path(key) for key in variant.session_options):
        return None
    folder = variant.model.parent
    return sum(p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "edgeq.json")


def _float_bytes(bundle: Bundle) -> int | None:
    found = bundle.components.get(FLOAT)
    return _bytes_of(found[0]) if found else None


def _json_in(bundle: Bundle, name: str) -> Mapping[str, Any]:
    if name not in bundle.files or bundle.files[name].size > MAX_BYTES:
        return {}
    return parse_json((bundle.root / name).read_bytes(), f"{bundle.source}: {name}")


def _body(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


# The last line of a page: the hash of all before it distinguishes a page that someone changed from one that is as
# edgeq left it.
_SEAL = b"<!-- edgeq report sha256:%s -->\n"
_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class Reported(Displayed):
    """Report the page that was written, and what comes first on it."""

    bundle: Path
    page: Path
    data: ReportData
    bytes: int

    @property
    def of_record(self) -> bool:
        """Tell whether `bundle` is the record of a bundle or of a tuning run alone, in a file of its own."""
        return _is_record(self.bundle)

    @property
    def verdict(self) -> Verdict:
        """Return what stands first on the page."""
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
    """Write the report of the bundle, of the record, or of the folder that `edgeq tune` left, at `path`.

    The page is always made anew from the bundle's figures: a page that came with an untrusted bundle is not opened.

    Args:
        output: the page; None puts it next to the bundle, as NAME.report.html.
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
        record = read_record(path / TUNING if path.is_dir() else path)
    elif _of_a_run(path):
        raise DataError(f"{path} is of a run that has not ended", "Go on with the command that began it, and --resume")
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
    return (path / TUNING).is_file() if _of_a_run(path) else path.suffix == ".json" and path.is_file()


def _of_a_run(path: Path) -> bool:
    """Tell whether `path` is the folder that a tuning run keeps next to its output."""
    return path.suffix == ".tuning" and path.is_dir()


def _beside(path: Path) -> Path:
    whole = path.absolute()
    return whole.with_name(f"{whole.name.removesuffix('.edgeq').removesuffix('.json')}.report.html")


def _check_outside(place: Path, bundle: Path) -> None:
    if bundle.is_dir() and not _of_a_run(bundle) and place.absolute().is_relative_to(bundle.absolute()):
        raise OutputError(f"{place} lies in the bundle, which would no longer verify", "Write the report next to it")


def _is_report(place: Path) -> bool:
    """Tell whether `place` is a report as edgeq left it, which a newer one may replace."""
    if not is_plain(place) or place.stat().st_size > _MOST_BYTES:
        return False
    page = place.read_bytes()
    return page == _sealed(page[: -len(_sealed(b""))])


def _sealed(page: bytes) -> bytes:
    return page + _SEAL % hashlib.sha256(page).hexdigest().encode()
