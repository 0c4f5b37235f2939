"""Which layers, tensors or products of a candidate to keep from its integers first, by the method that suits it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq.hardware.target import Target
from edgeq.jobs.job import Built, Job
from edgeq.model.int8_prediction import int8_rules, quantizable_operators
from edgeq.model.load import read_model
from edgeq.model.macs import node_macs
from edgeq.run.session import Engines
from edgeq.tune.accuracy import AccuracyMeter
from edgeq.tune.engines import CandidateBuilder
from edgeq.tune.float_layers import MacCosts, Ranking, rank_by_probing
from edgeq.tune.goal import Deadline
from edgeq.tune.recover.costs import rank_static
from edgeq.tune.recovery import WIDE, rank_products, rank_tensors
from edgeq.tune.sessions import judged, opened
from edgeq.tune.space import Candidate
from edgeq.util.display import Progress

SCREENED = 8
"""Samples on which candidates are screened, and noise is measured."""


@dataclass(frozen=True)
class LayerRanker:
    """Ranks what a candidate quantizes.

    Attributes:
        workdir: for the models of probes.
        timed: whether the target's kernels run here.
    """

    job: Job
    target: Target
    workdir: Path
    timed: bool
    accuracy: AccuracyMeter
    builder: CandidateBuilder
    engines: Engines
    progress: Progress

    def rank(self, candidate: Candidate, built: Built, *, headroom: float, seconds: float) -> Ranking:
        """See `Evaluator.rank`. Static candidates are ranked by tensors and the runtime's profile; others by probing
        groups of layers, in simulation every layer. `built` is what was built of `candidate`."""
        if self.timed and candidate.scheme.mode == "static" and not candidate.builder and self.job.calibration:
            return rank_static(
                self.builder.recoverer,
                self.job,
                candidate.scheme,
                candidate.recoveries,
                profiled=candidate.engine is None,
                progress=self.progress,
            )

        def noise_of(session: Any) -> float:
            """Noise over signal power of an open session, on the samples of the screening."""
            return self.accuracy.noise(session, SCREENED, model=candidate.name)

        model, half = self.job.prepared.model, Deadline(seconds / 2).passed
        if candidate.scheme.mode == "weight-only" and candidate.scheme.weight_bits < 8:
            with self.progress.stage("ranking products"):
                return rank_products(model, read_model(built.artifact.model), noise_of, half)
        if WIDE in self.target.profile.search:
            ranges = built.ranges
            if candidate.recoveries:
                model = self.builder.recoverer.ranged(candidate.scheme, candidate.recoveries).prepared.model
            with self.progress.stage("ranking tensors"):
                return rank_tensors(model, ranges, noise_of, half)
        macs = self._quantized_macs(candidate, built)
        if len(macs) < 2 or min(macs.values()) > headroom * sum(macs.values()):
            return Ranking((), MacCosts({}))
        expired = Deadline(seconds).passed
        with self.progress.stage("ranking layers") as advance:

            def noise(nodes: Sequence[str]) -> float:
                advance(1)
                return self._noise_alone(candidate, nodes, macs)

            if self.timed:
                return rank_by_probing(macs, noise, expired)
            return rank_by_probing(macs, noise, expired, groups=len(macs))

    def _quantized_macs(self, candidate: Candidate, built: Built) -> dict[str, int]:
        """Multiply-accumulates of the layers that run in int8 and may be kept in float, in execution order."""
        coverage = built.artifact.coverage
        if coverage is not None:
            return {node.source: node.macs for node in coverage.nodes if node.kind == "int8" and node.macs}
        scheme = candidate.scheme
        if scheme.mode == "dynamic":
            types = frozenset(scheme.dynamic_weight_types)
        else:
            types = frozenset(scheme.op_types or quantizable_operators(int8_rules(self.target.backend)))
        model = self.job.prepared.model
        macs = node_macs(model)
        eligible = [n.name or "" for n in model.graph if n.op_type in types and n.name not in scheme.exclude]
        return {name: macs[name] for name in eligible if macs.get(name)}

    def _noise_alone(self, candidate: Candidate, nodes: Sequence[str], macs: Mapping[str, int]) -> float:
        """Noise power over signal power at the outputs where of the layers in `macs` only `nodes` are quantized."""
        others = [name for name in macs if name not in nodes]
        scheme = candidate.scheme.replace(exclude=(*candidate.scheme.exclude, *others))
        # Recoveries take time, and change the noise of all layers about alike.
        probe = candidate.replace(name=f"{candidate.name}, only {nodes[0]}", scheme=scheme, recoveries=())
        with tempfile.TemporaryDirectory(dir=self.workdir) as folder:
            artifact = self.builder.build(probe, Path(folder) / "model.onnx").artifact
            with opened(self.engines, *judged(artifact)) as session:
                return self.accuracy.noise(session, SCREENED, model=probe.name)
