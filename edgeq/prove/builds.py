"""Build the artifacts of one job. If several targets share a part, it is built and proven only once.

Coverage is the share of the work that a target computes in int8. If the target's kernels run here, edgeq runs them to
measure the coverage. Otherwise rules forecast it. The coverage in a plug-in is either measured in that plug-in or
unknown.

Measurements on another CPU architecture do not count, because fusions differ: ONNX Runtime's optimiser fuses int8
convolutions on one architecture and leaves them in float on another.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from edgeq_device.engines.catalog import describe_package, load_wrong_kernels

from edgeq.backends.base import Alternative, Artifact, backend_for, backend_named
from edgeq.data.samples import spread_over
from edgeq.emulate.check import COMPILED, find_route
from edgeq.emulate.routes import EMULATED, NATIVE, ExecutionRoute
from edgeq.errors import BoardError, CheckFailedError, EdgeqError, ModelError, RuntimeUnavailableError, one_line
from edgeq.hardware.detect import Machine
from edgeq.hardware.target import Target, runs_natively
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.measure.checks import ArtifactCheck
from edgeq.measure.coverage import Basis, Coverage, Explain, forecast_coverage, measure_coverage
from edgeq.measure.node_runs import HALF, count_macs
from edgeq.model.compatibility import Compatibility, compatibility
from edgeq.model.files import model_bytes
from edgeq.model.int8_prediction import NodePrediction, foreign_type_reason, predict_int8
from edgeq.model.int8_rules import int8_rules, rules_title
from edgeq.model.macs import node_macs
from edgeq.model.sharing import shared_model
from edgeq.prove.job import Built, Job, build, computed_as_there, prepared_for
from edgeq.prove.proof import FLOAT, INT8, Proof, ProofSamples, prove, unchecked
from edgeq.run.engines import Engine
from edgeq.run.session import REQUEST_S, Engines, SessionSettings, open_session
from edgeq.scheme import ALL_NODES, Scheme
from edgeq.util.display import Progress
from edgeq.util.records import plain

_SAMPLES = 2
# Number of multiply-accumulates that a simulator computes in about half a minute, if it computes in float.
_SIMULATED_MACS = 200_000_000_000
_TABLE = "targets/onnxruntime/versions.toml"
# If the user sets one of these fields of a scheme, the user has chosen a mitigation.
_DECIDED = frozenset({"mode", "format", "activation_type", "weight_type", "reduce_range", "fit_pairs"})


def finished(job: Job, built: Built) -> Built:
    """Return `built` in the form that its backend ships. See `Backend.finished`."""
    folder = Path(tempfile.mkdtemp(prefix="finished-", dir=job.folder))
    backend = backend_for(built.target)
    artifact = backend.finished(built.artifact, job.prepared, job.validation, folder, progress=job.progress)
    return replace(built, artifact=artifact)


def with_compiled(job: Job, built: Built) -> Built:
    """Add the compiled form of `built` to its alternatives and return the result. If the engine does not simulate its
    hardware here, there is no compiled form.

    If there is a compiled form, this function also loads it. Its outputs must be equal to those of the model from which
    it was compiled.

    Raises:
        EngineError: the engine does not accept the model.
        CheckFailedError: the compiled form gives different outputs.
    """
    built = finished(job, built)
    artifact, target = built.artifact, built.target
    plugin = artifact.plugin
    if plugin is None or not artifact.in_simulator:
        return built
    file = Path(tempfile.mkdtemp(prefix="compiled-", dir=job.folder)) / "compiled.onnx"
    with job.progress.stage(f"Compiling for {target.name}"), Engines() as engines:
        engines.compile(plugin.engine, artifact.model, file)
        sessions = [engines.open(model, artifact.settings()) for model in (artifact.model, file)]
        for sample in itertools.islice(job.validation, _SAMPLES):
            online, compiled = (session.run(None, dict(sample.inputs)) for session in sessions)
            if not all(map(np.array_equal, online, compiled)):
                raise CheckFailedError(
                    f"{target.name}: the compiled model gives other outputs than its source", "Report this model"
                )
    maker = describe_package(plugin.engine)
    built_for = {"target": target.name, "profile": target.profile.name}
    requires = {**artifact.requires, **built_for, COMPILED: maker, **target.device.get("engine_options", {})}
    compiled_artifact = replace(artifact, model=file, requires=requires, alternatives=(), coverage=None)
    rank = target.profile.rank + 1
    title = f"{target.title}, compiled by {maker}"
    alternative = Alternative(f"{target.name}-compiled", title, rank, compiled_artifact, target.architecture)
    return replace(built, artifact=replace(artifact, alternatives=(alternative, *artifact.alternatives)))


_LEFT_OUT = "⟨emulate=False⟩ excludes its kernels"
_NOTED_S = 60.0  # a shorter wait needs no announcement


def target_coverage(job: Job, built: Built, *, emulate: bool = True, route: ExecutionRoute | None = None) -> Coverage:
    """Return the coverage of `built` on its target.

    Args:
        route: the route to the target's kernels, such as a board of the target's kind, or None if edgeq must find it.
        emulate: True to emulate the target's kernels if possible.

    Raises:
        CheckFailedError: the target's own kernels do not accept the model.
        RuntimeUnavailableError: the target is this machine, and its kernels do not accept the model.
    """
    if built.artifact.coverage is not None:
        return built.artifact.coverage
    if route is not None and built.artifact.plugin is not None:
        # A board sends only the profiling events of onnxruntime's own kernels.
        return Coverage(basis="unknown", how=f"a board does not report what {built.artifact.plugin.name} executes")
    target, feed, source = built.target, next(iter(job.validation)).inputs, job.prepared.model
    machine, progress = job.machine, job.progress
    rules = int8_rules(target.backend)
    hazards = prepared_for(job.prepared, target).hazards
    predicted = predict_int8(job.prepared.graph, rules, built.artifact.scheme, hazards=hazards)
    explain = explainer(built, predicted)
    if route is None and runs_natively(target, machine):
        with progress.stage("What runs in int8"):
            return measure_coverage(built.artifact.model, built.artifact.settings(), feed, source, explain)
    if route is None:
        route = find_route(target, machine, built.artifact.settings().engine, progress=progress)
    reason = _why_not(route, emulate=emulate)
    if not reason and route.speed is not None:
        about = forecast_coverage(predicted, count_macs(source, feed), rules_title(target.backend), "")
        reason = too_slow(route, about, 1, target, progress)
    if not reason:
        coverage = _measure(built, route, feed, source, explain, progress)
        if isinstance(coverage, Coverage):
            return coverage
        reason = coverage
    if built.artifact.plugin is not None:
        return Coverage(basis="unknown", how=reason)
    return forecast_coverage(predicted, count_macs(source, feed), rules_title(target.backend), reason)


def check_measurable(
    targets: Iterable[Target], machine: Machine, *, engine: Engine | None = None, emulate: bool = True
) -> None:
    """Raise an error if a required coverage cannot be measured because the kernels of a target, or the engine's kernels
    for it, cannot run here. This check comes before any work is done.

    Raises:
        RuntimeUnavailableError: the kernels cannot run here. The message names the first such target and what to do.
    """
    for target in targets:
        if runs_natively(target, machine) or backend_named(target.backend).targeted:
            continue  # edgeq's own compilers record where they placed each operator
        reason = _why_not(find_route(target, machine, engine), emulate=emulate)
        if reason:
            raise unchecked(f"{target.name}: {reason}")


def too_slow(route: ExecutionRoute, coverage: Coverage, inferences: int, target: Target, progress: Progress) -> str:
    """Return why a run on the target's kernels would take too long, or "" if it would not. If the run would take a
    minute or more, write a note.

    Args:
        coverage: the model's coverage, which contains its number of multiply-accumulates.
    """
    inference_s = route.seconds(coverage.int8_macs, coverage.float_macs)
    if inference_s > REQUEST_S:
        return f"one inference would take about {inference_s / 3600:.1f} h on {route.how}"
    if inference_s * inferences >= _NOTED_S:
        takes = f"running it on {route.how} takes about {inference_s * inferences / 60:.0f} min"
        progress.note(f"{target.name}: {takes}; ⟨emulate=False⟩ skips that")
    return ""


def _why_not(route: ExecutionRoute, *, emulate: bool) -> str:
    """Return why the target's kernels are not run, or "" if they are run."""
    if route.where not in (NATIVE, EMULATED) or route.start is None:
        return route.reason or f"{route.how} has no kernels to run"
    return "" if emulate or route.where == NATIVE else _LEFT_OUT


