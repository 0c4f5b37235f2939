"""What files have in common: hashes of their structure and content, and what of each structure runs in int8."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from edgeq.backends import Artifact
from edgeq.measure.coverage import measure_coverage
from edgeq.measure.node_runs import sized_macs
from edgeq.model.prepare import PreparedModel
from edgeq.model.structure import content_digest, structure_digest
from edgeq.tune.clock import Clock
from edgeq.tune.store import SampleStore


class Structures:
    """Finds each of them once.

    Args:
        prepared: the float model that artifacts are made of.
        samples: its first is what a structure is run on.
        clock: where its operators are fused, which depends on the machine.
    """

    def __init__(self, prepared: PreparedModel, samples: SampleStore, clock: Clock) -> None:
        self._prepared = prepared
        self._samples = samples
        self._clock = clock
        self._digests: dict[str, tuple[str, str]] = {}
        self._shares: dict[str, float] = {}

    def digests(self, artifact: Artifact) -> tuple[str, str]:
        """Of an artifact's structure and of its content, whatever engine it runs in."""
        key = f"{artifact.proof_model} {sorted(artifact.session_options.items())}"
        if key not in self._digests:
            file = artifact.proof_model, artifact.session_options
            self._digests[key] = structure_digest(*file), content_digest(*file)
        return self._digests[key]

    def int8_mac_share(self, artifact: Artifact) -> float:
        """The share of multiply-accumulates in int8 of an artifact in onnxruntime's own kernels."""
        structure, _ = self.digests(artifact)
        if structure not in self._shares:
            self._shares[structure] = self._measured_share(artifact)
        return self._shares[structure]

    def _measured_share(self, artifact: Artifact) -> float:
        if artifact.coverage is not None:
            return artifact.coverage.int8_mac_share or 0.0
        found = measure_coverage(
            artifact.model,
            artifact.settings(),
            self._feed,
            self._prepared.model,
            lambda name, op_type: "",
            macs=self._macs,
            opener=self._clock.open_profiled,
        )
        return found.int8_mac_share or 0.0

    @cached_property
    def _macs(self) -> dict[str, int]:
        return sized_macs(self._prepared.model, self._feed)

    @property
    def _feed(self) -> Mapping[str, Any]:
        return self._samples[0].inputs
