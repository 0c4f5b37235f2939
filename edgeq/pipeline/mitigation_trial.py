"""What mitigations against saturation answer: each built, and run on kernels that do not saturate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgeq.backends import Artifact
from edgeq.emulate.saturation.audit import Audit, audit
from edgeq.emulate.saturation.simulate import SimulatedSession, Simulation
from edgeq.hardware.machine import Machine
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.hardware.target import Target
from edgeq.measure.accuracy import Evaluation, evaluate_sessions
from edgeq.model.saturation import SaturationTable
from edgeq.pipeline.builds import Builds
from edgeq.pipeline.proof import FLOAT
from edgeq.pipeline.target_arithmetic import exact_settings, on_exact_kernels
from edgeq.progress import SILENT, Progress
from edgeq.scheme import Scheme
from edgeq.session import open_session


class MitigationTrial:
    """The artifacts of several schemes for one target, beside the float model.

    Args:
        builds: what is built and on which samples it is run.
        full: the scheme that uses all eight bits and nothing against saturation.
        machine: this one.
        table: which of the target's kernels saturate.

    Raises:
        EdgeqError: `full` cannot be built.
    """

    def __init__(
        self,
        builds: Builds,
        target: Target,
        full: Scheme,
        machine: Machine,
        *,
        table: SaturationTable,
        progress: Progress = SILENT,
    ) -> None:
        self.job = builds.job
        self._builds, self._target, self._scheme = builds, target, full
        self._table, self._progress = table, progress
        self._reference = open_session(builds.job.prepared.path)
        self.full = builds.build(target, full).artifact
        self._saturates = match_profile(machine, load_profiles()).profile.saturates
        # None: the machine's own kernels are exact, or a model of exact ones stands in.
        self._exact = exact_settings(self.full) if self._saturates(full) else None
        self._sessions: dict[Path, Any] = {}

    def artifact(self, scheme: Scheme) -> Artifact:
        """What is built by `scheme`; one that adds session options to the full range leaves its file as it is.

        Raises:
            EdgeqError: as the backend has it, or onnxruntime refuses the options.
        """
        if self.adds_options_alone(scheme):
            options = {**self.full.session_options, **scheme.session_options}
            artifact = replace(self.full, scheme=scheme, session_options=options)
            if scheme != self._scheme and artifact.settings() != self._exact:
                open_session(artifact.model, artifact.settings())  # onnxruntime refuses the options for some graphs
            return artifact
        return self._builds.build(self._target, scheme).artifact

    def adds_options_alone(self, scheme: Scheme) -> bool:
        """Whether `scheme` differs from the full range in nothing but session options."""
        return scheme.equals_but_options(self._scheme)

    def weights(self, artifact: Artifact) -> Audit:
        """What its weights alone say of saturation on the target's kernels."""
        return audit(artifact.model, artifact.settings(), table=self._table)

    def audit(self, artifact: Artifact, samples: int) -> Audit:
        """What saturation does to its answers on the target's kernels, on so many samples."""
        return audit(
            artifact.model,
            artifact.settings(),
            samples=self.job.validation,
            reference=self._reference,
            exact=self._session(artifact),
            count=samples,
            table=self._table,
            progress=self._progress,
        )

    def evaluate(self, artifacts: Mapping[str, Artifact], samples: int) -> Evaluation:
        """What exact kernels make of each, by name, against the float model; on so many samples, or with a task on all
        that the proof takes. Artifacts of one file differ in nothing that exact kernels compute."""
        first: dict[Path, str] = {}
        for name, artifact in artifacts.items():
            first.setdefault(artifact.model, name)
        task = self._builds.task
        found = evaluate_sessions(
            {FLOAT: self._reference, **{name: self._session(artifacts[name]) for name in first.values()}},
            self.job.validation,
            task=task,
            reference=FLOAT,
            progress=self._progress,
            count=None if task else samples,
            known={FLOAT: self.job.float_outputs} if self.job.float_outputs else {},
        )
        stands = {name: first[artifact.model] for name, artifact in artifacts.items()}
        return replace(
            found,
            agreement={name: found.agreement[other] for name, other in stands.items()},
            accuracy={name: found.accuracy[other] for name, other in stands.items() if found.accuracy},
        )

    def _session(self, artifact: Artifact) -> Any:
        """A session of it on kernels that do not saturate; artifacts of one file share it."""
        if artifact.model not in self._sessions:
            self._sessions[artifact.model] = self._opened(artifact)
        return self._sessions[artifact.model]

    def _opened(self, artifact: Artifact) -> Any:
        settings = artifact.settings()
        if not self._saturates(artifact.scheme):
            return open_session(artifact.model, settings)
        if self._exact is None:
            return SimulatedSession(Simulation(artifact.model, settings, saturating=False))
        return open_session(artifact.model, on_exact_kernels(settings))
