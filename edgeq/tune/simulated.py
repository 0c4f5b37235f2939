"""Tuning for a target whose kernels are not here, but whose artifacts can be simulated: accuracy alone decides.

There is nothing to time, so nothing is claimed about latency. What stands for it is the share of multiply-accumulates
in int8, which is kept as large as the accuracy asked for allows:

1. Each calibration method is built; the one with the least noise at the outputs, on a few samples, goes on.
2. If it loses more than allowed, every int8 layer is built alone in int8, the rest in the target's float type: the
   noise at the outputs is that layer's sensitivity.
3. The most sensitive layers stay in float: 1, 2, 4 ... until the loss is small enough, then by bisection, so that the
   fewest of that order stay. Then the largest of them are put back one by one, as long as the loss stays small enough.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.backends import Artifact, backend_for
from edgeq.backends.base import TargetedBackend
from edgeq.errors import GoalNotMetError
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.target import Target, resolve
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.measure.task import Task
from edgeq.pipeline.builds import model_bytes, prove_built
from edgeq.pipeline.checks import check_request
from edgeq.pipeline.job import Built, Data, Derived, Job, build_derived, derive, open_job, scheme_for
from edgeq.pipeline.package import check_bundle_output
from edgeq.pipeline.proof import FLOAT, INT8, Proof
from edgeq.pipeline.target_checks import artifact_checks
from edgeq.pipeline.variants import PackagedVariant, as_text, bundle_variants, variant_name
from edgeq.progress import SILENT, Progress
from edgeq.session import open_session
from edgeq.tune.goal import Deadline, Goal
from edgeq.tune.recover.moments import spread
from edgeq.tune.recover.sensitivity import columns

_SCREENED = 32
_RANKED = 4
_REFINEMENTS = 4


@dataclass(frozen=True)
class Trial:
    """One form of the model: the calibration method, the layers kept in float, and what was measured.

    Attributes:
        loss: accuracy lost, as a fraction: by labels, else the share of samples whose top-1 changes, else 1 - cosine.
            None where only the noise was looked at.
        noise: power of the error over power of the signal at the outputs, mean over their columns; None where not
            looked at.
    """

    method: str
    kept: tuple[str, ...]
    int8_mac_share: float
    loss: float | None = None
    noise: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "kept_in_float": list(self.kept),
            "int8_mac_share": round(self.int8_mac_share, 6),
            "loss": self.loss,
            "noise": self.noise,
        }


@dataclass(frozen=True)
class TunedElsewhere:
    """What `tune_simulated` did: the bundle, the chosen form, its proof, and everything that was tried."""

    bundle: Path
    target: Target
    goal: Goal
    chosen: Trial
    proof: Proof
    trials: tuple[Trial, ...]
    elapsed_s: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "bundle": str(self.bundle),
            "target": self.target.name,
            "simulated": True,
            "goal": self.goal.to_dict(),
            "chosen": self.chosen.to_dict(),
            "trials": [trial.to_dict() for trial in self.trials],
            "elapsed_s": round(self.elapsed_s, 3),
            "proof": self.proof.to_dict(),
        }


def is_simulated(target: str | Path) -> bool:
    """Whether artifacts for `target` are simulated here, so that their latency cannot be measured."""
    machine = detect_machine()
    chosen = resolve(target, machine)
    backend = backend_for(chosen)
    return isinstance(backend, TargetedBackend) and backend.simulated and bool(chosen.profile.missing(machine))


def tune_simulated(
    model: Path,
    data: Data | None,
    output: Path,
    *,
    target: str | Path,
    validation: Data | None = None,
    statistics: Path | None = None,
    task: Task | None = None,
    goal: Goal | None = None,
    with_float: bool = False,
    selftest: int = 2,
    force: bool = False,
    progress: Progress = SILENT,
) -> TunedElsewhere:
    """Find the form with the most int8 that loses at most `goal.max_drop` in simulation, and write it as a bundle.

    Args:
        goal: its objective is not looked at: there is no latency here.
        Others as `edgeq.tune`.

    Raises:
        GoalNotMetError: even with all layers in float, or within the budget, nothing keeps the accuracy.
        EdgeqError: as the stages have it.
    """
    goal = goal or Goal()
    deadline = Deadline(goal.budget_s)
    check_bundle_output(output, force=force, model=model, samples=(data, validation), statistics=statistics)
    chosen = resolve(target, detect_machine())
    check_request([chosen], {}, task=task, max_drop=None)
    with tempfile.TemporaryDirectory(prefix="edgeq-tune-") as folder:
        workdir = Path(folder)
        job = open_job(model, data, validation, workdir, statistics=statistics, progress=progress)
        bench = _Bench(job, chosen, task, workdir, progress)
        best = find_form(bench, methods_of(chosen), goal.max_drop, deadline.passed)
        if best is None:
            tried = [t for t in bench.trials if t.loss is not None]
            least = min(tried, key=lambda t: t.loss or 0.0)
            raise GoalNotMetError(
                f"no form for {chosen.name} loses at most {goal.max_drop:g} in simulation: the best, {least.loss:.4f}",
                "Allow more with --max-drop or --budget, or give more calibration samples",
                {"target": chosen.name, "trials": [trial.to_dict() for trial in bench.trials]},
            )
        built = bench.built(best)
        proof = prove_built(job, built, task=task, timed=False, progress=progress)
        notes = [f"tuned in simulation: calibration by {best.method}, {len(best.kept)} layers kept in float"]
        variant = PackagedVariant(
            built,
            proof,
            native=False,
            bytes=model_bytes(built.artifact.model),
            checks=artifact_checks(built, proof, detect_machine(), None),
        )
        bundle_variants(
            job,
            {variant_name(chosen): variant},
            output,
            workdir=workdir,
            selftest=selftest,
            with_float=with_float,
            command=f"edgeq tune {shlex.quote(as_text(model.name))} --data CALIBRATION -t {chosen.name} -o BUNDLE",
            notes=(*job.prepared.notes, *notes, *built.artifact.notes),
            force=force,
            progress=progress,
        )
    return TunedElsewhere(output, chosen, goal, best, proof, tuple(bench.trials), deadline.elapsed_s)


def methods_of(target: Target) -> tuple[str, ...]:
    """Calibration methods to try: the profile's own first."""
    return tuple(dict.fromkeys([target.profile.scheme.method, *target.profile.search.get("method", ())]))


