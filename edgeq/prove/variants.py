"""Hold the proven variants of one job, and describe them for a bundle's manifest."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.answers.head import Head
from edgeq_device.engines.catalog import engine_options, parse_version
from edgeq_device.engines.variant import DRAWN, SliceTolerance
from edgeq_device.measure.basis import EVERYTHING, Basis
from edgeq_device.measure.pairs import OutputPair, pair_outputs
from edgeq_device.prepare.arrays import to_array
from numpy.typing import NDArray

from edgeq.backends.base import ESTIMATE, Alternative, Artifact
from edgeq.bundle.spec import SelfTestCase, SelfTestSpec, VariantSpec
from edgeq.data.samples import Samples
from edgeq.emulate.check import EmulatedCheck
from edgeq.hardware.target import THIS_MACHINE, Target
from edgeq.measure.checks import ArtifactCheck, CheckKind
from edgeq.measure.coverage import Coverage
from edgeq.measure.inference import Session, infer
from edgeq.measure.slices import SliceSums
from edgeq.model.compatibility import Compatibility
from edgeq.model.graph import random_tensors
from edgeq.prove.job import Built, Job
from edgeq.prove.opening import open_stand_in
from edgeq.prove.proof import Proof
from edgeq.prove.saturation import Decision
from edgeq.reporting.page import DIGITS
from edgeq.run.session import Engines, open_session
from edgeq.scheme import Scheme
from edgeq.util.display import Displayed
from edgeq.util.records import marked, plain, round_floats

Array = NDArray[Any]

# Two architectures round differently. With the same integers as input, requantization and QLinearAdd on x86 and on ARM
# differed by up to 1.6 % of an output's largest value. A wrong kernel, such as one that saturates, differs by far more.
_SELFTEST_TOLERANCE = 0.025
# A simulation and the device round in different places. The difference of two independent noises has √2 times the RMS
# of each noise. The largest difference, on an H100 in float16, was 1.6 times the difference between the simulation and
# float32.
_SIMULATED = 2.0
# The allowed difference in a slice with another unit, as a share of the slice's largest value. In such a slice, a
# Sigmoid or an Exp in float often follows the integers and turns one rounding of its argument into a change of several
# percent.
_SLICE_TOLERANCE = 0.1
_MOST_SLICES = 64
# Fewer values may lie close together by chance.
_ENOUGH_VALUES = 64
# The allowed distance of a value from a multiple of the step, in steps. float32 represents up to 2^16 steps with this
# precision.
_OFF_GRID = 0.01


def selftest_cases(artifact: Artifact, samples: Samples, count: int) -> tuple[SelfTestCase, ...]:
    """Return the first `count` samples with the artifact's outputs for them, computed on this machine in the artifact's
    engine.
    """
    with Engines() as engines:
        session = engines.open(artifact.proof_model, artifact.proof_settings())
        return tuple(
            SelfTestCase(dict(sample.inputs), infer(session, sample)) for sample in itertools.islice(samples, count)
        )


def expected_outputs(
    cases: tuple[SelfTestCase, ...],
    check: EmulatedCheck | None,
    float_model: Path,
    *,
    native: bool,
    simulated: bool = False,
    basis: Basis = EVERYTHING,
    random: Collection[str] = (),
) -> SelfTestSpec:
    """Return the self-test, which contains the expected outputs and the tolerance for each output on the device.

    If the target's kernels ran the model, the expected outputs come from them. Otherwise they come from this machine,
    and the target's outputs may differ from them by as much as quantization changed the outputs. Roundings differ
    between architectures, and a network amplifies rounding differences as much as quantization noise.

    Args:
        check: the check on the target's own kernels, or None if there was no such check.
        float_model: the model that was quantized.
        native: True if this machine's kernels are the target's kernels.
        simulated: True if the outputs come from a simulation, which rounds in different places than the device.
        basis: what the figures of the float model are taken over. The tolerances are taken over the same elements.
        random: outputs that depend on random numbers. The self-test leaves them out, because the device draws others.
    """
    if check is not None and check.answers:
        cases = tuple(SelfTestCase(c.inputs, answer) for c, answer in zip(cases, check.answers, strict=True))
    cases = tuple(
        SelfTestCase(case.inputs, outputs)
        for case in cases
        if (outputs := {name: array for name, array in case.outputs.items() if name not in random})
    )
    device_outputs: list[Mapping[str, Array]] = [case.outputs for case in cases]
    if cases and not native and not (check is not None and check.answers):
        session = open_session(float_model)
        device_outputs = [_answers(session, case) for case in cases]
    factor = _SIMULATED if simulated else 1.0
    tolerance, slices = {}, {}
    names = tuple(dict.fromkeys(name for case in cases for name in case.outputs))
    pairs: dict[str, list[tuple[SelfTestCase, OutputPair]]] = {name: [] for name in names}
    for case, device_output in zip(cases, device_outputs, strict=True):
        for pair in pair_outputs(basis, case.outputs, device_output, case.inputs):
            pairs[pair.name].append((case, pair))
    for name in names:
        tolerance[name], parts = _allowed(pairs[name], factor)
        if parts:
            slices[name] = parts
    return SelfTestSpec(cases, tolerance, slices, basis.of(names))


def _answers(session: Session, case: SelfTestCase) -> dict[str, Array]:
    names = list(case.outputs)
    return dict(zip(names, map(to_array, session.run(names, dict(case.inputs))), strict=True))


def _allowed(
    pairs: Sequence[tuple[SelfTestCase, OutputPair]], factor: float
) -> tuple[float, tuple[SliceTolerance, ...]]:
    """Return the tolerance of an output and the tolerances of its slices. A tolerance is the larger of two values: a
    share of the output's range, and `factor` times the largest difference between the expected outputs and the
    other array in each pair. The tolerance of a slice is at least two steps of the output's grid, if there is one.
    """
    if any(pair.reference.dtype.kind != "f" for _, pair in pairs):
        return 0.0, ()
    sums, changed, grid = SliceSums(), 0.0, [np.zeros(0)]
    for case, pair in pairs:
        expected, device_values = pair.to_numbers()
        device_values = device_values if device_values.shape == expected.shape else expected
        changed = max(changed, float(np.abs(device_values - expected).max(initial=0.0)))
        sums.update(expected, device_values, case.inputs.values(), mask=pair.mask, ranked=pair.ranked)
        grid.append(expected.ravel() if pair.mask is None else expected[pair.mask])
    values = np.concatenate(grid)
    largest = float(np.abs(values).max(initial=0.0))
    if values.size >= _ENOUGH_VALUES:  # The distance of a quantity from zero is not its size.
        largest = min(largest, float(np.ptp(values))) or largest
    tolerance = max(_SELFTEST_TOLERANCE * largest, factor * changed)
    step = 2 * _step(values)
    parts = ((part, max(_SLICE_TOLERANCE * part.peak, factor * part.max_abs_error, step)) for part in sums.result())
    slices = (SliceTolerance(p.axis, p.first, p.last, allowed) for p, allowed in parts if allowed < tolerance)
    strictest = sorted(slices, key=lambda part: part.tolerance)[:_MOST_SLICES]
    return tolerance, tuple(sorted(strictest, key=lambda part: (part.axis, part.first)))


def _step(values: Array) -> float:
    """Return the step of the grid that contains all the values, or 0 if there is no grid. There is a grid if the whole
    output is quantized with one scale.
    """
    levels = np.unique(values.astype(np.float64))
    step = float(np.diff(levels).min()) if len(levels) > 1 else 0.0
    on_grid = step > 0 and bool(np.all(np.abs(levels / step - np.rint(levels / step)) < _OFF_GRID))
    return step if on_grid else 0.0


@dataclass(frozen=True)
class ProvenVariant(Displayed):
    """Describe one variant: its artifact, its proof, and its size in bytes.

    Attributes:
        native: True if the proof was made on the target's own kernels.
        scheme: the requested scheme, before its backend or an engine added to it.
        threads: the best number of threads, which is the runner's default. With 0, the runtime chooses the number.
        checks: the checks, each with the kernels on which it ran. Each name occurs once.
        decision: the decision on saturating kernels with its reason; None if no decision was needed.
        compatibility: what the variant requires of onnxruntime, or None if this was not determined.
        emulated: the check on the target's own kernels, if this machine has different kernels; None if there was no
            such check.
        preference: the rank among the variants of one profile. A device uses the variant with the highest rank that it
            can run; see `with_fallback`.
    """

    built: Built
    proof: Proof
    native: bool
    bytes: int
    scheme: Scheme = field(default_factory=Scheme)
    threads: int = 0
    checks: tuple[ArtifactCheck, ...] = ()
    decision: Decision | None = None
    compatibility: Compatibility | None = None
    emulated: EmulatedCheck | None = None
    preference: int = 0

    def __brief__(self) -> dict[str, Any]:
        artifact = self.built.artifact
        brief = {"target": self.built.target.name, "scheme": artifact.scheme.title, "bytes": self.bytes}
        return {**brief, "native": self.native, **self.proof.__brief__()}

    @property
    def min_onnxruntime(self) -> str:
        """Return the oldest onnxruntime that is known to run the variant."""
        versions = [self.built.artifact.min_onnxruntime or self.built.target.profile.min_onnxruntime]
        versions += [self.compatibility.minimum] if self.compatibility else []
        plugin = self.built.artifact.plugin
        if plugin is not None and plugin.engine.direct is None and plugin.engine.min_onnxruntime:
            # if the engine's own package can replace the plug-in, only a device that uses the plug-in needs this
            # version
            versions.append(plugin.engine.min_onnxruntime)
        return max(versions, key=parse_version)

    def __record__(self) -> dict[str, Any]:
        return {
            "target": self.built.target.name,
            "profile": self.built.target.profile.name,
            "scheme": self.built.artifact.scheme,
            "session_options": self.built.artifact.session_options,
            "bytes": self.bytes,
            "native": self.native,
            "checks": self.checks,
            "min_onnxruntime": self.min_onnxruntime,
            "saturation": self.decision,
            "emulated": self.emulated,
            **_estimate(self.built.artifact),
            **marked(self.proof),
        }


def variant_name(target: Target) -> str:
    """Return the name of a target's variant. For "this machine", the name is that of the profile, because "this
    machine" means nothing elsewhere.
    """
    return target.profile.name if target.name == THIS_MACHINE else target.name


def with_fallback(name: str, fallback: ProvenVariant, preferred: Sequence[ProvenVariant]) -> dict[str, ProvenVariant]:
    """Return variants for one target by name: first `fallback`, which needs only onnxruntime, then the variants of
    plug-in engines.

    Args:
        preferred: the variants of plug-ins, best first. A device uses the first variant whose engine is installed and
            passes the self-test.
    """
    variants = {name: fallback}
    for place, variant in enumerate(preferred):
        plugin = variant.built.artifact.plugin
        assert plugin is not None, "what onnxruntime runs by itself is the fall-back"
        fallback_name = f"{name}-{plugin.name.replace(':', '-')}"
        variants[fallback_name] = replace(variant, preference=len(preferred) - place)
    return variants


def variant_spec(
    name: str,
    variant: ProvenVariant,
    job: Job,
    cases: tuple[SelfTestCase, ...],
    model: Path,
    tables: Path | None = None,
) -> VariantSpec:
    """Describe a variant for the bundle.

    Args:
        cases: the cases of the variant's self-test.
        model: the variant's file.
        tables: the folder with the calibration tables that contain the variant's ranges.
    """
    built, proof = variant.built, variant.proof
    target, artifact = built.target, built.artifact
    simulated = artifact.simulation is not None
    random = _drawn_outputs(job)
    selftest = expected_outputs(
        cases,
        variant.emulated,
        job.prepared.path,
        native=variant.native,
        simulated=simulated,
        basis=job.basis,
        random=random,
    )
    info = {
        **({"table_file": f"{name}.{artifact.requires['table']}"} if "table" in artifact.requires else {}),
        "title": target.title,
        "target": target.name,
        "profile": target.profile.name,
        **_engine(artifact),
        "architecture": target.architecture,
        "required_features": sorted(target.profile.requires),
        "rank": target.profile.rank + variant.preference,
        "min_onnxruntime": variant.min_onnxruntime,
        **({"products": list(variant.compatibility.products)} if variant.compatibility else {}),
        "scheme": plain(artifact.scheme),
        "preprocessing": _preprocessing(job.validation),
        **({"head": _head(job, proof).to_dict()} if job.head is not None else {}),
        "coverage": _coverage(proof.coverage),
        "accuracy": _accuracy(proof),
        "checks": [plain(check) for check in variant.checks],
        **({"saturation": round_floats(plain(variant.decision), DIGITS)} if variant.decision else {}),
        **({"threads": variant.threads} if variant.threads else {}),
        **({"files": sorted(artifact.files)} if artifact.files else {}),
        **_estimate(artifact),
        **({DRAWN: list(random)} if random else {}),
    }
    return replace(_spec(name, artifact, info, selftest), model=model, calibration=tables)


def _head(job: Job, proof: Proof) -> Head:
    """Return the head of a variant. On request, its threshold is the one that gives the float model's recall back."""
    assert job.head is not None, "the caller made sure"
    lowered = proof.operating.lowered if proof.operating is not None else None
    if not job.float_recall or lowered is None:
        return job.head
    source = {**job.head.source, "thresholds": "the recall of float32 on the samples of the proof"}
    return replace(job.head, thresholds={**job.head.thresholds, "confidence": lowered}, source=source)