def _measure(
    built: Built, route: ExecutionRoute, feed: Mapping[str, Any], source: ir.Model, explain: Explain, progress: Progress
) -> Coverage | str:
    """Run the model on `route` and return its coverage. If the kernels cannot be started, return the reason."""
    assert route.start is not None
    settings = built.artifact.settings(threads=0 if route.native_speed else 1)
    basis: Basis = "native" if route.where == NATIVE else "emulated"
    with ExitStack() as stack:
        stack.enter_context(progress.stage(f"Coverage on {route.how}"))
        try:
            opener = stack.enter_context(route.start()).open
        except BoardError:  # the board failed, not the model
            raise
        except EdgeqError as error:
            return error.text
        try:
            model = built.artifact.model
            return measure_coverage(model, settings, feed, source, explain, basis=basis, how=route.how, opener=opener)
        except BoardError:  # the board failed, not the model
            raise
        except (RuntimeUnavailableError, ValueError) as error:
            raise CheckFailedError(
                f"the model fails on {built.target.name} ({route.how}): {one_line(error)}",
                "Do not deploy it there; choose another scheme",
            ) from error


# The minimum share of work in int8, and the minimum share of bytes saved. If both shares are smaller, quantization had
# no useful effect.
_LEAST_SHARE = 0.01


