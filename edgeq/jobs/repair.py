"""Repair results that fall short, before they are reported."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgeq.prove.builds import Builds, artifact_key
from edgeq.prove.job import Built
from edgeq.prove.proof import NotFiniteError, Proof, Repair
from edgeq.scheme import Scheme
from edgeq.tuning.goal import DEFAULT_DROP
from edgeq.tuning.ladder import climb
from edgeq.tuning.pace import Effort


@dataclass(frozen=True)
class Repairer:
    """Repair the builds of one job. If several targets share a build, it is repaired only once.

    Attributes:
        effort: effort of a repair, or None to repair nothing.
        max_drop: largest accepted loss of accuracy as a fraction; None means one point.
        chosen: fields of the scheme that the user has set.
    """

    builds: Builds
    effort: Effort | None
    max_drop: float | None
    chosen: Collection[str]
    _found: dict[str, tuple[Built | None, Repair | None]] = field(default_factory=dict)

    def proven(
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
        limit = DEFAULT_DROP if self.max_drop is None else self.max_drop
        proof: Proof | NotFiniteError
        try:
            proof = self.builds.prove(built, scheme, native=native)
            short = proof.falls_short(limit) and not proof.too_few
            limit = proof.limit(limit)
        except NotFiniteError as error:
            proof, short = error, True
        record = None
        if short and self.effort is not None:
            found, record = self._climbed(built, scheme, limit, self.effort, destination)
            if found is not None:
                built = self.builds.for_target(built.target, found)
                proof = self.builds.prove(built, None, native=native)
        if isinstance(proof, NotFiniteError):
            tried = f"; {len(record.steps)} builds were no better" if record is not None else ""
            raise NotFiniteError(f"{proof.problem}{tried}", proof.fix) from proof
        return built, replace(proof, repair=record)

    def _climbed(
        self, built: Built, scheme: Scheme, limit: float, effort: Effort, destination: Path | None
    ) -> tuple[Built | None, Repair | None]:
        """Return the result of `climb`, which is called only once for builds that are the same."""
        key = json.dumps([artifact_key(built.target, scheme), built.artifact.proof_options], sort_keys=True)
        if key not in self._found:
            job = self.builds.job
            self._found[key] = climb(
                job,
                built.target,
                scheme,
                destination or Path(tempfile.mkdtemp(prefix="repaired-", dir=job.folder)) / "model.onnx",
                max_drop=limit,
                effort=effort,
                fixed_fields=self.chosen,
                engine=built.artifact.plugin,
            )
        return self._found[key]