def _spec(name: str, artifact: Artifact, info: Mapping[str, Any], selftest: SelfTestSpec) -> VariantSpec:
    """Describe an artifact for the bundle. The description contains a plug-in's options only for ONNX Runtime's own
    package reader. edgeq's runner reads them from the description of the plug-in.
    """
    provider, options = artifact.provider, artifact.provider_options
    if artifact.plugin is not None:
        engine = artifact.plugin.engine
        # ONNX Runtime does not open files in an engine's own format.
        options = {} if engine.suffix else engine_options(engine, artifact.plugin.precision)
        provider = engine.provider
    return VariantSpec(
        name=name,
        model=artifact.model,
        ep=provider,
        device=artifact.device,
        session_options=artifact.session_options,
        provider_options=options,
        info={**artifact.requires, **info},
        selftest=selftest,
        files=artifact.files,
    )


def _estimate(artifact: Artifact) -> dict[str, Any]:
    return {ESTIMATE: plain(artifact.details[ESTIMATE])} if ESTIMATE in artifact.details else {}


def _engine(artifact: Artifact) -> dict[str, str]:
    """Return the plug-in that runs a variant, as entries for the variant's info. Return an empty dict if no plug-in
    runs it.
    """
    plugin = artifact.plugin
    return {} if plugin is None else {"engine": plugin.engine.name, "precision": plugin.precision}