def artifact_key(target: Target, scheme: Scheme) -> str:
    """Return a key made of everything that determines the artifact for `target`. Targets with the same key share an
    artifact.
    """
    device = target.name if backend_named(target.backend).targeted else ""
    return json.dumps([target.backend, device, plain(scheme)], sort_keys=True)


T = TypeVar("T")
_BUILD = "build"


class Builds:
    """Build and prove the artifacts of `job` in a private folder. What several targets share is computed only once.

    Args:
        timed: True if proofs time the artifacts against float32.
        emulate: True to emulate a target's kernels to find out what runs in int8 there.
    """

    def __init__(self, job: Job, folder: Path, *, timed: bool = True, emulate: bool = True) -> None:
        self.job = job
        self._folder, self._timed, self._emulate = folder, timed, emulate
        self._results: dict[tuple[str, str], Any] = {}

    def once(self, step: str, key: str, run: Callable[[], T]) -> T:
        """Return the result of a step. The first call for a key runs the step, and later calls return its result.

        Args:
            step: name of the step: a build, a proof, a coverage, a decision or a repair.
            key: text made of everything that determines the result; see `artifact_key`.
        """
        if (step, key) not in self._results:
            self._results[step, key] = run()
        result: T = self._results[step, key]
        return result

    def build(self, target: Target, scheme: Scheme) -> Built:
        """Return the artifact that exactly this scheme gives for `target`.

        Raises:
            EdgeqError: the backend cannot build the artifact.
        """

        def build_new() -> Built:
            folder = self._folder / f"build-{len(self._existing())}"
            folder.mkdir()
            return self._build(target, scheme, folder / "model.onnx")

        return self.for_target(target, self.once(_BUILD, artifact_key(target, scheme), build_new))

    def build_at(self, target: Target, scheme: Scheme, destination: Path) -> Built:
        """Return the result of `build`, with the model at `destination`. If the artifact already exists and consists of
        one file, copy that file.

        Raises:
            EdgeqError: the backend cannot build the artifact.
        """
        existing: Built | None = self._results.get((_BUILD, artifact_key(target, scheme)))
        if existing is None or not _is_one_file(existing):
            return self._build(target, scheme, destination)
        shutil.copyfile(existing.artifact.model, destination)
        return self.for_target(target, replace(existing, artifact=replace(existing.artifact, model=destination)))

    def _existing(self) -> list[Built]:
        return [built for (step, _), built in self._results.items() if step == _BUILD]

    def _build(self, target: Target, scheme: Scheme, destination: Path) -> Built:
        """Return a new artifact. If an existing artifact differs only in session options, derive the new artifact from
        that one.
        """

        def is_alike(built: Built) -> bool:
            same_graph = built.target.backend == target.backend and scheme.equals_but_options(built.artifact.scheme)
            return same_graph and _is_one_file(built)

        backend, twin = backend_named(target.backend), next(filter(is_alike, self._existing()), None)
        with self.job.progress.stage("Quantizing"):
            artifact = backend.with_options(twin.artifact, scheme, destination) if twin is not None else None
            if twin is None or artifact is None:
                return build(self.job, target, scheme, destination)
        return self.for_target(target, replace(twin, artifact=artifact))

    def for_target(self, target: Target, built: Built) -> Built:
        """Adapt an artifact that was built for another target to `target`, and return it. The artifact's proof uses
        kernels that compute like the kernels of `target`.
        """
        artifact = computed_as_there(built.artifact, target, self.job.host)
        return replace(built, target=target, artifact=artifact)

    def prove(self, built: Built, scheme: Scheme | None, *, native: bool) -> Proof:
        """Return the proof of an artifact in the engine that the artifact names.

        Args:
            scheme: the scheme by which `build` made the artifact, or None if the artifact was made in another way. With
                None, the proof is not cached.
            native: True if this machine's kernels are the target's kernels. Timings are then valid for the target.
        """
        job, timed = self.job, self._timed and native
        if scheme is None:
            coverage = target_coverage(job, built, emulate=self._emulate)
            check_gain(job, built, coverage)
            return prove_built(job, built, coverage, timed=timed)
        artifact = artifact_key(built.target, scheme)
        engine = built.artifact.engine.name if built.artifact.engine is not None else ""
        # Targets with the same artifact may have different kernels, so the coverage also depends on the target.
        coverage = self.once(
            "coverage",
            json.dumps([artifact, built.target.name, engine]),
            lambda: target_coverage(job, built, emulate=self._emulate),
        )
        check_gain(job, built, coverage)
        # The outputs depend only on the artifact and on the options that its proof needs on this machine.
        proof = self.once(
            "proof",
            json.dumps([artifact, built.artifact.proof_options, timed, engine], sort_keys=True),
            lambda: prove_built(job, built, coverage, timed=timed),
        )
        return replace(proof, coverage=coverage)