class _Bench:
    """Builds and measures forms of one job, and keeps what was found."""

    def __init__(self, job: Job, target: Target, task: Task | None, workdir: Path, progress: Progress) -> None:
        self.trials: list[Trial] = []
        self._job, self._target, self._task, self._progress = job, target, task, progress
        self._workdir = workdir
        self._derived: dict[str, Derived] = {}
        self._float = open_session(job.prepared.path)

    def built(self, trial: Trial) -> Built:
        return self._build(trial.method, trial.kept)

    def screened(self, method: str) -> float:
        """A method's noise at the outputs."""
        artifact = self._build(method, ()).artifact
        noise = self._noise(artifact, _SCREENED)
        self.trials.append(Trial(method, (), _share(artifact), noise=noise))
        return noise

    def measured(self, method: str, kept: Sequence[str]) -> Trial:
        """Accuracy on all samples."""
        artifact = self._build(method, kept).artifact
        sessions = {FLOAT: self._float, INT8: open_session(artifact.proof_model, artifact.proof_settings())}
        evaluation = evaluate_sessions(
            sessions, self._job.validation, task=self._task, reference=FLOAT, progress=self._progress
        )
        if self._task is not None:
            loss = evaluation.accuracy[INT8].loss_against(evaluation.accuracy[FLOAT])
        else:
            agreement = evaluation.agreement[INT8]
            cosine = min(output.cosine for output in agreement.outputs)
            loss = 1 - (agreement.top1 if agreement.top1 is not None else cosine)
        trial = Trial(method, tuple(kept), _share(artifact), loss)
        self.trials.append(trial)
        return trial

    def sensitivities(self, method: str) -> dict[str, Sensitivity]:
        """Int8 layer → what it alone does."""
        whole = self._build(method, ()).artifact
        assert whole.coverage is not None
        layers = {n.source: n.macs for n in whole.coverage.nodes if n.kind == "int8" and n.macs}
        found = {}
        with self._progress.stage("ranking layers", len(layers)) as advance:
            for name, macs in layers.items():
                alone = self._build(method, [other for other in layers if other != name]).artifact
                found[name] = Sensitivity(self._noise(alone, _RANKED), macs)
                advance(1)
        return found

    def _build(self, method: str, kept: Sequence[str]) -> Built:
        place = Path(tempfile.mkdtemp(dir=self._workdir))
        scheme = scheme_for(self._target, {"method": method, "exclude": tuple(kept)})
        if method not in self._derived:
            self._derived[method] = derive(self._job, self._target, scheme)
        return build_derived(self._job, self._target, scheme, self._derived[method], place / "model.onnx")

    def _noise(self, artifact: Artifact, count: int) -> float:
        session = open_session(artifact.proof_model, artifact.proof_settings())
        noise: list[Any] = []
        signal: list[Any] = []
        for sample in spread(self._job.validation, count):
            feed = dict(sample.inputs)
            pairs = list(zip(self._float.run(None, feed), session.run(None, feed), strict=True))
            errors = [columns(np.asarray(got, np.float64) - wanted) for wanted, got in pairs]
            powers = [columns(np.asarray(wanted, np.float64)) for wanted, _ in pairs]
            noise = [a + b for a, b in zip(noise, errors, strict=True)] if noise else errors
            signal = [a + b for a, b in zip(signal, powers, strict=True)] if signal else powers
        shares = [np.mean(n[s > 0] / s[s > 0]) for n, s in zip(noise, signal, strict=True) if np.any(s > 0)]
        return float(np.mean(shares)) if shares else 0.0