def alternative_spec(alternative: Alternative, job: Job, count: int) -> VariantSpec:
    """Return the variant for an artifact that can replace another artifact. A bundle contains this variant only once,
    because it is the same for every target.

    Args:
        count: the number of samples in the variant's self-test.

    Raises:
        CheckFailedError: the artifact's file gives different outputs when it is opened as on devices.
    """
    artifact = alternative.artifact
    unopened = ""
    # a plug-in's compiled form was already compared after compiling
    if artifact.plugin is None and artifact.model != job.prepared.path:
        opening = open_stand_in(artifact, job.prepared.path, job.validation, job.basis)
        opening.check(artifact.model)
        unopened = "; ".join(opening.notes)
    cases = selftest_cases(artifact, job.validation, count)
    modelled = artifact.simulation is not None
    random = _drawn_outputs(job)
    selftest = expected_outputs(
        cases, None, job.prepared.path, native=not modelled, simulated=modelled, basis=job.basis, random=random
    )
    simulated = modelled or artifact.plugin is not None
    location = "in simulation on a CPU" if simulated else "this machine"
    kind: CheckKind = "modelled" if simulated else "native"
    checks = [
        ArtifactCheck("load", kind, location, unopened, True),
        ArtifactCheck("self-test", kind, location, "", True),
    ]
    info = {
        **_engine(artifact),
        "title": alternative.title,
        "architecture": alternative.architecture,
        "required_features": [],
        "rank": alternative.rank,
        "min_onnxruntime": artifact.min_onnxruntime,
        "scheme": artifact.scheme.rest,
        "preprocessing": _preprocessing(job.validation),
        "checks": [plain(check) for check in checks],
        **({DRAWN: list(random)} if random else {}),
    }
    return replace(_spec(alternative.name, artifact, info, selftest), files={})