def _is_one_file(built: Built) -> bool:
    return list(built.artifact.model.parent.iterdir()) == [built.artifact.model]


def prove_built(
    job: Job, built: Built, coverage: Coverage, *, timed: bool, threads: int = 0, count: int | None = None
) -> Proof:
    """Prove an artifact on the job's validation samples. See `prove`."""
    proof = prove(
        job.prepared,
        built.artifact,
        ProofSamples(job.validation, job.held_out, job.float_outputs, job.basis),
        coverage,
        task=job.task,
        timed=timed,
        threads=threads,
        workers=job.workers,
        count=count,
        progress=job.progress,
    )
    return replace(proof, doubts=job.doubts)


def simulated_proof(job: Job, built: Built, proof: Proof) -> Proof:
    """Return the proof with the figures of the target's simulator, if layers run in float16 there. The simulation that
    proves such an artifact computes these layers in float32.
    """
    artifact, simulator = built.artifact, backend_for(built.target).simulator()
    half = artifact.coverage is not None and any(node.precision == HALF for node in artifact.coverage.nodes)
    if not half or artifact.simulation is None or simulator is None:
        return proof
    count = max(1, _SIMULATED_MACS // max(1, sum(node_macs(job.prepared.model).values())))
    samples = spread_over(job.validation, count)
    with job.progress.stage("Running the simulator"), simulator(built.target) as opener:
        settings = artifact.proof_settings()
        sessions = {FLOAT: open_session(job.prepared.path), INT8: opener(artifact.proof_model, settings)}
        settings_by_name = {FLOAT: SessionSettings(), INT8: settings}
        evaluation = evaluate_sessions(sessions, samples, task=job.task, reference=FLOAT, settings=settings_by_name)
    return replace(
        proof, agreement=evaluation.agreement[INT8], accuracy=evaluation.accuracy, samples=evaluation.samples
    )


def check_gain(job: Job, built: Built, coverage: Coverage) -> None:
    """Raise an error if a dynamic or weight-only model still runs in float and its file is not smaller.

    Raises:
        ModelError: the model gains nothing. The message names the operator with the most work.
    """
    scheme, total = built.artifact.scheme, coverage.int8_macs + coverage.float_macs
    if scheme.mode == "static" or coverage.int8_macs >= max(1, _LEAST_SHARE * total) or not total:
        return
    largest = max(coverage.float_nodes, key=lambda node: node.macs, default=None)
    if largest is None or model_bytes(built.artifact.model) < (1 - _LEAST_SHARE) * model_bytes(job.source):
        return
    raise ModelError(
        f"{job.source}: {scheme.mode} quantization leaves {coverage.float_macs / total:.2%} of the "
        "multiply-accumulates in float and makes the file no smaller; "
        f"{largest.op_type} ({largest.name}): {largest.reason}",
        "Quantize it statically: leave out ⟨mode='dynamic'⟩ or ⟨weight_only⟩ (with the older calibrate.py, "
        "--static=true)",
    )


def explainer(built: Built, predicted: tuple[NodePrediction, ...]) -> Explain:
    """Return a function of (node, operator type) that explains why the node runs in float. The reason can be the
    scheme, the backend's rules, or the optimiser's fusions.

    Args:
        predicted: the predictions for the prepared model, made with the scheme that was built.
    """
    scheme, plugin = built.artifact.scheme, built.artifact.plugin
    predictions = {node.name: node for node in predicted}

    def explain(name: str, op_type: str) -> str:
        """Return the reason. See `explainer`."""
        node = predictions.get(name)
        if node is not None and node.verdict == "float":
            return node.reason
        if plugin is not None:
            return _in_plugin(plugin.engine, scheme, node.op_type if node else op_type)
        if scheme.mode == "weight-only" and {name, ALL_NODES}.intersection(scheme.float_compute or ()):
            return "it expands its weights in blocks to float"
        if scheme.mode == "static":
            if node is None:
                return "ONNX Runtime's optimiser made it from nodes that are not all in int8"
            return "it could run in int8, but not all of its neighbours are in int8, so ONNX Runtime did not fuse it"
        source_node = predictions.get(name.partition("/")[0])
        if node is None and source_node is not None and source_node.op_type == "GRU":
            return f"of {source_node.name}, only the products run in int8"
        kind = node.op_type if node else op_type
        if kind not in (scheme.quantized_types or ()):
            return foreign_type_reason(kind)
        if kind == "GRU":
            return "it is too narrow to gain from integer products, or has a form that cannot be rewritten with them"
        return "onnxruntime's quantizer left it in float"

    return explain


def _in_plugin(engine: Engine, scheme: Scheme, op_type: str) -> str:
    if scheme.mode == "float":
        return "nothing is quantized"
    if scheme.pair not in engine.int8.pairs:
        return f"{engine.name} has no integer kernels for {scheme.pair}"
    if engine.int8.operators and op_type not in engine.int8.operators:
        return f"{engine.name} has no integer form of {op_type}"
    return f"it could run in int8, but not all of its neighbours are in int8, so {engine.name} did not fuse it"


def runtime_requirements(job: Job, target: Target, artifact: Artifact) -> tuple[Compatibility, ArtifactCheck]:
    """Return what an artifact requires of onnxruntime, and a check that the target's release meets these requirements.

    Raises:
        CheckFailedError: the target's release is too old, or it computes some products wrongly on the target's CPU.
        ModelError: none of the releases that were probed could load the artifact.
    """
    requirements = compatibility(shared_model(artifact.model, job.prepared.graph).model, target.architecture)
    device = target.runtime.get("onnxruntime")
    for row in load_wrong_kernels():
        # If a target names no release, it may have any release. Then only faults with a weight limit count: weights
        # within the limit are correct in every release and cost nothing.
        in_release = row.in_release(device) if device is not None else row.weight_limit > 0
        concerned = row.provider == artifact.provider and set(row.products).intersection(requirements.products)
        if in_release and concerned and row.on(target.architecture, target.features):
            raise CheckFailedError(f"{target.name}: {row.explain(device or 'of some releases', requirements.products)}")
    if device is None:
        return requirements, ArtifactCheck(
            "runtime", "none", _TABLE, f"needs onnxruntime {requirements.minimum}; the target names none"
        )
    if not requirements.runs_on(device):
        raise CheckFailedError(
            f"{target.name}: {requirements.explain(device)}",
            "Update onnxruntime there and correct [runtime] in the target's file, or choose another scheme",
        )
    return requirements, ArtifactCheck("runtime", "modelled", _TABLE, requirements.explain(device), True)


def kernels_saturate(target: Target, scheme: Scheme, engine: Engine | None = None) -> bool:
    """Return whether the target's kernels for a scheme's types add two products in 16 bits.

    Args:
        engine: the plug-in whose kernels are meant, or None for ONNX Runtime's own kernels.
    """
    if engine is None:
        return target.profile.saturates(scheme)
    on_cpu = target.profile.min_compute_capability is None and backend_named(target.backend).runs_engines
    static = on_cpu and scheme.mode == "static"
    return static and engine.has_saturating_kernels(scheme.pair, target.architecture, target.features)


def must_decide(target: Target, scheme: Scheme, overrides: Mapping[str, Any], engine: Engine | None = None) -> bool:
    """Return whether edgeq must choose a mitigation. This is so if the kernels saturate, mitigations are known, and the
    user has not chosen a mitigation.

    Args:
        engine: see `kernels_saturate`.
    """
    undecided = not _DECIDED.intersection(overrides)
    return undecided and bool(mitigation_costs(target, engine)) and kernels_saturate(target, full_range(scheme), engine)


def mitigation_costs(target: Target, engine: Engine | None) -> Mapping[str, float]:
    """Return mitigation → inference time relative to that of the full range. The times come from the plug-in or the
    target's profile.
    """
    return engine.int8.remedy_cost if engine is not None else target.profile.hazards.get("remedy_cost", {})


def full_range(scheme: Scheme) -> Scheme:
    """Return the scheme with full 8-bit weights and without a mitigation of saturation."""
    return scheme.replace(reduce_range=False, fit_pairs=False, fit_seen=False)