@dataclass(frozen=True)
class Sensitivity:
    """Noise at the outputs with one layer alone in int8, and that layer's multiply-accumulates."""

    noise: float
    macs: int


def _share(artifact: Artifact) -> float:
    return artifact.coverage.share if artifact.coverage is not None else 0.0


def find_form(bench: _Bench, methods: Sequence[str], max_drop: float, expired: Callable[[], bool]) -> Trial | None:
    """The form with the fewest layers in float that loses at most `max_drop`; None where none was found in time."""
    screened = {method: bench.screened(method) for method in methods}
    method = min(screened, key=lambda name: screened[name])
    whole = bench.measured(method, ())
    if _holds(whole, max_drop):
        return whole
    ranked = bench.sensitivities(method)
    order = sorted(ranked, key=lambda name: -ranked[name].noise)
    # All but one at most: a file for int8 without any int8 is none.
    found = fewest(order[:-1], lambda kept: bench.measured(method, kept), max_drop, expired)
    if found is None:
        return None
    kept = list(found.kept)
    for name in sorted(kept, key=lambda layer: -ranked[layer].macs)[:_REFINEMENTS]:
        if expired() or len(kept) == 1:
            break
        without = bench.measured(method, [other for other in kept if other != name])
        if _holds(without, max_drop):
            found, kept = without, list(without.kept)
    return found


def fewest(
    order: Sequence[str], measured: Callable[[Sequence[str]], Trial], max_drop: float, expired: Callable[[], bool]
) -> Trial | None:
    """The shortest head of `order` whose trial holds, by doubling and bisection, as far as more layers lose less."""
    failed, size, best = 0, 1, None
    while order and not expired():
        size = min(size, len(order))
        trial = measured(order[:size])
        if _holds(trial, max_drop):
            best = trial
            break
        if size == len(order):
            return None
        failed, size = size, 2 * size
    while best is not None and len(best.kept) - failed > 1 and not expired():
        middle = (failed + len(best.kept)) // 2
        trial = measured(order[:middle])
        if _holds(trial, max_drop):
            best = trial
        else:
            failed = middle
    return best


def _holds(trial: Trial, max_drop: float) -> bool:
    return trial.loss is not None and trial.loss <= max_drop


def summary(result: TunedElsewhere) -> Mapping[str, str]:
    """The outcome in words, for people."""
    chosen = result.chosen
    return {
        "chosen": f"calibration by {chosen.method}, {chosen.int8_mac_share:.1%} of the MACs in int8",
        "kept in float": ", ".join(chosen.kept) or "nothing",
        "loss": f"{chosen.loss:.4f}" if chosen.loss is not None else "",
        "latency": "not measured: this is a simulation. Time it on the device with `edgeq_run.py bench`",
    }
