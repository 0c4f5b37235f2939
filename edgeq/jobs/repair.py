"""Repair results that fall short, before they are reported."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from edgeq.prove.builds import Builds, artifact_key
from edgeq.prove.job import Built
from edgeq.prove.proof import NotFiniteError, Proof, Repair
from edgeq.prove.request import Effort
from edgeq.scheme import Scheme
from edgeq.tuning.goal import allowed_drop
from edgeq.tuning.repair import repair


@dataclass(frozen=True)
class Repairer:
    """Repair the builds of one job. If several targets share a build, it is repaired only once.

    Attributes:
        effort: effort of a repair, or None to repair nothing.
        max_drop: largest accepted loss of accuracy as a fraction; None means the default of the task (one point with
            labels; for the float model's answers, see `edgeq.measure.answer_meter.FIGURES`).
        chosen: fields of the scheme that the user has set. A repair does not change them.
        timed: whether the proof of a repaired build times it. If not, the caller times it against further forms.
    """

    builds: Builds
    effort: Effort | None
    max_drop: float | None
    chosen: Collection[str]
    timed: bool = True

    def prove(
        self,
        built: Built,
        scheme: Scheme,
        *,
        native: bool,
        destination: Path | None = None,
    ) -> tuple[Built, Proof]:
        """Return the plain build and its proof if the build is good enough, or if there are too few samples to judge a
        repair. Otherwise return the best repair and its proof.

        Args:
            scheme: the scheme that was requested for the plain build.
            native: see `Builds.prove`.
            destination: path of the repaired model, or None to put it into the job's folder.

        Raises:
            NotFiniteError: in every build that was tried, an output is not finite.
            EdgeqError: a stage failed.
        """
        limit = allowed_drop(self.max_drop, self.builds.job.task)
        proof: Proof | NotFiniteError
        try:
            proof = self.builds.prove(built, scheme, native=native)
            unsure = built.target.profile.integer_only and scheme.mode == "static" and proof.may_fall_short(limit)
            falls_short = (proof.falls_short(limit) or unsure) and not proof.too_few
            limit = proof.limit(limit)
        except NotFiniteError as error:
            # A repair may keep the layers that overflow in float, so an output that is not finite is not yet the end.
            proof, falls_short = error, True
        record = None
        original = built
        if falls_short and self.effort is not None:
            key = json.dumps([artifact_key(built.target, scheme), built.artifact.proof_options], sort_keys=True)
            repaired, record = self.builds.once(
                "repair", key, lambda: self._repair(original, scheme, limit, destination, proof)
            )
            if repaired is not None:
                built = self.builds.for_target(built.target, repaired)
                # No scheme describes a repaired model, so its proof has no key under which it could be shared.
                proof = self.builds.prove(built, None, native=native and self.timed)
        if isinstance(proof, NotFiniteError):
            attempts = f"; no further build was better (builds: {len(record.steps)})" if record is not None else ""
            raise NotFiniteError(f"{proof.problem}{attempts}", proof.fix) from proof
        return built, replace(proof, repair=record)

    def _repair(
        self, built: Built, scheme: Scheme, limit: float, destination: Path | None, proof: Proof | NotFiniteError
    ) -> tuple[Built | None, Repair | None]:
        job = self.builds.job
        assert self.effort is not None
        return repair(
            job,
            built.target,
            scheme,
            destination or Path(tempfile.mkdtemp(prefix="repaired-", dir=job.folder)) / "model.onnx",
            proof=proof if isinstance(proof, Proof) else None,
            max_drop=limit,
            effort=self.effort,
            fixed_fields=self.chosen,
            engine=built.artifact.plugin,
        )
