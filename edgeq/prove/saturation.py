"""Decide what to do about kernels that add two products in 16 bits. The choices are to do nothing, or to use smaller
weights, other types, or slower kernels.

edgeq builds and measures each mitigation. It chooses the cheapest mitigation that keeps the accuracy of exact kernels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgeq.backends.base import Artifact
from edgeq.data.open_source import Data
from edgeq.data.samples import open_samples
from edgeq.emulate.audit import Audit, KernelSimulation, SimulatedSession, audit, build_graph_settings, count_samples
from edgeq.errors import EdgeqError, UsageError
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.hardware.target import Target
from edgeq.measure.accuracy import Evaluation, evaluate_sessions
from edgeq.measure.loaded_model import open_model, refuse_ignored
from edgeq.model.load import model_signature
from edgeq.model.macs import node_macs
from edgeq.model.saturation import SaturationTable, exact_options, saturation_table
from edgeq.prove.builds import Builds, artifact_key, full_range, mitigation_costs
from edgeq.prove.job import exact_settings, on_exact_kernels
from edgeq.prove.proof import FLOAT
from edgeq.run.engines import DEFAULT, Engine, find_description
from edgeq.run.session import SessionSettings, open_session
from edgeq.scheme import Scheme
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import NOT_WRITTEN, marked


class MitigationTrial:
    """Hold the artifacts of several schemes for one target, and compare them with the float model.

    Args:
        builds: object that builds the artifacts. Its job contains the samples on which the artifacts run.
        full: the scheme with full 8-bit weights and no mitigation.
        table: the target's kernels that saturate.

    Raises:
        EdgeqError: `full` cannot be built.
    """

    def __init__(
        self,
        builds: Builds,
        target: Target,
        full: Scheme,
        *,
        table: SaturationTable,
    ) -> None:
        self.job = builds.job
        self._builds, self._target, self._scheme = builds, target, full
        self._table = table
        self._reference = open_session(builds.job.prepared.path)
        self.full = builds.build(target, full).artifact
        self._saturates = match_profile(self.job.machine, load_profiles()).profile.saturates
        # None means that the machine's own kernels are exact, or that a model of exact kernels replaces them.
        self._exact = exact_settings(self.full) if self._saturates(full) else None
        self._sessions: dict[Path, Any] = {}

    def artifact(self, scheme: Scheme) -> Artifact:
        """Return the artifact for `scheme`. If the scheme differs from the full range only in session options, use the
        file of the full range.

        Raises:
            EdgeqError: the backend cannot build the artifact, or onnxruntime does not accept the options.
        """
        # Options do not change the file, so there is nothing to build.
        if self.adds_options_alone(scheme):
            options = {**self.full.session_options, **scheme.session_options}
            artifact = replace(self.full, scheme=scheme, session_options=options)
            if scheme != self._scheme and artifact.settings() != self._exact:
                # raises an error if onnxruntime does not accept the options for this graph
                open_session(artifact.model, artifact.settings())
            return artifact
        return self._builds.build(self._target, scheme).artifact

    def adds_options_alone(self, scheme: Scheme) -> bool:
        """Return whether `scheme` differs from the full range only in session options."""
        return scheme.equals_but_options(self._scheme)

    def weights(self, artifact: Artifact) -> Audit:
        """Audit the saturation on the target's kernels using only the artifact's weights."""
        return audit(artifact.model, artifact.settings(), table=self._table)

    def audit(self, artifact: Artifact, samples: int) -> Audit:
        """Audit how saturation on the target's kernels affects the artifact's outputs, over `samples` samples."""
        return audit(
            artifact.model,
            artifact.settings(),
            samples=self.job.validation,
            reference=self._reference,
            exact=self._session(artifact),
            count=samples,
            table=self._table,
            progress=self.job.progress,
        )

    def evaluate(self, artifacts: Mapping[str, Artifact], samples: int) -> Evaluation:
        """Compare each artifact on exact kernels with the float model, and return the results by name. The comparison
        uses `samples` samples or, with a task, all the samples of the proof. Artifacts that share a file share a
        result, because exact kernels compute the same outputs for them.
        """
        name_by_path: dict[Path, str] = {}
        for name, artifact in artifacts.items():
            name_by_path.setdefault(artifact.model, name)
        task = self.job.task
        evaluation = evaluate_sessions(
            {FLOAT: self._reference, **{name: self._session(artifacts[name]) for name in name_by_path.values()}},
            self.job.validation,
            task=task,
            reference=FLOAT,
            progress=self.job.progress,
            # A metric over a few samples is too coarse to tell mitigations apart.
            count=None if task else samples,
            known_outputs={FLOAT: self.job.float_outputs} if self.job.float_outputs else {},
            basis=self.job.basis,
        )
        stands = {name: name_by_path[artifact.model] for name, artifact in artifacts.items()}
        return replace(
            evaluation,
            agreement={name: evaluation.agreement[stand_in] for name, stand_in in stands.items()},
            accuracy={name: evaluation.accuracy[stand_in] for name, stand_in in stands.items() if evaluation.accuracy},
        )

    def _session(self, artifact: Artifact) -> Any:
        """Return a session that runs the artifact on kernels that do not saturate. Artifacts that share a file share
        the session.
        """
        if artifact.model not in self._sessions:
            self._sessions[artifact.model] = self._open(artifact)
        return self._sessions[artifact.model]

    def _open(self, artifact: Artifact) -> Any:
        settings = artifact.settings()
        if not self._saturates(artifact.scheme):
            return open_session(artifact.model, settings)
        if self._exact is None:
            return SimulatedSession(KernelSimulation(artifact.model, settings, saturating=False))
        return open_session(artifact.model, on_exact_kernels(settings))


FULL = "full range"
# The allowed loss against exact kernels: in dB of SQNR, or in the unit of the task's metric (half a point).
TOLERATED_DB, TOLERATED_METRIC = 0.5, 0.005
_SAMPLES = 16
# Number of samples for the audit of the full range. The full range is chosen only if its weights are safe, so the loss
# found in the audit never affects the choice. It is shown to the user.
_AUDITED = 2


@dataclass(frozen=True)
class Mitigation:
    """Describe one mitigation of saturation and its result on the target.

    Attributes:
        name: the name shown to users.
        scheme: the scheme to build.
        cost: the inference time relative to that of the full range, from the profile.
        safe: True if nothing can saturate, whatever the input.
        sqnr_db: the SQNR against float32 on the target. If something can saturate, this SQNR comes from an exact model
            of the kernels.
        metric: the task's primary metric on the target; None without a task, or if something can saturate.
        failed: the reason why the scheme cannot be built, or "" if it can be built.
    """

    name: str
    scheme: Scheme = field(metadata=NOT_WRITTEN)
    cost: float
    safe: bool = False
    sqnr_db: float = -math.inf
    metric: float | None = None
    failed: str = ""


@dataclass(frozen=True)
class Decision:
    """Record the decision for one target, and its reasons.

    Attributes:
        chosen: the mitigation that edgeq builds.
        mitigations: the mitigations that were considered, with the full range first. If a mitigation is as good as
            exact kernels, all slower mitigations are left out.
        exact_db, exact_metric: the SQNR and the metric of the full range on kernels that do not saturate.
        audit: the audit of the full range.
        samples: the number of samples on which the figures were measured. The exception is figures with saturation,
            which were measured on `audit.samples` samples.
        why: the reason for the choice, as one sentence without a full stop.
    """

    chosen: Mitigation
    mitigations: tuple[Mitigation, ...]
    exact_db: float
    exact_metric: float | None
    audit: Audit
    samples: int
    why: str

    def __record__(self) -> dict[str, Any]:
        return {
            "chosen": self.chosen.name,
            "why": self.why,
            "exact": {"sqnr_db": self.exact_db, "metric": self.exact_metric},
            "samples": self.samples,
            "mitigations": self.mitigations,
            "audit": {key: value for key, value in marked(self.audit).items() if key != "layers"},
        }


def kernel_table(target: Target, engine: Engine | None = None) -> SaturationTable:
    """Return the table of the kernels that saturate on the target. For `engine`, see `kernels_saturate`."""
    return saturation_table() if engine is None else saturation_table(engine.int8.saturation, target.features)


def decision_for(builds: Builds, target: Target, scheme: Scheme, engine: Engine | None = None) -> Decision:
    """Return the decision for a target for which `must_decide` is true. See `decide`. On ONNX Runtime's own kernels,
    targets with the same artifact and the same costs share a decision.
    """
    if engine is not None:
        return decide(builds, target, scheme, engine=engine)
    key = json.dumps([artifact_key(target, full_range(scheme)), dict(mitigation_costs(target, None))])
    return builds.once("decision", key, lambda: decide(builds, target, scheme))


def decide(builds: Builds, target: Target, scheme: Scheme, *, engine: Engine | None = None) -> Decision:
    """Choose the best mitigation with which to build `scheme` for a target whose kernels can saturate.

    Args:
        engine: see `kernels_saturate`.

    Raises:
        EdgeqError: the full range cannot be built or run.
    """
    table = kernel_table(target, engine)
    trial = MitigationTrial(builds, target, full_range(scheme), table=table)
    full_audit = trial.audit(trial.full, _AUDITED)
    considered: list[Mitigation] = []

    def consider(candidates: Sequence[Mitigation]) -> Evaluation | None:
        """Build and measure each candidate, or record why it cannot be built. Return None if none can be built."""
        artifacts: dict[str, Artifact] = {}
        failed: dict[str, str] = {}
        for mitigation in candidates:
            try:
                artifacts[mitigation.name] = trial.artifact(mitigation.scheme)
            except EdgeqError as error:
                failed[mitigation.name] = error.text
        evaluation = trial.evaluate(artifacts, _SAMPLES) if artifacts else None
        for mitigation in candidates:
            artifact = artifacts.get(mitigation.name)
            if artifact is None or evaluation is None:
                considered.append(replace(mitigation, failed=failed[mitigation.name]))
            elif mitigation.scheme.fit_seen:
                count = count_samples(sum(node_macs(builds.job.prepared.model).values()))
                considered.append(_with_evaluation(mitigation, evaluation, trial.audit(artifact, count)))
            else:
                safe = full_audit.safe if mitigation.name == FULL else trial.weights(artifact).safe
                considered.append(_with_figures(mitigation, safe, evaluation, full_audit))
        return evaluation

    full, *alternatives = _mitigations(mitigation_costs(target, engine), scheme)
    fitted = [m for m in alternatives if m.scheme.fit_seen]
    alternatives = [m for m in alternatives if not m.scheme.fit_seen and not full_audit.safe]
    # Builds take most of the time here. So first consider the cheapest mitigations and those that need no build.
    least_cost = min((m.cost for m in alternatives), default=0.0)
    cheapest = [m for m in alternatives if m.cost == least_cost or trial.adds_options_alone(m.scheme)]
    evaluation = consider([full, *cheapest])
    assert evaluation is not None  # the evaluation exists because the full range could be built
    exact_db, exact_metric = evaluation.agreement[FULL].sqnr_db, _metric(evaluation, FULL)
    loss = _loss(evaluation, exact_db, exact_metric)

    def close() -> list[Mitigation]:
        usable = (m for m in considered if m.safe or (m.scheme.fit_seen and not m.failed))
        return [m for m in usable if loss(m) <= 1]

    affordable = min((m.cost for m in close()), default=math.inf)
    if cheaper := [m for m in alternatives if m not in cheapest and m.cost < affordable]:
        consider(cheaper)
    if not close():
        # No mitigation that is safe for every input is accurate enough. Try ranges that are safe for the samples, and
        # take their loss into account.
        for mitigation in fitted:
            consider([mitigation])
    choice = min(close(), key=lambda m: (m.cost, loss(m)), default=None)
    if choice is None:
        choice = min([m for m in considered if m.safe] or considered[:1], key=loss)
    why = _describe_choice(choice, full_audit, exact_db)
    return Decision(choice, tuple(considered), exact_db, exact_metric, full_audit, evaluation.samples, why)


def _mitigations(cost: Mapping[str, float], scheme: Scheme) -> tuple[Mitigation, ...]:
    full = full_range(scheme)
    precise = full.replace(session_options={**full.session_options, **exact_options()})
    (option,) = exact_options()
    changed = {
        "fit_pairs": ("fitted range", full.replace(fit_pairs=True)),
        "fit_seen": ("range fitted to the samples", full.replace(fit_pairs=True, fit_seen=True)),
        "reduce_range": ("7-bit weights", full.replace(reduce_range=True)),
        "weight_type": ("U8U8", full.replace(activation_type="uint8", weight_type="uint8")),
        option: (option.rpartition(".")[2], precise),
    }
    return (
        Mitigation(FULL, full, 1.0),
        *(Mitigation(name, changed[key][1], cost[key]) for key, (name, _) in changed.items() if key in cost),
    )


def _with_figures(mitigation: Mitigation, safe: bool, evaluation: Evaluation, full: Audit) -> Mitigation:
    if safe:
        return replace(
            mitigation,
            safe=True,
            sqnr_db=evaluation.agreement[mitigation.name].sqnr_db,
            metric=_metric(evaluation, mitigation.name),
        )
    return replace(mitigation, sqnr_db=full.float_db[0] if mitigation.name == FULL and full.float_db else -math.inf)


def _with_evaluation(mitigation: Mitigation, evaluation: Evaluation, audit_result: Audit) -> Mitigation:
    """Evaluate a mitigation whose ranges are fitted to the samples, so other inputs may saturate. If sums saturate on
    the audited samples, subtract the loss from the SQNR and leave out the metric. Otherwise use the metric of exact
    kernels.
    """
    sqnr_db = evaluation.agreement[mitigation.name].sqnr_db
    if audit_result.float_db is not None and audit_result.clipped:
        return replace(mitigation, sqnr_db=sqnr_db - max(0.0, audit_result.float_db[1] - audit_result.float_db[0]))
    metric = _metric(evaluation, mitigation.name)
    return replace(mitigation, sqnr_db=sqnr_db, metric=metric, safe=audit_result.safe)


def _metric(evaluation: Evaluation, name: str) -> float | None:
    return evaluation.accuracy[name].value if evaluation.accuracy else None


def _loss(evaluation: Evaluation, exact_db: float, exact_metric: float | None) -> Callable[[Mitigation], float]:
    """Return a function that returns the loss of a mitigation against exact kernels, in units of the allowed loss. The
    loss is measured in the task's metric if there is a task, otherwise in SQNR.
    """
    sign = 1.0 if not evaluation.accuracy or evaluation.accuracy[FULL].higher_is_better else -1.0

    def loss(mitigation: Mitigation) -> float:
        if exact_metric is not None and mitigation.metric is not None:
            return sign * (exact_metric - mitigation.metric) / TOLERATED_METRIC
        # If the exact kernels add no noise, there is no difference in dB to measure.
        return (exact_db - mitigation.sqnr_db) / TOLERATED_DB if math.isfinite(exact_db) else 0.0

    return loss


def _describe_choice(choice: Mitigation, full_audit: Audit, exact_db: float) -> str:
    if full_audit.safe:
        return f"{choice.name}: {full_audit.summary()}"
    by = f"{exact_db - choice.sqnr_db:.1f} dB below exact kernels"
    if not choice.safe:
        by = f"{by} on samples, and other inputs can saturate" if choice.scheme.fit_seen else "not free of saturation"
    return f"{choice.name}, at {choice.cost:g} times the time: {full_audit.summary()}; this is {by}"


@dataclass(frozen=True)
class Audited:
    """Record the result of an audit, with the model and the engine whose kernels were audited. `target` is "" if the
    audit is for any CPU on which these kernels saturate.
    """

    name: str
    audit: Audit
    engine: str = DEFAULT
    target: str = ""

    def __record__(self) -> dict[str, Any]:
        return {"model": self.name, "engine": self.engine, "target": self.target, **marked(self.audit)}


def audit_saturation(
    path: Path,
    data: Data | None = None,
    *,
    reference: Path | None = None,
    variant: str | None = None,
    config: dict[str, str] | None = None,
    engine: Engine | None = None,
    target: Target | None = None,
    progress: Progress = SILENT,
) -> Audited:
    """Compute a bound on the saturation in a quantized model from its weights. With samples, also measure the
    saturation.

    Args:
        path: a quantized model, or a bundle.
        data: samples to simulate the model on.
        reference: the float model, against which the loss caused by saturation is measured; needs `data`.
        variant: the variant of a bundle, or None for the variant for this machine.
        config: session options for a model file. A variant of a bundle has its own session options.
        engine: the engine whose kernels are audited. None means the engine of the bundle's variant, or else ONNX
            Runtime's own kernels.
        target: the target that runs the model. Nothing saturates on a target with exact kernels. None means a CPU on
            which the kernels saturate.

    Raises:
        UsageError: `reference` is given without `data`, or edgeq has no model of the engine's kernels.
        EdgeqError: the model or the data cannot be loaded, read or run.
    """
    if reference is not None and data is None:
        raise UsageError("the comparison with a float model needs samples", "Give ⟨data⟩")
    if reference is not None:
        model_signature(reference)  # checks the file before onnxruntime opens it
    settings = SessionSettings(config=config or {})
    refuse_ignored(settings, path)
    with open_model(path, settings, variant=variant) as loaded:
        plugin = engine if engine is not None and engine.module else find_description(loaded.settings.engine)
        name = plugin.name if plugin is not None else DEFAULT
        if plugin is not None and not plugin.int8.saturation:
            raise UsageError(f"it is unknown how {name}'s kernels saturate", "Leave ⟨engine⟩ out")
        if target is not None and not _saturates(target, plugin):
            return Audited(loaded.name, Audit(()), name, target.name)
        features = target.features if target is not None else frozenset[str]()
        samples = None
        # Without samples, the weights give a bound that holds for every input.
        if data is not None:
            samples = open_samples(data, loaded.signature, preprocess=loaded.preprocess, progress=progress)
        audit_result = audit(
            loaded.model,
            build_graph_settings(loaded.settings) if plugin is not None else loaded.settings,
            samples=samples,
            reference=open_session(reference) if reference is not None else None,
            count=data.count if data is not None else None,
            table=saturation_table(plugin.int8.saturation, features) if plugin is not None else None,
            progress=progress,
        )
        return Audited(loaded.name, audit_result, name, target.name if target is not None else "")


def _saturates(target: Target, plugin: Engine | None) -> bool:
    if plugin is None:
        return bool(target.profile.hazards.get("saturates_int16"))
    return any(plugin.has_saturating_kernels(pair, target.architecture, target.features) for pair in plugin.int8.pairs)
