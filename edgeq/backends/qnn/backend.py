"""The backend for Qualcomm's NPU: every tensor of every node between Q and DQ, run by the engine's simulator."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq_device.engines import find_library, installed_version
from edgeq_device.errors import DeviceError

from edgeq.backends.base import Alternative, Artifact, check_names, require_fields
from edgeq.backends.qnn.delegation import delegated, forecast
from edgeq.backends.qnn.pairs import wide_share, write_pairs
from edgeq.backends.qnn.rewrite import rewrite
from edgeq.calibrate.ranges import Range
from edgeq.data.samples import Samples
from edgeq.engines import EngineChoice, engine_for
from edgeq.errors import UsageError
from edgeq.hardware.target import Target
from edgeq.model.fixed_sizes import require_fixed_sizes
from edgeq.model.prepare import PreparedModel
from edgeq.scheme import ALL_NODES, Scheme
from edgeq.session import SessionSettings, onnxruntime

_CPU = "CPUExecutionProvider"
_FIELDS: Mapping[str, Any] = {
    "mode": "static",
    "format": "QDQ",
    "activation_type": "uint8",
    "rest": "float32",
    "reduce_range": False,
    "fit_pairs": False,
}
_NEEDS = "Leave the scheme to the target: static Q/DQ, uint8 activations, int8 weights"


@dataclass(frozen=True)
class QnnBackend:
    """Attributes:
    target: what it builds for, whose [device] engine_options the simulator is set to; None: the engine's defaults.
    """

    name: str = "qnn"
    title: str = "Qualcomm's NPU, through ONNX Runtime"
    simulated: bool = True
    recoverable: bool = True
    adopts_quantized: bool = False
    target: Target | None = None

    def configured(self, target: Target, observed: Mapping[str, Range], cut: Mapping[str, float]) -> QnnBackend:
        """This backend for one target."""
        del observed, cut
        return dataclasses.replace(self, target=target)

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that the NPU cannot do. See `Backend.check`."""
        require_fields(scheme, _FIELDS, self.name, _NEEDS)
        if scheme.per_channel and scheme.weight_type != "int8":
            raise UsageError("weights with a scale per channel are int8 there", "Add --no-per-channel")

    def build(
        self,
        prepared: PreparedModel,
        ranges: Mapping[str, Range],
        scheme: Scheme,
        destination: Path,
        *,
        samples: Samples | None = None,
    ) -> Artifact:
        """Write the Q/DQ model to `destination`; it takes nothing from samples. See `Backend.build`."""
        self.check(scheme)
        require_fixed_sizes(prepared.model, prepared.source, self.title)
        check_names(prepared, (*scheme.exclude, *(name for name in scheme.wide if name != ALL_NODES)))
        place = Path(tempfile.mkdtemp(prefix="qnn-", dir=prepared.path.parent))
        changed, ranges = rewrite(prepared, ranges, place / "rewritten.onnx")
        left = write_pairs(changed, ranges, scheme, destination)
        engine, absent = engine_for(self.name, self._options), ""
        try:
            find_library(engine, str(onnxruntime().__version__))
        except DeviceError as error:
            absent = str(error)
        artifact = Artifact(
            model=destination,
            scheme=scheme,
            provider=_CPU,
            device="npu",
            notes=changed.notes[len(prepared.notes) :],
            details={"wide_share": wide_share(changed.model, scheme)},
            engine=EngineChoice(engine),
            alternatives=(self._on_cpu(destination, scheme),),
        )
        if absent:
            settings = SessionSettings(optimization="none")
            notes = (*artifact.notes, f"not run in the simulator: {absent}")
            return dataclasses.replace(
                artifact,
                simulation=destination,
                simulation_settings=settings,
                notes=notes,
                coverage=forecast(changed.model, left, absent),
            )
        how = f"the simulator of {engine.packages[0]} {installed_version(engine)}"
        found = delegated(changed.model, destination, engine, left, how, prepared.path.parent)
        return dataclasses.replace(
            artifact,
            notes=(*artifact.notes, *found.notes(), f"answers are those of {how}: nothing was run on a chip"),
            coverage=found.coverage(),
        )

    @property
    def _options(self) -> Mapping[str, str]:
        return self.target.device.get("engine_options", {}) if self.target is not None else {}

    def _on_cpu(self, model: Path, scheme: Scheme) -> Alternative:
        where = self.target.name if self.target is not None else self.name
        artifact = Artifact(model=model, scheme=scheme, provider=_CPU)
        return Alternative(f"{where}-cpu", "any CPU, the same Q/DQ model", 0, artifact)