def _drawn_outputs(job: Job) -> tuple[str, ...]:
    """Return the model's outputs that depend on random numbers."""
    random = random_tensors(job.prepared.model.graph)
    return tuple(name for name in job.prepared.graph.outputs if name in random)


def _coverage(coverage: Coverage) -> dict[str, Any]:
    """Return the coverage for the manifest: the share (null if unknown), and how it is known."""
    share = None if coverage.int8_mac_share is None else round(coverage.int8_mac_share, 4)
    precisions = {"precisions": dict(coverage.precisions)} if coverage.precisions else {}
    return {"int8_mac_share": share, "basis": coverage.basis, "how": coverage.how, **precisions}


def _accuracy(proof: Proof) -> dict[str, Any]:
    """Return the accuracy for the manifest, rounded so that differences in the last bit of a sum do not change the
    bundle.
    """
    record: dict[str, Any] = {"samples": proof.samples, "held_out": proof.held_out}
    if np.isfinite(proof.agreement.sqnr_db):
        record["sqnr_db"] = round(proof.agreement.sqnr_db, 1)
    if proof.agreement.top1 is not None:
        record["top1_agreement"] = round(proof.agreement.top1, 4)
    for name, accuracy in proof.accuracy.items():
        record[name] = {metric: round(value, 4) for metric, value in accuracy.metrics.items()}
    return record


def _preprocessing(samples: Samples) -> dict[str, Any] | None:
    preprocess = getattr(samples, "preprocess", None)
    return plain(preprocess) if preprocess is not None else None
