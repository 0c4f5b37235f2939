"""`edgeq package`: quantize for one or more targets and write one bundle."""

from __future__ import annotations

import itertools
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq.atomic import Kind
from edgeq.backends import backend_named
from edgeq.bundle.write import SUFFIX
from edgeq.errors import UsageError
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.target import Target, resolve
from edgeq.measure.task import Task
from edgeq.pipeline.checks import check_output, check_request
from edgeq.pipeline.job import Data, build, open_job, scheme_for
from edgeq.pipeline.quantize import model_bytes, prove_built, runs_natively
from edgeq.pipeline.variants import PackagedVariant, as_text, bundle_variants, variant_name
from edgeq.progress import SILENT, Progress


@dataclass(frozen=True)
class Packaged:
    """What `package` did: the bundle and its variants by name."""

    bundle: Path
    variants: Mapping[str, PackagedVariant]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "bundle": str(self.bundle),
            "variants": {name: variant.to_dict() for name, variant in self.variants.items()},
            "notes": list(self.notes),
        }


def package(
    model: Path,
    data: Data | None,
    output: Path,
    *,
    targets: Sequence[str | Path] = ("this-machine",),
    validation: Data | None = None,
    statistics: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    task: Task | None = None,
    max_drop: float | None = None,
    require_coverage: float | None = None,
    with_float: bool = False,
    selftest: int = 2,
    timed: bool = True,
    force: bool = False,
    progress: Progress = SILENT,
) -> Packaged:
    """Calibrate `model` once, build and prove a variant for each target, and write them as one bundle.

    Args:
        output: a directory, or a file that ends in ".edgeq".
        targets: names of targets or profiles, or paths to TOML files; the order does not matter.
        with_float: put the float32 model in too, so that the device can time both.
        selftest: how many samples travel as self-test vectors.
        Others as `quantize`.

    Raises:
        CheckFailedError: a bar is not met by some variant; nothing is written then.
        EdgeqError: as the stages have it.
    """
    check_bundle_output(output, force=force, model=model, samples=(data, validation), statistics=statistics)
    machine = detect_machine()
    chosen = _in_package_order([resolve(target, machine) for target in targets])
    overrides = dict(overrides or {})
    check_request(chosen, overrides, task=task, max_drop=max_drop)
    schemes = [scheme_for(target, overrides) for target in chosen]
    with tempfile.TemporaryDirectory(prefix="edgeq-") as folder:
        workdir = Path(folder)
        job = open_job(
            model,
            data,
            validation,
            workdir,
            statistics=statistics,
            static=any(scheme.mode == "static" for scheme in schemes),
            exclude=sorted({name for scheme in schemes for name in scheme.exclude}),
            adopting=all(backend_named(target.backend).adopts_quantized for target in chosen),
            progress=progress,
        )
        done: dict[str, PackagedVariant] = {}
        for target in chosen:
            name = variant_name(target)
            place = workdir / name
            place.mkdir()
            built = build(job, target, overrides, place / "model.onnx")
            runnable = not target.profile.missing(machine)
            proof = prove_built(job, built, task=task, timed=timed and runnable, progress=progress)
            proof.check(max_drop=max_drop, require_coverage=require_coverage)
            done[name] = PackagedVariant(
                built, proof, runs_natively(target, machine), model_bytes(built.artifact.model)
            )
        artifacts = itertools.chain.from_iterable(v.built.artifact.notes for v in done.values())
        notes = tuple(dict.fromkeys([*job.prepared.notes, *artifacts]))
        named = " ".join(f"-t {shlex.quote(target)}" for target in sorted(map(str, targets)))
        bundle_variants(
            job,
            done,
            output,
            workdir=workdir,
            command=f"edgeq package {shlex.quote(as_text(model.name))} --data CALIBRATION {named} -o BUNDLE",
            selftest=selftest,
            with_float=with_float,
            notes=notes,
            force=force,
            progress=progress,
        )
    return Packaged(output, done, notes)


def check_bundle_output(
    output: Path, *, force: bool, model: Path, samples: Sequence[Data | None], statistics: Path | None
) -> None:
    """`check_output` for a bundle, which is a directory or a file by its name."""
    kind: Kind = "file" if output.suffix == SUFFIX else "directory"
    check_output(output, kind=kind, force=force, model=model, samples=samples, statistics=statistics)


def _in_package_order(targets: Sequence[Target]) -> list[Target]:
    """Least demanding first: ONNX Runtime itself takes the first variant that fits, edgeq's runner the best."""
    names = [variant_name(target) for target in targets]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated:
        raise UsageError(f"target {repeated} is named twice", "Name each target once")
    return sorted(targets, key=lambda target: (target.architecture, target.profile.rank, target.name))
