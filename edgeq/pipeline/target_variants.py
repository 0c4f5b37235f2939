"""The variants of a bundle for one target: built, proven, and checked on the target's own kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeq.engines import EngineChoice
from edgeq.hardware.machine import Machine
from edgeq.hardware.target import Target, runs_natively
from edgeq.measure.checks import strongest
from edgeq.model.load import model_bytes
from edgeq.pipeline.builds import Builds
from edgeq.pipeline.compiled import with_compiled
from edgeq.pipeline.emit_c import with_c
from edgeq.pipeline.emulated import check_built, checks_of
from edgeq.pipeline.engine_variants import exists_for, in_engine
from edgeq.pipeline.job import Built
from edgeq.pipeline.saturation_mitigation import Decision, decide, decision_key, must_decide
from edgeq.pipeline.target_checks import artifact_checks, refuse_left_out, runtime_requirements
from edgeq.pipeline.variants import PackagedVariant, variant_name
from edgeq.progress import Progress
from edgeq.scheme import Scheme


@dataclass(frozen=True)
class TargetVariants:
    """Makes the variants of one target after the other. Targets with the same grounds share a decision.

    Attributes:
        machine: this one.
        overrides: fields of the scheme that the user has set.
        plugins: each target gets one more variant for each of these engines.
        selftest: how many samples travel as self-test vectors.
        emulate: whether what is for other machines is checked on their kernels.
        max_drop, require_coverage: bars of each target's first variant.
        workdir: for what is made on the way.
    """

    builds: Builds
    machine: Machine
    overrides: Mapping[str, Any]
    plugins: Sequence[EngineChoice]
    selftest: int
    emulate: bool
    max_drop: float | None
    require_coverage: float | None
    workdir: Path
    progress: Progress
    _decisions: dict[str, Decision] = field(default_factory=dict)

    def of(self, target: Target, scheme: Scheme) -> tuple[PackagedVariant, list[PackagedVariant]]:
        """What runs in onnxruntime's own kernels, and what plug-ins run in its place where they are, the best first.

        Raises:
            CheckFailedError: a bar is not met, or it fails on the target's kernels.
        """
        decision, chosen = None, scheme
        if must_decide(target, scheme, self.overrides):
            decision = self._decision(target, scheme)
            chosen = decision.chosen.scheme
        job, name = self.builds.job, variant_name(target)
        built = self.builds.build(target, chosen)
        built = with_c(built, job.validation, self.workdir / f"c-{name}", images=self.selftest)
        built = with_compiled(job, built, self.workdir / f"compiled-{name}", progress=self.progress)
        variant = self._variant(built, chosen, decision)
        variant.proof.check(max_drop=self.max_drop, require_coverage=self.require_coverage)
        fitting = [choice for choice in self.plugins if exists_for(choice.engine, target)]
        preferred = [self._in_engine(choice, target, scheme, chosen, variant) for choice in fitting]
        if self.emulate and not variant.native:
            return self._emulated(variant), [self._emulated(own) for own in preferred]
        return variant, preferred

    def _decision(self, target: Target, scheme: Scheme) -> Decision:
        key = decision_key(target, scheme)
        if key not in self._decisions:
            self._decisions[key] = decide(self.builds, target, scheme, self.machine, progress=self.progress)
        return self._decisions[key]

    def _in_engine(
        self, choice: EngineChoice, target: Target, scheme: Scheme, chosen: Scheme, variant: PackagedVariant
    ) -> PackagedVariant:
        """`variant`, of the scheme `chosen`, in a plug-in; where the plug-in's kernels saturate, what is decided for
        them."""
        decision = None
        if must_decide(target, scheme, self.overrides, choice.engine):
            decision = decide(self.builds, target, scheme, self.machine, engine=choice.engine, progress=self.progress)
            chosen = decision.chosen.scheme
            variant = self._variant(self.builds.build(target, chosen), chosen, decision)
        return in_engine(self.builds, variant, chosen, choice, self.machine, decision)

    def _variant(self, built: Built, scheme: Scheme, decision: Decision | None) -> PackagedVariant:
        needed, runtime = runtime_requirements(built.target, built.artifact)
        refuse_left_out(built.target, built.artifact)
        native = runs_natively(built.target, self.machine)
        proof = self.builds.prove(built, scheme, self.machine, native=native)
        return PackagedVariant(
            built,
            proof,
            native,
            model_bytes(built.artifact.model),
            checks=(*artifact_checks(built, proof, self.machine, decision), runtime),
            decision=decision,
            compatibility=needed,
        )

    def _emulated(self, variant: PackagedVariant) -> PackagedVariant:
        """`variant` with the result of the check on the target's own kernels.

        Raises:
            CheckFailedError: it fails there.
        """
        job, task = self.builds.job, self.builds.task
        coverage = variant.proof.coverage
        found = check_built(
            job, variant.built, coverage, self.machine, task=task, selftest=self.selftest, progress=self.progress
        )
        return dataclasses.replace(variant, emulated=found, checks=strongest((*variant.checks, *checks_of(found))))
