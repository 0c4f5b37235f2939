"""Build Q/DQ models for ST's Neural-ART NPU.

ST Edge AI compiles such a model for the chip. It cannot be installed from a package registry, so edgeq writes the file
that it reads, and proves the file in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import onnx_ir as ir

from edgeq.backends.base import Artifact, TargetBackend, check_names, refuse_wide, require_fields
from edgeq.backends.neural_art.ports import write_integer_form
from edgeq.calibration.groups import scale_groups
from edgeq.calibration.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import HardwareError
from edgeq.hardware.target import Target
from edgeq.measure.coverage import Coverage, coverage_of
from edgeq.measure.node_runs import NodeRun
from edgeq.model.graph import DATA_MOVEMENT, is_constant, is_op, name_of
from edgeq.model.int8_prediction import predict_int8
from edgeq.model.int8_rules import int8_rules, rules_title
from edgeq.model.load import save_model
from edgeq.model.macs import node_macs
from edgeq.model.opset import Opset, lower_opset
from edgeq.model.prepare import PreparedModel
from edgeq.model.sizes import require_fixed_sizes
from edgeq.quantization.qdq import write_qdq
from edgeq.run.session import SessionSettings
from edgeq.scheme import Scheme
from edgeq.util.folders import shipped
from edgeq.util.record_files import read_toml

FOLDER = "neural-art"
_CPU = "CPUExecutionProvider"
_COMPILER = "ST Edge AI"
# The key of [device] engine_options that chooses the scales of an Add's inputs, and its value for one scale.
_ADD_INPUTS, _ONE_SCALE = "add_inputs", "one-scale"
_FIELDS: Mapping[str, Any] = {
    "mode": "static",
    "format": "QDQ",
    "activation_type": "int8",
    "weight_type": "int8",
    "weight_symmetric": True,
    "rest": "float32",
    "reduce_range": False,
    "fit_pairs": False,
}
_NEEDS = "Leave the scheme to the target: static Q/DQ, int8 activations, symmetric int8 weights"


@dataclass(frozen=True)
class _CompilerTable:
    opset: Opset


@cache
def compiler_opset() -> Opset:
    """Return the newest opset that ST Edge AI reads, from targets/neural-art/compiler.toml."""
    place = shipped("targets") / FOLDER / "compiler.toml"
    return read_toml(place, _CompilerTable, HardwareError, "Install edgeq again").opset


@dataclass(frozen=True)
class NeuralArtBackend(TargetBackend):
    """Build Q/DQ models for ST's Neural-ART.

    Attributes:
        target: the target to build for, whose `[device] engine_options` choose the scales of sums. None means a scale
            for each tensor.
    """

    name = "neural-art"
    title = "ST's Neural-ART, through ST Edge AI"
    simulated = True

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that the NPU cannot run. See `Backend.check`."""
        refuse_wide(scheme, self.title)
        require_fields(scheme, _FIELDS, self.name, _NEEDS)

    def build(
        self,
        prepared: PreparedModel,
        ranges: Mapping[str, Range],
        scheme: Scheme,
        destination: Path,
        *,
        samples: Samples | None = None,
    ) -> Artifact:
        """Write the Q/DQ model to `destination`. The samples are not used. See `Backend.build`."""
        self.check(scheme)
        check_names(prepared, scheme.exclude)
        # The compiler takes neither open sizes nor several samples at once.
        require_fixed_sizes(prepared.model, prepared.source, self.title)
        predicted = predict_int8(prepared.graph, int8_rules(self.name), scheme, hazards=prepared.hazards)
        reasons = {node.name: node.reason for node in predicted if node.verdict == "float"}
        model = prepared.model.clone()
        types = {node.op_type for node in predicted if node.verdict == "int8"}
        nodes = {str(node.name) for node in model.graph if node.op_type in types} - reasons.keys()
        if self._options.get(_ADD_INPUTS) == _ONE_SCALE:
            ranges = share_sums(model, ranges, nodes)
        write_qdq(model, ranges, scheme, nodes, source=prepared.source)
        lower_opset(model, prepared.source, compiler_opset(), _COMPILER)
        save_model(model, destination)
        return Artifact(
            model=destination,
            scheme=scheme,
            provider=_CPU,
            device="npu",
            notes=(
                f"the answers come from the file's formulas in ONNX Runtime; {_COMPILER} and a chip were never run",
            ),
            simulation=destination,
            # The NPU computes from the pairs as they are written. The optimiser would fuse them by the rules of a CPU.
            simulation_settings=SessionSettings(optimization="none"),
            coverage=_forecast(prepared.model, reasons, self.name),
        )

    def with_companions(self, artifact: Artifact, samples: Samples, folder: Path, *, count: int) -> Artifact:
        """Return `artifact` with a form of the model whose ends are int8. See `Backend.with_companions`."""
        del samples, count
        folder.mkdir()
        written = write_integer_form(artifact.model, folder)
        return replace(artifact, files={**artifact.files, **{f"{FOLDER}/{path.name}": path for path in written}})

    @property
    def _options(self) -> Mapping[str, str]:
        target: Target | None = self.target
        return target.device.get("engine_options", {}) if target is not None else {}


def share_sums(model: ir.Model, ranges: Mapping[str, Range], nodes: Collection[str]) -> dict[str, Range]:
    """Return a copy of `ranges` in which both inputs of each Add have one range: the smallest that covers both.

    Args:
        nodes: names of the nodes that run in integers.
    """
    adds = (node for node in model.graph if is_op(node, "Add") and node.name in nodes)
    pairs = [{name_of(value) for value in node.inputs if not is_constant(value)} for node in adds]
    # An operator that moves values gives its result the scale of its input.
    groups: list[set[str]] = [set(group) for group in scale_groups(model, DATA_MOVEMENT)]
    for pair in pairs:
        joined = [group for group in groups if group & pair]
        groups = [group for group in groups if not group & pair] + [pair.union(*joined)]
    common = dict(ranges)
    for group in groups:
        spans = [ranges[name] for name in sorted(group) if name in ranges]
        if spans and any(pair <= group for pair in pairs):
            union = Range(min(span.low for span in spans), max(span.high for span in spans))
            common.update({name: union for name in group if name in ranges})
    return common


def _forecast(model: ir.Model, reasons: Mapping[str, str], backend: str) -> Coverage:
    macs = node_macs(model)
    runs = [
        NodeRun(
            str(n.name), str(n.name), n.op_type, "float" if n.name in reasons else "int8", macs.get(n.name or "", 0)
        )
        for n in model.graph
    ]
    return coverage_of(runs, lambda run: reasons[run.name], basis="forecast", how=rules_title(backend))
